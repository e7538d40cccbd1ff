/* The agent's box: a thread of a process that is in it cannot open another file or start a program. */
#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent/box.h"
#include "os/os.h"
#include "os/os_box.h"
#include "os/process.h"
#include "tap.h"

static char root[64];

static const char *below(const char *name)
{
        static char path[4][128];
        static unsigned next;
        char *chosen = path[next++ % 4];

        snprintf(chosen, sizeof path[0], "%s/%s", root, name);
        return chosen;
}

static bool opens(const char *path, int flags)
{
        int fd = open(path, flags | O_CLOEXEC, 0600);

        if (fd >= 0)
                close(fd);
        return fd >= 0;
}

static void write_file(const char *path)
{
        int fd = open(path, O_WRONLY | O_CREAT, 0600);

        if (fd >= 0 && write(fd, "secret", 6) == 6)
                close(fd);
}

/* A thread whose stack hostile bytes have taken over tries these deeds. Returns the number of the first one that succeeded; 0: none. */
static void *hijacked(void *argument)
{
        static long deed;
        char *const words[] = { (char *)"true", NULL };
        const bool *has_paths = argument;
        struct iovec local = { &deed, sizeof deed };

        deed = 0;
        execv("/bin/true", words); /* this ends the process with 0 if it succeeds: the parent expects 42 */
        syscall(SYS_execveat, AT_FDCWD, "/bin/true", words, NULL, 0);
        if (*has_paths && (opens(below("other"), O_RDONLY) || opens(below("other"), O_WRONLY)))
                deed = 1;
        else if (*has_paths && (opens(below("served/../other"), O_RDONLY) || opens(below("served/link"), O_RDONLY)))
                deed = 2;
        else if (*has_paths && (opens(below("new"), O_WRONLY | O_CREAT) || opens("/etc/nebula-box-test", O_WRONLY | O_CREAT)))
                deed = 3;
        else if (*has_paths && !rename(below("served/file"), below("other")))
                deed = 4;
        else if (!ptrace(PTRACE_TRACEME, 0, NULL, NULL) || syscall(SYS_process_vm_writev, getpid(), &local, 1ul, &local, 1ul, 0ul) >= 0)
                deed = 5;
        else if (!mount("none", "/mnt", "tmpfs", 0, NULL) || !syscall(SYS_unshare, 0) || !syscall(SYS_setuid, 0))
                deed = 6;
        return &deed;
}

/* In a child: 42: all was refused, and what the agent needs works. */
static int boxed(bool has_paths)
{
        struct ipc_place place = { 0 };
        struct nebula_error error = { 0 };
        pthread_t thread;
        void *deed = NULL;
        char text[64];
        size_t size = 0;
        int code = -1;

        snprintf(place.directory, sizeof place.directory, "%s", below("run"));
        snprintf(place.memory, sizeof place.memory, "%s", below("memory"));
        if (has_paths)
                setenv("NEBULA_AGENT_PATHS", below("served"), 1);
        if (agent_box_enter(&place, &error))
                return 1;
        if (pthread_create(&thread, NULL, hijacked, &has_paths) || pthread_join(thread, &deed) || *(long *)deed)
                return 10 + (deed ? (int)*(long *)deed : 0);
        if (!opens(below("served/file"), O_RDWR) || !opens(below("served/made"), O_WRONLY | O_CREAT) || unlink(below("served/made")) ||
            !opens(below("memory/image"), O_RDWR | O_CREAT) || !opens("/etc/hosts", O_RDONLY) || mkdir(below("served/directory"), 0700))
                return 2;
        if (socket(AF_INET, SOCK_STREAM, 0) < 0 || os->memfd("x") < 0)
                return 3;
        /* a program that the user's settings name is started by the process from before */
        if (os->run("/bin/sh", (char *const[]){ (char *)"sh", (char *)"-c", (char *)"echo key; exit 3", NULL }, 20000, text, sizeof text, &size, &code) ||
            size != 4 || memcmp(text, "key\n", 4) || code != 3)
                return 4;
        return 42;
}

static int status_of(bool has_paths)
{
        int status = 0;
        pid_t pid = fork();

        if (!pid)
                _exit(boxed(has_paths));
        if (pid < 0 || waitpid(pid, &status, 0) < 0 || !WIFEXITED(status))
                return -1;
        return WEXITSTATUS(status);
}

static bool make_places(void)
{
        snprintf(root, sizeof root, "/tmp/nebula-box-XXXXXX");
        if (!mkdtemp(root) || mkdir(below("run"), 0700) || mkdir(below("memory"), 0700) || mkdir(below("served"), 0700))
                return false;
        write_file(below("other"));
        write_file(below("served/file"));
        return !symlink(below("other"), below("served/link"));
}

/*
 * fault (Storage): Hostile bytes take over a thread of the agent.
 * result: It can execute no program and, with `NEBULA_AGENT_PATHS`, open no other file.
 */
static void a_hijacked_thread_cannot_open_another_file_or_start_a_program(void)
{
        if (!OS_BOX_HAS_CALLS || syscall(SYS_landlock_create_ruleset, NULL, (size_t)0, 1u) < 1)
                SKIP("this kernel has no Landlock, or a sanitizer needs its calls");
        REQUIRE(make_places());
        CHECK(status_of(true) == 42);
        os_remove_tree(root);
}

static void without_paths_an_agent_starts_no_program_and_opens_all_files(void)
{
        if (!OS_BOX_HAS_CALLS)
                SKIP("a sanitizer needs its calls");
        REQUIRE(make_places());
        CHECK(status_of(false) == 42);
        os_remove_tree(root);
}

int main(int argc, char **argv)
{
        static const struct tap_test tests[] = {
                TEST(a_hijacked_thread_cannot_open_another_file_or_start_a_program),
                TEST(without_paths_an_agent_starts_no_program_and_opens_all_files),
        };

        if (argc == 3) /* as the command does for an agent */
                return os_programs_serve(atoi(argv[2])) < 0;
        os_programs_offer();
        return tap_run(tests, sizeof tests / sizeof tests[0]);
}
