/* Files staged, then the records that name them, then the files in place. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/persist/persist_private.h"
#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/document.h"
#include "sum/sum.h"

#define RIVAL_PATIENCE_NS INT64_C(5000000000) /* from records to manifest is a rename for each file, and a few syncs */

_Static_assert(IMAGE_CHUNK_BYTES == BULK_REQUEST_BYTES, "a chunk that was summed is a piece that may be written");

/* Some files of a plan that are written together. */
struct batch {
        struct plan_file *files;
        size_t file_count, mapped_count; /* mapped_count: so many of them have been looked at, and are mapped unless they are carried */
        struct store_object *objects;
        size_t object_count;
};

/* What is written, and the keys. Images are mapped: the writer needs them before they are sealed. */
static enum nebula_status list_objects(struct catalogue *catalogue, const struct plan *plan, struct batch *batch, struct nebula_error *error)
{
        for (; batch->mapped_count < batch->file_count; batch->mapped_count++) {
                struct plan_file *file = &batch->files[batch->mapped_count];
                enum nebula_status status;
                char key[MANIFEST_KEY_MAX];
                void *data;

                if (file->carried)
                        continue;
                status = sealing_map(catalogue, file->image, &data, error);
                if (status)
                        return status;
                if (manifest_find_file(&plan->before, file->name))
                        snprintf(key, sizeof key, "%s/" MANIFEST_DIRECTORY "/g%" PRIu64 "/%s", plan->directory, plan->generation,
                                 file->path);
                else
                        snprintf(key, sizeof key, "%s/%s", plan->directory, file->path);
                batch->objects[batch->object_count++] = (struct store_object){ strdup(key), data, file->size, &file->feed };
                if (bulk_feed_init(&file->feed, file->size) || !batch->objects[batch->object_count - 1].key) {
                        batch->mapped_count++;
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", plan->tag);
                }
        }
        return NEBULA_OK;
}

static void batch_done(struct catalogue *catalogue, struct batch *batch)
{
        for (size_t i = 0; i < batch->mapped_count; i++)
                if (!batch->files[i].carried)
                        sealing_unmap(catalogue, batch->files[i].image);
        for (size_t i = 0; i < batch->object_count; i++)
                free((char *)(uintptr_t)batch->objects[i].key);
        free(batch->objects);
}

/* Each piece goes to storage as soon as it was summed. */
static enum nebula_status stage_batch(struct catalogue *catalogue, struct version *version, struct store *store, const struct plan *plan,
                                      struct batch *batch, struct store_staged **ret_staged, struct nebula_error *error)
{
        struct sealing sealing = { .catalogue = catalogue, .version = version, .files = batch->files, .file_count = batch->file_count,
                                   .is_ahead = plan->is_ahead };
        enum nebula_status status = list_objects(catalogue, plan, batch, error);
        pthread_t thread;
        bool is_started;

        if (status || !batch->object_count)
                return status;
        is_started = !os_thread_start(&thread, sealing_run, &sealing, true);
        if (!is_started)
                sealing_run(&sealing);
        status = store->ops->old_stage(store, batch->objects, batch->object_count, ret_staged, error);
        sealing.is_vain = status != NEBULA_OK;
        if (is_started)
                pthread_join(thread, NULL);
        if (sealing.status) { /* then no record will name what was written */
                status = sealing.status;
                if (error)
                        *error = sealing.error;
        }
        return status;
}

enum nebula_status persist_stage(struct catalogue *catalogue, struct version *version, struct store *store,
                                 struct plan *plan, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        plan->staged = calloc(plan->file_count / PERSIST_BATCH + 1, sizeof *plan->staged);
        if (!plan->staged)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", plan->tag);
        for (size_t first = 0; first < plan->file_count && !status; first += PERSIST_BATCH) {
                size_t left = plan->file_count - first;
                struct batch batch = { .files = plan->files + first, .file_count = left < PERSIST_BATCH ? left : PERSIST_BATCH };

                batch.objects = calloc(batch.file_count, sizeof *batch.objects);
                status = batch.objects ? stage_batch(catalogue, version, store, plan, &batch, &plan->staged[plan->staged_count++], error)
                                       : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", plan->tag);
                batch_done(catalogue, &batch);
        }
        return status;
}

