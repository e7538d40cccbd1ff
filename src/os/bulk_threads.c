/*
 * A few threads, each with one request on its way: while one checks a chunk,
 * the others keep the device busy.
 */
#include <errno.h>
#include <string.h>

#include "os/bulk_private.h"
#include "os/os.h"

/* To make the pages of eight buffers may take a tenth of a second, where a host has to find them. A short job has half as many, and where
 * that would not pay for itself, none. */
#define BUFFERED_MIN (32u << 20)
#define LONG_MIN (128u << 20)

static int move_pieces(struct bulk_job *job, char *data, uint64_t offset, uint64_t size)
{
        int result = 0;

        while (size && !result) {
                size_t piece = size < BULK_REQUEST_BYTES ? (size_t)size : BULK_REQUEST_BYTES;

                if (job->is_write)
                        result = os_write_at(job->fd, data, piece, offset);
                else
                        result = os_read_at(job->fd, data, piece, offset);
                data += piece;
                offset += piece;
                size -= piece;
        }
        return result;
}

/* One thread's part in a job. */
struct mover {
        struct bulk_job *job;
        char *buffer; /* of a chunk; NULL: chunks are read into their places */
};

/* New memory is mostly of scattered pages, and to ask for huge ones would change what the program gets: see bulk_buffer. */
static bool wants_buffers(const struct bulk_job *job)
{
        return job->is_new && job->is_direct && job->size >= BUFFERED_MIN && job->chunk_bytes <= BULK_REQUEST_BYTES;
}

static void *move_chunks(void *argument)
{
        struct mover *mover = argument;
        struct bulk_job *job = mover->job;
        uint64_t offset, size;

        if (mover->buffer && !bulk_buffer_make(mover->buffer, job->chunk_bytes))
                mover->buffer = NULL;
        while (bulk_take(job, true, &offset, &size)) {
                uint64_t end = offset + size < job->direct_size ? offset + size : job->direct_size;
                bool is_buffered = mover->buffer && end == offset + size;
                char *data = is_buffered ? mover->buffer : job->data + offset;
                int result = end > offset ? move_pieces(job, data, offset, end - offset) : 0;

                if (result)
                        bulk_fail(job, offset, result, NULL);
                else
                        bulk_finish_chunk(job, data, offset, size);
                if (is_buffered && !atomic_load(&job->is_stopped))
                        memcpy(job->data + offset, data, size);
        }
        return NULL;
}

/*
 * A read into memory that has no pages makes them before it asks the disk for anything, and eight readers that do so at once hold
 * each other up. One thread is ahead of them where the disk is slower than it; where it is not, it lets them go by.
 */
static void *make_pages(void *argument)
{
        struct bulk_job *job = argument;
        uint64_t made = 0, taken;

        while ((taken = atomic_load(&job->next_chunk)) < job->chunk_count && !atomic_load(&job->is_stopped)) {
                uint64_t offset, size;

                made = made > taken ? made : taken;
                if (made >= job->chunk_count)
                        break;
                offset = made++ * job->chunk_bytes;
                size = job->size - offset < job->chunk_bytes ? job->size - offset : job->chunk_bytes;
                if (os->advise(job->data + offset, size, OS_ADVISE_POPULATE_WRITE) < 0)
                        break; /* a kernel before Linux 5.14: the reads make them */
        }
        return NULL;
}

/* The caller works too, so that it gets done also when no thread can be had. The maker of pages is the last that starts: what changes the
 * address space, as the making of threads and buffers does, waits for the end of each of its calls. */
void bulk_run_threads(struct bulk_job *job)
{
        struct mover movers[BULK_THREADS];
        struct bulk_buffer buffers = { 0 };
        pthread_t threads[BULK_THREADS - 1], maker;
        size_t count = 0, wanted = BULK_THREADS;
        bool is_making;

        if (wants_buffers(job)) {
                wanted = job->size < LONG_MIN ? BULK_THREADS / 2 : BULK_THREADS;
                bulk_buffer_map(&buffers, wanted * (uint64_t)BULK_REQUEST_BYTES);
        }
        for (size_t i = 0; i < wanted; i++)
                movers[i] = (struct mover){ job, buffers.data ? buffers.data + i * BULK_REQUEST_BYTES : NULL };
        while (count + 1 < wanted && count + 1 < job->chunk_count &&
               !bulk_start(&threads[count], move_chunks, &movers[count + 1]))
                count++;
        is_making = job->is_new && job->chunk_count > BULK_THREADS && !bulk_start(&maker, make_pages, job);
        move_chunks(&movers[0]);
        while (count)
                pthread_join(threads[--count], NULL);
        if (is_making)
                pthread_join(maker, NULL);
        bulk_buffer_close(&buffers);
}
