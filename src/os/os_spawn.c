/* Runs a program to its end. */
#include <errno.h>
#include <fcntl.h>
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

/* The trainer may block or ignore signals; the started program begins with the default ones. */
static int set_signals(posix_spawnattr_t *attributes)
{
        sigset_t none, all;

        sigemptyset(&none);
        sigfillset(&all);
        posix_spawnattr_setsigmask(attributes, &none);
        posix_spawnattr_setsigdefault(attributes, &all);
        return posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
}

int os_linux_spawn(const char *path, char *const argv[], int *ret_exit)
{
        posix_spawn_file_actions_t actions;
        posix_spawnattr_t attributes;
        pid_t pid;
        int result;

        result = posix_spawn_file_actions_init(&actions);
        if (result)
                return -result;
        result = posix_spawnattr_init(&attributes);
        if (result)
                goto done_actions;
        result = set_signals(&attributes);
        for (int fd = 0; fd < 3 && !result; fd++)
                result = posix_spawn_file_actions_addopen(&actions, fd, "/dev/null", fd ? O_WRONLY : O_RDONLY, 0);
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 34)
        if (!result)
                result = posix_spawn_file_actions_addclosefrom_np(&actions, 3);
#endif
        if (!result)
                result = posix_spawn(&pid, path, &actions, &attributes, argv, environ);
        posix_spawnattr_destroy(&attributes);
done_actions:
        posix_spawn_file_actions_destroy(&actions);
        return result ? -result : wait_for(pid, ret_exit);
}
