#include "delta/delta_block.h"

#include <string.h>

#include "delta/delta_lanes.h"

#define SKIP 255 /* a gap of so many elements without a change after them */

/* A block's encoding begins with its form. */
enum form {
        FORM_EQUAL,  /* nothing has changed */
        FORM_SPARSE, /* u16 changes, u16 bytes of gaps, gaps, then the XOR of each changed element */
        FORM_PLANES, /* a bit per element, then each byte of the elements' XOR as a plane */
        FORM_RAW,    /* the new values */
};
/* A plane has a byte for each changed element. It begins with its mode. */
enum plane {
        PLANE_ZERO,
        PLANE_FULL,   /* all bytes */
        PLANE_SPARSE, /* a bit per byte, then the bytes that are not 0 */
};

struct changes {
        uint64_t bits[DELTA_WORDS]; /* a bit per element */
        size_t count;
        uint8_t values[4 * DELTA_BLOCK + DELTA_SLACK]; /* the XOR of each changed element */
};

static size_t bytes_of_bits(size_t bits)
{
        return (bits + 7) / 8;
}

static const struct delta_lanes *best(void)
{
        const struct delta_lanes *lanes = delta_avx512();

        return lanes ? lanes : &delta_portable;
}

/* Writes how the changes lie. Returns the bytes of it. */
static size_t find_gaps(const struct changes *changes, size_t words, uint8_t *gaps)
{
        size_t used = 0, before = 0;

        for (size_t i = 0; i < words; i++)
                for (uint64_t bits = changes->bits[i]; bits; bits &= bits - 1) {
                        size_t at = i * 64 + (size_t)__builtin_ctzll(bits), gap = at - before;

                        for (; gap >= SKIP; gap -= SKIP)
                                gaps[used++] = SKIP;
                        gaps[used++] = (uint8_t)gap;
                        before = at + 1;
                }
        return used;
}

static enum plane choose_plane(size_t nonzero, size_t count)
{
        return !nonzero ? PLANE_ZERO : bytes_of_bits(count) + nonzero < count ? PLANE_SPARSE : PLANE_FULL;
}

static size_t plane_size(size_t nonzero, size_t count)
{
        enum plane mode = choose_plane(nonzero, count);

        return 1 + (mode == PLANE_FULL ? count : mode == PLANE_SPARSE ? bytes_of_bits(count) + nonzero : 0);
}

static uint8_t *put_16(uint8_t *out, size_t value)
{
        *out++ = (uint8_t)value;
        *out++ = (uint8_t)(value >> 8);
        return out;
}

static uint8_t *put_sparse(uint8_t *out, const struct changes *changes, const uint8_t *gaps, size_t gap_bytes, uint32_t width)
{
        out = put_16(put_16(out, changes->count), gap_bytes);
        memcpy(out, gaps, gap_bytes);
        memcpy(out + gap_bytes, changes->values, changes->count * width);
        return out + gap_bytes + changes->count * width;
}

static uint8_t *put_bits(uint8_t *out, const uint64_t *bits, size_t count)
{
        memcpy(out, bits, bytes_of_bits(count)); /* as everywhere, the machine is little-endian */
        return out + bytes_of_bits(count);
}

/* A plane, and its bytes that are not 0. */
struct plane_bytes {
        uint64_t bits[DELTA_WORDS];
        uint8_t packed[DELTA_BLOCK + DELTA_SLACK];
        size_t nonzero;
};

static uint8_t *put_plane(uint8_t *out, const uint8_t *bytes, const struct plane_bytes *plane, size_t count)
{
        enum plane mode = choose_plane(plane->nonzero, count);

        *out++ = (uint8_t)mode;
        if (mode == PLANE_FULL) {
                memcpy(out, bytes, count);
                return out + count;
        }
        if (mode == PLANE_ZERO)
                return out;
        out = put_bits(out, plane->bits, count);
        memcpy(out, plane->packed, plane->nonzero);
        return out + plane->nonzero;
}

/* Returns the end of the planes; NULL: they take as many bytes as the elements, or more. */
static uint8_t *put_planes(const struct delta_lanes *lanes, uint8_t *out, const struct changes *changes, size_t count, uint32_t width, size_t most)
{
        uint8_t planes[4 * DELTA_BLOCK + DELTA_SLACK];
        struct plane_bytes plane;
        size_t size = bytes_of_bits(count);
        uint8_t *end = put_bits(out, changes->bits, count);

        lanes->split(changes->values, changes->count, width, planes);
        for (uint32_t i = 0; i < width; i++) {
                plane.nonzero = lanes->pack(planes + i * DELTA_BLOCK, changes->count, plane.bits, plane.packed);
                size += plane_size(plane.nonzero, changes->count);
                if (size >= most)
                        return NULL;
                end = put_plane(end, planes + i * DELTA_BLOCK, &plane, changes->count);
        }
        return end;
}

size_t delta_block_make_with(const struct delta_lanes *lanes, const uint8_t *base, const uint8_t *next, size_t count, uint32_t width, uint8_t *out)
{
        uint8_t gaps[DELTA_BLOCK + DELTA_BLOCK / SKIP + 1], *end;
        size_t gap_bytes = 0, sparse = SIZE_MAX, most = count * width;
        struct changes changes;

        changes.count = lanes->gather(base, next, count, width, changes.bits, changes.values);
        if (!changes.count) {
                *out = FORM_EQUAL;
                return 1;
        }
        if (changes.count < bytes_of_bits(count)) { /* else a bit per element takes no more than the gaps */
                gap_bytes = find_gaps(&changes, (count + 63) / 64, gaps);
                sparse = 4 + gap_bytes + changes.count * width;
        }
        *out = FORM_PLANES;
        end = NULL;
        if (sparse > bytes_of_bits(count) + width + changes.count) /* planes have a byte for each change, or more */
                end = put_planes(lanes, out + 1, &changes, count, width, sparse < most ? sparse : most);
        if (!end && sparse < most) {
                *out = FORM_SPARSE;
                end = put_sparse(out + 1, &changes, gaps, gap_bytes, width);
        } else if (!end) {
                *out = FORM_RAW;
                memcpy(out + 1, next, most);
                end = out + 1 + most;
        }
        return (size_t)(end - out);
}

