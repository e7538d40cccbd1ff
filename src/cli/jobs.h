/*
 * jobs.h - the storage paths that lie in one path, for a person with many jobs: a path that has versions is a job, else each directory of it
 * that has versions is one. One listing finds them, and three small requests find the newest version of each.
 */
#ifndef NB_CLI_JOBS_H
#define NB_CLI_JOBS_H

#include <jansson.h>

#include "nebula.h"

/* {"path", "is_job": the path itself is one, "jobs": [{"name", "path", "newest": tag or null, "step", "committed_at", "size", "trainers", "in_memory", "verdict", "error"}]},
 * the worst first.
 * The caller owns *ret_jobs. */
enum nebula_status jobs_load(const char *given_path, json_t **ret_jobs, struct nebula_error *error);
void jobs_print(const json_t *answer);

#endif
