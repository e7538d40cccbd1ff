/*
 * process.h - starting a daemon and ending it.
 *
 *     os_daemonise(&ready_fd, &text)     returns 0 in the daemon, which goes on; returns 1 in
 *                                        the process that was started, after os_daemon_ready
 *     os_daemon_ready(ready_fd, NULL)    the daemon reports that it is ready; NULL is success
 *
 *     os_limits_raise();                 first of all
 *     os_file_limit_no_signal();         the same
 *
 *     os_signals_clean(clean, argument); a command cleans up before a signal ends it
 *
 *     os_signals_block();                before any thread starts
 *     os_signals_wait();                 the main thread waits here for a signal
 *     os_signal_self();                  any thread ends that wait
 *     os_process_end(pid);               ends that wait in another process
 *
 *     os_process_become(argv);           another program takes the process's place
 */
#ifndef NB_OS_PROCESS_H
#define NB_OS_PROCESS_H

#include <stddef.h>
#include <stdint.h>

#define OS_DAEMON_TEXT_MAX 600

/* Raises the process's soft limits to the hard limits: the agent works for all jobs of its user, and a shell's soft
 * limits are meant for one program. */
void os_limits_raise(void);

/* Returns 0 in the daemon: a session of its own, cwd "/", stdio on /dev/null, no other open file. Returns 1 in the
 * starter, with the daemon's report: "" is success. A negative errno: no daemon was started. */
int os_daemonise(int *ret_ready_fd, char ret_text[OS_DAEMON_TEXT_MAX]);
void os_daemon_ready(int ready_fd, const char *failure);

/* A write beyond RLIMIT_FSIZE fails with EFBIG from now on. By default a signal ends the process, without a message or a clean-up. */
void os_file_limit_no_signal(void);
void os_signals_block(void);
int os_signals_wait(void); /* the signal's number: SIGTERM, SIGINT or SIGHUP */
/* For a command. Each of SIGTERM, SIGINT and SIGHUP that is not ignored first runs `clean`, on a thread of its own,
 * and then ends the process as usual. Call it once, before other threads start. Returns 0 or a negative errno. */
int os_signals_clean(void (*clean)(void *argument), void *argument);
void os_signal_self(void);
int os_process_end(uint32_t pid); /* sends SIGTERM; 0 or a negative errno */
/*
 * For a process that gives up the right to start programs (os_box.h). os_programs_start starts this program again with the word `programs`, and os->run
 * asks that process from then on. It ends with this one. os_programs_serve is all that it does. Both return a negative errno, or 0.
 *
 * Only a program whose main() hands that word to os_programs_serve calls os_programs_offer, before anything else. In another one os_programs_start does
 * nothing: it would start the whole program, again and again.
 */
void os_programs_offer(void);
int os_programs_start(void);
int os_programs_serve(int fd);
/* argv[0] is a path, or a name that is searched on the PATH. Returns only on failure: a negative errno. */
int os_process_become(char *const argv[]);

#endif
