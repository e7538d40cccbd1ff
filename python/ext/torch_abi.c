/* Finds out about torch: see torch_abi.h. */
#include "torch_abi.h"

#include <dlfcn.h>
#include <string.h>

#include "pickle_plain.h"

#define HEAD_WORDS 24 /* the start of the C++ tensor, in which its dispatch keys are searched; it is longer */

struct torch_known known;
struct torch_shim shim;

/* The number in a call's result. -1 with PyErr_Occurred(): it is not a number. Takes over `value`. */
static int64_t number_of(PyObject *value)
{
        int64_t number = value ? PyLong_AsLongLong(value) : -1;

        Py_XDECREF(value);
        return number;
}

/* NULL: this torch has none. */
static PyObject *load_function(const char *module_name, const char *name)
{
        PyObject *module = PyImport_ImportModule(module_name);
        PyObject *function = module ? PyObject_GetAttrString(module, name) : NULL;

        PyErr_Clear();
        Py_XDECREF(module);
        return function;
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

static bool load_method(struct method *method, PyObject *type, const char *name)
{
        method->callable = PyObject_GetAttrString(type, name);
        if (method->callable && Py_IS_TYPE(method->callable, &PyMethodDescr_Type)) {
                const PyMethodDef *definition = ((PyMethodDescrObject *)method->callable)->d_method;

                if (definition->ml_flags == METH_NOARGS)
                        method->function = definition->ml_meth;
        }
        return method->callable != NULL;
}

/* The dtypes that torch.save writes with an untyped storage. A torch without this function leaves them to TorchPickler. */
static void load_untyped(void)
{
        PyObject *function = load_function("torch.storage", "_new_dtypes");
        PyObject *found = function ? PyObject_CallNoArgs(function) : NULL;
        PyObject *each = found && known.rebuild_untyped ? PyObject_GetIter(found) : NULL, *dtype;

        while (each && known.dtype_count < DTYPE_COUNT_MAX && (dtype = PyIter_Next(each))) {
                int64_t size = number_of(PyObject_GetAttrString(dtype, "itemsize"));

                if (size > 0) /* keeps the reference to the dtype */
                        known.dtypes[known.dtype_count++] = (struct dtype_row){
                                .dtype = dtype, .storage_type = torch.untyped_storage_type, .item_size = size, .is_untyped = true,
                        };
        }
        PyErr_Clear();
        Py_XDECREF(function);
        Py_XDECREF(found);
        Py_XDECREF(each);
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
                };
        return !PyErr_Occurred();
}

/* The index of `address` among the first words at `object`; 0: not found. */
static size_t word_of(const void *object, uint64_t address)
{
        for (size_t i = 2; i < 4; i++)
                if (((const uint64_t *)object)[i] == address)
                        return i;
        return 0;
}

/* Loads all functions of the shim, or none. */
static void load_shim(void)
{
        const struct {
                const char *name;
                void *to;
        } functions[] = {
                { "aoti_torch_get_device_type", &shim.device_type }, { "aoti_torch_get_dtype", &shim.dtype },
                { "aoti_torch_get_device_index", &shim.device_index },
                { "aoti_torch_get_sizes", &shim.sizes }, { "aoti_torch_get_strides", &shim.strides },
                { "aoti_torch_get_storage_offset", &shim.storage_offset },
                { "aoti_torch_get_storage_size", &shim.storage_size }, { "aoti_torch_get_dim", &shim.dim },
                { "aoti_torch_get_data_ptr", &shim.data_ptr },
        };
        void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD); /* stays open, as in torch */
        size_t found = 0;

        for (size_t i = 0; library && i < sizeof functions / sizeof functions[0]; i++) {
                void *function = dlsym(library, functions[i].name);

                memcpy(functions[i].to, &function, sizeof function);
                found += function != NULL;
        }
        if (found < sizeof functions / sizeof functions[0])
                memset(&shim, 0, sizeof shim);
}

