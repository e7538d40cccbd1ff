/* Ranges: see _ranges.h. */
#include "_ranges.h"

PyTypeObject *ranges_type;

static PyObject *ranges_make(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
        if (PyTuple_GET_SIZE(arguments) > 0 || (keywords && PyDict_GET_SIZE(keywords) > 0)) {
                PyErr_SetString(PyExc_TypeError, "Ranges() takes no arguments");
                return NULL;
        }
        return type->tp_alloc(type, 0);
}

struct ranges *ranges_new(void)
{
        return (struct ranges *)ranges_type->tp_alloc(ranges_type, 0);
}

static void ranges_dealloc(PyObject *object)
{
        struct ranges *self = (struct ranges *)object;
        PyTypeObject *type = Py_TYPE(object);

        for (size_t i = 0; i < self->count; i++)
                Py_DECREF(self->owners[i]);
        PyMem_Free(self->ranges);
        PyMem_Free(self->owners);
        type->tp_free(object);
        Py_DECREF(type);
}

static bool grow(struct ranges *self)
{
        size_t capacity = self->capacity ? 2 * self->capacity : 64;
        struct nebula_range *ranges = PyMem_Realloc(self->ranges, capacity * sizeof *ranges);
        PyObject **owners;

        if (ranges)
                self->ranges = ranges;
        owners = ranges ? PyMem_Realloc(self->owners, capacity * sizeof *owners) : NULL;
        if (!owners) {
                PyErr_NoMemory();
                return false;
        }
        self->owners = owners;
        self->capacity = capacity;
        return true;
}

bool ranges_add(struct ranges *self, const void *address, uint64_t size, PyObject *owner)
{
        if (self->count == self->capacity && !grow(self))
                return false;
        self->ranges[self->count] = (struct nebula_range){ address, size };
        self->owners[self->count++] = Py_NewRef(owner);
        return true;
}

static bool may_change(const struct ranges *self)
{
        if (self->is_fixed)
                PyErr_SetString(PyExc_RuntimeError, "these ranges are being saved, or were: they change no more");
        return !self->is_fixed;
}

static PyObject *ranges_append(PyObject *object, PyObject *arguments)
{
        PyObject *number, *owner;
        unsigned long long size;
        void *address = NULL;

        if (!PyArg_ParseTuple(arguments, "OKO", &number, &size, &owner) || !may_change((struct ranges *)object))
                return NULL;
        if (number != Py_None)
                address = PyLong_AsVoidPtr(number);
        if (PyErr_Occurred() || !ranges_add((struct ranges *)object, address, size, owner))
                return NULL;
        Py_RETURN_NONE;
}

static PyObject *ranges_leave_out(PyObject *object, PyObject *number)
{
        struct ranges *self = (struct ranges *)object;
        size_t index = PyLong_AsSize_t(number);

        if (PyErr_Occurred() || !may_change(self))
                return NULL;
        if (index >= self->count) {
                PyErr_SetString(PyExc_IndexError, "there is no such range");
                return NULL;
        }
        self->ranges[index].data = NULL;
        Py_RETURN_NONE;
}

static Py_ssize_t ranges_length(PyObject *object)
{
        return (Py_ssize_t)((struct ranges *)object)->count;
}

static PyObject *ranges_item(PyObject *object, Py_ssize_t index)
{
        const struct ranges *self = (struct ranges *)object;
        PyObject *address;

        if (index < 0 || (size_t)index >= self->count) {
                PyErr_SetString(PyExc_IndexError, "there is no such range");
                return NULL;
        }
        address = self->ranges[index].data ? PyLong_FromVoidPtr((void *)self->ranges[index].data) : Py_NewRef(Py_None);
        return Py_BuildValue("(NKO)", address, (unsigned long long)self->ranges[index].size, self->owners[index]);
}

static PyMethodDef ranges_methods[] = {
        { "append", ranges_append, METH_VARARGS, "append(address or None, size in bytes, owner)" },
        { "leave_out", ranges_leave_out, METH_O, "leave_out(index): its address becomes None." },
        { NULL, NULL, 0, NULL },
};

int ranges_add_type(PyObject *module)
{
        static PyType_Slot slots[] = {
                { Py_tp_doc, "Places in memory, and what keeps each alive; see _ranges.h." },
                { Py_tp_new, ranges_make },
                { Py_tp_dealloc, ranges_dealloc },
                { Py_tp_methods, ranges_methods },
                { Py_sq_length, ranges_length },
                { Py_sq_item, ranges_item },
                { 0, NULL },
        };
        static PyType_Spec spec = { "nebulaml._nebula.Ranges", sizeof(struct ranges), 0, Py_TPFLAGS_DEFAULT, slots };

        ranges_type = (PyTypeObject *)PyType_FromSpec(&spec);
        return ranges_type ? PyModule_AddObjectRef(module, "Ranges", (PyObject *)ranges_type) : -1;
}
