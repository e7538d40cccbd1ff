/*
 * pickle_reduce.c - reduces tensors and storages in torch.save's form.
 *
 * The tuples built here are those of torch.Tensor.__reduce_ex__ and of the
 * persistent_id in torch.serialization, so any torch reads the result. The
 * pickle equals torch.save's of the same object byte for byte.
 */
#include "pickle.h"

#include <stdint.h>
#include <string.h>

struct torch_objects torch;

static int load_name(PyObject **name, const char *text)
{
        *name = PyUnicode_InternFromString(text);
        return *name ? 0 : -1;
}

static PyObject *attribute(PyObject *object, const char *first, const char *second)
{
        PyObject *inner = PyObject_GetAttrString(object, first), *result = NULL;

        if (inner && second)
                result = PyObject_GetAttrString(inner, second);
        else if (inner)
                result = Py_NewRef(inner);
        Py_XDECREF(inner);
        return result;
}

/* Loads dtype -> (storage type, item size, complex) for the dtypes that have a typed storage and are not quantised. */
static int load_dtypes(PyObject *module)
{
        static const struct {
                const char *dtype, *storage;
                int item_size;
        } table[] = {
                { "float32", "FloatStorage", 4 },   { "float64", "DoubleStorage", 8 },
                { "float16", "HalfStorage", 2 },    { "bfloat16", "BFloat16Storage", 2 },
                { "int64", "LongStorage", 8 },      { "int32", "IntStorage", 4 },
                { "int16", "ShortStorage", 2 },     { "int8", "CharStorage", 1 },
                { "uint8", "ByteStorage", 1 },      { "bool", "BoolStorage", 1 },
                { "complex64", "ComplexFloatStorage", 8 }, { "complex128", "ComplexDoubleStorage", 16 },
        };

        torch.dtypes = PyDict_New();
        if (!torch.dtypes)
                return -1;
        for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
                PyObject *dtype = PyObject_GetAttrString(module, table[i].dtype);
                PyObject *storage = PyObject_GetAttrString(module, table[i].storage);
                PyObject *complex = strncmp(table[i].dtype, "complex", 7) == 0 ? Py_True : Py_False;
                PyObject *value = dtype && storage ? Py_BuildValue("(OiO)", storage, table[i].item_size, complex) : NULL;
                int failed = !value || PyDict_SetItem(torch.dtypes, dtype, value) < 0;

                Py_XDECREF(dtype);
                Py_XDECREF(storage);
                Py_XDECREF(value);
                if (failed)
                        return -1;
        }
        return 0;
}

int reduce_load_torch(void)
{
        PyObject *module, *collections;
        int result = -1;

        if (torch.ready)
                return 0;
        module = PyImport_ImportModule("torch");
        collections = PyImport_ImportModule("collections");
        if (!module || !collections)
                goto out;
        torch.tensor_type = PyObject_GetAttrString(module, "Tensor");
        torch.typed_storage_type = attribute(module, "storage", "TypedStorage");
        torch.untyped_storage_type = attribute(module, "storage", "UntypedStorage");
        torch.strided = PyObject_GetAttrString(module, "strided");
        torch.rebuild = attribute(module, "_utils", "_rebuild_tensor_v2");
        torch.ordered_dict = PyObject_GetAttrString(collections, "OrderedDict");
        if (!torch.tensor_type || !torch.typed_storage_type || !torch.untyped_storage_type || !torch.strided ||
            !torch.rebuild || !torch.ordered_dict || load_dtypes(module) < 0)
                goto out;
        torch.empty_dict_reduction = Py_BuildValue("(O())", torch.ordered_dict);
        if (!torch.empty_dict_reduction || load_name(&torch.str_storage, "storage") < 0 ||
            load_name(&torch.str_cpu, "cpu") < 0 || load_name(&torch.untyped_storage, "untyped_storage") < 0 ||
            load_name(&torch.storage_offset, "storage_offset") < 0 || load_name(&torch.shape, "shape") < 0 ||
            load_name(&torch.stride, "stride") < 0 || load_name(&torch.dtype, "dtype") < 0 ||
            load_name(&torch.requires_grad, "requires_grad") < 0 || load_name(&torch.is_cpu, "is_cpu") < 0 ||
            load_name(&torch.layout, "layout") < 0 || load_name(&torch.is_neg, "is_neg") < 0 ||
            load_name(&torch.is_conj, "is_conj") < 0 || load_name(&torch.backward_hooks, "_backward_hooks") < 0 ||
            load_name(&torch.cdata, "_cdata") < 0 || load_name(&torch.nbytes, "nbytes") < 0 ||
            load_name(&torch.data_ptr, "data_ptr") < 0 || load_name(&torch.is_nested, "is_nested") < 0)
                goto out;
        torch.ready = true;
        result = 0;
out:
        Py_XDECREF(module);
        Py_XDECREF(collections);
        return result;
}

