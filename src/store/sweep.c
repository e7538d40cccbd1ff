/* Debris of interrupted writes: what only Nebula can have made, and nobody will finish. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "store/manifest.h"
#include "store/manifest_private.h"

#define DEBRIS_KINDS                                                                                                     \
        (1u << ENTRY_RECORD | 1u << ENTRY_CLAIM | 1u << ENTRY_GENERATION | 1u << ENTRY_TEMPORARY | 1u << ENTRY_COMMITTING)

/* What a look at one .nebula directory found, above the generation that is complete. */
struct debris {
        size_t count;
        int64_t youngest_ns;
        bool is_foreign; /* some of it is another user's */
};

static enum nebula_status look(struct store *store, const char *directory, uint64_t complete, struct debris *ret_debris,
                               struct nebula_error *error)
{
        struct debris debris = { 0 };
        struct old_list list;
        char prefix[MANIFEST_KEY_MAX];
        enum nebula_status status = manifest_key(prefix, directory, MANIFEST_DIRECTORY, error);

        if (!status)
                status = store->ops->old_list(store, prefix, &list, error);
        if (status)
                return status;
        for (size_t i = 0; i < list.count; i++) {
                uint64_t generation = 0;
                enum manifest_entry_kind kind = manifest_entry_kind(list.entries[i].name, &generation);

                if (!(DEBRIS_KINDS & 1u << kind) || (manifest_has_generation(kind) && generation <= complete))
                        continue;
                debris.count++;
                debris.is_foreign = debris.is_foreign || list.entries[i].is_foreign;
                if (list.entries[i].mtime_ns > debris.youngest_ns)
                        debris.youngest_ns = list.entries[i].mtime_ns;
        }
        old_list_done(&list);
        *ret_debris = debris;
        return NEBULA_OK;
}

/* The files in place that a sound record claims, but for what `manifest` names; a file of another size is somebody else's by now. */
static enum nebula_status remove_claimed(struct store *store, const struct manifest *manifest, const char *tag,
                                         const char *directory, const char *record_name, struct nebula_error *error)
{
        char prefix[MANIFEST_KEY_MAX], key[MANIFEST_KEY_MAX];
        struct nebula_error unsound;
        struct old_entry entry;
        struct record record;
        char *text;
        size_t size;
        enum nebula_status status = manifest_key(prefix, directory, MANIFEST_DIRECTORY, error);

        if (!status)
                status = manifest_key(key, prefix, record_name, error);
        if (status)
                return status;
        if (old_read_text(store, key, DOCUMENT_TEXT_MAX, &text, &size, &unsound))
                return NEBULA_OK;
        status = record_parse(text, size, &record, &unsound);
        free(text);
        if (status)
                return NEBULA_OK;
        status = NEBULA_OK;
        for (size_t i = 0; i < record.file_count && !status && !strcmp(record.tag, tag); i++) {
                status = manifest_key(key, directory, record.files[i].path, error);
                if (status || manifest_find_file(manifest, record.files[i].name) || store->ops->old_stat(store, key, &entry, &unsound))
                        continue;
                if (!entry.is_directory && !entry.is_foreign && entry.size == record.files[i].size)
                        status = store->ops->old_remove(store, key, error);
                old_entry_done(&entry);
        }
        record_done(&record);
        return status;
}

/*
 * What is of a later generation than `manifest`, which is empty when there is none, but for what has come since it was
 * looked whether all of it is old: somebody has begun anew. The claims go last: they tell the next sweep what was ours.
 */
static enum nebula_status remove_later(struct store *store, const struct manifest *manifest, const char *tag,
                                       const char *directory, int64_t before_ns, struct nebula_error *error)
{
        struct old_list list;
        char prefix[MANIFEST_KEY_MAX];
        uint64_t generation;
        enum nebula_status status = manifest_key(prefix, directory, MANIFEST_DIRECTORY, error);

        if (!status)
                status = store->ops->old_list(store, prefix, &list, error);
        if (status)
                return status;
        for (size_t i = 0; i < list.count && !status; i++) {
                enum manifest_entry_kind kind = manifest_entry_kind(list.entries[i].name, &generation);

                if ((kind == ENTRY_RECORD || kind == ENTRY_CLAIM) && generation > manifest->generation &&
                    list.entries[i].mtime_ns <= before_ns)
                        status = remove_claimed(store, manifest, tag, directory, list.entries[i].name, error);
        }
        old_list_done(&list);
        if (!status)
                status = manifest_clear_private(store, manifest, directory, manifest->generation + 1, UINT64_MAX,
                                                DEBRIS_KINDS, before_ns, error);
        if (!status && !manifest->generation)
                manifest_remove_directories(store, directory);
        return status;
}

static enum nebula_status sweep_tag(struct store *store, const char *tag, int64_t before_ns, size_t *removed,
                                    struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct nebula_error failure;
        struct debris debris;
        char directory[256];
        enum nebula_status loaded = manifest_load(store, tag, &manifest, &failure);
        enum nebula_status status = NEBULA_OK;

        /* Unsound, or unreadable just now: a person may still want what is there. */
        if (loaded && loaded != NEBULA_NOT_FOUND)
                return NEBULA_OK;
        if (name_encode(tag, directory, error) || look(store, directory, manifest.generation, &debris, &failure))
                goto out; /* no .nebula inside: foreign */
        if (!debris.count || debris.is_foreign || debris.youngest_ns > before_ns)
                goto out;
        status = remove_later(store, &manifest, tag, directory, before_ns, error);
        if (!status)
                (*removed)++;
out:
        manifest_done(&manifest);
        return status;
}

enum nebula_status manifest_sweep_tag(struct store *store, const char *tag, int64_t age_ns, size_t *ret_removed,
                                      struct nebula_error *error)
{
        char directory[256];
        size_t removed = 0;
        enum nebula_status status = name_encode(tag, directory, error);

        if (!status)
                status = sweep_tag(store, tag, os->wall_ns() - age_ns, &removed, error);
        if (status)
                return status;
        manifest_remove_directories(store, directory);
        *ret_removed = removed;
        return NEBULA_OK;
}

enum nebula_status manifest_sweep(struct store *store, int64_t age_ns, size_t *ret_removed, struct nebula_error *error)
{
        int64_t before_ns = os->wall_ns() - age_ns;
        struct old_list list;
        char tag[256];
        size_t removed = 0;
        enum nebula_status status = store->ops->old_list(store, "", &list, error);

        if (status)
                return status;
        for (size_t i = 0; i < list.count && !status; i++) {
                const struct old_entry *entry = &list.entries[i];

                if (manifest_tag_of(entry, tag)) {
                        status = sweep_tag(store, tag, before_ns, &removed, error);
                } else if (!entry->is_directory && !entry->is_foreign && !strncmp(entry->name, ".nebula-tmp-", 12) &&
                           entry->mtime_ns <= before_ns) {
                        status = store->ops->old_remove(store, entry->name, error);
                        removed++;
                }
        }
        old_list_done(&list);
        if (!status)
                *ret_removed = removed;
        return status;
}
