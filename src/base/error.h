/*
 * error.h - describing a failure once, where it is first understood.
 *
 * The first function that knows what an error is calls error_set and returns
 * its result; callers pass the status and the filled struct upwards untouched.
 * `error` may be NULL when nobody wants to know.
 */
#ifndef NB_BASE_ERROR_H
#define NB_BASE_ERROR_H

#include "nebula.h"

/* Fills `error` and returns `status`. sys_errno is positive, or 0; its text is appended to the message. */
enum nebula_status error_set(struct nebula_error *error, enum nebula_status status, int sys_errno,
                             const char *format, ...) __attribute__((format(printf, 4, 5)));
/* The status that a failed system call amounts to: ENOSPC and EDQUOT are NO_SPACE, ENOENT is NOT_FOUND, ENOMEM is NO_MEMORY, else STORAGE. */
enum nebula_status error_status_of_errno(int sys_errno);
/* Puts "prefix: " before the message. */
void error_prefix(struct nebula_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
