/*
 * Arithmetic modulo the two CRC polynomials, and the CRC of two pieces computed from
 * the CRC of each.
 *
 * crc(AB) = crc(A) * x^(8 * size of B) + crc(B): the bytes of B move the register of A
 * by that power of x. The complements at both ends cancel out, so the formula holds for
 * finished values.
 */
#include "sum/sum_private.h"

#define SQUARES (64 + SUM_BYTES)

/* x^(2^k). With these squares, any power takes at most 64 multiplications. */
static uint32_t squares32[SQUARES];
static uint64_t squares64[SQUARES];

/* Bit W-1 of a register is x^0, and multiplying by x shifts right. */
uint32_t sum_multiply32(uint32_t a, uint32_t b)
{
        uint32_t product = 0;

        for (; a; a <<= 1) {
                product ^= (a >> 31) ? b : 0;
                b = (b >> 1) ^ ((b & 1) ? SUM_POLY32 : 0);
        }
        return product;
}

uint64_t sum_multiply64(uint64_t a, uint64_t b)
{
        uint64_t product = 0;

        for (; a; a <<= 1) {
                product ^= (a >> 63) ? b : 0;
                b = (b >> 1) ^ ((b & 1) ? SUM_POLY64 : 0);
        }
        return product;
}

void sum_combine_prepare(void)
{
        squares32[0] = UINT32_C(1) << 30;
        squares64[0] = UINT64_C(1) << 62;
        for (int k = 1; k < SQUARES; k++) {
                squares32[k] = sum_multiply32(squares32[k - 1], squares32[k - 1]);
                squares64[k] = sum_multiply64(squares64[k - 1], squares64[k - 1]);
        }
}

uint32_t sum_power32(uint64_t n, int first)
{
        uint32_t power = UINT32_C(1) << 31;

        for (int k = first; n; k++, n >>= 1) {
                if (n & 1)
                        power = sum_multiply32(power, squares32[k]);
        }
        return power;
}

uint64_t sum_power64(uint64_t n, int first)
{
        uint64_t power = UINT64_C(1) << 63;

        for (int k = first; n; k++, n >>= 1) {
                if (n & 1)
                        power = sum_multiply64(power, squares64[k]);
        }
        return power;
}
