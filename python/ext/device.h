/*
 * device.h - queues copies from a GPU and to it, without CUDA's headers and without a call to torch for each copy.
 *
 * It uses the driver's library that torch has loaded. If the driver can (CUDA 12.8 and later), one call queues thousands of copies;
 * else each copy takes a call.
 */
#ifndef NB_PYTHON_DEVICE_H
#define NB_PYTHON_DEVICE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* One copy: addresses and a size in bytes. */
struct device_piece {
        uint64_t to, from, size;
};

/* In both functions: `stream` is a handle of the driver, for this thread's current device. `pieces` are packed device_piece. If may_batch
 * is false, each copy is a call of its own. They raise RuntimeError with the driver's reason; then some copies may have been queued. */

/* copy_from_device(stream, pieces, may_batch): queues copies to the host. */
PyObject *device_copy_out(PyObject *module, PyObject *arguments);
/* copy_to_device(stream, pieces, buffer, may_batch): copies the pieces one after the other into the memory at address `buffer`, and queues
 * copies from there to the device. The memory at `buffer` must stay as it is until these are done. */
PyObject *device_copy_in(PyObject *module, PyObject *arguments);

#endif
