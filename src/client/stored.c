/*
 * A file in storage whose descriptor the agent passed. This process reads it chunk by chunk and checks each chunk before
 * it uses a byte of it. Failures are not reported in detail: the caller then asks the agent, which finds the cause.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "image/image.h"
#include "os/bulk.h"
#include "os/os.h"
#include "os/thread.h"
#include "sum/sum.h"

#define READERS_MAX 8u /* one request each: as many as a disk needs for full speed */
#define PIECE_BYTES (256u << 10) /* stays in a processor's cache while it is read, summed and copied */
#define FILLED_MIN (1u << 20)
#define SPAN_BYTES (1u << 20) /* of a record, for one reader at a time */
#define STRAIGHT_MIN (64u << 10) /* of one part; a read takes as long as a copy of fewer bytes */

static atomic_ullong read_bytes;

struct client_stored {
        int fd;
        bool is_direct;
        uint64_t size, chunk_bytes, chunk_count;
        uint64_t *crc64;
        bool *present; /* chunks that are in the map */
};

struct client_stored *stored_new(int fd, const struct ipc_opened *opened)
{
        struct client_stored *stored = calloc(1, sizeof *stored);

        if (!stored)
                return NULL;
        stored->fd = -1;
        stored->is_direct = opened->is_direct;
        stored->size = opened->size;
        stored->chunk_bytes = opened->chunk_bytes;
        stored->chunk_count = opened->chunk_count;
        stored->crc64 = calloc(stored->chunk_count + 1, sizeof *stored->crc64); /* + 1: calloc of 0 items may return NULL */
        stored->present = calloc(stored->chunk_count + 1, sizeof *stored->present);
        if (!stored->crc64 || !stored->present) {
                stored_free(stored);
                return NULL;
        }
        memcpy(stored->crc64, opened->crc64, stored->chunk_count * sizeof *stored->crc64);
        stored->fd = fd;
        return stored;
}

void stored_free(struct client_stored *stored)
{
        if (!stored)
                return;
        if (stored->fd >= 0)
                os->close(stored->fd);
        free(stored->crc64);
        free(stored->present);
        free(stored);
}

bool stored_is_direct(const struct client_stored *stored)
{
        return stored->is_direct;
}

static uint64_t chunk_size(const struct client_stored *stored, uint64_t index)
{
        uint64_t offset = index * stored->chunk_bytes;

        return stored->size - offset < stored->chunk_bytes ? stored->size - offset : stored->chunk_bytes;
}

static uint64_t whole_pages(uint64_t size)
{
        return (size + BULK_PAGE_BYTES - 1) / BULK_PAGE_BYTES * BULK_PAGE_BYTES;
}

/* Reads and checks one chunk. `to` has room for whole pages, because a direct file is read in whole pages. Only the
 * file's last chunk can be shorter. */
static bool read_chunk(const struct client_stored *stored, uint64_t index, char *to)
{
        uint64_t offset = index * stored->chunk_bytes, size = chunk_size(stored, index), done = 0, crc64 = 0;
        uint64_t whole = index + 1 < stored->chunk_count ? size : whole_pages(size);

        while (done < size) {
                uint64_t asked = stored->is_direct || whole - done < PIECE_BYTES ? whole - done : PIECE_BYTES, got;
                int64_t count = os->pread(stored->fd, to + done, asked, offset + done);

                if (count == -EINTR)
                        continue;
                if (count <= 0)
                        return false;
                got = (uint64_t)count < size - done ? (uint64_t)count : size - done;
                crc64 = sum_crc64(crc64, to + done, got);
                done += got;
        }
        atomic_fetch_add(&read_bytes, size);
        return crc64 == stored->crc64[index];
}

static enum nebula_status check_chunk(void *argument, const void *data, uint64_t offset, uint64_t size,
                                      struct nebula_error *error)
{
        const struct client_stored *stored = argument;

