/*
 * A few threads, each with one request on its way: while one checks a chunk,
 * the others keep the device busy.
 */
#include <errno.h>
#include <string.h>

#include "os/bulk_private.h"
#include "os/os.h"

#define BUFFERED_MIN (128u << 20) /* to make the buffers' pages may take a tenth of a second, where a host has to find them */

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

/* New memory is mostly of scattered pages, and to ask for huge ones would change what the program gets: see bulk_buffer. Without one
 * chunks are read into their places. */
static void open_buffer(const struct bulk_job *job, struct bulk_buffer *ret_buffer)
{
        *ret_buffer = (struct bulk_buffer){ 0 };
        if (!job->is_new || !job->is_direct || job->size < BUFFERED_MIN || job->chunk_bytes > BULK_REQUEST_BYTES)
                return;
        if (bulk_buffer_open(ret_buffer, job->chunk_bytes) == 0 && !ret_buffer->is_huge)
                bulk_buffer_close(ret_buffer);
}

static void *work(void *argument)
{
        struct bulk_job *job = argument;
        struct bulk_buffer buffer;
        uint64_t offset, size;

        open_buffer(job, &buffer);
        while (bulk_take(job, true, &offset, &size)) {
                uint64_t end = offset + size < job->direct_size ? offset + size : job->direct_size;
                bool is_buffered = buffer.data && end == offset + size;
                char *data = is_buffered ? buffer.data : job->data + offset;
                int result = end > offset ? move_pieces(job, data, offset, end - offset) : 0;

                if (result)
                        bulk_fail(job, offset, result, NULL);
                else
                        bulk_finish_chunk(job, data, offset, size);
                if (is_buffered && !atomic_load(&job->is_stopped))
                        memcpy(job->data + offset, data, size);
        }
        bulk_buffer_close(&buffer);
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

/* The caller works too, so that it gets done also when no thread can be had. */
void bulk_run_threads(struct bulk_job *job)
{
        pthread_t threads[BULK_THREADS - 1], maker;
        size_t count = 0;
        bool is_making = job->is_new && job->chunk_count > BULK_THREADS && !bulk_start(&maker, make_pages, job);

        while (count < BULK_THREADS - 1 && count + 1 < job->chunk_count &&
               !bulk_start(&threads[count], work, job))
                count++;
        work(job);
        while (count)
                pthread_join(threads[--count], NULL);
        if (is_making)
                pthread_join(maker, NULL);
}
