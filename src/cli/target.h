/*
 * target.h - finds the storage path and the version that a command works on.
 *
 * The storage path is --path, else $NEBULA_PERSISTENT_STORAGE_PATH, else the
 * current directory if it holds checkpoints. Plain paths are made absolute.
 */
#ifndef NB_CLI_TARGET_H
#define NB_CLI_TARGET_H

#include "store/manifest.h"

#define TARGET_PATH_MAX 4096

/* "" if no path is given and the current directory holds no checkpoints. NEBULA_INVALID: the path is too long or not UTF-8. */
enum nebula_status target_path(const char *given, char ret_path[TARGET_PATH_MAX], struct nebula_error *error);
/* Opens the store at that path. NEBULA_INVALID if there is none; the error says what to do. */
enum nebula_status target_open(const char *given, struct store **ret_store, struct nebula_error *error);
/* Makes a plain path absolute. Writes a URL in one spelling, without its signature, which store_open finds (store/place.h). */
enum nebula_status target_absolute(const char *path, char ret_path[TARGET_PATH_MAX], struct nebula_error *error);
/* The path of a directory below `parent`. A signature of the parent holds for it, too. */
enum nebula_status target_below(const char *parent, const char *key, char ret_path[TARGET_PATH_MAX], struct nebula_error *error);
/* Loads the version `tag`; for "latest" and NULL the newest. Unreadable versions may be newer: says on stderr how
 * many were skipped, and returns it in ret_passed_over, which may be NULL. */
enum nebula_status target_load(struct store *store, const char *tag, struct manifest *ret_manifest, size_t *ret_passed_over,
                               struct nebula_error *error);

#endif
