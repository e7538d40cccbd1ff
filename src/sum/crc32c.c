/* CRC-32C, by the instruction that x86 and ARM have for it, and by a table elsewhere. */
#include <string.h>

#include "sum/cpu.h"
#include "sum/sum.h"

static uint32_t portable(uint32_t crc, const uint8_t *bytes, size_t size)
{
        static const uint32_t table[] = { 0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
                                          0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75 };

        for (; size; size--, bytes++) {
                crc ^= *bytes;
                crc = crc >> 4 ^ table[crc & 15];
                crc = crc >> 4 ^ table[crc & 15];
        }
        return crc;
}

#ifdef __x86_64__
#ifdef __clang__
#define TARGET __attribute__((target("sse4.2,crc32")))
#else
#define TARGET __attribute__((target("sse4.2"))) /* gcc before 11 does not know the other name */
#endif

TARGET static uint32_t by_instruction(uint32_t crc, const uint8_t *bytes, size_t size)
{
        uint64_t wide = crc, word;

        for (; size >= sizeof word; size -= sizeof word, bytes += sizeof word) {
                memcpy(&word, bytes, sizeof word);
                wide = __builtin_ia32_crc32di(wide, word);
        }
        crc = (uint32_t)wide;
        for (; size; size--)
                crc = __builtin_ia32_crc32qi(crc, *bytes++);
        return crc;
}
#endif

#ifdef __aarch64__
#include <arm_acle.h>
#ifdef __clang__
#define TARGET __attribute__((target("crc")))
#else
#define TARGET __attribute__((target("+crc")))
#endif

TARGET static uint32_t by_instruction(uint32_t crc, const uint8_t *bytes, size_t size)
{
        uint64_t word;

        for (; size >= sizeof word; size -= sizeof word, bytes += sizeof word) {
                memcpy(&word, bytes, sizeof word);
                crc = __crc32cd(crc, word);
        }
        for (; size; size--)
                crc = __crc32cb(crc, *bytes++);
        return crc;
}
#endif

uint32_t sum_crc32c(uint32_t crc, const void *data, size_t size)
{
#ifdef __x86_64__
        if (sum_isa_used() != SUM_ISA_PORTABLE && cpu_has(CPU_SSE4_2))
                return ~by_instruction(~crc, data, size);
#elif defined(__aarch64__)
        if (sum_isa_used() != SUM_ISA_PORTABLE && cpu_has(CPU_ARM_CRC32))
                return ~by_instruction(~crc, data, size);
#endif
        return ~portable(~crc, data, size);
}
