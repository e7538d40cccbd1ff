/* Removal. A victim with a stamp is compared, moved aside, and compared again. If it is another object by then, it is moved back.
 * store.h describes what other processes can see meanwhile. */
#include <errno.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "store/store_file_private.h"

static bool is_victim(const struct store_victim *victim, const struct os_stat *there)
{
        return there->kind != OS_KIND_DIRECTORY && !strcmp(file_stamp(there).text, victim->stamp.text);
}

/* Renames the object to a temporary name that is free. */
static int move_once(struct store *store, const char *key, const char *parent, char ret_temp[FILE_TEMP_MAX])
{
        struct os_stat there;
        int result = file_dirs_ensure(((struct file_store *)store)->dirs, store->root, parent);

        if (result)
                return result;
        do {
                file_temp_name(store, parent, ret_temp);
                result = os->stat_below(store->root, ret_temp, &there);
        } while (!result);
        return result == -ENOENT ? os->rename_below(store->root, key, ret_temp) : result;
}

/* -ENOENT: `key` does not exist. */
static int move_aside(struct store *store, const char *key, char ret_temp[FILE_TEMP_MAX])
{
        char parent[STORE_KEY_MAX];
        struct os_stat there;
        int result = -ENOENT;

        file_temp_parent(key, parent);
        for (int i = 0; i < FILE_TRIES && result == -ENOENT; i++) {
                if (i)
                        file_dirs_forget(((struct file_store *)store)->dirs); /* another removal has removed the directory */
                result = move_once(store, key, parent, ret_temp);
                if (result == -ENOENT && os->stat_below(store->root, key, &there))
                        break;
        }
        return result;
}

static int move_back(const struct store *store, const char *temp, const char *key, const struct os_stat *moved)
{
        int result = file_place_new(store, temp, key, moved);

        if (result == -EEXIST)
                log_event(LOG_LEVEL_WARN, "%s/%s was written twice while it was removed: the first one is at %s", store->root, key, temp);
        else if (!result)
                result = os->unlink_below(store->root, temp);
        return result == -EEXIST || result == -ENOENT ? 0 : result;
}

static int remove_stamped(struct store *store, const struct store_victim *victim)
{
        char temp[FILE_TEMP_MAX];
        struct os_stat there, moved;
        int result = os->stat_below(store->root, victim->key, &there);

        if (result || !is_victim(victim, &there))
                return result;
        result = move_aside(store, victim->key, temp);
        if (!result)
                result = os->stat_below(store->root, temp, &moved);
        if (result)
                return result;
        return is_victim(victim, &moved) ? os->unlink_below(store->root, temp) : move_back(store, temp, victim->key, &moved);
}

/* A directory is not an object, so there is nothing to remove. */
static int remove_one(struct store *store, const struct store_victim *victim)
{
        int result = victim->stamp.text[0] ? remove_stamped(store, victim) : os->unlink_below(store->root, victim->key);

        return result == -ENOENT || result == -ENOTDIR || result == -EISDIR ? 0 : result;
}

/* Needed even if nothing was removed: the process that removed the object may have died before the sync. */
static int sync_parent(const struct store *store, const char *parent)
{
        int result = os_sync_dir_below(store->root, parent);

        return result == -ENOENT || result == -ENOTDIR ? 0 : result;
}

/* Removes the directory and its parents below the root, while they are empty. A directory that stays, or returns after a power loss, is
 * no failure. */
static void remove_empty(struct store *store, const char *directory)
{
        char key[STORE_KEY_MAX], path[STORE_PATH_MAX];

        strcpy(key, directory);
        while (*key) {
                char *slash = strrchr(key, '/');
                int result;

                if (file_path(store, key, path, NULL))
                        return;
                file_dirs_forget_one(((struct file_store *)store)->dirs, path);
                result = os->rmdir_below(store->root, key);
                if (result && result != -ENOENT && result != -ENOTDIR)
                        return;
                key[slash ? slash - key : 0] = 0;
        }
}

void file_remove_empty(struct store *store, const char *key)
{
        char directory[STORE_KEY_MAX];

        file_parent(key, directory);
        remove_empty(store, directory);
        file_temp_parent(key, directory);
        remove_empty(store, directory);
}

typedef void parent_of(const char *key, char ret_parent[STORE_KEY_MAX]);

/* Whether an earlier victim has the same parent. */
static bool is_known_parent(const struct store_victim *victims, size_t at, parent_of *of, const char *parent)
{
        char other[STORE_KEY_MAX];

        for (size_t i = at; i--;) {
                of(victims[i].key, other);
                if (!strcmp(other, parent))
                        return true;
        }
        return false;
}

static int sync_parents(struct store *store, const struct store_victim *victims, size_t count, parent_of *of, size_t *ret_at)
{
        char parent[STORE_KEY_MAX];
        int result = 0;

        for (size_t i = 0; i < count && !result; i++) {
                of(victims[i].key, parent);
                *ret_at = i;
                if (!is_known_parent(victims, i, of, parent))
                        result = sync_parent(store, parent);
        }
        return result;
}

/* Without the sync of the directories of temporary names, an object that was moved aside could lie there after a power loss. */
static int end_removal(struct store *store, const struct store_victim *victims, size_t count, size_t *ret_at)
{
        int result = sync_parents(store, victims, count, file_parent, ret_at);
        char parent[STORE_KEY_MAX];

        if (!result)
                result = sync_parents(store, victims, count, file_temp_parent, ret_at);
        for (size_t i = 0; i < count && !result; i++) {
                file_parent(victims[i].key, parent);
                if (!is_known_parent(victims, i, file_parent, parent))
                        file_remove_empty(store, victims[i].key);
        }
        return result;
}

enum nebula_status file_remove(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        enum nebula_status status = NEBULA_OK;
        size_t at = 0;
        int result = 0;

        for (size_t i = 0; i < count && !status; i++)
                status = *victims[i].key ? file_path(store, victims[i].key, path, error)
                                         : error_set(error, NEBULA_INVALID, 0, "the root of %s is no object", store->root);
        if (status)
                return status;
        for (size_t i = 0; i < count && !result; i++) {
                at = i;
                result = remove_one(store, &victims[i]);
        }
        if (!result)
                result = end_removal(store, victims, count, &at);
        if (!result)
                return NEBULA_OK;
        file_path(store, victims[at].key, path, NULL);
        return file_error(store, "remove", path, result, error);
}
