/*
 * os_fault.h - a table of system calls in which the k-th call fails. For tests
 * only: it is in the library nb_os_test, not in the product.
 *
 *     struct os_fault fault = { .error = EIO };
 *     fault.at = 1;
 *     do {
 *             ... a fresh start ...
 *             os_fault_begin(&fault);
 *             ... the code under test ...
 *             hit = os_fault_end();
 *             ... the conditions that must hold whichever call failed: os_fault_where() ...
 *             fault.at += os_fault_step(fault.error);
 *     } while (hit);
 *
 * Only calls that can fail in the chosen way count:
 * * EINTR: calls that may block
 * * ENOSPC and EDQUOT: calls that take space
 * * a short transfer: transfers of more than one byte
 * * any other error: every call that can fail
 * A failing call has no effect, with two exceptions: close still closes, and an
 * fsync may have lost any of the data.
 *
 * Threads: call begin and end while no other thread makes calls. The count is
 * atomic. With several threads, calls in flight at the same time have no fixed
 * order.
 */
#ifndef NB_OS_OS_FAULT_H
#define NB_OS_OS_FAULT_H

#include <stdbool.h>
#include <stdint.h>

#define OS_FAULT_SHORT 0 /* as `error`: the transfer moves about half of the bytes */

struct os_fault {
        const char *calls; /* count only these calls, separated by spaces: "fsync rename"; NULL: all */
        uint64_t at;       /* fail the k-th call, from 1; 0: fail none, only count */
        int error;         /* positive errno, or OS_FAULT_SHORT */
        bool goes_on;      /* all later calls fail too: a disk that stays full */
};

/* Wraps the table in use. `fault` is copied. */
void os_fault_begin(const struct os_fault *fault);
/* Restores the table. True: a call was made to fail. */
bool os_fault_end(void);
/* Number of calls that counted. */
uint64_t os_fault_count(void);
/* How far the next call to fail in this way is from the last one. Each call fails with EIO, and each fourth in any other way; with
 * NEBULA_TEST_NIGHTLY=1 each in all. */
uint64_t os_fault_step(int error);
/* The name of the call that failed first, such as "fsync"; "" if none failed. */
const char *os_fault_where(void);

#endif
