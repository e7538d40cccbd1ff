/* Runs a program to its end. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/os_linux.h"

extern char **environ;

static int wait_for(pid_t pid, int *ret_exit)
{
        int status;

        while (waitpid(pid, &status, 0) < 0)
                if (errno != EINTR)
                        return -errno; /* ECHILD: the program ignores SIGCHLD, so the exit status is lost */
        *ret_exit = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        return 0;
}

/* The trainer may block or ignore signals; the started program begins with the default ones. `more`: other flags. */
static int set_signals(posix_spawnattr_t *attributes, int more)
{
        sigset_t none, all;

        sigemptyset(&none);
        sigfillset(&all);
        posix_spawnattr_setsigmask(attributes, &none);
        posix_spawnattr_setsigdefault(attributes, &all);
        return posix_spawnattr_setflags(attributes, (short)(POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | more));
}

/* Starts a program. stdio: see os->spawn. leads: a process group of its own. */
static int start(const char *path, char *const argv[], const int stdio[3], bool leads, pid_t *ret_pid)
{
        posix_spawn_file_actions_t actions;
        posix_spawnattr_t attributes;
        int result;

        result = posix_spawn_file_actions_init(&actions);
        if (result)
                return -result;
        result = posix_spawnattr_init(&attributes);
        if (result)
                goto done_actions;
        result = set_signals(&attributes, leads ? POSIX_SPAWN_SETPGROUP : 0); /* whose default is a new group */
        for (int fd = 0; fd < 3 && !result; fd++) {
                if (stdio && stdio[fd] >= 0)
                        result = posix_spawn_file_actions_adddup2(&actions, stdio[fd], fd);
                else
                        result = posix_spawn_file_actions_addopen(&actions, fd, "/dev/null", fd ? O_WRONLY : O_RDONLY, 0);
        }
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 34)
        if (!result)
                result = posix_spawn_file_actions_addclosefrom_np(&actions, 3);
#endif
        if (!result)
                result = posix_spawn(ret_pid, path, &actions, &attributes, argv, environ);
        posix_spawnattr_destroy(&attributes);
done_actions:
        posix_spawn_file_actions_destroy(&actions);
        return -result;
}

int os_linux_spawn(const char *path, char *const argv[], const int stdio[3], int *ret_exit)
{
        pid_t pid;
        int result = start(path, argv, stdio, false, &pid);

        return result ? result : wait_for(pid, ret_exit);
}

/* Reads until the program, and all that inherited its stdout, have closed it. */
static int read_all(int fd, int64_t until_ns, char *text, size_t room, size_t *ret_size)
{
        size_t size = 0;
        char more[1];

        for (;;) {
                struct pollfd poller = { .fd = fd, .events = POLLIN };
                int64_t left_ms = (until_ns - os_linux.now_ns()) / 1000000;
                ssize_t count;

                if (left_ms <= 0)
                        return -ETIMEDOUT;
                if (poll(&poller, 1, (int)(left_ms < INT32_MAX ? left_ms : INT32_MAX)) < 0 && errno != EINTR)
                        return -errno;
                if (!poller.revents)
                        continue;
                count = size < room ? read(fd, text + size, room - size) : read(fd, more, 1);
                if (count < 0 && errno != EINTR && errno != EAGAIN)
                        return -errno;
                if (count > 0 && size == room)
                        return -EFBIG;
                if (!count) {
                        *ret_size = size;
                        return 0;
                }
                size += count > 0 ? (size_t)count : 0;
        }
}

/* Waits until the program has ended, and leaves its exit status to wait_for. */
static int wait_until(pid_t pid, int64_t until_ns)
{
        siginfo_t ended = { 0 };

        while (!waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) && !ended.si_pid) {
                if (os_linux.now_ns() >= until_ns)
                        return -ETIMEDOUT;
                os_linux.sleep_ms(2);
        }
        return 0;
}

int (*os_runs_elsewhere)(const char *path, char *const argv[], int64_t timeout_ms, char *text, size_t room, size_t *ret_size, int *ret_exit);

int os_linux_run(const char *path, char *const argv[], int64_t timeout_ms, char *text, size_t room, size_t *ret_size, int *ret_exit)
{
        int64_t until_ns = os_linux.now_ns() + timeout_ms * 1000000;
        int fds[2], result, ended;
        pid_t pid;

        if (os_runs_elsewhere)
                return os_runs_elsewhere(path, argv, timeout_ms, text, room, ret_size, ret_exit);
        if (pipe2(fds, O_CLOEXEC))
                return -errno;
        result = start(path, argv, (const int[3]){ -1, fds[1], -1 }, true, &pid);
        close(fds[1]);
        if (result)
                goto done;
        result = read_all(fds[0], until_ns, text, room, ret_size);
        if (!result)
                result = wait_until(pid, until_ns);
        if (result)
                kill(-pid, SIGKILL);
        ended = wait_for(pid, ret_exit);
        result = result ? result : ended;
done:
        close(fds[0]);
        return result;
}
