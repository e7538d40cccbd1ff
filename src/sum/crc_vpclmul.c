/*
 * As crc_pclmul.c, with four registers of four lanes each: 256 bytes per step.
 */
#include "sum/sum_private.h"

#ifdef SUM_X86
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul")))
#define REGISTERS 4
#define STEP (64 * REGISTERS)
#define SIZE_MIN 512

TARGET static inline __m512i load(const uint8_t *data)
{
        return _mm512_loadu_si512(data);
}

TARGET static inline __m512i load_fold(const struct sum_fold *fold)
{
        return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)fold->high, (long long)fold->low));
}

TARGET static inline __m512i fold(__m512i lanes, __m512i by, __m512i there)
{
        /* 0x96: the exclusive or of all three */
        return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, by, 0x00),
                                         _mm512_clmulepi64_epi128(lanes, by, 0x11), there, 0x96);
}

TARGET static inline __m128i fold_lane(__m128i lane, __m128i by, __m128i there)
{
        return _mm_xor_si128(there, _mm_xor_si128(_mm_clmulepi64_si128(lane, by, 0x00),
                                                  _mm_clmulepi64_si128(lane, by, 0x11)));
}

/* Registers of one polynomial into one lane, over all whole 16 bytes of the rest. */
TARGET static inline void join(const __m512i registers[REGISTERS], const struct sum_fold *folds, const uint8_t *data,
                               size_t size, uint8_t ret_lane[16])
{
        __m512i by = load_fold(&folds[SUM_FOLD_64]), lanes = registers[0];
        __m128i by_lane = _mm512_castsi512_si128(load_fold(&folds[SUM_FOLD_16])), lane;

        for (int k = 1; k < REGISTERS; k++)
                lanes = fold(lanes, by, registers[k]);
        for (; size >= 64; data += 64, size -= 64)
                lanes = fold(lanes, by, load(data));
        lane = fold_lane(_mm512_castsi512_si128(lanes), by_lane, _mm512_extracti32x4_epi32(lanes, 1));
        lane = fold_lane(lane, by_lane, _mm512_extracti32x4_epi32(lanes, 2));
        lane = fold_lane(lane, by_lane, _mm512_extracti32x4_epi32(lanes, 3));
        for (; size >= 16; data += 16, size -= 16)
                lane = fold_lane(lane, by_lane, _mm_loadu_si128((const __m128i *)(const void *)data));
        _mm_storeu_si128((__m128i *)(void *)ret_lane, lane);
}

TARGET static inline void fold_all(__m128i raw, const struct sum_fold *folds, const uint8_t *data, size_t size,
                                   uint8_t ret_lane[16])
{
        __m512i by = load_fold(&folds[SUM_FOLD_256]), registers[REGISTERS];

        for (int k = 0; k < REGISTERS; k++)
                registers[k] = load(data + 64 * k);
        registers[0] = _mm512_xor_si512(registers[0], _mm512_zextsi128_si512(raw));
        for (data += STEP, size -= STEP; size >= STEP; data += STEP, size -= STEP) {
                for (int k = 0; k < REGISTERS; k++)
                        registers[k] = fold(registers[k], by, load(data + 64 * k));
        }
        join(registers, folds, data, size, ret_lane);
}

TARGET static uint32_t vpclmul_crc32(uint32_t raw, const uint8_t *data, size_t size)
{
        uint8_t lane[16];

        if (size < SIZE_MIN)
                return sum_pclmul.crc32(raw, data, size);
        fold_all(_mm_cvtsi32_si128((int)raw), sum_folds32, data, size, lane);
        return sum_finish32(lane, data, size);
}

TARGET static uint64_t vpclmul_crc64(uint64_t raw, const uint8_t *data, size_t size)
{
        uint8_t lane[16];

        if (size < SIZE_MIN)
                return sum_pclmul.crc64(raw, data, size);
        fold_all(_mm_cvtsi64_si128((long long)raw), sum_folds64, data, size, lane);
        return sum_finish64(lane, data, size);
}

