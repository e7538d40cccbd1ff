/*
 * numbers.h - the values of tensors: sums over one, differences of two.
 *
 * Every element is converted without loss: floats of all kinds to double, integers to 64 bits. The bytes need no alignment. A complex
 * number counts as two.
 *
 * Threads: pure functions.
 */
#ifndef NB_CLI_NUMBERS_H
#define NB_CLI_NUMBERS_H

#include <jansson.h>

#include "image/torch_pickle.h"

struct numbers {
        double norm;     /* the square root of the sum of squares, over finite values */
        double min, max; /* of finite values; both 0 if there is none */
        uint64_t nan_count, infinite_count;
};
struct numbers numbers_of(const void *image, const struct torch_tensor *tensor);

struct difference {
        uint64_t differing;  /* elements whose bytes differ */
        bool is_integer;
        double largest;      /* of |a - b| for floats; NaN if only one of two values is NaN */
        uint64_t largest_integer; /* the same for integers, exact */
};
/* Both have the same dtype and shape. */
struct difference numbers_difference(const void *image_a, const struct torch_tensor *a, const void *image_b, const struct torch_tensor *b);

/* "2x3"; "()" for no dimensions. The caller frees it. NULL: no memory. */
char *numbers_shape(const struct torch_tensor *tensor);
json_t *numbers_shape_json(const struct torch_tensor *tensor);
/* A number, or a text for those that JSON does not have: "nan", "inf", "-inf". */
json_t *numbers_json(double value);

#endif
