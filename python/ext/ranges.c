/* Ranges: see ranges.h. */
#include "ranges.h"

#include "device.h"

#include <string.h>

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
        PyMem_Free(self->sources);
        PyMem_Free(self->owners);
        type->tp_free(object);
        Py_DECREF(type);
}

static bool grow(struct ranges *self)
{
        size_t capacity = self->capacity ? 2 * self->capacity : 64;
        struct nebula_range *ranges = PyMem_Realloc(self->ranges, capacity * sizeof *ranges);
        struct range_source *sources = PyMem_Realloc(self->sources, capacity * sizeof *sources);
        PyObject **owners = PyMem_Realloc(self->owners, capacity * sizeof *owners);

        self->ranges = ranges ? ranges : self->ranges;
        self->sources = sources ? sources : self->sources;
        self->owners = owners ? owners : self->owners;
        if (!ranges || !sources || !owners) {
                PyErr_NoMemory();
                return false;
        }
        self->capacity = capacity;
        return true;
}

bool ranges_add(struct ranges *self, int device, const void *address, uint64_t size, PyObject *owner)
{
        bool is_here = device == RANGES_HOST;

        if (self->count == self->capacity && !grow(self))
                return false;
        self->ranges[self->count] = (struct nebula_range){ is_here ? address : NULL, size };
        self->sources[self->count] = (struct range_source){ device, is_here ? NULL : address };
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
        unsigned long long address, size;
        PyObject *owner;

        if (!PyArg_ParseTuple(arguments, "KKO", &address, &size, &owner) || !may_change((struct ranges *)object) ||
            !ranges_add((struct ranges *)object, RANGES_HOST, (const void *)(uintptr_t)address, size, owner))
                return NULL;
        Py_RETURN_NONE;
}

/* Adds the bytes of an object, and its view as the owner: while that lives, they cannot move or be resized. 0: it has none that can be saved. */
static int add_buffer(struct ranges *self, PyObject *part)
{
        PyObject *view = PyMemoryView_FromObject(part);
        const Py_buffer *data;
        int result = 0;

        if (!view) {
                if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError) || PyErr_ExceptionMatches(PyExc_BufferError))
                        PyErr_Clear();
                return PyErr_Occurred() ? -1 : 0;
        }
        data = PyMemoryView_GET_BUFFER(view);
        if (PyBuffer_IsContiguous(data, 'C') && (!data->format || !strchr(data->format, 'O')))
                result = ranges_add(self, RANGES_HOST, data->buf, (uint64_t)data->len, view) ? 1 : -1;
        Py_DECREF(view);
        return result;
}

static PyObject *ranges_extend(PyObject *object, PyObject *parts)
{
        Py_ssize_t count = 0;

        if (!PyList_Check(parts)) {
                PyErr_SetString(PyExc_TypeError, "the parts are a list");
                return NULL;
        }
        if (!may_change((struct ranges *)object))
                return NULL;
        for (; count < PyList_GET_SIZE(parts); count++) {
                PyObject *part = Py_NewRef(PyList_GET_ITEM(parts, count));
                int added = add_buffer((struct ranges *)object, part);

                Py_DECREF(part);
                if (added < 0)
                        return NULL;
                if (added == 0)
                        break;
        }
        return PyLong_FromSsize_t(count);
}

static PyObject *ranges_put_on(PyObject *object, PyObject *arguments)
{
        struct ranges *self = (struct ranges *)object;
        unsigned long long address;
        Py_ssize_t index;
        int device;

        if (!PyArg_ParseTuple(arguments, "inK", &device, &index, &address) || !may_change(self))
                return NULL;
        if (index < 0 || (size_t)index >= self->count || device < 0) {
                PyErr_SetString(PyExc_IndexError, "there is no such range, or no such device");
                return NULL;
        }
        self->ranges[index].data = NULL;
        self->sources[index] = (struct range_source){ device, (const void *)(uintptr_t)address };
        Py_RETURN_NONE;
}

bool ranges_set_constant(struct ranges *self, PyObject *numbers)
{
        if (!may_change(self))
                return false;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(numbers); i++) {
                size_t index = PyLong_AsSize_t(PyList_GET_ITEM(numbers, i));

                if (PyErr_Occurred())
                        return false;
                if (index >= self->count || self->sources[index].device != RANGES_HOST) {
                        PyErr_SetString(PyExc_IndexError, "there is no such range on the host");
                        return false;
                }
                if (self->ranges[index].size == 0)
                        continue;
                self->sources[index] = (struct range_source){ RANGES_CONSTANT, self->ranges[index].data };
                self->ranges[index].data = NULL;
        }
        return true;
}

