/*
 * pickle_plain_leaf.c - what plain state holds beside containers, numbers, texts and tensors: bytes, parameters, sizes, dtypes,
 * devices, enums, complex numbers and what numpy has.
 *
 * Each says by __reduce_ex__ how it is made again, and that is written as CPython's pickler writes it. A few types are asked,
 * because a type that is not known here may do anything when it is asked, and TorchPickler would ask it once more.
 */
#include "pickle_plain.h"

#include <string.h>

static struct {
        bool is_ready;
        PyObject *types[5];  /* whose __reduce_ex__ is called; not their subclasses */
        PyObject *enum_type; /* with its subclasses */
        PyObject *dispatch, *extensions; /* of copyreg */
        PyObject *old_modules, *old_names; /* of protocol 2, by those of today */
        PyObject *encode, *latin1;
} leaf;

static PyObject *attribute_of(const char *module_name, const char *name)
{
        PyObject *module = PyImport_ImportModule(module_name);
        PyObject *value = module ? PyObject_GetAttrString(module, name) : NULL;

        Py_XDECREF(module);
        return value;
}

static bool leaf_load(void)
{
        if (leaf.is_ready)
                return true;
        leaf.is_ready = (leaf.types[0] = attribute_of("torch", "Size")) && (leaf.types[1] = attribute_of("torch", "dtype")) &&
                        (leaf.types[2] = attribute_of("torch", "device")) && (leaf.types[3] = attribute_of("torch.nn", "Parameter")) &&
                        (leaf.types[4] = Py_NewRef((PyObject *)&PyComplex_Type)) && (leaf.enum_type = attribute_of("enum", "Enum")) &&
                        (leaf.dispatch = attribute_of("copyreg", "dispatch_table")) &&
                        (leaf.extensions = attribute_of("copyreg", "_extension_registry")) &&
                        (leaf.old_modules = attribute_of("_compat_pickle", "REVERSE_IMPORT_MAPPING")) &&
                        (leaf.old_names = attribute_of("_compat_pickle", "REVERSE_NAME_MAPPING")) &&
                        (leaf.encode = attribute_of("_codecs", "encode")) && (leaf.latin1 = PyUnicode_InternFromString("latin1"));
        return leaf.is_ready;
}

static bool is_asked(const PyTypeObject *type)
{
        for (size_t i = 0; i < sizeof leaf.types / sizeof leaf.types[0]; i++)
                if ((const PyObject *)type == leaf.types[i])
                        return true;
        return PyType_IsSubtype((PyTypeObject *)type, (PyTypeObject *)leaf.enum_type) ||
               (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE) && !strncmp(type->tp_name, "numpy.", 6));
}

/* TorchPickler reports the error, if it is one. Only an exception that is not an Exception, like Ctrl-C, ends both. */
static enum outcome given_up(void)
{
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
                return FAILED;
        PyErr_Clear();
        return NOT_PLAIN;
}

/* The name of a module in protocol 2. NULL: TorchPickler handles this name. */
static const char *old_module(PyObject *module, PyObject *name)
{
        PyObject *pair = PyTuple_Pack(2, module, name);
        bool is_renamed = !pair || PyDict_Contains(leaf.old_names, pair) != 0;

        Py_XDECREF(pair);
        if (is_renamed || PyDict_GET_SIZE(leaf.extensions) > 0)
                return NULL;
        if (PyUnicode_CompareWithASCIIString(module, "builtins") == 0)
                return "__builtin__";
        return PyDict_Contains(leaf.old_modules, module) ? NULL : PyUnicode_AsUTF8(module);
}

static bool is_found_again(PyObject *object, PyObject *module, PyObject *name)
{
        PyObject *loaded = PyImport_GetModule(module), *found = loaded ? PyObject_GetAttr(loaded, name) : NULL;

        Py_XDECREF(loaded);
        Py_XDECREF(found);
        return found && found == object;
}

/* A class, a function or a constant, by its name. name NULL: its own. */
static enum outcome write_named(struct writer *writer, PyObject *object, PyObject *given)
{
        PyObject *module = PyObject_GetAttrString(object, "__module__");
        PyObject *name = given ? Py_NewRef(given) : module ? PyObject_GetAttrString(object, "__qualname__") : NULL;
        const char *module_text = NULL, *name_text = NULL;
        enum outcome outcome = NOT_PLAIN;

