/* The work after a commit: <tag>/<name> becomes a view of each file that lies apart, for programs that do not read manifests, and
 * objects that only earlier entries of the log named are removed. The version is durable before, and readers follow the manifest, so a
 * failure loses no data. */
#include <string.h>

#include "base/error.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/manifest_publish.h"
#include "store/tag_log.h"

#define LOOKS_MAX 20 /* if each time the log has a new entry before its views are made */

struct publishing {
        struct store *store;
        const struct manifest *manifest, *before;
        char directory[256];
        uint64_t kept_count; /* entries before it that are not removed */
        struct store_list objects;
        struct victims victims;
};

/* Fails if another entry has followed: its writer does this work for its own version. */
static enum nebula_status check_newest(const struct publishing *publishing, struct nebula_error *error)
{
        uint64_t newest;
        enum nebula_status status = tag_log_number(publishing->store, publishing->manifest->tag, &newest, error);

        if (!status && newest != publishing->manifest->number)
                status = error_set(error, NEBULA_BUSY, 0, "\"%.200s\" was written again or removed meanwhile", publishing->manifest->tag);
        return status;
}

/* `all`: also of carried-over files, whose views the writing that saved them made. */
static enum nebula_status refresh_views(const struct publishing *publishing, const struct manifest *manifest, bool all, struct nebula_error *error)
{
        struct store *store = publishing->store;
        char from[MANIFEST_KEY_MAX], to[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        if (!(store->ops->features(store) & STORE_COPIES))
                return NEBULA_OK;
        for (size_t i = 0; i < manifest->file_count && !status; i++) {
                const struct manifest_file *file = &manifest->files[i];

                if (!file->is_apart || (!all && manifest_file_origin(manifest, file)))
                        continue;
                status = manifest_file_key(manifest, file, from, error);
                if (!status)
                        status = file_key(publishing->directory, NULL, file->name, to, error);
                if (!status)
                        status = store->ops->copy(store, from, to, STORE_ALWAYS, error);
        }
        return status;
}

/* A newer entry may have made its views while this call made older ones over them. Makes the views of the newest entry again. */
static enum nebula_status show_newest(const struct publishing *publishing, struct nebula_error *error)
{
        const char *tag = publishing->manifest->tag;
        uint64_t shown = publishing->manifest->number, newest = 0;
        enum nebula_status status = tag_log_number(publishing->store, tag, &newest, error);

        for (int look = 0; look < LOOKS_MAX && !status && newest != shown; look++) {
                struct manifest now = { 0 };

                shown = newest;
                if (!manifest_load(publishing->store, tag, &now, NULL))
                        refresh_views(publishing, &now, true, NULL);
                manifest_done(&now);
                status = tag_log_number(publishing->store, tag, &newest, error);
        }
        return status ? status : check_newest(publishing, error);
}

/* Adds files of the version before that this version lacks: a program that does not read manifests would take the file of a rank that no
 * longer exists for a part of this version. */
static enum nebula_status add_dropped(struct publishing *publishing, struct nebula_error *error)
{
        const struct manifest *before = publishing->before;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; before && i < before->file_count && !status; i++) {
                const struct manifest_file *old = &before->files[i];
                const struct store_entry *object;

                if (manifest_find_file(publishing->manifest, old->name))
                        continue;
                status = file_key(publishing->directory, NULL, old->name, key, error);
                object = status ? NULL : store_list_find(&publishing->objects, key);
                if (object && !object->is_prefix && !object->is_foreign && !object->is_link && object->size == old->size)
                        status = victims_add(&publishing->victims, object, error);
        }
        return status;
}

/* The name of a node document has no number of a try. */
static bool names_writing(const struct manifest *manifest, const struct manifest_entry *entry)
{
        size_t length = entry->kind == ENTRY_COMMITTING ? strlen(entry->writing) : WRITING_MAX;

        for (size_t i = 0; i < manifest->record_count; i++)
                if (!strncmp(manifest->records[i].writing, entry->writing, length))
                        return true;
        return false;
}

