#include "delta/delta.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "delta/delta_block.h"
#include "os/os.h"
#include "os/thread.h"
#include "sum/sum.h"

#define MAGIC "NBDELTA1"
#define HEADER (8 + 5 * 8) /* magic, sum of all bytes after it, sum of the base, sum of the result, bytes of the state, parts */
#define SUMMED 16          /* bytes before those that the first sum covers */
#define PART (5 * 8)       /* offset, size, width, sum of the result, bytes of the encoding */
#define AT_ONCE 16         /* deltas that one pass over the state applies */

/* Parts that threads take one after the other. */
struct lanes {
        void (*work)(void *argument, size_t part);
        void *argument;
        size_t count;
        atomic_size_t next;
};

static void *lane(void *argument)
{
        struct lanes *lanes = argument;

        for (size_t part; (part = atomic_fetch_add(&lanes->next, 1)) < lanes->count;)
                lanes->work(lanes->argument, part);
        return NULL;
}

static void each_part(size_t count, void (*work)(void *argument, size_t part), void *argument)
{
        struct lanes lanes = { .work = work, .argument = argument, .count = count };
        pthread_t threads[DELTA_THREADS];
        size_t started = 0, wanted = os->cpu_count();

        while (started + 1 < wanted && started + 1 < count && started < DELTA_THREADS - 1 &&
               !os_thread_start(&threads[started], lane, &lanes, false))
                started++;
        (void)lane(&lanes);
        for (size_t i = 0; i < started; i++)
                pthread_join(threads[i], NULL);
}

void delta_sums(const void *state, struct delta_part *parts, size_t count)
{
        for (size_t i = 0; i < count; i++)
                parts[i].sum = sum_crc64(0, (const uint8_t *)state + parts[i].from, parts[i].size);
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

struct make {
        const uint8_t *base, *next;
        struct delta_part *parts;
        struct buf *encoded; /* one for each part */
        uint64_t limit;
        _Atomic uint64_t size; /* of all encodings */
};

/* Encodes a part, and computes its new sum in the same pass. After `limit` bytes only the sum. */
static void make_part(void *argument, size_t index)
{
        struct make *make = argument;
        struct delta_part *part = &make->parts[index];
        const uint8_t *base = make->base + part->from, *next = make->next + part->from;
        uint8_t block[DELTA_BLOCK_MOST];

        part->sum = 0;
        for (uint64_t done = 0; done < part->size;) {
                size_t count = next_block(part, done), bytes = count * part->width, used;

                part->sum = sum_crc64(part->sum, next + done, bytes);
                if (atomic_load_explicit(&make->size, memory_order_relaxed) <= make->limit) {
                        used = delta_block_make(base + done, next + done, count, part->width, block);
                        buf_add(&make->encoded[index], block, used);
                        atomic_fetch_add_explicit(&make->size, used, memory_order_relaxed);
                }
                done += bytes;
        }
}

static void write_header(uint8_t *header, uint64_t base_sum, uint64_t size, const struct delta_part *parts, const struct buf *encoded,
                         size_t count)
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
                put_64(at + 32, encoded[i].size);
        }
}

/* The delta of the encodings. */
static enum nebula_status put_together(const struct make *make, uint64_t base_sum, uint64_t size, size_t count, void **ret_delta, size_t *ret_size,
                                       struct nebula_error *error)
{
        size_t at = HEADER + count * PART;
        uint8_t *delta = malloc(make->size);
        bool failed = !delta;

        for (size_t i = 0; i < count; i++)
                failed = failed || make->encoded[i].failed;
        if (failed) {
                free(delta);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a delta");
        }
        write_header(delta, base_sum, size, make->parts, make->encoded, count);
        for (size_t i = 0; i < count; i++) {
                if (make->encoded[i].size)
                        memcpy(delta + at, make->encoded[i].data, make->encoded[i].size);
                at += make->encoded[i].size;
        }
        put_64(delta + 8, sum_crc64(0, delta + SUMMED, at - SUMMED));
        *ret_delta = delta;
        *ret_size = at;
        return NEBULA_OK;
}

