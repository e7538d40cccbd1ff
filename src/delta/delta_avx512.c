/* The loops with AVX-512: VBMI2 moves the elements that a mask names together, and apart. */
#include "delta/delta_lanes.h"

#ifdef __x86_64__
#include <immintrin.h>

#include "sum/cpu.h"

#define TARGET __attribute__((target("avx512f,avx512vl,avx512bw,avx512vbmi2,popcnt")))

TARGET static inline __m512i load(const void *from)
{
        return _mm512_loadu_si512(from);
}

TARGET static inline size_t ones(uint64_t bits)
{
        return (size_t)_mm_popcnt_u64(bits);
}

/* The elements of `width` bytes of a vector that differ from 0. */
TARGET static inline uint64_t changed(__m512i difference, uint32_t width)
{
        return width == 1 ? _mm512_test_epi8_mask(difference, difference) :
               width == 2 ? _mm512_test_epi16_mask(difference, difference) :
                            _mm512_test_epi32_mask(difference, difference);
}

TARGET static inline __m512i together(uint64_t mask, __m512i value, uint32_t width)
{
        return width == 1 ? _mm512_maskz_compress_epi8(mask, value) :
               width == 2 ? _mm512_maskz_compress_epi16((__mmask32)mask, value) :
                            _mm512_maskz_compress_epi32((__mmask16)mask, value);
}

TARGET static inline __m512i apart(uint64_t mask, __m512i value, uint32_t width)
{
        return width == 1 ? _mm512_maskz_expand_epi8(mask, value) :
               width == 2 ? _mm512_maskz_expand_epi16((__mmask32)mask, value) :
                            _mm512_maskz_expand_epi32((__mmask16)mask, value);
}

/* Whole words of 64 elements. Returns how many elements have changed. */
TARGET static inline size_t gather_words(const uint8_t *base, const uint8_t *next, size_t words, uint32_t width, uint64_t *bits, uint8_t *values)
{
        const uint32_t lanes = 64 / width;
        size_t n = 0;

        for (size_t i = 0; i < words; i++) {
                bits[i] = 0;
                for (uint32_t part = 0; part < width; part++) {
                        __m512i difference = _mm512_xor_si512(load(base), load(next));
                        uint64_t mask = changed(difference, width);

                        base += 64;
                        next += 64;
                        _mm512_storeu_si512(values + n * width, together(mask, difference, width));
                        bits[i] |= mask << part * lanes % 64;
                        n += ones(mask);
                }
        }
        return n;
}

TARGET static size_t gather(const uint8_t *base, const uint8_t *next, size_t count, uint32_t width, uint64_t *bits, uint8_t *values)
{
        size_t words = count / 64, at = words * 64 * width;
        size_t n = width == 1 ? gather_words(base, next, words, 1, bits, values) :
                   width == 2 ? gather_words(base, next, words, 2, bits, values) :
                                gather_words(base, next, words, 4, bits, values);

        if (count % 64)
                n += delta_portable.gather(base + at, next + at, count % 64, width, bits + words, values + n * width);
        return n;
}

TARGET static inline size_t spread_words(uint8_t *state, size_t words, uint32_t width, const uint64_t *bits, const uint8_t *values)
{
        const uint32_t lanes = 64 / width;
        const uint64_t all = width == 1 ? ~UINT64_C(0) : (UINT64_C(1) << lanes % 64) - 1;
        size_t n = 0;

        for (size_t i = 0; i < words; i++)
                for (uint32_t part = 0; part < width; part++, state += 64) {
                        uint64_t mask = bits[i] >> part * lanes % 64 & all;

                        if (!mask)
                                continue;
                        _mm512_storeu_si512(state, _mm512_xor_si512(load(state), apart(mask, load(values + n * width), width)));
                        n += ones(mask);
                }
        return n;
}

TARGET static void spread(uint8_t *state, size_t count, uint32_t width, const uint64_t *bits, const uint8_t *values)
{
        size_t words = count / 64;
        size_t n = width == 1 ? spread_words(state, words, 1, bits, values) :
                   width == 2 ? spread_words(state, words, 2, bits, values) :
                                spread_words(state, words, 4, bits, values);

        if (count % 64)
                delta_portable.spread(state + words * 64 * width, count % 64, width, bits + words, values + n * width);
}

TARGET static void split(const uint8_t *values, size_t count, uint32_t width, uint8_t *planes)
{
        if (width == 2) {
                for (size_t i = 0; i < count; i += 32) {
                        __m512i both = load(values + 2 * i);

                        _mm256_storeu_si256((void *)(planes + i), _mm512_cvtepi16_epi8(both));
                        _mm256_storeu_si256((void *)(planes + DELTA_BLOCK + i), _mm512_cvtepi16_epi8(_mm512_srli_epi16(both, 8)));
                }
                return;
        }
        delta_portable.split(values, count, width, planes);
}

TARGET static void join(const uint8_t *planes, size_t count, uint32_t width, uint8_t *values)
{
        if (width == 2) {
                for (size_t i = 0; i < count; i += 32) {
                        __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(planes + i)));
                        __m512i high = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(planes + DELTA_BLOCK + i)));

                        _mm512_storeu_si512(values + 2 * i, _mm512_or_si512(low, _mm512_slli_epi16(high, 8)));
                }
                return;
        }
        delta_portable.join(planes, count, width, values);
}

TARGET static size_t pack(const uint8_t *bytes, size_t count, uint64_t *bits, uint8_t *out)
{
        size_t n = 0;

        for (size_t i = 0; i < count; i += 64) {
                uint64_t left = count - i < 64 ? (UINT64_C(1) << (count - i)) - 1 : ~UINT64_C(0);
                __m512i value = load(bytes + i);
                uint64_t mask = _mm512_mask_test_epi8_mask(left, value, value);

                bits[i / 64] = mask;
                _mm512_storeu_si512(out + n, _mm512_maskz_compress_epi8(mask, value));
                n += ones(mask);
        }
        return n;
}

TARGET static void unpack(const uint8_t *in, size_t count, const uint64_t *bits, uint8_t *bytes)
{
        for (size_t i = 0; i < count; i += 64) {
                uint64_t mask = bits[i / 64];

                _mm512_storeu_si512(bytes + i, _mm512_maskz_expandloadu_epi8(mask, in)); /* reads as many bytes as the mask has ones */
                in += ones(mask);
        }
}

static const struct delta_lanes lanes = { gather, spread, split, join, pack, unpack };

const struct delta_lanes *delta_avx512(void)
{
        return cpu_has(CPU_AVX512F | CPU_AVX512VL | CPU_AVX512BW | CPU_AVX512VBMI2) ? &lanes : NULL;
}
#else
const struct delta_lanes *delta_avx512(void)
{
        return NULL;
}
#endif
