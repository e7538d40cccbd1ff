/*
 * location.h - one directory, or one place in an object store, is one path, however it is spelled.
 *
 * A client sends a storage path as its user wrote it: with symbolic links, "..", "//" or "file://". Two spellings of one
 * directory must be one job: otherwise two trainers overwrite each other's files. So the agent replaces each path from a
 * client by the path without links. A part that does not exist yet keeps its spelling. If a directory is mounted at two
 * places, its path is that of the job that came first; device and inode show that it is the same. The path of an object store has no
 * signature (store/place.h).
 *
 * A file system may hang. The caller then waits for a second, and takes the path to which the same spelling led before, or
 * else the spelling itself.
 *
 * Call these without the lock, from any thread.
 */
#ifndef NB_AGENT_CLIENTS_LOCATION_H
#define NB_AGENT_CLIENTS_LOCATION_H

#include "agent/catalogue/catalogue.h"

/* Resolves a storage path, a buffer of IPC_PATH_MAX bytes. "" and a text that is no path do not change. */
void location_resolve(struct catalogue *catalogue, char *path);
/* Resolves only the parent of a path that is published or removed: if the path is a link, the link itself is meant. */
void location_resolve_parent(struct catalogue *catalogue, char *path);
/* The directory at a job's storage path. */
struct job_location {
        uint64_t device, inode; /* inode 0: it is not known yet */
};
/* A new job, whose storage path was resolved: if the directory exists, another mount of it is recognised from now on. Lock held. */
void location_note(struct job *job);
/* The same for a pinned job whose storage path exists since then. May wait for storage. */
void location_learn(struct catalogue *catalogue, struct job *job);
/* Whether both paths are the same storage. May wait for storage, a second each. */
bool location_same(struct catalogue *catalogue, const char *a, const char *b);
void location_done(struct catalogue *catalogue);

#endif
