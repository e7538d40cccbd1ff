/* delta.c - the functions of delta/delta.h. A part is a tuple (offset, size, width, sum, from); without `from`, that is the offset. */
#include "module.h"

#include <limits.h>
#include <stdlib.h>

#include "delta/delta.h"

/* Reads a list of parts, which must lie in `size` bytes of memory. NULL: an exception is set. */
static struct delta_part *read_parts(PyObject *list, uint64_t size, size_t *ret_count)
{
        PyObject *sequence = PySequence_Tuple(list);
        struct delta_part *parts;

        if (!sequence)
                return NULL;
        *ret_count = (size_t)PyTuple_GET_SIZE(sequence);
        parts = calloc(*ret_count + 1, sizeof *parts);
        if (!parts)
                PyErr_NoMemory();
        for (size_t i = 0; parts && i < *ret_count; i++) {
                unsigned long long offset, bytes, sum, from = ULLONG_MAX;
                unsigned width;

                if (!PyArg_ParseTuple(PyTuple_GET_ITEM(sequence, (Py_ssize_t)i), "KKIK|K;a part is (offset, size, width, sum, from)", &offset, &bytes,
                                      &width, &sum, &from)) {
                        free(parts);
                        parts = NULL;
                        continue;
                }
                from = from == ULLONG_MAX ? offset : from;
                if (from > size || bytes > size - from || (width != 1 && width != 2 && width != 4) || bytes % width) {
                        PyErr_Format(PyExc_ValueError, "part %zu does not lie in the state, or has the width %u", i, width);
                        free(parts);
                        parts = NULL;
                } else {
                        parts[i] = (struct delta_part){ .offset = offset, .size = bytes, .from = from, .width = width, .sum = sum };
                }
        }
        Py_DECREF(sequence);
        return parts;
}

static PyObject *list_of(const struct delta_part *parts, size_t count)
{
        PyObject *list = PyList_New((Py_ssize_t)count);

        for (size_t i = 0; list && i < count; i++) {
                PyObject *part = Py_BuildValue("(KKIKK)", (unsigned long long)parts[i].offset, (unsigned long long)parts[i].size, parts[i].width,
                                               (unsigned long long)parts[i].sum, (unsigned long long)parts[i].from);

                if (!part)
                        Py_CLEAR(list);
                else
                        PyList_SET_ITEM(list, (Py_ssize_t)i, part);
        }
        return list;
}

PyObject *delta_sums_of(PyObject *module, PyObject *arguments)
{
        PyObject *list, *result = NULL;
        struct delta_part *parts;
        Py_buffer state;
        size_t count;

        if (!PyArg_ParseTuple(arguments, "y*O", &state, &list))
                return NULL;
        parts = read_parts(list, (uint64_t)state.len, &count);
        if (parts) {
                Py_BEGIN_ALLOW_THREADS
                delta_sums(state.buf, parts, count);
                Py_END_ALLOW_THREADS
                result = list_of(parts, count);
        }
        free(parts);
        PyBuffer_Release(&state);
        return result;
}

PyObject *delta_sum_of_state(PyObject *module, PyObject *list)
{
        size_t count;
        struct delta_part *parts = read_parts(list, UINT64_MAX, &count);
        PyObject *result = parts ? PyLong_FromUnsignedLongLong(delta_state_sum(parts, count)) : NULL;

        free(parts);
        return result;
}

PyObject *delta_between(PyObject *module, PyObject *arguments)
{
        unsigned long long limit, whole = 0;
        struct nebula_error error;
        enum nebula_status status;
        struct delta_part *parts = NULL;
        PyObject *list, *result = NULL;
        Py_buffer base, next;
        void *delta = NULL;
        size_t count, size;

        if (!PyArg_ParseTuple(arguments, "y*y*OK|K", &base, &next, &list, &limit, &whole))
                return NULL;
        if (base.len != next.len)
                PyErr_SetString(PyExc_ValueError, "the two states have different sizes");
        else
                parts = read_parts(list, (uint64_t)next.len, &count);
        if (parts) {
                Py_BEGIN_ALLOW_THREADS
                status = delta_make(base.buf, next.buf, whole ? whole : (uint64_t)next.len, parts, count, limit, &delta, &size, &error);
                Py_END_ALLOW_THREADS
                if (status)
                        nebula_raise(&error);
                else
                        result = Py_BuildValue("(NN)", delta ? PyBytes_FromStringAndSize(delta, (Py_ssize_t)size) : Py_NewRef(Py_None),
                                               list_of(parts, count));
        }
        free(delta);
        free(parts);
        PyBuffer_Release(&base);
        PyBuffer_Release(&next);
        return result;
}

/* Takes the bytes of all deltas, which the caller releases. Returns how many it took; with an exception set there are fewer. */
static size_t take_deltas(PyObject *tuple, Py_buffer *buffers, struct delta_bytes *deltas)
{
        size_t count = (size_t)PyTuple_GET_SIZE(tuple), taken = 0;

        while (taken < count && !PyObject_GetBuffer(PyTuple_GET_ITEM(tuple, (Py_ssize_t)taken), &buffers[taken], PyBUF_SIMPLE)) {
                deltas[taken] = (struct delta_bytes){ buffers[taken].buf, (uint64_t)buffers[taken].len };
                taken++;
        }
        return taken;
}

static PyObject *apply_deltas(Py_buffer *state, uint64_t sum, PyObject *tuple)
{
        size_t count = (size_t)PyTuple_GET_SIZE(tuple), taken = 0;
        Py_buffer *buffers = calloc(count + 1, sizeof *buffers);
        struct delta_bytes *deltas = calloc(count + 1, sizeof *deltas);
        enum nebula_status status = NEBULA_OK;
        struct nebula_error error;

        if (!buffers || !deltas)
                PyErr_NoMemory();
        else
                taken = take_deltas(tuple, buffers, deltas);
        if (!PyErr_Occurred()) {
                Py_BEGIN_ALLOW_THREADS
                status = delta_apply(state->buf, (uint64_t)state->len, &sum, deltas, count, &error);
                Py_END_ALLOW_THREADS
                if (status)
                        nebula_raise(&error);
        }
        while (taken)
                PyBuffer_Release(&buffers[--taken]);
        free(buffers);
        free(deltas);
        return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(sum);
}

PyObject *delta_apply_to(PyObject *module, PyObject *arguments)
{
        PyObject *list, *tuple, *result;
        unsigned long long sum;
        Py_buffer state;

        if (!PyArg_ParseTuple(arguments, "w*KO", &state, &sum, &list))
                return NULL;
        tuple = PySequence_Tuple(list);
        result = tuple ? apply_deltas(&state, sum, tuple) : NULL;
        Py_XDECREF(tuple);
        PyBuffer_Release(&state);
        return result;
}
