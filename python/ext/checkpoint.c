/*
 * checkpoint.c - Checkpoint: one checkpoint that is being written, or was found.
 *
 * save_pickle(name, pickle, storages, on_failure, unprotectable, filler), and save_ranges, which has no pickle:
 *
 *      storages       a Ranges. Its owners are held until the bytes are copied, perhaps after the call has returned
 *      on_failure     None, or on_failure(exception) is called on any thread if the copy fails
 *      unprotectable  None, or a byte for each storage, not 0 if a device may write to it
 *      filler         None, or an object that writes the storages whose address is None.
 *                     filler.start(address of the image, its size in bytes, [offset of each storage]) begins, during the
 *                     call. filler.finish() returns when the bytes are written; it is called after the call has returned
 *                     if filler.overlap is true. Both may raise.
 *
 * save_constants(name, ranges, constant, on_failure) is a save_ranges whose ranges with the numbers in `constant` never change. They are
 * copied after the call has returned, without the GIL.
 */
#include "module.h"
#include "ranges.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

struct checkpoint {
        PyObject_HEAD
        PyObject *session;
        nebula_checkpoint *handle;
};

static PyTypeObject *checkpoint_type;

static nebula_checkpoint *handle_of(PyObject *self)
{
        return ((struct checkpoint *)self)->handle;
}

PyObject *checkpoint_object(PyObject *session, nebula_checkpoint *handle)
{
        struct checkpoint *self = (struct checkpoint *)checkpoint_type->tp_alloc(checkpoint_type, 0);

        if (!self) {
                nebula_checkpoint_free(handle);
                return NULL;
        }
        self->session = Py_NewRef(session);
        self->handle = handle;
        return (PyObject *)self;
}

static void checkpoint_dealloc(PyObject *object)
{
        struct checkpoint *self = (struct checkpoint *)object;
        PyTypeObject *type = Py_TYPE(object);

        nebula_checkpoint_free(self->handle);
        Py_XDECREF(self->session);
        type->tp_free(object);
        Py_DECREF(type);
}

static atomic_bool interpreter_leaves;
static pthread_t last_thread; /* the thread that ends the interpreter, and may use it afterwards; valid once interpreter_leaves is set */

void checkpoint_leave(void)
{
        last_thread = pthread_self();
        atomic_store(&interpreter_leaves, true);
}

/* Whether this thread would wait for the GIL forever, or be ended there. */
static bool is_shut_out(void)
{
        return atomic_load(&interpreter_leaves) && !pthread_equal(last_thread, pthread_self());
}

bool checkpoint_has_left(void)
{
        return atomic_load(&interpreter_leaves);
}

/* The objects that a save holds until its bytes are copied. */
struct kept {
        struct ranges *storages;
        PyObject *on_failure, *filler;
        PyObject *interruption; /* an exception of the filler that is not an Exception, such as KeyboardInterrupt; or NULL */
        char *image;            /* of constant ranges, from here on */
        uint64_t *offsets;      /* of all ranges; or NULL */
};

static void kept_free(struct kept *kept)
{
        Py_DECREF(kept->storages);
        Py_DECREF(kept->on_failure);
        Py_DECREF(kept->filler);
        Py_XDECREF(kept->interruption);
        PyMem_RawFree(kept->offsets);
        PyMem_RawFree(kept);
}

/* Called by the session's release thread. A crashing thread does not wait for releases, so this one may wait for the GIL. */
static void kept_release(void *argument, const struct nebula_error *failure)
{
        struct kept *kept = argument;
        PyGILState_STATE state;

        if (is_shut_out()) /* no thread releases the GIL any more; the process is ending */
                return;
        state = PyGILState_Ensure();
        if (failure && kept->on_failure != Py_None) {
                PyObject *exception = nebula_exception(failure);
                PyObject *result = exception ? PyObject_CallOneArg(kept->on_failure, exception) : NULL;

                if (!result)
                        PyErr_WriteUnraisable(kept->on_failure);
                Py_XDECREF(exception);
                Py_XDECREF(result);
        }
        kept_free(kept);
        PyGILState_Release(state);
}

