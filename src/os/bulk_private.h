/*
 * bulk_private.h - what the engines of bulk I/O share. Nobody else includes it.
 */
#ifndef NB_OS_BULK_PRIVATE_H
#define NB_OS_BULK_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "os/bulk.h"

/* One call of bulk_write or bulk_read. */
struct bulk_job {
        /* Fixed while the engine runs. */
        int fd;
        bool is_write, is_direct, is_new; /* is_new: no pages yet, to be made for a read */
        char *data;
        uint64_t size, direct_size; /* direct_size: what goes in whole pages; the rest takes the bounce buffer */
        uint64_t chunk_bytes, chunk_count;
        bulk_check *check;
        void *argument;
        struct nebula_error *error;
        struct bulk_feed *feed; /* of a write; NULL: all is final */

        atomic_uint_fast64_t next_chunk; /* so many were taken; feed->lock guards it when there is one */
        atomic_bool is_stopped;

        pthread_mutex_t result_lock; /* guards the rest */
        int result;
        uint64_t failed_offset; /* of `result`: of several failures the one nearest to the beginning is told */
};

/* The next chunk, or false when there is none or the job has failed; unless `may_wait`, also when none is final yet. */
bool bulk_take(struct bulk_job *job, bool may_wait, uint64_t *ret_offset, uint64_t *ret_size);
/* Records a failure (negative errno or a check's status) and stops the job. */
void bulk_fail(struct bulk_job *job, uint64_t offset, int result, const struct nebula_error *error);
/* A chunk has arrived at `data`, its place or, if it is of whole pages, elsewhere: its last bytes if they take the bounce buffer, then the check. */
void bulk_finish_chunk(struct bulk_job *job, const char *data, uint64_t offset, uint64_t size);

/* A thread that takes no signal but those of its faults: the others are for the program's own. 0 or a negative errno. */
int bulk_start(pthread_t *ret_thread, void *(*run)(void *), void *argument);

void bulk_run_threads(struct bulk_job *job);

/* bulk_ring.c. False when no ring could be had: nothing was done. */
bool bulk_run_ring(struct bulk_job *job);
int bulk_ring_pin(const char *data, uint64_t size);
void bulk_ring_unpin(const char *data);

#endif
