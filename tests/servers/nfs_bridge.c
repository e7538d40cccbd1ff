/*
 * nfs_bridge URL MOUNT COMMAND...: mounts a directory of an NFS server at MOUNT, while COMMAND runs. It is for machines whose kernel has no NFS
 * client: it asks the server through libnfs. URL is one of libnfs: nfs://127.0.0.1/store?nfsport=20491&mountport=20492.
 *
 * COMMAND gets NB_TEST_MOUNT. The exit code is that of COMMAND; 77: FUSE is not usable here; 3: the server does not let the client mount.
 * Nothing is believed for longer than a call. Like the kernel's client it has no flags of renameat2, no fallocate and no user attributes, and it
 * renames an open file that is removed.
 */
#define FUSE_USE_VERSION 31
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <limits.h>
#include <nfsc/libnfs.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>

#include "mounted.h"

static struct nfs_context *nfs;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* libnfs does one call at a time */

/* The result of an expression that calls libnfs: 0 or more, or -errno. */
#define ASK(expression) \
        ({ \
                int asked; \
                pthread_mutex_lock(&lock); \
                asked = (int)(expression); \
                pthread_mutex_unlock(&lock); \
                asked; \
        })

static struct nfsfh *handle_of(const struct fuse_file_info *file)
{
        return (struct nfsfh *)(uintptr_t)file->fh; /* NOLINT: FUSE keeps a number */
}

static void convert(const struct nfs_stat_64 *from, struct stat *to)
{
        *to = (struct stat){
                .st_ino = from->nfs_ino, .st_mode = (mode_t)from->nfs_mode, .st_nlink = from->nfs_nlink, .st_uid = (uid_t)from->nfs_uid,
                .st_gid = (gid_t)from->nfs_gid, .st_size = (off_t)from->nfs_size, .st_blksize = (blksize_t)from->nfs_blksize,
                .st_blocks = (blkcnt_t)from->nfs_blocks, .st_atim = { (time_t)from->nfs_atime, (long)from->nfs_atime_nsec },
                .st_mtim = { (time_t)from->nfs_mtime, (long)from->nfs_mtime_nsec }, .st_ctim = { (time_t)from->nfs_ctime, (long)from->nfs_ctime_nsec },
        };
}

static int get_attributes(const char *path, struct stat *stat, struct fuse_file_info *file)
{
        struct nfs_stat_64 found;
        int result = ASK(file ? nfs_fstat64(nfs, handle_of(file), &found) : nfs_lstat64(nfs, path, &found));

        if (result >= 0)
                convert(&found, stat);
        return result < 0 ? result : 0;
}

static int list(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *file, enum fuse_readdir_flags flags)
{
        struct nfsdir *directory;
        struct nfsdirent *entry;
        int result;

        (void)offset, (void)file, (void)flags;
        pthread_mutex_lock(&lock);
        result = nfs_opendir(nfs, path, &directory);
        if (!result) {
                while ((entry = nfs_readdir(nfs, directory)))
                        fill(buffer, entry->name, NULL, 0, (enum fuse_fill_dir_flags)0);
                nfs_closedir(nfs, directory);
        }
        pthread_mutex_unlock(&lock);
        return result;
}

static int open_file(const char *path, struct fuse_file_info *file)
{
        struct nfsfh *handle;
        int result = ASK(nfs_open(nfs, path, file->flags & (O_ACCMODE | O_APPEND | O_SYNC | O_TRUNC), &handle));

        if (!result)
                file->fh = (uint64_t)(uintptr_t)handle;
        return result;
}

static int create_file(const char *path, mode_t mode, struct fuse_file_info *file)
{
        struct nfsfh *handle;
        int result = ASK(nfs_create(nfs, path, file->flags & (O_EXCL | O_APPEND | O_SYNC | O_TRUNC), (int)(mode & 07777), &handle));

        if (!result)
                file->fh = (uint64_t)(uintptr_t)handle;
        return result;
}

static int read_file(const char *path, char *data, size_t size, off_t offset, struct fuse_file_info *file)
{
        (void)path;
        return ASK(nfs_pread(nfs, handle_of(file), (uint64_t)offset, size, data));
}

static int write_file(const char *path, const char *data, size_t size, off_t offset, struct fuse_file_info *file)
{
        (void)path;
        return ASK(nfs_pwrite(nfs, handle_of(file), (uint64_t)offset, size, data));
}

