/* delta_block.h - the difference between two blocks of elements, within a delta. Pure functions. */
#ifndef NB_DELTA_DELTA_BLOCK_H
#define NB_DELTA_DELTA_BLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DELTA_BLOCK 16384 /* elements at most */
#define DELTA_BLOCK_MOST (DELTA_BLOCK * 4 + 1) /* bytes of an encoding at most */

/* Encodes the difference of `count` elements of `width` bytes. `out` has room for DELTA_BLOCK_MOST bytes. Returns how many it used. */
size_t delta_block_make(const uint8_t *base, const uint8_t *next, size_t count, uint32_t width, uint8_t *out);
/* Applies the encoding at *in, and moves *in behind it. False: it is damaged. */
bool delta_block_apply(uint8_t *state, size_t count, uint32_t width, const uint8_t **in, const uint8_t *end);

#endif
