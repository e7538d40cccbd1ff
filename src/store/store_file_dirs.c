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
        bool has_device;
        uint64_t device;            /* of the root, when it last existed */
        atomic_bool *is_mount;      /* it was on another file system than its parent */
};

struct file_dirs *file_dirs_new(atomic_bool *is_mount)
{
        struct file_dirs *dirs = calloc(1, sizeof *dirs);

        if (!dirs)
                return NULL;
        lock_init(&dirs->lock, LOCK_STORE_DIRS);
        dirs->is_mount = is_mount;
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

/* The device of the nearest directory that exists, at or above `path`. */
static int nearest_device(const char *path, uint64_t *ret_device, bool *ret_is_itself)
{
        char above[STORE_PATH_MAX];
        struct os_stat found;
        int result;

        snprintf(above, sizeof above, "%s", path);
        *ret_is_itself = true;
        while ((result = os->stat(above, true, &found)) == -ENOENT && above[1]) {
                char *slash = strrchr(above, '/');

                *ret_is_itself = false;
                slash[slash == above] = 0;
        }
        if (!result)
                *ret_device = found.device;
        return result;
}

/* Fails if the root was a mount point and is now a directory of the file system below. Files written there would fill the disk below,
 * and be hidden when the mount comes back. If another file system is mounted there, as an automounter does, that is fine. */
static int check_mount(struct file_dirs *dirs, const char *root)
{
        char above[STORE_PATH_MAX + 4];
        struct os_stat found, parent;
        int result = os->stat(root, true, &found);

        snprintf(above, sizeof above, "%s/..", root);
        if (result || os->stat(above, true, &parent))
                return result == -ENOENT ? 0 : result;
        if (atomic_load(dirs->is_mount) && found.device == parent.device)
                return -ENODEV;
        atomic_store(dirs->is_mount, found.device != parent.device);
        return 0;
}

/* -ENODEV: the root is not there, and the directory above it is on another file system than the root was. */
static int check_device(const struct file_dirs *dirs, const char *root, uint64_t *ret_device, bool *ret_is_there)
{
        int result = nearest_device(root, ret_device, ret_is_there);

        return !result && !*ret_is_there && dirs->has_device && *ret_device != dirs->device ? -ENODEV : result;
}

int file_dirs_look(struct file_dirs *dirs, const char *root)
{
        struct os_stat found;
        uint64_t device = 0;
        bool is_there;
        int result;

        lock_take(&dirs->lock);
        result = check_device(dirs, root, &device, &is_there);
        if (!result && is_there)
                result = os->stat(root, true, &found);
        if (!result && is_there && found.kind != OS_KIND_DIRECTORY)
                result = -ENOTDIR;
        if (!result && is_there)
                result = check_mount(dirs, root);
        if (!result && is_there) {
                dirs->has_device = true;
                dirs->device = device;
        }
        lock_give(&dirs->lock);
        return result;
}

/* Makes the root, unless its mount has gone: then it would be made on the file system below. A root that was removed is made again. */
static int make_root(struct file_dirs *dirs, const char *root)
{
        uint64_t device = 0;
        bool is_there;
        int result = check_device(dirs, root, &device, &is_there);

        if (!result)
                result = os_make_dirs(root, DIRECTORY_MODE);
        if (!result)
                result = check_mount(dirs, root);
        if (result)
                return result;
        dirs->has_device = true;
        dirs->device = device;
        return 0;
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
