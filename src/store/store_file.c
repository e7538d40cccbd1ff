/*
 * Storage in a directory: local disks and what is mounted, NFS included.
 * Nothing here depends on O_DIRECT, fallocate or a fresh cached listing.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/bulk.h"
#include "os/os.h"
#include "store/store_private.h"

enum nebula_status file_path(const struct store *store, const char *key, char ret_path[STORE_PATH_MAX],
                             struct nebula_error *error)
{
        if (*key && !store_key_sound(key))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is no key of a stored object", key);
        if (snprintf(ret_path, STORE_PATH_MAX, "%s%s%s", store->root, *key ? "/" : "", key) >= STORE_PATH_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the path of \"%.200s\" in %.200s is too long", key, store->root);
        return NEBULA_OK;
}

enum nebula_status file_error(const struct store *store, const char *what, const char *path, int result,
                              struct nebula_error *error)
{
        char text[400];

        /* What is read there is no part of the store; what is to be written can be, once the link has been moved away. */
        if (result == -ELOOP && (!strcmp(what, "read") || !strcmp(what, "find") || !strcmp(what, "list")))
                return error_set(error, NEBULA_CORRUPT, ELOOP,
                                 "can't %s %.300s: a part of it is a symbolic link, and none is followed below %.300s: put there what it leads to",
                                 what, path, store->root);
        if (result == -ENODEV)
                return error_set(error, NEBULA_STORAGE, ENODEV, "can't %s %s: %s is gone, and with it its file system",
                                 what, path, store->root);
        /* Of what is looked for and not there nothing is to be explained. */
        if (error && (result != -ENOENT || !strcmp(what, "write")) && file_obstacle(path, result, text, sizeof text))
                return error_set(error, error_status_of_errno(-result), -result, "can't %s %.200s: %s", what, path, text);
        return error_set(error, error_status_of_errno(-result), -result, "can't %s %s", what, path);
}

void file_parent(const char *key, char ret_directory[STORE_KEY_MAX])
{
        const char *slash = strrchr(key, '/');
        size_t length = slash ? (size_t)(slash - key) : 0;

        memcpy(ret_directory, key, length);
        ret_directory[length] = 0;
}

enum nebula_status file_ensure(struct store *store, const char *directory, const char *what, const char *path,
                               struct nebula_error *error)
{
        struct file_store *file = (struct file_store *)store;
        int result = file_dirs_ensure(file->dirs, store->root, directory);

        return result ? file_error(store, what, path, result, error) : NEBULA_OK;
}

int file_sync_directory(const struct store *store, const char *directory)
{
        return os_sync_dir_below(store->root, directory);
}

static enum nebula_status file_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        const char *path = strncmp(url, "file://", 7) ? url : url + 7;
        size_t length = strlen(path);
        struct file_store *file;
        uint32_t first = 0;

        if (path[0] != '/')
                return error_set(error, NEBULA_INVALID, 0, "the storage path \"%.400s\" is not absolute", url);
        while (length > 1 && path[length - 1] == '/')
                length--;
        if (length >= STORE_PATH_MAX - STORE_KEY_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the storage path \"%.200s...\" is too long", url);
        file = calloc(1, sizeof *file);
        if (!file)
                goto no_memory;
        os_offer_ring();
        file->store.ops = &store_file;
        file->store.root = strndup(path, length);
        file->dirs = file_dirs_new();
        if (!file->store.root || !file->dirs)
                goto no_memory;
        /* Another node may have our pid and share this directory. */
        os->random(&first, sizeof first);
        atomic_init(&file->temp_count, first);
        atomic_init(&file->given_uid, 0);
        *ret_store = &file->store;
        return NEBULA_OK;
no_memory:
        if (file) {
                file_dirs_free(file->dirs);
                free(file->store.root);
                free(file);
        }
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open %.400s", url);
}

