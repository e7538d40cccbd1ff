/* One version to storage, in the order of docs/formats.md: files staged, records, files in place, manifest, settling, latest. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/background.h"
#include "agent/commit.h"
#include "agent/log.h"
#include "agent/storage.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/announce.h"
#include "store/document.h"
#include "sum/sum.h"

#define KEY_MAX 1200

_Static_assert(IMAGE_CHUNK_BYTES == BULK_REQUEST_BYTES, "a chunk that was summed is a piece that may be written");

struct plan_file {
        char name[IPC_NAME_MAX], path[IPC_NAME_MAX];
        uint32_t rank;
        bool is_zip, carried;
        uint64_t size, generation;
        struct image *image;
        uint64_t *chunks; /* the version's, or sealed here and then given to it */
        size_t chunk_count;
        struct bulk_feed feed; /* what of it may be written; without room: not in use */
};
/* What the worker needs of a version, copied so that the lock is free while it writes. */
struct plan {
        char tag[IPC_NAME_MAX], run[IPC_NAME_MAX], directory[IPC_NAME_MAX]; /* directory: the tag, encoded */
        struct plan_file *files;
        size_t file_count;
        struct part *parts;
        size_t part_count;
        uint64_t generation, sequence;
        bool spread; /* other nodes hold the rest: numbers were agreed, carried files are the manifest writer's matter */
        struct store_staged *staged; /* NULL: no file is to be placed */
        struct manifest before; /* in storage, of this tag; file_count and generation 0: none */
        struct manifest manifest;
};

static void plan_done(struct plan *plan, struct store *store)
{
        if (plan->staged)
                store->ops->unstage(store, plan->staged);
        for (size_t i = 0; i < plan->file_count; i++)
                bulk_feed_done(&plan->files[i].feed);
        free(plan->files);
        free(plan->parts);
        manifest_done(&plan->before);
        manifest_done(&plan->manifest);
}

static enum nebula_status plan_init(struct catalogue *catalogue, struct version *version, struct plan *plan,
                                    struct nebula_error *error)
{
        enum nebula_status status = name_encode(version->tag, plan->directory, error);

        if (status)
                return status;
        catalogue_lock(catalogue);
        snprintf(plan->tag, sizeof plan->tag, "%s", version->tag);
        snprintf(plan->run, sizeof plan->run, "%s", version->run);
        plan->generation = version->generation;
        plan->sequence = version->sequence;
        plan->spread = version->spread;
        plan->files = calloc(version->file_count + 1, sizeof *plan->files);
        plan->parts = calloc(version->part_count + 1, sizeof *plan->parts);
        if (!plan->files || !plan->parts)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", version->tag);
        for (size_t i = 0; !status && i < version->file_count; i++) {
                const struct agent_file *file = &version->files[i];
                struct plan_file *to = &plan->files[plan->file_count++];

                *to = (struct plan_file){
                        .rank = file->rank, .is_zip = file->format == IPC_FORMAT_ZIP, .size = file->size,
                        .generation = file->generation, .image = file->image && !file->image->restored ? file->image : NULL,
                        .chunks = file->chunks, .chunk_count = file->chunk_count,
                };
                strcpy(to->name, file->name);
                status = name_encode(file->name, to->path, error);
        }
        for (size_t i = 0; !status && i < version->part_count; i++)
                plan->parts[plan->part_count++] = version->parts[i];
        catalogue_unlock(catalogue);
        return status;
}

static const struct manifest_file *stored_file(const struct manifest *manifest, const char *name)
{
        for (size_t i = 0; i < manifest->file_count; i++)
                if (!strcmp(manifest->files[i].name, name))
                        return &manifest->files[i];
        return NULL;
}

static enum nebula_status load_before(struct store *store, const struct job *job, struct plan *plan, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        enum nebula_status status = manifest_load(store, plan->tag, &plan->before, &failure);

        if (status == NEBULA_CORRUPT)
                log_event(LOG_LEVEL_WARN, "%s in %s is damaged and is written anew: %s", plan->tag, job->persist_path, failure.message);
        if (status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT) {
                memset(&plan->before, 0, sizeof plan->before);
                return NEBULA_OK;
        }
        if (status) {
                if (error)
                        *error = failure;
                return status;
        }
        if (strcmp(plan->before.job, job->name))
                return error_set(error, NEBULA_INVALID, 0,
                                 "\"%.200s\" in this storage path belongs to job \"%.100s\", and this is job \"%.100s\": give each job "
                                 "its own path", plan->tag, plan->before.job, job->name);
        return NEBULA_OK;
}

