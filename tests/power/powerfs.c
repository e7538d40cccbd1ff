/*
 * powerfs BACKING MOUNTPOINT - a file system that keeps a log of all changes and syncs, and makes the states that a loss of power may leave.
 *
 * Real agents, trainers and frameworks work below MOUNTPOINT. os_crash.h says which states a loss of power may leave. Commands come on
 * standard input, a line each, and each gets a line as its answer; the first line is "ready":
 *
 *     position                  the number of changes and syncs so far
 *     cut POSITION SEED PATH    makes the directory PATH: a state after a loss of power at that position. 0, or a negative errno
 *
 * The end of standard input unmounts it. A file system on a loop device whose image lies below MOUNTPOINT loses power in the same way.
 */
#define FUSE_USE_VERSION 312
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "os/os.h"
#include "os/os_crash.h"

#define PATH_BYTES 4096

static const char *root;
static pthread_rwlock_t changes = PTHREAD_RWLOCK_INITIALIZER; /* held for writing while a state is made */

static const char *full(const char *path, char text[PATH_BYTES])
{
        if (snprintf(text, PATH_BYTES, "%s%s", root, strcmp(path, "/") ? path : "") >= PATH_BYTES)
                abort(); /* FUSE passes no path that long */
        return text;
}

#define CHANGE(call)                                                     \
        ({                                                               \
                typeof(call) result_;                                    \
                pthread_rwlock_rdlock(&changes);                         \
                result_ = (call);                                        \
                pthread_rwlock_unlock(&changes);                         \
                result_;                                                 \
        })

static int result_of(int result)
{
        return result ? -errno : 0;
}

static int power_getattr(const char *path, struct stat *stat, struct fuse_file_info *info)
{
        char text[PATH_BYTES];

        return result_of(info ? fstat((int)info->fh, stat) : lstat(full(path, text), stat));
}

static int power_readlink(const char *path, char *target, size_t size)
{
        char text[PATH_BYTES];
        ssize_t length = readlink(full(path, text), target, size - 1);

        if (length < 0)
                return -errno;
        target[length] = 0;
        return 0;
}

static int power_mkdir(const char *path, mode_t mode)
{
        char text[PATH_BYTES];

        return CHANGE(os->mkdir(full(path, text), mode));
}

static int power_unlink(const char *path)
{
        char text[PATH_BYTES];

        return CHANGE(os->unlink(full(path, text)));
}

static int power_rmdir(const char *path)
{
        char text[PATH_BYTES];

        return CHANGE(os->rmdir(full(path, text)));
}

/* The log knows no links. */
static int power_symlink(const char *target, const char *path)
{
        return -EPERM;
}

static int power_rename(const char *from, const char *to, unsigned flags)
{
        char text[PATH_BYTES], to_text[PATH_BYTES];

        full(from, text);
        full(to, to_text);
        switch (flags) {
        case 0:
                return CHANGE(os->rename(text, to_text));
        case RENAME_NOREPLACE:
                return CHANGE(os->rename_new_below(root, from + 1, to + 1));
        case RENAME_EXCHANGE:
                return CHANGE(os->exchange(text, to_text));
        default:
                return -EINVAL;
        }
}

static int power_link(const char *from, const char *to)
{
        char text[PATH_BYTES], to_text[PATH_BYTES];

        return CHANGE(os->link(full(from, text), full(to, to_text)));
}

static int power_chmod(const char *path, mode_t mode, struct fuse_file_info *info)
{
        char text[PATH_BYTES];

        return result_of(info ? fchmod((int)info->fh, mode) : chmod(full(path, text), mode));
}

static int power_chown(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *info)
{
        char text[PATH_BYTES];

        return result_of(info ? fchown((int)info->fh, uid, gid) : lchown(full(path, text), uid, gid));
}

static int power_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *info)
{
        char text[PATH_BYTES];

        return result_of(info ? futimens((int)info->fh, times) : utimensat(AT_FDCWD, full(path, text), times, AT_SYMLINK_NOFOLLOW));
}

static int opened(int fd, struct fuse_file_info *info)
{
        if (fd < 0)
                return fd;
        info->fh = (uint64_t)fd;
        return 0;
}

static int power_open(const char *path, struct fuse_file_info *info)
{
        int access = info->flags & O_ACCMODE, flags = OS_READ; /* a page that is written in part is read first */
        char text[PATH_BYTES];

        if (access != O_RDONLY)
                flags |= OS_WRITE;
        if (info->flags & O_TRUNC)
                flags |= OS_TRUNCATE;
        return opened(CHANGE(os->open(full(path, text), flags)), info);
}

static int power_create(const char *path, mode_t mode, struct fuse_file_info *info)
{
        int flags = OS_READ | OS_WRITE | OS_CREATE;
        char text[PATH_BYTES];
        int fd;

        if (info->flags & O_EXCL)
                flags |= OS_EXCLUSIVE;
        if (info->flags & O_TRUNC)
                flags |= OS_TRUNCATE;
        fd = CHANGE(os->open(full(path, text), flags));
        if (fd >= 0 && fchmod(fd, mode)) {
                int failure = -errno;

                os->close(fd);
                return failure;
        }
        return opened(fd, info);
}

