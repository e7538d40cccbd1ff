/*
 * thread.h - what threads of the agent need beyond pthread.h: starting with
 * signals blocked, a modest stack and, if asked, low priority; and condition variables that
 * wait on a clock that nobody sets.
 *
 * Not part of `os`: a failing test has nothing to learn here.
 */
#ifndef NB_OS_THREAD_H
#define NB_OS_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

/* What a thread of ours blocks: all that is for the program's threads. Not its own faults, whose signals would end the program past
 * its handlers. */
void os_thread_mask(sigset_t *ret_mask);
/* 0 or a negative errno. ret_thread NULL: the thread is detached. */
int os_thread_start(pthread_t *ret_thread, void *(*run)(void *), void *argument, bool low_priority);
void os_cond_init(pthread_cond_t *cond);
/* False when timeout_ms passed without a signal; timeout_ms < 0: no limit. */
bool os_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t timeout_ms);

#endif
