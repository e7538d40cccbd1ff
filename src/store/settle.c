/* What becomes of a version's files after its manifest: they move into place, and one day they go. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/manifest.h"
#include "store/manifest_private.h"

#define IN_PROGRESS_NS (INT64_C(60) * 1000000000) /* a younger temporary file may be of a write that goes on; a sweep takes what stays */

/* Absent is fine: another agent, or a crash before us, has been here. */
static enum nebula_status move_waiting(struct store *store, const struct manifest *manifest, const char *directory,
                                       struct nebula_error *error)
{
        for (size_t i = 0; i < manifest->file_count; i++) {
                const struct manifest_file *file = &manifest->files[i];
                char from[MANIFEST_KEY_MAX], to[MANIFEST_KEY_MAX];
                struct nebula_error absent;
                struct old_entry entry;
                enum nebula_status status = manifest_waiting_key(from, directory, file->generation, file->path, error);

                if (!status)
                        status = manifest_key(to, directory, file->path, error);
                if (status)
                        return status;
                status = store->ops->old_stat(store, from, &entry, &absent);
                if (status == NEBULA_NOT_FOUND)
                        continue;
                if (!status) {
                        old_entry_done(&entry);
                        status = store->ops->old_move(store, from, to, &absent);
                }
                if (status && status != NEBULA_NOT_FOUND) {
                        if (error)
                                *error = absent;
                        return status;
                }
        }
        return NEBULA_OK;
}

static bool names_record(const struct manifest *manifest, const char *path)
{
        for (size_t i = 0; i < manifest->record_count; i++)
                if (!strcmp(manifest->records[i].path, path))
                        return true;
        return false;
}

static bool names_waiting(const struct manifest *manifest, uint64_t generation, const char *path)
{
        for (size_t i = 0; i < manifest->file_count; i++)
                if (manifest->files[i].generation == generation && !strcmp(manifest->files[i].path, path))
                        return true;
        return false;
}

/* Empties and removes <directory>/.nebula/g<N>, but for files that `keep` (may be NULL) still names there. */
static enum nebula_status clear_generation(struct store *store, const struct manifest *keep, const char *directory,
                                           const char *name, uint64_t generation, struct nebula_error *error)
{
        struct old_list list;
        struct nebula_error full;
        char prefix[MANIFEST_KEY_MAX], key[MANIFEST_KEY_MAX];
        bool is_kept = false;
        enum nebula_status status = manifest_key(key, directory, MANIFEST_DIRECTORY, error);

        if (!status)
                status = manifest_key(prefix, key, name, error);
        if (status)
                return status;
        status = store->ops->old_list(store, prefix, &list, error);
        if (status)
                return status == NEBULA_NOT_FOUND ? NEBULA_OK : status;
        for (size_t i = 0; i < list.count && !status; i++) {
                if (list.entries[i].is_directory || (keep && names_waiting(keep, generation, list.entries[i].name))) {
                        is_kept = true;
                        continue;
                }
                status = manifest_key(key, prefix, list.entries[i].name, error);
                if (!status)
                        status = store->ops->old_remove(store, key, error);
        }
        old_list_done(&list);
        if (!status && !is_kept && store->ops->old_remove_directory)
                store->ops->old_remove_directory(store, prefix, &full); /* somebody adds to it: then it stays */
        return status;
}

/* What lies in <directory>/.nebula, whose key is `ret_prefix` then; nothing, when there is none. */
static enum nebula_status list_private(struct store *store, const char *directory, char ret_prefix[MANIFEST_KEY_MAX],
                                       struct old_list *ret_list, struct nebula_error *error)
{
        enum nebula_status status = manifest_key(ret_prefix, directory, MANIFEST_DIRECTORY, error);

        if (!status)
                status = store->ops->old_list(store, ret_prefix, ret_list, error);
        if (status != NEBULA_NOT_FOUND)
                return status;
        memset(ret_list, 0, sizeof *ret_list);
        return NEBULA_OK;
}

enum nebula_status manifest_clear_private(struct store *store, const struct manifest *keep, const char *directory,
                                          uint64_t generation_min, uint64_t generation_max, unsigned kinds,
                                          int64_t before_ns, struct nebula_error *error)
{
        struct old_list list;
        char prefix[MANIFEST_KEY_MAX], key[MANIFEST_KEY_MAX];
        enum nebula_status status = list_private(store, directory, prefix, &list, error);

        if (status)
                return status;
        for (size_t i = 0; i < list.count && !status; i++) {
                const struct old_entry *entry = &list.entries[i];
                uint64_t generation = 0;
                enum manifest_entry_kind kind = manifest_entry_kind(entry->name, &generation);
                char path[512];

                if (!(kinds & 1u << kind) || entry->is_directory != (kind == ENTRY_GENERATION) ||
                    entry->mtime_ns > before_ns)
                        continue;
                if (kind == ENTRY_TEMPORARY && entry->is_foreign)
                        continue; /* another user's write in progress */
                if (manifest_has_generation(kind) &&
                    (generation < generation_min || generation > generation_max))
                        continue;
                snprintf(path, sizeof path, MANIFEST_DIRECTORY "/%s", entry->name);
                if (kind == ENTRY_GENERATION)
                        status = clear_generation(store, keep, directory, entry->name, generation, error);
                else if (kind != ENTRY_RECORD || !keep || !names_record(keep, path)) {
                        status = manifest_key(key, prefix, entry->name, error);
                        if (!status)
                                status = store->ops->old_remove(store, key, error);
                }
        }
        old_list_done(&list);
        return status;
}

