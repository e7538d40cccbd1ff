/*
 * doctor_measure.h - measures the speeds for `nebula plan`: of a memory copy into shared pages, of checksums, and of a write
 * to the storage path and a read from it. It moves 256 MiB each way through the storage driver, and removes what it wrote.
 */
#ifndef NB_CLI_DOCTOR_MEASURE_H
#define NB_CLI_DOCTOR_MEASURE_H

#include <jansson.h>

#include "nebula.h"

/* Limits of this machine in bytes per second; 0: not measured. */
struct doctor_limits {
        uint64_t bytes, memory; /* bytes: moved each way; memory: free for this process */
        double copy, sum, write, read;
};

/* path: the absolute storage path, or "": only memory is measured. On failure *ret_limits holds what was measured before it. */
enum nebula_status doctor_measure(const char *path, struct doctor_limits *ret_limits, struct nebula_error *error);
/* error->status NEBULA_OK: no error occurred. */
json_t *doctor_limits_json(const struct doctor_limits *limits, const struct nebula_error *error);
void doctor_limits_print(const struct doctor_limits *limits, const struct nebula_error *error);

#endif
