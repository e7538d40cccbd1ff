#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "os/ending.h"
#include "os/lock.h"
#include "os/os_uffd.h"
#include "os/thread.h"

#define POLL_NS 1000000
#define FORKED_NO_EXEC 0x40 /* PF_FORKNOEXEC of the kernel, in /proc/self/stat since Linux 2.6 */

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Signals that another process or a kernel limit sends, and whose default action ends the process. */
static const int sent_signals[] = { SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGPIPE, SIGXCPU,
                                    SIGXFSZ, SIGIO, SIGPWR, SIGSTKFLT };
static const int crash_signals[] = { SIGABRT, SIGFPE, SIGILL, SIGSYS };
static struct sigaction before_crash[COUNT(crash_signals)]; /* written once, before the handler is in place */

static atomic_uint under_way;
static atomic_int owner;      /* the process that owns the work: a child of vfork runs our handlers in its parent's memory */
static atomic_int only_sender; /* the process whose SIGTERM ends this one */
static atomic_int due_signal; /* a signal that waits to end the process; or 0 */
static atomic_bool is_near, was_crash_survived;
static atomic_int forked; /* 1: yes, -1: no, 0: not known yet */

static pthread_once_t once = PTHREAD_ONCE_INIT, crash_once = PTHREAD_ONCE_INIT;
static struct lock handlers_lock = LOCK_INIT(LOCK_ENDING); /* guards the variables below and the installing of handlers */
static bool has_thread;
static sem_t signal_came;

bool ending_wait(int64_t limit_ms)
{
        const struct timespec pause = { .tv_nsec = POLL_NS };

        for (int64_t waited = 0; atomic_load(&under_way) > 0 && waited < limit_ms; waited++)
                nanosleep(&pause, NULL); /* no lock: this may run in a handler */
        return atomic_load(&under_way) == 0;
}

static void on_sent(int number, siginfo_t *info, void *context);

static bool is_ours(const struct sigaction *action, void (*handler)(int, siginfo_t *, void *))
{
        return action->sa_flags & SA_SIGINFO && action->sa_sigaction == handler;
}

