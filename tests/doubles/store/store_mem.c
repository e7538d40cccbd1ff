/* The reference driver (store_mem.h): the promises of a store, in the simplest correct way. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/store_mem_private.h"

static enum nebula_status mem_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        struct mem_store *mem = calloc(1, sizeof *mem);

        if (mem) {
                mem->store = (struct store){ &store_mem, strdup(url) };
                mem->volume = mem_volume_find(url, true);
        }
        if (!mem || !mem->store.root || !mem->volume) {
                free(mem ? mem->store.root : NULL);
                free(mem);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open %.400s", url);
        }
        *ret_store = &mem->store;
        return NEBULA_OK;
}

static void mem_close(struct store *store)
{
        free(store->root);
        free(store);
}

static unsigned mem_features(struct store *store)
{
        struct mem_volume *volume = mem_volume_of(store);
        bool is_stale;

        lock_take(&volume->lock);
        is_stale = volume->faults.stale_writes || volume->faults.lists_late;
        lock_give(&volume->lock);
        return STORE_COPIES | STORE_PUTS_IF_SAME | STORE_REFERS | (is_stale ? 0 : STORE_LISTS_FRESH);
}

static enum nebula_status begin(struct store *store, const char *key, struct nebula_error *error)
{
        if (!store_key_sound(key))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is not a key of an object of %s", key, store->root);
        return mem_begin(store, key, error);
}

static bool holds(const struct mem_object *there, enum store_condition condition, const struct store_stamp *seen)
{
        if (condition == STORE_ALWAYS)
                return true;
        if (condition == STORE_IF_ABSENT)
                return !there;
        return there && !strcmp(mem_stamp(there).text, seen->text);
}

/* *data becomes NULL when the store has taken it. */
static enum nebula_status write_locked(struct store *store, const char *key, char **data, uint64_t size, uint64_t mark,
                                       enum store_condition condition, const struct store_stamp *seen, struct store_stamp *ret_stamp,
                                       struct nebula_error *error)
{
        struct mem_volume *volume = mem_volume_of(store);

        if (!holds(mem_find(volume, key), condition, seen))
                return error_set(error, NEBULA_BUSY, 0, condition == STORE_IF_ABSENT ? "%s/%s is there already" : "%s/%s has been replaced",
                                 store->root, key);
        if (!mem_set(volume, key, *data, size, ret_stamp))
                return mem_no_memory(store, error);
        *data = NULL;
        mem_find(volume, key)->mark = mark;
        return mem_answer(volume, key, error);
}

enum nebula_status mem_write(struct store *store, const char *key, char *data, uint64_t size, uint64_t mark, enum store_condition condition,
                             const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct mem_volume *volume = mem_volume_of(store);
        enum nebula_status status = begin(store, key, error);
        struct store_stamp stamp;

        if (!status) {
                lock_take(&volume->lock);
                status = write_locked(store, key, &data, size, mark, condition, seen, &stamp, error);
                lock_give(&volume->lock);
        }
        free(data);
        if (!status && ret_stamp)
                *ret_stamp = stamp;
        return status;
}

static enum nebula_status mem_put(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                  const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        char *copy;

        if (condition == STORE_IF_SAME && !seen)
                return error_set(error, NEBULA_INVALID, 0, "%s/%s: the condition STORE_IF_SAME needs a stamp", store->root, key);
        copy = malloc(size + 1);
        if (!copy)
                return mem_no_memory(store, error);
        if (size)
                memcpy(copy, data, size);
        return mem_write(store, key, copy, size, 0, condition, seen, ret_stamp, error);
}

static enum nebula_status read_locked(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size,
                                      struct nebula_error *error)
{
        const struct mem_object *object = mem_find(mem_volume_of(store), key);

        if (!object)
                return mem_not_found(store, key, error);
        if (offset > object->size || size > object->size - offset)
                return error_set(error, NEBULA_CORRUPT, 0, "%s/%s: ends after %" PRIu64 " bytes, %" PRIu64 " were expected",
                                 store->root, key, object->size, offset + size);
        if (size)
                memcpy(data, object->data + offset, size);
        return NEBULA_OK;
}

static enum nebula_status mem_read(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        struct mem_volume *volume = mem_volume_of(store);
        enum nebula_status status = begin(store, key, error);

        if (status)
                return status;
        lock_take(&volume->lock);
        status = read_locked(store, key, data, offset, size, error);
        lock_give(&volume->lock);
        return status;
}

static enum nebula_status get_locked(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                     struct store_stamp *ret_stamp, struct nebula_error *error)
{
        const struct mem_object *object = mem_find(mem_volume_of(store), key);
        char *text;

        if (!object)
                return mem_not_found(store, key, error);
        if (object->size > limit)
                return error_set(error, NEBULA_CORRUPT, 0, "%s/%s: has more than the %zu bytes that are allowed", store->root, key, limit);
        text = malloc(object->size + 1);
        if (!text)
                return mem_no_memory(store, error);
        memcpy(text, object->data, object->size);
        text[object->size] = 0;
        *ret_text = text;
        if (ret_size)
                *ret_size = object->size;
        if (ret_stamp)
                *ret_stamp = mem_stamp(object);
        return NEBULA_OK;
}