/* Fails if one piece of memory is used with two dtypes, as torch.save does: loading could not restore it. */
static int check_dtype(struct pickler *pickler, PyObject *address, PyObject *dtype)
{
        PyObject *known;
        int64_t value = PyLong_AsLongLong(address);

        if (value == -1 && PyErr_Occurred())
                return -1;
        if (value == 0)
                return 0;
        known = PyDict_GetItemWithError(pickler->dtype_at, address);
        if (!known)
                return PyErr_Occurred() ? -1 : PyDict_SetItem(pickler->dtype_at, address, dtype);
        if (known != dtype) {
                PyErr_SetString(PyExc_RuntimeError, "Cannot save multiple tensors or storages that view the same data "
                                                    "as different types: save one of them, or a clone");
                return -1;
        }
        return 0;
}

/* Numbers a storage at its first use. New reference to its storage_ref. */
static PyObject *add_storage(struct pickler *pickler, PyObject *cdata, PyObject *storage, PyObject *owner, PyObject *dtype,
                             PyObject *storage_type, PyObject *location, PyObject *count)
{
        PyObject *address = NULL, *size = NULL, *number = NULL, *key = NULL;
        struct storage_ref *ref = NULL;
        bool done = false;

        address = PyObject_CallMethodNoArgs(storage, torch.data_ptr);
        size = address ? PyObject_CallMethodNoArgs(storage, torch.nbytes) : NULL;
        number = size ? PyLong_FromSize_t(pickler->storages->count) : NULL;
        key = number ? PyObject_Str(number) : NULL; /* as torch does: the program may hold a text of one digit, too */
        if (!key || (dtype && check_dtype(pickler, address, dtype) < 0))
                goto out;
        ref = pickling_storage_ref(PyTuple_Pack(5, torch.str_storage, storage_type, key, location, count));
        if (!ref || PyDict_SetItem(pickler->refs, cdata, (PyObject *)ref) < 0)
                goto out;
        ref->owner = Py_NewRef(owner);
        done = ranges_add(pickler->storages, RANGES_HOST, PyLong_AsVoidPtr(address), PyLong_AsUnsignedLongLong(size), storage) &&
               !PyErr_Occurred();
out:
        Py_XDECREF(address);
        Py_XDECREF(size);
        Py_XDECREF(number);
        Py_XDECREF(key);
        if (!done)
                Py_CLEAR(ref);
        return (PyObject *)ref;
}

/* A reference to a storage that was saved first as `first` with another type, because that was untyped or has no memory. Each use has
 * its own type. */
static PyObject *storage_as(const struct storage_ref *first, PyObject *dtype_entry, PyObject *count)
{
        PyObject *pid = PyTuple_Pack(5, torch.str_storage, PyTuple_GET_ITEM(dtype_entry, 0), PyTuple_GET_ITEM(first->pid, 2),
                                     PyTuple_GET_ITEM(first->pid, 3), count);

        return pid ? (PyObject *)pickling_storage_ref(pid) : NULL;
}

/* The count of elements; `dtype_entry` is a row of torch.dtypes. */
static PyObject *storage_count(PyObject *storage, PyObject *dtype_entry)
{
        PyObject *size = PyObject_CallMethodNoArgs(storage, torch.nbytes);
        Py_ssize_t bytes = size ? PyLong_AsSsize_t(size) : -1;

        Py_XDECREF(size);
        return bytes >= 0 ? PyLong_FromSsize_t(bytes / PyLong_AsSsize_t(PyTuple_GET_ITEM(dtype_entry, 1))) : NULL;
}

