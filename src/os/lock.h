/*
 * lock.h - mutexes that know their place in the order of all locks (lock_order.h).
 *
 *      struct lock lock = LOCK_INIT(LOCK_SEAL);      or lock_init(&lock, LOCK_SEAL) ... lock_done(&lock)
 *      lock_take(&lock);  ...  lock_give(&lock);     the same thread does both
 *
 * In builds with tests (NB_LOCK_CHECKS, which meson sets) each thread keeps a list of the locks that it holds. An acquisition
 * out of order ends the process with the names of both. A file that is opened or changed under a lock that forbids files ends it,
 * too. In other builds these functions are those of pthread.h.
 */
#ifndef NB_OS_LOCK_H
#define NB_OS_LOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "os/lock_order.h"

struct lock {
        pthread_mutex_t mutex;
        enum lock_rank rank;
};
#define LOCK_INIT(rank) { PTHREAD_MUTEX_INITIALIZER, rank }

enum lock_how {
        LOCK_IN_ORDER,
        LOCK_BESIDE, /* the thread may hold others of the same name */
        LOCK_TRIED,  /* taken already, without waiting */
        LOCK_AGAIN,  /* released and taken again by a wait */
};
#ifdef NB_LOCK_CHECKS
void lock_enter(const struct lock *lock, enum lock_how how); /* call before the thread waits for the lock */
void lock_leave(const struct lock *lock, enum lock_rank rank); /* call afterwards: the lock may be gone */
void lock_forget(const struct lock *lock); /* call when the lock is initialised again, for example in a forked child */
/* Call before a system call that opens or changes a file. If the thread holds a lock that forbids files, it ends the process. */
void lock_check_files(const char *call);
#else
static inline void lock_enter(const struct lock *lock, enum lock_how how) {}
static inline void lock_leave(const struct lock *lock, enum lock_rank rank) {}
static inline void lock_forget(const struct lock *lock) {}
static inline void lock_check_files(const char *call) {}
#endif

static inline void lock_init(struct lock *lock, enum lock_rank rank)
{
        lock_forget(lock);
        pthread_mutex_init(&lock->mutex, NULL);
        lock->rank = rank;
}

static inline void lock_done(struct lock *lock)
{
        pthread_mutex_destroy(&lock->mutex);
}

static inline void lock_take(struct lock *lock)
{
        lock_enter(lock, LOCK_IN_ORDER);
        pthread_mutex_lock(&lock->mutex);
}

/* For a thread that holds others of the same name. A lock above them must make sure that no other thread holds two. */
static inline void lock_take_beside(struct lock *lock)
{
        lock_enter(lock, LOCK_BESIDE);
        pthread_mutex_lock(&lock->mutex);
}

/* False: another thread has it. */
static inline bool lock_try(struct lock *lock)
{
        bool is_taken = pthread_mutex_trylock(&lock->mutex) == 0;

        if (is_taken)
                lock_enter(lock, LOCK_TRIED);
        return is_taken;
}

static inline void lock_give(struct lock *lock)
{
        enum lock_rank rank = lock->rank; /* read now, because the next thread that takes the lock may free it */

        pthread_mutex_unlock(&lock->mutex);
        lock_leave(lock, rank);
}

/* Releases the lock, waits for `cond`, and takes the lock again. */
static inline void lock_wait(struct lock *lock, pthread_cond_t *cond)
{
        lock_enter(lock, LOCK_AGAIN);
        pthread_cond_wait(cond, &lock->mutex);
}
/* lock_wait with a limit; `cond` must be from os_cond_init. False if timeout_ms passed without a signal; timeout_ms < 0: no limit. */
bool lock_wait_for(struct lock *lock, pthread_cond_t *cond, int64_t timeout_ms);

#endif
