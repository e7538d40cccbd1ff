/* Tensors and storages in the pickle of plain state: as _reduce.c, without the objects in between. See _plain.h. */
#include "_plain.h"

#include <dlfcn.h>
#include <string.h>

#define DTYPE_COUNT_MAX 16
#define SCALAR_TYPE_MAX 64 /* torch's numbers of dtypes that are remembered */
#define SHIM_CPU 0         /* aoti_torch_device_type_cpu */

/* A property of tensors, read without a search for it. */
struct property {
        PyObject *name;
        PyGetSetDef *definition; /* NULL: it is not C's own in this torch */
};

struct dtype_row {
        PyObject *dtype, *storage_type;
        Py_ssize_t item_size;
        bool is_complex;
};

/* What is needed of torch beyond `torch`, fetched once. */
static struct {
        bool is_ready;
        struct property is_cuda, layout, is_nested, backward_hooks, dtype, requires_grad;
        struct property cdata, device; /* of storages */
        PyObject *is_neg, *is_conj, *untyped_storage, *data_ptr; /* methods */
        struct dtype_row dtypes[DTYPE_COUNT_MAX];
        size_t dtype_count;
        size_t tensor_word, storage_word; /* where a tensor points to C++'s, and that to its storage; 0: not found */
        uint8_t rows[SCALAR_TYPE_MAX];    /* by torch's number of a dtype: 1 + its row, or 0 */
} known;

/*
 * C++'s tensor through the C interface that torch keeps stable between versions
 * (torch/csrc/inductor/aoti_torch/c/shim.h): a tenth of what the same costs through Python. Answers other than 0
 * are failures.
 */
static struct {
        int32_t (*device_type)(const void *tensor, int32_t *ret_type);
        int32_t (*dtype)(const void *tensor, int32_t *ret_scalar_type);
        int32_t (*dim)(const void *tensor, int64_t *ret_dim);
        int32_t (*sizes)(const void *tensor, int64_t **ret_sizes);
        int32_t (*strides)(const void *tensor, int64_t **ret_strides);
        int32_t (*storage_offset)(const void *tensor, int64_t *ret_items);
        int32_t (*storage_size)(const void *tensor, int64_t *ret_bytes);
} shim;

static PyObject *read_property(const struct property *property, PyObject *object)
{
        if (property->definition)
                return property->definition->get(object, property->definition->closure);
        return PyObject_GetAttr(object, property->name);
}

/* Whether it is `wanted`; on an error of Python's it is not, and PyErr_Occurred(). */
static bool property_is(const struct property *property, PyObject *object, const PyObject *wanted)
{
        PyObject *value = read_property(property, object);

        Py_XDECREF(value); /* what it is compared with lives on */
        return value && value == wanted;
}

static bool method_is(PyObject *method, PyObject *object, const PyObject *wanted)
{
        PyObject *value = PyObject_CallOneArg(method, object);

        Py_XDECREF(value);
        return value && value == wanted;
}

/* The number that a call answered with; -1 and PyErr_Occurred() when there is none. Takes `value` over. */
static int64_t number_of(PyObject *value)
{
        int64_t number = value ? PyLong_AsLongLong(value) : -1;

        Py_XDECREF(value);
        return number;
}

/* C++'s tensor: what the shim takes. */
static const void *inner(PyObject *tensor)
{
        return (const uint64_t *)(const void *)tensor + known.tensor_word;
}

/* On the CPU, or, where the caller can deal with that, on a GPU. PyErr_Occurred() is to be asked. */
static bool is_reachable(const struct writer *writer, PyObject *tensor)
{
        int32_t type;

        if (shim.device_type(inner(tensor), &type) == 0 && type == SHIM_CPU)
                return true;
        return writer->takes_cuda && property_is(&known.is_cuda, tensor, Py_True);
}

/* NULL when there is none, or with PyErr_Occurred(). */
static const struct dtype_row *row_of(PyObject *tensor)
{
        const struct dtype_row *row = known.dtypes;
        int32_t scalar_type;
        PyObject *dtype;

        if (shim.dtype(inner(tensor), &scalar_type) != 0 || scalar_type < 0 || scalar_type >= SCALAR_TYPE_MAX)
                return NULL;
        if (known.rows[scalar_type])
                return &known.dtypes[known.rows[scalar_type] - 1];
        dtype = read_property(&known.dtype, tensor);
        Py_XDECREF(dtype);
        while (row < known.dtypes + known.dtype_count && row->dtype != dtype)
                row++;
        if (!dtype || row == known.dtypes + known.dtype_count)
                return NULL;
        known.rows[scalar_type] = (uint8_t)(row - known.dtypes + 1);
        return row;
}

