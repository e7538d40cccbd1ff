#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/memory/memory.h"
#include "agent/memory/memory_directory.h"
#include "base/error.h"
#include "image/image.h"
#include "os/os.h"

#define MIB (1u << 20)
#define DESCRIPTORS_LEAST 1024 /* every system allows as many */

uint64_t memory_random_id(void)
{
        uint64_t id = 0;

        while (!id)
                if (os->random(&id, sizeof id) < 0)
                        id = (uint64_t)os->wall_ns() * 0x9e3779b97f4a7c15u;
        return id;
}

bool memory_image_name(const char *name, const char *suffix, uint64_t *ret_id)
{
        char *end;

        if (strlen(name) != 16 + strlen(suffix) || strcmp(name + 16, suffix) || strspn(name, "0123456789abcdef") < 16)
                return false;
        *ret_id = strtoull(name, &end, 16);
        return *ret_id != 0;
}

static uint64_t default_budget(void)
{
        return os->memory_free() / 2;
}

void memory_path(const struct memory *memory, uint64_t id, const char *suffix, char path[MEMORY_PATH_MAX])
{
        snprintf(path, MEMORY_PATH_MAX, "%s/%016" PRIx64 "%s", memory->directory, id, suffix);
}

static uint32_t descriptor_limit(void)
{
        uint64_t limit;

        if (os->probe(OS_PROBE_DESCRIPTORS, &limit) < 0)
                limit = DESCRIPTORS_LEAST;
        return limit < UINT32_MAX ? (uint32_t)limit : UINT32_MAX;
}

void memory_init(struct memory *memory, const char *directory, uint64_t budget, char *ret_why, size_t why_size)
{
        memset(memory, 0, sizeof *memory);
        memory_files_init(&memory->files);
        memory->lock_fd = -1;
        ret_why[0] = 0;
        if (!directory || !*directory) {
                snprintf(ret_why, why_size, "no memory directory is set");
        } else if (strlen(directory) >= sizeof memory->directory) {
                snprintf(ret_why, why_size, "the memory directory's path is too long");
        } else if (memory_directory_take(memory, directory, ret_why, why_size) < 0) {
                if (memory->lock_fd >= 0)
                        os->close(memory->lock_fd);
                memory->lock_fd = -1;
                memory->directory[0] = 0;
        }
        memory->descriptor_limit = descriptor_limit();
        memory_configure(memory, budget);
}

void memory_configure(struct memory *memory, uint64_t budget)
{
        /* A larger budget would end in the OOM killer of the machine or the cgroup. */
        uint64_t most = os->memory_free() / 16 * 15 + memory->used;

        if (!budget)
                budget = default_budget() + memory->used;
        memory->budget = budget < most ? budget : most;
}

static void count_descriptor(struct memory *memory, struct image *image)
{
        image->memory = memory;
        if (image->fd < 0 || image->is_counted)
                return;
        image->is_counted = true;
        atomic_fetch_add(&memory->descriptor_count, 1);
}

/* Named images keep at most half of the descriptors open: connections and storage need the rest. */
static void keep_descriptor(struct memory *memory, struct image *image)
{
        count_descriptor(memory, image);
        if (image->named && atomic_load(&memory->descriptor_count) > memory->descriptor_limit / 2)
                image_close(image);
}

/* memfds must keep theirs; a quarter is left for all other uses. */
static bool has_descriptor(const struct memory *memory)
{
        return atomic_load(&memory->descriptor_count) < memory->descriptor_limit / 4 * 3;
}

void memory_lacks(const struct memory *memory, char *text, size_t size)
{
        text[0] = 0;
        if (!has_descriptor(memory))
                snprintf(text, size, "%u of the %u files that the agent may open are images without a name: raise the limit "
                                     "(ulimit -Hn), or give the agent a larger memory directory",
                 atomic_load(&memory->descriptor_count), memory->descriptor_limit);
}

void memory_stop_removing(struct memory *memory, bool forget)
{
        memory->removes_nothing = !forget;
}

void memory_done(struct memory *memory, bool forget)
{
        char path[MEMORY_PATH_MAX];

        memory_files_done(memory);
        for (struct image *image; (image = memory_next_doomed(memory));)
                memory_release(memory, image);
        while (memory->images) {
                struct image *image = memory->images;

                memory->images = image->next;
                if (image->named && forget) {
                        memory_path(memory, image->id, ".img", path);
                        os->unlink(path);
                }
                image_free(image);
        }
        if (memory->lock_fd < 0)
                return;
        if (forget) {
                snprintf(path, sizeof path, "%s/lock", memory->directory);
                os->unlink(path);
                os->rmdir(memory->directory); /* fails if a foreign file is in it, which then stays */
        }
        os->close(memory->lock_fd);
        memory->lock_fd = -1;
}

