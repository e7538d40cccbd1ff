#include "cli/numbers.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"

/* A float with `exponent` and `mantissa` bits; the bias is half the number of exponents. */
static double small_float(uint32_t bits, unsigned exponent_bits, unsigned mantissa_bits, bool has_infinity)
{
        uint32_t mantissa = bits & ((1u << mantissa_bits) - 1), top = (1u << exponent_bits) - 1;
        uint32_t exponent = bits >> mantissa_bits & top;
        int bias = (1 << (exponent_bits - 1)) - 1;
        double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;

        if (exponent == top && has_infinity)
                return mantissa ? NAN : sign * INFINITY;
        if (exponent == top && mantissa == (1u << mantissa_bits) - 1) /* e4m3fn: only this pattern is NaN */
                return NAN;
        if (!exponent)
                return sign * ldexp(mantissa, 1 - bias - (int)mantissa_bits);
        return sign * ldexp(mantissa | 1u << mantissa_bits, (int)exponent - bias - (int)mantissa_bits);
}

static uint64_t bits_of(const uint8_t *at, size_t size)
{
        uint64_t bits = 0;

        memcpy(&bits, at, size); /* little-endian, as the files and all machines that Nebula supports */
        return bits;
}

static double float32_of(uint32_t bits)
{
        float value;

        memcpy(&value, &bits, sizeof value);
        return value;
}

static double float64_of(uint64_t bits)
{
        double value;

        memcpy(&value, &bits, sizeof value);
        return value;
}

static bool is_integer(enum torch_dtype dtype)
{
        return dtype >= TORCH_I64 && dtype <= TORCH_BOOL;
}

static bool is_signed(enum torch_dtype dtype)
{
        return dtype >= TORCH_I64 && dtype <= TORCH_I8;
}

/* Extends the sign of signed kinds. */
static uint64_t integer_at(const uint8_t *at, enum torch_dtype dtype)
{
        size_t size = torch_dtype_size(dtype);
        uint64_t bits = bits_of(at, size);

        if (is_signed(dtype) && size < 8 && bits >> (8 * size - 1))
                bits |= ~UINT64_C(0) << (8 * size);
        return bits;
}

/* Part 0: the number; part 1: the imaginary part of a complex number. */
static double number_at(const uint8_t *at, enum torch_dtype dtype, int part)
{
        switch (dtype) {
        case TORCH_F64: return float64_of(bits_of(at, 8));
        case TORCH_C128: return float64_of(bits_of(at + 8 * part, 8));
        case TORCH_F32: return float32_of((uint32_t)bits_of(at, 4));
        case TORCH_C64: return float32_of((uint32_t)bits_of(at + 4 * part, 4));
        case TORCH_BF16: return float32_of((uint32_t)bits_of(at, 2) << 16);
        case TORCH_F16: return small_float((uint32_t)bits_of(at, 2), 5, 10, true);
        case TORCH_F8_E5M2: return small_float((uint32_t)bits_of(at, 1), 5, 2, true);
        case TORCH_F8_E4M3: return small_float((uint32_t)bits_of(at, 1), 4, 3, false);
        default: return is_signed(dtype) ? (double)(int64_t)integer_at(at, dtype) : (double)integer_at(at, dtype);
        }
}

static int parts_of(enum torch_dtype dtype)
{
        return dtype == TORCH_C64 || dtype == TORCH_C128 ? 2 : 1;
}

/* Visits the elements in the order of their indices. */
struct cursor {
        const struct torch_tensor *tensor;
        const uint8_t *at;
        uint64_t index[TORCH_DIM_MAX];
        size_t element_bytes;
};

static struct cursor cursor_at(const void *image, const struct torch_tensor *tensor)
{
        struct cursor cursor = { .tensor = tensor, .at = (const uint8_t *)image + tensor->offset, .element_bytes = torch_dtype_size(tensor->dtype) };

        return cursor;
}

