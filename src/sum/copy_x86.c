/*
 * Copies with non-temporal stores. The destination is not read soon, so its cache lines
 * need not be fetched before the write, and should not evict others.
 */
#include "sum/sum_private.h"

#ifdef SUM_X86
#include <immintrin.h>

/* Not memcpy: a sanitizer would check the ownership of the memory. */
SUM_ANY_MEMORY static void copy_64(uint8_t *to, const uint8_t *from)
{
        for (int k = 0; k < 4; k++)
                _mm_storeu_si128((__m128i *)(void *)to + k, _mm_loadu_si128((const __m128i *)(const void *)from + k));
}

SUM_ANY_MEMORY size_t sum_copy_head(uint8_t *to, const uint8_t *from)
{
        copy_64(to, from); /* the copy after the head writes some of these bytes again */
        return -(uintptr_t)to & 63;
}

/* Copies the last 64 bytes as one block; some of them were copied before. */
SUM_ANY_MEMORY void sum_copy_rest(uint8_t *to, const uint8_t *from, size_t size)
{
        for (; size > 64; to += 64, from += 64, size -= 64)
                copy_64(to, from);
        copy_64(to + size - 64, from + size - 64);
}

SUM_ANY_MEMORY void sum_copy_sse2(void *to_start, const void *from_start, size_t size)
{
        uint8_t *to = to_start;
        const uint8_t *from = from_start;
        size_t head;

        if (size < SUM_STREAM_MIN) {
                sum_portable.copy_stream(to, from, size);
                return;
        }
        head = sum_copy_head(to, from);
        for (to += head, from += head, size -= head; size >= 64; to += 64, from += 64, size -= 64) {
                for (int k = 0; k < 4; k++)
                        _mm_stream_si128((__m128i *)(void *)to + k, _mm_loadu_si128((const __m128i *)(const void *)from + k));
        }
        _mm_sfence(); /* streaming stores are not ordered with later ordinary stores that publish the data */
        sum_copy_rest(to, from, size);
}

SUM_ANY_MEMORY __attribute__((target("avx2"))) void sum_copy_avx2(void *to_start, const void *from_start, size_t size)
{
        uint8_t *to = to_start;
        const uint8_t *from = from_start;
        size_t head;

        if (size < SUM_STREAM_MIN) {
                sum_portable.copy_stream(to, from, size);
                return;
        }
        head = sum_copy_head(to, from);
        for (to += head, from += head, size -= head; size >= 128; to += 128, from += 128, size -= 128) {
                for (int k = 0; k < 4; k++)
                        _mm256_stream_si256((__m256i *)(void *)to + k,
                                            _mm256_loadu_si256((const __m256i *)(const void *)from + k));
        }
        _mm_sfence();
        sum_copy_rest(to, from, size);
}

SUM_ANY_MEMORY __attribute__((target("avx512f"))) void sum_copy_avx512(void *to_start, const void *from_start, size_t size)
{
        uint8_t *to = to_start;
        const uint8_t *from = from_start;
        size_t head;

        if (size < SUM_STREAM_MIN) {
                sum_portable.copy_stream(to, from, size);
                return;
        }
        head = sum_copy_head(to, from);
        for (to += head, from += head, size -= head; size >= 256; to += 256, from += 256, size -= 256) {
                for (int k = 0; k < 4; k++)
                        _mm512_stream_si512((__m512i *)(void *)(to + 64 * k), _mm512_loadu_si512(from + 64 * k));
        }
        _mm_sfence();
        sum_copy_rest(to, from, size);
}
#endif
