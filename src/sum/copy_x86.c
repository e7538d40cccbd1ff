/*
 * Copies with non-temporal stores: the destination is not read soon, so its
 * lines need neither be fetched before they are written nor push others out of the caches.
 */
#include "sum/sum_private.h"

#ifdef SUM_X86
#include <immintrin.h>
#include <string.h>

/* A shorter copy is over before streaming gains anything: its end waits for all stores. */
#define STREAM_MIN (8u << 10)

/* Copies what comes before the first 64-byte boundary of `to`; how much that was. */
static size_t copy_head(void *to, const void *from)
{
        size_t head = -(uintptr_t)to & 63;

        memcpy(to, from, head);
        return head;
}

void sum_copy_sse2(void *to_start, const void *from_start, size_t size)
{
        uint8_t *to = to_start;
        const uint8_t *from = from_start;
        size_t head;

        if (size < STREAM_MIN) {
                sum_portable.copy_stream(to, from, size);
                return;
        }
        head = copy_head(to, from);
        for (to += head, from += head, size -= head; size >= 64; to += 64, from += 64, size -= 64) {
                for (int k = 0; k < 4; k++)
                        _mm_stream_si128((__m128i *)(void *)to + k, _mm_loadu_si128((const __m128i *)(const void *)from + k));
        }
        _mm_sfence(); /* streamed stores are not ordered with those that tell others about them */
        memcpy(to, from, size);
}

__attribute__((target("avx2"))) void sum_copy_avx2(void *to_start, const void *from_start, size_t size)
{
        uint8_t *to = to_start;
        const uint8_t *from = from_start;
        size_t head;

        if (size < STREAM_MIN) {
                sum_portable.copy_stream(to, from, size);
                return;
        }
        head = copy_head(to, from);
        for (to += head, from += head, size -= head; size >= 128; to += 128, from += 128, size -= 128) {
                for (int k = 0; k < 4; k++)
                        _mm256_stream_si256((__m256i *)(void *)to + k,
                                            _mm256_loadu_si256((const __m256i *)(const void *)from + k));
        }
        _mm_sfence();
        memcpy(to, from, size);
}

__attribute__((target("avx512f"))) void sum_copy_avx512(void *to_start, const void *from_start, size_t size)
{
        uint8_t *to = to_start;
        const uint8_t *from = from_start;
        size_t head;

        if (size < STREAM_MIN) {
                sum_portable.copy_stream(to, from, size);
                return;
        }
        head = copy_head(to, from);
        for (to += head, from += head, size -= head; size >= 256; to += 256, from += 256, size -= 256) {
                for (int k = 0; k < 4; k++)
                        _mm512_stream_si512((__m512i *)(void *)(to + 64 * k), _mm512_loadu_si512(from + 64 * k));
        }
        _mm_sfence();
        memcpy(to, from, size);
}
#endif
