/*
 * doctor.h - the checks of `nebula doctor`, one function each. A check tries
 * the thing and reports the result. If the result is not good, it also says
 * what to do.
 */
#ifndef NB_CLI_DOCTOR_H
#define NB_CLI_DOCTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

enum doctor_verdict {
        DOCTOR_GOOD,
        DOCTOR_SLOWER, /* works, but more slowly */
        DOCTOR_BAD,    /* something essential does not work */
};
struct doctor_finding {
        enum doctor_verdict verdict;
        char found[400];  /* the result */
        char advice[400]; /* what to do; "": nothing */
};
#define FOUND(finding, ...) snprintf((finding)->found, sizeof (finding)->found, __VA_ARGS__)
#define ADVICE(finding, ...) snprintf((finding)->advice, sizeof (finding)->advice, __VA_ARGS__)

struct doctor_check {
        const char *name;
        /* path: the absolute storage path; "" if none is known. False: the check does not concern this path. */
        bool (*run)(const char *path, struct doctor_finding *finding);
};
extern const struct doctor_check doctor_health_checks[], doctor_machine_checks[], doctor_storage_checks[], doctor_store_checks[];
extern const size_t doctor_health_count, doctor_machine_count, doctor_storage_count, doctor_store_count;

bool doctor_memory(const char *path, struct doctor_finding *finding);
/* Looks below `sysfs`, which is /sys. */
void doctor_devices(const char *sysfs, struct doctor_finding *finding);
/* Writes 1 MiB to a temporary file in the directory or its nearest parent, and removes it. Returns 0 or a negative errno. */
int doctor_try_write(const char *path, int flags, double *ret_seconds);

#endif
