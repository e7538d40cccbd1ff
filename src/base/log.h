/*
 * log.h - writes one line per event, readable by people and sortable by programs.
 *
 *      2026-11-21T10:31:26.123Z info global_step500 is durable: 1.0 GiB in 0.52 s
 *
 * log_to sets the file of log_event, once, before threads start. Without log_to,
 * events are dropped. The trainer's half never calls log_to: it writes to the
 * agent's log with log_line. Each line is one write(), so lines of two processes
 * that share a file do not mix. Unprintable bytes in an event become '?', so a
 * tag with a newline cannot forge a line.
 *
 * Threads: log_event may be called from any thread. A thread that holds a lock which others need must not wait for the
 * file: between log_hold and log_let_go its events are kept, with the time at which they happened, and written by log_let_go.
 */
#ifndef NB_BASE_LOG_H
#define NB_BASE_LOG_H

#include <stdbool.h>

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };

/* Events up to `level` go to `fd`, which the caller keeps open. If fd < 0, events are dropped. */
void log_to(int fd, enum log_level level);
void log_event(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
void log_hold(void);
void log_let_go(void);
/* Whether this thread has kept an event. */
bool log_is_held(void);
/* Writes one line to a file that is not this process's log. */
void log_line(int fd, enum log_level level, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Whether an event of `level` would be written. Ask this before computing expensive arguments. */
bool log_wants(enum log_level level);

#endif
