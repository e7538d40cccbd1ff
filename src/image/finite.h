/*
 * finite.h - finds NaNs and infinite values among the elements of a tensor. Pure functions.
 */
#ifndef NB_IMAGE_FINITE_H
#define NB_IMAGE_FINITE_H

#include "image/torch_pickle.h"

#define FINITE_STRIDE_BYTES (256u << 10)
#define FINITE_SAMPLE_BYTES 1024u

/* Whether all of `size` bytes of such elements are finite. Types that have no other values are. Complex numbers are two floats. */
bool finite_all(const void *data, uint64_t size, enum torch_dtype dtype);
/* The same of the first FINITE_SAMPLE_BYTES of each FINITE_STRIDE_BYTES. */
bool finite_sample(const void *data, uint64_t size, enum torch_dtype dtype);

#endif
