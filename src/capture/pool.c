/* The images that the agent lent to this process, each mapped once. */
#include <errno.h>
#include <stdlib.h>

#include "base/error.h"
#include "capture/capture.h"
#include "os/os.h"

struct mapped {
        uint64_t image_id, device, inode;
        void *data;
        uint64_t capacity_bytes;
        bool is_fresh;
};

struct capture_pool {
        struct mapped *images;
        size_t count, capacity;
        void (*unmapping)(void *argument, void *image);
        void *argument;
};

enum nebula_status capture_pool_new(struct capture_pool **ret_pool, struct nebula_error *error)
{
        struct capture_pool *pool = calloc(1, sizeof *pool);

        if (!pool)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the list of images");
        *ret_pool = pool;
        return NEBULA_OK;
}

static void drop(struct capture_pool *pool, size_t index)
{
        if (pool->unmapping)
                pool->unmapping(pool->argument, pool->images[index].data);
        os->unmap(pool->images[index].data, pool->images[index].capacity_bytes);
        pool->images[index] = pool->images[--pool->count];
}

static bool has_room(struct capture_pool *pool)
{
        size_t capacity = pool->capacity ? 2 * pool->capacity : 16;
        struct mapped *images;

        if (pool->count < pool->capacity)
                return true;
        images = realloc(pool->images, capacity * sizeof *images);
        if (!images)
                return false;
        pool->images = images;
        pool->capacity = capacity;
        return true;
}

static enum nebula_status add(struct capture_pool *pool, struct mapped *image, int fd, struct nebula_error *error)
{
        int result;

        if (!has_room(pool))
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the list of images");
        result = os->map(fd, 0, image->capacity_bytes, OS_MAP_READ | OS_MAP_WRITE, &image->data);
        if (result < 0)
                return error_set(error, result == -ENOMEM ? NEBULA_NO_MEMORY : NEBULA_FAILED, -result,
                                 "an image of %llu bytes cannot be mapped", (unsigned long long)image->capacity_bytes);
        image->is_fresh = true;
        pool->images[pool->count++] = *image;
        return NEBULA_OK;
}

enum nebula_status capture_pool_map(struct capture_pool *pool, uint64_t image_id, int fd, uint64_t capacity_bytes,
                                    void **ret_image, struct nebula_error *error)
{
        struct mapped image = { .image_id = image_id, .capacity_bytes = capacity_bytes };
        enum nebula_status status = NEBULA_OK;
        struct os_stat stat;
        int result;

        result = os->fstat(fd, &stat);
        if (result < 0) {
                status = error_set(error, NEBULA_FAILED, -result, "the image that the agent lent cannot be examined");
                goto close_fd;
        }
        /* Touching a mapping beyond the end of its file would end the trainer with SIGBUS. */
        if (stat.size < capacity_bytes || capacity_bytes == 0) {
                status = error_set(error, NEBULA_FAILED, 0, "the agent lent an image of %llu bytes that holds only %llu",
                                   (unsigned long long)capacity_bytes, (unsigned long long)stat.size);
                goto close_fd;
        }
        image.device = stat.device;
        image.inode = stat.inode;
        for (size_t i = 0; i < pool->count; i++) {
                const struct mapped *known = &pool->images[i];

                if (known->image_id != image_id)
                        continue;
                if (known->device == image.device && known->inode == image.inode &&
                    known->capacity_bytes == capacity_bytes) {
                        *ret_image = known->data;
                        goto close_fd;
                }
                drop(pool, i);
                break;
        }
        status = add(pool, &image, fd, error);
        if (status == NEBULA_OK)
                *ret_image = image.data;
close_fd:
        os->close(fd);
        return status;
}

bool capture_pool_take_fresh(struct capture_pool *pool, const void *image)
{
        for (size_t i = 0; i < pool->count; i++) {
                bool is_fresh = pool->images[i].is_fresh;

                if (pool->images[i].data != image)
                        continue;
                pool->images[i].is_fresh = false;
                return is_fresh;
        }
        return false;
}

bool capture_pool_is_fresh(const struct capture_pool *pool, const void *image)
{
        for (size_t i = 0; i < pool->count; i++)
                if (pool->images[i].data == image)
                        return pool->images[i].is_fresh;
        return false;
}

static int by_number(const void *a, const void *b)
{
        uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

        return left < right ? -1 : left > right;
}

void capture_pool_keep(struct capture_pool *pool, uint64_t *live_ids, size_t count)
{
        if (pool->count && count)
                qsort(live_ids, count, sizeof *live_ids, by_number);
        for (size_t i = pool->count; i-- > 0;)
                if (!count || !bsearch(&pool->images[i].image_id, live_ids, count, sizeof *live_ids, by_number))
                        drop(pool, i);
}

void capture_pool_watch(struct capture_pool *pool, void (*unmapping)(void *argument, void *image), void *argument)
{
        pool->unmapping = unmapping;
        pool->argument = argument;
}

void capture_pool_free(struct capture_pool *pool)
{
        if (!pool)
                return;
        while (pool->count > 0)
                drop(pool, pool->count - 1);
        free(pool->images);
        free(pool);
}
