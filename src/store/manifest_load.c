#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/manifest.h"
#include "store/manifest_private.h"
#include "sum/sum.h"

static bool digits_to(const char **text, uint64_t *ret_value)
{
        const char *at = *text;
        uint64_t value = 0;

        /* 18 digits stay below INT64_MAX. */
        for (; *at >= '0' && *at <= '9' && at - *text < 18; at++)
                value = value * 10 + (uint64_t)(*at - '0');
        if (at == *text)
                return false;
        *text = at;
        *ret_value = value;
        return true;
}

enum manifest_entry_kind manifest_entry_kind(const char *name, uint64_t *ret_generation)
{
        uint64_t rank, generation = 1;
        const char *at = name;
        bool is_claim;

        if (!strcmp(name, "manifest.json"))
                return ENTRY_MANIFEST;
        if (!strncmp(name, "tmp-", 4))
                return ENTRY_TEMPORARY;
        if (!strcmp(name, "committed.json"))
                return ENTRY_COMMITTING;
        if (!strncmp(name, "captured-", 9)) {
                at += 9;
                if (!digits_to(&at, &rank))
                        return ENTRY_FOREIGN;
                if (!strncmp(at, ".w", 2)) {
                        at += 2;
                        if (!digits_to(&at, &generation))
                                return ENTRY_FOREIGN;
                }
                return !strcmp(at, ".json") ? ENTRY_COMMITTING : ENTRY_FOREIGN;
        }
        if (*at == 'g') {
                at++;
                if (!digits_to(&at, ret_generation) || *at)
                        return ENTRY_FOREIGN;
                return ENTRY_GENERATION;
        }
        is_claim = !strncmp(name, "claim-", 6);
        if (!is_claim && strncmp(name, "rank-", 5))
                return ENTRY_FOREIGN;
        at += is_claim ? 6 : 5;
        if (!digits_to(&at, &rank))
                return ENTRY_FOREIGN;
        if (!strncmp(at, ".g", 2)) {
                at += 2;
                if (!digits_to(&at, &generation))
                        return ENTRY_FOREIGN;
        }
        if (strcmp(at, ".json"))
                return ENTRY_FOREIGN;
        *ret_generation = generation;
        return is_claim ? ENTRY_CLAIM : ENTRY_RECORD;
}

enum nebula_status manifest_key(char ret_key[MANIFEST_KEY_MAX], const char *directory, const char *path,
                                struct nebula_error *error)
{
        int length = snprintf(ret_key, MANIFEST_KEY_MAX, "%s/%s", directory, path);

        if (length < 0 || length >= MANIFEST_KEY_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the path \"%.80s...\" is too long", path);
        return NEBULA_OK;
}

enum nebula_status manifest_waiting_key(char ret_key[MANIFEST_KEY_MAX], const char *directory, uint64_t generation,
                                        const char *path, struct nebula_error *error)
{
        int length = snprintf(ret_key, MANIFEST_KEY_MAX, "%s/" MANIFEST_DIRECTORY "/g%" PRIu64 "/%s", directory,
                              generation, path);

        if (length < 0 || length >= MANIFEST_KEY_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the path \"%.80s...\" is too long", path);
        return NEBULA_OK;
}

enum nebula_status manifest_load(struct store *store, const char *tag, struct manifest *ret_manifest, struct nebula_error *error)
{
        char directory[256], key[MANIFEST_KEY_MAX];
        struct manifest manifest;
        char *text;
        size_t size;
        enum nebula_status status = name_encode(tag, directory, error);

        if (status)
                return status;
        status = manifest_key(key, directory, MANIFEST_DIRECTORY "/manifest.json", error);
        if (status)
                return status;
        status = old_read_text(store, key, DOCUMENT_TEXT_MAX, &text, &size, error);
        if (status)
                return status;
        status = manifest_parse(text, size, &manifest, error);
        free(text);
        if (!status && strcmp(manifest.tag, tag)) {
                /* A copied or renamed directory: its keys would lead into another checkpoint. */
                status = error_set(error, NEBULA_CORRUPT, 0,
                                   "the manifest belongs to \"%s\": the directory was renamed or copied, give it back its name",
                                   manifest.tag);
                manifest_done(&manifest);
        }
        if (status) {
                error_prefix(error, "%s/%s", store->root, key);
                return status;
        }
        *ret_manifest = manifest;
        return NEBULA_OK;
}

bool manifest_is_gone(struct store *store, const struct manifest *manifest)
{
        struct manifest now = { 0 };
        enum nebula_status status = manifest_load(store, manifest->tag, &now, NULL);
        bool gone = status == NEBULA_NOT_FOUND ||
                    (!status && (now.generation != manifest->generation || now.sequence != manifest->sequence));

        manifest_done(&now);
        return gone;
}

