#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/memory/memory.h"
#include "base/error.h"
#include "image/image.h"
#include "ipc/ipc.h"
#include "os/bulk.h"
#include "os/os.h"

#define MIB (1u << 20)
#define LOCK_LOOKS 25
#define LOCK_LOOK_MS 20
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

static void image_path(const struct memory *memory, uint64_t id, char path[MEMORY_PATH_MAX])
{
        memory_path(memory, id, ".img", path);
}

/* Names the agent that holds the lock: it has written its pid into the lock file. */
static void name_rival(struct memory *memory, const char *directory)
{
        int64_t length = memory->lock_fd < 0 ? 0 : os->pread(memory->lock_fd, memory->rival, sizeof memory->rival - 1, 0);

        snprintf(memory->rival_directory, sizeof memory->rival_directory, "%s", directory);
        if (length <= 0)
                length = snprintf(memory->rival, sizeof memory->rival, "of this user");
        memory->rival[length] = 0;
}

/* An agent that was killed gives its lock up a moment after its sockets, and its trainers have started this agent by then. */
static int lock_soon(int fd)
{
        int result = os->lock(fd, OS_LOCK_ALONE);

        for (int i = 0; result == -EAGAIN && i < LOCK_LOOKS; i++) {
                os->sleep_ms(LOCK_LOOK_MS);
                result = os->lock(fd, OS_LOCK_ALONE);
        }
        return result;
}

static int directory_take(struct memory *memory, const char *directory, char *ret_why, size_t why_size)
{
        char path[MEMORY_PATH_MAX], text[32];
        int length;
        struct os_stat stat, named;
        int result = os->mkdir(directory, 0700);

        if (result < 0 && result != -EEXIST) {
                snprintf(ret_why, why_size, "cannot create %s: %s", directory, os_error_text(result));
                return result;
        }
        result = ipc_place_stat(directory, &stat);
        /* Other users may list the directory, but not read the files, which have mode 0600. */
        if (!result && (stat.kind != OS_KIND_DIRECTORY || stat.uid != os->uid() || (stat.mode & 022)))
                result = -EPERM;
        if (result < 0) {
                snprintf(ret_why, why_size, "%s is not a directory that belongs to this user alone: it must be this user's, with "
                                            "mode 0755 or less", directory);
                return result;
        }
        snprintf(path, sizeof path, "%s/lock", directory);
        memory->lock_fd = os->open(path, OS_READ | OS_WRITE | OS_CREATE | OS_NOFOLLOW);
        result = memory->lock_fd < 0 ? memory->lock_fd : lock_soon(memory->lock_fd);
        /* An agent that ended may have removed the file between the two calls. */
        if (result >= 0 && (os->fstat(memory->lock_fd, &stat) < 0 || os->stat(path, false, &named) < 0 || stat.inode != named.inode))
                result = -EBUSY;
        if (result < 0) {
                name_rival(memory, directory);
                snprintf(ret_why, why_size, "%s is in use by another agent, %s: %s", directory, memory->rival, os_error_text(result));
                return result;
        }
        length = snprintf(text, sizeof text, "process %u", os->pid());
        os->truncate(memory->lock_fd, 0);
        os->pwrite(memory->lock_fd, text, (size_t)length, 0); /* for the log of another agent that finds the directory locked */
        strcpy(memory->directory, directory);
        result = memory_measure(memory);
        if (result < 0)
                snprintf(ret_why, why_size, "no answer about the space in %s: %s", directory, os_error_text(result));
        return result;
}

