/* Describes the files that this node has written, for its record of the version. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/persist/persist_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "store/http/crypt.h"
#include "store/lanes.h"
#include "store/manifest_keys.h"
#include "store/record.h"
#include "store/trust.h"

#define SUMS_MAX 8u /* threads that read files for a signature */

static int by_rank(const void *a, const void *b)
{
        const struct record_rank *x = a, *y = b;

        return (x->rank > y->rank) - (x->rank < y->rank);
}

/* A rank of several nodes is covered even if it saved nothing: the writer of the manifest waits for all. */
static void collect_ranks(const struct plan *plan, struct record *record)
{
        size_t kept = 0;

        for (size_t i = 0; i < plan->part_count; i++)
                record->ranks[record->rank_count++] = (struct record_rank){ plan->parts[i].rank, plan->parts[i].begun, plan->parts[i].captured };
        for (size_t i = 0; i < plan->file_count; i++)
                if (!plan->files[i].carried && (!i || plan->files[i].rank != plan->files[i - 1].rank))
                        record->ranks[record->rank_count++] = (struct record_rank){ .rank = plan->files[i].rank };
        qsort(record->ranks, record->rank_count, sizeof *record->ranks, by_rank);
        for (size_t i = 0; i < record->rank_count; i++) {
                struct record_rank *last = &record->ranks[kept ? kept - 1 : 0];

                if (!kept || last->rank != record->ranks[i].rank)
                        record->ranks[kept++] = record->ranks[i];
                else if (record->ranks[i].captured > last->captured)
                        *last = record->ranks[i];
        }
        record->rank_count = kept;
}

static void collect_files(const struct plan *plan, struct record *record)
{
        for (size_t i = 0; i < plan->file_count; i++) {
                const struct plan_file *file = &plan->files[i];
                struct record_file *to = &record->files[record->file_count];

                if (file->carried)
                        continue;
                strcpy(to->name, file->name);
                to->rank = file->rank;
                to->size = file->size;
                to->is_zip = file->is_zip;
                to->is_apart = file->is_apart;
                to->mark = file->written.mark;
                to->referred = file->written.referred;
                to->chunk_bytes = IMAGE_CHUNK_BYTES;
                to->chunks = file->chunks;
                to->chunk_count = file->chunk_count;
                record->file_count++;
        }
}

/* The chunks stay the plan's. */
static enum nebula_status fill_record(const struct plan *plan, struct record *record, struct nebula_error *error)
{
        const struct manifest *manifest = &plan->writer.manifest;

        record->number = manifest->number;
        record->world = manifest->world;
        record->persisted = catalogue_now();
        record->files = calloc(plan->file_count + 1, sizeof *record->files);
        record->ranks = calloc(plan->file_count + plan->part_count + 1, sizeof *record->ranks);
        if (!record->files || !record->ranks)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the record of \"%s\"", manifest->tag);
        strcpy(record->tag, manifest->tag);
        strcpy(record->job, manifest->job);
        strcpy(record->run, manifest->run);
        strcpy(record->writing, plan->writing);
        collect_ranks(plan, record);
        collect_files(plan, record);
        return NEBULA_OK;
}

struct summing {
        const struct plan *plan;
        struct record *record;
        const struct plan_file **files; /* per file of the record */
};

static enum nebula_status sum_file(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        const struct summing *summing = argument;
        const struct plan_file *file = summing->files[index];
        struct record_file *to = &summing->record->files[index];
        void *data;
        enum nebula_status status = sealing_map(summing->plan->catalogue, file->image, &data, error);

        if (status)
                return status;
        to->has_sha256 = crypt_sha256(data, file->size, to->sha256);
        sealing_unmap(summing->plan->catalogue, file->image);
        return to->has_sha256 ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the SHA-256 of \"%s\"", file->name);
}