/* The storage_ref of an ordinary tensor's storage; `dtype_entry` is its row of torch.dtypes. */
static PyObject *tensor_storage(struct pickler *pickler, PyObject *tensor, PyObject *dtype, PyObject *dtype_entry)
{
        PyObject *storage = PyObject_CallMethodNoArgs(tensor, torch.untyped_storage);
        PyObject *cdata = storage ? PyObject_GetAttr(storage, torch.cdata) : NULL;
        PyObject *ref = cdata ? PyDict_GetItemWithError(pickler->refs, cdata) : NULL;

        if (ref) {
                /* The dtype must be that of the storage's first use. */
                if (PyTuple_GET_ITEM(((struct storage_ref *)ref)->pid, 1) == PyTuple_GET_ITEM(dtype_entry, 0)) {
                        Py_INCREF(ref);
                } else {
                        PyObject *address = PyObject_CallMethodNoArgs(storage, torch.data_ptr);
                        PyObject *count = address ? storage_count(storage, dtype_entry) : NULL;

                        if (!count || check_dtype(pickler, address, dtype) < 0)
                                ref = NULL;
                        else
                                ref = storage_as((struct storage_ref *)ref, dtype_entry, count);
                        Py_XDECREF(count);
                        Py_XDECREF(address);
                }
        } else if (cdata && !PyErr_Occurred()) {
                PyObject *count = storage_count(storage, dtype_entry);

                if (count)
                        ref = add_storage(pickler, cdata, storage, storage, dtype, PyTuple_GET_ITEM(dtype_entry, 0),
                                          torch.str_cpu, count);
                Py_XDECREF(count);
        }
        Py_XDECREF(storage);
        Py_XDECREF(cdata);
        return ref;
}

/* 1: the method or attribute is true; 0: false; -1: error. */
static int truth(PyObject *value)
{
        int result = value ? PyObject_IsTrue(value) : -1;

        Py_XDECREF(value);
        return result;
}

/* 1: the fast path is right for this tensor. */
static int is_ordinary(PyObject *tensor)
{
        PyObject **attributes = _PyObject_GetDictPtr(tensor);
        PyObject *value;
        int result;

        if (attributes && *attributes && PyDict_GET_SIZE(*attributes) > 0)
                return 0;
        result = truth(PyObject_GetAttr(tensor, torch.is_cpu));
        if (result <= 0)
                return result;
        value = PyObject_GetAttr(tensor, torch.layout);
        if (!value)
                return -1;
        Py_DECREF(value);
        if (value != torch.strided)
                return 0;
        result = truth(PyObject_CallMethodNoArgs(tensor, torch.is_neg));
        if (result != 0)
                return result < 0 ? -1 : 0;
        result = truth(PyObject_GetAttr(tensor, torch.is_nested));
        if (result != 0)
                return result < 0 ? -1 : 0;
        value = PyObject_GetAttr(tensor, torch.backward_hooks);
        if (!value)
                return -1;
        result = hooks_are_none(value);
        Py_DECREF(value);
        return result;
}

/* 0: all elements lie within the storage. -1 and a BufferError: they do not; torch.save would write a file that torch.load cannot read. */
static int check_extent(PyObject *tensor, PyObject *offset, PyObject *shape, PyObject *stride, Py_ssize_t item_size)
{
        PyObject *storage = PyObject_CallMethodNoArgs(tensor, torch.untyped_storage);
        PyObject *size = storage ? PyObject_CallMethodNoArgs(storage, torch.nbytes) : NULL;
        Py_ssize_t last = size ? PyLong_AsSsize_t(offset) : -1, bytes = size ? PyLong_AsSsize_t(size) : -1;

        Py_XDECREF(storage);
        Py_XDECREF(size);
        for (Py_ssize_t i = 0; !PyErr_Occurred() && i < PyTuple_GET_SIZE(shape); i++) {
                Py_ssize_t length = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));

                if (length == 0)
                        return 0;
                last += (length - 1) * PyLong_AsSsize_t(PyTuple_GET_ITEM(stride, i));
        }
        if (!PyErr_Occurred() && last >= bytes / item_size)
                PyErr_SetString(PyExc_BufferError, "the storage of the tensor is smaller than the tensor");
        return PyErr_Occurred() ? -1 : 0;
}

