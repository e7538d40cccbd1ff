#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "os/thread.h"

#define STACK_BYTES (1u << 20) /* a request's frame is a few KiB; hundreds of ranks may be connected */
#define LOW_PRIORITY 10        /* nice value: yields to training, but still progresses on a busy node */

struct start {
        void *(*run)(void *);
        void *argument;
        bool low_priority;
};

static void *thread_main(void *argument)
{
        struct start start = *(struct start *)argument;

        free(argument);
        if (start.low_priority)
                setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), LOW_PRIORITY);
        return start.run(start.argument);
}

void os_thread_mask(sigset_t *ret_mask)
{
        sigfillset(ret_mask);
        sigdelset(ret_mask, SIGSEGV);
        sigdelset(ret_mask, SIGBUS);
        sigdelset(ret_mask, SIGFPE);
        sigdelset(ret_mask, SIGILL);
}

static int start_thread(pthread_t *ret_thread, void *(*run)(void *), void *argument, bool low_priority, size_t stack_bytes)
{
        struct start *start = malloc(sizeof *start);
        pthread_attr_t attributes;
        pthread_t thread;
        sigset_t mask, before;
        int result;

        if (!start)
                return -ENOMEM;
        *start = (struct start){ run, argument, low_priority };
        pthread_attr_init(&attributes);
        if (stack_bytes)
                pthread_attr_setstacksize(&attributes, stack_bytes);
        if (!ret_thread)
                pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        os_thread_mask(&mask);
        pthread_sigmask(SIG_SETMASK, &mask, &before);
        result = pthread_create(&thread, &attributes, thread_main, start);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
        if (result) {
                free(start);
                return -result;
        }
        if (ret_thread)
                *ret_thread = thread;
        return 0;
}

int os_thread_start(pthread_t *ret_thread, void *(*run)(void *), void *argument, bool low_priority)
{
        return start_thread(ret_thread, run, argument, low_priority, STACK_BYTES);
}

int os_thread_start_for_program(pthread_t *ret_thread, void *(*run)(void *), void *argument)
{
        return start_thread(ret_thread, run, argument, false, 0);
}

bool os_thread_keep_off(pthread_t thread, cpu_set_t *ret_before)
{
        int here = sched_getcpu();
        cpu_set_t others;

        if (here < 0 || here >= CPU_SETSIZE || pthread_getaffinity_np(thread, sizeof *ret_before, ret_before) != 0)
                return false;
        others = *ret_before;
        CPU_CLR(here, &others);
        return CPU_COUNT(&others) > 0 && pthread_setaffinity_np(thread, sizeof others, &others) == 0;
}

void os_cond_init(pthread_cond_t *cond)
{
        pthread_condattr_t attributes;

        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(cond, &attributes);
        pthread_condattr_destroy(&attributes);
}