/* Which files storage has already, from an older generation; and numbers that are later than what it holds. */
static enum nebula_status plan_carry(struct plan *plan, struct nebula_error *error)
{
        uint64_t own = plan->generation;
        size_t kept = 0;

        if (plan->spread && plan->before.generation >= plan->generation)
                return error_set(error, NEBULA_CORRUPT, 0,
                                 "\"%.150s\" in storage was written by run \"%.100s\" while run \"%.100s\" wrote it too", plan->tag,
                                 plan->before.run, plan->run);
        if (plan->before.generation >= plan->generation)
                plan->generation = plan->before.generation + 1;
        if (plan->before.sequence >= plan->sequence)
                plan->sequence = plan->before.sequence + 1;
        for (size_t i = 0; i < plan->file_count; i++) {
                struct plan_file *file = &plan->files[i];
                const struct manifest_file *stored = stored_file(&plan->before, file->name);

                file->carried = file->generation != own && stored && stored->generation == file->generation &&
                                stored->rank == file->rank && stored->size == file->size;
                if (plan->spread && (file->carried || !file->image))
                        continue; /* who writes the manifest carries it over */
                if (!file->carried && !file->image)
                        return error_set(error, NEBULA_CORRUPT, 0,
                                         "file \"%.200s\" of \"%.100s\" was carried over from an older generation that is gone from storage",
                                         file->name, plan->tag);
                if (!file->carried)
                        file->generation = plan->generation;
                if (plan->spread)
                        plan->files[kept++] = *file;
        }
        if (plan->spread)
                plan->file_count = kept;
        return NEBULA_OK;
}

/* Checksums on a thread of low priority, of one file or of all that are written. */
struct sealing {
        struct catalogue *catalogue;
        struct version *version;
        struct plan_file *files;
        size_t file_count;
        enum nebula_status status;
        struct nebula_error error;
};

static void tell(void *argument, uint64_t offset)
{
        bulk_feed_tell(argument, offset);
}

/* The checksums belong to the version, so that another try, or a copy for a peer, need not compute them again. */
static void keep_chunks(struct catalogue *catalogue, struct version *version, const struct plan_file *file)
{
        struct agent_file *own;

        catalogue_lock(catalogue);
        own = version_file(version, file->name);
        if (own && !own->chunks) {
                own->chunks = file->chunks;
                own->chunk_count = file->chunk_count;
        }
        catalogue_unlock(catalogue);
}

/* One at a time: the persist worker and the replica thread may want the same image, and the second finds it done. */
static pthread_mutex_t seal_lock = PTHREAD_MUTEX_INITIALIZER;

static enum nebula_status seal_file(struct catalogue *catalogue, struct version *version, struct plan_file *file,
                                    struct nebula_error *error)
{
        struct bulk_feed *feed = file->feed.offsets ? &file->feed : NULL;
        const struct agent_file *own;
        enum nebula_status status;
        void *data;

        pthread_mutex_lock(&seal_lock);
        catalogue_lock(catalogue);
        own = version_file(version, file->name);
        if (own && own->chunks) {
                file->chunks = own->chunks;
                file->chunk_count = own->chunk_count;
        }
        catalogue_unlock(catalogue);
        status = memory_map(file->image, &data, error);
        if (!status && !file->chunks) {
                status = image_seal_telling(data, file->size, file->is_zip, IMAGE_CHUNK_BYTES, feed ? tell : NULL, feed,
                                            &file->chunks, &file->chunk_count, error);
                if (status)
                        error_prefix(error, "file \"%.100s\" in memory is not what its trainer promised", file->name);
                else
                        keep_chunks(catalogue, version, file);
        } else if (!status && feed) {
                bulk_feed_tell_all(feed);
        }
        pthread_mutex_unlock(&seal_lock);
        return status;
}

/* Ends every feed, so that nobody waits for what will not come. */
static void seal(void *argument)
{
        struct sealing *sealing = argument;

        for (size_t i = 0; i < sealing->file_count; i++) {
                struct plan_file *file = &sealing->files[i];

                if (!file->carried && !sealing->status)
                        sealing->status = seal_file(sealing->catalogue, sealing->version, file, &sealing->error);
                if (file->feed.offsets)
                        bulk_feed_end(&file->feed);
        }
}

