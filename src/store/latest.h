/*
 * latest.h - <root>/latest: one line with the directory of the newest version, for programs that do not read manifests. It is only a
 * hint. A user's own file, directory or link of that name is not replaced.
 *
 * Threads: no shared state. Errors are the store's.
 */
#ifndef NB_STORE_LATEST_H
#define NB_STORE_LATEST_H

#include "store/store.h"

#define LATEST_DIRECTORY_MAX 256 /* bytes of an encoded tag, its NUL included */

/* NEBULA_BUSY: the name is taken by something that Nebula did not write. `written`: the stamp of this caller's last put, "" at first: while the
 * hint has it, the hint is not read before it is replaced. NULL: it is read each time. */
enum nebula_status latest_put(struct store *store, const char *directory, struct store_stamp *written, struct nebula_error *error);
/* The directory of the step that the hint names, if that version no longer exists; else "". A hint that names no step may be a user's
 * own text. */
void latest_find_dead(struct store *store, char ret_directory[LATEST_DIRECTORY_MAX]);

#endif
