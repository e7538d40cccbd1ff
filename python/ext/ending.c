/* ending.c - functions for _session/ending.py: the events that end this process. */
#include "module.h"

#include <string.h>

#include "os/ending.h"

PyObject *end_is_near(PyObject *module, PyObject *unused)
{
        ending_is_near();
        Py_RETURN_NONE;
}

PyObject *await_copies(PyObject *module, PyObject *timeout_ms)
{
        long long limit_ms = PyLong_AsLongLong(timeout_ms);
        bool is_done;

        if (limit_ms == -1 && PyErr_Occurred())
                return NULL;
        Py_BEGIN_ALLOW_THREADS
        is_done = ending_wait(limit_ms);
        Py_END_ALLOW_THREADS
        return PyBool_FromLong(is_done);
}

PyObject *signal_would_end(PyObject *module, PyObject *number)
{
        long signal_number = PyLong_AsLong(number);

        if (signal_number == -1 && PyErr_Occurred()) { /* os.kill itself reports the error to its caller */
                PyErr_Clear();
                Py_RETURN_FALSE;
        }
        return PyBool_FromLong(ending_is_by((int)signal_number));
}

PyObject *end_only_by(PyObject *module, PyObject *process)
{
        long sender = PyLong_AsLong(process);

        if (sender == -1 && PyErr_Occurred())
                return NULL;
        ending_only_by((pid_t)sender);
        Py_RETURN_NONE;
}

static PyObject *auditor; /* NULL: none is set */

static int audit(const char *event, PyObject *arguments, void *unused)
{
        PyObject *result;

        if (strcmp(event, "os.exec") && strcmp(event, "os.kill") && strcmp(event, "os.killpg"))
                return 0;
        if (!auditor || PyInterpreterState_Get() != PyInterpreterState_Main())
                return 0;
        result = PyObject_CallFunction(auditor, "sO", event, arguments);
        if (!result && !PyErr_ExceptionMatches(PyExc_Exception)) /* Ctrl-C: the audited call must not happen */
                return -1;
        if (!result)
                PyErr_WriteUnraisable(auditor);
        Py_XDECREF(result);
        return 0;
}

PyObject *audit_ends(PyObject *module, PyObject *call)
{
        PyObject *before = auditor;

        auditor = Py_NewRef(call); /* for ever, as the hook */
        if (!before && PySys_AddAuditHook(audit, NULL) < 0) {
                Py_CLEAR(auditor);
                return NULL;
        }
        Py_XDECREF(before);
        Py_RETURN_NONE;
}
