#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/linux_abi.h"
#include "os/process.h"

/* A daemon outlives its starter, so it must not hold the starter's open files and sockets. */
static void close_all_but(int kept)
{
        struct rlimit limit;

        if (!syscall(SYS_close_range, 3u, (unsigned)kept - 1, 0u) && !syscall(SYS_close_range, (unsigned)kept + 1, ~0u, 0u))
                return;
        if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur > 65536)
                limit.rlim_cur = 65536;
        for (int fd = 3; fd < (int)limit.rlim_cur; fd++)
                if (fd != kept)
                        close(fd);
}

static void stdio_to_null(void)
{
        int fd = open("/dev/null", O_RDWR);

        if (fd < 0)
                return;
        for (int i = 0; i < 3; i++)
                dup2(fd, i);
        if (fd > 2)
                close(fd);
}

static void read_answer(int fd, char text[OS_DAEMON_TEXT_MAX])
{
        size_t size = 0;

        while (size < OS_DAEMON_TEXT_MAX - 1) {
                ssize_t count = read(fd, text + size, OS_DAEMON_TEXT_MAX - 1 - size);

                if (count < 0 && errno == EINTR)
                        continue;
                if (count <= 0)
                        break;
                size += (size_t)count;
        }
        text[size] = 0;
        if (!size)
                strcpy(text, "the agent ended before it was ready");
        else if (text[0] == '\n') /* one newline means success, so that a silent end is a failure */
                text[0] = 0;
}

int os_daemonise(int *ret_ready_fd, char ret_text[OS_DAEMON_TEXT_MAX])
{
        int fds[2];
        pid_t pid;

        if (pipe2(fds, O_CLOEXEC))
                return -errno;
        /* A number above stdio, even if parts of stdio are closed. */
        int ready = fcntl(fds[1], F_DUPFD_CLOEXEC, 10);

        close(fds[1]);
        if (ready < 0) {
                close(fds[0]);
                return -EMFILE;
        }
        pid = fork();
        if (pid < 0) {
                int failure = -errno;

                close(fds[0]);
                close(ready);
                return failure;
        }
        if (pid > 0) {
                close(ready);
                while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
                        ;
                read_answer(fds[0], ret_text);
                close(fds[0]);
                return 1;
        }
        setsid();
        pid = fork();
        if (pid)
                _exit(pid < 0);
        if (chdir("/"))
                _exit(1);
        stdio_to_null();
        close_all_but(ready);
        *ret_ready_fd = ready;
        return 0;
}

void os_limits_raise(void)
{
        static const int resources[] = { RLIMIT_NOFILE, RLIMIT_FSIZE, RLIMIT_NPROC, RLIMIT_MEMLOCK, RLIMIT_AS, RLIMIT_DATA };
        struct rlimit limit;

        for (size_t i = 0; i < sizeof resources / sizeof resources[0]; i++) {
                if (getrlimit((__rlimit_resource_t)resources[i], &limit) || limit.rlim_cur == limit.rlim_max)
                        continue;
                limit.rlim_cur = limit.rlim_max;
                setrlimit((__rlimit_resource_t)resources[i], &limit);
        }
}

void os_file_limit_no_signal(void)
{
        signal(SIGXFSZ, SIG_IGN);
}

void os_daemon_ready(int ready_fd, const char *failure)
{
        const char *text = failure && *failure ? failure : "\n";

        while (write(ready_fd, text, strlen(text)) < 0 && errno == EINTR)
                ;
        close(ready_fd);
}

static void ending_signals(sigset_t *ret_set)
{
        sigemptyset(ret_set);
        sigaddset(ret_set, SIGTERM);
        sigaddset(ret_set, SIGINT);
        sigaddset(ret_set, SIGHUP);
}

void os_signals_block(void)
{
        sigset_t set;

        signal(SIGPIPE, SIG_IGN);
        ending_signals(&set);
        pthread_sigmask(SIG_BLOCK, &set, NULL);
}

int os_signals_wait(void)
{
        sigset_t set;
        int number;

        ending_signals(&set);
        do
                number = sigwaitinfo(&set, NULL);
        while (number < 0 && errno == EINTR);
        return number;
}

static struct {
        void (*clean)(void *argument);
        void *argument;
        sigset_t set;
} ending;

static void *clean_and_end(void *unused)
{
        int number;

        (void)unused;
        do
                number = sigwaitinfo(&ending.set, NULL);
        while (number < 0 && errno == EINTR);
        if (number < 0)
                return NULL;
        ending.clean(ending.argument);
        signal(number, SIG_DFL);
        pthread_sigmask(SIG_UNBLOCK, &ending.set, NULL);
        raise(number);
        _exit(128 + number);
}

int os_signals_clean(void (*clean)(void *argument), void *argument)
{
        static const int numbers[] = { SIGTERM, SIGINT, SIGHUP };
        pthread_t thread;
        int result;

        ending.clean = clean;
        ending.argument = argument;
        sigemptyset(&ending.set);
        for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
                struct sigaction now;

                if (!sigaction(numbers[i], NULL, &now) && now.sa_handler != SIG_IGN) /* sigwait takes ignored ones too */
                        sigaddset(&ending.set, numbers[i]);
        }
        pthread_sigmask(SIG_BLOCK, &ending.set, NULL);
        result = pthread_create(&thread, NULL, clean_and_end, NULL);
        if (result) {
                pthread_sigmask(SIG_UNBLOCK, &ending.set, NULL);
                return -result;
        }
        pthread_detach(thread);
        return 0;
}

int os_process_end(uint32_t pid)
{
        if (!pid || pid > INT32_MAX) /* not visible in this pid namespace; kill(0) would signal this process's own group */
                return -ESRCH;
        return kill((pid_t)pid, SIGTERM) ? -errno : 0;
}

int os_process_become(char *const argv[])
{
        execvp(argv[0], argv);
        return -errno;
}

void os_signal_self(void)
{
        kill(getpid(), SIGTERM);
}