enum nebula_status manifest_settle(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        char directory[256];
        enum nebula_status status = name_encode(manifest->tag, directory, error);

        /* Where objects cannot be moved they stay where they wait: readers look there first. */
        if (!status && store->ops->old_move)
                status = move_waiting(store, manifest, directory, error);
        /* Younger generations are somebody's work in progress. */
        if (!status)
                status = manifest_clear_private(store, manifest, directory, 0, manifest->generation,
                                                1u << ENTRY_RECORD | 1u << ENTRY_CLAIM | 1u << ENTRY_GENERATION,
                                                INT64_MAX, error);
        return status;
}

/* Another program writes the tag again. What lies in place may be of that writing, or be carried over by it. */
static enum nebula_status is_followed(struct store *store, const struct manifest *manifest, const char *directory, bool *ret_followed,
                                      struct nebula_error *error)
{
        struct old_list list;
        char prefix[MANIFEST_KEY_MAX];
        enum nebula_status status = list_private(store, directory, prefix, &list, error);

        *ret_followed = false;
        if (status)
                return status;
        for (size_t i = 0; i < list.count; i++) {
                uint64_t generation = 0;
                enum manifest_entry_kind kind = manifest_entry_kind(list.entries[i].name, &generation);

                *ret_followed = *ret_followed || kind == ENTRY_MANIFEST || (manifest_has_generation(kind) && generation > manifest->generation);
        }
        old_list_done(&list);
        return NEBULA_OK;
}

static bool exists(struct store *store, const char *key)
{
        struct old_entry entry;

        if (store->ops->old_stat(store, key, &entry, NULL))
                return false;
        old_entry_done(&entry);
        return true;
}

/* Until another manifest, `manifest_at`, is there. */
static enum nebula_status remove_files(struct store *store, const struct manifest *manifest, const char *directory,
                                       const char *manifest_at, bool *ret_followed, struct nebula_error *error)
{
        enum nebula_status status = is_followed(store, manifest, directory, ret_followed, error);

        for (size_t i = 0; i < manifest->file_count && !status && !*ret_followed; i++) {
                const struct manifest_file *file = &manifest->files[i];
                char key[MANIFEST_KEY_MAX];

                *ret_followed = exists(store, manifest_at);
                if (*ret_followed)
                        break;
                status = manifest_key(key, directory, file->path, error);
                if (!status)
                        status = store->ops->old_remove(store, key, error);
                if (!status)
                        status = manifest_waiting_key(key, directory, file->generation, file->path, error);
                if (!status)
                        status = store->ops->old_remove(store, key, error);
        }
        return status;
}

void manifest_remove_directories(struct store *store, const char *directory)
{
        char key[MANIFEST_KEY_MAX];
        struct nebula_error full; /* something foreign is inside: then the directory stays */

        if (!store->ops->old_remove_directory || manifest_key(key, directory, MANIFEST_DIRECTORY, &full) ||
            store->ops->old_remove_directory(store, key, &full))
                return;
        store->ops->old_remove_directory(store, directory, &full);
}

/* A later writing of the tag has taken the place of this one, whose files went with that. */
static enum nebula_status check_not_rewritten(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        struct manifest now = { 0 };
        struct nebula_error failure = { 0 };
        enum nebula_status status = manifest_load(store, manifest->tag, &now, &failure);

        if (status == NEBULA_NOT_FOUND)
                return NEBULA_OK; /* a removal that was interrupted */
        if (status) {
                if (error)
                        *error = failure;
                return status;
        }
        if (now.generation != manifest->generation || now.sequence != manifest->sequence)
                status = error_set(error, NEBULA_BUSY, 0, "\"%.200s\" was written again meanwhile: it stays", manifest->tag);
        manifest_done(&now);
        return status;
}

enum nebula_status manifest_remove(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        char directory[256], key[MANIFEST_KEY_MAX];
        bool followed = false;
        enum nebula_status status = name_encode(manifest->tag, directory, error);

        if (!status)
                status = manifest_key(key, directory, MANIFEST_DIRECTORY "/manifest.json", error);
        if (!status)
                status = check_not_rewritten(store, manifest, error);
        if (!status)
                status = store->ops->old_remove(store, key, error);
        /* The records go last: they are what tells a sweep after a crash which files were ours. */
        if (!status)
                status = remove_files(store, manifest, directory, key, &followed, error);
        if (!status && !followed)
                status = is_followed(store, manifest, directory, &followed, error);
        if (!status && !followed)
                status = manifest_clear_private(store, NULL, directory, 0, manifest->generation,
                                                1u << ENTRY_RECORD | 1u << ENTRY_CLAIM | 1u << ENTRY_GENERATION | 1u << ENTRY_COMMITTING,
                                                INT64_MAX, error);
        if (!status && !followed)
                status = manifest_clear_private(store, NULL, directory, 0, 0, 1u << ENTRY_TEMPORARY,
                                                os->wall_ns() - IN_PROGRESS_NS, error);
        if (!status && !followed)
                manifest_remove_directories(store, directory);
        return status;
}
