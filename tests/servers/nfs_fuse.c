/*
 * nfs_fuse BACKING MOUNT CONTROL COMMAND...: shows the directory BACKING at MOUNT as an NFS client would, while COMMAND runs.
 *
 * Two of them over one BACKING are two clients of one server. COMMAND gets NB_TEST_MOUNT. The exit code is that of COMMAND; 77: FUSE is not
 * usable here. CONTROL is a text file that is read again at each call:
 *      ttl_ms N      what was seen of other clients' files is believed so long: attributes, names that are absent, listings
 *      ahead_s N     the server's clock is ahead
 *      squash 1      files belong to nobody, and no owner can be given to them
 *      down 1        the server does not answer: calls wait (a hard mount);  down 2: they fail with EIO (a soft one)
 * Always: a file that another client has removed gives ESTALE; one that this client has open is renamed instead (libfuse does that, as
 * `.fuse_hidden...`); no fallocate, no renameat2 flags, no O_TMPFILE, no user attributes.
 */
#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "mounted.h"

#define NOBODY 65534
#define SLOTS 4096

static char backing[PATH_MAX], control[PATH_MAX];

struct rules {
        long ttl_ms, ahead_s, squash, down;
};

/* What this client has seen of one path. */
struct seen {
        char *path;
        int result; /* 0, or the error */
        struct stat stat;
        char **names; /* of a listing; NULL: none was seen */
        size_t name_count;
        long stat_ms, names_ms; /* when; 0: not seen */
        struct seen *next;      /* another path with the same hash */
};
static struct seen *cache[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static long now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1000 + now.tv_nsec / 1000000 + 1;
}

static struct rules read_rules(void)
{
        struct rules rules = { 0 };
        char name[32];
        long value;
        FILE *file = fopen(control, "re");

        while (file && fscanf(file, "%31s %ld", name, &value) == 2) {
                long *rule = !strcmp(name, "ttl_ms") ? &rules.ttl_ms : !strcmp(name, "ahead_s") ? &rules.ahead_s :
                             !strcmp(name, "squash") ? &rules.squash : !strcmp(name, "down") ? &rules.down : NULL;

                if (rule)
                        *rule = value;
        }
        if (file)
                fclose(file);
        return rules;
}

/* Waits for the server. False: the call fails. */
static bool ask_server(struct rules *ret_rules)
{
        for (;;) {
                *ret_rules = read_rules();
                if (ret_rules->down != 1)
                        return !ret_rules->down;
                usleep(10000);
        }
}

static const char *real(const char *path, char text[PATH_MAX])
{
        snprintf(text, PATH_MAX, "%s%s", backing, path);
        return text;
}

static void forget(struct seen *seen)
{
        for (size_t i = 0; i < seen->name_count; i++)
                free(seen->names[i]);
        free(seen->names);
        *seen = (struct seen){ .path = seen->path, .next = seen->next };
}

/* The entry of the path, which is never lost to that of another path. Lock held. */
static struct seen *take(const char *path)
{
        unsigned hash = 5381;
        struct seen **at;

        for (const char *byte = path; *byte; byte++)
                hash = hash * 33 + (unsigned char)*byte;
        for (at = &cache[hash % SLOTS]; *at && strcmp((*at)->path, path); at = &(*at)->next) {}
        if (!*at) {
                *at = calloc(1, sizeof **at);
                (*at)->path = strdup(path);
        }
        return *at;
}

/* This client has changed something at the path: it forgets what it saw there and in the directory. */
static int changed(const char *path, int result)
{
        char parent[PATH_MAX];
        char *slash;

        if (result < 0)
                return -errno;
        snprintf(parent, sizeof parent, "%s", path);
        slash = strrchr(parent, '/');
        slash[slash == parent] = 0;
        pthread_mutex_lock(&lock);
        forget(take(path));
        forget(take(parent));
        pthread_mutex_unlock(&lock);
        return 0;
}

