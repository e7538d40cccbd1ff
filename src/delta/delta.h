/*
 * delta.h - the difference between two states of the same tensors.
 *
 * A publisher of weights calls delta_sums for a state that it publishes whole, then delta_make for each later one. A follower calls delta_sums
 * for its copy of the whole state, then delta_apply for the deltas after it, in their order.
 *
 * The tensors are parts of one block of memory, such as a safetensors file. The bytes between the parts are not compared: the caller makes
 * sure that they are equal. Parts are in the order of their offsets, and none overlaps another. The state's sum is one number for the values of all parts. A delta names the sum of the state that it
 * starts from, and the sum of each part of its result, so applying it to another state is an error.
 *
 * The bytes of a delta, all numbers little-endian and of 64 bits:
 *     0       "NBDELTA1"
 *     8       CRC-64 of all bytes from 16 on
 *     16, 24  sum of the state before and after
 *     32, 40  bytes of the state; count of its parts
 *     48      for each part: offset, bytes, width of an element, sum after the delta, bytes of the encoding
 *     then    the encodings: one block for each 16,384 elements. A block begins with a byte:
 *         0, equal
 *         1, sparse: 16 bits: count of changes; 16 bits: bytes of gaps; the gaps; the XOR of each changed element. A gap counts the elements
 *            since the last change; 255 means 255 and more follows.
 *         2, planes: a bit per element; then for each byte of an element the XORs of the changed elements: mode 0, all are zero; 1, a byte each;
 *            2, a bit per byte and the bytes that are not zero
 *         3, raw: the new values
 *
 * Threads: all functions are pure. delta_make and delta_apply divide the parts among as many threads as there are processors, at most
 * DELTA_THREADS; these threads end before the call returns.
 */
#ifndef NB_DELTA_DELTA_H
#define NB_DELTA_DELTA_H

#include <stddef.h>
#include <stdint.h>

#include "nebula.h"

#define DELTA_THREADS 8

struct delta_bytes {
        const void *data;
        uint64_t size;
};
struct delta_part {
        uint64_t offset, size; /* bytes; size is a multiple of width */
        uint64_t from;         /* where delta_sums and delta_make find it in the memory that they get: its offset, unless that is a part of the state */
        uint32_t width;        /* bytes of an element: 1, 2 or 4; of wider elements 4 */
        uint64_t sum;          /* CRC-64 of the values */
};

/* Computes the sum of each part. */
void delta_sums(const void *state, struct delta_part *parts, size_t count);
/* The sum of the state whose parts have these sums. */
uint64_t delta_state_sum(const struct delta_part *parts, size_t count);
/* Makes the delta from `base`, whose sums the parts have, to `next`. The state has `size` bytes. Then the parts have the sums of `next`.
 * *ret_delta: the caller frees it; NULL: the delta would exceed `limit` bytes. Fails only without memory. */
enum nebula_status delta_make(const void *base, const void *next, uint64_t size, struct delta_part *parts, size_t count, uint64_t limit,
                              void **ret_delta, size_t *ret_size, struct nebula_error *error);
/* Changes the state that has *sum into the one that the last of `count` deltas describes, and *sum with it. Each byte of the state is read and
 * verified once for all of them.
 * NEBULA_INVALID: the first delta starts from another state; nothing has changed. NEBULA_CORRUPT: the state is to be thrown away. */
enum nebula_status delta_apply(void *state, uint64_t size, uint64_t *sum, const struct delta_bytes *deltas, size_t count, struct nebula_error *error);

#endif
