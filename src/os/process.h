/*
 * process.h - becoming a daemon and being told to end.
 *
 *      os_daemonise(&ready_fd, &text)     the daemon goes on with 0; the process that
 *                                         was started gets 1 once the daemon has spoken
 *      os_daemon_ready(ready_fd, NULL)    the daemon speaks: NULL is success
 *
 *      os_limits_raise();                 first of all
 *
 *      os_signals_clean(clean, argument); a command cleans up before a signal ends it
 *
 *      os_signals_block();                before any thread starts
 *      os_signals_wait();                 the main thread rests here
 *      os_signal_self();                  any thread ends that rest
 *      os_process_end(pid);               ends that rest in another process
 */
#ifndef NB_OS_PROCESS_H
#define NB_OS_PROCESS_H

#include <stddef.h>
#include <stdint.h>

#define OS_DAEMON_TEXT_MAX 600

/* To the hard limits what the system gives for less: the agent works for all jobs of its user, and a shell's soft limits were meant for one. */
void os_limits_raise(void);

/* 0 in the daemon (session of its own, cwd "/", stdio on /dev/null, nothing else open); 1 in the starter, with what
 * the daemon said: "" is success. Negative errno: no daemon was started. */
int os_daemonise(int *ret_ready_fd, char ret_text[OS_DAEMON_TEXT_MAX]);
void os_daemon_ready(int ready_fd, const char *failure);

void os_signals_block(void);
int os_signals_wait(void); /* the signal's number: SIGTERM, SIGINT or SIGHUP */
/* For a command: each of these that is not ignored ends it as ever, once `clean` has run, on a thread of its own. Called once, before other
 * threads begin. 0 or negative errno. */
int os_signals_clean(void (*clean)(void *argument), void *argument);
void os_signal_self(void);
int os_process_end(uint32_t pid); /* asks with SIGTERM; 0 or a negative errno */

#endif
