/*
 * verify_report.h - prints the result of `nebula verify`, as text or as JSON.
 */
#ifndef NB_CLI_VERIFY_REPORT_H
#define NB_CLI_VERIFY_REPORT_H

#include <jansson.h>

/* A version (check.h): a line per file, and below them each damage. */
void verify_print_version(const json_t *version);
/* All versions, and their sum. `sample` NULL: the check was no sample. Returns the exit code. */
int verify_print(bool json, json_t *versions, const json_t *sample, size_t passed_over, double seconds);

#endif