/* 0 with PyErr_Occurred(): not available. */
static uint64_t dispatch_keys(PyObject *tensor)
{
        PyObject *module = PyImport_ImportModule("torch._C");
        PyObject *keys = module ? PyObject_CallMethod(module, "_dispatch_keys", "O", tensor) : NULL;
        PyObject *number = keys ? PyObject_CallMethod(keys, "raw_repr", NULL) : NULL;
        uint64_t bits = number ? PyLong_AsUnsignedLongLongMask(number) : 0;

        Py_XDECREF(module);
        Py_XDECREF(keys);
        Py_XDECREF(number);
        return bits;
}

/* Finds the word with the dispatch keys: it differs between a tensor and its negative view. */
static void load_keys_word(PyObject *tensor)
{
        PyObject *negative = PyObject_CallMethod(tensor, "_neg_view", NULL);
        uint64_t keys = 0, negative_keys = 0;
        size_t found = 0;

        if (negative && PyObject_TypeCheck(negative, (PyTypeObject *)torch.tensor_type))
                keys = dispatch_keys(tensor);
        if (keys)
                negative_keys = dispatch_keys(negative);
        for (size_t i = 2; negative_keys && negative_keys != keys && i < HEAD_WORDS; i++)
                if (words_of(tensor)[i] == keys && words_of(negative)[i] == negative_keys) {
                        known.keys_word = i;
                        found++;
                }
        if (found != 1)
                known.keys_word = 0;
        PyErr_Clear();
        Py_XDECREF(negative);
}

/* Finds the words that autograd and hooks change in a tensor that had neither. */
static void load_autograd_words(PyObject *tensor)
{
        PyObject *dict = PyDict_New(), *result = NULL;
        uint64_t before[8];
        size_t found = 0, last = (size_t)((PyTypeObject *)torch.tensor_type)->tp_basicsize / sizeof(void *);

        memcpy(before, words_of(tensor), sizeof before);
        if (dict)
                result = PyObject_CallMethod(tensor, "requires_grad_", NULL);
        for (size_t i = 2; result && i < 8; i++)
                if (!before[i] && words_of(tensor)[i]) {
                        known.autograd_word = i;
                        found++;
                }
        if (found != 1)
                known.autograd_word = 0;
        if (result && PyObject_SetAttrString(tensor, "_backward_hooks", dict) == 0)
                for (size_t i = known.tensor_word + 1; i < last; i++)
                        if (((PyObject **)tensor)[i] == dict)
                                known.hooks_word = i;
        PyErr_Clear();
        Py_XDECREF(result);
        Py_XDECREF(dict);
}

/* Finds the words with the addresses of C++ objects, in a tensor whose addresses are known. Without them no tensor is plain. */
static void load_words(void)
{
        PyObject *tensor = PyObject_CallNoArgs(torch.tensor_type);
        PyObject *storage = tensor ? call_method(&known.untyped_storage, tensor) : NULL;
        int64_t tensor_address = number_of(tensor ? PyObject_GetAttrString(tensor, "_cdata") : NULL);
        int64_t storage_address = number_of(storage ? read_property(&known.cdata, storage) : NULL);

        if (!PyErr_Occurred()) {
                known.tensor_word = word_of(tensor, (uint64_t)tensor_address);
                known.storage_word = word_of((const void *)(uintptr_t)tensor_address, (uint64_t)storage_address);
        }
        PyErr_Clear();
        if (known.tensor_word && known.storage_word) {
                load_keys_word(tensor);
                load_autograd_words(tensor);
        }
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
                load_method(&known.is_zero, tensor, "_is_zerotensor") &&
                load_method(&known.untyped_storage, tensor, "untyped_storage") &&
                load_method(&known.data_ptr, storage, "data_ptr") && load_dtypes();
        if (known.is_ready) {
                known.rebuild_untyped = load_function("torch._utils", "_rebuild_tensor_v3");
                load_untyped();
                load_words();
                load_shim();
        }
        return known.is_ready;
}
