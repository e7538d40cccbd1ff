#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "os/lock.h"

bool lock_wait_for(struct lock *lock, pthread_cond_t *cond, int64_t timeout_ms)
{
        struct timespec until;

        lock_enter(lock, LOCK_AGAIN);
        if (timeout_ms < 0)
                return pthread_cond_wait(cond, &lock->mutex) == 0;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += timeout_ms / 1000;
        until.tv_nsec += timeout_ms % 1000 * 1000000;
        if (until.tv_nsec >= 1000000000) {
                until.tv_sec++;
                until.tv_nsec -= 1000000000;
        }
        return pthread_cond_timedwait(cond, &lock->mutex, &until) != ETIMEDOUT;
}

#ifdef NB_LOCK_CHECKS

#define HELD_MAX 64 /* a fork holds two locks of each session */

#define LOCK_NAME(name) #name,
static const char *const names[] = { LOCK_ORDER(LOCK_NAME) };

/*
 * The locks that this thread holds or waits for. A lock is entered before it is taken and removed after it was released.
 * The memory is made together with the thread: under blocks_lock of a capture, a thread must neither allocate nor write to
 * memory that may be protected.
 */
#define PER_THREAD static _Thread_local __attribute__((tls_model("initial-exec")))
PER_THREAD struct {
        const struct lock *lock;
        enum lock_rank rank;
} held[HELD_MAX];
PER_THREAD size_t held_count;

__attribute__((noreturn))
static void end(const char *what, const char *first, const char *second)
{
        fprintf(stderr, "lock order: %s %s %s (see os/lock_order.h)\n", first, what, second);
        abort();
}

static size_t find(const struct lock *lock)
{
        size_t i = held_count;

        while (i > 0 && held[i - 1].lock != lock)
                i--;
        return i; /* its index, counted from 1; 0: the thread does not hold it */
}

static void check_order(const struct lock *lock, enum lock_how how)
{
        for (size_t i = 0; i < held_count; i++) {
                bool is_free = held[i].rank < lock->rank || (held[i].rank == lock->rank && how == LOCK_BESIDE) ||
                               (held[i].lock == lock && how == LOCK_AGAIN);

                if (!is_free)
                        end("is taken by a thread that holds", names[lock->rank], names[held[i].rank]);
        }
}

void lock_enter(const struct lock *lock, enum lock_how how)
{
        if (how != LOCK_TRIED)
                check_order(lock, how);
        if (how == LOCK_AGAIN && !find(lock))
                end("is waited with by a thread that does not hold", names[lock->rank], "it");
        if (how == LOCK_AGAIN)
                return;
        if (held_count == HELD_MAX)
                end("is one lock too many for a thread that holds", names[lock->rank], names[held[HELD_MAX - 1].rank]);
        held[held_count].lock = lock;
        held[held_count++].rank = lock->rank;
}

void lock_leave(const struct lock *lock, enum lock_rank rank)
{
        size_t at = find(lock);

        if (!at)
                end("is given back by a thread that does not hold", names[rank], "it");
        for (held_count--; at <= held_count; at++)
                held[at - 1] = held[at];
}

void lock_forget(const struct lock *lock)
{
        if (find(lock))
                lock_leave(lock, held[find(lock) - 1].rank);
}

void lock_check_files(const char *call)
{
        for (size_t i = 0; i < held_count; i++)
                if (LOCK_FORBIDS_FILES(held[i].rank))
                        end("is called by a thread that holds", call, names[held[i].rank]);
}

#endif
