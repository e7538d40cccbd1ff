/*
 * The reference driver: what a store has to do, in the simplest way that is
 * right. An array of objects under one lock; directories are what lies
 * between slashes, as in an object store, but are kept until removed.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/store_private.h"

struct mem_object {
        char *key;
        char *data; /* NULL: a directory */
        uint64_t size;
        int64_t mtime_ns;
};

struct store_staged {
        size_t count;
        struct mem_object objects[];
};

struct mem_store {
        struct store store;
        pthread_mutex_t lock; /* guards everything below */
        struct mem_object *objects;
        size_t count, capacity;
};

static enum nebula_status no_memory(struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an object of the memory store");
}

static struct mem_object *find(struct mem_store *mem, const char *key)
{
        for (size_t i = 0; i < mem->count; i++)
                if (!strcmp(mem->objects[i].key, key))
                        return &mem->objects[i];
        return NULL;
}

static void drop(struct mem_store *mem, struct mem_object *object)
{
        free(object->key);
        free(object->data);
        *object = mem->objects[--mem->count];
}

static enum nebula_status mem_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        struct mem_store *mem = calloc(1, sizeof *mem);

        if (mem)
                mem->store.root = strdup(url);
        if (!mem || !mem->store.root) {
                free(mem);
                return no_memory(error);
        }
        mem->store.ops = &store_mem;
        pthread_mutex_init(&mem->lock, NULL);
        *ret_store = &mem->store;
        return NEBULA_OK;
}

static void mem_close(struct store *store)
{
        struct mem_store *mem = (struct mem_store *)store;

        while (mem->count)
                drop(mem, &mem->objects[mem->count - 1]);
        pthread_mutex_destroy(&mem->lock);
        free(mem->objects);
        free(store->root);
        free(mem);
}

static enum nebula_status check_key(const struct store *store, const char *key, struct nebula_error *error)
{
        if (store_key_sound(key))
                return NEBULA_OK;
        return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is no key of an object of %s", key, store->root);
}

static enum nebula_status not_found(const struct store *store, const char *key, struct nebula_error *error)
{
        return error_set(error, NEBULA_NOT_FOUND, 0, "%s/%s: there is no such object", store->root, key);
}

/* Takes `data` over, also when it fails. */
static enum nebula_status put_locked(struct mem_store *mem, const char *key, char *data, uint64_t size,
                                     struct nebula_error *error)
{
        struct mem_object *object = find(mem, key);

        if (object && !object->data != !data) {
                free(data);
                return data ? error_set(error, NEBULA_STORAGE, 0, "%s/%s: is a directory", mem->store.root, key)
                            : error_set(error, NEBULA_STORAGE, 0, "%s/%s: is not a directory", mem->store.root, key);
        }
        if (!object && mem->count == mem->capacity) {
                size_t capacity = mem->capacity * 2 + 16;
                struct mem_object *grown = realloc(mem->objects, capacity * sizeof *grown);

                if (!grown) {
                        free(data);
                        return no_memory(error);
                }
                mem->objects = grown;
                mem->capacity = capacity;
        }
        if (!object) {
                char *copy = strdup(key);

                if (!copy) {
                        free(data);
                        return no_memory(error);
                }
                object = &mem->objects[mem->count++];
                *object = (struct mem_object){ .key = copy };
        }
        free(object->data);
        object->data = data;
        object->size = size;
        object->mtime_ns = os->wall_ns();
        return NEBULA_OK;
}

static enum nebula_status make_parents_locked(struct mem_store *mem, const char *key, struct nebula_error *error)
{
        char parent[STORE_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        for (const char *slash = strchr(key, '/'); slash && !status; slash = strchr(slash + 1, '/')) {
                memcpy(parent, key, (size_t)(slash - key));
                parent[slash - key] = 0;
                status = put_locked(mem, parent, NULL, 0, error);
        }
        return status;
}

static enum nebula_status mem_old_write(struct store *store, const char *key, const void *data, uint64_t size,
                                    struct nebula_error *error)
{
        struct mem_store *mem = (struct mem_store *)store;
        enum nebula_status status = check_key(store, key, error);
        char *copy;

