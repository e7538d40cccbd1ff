#include "sum/cpu.h"

#include <stdatomic.h>

#ifdef __x86_64__
#include <cpuid.h>

#define KNOWN (UINT32_C(1) << 31)
#define OSXSAVE (1u << 27)
#define YMM_STATE 0x06u
#define ZMM_STATE 0xe6u

/* The registers that the kernel saves, as bits of XCR0. */
static uint32_t saved_registers(void)
{
        uint32_t low, high;

        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        return low;
}

static uint32_t find(void)
{
        uint32_t a, b, c, d, saved, found = KNOWN;

        if (!__get_cpuid(1, &a, &b, &c, &d))
                return found;
        found |= (c & bit_PCLMUL ? CPU_PCLMUL : 0) | (c & bit_SSE4_1 ? CPU_SSE4_1 : 0) | (c & bit_SSE4_2 ? CPU_SSE4_2 : 0);
        saved = c & OSXSAVE ? saved_registers() : 0;
        if ((saved & YMM_STATE) != YMM_STATE || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
                return found;
        found |= (b & bit_AVX2 ? CPU_AVX2 : 0) | (c & (1u << 10) ? CPU_VPCLMULQDQ : 0);
        if ((saved & ZMM_STATE) == ZMM_STATE)
                found |= (b & bit_AVX512F ? CPU_AVX512F : 0) | (b & bit_AVX512VL ? CPU_AVX512VL : 0) | (b & bit_AVX512BW ? CPU_AVX512BW : 0) |
                         (c & (1u << 6) ? CPU_AVX512VBMI2 : 0);
        return found;
}

bool cpu_has(uint32_t features)
{
        static _Atomic uint32_t known; /* cpuid is slow in a virtual machine */
        uint32_t found = atomic_load_explicit(&known, memory_order_relaxed);

        if (!found) {
                found = find();
                atomic_store_explicit(&known, found, memory_order_relaxed);
        }
        return (found & features) == features;
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

/* Bits of AT_HWCAP, as Linux defines them for this architecture. */
#define HWCAP_PMULL_BIT (1ul << 4)
#define HWCAP_CRC32_BIT (1ul << 7)

bool cpu_has(uint32_t features)
{
        unsigned long capabilities = getauxval(AT_HWCAP); /* a look into this process's memory, no system call */
        uint32_t found = (capabilities & HWCAP_PMULL_BIT ? CPU_ARM_PMULL : 0) | (capabilities & HWCAP_CRC32_BIT ? CPU_ARM_CRC32 : 0);

        return (found & features) == features;
}
#else
bool cpu_has(uint32_t features)
{
        return !features;
}
#endif
