/* Gives a temporary file its key, and makes the key durable. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/store_file_private.h"

/* Whether the key already has our file: the server did the operation, lost the answer, and was asked again. */
static bool is_ours(const struct store *store, const char *key, const struct os_stat *made, uint32_t more_names)
{
        struct os_stat there;

        return !os->stat_below(store->root, key, &there) && there.device == made->device && there.inode == made->inode &&
               there.link_count >= made->link_count + more_names;
}

/* The file system has no call that prevents a race here: two writers can both succeed, and the later one's object stays. */
static int look_and_rename(const struct store *store, const char *temp, const char *key)
{
        struct os_stat there;
        int result = os->stat_below(store->root, key, &there);

        if (!result)
                return -EEXIST;
        return result == -ENOENT ? os->rename_below(store->root, temp, key) : result;
}

int file_place_new(const struct store *store, const char *temp, const char *key, const struct os_stat *made)
{
        int result = os->link_below(store->root, temp, store->root, key);

        if (result == -EEXIST && is_ours(store, key, made, 1))
                return 0;
        if (result != -EPERM && result != -EOPNOTSUPP && result != -ENOSYS && result != -ELOOP)
                return result;
        /* The file system has no hard links, or the file is a symbolic link, which gets none. */
        result = os->rename_new_below(store->root, temp, key);
        return result == -EINVAL || result == -ENOSYS ? look_and_rename(store, temp, key) : result;
}

static int place_over(const struct store *store, const struct file_placing *placing)
{
        int result = os->rename_below(store->root, placing->temp, placing->key);

        return result == -ENOENT && is_ours(store, placing->key, &placing->made, 0) ? 0 : result;
}

static int place_once(const struct store *store, const struct file_placing *placing, enum store_condition condition)
{
        struct os_stat there;
        int result;

        if (condition == STORE_ALWAYS)
                return place_over(store, placing);
        result = file_place_new(store, placing->temp, placing->key, &placing->made);
        if (result == -EEXIST && !os->stat_below(store->root, placing->key, &there) && there.kind == OS_KIND_DIRECTORY)
                return -EISDIR; /* a directory is not an object: another writer cannot have succeeded */
        return result;
}

int file_place(struct store *store, struct file_placing *placing, enum store_condition condition)
{
        struct file_dirs *dirs = ((struct file_store *)store)->dirs;
        char parent[STORE_KEY_MAX];
        struct os_stat temp;
        int result = place_once(store, placing, condition);

        file_parent(placing->key, parent);
        /* A removal has removed the empty directory. */
        for (int i = 1; i < FILE_TRIES && result == -ENOENT && !os->stat_below(store->root, placing->temp, &temp); i++) {
                file_dirs_forget(dirs);
                result = file_dirs_ensure(dirs, store->root, parent);
                if (!result)
                        result = place_once(store, placing, condition);
        }
        return result;
}

/* -ENOENT: the directory has gone, but not the object. If the object has gone, too, another process has removed it, and there is nothing
 * to sync. */
static int look_for_removed(const struct store *store, const struct file_placing *placing)
{
        struct os_stat there;
        int result = os->stat_below(store->root, placing->key, &there);

        if (!result)
                return there.inode == placing->made.inode ? -ENOENT : 0;
        return result == -ENOENT ? 0 : result;
}

static int sync_one(struct store *store, const struct file_placing *placing, const char *parent)
{
        int result = os_sync_dir_below(store->root, parent);

        if (!result)
                result = file_dirs_confirm(((struct file_store *)store)->dirs, store->root, parent);
        return result == -ENOENT ? look_for_removed(store, placing) : result;
}

/* Each directory once. */
int file_place_sync(struct store *store, const struct file_placing *placings, size_t count, size_t *ret_at)
{
        char parent[STORE_KEY_MAX], other[STORE_KEY_MAX];
        int result = 0;

        for (size_t i = 0; i < count && !result; i++) {
                bool is_synced = false;

                file_parent(placings[i].key, parent);
                for (size_t j = i; j-- && !is_synced;) {
                        file_parent(placings[j].key, other);
                        is_synced = !strcmp(parent, other);
                }
                *ret_at = i;
                if (!is_synced)
                        result = sync_one(store, &placings[i], parent);
        }
        return result;
}

struct store_stamp file_stamp(const struct os_stat *stat)
{
        struct store_stamp stamp;

        snprintf(stamp.text, sizeof stamp.text, "%" PRIu64 "-%" PRIi64 "-%" PRIu64, stat->inode, stat->mtime_ns, stat->size);
        return stamp;
}
