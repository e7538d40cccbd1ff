/*
 * ranges.h - Ranges: places in memory, and the owner that keeps each alive.
 *
 *      Ranges() ; .append(address, size in bytes, owner) ; .extend([bytes-like object]) ; len() ; [index]
 *      .put_on(device, index, address) ; .devices() ; .owners(device, least) ; .pieces(device, image, offsets, least, most, piece)
 *
 * A range on a device has the device's number and an address there; its host address is None. The filler of a save copies its bytes
 * (checkpoint.c, device.py). A save fixes the list, because C reads it without the GIL: later changes raise an error.
 *
 * Not a list of tuples: thousands of tuples take time to make, and make the cycle collector run after each save. The collector does
 * not visit this type, because no owner refers to the list that holds it.
 */
#ifndef NB_PYTHON_RANGES_H
#define NB_PYTHON_RANGES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "nebula.h"

#define RANGES_HOST -1 /* as a device's number */
#define RANGES_CONSTANT -2 /* as a device's number: on the host, and nothing writes there; copied after the save */

struct range_source {
        int device;
        const void *address; /* on the device; NULL on the host */
};

struct ranges {
        PyObject_HEAD
        size_t count, capacity;
        struct nebula_range *ranges; /* data is NULL for ranges on a device */
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
/* Makes the ranges with the numbers in this list constant, unless they are empty; false with a Python error. */
bool ranges_set_constant(struct ranges *ranges, PyObject *numbers);
/* The address of a range, on the host or on a device. */
static inline const void *ranges_address(const struct ranges *ranges, size_t index)
{
        return ranges->ranges[index].data ? ranges->ranges[index].data : ranges->sources[index].address;
}

#endif
