/*
 * target.h - which storage a command looks at, and which version in it.
 *
 * The storage path is --path, else $NEBULA_PERSISTENT_STORAGE_PATH, else the
 * current directory if it holds checkpoints. Plain paths are made absolute.
 */
#ifndef NB_CLI_TARGET_H
#define NB_CLI_TARGET_H

#include "store/manifest.h"

#define TARGET_PATH_MAX 4096

/* "" when nothing says one and the current directory holds none. NEBULA_INVALID: the path is too long, or not UTF-8. */
enum nebula_status target_path(const char *given, char ret_path[TARGET_PATH_MAX], struct nebula_error *error);
/* The path, opened. NEBULA_INVALID with what to do when there is none. */
enum nebula_status target_open(const char *given, struct store **ret_store, struct nebula_error *error);
/* Makes a plain path absolute; URLs stay. */
enum nebula_status target_absolute(const char *path, char ret_path[TARGET_PATH_MAX], struct nebula_error *error);
/* The version `tag`, or the newest for "latest" and NULL. How many were passed over for it, since nobody can tell whether they are newer,
 * is said on stderr; ret_passed_over: and here, may be NULL. */
enum nebula_status target_load(struct store *store, const char *tag, struct manifest *ret_manifest, size_t *ret_passed_over,
                               struct nebula_error *error);
uint64_t manifest_size(const struct manifest *manifest); /* bytes of all files */

#endif
