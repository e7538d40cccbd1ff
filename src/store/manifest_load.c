#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/document.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/record.h"
#include "store/signature.h"
#include "store/tag_log.h"
#include "sum/sum.h"

enum nebula_status manifest_load(struct store *store, const char *tag, struct manifest *ret_manifest, struct nebula_error *error)
{
        struct tag_log log;
        enum nebula_status status = tag_log_head(store, tag, &log, error);

        if (status)
                return status;
        if (log.is_unsound) {
                if (error)
                        *error = log.unsound;
                return log.unsound.status;
        }
        if (!log.number || log.is_removal)
                return error_set(error, NEBULA_NOT_FOUND, 0, "%s holds no checkpoint \"%s\"", store->root, tag);
        *ret_manifest = log.manifest;
        return NEBULA_OK;
}

bool manifest_is_gone(struct store *store, const struct manifest *manifest)
{
        struct manifest now = { 0 };
        enum nebula_status status = manifest_load(store, manifest->tag, &now, NULL);
        bool gone = status == NEBULA_NOT_FOUND ||
                    (!status && now.sequence != manifest->sequence);

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
                status = error_set(error, NEBULA_CORRUPT, 0, "the record has changed since the manifest was made from it");
        else if (record.ranks[0].rank != entry->rank || strcmp(record.writing, entry->writing) ||
                 strcmp(record.tag, manifest->tag))
                status = error_set(error, NEBULA_CORRUPT, 0,
                                   "the record is of rank %" PRIu32 ", writing \"%s\" of \"%s\", and its name says otherwise",
                                   record.ranks[0].rank, record.writing, record.tag);
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
        status = record_key(directory, entry->writing, entry->rank, key, error);
        if (status)
                return status;
        status = document_get(store, key, &text, &size, NULL, error);
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
        size_t low = 0, high = manifest->by_name ? manifest->file_count : 0;

        while (low < high) {
                size_t middle = low + (high - low) / 2;
                const struct manifest_file *file = &manifest->files[manifest->by_name[middle]];
                int order = strcmp(file->name, name);

                if (!order)
                        return file;
                if (order < 0)
                        low = middle + 1;
                else
                        high = middle;
        }
        for (size_t i = 0; !manifest->by_name && i < manifest->file_count; i++)
                if (!strcmp(manifest->files[i].name, name))
                        return &manifest->files[i];
        return NULL;
}

uint32_t *manifest_files_by_record(const struct manifest *manifest)
{
        uint32_t *order = calloc(manifest->file_count + 1, sizeof *order);
        size_t *place = calloc(manifest->record_count + 1, sizeof *place); /* index for the next file of each record */

        for (size_t i = 0; order && place && i < manifest->file_count; i++)
                place[manifest->files[i].record + 1]++;
        for (size_t i = 1; order && place && i < manifest->record_count; i++)
                place[i] += place[i - 1];
        for (size_t i = 0; order && place && i < manifest->file_count; i++)
                order[place[manifest->files[i].record]++] = (uint32_t)i;
        if (!place) {
                free(order);
                order = NULL;
        }
        free(place);
        return order;
}

static struct record_file *find_recorded(const struct record *record, const char *name)
{
        size_t low = 0, high = record->by_name ? record->file_count : 0;

        while (low < high) {
                size_t middle = low + (high - low) / 2;
                struct record_file *file = &record->files[record->by_name[middle]];
                int order = strcmp(file->name, name);

                if (!order)
                        return file;
                if (order < 0)
                        low = middle + 1;
                else
                        high = middle;
        }
        return NULL;
}

enum nebula_status record_take_file(struct record *record, const struct manifest_file *file,
                                    struct record_file *ret_file, struct nebula_error *error)
{
        struct record_file *found = find_recorded(record, file->name);

        if (!found || !found->chunk_bytes) /* absent, or taken by record_take_file */
                return error_set(error, NEBULA_CORRUPT, 0, "the record of rank %" PRIu32 ", writing \"%s\", of \"%s\" does not hold \"%s\"",
                                 file->rank, record->writing, record->tag, file->name);
        if (found->size != file->size || found->is_apart != file->is_apart || found->rank != file->rank)
                return error_set(error, NEBULA_CORRUPT, 0,
                                 "\"%s\" has %" PRIu64 " bytes in the record of rank %" PRIu32 " and %" PRIu64 " in the manifest",
                                 file->name, found->size, found->rank, file->size);
        *ret_file = *found;
        found->chunks = NULL;
        found->chunk_bytes = 0;
        return NEBULA_OK;
}

enum nebula_status manifest_load_file(struct store *store, const struct manifest *manifest, const char *name,
                                      struct record_file *ret_file, struct nebula_error *error)
{
        const struct manifest_file *file = manifest_find_file(manifest, name);
        struct record record;
        enum nebula_status status;

        if (!file)
                return error_set(error, NEBULA_NOT_FOUND, 0, "\"%s\" has no file \"%s\"%s%s", manifest->tag, name,
                                 *manifest->thinned ? ": keep_items has removed files of older versions: " : "", manifest->thinned);
        status = manifest_load_record(store, manifest, file->record, &record, error);
        if (status)
                return status;
        status = record_take_file(&record, file, ret_file, error);
        record_done(&record);
        if (!status)
                status = signature_take(store, manifest, ret_file, error);
        if (status)
                record_file_done(ret_file);
        return status;
}
