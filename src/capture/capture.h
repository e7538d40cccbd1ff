/*
 * capture.h - fixing the values of memory ranges into an image.
 *
 * A plan is the list of parts: ranges, and where each goes. capture_copy is the way
 * that is always possible: a streaming copy on a few threads that the caller
 * waits for. The pool keeps the images that the agent lent to this process mapped, so that
 * the next capture into one of them takes no page faults.
 *
 * Threads: one capture at a time per pool (the session's lock); capture_copy
 * starts helper threads once and keeps them.
 */
#ifndef NB_CAPTURE_CAPTURE_H
#define NB_CAPTURE_CAPTURE_H

#include <stdbool.h>

#include "image/image.h"

struct capture_part {
        const void *data;      /* NULL: nothing is copied, the image's pages are made */
        uint64_t size;         /* bytes */
        uint64_t image_offset;
};

/* Copies all parts into `image`; returns when every byte is there: the CPU time of all threads that took part, in ns.
 * Captures that overlap in time wait for each other. */
int64_t capture_copy(void *image, const struct capture_part *parts, size_t count);
/* Makes the pages of an image that was just mapped, for somebody who needs them all at once. As capture_copy. */
int64_t capture_populate(void *image, uint64_t size);

/* capture_copy in two steps: between them the helpers copy, and the caller writes what else belongs into the image. Both
 * steps by one thread, and no other capture by it in between. */
struct capture_job {
        char *image;
        const struct capture_part *parts;
        size_t count;
        bool is_fresh;    /* this process has not touched the image's pages: they are faulted in batches */
        struct image_sums *sums; /* NULL, or where to add what is summed on the way */
        bool has_crew;    /* private to copy.c, as all that follows */
        size_t next_part; /* where the next piece begins */
        uint64_t next_offset; /* within that part */
        int64_t cpu_ns;   /* of the helpers that have finished */
};
/* `job` stays where it is, with image, parts, count, is_fresh and sums set and all else 0. */
void capture_copy_begin(struct capture_job *job);
int64_t capture_copy_end(struct capture_job *job);
/* Ends the parked helper threads; the next copy starts them again. A fork loses them, and does the same. */
void capture_copy_rest(void);

/* Mapped images by the agent's id. */
struct capture_pool;
enum nebula_status capture_pool_new(struct capture_pool **ret_pool, struct nebula_error *error);
/* Takes over `fd` in every case. Maps it, or finds the mapping from before: of the same file, since another agent may
 * give an id again. */
enum nebula_status capture_pool_map(struct capture_pool *pool, uint64_t image_id, int fd, uint64_t capacity_bytes,
                                    void **ret_image, struct nebula_error *error);
/* Whether nothing was captured into `image` since it was mapped; true only once. */
bool capture_pool_take_fresh(struct capture_pool *pool, const void *image);
/* Unmaps every image that is not in `live_ids`, which is sorted for that. */
void capture_pool_keep(struct capture_pool *pool, uint64_t *live_ids, size_t count);
/* `unmapping`, unless NULL, is called before an image is unmapped. */
void capture_pool_watch(struct capture_pool *pool, void (*unmapping)(void *argument, void *image), void *argument);
void capture_pool_free(struct capture_pool *pool);

#endif
