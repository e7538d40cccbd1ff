/*
 * _pickling.h - what the two halves of TorchPickler share: the type itself
 * (_pickling.c) and the reduction of tensors and storages (_reduce.c).
 */
#ifndef NB_PYTHON_PICKLING_H
#define NB_PYTHON_PICKLING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

/* What a tensor's arguments hold in place of its storage until persistent_id sees it. */
struct storage_ref {
        PyObject_HEAD
        PyObject *pid; /* the finished persistent id */
        bool used;
};

/* Our part of a pickler; it lies behind its base's. */
struct pickler {
        PyObject *describe;
        PyObject *storages;   /* list of (address, size in bytes, storage, owner) */
        PyObject *refs;       /* cdata -> storage_ref */
        PyObject *dtype_at;   /* address -> dtype, for the check that torch.save makes */
};

/* Adds TorchPickler to the extension module. Functions here return 0, or -1 with a Python error set. */
int pickling_add_types(PyObject *module);
/* A storage_ref that takes over `pid`. */
struct storage_ref *pickling_storage_ref(PyObject *pid);

/* Fetches what is needed of torch, once. */
int reduce_load_torch(void);
/* The reduction of an ordinary CPU tensor or of an empty OrderedDict; NotImplemented for anything else. */
PyObject *reduce_object(struct pickler *pickler, PyObject *object);
/* The persistent id of a storage that torch's own reduction, or the user, put into the stream; None for anything else. */
PyObject *reduce_storage(struct pickler *pickler, PyObject *object);

#endif