        if (status)
                return status;
        copy = malloc(size + 1); /* never NULL for an empty object: NULL is a directory */
        if (!copy)
                return no_memory(error);
        if (size)
                memcpy(copy, data, size);
        pthread_mutex_lock(&mem->lock);
        status = make_parents_locked(mem, key, error);
        if (!status)
                status = put_locked(mem, key, copy, size, error);
        else
                free(copy);
        pthread_mutex_unlock(&mem->lock);
        return status;
}

static enum nebula_status mem_old_create(struct store *store, const char *key, const void *data, uint64_t size,
                                     struct nebula_error *error)
{
        struct mem_store *mem = (struct mem_store *)store;
        enum nebula_status status = check_key(store, key, error);
        char *copy = status ? NULL : malloc(size + 1);

        if (status)
                return status;
        if (!copy)
                return no_memory(error);
        if (size)
                memcpy(copy, data, size);
        pthread_mutex_lock(&mem->lock);
        if (find(mem, key))
                status = error_set(error, NEBULA_BUSY, 0, "%s is there already", key);
        else
                status = make_parents_locked(mem, key, error);
        if (status)
                free(copy);
        else
                status = put_locked(mem, key, copy, size, error);
        pthread_mutex_unlock(&mem->lock);
        return status;
}

static void mem_old_unstage(struct store *store, struct store_staged *staged)
{
        (void)store;
        for (size_t i = 0; staged && i < staged->count; i++) {
                free(staged->objects[i].key);
                free(staged->objects[i].data);
        }
        free(staged);
}

static enum nebula_status mem_old_stage(struct store *store, const struct store_object *objects, size_t count,
                                    struct store_staged **ret_staged, struct nebula_error *error)
{
        struct store_staged *staged = calloc(1, sizeof *staged + count * sizeof *staged->objects);
        enum nebula_status status = staged ? NEBULA_OK : no_memory(error);

        for (size_t i = 0; !status && i < count; i++) {
                struct mem_object *object = &staged->objects[i];

                status = check_key(store, objects[i].key, error);
                if (!status && objects[i].feed && !bulk_feed_wait(objects[i].feed))
                        status = error_set(error, NEBULA_STORAGE, 0, "%s was given up by its writer", objects[i].key);
                if (status)
                        break;
                *object = (struct mem_object){ .key = strdup(objects[i].key), .data = malloc(objects[i].size + 1), .size = objects[i].size };
                staged->count = i + 1;
                if (!object->key || !object->data)
                        status = no_memory(error);
                else if (object->size)
                        memcpy(object->data, objects[i].data, object->size);
        }
        if (status)
                mem_old_unstage(store, staged);
        else
                *ret_staged = staged;
        return status;
}

static enum nebula_status mem_old_place(struct store *store, struct store_staged *staged, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; !status && i < staged->count; i++)
                status = mem_old_write(store, staged->objects[i].key, staged->objects[i].data, staged->objects[i].size, error);
        mem_old_unstage(store, staged);
        return status;
}

static enum nebula_status mem_old_move(struct store *store, const char *from, const char *to, struct nebula_error *error)
{
        struct mem_store *mem = (struct mem_store *)store;
        struct mem_object *object;
        enum nebula_status status = check_key(store, from, error);

        if (!status)
                status = check_key(store, to, error);
        if (status || !strcmp(from, to))
                return status;
        pthread_mutex_lock(&mem->lock);
        object = find(mem, from);
        if (!object || !object->data)
                status = not_found(store, from, error);
        if (!status)
                status = make_parents_locked(mem, to, error);
        if (!status) {
                char *data;
                uint64_t size;

                object = find(mem, from); /* the array may have moved */
                data = object->data;
                size = object->size;
                object->data = NULL;
                drop(mem, object);
                status = put_locked(mem, to, data, size, error);
        }
        pthread_mutex_unlock(&mem->lock);
        return status;
}

