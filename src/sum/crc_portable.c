/*
 * Slicing by 8: table[k][b] is the contribution of byte b after k more zero
 * bytes, so eight bytes cost eight independent look-ups.
 */
#include <string.h>

#include "sum/sum_private.h"

static uint32_t table32[8][256];
static uint64_t table64[8][256];

void sum_portable_prepare(void)
{
        for (uint32_t byte = 0; byte < 256; byte++) {
                uint32_t crc32 = byte;
                uint64_t crc64 = byte;

                for (int bit = 0; bit < 8; bit++) {
                        crc32 = (crc32 >> 1) ^ ((crc32 & 1) ? SUM_POLY32 : 0);
                        crc64 = (crc64 >> 1) ^ ((crc64 & 1) ? SUM_POLY64 : 0);
                }
                table32[0][byte] = crc32;
                table64[0][byte] = crc64;
        }
        for (int k = 1; k < 8; k++) {
                for (int byte = 0; byte < 256; byte++) {
                        uint32_t crc32 = table32[k - 1][byte];
                        uint64_t crc64 = table64[k - 1][byte];

                        table32[k][byte] = (crc32 >> 8) ^ table32[0][crc32 & 0xff];
                        table64[k][byte] = (crc64 >> 8) ^ table64[0][crc64 & 0xff];
                }
        }
}

static inline uint64_t load_le(const uint8_t *data)
{
        uint64_t word;

        memcpy(&word, data, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
#endif
        return word;
}

static inline uint32_t step32(uint32_t crc, uint64_t word)
{
        word ^= crc;
        return table32[7][word & 0xff] ^ table32[6][(word >> 8) & 0xff] ^ table32[5][(word >> 16) & 0xff] ^
               table32[4][(word >> 24) & 0xff] ^ table32[3][(word >> 32) & 0xff] ^ table32[2][(word >> 40) & 0xff] ^
               table32[1][(word >> 48) & 0xff] ^ table32[0][word >> 56];
}

static inline uint64_t step64(uint64_t crc, uint64_t word)
{
        word ^= crc;
        return table64[7][word & 0xff] ^ table64[6][(word >> 8) & 0xff] ^ table64[5][(word >> 16) & 0xff] ^
               table64[4][(word >> 24) & 0xff] ^ table64[3][(word >> 32) & 0xff] ^ table64[2][(word >> 40) & 0xff] ^
               table64[1][(word >> 48) & 0xff] ^ table64[0][word >> 56];
}

static uint32_t portable_crc32(uint32_t raw, const uint8_t *data, size_t size)
{
        for (; size >= 8; data += 8, size -= 8)
                raw = step32(raw, load_le(data));
        for (; size > 0; data++, size--)
                raw = (raw >> 8) ^ table32[0][(raw ^ *data) & 0xff];
        return raw;
}

static uint64_t portable_crc64(uint64_t raw, const uint8_t *data, size_t size)
{
        for (; size >= 8; data += 8, size -= 8)
                raw = step64(raw, load_le(data));
        for (; size > 0; data++, size--)
                raw = (raw >> 8) ^ table64[0][(raw ^ *data) & 0xff];
        return raw;
}

static void portable_both(const uint8_t *data, size_t size, uint32_t *raw32, uint64_t *raw64)
{
        uint32_t crc32 = *raw32;
        uint64_t crc64 = *raw64;

        for (; size >= 8; data += 8, size -= 8) {
                uint64_t word = load_le(data);

                crc32 = step32(crc32, word);
                crc64 = step64(crc64, word);
        }
        *raw32 = portable_crc32(crc32, data, size);
        *raw64 = portable_crc64(crc64, data, size);
}

static void portable_copy(void *to, const void *from, size_t size)
{
        if (size) /* the pointers may be NULL if size is 0 */
                memcpy(to, from, size);
}

const struct sum_ops sum_portable = { portable_crc32, portable_crc64, portable_both, portable_copy, NULL, false };