static void *seal_main(void *argument)
{
        seal(argument);
        return NULL;
}

enum nebula_status storage_seal(struct catalogue *catalogue, struct version *version, const char *name, const void **ret_data,
                                uint64_t **ret_chunks, struct nebula_error *error)
{
        struct plan_file file = { 0 };
        struct sealing sealing = { .catalogue = catalogue, .version = version, .files = &file, .file_count = 1 };
        const struct agent_file *own;

        catalogue_lock(catalogue);
        own = version_file(version, name);
        if (own) {
                snprintf(file.name, sizeof file.name, "%s", own->name);
                file.is_zip = own->format == IPC_FORMAT_ZIP;
                file.size = own->size;
                file.image = own->image;
        }
        catalogue_unlock(catalogue);
        if (!file.image)
                return error_set(error, NEBULA_NOT_FOUND, 0, "file \"%.200s\" is not in memory", name);
        background_run(seal, &sealing);
        if (sealing.status) {
                if (error)
                        *error = sealing.error;
                return sealing.status;
        }
        *ret_data = file.image->data;
        *ret_chunks = file.chunks;
        return NEBULA_OK;
}

/* What is written, and the keys, which the caller frees. Images are mapped: the writer needs them before they are sealed. */
static enum nebula_status list_objects(struct plan *plan, struct store_object *objects, size_t *ret_count, struct nebula_error *error)
{
        size_t count = 0;

        for (size_t i = 0; i < plan->file_count; i++) {
                struct plan_file *file = &plan->files[i];
                enum nebula_status status;
                char key[KEY_MAX];
                void *data;

                if (file->carried)
                        continue;
                pthread_mutex_lock(&seal_lock);
                status = memory_map(file->image, &data, error);
                pthread_mutex_unlock(&seal_lock);
                if (status)
                        return status;
                if (stored_file(&plan->before, file->name))
                        snprintf(key, sizeof key, "%s/" MANIFEST_DIRECTORY "/g%" PRIu64 "/%s", plan->directory, plan->generation,
                                 file->path);
                else
                        snprintf(key, sizeof key, "%s/%s", plan->directory, file->path);
                objects[count] = (struct store_object){ strdup(key), data, file->size, &file->feed };
                if (bulk_feed_init(&file->feed, file->size) || !objects[count].key)
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", plan->tag);
                *ret_count = ++count;
        }
        return NEBULA_OK;
}

/* Each piece goes to storage as soon as it was summed. */
static enum nebula_status stage_files(struct catalogue *catalogue, struct version *version, struct store *store,
                                      struct plan *plan, struct nebula_error *error)
{
        struct sealing sealing = { .catalogue = catalogue, .version = version, .files = plan->files, .file_count = plan->file_count };
        struct store_object *objects = calloc(plan->file_count + 1, sizeof *objects);
        size_t count = 0;
        pthread_t thread;
        bool is_started;
        enum nebula_status status = objects ? list_objects(plan, objects, &count, error)
                                            : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", plan->tag);

        if (!status && count) {
                is_started = !os_thread_start(&thread, seal_main, &sealing, true);
                if (!is_started)
                        seal(&sealing);
                status = store->ops->stage(store, objects, count, &plan->staged, error);
                if (is_started)
                        pthread_join(thread, NULL);
                if (sealing.status) { /* then no record will name what was written */
                        status = sealing.status;
                        if (error)
                                *error = sealing.error;
                }
        }
        for (size_t i = 0; objects && i < plan->file_count; i++)
                free((char *)(uintptr_t)objects[i].key);
        free(objects);
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

        if (store_read_text(store, key, DOCUMENT_TEXT_MAX, &text, &size, NULL))
                return false;
        same = !record_parse(text, size, &found, NULL) && same_files(record, &found);
        record_done(&found);
        free(text);
        return same;
}

