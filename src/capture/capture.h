/*
 * capture.h - fixes the values of memory ranges by copying them into an image.
 *
 * A plan is a list of parts: memory ranges, and their place in the image. capture_copy
 * always works: it is a streaming copy on a few threads, and its caller waits. The pool
 * keeps the images that the agent lent to this process mapped, so the next capture into
 * one of them takes no page faults.
 *
 * Threads: one capture at a time per pool (the session's lock). capture_copy starts helper
 * threads once and keeps them.
 */
#ifndef NB_CAPTURE_CAPTURE_H
#define NB_CAPTURE_CAPTURE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "image/image.h"

struct capture_part {
        const void *data;      /* NULL: copies nothing, but makes the image's pages */
        uint64_t size;         /* bytes */
        uint64_t image_offset;
};

/* Copies all parts into `image`. Returns when every byte is there: the processor time of all its threads, in ns.
 * Captures that overlap in time wait for each other. */
int64_t capture_copy(void *image, const struct capture_part *parts, size_t count);
/* Makes the pages of an image that was just mapped and is needed as a whole. False: some could not be made, because memory is full. A write
 * to such a page would end the process. */
bool capture_populate(void *image, uint64_t size);
/* The same for a few bytes, on the caller's thread. */
bool capture_make_pages(void *image, uint64_t offset, uint64_t size);

/* capture_copy in two steps. Between them the helpers copy, while the caller writes other bytes of the image. One
 * thread calls both steps and starts no other capture in between. */
struct capture_job {
        char *image;
        const struct capture_part *parts;
        size_t count;
        bool is_fresh;    /* this process has not touched the image's pages: make them in batches */
        struct image_sums *sums; /* NULL, or the list to which the copy adds its checksums */
        bool has_crew;    /* this and all below: private to copy.c */
        atomic_bool lacks_pages; /* some pages could not be made */
        size_t next_part; /* the part in which the next piece begins */
        uint64_t next_offset; /* its offset in that part */
        int64_t cpu_ns;   /* of helpers that have finished */
};
/* Set image, parts, count, is_fresh and sums, and zero all else. `job` must not move until capture_copy_end. */
void capture_copy_begin(struct capture_job *job);
int64_t capture_copy_end(struct capture_job *job);
/* Ends the parked helper threads; the next copy starts them again. A fork loses the helpers, with the same effect. */
void capture_copy_rest(void);

/* Mapped images, by the agent's image id. */
struct capture_pool;
enum nebula_status capture_pool_new(struct capture_pool **ret_pool, struct nebula_error *error);
/* Takes `fd` over in every case. Maps the image, or returns its existing mapping. That mapping is used only if it is
 * of the same file, because a new agent may use an id again. */
enum nebula_status capture_pool_map(struct capture_pool *pool, uint64_t image_id, int fd, uint64_t capacity_bytes,
                                    void **ret_image, struct nebula_error *error);
/* Whether this process has not captured into `image` since it mapped it. True only once. */
bool capture_pool_take_fresh(struct capture_pool *pool, const void *image);
bool capture_pool_is_fresh(const struct capture_pool *pool, const void *image);
/* Unmaps every image that is not in `live_ids`. Sorts `live_ids`. */
void capture_pool_keep(struct capture_pool *pool, uint64_t *live_ids, size_t count);
/* `unmapping` is called before each unmapping; NULL: no call. */
void capture_pool_watch(struct capture_pool *pool, void (*unmapping)(void *argument, void *image), void *argument);
void capture_pool_free(struct capture_pool *pool);

#endif
