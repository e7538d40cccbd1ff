/*
 * Sealing reads the file once, from front to back. The CRC-64 of a chunk covers headers, and a header contains the CRC-32
 * of the payload after it. So sealing sums each payload first, then writes its header, then continues the chunk over
 * header and payload.
 *
 * Large payloads are summed in pieces that end at chunk borders, with both CRCs at once; the sum of such a piece is joined
 * to the chunk's. A small payload is summed a second time while it is in the cache. Only headers change: a chunk that lies
 * within one payload is final, and is reported, as soon as it is summed. Ranges that were summed while they were copied
 * are not read here.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "base/error.h"
#include "image/image.h"
#include "image/zip_format.h"
#include "sum/sum.h"

/* A piece of this size stays in a core's cache until its second sum. Joining sums costs some microseconds, so
 * smaller pieces are summed twice. */
#define PIECE_MIN (256u << 10)

/* The part of one payload in one chunk, summed. */
struct piece {
        uint64_t offset, size, crc64;
};

struct sealing {
        uint8_t *bytes;
        uint64_t size;
        uint32_t chunk_bytes;
        /* Chunks before `offset` are complete; crc64 is that of the current chunk up to `offset`. */
        uint64_t offset, crc64;
        uint64_t *chunks;
        size_t chunk_count;
        struct piece *pieces; /* pieces of the current record; room for one per chunk */
        const struct image_flow *flow;
        size_t next_sum; /* index in the flow's sums */
        bool is_given_up; /* the awaited bytes will not come: nothing more is read */
};

static void report(const struct sealing *sealing, uint64_t offset, uint64_t crc64)
{
        if (sealing->flow->ready)
                sealing->flow->ready(sealing->flow->argument, offset, crc64);
}

/* Waits until the bytes before `end` can be read. False: they will not come. */
static bool has_until(struct sealing *sealing, uint64_t end)
{
        if (!sealing->is_given_up && sealing->flow->await)
                sealing->is_given_up = !sealing->flow->await(sealing->flow->argument, end);
        return !sealing->is_given_up;
}

static uint64_t next_border(const struct sealing *sealing, uint64_t offset)
{
        return (offset / sealing->chunk_bytes + 1) * sealing->chunk_bytes;
}

/* Moves on to `offset`, at most the next border. True: a chunk ends there. */
static bool advance(struct sealing *sealing, uint64_t offset, uint64_t crc64)
{
        bool is_end = offset % sealing->chunk_bytes == 0 || offset == sealing->size;

        sealing->offset = offset;
        sealing->crc64 = is_end ? 0 : crc64;
        if (is_end)
                sealing->chunks[sealing->chunk_count++] = crc64;
        return is_end;
}

/* The flow's next sum, if its range lies in [start, end). */
static bool find_sum(struct sealing *sealing, uint64_t start, uint64_t end, struct image_sum *ret_sum)
{
        size_t count = sealing->flow->sums ? atomic_load(sealing->flow->sum_count) : 0;

        for (; sealing->next_sum < count; sealing->next_sum++) {
                *ret_sum = sealing->flow->sums[sealing->next_sum]; /* copied once: the process that wrote it could change it */
                if (ret_sum->offset >= start && ret_sum->size)
                        return ret_sum->offset < end && ret_sum->size <= end - ret_sum->offset;
        }
        return false;
}

/* Continues the sums over [start, end): joins known sums and reads the bytes between them. crc32 may be NULL. */
static void sum_range(struct sealing *sealing, uint64_t start, uint64_t end, uint32_t *crc32, uint64_t *crc64)
{
        while (start < end) {
                struct image_sum sum = { 0 };
                bool is_known = find_sum(sealing, start, end, &sum);
                uint64_t stop = is_known ? sum.offset : end;

                if (crc32)
                        sum_both(sealing->bytes + start, (size_t)(stop - start), crc32, crc64);
                else
                        *crc64 = sum_crc64(*crc64, sealing->bytes + start, (size_t)(stop - start));
                start = stop;
                if (!is_known)
                        continue;
                if (crc32)
                        *crc32 = sum_crc32_combine(*crc32, sum.crc32, sum.size);
                *crc64 = sum_crc64_combine(*crc64, sum.crc64, sum.size);
                start += sum.size;
                sealing->next_sum++;
        }
}

static void add_bytes_until(struct sealing *sealing, uint64_t end)
{
        while (sealing->offset < end) {
                uint64_t start = sealing->offset, border = next_border(sealing, start), stop = border < end ? border : end;
                uint64_t crc64 = sealing->crc64;

                if (!has_until(sealing, stop))
                        return;
                sum_range(sealing, start, stop, NULL, &crc64);
                if (advance(sealing, stop, crc64))
                        report(sealing, start / sealing->chunk_bytes * sealing->chunk_bytes, crc64);
        }
}

static void add_piece(struct sealing *sealing, const struct piece *piece)
{
        uint64_t crc64;

        add_bytes_until(sealing, piece->offset);
        crc64 = sum_crc64_combine(sealing->crc64, piece->crc64, piece->size);
        if (advance(sealing, piece->offset + piece->size, crc64) && piece->size < sealing->chunk_bytes)
                report(sealing, piece->offset / sealing->chunk_bytes * sealing->chunk_bytes, crc64); /* whole chunks were reported before */
}