/* The row of an ordinary tensor's dtype; NULL for any other tensor, or with PyErr_Occurred(). See is_ordinary. */
static const struct dtype_row *ordinary_row(const struct writer *writer, PyObject *tensor)
{
        PyObject **attributes = _PyObject_GetDictPtr(tensor);
        const struct dtype_row *row;

        if ((attributes && *attributes && PyDict_GET_SIZE(*attributes) > 0) ||
            !is_reachable(writer, tensor) || !property_is(&known.layout, tensor, torch.strided) ||
            !property_is(&known.is_nested, tensor, Py_False) || !property_is(&known.backward_hooks, tensor, Py_None) ||
            !method_is(known.is_neg, tensor, Py_False))
                return NULL;
        row = row_of(tensor);
        return row && row->is_complex && !method_is(known.is_conj, tensor, Py_False) ? NULL : row;
}

/* The key of a storage. A text of one digit is an object that Python has only once, so the program may hold it too. */
static enum outcome write_key(struct writer *writer, Py_ssize_t index, uint64_t *ret_memo)
{
        PyObject *number, *text;
        enum outcome outcome;
        char key[24]; /* its end */
        size_t length;

        if (index < 10) {
                number = PyLong_FromSsize_t(index);
                text = number ? PyObject_Str(number) : NULL;
                outcome = text ? write_text(writer, text) : FAILED;
                if (outcome == WRITTEN)
                        *ret_memo = table_find(&writer->memo, (uint64_t)(uintptr_t)text)->value;
                Py_XDECREF(number);
                Py_XDECREF(text);
                return outcome;
        }
        for (length = 0; index > 0; index /= 10)
                key[sizeof key - ++length] = (char)('0' + index % 10);
        if (!room(writer, length + 10))
                return FAILED;
        put(writer, OP_TEXT);
        put_little(writer, length, 4);
        memcpy(writer->at, key + sizeof key - length, length);
        writer->at += length;
        *ret_memo = put_memo(writer);
        return WRITTEN;
}

/* Numbers a storage that is seen for the first time, and writes its key. */
static enum outcome add_storage(struct writer *writer, PyObject *storage, int64_t size, size_t row,
                                struct stored *ret_stored)
{
        Py_ssize_t index = (Py_ssize_t)writer->storages->count;
        PyObject *address = PyObject_CallOneArg(known.data_ptr, storage);
        struct pair *dtype_at = NULL;
        enum outcome outcome = FAILED;
        bool is_new;

        if (!address)
                return FAILED;
        if (PyLong_AsVoidPtr(address)) {
                dtype_at = table_at(&writer->dtype_at, (uint64_t)(uintptr_t)PyLong_AsVoidPtr(address), &is_new);
                if (!dtype_at)
                        goto out;
                if (!is_new && dtype_at->value != row + 1) {
                        outcome = NOT_PLAIN; /* torch.save refuses it */
                        goto out;
                }
                dtype_at->value = row + 1;
        }
        if (!ranges_add(writer->storages, PyLong_AsVoidPtr(address), (uint64_t)size, storage))
                goto out;
        outcome = write_key(writer, index, &ret_stored->key_memo);
        ret_stored->row = row;
out:
        Py_DECREF(address);
        return outcome;
}

static bool room_for_stored(struct writer *writer, size_t count)
{
        size_t capacity = writer->stored_capacity ? 2 * writer->stored_capacity : 256;
        struct stored *larger;

        if (count <= writer->stored_capacity)
                return true;
        larger = PyMem_Realloc(writer->stored, capacity * sizeof *larger);
        if (!larger) {
                PyErr_NoMemory();
                return false;
        }
        writer->stored = larger;
        writer->stored_capacity = capacity;
        return true;
}

/* "cpu", or "cuda:0", which torch makes anew each time: as the text of a device. */
static enum outcome write_location(struct writer *writer, PyObject *storage)
{
        PyObject *device, *text;
        enum outcome outcome;

        if (!writer->takes_cuda)
                return write_text(writer, torch.str_cpu);
        device = read_property(&known.device, storage);
        text = device ? PyObject_Str(device) : NULL;
        if (!text)
                outcome = FAILED;
        else if (PyUnicode_CompareWithASCIIString(text, "cpu") == 0)
                outcome = write_text(writer, torch.str_cpu);
        else
                outcome = write_text(writer, text);
        Py_XDECREF(device);
        Py_XDECREF(text);
        return outcome;
}

/* ('storage', type, key, location, count) as a persistent id. */
static enum outcome write_storage(struct writer *writer, PyObject *tensor, size_t row)
{
        const uint64_t *words = *(const uint64_t *const *)inner(tensor);
        enum outcome outcome;
        struct stored *stored;
        PyObject *storage;
        struct pair *pair;
        int64_t size;
        bool is_new;