TARGET static void vpclmul_both(const uint8_t *data, size_t size, uint32_t *raw32, uint64_t *raw64)
{
        __m512i by32 = load_fold(&sum_folds32[SUM_FOLD_256]), by64 = load_fold(&sum_folds64[SUM_FOLD_256]);
        __m512i registers32[REGISTERS], registers64[REGISTERS];
        uint8_t lane32[16], lane64[16];

        if (size < SIZE_MIN) {
                sum_pclmul.both(data, size, raw32, raw64);
                return;
        }
        for (int k = 0; k < REGISTERS; k++)
                registers32[k] = registers64[k] = load(data + 64 * k);
        registers32[0] = _mm512_xor_si512(registers32[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)*raw32)));
        registers64[0] = _mm512_xor_si512(registers64[0], _mm512_zextsi128_si512(_mm_cvtsi64_si128((long long)*raw64)));
        for (data += STEP, size -= STEP; size >= STEP; data += STEP, size -= STEP) {
                for (int k = 0; k < REGISTERS; k++) {
                        __m512i there = load(data + 64 * k);

                        registers32[k] = fold(registers32[k], by32, there);
                        registers64[k] = fold(registers64[k], by64, there);
                }
        }
        join(registers32, sum_folds32, data, size, lane32);
        join(registers64, sum_folds64, data, size, lane64);
        *raw32 = sum_finish32(lane32, data, size);
        *raw64 = sum_finish64(lane64, data, size);
}

/* vpclmul_both over what a streaming copy has in its registers. Ends that no step fills are summed where they were copied to; each
 * byte of the rest is read and stored once, so that its sum is of what was stored. */
SUM_ANY_MEMORY TARGET static void vpclmul_copy_both(void *to_start, const void *from_start, size_t size, uint32_t *raw32,
                                                    uint64_t *raw64)
{
        __m512i by32 = load_fold(&sum_folds32[SUM_FOLD_256]), by64 = load_fold(&sum_folds64[SUM_FOLD_256]);
        __m512i registers32[REGISTERS] = { 0 }, registers64[REGISTERS] = { 0 };
        uint8_t *to = to_start, lane32[16], lane64[16];
        const uint8_t *from = from_start;
        size_t head;

        if (size < SUM_STREAM_MIN) {
                sum_copy_avx512(to, from, size);
                vpclmul_both(to, size, raw32, raw64);
                return;
        }
        head = sum_copy_head(to, from);
        sum_portable.both(to, head, raw32, raw64);
        to += head;
        from += head;
        size -= head;
        for (int k = 0; k < REGISTERS; k++) {
                registers32[k] = registers64[k] = _mm512_loadu_si512(from + 64 * k);
                _mm512_stream_si512((__m512i *)(void *)(to + 64 * k), registers32[k]);
        }
        registers32[0] = _mm512_xor_si512(registers32[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)*raw32)));
        registers64[0] = _mm512_xor_si512(registers64[0], _mm512_zextsi128_si512(_mm_cvtsi64_si128((long long)*raw64)));
        for (to += STEP, from += STEP, size -= STEP; size >= STEP + 64; to += STEP, from += STEP, size -= STEP) {
                for (int k = 0; k < REGISTERS; k++) {
                        __m512i there = _mm512_loadu_si512(from + 64 * k);

                        _mm512_stream_si512((__m512i *)(void *)(to + 64 * k), there);
                        registers32[k] = fold(registers32[k], by32, there);
                        registers64[k] = fold(registers64[k], by64, there);
                }
        }
        _mm_sfence();
        sum_copy_rest(to, from, size); /* 64 bytes or more, none of them summed yet */
        join(registers32, sum_folds32, to, 0, lane32);
        join(registers64, sum_folds64, to, 0, lane64);
        *raw32 = sum_finish32(lane32, to, 0);
        *raw64 = sum_finish64(lane64, to, 0);
        vpclmul_both(to, size, raw32, raw64);
}

const struct sum_ops sum_vpclmul = { vpclmul_crc32, vpclmul_crc64, vpclmul_both, sum_copy_avx512, vpclmul_copy_both };
#endif
