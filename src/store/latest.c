#include "store/latest.h"
#include "store/manifest_load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/manifest.h"

#define LATEST "latest"
#define LATEST_BYTES_MAX 256 /* an encoded tag and a newline */

/* Whether a directory of this name exists. True also if storage does not answer. */
static bool has_directory(struct store *store, const char *directory)
{
        const struct store_entry *entry;
        struct store_list list;
        bool result;

        if (store_list_all(store, directory, false, &list, NULL))
                return true;
        entry = store_list_find(&list, directory);
        result = entry && entry->is_prefix;
        store_list_done(&list);
        return result;
}

/* Whether the text is a hint of Nebula's: it names a directory that exists, or a step whose directory the user may have moved away. Cuts
 * the newline off. */
static bool is_hint(struct store *store, char *text, size_t size)
{
        char tag[256];

        if (strlen(text) != size)
                return false;
        if (size && text[size - 1] == '\n')
                text[size - 1] = 0;
        return !name_decode(text, tag, NULL) && (name_step(tag) >= 0 || has_directory(store, text));
}

static bool may_write(struct store *store)
{
        struct nebula_error failure = { 0 };
        size_t size;
        char *text;
        bool result;
        enum nebula_status status = store->ops->get(store, LATEST, LATEST_BYTES_MAX, &text, &size, NULL, &failure);

        if (status == NEBULA_NOT_FOUND)
                return !has_directory(store, LATEST);
        if (status)
                return false;
        result = is_hint(store, text, size);
        free(text);
        return result;
}

enum nebula_status latest_put(struct store *store, const char *directory, struct store_stamp *written, struct nebula_error *error)
{
        bool keeps_stamp = written && (store->ops->features(store) & (STORE_PUTS_IF_SAME | STORE_PATHS)) == STORE_PUTS_IF_SAME;
        char text[LATEST_DIRECTORY_MAX + 1];
        enum nebula_status status;

        snprintf(text, sizeof text, "%s\n", directory);
        if (keeps_stamp && *written->text) {
                struct store_stamp seen = *written;

                status = store->ops->put(store, LATEST, text, strlen(text), STORE_IF_SAME, &seen, written, error);
                if (status != NEBULA_BUSY)
                        return status;
        }
        if (!may_write(store))
                return error_set(error, NEBULA_BUSY, 0, "%s/" LATEST " was not written by Nebula, and is left alone: it does not name the newest "
                                 "checkpoint. Move it away to have it written", store->root);
        return store->ops->put(store, LATEST, text, strlen(text), STORE_ALWAYS, NULL, keeps_stamp ? written : NULL, error);
}

void latest_find_dead(struct store *store, char ret_directory[LATEST_DIRECTORY_MAX])
{
        struct manifest there = { 0 };
        char *hint, tag[256];
        size_t size;

        ret_directory[0] = 0;
        if (store->ops->get(store, LATEST, LATEST_BYTES_MAX, &hint, &size, NULL, NULL))
                return;
        if (size && strlen(hint) == size && hint[size - 1] == '\n') {
                hint[size - 1] = 0;
                if (!name_decode(hint, tag, NULL) && name_follows_step(tag) && !has_directory(store, hint) &&
                    manifest_load(store, tag, &there, NULL) == NEBULA_NOT_FOUND)
                        snprintf(ret_directory, LATEST_DIRECTORY_MAX, "%s", hint);
        }
        manifest_done(&there);
        free(hint);
}