static void file_close(struct store *store)
{
        struct file_store *file = (struct file_store *)store;

        file_dirs_free(file->dirs);
        free(store->root);
        free(file);
}

/* rename does nothing when both names are one file, as after a crash or a hard link: then the old one goes apart. */
static int drop_old_name(const char *root, const char *from, const char *to)
{
        struct os_stat old, new;
        int result = os->stat_below(root, from, &old);

        if (!result)
                result = os->stat_below(root, to, &new);
        if (!result && old.device == new.device && old.inode == new.inode)
                result = os->unlink_below(root, from);
        return result == -ENOENT ? 0 : result;
}

static enum nebula_status file_old_move(struct store *store, const char *from, const char *to, struct nebula_error *error)
{
        struct file_store *file = (struct file_store *)store;
        char from_path[STORE_PATH_MAX], to_path[STORE_PATH_MAX];
        char from_parent[STORE_KEY_MAX], to_parent[STORE_KEY_MAX];
        struct os_stat found;
        enum nebula_status status = file_path(store, from, from_path, error);
        int result;

        if (!status)
                status = file_path(store, to, to_path, error);
        if (status)
                return status;
        if (!strcmp(from, to))
                return NEBULA_OK;
        /* First, so that no directory is made for what isn't there. */
        result = os->stat_below(store->root, from, &found);
        if (result)
                return file_error(store, "move", from_path, result, error);
        file_parent(from, from_parent);
        file_parent(to, to_parent);
        status = file_ensure(store, to_parent, "move to", to_path, error);
        if (status)
                goto forget;
        result = os->rename_below(store->root, from, to);
        if (!result)
                result = drop_old_name(store->root, from, to);
        /* The new place first: between the two both names may survive, never none. */
        if (!result)
                result = file_sync_directory(store, to_parent);
        if (!result && strcmp(from_parent, to_parent))
                result = file_sync_directory(store, from_parent);
        if (!result)
                return NEBULA_OK;
        status = error_set(error, error_status_of_errno(-result), -result, "can't move %s to %s", from_path, to_path);
forget:
        file_dirs_forget(file->dirs);
        return status;
}

/* A server may give our files to another user (root_squash): then what it gave the last one to is ours as well. */
static bool is_foreign(const struct store *store, const struct os_stat *found)
{
        const struct file_store *file = (const struct file_store *)store;
        uint64_t given = atomic_load(&file->given_uid);

        return found->uid != os->uid() && found->uid + UINT64_C(1) != given;
}

static enum nebula_status file_old_stat(struct store *store, const char *key, struct old_entry *ret_entry,
                                    struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        struct os_stat found;
        const char *slash = strrchr(key, '/');
        enum nebula_status status = file_path(store, key, path, error);
        char *name;
        int result;

        if (status)
                return status;
        result = os->stat_below(store->root, key, &found);
        if (!result && found.kind == OS_KIND_LINK)
                result = -ELOOP;
        if (result)
                return file_error(store, "find", path, result == -ENOTDIR ? -ENOENT : result, error);
        name = strdup(slash ? slash + 1 : key);
        if (!name)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to look at %s", path);
        *ret_entry = (struct old_entry){ .name = name, .size = found.size, .mtime_ns = found.mtime_ns,
                                           .is_directory = found.kind == OS_KIND_DIRECTORY, .is_foreign = is_foreign(store, &found) };
        return NEBULA_OK;
}

/* One entry of a listing; what has gone since is left out. A directory that may not be searched must not look like an empty one. */
static int list_one(const struct store *store, struct os_dir *dir, const char *name, struct old_list *list)
{
        struct old_entry entry = { .name = (char *)(uintptr_t)name };
        struct os_stat found;
        int result = os->stat_entry(dir, name, &found);

        if (result)
                return result == -ENOENT ? 0 : result;
        entry.size = found.size;
        entry.mtime_ns = found.mtime_ns;
        entry.is_directory = found.kind == OS_KIND_DIRECTORY;
        entry.is_link = found.kind == OS_KIND_LINK;
        entry.is_foreign = is_foreign(store, &found);
        return old_list_add(list, &entry) ? -ENOMEM : 0;
}

