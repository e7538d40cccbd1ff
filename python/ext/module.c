/*
 * module.c - the extension module: its functions, constants and error path.
 *
 * Failures become Python exceptions through the callable given to
 * set_error_factory(status name, message, errno, HTTP status) -> exception.
 */
#include "module.h"

#include <stdlib.h>

#include "device.h"
#include "pickle.h"
#include "client/client.h"
#include "image/image.h"
#include "os/os.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Nebula's files hold numbers in the order of little-endian machines, as torch's do there: this machine is none"
#endif

static PyObject *error_factory;

PyObject *nebula_exception(const struct nebula_error *error)
{
        if (!error_factory)
                return PyObject_CallFunction(PyExc_RuntimeError, "s", error->message);
        return PyObject_CallFunction(error_factory, "sNii", nebula_status_name(error->status),
                                     PyUnicode_DecodeUTF8(error->message, (Py_ssize_t)strlen(error->message), "replace"),
                                     error->sys_errno, error->http_status);
}

PyObject *nebula_raise(const struct nebula_error *error)
{
        PyObject *exception = nebula_exception(error);

        if (exception) {
                PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
                Py_DECREF(exception);
        }
        return NULL;
}

PyObject *nebula_text(char *text)
{
        PyObject *result = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "surrogateescape");

        nebula_text_free(text);
        return result;
}

static PyObject *set_error_factory(PyObject *module, PyObject *factory)
{
        Py_XSETREF(error_factory, Py_NewRef(factory));
        Py_RETURN_NONE;
}

static PyObject *encode_name(PyObject *module, PyObject *name)
{
        const char *utf8 = PyUnicode_AsUTF8(name);
        struct nebula_error error = { 0 };
        char text[256];

        if (!utf8)
                return NULL;
        if (name_encode(utf8, text, &error) != NEBULA_OK)
                return nebula_raise(&error);
        return PyUnicode_FromString(text);
}

static PyObject *step_of(PyObject *module, PyObject *tag)
{
        const char *utf8 = PyUnicode_AsUTF8(tag);

        return utf8 ? PyLong_FromLongLong(name_step(utf8)) : NULL;
}

static PyObject *follows_step(PyObject *module, PyObject *tag)
{
        const char *utf8 = PyUnicode_AsUTF8(tag);

        return utf8 ? PyBool_FromLong(name_follows_step(utf8)) : NULL;
}

static PyObject *leave(PyObject *module, PyObject *unused)
{
        checkpoint_leave();
        Py_RETURN_NONE;
}

/* The bytes of a torch file around its payloads: before the first, between them, and after the last. */
static PyObject *gaps_of(const struct zip_layout *layout, const uint64_t *sizes, const char *image)
{
        PyObject *gaps = PyList_New(0);
        uint64_t from = 0;

        for (size_t i = 0; gaps && i <= layout->storage_count; i++) {
                uint64_t to = i < layout->storage_count ? layout->storage_offsets[i] : layout->size;
                PyObject *gap = PyBytes_FromStringAndSize(image + from, (Py_ssize_t)(to - from));

                if (!gap || PyList_Append(gaps, gap) < 0)
                        Py_CLEAR(gaps);
                Py_XDECREF(gap);
                if (i < layout->storage_count)
                        from = to + sizes[i];
        }
        return gaps;
}

/* Zeroed memory of which only the touched pages count, also where the system refuses to promise more memory than it has. 0 or a negative errno. */
static int map_sparse(uint64_t size, void **ret_data)
{
        int fd = os->memfd("nebula-frame"), result = fd < 0 ? fd : os->truncate(fd, size);

        if (!result)
                result = os->map(fd, 0, size, OS_MAP_READ | OS_MAP_WRITE, ret_data);
        if (fd >= 0)
                os->close(fd);
        return result;
}

static PyObject *zip_frame(PyObject *module, PyObject *arguments)
{
        PyObject *list, *gaps = NULL;
        struct nebula_error error = { 0 };
        struct zip_layout layout;
        uint64_t *sizes = NULL;
        enum nebula_status status;
        Py_buffer pickle;
        void *image;
        size_t count;

        if (!PyArg_ParseTuple(arguments, "y*O!", &pickle, &PyList_Type, &list))
                return NULL;
        count = (size_t)PyList_GET_SIZE(list);
        sizes = PyMem_Calloc(count + 1, sizeof *sizes);
        for (size_t i = 0; sizes && i < count; i++)
                sizes[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, (Py_ssize_t)i));
        if (!sizes || PyErr_Occurred()) {
                if (!sizes)
                        PyErr_NoMemory();
                goto release;
        }
        status = zip_layout_init(&layout, (size_t)pickle.len, sizes, count, &error);
        if (status != NEBULA_OK) {
                nebula_raise(&error);
                goto release;
        }
        /* Only the pages of the gaps are touched: the room for payloads takes addresses, not memory. */
        if (!map_sparse(layout.size, &image)) {
                zip_layout_write(&layout, pickle.buf, image);
                gaps = gaps_of(&layout, sizes, image);
                os->unmap(image, layout.size);
        } else {
                PyErr_NoMemory();
        }
        zip_layout_done(&layout);
