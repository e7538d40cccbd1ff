/*
 * metrics.h - the metrics that a program gave a version: numbers by name, in the small file nebula-metadata.json of the version, which the
 * Python package writes (docs/formats.md).
 *
 * Threads: no shared state. Errors are the store's.
 */
#ifndef NB_STORE_METRICS_H
#define NB_STORE_METRICS_H

#include <jansson.h>

#include "store/manifest.h"

#define METRICS_FILE "nebula-metadata.json"

/* Loads the metrics as an object; an empty one if the version has none, or a file that cannot be read as such. The caller drops it. */
enum nebula_status metrics_load(struct store *store, const struct manifest *manifest, json_t **ret_metrics, struct nebula_error *error);
/* The value of a metric; NaN: there is none. */
double metrics_value(const json_t *metrics, const char *name);

#endif