/* Sums one payload, writes its CRC-32 into both headers, and continues the chunks to its end. */
static void seal_record(struct sealing *sealing, const struct zip_entry *entry)
{
        uint64_t offset = entry->payload_offset, end = offset + entry->size;
        size_t piece_count = 0;
        uint32_t crc32 = 0;

        while (offset < end) {
                uint64_t border = next_border(sealing, offset);
                struct piece piece = { .offset = offset, .size = (border < end ? border : end) - offset };

                if (!has_until(sealing, offset + piece.size))
                        return;
                if (piece.size < PIECE_MIN) {
                        crc32 = sum_crc32(crc32, sealing->bytes + offset, (size_t)piece.size);
                } else {
                        sum_range(sealing, offset, offset + piece.size, &crc32, &piece.crc64);
                        if (piece.size == sealing->chunk_bytes)
                                report(sealing, offset, piece.crc64);
                        sealing->pieces[piece_count++] = piece;
                }
                offset += piece.size;
        }
        zip_put32(sealing->bytes + entry->header_crc_offset, crc32);
        zip_put32(sealing->bytes + entry->directory_crc_offset, crc32);
        for (size_t k = 0; k < piece_count; k++)
                add_piece(sealing, &sealing->pieces[k]);
        add_bytes_until(sealing, end);
}

/* Refuses what cannot be sealed, before anything is written. */
static enum nebula_status check_entries(const struct zip_entry *entries, size_t count, struct nebula_error *error)
{
        for (size_t k = 0; k < count; k++) {
                if (entries[k].has_descriptor)
                        return error_set(error, NEBULA_INVALID, 0, "record \"%s\" has a data descriptor, so Nebula did not lay "
                                                                   "this image out and cannot seal it",
                                         entries[k].name);
        }
        return NEBULA_OK;
}

static enum nebula_status seal_records(struct sealing *sealing, struct nebula_error *error)
{
        struct zip_entry *entries;
        size_t count;
        enum nebula_status status = zip_read(sealing->bytes, sealing->size, &entries, &count, error);

        if (status != NEBULA_OK)
                return status;
        status = check_entries(entries, count, error);
        for (size_t k = 0; k < count && status == NEBULA_OK && !sealing->is_given_up; k++)
                seal_record(sealing, &entries[k]);
        free(entries);
        return status;
}

enum nebula_status image_seal(void *data, uint64_t size, bool is_zip, uint32_t chunk_bytes, uint64_t **ret_chunks,
                              size_t *ret_count, struct nebula_error *error)
{
        static const struct image_flow whole;

        return image_seal_flowing(data, size, is_zip, chunk_bytes, &whole, ret_chunks, ret_count, error);
}

enum nebula_status image_seal_flowing(void *data, uint64_t size, bool is_zip, uint32_t chunk_bytes, const struct image_flow *flow,
                                      uint64_t **ret_chunks, size_t *ret_count, struct nebula_error *error)
{
        struct sealing sealing = { .bytes = data, .size = size, .chunk_bytes = chunk_bytes, .flow = flow };
        enum nebula_status status = NEBULA_OK;
        size_t chunk_count;

        if (chunk_bytes == 0)
                return error_set(error, NEBULA_INVALID, 0, "a chunk of 0 bytes");
        chunk_count = (size_t)(size / chunk_bytes + (size % chunk_bytes != 0));
        sealing.chunks = calloc(chunk_count + 1, sizeof *sealing.chunks); /* + 1: calloc of 0 items may return NULL */
        sealing.pieces = calloc(chunk_count + 1, sizeof *sealing.pieces);
        if (!sealing.chunks || !sealing.pieces)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the checksums of %zu chunks", chunk_count);
        else if (is_zip && has_until(&sealing, 1))
                status = seal_records(&sealing, error);
        free(sealing.pieces);
        if (status == NEBULA_OK)
                add_bytes_until(&sealing, size); /* the directory of a zip; all of a raw file */
        if (status == NEBULA_OK && sealing.is_given_up)
                status = error_set(error, NEBULA_BUSY, 0, "the image is incomplete: its copy ended early");
        if (status != NEBULA_OK) {
                free(sealing.chunks);
                return status;
        }
        *ret_chunks = sealing.chunks;
        *ret_count = sealing.chunk_count;
        return NEBULA_OK;
}

enum nebula_status image_seal_rest(void *data, uint64_t size, struct nebula_error *error)
{
        uint8_t *bytes = data;
        struct zip_entry *entries;
        size_t count;
        enum nebula_status status = zip_read(data, size, &entries, &count, error);

        if (status)
                return status;
        for (size_t k = 0; k < count; k++) {
                const struct zip_entry *entry = &entries[k];
                uint32_t crc32;

                if ((entry->crc32 && entry->header_crc32) || entry->has_descriptor)
                        continue;
                crc32 = sum_crc32(0, bytes + entry->payload_offset, (size_t)entry->size);
                zip_put32(bytes + entry->header_crc_offset, crc32);
                zip_put32(bytes + entry->directory_crc_offset, crc32);
        }
        free(entries);
        return zip_verify(data, size, error);
}