enum nebula_status mem_get(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                           struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct mem_volume *volume = mem_volume_of(store);
        enum nebula_status status = begin(store, key, error);

        if (status)
                return status;
        lock_take(&volume->lock);
        status = get_locked(store, key, limit, ret_text, ret_size, ret_stamp, error);
        lock_give(&volume->lock);
        return status;
}

static enum nebula_status mem_read_bulk(struct store *store, const char *key, void *data, uint64_t size, uint32_t chunk_bytes,
                                        store_check *check, void *argument, struct nebula_error *error)
{
        enum nebula_status status = mem_read(store, key, data, 0, size, error);

        if (!chunk_bytes && !status)
                return error_set(error, NEBULA_INVALID, 0, "%s/%s: chunks of no bytes", store->root, key);
        for (uint64_t offset = 0; offset < size && !status && check; offset += chunk_bytes)
                status = check(argument, (char *)data + offset, offset, size - offset < chunk_bytes ? size - offset : chunk_bytes, NULL, error);
        return status;
}

static enum nebula_status mem_read_chunks(struct store *store, const char *key, void *data, const struct store_range *ranges, size_t count,
                                          uint32_t chunk_bytes, store_check *check, void *argument, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < count && !status; i++) {
                uint64_t end = ranges[i].offset + ranges[i].size;

                status = mem_read(store, key, (char *)data + ranges[i].offset, ranges[i].offset, ranges[i].size, error);
                for (uint64_t offset = ranges[i].offset; offset < end && !status && check; offset += chunk_bytes)
                        status = check(argument, (char *)data + offset, offset, end - offset < chunk_bytes ? end - offset : chunk_bytes, NULL,
                                       error);
        }
        return status;
}

static enum nebula_status mem_stat(struct store *store, const char *key, struct store_entry *ret_entry, struct nebula_error *error)
{
        struct mem_volume *volume = mem_volume_of(store);
        enum nebula_status status = begin(store, key, error);
        const struct mem_object *object;
        struct store_entry entry;

        if (status)
                return status;
        lock_take(&volume->lock);
        object = mem_find(volume, key);
        if (object) {
                entry = mem_entry(object);
                entry.key = strdup(key);
                status = entry.key ? NEBULA_OK : mem_no_memory(store, error);
        } else {
                status = mem_not_found(store, key, error);
        }
        lock_give(&volume->lock);
        if (!status)
                *ret_entry = entry;
        return status;
}

static enum nebula_status remove_one(struct store *store, const struct store_victim *victim, struct nebula_error *error)
{
        struct mem_volume *volume = mem_volume_of(store);
        enum nebula_status status = begin(store, victim->key, error);
        struct mem_object *object;

        if (status)
                return status;
        lock_take(&volume->lock);
        object = mem_find(volume, victim->key);
        if (object && (!victim->stamp.text[0] || !strcmp(mem_stamp(object).text, victim->stamp.text))) {
                mem_drop(volume, object);
                status = mem_answer(volume, victim->key, error);
        }
        lock_give(&volume->lock);
        return status;
}

static enum nebula_status mem_remove(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < count && !status; i++)
                status = remove_one(store, &victims[i], error);
        return status;
}

static enum nebula_status mem_clock(struct store *store, int64_t *ret_ns, struct nebula_error *error)
{
        enum nebula_status status = mem_begin(store, "", error);

        if (!status)
                *ret_ns = mem_time(os->wall_ns());
        return status;
}

static enum nebula_status mem_copy(struct store *store, const char *from, const char *to, enum store_condition condition,
                                   struct nebula_error *error)
{
        enum nebula_status status;
        char *data;
        size_t size;

        if (condition == STORE_IF_SAME || !store_key_sound(to))
                return error_set(error, NEBULA_INVALID, 0, "%s/%.300s: no place for a copy", store->root, to);
        status = mem_get(store, from, SIZE_MAX, &data, &size, NULL, error);
        return status ? status : mem_write(store, to, data, size, 0, condition, NULL, NULL, error);
}

static enum nebula_status mem_free_bytes(struct store *store, uint64_t *ret_bytes, struct nebula_error *error)
{
        (void)ret_bytes;
        return error_set(error, NEBULA_NOT_FOUND, 0, "%s has no limit that is known", store->root);
}

const struct store_ops store_mem = {
        .scheme = "mem",
        .open = mem_open,
        .close = mem_close,
        .features = mem_features,
        .put = mem_put,
        .get = mem_get,
        .upload = mem_upload,
        .publish = mem_publish,
        .abort = mem_abort,
        .read = mem_read,
        .read_bulk = mem_read_bulk,
        .read_chunks = mem_read_chunks,
        .list = mem_list,
        .list_after = mem_list_after,
        .stat = mem_stat,
        .remove = mem_remove,
        .clock = mem_clock,
        .copy = mem_copy,
        .free_bytes = mem_free_bytes,
};