static PyObject *reduce_tensor(struct pickler *pickler, PyObject *tensor)
{
        PyObject *dtype, *dtype_entry, *items[6] = { NULL }, *size = NULL, *arguments = NULL, *result = NULL;
        int ordinary = is_ordinary(tensor);

        if (ordinary <= 0)
                return ordinary < 0 ? NULL : Py_NewRef(Py_NotImplemented);
        dtype = PyObject_GetAttr(tensor, torch.dtype);
        if (!dtype)
                return NULL;
        dtype_entry = PyDict_GetItemWithError(torch.dtypes, dtype);
        ordinary = dtype_entry ? 1 : PyErr_Occurred() ? -1 : 0;
        if (ordinary == 1 && PyTuple_GET_ITEM(dtype_entry, 2) == Py_True) {
                int conjugate = truth(PyObject_CallMethodNoArgs(tensor, torch.is_conj));

                ordinary = conjugate < 0 ? -1 : !conjugate;
        }
        if (ordinary <= 0) {
                Py_DECREF(dtype);
                return ordinary < 0 ? NULL : Py_NewRef(Py_NotImplemented);
        }
        items[0] = tensor_storage(pickler, tensor, dtype, dtype_entry);
        items[1] = items[0] ? PyObject_CallMethodNoArgs(tensor, torch.storage_offset) : NULL;
        size = items[1] ? PyObject_GetAttr(tensor, torch.shape) : NULL;
        items[2] = size ? PyTuple_GetSlice(size, 0, PyTuple_GET_SIZE(size)) : NULL;
        /* Slicing a whole tuple subclass gives a plain tuple. */
        items[3] = items[2] ? PyObject_CallMethodNoArgs(tensor, torch.stride) : NULL;
        if (items[3] && check_extent(tensor, items[1], items[2], items[3], PyLong_AsSsize_t(PyTuple_GET_ITEM(dtype_entry, 1))) == 0)
                items[4] = PyObject_GetAttr(tensor, torch.requires_grad);
        items[5] = items[4] ? PyObject_CallNoArgs(torch.ordered_dict) : NULL;
        if (items[5])
                arguments = PyTuple_Pack(6, items[0], items[1], items[2], items[3], items[4], items[5]);
        if (arguments)
                result = PyTuple_Pack(2, torch.rebuild, arguments);
        for (size_t i = 0; i < 6; i++)
                Py_XDECREF(items[i]);
        Py_XDECREF(arguments);
        Py_XDECREF(size);
        Py_DECREF(dtype);
        return result;
}

PyObject *reduce_object(struct pickler *pickler, PyObject *object)
{
        if (Py_IS_TYPE(object, (PyTypeObject *)torch.tensor_type))
                return reduce_tensor(pickler, object);
        if (Py_IS_TYPE(object, (PyTypeObject *)torch.ordered_dict) && PyDict_GET_SIZE(object) == 0) {
                PyObject **attributes = _PyObject_GetDictPtr(object);

                /* Each tensor has an empty dict of hooks of its own. */
                if (!attributes || !*attributes || PyDict_GET_SIZE(*attributes) == 0)
                        return Py_NewRef(torch.empty_dict_reduction);
        }
        return Py_NewRef(Py_NotImplemented);
}

/* The same for a storage on any device; a storage on "meta" has no memory and no dtype to check. */
static int check_owner(struct pickler *pickler, PyObject *owner, PyObject *dtype)
{
        PyObject *address;
        int result;

        if (dtype == Py_None)
                return 0;
        address = PyObject_CallMethodNoArgs(owner, torch.data_ptr);
        result = address ? check_dtype(pickler, address, dtype) : -1;
        Py_XDECREF(address);
        return result;
}

/* Describes a storage that torch's own reduction, or the user, has put into the stream. */
static PyObject *describe_storage(struct pickler *pickler, PyObject *object)
{
        PyObject *storage, *dtype, *storage_type, *location, *count, *owner, *cdata, *ref, *pid = NULL;
        PyObject *row = PyObject_CallOneArg(pickler->describe, object);

        if (!row)
                return NULL;
        if (!PyArg_ParseTuple(row, "OOOOOO", &owner, &storage, &dtype, &storage_type, &location, &count)) {
                Py_DECREF(row);
                return NULL;
        }
        cdata = PyObject_GetAttr(owner, torch.cdata);
        ref = cdata ? PyDict_GetItemWithError(pickler->refs, cdata) : NULL;
        if (ref) {
                if (check_owner(pickler, owner, dtype) == 0)
                        pid = PyTuple_Pack(5, torch.str_storage, storage_type,
                                           PyTuple_GET_ITEM(((struct storage_ref *)ref)->pid, 2), location, count);
        } else if (cdata && !PyErr_Occurred()) {
                /* The dtype is checked by the original's address: a copy to the CPU has another one. */
                ref = add_storage(pickler, cdata, storage, owner, NULL, storage_type, location, count);
                if (ref) {
                        if (check_owner(pickler, owner, dtype) == 0)
                                pid = Py_NewRef(((struct storage_ref *)ref)->pid);
                        ((struct storage_ref *)ref)->used = true;
                        Py_DECREF(ref);
                }
        }
        Py_XDECREF(cdata);
        Py_DECREF(row);
        return pid;
}

PyObject *reduce_storage(struct pickler *pickler, PyObject *object)
{
        PyTypeObject *type = Py_TYPE(object);

        if (PyType_IsSubtype(type, (PyTypeObject *)torch.typed_storage_type) ||
            PyType_IsSubtype(type, (PyTypeObject *)torch.untyped_storage_type))
                return describe_storage(pickler, object);
        Py_RETURN_NONE;
}