static void forget_all(void)
{
        pthread_mutex_lock(&lock);
        for (size_t i = 0; i < SLOTS; i++)
                for (struct seen *seen = cache[i]; seen; seen = seen->next)
                        forget(seen);
        pthread_mutex_unlock(&lock);
}

static void show(struct stat *stat, const struct rules *rules)
{
        stat->st_mtim.tv_sec += rules->ahead_s;
        stat->st_ctim.tv_sec += rules->ahead_s;
        stat->st_atim.tv_sec += rules->ahead_s;
        if (rules->squash)
                stat->st_uid = stat->st_gid = NOBODY;
}

static int get_attributes(const char *path, struct stat *stat, struct fuse_file_info *file)
{
        char text[PATH_MAX];
        struct rules rules;
        struct seen *seen;
        int result;

        if (!ask_server(&rules))
                return -EIO;
        if (file) {
                result = fstat((int)file->fh, stat) < 0 ? -errno : !stat->st_nlink ? -ESTALE : 0;
        } else {
                pthread_mutex_lock(&lock);
                seen = take(path);
                if (!seen->stat_ms || now_ms() - seen->stat_ms >= rules.ttl_ms) {
                        seen->result = lstat(real(path, text), &seen->stat) < 0 ? -errno : 0;
                        seen->stat_ms = now_ms();
                }
                result = seen->result;
                *stat = seen->stat;
                pthread_mutex_unlock(&lock);
        }
        show(stat, &rules);
        return result;
}

static int see_names(struct seen *seen, const char *path)
{
        char text[PATH_MAX];
        DIR *directory = opendir(real(path, text));
        struct dirent *entry;

        if (!directory)
                return -errno;
        for (size_t i = 0; i < seen->name_count; i++)
                free(seen->names[i]);
        seen->name_count = 0;
        while ((entry = readdir(directory))) {
                seen->names = realloc(seen->names, (seen->name_count + 1) * sizeof *seen->names);
                seen->names[seen->name_count++] = strdup(entry->d_name);
        }
        closedir(directory);
        seen->names_ms = now_ms();
        return 0;
}

static int list(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *file, enum fuse_readdir_flags flags)
{
        struct rules rules;
        struct seen *seen;
        int result = 0;

        (void)offset, (void)file, (void)flags;
        if (!ask_server(&rules))
                return -EIO;
        pthread_mutex_lock(&lock);
        seen = take(path);
        if (!seen->names_ms || now_ms() - seen->names_ms >= rules.ttl_ms)
                result = see_names(seen, path);
        for (size_t i = 0; !result && i < seen->name_count; i++)
                fill(buffer, seen->names[i], NULL, 0, (enum fuse_fill_dir_flags)0);
        pthread_mutex_unlock(&lock);
        return result;
}

#define UP() \
        char text[PATH_MAX]; \
        struct rules rules; \
        if (!ask_server(&rules)) \
                return -EIO

/* A file that is opened is looked at anew, but a name that was absent is believed to be. */
static int open_file(const char *path, struct fuse_file_info *file)
{
        UP();
        int fd = open(real(path, text), file->flags & ~(O_DIRECT | O_NOFOLLOW));

        if (fd < 0)
                return -errno;
        file->fh = (uint64_t)fd;
        if ((file->flags & O_ACCMODE) != O_RDONLY)
                changed(path, 0);
        return 0;
}

static int create_file(const char *path, mode_t mode, struct fuse_file_info *file)
{
        UP();
        int fd = open(real(path, text), (file->flags & ~(O_DIRECT | O_NOFOLLOW)) | O_CREAT, mode);
        int result = changed(path, fd);

        if (!result)
                file->fh = (uint64_t)fd;
        return result;
}

static int is_stale(int fd)
{
        struct stat stat;

        return fstat(fd, &stat) < 0 || !stat.st_nlink;
}

