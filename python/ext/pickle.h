/*
 * pickle.h - declarations that the pickling files share: the type TorchPickler
 * (pickle.c), the reduction of tensors and storages (pickle_reduce.c), and the
 * writer of plain state, which needs no pickler (pickle_plain.c).
 */
#ifndef NB_PYTHON_PICKLING_H
#define NB_PYTHON_PICKLING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "ranges.h"

/* Stands in a tensor's arguments for its storage until persistent_id sees it. */
struct storage_ref {
        PyObject_HEAD
        PyObject *pid;   /* the finished persistent id */
        PyObject *owner; /* a reference, so that no other storage gets the same cdata; or NULL */
        bool used;
};

/* Our part of a pickler; it follows the base's part. */
struct pickler {
        PyObject *describe;
        struct ranges *storages;
        PyObject *refs;       /* cdata -> storage_ref */
        PyObject *dtype_at;   /* address -> dtype, for torch.save's check */
};

/* Objects of torch that every tensor needs; reduce_load_torch fetches them once. */
extern struct torch_objects {
        bool ready;
        PyObject *tensor_type, *typed_storage_type, *untyped_storage_type, *strided, *rebuild, *ordered_dict;
        PyObject *dtypes;     /* dtype -> (storage type, item size, complex) */
        PyObject *empty_dict_reduction;
        PyObject *str_storage, *str_cpu;
        PyObject *untyped_storage, *storage_offset, *shape, *stride, *dtype, *requires_grad, *is_cpu, *layout, *is_neg,
                *backward_hooks, *cdata, *nbytes, *data_ptr, *is_conj, *is_nested;
} torch;

/* Adds TorchPickler to the extension module. Functions here return 0, or -1 with a Python error set. */
int pickling_add_types(PyObject *module);
/* A storage_ref that takes over `pid`. */
struct storage_ref *pickling_storage_ref(PyObject *pid);

/* Whether a tensor has no `_backward_hooks`: torch gives each loaded tensor an empty dict. */
static inline bool hooks_are_none(PyObject *hooks)
{
        return hooks == Py_None || ((PyDict_CheckExact(hooks) || Py_IS_TYPE(hooks, (PyTypeObject *)torch.ordered_dict)) &&
                                    PyDict_GET_SIZE(hooks) == 0);
}

/* Fetches these objects, once. */
int reduce_load_torch(void);
/* The reduction of an ordinary CPU tensor or of an empty OrderedDict; NotImplemented for anything else. */
PyObject *reduce_object(struct pickler *pickler, PyObject *object);
/* The persistent id of a storage that torch's own reduction, or the user, has put into the stream; None for anything else. */
PyObject *reduce_storage(struct pickler *pickler, PyObject *object);

/* plain_dump(object, takes_cuda): (pickle, storages) of a plain object, as TorchPickler makes them; None for any other object.
 * takes_cuda: a storage may be on a GPU (ranges.h). */
PyObject *plain_dump(PyObject *module, PyObject *arguments);

#endif
