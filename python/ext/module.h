/*
 * module.h - declarations that the files of the extension module share.
 *
 * The extension is a thin layer over include/nebula.h: four types (Session,
 * Checkpoint, Map, Watch) whose methods are its functions one to one, and the
 * input of a save: pickles (pickle.h) and ranges of memory (ranges.h). Policy
 * is in the Python files beside it.
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
/* A str of a JSON text; frees the text. */
PyObject *nebula_text(char *text);

/* Python objects for handles; they take the handles over, also on failure. */
PyObject *checkpoint_object(PyObject *session, nebula_checkpoint *checkpoint);
/* From now on, threads of the library do not take the GIL. */
void checkpoint_leave(void);
bool checkpoint_has_left(void);
/* ending.c: functions for nebulaml/_session/ending.py. */
PyObject *end_is_near(PyObject *module, PyObject *unused);
PyObject *end_only_by(PyObject *module, PyObject *process);
PyObject *await_copies(PyObject *module, PyObject *timeout_ms);
PyObject *signal_would_end(PyObject *module, PyObject *number);
PyObject *audit_ends(PyObject *module, PyObject *call);
PyObject *map_object(PyObject *checkpoint, nebula_map *map);

/* watch_images(f, g): f(address, bytes) is called after a spare image was mapped, g(address, 0) before an image is unmapped. */
PyObject *session_watch_images(PyObject *module, PyObject *arguments);
/* watch_waits(f): f() is called every 200 ms while a save waits for memory; an exception from f ends the save. */
PyObject *session_watch_waits(PyObject *module, PyObject *watcher);
/* pickle_is_modest(pickle): False also if the bytes are cut off or not a pickle. */
PyObject *pickle_is_modest(PyObject *module, PyObject *pickle);
/* pickle_is_torchs(pickle): modest, and only with opcodes that torch's loader for untrusted files accepts. */
PyObject *pickle_is_torchs(PyObject *module, PyObject *pickle);
/* Session, the type, and its handle. */
PyTypeObject *session_type(void);
nebula_session *session_handle(PyObject *session);
int session_add_type(PyObject *module);
int checkpoint_add_type(PyObject *module);
int map_add_type(PyObject *module);
int watch_add_type(PyObject *module);
int output_add_type(PyObject *module);
/* output.c: functions for nebulaml/export. */
PyObject *output_read_sums(PyObject *module, PyObject *arguments);
PyObject *output_sum_bytes(PyObject *module, PyObject *arguments);
PyObject *output_staging_make(PyObject *module, PyObject *parent);
PyObject *output_staging_end(PyObject *module, PyObject *arguments);
PyObject *output_staging_left(PyObject *module, PyObject *parent);
PyObject *output_staging_place(PyObject *module, PyObject *arguments);
/* order(versions): see order.c. */
PyObject *order_versions(PyObject *module, PyObject *versions);
/* See delta.c. */
PyObject *delta_sums_of(PyObject *module, PyObject *arguments);
PyObject *delta_sum_of_state(PyObject *module, PyObject *list);
PyObject *delta_between(PyObject *module, PyObject *arguments);
PyObject *delta_apply_to(PyObject *module, PyObject *arguments);

#endif
