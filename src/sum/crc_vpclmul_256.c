/* The carry-less loops with VPCLMULQDQ and AVX2: a vector is two lanes, 128 bytes per step. */
#include "sum/sum_private.h"

#ifdef SUM_X86
#define TARGET __attribute__((target("avx2,vpclmulqdq,pclmul")))
#define VECTOR_BYTES 32
#define FOLD_VECTOR SUM_FOLD_32
#define FOLD_STEP SUM_FOLD_128
#define SIZE_MIN 256
#define smaller sum_pclmul
#define COPIES_BOTH

#include "sum/lane_x86.h"

typedef __m256i vector;

TARGET static inline vector vector_load(const void *from)
{
        return _mm256_loadu_si256(from);
}

SUM_ANY_MEMORY TARGET static inline vector vector_load_any(const void *from)
{
        return _mm256_loadu_si256(from);
}

TARGET static inline void vector_store(void *to, vector value)
{
        _mm256_storeu_si256(to, value);
}

TARGET static inline void vector_stream(void *to, vector value)
{
        _mm256_stream_si256(to, value);
}

TARGET static inline vector vector_first(lane moved)
{
        return _mm256_inserti128_si256(_mm256_setzero_si256(), moved, 0);
}

TARGET static inline vector vector_each(lane moved)
{
        return _mm256_broadcastsi128_si256(moved);
}

TARGET static inline vector vector_xor(vector a, vector b)
{
        return _mm256_xor_si256(a, b);
}

TARGET static inline vector vector_fold(vector lanes, vector by, vector there)
{
        return _mm256_xor_si256(there, _mm256_xor_si256(_mm256_clmulepi64_epi128(lanes, by, 0x00),
                                                        _mm256_clmulepi64_epi128(lanes, by, 0x11)));
}

#include "sum/crc_lanes.h"

const struct sum_ops sum_vpclmul_256 = { lanes_crc32, lanes_crc64, lanes_both, sum_copy_avx2, lanes_copy_both, false };
#endif