static enum nebula_status file_old_list(struct store *store, const char *prefix, struct old_list *ret_list,
                                    struct nebula_error *error)
{
        char path[STORE_PATH_MAX], name[256];
        struct old_list list = { 0 };
        struct os_dir *dir;
        enum nebula_status status = file_path(store, prefix, path, error);
        int result;

        if (status)
                return status;
        result = os->opendir_below(store->root, prefix, &dir);
        if (result == -ENOTDIR && *prefix) /* but a root that is no directory must not look like an empty one */
                result = -ENOENT;
        if (result)
                return file_error(store, "list", path, result, error);
        while ((result = os->readdir(dir, name, sizeof name)) > 0) {
                result = list_one(store, dir, name, &list);
                if (result)
                        break;
        }
        os->closedir(dir);
        if (result) {
                old_list_done(&list);
                return file_error(store, "list", path, result, error);
        }
        *ret_list = list;
        return NEBULA_OK;
}

/* Also when it was gone already: whoever removed it may have died before the sync. */
static enum nebula_status end_removal(struct store *store, const char *key, const char *path, int result,
                                      struct nebula_error *error)
{
        char parent[STORE_KEY_MAX];

        if (!result || result == -ENOENT || result == -ENOTDIR) {
                file_parent(key, parent);
                result = file_sync_directory(store, parent);
                if (result == -ENOENT || result == -ENOTDIR)
                        result = 0;
        }
        return result ? file_error(store, "remove", path, result, error) : NEBULA_OK;
}

static enum nebula_status file_old_remove(struct store *store, const char *key, struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        enum nebula_status status = *key ? file_path(store, key, path, error) : NEBULA_INVALID;

        if (status)
                return *key ? status : error_set(error, status, 0, "the root of %s is no object", store->root);
        return end_removal(store, key, path, os->unlink_below(store->root, key), error);
}

static enum nebula_status file_old_remove_directory(struct store *store, const char *prefix, struct nebula_error *error)
{
        struct file_store *file = (struct file_store *)store;
        char path[STORE_PATH_MAX];
        enum nebula_status status = *prefix ? file_path(store, prefix, path, error) : NEBULA_INVALID;

        if (status)
                return *prefix ? status : error_set(error, status, 0, "the root %s is not removed", store->root);
        file_dirs_forget_one(file->dirs, path);
        return end_removal(store, prefix, path, os->rmdir_below(store->root, prefix), error);
}

/* Of the nearest directory that is there: the first write makes the rest. */
static enum nebula_status file_free_bytes(struct store *store, uint64_t *ret_bytes, struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        struct os_space space;
        int result;

        snprintf(path, sizeof path, "%s", store->root);
        while ((result = os->space(path, &space)) == -ENOENT && path[1]) {
                char *slash = strrchr(path, '/');

                slash[slash == path] = 0;
        }
        if (result)
                return file_error(store, "ask for the free space of", store->root, result, error);
        *ret_bytes = space.free_bytes;
        return NEBULA_OK;
}

const struct store_ops store_file = {
        .scheme = "file",
        .open = file_open,
        .close = file_close,
        .old_write = file_old_write,
        .old_create = file_old_create,
        .old_stage = file_old_stage,
        .old_place = file_old_place,
        .old_unstage = file_old_unstage,
        .old_move = file_old_move,
        .read = file_read,
        .old_read_text = file_old_read_text,
        .read_bulk = file_read_bulk,
        .open_read = file_open_read,
        .old_stat = file_old_stat,
        .old_list = file_old_list,
        .old_remove = file_old_remove,
        .old_remove_directory = file_old_remove_directory,
        .free_bytes = file_free_bytes,
};
