/* Queues copies from a GPU: see device.h. Types and numbers are those of the driver's documented interface. */
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
        int (*copy)(void *to, uint64_t from, size_t size, void *stream);
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
                find(library, "cuMemcpyDtoHAsync_v2", &driver.copy);
                find(library, "cuMemcpyBatchAsync_v2", &driver.copy_batch);
                find(library, "cuMemcpyBatchAsync", &driver.copy_batch_12);
                find(library, "cuGetErrorString", &driver.error_text);
        } else {
                library = dlopen("libamdhip64.so", RTLD_LAZY | RTLD_NOLOAD);
                if (library)
                        find(library, "hipMemcpyDtoHAsync", &driver.copy);
        }
        driver.is_ready = driver.copy != NULL;
        if (!driver.is_ready)
                PyErr_SetString(PyExc_RuntimeError, "torch has loaded no driver of a GPU that is known here");
        return driver.is_ready;
}

/* Arrays with `count` entries each. */
struct batch {
        uint64_t *to, *from;
        size_t *sizes, count;
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
                error = driver.copy((void *)(uintptr_t)batch->to[i], batch->from[i], batch->sizes[i], stream);
        return error;
}

static PyObject *refused(int error)
{
        const char *text = NULL;

        if (driver.error_text)
                driver.error_text(error, &text);
        return PyErr_Format(PyExc_RuntimeError, "the driver of the GPU refuses to copy: %s (error %d)",
                            text ? text : "it gives no reason", error);
}

PyObject *device_copy(PyObject *module, PyObject *arguments)
{
        unsigned long long stream_number;
        struct batch batch = { 0 };
        const char *packed;
        Py_ssize_t size;
        int error, may_batch = 1;
        uint64_t *room;
        void *stream;

        if (!PyArg_ParseTuple(arguments, "Ky#|p", &stream_number, &packed, &size, &may_batch) || !load_driver())
                return NULL;
        stream = (void *)(uintptr_t)stream_number;
        batch.count = (size_t)size / sizeof(struct device_piece);
        if (batch.count == 0)
                Py_RETURN_NONE;
        room = PyMem_Malloc(batch.count * sizeof(struct device_piece));
        if (!room)
                return PyErr_NoMemory();
        batch.to = room;
        batch.from = room + batch.count;
        batch.sizes = (size_t *)(room + 2 * batch.count);
        for (size_t i = 0; i < batch.count; i++) {
                struct device_piece piece;

                memcpy(&piece, packed + i * sizeof piece, sizeof piece);
                batch.to[i] = piece.to;
                batch.from[i] = piece.from;
                batch.sizes[i] = piece.size;
        }
        Py_BEGIN_ALLOW_THREADS /* a driver with a full queue blocks */
        /* A single copy is queued by itself: then its target need not be pinned. */
        error = may_batch && batch.count > 1 ? queue_batch(&batch, stream) : DRIVER_NOT_SUPPORTED;
        if (error == DRIVER_NOT_SUPPORTED)
                error = queue_each(&batch, stream);
        Py_END_ALLOW_THREADS
        PyMem_Free(room);
        if (error != 0)
                return refused(error);
        Py_RETURN_NONE;
}
