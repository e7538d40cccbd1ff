/* order.c - order(versions): the order of versions, as store/order.h decides it for agent and command. */
#include "module.h"

#include "store/order.h"

/* The entry of (tag, began, sequence, abandoned). False: an exception is set. `version` keeps the tag. */
static bool read_entry(PyObject *version, struct order_entry *ret_entry)
{
        unsigned long long began, sequence;
        const char *tag;
        int is_abandoned;

        if (!PyArg_ParseTuple(version, "sKKp;a version is (tag, began, sequence, abandoned)", &tag, &began, &sequence, &is_abandoned))
                return false;
        *ret_entry = order_entry(tag, sequence, NULL);
        ret_entry->began = began;
        ret_entry->is_abandoned = is_abandoned;
        return true;
}

static PyObject *list_of(const size_t *indices, size_t count)
{
        PyObject *list = PyList_New((Py_ssize_t)count);

        for (size_t i = 0; list && i < count; i++) {
                PyObject *index = PyLong_FromSize_t(indices[i]);

                if (!index)
                        Py_CLEAR(list);
                else
                        PyList_SET_ITEM(list, (Py_ssize_t)i, index);
        }
        return list;
}

PyObject *order_versions(PyObject *module, PyObject *versions)
{
        PyObject *sequence = PySequence_Tuple(versions), *result = NULL;
        size_t count = sequence ? (size_t)PyTuple_GET_SIZE(sequence) : 0, used = 0, *indices;
        struct order_entry *entries;
        bool is_read = true;

        if (!sequence)
                return NULL;
        entries = calloc(count + 1, sizeof *entries);
        indices = calloc(count + 1, sizeof *indices);
        for (size_t i = 0; entries && indices && is_read && i < count; i++) {
                PyObject *version = PyTuple_GET_ITEM(sequence, (Py_ssize_t)i);

                is_read = PyTuple_Check(version) && read_entry(version, &entries[i]);
                if (!is_read && !PyErr_Occurred())
                        PyErr_SetString(PyExc_TypeError, "a version is (tag, began, sequence, abandoned)");
        }
        if (entries && indices && is_read && order_sort(entries, count, indices, &used))
                result = list_of(indices, used);
        else if (!PyErr_Occurred())
                PyErr_NoMemory();
        free(entries);
        free(indices);
        Py_DECREF(sequence);
        (void)module;
        return result;
}
