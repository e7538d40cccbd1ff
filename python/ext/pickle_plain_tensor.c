/* Tensors and storages in the pickle of plain state: the same as pickle_reduce.c, without intermediate objects. See pickle_plain.h. */
#include "pickle_plain.h"

#include <string.h>

#include "torch_abi.h"

/* NULL: not found, or a Python error is set. */
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

/* is_ordinary without the checks of attributes and hooks. The caller checks PyErr_Occurred(). */
static bool torch_says_ordinary(PyObject *tensor, bool *ret_is_cuda)
{
        int32_t type;

        *ret_is_cuda = shim.device_type(inner(tensor), &type) != 0 || type != SHIM_CPU;
        return (!*ret_is_cuda || property_is(&known.is_cuda, tensor, Py_True)) &&
               property_is(&known.layout, tensor, torch.strided) && property_is(&known.is_nested, tensor, Py_False) &&
               method_is(&known.is_neg, tensor, Py_False) && method_is(&known.is_conj, tensor, Py_False) &&
               method_is(&known.is_zero, tensor, Py_False);
}

/* Whether the tensor is on the CPU (or on a GPU, if the caller takes that), dense, and holds its values unchanged. C++ reads all of this
 * from one word of the tensor, its dispatch keys. So an answer for one tensor holds for all tensors with the same keys. */
static bool is_of_ordinary_kind(const struct writer *writer, PyObject *tensor)
{
        uint64_t keys = known.keys_word ? words_of(tensor)[known.keys_word] : 0;
        bool is_cuda;

        for (size_t i = 0; i < known.kind_count; i++)
                if (known.kinds[i].keys == keys)
                        return !known.kinds[i].is_cuda || writer->takes_cuda;
        if (!torch_says_ordinary(tensor, &is_cuda))
                return false;
        if (known.keys_word && known.kind_count < KIND_COUNT_MAX) {
                known.kinds[known.kind_count].keys = keys;
                known.kinds[known.kind_count++].is_cuda = is_cuda;
        }
        return !is_cuda || writer->takes_cuda;
}

static bool has_no_hooks(PyObject *tensor)
{
        PyObject *hooks;
        bool has_none;

        if (known.hooks_word && !((PyObject **)tensor)[known.hooks_word])
                return true;
        hooks = read_property(&known.backward_hooks, tensor);
        has_none = hooks && hooks_are_none(hooks);
        Py_XDECREF(hooks);
        return has_none;
}

/* The row of an ordinary tensor's dtype. NULL: another tensor, or a Python error is set. See is_ordinary. */
static const struct dtype_row *ordinary_row(const struct writer *writer, PyObject *tensor)
{
        PyObject **attributes = _PyObject_GetDictPtr(tensor);

        if ((attributes && *attributes && PyDict_GET_SIZE(*attributes) > 0) || !has_no_hooks(tensor) ||
            !is_of_ordinary_kind(writer, tensor))
                return NULL;
        return row_of(tensor);
}

/* Writes the key of a storage. Python has each text of one digit only once, so the program may use the same object. */
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

/* The address of a storage's memory: its data_ptr(). */
static bool storage_address(PyObject *tensor, PyObject *storage, size_t item_size, const void **ret_address)
{
        const void *handle = inner(tensor);
        PyObject *address;
        int64_t offset;
        void *data;

        /* torch returns NULL for a tensor without elements. */
        if (shim.data_ptr(handle, &data) == 0 && data && shim.storage_offset(handle, &offset) == 0) {
                *ret_address = (const char *)data - (size_t)offset * item_size;
                return true;
        }
        address = call_method(&known.data_ptr, storage);
        if (!address)
                return false;
        *ret_address = PyLong_AsVoidPtr(address);
        Py_DECREF(address);
        return !PyErr_Occurred();
}

static bool device_number(PyObject *tensor, int32_t *ret_device)
{
        int32_t type;

        *ret_device = RANGES_HOST;
        if (shim.device_type(inner(tensor), &type) != 0)
                return false;
        return type == SHIM_CPU || (shim.device_index(inner(tensor), ret_device) == 0 && *ret_device >= 0);
}

/* Numbers a storage at its first use, and writes its key. */
static enum outcome add_storage(struct writer *writer, PyObject *tensor, PyObject *storage, size_t row,
                                struct stored *ret_stored)
{
        Py_ssize_t index = (Py_ssize_t)writer->storages->count;
        int32_t device = RANGES_HOST;
        const void *address;
        int64_t size;

        if (shim.storage_size(inner(tensor), &size) != 0 || size < 0 ||
            (writer->takes_cuda && !device_number(tensor, &device)))
                return NOT_PLAIN;
        if (!storage_address(tensor, storage, (size_t)known.dtypes[row].item_size, &address) ||
            !ranges_add(writer->storages, device, address, (uint64_t)size, storage))
                return FAILED;
        ret_stored->row = row;
        return write_key(writer, index, &ret_stored->key_memo);
}

