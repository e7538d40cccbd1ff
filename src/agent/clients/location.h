/*
 * location.h - one directory is one path, however it is spelled.
 *
 * A client gives a storage path as its user wrote it: through symbolic links, with "..", "//" or "file://". Two spellings of one
 * directory must be one job, or two trainers write each other's files. So the agent replaces each path that a client gives by the
 * one without links. What does not exist yet stays as it is spelled, behind what exists. A directory that is mounted at two places
 * has one path here: that of the job that came first (device and inode say so).
 *
 * A file system may hang. Then the caller waits for a second, and takes what the same spelling led to before, or the spelling itself.
 *
 * None is called with the lock held. Any thread.
 */
#ifndef NB_AGENT_CLIENTS_LOCATION_H
#define NB_AGENT_CLIENTS_LOCATION_H

#include "agent/catalogue/catalogue.h"

/* A storage path, of IPC_PATH_MAX bytes; "" and what is no path stay as they are. */
void location_settle(struct catalogue *catalogue, char *path);
/* A path that is published or removed: its parent alone, since of a link only the link is meant. */
void location_settle_name(struct catalogue *catalogue, char *path);
/* The storage path of a job is there by now: another mount of it is known from here on. May wait for storage. */
void location_learn(struct catalogue *catalogue, const char *path);
/* Whether both are one storage path. May wait for storage, a second each. */
bool location_same(struct catalogue *catalogue, const char *a, const char *b);
void location_done(struct catalogue *catalogue);

#endif
