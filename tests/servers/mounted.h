/* Mounts a file system through FUSE while a command runs. */
#ifndef NB_TESTS_SERVERS_MOUNTED_H
#define NB_TESTS_SERVERS_MOUNTED_H

#include <errno.h>
#include <fuse3/fuse.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void *mounted_serve(void *fuse)
{
        fuse_loop_mt(fuse, 0);
        return NULL;
}

/* Its exit code. */
static int mounted_run(char **command, const char *mount, mode_t mask)
{
        int status;
        pid_t child = fork();

        if (child < 0)
                return 1;
        if (!child) {
                umask(mask);
                setenv("NB_TEST_MOUNT", mount, 1);
                execvp(command[0], command);
                _exit(127);
        }
        while (waitpid(child, &status, 0) < 0 && errno == EINTR)
                ;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* The command gets NB_TEST_MOUNT. Returns its exit code; 77: FUSE is not usable here. */
static int mounted_while(const char *program, const struct fuse_operations *operations, const char *mount, char **command)
{
        char name[64], *words[] = { (char *)(uintptr_t)program, (char *)"-o", name };
        struct fuse_args args = FUSE_ARGS_INIT(3, words);
        struct fuse *fuse;
        pthread_t thread;
        mode_t mask;
        int code;

        snprintf(name, sizeof name, "fsname=%s", program);
        fuse = access("/dev/fuse", R_OK | W_OK) ? NULL : fuse_new(&args, operations, sizeof *operations, NULL);
        if (!fuse || fuse_mount(fuse, mount)) {
                fprintf(stderr, "no file system can be mounted through /dev/fuse here\n");
                return 77;
        }
        mask = umask(0); /* modes come from the callers */
        pthread_create(&thread, NULL, mounted_serve, fuse);
        code = mounted_run(command, mount, mask);
        fuse_exit(fuse);
        fuse_unmount(fuse);
        pthread_join(thread, NULL);
        fuse_destroy(fuse);
        return code;
}

#endif
