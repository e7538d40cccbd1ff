/* Helpers built on the table: complete transfers, whole files, directories. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"

#define PATH_MAX_BYTES 4096
#define NAME_MAX_BYTES 256
#define TEMP_TRIES 100 /* dead processes with our pid may have left such names */

int os_read_at(int fd, void *data, size_t size, uint64_t offset)
{
        char *at = data;

        while (size) {
                int64_t count = os->pread(fd, at, size, offset);

                if (count == -EINTR)
                        continue;
                if (count < 0)
                        return (int)count;
                if (!count)
                        return -ENODATA;
                at += count;
                size -= (size_t)count;
                offset += (uint64_t)count;
        }
        return 0;
}

int os_write_at(int fd, const void *data, size_t size, uint64_t offset)
{
        const char *at = data;

        while (size) {
                int64_t count = os->pwrite(fd, at, size, offset);

                if (count == -EINTR)
                        continue;
                if (count < 0)
                        return (int)count;
                if (!count)
                        return -EIO; /* a file system that accepts no bytes would keep us in this loop for ever */
                at += count;
                size -= (size_t)count;
                offset += (uint64_t)count;
        }
        return 0;
}

int os_sync(int fd)
{
        int result;

        do
                result = os->fsync(fd);
        while (result == -EINTR);
        return result;
}

static int open_retried(const char *path, int flags)
{
        int fd;

        do
                fd = os->open(path, flags);
        while (fd == -EINTR);
        return fd;
}

static int open_below_retried(const char *root, const char *key, int flags)
{
        int fd;

        do
                fd = os->open_below(root, key, flags);
        while (fd == -EINTR);
        return fd;
}

/* The size from stat is only a hint: files of /proc have none, and files grow. */
static int read_to_end(int fd, size_t limit, size_t capacity, char **ret_data, size_t *ret_size)
{
        char *data = malloc(capacity + 1);
        size_t size = 0;
        int result = -ENOMEM;

        if (!data)
                return result;
        for (;;) {
                int64_t count;

                if (size == capacity) {
                        size_t more = capacity > limit / 2 ? limit + 1 : capacity * 2 + 512;
                        char *grown;

                        result = -EFBIG;
                        if (size > limit)
                                goto free_data;
                        grown = realloc(data, more + 1);
                        result = -ENOMEM;
                        if (!grown)
                                goto free_data;
                        data = grown;
                        capacity = more;
                }
                count = os->pread(fd, data + size, capacity - size, size);
                if (count == -EINTR)
                        continue;
                result = (int)count;
                if (count < 0)
                        goto free_data;
                if (!count)
                        break;
                size += (size_t)count;
        }
        result = -EFBIG;
        if (size > limit)
                goto free_data;
        data[size] = 0;
        *ret_data = data;
        *ret_size = size;
        return 0;
free_data:
        free(data);
        return result;
}

/* Closes `fd`. */
static int read_whole(int fd, size_t limit, char **ret_data, size_t *ret_size)
{
        struct os_stat found;
        int result;

        if (fd < 0)
                return fd;
        result = os->fstat(fd, &found);
        if (!result && found.kind == OS_KIND_DIRECTORY)
                result = -EISDIR;
        if (!result && found.size > limit)
                result = -EFBIG;
        if (!result)
                result = read_to_end(fd, limit, found.size + 1, ret_data, ret_size);
        os->close(fd);
        return result;
}

int os_read_file(const char *path, size_t limit, char **ret_data, size_t *ret_size)
{
        return read_whole(open_retried(path, OS_READ), limit, ret_data, ret_size);
}

/* The directory part of `path`: "." if it has none, "/" for a name in the root. */
static int parent_of(const char *path, char ret_parent[PATH_MAX_BYTES])
{
        size_t length = strlen(path);

        while (length > 1 && path[length - 1] == '/')
                length--;
        while (length && path[length - 1] != '/')
                length--;
        while (length > 1 && path[length - 1] == '/')
                length--;
        if (length >= PATH_MAX_BYTES)
                return -ENAMETOOLONG;
        if (!length) {
                strcpy(ret_parent, ".");
                return 0;
        }
        memcpy(ret_parent, path, length);
        ret_parent[length] = 0;
        return 0;
}

/* Closes `fd`. */
static int sync_directory(int fd)
{
        int result;

        if (fd < 0)
                return fd;
        result = os_sync(fd);
        os->close(fd);
        /* Some network file systems have no fsync for directories: their server decides. */
        return result == -EINVAL || result == -ENOTSUP ? 0 : result;
}

int os_sync_dir(const char *path)
{
        return sync_directory(open_retried(path, OS_READ | OS_DIRECTORY));
}

int os_sync_dir_below(const char *root, const char *key)
{
        return sync_directory(open_below_retried(root, key, OS_READ | OS_DIRECTORY));
}

static int open_temp(const char *path, char ret_temp[PATH_MAX_BYTES])
{
        static atomic_uint counter;

        for (int i = 0; i < TEMP_TRIES; i++) {
                int length = snprintf(ret_temp, PATH_MAX_BYTES, "%s.tmp-%u-%u", path, os->pid(),
                                      atomic_fetch_add(&counter, 1));
                int fd;

                if (length >= PATH_MAX_BYTES)
                        return -ENAMETOOLONG;
                fd = open_retried(ret_temp, OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW | OS_SHARED);
                if (fd != -EEXIST)
                        return fd;
        }
        return -EEXIST;
}