static enum nebula_status write_record(struct store *store, const struct job *job, const struct version *version,
                                       struct plan *plan, uint32_t rank, struct nebula_error *error)
{
        struct manifest_record *entry = &plan->manifest.records[plan->manifest.record_count];
        struct record record = { .generation = plan->generation, .rank = rank, .world = version->world,
                                 .persisted = catalogue_now() };
        char key[KEY_MAX], *text;
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
        status = store->ops->write(store, key, text, size, error);
        entry->size = size;
        entry->generation = plan->generation;
        entry->rank = rank;
        entry->crc64 = sum_crc64(0, text, size);
        free(text);
        if (!status)
                plan->manifest.record_count++;
        return status;
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
static enum nebula_status write_records(struct store *store, const struct job *job, const struct version *version,
                                        struct plan *plan, struct nebula_error *error)
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
                status = write_record(store, job, version, plan, rank, error);
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

static enum nebula_status place_files(struct store *store, struct plan *plan, struct nebula_error *error)
{
        enum nebula_status status = plan->staged ? store->ops->place(store, plan->staged, error) : NEBULA_OK;

        plan->staged = NULL;
        for (size_t i = 0; !status && plan->spread && i < plan->manifest.record_count; i++) {
                const struct manifest_record *record = &plan->manifest.records[i];
                char path[64], from[KEY_MAX], to[KEY_MAX];

                claim_path(record->rank, record->generation, path);
                snprintf(from, sizeof from, "%s/%s", plan->directory, path);
                snprintf(to, sizeof to, "%s/%s", plan->directory, record->path);
                status = store->ops->move(store, from, to, error);
        }
        return status;
}

static void fill_manifest(const struct job *job, const struct version *version, struct plan *plan)
{
        struct manifest *manifest = &plan->manifest;

        strcpy(manifest->tag, plan->tag);
        strcpy(manifest->job, job->name);
        strcpy(manifest->run, version->run);
        manifest->generation = plan->generation;
        manifest->sequence = plan->sequence;
        manifest->step = version->step;
        manifest->world = version->world;
}

static enum nebula_status put_manifest(struct store *store, const struct plan *plan, struct nebula_error *error)
{
        char key[KEY_MAX], *text;
        size_t size;
        enum nebula_status status = manifest_format(&plan->manifest, &text, &size, error);

        if (status)
                return status;
        snprintf(key, sizeof key, "%s/" MANIFEST_DIRECTORY "/manifest.json", plan->directory);
        status = store->ops->write(store, key, text, size, error);
        free(text);
        return status;
}

static enum nebula_status write_manifest(struct store *store, const struct job *job, const struct version *version,
                                         struct plan *plan, struct nebula_error *error)
{
        struct manifest *manifest = &plan->manifest;

        fill_manifest(job, version, plan);
        manifest->files = calloc(plan->file_count + 1, sizeof *manifest->files);
        if (!manifest->files)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", plan->tag);
        for (size_t i = 0; i < plan->file_count; i++) {
                struct manifest_file *to = &manifest->files[manifest->file_count++];

                strcpy(to->name, plan->files[i].name);
                strcpy(to->path, plan->files[i].path);
                to->size = plan->files[i].size;
                to->generation = plan->files[i].generation;
                to->rank = plan->files[i].rank;
        }
        return put_manifest(store, plan, error);
}

/* Files of other nodes, which storage has now. */
static void name_others(struct catalogue *catalogue, struct version *version, const struct manifest *manifest)
{
        for (size_t i = 0; !strcmp(manifest->tag, version->tag) && i < manifest->file_count; i++) {
                const struct manifest_file *other = &manifest->files[i];
                struct agent_file *file = version_file(version, other->name);

                if (file && file->generation != other->generation)
                        version_file_change(catalogue, version, file); /* another rank wrote that name too, and its file stands */
                else if (file || !(file = version_file_add(version, other->name)))
                        continue;
                file->rank = other->rank;
                file->size = other->size;
                file->generation = other->generation;
        }
}

/* The plan's manifest becomes the job's knowledge of that tag. True: it is the job's newest. */
static bool publish(struct catalogue *catalogue, struct job *job, struct version *version, struct plan *plan)
{
        struct manifest_scan *stored = &job->stored;
        struct manifest *grown;
        size_t at = 0;
        int64_t newest;
        bool is_newest;

        catalogue_lock(catalogue);
        version_set_generation(version, plan->generation);
        version->sequence = plan->sequence;
        if (plan->sequence > catalogue->last_sequence)
                catalogue->last_sequence = plan->sequence;
        while (at < stored->count && strcmp(stored->manifests[at].tag, plan->tag))
                at++;
        if (at < stored->count) {
                manifest_done(&stored->manifests[at]);
                memmove(&stored->manifests[at], &stored->manifests[at + 1], (stored->count - at - 1) * sizeof *grown);
                stored->count--;
        }
        grown = realloc(stored->manifests, (stored->count + 1) * sizeof *grown);
        if (grown) {
                stored->manifests = grown;
                for (at = stored->count++; at && grown[at - 1].sequence > plan->sequence; at--)
                        grown[at] = grown[at - 1];
                grown[at] = plan->manifest;
                memset(&plan->manifest, 0, sizeof plan->manifest);
        }
        if (version->spread && grown)
                name_others(catalogue, version, &grown[at]);
        newest = manifest_scan_newest(stored, job->name);
        is_newest = newest >= 0 && !strcmp(stored->manifests[newest].tag, plan->tag);
        catalogue_unlock(catalogue);
        return is_newest;
}

static void settle(struct store *store, struct plan *plan, const struct manifest *manifest)
{
        struct nebula_error error = { 0 };

        /* It is durable already: readers look in the waiting place, and the next start tries again. */
        if (manifest_settle(store, manifest, &error))
                log_event(LOG_LEVEL_WARN, "%s is durable but not settled: %s", plan->tag, error.message);
}

static void write_latest(struct store *store, const struct plan *plan)
{
        struct nebula_error error = { 0 };
        char text[IPC_NAME_MAX + 2];
        int size = snprintf(text, sizeof text, "%s\n", plan->directory);

        if (store->ops->write(store, "latest", text, (uint64_t)size, &error))
                log_event(LOG_LEVEL_WARN, "the hint \"latest\" could not be written: %s", error.message);
}

/* Adds what one rank's record says to the manifest. NEBULA_BUSY: it is not there yet. */
static enum nebula_status gather_record(struct store *store, struct plan *plan, uint32_t rank, struct nebula_error *error)
{
        struct manifest *manifest = &plan->manifest;
        struct manifest_record *entry = &manifest->records[manifest->record_count];
        struct record record = { 0 };
        struct manifest_file *files;
        char key[KEY_MAX], *text;
        size_t size;
        enum nebula_status status;

