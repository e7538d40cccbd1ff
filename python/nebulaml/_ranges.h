/*
 * _ranges.h - Ranges: places in memory, and what keeps each alive.
 *
 *      Ranges() ; .append(address, size in bytes, owner) ; .leave_out(index) ; len() ; [index]
 *
 * An address of None is a range whose bytes somebody else brings: see _checkpoint.c. leave_out makes it one. A save fixes
 * the list, since C reads it without the GIL: whoever changes it from then on gets an error.
 *
 * Not a list of tuples: those of thousands of small tensors take time to make, and are so many that the cycle collector
 * runs after each save. It does not look in here, as no owner refers to the list that holds it.
 */
#ifndef NB_PYTHON_RANGES_H
#define NB_PYTHON_RANGES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "nebula.h"

struct ranges {
        PyObject_HEAD
        size_t count, capacity;
        struct nebula_range *ranges;
        PyObject **owners;
        bool is_fixed;
};

extern PyTypeObject *ranges_type;

int ranges_add_type(PyObject *module);
/* A new object, or NULL with a Python error. */
struct ranges *ranges_new(void);
/* Takes a reference to `owner`; false with a Python error. */
bool ranges_add(struct ranges *ranges, const void *address, uint64_t size, PyObject *owner);

#endif
