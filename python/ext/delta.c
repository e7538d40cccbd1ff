/* delta.c - the functions of delta/delta.h. A part is a tuple (offset, size, width, sum). */
#include "module.h"

#include <stdlib.h>

#include "delta/delta.h"

/* Reads a list of parts, which must lie in `size` bytes. NULL: an exception is set. */
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
                unsigned long long offset, bytes, sum;
                unsigned width;

                if (!PyArg_ParseTuple(PyTuple_GET_ITEM(sequence, (Py_ssize_t)i), "KKIK;a part is (offset, size, width, sum)", &offset, &bytes, &width, &sum)) {
                        free(parts);
                        parts = NULL;
                } else if (offset > size || bytes > size - offset || (width != 1 && width != 2 && width != 4) || bytes % width) {
                        PyErr_Format(PyExc_ValueError, "part %zu does not lie in the state, or has the width %u", i, width);
                        free(parts);
                        parts = NULL;
                } else {
                        parts[i] = (struct delta_part){ .offset = offset, .size = bytes, .width = width, .sum = sum };
                }
        }
        Py_DECREF(sequence);
        return parts;
}

static PyObject *list_of(const struct delta_part *parts, size_t count)
{
        PyObject *list = PyList_New((Py_ssize_t)count);

        for (size_t i = 0; list && i < count; i++) {
                PyObject *part = Py_BuildValue("(KKIK)", (unsigned long long)parts[i].offset, (unsigned long long)parts[i].size, parts[i].width,
                                               (unsigned long long)parts[i].sum);

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
        unsigned long long limit;
        struct nebula_error error;
        enum nebula_status status;
        struct delta_part *parts = NULL;
        PyObject *list, *result = NULL;
        Py_buffer base, next;
        void *delta = NULL;
        size_t count, size;

        if (!PyArg_ParseTuple(arguments, "y*y*OK", &base, &next, &list, &limit))
                return NULL;
        if (base.len != next.len)
                PyErr_SetString(PyExc_ValueError, "the two states have different sizes");
        else
                parts = read_parts(list, (uint64_t)next.len, &count);
        if (parts) {
                Py_BEGIN_ALLOW_THREADS
                status = delta_make(base.buf, next.buf, (uint64_t)next.len, parts, count, limit, &delta, &size, &error);
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

PyObject *delta_apply_to(PyObject *module, PyObject *arguments)
{
        unsigned long long before;
        struct nebula_error error;
        enum nebula_status status;
        Py_buffer state, delta;
        uint64_t sum;

        if (!PyArg_ParseTuple(arguments, "w*Ky*", &state, &before, &delta))
                return NULL;
        sum = before;
        Py_BEGIN_ALLOW_THREADS
        status = delta_apply(state.buf, (uint64_t)state.len, &sum, delta.buf, (uint64_t)delta.len, &error);
        Py_END_ALLOW_THREADS
        PyBuffer_Release(&state);
        PyBuffer_Release(&delta);
        return status ? nebula_raise(&error) : PyLong_FromUnsignedLongLong(sum);
}