enum nebula_status delta_make(const void *base, const void *next, uint64_t size, struct delta_part *parts, size_t count, uint64_t limit,
                              void **ret_delta, size_t *ret_size, struct nebula_error *error)
{
        struct make make = { .base = base, .next = next, .parts = parts, .limit = limit, .size = HEADER + count * PART };
        uint64_t base_sum = delta_state_sum(parts, count);
        enum nebula_status status = NEBULA_OK;

        make.encoded = calloc(count + 1, sizeof *make.encoded);
        *ret_delta = NULL;
        *ret_size = 0;
        if (!make.encoded)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a delta");
        each_part(count, make_part, &make);
        if (make.size <= limit)
                status = put_together(&make, base_sum, size, count, ret_delta, ret_size, error);
        for (size_t i = 0; i < count; i++)
                buf_done(&make.encoded[i]);
        free(make.encoded);
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

/* Deltas that one pass applies. */
struct apply {
        uint8_t *state;
        const struct delta_bytes *deltas;
        size_t count;
        const uint64_t *offsets; /* of each part's encoding, for each delta */
        uint64_t size;
        _Atomic size_t damaged; /* a part that is wrong, plus 1; 0: none */
};

static const uint8_t *encoding_of(const struct apply *apply, size_t delta, size_t part, const uint8_t **ret_end)
{
        const uint8_t *data = apply->deltas[delta].data;
        const uint64_t *offsets = apply->offsets + part * apply->count + delta;

        *ret_end = data + offsets[apply->count];
        return data + *offsets;
}

static void apply_part(void *argument, size_t index)
{
        struct apply *apply = argument;
        const uint8_t *in[AT_ONCE], *end[AT_ONCE];
        const uint8_t *last = (const uint8_t *)apply->deltas[apply->count - 1].data + HEADER + index * PART;
        struct delta_part part;
        uint64_t sum = 0, encoded;
        bool is_right = read_part(last, apply->size, &part, &encoded);

        for (size_t i = 0; i < apply->count; i++)
                in[i] = encoding_of(apply, i, index, &end[i]);
        for (uint64_t done = 0; done < part.size && is_right;) {
                size_t count = next_block(&part, done), bytes = count * part.width;
                uint8_t *at = apply->state + part.offset + done;

                for (size_t i = 0; i < apply->count && is_right; i++)
                        is_right = delta_block_apply(at, count, part.width, &in[i], end[i]);
                sum = sum_crc64(sum, at, bytes);
                done += bytes;
        }
        for (size_t i = 0; i < apply->count; i++)
                is_right = is_right && in[i] == end[i];
        if (!is_right || sum != part.sum)
                atomic_store(&apply->damaged, index + 1);
}

/* Checks the description of part `index` of delta `i`, and computes where its encoding ends. */
static bool find_encoding(const struct delta_bytes *deltas, size_t count, size_t i, size_t index, uint64_t size, uint64_t *offsets)
{
        const uint8_t *at = (const uint8_t *)deltas[i].data + HEADER + index * PART;
        struct delta_part part;
        uint64_t encoded, begin = offsets[index * count + i];

        /* offset, size and width are those of the first delta: one pass goes over the parts of all */
        if (!read_part(at, size, &part, &encoded) || encoded > deltas[i].size - begin ||
            memcmp(at, (const uint8_t *)deltas[0].data + HEADER + index * PART, 24) != 0)
                return false;
        if (index && part.offset < get_64(at - PART) + get_64(at - PART + 8)) /* another thread has the part before */
                return false;
        offsets[(index + 1) * count + i] = begin + encoded;
        return true;
}

/* Checks a delta whose state before has the sum *sum, and then sets that of the state after it. */
static enum nebula_status check_delta(const struct delta_bytes *delta, uint64_t size, uint64_t *sum, struct nebula_error *error)
{
        const uint8_t *header = delta->data;
        uint64_t count, result = 0;

        if (delta->size < HEADER || memcmp(header, MAGIC, 8) != 0)
                return error_set(error, NEBULA_CORRUPT, 0, "these bytes are not a delta");
        if (get_64(header + 8) != sum_crc64(0, header + SUMMED, delta->size - SUMMED))
                return error_set(error, NEBULA_CORRUPT, 0, "the delta is damaged");
        if (get_64(header + 16) != *sum || get_64(header + 32) != size)
                return error_set(error, NEBULA_INVALID, 0, "the delta starts from another state");
        count = get_64(header + 40);
        if (count > (delta->size - HEADER) / PART)
                return error_set(error, NEBULA_CORRUPT, 0, "the delta is cut off");
        for (uint64_t i = 0; i < count; i++)
                result = sum_crc64(result, header + HEADER + i * PART + 24, 8);
        if (result != get_64(header + 24))
                return error_set(error, NEBULA_CORRUPT, 0, "the delta is damaged");
        *sum = result;
        return NEBULA_OK;
}

/* Applies at most AT_ONCE deltas. */
static enum nebula_status apply_some(struct apply *apply, uint64_t *sum, struct nebula_error *error)
{
        uint64_t after = *sum, parts = 0, *offsets;
        enum nebula_status status = NEBULA_OK;
        bool fits = true;

        for (size_t i = 0; i < apply->count && !status; i++)
                status = check_delta(&apply->deltas[i], apply->size, &after, error);
        if (status)
                return status;
        parts = get_64((const uint8_t *)apply->deltas[0].data + 40);
        offsets = calloc((parts + 1) * apply->count, sizeof *offsets);
        if (!offsets)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %" PRIu64 " parts of a delta", parts);
        for (size_t i = 0; i < apply->count && fits; i++) {
                fits = get_64((const uint8_t *)apply->deltas[i].data + 40) == parts;
                offsets[i] = HEADER + parts * PART;
                for (uint64_t index = 0; index < parts && fits; index++)
                        fits = find_encoding(apply->deltas, apply->count, i, index, apply->size, offsets);
                fits = fits && offsets[parts * apply->count + i] == apply->deltas[i].size;
        }
        apply->offsets = offsets;
        if (fits)
                each_part(parts, apply_part, apply);
        free(offsets);
        if (!fits)
                return error_set(error, NEBULA_CORRUPT, 0, "the delta is damaged");
        if (apply->damaged)
                return error_set(error, NEBULA_CORRUPT, 0, "part %zu of the state is damaged, or was so before the delta", apply->damaged - 1);
        *sum = after;
        return NEBULA_OK;
}

enum nebula_status delta_apply(void *state, uint64_t size, uint64_t *sum, const struct delta_bytes *deltas, size_t count, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t done = 0; done < count && !status; done += AT_ONCE) {
                struct apply apply = { .state = state, .size = size, .deltas = deltas + done, .count = count - done < AT_ONCE ? count - done : AT_ONCE };

                status = apply_some(&apply, sum, error);
                if (status == NEBULA_INVALID && done)
                        status = error_set(error, NEBULA_CORRUPT, 0, "a delta does not start from the state that the one before it makes");
        }
        return status;
}
