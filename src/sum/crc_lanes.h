/*
 * crc_lanes.h - the loops of the carry-less files, over vectors of one to four lanes of 16 bytes. A step moves four
 * vectors forward (fold.c has the derivation). The result is one lane that is congruent to all data before it; the
 * portable code finishes it.
 *
 * Only the carry-less files include this header. Each first includes lane_x86.h or lane_arm.h, which have one lane, and
 * defines its instruction set:
 *
 *     TARGET                      the attribute of its functions
 *     vector, VECTOR_BYTES        a register, and its size
 *     FOLD_VECTOR, FOLD_STEP      the distances of one and of four vectors (enum sum_distance)
 *     SIZE_MIN, smaller           below SIZE_MIN the set-up costs more than it saves, so `smaller` computes the sum
 *     vector_load(from), vector_store(to, v)      any alignment
 *     vector_load_any(from)                       the same, of memory that other threads may write to or free; for COPIES_BOTH
 *     vector_first(lane), vector_each(lane)       the lane and zeros in the others; the lane in each place
 *     vector_xor(a, b)
 *     vector_fold(v, by, there)   each lane moved forward, plus the lanes in `there`
 *     COPIES_BOTH                 set only if a copy has time for the sums; lanes_copy_both then exists, and needs
 *     vector_stream(to, v)        a store past the caches; `to` is aligned
 */
#define REGISTERS 4
#define STEP (VECTOR_BYTES * REGISTERS)
#define PREFETCH_BYTES 1024
/* Put in front of a loop over registers: unrolled, the compiler keeps them in registers and not in an array in memory. */
#ifdef __clang__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 4")
#endif

/* Joins the registers of one polynomial into one lane, then folds in all whole 16 bytes of the rest. */
TARGET static inline void join(const vector registers[REGISTERS], const struct sum_fold *folds, const uint8_t *data, size_t size,
                               uint8_t ret_lane[16])
{
        vector by = vector_each(load_fold(&folds[FOLD_VECTOR])), lanes = registers[0];
        lane by_lane = load_fold(&folds[SUM_FOLD_16]), joined, each[VECTOR_BYTES / 16];

        UNROLLED
        for (int k = 1; k < REGISTERS; k++)
                lanes = vector_fold(lanes, by, registers[k]);
        for (; size >= VECTOR_BYTES; data += VECTOR_BYTES, size -= VECTOR_BYTES)
                lanes = vector_fold(lanes, by, vector_load(data));
        vector_store(each, lanes);
        joined = each[0];
        for (size_t k = 1; k < VECTOR_BYTES / 16; k++)
                joined = fold_lane(joined, by_lane, each[k]);
        for (; size >= 16; data += 16, size -= 16)
                joined = fold_lane(joined, by_lane, lane_load(data));
        lane_store(ret_lane, joined);
}

/* Folds all whole 16 bytes of one polynomial into one lane. `raw` is the register before them. */
TARGET static inline void fold_all(lane raw, const struct sum_fold *folds, const uint8_t *data, size_t size,
                                   uint8_t ret_lane[16])
{
        vector by = vector_each(load_fold(&folds[FOLD_STEP])), registers[REGISTERS];

        UNROLLED
        for (int k = 0; k < REGISTERS; k++)
                registers[k] = vector_load(data + VECTOR_BYTES * k);
        registers[0] = vector_xor(registers[0], vector_first(raw));
        for (data += STEP, size -= STEP; size >= STEP; data += STEP, size -= STEP) {
                UNROLLED
                for (int k = 0; k < REGISTERS; k++)
                        registers[k] = vector_fold(registers[k], by, vector_load(data + VECTOR_BYTES * k));
        }
        join(registers, folds, data, size, ret_lane);
}

TARGET static uint32_t lanes_crc32(uint32_t raw, const uint8_t *data, size_t size)
{
        uint8_t last[16];

        if (size < SIZE_MIN)
                return smaller.crc32(raw, data, size);
        fold_all(lane_first(raw), sum_folds32, data, size, last);
        return sum_finish32(last, data, size);
}

