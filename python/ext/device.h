/*
 * device.h - queueing copies from a GPU, without CUDA's headers and without a call to torch for each.
 *
 * The driver's library is the one that torch has loaded. Thousands of copies are one call where it has such a call (CUDA 12.8 and
 * later), and else one each.
 */
#ifndef NB_PYTHON_DEVICE_H
#define NB_PYTHON_DEVICE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* One copy to the host: addresses, and bytes. */
struct device_piece {
        uint64_t to, from, size;
};

/* copy_from_device(stream, pieces, may_batch): `stream` is the driver's handle of one, whose device is the current one of this thread;
 * `pieces` are packed device_piece; may_batch false: as where the driver has no call for many. Raises RuntimeError with the driver's
 * reason; then some may have been queued. */
PyObject *device_copy(PyObject *module, PyObject *arguments);

#endif
