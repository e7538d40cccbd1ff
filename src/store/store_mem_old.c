/* The operations of the driver `mem` that go away (old_ in store.h). A directory is there while an object is below it. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/store_mem_private.h"

enum nebula_status mem_old_write(struct store *store, const char *key, const void *data, uint64_t size, struct nebula_error *error)
{
        return store_mem.put(store, key, data, size, STORE_ALWAYS, NULL, NULL, error);
}

enum nebula_status mem_old_create(struct store *store, const char *key, const void *data, uint64_t size, struct nebula_error *error)
{
        return store_mem.put(store, key, data, size, STORE_IF_ABSENT, NULL, NULL, error);
}

enum nebula_status mem_old_stage(struct store *store, const struct store_object *objects, size_t count,
                                 struct store_staged **ret_staged, struct nebula_error *error)
{
        return mem_upload(store, objects, count, (struct store_upload **)ret_staged, error);
}

enum nebula_status mem_old_place(struct store *store, struct store_staged *staged, struct nebula_error *error)
{
        return mem_publish_as(store, (struct store_upload *)staged, STORE_ALWAYS, error);
}

void mem_old_unstage(struct store *store, struct store_staged *staged)
{
        mem_abort(store, (struct store_upload *)staged);
}

enum nebula_status mem_old_move(struct store *store, const char *from, const char *to, struct nebula_error *error)
{
        enum nebula_status status = store_mem.copy(store, from, to, STORE_ALWAYS, error);

        return status || !strcmp(from, to) ? status : store_remove_one(store, from, error);
}

enum nebula_status mem_old_read_text(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                     struct nebula_error *error)
{
        return mem_get(store, key, limit, ret_text, ret_size, NULL, error);
}

/* Keys below `key`, cut at the next '/'. */
static enum nebula_status list_below(struct store *store, const char *key, struct store_list *ret_list, struct nebula_error *error)
{
        char prefix[STORE_KEY_MAX + 1];
        size_t length = strlen(key);

        if (*key && !store_key_sound(key))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is no key of %s", key, store->root);
        memcpy(prefix, key, length);
        strcpy(prefix + length, length ? "/" : "");
        return store_list_all(store, prefix, false, ret_list, error);
}

enum nebula_status mem_old_stat(struct store *store, const char *key, struct old_entry *ret_entry, struct nebula_error *error)
{
        struct mem_volume *volume = mem_volume_of(store);
        const char *slash = strrchr(key, '/');
        struct old_entry entry = { .name = strdup(slash ? slash + 1 : key) };
        const struct mem_object *object;
        struct store_list list = { 0 };
        enum nebula_status status = list_below(store, key, &list, error);

        entry.is_directory = list.count;
        lock_take(&volume->lock);
        object = status ? NULL : mem_find(volume, key);
        if (object) {
                entry.size = object->size;
                entry.mtime_ns = object->wall_ns;
        }
        lock_give(&volume->lock);
        if (!status && !object && !list.count)
                status = mem_not_found(store, key, error);
        store_list_done(&list);
        if (status)
                old_entry_done(&entry);
        else
                *ret_entry = entry;
        return status;
}

/* These operations count time more finely than the store does. */
static int64_t wall_of(const struct store *store, const char *key)
{
        struct mem_volume *volume = mem_volume_of(store);
        const struct mem_object *object;
        int64_t wall_ns;

        lock_take(&volume->lock);
        object = mem_find(volume, key);
        wall_ns = object ? object->wall_ns : 0;
        lock_give(&volume->lock);
        return wall_ns;
}

enum nebula_status mem_old_list(struct store *store, const char *prefix, struct old_list *ret_list, struct nebula_error *error)
{
        struct old_list list = { 0 };
        struct store_list found;
        enum nebula_status status = list_below(store, prefix, &found, error);

        if (status)
                return status;
        if (!found.count && *prefix)
                status = mem_not_found(store, prefix, error);
        for (size_t i = 0; i < found.count && !status; i++) {
                struct store_entry *entry = &found.entries[i];
                char *slash = strrchr(entry->key, '/');
                struct old_entry old = { .name = slash ? slash + 1 : entry->key, .size = entry->size,
                                         .mtime_ns = wall_of(store, entry->key), .is_directory = entry->is_prefix };

                if (old_list_add(&list, &old))
                        status = mem_no_memory(store, error);
        }
        store_list_done(&found);
        if (status)
                old_list_done(&list);
        else
                *ret_list = list;
        return status;
}

enum nebula_status mem_old_remove(struct store *store, const char *key, struct nebula_error *error)
{
        return store_remove_one(store, key, error);
}

enum nebula_status mem_old_remove_directory(struct store *store, const char *prefix, struct nebula_error *error)
{
        struct store_list list = { 0 };
        enum nebula_status status = *prefix ? list_below(store, prefix, &list, error)
                                            : error_set(error, NEBULA_INVALID, 0, "the root %s is not removed", store->root);

        if (!status && list.count)
                status = error_set(error, NEBULA_STORAGE, 0, "%s/%s: is not empty", store->root, prefix);
        store_list_done(&list);
        return status;
}
