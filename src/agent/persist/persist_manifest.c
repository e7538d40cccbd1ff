/* The manifest, which makes a version durable: of this node's files, or of all nodes' records. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/memory/survival_log.h"
#include "agent/persist/persist_private.h"
#include "agent/commit/world.h"
#include "base/error.h"
#include "os/os.h"
#include "store/announce.h"
#include "store/document.h"
#include "sum/sum.h"

#define LATEST "latest"
#define LATEST_BYTES_MAX 256 /* an encoded tag and a newline */
#define SECOND_NS INT64_C(1000000000)

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
        manifest->line = plan->line;
        if (plan->spread || os->host_name(manifest->host, sizeof manifest->host) < 0)
                manifest->host[0] = 0; /* whichever node writes it, it has the same bytes */
}

static enum nebula_status put_manifest(struct store *store, const struct plan *plan, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status = manifest_format(&plan->manifest, &text, &size, error);

        if (status)
                return status;
        snprintf(key, sizeof key, "%s/" MANIFEST_DIRECTORY "/manifest.json", plan->directory);
        status = store->ops->old_write(store, key, text, size, error);
        free(text);
        return status;
}

/* One is there: the bytes are staged first, so that only a rename follows the last look at it. */
static enum nebula_status replace_manifest(struct catalogue *catalogue, struct store *store, struct version *version, const struct plan *plan,
                                           const struct store_object *object, struct nebula_error *error)
{
        struct store_staged *staged = NULL;
        enum nebula_status status = store->ops->old_stage(store, object, 1, &staged, error);

        if (status)
                return status;
        status = plan_look_again(catalogue, store, version, plan, error);
        if (!status)
                return store->ops->old_place(store, staged, error);
        store->ops->old_unstage(store, staged);
        return status;
}

/* As put_manifest, but nothing that has come to lie there since plan_load_before is replaced. */
static enum nebula_status commit_manifest(struct catalogue *catalogue, struct store *store, struct version *version,
                                          const struct plan *plan, struct nebula_error *error)
{
        struct store_object object = { 0 };
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status = manifest_format(&plan->manifest, &text, &size, error);

        if (status)
                return status;
        snprintf(key, sizeof key, "%s/" MANIFEST_DIRECTORY "/manifest.json", plan->directory);
        object.key = key;
        object.data = text;
        object.size = size;
        status = plan->before.generation ? NEBULA_BUSY : plan_look_again(catalogue, store, version, plan, error);
        if (!status)
                status = store->ops->old_create(store, key, text, size, error);
        if (status == NEBULA_BUSY)
                status = replace_manifest(catalogue, store, version, plan, &object, error);
        free(text);
        return status;
}

enum nebula_status persist_write_manifest(struct catalogue *catalogue, struct store *store, const struct job *job,
                                          struct version *version, struct plan *plan, struct nebula_error *error)
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
        return commit_manifest(catalogue, store, version, plan, error);
}

/* Files of other nodes, which storage has now. */
static void name_others(struct catalogue *catalogue, struct version *version, const struct manifest *manifest)
{
        for (size_t i = 0; i < manifest->file_count; i++) {
                const struct manifest_file *other = &manifest->files[i];
                struct agent_file *file = version_file(version, other->name);

                if (file && file->rank != other->rank)
                        version_file_change(catalogue, version, file); /* another rank wrote that name too, and its file stands */
                else if (file || !(file = version_file_add(version, other->name)))
                        continue;
                file->rank = other->rank;
                file->size = other->size;
        }
}

/* A later writing of the tag that carries this file over need not write it again. */
static bool tell_later(struct version *later, const struct agent_file *file)
{
        struct agent_file *same = file->image ? version_file(later, file->name) : NULL;

        if (!same || same->image != file->image)
                return false;
        same->generation = file->generation;
        same->stored = true;
        return true;
}

/* Each file is of the writing that the manifest says: one that was to carry over, and was in no storage, has been written with the rest. */
static void files_stored(struct catalogue *catalogue, struct version *version, const struct manifest *manifest)
{
        for (size_t i = 0; i < manifest->file_count; i++) {
                struct agent_file *file = version_file(version, manifest->files[i].name);

                if (!file)
                        continue;
                file->generation = manifest->files[i].generation;
                file->stored = true;
        }
        for (struct version *later = version->job->versions; later; later = later->next) {
                bool told = false;

                if (later == version || later->generation <= version->generation || strcmp(later->tag, version->tag))
                        continue;
                for (size_t i = 0; i < version->file_count; i++)
                        told = tell_later(later, &version->files[i]) || told;
                if (told) {
                        later->noted_count = 0;
                        survival_log_write(catalogue, later);
                }
        }
}