static size_t collect_record(const struct plan *plan, uint32_t rank, struct record *record)
{
        for (size_t i = 0; i < plan->file_count; i++) {
                const struct plan_file *file = &plan->files[i];
                struct record_file *to = &record->files[record->file_count];

                if (file->carried || file->rank != rank)
                        continue;
                strcpy(to->name, file->name);
                strcpy(to->path, file->path);
                to->size = file->size;
                to->is_zip = file->is_zip;
                to->chunk_bytes = IMAGE_CHUNK_BYTES;
                to->chunks = file->chunks;
                to->chunk_count = file->chunk_count;
                record->file_count++;
        }
        return record->file_count;
}

static bool same_files(const struct record *a, const struct record *b)
{
        bool same = a->file_count == b->file_count && a->rank == b->rank && a->generation == b->generation && !strcmp(a->run, b->run) &&
                    !strcmp(a->job, b->job);

        for (size_t i = 0; same && i < a->file_count; i++)
                same = !strcmp(a->files[i].name, b->files[i].name) && a->files[i].size == b->files[i].size &&
                       a->files[i].chunk_count == b->files[i].chunk_count &&
                       (!a->files[i].chunk_count ||
                        !memcmp(a->files[i].chunks, b->files[i].chunks, a->files[i].chunk_count * sizeof *a->files[i].chunks));
        return same;
}

/* An agent before this one got as far as this record, and another node may have written the manifest that names it. */
static bool already_recorded(struct store *store, const char *key, const struct record *record)
{
        struct record found = { 0 };
        char *text;
        size_t size;
        bool same;

        if (old_read_text(store, key, DOCUMENT_TEXT_MAX, &text, &size, NULL))
                return false;
        same = !record_parse(text, size, &found, NULL) && same_files(record, &found);
        record_done(&found);
        free(text);
        return same;
}

/*
 * A record of this rank and generation is there already. One that an earlier try, or a run before this one, has left is replaced.
 * Another run's may be of a writing that goes on: then its manifest comes soon. If none does, whoever wrote it has died.
 */
static enum nebula_status take_over(struct catalogue *catalogue, struct store *store, const char *key, const char *text, size_t size,
                                    struct version *version, struct nebula_error *error)
{
        struct record found = { 0 };
        char *there;
        size_t there_size;
        bool is_free;
        enum nebula_status status = old_read_text(store, key, DOCUMENT_TEXT_MAX, &there, &there_size, error);

        if (status && status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT)
                return status;
        if (!status) {
                status = record_parse(there, there_size, &found, error);
                free(there);
        }
        catalogue_lock(catalogue);
        is_free = status || (!strcmp(found.job, version->job->name) &&
                             ancestry_covers(version, found.run, (uint64_t)(found.captured > 0 ? found.captured * 1e9 : 0)));
        version->rival_ns = is_free ? 0 : version->rival_ns ? version->rival_ns : os->now_ns();
        is_free = is_free || os->now_ns() - version->rival_ns >= RIVAL_PATIENCE_NS;
        catalogue_unlock(catalogue);
        status = is_free ? store->ops->old_write(store, key, text, size, error)
                         : error_set(error, NEBULA_STORAGE, 0, "run \"%.100s\" of job \"%.100s\" is writing \"%.150s\" in this storage path, too", found.run,
                                     found.job, version->tag);
        record_done(&found);
        return status;
}

static enum nebula_status put_record(struct catalogue *catalogue, struct store *store, const char *key, const char *text, size_t size,
                                     struct version *version, const struct plan *plan, struct nebula_error *error)
{
        enum nebula_status status;

        if (plan->spread) /* rivals are told apart by what they have captured (node_documents.c) */
                return store->ops->old_write(store, key, text, size, error);
        status = store->ops->old_create(store, key, text, size, error);
        return status == NEBULA_BUSY ? take_over(catalogue, store, key, text, size, version, error) : status;
}

static enum nebula_status write_record(struct catalogue *catalogue, struct store *store, const struct job *job, struct version *version,
                                       struct plan *plan, uint32_t rank, struct nebula_error *error)
{
        struct manifest_record *entry = &plan->manifest.records[plan->manifest.record_count];
        struct record record = { .generation = plan->generation, .rank = rank, .world = version->world,
                                 .persisted = catalogue_now() };
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status;