        atomic_fetch_add(&read_bytes, size);
        return sum_crc64(0, data, size) == stored->crc64[offset / stored->chunk_bytes] ? NEBULA_OK : NEBULA_CORRUPT;
}

uint64_t stored_read_bytes(void)
{
        return atomic_load(&read_bytes);
}

/* Runs `run` on `wanted` threads, the calling thread included. */
static void run_readers(void *(*run)(void *argument), void *argument, size_t wanted)
{
        pthread_t threads[READERS_MAX];
        size_t started = 0;

        while (started + 1 < wanted && started < READERS_MAX && !os_thread_start(&threads[started], run, argument, false))
                started++;
        run(argument);
        while (started)
                pthread_join(threads[--started], NULL);
}

/* One call of fill_all. */
struct filling {
        const struct client_stored *stored;
        char *data;
        int fd;
        atomic_uint_fast64_t next; /* the next chunk to read */
        atomic_bool failed;
};

static bool fill_chunk(const struct filling *filling, uint64_t index, char *buffer)
{
        const struct client_stored *stored = filling->stored;
        uint64_t offset = index * stored->chunk_bytes, end = offset + chunk_size(stored, index), crc64 = 0;

        while (offset < end) {
                uint64_t size = end - offset < PIECE_BYTES ? end - offset : PIECE_BYTES, pages = whole_pages(size);

                if (os_read_at(stored->fd, buffer, size, offset))
                        return false;
                crc64 = sum_crc64(crc64, buffer, size);
                memset(buffer + size, 0, pages - size);
                if (os->fill(filling->fd, filling->data + offset, buffer, pages))
                        return false;
                atomic_fetch_add(&read_bytes, size);
                offset += size;
        }
        return crc64 == stored->crc64[index];
}

static void *fill_chunks(void *argument)
{
        struct filling *filling = argument;
        char *buffer = aligned_alloc(BULK_PAGE_BYTES, PIECE_BYTES);

        if (!buffer)
                atomic_store(&filling->failed, true);
        while (!atomic_load(&filling->failed)) {
                uint64_t index = atomic_fetch_add(&filling->next, 1);

                if (index >= filling->stored->chunk_count)
                        break;
                if (!fill_chunk(filling, index, buffer))
                        atomic_store(&filling->failed, true);
        }
        free(buffer);
        return NULL;
}

/*
 * Reads the whole file through the page cache into memory that has no pages yet. Most of the time of such a read goes into making these
 * pages. So each piece is read into a buffer that stays in the processor's cache, is summed there, and becomes pages with contents.
 * False: this file or this machine is not suited, and nothing was done. *ret_read: the file was read and every chunk was right.
 */
static bool fill_all(const struct client_stored *stored, void *data, bool *ret_read)
{
        struct filling filling = { .stored = stored, .data = data };
        uint64_t pages = whole_pages(stored->size);

        if (stored->is_direct || stored->size < FILLED_MIN || stored->chunk_bytes % BULK_PAGE_BYTES)
                return false;
        filling.fd = os->fill_open(data, pages);
        if (filling.fd < 0)
                return false;
        run_readers(fill_chunks, &filling, (size_t)stored->chunk_count);
        /* A forked child may still have the descriptor, so closing it would not be enough. */
        os->uffd_unregister(filling.fd, (uintptr_t)data, (uintptr_t)data + pages);
        os->close(filling.fd);
        *ret_read = !atomic_load(&filling.failed);
        return true;
}

bool stored_fetch_all(struct client_stored *stored, void *data)
{
        bool is_read = !stored->size;

        if (!is_read && !fill_all(stored, data, &is_read))
                is_read = !bulk_read(stored->fd, stored->is_direct, data, true, stored->size, (uint32_t)stored->chunk_bytes, check_chunk,
                                     stored, NULL);
        if (is_read)
                memset(stored->present, true, stored->chunk_count * sizeof *stored->present);
        return is_read;
}