/* For a small number of devices. */
static PyObject *ranges_devices(PyObject *object, PyObject *unused)
{
        const struct ranges *self = (struct ranges *)object;
        PyObject *found = PyList_New(0);
        int last = RANGES_HOST;

        for (size_t i = 0; found && i < self->count; i++) {
                PyObject *number;

                if (self->sources[i].device == last || self->ranges[i].size == 0)
                        continue;
                last = self->sources[i].device;
                number = PyLong_FromLong(last);
                if (!number || (last != RANGES_HOST && PySequence_Contains(found, number) == 0 && PyList_Append(found, number) < 0))
                        Py_CLEAR(found);
                Py_XDECREF(number);
        }
        return found;
}

static PyObject *ranges_owners(PyObject *object, PyObject *arguments)
{
        const struct ranges *self = (struct ranges *)object;
        PyObject *found = PyList_New(0);
        unsigned long long least;
        int device;

        if (!PyArg_ParseTuple(arguments, "iK", &device, &least))
                Py_CLEAR(found);
        for (size_t i = 0; found && i < self->count; i++) {
                PyObject *pair;

                if (self->sources[i].device != device || self->ranges[i].size < least)
                        continue;
                pair = Py_BuildValue("(nO)", (Py_ssize_t)i, self->owners[i]);
                if (!pair || PyList_Append(found, pair) < 0)
                        Py_CLEAR(found);
                Py_XDECREF(pair);
        }
        return found;
}

static size_t piece_count(const struct ranges *self, size_t index, int device, uint64_t least, uint64_t most, uint64_t piece)
{
        uint64_t size = self->ranges[index].size;

        return self->sources[index].device == device && size >= least && size <= most ? (size + piece - 1) / piece : 0;
}

/* Returns packed device_piece structs. */
static PyObject *ranges_pieces(PyObject *object, PyObject *arguments)
{
        const struct ranges *self = (struct ranges *)object;
        unsigned long long image, least, most, piece;
        PyObject *offsets, *packed;
        struct device_piece *to;
        size_t count = 0;
        int device;

        if (!PyArg_ParseTuple(arguments, "iKO!KKK", &device, &image, &PyList_Type, &offsets, &least, &most, &piece))
                return NULL;
        if ((size_t)PyList_GET_SIZE(offsets) != self->count || piece == 0 || least == 0) {
                PyErr_SetString(PyExc_ValueError, "an offset for each range is needed, and sizes that are not 0");
                return NULL;
        }
        for (size_t i = 0; i < self->count; i++)
                count += piece_count(self, i, device, least, most, piece);
        packed = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof *to));
        if (!packed)
                return NULL;
        to = (struct device_piece *)(void *)PyBytes_AS_STRING(packed);
        for (size_t i = 0; i < self->count; i++) {
                size_t pieces = piece_count(self, i, device, least, most, piece);
                uint64_t offset = pieces ? PyLong_AsUnsignedLongLong(PyList_GET_ITEM(offsets, i)) : 0;
                uint64_t from = (uint64_t)(uintptr_t)self->sources[i].address, size = self->ranges[i].size;

                for (size_t k = 0; k < pieces; k++)
                        *to++ = (struct device_piece){ image + offset + k * piece, from + k * piece,
                                                       k + 1 < pieces ? piece : size - k * piece };
        }
        if (PyErr_Occurred())
                Py_CLEAR(packed);
        return packed;
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
        { "append", ranges_append, METH_VARARGS, "append(address, size in bytes, owner)" },
        { "extend", ranges_extend, METH_O,
          "extend(parts): adds bytes-like objects, each as its own owner, up to the first that has no contiguous bytes; how many" },
        { "put_on", ranges_put_on, METH_VARARGS, "put_on(device, index, address): moves a range to a device; its host address becomes None." },
        { "devices", ranges_devices, METH_NOARGS, "devices(): the numbers of the devices of the ranges that are not empty." },
        { "owners", ranges_owners, METH_VARARGS,
          "owners(device, least): (index, owner) of those of at least so many bytes on a device; -1: on the host." },
        { "pieces", ranges_pieces, METH_VARARGS,
          "pieces(device, image, offsets, least, most, piece): the copies to the host of those of least to most bytes there, each of\n"
          "up to `piece` bytes: (to, from, size), each of them a uint64 of this machine, packed." },
        { NULL, NULL, 0, NULL },
};

int ranges_add_type(PyObject *module)
{
        static PyType_Slot slots[] = {
                { Py_tp_doc, "Places in memory, and what keeps each alive; see ranges.h." },
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