size_t delta_block_make(const uint8_t *base, const uint8_t *next, size_t count, uint32_t width, uint8_t *out)
{
        return delta_block_make_with(best(), base, next, count, width, out);
}

/* Takes `size` bytes; NULL: there are not so many. */
static const uint8_t *take(const uint8_t **in, const uint8_t *end, size_t size)
{
        const uint8_t *taken = *in;

        if ((size_t)(end - taken) < size)
                return NULL;
        *in += size;
        return taken;
}

static inline bool apply_gaps(uint8_t *state, size_t count, uint32_t width, const uint8_t *gaps, size_t gap_bytes, const uint8_t *values, size_t changes)
{
        size_t at = 0, n = 0;

        for (size_t i = 0; i < gap_bytes; i++) {
                at += gaps[i];
                if (gaps[i] == SKIP)
                        continue;
                if (at >= count || n == changes)
                        return false;
                for (uint32_t byte = 0; byte < width; byte++)
                        state[at * width + byte] ^= values[n * width + byte];
                at++;
                n++;
        }
        return n == changes;
}

static bool apply_sparse(uint8_t *state, size_t count, uint32_t width, const uint8_t **in, const uint8_t *end)
{
        const uint8_t *sizes = take(in, end, 4), *gaps, *values;
        size_t changes = sizes ? (size_t)sizes[0] | (size_t)sizes[1] << 8 : 0, gap_bytes = sizes ? (size_t)sizes[2] | (size_t)sizes[3] << 8 : 0;

        gaps = sizes ? take(in, end, gap_bytes) : NULL;
        values = gaps ? take(in, end, changes * width) : NULL;
        if (!values)
                return false;
        return width == 1 ? apply_gaps(state, count, 1, gaps, gap_bytes, values, changes) :
               width == 2 ? apply_gaps(state, count, 2, gaps, gap_bytes, values, changes) :
                            apply_gaps(state, count, 4, gaps, gap_bytes, values, changes);
}

/* Reads a bit for each of `count` elements. Returns how many are set; SIZE_MAX: they are damaged. */
static size_t take_bits(const uint8_t **in, const uint8_t *end, size_t count, uint64_t *bits)
{
        const uint8_t *from = take(in, end, bytes_of_bits(count));
        size_t set = 0;

        if (!from)
                return SIZE_MAX;
        memset(bits, 0, (count + 63) / 64 * sizeof *bits);
        memcpy(bits, from, bytes_of_bits(count));
        if (count % 64 && bits[count / 64] >> count % 64)
                return SIZE_MAX;
        for (size_t i = 0; i < (count + 63) / 64; i++)
                set += (size_t)__builtin_popcountll(bits[i]);
        return set;
}

/* Reads a plane of `count` bytes. */
static bool read_plane(const struct delta_lanes *lanes, uint8_t *bytes, size_t count, const uint8_t **in, const uint8_t *end)
{
        const uint8_t *mode = take(in, end, 1), *from;
        uint64_t bits[DELTA_WORDS];
        size_t nonzero;

        if (!mode || *mode > PLANE_SPARSE)
                return false;
        if (*mode == PLANE_ZERO) {
                memset(bytes, 0, count);
                return true;
        }
        nonzero = *mode == PLANE_SPARSE ? take_bits(in, end, count, bits) : count;
        from = nonzero == SIZE_MAX ? NULL : take(in, end, nonzero);
        if (!from)
                return false;
        if (*mode == PLANE_FULL)
                memcpy(bytes, from, count);
        else
                lanes->unpack(from, count, bits, bytes);
        return true;
}

static bool apply_planes(const struct delta_lanes *lanes, uint8_t *state, size_t count, uint32_t width, const uint8_t **in, const uint8_t *end)
{
        uint8_t planes[4 * DELTA_BLOCK + DELTA_SLACK], values[4 * DELTA_BLOCK + DELTA_SLACK];
        uint64_t bits[DELTA_WORDS];
        size_t changes = take_bits(in, end, count, bits);

        if (changes == SIZE_MAX)
                return false;
        for (uint32_t plane = 0; plane < width; plane++)
                if (!read_plane(lanes, planes + plane * DELTA_BLOCK, changes, in, end))
                        return false;
        lanes->join(planes, changes, width, values);
        lanes->spread(state, count, width, bits, values);
        return true;
}

bool delta_block_apply_with(const struct delta_lanes *lanes, uint8_t *state, size_t count, uint32_t width, const uint8_t **in, const uint8_t *end)
{
        const uint8_t *form = take(in, end, 1), *values;

        if (!form || *form > FORM_RAW)
                return false;
        if (*form == FORM_SPARSE)
                return apply_sparse(state, count, width, in, end);
        if (*form == FORM_PLANES)
                return apply_planes(lanes, state, count, width, in, end);
        values = *form == FORM_RAW ? take(in, end, count * width) : NULL;
        if (values)
                memcpy(state, values, count * width);
        return *form == FORM_EQUAL || values;
}

bool delta_block_apply(uint8_t *state, size_t count, uint32_t width, const uint8_t **in, const uint8_t *end)
{
        return delta_block_apply_with(best(), state, count, width, in, end);
}
