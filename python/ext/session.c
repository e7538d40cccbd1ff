/*
 * session.c - Session: this process's connection to the node's agent.
 *
 * Session(**options) opens a session. Options are the members of struct
 * nebula_options under their own names (on_full as a number); omitted ones keep
 * the default. leave() disconnects, and the session ends with the last reference
 * to it, so that every checkpoint has its session.
 */
#include "module.h"
#include "ranges.h"

#include <stdatomic.h>
#include <stdbool.h>

struct session {
        PyObject_HEAD
        nebula_session *handle;
        nebula_pulse *pulse; /* NULL: it counts no steps */
};

static PyTypeObject *the_type;

PyTypeObject *session_type(void)
{
        return the_type;
}

nebula_session *session_handle(PyObject *session)
{
        return ((struct session *)session)->handle;
}

static PyObject *mapped_watcher, *unmapping_watcher; /* NULL: no watcher. Guarded by the GIL */
static atomic_bool has_image_watchers;

PyObject *session_watch_images(PyObject *module, PyObject *arguments)
{
        PyObject *mapped, *unmapping;

        if (!PyArg_ParseTuple(arguments, "OO", &mapped, &unmapping))
                return NULL;
        Py_XSETREF(mapped_watcher, Py_NewRef(mapped));
        Py_XSETREF(unmapping_watcher, Py_NewRef(unmapping));
        atomic_store(&has_image_watchers, true);
        Py_RETURN_NONE;
}

/* Called without the GIL, by any thread that makes a call on a session, or by a thread of the session. */
static void report_watcher(PyObject **watcher, void *image, uint64_t size)
{
        PyObject *type, *value, *trace, *result;
        PyGILState_STATE state;

        if (!atomic_load(&has_image_watchers) || checkpoint_has_left())
                return;
        state = PyGILState_Ensure();
        PyErr_Fetch(&type, &value, &trace); /* a session may be freed while an exception of the program is set */
        result = PyObject_CallFunction(*watcher, "NK", PyLong_FromVoidPtr(image), (unsigned long long)size);
        if (!result)
                PyErr_WriteUnraisable(*watcher);
        Py_XDECREF(result);
        PyErr_Restore(type, value, trace);
        PyGILState_Release(state);
}

static void image_mapped(void *unused, void *image, uint64_t capacity_bytes)
{
        report_watcher(&mapped_watcher, image, capacity_bytes);
}

static void image_unmapping(void *unused, void *image)
{
        report_watcher(&unmapping_watcher, image, 0);
}

static PyObject *wait_watcher; /* NULL: no watcher. Guarded by the GIL */

PyObject *session_watch_waits(PyObject *module, PyObject *watcher)
{
        Py_XSETREF(wait_watcher, Py_NewRef(watcher));
        Py_RETURN_NONE;
}

/* Called inside a save, without the GIL. An exception of the watcher stays set on this thread, and the save raises it. */
static int is_interrupted(void *unused)
{
        PyObject *result;
        PyGILState_STATE state;

        if (checkpoint_has_left())
                return false;
        state = PyGILState_Ensure();
        result = wait_watcher ? PyObject_CallNoArgs(wait_watcher) : Py_NewRef(Py_None);
        Py_XDECREF(result);
        PyGILState_Release(state);
        return !result;
}

static bool parse_options(PyObject *arguments, PyObject *keywords, struct nebula_options *ret_options)
{
        static char *names[] = { "persist_path", "job", "output_dir", "run", "agent_path", "persist_interval_s",
                                 "retention_count", "rank", "world", "local_rank", "local_world", "memory_bytes", "on_full",
                                 "keep_last", "keep_every", "replica_count", "keep_best", "keep_best_count",
                                 "keep_best_is_largest", "is_reader", "keep_items", "keep_hourly", "keep_daily", "keep_weekly", "keep_within_s",
                                 "is_spare", "has_spares", NULL };
        struct nebula_options options;
        unsigned long long memory_bytes, keep_every;
        int on_full;

        nebula_options_init(&options);
        memory_bytes = options.memory_bytes;
        keep_every = options.keep_every;
        on_full = (int)options.on_full;
        if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|$zzzzzdIIIIIKiIKIzIIIzIIIIII", names, &options.persist_path,
                                         &options.job, &options.output_dir, &options.run, &options.agent_path,
                                         &options.persist_interval_s, &options.retention_count, &options.rank,
                                         &options.world, &options.local_rank, &options.local_world, &memory_bytes,
                                         &on_full, &options.keep_last, &keep_every, &options.replica_count,
                                         &options.keep_best, &options.keep_best_count, &options.keep_best_is_largest,
                                         &options.is_reader, &options.keep_items, &options.keep_hourly, &options.keep_daily,
                                         &options.keep_weekly, &options.keep_within_s, &options.is_spare, &options.has_spares))
                return false;
        options.memory_bytes = memory_bytes;
        options.keep_every = keep_every;
        options.on_full = (enum nebula_on_full)on_full;
        *ret_options = options;
        return true;
}

