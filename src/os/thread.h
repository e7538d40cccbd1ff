/*
 * thread.h - additions to pthread.h for Nebula's own threads: start with signals
 * blocked, a moderate stack and, if asked, low priority; wake up on another
 * processor than the waking thread; wait on a clock that is never set (lock_wait_for in lock.h).
 *
 * Not part of `os`: there is no system call here whose failure a test could
 * simulate.
 */
#ifndef NB_OS_THREAD_H
#define NB_OS_THREAD_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

/* The signals that Nebula's own threads block: all that are meant for the program's threads. A thread does not block
 * the signals of its own faults, because those would then end the program without its handlers. */
void os_thread_mask(sigset_t *ret_mask);
/* Returns 0 or a negative errno. ret_thread NULL: the thread is detached. */
int os_thread_start(pthread_t *ret_thread, void *(*run)(void *), void *argument, bool low_priority);
/* For a thread that calls functions of the program. It has as large a stack as the program's own threads, because
 * Python's recursion limit depends on that. */
int os_thread_start_for_program(pthread_t *ret_thread, void *(*run)(void *), void *argument);
/* Keeps a sleeping thread off the caller's processor. Call it just before you wake the thread to work beside the
 * caller: on a machine that was busy a moment ago the scheduler searches no idle processor, and the thread may wait
 * for the caller's until the caller sleeps. Afterwards restore *ret_before by pthread_setaffinity_np. False: there
 * is no other processor, and nothing has changed. */
bool os_thread_keep_off(pthread_t thread, cpu_set_t *ret_before);
void os_cond_init(pthread_cond_t *cond);

#endif
