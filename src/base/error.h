/*
 * error.h - describes a failure once, in the function that first understands
 * it.
 *
 * The first function that understands an error calls error_set and returns its
 * result. Callers pass the status and the filled struct up unchanged. A caller
 * that does not need the message passes NULL for `error`.
 */
#ifndef NB_BASE_ERROR_H
#define NB_BASE_ERROR_H

#include "nebula.h"

/* Fills `error` and returns `status`. sys_errno is positive, or 0; its text is appended to the message. */
enum nebula_status error_set(struct nebula_error *error, enum nebula_status status, int sys_errno,
                             const char *format, ...) __attribute__((format(printf, 4, 5)));
#ifdef __clang_analyzer__ /* it looks into one file at a time */
#define error_set(error, status, ...) (error_set(error, status, __VA_ARGS__), (status))
#endif
/* Maps a failed system call to a status: ENOSPC and EDQUOT are NO_SPACE, ENOENT is NOT_FOUND, ENOMEM is NO_MEMORY,
 * all others are STORAGE. */
enum nebula_status error_status_of_errno(int sys_errno);
/* Adds to the end, as far as there is room. */
void error_suffix(struct nebula_error *error, const char *text);
/* Puts "prefix: " before the message. */
void error_prefix(struct nebula_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
