/* lane_x86.h - one lane of 16 bytes for crc_lanes.h, on x86. The including file defines TARGET before. */
#include <immintrin.h>

typedef __m128i lane;

TARGET static inline lane lane_load(const void *from)
{
        return _mm_loadu_si128(from);
}

TARGET static inline void lane_store(void *to, lane value)
{
        _mm_storeu_si128(to, value);
}

/* `value` in the first 8 bytes, zeros in the others. */
TARGET static inline lane lane_first(uint64_t value)
{
        return _mm_cvtsi64_si128((long long)value);
}

TARGET static inline lane load_fold(const struct sum_fold *fold)
{
        return _mm_set_epi64x((long long)fold->high, (long long)fold->low);
}

TARGET static inline lane fold_lane(lane moved, lane by, lane there)
{
        return _mm_xor_si128(there, _mm_xor_si128(_mm_clmulepi64_si128(moved, by, 0x00),
                                                  _mm_clmulepi64_si128(moved, by, 0x11)));
}
