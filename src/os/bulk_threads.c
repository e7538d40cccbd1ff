/*
 * The thread engine: a few threads with one request each. While one thread
 * checks a chunk, the others keep the device busy.
 */
#include <errno.h>
#include <string.h>

#include "os/bulk_private.h"
#include "os/os.h"

/* Making the pages of eight buffers can take a tenth of a second if the host must find free pages first. So a short
 * job uses half as many, and a very short one uses none. */
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

/* One thread of a job. */
struct mover {
        struct bulk_job *job;
        char *buffer; /* one chunk long; NULL: chunks are read into their places */
};

/* New memory is usually scattered small pages, and advising huge ones would change the program's own memory. Buffers
 * give the disk huge pages instead: see bulk_buffer. */
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
 * Makes the pages of new memory ahead of the reads. A read into memory without pages makes them before it asks the disk,
 * and eight readers that do so at once slow each other down. If the disk is faster than this thread, readers overtake it
 * and make their own pages.
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
                        break; /* a kernel before Linux 5.14: the reads make the pages */
        }
        return NULL;
}

/* The caller works too, so the job finishes even if no thread can be started. The page-making thread starts last:
 * starting a thread and mapping a buffer change the address space, and each such change waits until a running
 * populate call ends. */
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