uint64_t memory_capacity(uint64_t size)
{
        uint64_t piece = MEMORY_PAGE;

        if (size > INT64_MAX)
                return UINT64_MAX;
        size = image_size_with_sums(size);
        while (piece < MEMORY_ROUND && piece <= size / MEMORY_ROUND_PART / 2)
                piece *= 2;
        return size ? (size + piece - 1) / piece * piece : piece;
}

bool memory_reserve(struct memory *memory, uint64_t capacity, bool *ret_named)
{
        if (capacity > memory->budget || memory->used > memory->budget - capacity)
                return false;
        /* Trainers or other programs have grown since the budget was set: without this check the kernel would kill one of them. */
        if (os->memory_free() < capacity + memory->lacking + MEMORY_LEFT)
                return false;
        *ret_named = memory->directory[0] && memory->named_used + capacity <= memory->named_limit;
        if (!*ret_named && !has_descriptor(memory))
                return false;
        memory->used += capacity;
        return true;
}

void memory_unreserve(struct memory *memory, uint64_t capacity)
{
        memory->used -= capacity;
}

bool memory_follows(const struct memory *memory)
{
        return memory->room_pending > 0 || memory->doomed;
}

static int make_all(const struct image *image)
{
        int result;

        do
                result = image->lacks_pages ? os->truncate(image->fd, image->capacity) : os->allocate(image->fd, 0, image->capacity);
        while (result == -EINTR);
        return result;
}

static int create_named(struct memory *memory, struct image *image)
{
        char path[MEMORY_PATH_MAX];
        int result;

        memory_path(memory, image->id, ".img", path);
        image->fd = os->open(path, OS_READ | OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW);
        if (image->fd < 0)
                return image->fd;
        result = make_all(image);
        if (result < 0) {
                os->unlink(path);
                os->close(image->fd);
                image->fd = -1;
        }
        return result;
}

static int create_memfd(struct image *image)
{
        int result;

        image->fd = os->memfd("nebula-image");
        if (image->fd < 0)
                return image->fd;
        result = make_all(image);
        if (result < 0) {
                os->close(image->fd);
                image->fd = -1;
        }
        return result;
}

static enum nebula_status create(struct memory *memory, uint64_t capacity, bool named, bool is_bare, struct image **ret_image,
                                 struct nebula_error *error)
{
        struct image *image = calloc(1, sizeof *image);
        int named_result = 0, result = -ENOSYS;

        if (!image)
                return error_set(error, NEBULA_NO_MEMORY, ENOMEM, "no memory to describe an image");
        *image = (struct image){ .id = memory_random_id(), .capacity = capacity, .fd = -1, .lacks_pages = is_bare };
        if (named) {
                named_result = result = create_named(memory, image);
                image->named = result >= 0;
        }
        if (image->fd < 0)
                result = create_memfd(image);
        if (result < 0) {
                free(image);
                return error_set(error, NEBULA_NO_MEMORY, -result,
                                 "cannot get %" PRIu64 " MiB of memory for a checkpoint%s", capacity / MIB,
                                 named_result ? ", neither in the memory directory nor as a memfd" : " as a memfd");
        }
        keep_descriptor(memory, image);
        *ret_image = image;
        return NEBULA_OK;
}

enum nebula_status memory_create(struct memory *memory, uint64_t capacity, bool named, struct image **ret_image,
                                 struct nebula_error *error)
{
        return create(memory, capacity, named, false, ret_image, error);
}

enum nebula_status memory_create_bare(struct memory *memory, uint64_t capacity, bool named, struct image **ret_image, struct nebula_error *error)
{
        return create(memory, capacity, named, true, ret_image, error);
}

static pthread_once_t populate_once = PTHREAD_ONCE_INIT;
static bool can_populate;

static void try_populate(void)
{
        void *page;

        if (os->map(-1, 0, MEMORY_PAGE, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &page) < 0)
                return;
        can_populate = os->advise(page, MEMORY_PAGE, OS_ADVISE_POPULATE_WRITE) >= 0;
        os->unmap(page, MEMORY_PAGE);
}

bool memory_may_lack_pages(const struct memory *memory, uint64_t capacity, bool named)
{
        uint64_t plenty = 2 * capacity + memory->lacking;
        struct os_space space;

        pthread_once(&populate_once, try_populate);
        if (!can_populate || capacity < MEMORY_ROUND || os->memory_free() < plenty + MEMORY_LEFT)
                return false;
        return !named || (os->space(memory->directory, &space) >= 0 && space.free_bytes >= plenty);
}

struct image *memory_next_lacking(const struct memory *memory)
{
        struct image *image = memory->lacking ? memory->images : NULL;

