/*
 * _map.c - Map: the verified bytes of one file.
 *
 * memoryview(map) is writable: the memory is this process's own, and no checkpoint changes with it.
 */
#include "_nebula.h"

struct map {
        PyObject_HEAD
        PyObject *checkpoint;
        nebula_map *handle;
};

static PyTypeObject *map_type;

PyObject *map_object(PyObject *checkpoint, nebula_map *handle)
{
        struct map *self = (struct map *)map_type->tp_alloc(map_type, 0);

        if (!self) {
                nebula_map_free(handle);
                return NULL;
        }
        self->checkpoint = Py_NewRef(checkpoint);
        self->handle = handle;
        return (PyObject *)self;
}

static void map_dealloc(PyObject *object)
{
        struct map *self = (struct map *)object;
        PyTypeObject *type = Py_TYPE(object);

        nebula_map_free(self->handle);
        Py_XDECREF(self->checkpoint);
        type->tp_free(object);
        Py_DECREF(type);
}

static int map_buffer(PyObject *self, Py_buffer *view, int flags)
{
        nebula_map *handle = ((struct map *)self)->handle;

        return PyBuffer_FillInfo(view, self, (void *)(uintptr_t)nebula_map_data(handle),
                                 (Py_ssize_t)nebula_map_size(handle), 0, flags);
}

int map_add_type(PyObject *module)
{
        static PyType_Slot slots[] = {
                { Py_tp_doc, "The verified bytes of one file; see _map.c." },
                { Py_tp_dealloc, map_dealloc },
                { Py_bf_getbuffer, map_buffer },
                { 0, NULL },
        };
        static PyType_Spec spec = { "nebulaml._nebula.Map", sizeof(struct map), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots };

        map_type = (PyTypeObject *)PyType_FromSpec(&spec);
        return map_type ? PyModule_AddObjectRef(module, "Map", (PyObject *)map_type) : -1;
}