static int power_release(const char *path, struct fuse_file_info *info)
{
        return CHANGE(os->close((int)info->fh));
}

static int power_read(const char *path, char *data, size_t size, off_t offset, struct fuse_file_info *info)
{
        return (int)os->pread((int)info->fh, data, size, (uint64_t)offset);
}

static int power_write(const char *path, const char *data, size_t size, off_t offset, struct fuse_file_info *info)
{
        return (int)CHANGE(os->pwrite((int)info->fh, data, size, (uint64_t)offset));
}

static int power_truncate(const char *path, off_t size, struct fuse_file_info *info)
{
        char text[PATH_BYTES];
        int fd, result;

        if (info)
                return CHANGE(os->truncate((int)info->fh, (uint64_t)size));
        fd = CHANGE(os->open(full(path, text), OS_WRITE));
        if (fd < 0)
                return fd;
        result = CHANGE(os->truncate(fd, (uint64_t)size));
        CHANGE(os->close(fd));
        return result;
}

static int power_fallocate(const char *path, int mode, off_t offset, off_t size, struct fuse_file_info *info)
{
        if (!mode)
                return CHANGE(os->allocate((int)info->fh, (uint64_t)offset, (uint64_t)size));
        if (mode == (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE))
                return CHANGE(os->punch((int)info->fh, (uint64_t)offset, (uint64_t)size));
        return -EOPNOTSUPP;
}

static int power_fsync(const char *path, int data_only, struct fuse_file_info *info)
{
        return CHANGE(os->fsync((int)info->fh));
}

static int power_opendir(const char *path, struct fuse_file_info *info)
{
        char text[PATH_BYTES];

        return opened(CHANGE(os->open(full(path, text), OS_READ | OS_DIRECTORY)), info);
}

static int power_readdir(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *info,
                         enum fuse_readdir_flags flags)
{
        int fd = openat((int)info->fh, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        DIR *directory = fd < 0 ? NULL : fdopendir(fd);
        struct dirent *entry;

        if (!directory) {
                int failure = -errno;

                if (fd >= 0)
                        close(fd);
                return failure;
        }
        while ((entry = readdir(directory))) {
                struct stat stat = { .st_ino = entry->d_ino, .st_mode = DTTOIF(entry->d_type) };

                if (fill(buffer, entry->d_name, &stat, 0, 0))
                        break;
        }
        closedir(directory);
        return 0;
}

static int power_statfs(const char *path, struct statvfs *stat)
{
        return result_of(statvfs(root, stat));
}

static void answer(char *line)
{
        unsigned long long position, seed;
        int at = 0;

        line[strcspn(line, "\n")] = 0;
        if (!strcmp(line, "position")) {
                printf("%llu\n", (unsigned long long)os_crash_position());
        } else if (sscanf(line, "cut %llu %llu %n", &position, &seed, &at) == 2 && at) {
                pthread_rwlock_wrlock(&changes);
                printf("%d\n", os_crash_materialise(position, seed, line + at));
                pthread_rwlock_unlock(&changes);
        } else {
                printf("%d\n", -EINVAL);
        }
        fflush(stdout);
}

static void *listen(void *nothing)
{
        char line[PATH_BYTES + 64];

        puts("ready");
        fflush(stdout);
        while (fgets(line, sizeof line, stdin))
                answer(line);
        kill(getpid(), SIGTERM);
        return NULL;
}

static void *power_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
        pthread_t thread;

        config->use_ino = 1;
        config->hard_remove = 1; /* a removed file that is open has no name */
        config->nullpath_ok = 1;
        config->attr_timeout = config->entry_timeout = config->negative_timeout = 0; /* files have several names */
        if (pthread_create(&thread, NULL, listen, NULL))
                abort();
        pthread_detach(thread);
        return NULL;
}

static const struct fuse_operations operations = {
        .init = power_init,
        .getattr = power_getattr,
        .readlink = power_readlink,
        .mkdir = power_mkdir,
        .unlink = power_unlink,
        .rmdir = power_rmdir,
        .symlink = power_symlink,
        .rename = power_rename,
        .link = power_link,
        .chmod = power_chmod,
        .chown = power_chown,
        .utimens = power_utimens,
        .open = power_open,
        .create = power_create,
        .release = power_release,
        .releasedir = power_release,
        .read = power_read,
        .write = power_write,
        .truncate = power_truncate,
        .fallocate = power_fallocate,
        .fsync = power_fsync,
        .fsyncdir = power_fsync,
        .opendir = power_opendir,
        .readdir = power_readdir,
        .statfs = power_statfs,
};

int main(int argc, char **argv)
{
        char *arguments[] = { argv[0], argv[argc - 1], "-f", "-omax_threads=10", NULL };
        char resolved[PATH_BYTES];
        int result;

        if (argc != 3 || !realpath(argv[1], resolved)) {
                fprintf(stderr, "usage: powerfs BACKING MOUNTPOINT\n");
                return 2;
        }
        root = resolved;
        umask(0); /* FUSE has applied that of the caller */
        result = os_crash_begin(root);
        if (result) {
                fprintf(stderr, "powerfs: %s: %s\n", root, strerror(-result));
                return 1;
        }
        result = fuse_main(4, arguments, &operations, NULL);
        os_crash_end();
        os_crash_free();
        return result;
}
