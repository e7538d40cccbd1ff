/*
 * Files below a root in which other users may write. The root is resolved like any path. Below it no link is followed, and
 * every call works on the descriptor of the directory that holds the name. So if another process moves or replaces a
 * directory meanwhile, the call still cannot leave the root.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "os/linux_abi.h"
#include "os/lock.h"
#include "os/os_create.h"
#include "os/os_linux.h"

#define NAME_BYTES 256
#define HOLD (O_PATH | O_DIRECTORY | O_CLOEXEC) /* a start directory: the search permission is enough, it need not be readable */

static bool is_link(int directory, const char *name)
{
        struct stat found;

        return !fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) && S_ISLNK(found.st_mode);
}

static int open_one(int directory, const char *name, int flags, mode_t mode)
{
        int fd = openat(directory, name, flags | O_NOFOLLOW, mode);

        if (fd >= 0)
                return fd;
        return errno == ENOTDIR && is_link(directory, name) ? -ELOOP : -errno;
}

/* Opens one name after the other. */
static int walk(int directory, const char *key, int flags, mode_t mode)
{
        int at = directory, next = -EINVAL;

        for (;;) {
                size_t length = strcspn(key, "/");
                char name[NAME_BYTES];
                bool is_last = !key[length];

                next = length && length < sizeof name ? 0 : -EINVAL;
                if (!next) {
                        memcpy(name, key, length);
                        name[length] = 0;
                        next = !strcmp(name, "..") ? -EXDEV : open_one(at, name, is_last ? flags : HOLD, mode);
                }
                if (at != directory)
                        close(at);
                if (next < 0 || is_last)
                        return next;
                at = next;
                key += length + 1;
        }
}

/* Containers refuse openat2 with EPERM, and older kernels lack it. Then `walk` does the same in several steps. */
static int open_beneath(int directory, const char *key, int flags, mode_t mode)
{
        struct linux_open_how how = {
                .flags = (uint64_t)flags, .mode = flags & O_CREAT ? mode : 0,
                .resolve = LINUX_RESOLVE_BENEATH | LINUX_RESOLVE_NO_SYMLINKS | LINUX_RESOLVE_NO_MAGICLINKS,
        };
        long fd = syscall(SYS_openat2, directory, key, &how, sizeof how);

        if (fd >= 0)
                return (int)fd;
        if (errno != ENOSYS && errno != EPERM && errno != EAGAIN)
                return -errno;
        return walk(directory, key, flags, mode);
}

/* key "" is the root itself. */
static int open_at_root(const char *root, const char *key, int flags, mode_t mode)
{
        int directory, fd;

        if (!*key) {
                fd = open(root, flags, mode);
                return fd < 0 ? -errno : fd;
        }
        directory = open(root, HOLD);
        if (directory < 0)
                return -errno;
        fd = open_beneath(directory, key, flags, mode);
        close(directory);
        return fd;
}

/* Opens the directory that holds the last name of `key`. */
static int open_parent(const char *root, const char *key, const char **ret_name)
{
        const char *slash = strrchr(key, '/'), *name = slash ? slash + 1 : key;
        char parent[4096] = "";

        if (!*name || !strcmp(name, ".") || !strcmp(name, ".."))
                return -EINVAL;
        if (slash && (size_t)(slash - key) >= sizeof parent)
                return -ENAMETOOLONG;
        if (slash)
                memcpy(parent, key, (size_t)(slash - key));
        *ret_name = name;
        return open_at_root(root, parent, HOLD, 0);
}

int os_linux_open_below(const char *root, const char *key, int flags)
{
        int theirs = os_linux_open_flags(flags);
        int directory, fd;
        const char *name;

        lock_check_files("open_below");
        if (!os_linux_is_shared(flags)) {
                fd = open_at_root(root, key, theirs | O_NONBLOCK, 0600);
                return fd < 0 ? fd : os_linux_opened(fd, theirs);
        }
        directory = open_parent(root, key, &name);
        if (directory < 0)
                return directory;
        fd = os_create_file(directory, name, theirs | O_NONBLOCK | O_NOFOLLOW);
        if (fd < 0)
                fd = -errno;
        close(directory);
        return fd < 0 ? fd : os_linux_opened(fd, theirs);
}

