/* Opening a store, and what every driver has in common. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/store_private.h"

enum nebula_status store_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        const char *scheme_end = strstr(url, "://");

        if (url[0] == '/' || !strncmp(url, "file://", 7))
                return store_file.open(url, ret_store, error);
        if (!scheme_end)
                return error_set(error, NEBULA_INVALID, 0,
                                 "the storage path \"%s\" is neither an absolute path nor a URL", url);
        return error_set(error, NEBULA_INVALID, 0,
                         "the storage path \"%s\": this build has no driver for \"%.*s\"; give a directory, or file:///directory",
                         url, (int)(scheme_end - url), url);
}

void store_close(struct store *store)
{
        if (store)
                store->ops->close(store);
}

enum nebula_status store_read_text(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                   struct nebula_error *error)
{
        return store->ops->read_text(store, key, limit, ret_text, ret_size, error);
}

bool store_key_sound(const char *key)
{
        if (strlen(key) >= STORE_KEY_MAX)
                return false;
        for (;;) {
                size_t length = strcspn(key, "/");

                if (!length || length > 255 || (length <= 2 && !strncmp(key, "..", length)))
                        return false;
                if (!key[length])
                        return true;
                key += length + 1;
        }
}

enum nebula_status store_list_add(struct store_list *list, const struct store_entry *entry)
{
        struct store_entry *grown;
        char *name;

        /* Grows at powers of two, so the capacity need not be kept. */
        if (!(list->count & (list->count - 1))) {
                size_t capacity = list->count ? list->count * 2 : 1;

                grown = realloc(list->entries, capacity * sizeof *grown);
                if (!grown)
                        return NEBULA_NO_MEMORY;
                list->entries = grown;
        }
        name = strdup(entry->name);
        if (!name)
                return NEBULA_NO_MEMORY;
        list->entries[list->count] = *entry;
        list->entries[list->count].name = name;
        list->count++;
        return NEBULA_OK;
}

void store_list_done(struct store_list *list)
{
        for (size_t i = 0; i < list->count; i++)
                store_entry_done(&list->entries[i]);
        free(list->entries);
        *list = (struct store_list){ 0 };
}

void store_entry_done(struct store_entry *entry)
{
        free(entry->name);
        *entry = (struct store_entry){ 0 };
}
