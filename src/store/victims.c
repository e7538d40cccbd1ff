/* The objects that a removal or a sweep is about to remove, each only if it is still the object that was listed. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/record.h"

enum nebula_status victims_add(struct victims *victims, const struct store_entry *entry, struct nebula_error *error)
{
        char *key = strdup(entry->key);

        if (key && victims->count == victims->capacity) {
                size_t capacity = victims->capacity * 2 + 16;
                struct store_victim *list = realloc(victims->list, capacity * sizeof *list);

                if (list) {
                        victims->list = list;
                        victims->capacity = capacity;
                } else {
                        free(key);
                        key = NULL;
                }
        }
        if (!key)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to remove %zu objects", victims->count + 1);
        victims->list[victims->count++] = (struct store_victim){ key, entry->stamp };
        return NEBULA_OK;
}

static bool is_record(const struct store_victim *victim)
{
        const char *slash = strchr(victim->key, '/');
        const char *name = slash ? manifest_behind(slash + 1, MANIFEST_DIRECTORY) : NULL;
        enum manifest_entry_kind kind = name ? manifest_entry(name).kind : ENTRY_FOREIGN;

        return kind == ENTRY_RECORD || kind == ENTRY_CLAIM;
}

static int records_last(const void *a, const void *b)
{
        const struct store_victim *x = a, *y = b;
        int order = is_record(x) - is_record(y);

        return order ? order : strcmp(x->key, y->key);
}

enum nebula_status victims_remove(struct victims *victims, struct store *store, struct nebula_error *error)
{
        size_t first = 0;
        enum nebula_status status = NEBULA_OK;

        if (victims->count)
                qsort(victims->list, victims->count, sizeof *victims->list, records_last);
        while (first < victims->count && !is_record(&victims->list[first]))
                first++;
        if (first)
                status = store->ops->remove(store, victims->list, first, error);
        if (!status && first < victims->count)
                status = store->ops->remove(store, victims->list + first, victims->count - first, error);
        return status;
}

void victims_done(struct victims *victims)
{
        for (size_t i = 0; i < victims->count; i++)
                free((char *)(uintptr_t)victims->list[i].key);
        free(victims->list);
        *victims = (struct victims){ 0 };
}

/* Skips an object of another size: another program has written it. */
static enum nebula_status add_file(struct victims *victims, const char *directory, const struct record_file *file,
                                   const struct store_list *objects, struct nebula_error *error)
{
        const struct store_entry *entry;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = file_key(directory, NULL, file->name, key, error);

        if (status)
                return status;
        entry = store_list_find(objects, key);
        if (!entry || entry->is_prefix || entry->is_foreign || entry->is_link || entry->size != file->size)
                return NEBULA_OK;
        return victims_add(victims, entry, error);
}

static bool is_kept(const struct manifest *keep, size_t keep_count, const char *name)
{
        for (size_t i = 0; i < keep_count; i++)
                if (manifest_find_file(&keep[i], name))
                        return true;
        return false;
}

/* Succeeds without a record if none can be read: then its files are unknown. */
static enum nebula_status load_record(struct store *store, const char *key, struct record *ret_record, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        char *text;
        size_t size;
        enum nebula_status status = document_get(store, key, &text, &size, NULL, &failure);

        if (!status) {
                status = record_parse(text, size, ret_record, &failure);
                free(text);
        }
        if (status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT)
                return NEBULA_OK;
        if (status && error)
                *error = failure;
        return status;
}

enum nebula_status victims_add_recorded(struct victims *victims, struct store *store, const char *tag, const char *record_key,
                                        const struct manifest *keep, size_t keep_count, const struct store_list *objects,
                                        struct nebula_error *error)
{
        struct record record = { 0 };
        char directory[256];
        enum nebula_status status = name_encode(tag, directory, error);

        if (!status)
                status = load_record(store, record_key, &record, error);
        for (size_t i = 0; i < record.file_count && !status && !strcmp(record.tag, tag); i++)
                if (!record.files[i].is_apart && !is_kept(keep, keep_count, record.files[i].name))
                        status = add_file(victims, directory, &record.files[i], objects, error);
        record_done(&record);
        return status;
}