/* Turns the filler's exception into an error. */
static enum nebula_status filler_failed(struct kept *kept, struct nebula_error *ret_error)
{
        PyObject *type, *value, *trace, *text;
        const char *utf8;

        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        text = value ? PyUnicode_FromFormat("%s: %S", ((PyTypeObject *)type)->tp_name, value) : NULL;
        utf8 = text ? PyUnicode_AsUTF8(text) : NULL;
        if (ret_error) {
                *ret_error = (struct nebula_error){ .status = NEBULA_FAILED };
                PyOS_snprintf(ret_error->message, sizeof ret_error->message, "the copy from the device failed: %s",
                              utf8 ? utf8 : "no reason is known");
        }
        if (value && !PyErr_GivenExceptionMatches(type, PyExc_Exception))
                Py_XSETREF(kept->interruption, Py_NewRef(value));
        PyErr_Clear();
        Py_XDECREF(text);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return NEBULA_FAILED;
}

/* Takes over `result`. */
static enum nebula_status filler_answered(struct kept *kept, PyObject *result, struct nebula_error *ret_error)
{
        if (!result)
                return filler_failed(kept, ret_error);
        Py_DECREF(result);
        return NEBULA_OK;
}

/* Called inside a save, without the GIL. A thread that waits for that save does not hold the GIL. */
static enum nebula_status kept_fill(void *argument, void *image, uint64_t image_bytes, const uint64_t *offsets,
                                    struct nebula_error *ret_error)
{
        struct kept *kept = argument;
        PyObject *list, *result;
        enum nebula_status status;
        PyGILState_STATE state;

        if (is_shut_out())
                return NEBULA_FAILED;
        state = PyGILState_Ensure();
        list = PyList_New((Py_ssize_t)kept->storages->count);
        for (Py_ssize_t i = 0; list && i < PyList_GET_SIZE(list); i++) {
                PyObject *offset = PyLong_FromUnsignedLongLong(offsets[i]);

                if (offset)
                        PyList_SET_ITEM(list, i, offset);
                else
                        Py_CLEAR(list);
        }
        result = list ? PyObject_CallMethod(kept->filler, "start", "NKO", PyLong_FromVoidPtr(image),
                                            (unsigned long long)image_bytes, list) : NULL;
        status = filler_answered(kept, result, ret_error);
        Py_XDECREF(list);
        PyGILState_Release(state);
        return status;
}

static enum nebula_status kept_filled(void *argument, struct nebula_error *ret_error)
{
        struct kept *kept = argument;
        enum nebula_status status;
        PyGILState_STATE state;

        if (is_shut_out())
                return NEBULA_FAILED;
        state = PyGILState_Ensure();
        status = filler_answered(kept, PyObject_CallMethod(kept->filler, "finish", NULL), ret_error);
        PyGILState_Release(state);
        return status;
}

/* Called inside a save. An earlier image may be that of an agent that has died. */
static enum nebula_status constants_fill(void *argument, void *image, uint64_t image_bytes, const uint64_t *offsets,
                                         struct nebula_error *ret_error)
{
        struct kept *kept = argument;
        size_t bytes = kept->storages->count * sizeof *offsets;

        if (!kept->offsets && !(kept->offsets = PyMem_RawMalloc(bytes))) {
                if (ret_error)
                        *ret_error = (struct nebula_error){ .status = NEBULA_NO_MEMORY, .message = "no memory for the places of the ranges" };
                return NEBULA_NO_MEMORY;
        }
        memcpy(kept->offsets, offsets, bytes);
        kept->image = image;
        return NEBULA_OK;
}

/* Called on a thread of the session, if there is one: it copies while the program goes on. */
static enum nebula_status constants_filled(void *argument, struct nebula_error *ret_error)
{
        struct kept *kept = argument;
        struct ranges *ranges = kept->storages;

        for (size_t i = 0; i < ranges->count; i++)
                if (ranges->sources[i].device == RANGES_CONSTANT)
                        memcpy(kept->image + kept->offsets[i], ranges->sources[i].address, ranges->ranges[i].size);
        return NEBULA_OK;
}

