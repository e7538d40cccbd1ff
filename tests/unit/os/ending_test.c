/* Pending work at each kind of end of a process. Each case ends a child process. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "os/ending.h"
#include "os/os.h"
#include "os/thread.h"
#include "tap.h"

#define WORK_MS 100

static int told[2]; /* the child writes a letter when its work is done */

static void tell(char letter)
{
        if (write(told[1], &letter, 1) != 1)
                _exit(99);
}

static atomic_bool is_held; /* the work does not end before hold_no_more */

static void *work(void *letter)
{
        os->sleep_ms(WORK_MS);
        while (atomic_load(&is_held))
                os->sleep_ms(1);
        tell(*(const char *)letter);
        ending_done();
        return NULL;
}

static void begin(void)
{
        static char letter = 'w';

        ending_begin();
        if (os_thread_start(NULL, work, &letter, false))
                _exit(98);
}

static void begin_held(void)
{
        atomic_store(&is_held, true);
        begin();
}

static void hold_no_more(void)
{
        atomic_store(&is_held, false);
}

/* The thread of the work gives signals back after its end. */
static void await_default(int number)
{
        struct sigaction now;

        while (!sigaction(number, NULL, &now) && now.sa_handler != SIG_DFL)
                os->sleep_ms(1);
}

static void by_default(void)
{
        struct rlimit no_core = { 0, 0 };

        setrlimit(RLIMIT_CORE, &no_core);
        for (int number = 1; number < 32; number++)
                signal(number, SIG_DFL); /* a sanitizer has handlers of its own */
}

/* How a child that runs this ends: its status, or the negative signal. `ret_said`: the text that it wrote. */
static int end_of(void (*run)(void), char ret_said[16])
{
        ssize_t size;
        int status = 0;
        pid_t child;

        if (pipe(told))
                return -1000;
        fflush(stdout);
        child = fork();
        if (child == 0) {
                by_default();
                alarm(60);
                run();
                _exit(7);
        }
        close(told[1]);
        waitpid(child, &status, 0);
        size = read(told[0], ret_said, 15);
        ret_said[size > 0 ? size : 0] = 0;
        close(told[0]);
        return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static void run_exit(void)
{
        begin();
        exit(3);
}

static void run_quick_exit(void)
{
        begin();
        quick_exit(4);
}

static void run_exit_at_once(void)
{
        begin_held();
        _exit(5);
}

static void run_wait(void)
{
        bool is_early, is_done;

        begin_held();
        is_early = ending_wait(1);
        hold_no_more();
        is_done = ending_wait(60000);
        _exit(!is_early && is_done ? 0 : 1);
}

/* fault: as test_a_committed_version_survives_an_end_right_after_the_commit */
static void an_exit_waits_for_what_is_under_way(void)
{
        char said[16];

        CHECK(end_of(run_exit, said) == 3 && !strcmp(said, "w"));
        CHECK(end_of(run_quick_exit, said) == 4 && !strcmp(said, "w"));
        CHECK(end_of(run_wait, said) == 0 && !strcmp(said, "w"));
        CHECK(end_of(run_exit_at_once, said) == 5 && !strcmp(said, "")); /* which runs no handler */
}

static int number_to_send;

static void run_signal(void)
{
        begin_held();
        kill(getpid(), number_to_send);
        tell('r'); /* runs on */
        hold_no_more();
        for (;;)
                os->sleep_ms(1000);
}

static void run_signal_twice(void)
{
        begin_held();
        kill(getpid(), SIGTERM);
        os->sleep_ms(WORK_MS / 4);
        kill(getpid(), SIGINT);
        hold_no_more();
        for (;;)
                os->sleep_ms(1000);
}

/* fault: as test_a_committed_version_survives_an_end_right_after_the_commit */
static void a_signal_ends_the_process_when_the_work_is_done(void)
{
        static const int numbers[] = { SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGPIPE, SIGXCPU,
                                       SIGXFSZ, SIGIO, SIGPWR };
        char said[16];

        for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
                number_to_send = numbers[i];
                CHECK(end_of(run_signal, said) == -numbers[i] && !strcmp(said, "rw"));
        }
        number_to_send = SIGKILL;
        CHECK(end_of(run_signal, said) == -SIGKILL && !strcmp(said, ""));
        CHECK(end_of(run_signal_twice, said) == -SIGTERM && !strcmp(said, "w"));
}

static void run_signal_behind(void)
{
        begin();
        ending_wait(60000);
        await_default(SIGTERM);
        kill(getpid(), SIGTERM);
        tell('r');
}