/* For the signature. Each file takes a thread. */
static enum nebula_status sum_files(const struct plan *plan, struct record *record, struct nebula_error *error)
{
        struct summing summing = { plan, record, calloc(plan->file_count + 1, sizeof *summing.files) };
        uint32_t width = os->cpu_count();
        size_t count = 0;
        enum nebula_status status;

        if (!summing.files)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the record of \"%s\"", record->tag);
        for (size_t i = 0; i < plan->file_count; i++)
                if (!plan->files[i].carried)
                        summing.files[count++] = &plan->files[i];
        status = lanes_run(count, width < SUMS_MAX ? width : SUMS_MAX, sum_file, &summing, error);
        free(summing.files);
        return status;
}

/* One record for the files that this node has written. A node that shares the version writes one even if its ranks saved nothing. */
enum nebula_status persist_describe(void *argument, struct nebula_error *error)
{
        struct plan *plan = argument;
        struct writer *writer = &plan->writer;
        struct writer_share *share;
        size_t written = 0;
        enum nebula_status status;

        writer->is_carried = calloc(writer->before.manifest.file_count + 1, sizeof *writer->is_carried);
        if (!writer->is_carried)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", writer->manifest.tag);
        for (size_t i = 0; i < plan->file_count; i++) {
                if (plan->files[i].carried)
                        writer->is_carried[plan->files[i].before_index] = true;
                else
                        written++;
        }
        if (!written && !plan->spread)
                return NEBULA_OK;
        share = writer_add_share(writer, error);
        if (!share)
                return NEBULA_NO_MEMORY;
        share->lends_chunks = true;
        status = fill_record(plan, &share->record, error);
        return !status && writer->store->trust && writer->store->trust->own.key ? sum_files(plan, &share->record, error) : status;
}

static bool same_files(const struct record *own, const struct record *found)
{
        bool same = own->file_count == found->file_count && own->rank_count == found->rank_count && own->number == found->number &&
                    !strcmp(own->run, found->run) && !strcmp(own->job, found->job);

        for (size_t i = 0; same && i < own->rank_count; i++)
                same = own->ranks[i].rank == found->ranks[i].rank;
        for (size_t i = 0; same && i < own->file_count; i++)
                same = !strcmp(own->files[i].name, found->files[i].name) && own->files[i].size == found->files[i].size &&
                       own->files[i].chunk_count == found->files[i].chunk_count &&
                       (!own->files[i].chunk_count ||
                        !memcmp(own->files[i].chunks, found->files[i].chunks, own->files[i].chunk_count * sizeof *own->files[i].chunks));
        return same;
}

static bool is_own(struct store *store, const char *key, const struct record *own)
{
        struct record found = { 0 };
        char *text;
        size_t size;
        bool same;

        if (document_get(store, key, &text, &size, NULL, NULL))
                return false;
        same = !record_parse(text, size, &found, NULL) && same_files(own, &found);
        record_done(&found);
        free(text);
        return same;
}

bool persist_is_recorded(const struct plan *plan)
{
        const struct version *version = plan->version;
        struct store *store = plan->writer.store;
        struct record own = { 0 };
        struct store_list list;
        char prefix[MANIFEST_KEY_MAX], writing[WRITING_MAX], end[32];
        bool result = false;

        writing_prefix(version->job->name, version->run, version->writing, writing);
        snprintf(prefix, sizeof prefix, "%s/" MANIFEST_DIRECTORY "/%s", plan->writer.directory, writing);
        if (!fill_record(plan, &own, NULL) && !store_list_all(store, prefix, false, &list, NULL)) {
                snprintf(end, sizeof end, ".record-%05u.json", own.rank_count ? own.ranks[0].rank : 0);
                for (size_t i = 0; i < list.count && !result; i++) {
                        const char *at = strstr(list.entries[i].key + strlen(prefix), end);

                        result = at && !at[strlen(end)] && is_own(store, list.entries[i].key, &own);
                }
                store_list_done(&list);
        }
        free(own.files);
        free(own.ranks);
        return result;
}