        pair = table_at(&writer->by_cdata, words[known.storage_word], &is_new);
        if (!pair || !room(writer, 1))
                return FAILED;
        put(writer, OP_MARK);
        outcome = write_text(writer, torch.str_storage);
        if (outcome == WRITTEN)
                outcome = write_global(writer, known.dtypes[row].storage_type);
        if (outcome != WRITTEN)
                return outcome;
        if (is_new)
                pair->value = writer->by_cdata.count - 1;
        if (!room(writer, 5) || !room_for_stored(writer, (size_t)pair->value + 1))
                return FAILED;
        stored = &writer->stored[pair->value];
        if (!is_new && stored->row != row)
                return NOT_PLAIN; /* torch.save refuses it, unless it is empty */
        if (!is_new)
                put_get(writer, stored->key_memo);
        storage = is_new || writer->takes_cuda ? PyObject_CallOneArg(known.untyped_storage, tensor) : NULL;
        if (!storage && PyErr_Occurred())
                return FAILED;
        if (is_new)
                outcome = shim.storage_size(inner(tensor), &size) == 0 && size >= 0 ?
                          add_storage(writer, storage, size, row, stored) : NOT_PLAIN;
        if (outcome == WRITTEN)
                outcome = write_location(writer, storage);
        Py_XDECREF(storage);
        if (outcome != WRITTEN)
                return outcome;
        if (!room(writer, 18))
                return FAILED;
        put_int(writer, (int64_t)writer->storages->ranges[pair->value].size / known.dtypes[row].item_size);
        put(writer, OP_TUPLE);
        put_memo(writer);
        put(writer, OP_PERSID);
        return WRITTEN;
}

/* A tuple that nothing else refers to. */
static enum outcome write_numbers(struct writer *writer, const int64_t *numbers, int64_t count)
{
        if (!room(writer, 11 * (size_t)count + 7))
                return FAILED;
        if (count == 0) {
                put(writer, OP_TUPLE0);
                return WRITTEN;
        }
        if (count > 3)
                put(writer, OP_MARK);
        for (int64_t i = 0; i < count; i++)
                put_int(writer, numbers[i]);
        put(writer, count > 3 ? OP_TUPLE : OP_TUPLE1 + (int)count - 1);
        put_memo(writer);
        return WRITTEN;
}

/* As Tensor.__reduce_ex__: _rebuild_tensor_v2(storage, offset, shape, stride, requires_grad, OrderedDict()). */
enum outcome write_tensor(struct writer *writer, PyObject *tensor)
{
        const struct dtype_row *row = known.storage_word && shim.dim ? ordinary_row(writer, tensor) : NULL;
        const void *handle = inner(tensor);
        int64_t offset, dim, *sizes, *strides;
        PyObject *requires_grad;
        enum outcome outcome;

        if (!row)
                return PyErr_Occurred() ? FAILED : NOT_PLAIN;
        outcome = write_global(writer, torch.rebuild);
        if (outcome != WRITTEN)
                return outcome;
        if (!room(writer, 1))
                return FAILED;
        put(writer, OP_MARK);
        outcome = write_storage(writer, tensor, (size_t)(row - known.dtypes));
        if (outcome != WRITTEN)
                return outcome;
        if (shim.storage_offset(handle, &offset) || shim.dim(handle, &dim) || shim.sizes(handle, &sizes) ||
            shim.strides(handle, &strides) || offset < 0 || dim < 0)
                return NOT_PLAIN;
        if (!room(writer, 11))
                return FAILED;
        put_int(writer, offset);
        outcome = write_numbers(writer, sizes, dim);
        if (outcome == WRITTEN)
                outcome = write_numbers(writer, strides, dim);
        if (outcome != WRITTEN)
                return outcome;
        requires_grad = read_property(&known.requires_grad, tensor);
        Py_XDECREF(requires_grad);
        if (!requires_grad || !room(writer, 1))
                return FAILED;
        put(writer, requires_grad == Py_True ? OP_TRUE : OP_FALSE);
        outcome = write_global(writer, torch.ordered_dict);
        if (outcome != WRITTEN)
                return outcome;
        if (!room(writer, 20))
                return FAILED;
        put(writer, OP_TUPLE0);
        put(writer, OP_REDUCE);
        put_memo(writer);
        put(writer, OP_TUPLE);
        put_memo(writer);
        put(writer, OP_REDUCE);
        return memoize(writer, tensor);
}

static bool load_property(struct property *property, PyObject *type, const char *name)
{
        PyObject *found = PyObject_GetAttrString(type, name);

        property->name = PyUnicode_InternFromString(name);
        if (found && Py_IS_TYPE(found, &PyGetSetDescr_Type))
                property->definition = ((PyGetSetDescrObject *)found)->d_getset; /* lives as long as its type */
        Py_XDECREF(found);
        return found && property->name;
}

static bool load_method(PyObject **method, PyObject *type, const char *name)
{
        *method = PyObject_GetAttrString(type, name);
        return *method != NULL;
}

