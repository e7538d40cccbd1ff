/*
 * Folding with PCLMULQDQ: four lanes of 16 bytes, each moved 64 bytes forward per
 * step (fold.c has the derivation). What is left, one lane congruent to all before,
 * is finished by the portable code.
 */
#include "sum/sum_private.h"

#ifdef SUM_X86
#include <immintrin.h>

#define TARGET __attribute__((target("sse4.1,pclmul")))
#define LANES 4
#define STEP (16 * LANES)
/* Below this the set-up costs more than it saves. */
#define SIZE_MIN 128

TARGET static inline __m128i load(const uint8_t *data)
{
        return _mm_loadu_si128((const __m128i *)(const void *)data);
}

TARGET static inline __m128i load_fold(const struct sum_fold *fold)
{
        return _mm_set_epi64x((long long)fold->high, (long long)fold->low);
}

/* `lane` moved forward, plus what stands there. */
TARGET static inline __m128i fold(__m128i lane, __m128i by, __m128i there)
{
        return _mm_xor_si128(there, _mm_xor_si128(_mm_clmulepi64_si128(lane, by, 0x00),
                                                  _mm_clmulepi64_si128(lane, by, 0x11)));
}

/* Lanes of one polynomial into one, and that over the whole lanes of the rest. */
TARGET static inline void join(const __m128i lanes[LANES], const struct sum_fold *folds, const uint8_t *data, size_t size,
                               uint8_t ret_lane[16])
{
        __m128i by = load_fold(&folds[SUM_FOLD_16]), lane = lanes[0];

        for (int k = 1; k < LANES; k++)
                lane = fold(lane, by, lanes[k]);
        for (; size >= 16; data += 16, size -= 16)
                lane = fold(lane, by, load(data));
        _mm_storeu_si128((__m128i *)(void *)ret_lane, lane);
}

/* All whole 16 bytes of one polynomial into one lane; `raw`: the register to begin with. */
TARGET static inline void fold_all(__m128i raw, const struct sum_fold *folds, const uint8_t *data, size_t size,
                                   uint8_t ret_lane[16])
{
        __m128i by = load_fold(&folds[SUM_FOLD_64]), lanes[LANES];

        for (int k = 0; k < LANES; k++)
                lanes[k] = load(data + 16 * k);
        lanes[0] = _mm_xor_si128(lanes[0], raw);
        for (data += STEP, size -= STEP; size >= STEP; data += STEP, size -= STEP) {
                for (int k = 0; k < LANES; k++)
                        lanes[k] = fold(lanes[k], by, load(data + 16 * k));
        }
        join(lanes, folds, data, size, ret_lane);
}

TARGET static uint32_t pclmul_crc32(uint32_t raw, const uint8_t *data, size_t size)
{
        uint8_t lane[16];

        if (size < SIZE_MIN)
                return sum_portable.crc32(raw, data, size);
        fold_all(_mm_cvtsi32_si128((int)raw), sum_folds32, data, size, lane);
        return sum_finish32(lane, data, size);
}

TARGET static uint64_t pclmul_crc64(uint64_t raw, const uint8_t *data, size_t size)
{
        uint8_t lane[16];

        if (size < SIZE_MIN)
                return sum_portable.crc64(raw, data, size);
        fold_all(_mm_cvtsi64_si128((long long)raw), sum_folds64, data, size, lane);
        return sum_finish64(lane, data, size);
}

/* Each byte is loaded once for both. */
TARGET static void pclmul_both(const uint8_t *data, size_t size, uint32_t *raw32, uint64_t *raw64)
{
        __m128i by32 = load_fold(&sum_folds32[SUM_FOLD_64]), by64 = load_fold(&sum_folds64[SUM_FOLD_64]);
        __m128i lanes32[LANES], lanes64[LANES];
        uint8_t lane32[16], lane64[16];

        if (size < SIZE_MIN) {
                sum_portable.both(data, size, raw32, raw64);
                return;
        }
        for (int k = 0; k < LANES; k++)
                lanes32[k] = lanes64[k] = load(data + 16 * k);
        lanes32[0] = _mm_xor_si128(lanes32[0], _mm_cvtsi32_si128((int)*raw32));
        lanes64[0] = _mm_xor_si128(lanes64[0], _mm_cvtsi64_si128((long long)*raw64));
        for (data += STEP, size -= STEP; size >= STEP; data += STEP, size -= STEP) {
                for (int k = 0; k < LANES; k++) {
                        __m128i there = load(data + 16 * k);

                        lanes32[k] = fold(lanes32[k], by32, there);
                        lanes64[k] = fold(lanes64[k], by64, there);
                }
        }
        join(lanes32, sum_folds32, data, size, lane32);
        join(lanes64, sum_folds64, data, size, lane64);
        *raw32 = sum_finish32(lane32, data, size);
        *raw64 = sum_finish64(lane64, data, size);
}

TARGET static void pclmul_copy(void *to, const void *from, size_t size)
{
        if (__builtin_cpu_supports("avx2"))
                sum_copy_avx2(to, from, size);
        else
                sum_copy_sse2(to, from, size);
}

const struct sum_ops sum_pclmul = { pclmul_crc32, pclmul_crc64, pclmul_both, pclmul_copy, NULL };
#endif