TARGET static uint64_t lanes_crc64(uint64_t raw, const uint8_t *data, size_t size)
{
        uint8_t last[16];

        if (size < SIZE_MIN)
                return smaller.crc64(raw, data, size);
        fold_all(lane_first(raw), sum_folds64, data, size, last);
        return sum_finish64(last, data, size);
}

/* Loads each byte once for both sums. */
TARGET static void lanes_both(const uint8_t *data, size_t size, uint32_t *raw32, uint64_t *raw64)
{
        vector by32 = vector_each(load_fold(&sum_folds32[FOLD_STEP])), by64 = vector_each(load_fold(&sum_folds64[FOLD_STEP]));
        vector registers32[REGISTERS], registers64[REGISTERS];
        uint8_t lane32[16], lane64[16];

        if (size < SIZE_MIN) {
                smaller.both(data, size, raw32, raw64);
                return;
        }
        UNROLLED
        for (int k = 0; k < REGISTERS; k++)
                registers32[k] = registers64[k] = vector_load(data + VECTOR_BYTES * k);
        registers32[0] = vector_xor(registers32[0], vector_first(lane_first(*raw32)));
        registers64[0] = vector_xor(registers64[0], vector_first(lane_first(*raw64)));
        for (data += STEP, size -= STEP; size >= STEP; data += STEP, size -= STEP) {
                UNROLLED
                for (int k = 0; k < REGISTERS; k++) {
                        vector there = vector_load(data + VECTOR_BYTES * k);

                        registers32[k] = vector_fold(registers32[k], by32, there);
                        registers64[k] = vector_fold(registers64[k], by64, there);
                }
        }
        join(registers32, sum_folds32, data, size, lane32);
        join(registers64, sum_folds64, data, size, lane64);
        *raw32 = sum_finish32(lane32, data, size);
        *raw64 = sum_finish64(lane64, data, size);
}

#ifdef COPIES_BOTH
/* Sums for lanes_both the bytes that a streaming copy of SUM_STREAM_MIN bytes or more has in its registers. The head
 * and the end, which no full step covers, are summed at the destination. All other bytes are loaded once, so the sum
 * is of the bytes that were stored. */
SUM_ANY_MEMORY TARGET static void lanes_copy_both(uint8_t *to, const uint8_t *from, size_t size, uint32_t *raw32, uint64_t *raw64)
{
        vector by32 = vector_each(load_fold(&sum_folds32[FOLD_STEP])), by64 = vector_each(load_fold(&sum_folds64[FOLD_STEP]));
        vector registers32[REGISTERS], registers64[REGISTERS];
        uint8_t lane32[16], lane64[16];
        size_t head = sum_copy_head(to, from);

        sum_portable.both(to, head, raw32, raw64);
        to += head;
        from += head;
        size -= head;
        UNROLLED
        for (int k = 0; k < REGISTERS; k++) {
                registers32[k] = registers64[k] = vector_load_any(from + VECTOR_BYTES * k);
                vector_stream(to + VECTOR_BYTES * k, registers32[k]);
        }
        registers32[0] = vector_xor(registers32[0], vector_first(lane_first(*raw32)));
        registers64[0] = vector_xor(registers64[0], vector_first(lane_first(*raw64)));
        for (to += STEP, from += STEP, size -= STEP; size >= STEP + 64; to += STEP, from += STEP, size -= STEP) {
                for (size_t k = 0; k < STEP; k += 64) /* the processor prefetches too, but less far while it multiplies */
                        _mm_prefetch((const char *)from + PREFETCH_BYTES + k, _MM_HINT_T0);
                UNROLLED
                for (int k = 0; k < REGISTERS; k++) {
                        vector there = vector_load_any(from + VECTOR_BYTES * k);

                        vector_stream(to + VECTOR_BYTES * k, there);
                        registers32[k] = vector_fold(registers32[k], by32, there);
                        registers64[k] = vector_fold(registers64[k], by64, there);
                }
        }
        _mm_sfence();
        sum_copy_rest(to, from, size); /* at least 64 bytes, none of them summed yet */
        join(registers32, sum_folds32, to, 0, lane32);
        join(registers64, sum_folds64, to, 0, lane64);
        *raw32 = sum_finish32(lane32, to, 0);
        *raw64 = sum_finish64(lane64, to, 0);
        lanes_both(to, size, raw32, raw64);
}
#endif