/* What this agent has written of the tag a later writing here may replace, whichever run that is of. */
static void set_base(struct version *version, uint64_t sequence)
{
        for (struct version *later = version->job->versions; later; later = later->next)
                if (later != version && later->generation > version->generation && !strcmp(later->tag, version->tag))
                        later->base_sequence = sequence;
        if (version->beginning != version->job->beginning)
                ancestry_add(version->job, version->run, sequence);
}

/* The plan's manifest becomes the job's knowledge of that tag. True: it is the job's newest. */
static bool make_known(struct catalogue *catalogue, struct job *job, struct version *version, struct plan *plan)
{
        struct manifest_scan *stored = &job->stored;
        const struct manifest *known;
        struct manifest *grown;
        size_t at = 0;
        int64_t newest;
        bool is_newest;

        catalogue_lock(catalogue);
        version_set_generation(version, plan->generation);
        version->sequence = plan->sequence;
        version->line = plan->manifest.line;
        commit_saw_sequence(job, plan->sequence);
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
        known = grown ? &grown[at] : &plan->manifest;
        set_base(version, known->sequence);
        if (version->spread)
                name_others(catalogue, version, known);
        files_stored(catalogue, version, known);
        manifest_scan_mark(stored);
        newest = manifest_scan_newest(stored, job->name);
        is_newest = newest >= 0 && !strcmp(stored->manifests[newest].tag, plan->tag);
        catalogue_unlock(catalogue);
        return is_newest;
}

void persist_settle(struct store *store, const struct plan *plan, const struct manifest *manifest)
{
        struct nebula_error error = { 0 };

        /* It is durable already: readers look in the waiting place, and the next start tries again. */
        if (manifest_settle(store, manifest, &error))
                log_event(LOG_LEVEL_WARN, "%s is durable but not settled: %s", plan->tag, error.message);
}

/* A hint is one line: an encoded tag that lies there, or one that names a step, since the user may have moved that version away. */
static bool is_hint(struct store *store, char *text, size_t size)
{
        struct old_entry entry;
        char tag[256];

        if (strlen(text) != size)
                return false;
        if (size && text[size - 1] == '\n')
                text[size - 1] = 0;
        if (name_decode(text, tag, NULL))
                return false;
        if (name_step(tag) >= 0)
                return true;
        if (store->ops->old_stat(store, text, &entry, NULL))
                return false;
        old_entry_done(&entry);
        return true;
}

/* The name is not Nebula's alone: what a user has put there stays. */
static bool may_write_latest(struct store *store)
{
        struct nebula_error failure = { 0 };
        struct old_entry entry;
        size_t size;
        char *text;
        bool result;
        enum nebula_status status = store->ops->old_stat(store, LATEST, &entry, &failure);

        if (status)
                return status != NEBULA_CORRUPT; /* a link; whatever else keeps us from looking also fails the write */
        result = !entry.is_directory && entry.size <= LATEST_BYTES_MAX;
        old_entry_done(&entry);
        if (!result || old_read_text(store, LATEST, LATEST_BYTES_MAX, &text, &size, &failure))
                return false;
        result = is_hint(store, text, size);
        free(text);
        return result;
}

static void write_latest(struct store *store, struct job *job, const struct plan *plan)
{
        struct nebula_error error = { 0 };
        char text[IPC_NAME_MAX + 2];
        int size = snprintf(text, sizeof text, "%s\n", plan->directory);

        if (!may_write_latest(store)) {
                if (!job->latest_told)
                        log_event(LOG_LEVEL_WARN, "%s/" LATEST " was not written by Nebula, and is left alone: it does not name the newest checkpoint. "
                                  "Move it away to have it written", store->root);
                job->latest_told = true;
                return;
        }
        if (store->ops->old_write(store, LATEST, text, (uint64_t)size, &error))
                log_event(LOG_LEVEL_WARN, "the hint \"latest\" could not be written: %s", error.message);
}

/* One that cannot be read again does not count: nothing would load what it stands for. */
static enum nebula_status find_manifest(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        struct manifest there = { 0 };
        enum nebula_status status = manifest_load(store, manifest->tag, &there, error);

        if (!status && (there.generation != manifest->generation || there.sequence != manifest->sequence))
                status = error_set(error, NEBULA_NOT_FOUND, 0, "the manifest of \"%.200s\" is that of another writing", manifest->tag);
        manifest_done(&there);
        return status;
}

static enum nebula_status find_all(struct store *store, const struct plan *plan, struct nebula_error *error)
{
        const struct manifest *manifest = &plan->manifest;
        struct old_entry entry;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = find_manifest(store, manifest, error);

