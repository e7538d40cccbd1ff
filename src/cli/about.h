/*
 * about.h - the metrics and metadata that a program gave a version: nebula-metadata.json, a file of the version (python/nebulaml/_session/about.py).
 *
 * Threads: no shared state.
 */
#ifndef NB_CLI_ABOUT_H
#define NB_CLI_ABOUT_H

#include <jansson.h>

#include "store/manifest.h"

/* The document, which has the objects "metrics" and "metadata". NULL: the version has none, or it is not sound. The caller decrefs it. */
json_t *about_load(struct store *store, const struct manifest *manifest);
/* "loss=0.25 accuracy=0.9": numbers and texts of one object by their names. The caller frees it. NULL: none. */
char *about_text(const json_t *object);

#endif