        if (module && name && PyUnicode_CheckExact(module) && PyUnicode_CheckExact(name) && PyUnicode_IS_ASCII(module) &&
            PyUnicode_IS_ASCII(name) && is_found_again(object, module, name)) {
                module_text = old_module(module, name);
                name_text = PyUnicode_AsUTF8(name);
        }
        if (module_text && name_text && !strchr(name_text, '.')) {
                outcome = FAILED;
                if (room(writer, strlen(module_text) + strlen(name_text) + 3)) {
                        writer->at += sprintf(writer->at, "c%s\n%s", module_text, name_text);
                        put(writer, '\n'); /* over sprintf's NUL */
                        outcome = memoize(writer, object);
                }
        }
        Py_XDECREF(module);
        Py_XDECREF(name);
        return outcome == NOT_PLAIN ? given_up() : outcome;
}

static bool is_named(PyObject *object)
{
        if (PyCFunction_CheckExact(object))
                return PyCFunction_GET_SELF(object) && PyModule_Check(PyCFunction_GET_SELF(object));
        return PyFunction_Check(object) ||
               (PyType_Check(object) && object != (PyObject *)Py_TYPE(Py_None) && object != (PyObject *)Py_TYPE(Py_Ellipsis) &&
                object != (PyObject *)Py_TYPE(Py_NotImplemented));
}

static enum outcome write_op(struct writer *writer, int op)
{
        if (!room(writer, 1))
                return FAILED;
        put(writer, op);
        return WRITTEN;
}

/* Writes function(*arguments), then the state. `object` is the object that this call makes. */
static enum outcome write_call(struct writer *writer, PyObject *object, PyObject *function, PyObject *arguments, PyObject *state)
{
        enum outcome outcome;

        if (!is_named(function) || !PyTuple_CheckExact(arguments))
                return NOT_PLAIN;
        outcome = plain_write(writer, function);
        if (outcome == WRITTEN)
                outcome = plain_write(writer, arguments);
        if (outcome == WRITTEN && table_find(&writer->memo, (uint64_t)(uintptr_t)object))
                return NOT_PLAIN; /* it holds itself */
        if (outcome == WRITTEN)
                outcome = write_op(writer, OP_REDUCE);
        if (outcome == WRITTEN)
                outcome = memoize(writer, object);
        if (outcome == WRITTEN && state != Py_None) {
                outcome = plain_write(writer, state);
                if (outcome == WRITTEN)
                        outcome = write_op(writer, OP_BUILD);
        }
        return outcome;
}

static enum outcome write_bytes(struct writer *writer, PyObject *bytes)
{
        PyObject *text = PyUnicode_DecodeLatin1(PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes), NULL);
        PyObject *arguments = !text ? NULL : PyBytes_GET_SIZE(bytes) ? PyTuple_Pack(2, text, leaf.latin1) : PyTuple_New(0);
        PyObject *function = PyBytes_GET_SIZE(bytes) ? leaf.encode : (PyObject *)&PyBytes_Type;
        enum outcome outcome = arguments ? write_call(writer, bytes, function, arguments, Py_None) : FAILED;

        Py_XDECREF(text);
        Py_XDECREF(arguments);
        return outcome;
}

static PyObject *reduction_of(PyObject *object)
{
        PyObject *function = PyDict_GetItemWithError(leaf.dispatch, (PyObject *)Py_TYPE(object));

        if (PyErr_Occurred())
                return NULL;
        return function ? PyObject_CallOneArg(function, object) : PyObject_CallMethod(object, "__reduce_ex__", "i", 2);
}

static PyObject *part_of(PyObject *reduction, Py_ssize_t index)
{
        return index < PyTuple_GET_SIZE(reduction) ? PyTuple_GET_ITEM(reduction, index) : Py_None;
}

enum outcome write_leaf(struct writer *writer, PyObject *object)
{
        PyObject *reduction;
        enum outcome outcome = NOT_PLAIN;

        if (!leaf_load())
                return FAILED;
        if (PyBytes_CheckExact(object))
                return write_bytes(writer, object);
        if (is_named(object))
                return write_named(writer, object, NULL);
        if (!is_asked(Py_TYPE(object)))
                return NOT_PLAIN;
        reduction = reduction_of(object);
        if (!reduction)
                return given_up();
        if (PyUnicode_CheckExact(reduction))
                outcome = write_named(writer, object, reduction);
        else if (PyTuple_CheckExact(reduction) && PyTuple_GET_SIZE(reduction) >= 2 && part_of(reduction, 3) == Py_None &&
                 part_of(reduction, 4) == Py_None && part_of(reduction, 5) == Py_None)
                outcome = write_call(writer, object, PyTuple_GET_ITEM(reduction, 0), PyTuple_GET_ITEM(reduction, 1), part_of(reduction, 2));
        Py_DECREF(reduction);
        return outcome;
}