        for (size_t i = 0; i < manifest->record_count && !status; i++) {
                snprintf(key, sizeof key, "%s/%s", plan->directory, manifest->records[i].path);
                status = store->ops->old_stat(store, key, &entry, error);
                if (!status)
                        old_entry_done(&entry);
        }
        for (size_t i = 0; i < manifest->file_count && !status; i++)
                status = manifest_check_file(store, manifest, &manifest->files[i], error);
        return status;
}

enum nebula_status persist_check(struct store *store, const struct plan *plan, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = plan->spread ? NEBULA_OK : find_all(store, plan, &failure);

        if (status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT) {
                if (status && error)
                        *error = failure;
                return status;
        }
        snprintf(key, sizeof key, "%s/" MANIFEST_DIRECTORY "/manifest.json", plan->directory);
        if (!manifest_is_gone(store, &plan->manifest))
                store->ops->old_remove(store, key, NULL); /* else the next try would take all for written */
        return error_set(error, NEBULA_STORAGE, 0, "another program has removed or replaced files of \"%.150s\" while it was written: %.250s",
                         plan->tag, failure.message);
}

/* Files of ranks that are no more: a reader that knows no manifests would take them for a part of this writing. */
static void remove_dropped(struct store *store, const struct plan *plan)
{
        struct nebula_error error = { 0 };
        struct old_entry entry;
        char key[MANIFEST_KEY_MAX];
        bool is_ours;

        for (size_t i = 0; i < plan->before.file_count; i++) {
                const struct manifest_file *old = &plan->before.files[i];

                if (old->rank < plan->manifest.world || manifest_find_file(&plan->manifest, old->name))
                        continue;
                snprintf(key, sizeof key, "%s/%s", plan->directory, old->path);
                if (store->ops->old_stat(store, key, &entry, &error))
                        continue;
                is_ours = !entry.is_directory && !entry.is_foreign && entry.size == old->size;
                old_entry_done(&entry);
                if (is_ours && store->ops->old_remove(store, key, &error))
                        log_event(LOG_LEVEL_WARN, "%s still has \"%s\", which is no part of it any more: %s", plan->tag, old->name, error.message);
        }
}

void persist_conclude(struct catalogue *catalogue, struct store *store, struct job *job, struct version *version, struct plan *plan)
{
        remove_dropped(store, plan);
        persist_settle(store, plan, &plan->manifest);
        if (make_known(catalogue, job, version, plan))
                write_latest(store, job, plan);
}

/* Of several nodes, the one that writes the manifest unless it is gone. */
static bool is_writer(const struct version *version, const struct plan *plan)
{
        bool writes = version->leads;

        for (size_t i = 0; i < plan->part_count; i++)
                writes = writes || !plan->parts[i].rank;
        return writes;
}

enum nebula_status persist_repeat_manifest(struct store *store, const struct version *version, const struct plan *plan,
                                           struct nebula_error *error)
{
        return !plan->spread || is_writer(version, plan) ? put_manifest(store, plan, error) : NEBULA_OK;
}

static enum nebula_status record_missing(const struct plan *plan, uint32_t rank, struct nebula_error *error)
{
        return error_set(error, NEBULA_BUSY, 0, "the record of rank %" PRIu32 " of \"%.200s\", which is on another node, has not come", rank, plan->tag);
}

/* Adds what one rank's record says to the manifest. NEBULA_BUSY: it is not there yet. */
static enum nebula_status gather_record(struct store *store, struct plan *plan, uint32_t rank, struct nebula_error *error)
{
        struct manifest *manifest = &plan->manifest;
        struct manifest_record *entry = &manifest->records[manifest->record_count];
        struct record record = { 0 };
        struct manifest_file *files;
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status;

