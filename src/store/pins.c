#include "store/pins.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "store/document.h"
#include "store/manifest.h"

#define PREFIX MANIFEST_DIRECTORY "/pins/"
#define SUFFIX ".json"
#define TEXT_MAX (64u << 10)
#define UNREADABLE "(unreadable)"

static enum nebula_status pin_key(const char *tag, char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error)
{
        char directory[256];
        enum nebula_status status = name_encode(tag, directory, error);

        if (!status && strlen(directory) + strlen(SUFFIX) > 255)
                return error_set(error, NEBULA_INVALID, 0, "the tag \"%.200s\" is too long to be pinned", tag);
        if (!status)
                snprintf(ret_key, MANIFEST_KEY_MAX, PREFIX "%s" SUFFIX, directory);
        return status;
}

enum nebula_status pin_put(struct store *store, const char *tag, const char *reason, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX], *text;
        json_t *body;
        size_t size;
        enum nebula_status status = pin_key(tag, key, error);

        if (status)
                return status;
        if (strlen(reason) > PIN_REASON_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the reason has more than %d bytes", PIN_REASON_MAX);
        body = document_new("pin");
        if (!body || json_object_set_new(body, "tag", json_string(tag)) || json_object_set_new(body, "reason", json_string(reason)) ||
            json_object_set_new(body, "time", json_integer(os->wall_ns() / SECOND_NS)))
                status = error_set(error, NEBULA_INVALID, 0, "the reason is not valid UTF-8");
        if (!status)
                status = document_format(body, &text, &size, error);
        json_decref(body);
        if (status)
                return status;
        status = store->ops->put(store, key, text, size, STORE_ALWAYS, NULL, NULL, error);
        free(text);
        return status;
}

enum nebula_status pin_remove(struct store *store, const char *tag, bool *ret_was_there, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        struct store_entry entry;
        enum nebula_status status = pin_key(tag, key, error);

        if (!status)
                status = store->ops->stat(store, key, &entry, error);
        if (ret_was_there && (!status || status == NEBULA_NOT_FOUND))
                *ret_was_there = !status;
        if (status == NEBULA_NOT_FOUND)
                return NEBULA_OK;
        if (status)
                return status;
        store_entry_done(&entry);
        return store_remove_one(store, key, error);
}

/* The tag that an object pins; false: it is not a pin. */
static bool tag_of(const struct store_entry *entry, char ret_tag[256])
{
        const char *name = entry->key + strlen(PREFIX);
        size_t length = strlen(name);
        char directory[256], again[256];

        if (entry->is_prefix || length <= strlen(SUFFIX) || length > 255 || strcmp(name + length - strlen(SUFFIX), SUFFIX))
                return false;
        memcpy(directory, name, length - strlen(SUFFIX));
        directory[length - strlen(SUFFIX)] = 0;
        return !name_decode(directory, ret_tag, NULL) && !name_encode(ret_tag, again, NULL) && !strcmp(directory, again);
}

/* Reads a pin without comparing the checksum: earlier pins have none, and a pin with an unreadable document still counts. */
static enum nebula_status read_one(struct store *store, const char *key, struct pin *pin, struct nebula_error *error)
{
        const char *reason;
        char *text;
        size_t size;
        json_t *body;
        enum nebula_status status = store->ops->get(store, key, TEXT_MAX, &text, &size, NULL, error);

        if (status && status != NEBULA_CORRUPT)
                return status;
        body = status ? NULL : json_loadb(text, size, JSON_REJECT_DUPLICATES, NULL);
        reason = json_string_value(json_object_get(body, "reason"));
        pin->time = json_number_value(json_object_get(body, "time"));
        pin->reason = strdup(reason ? reason : UNREADABLE);
        json_decref(body);
        if (!status)
                free(text);
        return pin->reason ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a pin");
}

enum nebula_status pins_load(struct store *store, bool reads, struct pins *ret_pins, struct nebula_error *error)
{
        struct store_list list;
        struct pins pins = { 0 };
        enum nebula_status status = store_list_all(store, PREFIX, false, &list, error);

        if (status == NEBULA_NOT_FOUND) {
                *ret_pins = pins;
                return NEBULA_OK;
        }
        if (status)
                return status;
        pins.list = calloc(list.count + 1, sizeof *pins.list);
        if (!pins.list)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %zu pins", list.count);
        for (size_t i = 0; i < list.count && !status; i++) {
                struct pin *pin = &pins.list[pins.count];

                if (!tag_of(&list.entries[i], pin->tag))
                        continue;
                if (reads)
                        status = read_one(store, list.entries[i].key, pin, error);
                else if (!(pin->reason = strdup("")))
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a pin");
                if (status == NEBULA_NOT_FOUND) /* taken back meanwhile */
                        status = NEBULA_OK;
                else
                        pins.count++;
        }
        store_list_done(&list);
        if (status)
                pins_done(&pins);
        else
                *ret_pins = pins;
        return status;
}

const struct pin *pins_find(const struct pins *pins, const char *tag)
{
        for (size_t i = 0; i < pins->count; i++)
                if (!strcmp(pins->list[i].tag, tag))
                        return &pins->list[i];
        return NULL;
}

void pins_done(struct pins *pins)
{
        for (size_t i = 0; i < pins->count; i++)
                free(pins->list[i].reason);
        free(pins->list);
        *pins = (struct pins){ 0 };
}
