#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "os/os.h"
#include "os/os_create.h"

#define STATUS_BYTES_MAX 65536
#define TRIES 10 /* retries against a process that makes and removes the file all the time */
#define FILE_MODE 0666

static uint32_t process_umask = OS_CREATE_UNKNOWN; /* the umask that os_umask_take replaced */
static _Thread_local uint32_t thread_umask = OS_CREATE_UNKNOWN, thread_group = OS_CREATE_UNKNOWN;

void os_umask_take(void)
{
        process_umask = umask(0);
}

void os_create_as(uint32_t umask, uint32_t group)
{
        thread_umask = umask;
        thread_group = group;
}

static bool find_number(const char *text, const char *name, unsigned column, int base, uint32_t *ret_value)
{
        const char *at = strstr(text, name);
        char *end = (char *)(uintptr_t)(at ? at + strlen(name) : NULL);
        unsigned long value = 0;

        for (unsigned i = 0; at && i <= column; i++) {
                at = end;
                value = strtoul(at, &end, base);
                if (end == at)
                        return false;
        }
        *ret_value = (uint32_t)value;
        return at != NULL;
}

void os_create_self(uint32_t *ret_umask, uint32_t *ret_group)
{
        char *text;
        size_t size;

        *ret_umask = *ret_group = OS_CREATE_UNKNOWN;
        if (os_read_file("/proc/self/status", STATUS_BYTES_MAX, &text, &size))
                return;
        find_number(text, "\nUmask:", 0, 8, ret_umask);
        find_number(text, "\nGid:", 3, 10, ret_group); /* the four ids: real, effective, saved, file system */
        free(text);
}

/* The directory that contains `path`. */
static bool parent_of(int directory, const char *path, char *parent, size_t size)
{
        const char *slash = strrchr(path, '/');
        int length = slash == path ? 1 : slash ? (int)(slash - path) : 1;

        if (directory != AT_FDCWD) /* the descriptor may be O_PATH, which fgetxattr refuses */
                return (size_t)snprintf(parent, size, "/proc/self/fd/%d", directory) < size;
        return (size_t)snprintf(parent, size, "%.*s", length, slash ? path : ".") < size;
}

/* Whether the parent directory has default ACLs, which replace the umask, and whether it hands down its group. */
static void look_above(int directory, const char *path, bool *ret_has_acl, bool *ret_has_group)
{
        char parent[4096];
        struct stat found;

        *ret_has_acl = *ret_has_group = false;
        if (!parent_of(directory, path, parent, sizeof parent))
                return;
        *ret_has_acl = getxattr(parent, "system.posix_acl_default", NULL, 0) > 0;
        *ret_has_group = stat(parent, &found) || (found.st_mode & S_ISGID);
}

static mode_t mode_for(mode_t mode, bool has_acl)
{
        uint32_t mask = thread_umask != OS_CREATE_UNKNOWN ? thread_umask : process_umask;

        return process_umask == OS_CREATE_UNKNOWN || has_acl ? mode : mode & (mode_t)~mask;
}

static bool gives_group(bool has_group)
{
        return process_umask != OS_CREATE_UNKNOWN && thread_group != OS_CREATE_UNKNOWN && !has_group && thread_group != getegid();
}

int os_create_file(int directory, const char *path, int flags)
{
        bool has_acl, has_group;
        int fd = -1;

        if (process_umask == OS_CREATE_UNKNOWN)
                return openat(directory, path, flags, FILE_MODE);
        look_above(directory, path, &has_acl, &has_group);
        /* A file that exists keeps its group and mode. */
        for (int i = 0; i < TRIES; i++) {
                fd = openat(directory, path, flags | O_EXCL, mode_for(FILE_MODE, has_acl));
                if (fd >= 0 && gives_group(has_group) && fchown(fd, (uid_t)-1, (gid_t)thread_group))
                        errno = 0; /* the agent is not in that group: the file keeps the agent's group */
                if (fd >= 0 || errno != EEXIST || (flags & O_EXCL))
                        return fd;
                fd = openat(directory, path, flags & ~O_CREAT);
                if (fd >= 0 || errno != ENOENT)
                        return fd;
        }
        return fd;
}

int os_create_directory(int directory, const char *path, uint32_t mode)
{
        bool has_acl, has_group;
        int result;

        if (process_umask == OS_CREATE_UNKNOWN)
                return mkdirat(directory, path, (mode_t)mode);
        look_above(directory, path, &has_acl, &has_group);
        result = mkdirat(directory, path, mode_for((mode_t)mode, has_acl));
        if (!result && (mode & 070) && gives_group(has_group) && fchownat(directory, path, (uid_t)-1, (gid_t)thread_group, AT_SYMLINK_NOFOLLOW))
                errno = 0;
        return result;
}
