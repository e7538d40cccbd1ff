/* watch.c - Watch(session): events of the checkpoints of the session's job, for one thread that waits for them. Watch(session, cloud): those
 * of a cloud. */
#include "module.h"

#include "client/client.h"

struct watch {
        PyObject_HEAD
        nebula_watch *handle;
};

static PyObject *watch_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
        struct nebula_error error = { 0 };
        nebula_watch *handle = NULL;
        struct watch *self;
        enum nebula_status status;
        PyObject *session;
        int cloud = -1;

        if (!PyArg_ParseTuple(arguments, "O!|i", session_type(), &session, &cloud))
                return NULL;
        if (cloud < 0)
                status = nebula_watch_open(session_handle(session), &handle, &error);
        else
                status = nebula_watch_open_cloud(session_handle(session), (enum nebula_cloud)cloud, &handle, &error);
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        self = (struct watch *)type->tp_alloc(type, 0);
        if (self)
                self->handle = handle;
        else
                nebula_watch_close(handle);
        (void)keywords;
        return (PyObject *)self;
}

static void watch_dealloc(PyObject *self)
{
        PyTypeObject *type = Py_TYPE(self);

        nebula_watch_close(((struct watch *)self)->handle);
        type->tp_free(self);
        Py_DECREF(type);
}

static PyObject *watch_next(PyObject *self, PyObject *timeout)
{
        long long timeout_ms = PyLong_AsLongLong(timeout);
        struct nebula_error error = { 0 };
        struct nebula_event event;
        enum nebula_status status;

        if (timeout_ms == -1 && PyErr_Occurred())
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = nebula_watch_next(((struct watch *)self)->handle, timeout_ms, &event, &error);
        Py_END_ALLOW_THREADS
        if (status == NEBULA_TIMEOUT)
                Py_RETURN_NONE;
        if (status != NEBULA_OK)
                return nebula_raise(&error);
        return Py_BuildValue("(iNKdN)", (int)event.kind, PyUnicode_DecodeUTF8(event.tag, (Py_ssize_t)strlen(event.tag), "replace"),
                             (unsigned long long)event.size, event.seconds,
                             PyUnicode_DecodeUTF8(event.text, (Py_ssize_t)strlen(event.text), "replace"));
}

static PyObject *watch_stop(PyObject *self, PyObject *unused)
{
        (void)unused;
        client_watch_stop(((struct watch *)self)->handle);
        Py_RETURN_NONE;
}

static PyMethodDef watch_methods[] = {
        { "next", watch_next, METH_O, "next(timeout_ms) -> (kind, tag, bytes, seconds, text), or None" },
        { "stop", watch_stop, METH_NOARGS, "stop(): makes next() fail, a waiting one at once; call it from any thread" },
        { NULL, NULL, 0, NULL },
};

int watch_add_type(PyObject *module)
{
        static PyType_Slot slots[] = {
                { Py_tp_doc, "The events of checkpoints in the background; see watch.c." },
                { Py_tp_new, watch_new },
                { Py_tp_dealloc, watch_dealloc },
                { Py_tp_methods, watch_methods },
                { 0, NULL },
        };
        static PyType_Spec spec = { "nebulaml._nebula.Watch", sizeof(struct watch), 0, Py_TPFLAGS_DEFAULT, slots };
        PyObject *type = PyType_FromSpec(&spec);
        int result = type ? PyModule_AddObjectRef(module, "Watch", type) : -1;

        Py_XDECREF(type);
        return result;
}