static struct kept *kept_new(struct ranges *storages, PyObject *on_failure, PyObject *filler)
{
        struct kept *kept = PyMem_RawCalloc(1, sizeof *kept);

        if (!kept)
                return (struct kept *)PyErr_NoMemory();
        storages->is_fixed = true;
        Py_INCREF(storages);
        kept->storages = storages;
        kept->on_failure = Py_NewRef(on_failure);
        kept->filler = Py_NewRef(filler);
        return kept;
}

static bool take_filler(PyObject *filler, struct nebula_keep *keep)
{
        PyObject *overlap = filler == Py_None ? NULL : PyObject_GetAttrString(filler, "overlap");

        if (filler == Py_None)
                return true;
        if (!overlap)
                return false;
        keep->fill = kept_fill;
        keep->filled = kept_filled;
        keep->may_overlap = PyObject_IsTrue(overlap) == 1;
        Py_DECREF(overlap);
        return !PyErr_Occurred();
}

/* Saves the ranges of `storages`: with a pickle as its storages, without one as consecutive bytes. Takes no reference.
 * has_constant: some ranges are constant, and there is no filler. */
static PyObject *save_kept(PyObject *self, const char *name, const Py_buffer *pickle, struct ranges *storages,
                           PyObject *on_failure, const Py_buffer *unprotectable, PyObject *filler, bool has_constant)
{
        struct nebula_keep keep = { .release = kept_release, .is_unprotectable = unprotectable->buf };
        struct nebula_error error = { 0 };
        enum nebula_status status;
        struct kept *kept;

        if (unprotectable->buf && (size_t)unprotectable->len != storages->count) {
                PyErr_SetString(PyExc_ValueError, "unprotectable must have a byte for each storage");
                return NULL;
        }
        if (has_constant) {
                keep.fill = constants_fill;
                keep.filled = constants_filled;
                keep.may_overlap = 1;
        } else if (!take_filler(filler, &keep)) {
                return NULL;
        }
        kept = kept_new(storages, on_failure, filler);
        if (!kept)
                return NULL;
        keep.argument = kept;
        Py_BEGIN_ALLOW_THREADS
        if (pickle)
                status = nebula_checkpoint_save_pickle_kept(handle_of(self), name, pickle->buf, (size_t)pickle->len,
                                                            storages->ranges, storages->count, &keep, &error);
        else
                status = nebula_checkpoint_save_bytes_kept(handle_of(self), name, storages->ranges, storages->count, &keep,
                                                           &error);
        Py_END_ALLOW_THREADS
        if (status == NEBULA_OK)
                Py_RETURN_NONE;
        if (!PyErr_Occurred() && kept->interruption)
                PyErr_SetObject((PyObject *)Py_TYPE(kept->interruption), kept->interruption);
        if (!PyErr_Occurred()) /* else a handler raised an exception while the save waited for memory */
                nebula_raise(&error);
        kept_free(kept);
        return NULL;
}

static PyObject *checkpoint_save_pickle(PyObject *self, PyObject *arguments)
{
        PyObject *storages, *on_failure = Py_None, *filler = Py_None, *result;
        Py_buffer pickle, unprotectable = { 0 };
        const char *name;

        if (!PyArg_ParseTuple(arguments, "sy*O!|Oz*O", &name, &pickle, ranges_type, &storages, &on_failure, &unprotectable,
                              &filler))
                return NULL;
        result = save_kept(self, name, &pickle, (struct ranges *)storages, on_failure, &unprotectable, filler, false);
        if (unprotectable.obj)
                PyBuffer_Release(&unprotectable);
        PyBuffer_Release(&pickle);
        return result;
}

