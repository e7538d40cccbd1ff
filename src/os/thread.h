/*
 * thread.h - what threads of ours need beyond pthread.h: starting with
 * signals blocked, a modest stack and, if asked, low priority; waking up beside
 * who wakes them; and condition variables that wait on a clock that nobody sets.
 *
 * Not part of `os`: a failing test has nothing to learn here.
 */
#ifndef NB_OS_THREAD_H
#define NB_OS_THREAD_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

/* What a thread of ours blocks: all that is for the program's threads. Not its own faults, whose signals would end the program past
 * its handlers. */
void os_thread_mask(sigset_t *ret_mask);
/* 0 or a negative errno. ret_thread NULL: the thread is detached. */
int os_thread_start(pthread_t *ret_thread, void *(*run)(void *), void *argument, bool low_priority);
/* For a thread that calls functions of the program: with as much stack as the program's own threads have. Python's limit of recursion counts
 * on that. */
int os_thread_start_for_program(pthread_t *ret_thread, void *(*run)(void *), void *argument);
/* For a thread that sleeps, just before it is woken to work beside the caller: on a machine that was busy a moment ago the scheduler looks
 * for no idle processor, and the thread may wait on the caller's until that one sleeps. Afterwards the caller gives *ret_before back by
 * pthread_setaffinity_np. False: nothing has changed, since there is no other processor for it. */
bool os_thread_keep_off(pthread_t thread, cpu_set_t *ret_before);
void os_cond_init(pthread_cond_t *cond);
/* False when timeout_ms passed without a signal; timeout_ms < 0: no limit. */
bool os_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t timeout_ms);

#endif
