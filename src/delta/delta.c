#include "delta/delta.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "delta/delta_block.h"
#include "sum/sum.h"

#define MAGIC "NBDELTA1"
#define HEADER (8 + 5 * 8) /* magic, sum of all bytes after it, sum of the base, sum of the result, bytes of the state, parts */
#define SUMMED 16          /* bytes before those that the first sum covers */
#define PART (5 * 8)       /* offset, size, width, sum of the result, bytes of the encoding */

void delta_sums(const void *state, struct delta_part *parts, size_t count)
{
        for (size_t i = 0; i < count; i++)
                parts[i].sum = sum_crc64(0, (const uint8_t *)state + parts[i].offset, parts[i].size);
}

static void put_64(uint8_t *to, uint64_t value)
{
        for (int i = 0; i < 8; i++)
                to[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t get_64(const uint8_t *from)
{
        uint64_t value = 0;

        for (int i = 0; i < 8; i++)
                value |= (uint64_t)from[i] << 8 * i;
        return value;
}

uint64_t delta_state_sum(const struct delta_part *parts, size_t count)
{
        uint64_t sum = 0;
        uint8_t text[8];

        for (size_t i = 0; i < count; i++) {
                put_64(text, parts[i].sum);
                sum = sum_crc64(sum, text, sizeof text);
        }
        return sum;
}

static size_t next_block(const struct delta_part *part, uint64_t done)
{
        uint64_t left = (part->size - done) / part->width;

        return left < DELTA_BLOCK ? (size_t)left : DELTA_BLOCK;
}

/* Adds a part's encoding, and computes its new sum in the same pass. After `limit` bytes only the sum. */
static void make_part(const uint8_t *base, const uint8_t *next, struct delta_part *part, uint64_t limit, struct buf *out)
{
        uint8_t block[DELTA_BLOCK_MOST];

        part->sum = 0;
        for (uint64_t done = 0; done < part->size;) {
                size_t count = next_block(part, done), bytes = count * part->width;

                part->sum = sum_crc64(part->sum, next + part->offset + done, bytes);
                if (out->size <= limit)
                        buf_add(out, block, delta_block_make(base + part->offset + done, next + part->offset + done, count, part->width, block));
                done += bytes;
        }
}

static void write_header(uint8_t *header, uint64_t base_sum, uint64_t size, const struct delta_part *parts, const uint64_t *encoded, size_t count)
{
        memcpy(header, MAGIC, 8);
        put_64(header + 16, base_sum);
        put_64(header + 24, delta_state_sum(parts, count));
        put_64(header + 32, size);
        put_64(header + 40, count);
        for (size_t i = 0; i < count; i++) {
                uint8_t *at = header + HEADER + i * PART;

                put_64(at, parts[i].offset);
                put_64(at + 8, parts[i].size);
                put_64(at + 16, parts[i].width);
                put_64(at + 24, parts[i].sum);
                put_64(at + 32, encoded[i]);
        }
}

enum nebula_status delta_make(const void *base, const void *next, uint64_t size, struct delta_part *parts, size_t count, uint64_t limit,
                              void **ret_delta, size_t *ret_size, struct nebula_error *error)
{
        uint64_t base_sum = delta_state_sum(parts, count), *encoded = calloc(count + 1, sizeof *encoded);
        size_t header_size = HEADER + count * PART;
        uint8_t *header = calloc(1, header_size);
        struct buf out = { 0 };
        enum nebula_status status = NEBULA_OK;

        if (header)
                buf_add(&out, header, header_size);
        for (size_t i = 0; i < count && header && encoded; i++) {
                size_t before = out.size;

                make_part(base, next, &parts[i], limit, &out);
                encoded[i] = out.size - before;
        }
        if (!header || !encoded || out.failed) {
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a delta");
        } else if (out.size > limit) {
                *ret_delta = NULL;
                *ret_size = 0;
        } else {
                write_header((uint8_t *)out.data, base_sum, size, parts, encoded, count);
                put_64((uint8_t *)out.data + 8, sum_crc64(0, out.data + SUMMED, out.size - SUMMED));
                *ret_delta = buf_take(&out, ret_size);
                if (!*ret_delta)
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a delta");
        }
        buf_done(&out);
        free(encoded);
        free(header);
        return status;
}

/* Reads and checks the description of a part. */
static bool read_part(const uint8_t *at, uint64_t size, struct delta_part *ret_part, uint64_t *ret_encoded)
{
        uint64_t width = get_64(at + 16);

        *ret_part = (struct delta_part){ .offset = get_64(at), .size = get_64(at + 8), .width = (uint32_t)width, .sum = get_64(at + 24) };
        *ret_encoded = get_64(at + 32);
        return (width == 1 || width == 2 || width == 4) && ret_part->offset <= size && ret_part->size <= size - ret_part->offset &&
               ret_part->size % width == 0;
}

static bool apply_part(uint8_t *state, const struct delta_part *part, const uint8_t *in, const uint8_t *end)
{
        uint64_t sum = 0;

        for (uint64_t done = 0; done < part->size;) {
                size_t count = next_block(part, done), bytes = count * part->width;
                uint8_t *at = state + part->offset + done;

                if (!delta_block_apply(at, count, part->width, &in, end))
                        return false;
                sum = sum_crc64(sum, at, bytes);
                done += bytes;
        }
        return in == end && sum == part->sum;
}

enum nebula_status delta_apply(void *state, uint64_t size, uint64_t *sum, const void *delta, uint64_t delta_size, struct nebula_error *error)
{
        const uint8_t *header = delta, *end = header + delta_size, *in;
        uint64_t count, result = 0;

        if (delta_size < HEADER || memcmp(header, MAGIC, 8) != 0)
                return error_set(error, NEBULA_CORRUPT, 0, "these bytes are not a delta");
        if (get_64(header + 8) != sum_crc64(0, header + SUMMED, delta_size - SUMMED))
                return error_set(error, NEBULA_CORRUPT, 0, "the delta is damaged");
        count = get_64(header + 40);
        if (get_64(header + 16) != *sum || get_64(header + 32) != size)
                return error_set(error, NEBULA_INVALID, 0, "the delta starts from another state");
        if (count > (delta_size - HEADER) / PART)
                return error_set(error, NEBULA_CORRUPT, 0, "the delta is cut off");
        in = header + HEADER + count * PART;
        for (uint64_t i = 0; i < count; i++) {
                struct delta_part part;
                uint64_t encoded;
                uint8_t text[8];

                if (!read_part(header + HEADER + i * PART, size, &part, &encoded) || encoded > (uint64_t)(end - in) ||
                    !apply_part(state, &part, in, in + encoded))
                        return error_set(error, NEBULA_CORRUPT, 0, "part %" PRIu64 " of the state is damaged, or was so before the delta", i);
                in += encoded;
                put_64(text, part.sum);
                result = sum_crc64(result, text, sizeof text);
        }
        if (in != end || result != get_64(header + 24))
                return error_set(error, NEBULA_CORRUPT, 0, "the delta is damaged");
        *sum = result;
        return NEBULA_OK;
}