static void advance(struct cursor *cursor)
{
        const struct torch_tensor *tensor = cursor->tensor;

        if (tensor->is_contiguous) {
                cursor->at += cursor->element_bytes;
                return;
        }
        for (uint32_t i = tensor->dim_count; i--;) {
                cursor->at += (uint64_t)tensor->strides[i] * cursor->element_bytes;
                if (++cursor->index[i] < tensor->shape[i])
                        return;
                cursor->at -= (uint64_t)tensor->strides[i] * tensor->shape[i] * cursor->element_bytes;
                cursor->index[i] = 0;
        }
}

struct numbers numbers_of(const void *image, const struct torch_tensor *tensor)
{
        struct cursor cursor = cursor_at(image, tensor);
        struct numbers numbers = { 0 };
        double squares = 0;
        bool has_any = false;

        for (uint64_t i = 0; i < tensor->elements; i++, advance(&cursor)) {
                for (int part = 0; part < parts_of(tensor->dtype); part++) {
                        double value = number_at(cursor.at, tensor->dtype, part);

                        if (!isfinite(value)) {
                                numbers.nan_count += isnan(value) != 0;
                                numbers.infinite_count += isinf(value) != 0;
                                continue;
                        }
                        squares += value * value;
                        numbers.min = !has_any || value < numbers.min ? value : numbers.min;
                        numbers.max = !has_any || value > numbers.max ? value : numbers.max;
                        has_any = true;
                }
        }
        numbers.norm = sqrt(squares);
        return numbers;
}

static void add_floats(struct difference *difference, const uint8_t *a, const uint8_t *b, enum torch_dtype dtype)
{
        for (int part = 0; part < parts_of(dtype); part++) {
                double x = number_at(a, dtype, part), y = number_at(b, dtype, part), distance = x == y ? 0 : fabs(x - y);

                if (isnan(x) && isnan(y))
                        continue;
                if (isnan(distance) || distance > difference->largest)
                        difference->largest = distance;
        }
}

static void add_integers(struct difference *difference, const uint8_t *a, const uint8_t *b, enum torch_dtype dtype)
{
        uint64_t x = integer_at(a, dtype), y = integer_at(b, dtype);
        bool is_less = is_signed(dtype) ? (int64_t)x < (int64_t)y : x < y;
        uint64_t distance = is_less ? y - x : x - y;

        if (distance > difference->largest_integer)
                difference->largest_integer = distance;
}

struct difference numbers_difference(const void *image_a, const struct torch_tensor *a, const void *image_b, const struct torch_tensor *b)
{
        struct cursor x = cursor_at(image_a, a), y = cursor_at(image_b, b);
        struct difference difference = { .is_integer = is_integer(a->dtype) };

        for (uint64_t i = 0; i < a->elements; i++, advance(&x), advance(&y)) {
                if (!memcmp(x.at, y.at, x.element_bytes))
                        continue;
                difference.differing++;
                if (difference.is_integer)
                        add_integers(&difference, x.at, y.at, a->dtype);
                else if (!isnan(difference.largest))
                        add_floats(&difference, x.at, y.at, a->dtype);
        }
        return difference;
}

char *numbers_shape(const struct torch_tensor *tensor)
{
        struct buf buf = { 0 };
        char text[32];
        size_t size;

        if (!tensor->dim_count)
                buf_add_text(&buf, "()");
        for (uint32_t i = 0; i < tensor->dim_count; i++) {
                snprintf(text, sizeof text, "%s%" PRIu64, i ? "x" : "", tensor->shape[i]);
                buf_add_text(&buf, text);
        }
        return buf_take(&buf, &size);
}

json_t *numbers_shape_json(const struct torch_tensor *tensor)
{
        json_t *shape = json_array();

        for (uint32_t i = 0; i < tensor->dim_count; i++)
                json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i]));
        return shape;
}

json_t *numbers_json(double value)
{
        return isnan(value) ? json_string("nan") : isinf(value) ? json_string(value > 0 ? "inf" : "-inf") : json_real(value);
}
