/*
 * device.h - queues copies from a GPU, without CUDA's headers and without a call to torch for each copy.
 *
 * It uses the driver's library that torch has loaded. If the driver can (CUDA 12.8 and later), one call queues thousands of copies;
 * else each copy takes a call.
 */
#ifndef NB_PYTHON_DEVICE_H
#define NB_PYTHON_DEVICE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* One copy to the host: addresses and a size. */
struct device_piece {
        uint64_t to, from, size;
};

/* copy_from_device(stream, pieces, may_batch): `stream` is a handle of the driver, for this thread's current device. `pieces` are packed
 * device_piece. If may_batch is false, each copy is a call of its own. Raises RuntimeError with the driver's reason; then some copies
 * may have been queued. */
PyObject *device_copy(PyObject *module, PyObject *arguments);

#endif
