/*
 * The constants of the carry-less multiplication paths, computed at start-up.
 *
 * A 16-byte lane holds L * x^64 + H, where L is its first 8 bytes (reflected: the first byte has the
 * highest powers). To add the lane to the lane D bits further on, replace it by the congruent L *
 * (x^(D+64) mod P) + H * (x^D mod P), which again fits 128 bits.
 *
 * A carry-less multiplication of two reflected 64-bit registers a and b puts the coefficient of x^(126-k)
 * at bit k. Bit k of a lane stands for x^(127-k), so the result reads as x * a * b. So the constants have
 * one power less: x^(D+63) and x^(D-1).
 *
 * A residue of the 32-bit polynomial is a 64-bit register with the powers x^31 ... x^0 in the upper half.
 */
#include "sum/sum_private.h"

struct sum_fold sum_folds32[SUM_DISTANCE_COUNT], sum_folds64[SUM_DISTANCE_COUNT];

void sum_folds_prepare(void)
{
        static const uint32_t distance_bytes[SUM_DISTANCE_COUNT] = {
                [SUM_FOLD_16] = 16, [SUM_FOLD_32] = 32, [SUM_FOLD_64] = 64, [SUM_FOLD_128] = 128, [SUM_FOLD_256] = 256,
        };

        for (int k = 0; k < SUM_DISTANCE_COUNT; k++) {
                uint64_t bits = 8 * (uint64_t)distance_bytes[k];

                sum_folds32[k].low = (uint64_t)sum_power32(bits + 63, SUM_BITS) << 32;
                sum_folds32[k].high = (uint64_t)sum_power32(bits - 1, SUM_BITS) << 32;
                sum_folds64[k].low = sum_power64(bits + 63, SUM_BITS);
                sum_folds64[k].high = sum_power64(bits - 1, SUM_BITS);
        }
}
