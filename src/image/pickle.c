/*
 * The pickle of {name: tensor}, protocol 2, in the form that torch.save gives it. Each tensor is the call
 *
 *      torch._utils._rebuild_tensor_v2(persistent id, offset, shape, stride, requires_grad, hooks)
 *
 * and the persistent id ("storage", class, key, "cpu", count) names the record data/<key>. Nothing is memoised: the text repeats.
 */
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/text.h"
#include "image/torch_pickle.h"

enum pickle_opcode {
        PICKLE_MARK = '(',
        PICKLE_TUPLE = 't',
        PICKLE_EMPTY_TUPLE = ')',
        PICKLE_BINUNICODE = 'X',
        PICKLE_BININT1 = 'K',
        PICKLE_BININT2 = 'M',
        PICKLE_BININT = 'J',
        PICKLE_LONG1 = 0x8a,
        PICKLE_NEWFALSE = 0x89,
        PICKLE_BINPERSID = 'Q',
        PICKLE_REDUCE = 'R',
};

#define PICKLE_BEGIN "\x80\x02}("  /* protocol 2, an empty dict, and a mark; the items follow */
#define PICKLE_FINISH "u."         /* puts the items into the dict, and stops */
#define PICKLE_REBUILD "ctorch._utils\n_rebuild_tensor_v2\n"
#define PICKLE_TORCH "ctorch\n"
#define PICKLE_HOOKS "ccollections\nOrderedDict\n)R" /* OrderedDict() */

struct pickle_dtype {
        const char *storage; /* the name of torch's class */
        uint32_t item_bytes;
};
#define PICKLE_DTYPE_COUNT (NEBULA_DTYPE_BOOL + 1u)

static const struct pickle_dtype pickle_dtypes[PICKLE_DTYPE_COUNT] = {
        [NEBULA_DTYPE_U8] = { "ByteStorage", 1 },           [NEBULA_DTYPE_I8] = { "CharStorage", 1 },
        [NEBULA_DTYPE_I16] = { "ShortStorage", 2 },         [NEBULA_DTYPE_I32] = { "IntStorage", 4 },
        [NEBULA_DTYPE_I64] = { "LongStorage", 8 },          [NEBULA_DTYPE_F16] = { "HalfStorage", 2 },
        [NEBULA_DTYPE_BF16] = { "BFloat16Storage", 2 },     [NEBULA_DTYPE_F32] = { "FloatStorage", 4 },
        [NEBULA_DTYPE_F64] = { "DoubleStorage", 8 },        [NEBULA_DTYPE_C64] = { "ComplexFloatStorage", 8 },
        [NEBULA_DTYPE_C128] = { "ComplexDoubleStorage", 16 }, [NEBULA_DTYPE_BOOL] = { "BoolStorage", 1 },
};

uint64_t pickle_tensor_size(const struct nebula_tensor *tensor)
{
        uint64_t extent = 1; /* each 0 counts as 1: strides must be valid even if no byte is stored */
        bool empty = false;

        if ((unsigned)tensor->dtype >= PICKLE_DTYPE_COUNT || tensor->dim_count > NEBULA_DIM_MAX)
                return UINT64_MAX;
        for (uint32_t k = 0; k < tensor->dim_count; k++) {
                empty = empty || tensor->shape[k] == 0;
                if (__builtin_mul_overflow(extent, tensor->shape[k] ? tensor->shape[k] : 1, &extent))
                        return UINT64_MAX;
        }
        if (__builtin_mul_overflow(extent, pickle_dtypes[tensor->dtype].item_bytes, &extent) || extent > INT64_MAX)
                return UINT64_MAX;
        return empty ? 0 : extent;
}

static void add_integer(struct buf *buf, uint64_t value)
{
        if (value <= UINT8_MAX) {
                buf_add_byte(buf, PICKLE_BININT1);
                buf_add_le(buf, value, 1);
        } else if (value <= UINT16_MAX) {
                buf_add_byte(buf, PICKLE_BININT2);
                buf_add_le(buf, value, 2);
        } else if (value <= INT32_MAX) {
                buf_add_byte(buf, PICKLE_BININT);
                buf_add_le(buf, value, 4);
        } else {
                buf_add_byte(buf, PICKLE_LONG1); /* two's complement; values are at most INT64_MAX, so 8 bytes hold the sign too */
                buf_add_byte(buf, 8);
                buf_add_le(buf, value, 8);
        }
}

static void add_string(struct buf *buf, const char *text, size_t size)
{
        buf_add_byte(buf, PICKLE_BINUNICODE);
        buf_add_le(buf, size, 4);
        buf_add(buf, text, size);
}

static void add_key(struct buf *buf, size_t index)
{
        char digits[24];
        size_t at = sizeof digits;

        do {
                digits[--at] = (char)('0' + index % 10);
                index /= 10;
        } while (index);
        add_string(buf, digits + at, sizeof digits - at);
}