        record_path(rank, plan->generation, entry->path);
        snprintf(key, sizeof key, "%s/%s", plan->directory, entry->path);
        status = store_read_text(store, key, DOCUMENT_TEXT_MAX, &text, &size, error);
        if (status)
                return status == NEBULA_NOT_FOUND ? NEBULA_BUSY : status;
        status = record_parse(text, size, &record, error);
        entry->size = size;
        entry->crc64 = sum_crc64(0, text, size);
        entry->generation = plan->generation;
        entry->rank = rank;
        free(text);
        if (status)
                return NEBULA_BUSY; /* of a run that was killed, perhaps; its place is still to be taken */
        if (strcmp(record.run, plan->run) || strcmp(record.tag, plan->tag) || record.generation != plan->generation || record.rank != rank) {
                record_done(&record);
                return NEBULA_BUSY;
        }
        files = realloc(manifest->files, (manifest->file_count + record.file_count + 1) * sizeof *files);
        if (!files) {
                record_done(&record);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", plan->tag);
        }
        manifest->files = files;
        for (size_t i = 0; i < record.file_count; i++) {
                struct manifest_file *to = &files[manifest->file_count++];

                memset(to, 0, sizeof *to);
                strcpy(to->name, record.files[i].name);
                strcpy(to->path, record.files[i].path);
                to->size = record.files[i].size;
                to->generation = plan->generation;
                to->rank = rank;
        }
        manifest->record_count++;
        record_done(&record);
        return NEBULA_OK;
}

/* Files of the generation before that no rank wrote again, and the records that describe them. */
static enum nebula_status gather_carried(struct plan *plan, struct nebula_error *error)
{
        struct manifest *manifest = &plan->manifest;
        struct manifest_file *files = realloc(manifest->files, (manifest->file_count + plan->before.file_count + 1) * sizeof *files);
        size_t own = manifest->file_count;