static bool load_dtypes(void)
{
        PyObject *dtype, *row;
        Py_ssize_t position = 0;

        known.dtype_count = 0;
        while (PyDict_Next(torch.dtypes, &position, &dtype, &row) && known.dtype_count < DTYPE_COUNT_MAX)
                known.dtypes[known.dtype_count++] = (struct dtype_row){
                        .dtype = dtype, .storage_type = PyTuple_GET_ITEM(row, 0),
                        .item_size = PyLong_AsSsize_t(PyTuple_GET_ITEM(row, 1)),
                        .is_complex = PyTuple_GET_ITEM(row, 2) == Py_True,
                };
        return !PyErr_Occurred();
}

/* Which of the first words at `object` is `address`; 0 when none is. */
static size_t word_of(const void *object, uint64_t address)
{
        for (size_t i = 2; i < 4; i++)
                if (((const uint64_t *)object)[i] == address)
                        return i;
        return 0;
}

/* All of the shim or nothing. */
static void load_shim(void)
{
        const struct {
                const char *name;
                void *to;
        } functions[] = {
                { "aoti_torch_get_device_type", &shim.device_type }, { "aoti_torch_get_dtype", &shim.dtype },
                { "aoti_torch_get_sizes", &shim.sizes }, { "aoti_torch_get_strides", &shim.strides },
                { "aoti_torch_get_storage_offset", &shim.storage_offset },
                { "aoti_torch_get_storage_size", &shim.storage_size }, { "aoti_torch_get_dim", &shim.dim },
        };
        void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD); /* stays open, as torch does */
        size_t found = 0;

        for (size_t i = 0; library && i < sizeof functions / sizeof functions[0]; i++) {
                void *function = dlsym(library, functions[i].name);

                memcpy(functions[i].to, &function, sizeof function);
                found += function != NULL;
        }
        if (found < sizeof functions / sizeof functions[0])
                memset(&shim, 0, sizeof shim);
}

/* Finds where the addresses of C++'s objects lie, in a tensor of which they are known. Without them no tensor is plain. */
static void load_words(void)
{
        PyObject *tensor = PyObject_CallNoArgs(torch.tensor_type);
        PyObject *storage = tensor ? PyObject_CallOneArg(known.untyped_storage, tensor) : NULL;
        int64_t tensor_address = number_of(tensor ? PyObject_GetAttrString(tensor, "_cdata") : NULL);
        int64_t storage_address = number_of(storage ? read_property(&known.cdata, storage) : NULL);

        if (!PyErr_Occurred()) {
                known.tensor_word = word_of(tensor, (uint64_t)tensor_address);
                known.storage_word = word_of((const void *)(uintptr_t)tensor_address, (uint64_t)storage_address);
        }
        PyErr_Clear();
        Py_XDECREF(storage);
        Py_XDECREF(tensor);
}

static const char *tensor_words(PyObject *value)
{
        if (!known.tensor_word || !Py_IS_TYPE(value, (PyTypeObject *)torch.tensor_type))
                return NULL;
        return ((const char *const *)value)[known.tensor_word];
}

void tensor_fetch(PyObject *key, PyObject *value)
{
        const char *words = tensor_words(value);

        for (int line = 0; words && line < 4; line++)
                __builtin_prefetch(words + 64 * line);
}

void tensor_fetch_storage(PyObject *key, PyObject *value)
{
        const char *const *words = (const char *const *)(const void *)tensor_words(value);

        if (words && known.storage_word) {
                __builtin_prefetch(words[known.storage_word]);
                __builtin_prefetch(words[known.storage_word] + 64);
        }
}

bool plain_load(void)
{
        PyObject *tensor, *storage;

        if (known.is_ready)
                return true;
        if (reduce_load_torch() < 0)
                return false;
        tensor = torch.tensor_type;
        storage = torch.untyped_storage_type;
        known.is_ready =
                load_property(&known.is_cuda, tensor, "is_cuda") &&
                load_property(&known.layout, tensor, "layout") && load_property(&known.device, storage, "device") &&
                load_property(&known.is_nested, tensor, "is_nested") && load_property(&known.dtype, tensor, "dtype") &&
                load_property(&known.backward_hooks, tensor, "_backward_hooks") &&
                load_property(&known.requires_grad, tensor, "requires_grad") &&
                load_property(&known.cdata, storage, "_cdata") &&
                load_method(&known.is_neg, tensor, "is_neg") && load_method(&known.is_conj, tensor, "is_conj") &&
                load_method(&known.untyped_storage, tensor, "untyped_storage") &&
                load_method(&known.data_ptr, storage, "data_ptr") && load_dtypes();
        if (known.is_ready) {
                load_words();
                load_shim();
        }
        return known.is_ready;
}