bool ending_is_by(int number)
{
        struct sigaction now;
        bool is_known = false;

        for (size_t i = 0; i < COUNT(sent_signals); i++)
                is_known |= sent_signals[i] == number;
        return is_known && sigaction(number, NULL, &now) == 0 &&
               (is_ours(&now, on_sent) || (!(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL));
}

static void wait_at_exit(void)
{
        ending_wait(ENDING_EXIT_MS);
}

/* A forked child has neither the parent's threads nor their work. */
static void forget_in_child(void)
{
        lock_init(&handlers_lock, LOCK_ENDING);
        has_thread = false;
        atomic_store(&under_way, 0);
        atomic_store(&due_signal, 0);
        atomic_store(&forked, 1);
}

/* Ends the process by the signal's default action, so that the parent process sees the signal as the cause. */
static void end_by(int number)
{
        struct sigaction by_default = { .sa_handler = SIG_DFL };

        sigaction(number, &by_default, NULL);
        raise(number); /* inside a handler, the signal is delivered when the handler returns */
}

static void on_term(int number, siginfo_t *info, void *context)
{
        int saved_errno = errno;
        pid_t sender = (pid_t)atomic_load(&only_sender);

        (void)context;
        if (info->si_code <= 0 && info->si_pid == sender)
                _exit(0); /* torch does the same: the worker was asked to end */
        if (kill(sender, 0) < 0 && errno == ESRCH)
                end_by(number);
        errno = saved_errno;
}

void ending_only_by(pid_t sender)
{
        struct sigaction ours = { .sa_sigaction = on_term, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART };

        atomic_store(&only_sender, (int)sender);
        sigaction(SIGTERM, &ours, NULL);
}

static void on_sent(int number, siginfo_t *info, void *context)
{
        int saved_errno = errno, none = 0;

        (void)info;
        (void)context;
        if (getpid() != atomic_load(&owner)) {
                end_by(number);
        } else if (atomic_compare_exchange_strong(&due_signal, &none, number)) {
                if (atomic_load(&under_way) > 0)
                        sem_post(&signal_came);
                else
                        end_by(number);
        }
        errno = saved_errno;
}

/* Ends the process after a signal. The signal's thread must run on until the work is done: it may hold a lock that
 * the work needs, such as the interpreter's. */
static void *end_main(void *unused)
{
        sigset_t mask;
        int number;

        (void)unused;
        while (sem_wait(&signal_came) < 0)
                ;
        ending_wait(ENDING_SIGNAL_MS);
        number = atomic_load(&due_signal);
        sigemptyset(&mask);
        sigaddset(&mask, number);
        pthread_sigmask(SIG_UNBLOCK, &mask, NULL);
        end_by(number);
        return NULL;
}

void ending_pass_on(const struct sigaction *before, int number, siginfo_t *info, void *context)
{
        struct sigaction by_default = { .sa_handler = SIG_DFL };
        bool is_sent = info->si_code <= 0; /* sent by kill or the like: returning does not repeat a fault */

        if (before->sa_handler == SIG_IGN && is_sent) /* the kernel does not ignore a real fault either */
                return;
        if (before->sa_handler == SIG_DFL || before->sa_handler == SIG_IGN || before->sa_flags & SA_RESETHAND)
                sigaction(number, &by_default, NULL);
        if (before->sa_handler == SIG_DFL || before->sa_handler == SIG_IGN) {
                if (is_sent)
                        raise(number);
        } else if (before->sa_flags & SA_SIGINFO) {
                before->sa_sigaction(number, info, context);
        } else {
                before->sa_handler(number);
        }
}

/* Nebula's own threads block the signals that are meant for the program's threads. If one of them crashes, work that
 * depends on it would never be done, so do not wait. */
static bool is_thread_of_ours(const void *context)
{
        const sigset_t *mask = &((const ucontext_t *)context)->uc_sigmask;

        return sigismember(mask, SIGTERM) == 1 && sigismember(mask, SIGCHLD) == 1 && sigismember(mask, SIGWINCH) == 1;
}

void ending_crashes(const void *context)
{
        if (atomic_load(&under_way) == 0 || getpid() != atomic_load(&owner) || is_thread_of_ours(context) ||
            atomic_load(&was_crash_survived))
                return;
        ending_wait(ENDING_SIGNAL_MS);
        atomic_store(&was_crash_survived, true); /* the next crash does not wait */
}

static void on_crash(int number, siginfo_t *info, void *context)
{
        int saved_errno = errno;

        ending_crashes(context);
        for (size_t i = 0; i < COUNT(crash_signals); i++)
                if (crash_signals[i] == number)
                        ending_pass_on(&before_crash[i], number, info, context);
        errno = saved_errno;
}

static void watch_crashes(void)
{
        for (size_t i = 0; i < COUNT(crash_signals); i++) {
                struct sigaction ours = { .sa_sigaction = on_crash };

                if (sigaction(crash_signals[i], NULL, &before_crash[i]) < 0 || before_crash[i].sa_handler == SIG_IGN)
                        continue;
                ours.sa_mask = before_crash[i].sa_mask;
                ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (before_crash[i].sa_flags & (SA_NODEFER | SA_RESTART));
                sigaction(crash_signals[i], &ours, NULL);
        }
        linux_guard();
}

static void start(void)
{
        sem_init(&signal_came, 0, 0);
        pthread_atfork(NULL, NULL, forget_in_child);
        atexit(wait_at_exit);
        at_quick_exit(wait_at_exit);
}

/* The caller holds handlers_lock. */
static void hold_signals(void)
{
        struct sigaction ours = { .sa_sigaction = on_sent, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART }, now;

        if (!has_thread)
                has_thread = os_thread_start(NULL, end_main, NULL, false) == 0;
        for (size_t i = 0; has_thread && i < COUNT(sent_signals); i++)
                if (sigaction(sent_signals[i], NULL, &now) == 0 && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL)
                        sigaction(sent_signals[i], &ours, NULL);
}

/* The caller holds handlers_lock. */
static void let_signals_go(void)
{
        struct sigaction by_default = { .sa_handler = SIG_DFL }, now;

        for (size_t i = 0; i < COUNT(sent_signals); i++)
                if (sigaction(sent_signals[i], NULL, &now) == 0 && is_ours(&now, on_sent))
                        sigaction(sent_signals[i], &by_default, NULL);
}

void ending_begin(void)
{
        pthread_once(&once, start);
        pthread_once(&crash_once, watch_crashes);
        lock_take(&handlers_lock);
        atomic_store(&owner, getpid());
        atomic_fetch_add(&under_way, 1);
        hold_signals(); /* on every call: the program may have restored the default since */
        lock_give(&handlers_lock);
}

void ending_done(void)
{
        lock_take(&handlers_lock);
        if (atomic_fetch_sub(&under_way, 1) == 1 && atomic_load(&due_signal) == 0)
                let_signals_go();
        lock_give(&handlers_lock);
}

/* Whether the process was forked without exec since. Field 9 of stat is the flags; it is the seventh field after the program's name. */
static bool was_forked(void)
{
        unsigned long flags = 0;
        char text[512];
        const char *at;
        ssize_t size;
        int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);

        if (fd < 0)
                return false;
        size = read(fd, text, sizeof text - 1);
        close(fd);
        text[size > 0 ? size : 0] = 0;
        at = strrchr(text, ')');
        return at && sscanf(at + 1, " %*c %*d %*d %*d %*d %*d %lu", &flags) == 1 && flags & FORKED_NO_EXEC;
}

static bool ends_by_exit(void)
{
        const char *id = getenv("NEBULA_ENDS_BY_EXIT");

        return id && strtol(id, NULL, 10) == getpid();
}

bool ending_may_linger(void)
{
        if (atomic_load(&forked) == 0) {
                pthread_once(&once, start); /* so that a child forked later knows that it was forked */
                atomic_store(&forked, was_forked() && !ends_by_exit() ? 1 : -1);
        }
        return atomic_load(&forked) < 0 && !atomic_load(&is_near) && atomic_load(&due_signal) == 0;
}

void ending_is_near(void)
{
        atomic_store(&is_near, true);
}
