/* Queues copies from a GPU and to it: see device.h. Types and numbers are those of the driver's documented interface. */
#include "device.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

#define DRIVER_NOT_SUPPORTED 801 /* CUDA_ERROR_NOT_SUPPORTED */
#define ORDER_STREAM 1           /* CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the order of the stream */

/* CUmemcpyAttributes. The hints are for managed memory. */
struct batch_attributes {
        int source_order;
        struct {
                int type, id;
        } source_hint, destination_hint;
        unsigned flags;
};

/* The driver's functions; each returns a CUresult, 0 for success. */
static struct {
        bool is_ready;
        int (*copy_out)(void *to, uint64_t from, size_t size, void *stream);
        int (*copy_in)(uint64_t to, const void *from, size_t size, void *stream);
        int (*copy_batch)(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, struct batch_attributes *attributes,
                          size_t *attribute_starts, size_t attribute_count, void *stream);
        int (*copy_batch_12)(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, struct batch_attributes *attributes,
                             size_t *attribute_starts, size_t attribute_count, size_t *ret_failed, void *stream);
        int (*error_text)(int error, const char **ret_text);
} driver;

static void find(void *library, const char *name, void *ret_function)
{
        void *function = dlsym(library, name);

        memcpy(ret_function, &function, sizeof function);
}

/* Loads NVIDIA's driver, or AMD's, whose functions have other names. The GIL is held. */
static bool load_driver(void)
{
        void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD); /* stays open, as in torch */

        if (driver.is_ready)
                return true;
        if (library) {
                find(library, "cuMemcpyDtoHAsync_v2", &driver.copy_out);
                find(library, "cuMemcpyHtoDAsync_v2", &driver.copy_in);
                find(library, "cuMemcpyBatchAsync_v2", &driver.copy_batch);
                find(library, "cuMemcpyBatchAsync", &driver.copy_batch_12);
                find(library, "cuGetErrorString", &driver.error_text);
        } else {
                library = dlopen("libamdhip64.so", RTLD_LAZY | RTLD_NOLOAD);
                if (library) {
                        find(library, "hipMemcpyDtoHAsync", &driver.copy_out);
                        find(library, "hipMemcpyHtoDAsync", &driver.copy_in);
                }
        }
        driver.is_ready = driver.copy_out && driver.copy_in;
        if (!driver.is_ready)
                PyErr_SetString(PyExc_RuntimeError, "torch has loaded no driver of a GPU that is known here");
        return driver.is_ready;
}

/* Arrays with `count` entries each, in one block of memory that begins at `to`. */
struct batch {
        uint64_t *to, *from;
        size_t *sizes, count;
        bool is_inward; /* to the device */
};

static int queue_batch(const struct batch *batch, void *stream)
{
        struct batch_attributes attributes = { .source_order = ORDER_STREAM };
        size_t start = 0, failed = 0;

        if (driver.copy_batch)
                return driver.copy_batch(batch->to, batch->from, batch->sizes, batch->count, &attributes, &start, 1, stream);
        if (driver.copy_batch_12)
                return driver.copy_batch_12(batch->to, batch->from, batch->sizes, batch->count, &attributes, &start, 1, &failed,
                                            stream);
        return DRIVER_NOT_SUPPORTED;
}

static int queue_each(const struct batch *batch, void *stream)
{
        int error = 0;

        for (size_t i = 0; error == 0 && i < batch->count; i++)
                error = batch->is_inward ? driver.copy_in(batch->to[i], (const void *)(uintptr_t)batch->from[i], batch->sizes[i], stream)
                                         : driver.copy_out((void *)(uintptr_t)batch->to[i], batch->from[i], batch->sizes[i], stream);
        return error;
}

static int queue(const struct batch *batch, bool may_batch, void *stream)
{
        int error = DRIVER_NOT_SUPPORTED;

        /* A single copy is queued by itself: then its target need not be pinned. */
        if (may_batch && batch->count > 1)
                error = queue_batch(batch, stream);
        return error == DRIVER_NOT_SUPPORTED ? queue_each(batch, stream) : error;
}

/* PyMem_Free(ret_batch->to) frees the batch. False: an exception is set. */
static bool unpack(const char *packed, Py_ssize_t size, struct batch *ret_batch)
{
        size_t count = (size_t)size / sizeof(struct device_piece);
        uint64_t *room = PyMem_Malloc((count + 1) * sizeof(struct device_piece));

        if (!room) {
                PyErr_NoMemory();
                return false;
        }
        *ret_batch = (struct batch){ .to = room, .from = room + count, .sizes = (size_t *)(room + 2 * count), .count = count };
        for (size_t i = 0; i < count; i++) {
                struct device_piece piece;

                memcpy(&piece, packed + i * sizeof piece, sizeof piece);
                ret_batch->to[i] = piece.to;
                ret_batch->from[i] = piece.from;
                ret_batch->sizes[i] = piece.size;
        }
        return true;
}

static PyObject *refused(int error)
{
        const char *text = NULL;

        if (driver.error_text)
                driver.error_text(error, &text);
        return PyErr_Format(PyExc_RuntimeError, "the driver of the GPU refuses to copy: %s (error %d)",
                            text ? text : "it gives no reason", error);
}

PyObject *device_copy_out(PyObject *module, PyObject *arguments)
{
        unsigned long long stream;
        const char *packed;
        struct batch batch;
        Py_ssize_t size;
        int error, may_batch = 1;

        if (!PyArg_ParseTuple(arguments, "Ky#|p", &stream, &packed, &size, &may_batch) || !load_driver() || !unpack(packed, size, &batch))
                return NULL;
        Py_BEGIN_ALLOW_THREADS /* a driver with a full queue blocks */
        error = queue(&batch, may_batch, (void *)(uintptr_t)stream);
        Py_END_ALLOW_THREADS
        PyMem_Free(batch.to);
        return error ? refused(error) : Py_NewRef(Py_None);
}

PyObject *device_copy_in(PyObject *module, PyObject *arguments)
{
        unsigned long long stream, buffer;
        const char *packed;
        struct batch batch;
        Py_ssize_t size;
        int error, may_batch = 1;

        if (!PyArg_ParseTuple(arguments, "Ky#K|p", &stream, &packed, &size, &buffer, &may_batch) || !load_driver() ||
            !unpack(packed, size, &batch))
                return NULL;
        batch.is_inward = true;
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < batch.count; i++) {
                memcpy((void *)(uintptr_t)buffer, (const void *)(uintptr_t)batch.from[i], batch.sizes[i]);
                batch.from[i] = buffer;
                buffer += batch.sizes[i];
        }
        error = queue(&batch, may_batch, (void *)(uintptr_t)stream);
        Py_END_ALLOW_THREADS
        PyMem_Free(batch.to);
        return error ? refused(error) : Py_NewRef(Py_None);
}