static PyObject *checkpoint_save_bytes(PyObject *self, PyObject *arguments)
{
        struct nebula_error error = { 0 };
        struct nebula_range range;
        enum nebula_status status;
        const char *name;
        Py_buffer data;

        if (!PyArg_ParseTuple(arguments, "sy*", &name, &data))
                return NULL;
        range.data = data.buf;
        range.size = (uint64_t)data.len;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_checkpoint_save_bytes(handle_of(self), name, &range, 1, &error);
        Py_END_ALLOW_THREADS
        PyBuffer_Release(&data);
        if (status != NEBULA_OK)
                return PyErr_Occurred() ? NULL : nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *checkpoint_save_ranges(PyObject *self, PyObject *arguments)
{
        PyObject *parts, *on_failure = Py_None, *filler = Py_None, *result;
        Py_buffer unprotectable = { 0 };
        const char *name;

        if (!PyArg_ParseTuple(arguments, "sO!|Oz*O", &name, ranges_type, &parts, &on_failure, &unprotectable, &filler))
                return NULL;
        result = save_kept(self, name, NULL, (struct ranges *)parts, on_failure, &unprotectable, filler, false);
        if (unprotectable.obj)
                PyBuffer_Release(&unprotectable);
        return result;
}

static PyObject *checkpoint_save_constants(PyObject *self, PyObject *arguments)
{
        PyObject *parts, *constant, *on_failure;
        const char *name;

        if (!PyArg_ParseTuple(arguments, "sO!O!O", &name, ranges_type, &parts, &PyList_Type, &constant, &on_failure) ||
            !ranges_set_constant((struct ranges *)parts, constant))
                return NULL;
        return save_kept(self, name, NULL, (struct ranges *)parts, on_failure, &(Py_buffer){ 0 }, Py_None, true);
}

static PyObject *checkpoint_publish(PyObject *self, PyObject *arguments)
{
        const char *name, *path, *staging;
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (!PyArg_ParseTuple(arguments, "zsz", &name, &path, &staging))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_checkpoint_publish(handle_of(self), name, path, staging, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *checkpoint_commit(PyObject *self, PyObject *unused)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;

        Py_BEGIN_ALLOW_THREADS
        status = nebula_checkpoint_commit(handle_of(self), &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *checkpoint_fail(PyObject *self, PyObject *reason)
{
        const char *utf8 = PyUnicode_AsUTF8(reason);
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (!utf8)
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_checkpoint_fail(handle_of(self), utf8, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

/* Parses a state that can be waited for; false with a Python error set for any other name. */
static bool parse_state(const char *name, enum nebula_state *ret_state)
{
        for (int state = NEBULA_STATE_CAPTURING; state < NEBULA_STATE_FAILED; state++) { /* a failure ends every wait */
                if (strcmp(nebula_state_name((enum nebula_state)state), name) == 0) {
                        *ret_state = (enum nebula_state)state;
                        return true;
                }
        }
        PyErr_Format(PyExc_ValueError, "no state to wait for is called '%s': captured, committed, replicated or durable", name);
        return false;
}

static PyObject *checkpoint_wait(PyObject *self, PyObject *arguments)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;
        enum nebula_state state;
        long long timeout_ms;
        const char *name;

        if (!PyArg_ParseTuple(arguments, "sL", &name, &timeout_ms) || !parse_state(name, &state))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_checkpoint_wait(handle_of(self), state, timeout_ms, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *checkpoint_state(PyObject *self, PyObject *unused)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;
        enum nebula_state state = NEBULA_STATE_CAPTURING;

        Py_BEGIN_ALLOW_THREADS
        status = nebula_checkpoint_state(handle_of(self), &state, &error);
        Py_END_ALLOW_THREADS
        return status == NEBULA_OK ? PyUnicode_FromString(nebula_state_name(state)) : nebula_raise(&error);
}

static PyObject *open_map(PyObject *self, PyObject *name,
                          enum nebula_status (*open)(nebula_checkpoint *, const char *, nebula_map **, struct nebula_error *))
{
        const char *utf8 = PyUnicode_AsUTF8(name);
        struct nebula_error error = { 0 };
        enum nebula_status status;
        nebula_map *map = NULL;

        if (!utf8)
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = open(handle_of(self), utf8, &map, &error);
        Py_END_ALLOW_THREADS
        return status == NEBULA_OK ? map_object(self, map) : nebula_raise(&error);
}

static PyObject *checkpoint_map(PyObject *self, PyObject *name)
{
        return open_map(self, name, nebula_checkpoint_map);
}

static PyObject *checkpoint_map_lazily(PyObject *self, PyObject *name)
{
        return open_map(self, name, nebula_checkpoint_map_lazily);
}

static PyObject *checkpoint_report(PyObject *self, PyObject *unused)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;
        char *text = NULL;

        Py_BEGIN_ALLOW_THREADS
        status = nebula_checkpoint_report(handle_of(self), &text, &error);
        Py_END_ALLOW_THREADS
        return status == NEBULA_OK ? nebula_text(text) : nebula_raise(&error);
}

static PyObject *checkpoint_tag(PyObject *self, void *closure)
{
        return PyUnicode_FromString(nebula_checkpoint_tag(handle_of(self)));
}

static PyObject *checkpoint_sequence(PyObject *self, void *closure)
{
        return PyLong_FromUnsignedLongLong(nebula_checkpoint_sequence(handle_of(self)));
}

static PyObject *checkpoint_passed_over(PyObject *self, PyObject *unused)
{
        PyObject *list = PyList_New(0);
        const char *tag, *reason;

        for (uint32_t i = 0; list && nebula_checkpoint_passed_over(handle_of(self), i, &tag, &reason); i++) {
                PyObject *pair = Py_BuildValue("(ss)", tag, reason);

                if (!pair || PyList_Append(list, pair))
                        Py_CLEAR(list);
                Py_XDECREF(pair);
        }
        return list;
}

static PyMethodDef checkpoint_methods[] = {
        { "save_pickle", checkpoint_save_pickle, METH_VARARGS, "save_pickle(name, pickle, Ranges, on_failure, unprotectable, filler)" },
        { "save_bytes", checkpoint_save_bytes, METH_VARARGS, "save_bytes(name, data)" },
        { "save_ranges", checkpoint_save_ranges, METH_VARARGS, "save_ranges(name, Ranges, on_failure, unprotectable, filler): consecutive bytes" },
        { "save_constants", checkpoint_save_constants, METH_VARARGS,
          "save_constants(name, Ranges, constant, on_failure): consecutive bytes; the ranges with these numbers never change" },
        { "publish", checkpoint_publish, METH_VARARGS, "publish(name or None, path, staging or None)" },
        { "commit", checkpoint_commit, METH_NOARGS, "Closes this rank's part." },
        { "fail", checkpoint_fail, METH_O, "fail(reason): gives this checkpoint up." },
        { "wait", checkpoint_wait, METH_VARARGS, "wait(state, timeout_ms)" },
        { "state", checkpoint_state, METH_NOARGS, "The name of its state." },
        { "map", checkpoint_map, METH_O, "map(name) -> Map of the verified bytes" },
        { "map_lazily", checkpoint_map_lazily, METH_O, "map_lazily(name) -> Map whose bytes may have to be fetched" },
        { "passed_over", checkpoint_passed_over, METH_NOARGS, "[(tag, reason)] of the checkpoints that the search skipped." },
        { "report", checkpoint_report, METH_NOARGS, "The agent's report on it, as JSON text." },
        { NULL, NULL, 0, NULL },
};

static PyGetSetDef checkpoint_getset[] = {
        { "tag", checkpoint_tag, NULL, "Its tag.", NULL },
        { "sequence", checkpoint_sequence, NULL, "The sequence of the version that a search has found; 0: it was begun.", NULL },
        { NULL, NULL, NULL, NULL, NULL },
};

int checkpoint_add_type(PyObject *module)
{
        static PyType_Slot slots[] = {
                { Py_tp_doc, "One checkpoint; see checkpoint.c." },
                { Py_tp_dealloc, checkpoint_dealloc },
                { Py_tp_methods, checkpoint_methods },
                { Py_tp_getset, checkpoint_getset },
                { 0, NULL },
        };
        static PyType_Spec spec = { "nebulaml._nebula.Checkpoint", sizeof(struct checkpoint), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots };

        checkpoint_type = (PyTypeObject *)PyType_FromSpec(&spec);
        return checkpoint_type ? PyModule_AddObjectRef(module, "Checkpoint", (PyObject *)checkpoint_type) : -1;
}