        record.files = calloc(plan->file_count + 1, sizeof *record.files);
        if (!record.files)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a record of \"%s\"", plan->tag);
        collect_record(plan, rank, &record);
        strcpy(record.tag, plan->tag);
        strcpy(record.job, job->name);
        strcpy(record.run, version->run);
        for (size_t i = 0; i < plan->part_count; i++)
                if (plan->parts[i].rank == rank) {
                        record.begun = plan->parts[i].begun;
                        record.captured = plan->parts[i].captured;
                }
        /* record_path is relative to the tag's directory. */
        record_path(rank, plan->generation, entry->path);
        snprintf(key, sizeof key, "%s/%s", plan->directory, entry->path);
        if (plan->spread && already_recorded(store, key, &record)) {
                free(record.files);
                return NEBULA_OK; /* the manifest is made from what lies in storage */
        }
        if (plan->spread) {
                char path[64];

                claim_path(rank, plan->generation, path);
                snprintf(key, sizeof key, "%s/%s", plan->directory, path);
        }
        status = record_format(&record, &text, &size, error);
        free(record.files); /* the chunks are the version's */
        if (status)
                return status;
        status = put_record(catalogue, store, key, text, size, version, plan, error);
        entry->size = size;
        entry->generation = plan->generation;
        entry->rank = rank;
        entry->crc64 = sum_crc64(0, text, size);
        free(text);
        if (status)
                return status;
        if (!plan->spread && !*plan->claim_key) {
                strcpy(plan->claim_key, key);
                plan->claim_crc64 = entry->crc64;
        }
        plan->manifest.record_count++;
        return NEBULA_OK;
}

static bool rank_writes(const struct plan *plan, uint32_t rank)
{
        for (size_t i = 0; i < plan->file_count; i++)
                if (!plan->files[i].carried && plan->files[i].rank == rank)
                        return true;
        /* Another node waits for the record of every rank, also of one that saved nothing. */
        for (size_t i = 0; plan->spread && i < plan->part_count; i++)
                if (plan->parts[i].rank == rank)
                        return true;
        return false;
}

/*
 * Before the files are in place: a record tells a sweep which of them are ours. But to other nodes it says that
 * they are in place; for these it is a claim until then.
 */
enum nebula_status persist_write_records(struct catalogue *catalogue, struct store *store, const struct job *job,
                                         struct version *version, struct plan *plan, struct nebula_error *error)
{
        uint32_t last = 0;

        plan->manifest.records = calloc(plan->file_count + plan->part_count + plan->before.record_count + 1,
                                        sizeof *plan->manifest.records);
        if (!plan->manifest.records)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", plan->tag);
        for (size_t i = 0; i < plan->file_count; i++)
                last = plan->files[i].rank > last ? plan->files[i].rank : last;
        for (size_t i = 0; plan->spread && i < plan->part_count; i++)
                last = plan->parts[i].rank > last ? plan->parts[i].rank : last;
        for (uint32_t rank = 0; rank <= last; rank++) {
                enum nebula_status status;

                if (!rank_writes(plan, rank))
                        continue;
                status = write_record(catalogue, store, job, version, plan, rank, error);
                if (status)
                        return status;
        }
        /* Records that a carried file needs stay listed. */
        for (size_t i = 0; i < plan->before.record_count; i++) {
                const struct manifest_record *old = &plan->before.records[i];
                bool needed = false;

                for (size_t j = 0; j < plan->file_count; j++)
                        needed = needed || (plan->files[j].carried && plan->files[j].rank == old->rank &&
                                            plan->files[j].generation == old->generation);
                if (needed)
                        plan->manifest.records[plan->manifest.record_count++] = *old;
        }
        return NEBULA_OK;
}

void persist_leave(struct store *store, const struct plan *plan)
{
        char *text;
        size_t size;

        if (!*plan->claim_key || old_read_text(store, plan->claim_key, DOCUMENT_TEXT_MAX, &text, &size, NULL))
                return;
        if (sum_crc64(0, text, size) == plan->claim_crc64)
                store->ops->old_remove(store, plan->claim_key, NULL);
        free(text);
}

enum nebula_status persist_place(struct store *store, struct plan *plan, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < plan->staged_count && !status; i++) {
                struct store_staged *staged = plan->staged[i];

                plan->staged[i] = NULL;
                status = staged ? store->ops->old_place(store, staged, error) : NEBULA_OK;
        }
        for (size_t i = 0; !status && plan->spread && i < plan->manifest.record_count; i++) {
                const struct manifest_record *record = &plan->manifest.records[i];
                char path[64], from[MANIFEST_KEY_MAX], to[MANIFEST_KEY_MAX];

                claim_path(record->rank, record->generation, path);
                snprintf(from, sizeof from, "%s/%s", plan->directory, path);
                snprintf(to, sizeof to, "%s/%s", plan->directory, record->path);
                status = store->ops->old_move(store, from, to, error);
        }
        return status;
}
