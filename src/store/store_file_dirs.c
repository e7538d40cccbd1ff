/* A file is durable only when each directory on its path is. An existing directory is no proof: the process that made it may have died
 * before the sync. So a store syncs the path to each directory once, and remembers that. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/store_file_private.h"

#define DIRECTORY_MODE 0777 /* less the umask: other users may read checkpoints */

struct known_dir {
        char *path; /* absolute; NULL: none */
        uint64_t inode;
        int64_t born_ns;
};

struct file_dirs {
        struct lock lock;       /* guards everything below */
        struct known_dir known[FILE_DIRS_KEPT]; /* the oldest is replaced */
        size_t next;
        atomic_uint *mount_length;
};

struct file_dirs *file_dirs_new(atomic_uint *mount_length)
{
        struct file_dirs *dirs = calloc(1, sizeof *dirs);

        if (!dirs)
                return NULL;
        lock_init(&dirs->lock, LOCK_STORE_DIRS);
        dirs->mount_length = mount_length;
        return dirs;
}

void file_dirs_free(struct file_dirs *dirs)
{
        if (!dirs)
                return;
        file_dirs_forget(dirs);
        lock_done(&dirs->lock);
        free(dirs);
}

void file_dirs_forget(struct file_dirs *dirs)
{
        lock_take(&dirs->lock);
        for (size_t i = 0; i < FILE_DIRS_KEPT; i++) {
                free(dirs->known[i].path);
                dirs->known[i].path = NULL;
        }
        lock_give(&dirs->lock);
}

void file_dirs_forget_one(struct file_dirs *dirs, const char *path)
{
        size_t length = strlen(path);

        lock_take(&dirs->lock);
        for (size_t i = 0; i < FILE_DIRS_KEPT; i++) {
                const char *known = dirs->known[i].path;

                if (!known || strncmp(known, path, length) || (known[length] && known[length] != '/'))
                        continue;
                free(dirs->known[i].path);
                dirs->known[i].path = NULL;
        }
        lock_give(&dirs->lock);
}

static const struct known_dir *find_known(const struct file_dirs *dirs, const char *path)
{
        for (size_t i = 0; i < FILE_DIRS_KEPT; i++)
                if (dirs->known[i].path && !strcmp(dirs->known[i].path, path))
                        return &dirs->known[i];
        return NULL;
}

/* Without memory the directory is synced again the next time. */
static void remember(struct file_dirs *dirs, const char *path, const struct os_stat *found)
{
        struct known_dir *known = &dirs->known[dirs->next];

        free(known->path);
        *known = (struct known_dir){ strdup(path), found->inode, found->born_ns };
        dirs->next = (dirs->next + 1) % FILE_DIRS_KEPT;
}

/* Finds the mount point on which `root` lies: the path up to the nearest directory, at or above it, that is on another file system than the
 * directory above. *ret_length: of that path; 0: there is none below "/". */
static int find_mount(const char *root, unsigned *ret_length)
{
        char path[STORE_PATH_MAX];
        struct os_stat found, below;
        size_t length = strlen(root), below_length = 0; /* of the directory below `path`; 0: it is not there */

        snprintf(path, sizeof path, "%s", root);
        *ret_length = 0;
        for (;;) {
                int result = os->stat(*path ? path : "/", true, &found);

                if (result && (result != -ENOENT || !length))
                        return result;
                if (!result && below_length && found.device != below.device) {
                        *ret_length = (unsigned)below_length;
                        return 0;
                }
                if (!length)
                        return 0;
                if (!result)
                        below = found;
                below_length = result ? 0 : length;
                while (length && path[--length] != '/')
                        ;
                path[length] = 0;
        }
}

/* Fails if the mount point on which the root lay is now a directory of the file system below. Files written there would fill the disk below,
 * and be hidden when the mount comes back. If another file system is mounted there, as an automounter does, that is fine. */
static int check_mount(struct file_dirs *dirs, const char *root)
{
        unsigned length;
        int result = find_mount(root, &length);

        if (result)
                return result;
        if (length < atomic_load(dirs->mount_length))
                return -ENODEV;
        atomic_store(dirs->mount_length, length);
        return 0;
}