static enum nebula_status check_record(const struct manifest *manifest, const struct manifest_record *entry,
                                       const char *text, size_t size, struct record *ret_record,
                                       struct nebula_error *error)
{
        struct record record;
        enum nebula_status status;

        if (size != entry->size)
                return error_set(error, NEBULA_CORRUPT, 0, "the record has %zu bytes, the manifest says %" PRIu64, size,
                                 entry->size);
        status = record_parse(text, size, &record, error);
        if (status)
                return status;
        if (sum_crc64(0, text, size) != entry->crc64)
                status = error_set(error, NEBULA_CORRUPT, 0, "the record is not the one that the manifest was made from");
        else if (record.rank != entry->rank || record.generation != entry->generation ||
                 strcmp(record.tag, manifest->tag))
                status = error_set(error, NEBULA_CORRUPT, 0,
                                   "the record is of rank %" PRIu32 ", generation %" PRIu64 " of \"%s\": not of its name",
                                   record.rank, record.generation, record.tag);
        if (status) {
                record_done(&record);
                return status;
        }
        *ret_record = record;
        return NEBULA_OK;
}

enum nebula_status manifest_load_record(struct store *store, const struct manifest *manifest, size_t index,
                                        struct record *ret_record, struct nebula_error *error)
{
        const struct manifest_record *entry = &manifest->records[index];
        char directory[256], key[MANIFEST_KEY_MAX];
        char *text;
        size_t size;
        enum nebula_status status = name_encode(manifest->tag, directory, error);

        if (status)
                return status;
        status = manifest_key(key, directory, entry->path, error);
        if (status)
                return status;
        status = old_read_text(store, key, DOCUMENT_TEXT_MAX, &text, &size, error);
        if (status)
                return status;
        status = check_record(manifest, entry, text, size, ret_record, error);
        free(text);
        if (status)
                error_prefix(error, "%s/%s", store->root, key);
        return status;
}

const struct manifest_file *manifest_find_file(const struct manifest *manifest, const char *name)
{
        for (size_t i = 0; i < manifest->file_count; i++)
                if (!strcmp(manifest->files[i].name, name))
                        return &manifest->files[i];
        return NULL;
}

enum nebula_status record_take_file(struct record *record, const struct manifest_file *file,
                                    struct record_file *ret_file, struct nebula_error *error)
{
        for (size_t i = 0; i < record->file_count; i++) {
                struct record_file *found = &record->files[i];

                if (strcmp(found->name, file->name) || strcmp(found->path, file->path))
                        continue;
                if (found->size != file->size)
                        return error_set(error, NEBULA_CORRUPT, 0,
                                         "\"%s\" has %" PRIu64 " bytes in the record of rank %" PRIu32 " and %" PRIu64 " in the manifest",
                                         file->name, found->size, file->rank, file->size);
                *ret_file = *found;
                *found = (struct record_file){ 0 };
                return NEBULA_OK;
        }
        return error_set(error, NEBULA_CORRUPT, 0, "the record of rank %" PRIu32 ", generation %" PRIu64 " of \"%s\" does not hold \"%s\"",
                         file->rank, file->generation, record->tag, file->name);
}

enum nebula_status manifest_load_file(struct store *store, const struct manifest *manifest, const char *name,
                                      struct record_file *ret_file, struct nebula_error *error)
{
        const struct manifest_file *file = manifest_find_file(manifest, name);
        struct record record;
        enum nebula_status status;

        if (!file)
                return error_set(error, NEBULA_NOT_FOUND, 0, "\"%s\" has no file \"%s\"", manifest->tag, name);
        for (size_t i = 0; i < manifest->record_count; i++) {
                if (manifest->records[i].rank != file->rank || manifest->records[i].generation != file->generation)
                        continue;
                status = manifest_load_record(store, manifest, i, &record, error);
                if (status)
                        return status;
                status = record_take_file(&record, file, ret_file, error);
                record_done(&record);
                return status;
        }
        return error_set(error, NEBULA_CORRUPT, 0, "the manifest of \"%s\" lists no record for \"%s\"", manifest->tag, name);
}

enum nebula_status manifest_file_key(struct store *store, const struct manifest *manifest, const struct manifest_file *file,
                                     char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error)
{
        struct old_entry entry;
        char directory[256];
        enum nebula_status status = name_encode(manifest->tag, directory, error);

        if (status)
                return status;
        status = manifest_waiting_key(ret_key, directory, file->generation, file->path, error);
        if (status)
                return status;
        status = store->ops->old_stat(store, ret_key, &entry, error);
        if (!status)
                old_entry_done(&entry);
        if (status != NEBULA_NOT_FOUND)
                return status;
        return manifest_key(ret_key, directory, file->path, error);
}

bool manifest_file_moved(struct store *store, const struct manifest *manifest, const struct manifest_file *file, const char *key)
{
        char now[MANIFEST_KEY_MAX];

        return !manifest_file_key(store, manifest, file, now, NULL) && strcmp(now, key) != 0;
}