        while (image && !(image->lacks_pages && atomic_load(&image->copied) == IMAGE_WHOLE && !image->faulting))
                image = image->next;
        return image;
}

void memory_has_pages(struct memory *memory, struct image *image)
{
        memory->lacking -= image->lacks_pages ? image->capacity : 0;
        image->lacks_pages = false;
}

enum nebula_status memory_create_sparse(uint64_t capacity, struct image **ret_image, struct nebula_error *error)
{
        struct image *image = calloc(1, sizeof *image);
        int result;

        if (!image)
                return error_set(error, NEBULA_NO_MEMORY, ENOMEM, "no memory to describe an image");
        *image = (struct image){ .id = memory_random_id(), .capacity = capacity, .fd = os->memfd("nebula-image"), .is_sparse = true };
        result = image->fd < 0 ? image->fd : os->truncate(image->fd, capacity);
        if (result < 0) {
                image_free(image);
                return error_set(error, NEBULA_NO_MEMORY, -result, "cannot get a memfd of %" PRIu64 " MiB for a checkpoint", capacity / MIB);
        }
        *ret_image = image;
        return NEBULA_OK;
}

/* Four slots per power of two, so that all images that fit a need lie in three slots. */
static size_t size_slot(uint64_t capacity)
{
        unsigned power = 63 - (unsigned)__builtin_clzll(capacity);

        return power * 4 + (capacity >> (power - 2) & 3);
}

static void free_add(struct memory *memory, struct image *image)
{
        struct image **slot = &memory->free[size_slot(image->capacity)];

        image->next_free = *slot;
        image->previous_free = NULL;
        if (*slot)
                (*slot)->previous_free = image;
        *slot = image;
        image->is_free = true;
}

static void free_remove(struct image *image)
{
        if (!image->is_free)
                return;
        if (image->previous_free)
                image->previous_free->next_free = image->next_free;
        else
                image->memory->free[size_slot(image->capacity)] = image->next_free;
        if (image->next_free)
                image->next_free->previous_free = image->previous_free;
        image->is_free = false;
}

struct image *memory_next_free(const struct memory *memory, const struct image *image, const void *job)
{
        size_t slot = image ? size_slot(image->capacity) : 0;
        struct image *next = image ? image->next_free : memory->free[0];

        for (;;) {
                while (next && job && next->job != job)
                        next = next->next_free;
                if (next || ++slot == MEMORY_SIZE_SLOTS)
                        return next;
                next = memory->free[slot];
        }
}

void memory_add(struct memory *memory, struct image *image)
{
        struct image **slot = &memory->by_id[image->id % MEMORY_ID_SLOTS];

        image->next_of_id = *slot;
        *slot = image;
        image->next = memory->images;
        image->previous = NULL;
        if (memory->images)
                memory->images->previous = image;
        memory->images = image;
        image->is_listed = true;
        memory->lacking += image->lacks_pages ? image->capacity : 0;
        memory->large_count += image->capacity >= MEMORY_ROUND;
        count_descriptor(memory, image);
        free_add(memory, image);
        if (image->named)
                memory->named_used += image->capacity;
}

enum nebula_status memory_adopt(struct memory *memory, uint64_t id, struct image **ret_image, struct nebula_error *error)
{
        struct image *image = calloc(1, sizeof *image);
        char path[MEMORY_PATH_MAX];
        struct os_stat stat;
        int result;

        if (!image)
                return error_set(error, NEBULA_NO_MEMORY, ENOMEM, "no memory to describe an image");
        *image = (struct image){ .id = id, .fd = -1, .named = true };
        memory_path(memory, id, ".img", path);
        image->fd = os->open(path, OS_READ | OS_WRITE | OS_NOFOLLOW);
        result = image->fd < 0 ? image->fd : os->fstat(image->fd, &stat);
        if (result >= 0 && (stat.kind != OS_KIND_FILE || stat.uid != os->uid() || !stat.size || stat.size % MEMORY_PAGE))
                result = -EINVAL;
        if (result < 0) {
                image_free(image);
                return error_set(error, result == -ENOENT || result == -ELOOP || result == -EINVAL ? NEBULA_CORRUPT : NEBULA_NO_MEMORY,
                                 -result, "the image %s cannot be adopted", path);
        }
        image->capacity = stat.size;
        keep_descriptor(memory, image);
        memory->used += image->capacity;
        memory_add(memory, image);
        *ret_image = image;
        return NEBULA_OK;
}

struct image *memory_find(const struct memory *memory, uint64_t id)
{
        struct image *image = memory->by_id[id % MEMORY_ID_SLOTS];

        while (image && image->id != id)
                image = image->next_of_id;
        return image;
}

