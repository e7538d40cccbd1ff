#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "agent/memory/memory.h"
#include "base/error.h"
#include "os/bulk.h"
#include "os/os.h"

#define MIB (1u << 20)

void image_close(struct image *image)
{
        if (image->fd >= 0)
                os->close(image->fd);
        if (image->is_counted)
                atomic_fetch_sub(&image->memory->descriptor_count, 1);
        image->fd = -1;
        image->is_counted = false;
}

void image_free(struct image *image)
{
        image_unmap(image);
        image_close(image);
        free(image->chunks);
        free(image);
}

int image_open(const struct image *image, int flags, bool *ret_own)
{
        char path[MEMORY_PATH_MAX];

        *ret_own = image->fd < 0;
        if (image->fd >= 0)
                return image->fd;
        memory_path(image->memory, image->id, ".img", path);
        return os->open(path, flags | OS_NOFOLLOW);
}

int image_make_rest(const struct image *image)
{
        bool is_own;
        int fd = image_open(image, OS_READ | OS_WRITE, &is_own), result = fd;

        while (fd >= 0 && (result = os->allocate(fd, 0, image->capacity)) == -EINTR)
                ;
        if (fd >= 0 && is_own)
                os->close(fd);
        return result;
}

enum nebula_status image_make_pages(const struct image *image, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        int result;

        do
                result = os->allocate(image->fd, offset, size);
        while (result == -EINTR);
        return result < 0 ? error_set(error, NEBULA_NO_MEMORY, -result, "cannot get %" PRIu64 " MiB of memory for a checkpoint", size / MIB) :
                            NEBULA_OK;
}

void image_drop_pages(const struct image *image, uint64_t offset, uint64_t size)
{
        os->punch(image->fd, offset, size);
}

uint64_t image_taken(const struct image *image)
{
        return image->spilled ? 0 : image->is_sparse ? image->taken : image->capacity;
}

uint64_t image_join_size(const struct image *image)
{
        return image->capacity / MEMORY_ROUND * MEMORY_ROUND;
}

bool image_is_small(const struct image *image, int64_t now_ns)
{
        if (image->exposed || image->restored || image->spilled || image->joined >= image_join_size(image))
                return false;
        return image->served >= MEMORY_SERVED && now_ns - image->taken_ns <= image->pause_ns;
}

bool image_is_held(struct image *image, int fd)
{
        image->lent = os->lock(fd, OS_LOCK_ALONE) < 0;
        if (!image->lent) {
                image->kept = false;
                os->lock(fd, OS_LOCK_NONE);
        }
        return image->lent;
}

/* The catalogue's lock, which callers hold, allows no open: a lent image without a descriptor counts as in use. */
bool image_is_in_use(struct image *image)
{
        if (image->exposed || !image->lent)
                return image->exposed;
        return image->fd < 0 || image_is_held(image, image->fd);
}

enum nebula_status image_map(struct image *image, void **ret_data, struct nebula_error *error)
{
        if (!image->data) {
                bool is_own;
                int fd = image_open(image, OS_READ | OS_WRITE, &is_own), result;

                result = fd < 0 ? fd : os->map(fd, 0, image->capacity, OS_MAP_READ | OS_MAP_WRITE, &image->data);
                if (fd >= 0 && is_own)
                        os->close(fd);
                if (result < 0) {
                        image->data = NULL;
                        return error_set(error, NEBULA_NO_MEMORY, -result, "cannot map an image of %" PRIu64 " KiB",
                                         image->capacity / 1024);
                }
                if (image->memory)
                        atomic_fetch_add(&image->memory->mapped_count, 1);
        }
        *ret_data = image->data;
        return NEBULA_OK;
}

void image_unmap(struct image *image)
{
        if (!image->data)
                return;
        image_unpin(image);
        os->unmap(image->data, image->capacity);
        image->data = NULL;
        if (image->memory)
                atomic_fetch_sub(&image->memory->mapped_count, 1);
}

