/*
 * os_crash.h - a table of system calls that models power loss. For tests only: it is in the
 * library nb_os_test, not in the product.
 *
 *     os_crash_begin(root);                      // files that exist now are durable
 *     ... the code under test works below root ...
 *     returned_at = os_crash_position();         // after each call whose promise is checked
 *     os_crash_end();
 *     for (at = 0; at <= last; at++)
 *             for (seed = 0; seed < os_crash_seeds(20); seed++) {
 *                     os_crash_materialise(at, seed, other_directory);
 *                     ... the conditions that must hold if the power went at `at` ...
 *             }
 *     os_crash_free();
 *
 * Every change below root happens for real and is logged. A power loss at a position keeps
 * each earlier change that was synced: fsync of a file keeps its bytes and size, fsync of a
 * directory keeps its entries. Each other change may be kept or lost, in any combination, so
 * every order is covered too. Bytes may also be torn at 512 or 4096 bytes. A rename never
 * loses both names, and moves a directory as a whole; an exchange happens or does not. Inodes
 * that no surviving entry leads to are gone. Changes through shared mappings and symbolic
 * links are not followed.
 *
 * Threads: any thread may make calls; begin, end and materialise must run while no thread
 * does.
 */
#ifndef NB_OS_OS_CRASH_H
#define NB_OS_OS_CRASH_H

#include <stdint.h>
#include <stdlib.h>

#define OS_CRASH_ALL_LOST 0 /* as `seed`: no change without a sync survives */
#define OS_CRASH_ALL_KEPT 1 /* as `seed`: every change survives, as after SIGKILL */

/* Wraps the table in use. `root` is an absolute path to a directory. 0 or a negative errno. */
int os_crash_begin(const char *root);
/* Restores the table; the log stays. */
void os_crash_end(void);
/* Number of changes and syncs so far. */
uint64_t os_crash_position(void);
/* Writes into `directory`, which is emptied first, a state that a power loss after the first `position` changes may
 * leave. The same seed gives the same state. Returns 0 or a negative errno. */
int os_crash_materialise(uint64_t position, uint64_t seed, const char *directory);
void os_crash_free(void);

/* How many seeds to try at each position: four, and `all` with NEBULA_TEST_NIGHTLY=1. */
static inline uint64_t os_crash_seeds(uint64_t all)
{
        return getenv("NEBULA_TEST_NIGHTLY") || all < 4 ? all : 4;
}

#endif