/* Whether `image` fits better than `best`: this session still has it mapped, or it is smaller. */
static bool is_better(const struct image *image, const struct image *best, uint64_t owner_nonce)
{
        bool is_own = image->owner_nonce == owner_nonce;

        if (best && is_own != (best->owner_nonce == owner_nonce))
                return is_own;
        return !best || image->capacity < best->capacity;
}

/* A free image of this job that is large enough but not wastefully large. */
static struct image *find_free(const struct memory *memory, uint64_t need, uint64_t owner_nonce, const void *job)
{
        uint64_t most = need + need / 4;
        struct image *best = NULL;
        size_t left = MEMORY_SEARCH_MAX;

        for (size_t slot = size_slot(need); slot <= size_slot(most); slot++)
                for (struct image *image = memory->free[slot]; image && left; image = image->next_free, left--) {
                        if (image->exposed || image->spilled || image->job != job || image->capacity < need || image->capacity > most)
                                continue;
                        if (is_better(image, best, owner_nonce))
                                best = image;
                        if (best->capacity == need && best->owner_nonce == owner_nonce)
                                return best;
                }
        return best;
}

struct image *memory_take(struct memory *memory, uint64_t size, uint64_t owner_nonce, const void *job)
{
        uint64_t need = memory_capacity(size);
        struct image *image = need > INT64_MAX ? NULL : find_free(memory, need, owner_nonce, job);

        if (image) {
                int64_t now_ns = os->now_ns();

                image->served++;
                image->pause_ns = now_ns - image->taken_ns;
                image->taken_ns = now_ns;
                atomic_store(&image->sum_count, 0);
        }
        return image;
}

void memory_hold(struct image *image)
{
        image->users++;
        free_remove(image);
}

void memory_drop(struct memory *memory, struct image *image)
{
        if (--image->users)
                return;
        if (image->restored || image->spilled || image->lacks_pages || image_is_in_use(image))
                memory_doom(memory, image);
        else if (image->is_listed)
                free_add(memory, image);
}

/* False: it is not in the list. */
static bool take_off(struct memory *memory, struct image *image)
{
        struct image **link = &memory->by_id[image->id % MEMORY_ID_SLOTS];

        if (!image->is_listed)
                return false;
        while (*link != image)
                link = &(*link)->next_of_id;
        *link = image->next_of_id;
        if (image->previous)
                image->previous->next = image->next;
        else
                memory->images = image->next;
        if (image->next)
                image->next->previous = image->previous;
        free_remove(image);
        image->is_listed = false;
        memory_has_pages(memory, image);
        memory->large_count -= image->capacity >= MEMORY_ROUND;
        if (image->named)
                memory->named_used -= image->capacity;
        return true;
}

void memory_leave(struct memory *memory, struct image *image)
{
        take_off(memory, image);
        memory_unreserve(memory, image->capacity);
        image_free(image);
}

void memory_doom(struct memory *memory, struct image *image)
{
        if (memory->removes_nothing || !take_off(memory, image))
                return;
        image->next = memory->doomed;
        memory->doomed = image;
}

struct image *memory_next_doomed(struct memory *memory)
{
        struct image **link = &memory->doomed, *image;

        while (*link && (*link)->faulting)
                link = &(*link)->next;
        image = *link;
        if (image)
                *link = image->next;
        return image;
}

/* Gives the pages back now, even if the trainer still has the image mapped, unless a loader may be reading it.
 * Removes the name first: if the agent were killed in between, the next agent would find an image of zeros. */
void memory_release(struct memory *memory, struct image *image)
{
        char path[MEMORY_PATH_MAX];
        bool is_own = false;
        int fd = image->exposed || (image->fd < 0 && !image->named) ? -1 : image_open(image, OS_READ | OS_WRITE, &is_own);

        if (fd >= 0 && image->lent && image_is_held(image, fd)) {
                if (is_own)
                        os->close(fd);
                fd = -1;
        }
        if (image->named) {
                memory_path(memory, image->id, ".img", path);
                os->unlink(path);
        }
        if (fd >= 0)
                os->punch(fd, 0, image->capacity);
        if (fd >= 0 && is_own)
                os->close(fd);
        image_free(image);
}

uint64_t memory_free_bytes(const struct memory *memory, const void *job)
{
        uint64_t bytes = 0;

        for (const struct image *image = NULL; (image = memory_next_free(memory, image, job));)
                bytes += image->capacity;
        return bytes;
}

static void unlink_named(struct memory *memory, const struct image *image)
{
        for (; image; image = image->next)
                if (image->named)
                        memory_files_add(memory, &(struct memory_file_task){ .kind = MEMORY_FILE_REMOVE, .id = image->id, .suffix = ".img" });
}

void memory_unlink_all(struct memory *memory)
{
        unlink_named(memory, memory->images);
        unlink_named(memory, memory->doomed);
}
