/*
 * pickle_plain.c - the pickle of plain state, written without a pickler.
 *
 * Nearly all states are dicts, lists and tuples of strings, numbers and ordinary
 * tensors. CPython's pickler spends three microseconds on a tensor: on calls of hooks, on
 * temporary tuples, and on memo entries for them. This writer writes each object at
 * once, and its memo has only the program's own objects. The bytes are those of
 * CPython's pickler, memo numbers included.
 *
 * Tensors are read through torch's C interface for compiled models. If this torch lacks it, no tensor is plain.
 *
 * An object that is not plain ends this attempt: a type that is not known here, a subclass, a tensor
 * that is_ordinary in pickle_reduce.c would refuse, a tuple that contains itself, memory
 * under two dtypes. TorchPickler then starts over: it handles every object, and reports
 * errors.
 *
 * Threads: the GIL is held, but torch's methods may release it for a moment. So the writer holds a reference to the
 * object that it writes, and leaves a container that changed meanwhile to TorchPickler.
 */
#include "pickle_plain.h"

#include <string.h>

#define BATCH_COUNT 1000
/* Deeper containers are left to TorchPickler. A program that has raised Python's recursion limit did so for CPython's pickler, whose
 * steps use less stack than these. No training state is that deep. */
#define DEPTH_MAX 200
#define AHEAD_COUNT 8


/* Prefetches. Training has pushed the tensors' descriptions out of the caches, and their page translations, too. A value, the object
 * that it points to, and the next one lie in different places. Prefetching a batch of each lets them arrive together; one by one, each
 * would wait for the one before. */
struct ahead {
        PyObject *dict;
        Py_ssize_t values, tensors, storages; /* positions in the dict; each is a batch after the one before */
        int step;
};

static void ahead_batch(PyObject *dict, Py_ssize_t *position, void (*fetch)(PyObject *key, PyObject *value))
{
        PyObject *key, *value;

        for (int i = 0; i < AHEAD_COUNT && PyDict_Next(dict, position, &key, &value); i++)
                fetch(key, value);
}

static void value_fetch(PyObject *key, PyObject *value)
{
        __builtin_prefetch(key);
        __builtin_prefetch(value);
}

static void ahead_step(struct ahead *ahead)
{
        if (ahead->step++ % AHEAD_COUNT > 0)
                return;
        if (ahead->step > 2 * AHEAD_COUNT)
                ahead_batch(ahead->dict, &ahead->storages, tensor_fetch_storage);
        if (ahead->step > AHEAD_COUNT)
                ahead_batch(ahead->dict, &ahead->tensors, tensor_fetch);
        ahead_batch(ahead->dict, &ahead->values, value_fetch);
}

static struct ahead ahead_begin(PyObject *dict)
{
        struct ahead ahead = { .dict = dict };

        while (ahead.step < 3 * AHEAD_COUNT)
                ahead_step(&ahead);
        return ahead;
}

static enum outcome write_dict(struct writer *writer, PyObject *dict)
{
        Py_ssize_t position = 0, count = PyDict_GET_SIZE(dict), batch = 0;
        struct ahead ahead = ahead_begin(dict);
        enum outcome outcome;
        PyObject *key, *value;

        if (!room(writer, 1))
                return FAILED;
        put(writer, OP_DICT);
        outcome = memoize(writer, dict);
        if (outcome != WRITTEN || count == 0)
                return outcome;
        if (count > 1) {
                if (!room(writer, 1))
                        return FAILED;
                put(writer, OP_MARK);
        }
        while (PyDict_Next(dict, &position, &key, &value)) {
                ahead_step(&ahead);
                Py_INCREF(key);
                Py_INCREF(value);
                outcome = plain_write(writer, key);
                if (outcome == WRITTEN)
                        outcome = plain_write(writer, value);
                Py_DECREF(key);
                Py_DECREF(value);
                if (outcome == WRITTEN && PyDict_GET_SIZE(dict) != count)
                        outcome = NOT_PLAIN; /* torch let another thread run, which changed the dict */
                if (outcome != WRITTEN)
                        return outcome;
                /* After a full batch CPython's pickler begins another, even if no item is left. */
                if (++batch == BATCH_COUNT) {
                        if (!room(writer, 2))
                                return FAILED;
                        put(writer, OP_SETITEMS);
                        put(writer, OP_MARK);
                        batch = 0;
                }
        }
        if (!room(writer, 1))
                return FAILED;
        put(writer, count > 1 ? OP_SETITEMS : OP_SETITEM);
        return WRITTEN;
}

static enum outcome write_list(struct writer *writer, PyObject *list)
{
        Py_ssize_t count = PyList_GET_SIZE(list);
        enum outcome outcome;