int memory_measure(struct memory *memory)
{
        struct os_space space;
        int result = os->space(memory->directory, &space);

        if (result >= 0)
                memory->named_limit = (space.free_bytes + memory->named_used) / 10 * 9;
        return result;
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
        } else if (directory_take(memory, directory, ret_why, why_size) < 0) {
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

void memory_close(struct image *image)
{
        if (image->fd >= 0)
                os->close(image->fd);
        if (image->is_counted)
                atomic_fetch_sub(&image->memory->descriptor_count, 1);
        image->fd = -1;
        image->is_counted = false;
}

static void image_free(struct image *image)
{
        memory_unmap(image);
        memory_close(image);
        free(image->chunks);
        free(image);
}

/* Named images keep at most half of the descriptors open: connections and storage need the rest. */
static void keep_descriptor(struct memory *memory, struct image *image)
{
        count_descriptor(memory, image);
        if (image->named && atomic_load(&memory->descriptor_count) > memory->descriptor_limit / 2)
                memory_close(image);
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

/* Returns the image's descriptor, or opens another, which *ret_own says; or a negative errno. */
static int image_open(const struct image *image, int flags, bool *ret_own)
{
        char path[MEMORY_PATH_MAX];

        *ret_own = image->fd < 0;
        if (image->fd >= 0)
                return image->fd;
        image_path(image->memory, image->id, path);
        return os->open(path, flags | OS_NOFOLLOW);
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
                        image_path(memory, image->id, path);
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

        image_path(memory, image->id, path);
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

int memory_make_rest(const struct image *image)
{
        bool is_own;
        int fd = image_open(image, OS_READ | OS_WRITE, &is_own), result = fd;

        while (fd >= 0 && (result = os->allocate(fd, 0, image->capacity)) == -EINTR)
                ;
        if (fd >= 0 && is_own)
                os->close(fd);
        return result;
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

enum nebula_status memory_make(const struct image *image, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        int result;

        do
                result = os->allocate(image->fd, offset, size);
        while (result == -EINTR);
        return result < 0 ? error_set(error, NEBULA_NO_MEMORY, -result, "cannot get %" PRIu64 " MiB of memory for a checkpoint", size / MIB) :
                            NEBULA_OK;
}

void memory_unmake(const struct image *image, uint64_t offset, uint64_t size)
{
        os->punch(image->fd, offset, size);
}

uint64_t memory_taken(const struct image *image)
{
        return image->spilled ? 0 : image->is_sparse ? image->taken : image->capacity;
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
        image_path(memory, id, path);
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

uint64_t memory_join_size(const struct image *image)
{
        return image->capacity / MEMORY_ROUND * MEMORY_ROUND;
}

bool memory_is_small(const struct image *image, int64_t now_ns)
{
        if (image->exposed || image->restored || image->spilled || image->joined >= memory_join_size(image))
                return false;
        return image->served >= MEMORY_SERVED && now_ns - image->taken_ns <= image->pause_ns;
}

void memory_hold(struct image *image)
{
        image->users++;
        free_remove(image);
}

/* Whether a reader has the lent image, by its descriptor. */
static bool is_held(struct image *image, int fd)
{
        image->lent = os->lock(fd, OS_LOCK_ALONE) < 0;
        if (!image->lent) {
                image->kept = false;
                os->lock(fd, OS_LOCK_NONE);
        }
        return image->lent;
}

/* The catalogue's lock, which callers hold, allows no open: a lent image without a descriptor counts as in use. */
bool memory_is_in_use(struct image *image)
{
        if (image->exposed || !image->lent)
                return image->exposed;
        return image->fd < 0 || is_held(image, image->fd);
}

void memory_drop(struct memory *memory, struct image *image)
{
        if (--image->users)
                return;
        if (image->restored || image->spilled || image->lacks_pages || memory_is_in_use(image))
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

        if (fd >= 0 && image->lent && is_held(image, fd)) {
                if (is_own)
                        os->close(fd);
                fd = -1;
        }
        if (image->named) {
                image_path(memory, image->id, path);
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

enum nebula_status memory_map(struct image *image, void **ret_data, struct nebula_error *error)
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

void memory_unmap(struct image *image)
{
        if (!image->data)
                return;
        memory_unpin(image);
        os->unmap(image->data, image->capacity);
        image->data = NULL;
        if (image->memory)
                atomic_fetch_sub(&image->memory->mapped_count, 1);
}

bool memory_stays_mapped(const struct image *image)
{
        return image->capacity >= MEMORY_ROUND && atomic_load(&image->memory->mapped_count) <= MEMORY_MAPPED_MAX;
}

bool memory_wants_pin(const struct image *image)
{
        return image->capacity >= MEMORY_ROUND && image->served && !image->joined && !image->faulting && !image->pinned && !image->unpinnable && !image->exposed &&
               !image->restored && !image->spilled;
}

bool memory_pin(const struct image *image)
{
        return bulk_pin(image->data, image->capacity) == 0;
}

void memory_unpin(const struct image *image)
{
        bulk_unpin(image->data);
}

void memory_set_copied(struct image *image, uint64_t copied)
{
        atomic_store(&image->copied, copied);
        atomic_fetch_add(&image->copied_turn, 1);
        os->futex_wake(&image->copied_turn);
}

uint64_t memory_await_copied(struct image *image, uint64_t size, int64_t timeout_ms)
{
        uint32_t turn = atomic_load(&image->copied_turn);

        if (atomic_load(&image->copied) < size)
                os->futex_wait(&image->copied_turn, turn, timeout_ms);
        return atomic_load(&image->copied);
}

void memory_prefault(struct image *image)
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
int memory_join(const struct image *image, uint64_t offset, uint64_t size)
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

enum nebula_status memory_duplicate(const struct image *image, int *ret_fd, struct nebula_error *error)
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

enum nebula_status memory_open_read_only(const struct image *image, int *ret_fd, struct nebula_error *error)
{
        char path[MEMORY_PATH_MAX];
        int fd;

        /* Opens it by name only if there is no descriptor, because the name may be gone: systemd, for example,
         * empties /dev/shm at the user's logout (RemoveIPC). */
        if (image->fd >= 0)
                snprintf(path, sizeof path, "/proc/self/fd/%d", image->fd);
        else
                image_path(image->memory, image->id, path);
        fd = os->open(path, OS_READ);
        if (fd < 0)
                return error_set(error, error_status_of_errno(-fd), -fd, "cannot open an image for reading");
        *ret_fd = fd;
        return NEBULA_OK;
}

void memory_set_lent(struct image *image, int fd)
{
        image->lent = true;
        if (os->lock(fd, OS_LOCK_SHARED) < 0) /* a directory whose file system has no locks */
                image->exposed = true;
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
