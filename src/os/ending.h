/*
 * ending.h - finishes pending work before the process ends.
 *
 *      ending_begin();         // before the work is given to another thread
 *      ...
 *      ending_done();          // when the work is done, or will never be
 *
 * While work is pending:
 * * exit and quick_exit wait for it.
 * * A signal whose default action ends the process waits for it, if the program neither handles nor ignores the signal.
 *   The program runs on meanwhile; a thread of this file raises the signal again when the work is done.
 * * abort and a crash (SIGABRT, SIGFPE, SIGILL, SIGSYS; SIGSEGV and SIGBUS through os_guard.c) hold their own thread until
 *   the work is done.
 * Each of these waits has a limit. SIGKILL, _exit and exec do not wait: call ending_wait before _exit and exec.
 *
 * The handlers for signals that end the process by default are installed only while work is pending. The handlers for
 * crashes stay from the first ending_begin on, and pass the signal on to the previous handler.
 *
 * Not part of `os`: there is no system call here whose failure a test could simulate.
 */
#ifndef NB_OS_ENDING_H
#define NB_OS_ENDING_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

/* A copy in memory takes seconds. If one takes longer, its agent, machine or storage is gone. */
#define ENDING_EXIT_MS 300000
/* After a signal. Launchers (Slurm, Kubernetes, torchrun) send SIGKILL 30 s after the first signal. */
#define ENDING_SIGNAL_MS 30000

void ending_begin(void);
void ending_done(void);
/* Waits until no work is pending. False if work is still pending after limit_ms. */
bool ending_wait(int64_t limit_ms);
/* Whether work may be left to other threads. No in two cases:
 * * The process is about to end, by ending_is_near or a signal.
 * * The process was forked and has not called exec. Such a process usually ends by _exit, which skips all exit
 *   handlers (multiprocessing, workers of data loaders). A launcher whose forked workers end by exit says so: it sets
 *   NEBULA_ENDS_BY_EXIT to the worker's process id before the worker's first save. A child of the worker has another id. */
bool ending_may_linger(void);
/* From now on, ending_may_linger returns false. */
void ending_is_near(void);
/* Whether this signal would end the process after waiting, because the program does not handle it. False for
 * SIGKILL, which does not wait. */
bool ending_is_by(int number);
/* From now on SIGTERM ends this process only if the process `sender` sends it, or has gone. exit handlers do not run. For the workers
 * of a trainer that saves at SIGTERM: it asks them to end when it has saved. */
void ending_only_by(pid_t sender);

/* For os_guard.c, inside its signal handler, whose context is `context`. Waits for pending work. Does not wait if
 * the process survived an earlier crash, because then its program handles crashes itself. */
void ending_crashes(const void *context);
/* Does what would have happened without our handler. */
void ending_pass_on(const struct sigaction *before, int number, siginfo_t *info, void *context);

#endif
