/*
 * os_fault.h - a table of system calls in which the k-th call fails. For tests
 * only: it is in the library nb_os_test, not in the product.
 *
 *      struct os_fault fault = { .error = EIO };
 *      do {
 *              fault.at++;
 *              ... a fresh start ...
 *              os_fault_begin(&fault);
 *              ... the code under test ...
 *              hit = os_fault_end();
 *              ... what must hold, whichever call failed: os_fault_where() ...
 *      } while (hit);
 *
 * Only calls that can fail so count: EINTR the ones that may block, ENOSPC and
 * EDQUOT the ones that take space, a short transfer the transfers of more than
 * one byte, everything else all that can fail at all. A call that fails does
 * nothing, but close does close, and an fsync may have lost anything.
 *
 * Threads: begin and end while no other thread makes calls; the count is
 * atomic, so with several threads "the k-th" is one of those at that time.
 */
#ifndef NB_OS_OS_FAULT_H
#define NB_OS_OS_FAULT_H

#include <stdbool.h>
#include <stdint.h>

#define OS_FAULT_SHORT 0 /* as `error`: the transfer moves about half */

struct os_fault {
        const char *calls; /* only these, separated by spaces: "fsync rename"; NULL: all */
        uint64_t at;       /* the k-th, from 1; 0: none, only counts */
        int error;         /* positive errno, or OS_FAULT_SHORT */
        bool goes_on;      /* every later one fails too: a disk that stays full */
};

/* Wraps the table in use. `fault` is copied. */
void os_fault_begin(const struct os_fault *fault);
/* Puts the table back. True: a call was made to fail. */
bool os_fault_end(void);
/* How many calls counted. */
uint64_t os_fault_count(void);
/* The call that failed first, as "fsync"; "" when none did. */
const char *os_fault_where(void);

#endif