static void add_tuple(struct buf *buf, const uint64_t *values, uint32_t count)
{
        if (count == 0) {
                buf_add_byte(buf, PICKLE_EMPTY_TUPLE);
                return;
        }
        buf_add_byte(buf, PICKLE_MARK);
        for (uint32_t k = 0; k < count; k++)
                add_integer(buf, values[k]);
        buf_add_byte(buf, PICKLE_TUPLE);
}

/* Strides of a dense array in row-major order, as torch counts them: in items; an extent of 0 counts as 1. */
static void count_strides(const struct nebula_tensor *tensor, uint64_t ret_strides[NEBULA_DIM_MAX])
{
        uint64_t stride = 1;

        for (uint32_t k = tensor->dim_count; k-- > 0;) {
                ret_strides[k] = stride;
                stride *= tensor->shape[k] ? tensor->shape[k] : 1;
        }
}

static void add_tensor(struct buf *buf, const struct nebula_tensor *tensor, size_t index)
{
        const struct pickle_dtype *dtype = &pickle_dtypes[tensor->dtype];
        uint64_t strides[NEBULA_DIM_MAX];

        buf_add_text(buf, PICKLE_REBUILD);
        buf_add_byte(buf, PICKLE_MARK);
        buf_add_byte(buf, PICKLE_MARK);
        add_string(buf, "storage", 7);
        buf_add_text(buf, PICKLE_TORCH);
        buf_add_text(buf, dtype->storage);
        buf_add_byte(buf, '\n');
        add_key(buf, index);
        add_string(buf, "cpu", 3);
        add_integer(buf, pickle_tensor_size(tensor) / dtype->item_bytes);
        buf_add_byte(buf, PICKLE_TUPLE);
        buf_add_byte(buf, PICKLE_BINPERSID);
        add_integer(buf, 0);
        add_tuple(buf, tensor->shape, tensor->dim_count);
        count_strides(tensor, strides);
        add_tuple(buf, strides, tensor->dim_count);
        buf_add_byte(buf, PICKLE_NEWFALSE);
        buf_add_text(buf, PICKLE_HOOKS);
        buf_add_byte(buf, PICKLE_TUPLE);
        buf_add_byte(buf, PICKLE_REDUCE);
}

static int by_name(const void *a, const void *b)
{
        return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* A dict holds each name once: a second tensor of the same name would silently replace the first. */
static enum nebula_status check_names(const struct nebula_tensor *tensors, size_t count, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        const char **names = calloc(count + 1, sizeof *names);

        if (!names)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the names of %zu tensors", count);
        for (size_t k = 0; k < count; k++)
                names[k] = tensors[k].name;
        qsort(names, count, sizeof *names, by_name);
        for (size_t k = 1; k < count && status == NEBULA_OK; k++) {
                if (strcmp(names[k - 1], names[k]) == 0)
                        status = error_set(error, NEBULA_INVALID, 0, "two tensors are named \"%s\"", names[k]);
        }
        free(names);
        return status;
}

static enum nebula_status check_tensor(const struct nebula_tensor *tensor, size_t index, struct nebula_error *error)
{
        if (!tensor->name || !*tensor->name)
                return error_set(error, NEBULA_INVALID, 0, "tensor %zu has no name", index);
        if (strlen(tensor->name) > TORCH_KEY_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the name of tensor %zu is longer than %u bytes", index, TORCH_KEY_MAX);
        if (!text_is_utf8(tensor->name, strlen(tensor->name)))
                return error_set(error, NEBULA_INVALID, 0, "the name of tensor %zu is not valid UTF-8", index);
        if ((unsigned)tensor->dtype >= PICKLE_DTYPE_COUNT)
                return error_set(error, NEBULA_INVALID, 0, "tensor \"%s\" has the unknown dtype %d", tensor->name,
                                 (int)tensor->dtype);
        if (tensor->dim_count > NEBULA_DIM_MAX)
                return error_set(error, NEBULA_INVALID, 0, "tensor \"%s\" has %u dimensions, more than %d", tensor->name,
                                 tensor->dim_count, NEBULA_DIM_MAX);
        if (pickle_tensor_size(tensor) == UINT64_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the shape of tensor \"%s\" overflows", tensor->name);
        return NEBULA_OK;
}

enum nebula_status pickle_flat_dict(const struct nebula_tensor *tensors, size_t count, char **ret_pickle,
                                    size_t *ret_size, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        struct buf buf = { 0 };
        char *pickle;

        for (size_t k = 0; k < count && status == NEBULA_OK; k++)
                status = check_tensor(&tensors[k], k, error);
        if (status == NEBULA_OK)
                status = check_names(tensors, count, error);
        if (status != NEBULA_OK)
                return status;
        buf_add_text(&buf, PICKLE_BEGIN);
        for (size_t k = 0; k < count; k++) {
                add_string(&buf, tensors[k].name, strlen(tensors[k].name));
                add_tensor(&buf, &tensors[k], k);
        }
        buf_add_text(&buf, PICKLE_FINISH);
        pickle = buf_take(&buf, ret_size);
        if (!pickle)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the pickle of %zu tensors", count);
        *ret_pickle = pickle;
        return NEBULA_OK;
}