        if (!files)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", plan->tag);
        manifest->files = files;
        for (size_t i = 0; i < plan->before.file_count; i++) {
                const struct manifest_file *old = &plan->before.files[i];
                bool again = false;

                for (size_t j = 0; j < own && !again; j++)
                        again = !strcmp(files[j].name, old->name);
                if (!again)
                        files[manifest->file_count++] = *old;
        }
        for (size_t i = 0; i < plan->before.record_count; i++) {
                const struct manifest_record *old = &plan->before.records[i];
                bool needed = false;

                for (size_t j = own; j < manifest->file_count && !needed; j++)
                        needed = files[j].rank == old->rank && files[j].generation == old->generation;
                if (needed)
                        manifest->records[manifest->record_count++] = *old;
        }
        return NEBULA_OK;
}

/*
 * This node's records are in storage. Whoever holds rank 0 writes the manifest once all records are there, anybody
 * when it has not for a while; the others look for it. NEBULA_BUSY: look again.
 */
static enum nebula_status gather(struct catalogue *catalogue, struct store *store, struct job *job, struct version *version,
                                 struct plan *plan, struct nebula_error *error)
{
        struct committed committed = { 0 };
        bool writes = version->leads || os->now_ns() - version->waiting_since_ns > (int64_t)catalogue->takeover_s * 1000000000;
        char key[KEY_MAX], *text;
        size_t size;
        enum nebula_status status;

        for (size_t i = 0; i < plan->part_count; i++)
                writes = writes || !plan->parts[i].rank;
        if (!writes)
                return NEBULA_BUSY;
        snprintf(key, sizeof key, "%s/" MANIFEST_DIRECTORY "/committed.json", plan->directory);
        status = store_read_text(store, key, DOCUMENT_TEXT_MAX, &text, &size, error);
        if (!status) {
                status = committed_parse(text, size, &committed, error);
                free(text);
        }
        if (status)
                return status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT ? NEBULA_BUSY : status;
        if (strcmp(committed.of.run, plan->run) || committed.generation != plan->generation)
                status = NEBULA_BUSY; /* a later writing: when that is complete this one is given up */
        manifest_done(&plan->manifest); /* of this node's records, when it has just written them */
        memset(&plan->manifest, 0, sizeof plan->manifest);
        fill_manifest(job, version, plan);
        if (!status) {
                plan->manifest.records = calloc(committed.rank_count + plan->before.record_count + 1, sizeof *plan->manifest.records);
                if (!plan->manifest.records)
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", plan->tag);
        }
        for (size_t i = 0; !status && i < committed.rank_count; i++)
                status = gather_record(store, plan, committed.ranks[i], error);
        if (!status)
                status = gather_carried(plan, error);
        if (!status)
                status = put_manifest(store, plan, error);
        if (!status) {
                settle(store, plan, &plan->manifest);
                if (publish(catalogue, job, version, plan))
                        write_latest(store, plan);
        }
        committed_done(&committed);
        return status;
}

enum nebula_status storage_persist(struct catalogue *catalogue, struct job *job, struct version *version,
                                   struct nebula_error *error)
{
        struct plan plan = { 0 };
        struct store *store = NULL;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (!status)
                status = plan_init(catalogue, version, &plan, error);
        if (!status)
                status = load_before(store, job, &plan, error);
        if (status)
                goto done;
        if (plan.before.generation == version->generation &&
            (plan.spread ? !strcmp(plan.before.run, plan.run) : plan.before.sequence == version->sequence)) {
                /* An agent before this one got as far as the manifest, and not to saying so. */
                settle(store, &plan, &plan.before);
                plan.manifest = plan.before;
                plan.sequence = plan.before.sequence;
                memset(&plan.before, 0, sizeof plan.before);
                if (publish(catalogue, job, version, &plan))
                        write_latest(store, &plan);
                goto done;
        }
        if (plan.spread && version->recorded_here) {
                status = gather(catalogue, store, job, version, &plan, error);
                goto done;
        }
        if (plan.before.file_count)
                settle(store, &plan, &plan.before); /* what still waits there would be lost to a reader otherwise */
        status = plan_carry(&plan, error);
        if (!status)
                status = stage_files(catalogue, version, store, &plan, error);
        if (!status)
                status = write_records(store, job, version, &plan, error);
        if (!status)
                status = place_files(store, &plan, error);
        if (!status && plan.spread) {
                catalogue_lock(catalogue);
                version->recorded_here = true;
                version->waiting_since_ns = os->now_ns();
                version->poll_count = 0;
                catalogue_unlock(catalogue);
                status = gather(catalogue, store, job, version, &plan, error);
                goto done;
        }
        if (!status)
                status = write_manifest(store, job, version, &plan, error);
        if (!status) {
                settle(store, &plan, &plan.manifest);
                if (publish(catalogue, job, version, &plan))
                        write_latest(store, &plan);
        }
done:
        plan_done(&plan, store);
        return status;
}
