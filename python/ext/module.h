/*
 * module.h - what the files of the extension module share.
 *
 * The extension is a thin skin over include/nebula.h: four types (Session,
 * Checkpoint, Map, Watch) whose methods are its functions one to one, and what a save
 * takes: pickles (pickle.h) and ranges of memory (ranges.h). Policy lives in
 * the Python files beside it.
 *
 * Threads: every call into the C library that may wait runs without the GIL.
 * Ownership: a Checkpoint keeps its Session alive, a Map its Checkpoint; the C
 * handles are freed with the last reference to their object.
 */
#ifndef NB_PYTHON_NEBULA_H
#define NB_PYTHON_NEBULA_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "nebula.h"

/* Raises the Python exception for a failure of the C library; always NULL. */
PyObject *nebula_raise(const struct nebula_error *error);
/* That exception, as an object. */
PyObject *nebula_exception(const struct nebula_error *error);
/* A str of JSON text, which is freed. */
PyObject *nebula_text(char *text);

/* Objects around handles that are taken over in every case. */
PyObject *checkpoint_object(PyObject *session, nebula_checkpoint *checkpoint);
/* From now on no thread of the library takes the GIL. */
void checkpoint_leave(void);
bool checkpoint_has_left(void);
/* ending.c: what nebulaml/_session/ending.py asks of C. */
PyObject *end_is_near(PyObject *module, PyObject *unused);
PyObject *await_copies(PyObject *module, PyObject *timeout_ms);
PyObject *signal_would_end(PyObject *module, PyObject *number);
PyObject *audit_ends(PyObject *module, PyObject *call);
PyObject *map_object(PyObject *checkpoint, nebula_map *map);

/* watch_images(f): f(address) is called before an image leaves this process's memory. */
PyObject *session_watch_images(PyObject *module, PyObject *watcher);
/* watch_waits(f): f() is called every 200 ms while a save waits for memory; what it raises ends the save. */
PyObject *session_watch_waits(PyObject *module, PyObject *watcher);
/* pickle_is_modest(pickle): False also for what is cut off, or no pickle. */
PyObject *pickle_is_modest(PyObject *module, PyObject *pickle);
/* pickle_is_torchs(pickle): modest, and of opcodes that torch's loader for untrusted files knows. */
PyObject *pickle_is_torchs(PyObject *module, PyObject *pickle);
/* Session, the type, and its handle. */
PyTypeObject *session_type(void);
nebula_session *session_handle(PyObject *session);
int session_add_type(PyObject *module);
int checkpoint_add_type(PyObject *module);
int map_add_type(PyObject *module);
int watch_add_type(PyObject *module);

#endif
