/* lane_arm.h - one lane of 16 bytes for crc_lanes.h, on ARM. The including file defines TARGET before. */
#include <arm_neon.h>

typedef uint64x2_t lane;

TARGET static inline lane lane_load(const void *from)
{
        return vreinterpretq_u64_u8(vld1q_u8(from));
}

TARGET static inline void lane_store(void *to, lane value)
{
        vst1q_u8(to, vreinterpretq_u8_u64(value));
}

/* `value` in the first 8 bytes, zeros in the others. */
TARGET static inline lane lane_first(uint64_t value)
{
        return vcombine_u64(vcreate_u64(value), vcreate_u64(0));
}

TARGET static inline lane load_fold(const struct sum_fold *fold)
{
        return vcombine_u64(vcreate_u64(fold->low), vcreate_u64(fold->high));
}

TARGET static inline lane fold_lane(lane moved, lane by, lane there)
{
        lane low = vreinterpretq_u64_p128(vmull_p64((poly64_t)vgetq_lane_u64(moved, 0), (poly64_t)vgetq_lane_u64(by, 0)));
        lane high = vreinterpretq_u64_p128(vmull_high_p64(vreinterpretq_p64_u64(moved), vreinterpretq_p64_u64(by)));

        return veorq_u64(there, veorq_u64(low, high));
}
