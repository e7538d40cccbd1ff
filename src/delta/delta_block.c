#include "delta/delta_block.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define WORDS (DELTA_BLOCK / 64)
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
        uint64_t bits[WORDS]; /* a bit per element */
        size_t count;
};

static size_t bytes_of_bits(size_t bits)
{
        return (bits + 7) / 8;
}

static uint64_t compare_slowly(const uint8_t *a, const uint8_t *b, size_t count, uint32_t width)
{
        uint64_t bits = 0;

        for (size_t i = 0; i < count; i++)
                bits |= (uint64_t)(memcmp(a + i * width, b + i * width, width) != 0) << i;
        return bits;
}

#ifdef __SSE2__
static __m128i load(const uint8_t *at)
{
        return _mm_loadu_si128((const __m128i *)at);
}

/* The comparison of 16 elements of two bytes, a byte each. */
static __m128i equal_16(const uint8_t *a, const uint8_t *b)
{
        return _mm_packs_epi16(_mm_cmpeq_epi16(load(a), load(b)), _mm_cmpeq_epi16(load(a + 16), load(b + 16)));
}

static __m128i equal_32(const uint8_t *a, const uint8_t *b)
{
        return _mm_packs_epi16(_mm_packs_epi32(_mm_cmpeq_epi32(load(a), load(b)), _mm_cmpeq_epi32(load(a + 16), load(b + 16))),
                               _mm_packs_epi32(_mm_cmpeq_epi32(load(a + 32), load(b + 32)), _mm_cmpeq_epi32(load(a + 48), load(b + 48))));
}

/* A bit for each of 64 elements, set if it has changed. */
static uint64_t compare_64(const uint8_t *a, const uint8_t *b, uint32_t width)
{
        uint64_t equal = 0;

        for (int i = 0; i < 4; i++) {
                size_t at = (size_t)i * 16 * width;
                __m128i same = width == 1 ? _mm_cmpeq_epi8(load(a + at), load(b + at)) : width == 2 ? equal_16(a + at, b + at) : equal_32(a + at, b + at);

                equal |= (uint64_t)(uint32_t)_mm_movemask_epi8(same) << (i * 16);
        }
        return ~equal;
}
#else
static uint64_t compare_64(const uint8_t *a, const uint8_t *b, uint32_t width)
{
        return memcmp(a, b, 64 * width) ? compare_slowly(a, b, 64, width) : 0;
}
#endif

static void find_changes(const uint8_t *base, const uint8_t *next, size_t count, uint32_t width, struct changes *changes)
{
        size_t whole = count / 64, rest = count % 64;

        memset(changes, 0, sizeof *changes);
        for (size_t i = 0; i < whole; i++)
                changes->bits[i] = compare_64(base + i * 64 * width, next + i * 64 * width, width);
        if (rest)
                changes->bits[whole] = compare_slowly(base + whole * 64 * width, next + whole * 64 * width, rest, width);
        for (size_t i = 0; i < whole + (rest != 0); i++)
                changes->count += (size_t)__builtin_popcountll(changes->bits[i]);
}

/* The XOR of each changed element, one plane of bytes after the other. Returns in `gaps` how the changes lie. */
static size_t gather(const uint8_t *base, const uint8_t *next, uint32_t width, const struct changes *changes, uint8_t *planes, uint8_t *gaps)
{
        size_t used = 0, before = 0, n = 0;

        for (size_t i = 0; i < WORDS; i++)
                for (uint64_t bits = changes->bits[i]; bits; bits &= bits - 1, n++) {
                        size_t at = i * 64 + (size_t)__builtin_ctzll(bits), gap = at - before;

                        for (; gap >= SKIP; gap -= SKIP)
                                gaps[used++] = SKIP;
                        gaps[used++] = (uint8_t)gap;
                        before = at + 1;
                        for (uint32_t plane = 0; plane < width; plane++)
                                planes[plane * DELTA_BLOCK + n] = base[at * width + plane] ^ next[at * width + plane];
                }
        return used;
}

