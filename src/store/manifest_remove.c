/* Removes a version. The removal is an entry of the tag's log, so that every writer of the tag sees it. Each object is removed only if
 * it is the one that was there before that entry. The order of the steps is that of tests/model/storage_model.py. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/announce.h"
#include "store/index.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/manifest_remove.h"
#include "store/index_room.h"
#include "store/tag_log.h"

#define IN_PROGRESS_NS (60 * SECOND_NS) /* a younger temporary object may belong to a running write; a sweep removes it later */

struct removing {
        struct store *store;
        const char *tag;
        const struct manifest *manifest; /* of the tag; NULL: only the rest of an interrupted removal */
        char directory[256];
        struct store_list objects; /* listed before the entry is made */
        uint64_t listed_number;    /* the largest number of an entry in that listing */
        uint64_t number;           /* of the entry */
        int64_t now_ns;            /* the store's */
        struct victims victims, entries;
};

static enum nebula_status add_private(struct removing *removing, const struct store_entry *object, const char *name, struct nebula_error *error)
{
        struct manifest_entry entry = manifest_entry(name);
        enum nebula_status status = NEBULA_OK;

        /* A tag of format 1 that was written again: a removal that leaves its manifest would leave a checkpoint without its files. */
        if (entry.kind == ENTRY_FOREIGN && manifest_is_format_1(name) && !object->is_foreign)
                return victims_add(&removing->victims, object, error);
        if (object->is_foreign || entry.kind == ENTRY_FOREIGN ||
            (entry.kind == ENTRY_TEMPORARY && object->time_ns > removing->now_ns - IN_PROGRESS_NS))
                return NEBULA_OK;
        if (entry.kind == ENTRY_MANIFEST && entry.number > removing->listed_number)
                removing->listed_number = entry.number;
        if (entry.kind == ENTRY_MANIFEST)
                return victims_add(&removing->entries, object, error);
        /* Another writing of the tag may have files in place. */
        if ((entry.kind == ENTRY_RECORD || entry.kind == ENTRY_CLAIM) && !manifest_names_record(removing->manifest, &entry))
                status = victims_add_recorded(&removing->victims, removing->store, removing->tag, object->key, removing->manifest,
                                              removing->manifest ? 1 : 0, &removing->objects, error);
        return status ? status : victims_add(&removing->victims, object, error);
}

static bool names_file(const struct manifest *manifest, const char *encoded)
{
        char name[256];

        return manifest && !name_decode(encoded, name, NULL) && manifest_find_file(manifest, name);
}

static enum nebula_status choose_victims(struct removing *removing, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < removing->objects.count && !status; i++) {
                const struct store_entry *object = &removing->objects.entries[i];
                const char *private = manifest_behind_private(object->key, removing->directory);
                const char *path = manifest_behind(object->key, removing->directory);

                if (object->is_prefix)
                        continue;
                if (private)
                        status = add_private(removing, object, private, error);
                else if (path && !object->is_foreign && names_file(removing->manifest, path))
                        status = victims_add(&removing->victims, object, error);
        }
        return status;
}

/* Adds an object that is known by its key, if a stale listing lacks it. */
static enum nebula_status add_unlisted(struct removing *removing, struct victims *victims, const char *key, struct nebula_error *error)
{
        struct store_entry object = { 0 };
        enum nebula_status status;

        if (store_list_find(&removing->objects, key))
                return NEBULA_OK;
        status = removing->store->ops->stat(removing->store, key, &object, error);
        if (status)
                return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
        if (!object.is_foreign)
                status = victims_add(victims, &object, error);
        store_entry_done(&object);
        return status;
}

