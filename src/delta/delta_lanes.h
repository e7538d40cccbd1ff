/*
 * delta_lanes.h - the loops over the elements of a block, for the instructions that this processor has. Pure functions.
 *
 * A block has at most DELTA_BLOCK elements of 1, 2 or 4 bytes. `bits` has a bit per element: 1, it has changed. `values` has the XOR of each changed
 * element, one behind the other. `planes` has the same bytes in another order: the first bytes of all values from planes on, the second ones from
 * planes + DELTA_BLOCK on. Each output array has DELTA_SLACK bytes behind its last byte, which the function may overwrite, and each input array has
 * as many that it may read.
 */
#ifndef NB_DELTA_DELTA_LANES_H
#define NB_DELTA_DELTA_LANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "delta/delta_block.h"

#define DELTA_WORDS (DELTA_BLOCK / 64)
#define DELTA_SLACK 64

struct delta_lanes {
        /* Returns how many elements have changed. No slack at `base` and `next`. */
        size_t (*gather)(const uint8_t *base, const uint8_t *next, size_t count, uint32_t width, uint64_t *bits, uint8_t *values);
        /* Changes the elements of `state` whose bits are set. No slack at `state`. */
        void (*spread)(uint8_t *state, size_t count, uint32_t width, const uint64_t *bits, const uint8_t *values);
        void (*split)(const uint8_t *values, size_t count, uint32_t width, uint8_t *planes);
        void (*join)(const uint8_t *planes, size_t count, uint32_t width, uint8_t *values);
        /* Writes the bytes that are not 0 into `out`, and a bit for each byte. Returns how many it wrote. */
        size_t (*pack)(const uint8_t *bytes, size_t count, uint64_t *bits, uint8_t *out);
        /* The opposite. `in` has no more bytes than `bits` has ones, and no slack is read behind them. */
        void (*unpack)(const uint8_t *in, size_t count, const uint64_t *bits, uint8_t *bytes);
};

extern const struct delta_lanes delta_portable;
/* NULL: this processor does not have the instructions. */
const struct delta_lanes *delta_avx512(void);
/* delta_block_make and delta_block_apply with these loops. */
size_t delta_block_make_with(const struct delta_lanes *lanes, const uint8_t *base, const uint8_t *next, size_t count, uint32_t width, uint8_t *out);
bool delta_block_apply_with(const struct delta_lanes *lanes, uint8_t *state, size_t count, uint32_t width, const uint8_t **in, const uint8_t *end);

#endif