static enum nebula_status read_locked(struct mem_store *mem, const char *key, void *data, uint64_t offset, uint64_t size,
                                      struct nebula_error *error)
{
        const struct mem_object *object = find(mem, key);

        if (!object)
                return not_found(&mem->store, key, error);
        if (!object->data)
                return error_set(error, NEBULA_STORAGE, 0, "%s/%s: is a directory", mem->store.root, key);
        if (offset > object->size || size > object->size - offset)
                return error_set(error, NEBULA_CORRUPT, 0, "%s/%s: ends after %" PRIu64 " bytes, %" PRIu64 " were expected",
                                 mem->store.root, key, object->size, offset + size);
        if (size)
                memcpy(data, object->data + offset, size);
        return NEBULA_OK;
}

static enum nebula_status mem_read(struct store *store, const char *key, void *data, uint64_t offset, uint64_t size,
                                   struct nebula_error *error)
{
        struct mem_store *mem = (struct mem_store *)store;
        enum nebula_status status = check_key(store, key, error);

        if (status)
                return status;
        pthread_mutex_lock(&mem->lock);
        status = read_locked(mem, key, data, offset, size, error);
        pthread_mutex_unlock(&mem->lock);
        return status;
}

static enum nebula_status mem_old_read_text(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                        struct nebula_error *error)
{
        struct mem_store *mem = (struct mem_store *)store;
        enum nebula_status status = check_key(store, key, error);
        const struct mem_object *object;
        uint64_t size;
        char *text;

        if (status)
                return status;
        pthread_mutex_lock(&mem->lock);
        object = find(mem, key);
        size = object ? object->size : 0;
        text = size > limit ? NULL : malloc(size + 1);
        if (size > limit)
                status = error_set(error, NEBULA_CORRUPT, 0, "%s/%s: has more than the %zu bytes that are allowed", store->root, key, limit);
        else if (!text)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %" PRIu64 " bytes of %s/%s", size, store->root, key);
        else
                status = read_locked(mem, key, text, 0, size, error);
        pthread_mutex_unlock(&mem->lock);
        if (status) {
                free(text);
                return status;
        }
        text[size] = 0;
        *ret_text = text;
        *ret_size = size;
        return NEBULA_OK;
}

static enum nebula_status mem_read_bulk(struct store *store, const char *key, void *data, uint64_t size,
                                        uint32_t chunk_bytes, store_check *check, void *argument,
                                        struct nebula_error *error)
{
        enum nebula_status status = mem_read(store, key, data, 0, size, error);

        if (!chunk_bytes && !status)
                return error_set(error, NEBULA_INVALID, 0, "%s/%s: chunks of no bytes", store->root, key);
        for (uint64_t offset = 0; offset < size && !status && check; offset += chunk_bytes)
                status = check(argument, (char *)data + offset, offset,
                               size - offset < chunk_bytes ? size - offset : chunk_bytes, error);
        return status;
}

static struct old_entry entry_of(const struct mem_object *object)
{
        char *slash = strrchr(object->key, '/');

        return (struct old_entry){ .name = slash ? slash + 1 : object->key, .size = object->size,
                                     .mtime_ns = object->mtime_ns, .is_directory = !object->data };
}

static enum nebula_status mem_old_stat(struct store *store, const char *key, struct old_entry *ret_entry,
                                   struct nebula_error *error)
{
        struct mem_store *mem = (struct mem_store *)store;
        struct old_entry entry = { 0 };
        const struct mem_object *object;
        enum nebula_status status = check_key(store, key, error);

