/*
 * sleepers.h - programs that use one store together. Only one is awake at a time; each sleeps before a call that the test chooses.
 *
 *      sleepers_begin(programs, count)   the store's calls go through watched.h; all programs sleep before their first call
 *      sleeper_let(&programs[0], 3)      the first program makes three calls; true: it has ended
 *      sleepers_end(programs, count)     all have ended
 */
#ifndef NB_TESTS_SLEEPERS_H
#define NB_TESTS_SLEEPERS_H

#include <pthread.h>
#include <stdlib.h>

#include "watched.h"

#define WITHOUT_END UINT64_MAX

struct sleeper {
        void (*run)(void *argument);
        void *argument;
        /* The other fields are private to this file. */
        pthread_t thread;
        uint64_t calls; /* the calls that it may make until it sleeps again */
        bool is_awake, has_ended;
};

static pthread_mutex_t sleepers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t sleepers_moved = PTHREAD_COND_INITIALIZER;
static _Thread_local struct sleeper *sleeper_self;

static inline void sleeper_before_call(struct store *one, enum watched_call call, const char *key)
{
        struct sleeper *self = sleeper_self;

        (void)one;
        (void)call;
        (void)key;
        if (!self)
                return;
        pthread_mutex_lock(&sleepers_lock);
        while (!self->calls) {
                self->is_awake = false;
                pthread_cond_broadcast(&sleepers_moved);
                while (!self->is_awake)
                        pthread_cond_wait(&sleepers_moved, &sleepers_lock);
        }
        self->calls--;
        pthread_mutex_unlock(&sleepers_lock);
}

static inline void *sleeper_main(void *argument)
{
        struct sleeper *self = argument;

        sleeper_self = self;
        self->run(self->argument);
        pthread_mutex_lock(&sleepers_lock);
        self->is_awake = false;
        self->has_ended = true;
        pthread_cond_broadcast(&sleepers_moved);
        pthread_mutex_unlock(&sleepers_lock);
        return NULL;
}

static inline bool sleeper_let(struct sleeper *sleeper, uint64_t calls)
{
        pthread_mutex_lock(&sleepers_lock);
        if (!sleeper->has_ended) {
                sleeper->calls = calls;
                sleeper->is_awake = true;
                pthread_cond_broadcast(&sleepers_moved);
                while (sleeper->is_awake)
                        pthread_cond_wait(&sleepers_moved, &sleepers_lock);
        }
        pthread_mutex_unlock(&sleepers_lock);
        return sleeper->has_ended;
}

static inline void sleepers_begin(struct store *one, struct sleeper *sleepers, size_t count)
{
        watched_begin(one);
        watched.before = sleeper_before_call;
        for (size_t i = 0; i < count; i++) {
                sleepers[i].has_ended = false;
                sleepers[i].is_awake = true;
                sleepers[i].calls = 0;
                if (pthread_create(&sleepers[i].thread, NULL, sleeper_main, &sleepers[i]))
                        abort();
                pthread_mutex_lock(&sleepers_lock);
                while (sleepers[i].is_awake)
                        pthread_cond_wait(&sleepers_moved, &sleepers_lock);
                pthread_mutex_unlock(&sleepers_lock);
        }
}

static inline void sleepers_end(struct store *one, struct sleeper *sleepers, size_t count)
{
        for (size_t i = 0; i < count; i++) {
                sleeper_let(&sleepers[i], WITHOUT_END);
                pthread_join(sleepers[i].thread, NULL);
        }
        watched_end(one);
}

#endif
