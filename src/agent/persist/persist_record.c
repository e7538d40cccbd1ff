/* This node's record of a version: the files that it has written, as one object. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/persist/persist_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "sum/sum.h"

static int by_rank(const void *a, const void *b)
{
        const struct record_rank *x = a, *y = b;

        return (x->rank > y->rank) - (x->rank < y->rank);
}

/* A rank of several nodes is covered also if it saved nothing: the writer of the manifest waits for all. */
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
static enum nebula_status describe(const struct job *job, const struct version *version, const struct plan *plan, struct record *ret_record,
                                   struct nebula_error *error)
{
        struct record record = { .number = plan->next_number, .generation = plan->generation, .world = version->world, .persisted = catalogue_now() };

        record.files = calloc(plan->file_count + 1, sizeof *record.files);
        record.ranks = calloc(plan->file_count + plan->part_count + 1, sizeof *record.ranks);
        if (!record.files || !record.ranks) {
                free(record.files);
                free(record.ranks);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the record of \"%s\"", plan->tag);
        }
        strcpy(record.tag, plan->tag);
        strcpy(record.job, job->name);
        strcpy(record.run, version->run);
        strcpy(record.writing, plan->writing);
        collect_ranks(plan, &record);
        collect_files(plan, &record);
        *ret_record = record;
        return NEBULA_OK;
}

static void done(struct record *record)
{
        free(record->files);
        free(record->ranks);
}

enum nebula_status persist_write_record(struct store *store, const struct job *job, const struct version *version, struct plan *plan,
                                        struct nebula_error *error)
{
        struct record record;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = describe(job, version, plan, &record, error);

        if (status)
                return status;
        if (!plan->spread && !record.file_count) {
                done(&record); /* all of it carries over, with the records that describe it */
                return NEBULA_OK;
        }
        plan->first_rank = record.ranks[0].rank;
        status = record_format(&record, &plan->record_text, &plan->record_size, error);
        done(&record);
        if (!status)
                status = (plan->spread ? claim_key : record_key)(plan->directory, plan->writing, plan->first_rank, key, error);
        return status ? status : store->ops->put(store, key, plan->record_text, plan->record_size, STORE_IF_ABSENT, NULL, NULL, error);
}

enum nebula_status persist_show_record(struct store *store, struct plan *plan, struct nebula_error *error)
{
        char claim[MANIFEST_KEY_MAX], key[MANIFEST_KEY_MAX];
        enum nebula_status status;

        if (!plan->spread || !plan->record_text)
                return NEBULA_OK;
        status = claim_key(plan->directory, plan->writing, plan->first_rank, claim, error);
        if (!status)
                status = record_key(plan->directory, plan->writing, plan->first_rank, key, error);
        if (!status)
                status = store->ops->put(store, key, plan->record_text, plan->record_size, STORE_IF_ABSENT, NULL, NULL, error);
        if (!status)
                store_drop(store, claim);
        return status;
}

void persist_describe_record(const struct plan *plan, struct manifest_record *ret_record)
{
        *ret_record = (struct manifest_record){
                .size = plan->record_size, .generation = plan->generation, .rank = plan->first_rank,
                .crc64 = sum_crc64(0, plan->record_text, plan->record_size),
        };
        strcpy(ret_record->writing, plan->writing);
}

static bool same_files(const struct record *own, const struct record *found)
{
        bool same = own->file_count == found->file_count && own->rank_count == found->rank_count && own->number == found->number &&
                    own->generation == found->generation &&
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

bool persist_is_recorded(struct store *store, const struct job *job, const struct version *version, struct plan *plan)
{
        struct record own;
        struct store_list list;
        char prefix[MANIFEST_KEY_MAX], writing[WRITING_MAX], end[32];
        bool result = false;

        if (describe(job, version, plan, &own, NULL))
                return false;
        writing_prefix(job->name, version->run, version->nodes.writing, writing);
        snprintf(prefix, sizeof prefix, "%s/" MANIFEST_DIRECTORY "/%s", plan->directory, writing);
        snprintf(end, sizeof end, ".record-%05u.json", own.rank_count ? own.ranks[0].rank : 0);
        if (!store_list_all(store, prefix, false, &list, NULL)) {
                for (size_t i = 0; i < list.count && !result; i++) {
                        const char *at = strstr(list.entries[i].key + strlen(prefix), end);

                        result = at && !at[strlen(end)] && is_own(store, list.entries[i].key, &own);
                }
                store_list_done(&list);
        }
        done(&own);
        return result;
}
