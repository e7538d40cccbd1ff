/*
 * ending.h - what is under way when the process ends is done first.
 *
 *      ending_begin();         // before the work is given to another thread
 *      ...
 *      ending_done();          // when it is done, or will never be
 *
 * While anything is under way
 *      exit and quick_exit wait for it;
 *      a signal that ends the process because its action is the default waits for it, while the program runs on: a thread of this
 *      file raises it again when all is done. If the program handles or ignores a signal, this file does not touch it;
 *      abort and a crash (SIGABRT, SIGFPE, SIGILL, SIGSYS; SIGSEGV and SIGBUS through os_guard.c) hold their thread up.
 * Each has a limit. SIGKILL, _exit and exec ask nobody: who calls those calls ending_wait before.
 *
 * Handlers of the first kind are there only while something is under way; those of crashes stay from the first ending_begin on, and pass
 * the signal on to what was there before.
 *
 * Not part of `os`: a failing test has nothing to learn here.
 */
#ifndef NB_OS_ENDING_H
#define NB_OS_ENDING_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

/* A copy in memory takes seconds; if one takes longer, it has lost its agent, its machine or its storage. */
#define ENDING_EXIT_MS 300000
/* After a signal: launchers (Slurm, Kubernetes, torchrun) send SIGKILL 30 s behind it. */
#define ENDING_SIGNAL_MS 30000

void ending_begin(void);
void ending_done(void);
/* Returns when nothing is under way any more; false when something still is after limit_ms. */
bool ending_wait(int64_t limit_ms);
/* Whether work may be left to other threads. Not when the process is about to end (ending_is_near, or a signal), and not when it was
 * forked and has called no exec since: such a process ends by _exit as a rule (multiprocessing, data loaders' workers), past all that is
 * called at exit. */
bool ending_may_linger(void);
/* From now on nothing may. */
void ending_is_near(void);
/* Whether this signal would end the process, because it is not handled by the program. SIGKILL, which ends it in any case: false. */
bool ending_is_by(int number);

/* For os_guard.c, in a handler. Waits, unless the process has lived through an earlier crash: then it knows what to do with them.
 * `context`: that of the handler. */
void ending_crashes(const void *context);
/* What would have happened without our handler. */
void ending_pass_on(const struct sigaction *before, int number, siginfo_t *info, void *context);

#endif
