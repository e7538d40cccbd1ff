/*
 * torch_abi.h - knowledge about torch for writing the pickle of plain state: the functions to call, and the words of a
 * tensor to read. plain_load (pickle_plain.h) finds them, once.
 */
#ifndef NB_PYTHON_PLAIN_TORCH_H
#define NB_PYTHON_PLAIN_TORCH_H

#include "pickle.h"

#include <stdint.h>

#define DTYPE_COUNT_MAX 48
#define SCALAR_TYPE_MAX 64 /* so many of torch's dtype numbers are cached */
#define SHIM_CPU 0         /* aoti_torch_device_type_cpu */
#define KIND_COUNT_MAX 8

/* A property of tensors, read without a name lookup. */
struct property {
        PyObject *name;
        PyGetSetDef *definition; /* NULL: this torch does not implement it in C */
};

/* A method without arguments, called without a name lookup. */
struct method {
        PyObject *callable;
        PyCFunction function; /* NULL: this torch does not implement it in C */
};

struct dtype_row {
        PyObject *dtype, *storage_type;
        Py_ssize_t item_size;
        bool is_untyped; /* torch has no typed storage of it, as of float8: the pickle names the dtype, and counts bytes */
};

/* Objects and offsets of torch beyond `torch`, found once. */
extern struct torch_known {
        bool is_ready;
        struct property is_cuda, layout, is_nested, backward_hooks, dtype, requires_grad;
        struct property cdata, device; /* of storages */
        struct method is_neg, is_conj, is_zero, untyped_storage, data_ptr;
        struct dtype_row dtypes[DTYPE_COUNT_MAX];
        PyObject *rebuild_untyped; /* makes tensors whose row is untyped; NULL: there is none */
        size_t dtype_count;
        size_t tensor_word, storage_word; /* the pointers Python tensor -> C++ tensor -> storage; 0: not found */
        /* 0: not found; torch is asked each time. */
        size_t hooks_word;               /* in a Python tensor: its hooks, NULL for None */
        size_t keys_word, autograd_word; /* in a C++ tensor: its dispatch keys; its autograd data, NULL for none */
        struct {
                uint64_t keys;
                bool is_cuda;
        } kinds[KIND_COUNT_MAX]; /* dispatch keys of ordinary tensors */
        size_t kind_count;
        uint8_t rows[SCALAR_TYPE_MAX];    /* by torch's dtype number: 1 + its row, or 0 */
} known;

/* The C++ tensor through the C interface that torch keeps stable between versions (torch/csrc/inductor/aoti_torch/c/shim.h). It takes a
 * tenth of the time of the same calls through Python. Results other than 0 are failures. */
extern struct torch_shim {
        int32_t (*device_type)(const void *tensor, int32_t *ret_type);
        int32_t (*device_index)(const void *tensor, int32_t *ret_index);
        int32_t (*dtype)(const void *tensor, int32_t *ret_scalar_type);
        int32_t (*dim)(const void *tensor, int64_t *ret_dim);
        int32_t (*sizes)(const void *tensor, int64_t **ret_sizes);
        int32_t (*strides)(const void *tensor, int64_t **ret_strides);
        int32_t (*storage_offset)(const void *tensor, int64_t *ret_items);
        int32_t (*storage_size)(const void *tensor, int64_t *ret_bytes);
        int32_t (*data_ptr)(const void *tensor, void **ret_data);
} shim;

static inline PyObject *read_property(const struct property *property, PyObject *object)
{
        if (property->definition)
                return property->definition->get(object, property->definition->closure);
        return PyObject_GetAttr(object, property->name);
}

/* Whether the property is `wanted`. On a Python error: false, and PyErr_Occurred(). */
static inline bool property_is(const struct property *property, PyObject *object, const PyObject *wanted)
{
        PyObject *value = read_property(property, object);

        Py_XDECREF(value); /* only the address is compared, and `wanted` is still referenced */
        return value && value == wanted;
}

static inline PyObject *call_method(const struct method *method, PyObject *object)
{
        return method->function ? method->function(object, NULL) : PyObject_CallOneArg(method->callable, object);
}

static inline bool method_is(const struct method *method, PyObject *object, const PyObject *wanted)
{
        PyObject *value = call_method(method, object);

        Py_XDECREF(value);
        return value && value == wanted;
}

/* The C++ tensor, as the shim's functions take it. */
static inline const void *inner(PyObject *tensor)
{
        return (const uint64_t *)(const void *)tensor + known.tensor_word;
}

static inline const uint64_t *words_of(PyObject *tensor)
{
        return *(const uint64_t *const *)inner(tensor);
}

#endif
