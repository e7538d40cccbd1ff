/*
 * pickle.c - TorchPickler: torch.save's pickle without torch.save's Python.
 *
 * A subclass of CPython's own C pickler, so CPython's code pickles containers,
 * numbers, strings, the memo and every object that needs Python's protocols.
 * Two hooks are ours, both in C:
 *
 *   reducer_override   an ordinary CPU tensor becomes the same tuple that
 *                      Tensor.__reduce_ex__ builds; any other tensor (a
 *                      subclass, attributes, hooks, quantised, sparse, meta,
 *                      another device, conj or neg bits, a dtype without a typed
 *                      storage) gets NotImplemented, and torch's own code reduces it
 *   persistent_id      a storage becomes ('storage', type, key, location, numel);
 *                      storages are numbered by identity, as torch.save does
 *
 * Calling sequence: TorchPickler(file, describe) ; .dump(obj) ; .storages
 * `describe` is called for each storage that reducer_override did not handle,
 * with the TypedStorage or UntypedStorage; it returns (its UntypedStorage, the
 * CPU storage to copy from, dtype or None, storage type, location, numel).
 *
 * After dump, .storages is a Ranges in the order of the keys "0", "1", ...; the storages own them.
 *
 * Threads: the GIL is held throughout; one pickler is used once.
 */
#include "pickle.h"

static PyTypeObject *storage_ref_type, *pickler_type;
static Py_ssize_t base_size;

static struct pickler *part(PyObject *self)
{
        return (struct pickler *)((char *)self + base_size);
}

struct storage_ref *pickling_storage_ref(PyObject *pid)
{
        struct storage_ref *ref = pid ? (struct storage_ref *)storage_ref_type->tp_alloc(storage_ref_type, 0) : NULL;

        if (ref)
                ref->pid = pid;
        else
                Py_XDECREF(pid);
        return ref;
}

static void storage_ref_dealloc(PyObject *self)
{
        PyTypeObject *type = Py_TYPE(self);

        Py_XDECREF(((struct storage_ref *)self)->pid);
        Py_XDECREF(((struct storage_ref *)self)->owner);
        type->tp_free(self);
        Py_DECREF(type);
}

static PyObject *persistent_id(PyObject *self, PyObject *object)
{
        if (Py_IS_TYPE(object, storage_ref_type)) {
                struct storage_ref *ref = (struct storage_ref *)object;

                /* The first use returns the tuple itself, each later one a new tuple: then the bytes are those of torch.save. */
                if (!ref->used) {
                        ref->used = true;
                        return Py_NewRef(ref->pid);
                }
                return PyTuple_Pack(5, PyTuple_GET_ITEM(ref->pid, 0), PyTuple_GET_ITEM(ref->pid, 1),
                                    PyTuple_GET_ITEM(ref->pid, 2), PyTuple_GET_ITEM(ref->pid, 3),
                                    PyTuple_GET_ITEM(ref->pid, 4));
        }
        return reduce_storage(part(self), object);
}

static PyObject *reducer_override(PyObject *self, PyObject *object)
{
        return reduce_object(part(self), object);
}

static int pickler_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
        struct pickler *pickler = part(self);
        PyObject *file, *describe, *base_arguments, *base_keywords;
        int result = -1;

        if (keywords && PyDict_GET_SIZE(keywords) > 0) {
                PyErr_SetString(PyExc_TypeError, "TorchPickler(file, describe) takes no keywords");
                return -1;
        }
        if (!PyArg_ParseTuple(arguments, "OO", &file, &describe) || reduce_load_torch() < 0)
                return -1;
        Py_XSETREF(pickler->describe, Py_NewRef(describe));
        Py_XSETREF(pickler->storages, ranges_new());
        Py_XSETREF(pickler->refs, PyDict_New());
        Py_XSETREF(pickler->dtype_at, PyDict_New());
        base_arguments = PyTuple_Pack(1, file);
        base_keywords = Py_BuildValue("{si}", "protocol", 2);
        if (pickler->storages && pickler->refs && pickler->dtype_at && base_arguments && base_keywords)
                result = pickler_type->tp_base->tp_init(self, base_arguments, base_keywords);
        Py_XDECREF(base_arguments);
        Py_XDECREF(base_keywords);
        return result;
}

static int pickler_traverse(PyObject *self, visitproc visit, void *arg)
{
        struct pickler *pickler = part(self);

        if (!PyType_HasFeature(pickler_type->tp_base, Py_TPFLAGS_HEAPTYPE)) /* a heap type's own traverse visits the type */
                Py_VISIT(Py_TYPE(self));
        Py_VISIT(pickler->describe);
        Py_VISIT(pickler->storages);
        Py_VISIT(pickler->refs);
        Py_VISIT(pickler->dtype_at);
        return pickler_type->tp_base->tp_traverse(self, visit, arg);
}

