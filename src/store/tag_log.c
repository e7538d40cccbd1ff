#include "store/tag_log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/manifest_private.h"
#include "sum/sum.h"

#define LOOKS_MAX 20 /* if each time the newest entry is removed before it is read */
#define REMOVED_DIRECTORY MANIFEST_DIRECTORY "/removed"
#define FORMAT_1_MANIFEST MANIFEST_DIRECTORY "/manifest.json"

enum nebula_status removal_format(const struct removal *removal, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = document_new("removal");
        enum nebula_status status = document_check_number(removal->tag, removal->number, error);

        if (!status && (!body || json_object_set_new(body, "tag", json_string(removal->tag)) ||
                        json_object_set_new(body, "number", json_integer((json_int_t)removal->number))))
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the removal of \"%s\"", removal->tag);
        if (!status)
                status = document_format(body, ret_text, ret_size, error);
        json_decref(body);
        return status;
}

enum nebula_status removal_parse(const char *text, size_t size, struct removal *ret_removal, struct nebula_error *error)
{
        struct document_reader reader = { .kind = "removal", .error = error };
        struct removal removal = { 0 };
        json_t *body;
        enum nebula_status status = document_parse(text, size, "removal", &body, error);

        if (status)
                return status;
        document_text(&reader, body, "tag", 0, removal.tag, sizeof removal.tag);
        removal.number = document_number(&reader, body);
        json_decref(body);
        if (!reader.status)
                *ret_removal = removal;
        return reader.status;
}

enum nebula_status tag_log_key(const char *directory, uint64_t number, char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error)
{
        char path[64];

        snprintf(path, sizeof path, MANIFEST_DIRECTORY "/manifest-%" PRIu64 ".json", number);
        return manifest_key(ret_key, directory, path, error);
}

static uint64_t stamp_sum(const struct store_entry *entry)
{
        return sum_crc64(0, entry->stamp.text, strlen(entry->stamp.text));
}

static bool has_entry(struct store *store, const char *directory, uint64_t number, struct tag_head *ret_head)
{
        char key[MANIFEST_KEY_MAX];
        struct store_entry entry;

        if (tag_log_key(directory, number, key, NULL) || store->ops->stat(store, key, &entry, NULL))
                return false;
        *ret_head = (struct tag_head){ number, stamp_sum(&entry) };
        store_entry_done(&entry);
        return true;
}

enum nebula_status tag_log_look(struct store *store, struct lister *lister, const char *directory, struct tag_head *ret_head,
                                struct nebula_error *error)
{
        struct store_list list;
        char prefix[MANIFEST_KEY_MAX];
        struct tag_head head = { 0 };
        enum nebula_status status = manifest_key(prefix, directory, MANIFEST_DIRECTORY "/manifest-", error);

        if (!status)
                status = lister ? lister_list(lister, prefix, &list, error) : store_list_all(store, prefix, false, &list, error);
        if (status)
                return status;
        for (size_t i = 0; i < list.count; i++) {
                struct manifest_entry entry = manifest_entry(manifest_behind_private(list.entries[i].key, directory));

                if (entry.kind == ENTRY_MANIFEST && entry.number > head.number && !list.entries[i].is_prefix)
                        head = (struct tag_head){ entry.number, stamp_sum(&list.entries[i]) };
        }
        store_list_done(&list);
        while (!(store->ops->features(store) & STORE_LISTS_FRESH) && has_entry(store, directory, head.number + 1, &head))
                ;
        *ret_head = head;
        return NEBULA_OK;
}

static enum nebula_status newest_number(struct store *store, const char *directory, uint64_t *ret_number, struct nebula_error *error)
{
        struct tag_head head;
        enum nebula_status status = tag_log_look(store, NULL, directory, &head, error);

        if (!status)
                *ret_number = head.number;
        return status;
}

enum nebula_status tag_log_number(struct store *store, const char *tag, uint64_t *ret_number, struct nebula_error *error)
{
        char directory[256];
        enum nebula_status status = name_encode(tag, directory, error);

        return status ? status : newest_number(store, directory, ret_number, error);
}

/* The number of a finished removal from the last component of its key; 0: it is another name. */
static uint64_t removed_number(const char *text)
{
        uint64_t number = strspn(text, "0123456789") == strlen(text) && strlen(text) <= 18 ? strtoull(text, NULL, 10) : 0;

        return number <= DOCUMENT_NUMBER_MAX ? number : 0;
}

