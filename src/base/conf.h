/*
 * conf.h - parses settings that people write: sizes, durations, numbers.
 *
 * The error message names the setting (`what`), the text, and the expected
 * form. Outputs are written only on success.
 */
#ifndef NB_BASE_CONF_H
#define NB_BASE_CONF_H

#include "nebula.h"

/* Bytes: "4G", "512M", "1.5 GiB", "4096". K, M, G, T are powers of 1024, in either case; "B" or "iB" may follow. */
enum nebula_status conf_parse_size(const char *what, const char *text, uint64_t *ret_bytes, struct nebula_error *error);
/* Seconds: "100", "2.5", "250ms", "90s", "15m", "1h", "2d". */
enum nebula_status conf_parse_duration(const char *what, const char *text, double *ret_seconds, struct nebula_error *error);
/* A plain number, 0 or more: "2", "0.5". */
enum nebula_status conf_parse_number(const char *what, const char *text, double *ret_value, struct nebula_error *error);
/* A whole number in decimal, at most `max`. */
enum nebula_status conf_parse_count(const char *what, const char *text, uint64_t max, uint64_t *ret_count,
                                    struct nebula_error *error);
/* The value of an environment variable; NULL when it is unset or empty. Of variables of clouds, those count that this thread has entered (vars.h). */
const char *conf_env(const char *name);

#endif
