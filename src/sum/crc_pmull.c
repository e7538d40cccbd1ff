/* The carry-less loops with ARM's PMULL: a vector is one lane, 64 bytes per step. */
#include "sum/sum_private.h"

#ifdef SUM_ARM
#ifdef __clang__
#define TARGET __attribute__((target("aes")))
#else
#define TARGET __attribute__((target("+crypto")))
#endif
#define VECTOR_BYTES 16
#define FOLD_VECTOR SUM_FOLD_16
#define FOLD_STEP SUM_FOLD_64
#define SIZE_MIN 128
#define smaller sum_portable
#define vector_first(lane) (lane)
#define vector_each(lane) (lane)
#define vector_load lane_load
#define vector_store lane_store
#define vector_xor veorq_u64
#define vector_fold fold_lane

#include "sum/lane_arm.h"

typedef lane vector;

#include "sum/crc_lanes.h"

static void copy_stream(void *to, const void *from, size_t size)
{
        sum_portable.copy_stream(to, from, size);
}

const struct sum_ops sum_pmull = { lanes_crc32, lanes_crc64, lanes_both, copy_stream, NULL, false };
#endif