static PyObject *session_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
        struct nebula_options options;
        struct nebula_error error = { 0 };
        enum nebula_status status;
        struct session *self;
        nebula_session *handle = NULL;

        if (!parse_options(arguments, keywords, &options))
                return NULL;
        self = (struct session *)type->tp_alloc(type, 0);
        if (!self)
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_session_open(&options, &handle, &error);
        if (status == NEBULA_OK) {
                nebula_session_watch_images(handle, image_unmapping, NULL);
                nebula_session_watch_waits(handle, is_interrupted, NULL);
        }
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK) {
                Py_DECREF(self);
                return nebula_raise(&error);
        }
        self->handle = handle;
        return (PyObject *)self;
}

static void session_dealloc(PyObject *object)
{
        PyTypeObject *type = Py_TYPE(object);
        nebula_session *handle = ((struct session *)object)->handle;
        nebula_pulse *pulse = ((struct session *)object)->pulse;

        if (handle) {
                Py_BEGIN_ALLOW_THREADS
                nebula_pulse_close(pulse);
                nebula_session_close(handle);
                Py_END_ALLOW_THREADS
        }
        type->tp_free(object);
        Py_DECREF(type);
}

static PyObject *session_configure(PyObject *self, PyObject *arguments, PyObject *keywords)
{
        nebula_session *handle = ((struct session *)self)->handle;
        struct nebula_options options;
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (!parse_options(arguments, keywords, &options))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_session_configure(handle, &options, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *session_flush(PyObject *self, PyObject *arguments)
{
        nebula_session *handle = ((struct session *)self)->handle;
        struct nebula_error error = { 0 };
        enum nebula_status status;
        long long timeout_ms;
        const char *tag;

        if (!PyArg_ParseTuple(arguments, "zL", &tag, &timeout_ms))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_session_flush(handle, tag, timeout_ms, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *session_settle(PyObject *self, PyObject *timeout)
{
        nebula_session *handle = ((struct session *)self)->handle;
        long long timeout_ms = PyLong_AsLongLong(timeout);
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (timeout_ms == -1 && PyErr_Occurred())
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_session_settle(handle, timeout_ms, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *session_leave(PyObject *self, PyObject *unused)
{
        Py_BEGIN_ALLOW_THREADS
        nebula_session_leave(((struct session *)self)->handle);
        Py_END_ALLOW_THREADS
        Py_RETURN_NONE;
}

static PyObject *session_begin(PyObject *self, PyObject *arguments)
{
        nebula_session *handle = ((struct session *)self)->handle;
        nebula_checkpoint *checkpoint = NULL;
        struct nebula_error error = { 0 };
        enum nebula_status status;
        long long file_count;
        const char *tag;

        if (!PyArg_ParseTuple(arguments, "sL", &tag, &file_count))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_checkpoint_begin(handle, tag, file_count, &checkpoint, &error);
        Py_END_ALLOW_THREADS
        return status == NEBULA_OK ? checkpoint_object(self, checkpoint) : nebula_raise(&error);
}

static PyObject *session_latest(PyObject *self, PyObject *arguments)
{
        nebula_session *handle = ((struct session *)self)->handle;
        nebula_checkpoint *checkpoint = NULL;
        struct nebula_error error = { 0 };
        enum nebula_status status;
        const char *persist_path;

        if (!PyArg_ParseTuple(arguments, "z", &persist_path))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_checkpoint_latest(handle, persist_path, &checkpoint, &error);
        Py_END_ALLOW_THREADS
        return status == NEBULA_OK ? checkpoint_object(self, checkpoint) : nebula_raise(&error);
}

static PyObject *session_find(PyObject *self, PyObject *arguments)
{
        nebula_session *handle = ((struct session *)self)->handle;
        nebula_checkpoint *checkpoint = NULL;
        struct nebula_error error = { 0 };
        enum nebula_status status;
        unsigned long long sequence = 0;
        const char *tag, *persist_path;

        if (!PyArg_ParseTuple(arguments, "sz|K", &tag, &persist_path, &sequence))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_checkpoint_find_version(handle, tag, sequence, persist_path, &checkpoint, &error);
        Py_END_ALLOW_THREADS
        return status == NEBULA_OK ? checkpoint_object(self, checkpoint) : nebula_raise(&error);
}

static PyObject *session_report(PyObject *self, PyObject *arguments)
{
        nebula_session *handle = ((struct session *)self)->handle;
        struct nebula_error error = { 0 };
        enum nebula_status status;
        const char *persist_path;
        char *text = NULL;
        int report;

        if (!PyArg_ParseTuple(arguments, "iz", &report, &persist_path))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_session_report(handle, (enum nebula_report)report, persist_path, &text, &error);
        Py_END_ALLOW_THREADS
        return status == NEBULA_OK ? nebula_text(text) : nebula_raise(&error);
}

static PyObject *session_unpublish(PyObject *self, PyObject *path)
{
        nebula_session *handle = ((struct session *)self)->handle;
        const char *utf8 = PyUnicode_AsUTF8(path);
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (!utf8)
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_session_unpublish(handle, utf8, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *session_find_published(PyObject *self, PyObject *path)
{
        nebula_session *handle = ((struct session *)self)->handle;
        const char *utf8 = PyUnicode_AsUTF8(path);
        nebula_checkpoint *checkpoint = NULL;
        struct nebula_error error = { 0 };
        enum nebula_status status;
        char name[256];

        if (!utf8)
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_session_find_published(handle, utf8, &checkpoint, name, &error);
        Py_END_ALLOW_THREADS
        return status == NEBULA_OK ? Py_BuildValue("Ns", checkpoint_object(self, checkpoint), name) : nebula_raise(&error);
}

static PyObject *session_pin(PyObject *self, PyObject *arguments)
{
        nebula_session *handle = ((struct session *)self)->handle;
        struct nebula_error error = { 0 };
        enum nebula_status status;
        const char *tag, *reason;

        if (!PyArg_ParseTuple(arguments, "ss", &tag, &reason))
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_session_pin(handle, tag, reason, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *call_with_tag(PyObject *self, PyObject *tag, enum nebula_status (*call)(nebula_session *, const char *, struct nebula_error *))
{
        nebula_session *handle = ((struct session *)self)->handle;
        const char *utf8 = PyUnicode_AsUTF8(tag);
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (!utf8)
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = call(handle, utf8, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *session_unpin(PyObject *self, PyObject *tag)
{
        return call_with_tag(self, tag, nebula_session_unpin);
}

static PyObject *session_remove(PyObject *self, PyObject *tag)
{
        return call_with_tag(self, tag, nebula_session_remove);
}

static PyObject *session_prepare(PyObject *self, PyObject *arguments)
{
        nebula_session *handle = ((struct session *)self)->handle;
        struct ranges *found;
        Py_ssize_t pickle_size;
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (!PyArg_ParseTuple(arguments, "nO!", &pickle_size, ranges_type, &found))
                return NULL;
        found->is_fixed = true; /* C reads the list without the GIL */
        Py_BEGIN_ALLOW_THREADS
        nebula_session_watch_spares(handle, atomic_load(&has_image_watchers) ? image_mapped : NULL, NULL);
        status = nebula_session_prepare(handle, (size_t)pickle_size, found->ranges, found->count, &error);
        Py_END_ALLOW_THREADS
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        Py_RETURN_NONE;
}

static PyObject *session_pulse_open(PyObject *self, PyObject *arguments)
{
        struct session *session = (struct session *)self;
        struct nebula_pulse_options options;
        struct nebula_error error = { 0 };
        nebula_pulse *pulse = session->pulse;
        enum nebula_status status = NEBULA_OK;
        int ends_hung;

        if (!PyArg_ParseTuple(arguments, "Iip", &options.stack_signal, &options.stack_fd, &ends_hung))
                return NULL;
        options.ends_hung = (uint32_t)ends_hung;
        if (!pulse) {
                Py_BEGIN_ALLOW_THREADS
                status = nebula_pulse_open(session->handle, &options, &pulse, &error);
                Py_END_ALLOW_THREADS
        }
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        session->pulse = pulse;
        Py_RETURN_NONE;
}

static PyObject *session_pulse_step(PyObject *self, PyObject *number)
{
        nebula_pulse *pulse = ((struct session *)self)->pulse;
        unsigned long long step = PyLong_AsUnsignedLongLongMask(number);

        if (PyErr_Occurred())
                return NULL;
        if (pulse)
                nebula_pulse_step(pulse, step);
        Py_RETURN_NONE;
}

static PyObject *session_pulse_phase(PyObject *self, PyObject *name)
{
        nebula_pulse *pulse = ((struct session *)self)->pulse;
        const char *utf8 = name == Py_None ? NULL : PyUnicode_AsUTF8(name);

        if (!utf8 && name != Py_None)
                return NULL;
        if (pulse)
                nebula_pulse_phase(pulse, utf8);
        Py_RETURN_NONE;
}

static PyObject *session_pulse_rest(PyObject *self, PyObject *unused)
{
        nebula_pulse *pulse = ((struct session *)self)->pulse;

        if (pulse)
                nebula_pulse_rest(pulse);
        Py_RETURN_NONE;
}

static PyObject *session_pulse_close(PyObject *self, PyObject *unused)
{
        nebula_pulse *pulse = ((struct session *)self)->pulse;

        ((struct session *)self)->pulse = NULL;
        Py_BEGIN_ALLOW_THREADS
        nebula_pulse_close(pulse);
        Py_END_ALLOW_THREADS
        Py_RETURN_NONE;
}

static PyMethodDef session_methods[] = {
        { "pulse_open", session_pulse_open, METH_VARARGS, "pulse_open(stack_signal, stack_fd, ends_hung): this session counts steps from now on" },
        { "pulse_step", session_pulse_step, METH_O, "pulse_step(number)" },
        { "pulse_phase", session_pulse_phase, METH_O, "pulse_phase(name or None)" },
        { "pulse_rest", session_pulse_rest, METH_NOARGS, "Nothing is watched until the next step." },
        { "pulse_close", session_pulse_close, METH_NOARGS, "This session counts no more steps." },
        { "configure", (PyCFunction)(void (*)(void))session_configure, METH_VARARGS | METH_KEYWORDS, "Sets new options for all further calls." },
        { "flush", session_flush, METH_VARARGS, "flush(tag or None, timeout_ms): returns when it is durable." },
        { "settle", session_settle, METH_O, "settle(timeout_ms): returns when all running copies have ended." },
        { "leave", session_leave, METH_NOARGS, "Waits for running copies and disconnects. Calls on its checkpoints connect again." },
        { "prepare", session_prepare, METH_VARARGS, "prepare(pickle_size, Ranges): makes memory for such a file in the background" },
        { "begin", session_begin, METH_VARARGS, "begin(tag, file_count) -> Checkpoint" },
        { "latest", session_latest, METH_VARARGS, "latest(persist_path or None) -> Checkpoint" },
        { "find", session_find, METH_VARARGS, "find(tag, persist_path or None, sequence=0) -> Checkpoint" },
        { "unpublish", session_unpublish, METH_O, "unpublish(path): removes it after all earlier publishes" },
        { "find_published", session_find_published, METH_O, "find_published(path) -> (Checkpoint, name)" },
        { "pin", session_pin, METH_VARARGS, "pin(tag, reason): no rule removes the tag's version from storage" },
        { "unpin", session_unpin, METH_O, "unpin(tag): takes the pin back" },
        { "remove", session_remove, METH_O, "remove(tag): removes the tag's version from storage" },
        { "report", session_report, METH_VARARGS, "report(REPORT_..., persist_path or None) -> JSON text" },
        { NULL, NULL, 0, NULL },
};

int session_add_type(PyObject *module)
{
        static PyType_Slot slots[] = {
                { Py_tp_doc, "This process's connection to the node's agent; see session.c." },
                { Py_tp_new, session_new },
                { Py_tp_dealloc, session_dealloc },
                { Py_tp_methods, session_methods },
                { 0, NULL },
        };
        static PyType_Spec spec = { "nebulaml._nebula.Session", sizeof(struct session), 0, Py_TPFLAGS_DEFAULT, slots };

        the_type = (PyTypeObject *)PyType_FromSpec(&spec);
        return the_type ? PyModule_AddObjectRef(module, "Session", (PyObject *)the_type) : -1;
}
