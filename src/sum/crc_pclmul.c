/* The carry-less loops with PCLMULQDQ: a vector is one lane, 64 bytes per step. */
#include "sum/sum_private.h"

#ifdef SUM_X86
#include "sum/cpu.h"

#define TARGET __attribute__((target("sse4.1,pclmul")))
#define VECTOR_BYTES 16
#define FOLD_VECTOR SUM_FOLD_16
#define FOLD_STEP SUM_FOLD_64
#define SIZE_MIN 128
#define smaller sum_portable
#define vector_first(lane) (lane)
#define vector_each(lane) (lane)
#define vector_fold fold_lane

#include "sum/lane_x86.h"

typedef __m128i vector;

TARGET static inline vector vector_load(const void *from)
{
        return _mm_loadu_si128(from);
}

TARGET static inline void vector_store(void *to, vector value)
{
        _mm_storeu_si128(to, value);
}

TARGET static inline vector vector_xor(vector a, vector b)
{
        return _mm_xor_si128(a, b);
}

#include "sum/crc_lanes.h"

TARGET static void copy_stream(void *to, const void *from, size_t size)
{
        if (cpu_has(CPU_AVX2))
                sum_copy_avx2(to, from, size);
        else
                sum_copy_sse2(to, from, size);
}

const struct sum_ops sum_pclmul = { lanes_crc32, lanes_crc64, lanes_both, copy_stream, NULL, false };
#endif
