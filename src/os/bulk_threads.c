/*
 * A few threads, each with one request on its way: while one checks a chunk,
 * the others keep the device busy.
 */
#include <errno.h>

#include "os/bulk_private.h"
#include "os/os.h"

static int move_pieces(struct bulk_job *job, uint64_t offset, uint64_t size)
{
        int result = 0;

        while (size && !result) {
                size_t piece = size < BULK_REQUEST_BYTES ? (size_t)size : BULK_REQUEST_BYTES;

                if (job->is_write)
                        result = os_write_at(job->fd, job->data + offset, piece, offset);
                else
                        result = os_read_at(job->fd, job->data + offset, piece, offset);
                offset += piece;
                size -= piece;
        }
        return result;
}

static void *work(void *argument)
{
        struct bulk_job *job = argument;
        uint64_t offset, size;

        while (bulk_take(job, true, &offset, &size)) {
                uint64_t end = offset + size < job->direct_size ? offset + size : job->direct_size;
                int result = end > offset ? move_pieces(job, offset, end - offset) : 0;

                if (result)
                        bulk_fail(job, offset, result, NULL);
                else
                        bulk_finish_chunk(job, offset, size);
        }
        return NULL;
}

/* The caller works too, so that it gets done also when no thread can be had. */
void bulk_run_threads(struct bulk_job *job)
{
        pthread_t threads[BULK_THREADS - 1];
        size_t count = 0;

        while (count < BULK_THREADS - 1 && count + 1 < job->chunk_count &&
               !bulk_start(&threads[count], work, job))
                count++;
        work(job);
        while (count)
                pthread_join(threads[--count], NULL);
}