/* torch.save refuses memory that is used by storages of two dtypes. */
enum outcome check_dtypes(struct writer *writer)
{
        for (size_t i = 0; i < writer->storages->count; i++) {
                uint64_t address = (uint64_t)(uintptr_t)ranges_address(writer->storages, i);
                struct pair *pair;
                bool is_new;

                if (!address)
                        continue;
                pair = table_at(&writer->dtype_at, address, &is_new);
                if (!pair)
                        return FAILED;
                if (!is_new && pair->value != writer->stored[i].row)
                        return NOT_PLAIN;
                pair->value = writer->stored[i].row;
        }
        return WRITTEN;
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

/* Writes "cpu", or "cuda:0", which torch makes anew each time: as the text of a device. */
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

/* Writes ('storage', type, key, location, count) as a persistent id. */
static enum outcome write_storage(struct writer *writer, PyObject *tensor, size_t row)
{
        enum outcome outcome;
        struct stored *stored;
        PyObject *storage;
        struct pair *pair;
        bool is_new;

        pair = table_at(&writer->by_cdata, words_of(tensor)[known.storage_word], &is_new);
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
                return NOT_PLAIN; /* torch.save refuses it unless the storage is empty */
        if (!is_new)
                put_get(writer, stored->key_memo);
        storage = is_new || writer->takes_cuda ? call_method(&known.untyped_storage, tensor) : NULL;
        if (!storage && PyErr_Occurred())
                return FAILED;
        if (is_new)
                outcome = add_storage(writer, tensor, storage, row, stored);
        if (outcome == WRITTEN)
                outcome = write_location(writer, storage);
        Py_XDECREF(storage);
        if (outcome != WRITTEN)
                return outcome;
        if (!room(writer, 18))
                return FAILED;
        put_int(writer, (int64_t)writer->storages->ranges[pair->value].size / (known.dtypes[row].is_untyped ? 1 : known.dtypes[row].item_size));
        put(writer, OP_TUPLE);
        put_memo(writer);
        put(writer, OP_PERSID);
        return WRITTEN;
}

/* Whether all elements lie within the storage, which may have been resized. If not, TorchPickler reports it. */
static bool lies_within(uint64_t storage_size, Py_ssize_t item_size, int64_t offset, const int64_t *sizes, const int64_t *strides,
                        int64_t dim)
{
        uint64_t last = (uint64_t)offset;

        for (int64_t i = 0; i < dim; i++) {
                if (sizes[i] == 0)
                        return true;
                last += (uint64_t)(sizes[i] - 1) * (uint64_t)strides[i];
        }
        return last < storage_size / (uint64_t)item_size;
}

/* Writes a tuple that no other object refers to. */
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

static bool write_requires_grad(struct writer *writer, PyObject *tensor)
{
        bool is_unknown = known.autograd_word && !words_of(tensor)[known.autograd_word];
        bool answer = !is_unknown && property_is(&known.requires_grad, tensor, Py_True);

        if ((!is_unknown && PyErr_Occurred()) || !room(writer, 1))
                return false;
        put(writer, answer ? OP_TRUE : OP_FALSE);
        return true;
}

/* Writes what Tensor.__reduce_ex__ returns: _rebuild_tensor_v2(storage, offset, shape, stride, requires_grad, OrderedDict()), or
 * _rebuild_tensor_v3 of the same and the dtype. */
enum outcome write_tensor(struct writer *writer, PyObject *tensor)
{
        const struct dtype_row *row = known.storage_word && shim.dim ? ordinary_row(writer, tensor) : NULL;
        const void *handle = inner(tensor);
        int64_t offset, dim, size, *sizes, *strides;
        enum outcome outcome;

        if (!row)
                return PyErr_Occurred() ? FAILED : NOT_PLAIN;
        outcome = write_global(writer, row->is_untyped ? known.rebuild_untyped : torch.rebuild);
        if (outcome != WRITTEN)
                return outcome;
        if (!room(writer, 1))
                return FAILED;
        put(writer, OP_MARK);
        outcome = write_storage(writer, tensor, (size_t)(row - known.dtypes));
        if (outcome != WRITTEN)
                return outcome;
        if (shim.storage_offset(handle, &offset) || shim.dim(handle, &dim) || shim.sizes(handle, &sizes) ||
            shim.strides(handle, &strides) || offset < 0 || dim < 0 || shim.storage_size(handle, &size) ||
            !lies_within((uint64_t)size, row->item_size, offset, sizes, strides, dim))
                return NOT_PLAIN;
        if (!room(writer, 11))
                return FAILED;
        put_int(writer, offset);
        outcome = write_numbers(writer, sizes, dim);
        if (outcome == WRITTEN)
                outcome = write_numbers(writer, strides, dim);
        if (outcome != WRITTEN)
                return outcome;
        if (!write_requires_grad(writer, tensor))
                return FAILED;
        outcome = write_global(writer, torch.ordered_dict);
        if (outcome != WRITTEN)
                return outcome;
        if (!room(writer, 20))
                return FAILED;
        put(writer, OP_TUPLE0);
        put(writer, OP_REDUCE);
        put_memo(writer);
        outcome = row->is_untyped ? plain_write(writer, row->dtype) : WRITTEN;
        if (outcome != WRITTEN)
                return outcome;
        if (!room(writer, 12))
                return FAILED;
        put(writer, OP_TUPLE);
        put_memo(writer);
        put(writer, OP_REDUCE);
        return memoize(writer, tensor);
}