static int pickler_clear(PyObject *self)
{
        struct pickler *pickler = part(self);

        Py_CLEAR(pickler->describe);
        Py_CLEAR(pickler->storages);
        Py_CLEAR(pickler->refs);
        Py_CLEAR(pickler->dtype_at);
        return pickler_type->tp_base->tp_clear(self);
}

static void pickler_dealloc(PyObject *self)
{
        PyTypeObject *type = Py_TYPE(self);
        struct pickler *pickler = part(self);

        PyObject_GC_UnTrack(self);
        Py_CLEAR(pickler->describe);
        Py_CLEAR(pickler->storages);
        Py_CLEAR(pickler->refs);
        Py_CLEAR(pickler->dtype_at);
        PyObject_GC_Track(self); /* the base's dealloc expects a tracked object */
        pickler_type->tp_base->tp_dealloc(self);
        if (!PyType_HasFeature(pickler_type->tp_base, Py_TPFLAGS_HEAPTYPE))
                Py_DECREF(type);
}

static PyObject *pickler_storages(PyObject *self, void *closure)
{
        (void)closure;
        return Py_NewRef((PyObject *)part(self)->storages);
}

/* Before CPython 3.13 the base keeps persistent_id as a bound method of the pickler. That cycle would keep all objects of the memo until
 * a collection. */
static void break_cycle(PyObject *self)
{
        struct pickler *pickler = part(self);

        Py_CLEAR(pickler->describe);
        Py_CLEAR(pickler->refs);
        Py_CLEAR(pickler->dtype_at);
        pickler_type->tp_base->tp_clear(self);
}

/* The memo keeps every object alive until the end, so the cycle collector would run often and find nothing. A pickler is used once. */
static PyObject *pickler_dump(PyObject *self, PyObject *object)
{
        PyObject *result, *type, *value, *trace, *method = PyObject_GetAttrString((PyObject *)pickler_type->tp_base, "dump");
        int enabled;

        if (!method)
                return NULL;
        enabled = PyGC_Disable();
        result = PyObject_CallFunctionObjArgs(method, self, object, NULL);
        if (enabled)
                PyGC_Enable();
        Py_DECREF(method);
        PyErr_Fetch(&type, &value, &trace); /* freeing these objects may run code of the program */
        break_cycle(self);
        PyErr_Restore(type, value, trace);
        return result;
}

static PyMethodDef pickler_methods[] = {
        { "dump", pickler_dump, METH_O, "Writes the pickle of an object to the file." },
        { "persistent_id", persistent_id, METH_O, "The persistent id of a storage; None for anything else." },
        { "reducer_override", reducer_override, METH_O, "The reduction of an ordinary CPU tensor; else NotImplemented." },
        { NULL, NULL, 0, NULL },
};

static PyGetSetDef pickler_getset[] = {
        { "storages", pickler_storages, NULL, "A Ranges of the storages, by key.", NULL },
        { NULL, NULL, NULL, NULL, NULL },
};

int pickling_add_types(PyObject *module)
{
        static PyType_Slot ref_slots[] = { { Py_tp_dealloc, storage_ref_dealloc }, { 0, NULL } };
        static PyType_Spec ref_spec = { "nebulaml._nebula.StorageRef", sizeof(struct storage_ref), 0,
                                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, ref_slots };
        static PyType_Slot slots[] = {
                { Py_tp_doc, "torch.save's pickler in C; see pickle.c." },
                { Py_tp_init, pickler_init },
                { Py_tp_traverse, pickler_traverse },
                { Py_tp_clear, pickler_clear },
                { Py_tp_dealloc, pickler_dealloc },
                { Py_tp_methods, pickler_methods },
                { Py_tp_getset, pickler_getset },
                { 0, NULL },
        };
        static PyType_Spec spec = { "nebulaml._nebula.TorchPickler", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots };
        PyObject *pickle = PyImport_ImportModule("_pickle");
        PyObject *base = pickle ? PyObject_GetAttrString(pickle, "Pickler") : NULL;
        PyObject *bases = base ? PyTuple_Pack(1, base) : NULL;
        int result = -1;

        if (!bases)
                goto out;
        base_size = (((PyTypeObject *)base)->tp_basicsize + 15) & ~(Py_ssize_t)15;
        spec.basicsize = (int)(base_size + (Py_ssize_t)sizeof(struct pickler));
        storage_ref_type = (PyTypeObject *)PyType_FromSpec(&ref_spec);
        pickler_type = storage_ref_type ? (PyTypeObject *)PyType_FromSpecWithBases(&spec, bases) : NULL;
        if (!pickler_type)
                goto out;
        result = PyModule_AddObjectRef(module, "TorchPickler", (PyObject *)pickler_type);
out:
        Py_XDECREF(pickle);
        Py_XDECREF(base);
        Py_XDECREF(bases);
        return result;
}