#ifndef __SANITIZE_THREAD__
static void run_signal_of_child(void)
{
        int status;
        pid_t child;

        begin_held();
        child = fork();
        if (child == 0) {
                kill(getpid(), SIGTERM);
                tell('r');
                _exit(0);
        }
        waitpid(child, &status, 0);
        tell(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM ? 'c' : 'n');
        hold_no_more();
        exit(0);
}
#endif

static void with_nothing_under_way_a_signal_ends_it_at_once(void)
{
        char said[16];

        CHECK(end_of(run_signal_behind, said) == -SIGTERM && !strcmp(said, "w"));
#ifndef __SANITIZE_THREAD__ /* with it, the handler of a forked child does not end the child */
        CHECK(end_of(run_signal_of_child, said) == 0 && !strcmp(said, "cw")); /* the parent's work is not the child's */
#endif
}

static void handle(int number)
{
        (void)number;
        tell('h');
}

static void run_handled(void)
{
        struct sigaction now;

        signal(SIGUSR1, handle);
        signal(SIGHUP, SIG_IGN);
        begin_held();
        kill(getpid(), SIGUSR1);
        kill(getpid(), SIGHUP);
        signal(SIGTERM, handle); /* later than the handler of this library */
        kill(getpid(), SIGTERM);
        hold_no_more();
        ending_wait(60000);
        await_default(SIGINT);
        sigaction(SIGTERM, NULL, &now);
        tell(now.sa_handler == handle ? 's' : 'n');
        tell('d');
        _exit(0);
}

static void a_signal_that_the_program_handles_or_ignores_is_left_to_it(void)
{
        char said[16];

        CHECK(end_of(run_handled, said) == 0 && !strcmp(said, "hhwsd"));
}

static void run_abort(void)
{
        begin();
        abort();
}

static void *fault_elsewhere(void *unused)
{
        /* No page that was unmapped: another thread that starts may get its address. */
        volatile char *closed = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        (void)unused;
        tell(*closed);
        return NULL;
}

static void run_fault(void)
{
        begin();
        fault_elsewhere(NULL);
}

static void run_fault_in_thread(void)
{
        pthread_t thread;

        begin();
        pthread_create(&thread, NULL, fault_elsewhere, NULL);
        pthread_join(thread, NULL);
}

/* As a thread that does the work itself: no other thread would finish it. */
static void run_fault_in_thread_of_ours(void)
{
        ending_begin();
        os_thread_start(NULL, fault_elsewhere, NULL, false);
        for (;;)
                os->sleep_ms(1000);
}

static void handle_crash(int number)
{
        tell('h');
        signal(number, SIG_DFL);
        raise(number);
}

static void run_handled_abort(void)
{
        signal(SIGABRT, handle_crash);
        begin();
        abort();
}

/* fault: as test_a_committed_version_survives_an_end_right_after_the_commit */
static void a_crash_waits_and_ends_as_it_would_have(void)
{
        char said[16];

        CHECK(end_of(run_abort, said) == -SIGABRT && !strcmp(said, "w"));
        CHECK(end_of(run_fault, said) == -SIGSEGV && !strcmp(said, "w"));
        CHECK(end_of(run_fault_in_thread, said) == -SIGSEGV && !strcmp(said, "w"));
        CHECK(end_of(run_handled_abort, said) == -SIGABRT && !strcmp(said, "wh"));
        CHECK(end_of(run_fault_in_thread_of_ours, said) == -SIGSEGV && !strcmp(said, ""));
}

static void run_linger(void)
{
        _exit(ending_may_linger() ? 1 : 0);
}

static void in_a_forked_process_nothing_lingers(void)
{
        char said[16];

        CHECK(ending_may_linger());
        CHECK(end_of(run_linger, said) == 0);
        CHECK(ending_may_linger());
}

static void run_linger_of_worker(void)
{
        char id[16];
        int status = 0;
        pid_t child;

        snprintf(id, sizeof id, "%d", (int)getpid());
        setenv("NEBULA_ENDS_BY_EXIT", id, 1);
        child = fork();
        if (child == 0)
                run_linger(); /* its id is another one */
        waitpid(child, &status, 0);
        if (status != 0)
                _exit(2);
        run_linger();
}

/* The first test, because a process that has asked remembers the answer, and its children are forked. */
static void a_forked_process_that_ends_by_exit_may_leave_work(void)
{
        char said[16];

        CHECK(end_of(run_linger_of_worker, said) == 1);
}

TAP_MAIN(TEST(a_forked_process_that_ends_by_exit_may_leave_work), TEST(in_a_forked_process_nothing_lingers), TEST(an_exit_waits_for_what_is_under_way),
         TEST(a_signal_ends_the_process_when_the_work_is_done), TEST(with_nothing_under_way_a_signal_ends_it_at_once),
         TEST(a_signal_that_the_program_handles_or_ignores_is_left_to_it), TEST(a_crash_waits_and_ends_as_it_would_have))