        if (!room(writer, 1))
                return FAILED;
        put(writer, OP_LIST);
        outcome = memoize(writer, list);
        for (Py_ssize_t i = 0; outcome == WRITTEN && i < count; i++) {
                PyObject *item = Py_NewRef(PyList_GET_ITEM(list, i));

                if (!room(writer, 1))
                        outcome = FAILED;
                else if (count > 1 && i % BATCH_COUNT == 0)
                        put(writer, OP_MARK);
                if (outcome == WRITTEN)
                        outcome = plain_write(writer, item);
                Py_DECREF(item);
                if (outcome == WRITTEN && PyList_GET_SIZE(list) != count)
                        outcome = NOT_PLAIN; /* as in write_dict */
                if (outcome == WRITTEN && !room(writer, 1))
                        outcome = FAILED;
                if (outcome == WRITTEN && (count == 1 || (i + 1) % BATCH_COUNT == 0 || i + 1 == count))
                        put(writer, count == 1 ? OP_APPEND : OP_APPENDS);
        }
        return outcome;
}

static enum outcome write_tuple(struct writer *writer, PyObject *tuple)
{
        Py_ssize_t count = PyTuple_GET_SIZE(tuple);
        enum outcome outcome;

        if (!room(writer, 1))
                return FAILED;
        if (count == 0) {
                put(writer, OP_TUPLE0);
                return WRITTEN;
        }
        if (count > 3)
                put(writer, OP_MARK);
        for (Py_ssize_t i = 0; i < count; i++) {
                outcome = plain_write(writer, PyTuple_GET_ITEM(tuple, i));
                if (outcome != WRITTEN)
                        return outcome;
        }
        /* The tuple may contain itself through a list or dict. */
        if (table_find(&writer->memo, (uint64_t)(uintptr_t)tuple))
                return NOT_PLAIN;
        if (!room(writer, 1))
                return FAILED;
        put(writer, count > 3 ? OP_TUPLE : OP_TUPLE1 + (int)count - 1);
        return memoize(writer, tuple);
}

/* Writes the items of an OrderedDict in batches. Most often they have the order of its underlying dict. */
static enum outcome write_items(struct writer *writer, PyObject *dict, PyObject *items)
{
        struct ahead ahead = ahead_begin(dict);
        PyObject *item = PyIter_Next(items), *next;
        enum outcome outcome = WRITTEN;
        int batch = 0;
        bool is_alone = false;

        while (item && outcome == WRITTEN) {
                next = PyIter_Next(items);
                ahead_step(&ahead);
                if (batch == 0) {
                        is_alone = !next;
                        if (!room(writer, 1))
                                outcome = FAILED;
                        else if (!is_alone)
                                put(writer, OP_MARK);
                }
                if (outcome == WRITTEN && (!PyTuple_CheckExact(item) || PyTuple_GET_SIZE(item) != 2))
                        outcome = NOT_PLAIN;
                if (outcome == WRITTEN)
                        outcome = plain_write(writer, PyTuple_GET_ITEM(item, 0));
                if (outcome == WRITTEN)
                        outcome = plain_write(writer, PyTuple_GET_ITEM(item, 1));
                if (outcome == WRITTEN && !room(writer, 1))
                        outcome = FAILED;
                if (outcome == WRITTEN && (++batch == BATCH_COUNT || !next)) {
                        put(writer, is_alone ? OP_SETITEM : OP_SETITEMS);
                        batch = 0;
                }
                Py_DECREF(item);
                item = next;
        }
        Py_XDECREF(item);
        return PyErr_Occurred() ? FAILED : outcome;
}

/* Writes what the class's reduction returns: class, no arguments, attributes, items. */
static enum outcome write_ordered_dict(struct writer *writer, PyObject *dict)
{
        PyObject *reduction = PyObject_CallMethod(dict, "__reduce__", NULL), *attributes;
        enum outcome outcome;

        if (!reduction)
                return FAILED;
        if (!PyTuple_CheckExact(reduction) || PyTuple_GET_SIZE(reduction) != 5 ||
            PyTuple_GET_ITEM(reduction, 0) != torch.ordered_dict ||
            !PyTuple_CheckExact(PyTuple_GET_ITEM(reduction, 1)) ||
            PyTuple_GET_SIZE(PyTuple_GET_ITEM(reduction, 1)) > 0 ||
            PyTuple_GET_ITEM(reduction, 3) != Py_None || !PyIter_Check(PyTuple_GET_ITEM(reduction, 4))) {
                Py_DECREF(reduction);
                return NOT_PLAIN;
        }
        attributes = PyTuple_GET_ITEM(reduction, 2);
        outcome = write_global(writer, torch.ordered_dict);
        if (outcome == WRITTEN && !room(writer, 2))
                outcome = FAILED;
        if (outcome == WRITTEN) {
                put(writer, OP_TUPLE0);
                put(writer, OP_REDUCE);
                outcome = memoize(writer, dict);
        }
        if (outcome == WRITTEN)
                outcome = write_items(writer, dict, PyTuple_GET_ITEM(reduction, 4));
        if (outcome == WRITTEN && attributes != Py_None) {
                outcome = plain_write(writer, attributes);
                if (outcome == WRITTEN && !room(writer, 1))
                        outcome = FAILED;
                if (outcome == WRITTEN)
                        put(writer, OP_BUILD);
        }
        Py_DECREF(reduction);
        return outcome;
}

