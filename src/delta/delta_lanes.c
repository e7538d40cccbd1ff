#include "delta/delta_lanes.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

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

/* The XOR of two elements. The compiler makes a few instructions of it, for it knows the width. */
static inline void differ(const uint8_t *a, const uint8_t *b, uint8_t *out, uint32_t width)
{
        uint32_t x = 0, y = 0;

        memcpy(&x, a, width);
        memcpy(&y, b, width);
        x ^= y;
        memcpy(out, &x, width);
}

static inline size_t gather_of(const uint8_t *base, const uint8_t *next, size_t count, uint32_t width, uint64_t *bits, uint8_t *values)
{
        size_t n = 0;

        for (size_t i = 0; i < count; i += 64, bits++) {
                *bits = count - i < 64 ? compare_slowly(base + i * width, next + i * width, count - i, width) :
                                         compare_64(base + i * width, next + i * width, width);
                for (uint64_t left = *bits; left; left &= left - 1, n++) {
                        size_t at = (i + (size_t)__builtin_ctzll(left)) * width;

                        differ(base + at, next + at, values + n * width, width);
                }
        }
        return n;
}

static size_t gather(const uint8_t *base, const uint8_t *next, size_t count, uint32_t width, uint64_t *bits, uint8_t *values)
{
        return width == 1 ? gather_of(base, next, count, 1, bits, values) :
               width == 2 ? gather_of(base, next, count, 2, bits, values) :
                            gather_of(base, next, count, 4, bits, values);
}

static inline void spread_of(uint8_t *state, size_t count, uint32_t width, const uint64_t *bits, const uint8_t *values)
{
        for (size_t i = 0; i < count; i += 64, bits++)
                for (uint64_t left = *bits; left; left &= left - 1, values += width) {
                        uint8_t *at = state + (i + (size_t)__builtin_ctzll(left)) * width;

                        differ(at, values, at, width);
                }
}

static void spread(uint8_t *state, size_t count, uint32_t width, const uint64_t *bits, const uint8_t *values)
{
        if (width == 1)
                spread_of(state, count, 1, bits, values);
        else if (width == 2)
                spread_of(state, count, 2, bits, values);
        else
                spread_of(state, count, 4, bits, values);
}

static void split(const uint8_t *values, size_t count, uint32_t width, uint8_t *planes)
{
        for (uint32_t plane = 0; plane < width; plane++)
                for (size_t i = 0; i < count; i++)
                        planes[plane * DELTA_BLOCK + i] = values[i * width + plane];
}

static void join(const uint8_t *planes, size_t count, uint32_t width, uint8_t *values)
{
        for (uint32_t plane = 0; plane < width; plane++)
                for (size_t i = 0; i < count; i++)
                        values[i * width + plane] = planes[plane * DELTA_BLOCK + i];
}

static size_t pack(const uint8_t *bytes, size_t count, uint64_t *bits, uint8_t *out)
{
        size_t n = 0;

        memset(bits, 0, (count + 63) / 64 * sizeof *bits);
        for (size_t i = 0; i < count; i++) {
                bits[i / 64] |= (uint64_t)(bytes[i] != 0) << i % 64;
                out[n] = bytes[i];
                n += bytes[i] != 0;
        }
        return n;
}

static void unpack(const uint8_t *in, size_t count, const uint64_t *bits, uint8_t *bytes)
{
        memset(bytes, 0, count);
        for (size_t i = 0; i < count; i += 64)
                for (uint64_t left = bits[i / 64]; left; left &= left - 1)
                        bytes[i + (size_t)__builtin_ctzll(left)] = *in++;
}

const struct delta_lanes delta_portable = { gather, spread, split, join, pack, unpack };