/* 0 if the kernel, container or file system does not provide it. */
static int64_t birth_of(int directory, const char *name)
{
        struct statx found;

        if (statx(directory, name, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH, STATX_BTIME, &found) || !(found.stx_mask & STATX_BTIME))
                return 0;
        return found.stx_btime.tv_sec * 1000000000 + found.stx_btime.tv_nsec;
}

int os_linux_stat_below(const char *root, const char *key, struct os_stat *ret_stat)
{
        struct stat found;
        const char *name = "";
        int directory = *key ? open_parent(root, key, &name) : open_at_root(root, "", HOLD, 0), result;

        if (directory < 0)
                return directory;
        result = fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) ? -errno : 0;
        if (!result) {
                os_linux_convert_stat(&found, ret_stat);
                ret_stat->born_ns = ret_stat->kind == OS_KIND_DIRECTORY ? birth_of(directory, name) : 0;
        }
        close(directory);
        return result;
}

static int rename_with(const char *root, const char *from, const char *to, unsigned flags)
{
        const char *from_name, *to_name;
        int from_directory = open_parent(root, from, &from_name), to_directory, result;

        lock_check_files("rename_below");
        if (from_directory < 0)
                return from_directory;
        to_directory = result = open_parent(root, to, &to_name);
        if (to_directory >= 0) {
                result = renameat2(from_directory, from_name, to_directory, to_name, flags) ? -errno : 0;
                close(to_directory);
        }
        close(from_directory);
        return result;
}

int os_linux_rename_below(const char *root, const char *from, const char *to)
{
        return rename_with(root, from, to, 0);
}

int os_linux_rename_new_below(const char *root, const char *from, const char *to)
{
        return rename_with(root, from, to, RENAME_NOREPLACE);
}

int os_linux_link_below(const char *root, const char *key, const char *to_root, const char *to)
{
        const char *name, *to_name;
        int directory = open_parent(root, key, &name), to_directory, result;

        lock_check_files("link_below");
        if (directory < 0)
                return directory;
        to_directory = result = open_parent(to_root, to, &to_name);
        if (to_directory >= 0) {
                result = is_link(directory, name) ? -ELOOP : linkat(directory, name, to_directory, to_name, 0) ? -errno : 0;
                close(to_directory);
        }
        close(directory);
        return result;
}

static int unlink_with(const char *root, const char *key, int flags)
{
        const char *name;
        int directory = open_parent(root, key, &name), result;

        if (directory < 0)
                return directory;
        result = unlinkat(directory, name, flags) ? -errno : 0;
        close(directory);
        return result;
}

int os_linux_unlink_below(const char *root, const char *key)
{
        lock_check_files("unlink_below");
        return unlink_with(root, key, 0);
}

int os_linux_rmdir_below(const char *root, const char *key)
{
        lock_check_files("rmdir_below");
        return unlink_with(root, key, AT_REMOVEDIR);
}

int os_linux_mkdir_below(const char *root, const char *key, uint32_t mode)
{
        const char *name;
        int directory = open_parent(root, key, &name), result;

        lock_check_files("mkdir_below");
        if (directory < 0)
                return directory;
        result = os_create_directory(directory, name, mode) ? -errno : 0;
        close(directory);
        return result;
}

int os_linux_opendir_below(const char *root, const char *key, struct os_dir **ret_dir)
{
        int fd = open_at_root(root, key, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK, 0), result;
        struct os_dir *dir;

        lock_check_files("opendir_below");
        if (fd < 0)
                return fd;
        dir = malloc(sizeof *dir);
        if (dir)
                dir->stream = fdopendir(fd);
        if (dir && dir->stream) {
                *ret_dir = dir;
                return 0;
        }
        result = dir ? -errno : -ENOMEM;
        free(dir);
        close(fd);
        return result;
}

int os_linux_stat_entry(struct os_dir *dir, const char *name, struct os_stat *ret_stat)
{
        struct stat found;

        if (fstatat(dirfd(dir->stream), name, &found, AT_SYMLINK_NOFOLLOW))
                return -errno;
        os_linux_convert_stat(&found, ret_stat);
        return 0;
}