release:
        PyMem_Free(sizes);
        PyBuffer_Release(&pickle);
        return gaps;
}

static PyObject *address_of(PyObject *module, PyObject *object)
{
        Py_buffer buffer;
        PyObject *address;

        if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) < 0)
                return NULL;
        address = PyLong_FromVoidPtr(buffer.buf);
        PyBuffer_Release(&buffer);
        return address;
}

static PyObject *read_bytes(PyObject *module, PyObject *unused)
{
        return PyLong_FromUnsignedLongLong(stored_read_bytes());
}

static PyMethodDef functions[] = {
        { "leave", leave, METH_NOARGS, "Call before the interpreter ends: no thread of the library calls into it any more." },
        { "end_only_by", end_only_by, METH_O, "SIGTERM ends this process only if that process sends it, or has gone." },
        { "end_is_near", end_is_near, METH_NOARGS, "From now on a save returns when its bytes are copied." },
        { "await_copies", await_copies, METH_O, "await_copies(timeout_ms): waits for this process's running copies; False: some still run." },
        { "signal_would_end", signal_would_end, METH_O, "Whether this signal ends the process, because the program does not handle it." },
        { "audit_ends", audit_ends, METH_O, "audit_ends(f): f(event, arguments) is called before os.exec..., os.kill and os.killpg." },
        { "set_error_factory", set_error_factory, METH_O, "Sets the function that makes exceptions: f(status, message, errno, http_status)." },
        { "encode_name", encode_name, METH_O, "A tag or file name, encoded as in storage." },
        { "step_of", step_of, METH_O, "The step in a tag; -1: it has none." },
        { "follows_step", follows_step, METH_O, "Whether versions of this tag are ordered by its step: global_step<n>." },
        { "order", order_versions, METH_O, "order([(tag, began, sequence, abandoned), ...]): the indices of these versions, newest first." },
        { "delta_sums", delta_sums_of, METH_VARARGS, "delta_sums(state, [(offset, size, width, sum[, from]), ...]): the parts with their sums." },
        { "delta_state_sum", delta_sum_of_state, METH_O, "delta_state_sum(parts): the sum of the state whose parts have these sums." },
        { "delta_make", delta_between, METH_VARARGS, "delta_make(base, next, parts, limit[, size]): (the delta or None, the parts with the sums of next)." },
        { "delta_apply", delta_apply_to, METH_VARARGS, "delta_apply(state, sum, deltas): changes the state; the sum after them." },
        { "address_of", address_of, METH_O, "The address of a contiguous buffer." },
        { "watch_images", session_watch_images, METH_VARARGS, "watch_images(f, g): f(address, bytes) is called after a spare image was mapped, g(address, 0) before an image is unmapped." },
        { "watch_waits", session_watch_waits, METH_O, "watch_waits(f): f() is called while a save waits for memory, and may raise." },
        { "plain_dump", plain_dump, METH_VARARGS, "plain_dump(object, takes_cuda): (pickle, storages), or None." },
        { "copy_from_device", device_copy_out, METH_VARARGS, "copy_from_device(stream, pieces, may_batch=True): queues the copies of Ranges.pieces on a CUDA stream." },
        { "copy_to_device", device_copy_in, METH_VARARGS, "copy_to_device(stream, pieces, buffer, may_batch=True): copies pieces into a buffer, and queues copies from there on a CUDA stream." },
        { "read_bytes", read_bytes, METH_NOARGS, "The bytes that this process has read from stored files, those of running loads included." },
        { "pickle_is_modest", pickle_is_modest, METH_O, "Whether no memo index is larger than the pickle's size." },
        { "pickle_is_torchs", pickle_is_torchs, METH_O, "Whether it is modest, and torch's loader for untrusted files accepts its opcodes." },
        { "read_sums", output_read_sums, METH_VARARGS, "read_sums(path, [(offset, size), ...]): the CRC-64 of each range, read from the disk." },
        { "sum_bytes", output_sum_bytes, METH_VARARGS, "sum_bytes(data, sum): the CRC-64 of earlier bytes, `sum`, with those of `data`." },
        { "staging_make", output_staging_make, METH_O, "staging_make(parent): (path, descriptor) of a new directory; the descriptor locks it." },
        { "staging_end", output_staging_end, METH_VARARGS, "staging_end(path, descriptor): removes the lock of a directory that is gone." },
        { "staging_left", output_staging_left, METH_O, "staging_left(parent): (path, descriptor) of directories whose process has ended, locked." },
        { "staging_place", output_staging_place, METH_VARARGS, "staging_place(staging, path, parent, swaps): gives the directory its name, or swaps the two." },
        { "zip_frame", zip_frame, METH_VARARGS, "zip_frame(pickle, [size, ...]): the bytes around the storages of a torch file." },
        { NULL, NULL, 0, NULL },
};