static int read_file(const char *path, char *data, size_t size, off_t offset, struct fuse_file_info *file)
{
        struct rules rules;
        ssize_t done;

        (void)path;
        if (!ask_server(&rules))
                return -EIO;
        if (is_stale((int)file->fh))
                return -ESTALE;
        done = pread((int)file->fh, data, size, offset);
        return done < 0 ? -errno : (int)done;
}

static int write_file(const char *path, const char *data, size_t size, off_t offset, struct fuse_file_info *file)
{
        struct rules rules;
        ssize_t done;

        if (!ask_server(&rules))
                return -EIO;
        if (is_stale((int)file->fh))
                return -ESTALE;
        done = pwrite((int)file->fh, data, size, offset);
        changed(path, 0);
        return done < 0 ? -errno : (int)done;
}

static int sync_file(const char *path, int data_only, struct fuse_file_info *file)
{
        struct rules rules;

        (void)path, (void)data_only;
        if (!ask_server(&rules))
                return -EIO;
        return fsync((int)file->fh) < 0 ? -errno : 0;
}

static int sync_directory(const char *path, int data_only, struct fuse_file_info *file)
{
        (void)path, (void)data_only, (void)file;
        return 0; /* a server of NFS makes names durable before it answers */
}

static int release_file(const char *path, struct fuse_file_info *file)
{
        (void)path;
        close((int)file->fh);
        return 0;
}

static int make_directory(const char *path, mode_t mode)
{
        UP();
        return changed(path, mkdir(real(path, text), mode));
}

static int remove_file(const char *path)
{
        UP();
        return changed(path, unlink(real(path, text)));
}

static int remove_directory(const char *path)
{
        UP();
        return changed(path, rmdir(real(path, text)));
}

static int rename_file(const char *from, const char *to, unsigned flags)
{
        char target[PATH_MAX];
        int result;

        UP();
        if (flags)
                return -EINVAL;
        result = rename(real(from, text), real(to, target)) < 0 ? -errno : 0;
        forget_all(); /* whole directories may have moved */
        return result;
}

static int link_file(const char *from, const char *to)
{
        char target[PATH_MAX];

        UP();
        int result = changed(to, link(real(from, text), real(to, target)));

        changed(from, 0);
        return result;
}

static int symlink_file(const char *target, const char *path)
{
        UP();
        return changed(path, symlink(target, real(path, text)));
}

static int read_link(const char *path, char *target, size_t size)
{
        UP();
        ssize_t length = readlink(real(path, text), target, size - 1);

        if (length < 0)
                return -errno;
        target[length] = 0;
        return 0;
}

static int change_mode(const char *path, mode_t mode, struct fuse_file_info *file)
{
        (void)file;
        UP();
        return changed(path, chmod(real(path, text), mode));
}

static int change_owner(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *file)
{
        (void)file;
        UP();
        return rules.squash ? -EPERM : changed(path, lchown(real(path, text), uid, gid));
}

static int cut_file(const char *path, off_t size, struct fuse_file_info *file)
{
        UP();
        return changed(path, file ? ftruncate((int)file->fh, size) : truncate(real(path, text), size));
}

static int set_times(const char *path, const struct timespec times[2], struct fuse_file_info *file)
{
        (void)file;
        UP();
        return changed(path, utimensat(AT_FDCWD, real(path, text), times, AT_SYMLINK_NOFOLLOW));
}

static int count_space(const char *path, struct statvfs *space)
{
        UP();
        return statvfs(real(path, text), space) < 0 ? -errno : 0;
}

/* Nothing is left to the kernel's caches: all that is believed is believed here. */
static void *begin(struct fuse_conn_info *connection, struct fuse_config *config)
{
        (void)connection;
        config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
        config->use_ino = 0;
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
        if (argc < 5 || !realpath(argv[1], backing)) {
                fprintf(stderr, "nfs_fuse BACKING MOUNT CONTROL COMMAND...\n");
                return 2;
        }
        snprintf(control, sizeof control, "%s", argv[3]);
        return mounted_while("nfs_fuse", &operations, argv[2], argv + 4);
}
