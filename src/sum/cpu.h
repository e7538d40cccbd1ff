/*
 * cpu.h - the instructions that this processor has and that the kernel lets programs use. The compiler's own
 * __builtin_cpu_supports is not used: without gcc's run time library it finds none of them.
 */
#ifndef NB_SUM_CPU_H
#define NB_SUM_CPU_H

#include <stdbool.h>
#include <stdint.h>

enum cpu_feature {
        CPU_PCLMUL = 1 << 0,
        CPU_SSE4_1 = 1 << 1,
        CPU_SSE4_2 = 1 << 2,
        CPU_AVX2 = 1 << 3,
        CPU_VPCLMULQDQ = 1 << 4,
        CPU_AVX512F = 1 << 5,
        CPU_AVX512VL = 1 << 6,
        CPU_ARM_PMULL = 1 << 7,
        CPU_ARM_CRC32 = 1 << 8,
        CPU_AVX512BW = 1 << 9,
        CPU_AVX512VBMI2 = 1 << 10,
};

/* Whether all of `features` are there. */
bool cpu_has(uint32_t features);

#endif