/* Whether the object belonged to the version before, or to a failed try of this writing. Other objects may belong to a running writing. */
static bool is_superseded(const struct publishing *publishing, const struct store_entry *object)
{
        const struct manifest *manifest = publishing->manifest, *before = publishing->before;
        const char *name = manifest_behind_private(object->key, publishing->directory);
        struct manifest_entry entry;
        size_t try_at;

        if (!name || object->is_prefix || object->is_foreign)
                return false;
        entry = manifest_entry(name);
        if (entry.kind == ENTRY_MANIFEST)
                return entry.number < manifest->number - publishing->kept_count;
        if (entry.kind == ENTRY_SIGNATURE)
                return before && entry.number == before->sequence && entry.number != manifest->sequence;
        if (entry.kind == ENTRY_COMMITTING)
                return before && names_writing(before, &entry) && !names_writing(manifest, &entry);
        if (entry.kind != ENTRY_RECORD && entry.kind != ENTRY_CLAIM && entry.kind != ENTRY_APART)
                return false;
        if (before && names_writing(before, &entry))
                return !manifest_names(manifest, &entry, object->key);
        if (names_writing(manifest, &entry))
                return entry.kind == ENTRY_CLAIM;
        for (size_t i = 0; i < manifest->record_count; i++) {
                try_at = (size_t)(strrchr(manifest->records[i].writing, '-') - manifest->records[i].writing);
                if (manifest->records[i].sequence == manifest->sequence && !strncmp(manifest->records[i].writing, entry.writing, try_at + 1))
                        return true;
        }
        return false;
}

/* is_rest: an earlier call may have done the work. It makes the views before it removes objects. */
static bool changes_nothing(const struct publishing *publishing, const bool *is_rest)
{
        for (size_t i = 0; i < publishing->manifest->file_count && !is_rest; i++)
                if (publishing->manifest->files[i].is_apart)
                        return false;
        return !publishing->victims.count;
}

static enum nebula_status publish(struct store *store, const struct manifest *manifest, const struct manifest *before, bool *is_rest,
                                  struct nebula_error *error)
{
        struct publishing publishing = { .store = store, .manifest = manifest, .before = before };
        char prefix[MANIFEST_KEY_MAX];
        enum nebula_status status = name_encode(manifest->tag, publishing.directory, error);

        /* A program with a stale list takes the number after the newest entry that it sees. That entry stays, so that the number is
         * taken. */
        publishing.kept_count = store->ops->features(store) & STORE_LISTS_FRESH ? 0 : 1;
        if (!status)
                status = manifest_key(prefix, publishing.directory, "", error);
        if (!status)
                status = store_list_all(store, prefix, true, &publishing.objects, error);
        if (status)
                return status;
        status = add_dropped(&publishing, error);
        for (size_t i = 0; i < publishing.objects.count && !status; i++)
                if (is_superseded(&publishing, &publishing.objects.entries[i]))
                        status = victims_add(&publishing.victims, &publishing.objects.entries[i], error);
        if (!status && changes_nothing(&publishing, is_rest)) /* as for the first writing of a tag, whose files are in place */
                goto done;
        if (is_rest)
                *is_rest = true;
        if (!status)
                status = check_newest(&publishing, error);
        if (!status) {
                enum nebula_status shown = refresh_views(&publishing, manifest, false, error);

                if (!shown)
                        shown = victims_remove(&publishing.victims, store, error);
                status = show_newest(&publishing, error);
                status = status ? status : shown;
        }
done:
        victims_done(&publishing.victims);
        store_list_done(&publishing.objects);
        return status;
}

enum nebula_status manifest_publish(struct store *store, const struct manifest *manifest, const struct manifest *before,
                                    struct nebula_error *error)
{
        return publish(store, manifest, before, NULL, error);
}

enum nebula_status manifest_publish_rest(struct store *store, const struct manifest *manifest, const struct manifest *before,
                                         bool *ret_was_left, struct nebula_error *error)
{
        *ret_was_left = false;
        return publish(store, manifest, before, ret_was_left, error);
}