/* `newest`: the number of the newest entry. */
static enum nebula_status add_all_unlisted(struct removing *removing, uint64_t newest, struct nebula_error *error)
{
        const struct manifest *manifest = removing->manifest;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        for (uint64_t number = removing->listed_number + 1; number <= newest && !status; number++) {
                status = tag_log_key(removing->directory, number, key, error);
                if (!status)
                        status = add_unlisted(removing, &removing->entries, key, error);
        }
        for (size_t i = 0; manifest && i < manifest->record_count && !status; i++) {
                status = record_key(removing->directory, manifest->records[i].writing, manifest->records[i].rank, key, error);
                if (!status)
                        status = add_unlisted(removing, &removing->victims, key, error);
        }
        for (size_t i = 0; manifest && i < manifest->file_count && !status; i++) {
                status = manifest_file_key(manifest, &manifest->files[i], key, error);
                if (!status)
                        status = add_unlisted(removing, &removing->victims, key, error);
        }
        return status;
}

static enum nebula_status enter(struct removing *removing, struct nebula_error *error)
{
        struct removal removal = { .number = removing->number };
        char *text;
        size_t size;
        enum nebula_status status;

        memcpy(removal.tag, removing->tag, strlen(removing->tag) + 1);
        status = removal_format(&removal, &text, &size, error);
        if (status)
                return status;
        status = tag_log_create(removing->store, removing->tag, removing->number, text, size, error);
        free(text);
        if (status == NEBULA_BUSY)
                return error_set(error, NEBULA_BUSY, 0, "\"%.200s\" was written again, or removed, meanwhile: it stays", removing->tag);
        return status;
}

static enum nebula_status remove_all(struct removing *removing, struct nebula_error *error)
{
        struct store *store = removing->store;
        enum nebula_status status = victims_remove(&removing->victims, store, error);

        if (!status)
                status = tag_log_set_removed(store, removing->directory, removing->number, error);
        /* The entries last: the removal stays the newest until they are gone. */
        if (!status)
                status = victims_remove(&removing->entries, store, error);
        return status;
}

/* From here on the tag is not at rest (index.h). If the store refuses removals, the tag gets a second entry, so that readers read its log. */
static enum nebula_status drop_index(const struct removing *removing, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        enum nebula_status status = index_remove(removing->store, removing->manifest, &failure);
        struct manifest second = *removing->manifest;

        if (status && store_class(&failure) == STORE_NEVER) {
                second.number = removing->number;
                return index_put(removing->store, &second, error);
        }
        if (status && error)
                *error = failure;
        return status;
}

/* The nodes of a run count its writings of a tag, and a node whose agent was restarted counts their documents, which go. */
static enum nebula_status leave_count(const struct removing *removing, struct nebula_error *error)
{
        const struct manifest *manifest = removing->manifest;
        char run[WRITING_MAX];
        uint64_t count;

        if (!manifest || manifest->world < 2)
                return NEBULA_OK;
        writing_prefix(manifest->job, manifest->run, manifest->writing, run);
        count = manifest->writing;
        for (size_t i = 0; i < removing->objects.count; i++) {
                const char *name = manifest_behind_private(removing->objects.entries[i].key, removing->directory);
                struct announce_name document;

                if (name && !strncmp(name, "committed-", 10) && announce_name_parse(name, &document) &&
                    !strncmp(document.writing, run, WRITING_RUN_CHARS) && document.number > count)
                        count = document.number;
        }
        return tag_log_set_writings(removing->store, removing->directory, run, count, error);
}

static enum nebula_status begin_removal(struct removing *removing, struct nebula_error *error)
{
        enum nebula_status status = leave_count(removing, error);

        return status ? status : enter(removing, error);
}

/* Another removal, with this number or a later one, may have ended since the log was read. Then the version is gone, this entry is dead,
 * and the listed names may belong to a later writer. */
static enum nebula_status carry_out(struct removing *removing, uint64_t newest, struct nebula_error *error)
{
        uint64_t removed = 0;
        struct index_room room = { 0 };
        enum nebula_status status = choose_victims(removing, error);

        if (!status)
                status = add_all_unlisted(removing, newest, error);
        if (!status && removing->manifest)
                status = drop_index(removing, error);
        if (!status)
                status = begin_removal(removing, error);
        if (index_room_may_help(removing->store, status)) {
                index_room_make(removing->store, &room);
                status = begin_removal(removing, error);
        }
        if (!status)
                status = tag_log_removed(removing->store, removing->directory, &removed, error);
        if (!status && removed < removing->number)
                status = remove_all(removing, error);
        index_room_give_back(removing->store, &room);
        return status ? status : tag_log_take_back(removing->store, removing->tag, removing->number, error);
}