int os_write_file_atomic(const char *path, const void *data, size_t size)
{
        char temp[PATH_MAX_BYTES], parent[PATH_MAX_BYTES];
        int result = parent_of(path, parent);
        int fd, closed;

        if (result)
                return result;
        fd = open_temp(path, temp);
        if (fd < 0)
                return fd;
        result = os_write_at(fd, data, size, 0);
        if (!result)
                result = os_sync(fd);
        closed = os->close(fd);
        if (!result)
                result = closed;
        if (!result)
                result = os->rename(temp, path);
        if (result) {
                os->unlink(temp);
                return result;
        }
        return os_sync_dir(parent);
}

int os_make_dirs_below(const char *root, const char *key, uint32_t mode)
{
        char part[PATH_MAX_BYTES], parent[PATH_MAX_BYTES] = "";
        size_t length = strlen(key);

        if (length >= sizeof part)
                return -ENAMETOOLONG;
        for (size_t i = 1; i <= length; i++) {
                struct os_stat found;
                int result;

                if (key[i] != '/' && key[i])
                        continue;
                snprintf(part, sizeof part, "%.*s", (int)i, key);
                result = os->mkdir_below(root, part, mode);
                if (!result)
                        result = os_sync_dir_below(root, parent);
                else if (!os->stat_below(root, part, &found)) /* also if this directory is not writable */
                        result = found.kind == OS_KIND_DIRECTORY ? 0 : found.kind == OS_KIND_LINK ? -ELOOP : -ENOTDIR;
                if (result)
                        return result;
                memcpy(parent, part, i + 1);
        }
        return 0;
}

static int make_one(const char *path, uint32_t mode)
{
        char parent[PATH_MAX_BYTES];
        int result = os->mkdir(path, mode), looked;
        struct os_stat found;

        if (!result) {
                result = parent_of(path, parent);
                return result ? result : os_sync_dir(parent);
        }
        /* An existing directory is enough, also if its parent is not writable or read-only. */
        looked = os->stat(path, true, &found);
        if (looked)
                return result == -EEXIST ? looked : result;
        return found.kind == OS_KIND_DIRECTORY ? 0 : -ENOTDIR;
}

int os_make_dirs(const char *path, uint32_t mode)
{
        char part[PATH_MAX_BYTES];
        size_t length = strlen(path);
        struct os_stat found;

        if (length >= sizeof part)
                return -ENAMETOOLONG;
        if (!os->stat(path, true, &found))
                return found.kind == OS_KIND_DIRECTORY ? 0 : -ENOTDIR;
        memcpy(part, path, length + 1);
        for (size_t i = 1; i <= length; i++) {
                int result;

                if (part[i] != '/' && part[i])
                        continue;
                if (part[i - 1] == '/')
                        continue;
                part[i] = 0;
                result = make_one(part, mode);
                if (result)
                        return result;
                part[i] = path[i];
        }
        return 0;
}

static int remove_below(const char *root, char *key, size_t length);

static int remove_one(const char *root, char *key, size_t length)
{
        struct os_stat found;
        int result = os->stat_below(root, key, &found);

        if (!result && found.kind != OS_KIND_DIRECTORY)
                result = os->unlink_below(root, key);
        else if (!result)
                result = remove_below(root, key, length);
        return result == -ENOENT ? 0 : result;
}

static int remove_below(const char *root, char *key, size_t length)
{
        char name[NAME_MAX_BYTES];
        struct os_dir *dir;
        int result = os->opendir_below(root, key, &dir);
        int found;

        if (result)
                return result;
        while ((found = os->readdir(dir, name, sizeof name)) > 0 && !result) {
                size_t more = strlen(name);

                if (length + more + 2 > PATH_MAX_BYTES) {
                        result = -ENAMETOOLONG;
                        break;
                }
                key[length] = '/';
                memcpy(key + length + 1, name, more + 1);
                result = remove_one(root, key, length + 1 + more);
                key[length] = 0;
        }
        os->closedir(dir);
        if (!result)
                result = found < 0 ? found : os->rmdir_below(root, key);
        return result;
}

/* Works on the descriptor of the parent, so that a directory which another process replaces by a link meanwhile is not entered. */
int os_remove_tree(const char *path)
{
        char parent[PATH_MAX_BYTES], key[PATH_MAX_BYTES];
        size_t length = strlen(path), at;
        int result;

        while (length > 1 && path[length - 1] == '/')
                length--;
        for (at = length; at && path[at - 1] != '/';)
                at--;
        if (length - at >= sizeof key)
                return -ENAMETOOLONG;
        result = parent_of(path, parent);
        if (result)
                return result;
        memcpy(key, path + at, length - at);
        key[length - at] = 0;
        return remove_one(parent, key, length - at);
}

const char *os_error_text(int negative_errno)
{
#if __GLIBC_PREREQ(2, 32)
        const char *text = strerrordesc_np(-negative_errno);

        return text ? text : "unknown error";
#else
        char unused[64]; /* glibc returns its own text for each error that it knows */
        const char *text = strerror_r(-negative_errno, unused, sizeof unused);

        return text != unused ? text : "unknown error";
#endif
}