        if (status)
                return status;
        pthread_mutex_lock(&mem->lock);
        object = find(mem, key);
        if (object) {
                entry = entry_of(object);
                entry.name = strdup(entry.name);
                status = entry.name ? NEBULA_OK : no_memory(error);
        } else {
                status = not_found(store, key, error);
        }
        pthread_mutex_unlock(&mem->lock);
        if (!status)
                *ret_entry = entry;
        return status;
}

/* The part of `key` below the directory `prefix`, or NULL. */
static const char *below(const char *key, const char *prefix)
{
        size_t length = strlen(prefix);

        if (!length)
                return key;
        return !strncmp(key, prefix, length) && key[length] == '/' ? key + length + 1 : NULL;
}

static enum nebula_status mem_old_list(struct store *store, const char *prefix, struct old_list *ret_list,
                                   struct nebula_error *error)
{
        struct mem_store *mem = (struct mem_store *)store;
        struct old_list list = { 0 };
        const struct mem_object *directory;
        enum nebula_status status = *prefix ? check_key(store, prefix, error) : NEBULA_OK;

        if (status)
                return status;
        pthread_mutex_lock(&mem->lock);
        directory = find(mem, prefix);
        if (*prefix && (!directory || directory->data))
                status = not_found(store, prefix, error);
        for (size_t i = 0; i < mem->count && !status; i++) {
                const char *rest = below(mem->objects[i].key, prefix);
                struct old_entry entry = entry_of(&mem->objects[i]);

                if (rest && !strchr(rest, '/') && old_list_add(&list, &entry))
                        status = no_memory(error);
        }
        pthread_mutex_unlock(&mem->lock);
        if (status)
                old_list_done(&list);
        else
                *ret_list = list;
        return status;
}

static enum nebula_status mem_old_remove(struct store *store, const char *key, struct nebula_error *error)
{
        struct mem_store *mem = (struct mem_store *)store;
        struct mem_object *object;
        enum nebula_status status = check_key(store, key, error);

        if (status)
                return status;
        pthread_mutex_lock(&mem->lock);
        object = find(mem, key);
        if (object && !object->data)
                status = error_set(error, NEBULA_STORAGE, 0, "%s/%s: is a directory", store->root, key);
        else if (object)
                drop(mem, object);
        pthread_mutex_unlock(&mem->lock);
        return status;
}

static enum nebula_status mem_old_remove_directory(struct store *store, const char *prefix, struct nebula_error *error)
{
        struct mem_store *mem = (struct mem_store *)store;
        struct mem_object *object;
        enum nebula_status status = check_key(store, prefix, error);

        if (status)
                return status;
        pthread_mutex_lock(&mem->lock);
        object = find(mem, prefix);
        if (object && object->data)
                status = error_set(error, NEBULA_STORAGE, 0, "%s/%s: is not a directory", store->root, prefix);
        for (size_t i = 0; i < mem->count && !status; i++)
                if (below(mem->objects[i].key, prefix))
                        status = error_set(error, NEBULA_STORAGE, 0, "%s/%s: is not empty", store->root, prefix);
        if (object && !status)
                drop(mem, object);
        pthread_mutex_unlock(&mem->lock);
        return status;
}

static enum nebula_status mem_free_bytes(struct store *store, uint64_t *ret_bytes, struct nebula_error *error)
{
        (void)store;
        (void)error;
        *ret_bytes = os->memory_free();
        return NEBULA_OK;
}

const struct store_ops store_mem = {
        .scheme = "mem",
        .open = mem_open,
        .close = mem_close,
        .old_write = mem_old_write,
        .old_create = mem_old_create,
        .old_stage = mem_old_stage,
        .old_place = mem_old_place,
        .old_unstage = mem_old_unstage,
        .old_move = mem_old_move,
        .read = mem_read,
        .old_read_text = mem_old_read_text,
        .read_bulk = mem_read_bulk,
        .old_stat = mem_old_stat,
        .old_list = mem_old_list,
        .old_remove = mem_old_remove,
        .old_remove_directory = mem_old_remove_directory,
        .free_bytes = mem_free_bytes,
};