static int sync_file(const char *path, int data_only, struct fuse_file_info *file)
{
        (void)path, (void)data_only;
        return ASK(nfs_fsync(nfs, handle_of(file)));
}

static int sync_directory(const char *path, int data_only, struct fuse_file_info *file)
{
        (void)path, (void)data_only, (void)file;
        return 0; /* the server makes names durable before it answers */
}

static int release_file(const char *path, struct fuse_file_info *file)
{
        (void)path;
        return ASK(nfs_close(nfs, handle_of(file)));
}

static int make_directory(const char *path, mode_t mode)
{
        return ASK(nfs_mkdir2(nfs, path, (int)mode));
}

static int remove_file(const char *path)
{
        return ASK(nfs_unlink(nfs, path));
}

static int remove_directory(const char *path)
{
        return ASK(nfs_rmdir(nfs, path));
}

static int rename_file(const char *from, const char *to, unsigned flags)
{
        return flags ? -EINVAL : ASK(nfs_rename(nfs, from, to));
}

static int link_file(const char *from, const char *to)
{
        return ASK(nfs_link(nfs, from, to));
}

static int symlink_file(const char *target, const char *path)
{
        return ASK(nfs_symlink(nfs, target, path));
}

static int read_link(const char *path, char *target, size_t size)
{
        return ASK(nfs_readlink(nfs, path, target, (int)size));
}

static int change_mode(const char *path, mode_t mode, struct fuse_file_info *file)
{
        (void)file;
        return ASK(nfs_lchmod(nfs, path, (int)mode));
}

static int change_owner(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *file)
{
        (void)file;
        return ASK(nfs_lchown(nfs, path, (int)uid, (int)gid));
}

static int cut_file(const char *path, off_t size, struct fuse_file_info *file)
{
        return ASK(file ? nfs_ftruncate(nfs, handle_of(file), (uint64_t)size) : nfs_truncate(nfs, path, (uint64_t)size));
}

static struct timeval wanted(const struct timespec *given, const struct timespec *before)
{
        struct timespec time = *given;

        if (given->tv_nsec == UTIME_NOW)
                clock_gettime(CLOCK_REALTIME, &time);
        else if (given->tv_nsec == UTIME_OMIT)
                time = *before;
        return (struct timeval){ time.tv_sec, time.tv_nsec / 1000 };
}

static int set_times(const char *path, const struct timespec times[2], struct fuse_file_info *file)
{
        struct timeval both[2];
        struct stat stat;
        int result = get_attributes(path, &stat, file);

        if (result)
                return result;
        both[0] = wanted(&times[0], &stat.st_atim);
        both[1] = wanted(&times[1], &stat.st_mtim);
        return ASK(nfs_lutimes(nfs, path, both));
}

static int count_space(const char *path, struct statvfs *space)
{
        return ASK(nfs_statvfs(nfs, path, space));
}

static void *begin(struct fuse_conn_info *connection, struct fuse_config *config)
{
        (void)connection;
        config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
        config->use_ino = 1;
        return NULL;
}

static const struct fuse_operations operations = {
        .init = begin, .getattr = get_attributes, .readdir = list, .open = open_file, .create = create_file, .read = read_file, .write = write_file,
        .fsync = sync_file, .fsyncdir = sync_directory, .release = release_file, .mkdir = make_directory, .unlink = remove_file,
        .rmdir = remove_directory, .rename = rename_file, .link = link_file, .symlink = symlink_file, .readlink = read_link, .chmod = change_mode,
        .chown = change_owner, .truncate = cut_file, .utimens = set_times, .statfs = count_space,
};

int main(int argc, char **argv)
{
        struct nfs_url *url = NULL;

        if (argc < 4) {
                fprintf(stderr, "nfs_bridge URL MOUNT COMMAND...\n");
                return 2;
        }
        nfs = nfs_init_context();
        if (nfs)
                url = nfs_parse_url_dir(nfs, argv[1]);
        if (!url || nfs_mount(nfs, url->server, url->path)) {
                fprintf(stderr, "%s: %s\n", argv[1], nfs ? nfs_get_error(nfs) : "no memory");
                return 3;
        }
        nfs_set_dircache(nfs, 0);
        nfs_set_autoreconnect(nfs, -1); /* a hard mount */
        return mounted_while("nfs_bridge", &operations, argv[2], argv + 3);
}
