/*
 * bulk_private.h - shared by the engines of bulk I/O. Only src/os/bulk*.c
 * includes it.
 */
#ifndef NB_OS_BULK_PRIVATE_H
#define NB_OS_BULK_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "os/bulk.h"
#include "os/lock.h"

/* One call of bulk_write or bulk_read. */
struct bulk_job {
        /* Does not change while the engine runs. */
        int fd;
        bool is_write, is_direct, is_new; /* is_new: memory of a read that has no pages yet */
        char *data;
        uint64_t size, direct_size; /* direct_size: the whole pages; the rest goes through the bounce buffer */
        uint64_t chunk_bytes, chunk_count;
        bulk_check *check;
        void *argument;
        struct nebula_error *error;
        struct bulk_feed *feed; /* of a write; NULL: all bytes are final */

        atomic_uint_fast64_t next_chunk; /* chunks taken so far; if there is a feed, feed->lock guards it */
        atomic_bool is_stopped;

        struct lock result_lock; /* guards the members below */
        int result;
        uint64_t failed_offset; /* where `result` happened: of several failures, the one nearest to the start is reported */
};

/* Takes the next chunk. False if no chunk is left or the job has failed. Without `may_wait`, also false if no chunk is final yet. */
bool bulk_take(struct bulk_job *job, bool may_wait, uint64_t *ret_offset, uint64_t *ret_size);
/* Records a failure (a negative errno or a check's status) and stops the job. */
void bulk_fail(struct bulk_job *job, uint64_t offset, int result, const struct nebula_error *error);
/* Call when a chunk has arrived at `data`, which is its place or, for a chunk of whole pages, a buffer. Fetches the
 * chunk's last bytes if they go through the bounce buffer, then runs the check. */
void bulk_finish_chunk(struct bulk_job *job, const char *data, uint64_t offset, uint64_t size);

/* Starts a thread that blocks all signals except those of its own faults: the others are for the program's threads.
 * Returns 0 or a negative errno. */
int bulk_start(pthread_t *ret_thread, void *(*run)(void *), void *argument);

void bulk_run_threads(struct bulk_job *job);

/* bulk_ring.c. False: no ring was available and nothing was done. */
bool bulk_run_ring(struct bulk_job *job);
int bulk_ring_pin(const char *data, uint64_t size);
void bulk_ring_unpin(const char *data);

#endif