int file_dirs_look(struct file_dirs *dirs, const char *root)
{
        struct os_stat found;
        int result;

        lock_take(&dirs->lock);
        result = check_mount(dirs, root);
        if (!result)
                result = os->stat(root, true, &found);
        if (!result && found.kind != OS_KIND_DIRECTORY)
                result = -ENOTDIR;
        lock_give(&dirs->lock);
        return result == -ENOENT ? 0 : result;
}

/* Makes the root, unless its mount has gone: then it would be made on the file system below. A root that was removed is made again. */
static int make_root(struct file_dirs *dirs, const char *root)
{
        int result = check_mount(dirs, root);

        if (!result)
                result = os_make_dirs(root, DIRECTORY_MODE);
        return result ? result : check_mount(dirs, root);
}

/* Syncs the entry of the root in its parent directory, which may belong to another user and be closed to us. */
static int sync_above_root(const char *root)
{
        char above[STORE_PATH_MAX];
        char *slash;
        int result;

        snprintf(above, sizeof above, "%s", root);
        slash = strrchr(above, '/');
        slash[slash == above] = 0;
        result = os_sync_dir(above);
        return result == -EACCES || result == -EPERM || result == -EROFS ? 0 : result;
}

/* Makes one directory, if it is missing. -ENOENT: its parent has gone, and is not made again. */
static int make_below(const char *root, const char *key, struct os_stat *ret_found)
{
        int result = os->stat_below(root, key, ret_found);

        if (result == -ENOENT) {
                result = os->mkdir_below(root, key, DIRECTORY_MODE);
                if (result && result != -EEXIST) /* -EEXIST: another node was faster */
                        return result;
                result = os->stat_below(root, key, ret_found);
        }
        if (result)
                return result;
        return ret_found->kind == OS_KIND_DIRECTORY ? 0 : ret_found->kind == OS_KIND_LINK ? -ELOOP : -ENOTDIR;
}

static int ensure_root(struct file_dirs *dirs, const char *root)
{
        struct os_stat found;
        int result;

        if (find_known(dirs, root))
                return check_mount(dirs, root);
        result = make_root(dirs, root);
        if (!result)
                result = sync_above_root(root);
        if (!result)
                result = os->stat_below(root, "", &found);
        if (!result)
                remember(dirs, root, &found);
        return result;
}

/* `path` is <root>/<key>. */
static int ensure_below(struct file_dirs *dirs, const char *path, const char *root, const char *key)
{
        char parent[STORE_KEY_MAX];
        struct os_stat found;
        int result;

        if (find_known(dirs, path))
                return 0;
        file_parent(key, parent);
        result = make_below(root, key, &found);
        if (!result)
                result = os_sync_dir_below(root, parent);
        if (!result)
                remember(dirs, path, &found);
        return result;
}

int file_dirs_ensure(struct file_dirs *dirs, const char *root, const char *directory)
{
        char path[STORE_PATH_MAX];
        size_t root_length = strlen(root), length;
        int result = 0;

        length = (size_t)snprintf(path, sizeof path, "%s%s%s", root, *directory ? "/" : "", directory);
        if (length >= sizeof path)
                return -ENAMETOOLONG;
        lock_take(&dirs->lock);
        if (!find_known(dirs, path))
                result = ensure_root(dirs, root);
        for (size_t i = root_length + 1; i <= length && !result; i++) {
                char kept = path[i];

                if (kept != '/' && kept)
                        continue;
                path[i] = 0;
                result = ensure_below(dirs, path, root, path + root_length + 1);
                path[i] = kept;
        }
        lock_give(&dirs->lock);
        return result;
}

/* Without a creation time, a directory that was removed and made again with the same inode number goes unnoticed. */
int file_dirs_confirm(struct file_dirs *dirs, const char *root, const char *directory)
{
        char path[STORE_PATH_MAX];
        const struct known_dir *known;
        struct os_stat found;
        bool is_same;
        int result = os->stat_below(root, directory, &found);

        if (result)
                return result;
        if (snprintf(path, sizeof path, "%s%s%s", root, *directory ? "/" : "", directory) >= (int)sizeof path)
                return -ENAMETOOLONG;
        lock_take(&dirs->lock);
        known = find_known(dirs, path);
        is_same = known && known->inode == found.inode && known->born_ns == found.born_ns;
        lock_give(&dirs->lock);
        if (is_same)
                return 0;
        file_dirs_forget(dirs);
        return file_dirs_ensure(dirs, root, directory);
}