/* Adds the constants of the C library, under their C names. */
static int add_constants(PyObject *module)
{
        static const struct {
                const char *name;
                long value;
        } constants[] = {
                { "FILES_OPEN", NEBULA_FILES_OPEN },
                { "FILES_ALL_RANKS", NEBULA_FILES_ALL_RANKS },
                { "REPORT_VERSIONS", NEBULA_REPORT_VERSIONS },
                { "REPORT_STATUS", NEBULA_REPORT_STATUS },
                { "REPORT_HISTORY", NEBULA_REPORT_HISTORY },
                { "REPORT_PINS", NEBULA_REPORT_PINS },
                { "EVENT_DURABLE", NEBULA_EVENT_DURABLE },
                { "EVENT_LOST", NEBULA_EVENT_LOST },
                { "EVENT_STORAGE", NEBULA_EVENT_STORAGE },
                { "EVENT_LATE", NEBULA_EVENT_LATE },
                { "EVENT_OTHER_AGENT", NEBULA_EVENT_OTHER_AGENT },
                { "EVENT_HUNG", NEBULA_EVENT_HUNG },
                { "EVENT_ROTTEN", NEBULA_EVENT_ROTTEN },
                { "EVENT_STALE", NEBULA_EVENT_STALE },
                { "EVENT_NOT_FINITE", NEBULA_EVENT_NOT_FINITE },
                { "EVENT_LEFT_MEMORY", NEBULA_EVENT_LEFT_MEMORY },
                { "EVENT_REMOVED", NEBULA_EVENT_REMOVED },
                { "EVENT_EVICTION", NEBULA_EVENT_EVICTION },
                { "EVENT_METADATA", NEBULA_EVENT_METADATA },
                { "CLOUD_AZURE", NEBULA_CLOUD_AZURE },
                { "CLOUD_AWS", NEBULA_CLOUD_AWS },
                { "CLOUD_GCE", NEBULA_CLOUD_GCE },
        };

        for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
                if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
                        return -1;
        return PyModule_AddStringConstant(module, "VERSION", NEBULA_VERSION);
}

/* Only the main interpreter is supported: threads of the C library enter it by PyGILState_Ensure. */
static int is_allowed_here(void)
{
        static bool is_loaded;

        if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
                PyErr_SetString(PyExc_ImportError, "nebulaml works in the main interpreter of a process, and not in a subinterpreter");
                return -1;
        }
        if (is_loaded) {
                PyErr_SetString(PyExc_ImportError, "nebulaml._nebula is loaded already, and cannot be loaded twice in one process");
                return -1;
        }
        is_loaded = true;
        return 0;
}

static int module_exec(PyObject *module)
{
        if (is_allowed_here() < 0 || add_constants(module) < 0 || session_add_type(module) < 0 || checkpoint_add_type(module) < 0 ||
            map_add_type(module) < 0 || ranges_add_type(module) < 0 || watch_add_type(module) < 0 || output_add_type(module) < 0 || pickling_add_types(module) < 0)
                return -1;
        return 0;
}

static PyModuleDef_Slot slots[] = {
        { Py_mod_exec, module_exec },
#ifdef Py_mod_multiple_interpreters
        { Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED },
#endif
#ifdef Py_mod_gil
        { Py_mod_gil, Py_MOD_GIL_USED }, /* a free-threaded interpreter turns its GIL on again, and prints a warning */
#endif
        { 0, NULL },
};

static struct PyModuleDef definition = {
        PyModuleDef_HEAD_INIT, "_nebula", "The C library of Nebula; see include/nebula.h.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__nebula(void);

PyMODINIT_FUNC PyInit__nebula(void)
{
        return PyModuleDef_Init(&definition);
}