        record_path(rank, plan->generation, entry->path);
        snprintf(key, sizeof key, "%s/%s", plan->directory, entry->path);
        status = old_read_text(store, key, DOCUMENT_TEXT_MAX, &text, &size, error);
        if (status)
                return status == NEBULA_NOT_FOUND ? record_missing(plan, rank, error) : status;
        status = record_parse(text, size, &record, error);
        entry->size = size;
        entry->crc64 = sum_crc64(0, text, size);
        entry->generation = plan->generation;
        entry->rank = rank;
        free(text);
        if (status)
                return record_missing(plan, rank, error); /* of a run that was killed, perhaps; its place is still to be taken */
        if (strcmp(record.run, plan->run) || strcmp(record.tag, plan->tag) || record.generation != plan->generation || record.rank != rank) {
                record_done(&record);
                return record_missing(plan, rank, error);
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

static int compare_names(const void *a, const void *b)
{
        const struct manifest_file *const *one = a, *const *other = b;

        return strcmp((*one)->name, (*other)->name);
}

/* Within a node the last one stands; files of two nodes, of which either may be the later, are one in storage. No reader would take
 * a manifest that names both. */
static enum nebula_status refuse_shared_names(const struct plan *plan, struct nebula_error *error)
{
        size_t count = plan->manifest.file_count;
        const struct manifest_file **files = calloc(count + 1, sizeof *files);
        enum nebula_status status = NEBULA_OK;

        if (!files)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the manifest of \"%s\"", plan->tag);
        for (size_t i = 0; i < count; i++)
                files[i] = &plan->manifest.files[i];
        qsort(files, count, sizeof *files, compare_names);
        for (size_t i = 1; i < count && !status; i++) {
                const struct manifest_file *a = files[i - 1], *b = files[i];

                if (!strcmp(a->name, b->name))
                        status = error_set(error, NEBULA_INVALID, 0,
                                           "rank %" PRIu32 " and rank %" PRIu32 ", which are on different nodes, both saved file \"%.150s\" of "
                                           "\"%.150s\": give each its own name", a->rank < b->rank ? a->rank : b->rank,
                                           a->rank < b->rank ? b->rank : a->rank, a->name, plan->tag);
        }
        free(files);
        return status;
}

/* Files of the generation before that no rank wrote again, and the records that describe them; none of ranks that are no more. */
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
                if (!again && old->rank < manifest->world)
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

/* A document that comes within this time needs no help. */
static bool has_waited(const struct version *version)
{
        return os->now_ns() - version->waiting_since_ns > SECOND_NS;
}

/* An older run's agent that slept may have written its record over this one's, which is then nobody's. */
static bool records_stand(struct store *store, const struct plan *plan)
{
        bool stand = true;

        for (size_t i = 0; i < plan->part_count && stand; i++) {
                struct record record = { 0 };
                char path[64], key[MANIFEST_KEY_MAX], *text;
                size_t size;

                record_path(plan->parts[i].rank, plan->generation, path);
                snprintf(key, sizeof key, "%s/%s", plan->directory, path);
                if (old_read_text(store, key, DOCUMENT_TEXT_MAX, &text, &size, NULL))
                        continue; /* gone, or not to be had just now */
                stand = !record_parse(text, size, &record, NULL) && !strcmp(record.run, plan->run) && record.generation == plan->generation;
                record_done(&record);
                free(text);
        }
        return stand;
}

/* The others have not done their part yet. What they were told, and wait for, may have been taken away by somebody who slept. */
static void keep_others_going(struct catalogue *catalogue, struct store *store, struct version *version, const struct plan *plan)
{
        bool is_due = !(version->poll_count & (version->poll_count - 1)); /* less and less often: a read for each rank */

        world_keep_committed(catalogue, store, version);
        if (!is_due || records_stand(store, plan))
                return;
        log_event(LOG_LEVEL_WARN, "%s: another run has replaced a record of this node, which is written again", plan->tag);
        catalogue_lock(catalogue);
        version->recorded_here = false;
        catalogue_unlock(catalogue);
}

/*
 * This node's records are in storage. Whoever holds rank 0 writes the manifest once all records are there, anybody
 * when it has not for a while; the others look for it. NEBULA_BUSY: look again.
 */
enum nebula_status persist_gather(struct catalogue *catalogue, struct store *store, struct job *job, struct version *version,
                                  struct plan *plan, struct nebula_error *error)
{
        struct committed committed = { 0 };
        bool writes = is_writer(version, plan) || os->now_ns() - version->waiting_since_ns > (int64_t)catalogue->takeover_s * 1000000000;
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        enum nebula_status status;

        if (!writes && has_waited(version))
                keep_others_going(catalogue, store, version, plan);
        if (!writes)
                return error_set(error, NEBULA_BUSY, 0, "the manifest of \"%.200s\", which the node of rank 0 writes, has not come", plan->tag);
        snprintf(key, sizeof key, "%s/" MANIFEST_DIRECTORY "/committed.json", plan->directory);
        status = old_read_text(store, key, DOCUMENT_TEXT_MAX, &text, &size, error);
        if (!status) {
                status = committed_parse(text, size, &committed, error);
                free(text);
        }
        if (status)
                return status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT ? status :
                               error_set(error, NEBULA_BUSY, 0, "committed.json of \"%.200s\" is not there any more", plan->tag);
        if (strcmp(committed.of.run, plan->run) || committed.generation != plan->generation) /* when that is complete this one is given up */
                status = error_set(error, NEBULA_BUSY, 0, "committed.json of \"%.200s\" is that of a later writing", plan->tag);
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
                status = refuse_shared_names(plan, error);
        if (!status)
                status = gather_carried(plan, error);
        if (!status)
                status = commit_manifest(catalogue, store, version, plan, error);
        if (!status)
                persist_conclude(catalogue, store, job, version, plan);
        if (status == NEBULA_BUSY && has_waited(version))
                keep_others_going(catalogue, store, version, plan);
        committed_done(&committed);
        return status;
}
