#include "agent/persist/records.h"

#include <stdlib.h>
#include <string.h>

#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "base/error.h"
#include "store/document.h"
#include "store/manifest_keys.h"
#include "store/repair_object.h"
#include "sum/sum.h"

#define BYTES_MAX DOCUMENT_TEXT_MAX /* of a version: all records of a checkpoint of 6 TiB */

static bool add(struct records *records, const char *text, size_t size, uint64_t crc64)
{
        struct record_text *grown = realloc(records->texts, (records->count + 1) * sizeof *grown);
        char *copy = malloc(size + 1);

        if (grown)
                records->texts = grown;
        if (!grown || !copy) {
                free(copy);
                return false;
        }
        memcpy(copy, text, size);
        copy[size] = 0;
        grown[records->count++] = (struct record_text){ copy, size, crc64 };
        records->bytes += size;
        return true;
}

static const struct record_text *find(const struct records *records, size_t size, uint64_t crc64)
{
        for (size_t i = 0; i < records->count; i++)
                if (records->texts[i].size == size && records->texts[i].crc64 == crc64)
                        return &records->texts[i];
        return NULL;
}

void records_keep(struct version *version, const char *text, size_t size)
{
        struct records *records = &version->persist->records;
        uint64_t crc64 = sum_crc64(0, text, size);

        if (size <= BYTES_MAX && records->bytes <= BYTES_MAX - size && !find(records, size, crc64))
                add(records, text, size, crc64); /* without memory, a damaged one is repaired from another storage only */
}

const struct record_text *records_find(const struct records *records, const struct manifest *manifest, size_t index)
{
        return find(records, manifest->records[index].size, manifest->records[index].crc64);
}

void records_done(struct records *records)
{
        for (size_t i = 0; i < records->count; i++)
                free(records->texts[i].text);
        free(records->texts);
        *records = (struct records){ 0 };
}

enum nebula_status records_copy(const struct version *version, struct records *ret_records, struct nebula_error *error)
{
        const struct records *records = &version->persist->records;

        for (size_t i = 0; i < records->count; i++)
                if (!add(ret_records, records->texts[i].text, records->texts[i].size, records->texts[i].crc64)) {
                        records_done(ret_records);
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the records of \"%s\"", version->tag);
                }
        return NEBULA_OK;
}

static bool is_own(const struct plan *plan, const struct manifest_record *entry)
{
        bool is_so = !plan->spread;

        for (size_t i = 0; i < plan->part_count; i++)
                is_so = is_so || plan->parts[i].rank == entry->rank;
        return is_so;
}

/* Of a file that carries over, or of a writing that an earlier agent has brought to storage. */
static void read_record(const struct plan *plan, size_t index)
{
        const struct writer *writer = &plan->writer;
        const struct manifest_record *entry = &writer->manifest.records[index];
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;

        if (record_key(writer->directory, entry->writing, entry->rank, key, NULL) || document_get(writer->store, key, &text, &size, NULL, NULL))
                return;
        if (repair_is_record(&writer->manifest, index, text, size)) {
                catalogue_lock(plan->catalogue);
                records_keep(plan->version, text, size);
                catalogue_unlock(plan->catalogue);
        }
        free(text);
}

/* Both have mostly the same order, so each search begins behind the entry that the one before has found. Lock held. */
static void forget_others(struct records *records, const struct manifest *manifest)
{
        size_t count = 0, next = 0;

        for (size_t i = 0; i < records->count; i++) {
                struct record_text *one = &records->texts[i];
                bool is_named = false;

                for (size_t k = 0; k < manifest->record_count && !is_named; k++) {
                        const struct manifest_record *entry = &manifest->records[next++ % manifest->record_count];

                        is_named = entry->size == one->size && entry->crc64 == one->crc64;
                }
                if (is_named) {
                        records->texts[count++] = *one;
                } else {
                        records->bytes -= one->size;
                        free(one->text);
                }
        }
        records->count = count;
}

static bool lacks(const struct plan *plan, size_t index)
{
        const struct manifest *manifest = &plan->writer.manifest;
        bool result;

        catalogue_lock(plan->catalogue);
        result = plan->version->in_memory && !records_find(&plan->version->persist->records, manifest, index);
        catalogue_unlock(plan->catalogue);
        return result;
}

void records_conclude(const struct plan *plan)
{
        const struct manifest *manifest = &plan->writer.manifest;

        catalogue_lock(plan->catalogue);
        forget_others(&plan->version->persist->records, manifest);
        catalogue_unlock(plan->catalogue);
        for (size_t i = 0; i < manifest->record_count; i++)
                if (is_own(plan, &manifest->records[i]) && lacks(plan, i))
                        read_record(plan, i);
}

enum nebula_status records_report(struct catalogue *catalogue, uint64_t version_id, char **ret_text, struct nebula_error *error)
{
        const struct version *version;
        struct records records = { 0 };
        json_t *texts = json_array();
        enum nebula_status status;

        catalogue_lock(catalogue);
        version = catalogue_version(catalogue, version_id);
        status = version ? records_copy(version, &records, error) :
                 error_set(error, NEBULA_NOT_FOUND, 0, "the agent does not know this checkpoint any more: look it up again");
        catalogue_unlock(catalogue);
        for (size_t i = 0; i < records.count; i++)
                json_array_append_new(texts, json_stringn(records.texts[i].text, records.texts[i].size));
        records_done(&records);
        *ret_text = status ? NULL : json_dumps(texts, JSON_COMPACT);
        json_decref(texts);
        return status || *ret_text ? status : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the records of a checkpoint");
}