/* Checks that the newest entry is the version that the caller has seen, or an interrupted removal. */
static enum nebula_status check_head(const struct removing *removing, const struct tag_log *log, struct nebula_error *error)
{
        const struct manifest *manifest = removing->manifest;

        if (log->is_unsound) {
                if (error)
                        *error = log->unsound;
                return log->unsound.status;
        }
        if (log->is_removal || !log->number)
                return NEBULA_OK;
        /* An overtaken writer enters the same version again, under a later number. */
        if (manifest && log->manifest.number == manifest->number && log->manifest.sequence == manifest->sequence)
                return NEBULA_OK;
        return error_set(error, NEBULA_BUSY, 0, "\"%.200s\" was written again meanwhile: it stays", removing->tag);
}

enum nebula_status manifest_remove_tag(struct store *store, const char *tag, const struct manifest *manifest, struct nebula_error *error)
{
        struct removing removing = { .store = store, .tag = tag, .manifest = manifest };
        struct tag_log log = { 0 };
        char prefix[MANIFEST_KEY_MAX];
        enum nebula_status status = name_encode(tag, removing.directory, error);

        if (!status)
                status = manifest_key(prefix, removing.directory, "", error);
        if (!status)
                status = store->ops->clock(store, &removing.now_ns, error);
        if (!status)
                status = store_list_all(store, prefix, true, &removing.objects, error);
        if (status)
                return status;
        status = tag_log_head(store, tag, &log, error);
        if (!status)
                status = check_head(&removing, &log, error);
        /* After a removal, objects in place that no record names may belong to a later writer. */
        removing.manifest = log.is_removal ? NULL : &log.manifest;
        if (!status)
                status = tag_log_next(store, tag, log.number, &removing.number, error);
        if (!status && log.number) /* the log is empty: the whole version is gone */
                status = carry_out(&removing, log.number, error);
        tag_log_done(&log);
        victims_done(&removing.victims);
        victims_done(&removing.entries);
        store_list_done(&removing.objects);
        return status;
}

enum nebula_status manifest_end_removal(struct store *store, const char *tag, struct nebula_error *error)
{
        struct tag_log log = { 0 };
        enum nebula_status status = tag_log_head(store, tag, &log, error);

        if (!status && log.is_removal)
                status = manifest_remove_tag(store, tag, NULL, error);
        tag_log_done(&log);
        return status;
}

enum nebula_status manifest_remove(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        return manifest_remove_tag(store, manifest->tag, manifest, error);
}

void manifest_forsake(struct store *store, const char *tag, const char *writing)
{
        struct removing removing = { .store = store, .tag = tag };
        struct tag_log log = { 0 };
        char prefix[MANIFEST_KEY_MAX];

        if (name_encode(tag, removing.directory, NULL) || manifest_key(prefix, removing.directory, "", NULL) ||
            store_list_all(store, prefix, true, &removing.objects, NULL))
                return;
        if (tag_log_head(store, tag, &log, NULL) || log.is_unsound)
                goto out;
        for (size_t i = 0; i < removing.objects.count; i++) {
                const struct store_entry *object = &removing.objects.entries[i];
                const char *name = manifest_behind_private(object->key, removing.directory);
                struct manifest_entry entry = { .kind = ENTRY_FOREIGN };

                if (name && !object->is_prefix)
                        entry = manifest_entry(name);
                if (strcmp(entry.writing, writing))
                        continue;
                if (entry.kind != ENTRY_APART)
                        victims_add_recorded(&removing.victims, store, tag, object->key, &log.manifest, 1, &removing.objects, NULL);
                victims_add(&removing.victims, object, NULL);
        }
        victims_remove(&removing.victims, store, NULL);
out:
        tag_log_done(&log);
        victims_done(&removing.victims);
        store_list_done(&removing.objects);
}
