/*
 * Copies with non-temporal stores: the destination is not read soon, so its
 * lines need neither be fetched before they are written nor push others out of the caches.
 */
#include "sum/sum_private.h"

#ifdef SUM_X86
#include <immintrin.h>

/* A shorter copy is over before streaming gains anything: its end waits for all stores. */
#define STREAM_MIN (8u << 10)

/* What is copied may be the program's to free and to change: os->copy_guarded. */
#define ANY_MEMORY __attribute__((no_sanitize_address, no_sanitize_thread))

/* Not by memcpy: a sanitizer would look at whose memory it is. */
ANY_MEMORY static void copy_64(uint8_t *to, const uint8_t *from)
{
        for (int k = 0; k < 4; k++)
                _mm_storeu_si128((__m128i *)(void *)to + k, _mm_loadu_si128((const __m128i *)(const void *)from + k));
}

/* How much comes before the first 64-byte boundary of `to`. */
static size_t head_of(const uint8_t *to)
{
        return -(uintptr_t)to & 63;
}

/* What is left of a longer copy; some of the last 64 bytes again. */
ANY_MEMORY static void copy_rest(uint8_t *to, const uint8_t *from, size_t size)
{
        for (; size > 64; to += 64, from += 64, size -= 64)
                copy_64(to, from);
        copy_64(to + size - 64, from + size - 64);
}

ANY_MEMORY void sum_copy_sse2(void *to_start, const void *from_start, size_t size)
{
        uint8_t *to = to_start;
        const uint8_t *from = from_start;
        size_t head;

        if (size < STREAM_MIN) {
                sum_portable.copy_stream(to, from, size);
                return;
        }
        copy_64(to, from); /* some of it again below */
        head = head_of(to);
        for (to += head, from += head, size -= head; size >= 64; to += 64, from += 64, size -= 64) {
                for (int k = 0; k < 4; k++)
                        _mm_stream_si128((__m128i *)(void *)to + k, _mm_loadu_si128((const __m128i *)(const void *)from + k));
        }
        _mm_sfence(); /* streamed stores are not ordered with those that tell others about them */
        copy_rest(to, from, size);
}

ANY_MEMORY __attribute__((target("avx2"))) void sum_copy_avx2(void *to_start, const void *from_start, size_t size)
{
        uint8_t *to = to_start;
        const uint8_t *from = from_start;
        size_t head;

        if (size < STREAM_MIN) {
                sum_portable.copy_stream(to, from, size);
                return;
        }
        copy_64(to, from); /* some of it again below */
        head = head_of(to);
        for (to += head, from += head, size -= head; size >= 128; to += 128, from += 128, size -= 128) {
                for (int k = 0; k < 4; k++)
                        _mm256_stream_si256((__m256i *)(void *)to + k,
                                            _mm256_loadu_si256((const __m256i *)(const void *)from + k));
        }
        _mm_sfence();
        copy_rest(to, from, size);
}

ANY_MEMORY __attribute__((target("avx512f"))) void sum_copy_avx512(void *to_start, const void *from_start, size_t size)
{
        uint8_t *to = to_start;
        const uint8_t *from = from_start;
        size_t head;

        if (size < STREAM_MIN) {
                sum_portable.copy_stream(to, from, size);
                return;
        }
        copy_64(to, from); /* some of it again below */
        head = head_of(to);
        for (to += head, from += head, size -= head; size >= 256; to += 256, from += 256, size -= 256) {
                for (int k = 0; k < 4; k++)
                        _mm512_stream_si512((__m512i *)(void *)(to + 64 * k), _mm512_loadu_si512(from + 64 * k));
        }
        _mm_sfence();
        copy_rest(to, from, size);
}
#endif
