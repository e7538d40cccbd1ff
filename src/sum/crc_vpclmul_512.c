/* The carry-less loops with VPCLMULQDQ and AVX-512: a vector is four lanes, 256 bytes per step. */
#include "sum/sum_private.h"

#ifdef SUM_X86
#define TARGET __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul")))
#define VECTOR_BYTES 64
#define FOLD_VECTOR SUM_FOLD_64
#define FOLD_STEP SUM_FOLD_256
#define SIZE_MIN 512
#define smaller sum_pclmul
#define COPIES_BOTH

#include "sum/lane_x86.h"

typedef __m512i vector;

TARGET static inline vector vector_load(const void *from)
{
        return _mm512_loadu_si512(from);
}

SUM_ANY_MEMORY TARGET static inline vector vector_load_any(const void *from)
{
        return _mm512_loadu_si512(from);
}

TARGET static inline void vector_store(void *to, vector value)
{
        _mm512_storeu_si512(to, value);
}

TARGET static inline void vector_stream(void *to, vector value)
{
        _mm512_stream_si512(to, value);
}

TARGET static inline vector vector_first(lane moved)
{
        return _mm512_zextsi128_si512(moved);
}

TARGET static inline vector vector_each(lane moved)
{
        return _mm512_broadcast_i32x4(moved);
}

TARGET static inline vector vector_xor(vector a, vector b)
{
        return _mm512_xor_si512(a, b);
}

TARGET static inline vector vector_fold(vector lanes, vector by, vector there)
{
        /* 0x96 is the truth table of the exclusive or of three operands. */
        return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, by, 0x00),
                                         _mm512_clmulepi64_epi128(lanes, by, 0x11), there, 0x96);
}

#include "sum/crc_lanes.h"

const struct sum_ops sum_vpclmul_512 = { lanes_crc32, lanes_crc64, lanes_both, sum_copy_avx512, lanes_copy_both, true };
#endif
