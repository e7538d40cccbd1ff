/* The operations of the driver `file` that go away (old_ in store.h). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/store_file_private.h"

enum nebula_status file_old_write(struct store *store, const char *key, const void *data, uint64_t size, struct nebula_error *error)
{
        return file_put(store, key, data, size, STORE_ALWAYS, NULL, NULL, error);
}

enum nebula_status file_old_create(struct store *store, const char *key, const void *data, uint64_t size, struct nebula_error *error)
{
        return file_put(store, key, data, size, STORE_IF_ABSENT, NULL, NULL, error);
}

enum nebula_status file_old_stage(struct store *store, const struct store_object *objects, size_t count,
                                  struct store_staged **ret_staged, struct nebula_error *error)
{
        return file_upload(store, objects, count, (struct store_upload **)ret_staged, error);
}

enum nebula_status file_old_place(struct store *store, struct store_staged *staged, struct nebula_error *error)
{
        return file_publish_as(store, (struct store_upload *)staged, STORE_ALWAYS, error);
}

void file_old_unstage(struct store *store, struct store_staged *staged)
{
        file_abort(store, (struct store_upload *)staged);
}

enum nebula_status file_old_read_text(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                      struct nebula_error *error)
{
        return file_get(store, key, limit, ret_text, ret_size, NULL, error);
}

static enum nebula_status ensure(struct store *store, const char *directory, const char *path, struct nebula_error *error)
{
        int result = file_dirs_ensure(((struct file_store *)store)->dirs, store->root, directory);

        return result ? file_error(store, "move to", path, result, error) : NEBULA_OK;
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

enum nebula_status file_old_move(struct store *store, const char *from, const char *to, struct nebula_error *error)
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
        status = ensure(store, to_parent, to_path, error);
        if (status)
                goto forget;
        result = os->rename_below(store->root, from, to);
        if (!result)
                result = drop_old_name(store->root, from, to);
        /* The new place first: between the two both names may survive, never none. */
        if (!result)
                result = os_sync_dir_below(store->root, to_parent);
        if (!result && strcmp(from_parent, to_parent))
                result = os_sync_dir_below(store->root, from_parent);
        if (!result)
                return NEBULA_OK;
        status = error_set(error, error_status_of_errno(-result), -result, "can't move %s to %s", from_path, to_path);
forget:
        file_dirs_forget(file->dirs);
        return status;
}

enum nebula_status file_old_stat(struct store *store, const char *key, struct old_entry *ret_entry,
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
                                           .is_directory = found.kind == OS_KIND_DIRECTORY, .is_foreign = file_is_foreign(store, &found) };
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
        entry.is_foreign = file_is_foreign(store, &found);
        return old_list_add(list, &entry) ? -ENOMEM : 0;
}

enum nebula_status file_old_list(struct store *store, const char *prefix, struct old_list *ret_list,
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
                result = os_sync_dir_below(store->root, parent);
                if (result == -ENOENT || result == -ENOTDIR)
                        result = 0;
        }
        return result ? file_error(store, "remove", path, result, error) : NEBULA_OK;
}

enum nebula_status file_old_remove(struct store *store, const char *key, struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        enum nebula_status status = *key ? file_path(store, key, path, error) : NEBULA_INVALID;

        if (status)
                return *key ? status : error_set(error, status, 0, "the root of %s is no object", store->root);
        return end_removal(store, key, path, os->unlink_below(store->root, key), error);
}

enum nebula_status file_old_remove_directory(struct store *store, const char *prefix, struct nebula_error *error)
{
        struct file_store *file = (struct file_store *)store;
        char path[STORE_PATH_MAX];
        enum nebula_status status = *prefix ? file_path(store, prefix, path, error) : NEBULA_INVALID;

        if (status)
                return *prefix ? status : error_set(error, status, 0, "the root %s is not removed", store->root);
        file_dirs_forget_one(file->dirs, path);
        return end_removal(store, prefix, path, os->rmdir_below(store->root, prefix), error);
}