enum nebula_status tag_log_removed(struct store *store, const char *directory, uint64_t *ret_number, struct nebula_error *error)
{
        struct store_list list;
        char prefix[MANIFEST_KEY_MAX];
        uint64_t number = 0;
        enum nebula_status status = NEBULA_OK;

        snprintf(prefix, sizeof prefix, REMOVED_DIRECTORY "/%s/", directory);
        status = store_list_all(store, prefix, false, &list, error);
        if (status)
                return status;
        for (size_t i = 0; i < list.count; i++) {
                uint64_t one = removed_number(list.entries[i].key + strlen(prefix));

                number = one > number ? one : number;
        }
        store_list_done(&list);
        *ret_number = number;
        return NEBULA_OK;
}

/* Records that an entry cannot be read, with its key. */
static void note_unsound(struct store *store, const char *key, struct tag_log *log)
{
        error_prefix(&log->unsound, "%s/%s", store->root, key);
        log->is_unsound = true;
}

static void parse_entry(struct store *store, const char *tag, const char *key, const char *text, size_t size, struct tag_log *log)
{
        struct removal removal = { 0 };
        const char *of = log->manifest.tag;
        uint64_t number = 0;
        enum nebula_status status;

        log->is_removal = document_is(text, "removal");
        if (log->is_removal) {
                status = removal_parse(text, size, &removal, &log->unsound);
                of = removal.tag;
                number = removal.number;
        } else {
                status = manifest_parse(text, size, &log->manifest, &log->unsound);
                number = log->manifest.number;
        }
        if (!status && strcmp(of, tag)) /* the directory was copied or renamed: the keys would lead to another checkpoint */
                status = error_set(&log->unsound, NEBULA_CORRUPT, 0,
                                   "the manifest belongs to \"%s\": the directory was renamed or copied, give it back its name", of);
        else if (!status && number != log->number)
                status = error_set(&log->unsound, NEBULA_CORRUPT, 0, "the manifest has number %" PRIu64 ": the object was renamed or copied", number);
        if (!status)
                return;
        log->is_removal = false;
        manifest_done(&log->manifest);
        note_unsound(store, key, log);
}

/* Marks a checkpoint of Nebula 0.1 as unsound: it is not debris, and this version cannot read it. */
static void look_for_format_1(struct store *store, const char *directory, struct tag_log *log)
{
        struct nebula_error absent;
        char key[MANIFEST_KEY_MAX];
        struct store_entry entry;

        if (!(store->ops->features(store) & STORE_PATHS) || manifest_key(key, directory, FORMAT_1_MANIFEST, NULL) ||
            store->ops->stat(store, key, &entry, &absent))
                return;
        store_entry_done(&entry);
        error_set(&log->unsound, NEBULA_CORRUPT, 0,
                  "a checkpoint of format 1, which this Nebula does not read: its files are whole and can be read with torch.load; remove "
                  "its directory " MANIFEST_DIRECTORY " to write this tag again");
        note_unsound(store, key, log);
}

enum nebula_status tag_log_entry(struct store *store, const char *tag, uint64_t number, struct tag_log *ret_log, struct nebula_error *error)
{
        struct nebula_error failure;
        struct tag_log log = { .number = number };
        char directory[256], key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status = name_encode(tag, directory, error);

        if (!status)
                status = tag_log_key(directory, number, key, error);
        if (status)
                return status;
        status = document_get(store, key, &text, &size, NULL, &failure);
        if (!status) {
                parse_entry(store, tag, key, text, size, &log);
                free(text);
        } else if (status == NEBULA_CORRUPT) { /* longer than readers accept */
                log.unsound = failure;
                log.is_unsound = true;
        } else {
                if (error)
                        *error = failure;
                return status;
        }
        *ret_log = log;
        return NEBULA_OK;
}

enum nebula_status tag_log_head(struct store *store, const char *tag, struct tag_log *ret_log, struct nebula_error *error)
{
        struct tag_log log = { 0 };
        char directory[256];
        enum nebula_status status = name_encode(tag, directory, error);

