/*
 * check.h - the work of `nebula verify`: one version, or one file, checked in
 * full; what was found comes back as JSON, which is also what is printed for
 * people from.
 *
 *      file:    {"name", "path", "size", "ok", "damage": [damage...]}
 *      damage:  {"offset", "size", "message"} and, in a zip image, "records": the names it lies in
 *      version: {"tag", "generation", "ok", "size", "documents": [file...], "files": [file...]}
 *
 * Every returned object is the caller's; NULL means that memory is out.
 */
#ifndef NB_CLI_CHECK_H
#define NB_CLI_CHECK_H

#include <jansson.h>

#include "cli/target.h"

/* `only_name`: that file alone; NULL: all. Calls progress_add with every byte that was read. */
json_t *check_version(struct store *store, const struct manifest *manifest, const char *only_name);
/* A manifest that cannot be loaded, as a version. */
json_t *check_broken(struct store *store, const char *tag, const struct nebula_error *error);
/* A zip file that no manifest covers: only its own CRC-32s. */
json_t *check_lone_file(const char *path);
bool check_ok(const json_t *object);

#endif
