/*
 * log.h - one line per event, for a person to read and a program to sort.
 *
 *      2026-11-21T10:31:26.123Z info global_step500 is durable: 1.0 GiB in 0.52 s
 *
 * log_to names the file of log_event, once, before threads start; without it
 * events go nowhere. The trainer's half never calls it: what it has to say in
 * the agent's log it says with log_line. A line is written with one call, so
 * lines of two processes that share a file do not mix. What is not printable
 * in an event becomes '?': a tag with a newline cannot forge a line.
 *
 * Threads: log_event may be called from any.
 */
#ifndef NB_BASE_LOG_H
#define NB_BASE_LOG_H

#include <stdbool.h>

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };

/* Events up to `level` go to `fd`, which stays the caller's; fd < 0: nowhere. */
void log_to(int fd, enum log_level level);
void log_event(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* One line in a file that this process does not log to otherwise. */
void log_line(int fd, enum log_level level, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Whether an event of `level` would be written: for arguments that cost something. */
bool log_wants(enum log_level level);
/* "error", "warn", "info", "debug"; false for anything else. */
bool log_level_parse(const char *text, enum log_level *ret_level);

#endif
