/*
 * os_crash.h - a table of system calls that knows what a power loss would
 * leave. For tests only: it is in the library nb_os_test, not in the product.
 *
 *      os_crash_begin(root);                      // what lies there already is durable
 *      ... the code under test works below root ...
 *      returned_at = os_crash_position();         // after each call whose promise is checked
 *      os_crash_end();
 *      for (at = 0; at <= last; at++)
 *              for (seed = 0; seed < 20; seed++) {
 *                      os_crash_materialise(at, seed, other_directory);
 *                      ... what must hold if the power went at `at` ...
 *              }
 *      os_crash_free();
 *
 * Every change below root happens for real and is written into a log. A power
 * loss at a position keeps, of the changes before it, those that were synced:
 * a file's bytes and size by fsync of the file, a directory's entries by fsync
 * of the directory. Of the others each may be kept, lost or, for bytes, torn
 * at 512 or 4096 bytes, in any combination; so it also covers every order.
 * A rename never loses both names, and moves a directory whole; an exchange
 * happens or does not. What no surviving entry leads to is gone. Changes through
 * shared mappings and symbolic links are not followed.
 *
 * Threads: calls may come from any; begin, end and materialise while none do.
 */
#ifndef NB_OS_OS_CRASH_H
#define NB_OS_OS_CRASH_H

#include <stdint.h>

#define OS_CRASH_ALL_LOST 0 /* as `seed`: nothing that was not synced survives */
#define OS_CRASH_ALL_KEPT 1 /* everything does, as after a mere kill */

/* Wraps the table in use. `root` is an absolute path to a directory. 0 or a negative errno. */
int os_crash_begin(const char *root);
/* Puts the table back; the log stays. */
void os_crash_end(void);
/* How many changes and syncs there were so far. */
uint64_t os_crash_position(void);
/* Writes a state that a power loss after the first `position` of them may leave into `directory`, which
 * is emptied first. Same seed, same state. 0 or a negative errno. */
int os_crash_materialise(uint64_t position, uint64_t seed, const char *directory);
void os_crash_free(void);

#endif
