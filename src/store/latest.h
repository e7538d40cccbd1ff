/*
 * latest.h - <root>/latest: one line with the directory of the newest version, for programs that know no manifests. A hint, never the
 * authority. The name is not Nebula's alone: a user's file, directory or link of that name stays.
 *
 * Threads: no shared state. Errors are the store's.
 */
#ifndef NB_STORE_LATEST_H
#define NB_STORE_LATEST_H

#include "store/store.h"

#define LATEST_DIRECTORY_MAX 256 /* bytes of an encoded tag, its NUL included */

/* NEBULA_BUSY: something is there that Nebula did not write. */
enum nebula_status latest_put(struct store *store, const char *directory, struct nebula_error *error);
/* The step that the hint names although it is gone; "": it names none such. Another name may be the user's own text. */
void latest_find_dead(struct store *store, char ret_directory[LATEST_DIRECTORY_MAX]);

#endif
