/*
 * ranges.h - Ranges: places in memory, and what keeps each alive.
 *
 *      Ranges() ; .append(address, size in bytes, owner) ; len() ; [index]
 *      .put_on(device, index, address) ; .devices() ; .owners(device, least) ; .pieces(device, image, offsets, least, most, piece)
 *
 * A range on a device has a number of that device, and an address there; its address here is None, and its bytes are brought by
 * who can: see checkpoint.c and device.py. A save fixes the list, since C reads it without the GIL: whoever changes it from then
 * on gets an error.
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

#define RANGES_HOST -1 /* as a device's number */

struct range_source {
        int device;
        const void *address; /* there; NULL on the host */
};

struct ranges {
        PyObject_HEAD
        size_t count, capacity;
        struct nebula_range *ranges; /* data is NULL for those on a device */
        struct range_source *sources;
        PyObject **owners;
        bool is_fixed;
};

extern PyTypeObject *ranges_type;

int ranges_add_type(PyObject *module);
/* A new object, or NULL with a Python error. */
struct ranges *ranges_new(void);
/* Takes a reference to `owner`; false with a Python error. */
bool ranges_add(struct ranges *ranges, int device, const void *address, uint64_t size, PyObject *owner);
/* Wherever it lies. */
static inline const void *ranges_address(const struct ranges *ranges, size_t index)
{
        return ranges->ranges[index].data ? ranges->ranges[index].data : ranges->sources[index].address;
}

#endif