bool stored_fill(const struct client_stored *stored, void *data, const void *file)
{
        for (uint64_t i = 0; i < stored->chunk_count; i++) {
                uint64_t offset = i * stored->chunk_bytes, size = chunk_size(stored, i);

                if (stored->present[i])
                        continue;
                if (sum_crc64(0, (const char *)file + offset, size) != stored->crc64[i])
                        return false;
                memcpy((char *)data + offset, (const char *)file + offset, size);
        }
        return true;
}

/* Chunks to read into the map. */
struct fetching {
        struct client_stored *stored;
        char *data;
        uint64_t *chunks;
        size_t count;
        atomic_size_t next;
        atomic_bool failed;
};

static void *fetch_chunks(void *argument)
{
        struct fetching *fetching = argument;
        struct client_stored *stored = fetching->stored;

        while (!atomic_load(&fetching->failed)) {
                size_t turn = atomic_fetch_add(&fetching->next, 1);

                if (turn >= fetching->count)
                        break;
                if (read_chunk(stored, fetching->chunks[turn], fetching->data + fetching->chunks[turn] * stored->chunk_bytes))
                        stored->present[fetching->chunks[turn]] = true;
                else
                        atomic_store(&fetching->failed, true);
        }
        return NULL;
}

bool stored_fetch(struct client_stored *stored, void *data, const struct nebula_part *parts, size_t count)
{
        struct fetching fetching = { .stored = stored, .data = data };
        bool *wanted = calloc(stored->chunk_count + 1, sizeof *wanted);

        fetching.chunks = calloc(stored->chunk_count + 1, sizeof *fetching.chunks);
        for (size_t i = 0; wanted && fetching.chunks && i < count; i++)
                for (uint64_t index = parts[i].offset / stored->chunk_bytes;
                     parts[i].size && index * stored->chunk_bytes < parts[i].offset + parts[i].size; index++) {
                        if (!stored->present[index] && !wanted[index])
                                fetching.chunks[fetching.count++] = index;
                        wanted[index] = true;
                }
        if (!wanted || !fetching.chunks)
                atomic_store(&fetching.failed, true);
        run_readers(fetch_chunks, &fetching, fetching.count);
        free(wanted);
        free(fetching.chunks);
        return !atomic_load(&fetching.failed);
}

/* One call of stored_scatter. */
struct scatter {
        const struct client_stored *stored;
        int image_fd;
        const char *data;
        uint64_t size, chunk_bytes;
        const struct nebula_part *parts; /* sorted by offset */
        size_t count;
        atomic_uint_fast64_t next; /* the next chunk to read */
        uint64_t end;              /* the chunk after the last one with parts */
        atomic_bool failed;
};