static size_t count_nonzero(const uint8_t *bytes, size_t count)
{
        size_t result = 0;

        for (size_t i = 0; i < count; i++)
                result += bytes[i] != 0;
        return result;
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

static uint8_t *put_sparse(uint8_t *out, const uint8_t *planes, const uint8_t *gaps, size_t gap_bytes, size_t count, uint32_t width)
{
        out = put_16(put_16(out, count), gap_bytes);
        memcpy(out, gaps, gap_bytes);
        out += gap_bytes;
        for (size_t i = 0; i < count; i++)
                for (uint32_t plane = 0; plane < width; plane++)
                        *out++ = planes[plane * DELTA_BLOCK + i];
        return out;
}

static uint8_t *put_plane(uint8_t *out, const uint8_t *bytes, size_t nonzero, size_t count)
{
        enum plane mode = choose_plane(nonzero, count);
        uint8_t *bits;

        *out++ = (uint8_t)mode;
        if (mode == PLANE_FULL) {
                memcpy(out, bytes, count);
                return out + count;
        }
        if (mode == PLANE_ZERO)
                return out;
        bits = out;
        out += bytes_of_bits(count);
        memset(bits, 0, bytes_of_bits(count));
        for (size_t i = 0; i < count; i++)
                if (bytes[i]) {
                        bits[i / 8] |= (uint8_t)(1 << i % 8);
                        *out++ = bytes[i];
                }
        return out;
}

static uint8_t *put_planes(uint8_t *out, const struct changes *changes, const uint8_t *planes, const size_t *nonzero, size_t count, uint32_t width)
{
        for (size_t i = 0; i < bytes_of_bits(count); i++)
                *out++ = (uint8_t)(changes->bits[i / 8] >> i % 8 * 8);
        for (uint32_t plane = 0; plane < width; plane++)
                out = put_plane(out, planes + plane * DELTA_BLOCK, nonzero[plane], changes->count);
        return out;
}

size_t delta_block_make(const uint8_t *base, const uint8_t *next, size_t count, uint32_t width, uint8_t *out)
{
        uint8_t planes[4 * DELTA_BLOCK], gaps[DELTA_BLOCK + DELTA_BLOCK / SKIP + 1], *at = out + 1;
        size_t nonzero[4], gap_bytes, sparse, full = bytes_of_bits(count);
        struct changes changes;

        find_changes(base, next, count, width, &changes);
        if (!changes.count) {
                *out = FORM_EQUAL;
                return 1;
        }
        gap_bytes = gather(base, next, width, &changes, planes, gaps);
        for (uint32_t plane = 0; plane < width; plane++) {
                nonzero[plane] = count_nonzero(planes + plane * DELTA_BLOCK, changes.count);
                full += plane_size(nonzero[plane], changes.count);
        }
        sparse = 4 + gap_bytes + changes.count * width;
        if (sparse <= full && sparse < count * width) {
                *out = FORM_SPARSE;
                at = put_sparse(at, planes, gaps, gap_bytes, changes.count, width);
        } else if (full < count * width) {
                *out = FORM_PLANES;
                at = put_planes(at, &changes, planes, nonzero, count, width);
        } else {
                *out = FORM_RAW;
                memcpy(at, next, count * width);
                at += count * width;
        }
        return (size_t)(at - out);
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

static bool apply_sparse(uint8_t *state, size_t count, uint32_t width, const uint8_t **in, const uint8_t *end)
{
        const uint8_t *sizes = take(in, end, 4), *gaps, *values;
        size_t changes = sizes ? (size_t)sizes[0] | (size_t)sizes[1] << 8 : 0, gap_bytes = sizes ? (size_t)sizes[2] | (size_t)sizes[3] << 8 : 0;
        size_t at = 0, n = 0;

        gaps = sizes ? take(in, end, gap_bytes) : NULL;
        values = gaps ? take(in, end, changes * width) : NULL;
        if (!values)
                return false;
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

/* Reads a plane of `count` bytes. */
static bool read_plane(uint8_t *bytes, size_t count, const uint8_t **in, const uint8_t *end)
{
        const uint8_t *mode = take(in, end, 1), *from;
        size_t nonzero = 0;

        if (!mode || *mode > PLANE_SPARSE)
                return false;
        memset(bytes, 0, count);
        if (*mode == PLANE_ZERO)
                return true;
        from = take(in, end, *mode == PLANE_FULL ? count : bytes_of_bits(count));
        if (!from)
                return false;
        if (*mode == PLANE_FULL) {
                memcpy(bytes, from, count);
                return true;
        }
        for (size_t i = 0; i < count; i++) {
                if (!(from[i / 8] >> i % 8 & 1))
                        continue;
                if ((size_t)(end - *in) <= nonzero)
                        return false;
                bytes[i] = (*in)[nonzero++];
        }
        *in += nonzero;
        return true;
}

static bool apply_planes(uint8_t *state, size_t count, uint32_t width, const uint8_t **in, const uint8_t *end)
{
        uint8_t planes[4 * DELTA_BLOCK];
        const uint8_t *bits = take(in, end, bytes_of_bits(count));
        size_t changes = 0, n = 0;

        if (!bits || (count % 8 && bits[count / 8] >> count % 8))
                return false;
        for (size_t i = 0; i < bytes_of_bits(count); i++)
                changes += (size_t)__builtin_popcount(bits[i]);
        for (uint32_t plane = 0; plane < width; plane++)
                if (!read_plane(planes + plane * DELTA_BLOCK, changes, in, end))
                        return false;
        for (size_t i = 0; i < bytes_of_bits(count); i++)
                for (unsigned rest = bits[i]; rest; rest &= rest - 1, n++) {
                        uint8_t *element = state + (i * 8 + (size_t)__builtin_ctz(rest)) * width;

                        for (uint32_t plane = 0; plane < width; plane++)
                                element[plane] ^= planes[plane * DELTA_BLOCK + n];
                }
        return true;
}

bool delta_block_apply(uint8_t *state, size_t count, uint32_t width, const uint8_t **in, const uint8_t *end)
{
        const uint8_t *form = take(in, end, 1), *values;

        if (!form || *form > FORM_RAW)
                return false;
        if (*form == FORM_SPARSE)
                return apply_sparse(state, count, width, in, end);
        if (*form == FORM_PLANES)
                return apply_planes(state, count, width, in, end);
        values = *form == FORM_RAW ? take(in, end, count * width) : NULL;
        if (values)
                memcpy(state, values, count * width);
        return *form == FORM_EQUAL || values;
}