bool image_stays_mapped(const struct image *image)
{
        return image->capacity >= MEMORY_ROUND && atomic_load(&image->memory->mapped_count) <= MEMORY_MAPPED_MAX;
}

bool image_wants_pin(const struct image *image)
{
        return image->capacity >= MEMORY_ROUND && image->served && !image->joined && !image->faulting && !image->pinned && !image->unpinnable && !image->exposed &&
               !image->restored && !image->spilled;
}

bool image_pin(const struct image *image)
{
        return bulk_pin(image->data, image->capacity) == 0;
}

void image_unpin(const struct image *image)
{
        bulk_unpin(image->data);
}

void image_set_copied(struct image *image, uint64_t copied)
{
        atomic_store(&image->copied, copied);
        atomic_fetch_add(&image->copied_turn, 1);
        os->futex_wake(&image->copied_turn);
}

uint64_t image_await_copied(struct image *image, uint64_t size, int64_t timeout_ms)
{
        uint32_t turn = atomic_load(&image->copied_turn);

        if (atomic_load(&image->copied) < size)
                os->futex_wait(&image->copied_turn, turn, timeout_ms);
        return atomic_load(&image->copied);
}

void image_prefault(struct image *image)
{
        /* In pieces, so that a low-priority thread does not hold the lock of the process's memory map for long. */
        for (uint64_t at = 0; image->data && at < image->capacity; at += 16 * MIB) {
                uint64_t piece = image->capacity - at < 16 * MIB ? image->capacity - at : 16 * MIB;

                if (os->advise((char *)image->data + at, piece, OS_ADVISE_POPULATE_WRITE) < 0)
                        return; /* an old kernel: the trainer takes the page faults */
        }
}

/* Uses a mapping of its own, because image->data may belong to another thread. Joins one page at a time, so that
 * page faults of other threads wait no longer than that. */
int image_join(const struct image *image, uint64_t offset, uint64_t size)
{
        void *data;
        bool is_own;
        int fd = image_open(image, OS_READ | OS_WRITE, &is_own), result;

        result = fd < 0 ? fd : os->map(fd, offset, size, OS_MAP_READ | OS_MAP_WRITE, &data);
        if (fd >= 0 && is_own)
                os->close(fd);
        if (result < 0)
                return result;
        for (uint64_t at = 0; at < size && result != -EINVAL; at += MEMORY_ROUND)
                result = os->advise((char *)data + at, MEMORY_ROUND, OS_ADVISE_COLLAPSE);
        os->unmap(data, size);
        return result == -EINVAL ? result : 0;
}

enum nebula_status image_duplicate(const struct image *image, int *ret_fd, struct nebula_error *error)
{
        bool is_own;
        int fd = image_open(image, OS_READ | OS_WRITE, &is_own);

        if (fd >= 0 && !is_own)
                fd = os->duplicate(fd);
        if (fd < 0)
                return error_set(error, NEBULA_NO_MEMORY, -fd, "no descriptor of an image for its trainer");
        *ret_fd = fd;
        return NEBULA_OK;
}

enum nebula_status image_open_read_only(const struct image *image, int *ret_fd, struct nebula_error *error)
{
        char path[MEMORY_PATH_MAX];
        int fd;

        /* Opens it by name only if there is no descriptor, because the name may be gone: systemd, for example,
         * empties /dev/shm at the user's logout (RemoveIPC). */
        if (image->fd >= 0)
                snprintf(path, sizeof path, "/proc/self/fd/%d", image->fd);
        else
                memory_path(image->memory, image->id, ".img", path);
        fd = os->open(path, OS_READ);
        if (fd < 0)
                return error_set(error, error_status_of_errno(-fd), -fd, "cannot open an image for reading");
        *ret_fd = fd;
        return NEBULA_OK;
}

void image_set_lent(struct image *image, int fd)
{
        image->lent = true;
        if (os->lock(fd, OS_LOCK_SHARED) < 0) /* a directory whose file system has no locks */
                image->exposed = true;
}
