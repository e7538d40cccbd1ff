#include "cli/follow_directory.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "os/os.h"

#define TRIES_MAX 100
#define PAUSE_MS 10

/* Whether the path leads to the directory of the descriptor, and that is of this user. */
static bool is_ours_at(const char *path, int fd)
{
        struct os_stat opened, named;

        return !os->fstat(fd, &opened) && !os->stat(path, false, &named) && opened.uid == os->uid() && opened.kind == OS_KIND_DIRECTORY &&
               opened.device == named.device && opened.inode == named.inode;
}

/* Returns a descriptor that has the lock, or a negative errno. -EAGAIN: another process has it, or removes the directory. */
static int open_locked(const char *path)
{
        int fd = os->open(path, OS_READ | OS_DIRECTORY | OS_NOFOLLOW), result;
        struct os_stat opened;

        if (fd < 0)
                return fd == -ENOENT ? -EAGAIN : fd;
        result = os->fstat(fd, &opened);
        if (!result && opened.uid != os->uid())
                result = -EPERM;
        if (!result)
                result = os->lock(fd, OS_LOCK_ALONE);
        if (!result && !is_ours_at(path, fd))
                result = -EAGAIN;
        if (result)
                os->close(fd);
        return result ? result : fd;
}

int follow_directory_take(const char *path, int *lock)
{
        int result = -EAGAIN;

        if (*lock >= 0) {
                if (is_ours_at(path, *lock))
                        return 0;
                os->close(*lock); /* the last command has removed the directory */
                *lock = -1;
        }
        for (int i = 0; i < TRIES_MAX && result == -EAGAIN; i++) { /* a sweep holds the lock of a directory for a moment */
                if (i)
                        os->sleep_ms(PAUSE_MS);
                result = os->mkdir(path, 0777);
                if (!result || result == -EEXIST)
                        result = open_locked(path);
        }
        if (result < 0)
                return result;
        *lock = result;
        return 0;
}

static bool has_our_form(const char *name)
{
        size_t length = strlen(FOLLOW_NAME);

        return !strncmp(name, FOLLOW_NAME, length) && name[length] && name[length + strspn(name + length, "0123456789")] == 0;
}

void follow_directory_sweep(void)
{
        char name[256], path[sizeof FOLLOW_SHM + sizeof name];
        struct os_dir *dir;
        int fd;

        if (os->opendir(FOLLOW_SHM, &dir) < 0)
                return;
        while (os->readdir(dir, name, sizeof name) > 0) {
                if (!has_our_form(name))
                        continue;
                snprintf(path, sizeof path, FOLLOW_SHM "/%s", name);
                fd = open_locked(path);
                if (fd < 0)
                        continue;
                os_remove_tree(path);
                os->close(fd);
        }
        os->closedir(dir);
}