static enum outcome write_new(struct writer *writer, PyObject *object)
{
        PyTypeObject *type = Py_TYPE(object);
        enum outcome outcome = NOT_PLAIN;

        if (type == (PyTypeObject *)torch.tensor_type)
                return write_tensor(writer, object);
        if (writer->depth == DEPTH_MAX)
                return NOT_PLAIN;
        if (Py_EnterRecursiveCall(" while pickling an object"))
                return FAILED;
        writer->depth++;
        if (type == &PyDict_Type)
                outcome = write_dict(writer, object);
        else if (type == &PyList_Type)
                outcome = write_list(writer, object);
        else if (type == &PyTuple_Type)
                outcome = write_tuple(writer, object);
        else if (type == (PyTypeObject *)torch.ordered_dict)
                outcome = write_ordered_dict(writer, object);
        else
                outcome = write_leaf(writer, object);
        writer->depth--;
        Py_LeaveRecursiveCall();
        return outcome;
}

enum outcome plain_write(struct writer *writer, PyObject *object)
{
        if (PyUnicode_CheckExact(object))
                return write_text(writer, object);
        if (PyLong_CheckExact(object))
                return write_number(writer, object);
        if (PyFloat_CheckExact(object))
                return write_float(writer, object);
        if (!room(writer, 5))
                return FAILED;
        if (object == Py_None || object == Py_True || object == Py_False) {
                put(writer, object == Py_None ? OP_NONE : object == Py_True ? OP_TRUE : OP_FALSE);
                return WRITTEN;
        }
        return write_known(writer, object) ? WRITTEN : write_new(writer, object);
}

static void writer_done(struct writer *writer, bool is_written)
{
        size_t pickle_size = is_written ? (size_t)PyBytes_GET_SIZE(writer->bytes) : 0;

        for (size_t i = 0; i < writer->memo.count; i++)
                Py_DECREF((PyObject *)(uintptr_t)writer->memo.pairs[i].key);
        Py_XDECREF(writer->bytes);
        Py_XDECREF((PyObject *)writer->storages);
        plain_give_spare(writer, pickle_size);
}

static enum outcome write_all(struct writer *writer, PyObject *object)
{
        enum outcome outcome;

        put(writer, OP_PROTO);
        put(writer, 2);
        outcome = plain_write(writer, object);
        if (outcome == WRITTEN)
                outcome = check_dtypes(writer);
        if (outcome == WRITTEN && !room(writer, 1))
                outcome = FAILED;
        if (outcome != WRITTEN)
                return outcome;
        put(writer, OP_STOP);
        return _PyBytes_Resize(&writer->bytes, writer->at - PyBytes_AS_STRING(writer->bytes)) < 0 ? FAILED : WRITTEN;
}

PyObject *plain_dump(PyObject *module, PyObject *arguments)
{
        struct writer writer = { 0 };
        PyObject *object, *result = NULL;
        enum outcome outcome = FAILED;
        int takes_cuda = 0, enabled;

        (void)module;
        if (!PyArg_ParseTuple(arguments, "O|p", &object, &takes_cuda) || !plain_load())
                return NULL;
        writer.takes_cuda = takes_cuda;
        writer.bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)plain_take_spare(&writer) + (1 << 14));
        writer.storages = ranges_new();
        enabled = PyGC_Disable(); /* a collection would find nothing: all objects made here are in use */
        if (writer.bytes && writer.storages) {
                writer.at = PyBytes_AS_STRING(writer.bytes);
                writer.end = writer.at + PyBytes_GET_SIZE(writer.bytes);
                outcome = write_all(&writer, object);
        }
        if (outcome == WRITTEN)
                result = PyTuple_Pack(2, writer.bytes, (PyObject *)writer.storages);
        else if (outcome == NOT_PLAIN)
                result = Py_NewRef(Py_None);
        writer_done(&writer, outcome == WRITTEN);
        if (enabled)
                PyGC_Enable();
        return result;
}