/* The first part that ends after `offset`. */
static size_t first_part(const struct scatter *scatter, uint64_t offset)
{
        size_t low = 0, high = scatter->count;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (scatter->parts[middle].offset + scatter->parts[middle].size <= offset)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

static void copy_part(const struct scatter *scatter, char *to, const char *from, uint64_t offset, uint64_t size)
{
        bool is_read = scatter->image_fd >= 0 && size >= STRAIGHT_MIN;

        if (!is_read || os_read_at(scatter->image_fd, to, size, offset))
                memcpy(to, from, size);
}

/* Copies the bytes [begin, end) of the file, which lie at `from`, to the parts that want them. from NULL: these get zeros. */
static void deal_out(const struct scatter *scatter, uint64_t begin, uint64_t end, const char *from)
{
        for (size_t i = first_part(scatter, begin); i < scatter->count && scatter->parts[i].offset < end; i++) {
                const struct nebula_part *part = &scatter->parts[i];
                uint64_t first = part->offset > begin ? part->offset : begin;
                uint64_t last = part->offset + part->size < end ? part->offset + part->size : end;
                char *to = (char *)part->data + (first - part->offset);

                if (first >= last || (from && to == from + (first - begin))) /* nothing, or the bytes are there */
                        continue;
                if (from)
                        copy_part(scatter, to, from + (first - begin), first, last - first);
                else
                        memset(to, 0, last - first);
        }
}

/* How many of the bytes from `offset` on one part takes; at most `limit`. *ret_to: its memory for them. */
static uint64_t part_at(const struct scatter *scatter, uint64_t offset, uint64_t limit, char **ret_to)
{
        size_t index = first_part(scatter, offset);
        const struct nebula_part *part = &scatter->parts[index];

        if (index == scatter->count || part->offset > offset)
                return 0;
        *ret_to = (char *)part->data + (offset - part->offset);
        return part->offset + part->size - offset < limit ? part->offset + part->size - offset : limit;
}

/* Reads a chunk through the page cache. Bytes of large parts go straight to their places and are summed there, while a processor's cache
 * has them. All others go through `buffer`. */
static bool scatter_pieces(const struct scatter *scatter, uint64_t index, char *buffer)
{
        const struct client_stored *stored = scatter->stored;
        uint64_t begin = index * stored->chunk_bytes, offset = begin, end = begin + chunk_size(stored, index), crc64 = 0;

        while (offset < end) {
                uint64_t size = end - offset < PIECE_BYTES ? end - offset : PIECE_BYTES;
                char *to = NULL;
                uint64_t straight = part_at(scatter, offset, size, &to);

                if (straight < STRAIGHT_MIN)
                        to = buffer;
                else
                        size = straight;
                if (os_read_at(stored->fd, to, size, offset))
                        break;
                crc64 = sum_crc64(crc64, to, size);
                if (to == buffer)
                        deal_out(scatter, offset, offset + size, buffer);
                atomic_fetch_add(&read_bytes, size);
                offset += size;
        }
        if (offset == end && crc64 == stored->crc64[index])
                return true;
        deal_out(scatter, begin, end, NULL); /* no byte that was not compared stays there */
        return false;
}

static bool has_parts(const struct scatter *scatter, uint64_t begin, uint64_t end)
{
        size_t index = first_part(scatter, begin);

        return index < scatter->count && scatter->parts[index].offset < end;
}

/* The buffers of one thread, made when it needs them. */
struct scatter_buffers {
        struct bulk_buffer chunk; /* of a direct file */
        char *piece;              /* of a file in the page cache */
};

static bool scatter_chunk(const struct scatter *scatter, uint64_t index, struct scatter_buffers *buffers)
{
        const struct client_stored *stored = scatter->stored;
        uint64_t begin = index * scatter->chunk_bytes;
        uint64_t end = scatter->size - begin < scatter->chunk_bytes ? scatter->size : begin + scatter->chunk_bytes;

        if (!has_parts(scatter, begin, end))
                return true;
        if (!stored || stored->present[index]) {
                deal_out(scatter, begin, end, scatter->data + begin);
                return true;
        }
        if (!stored->is_direct) {
                if (!buffers->piece)
                        buffers->piece = malloc(PIECE_BYTES);
                return buffers->piece && scatter_pieces(scatter, index, buffers->piece);
        }
        if ((!buffers->chunk.data && bulk_buffer_open(&buffers->chunk, chunk_size(stored, 0))) || !read_chunk(stored, index, buffers->chunk.data))
                return false;
        deal_out(scatter, begin, end, buffers->chunk.data);
        return true;
}

static void *scatter_chunks(void *argument)
{
        struct scatter *scatter = argument;
        struct scatter_buffers buffers = { 0 };

        while (!atomic_load(&scatter->failed)) {
                uint64_t index = atomic_fetch_add(&scatter->next, 1);

                if (index >= scatter->end)
                        break;
                if (!scatter_chunk(scatter, index, &buffers))
                        atomic_store(&scatter->failed, true);
        }
        bulk_buffer_close(&buffers.chunk);
        free(buffers.piece);
        return NULL;
}

bool stored_scatter(const struct client_stored *stored, int image_fd, const void *data, uint64_t size, const struct nebula_part *parts,
                    size_t count)
{
        struct scatter scatter = { .stored = stored, .image_fd = image_fd, .data = data, .size = size, .parts = parts, .count = count,
                                   .chunk_bytes = stored ? stored->chunk_bytes : IMAGE_CHUNK_BYTES };
        size_t wanted = stored || os->cpu_count() > READERS_MAX ? READERS_MAX : os->cpu_count();
        uint64_t first = count ? parts[0].offset / scatter.chunk_bytes : 0;

        scatter.end = count ? (parts[count - 1].offset + parts[count - 1].size + scatter.chunk_bytes - 1) / scatter.chunk_bytes : 0;
        atomic_store(&scatter.next, first);
        run_readers(scatter_chunks, &scatter, scatter.end - first < wanted ? (size_t)(scatter.end - first) : wanted);
        return !atomic_load(&scatter.failed) && atomic_load(&scatter.next) >= scatter.end;
}

/* One call of stored_read_record. */
struct record {
        const struct client_stored *stored;
        const struct nebula_part *part;
        uint32_t *crc32; /* of each span */
        uint64_t span_count;
        atomic_uint_fast64_t next; /* the next span to read */
        atomic_bool failed;
};

static uint64_t span_size(const struct record *record, uint64_t index)
{
        uint64_t rest = record->part->size - index * SPAN_BYTES;

        return rest < SPAN_BYTES ? rest : SPAN_BYTES;
}

static bool read_span(const struct record *record, uint64_t index)
{
        uint64_t begin = index * SPAN_BYTES, end = begin + span_size(record, index);

        for (uint64_t offset = begin, size; offset < end; offset += size) {
                char *to = (char *)record->part->data + offset;

                size = end - offset < PIECE_BYTES ? end - offset : PIECE_BYTES;
                if (os_read_at(record->stored->fd, to, size, record->part->offset + offset))
                        return false;
                record->crc32[index] = sum_crc32(record->crc32[index], to, size);
                atomic_fetch_add(&read_bytes, size);
        }
        return true;
}

static void *read_spans(void *argument)
{
        struct record *record = argument;

        while (!atomic_load(&record->failed)) {
                uint64_t index = atomic_fetch_add(&record->next, 1);

                if (index >= record->span_count)
                        break;
                if (!read_span(record, index))
                        atomic_store(&record->failed, true);
        }
        return NULL;
}

/* Whether bytes of the part may lie in the map only, because the program has changed them there. */
static bool is_in_map(const struct client_stored *stored, const struct nebula_part *part)
{
        for (uint64_t index = part->offset / stored->chunk_bytes; index * stored->chunk_bytes < part->offset + part->size; index++)
                if (!stored->present[index])
                        return false;
        return true;
}

bool stored_read_record(const struct client_stored *stored, const struct nebula_part *part, uint32_t crc32)
{
        struct record record = { .stored = stored, .part = part, .span_count = (part->size + SPAN_BYTES - 1) / SPAN_BYTES };
        size_t wanted = os->cpu_count() < READERS_MAX ? os->cpu_count() : READERS_MAX;
        uint32_t found = 0;

        if (stored->is_direct || !part->size || is_in_map(stored, part))
                return false;
        record.crc32 = calloc(record.span_count, sizeof *record.crc32);
        if (!record.crc32)
                return false;
        run_readers(read_spans, &record, record.span_count < wanted ? (size_t)record.span_count : wanted);
        for (uint64_t i = 0; i < record.span_count; i++)
                found = sum_crc32_combine(found, record.crc32[i], span_size(&record, i));
        free(record.crc32);
        if (!atomic_load(&record.failed) && found == crc32)
                return true;
        memset(part->data, 0, part->size); /* no byte that was not compared stays there */
        return false;
}