        for (int look = 0; look < LOOKS_MAX && !status; look++) {
                status = newest_number(store, directory, &log.number, error);
                if (!status && !log.number) {
                        look_for_format_1(store, directory, &log);
                        *ret_log = log;
                        return NEBULA_OK;
                }
                if (!status)
                        status = tag_log_entry(store, tag, log.number, ret_log, error);
                if (status != NEBULA_NOT_FOUND)
                        return status;
                status = NEBULA_OK;
        }
        return status ? status : error_set(error, NEBULA_STORAGE, EAGAIN, "%s/%s: entry %" PRIu64 " of its log is listed and not there: the list is old, "
                                           "or the log goes on faster than it is read", store->root, directory, log.number);
}

void tag_log_done(struct tag_log *log)
{
        manifest_done(&log->manifest);
}

enum nebula_status tag_log_next(struct store *store, const char *tag, uint64_t newest, uint64_t *ret_number, struct nebula_error *error)
{
        char directory[256];
        uint64_t removed;
        enum nebula_status status = name_encode(tag, directory, error);

        if (!status)
                status = tag_log_removed(store, directory, &removed, error);
        if (!status)
                *ret_number = (removed > newest ? removed : newest) + 1;
        return status;
}

enum nebula_status tag_log_create(struct store *store, const char *tag, uint64_t number, const char *text, size_t size,
                                  struct nebula_error *error)
{
        char directory[256], key[MANIFEST_KEY_MAX];
        enum nebula_status status = name_encode(tag, directory, error);

        if (!status)
                status = tag_log_key(directory, number, key, error);
        return status ? status : store->ops->put(store, key, text, size, STORE_IF_ABSENT, NULL, NULL, error);
}

enum nebula_status tag_log_take_back(struct store *store, const char *tag, uint64_t number, struct nebula_error *error)
{
        char directory[256], key[MANIFEST_KEY_MAX];
        enum nebula_status status = name_encode(tag, directory, error);

        if (!status)
                status = tag_log_key(directory, number, key, error);
        return status ? status : store_remove_one(store, key, error);
}

/* Another removal may have ended later: removes the markers with smaller numbers, so that the largest stays. */
enum nebula_status tag_log_set_removed(struct store *store, const char *directory, uint64_t number, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX], prefix[MANIFEST_KEY_MAX];
        struct store_list list;
        enum nebula_status status;

        snprintf(key, sizeof key, REMOVED_DIRECTORY "/%s/%" PRIu64, directory, number);
        status = store->ops->put(store, key, "\n", 1, STORE_ALWAYS, NULL, NULL, error);
        snprintf(prefix, sizeof prefix, REMOVED_DIRECTORY "/%s/", directory);
        if (status || store_list_all(store, prefix, false, &list, NULL))
                return status;
        for (size_t i = 0; i < list.count; i++) {
                uint64_t one = removed_number(list.entries[i].key + strlen(prefix));

                if (one && one < number)
                        store_remove_one(store, list.entries[i].key, NULL);
        }
        store_list_done(&list);
        return NEBULA_OK;
}

static void writings_key(const char *directory, const char *run, char ret_key[MANIFEST_KEY_MAX])
{
        snprintf(ret_key, MANIFEST_KEY_MAX, REMOVED_DIRECTORY "/%s/%.*s", directory, WRITING_RUN_CHARS, run);
}

enum nebula_status tag_log_set_writings(struct store *store, const char *directory, const char *run, uint64_t count, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX], text[32];
        int size = snprintf(text, sizeof text, "%" PRIu64 "\n", count);

        writings_key(directory, run, key);
        return store->ops->put(store, key, text, (size_t)size, STORE_ALWAYS, NULL, NULL, error);
}

enum nebula_status tag_log_writings(struct store *store, const char *directory, const char *run, uint64_t *ret_count, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status;

        writings_key(directory, run, key);
        status = document_get(store, key, &text, &size, NULL, error);
        if (status)
                return status;
        if (size && text[size - 1] == '\n')
                text[--size] = 0;
        *ret_count = removed_number(text);
        free(text);
        return *ret_count ? NEBULA_OK : error_set(error, NEBULA_CORRUPT, 0, "%s/%s is no number", store->root, key);
}

enum nebula_status tag_log_sweep_before(struct store *store, int64_t before_ns, struct nebula_error *error)
{
        return store_remove_before(store, REMOVED_DIRECTORY "/", before_ns, error);
}

enum nebula_status tag_log_sweep(struct store *store, int64_t age_ns, struct nebula_error *error)
{
        int64_t now_ns;
        enum nebula_status status = store->ops->clock(store, &now_ns, error);

        return status ? status : tag_log_sweep_before(store, now_ns - age_ns, error);
}
