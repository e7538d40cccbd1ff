#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit.h"
#include "agent/log.h"
#include "agent/replica.h"
#include "agent/restore.h"
#include "agent/retain.h"
#include "agent/storage.h"
#include "agent/worker.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"

#define ROOM_LOOK_MS 500 /* who gives pages back says so */

static bool is_newer(const struct version *a, const struct version *b)
{
        const struct retain_entry entries[2] = { retain_complete(a->tag, a->sequence), retain_complete(b->tag, b->sequence) };

        return retain_is_newer(&entries[0], &entries[1]);
}

static struct version *newest_in_memory(struct job *job, const struct ipc_find *wanted)
{
        const char *tag = wanted->tag;
        struct version *best = NULL;

        for (struct version *version = job->versions; version; version = version->next) {
                if (!version_whole_in_memory(version) || (*tag && strcmp(tag, version->tag)) ||
                    !version_wanted(wanted, version->generation, version->sequence))
                        continue;
                /* Generations of one tag follow each other. */
                if (!best || (*tag ? version->generation > best->generation :
                                     is_newer(version, best)))
                        best = version;
        }
        return best;
}

static struct version *find_in_memory(struct catalogue *catalogue, struct job *own, const char *path, const struct ipc_find *wanted)
{
        struct version *found = NULL;
        struct job *job = catalogue_job(catalogue, path, own->name);

        if (job)
                found = newest_in_memory(job, wanted);
        if (found || !strcmp(path, own->persist_path))
                return found;
        for (job = catalogue->jobs; job; job = job->next) {
                struct version *version = strcmp(job->persist_path, path) ? NULL : newest_in_memory(job, wanted);

                if (version && (!found || version->sequence > found->sequence))
                        found = version;
        }
        return found;
}

/* Every file is where it should be, and as long. */
static enum nebula_status check_files(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        for (size_t i = 0; i < manifest->file_count; i++) {
                const struct manifest_file *file = &manifest->files[i];
                struct store_entry entry;
                char key[MANIFEST_KEY_MAX];
                enum nebula_status status = manifest_file_key(store, manifest, file, key, error);

                if (!status)
                        status = store->ops->stat(store, key, &entry, error);
                if (status == NEBULA_NOT_FOUND)
                        return error_set(error, NEBULA_CORRUPT, 0, "file \"%.200s\" of checkpoint \"%.100s\" is missing from %.150s",
                                         file->name, manifest->tag, store->root);
                if (status)
                        return status;
                if (entry.size != file->size)
                        status = error_set(error, NEBULA_CORRUPT, 0,
                                           "file \"%.150s\" of checkpoint \"%.100s\" has %" PRIu64 " bytes where its manifest says %" PRIu64,
                                           file->name, manifest->tag, entry.size, file->size);
                store_entry_done(&entry);
                if (status)
                        return status;
        }
        return NEBULA_OK;
}

static enum nebula_status stored_newest(struct store *store, const char *job, bool any_job, struct manifest *ret_manifest,
                                        struct nebula_error *error)
{
        struct manifest_scan scan = { 0 };
        struct nebula_error failure = { 0 };
        enum nebula_status status = manifest_scan(store, &scan, error);

        if (status)
                return status;
        if (scan.broken_count)
                log_event(LOG_LEVEL_WARN, "%zu broken manifests in %s are passed over, the first: %s", scan.broken_count, store->root, scan.broken);
        for (;;) {
                int64_t index = manifest_scan_newest(&scan, job);

                if (index < 0 && any_job)
                        index = manifest_scan_newest(&scan, NULL);
                if (index < 0) {
                        /* That there is none means to begin from nothing: it must be true. */
                        if (failure.status || scan.broken_count)
                                status = error_set(error, NEBULA_CORRUPT, 0, "no checkpoint in %.150s can be loaded: %.300s", store->root,
                                                   failure.status ? failure.message : scan.broken);
                        else
                                status = error_set(error, NEBULA_NOT_FOUND, 0, "there is no complete checkpoint in %.300s", store->root);
                        break;
                }
                status = check_files(store, &scan.manifests[index], &failure);
                if (status && status != NEBULA_CORRUPT) {
                        if (error)
                                *error = failure;
                        break;
                }
                if (!status)
                        *ret_manifest = scan.manifests[index];
                else
                        log_event(LOG_LEVEL_ERROR, "FALLING BACK to an older checkpoint than %s: %s", scan.manifests[index].tag, failure.message);
                if (status)
                        manifest_done(&scan.manifests[index]);
                memmove(&scan.manifests[index], &scan.manifests[index + 1],
                        (scan.count - (size_t)index - 1) * sizeof *scan.manifests);
                scan.count--;
                if (!status)
                        break;
        }
        manifest_scan_done(&scan);
        return status;
}

static enum nebula_status stored_tag(struct store *store, const struct ipc_find *wanted, const char *job, bool any_job,
                                     struct manifest *ret_manifest, struct nebula_error *error)
{
        const char *tag = wanted->tag;
        struct manifest manifest = { 0 };
        enum nebula_status status = manifest_load(store, tag, &manifest, error);

        if (status == NEBULA_NOT_FOUND)
                return error_set(error, status, 0, "there is no complete checkpoint \"%.200s\" in %.200s", tag, store->root);
        if (status)
                return status;
        if (!any_job && strcmp(manifest.job, job))
                status = error_set(error, NEBULA_NOT_FOUND, 0, "checkpoint \"%.150s\" in %.150s belongs to another job, \"%.100s\"",
                                   tag, store->root, manifest.job);
        else if (!version_wanted(wanted, manifest.generation, manifest.sequence))
                status = error_set(error, NEBULA_NOT_FOUND, 0,
                                   "checkpoint \"%.150s\" in %.150s is generation %" PRIu64 " (sequence %" PRIu64 "), and not %" PRIu64
                                   " (%" PRIu64 ")", tag, store->root, manifest.generation, manifest.sequence, wanted->generation,
                                   wanted->sequence);
        else
                status = check_files(store, &manifest, error);
        if (status)
                manifest_done(&manifest);
        else
                *ret_manifest = manifest;
        return status;
}

static void fill_found(const struct version *version, struct ipc_found *found)
{
        memset(found, 0, sizeof *found);
        found->version_id = version->id;
        found->generation = version->generation;
        found->step = version->step;
        found->state = (uint32_t)version->life.state;
        strcpy(found->tag, version->tag);
}

/* What this agent knows of storage without looking: a newer one there than in memory makes it look. */
static bool storage_may_be_newer(const struct job *job, const struct version *version)
{
        const struct retain_entry known = retain_complete(version->tag, version->sequence);
        int64_t newest = manifest_scan_newest(&job->stored, job->name);
        struct retain_entry stored;

        if (newest < 0)
                return false;
        stored = retain_complete(job->stored.manifests[newest].tag, job->stored.manifests[newest].sequence);
        return retain_is_newer(&stored, &known);
}

static enum nebula_status find_stored(struct catalogue *catalogue, struct job *job, const struct ipc_find *wanted, bool any_job,
                                      struct ipc_found *found, struct retain_entry *ret_entry, struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct version *version;
        struct store *store;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (!status)
                status = *wanted->tag ? stored_tag(store, wanted, job->name, any_job, &manifest, error) :
                                        stored_newest(store, job->name, any_job, &manifest, error);
        if (status)
                return status;
        catalogue_lock(catalogue);
        version = catalogue_stored(catalogue, job, &manifest);
        if (version) {
                fill_found(version, found);
                *ret_entry = retain_complete(version->tag, version->sequence);
        } else {
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe checkpoint \"%s\"", manifest.tag);
        }
        catalogue_unlock(catalogue);
        manifest_done(&manifest);
        return status;
}

/* The newest that peers hold. */
static enum nebula_status find_remote(struct catalogue *catalogue, struct job *job, const struct session *session,
                                      const struct ipc_find *wanted, struct ipc_found *found, struct retain_entry *ret_entry)
{
        struct nebula_error error = { 0 };
        struct version *version = NULL;
        uint64_t id;
        enum nebula_status status = replica_find(catalogue, job, session, wanted, &id, &error);

        if (status && status != NEBULA_NOT_FOUND)
                log_event(LOG_LEVEL_WARN, "peers could not be asked: %s", error.message);
        catalogue_lock(catalogue);
        if (!status)
                version = catalogue_version(catalogue, id);
        if (version) {
                fill_found(version, found);
                *ret_entry = retain_complete(version->tag, version->sequence);
        }
        catalogue_unlock(catalogue);
        return version ? NEBULA_OK : NEBULA_NOT_FOUND;
}

/* A job that waited for its storage would not train; one that goes back further than it has to is told. */
static void log_older(struct catalogue *catalogue, const struct job *job, const struct ipc_find *wanted, const struct ipc_found *found,
                      struct retain_entry found_entry, enum nebula_status status, const char *why)
{
        const struct manifest *known = NULL;
        struct retain_entry known_entry = { 0 };
        int64_t newest;

        catalogue_lock(catalogue);
        newest = *wanted->tag ? -1 : manifest_scan_newest(&job->stored, job->name);
        if (newest >= 0) {
                known = &job->stored.manifests[newest];
                known_entry = retain_complete(known->tag, known->sequence);
        }
        if (known && retain_is_newer(&known_entry, &found_entry))
                log_event(LOG_LEVEL_ERROR, "FALLING BACK to %s, an older checkpoint than %s, which does not come from %s: %s", found->tag,
                          known->tag, job->persist_path, why);
        else if (status != NEBULA_NOT_FOUND)
                log_event(LOG_LEVEL_WARN, "%s is taken from memory, and %s cannot be looked through for a newer one: %s", found->tag,
                          job->persist_path, why);
        catalogue_unlock(catalogue);
}

/* NULL: none. */
static void unpin(struct job *job)
{
        if (job)
                job->pins--;
}

enum nebula_status restore_find(struct catalogue *catalogue, const struct session *session, const struct ipc_find *request,
                                struct ipc_found *ret_found, struct nebula_error *error)
{
        bool own, in_memory = false, look = true, failed = false;
        const char *path;
        struct retain_entry memory_entry = { 0 }, stored_entry = { 0 };
        struct ipc_found found, stored;
        struct version *version;
        struct job *job, *own_job;
        enum nebula_status status;

        catalogue_lock(catalogue);
        job = own_job = session->job;
        path = request->persist_path[0] ? request->persist_path : job->persist_path;
        own = !strcmp(path, job->persist_path);
        commit_close_dead(catalogue, job); /* who asks may have seen it die */
        version = find_in_memory(catalogue, job, path, request);
        if (version) {
                in_memory = true;
                fill_found(version, &found);
                memory_entry = retain_complete(version->tag, version->sequence);
                failed = version->life.state == NEBULA_STATE_FAILED && version->recorded_here; /* another node may have made it durable since */
                look = version->job->persist_path[0] && (failed || (!request->tag[0] && storage_may_be_newer(version->job, version)));
        }
        if (!own && *path)
                job = catalogue_job_get(catalogue, path, job->name);
        if (job && job != own_job)
                job->last_guest = catalogue->session_number;
        if (version && version->job != own_job)
                version->job->last_guest = catalogue->session_number;
        own_job->pins++;
        if (job)
                job->pins++;
        catalogue_unlock(catalogue);
        status = NEBULA_OK;
        if (!look) {
                *ret_found = found;
                goto done;
        }
        /* This node has lost its memory, or never had it: another node's. */
        if (!in_memory && own && !find_remote(catalogue, own_job, session, request, &found, &memory_entry))
                in_memory = true;
        if (!job) {
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to look in %.300s", path);
                goto done;
        }
        if (!*path && in_memory) {
                *ret_found = found;
                goto done;
        }
        if (!*path) {
                status = error_set(error, NEBULA_NOT_FOUND, 0, "there is no complete checkpoint%s%s in memory, and no storage path is set",
                                   *request->tag ? " " : "", request->tag);
                goto done;
        }
        status = find_stored(catalogue, job, request, !own, &stored, &stored_entry, error);
        if (in_memory && status)
                log_older(catalogue, job, request, &found, memory_entry, status, error ? error->message : "");
        if (in_memory && (status || (failed ? retain_is_newer(&memory_entry, &stored_entry) : !retain_is_newer(&stored_entry, &memory_entry)))) {
                *ret_found = found;
                status = NEBULA_OK;
                goto done;
        }
        if (status == NEBULA_NOT_FOUND && error && !*request->tag)
                error_set(error, NEBULA_NOT_FOUND, 0, "there is no complete checkpoint in memory or in %.300s", path);
        if (!status)
                *ret_found = stored;
done:
        catalogue_lock(catalogue);
        unpin(own_job);
        unpin(job);
        catalogue_unlock(catalogue);
        return status;
}

static enum nebula_status room_for(struct catalogue *catalogue, uint64_t capacity, const char *name, struct nebula_error *error)
{
        bool named;

        while (!memory_reserve(&catalogue->memory, capacity, &named)) {
                if (worker_bury(catalogue) || catalogue_reclaim(catalogue))
                        continue;
                if (catalogue->stopping || !memory_follows(&catalogue->memory))
                        return error_set(error, NEBULA_NO_MEMORY, 0,
                                         "\"%.200s\" needs %" PRIu64 " MiB of memory to be read into; the budget is %" PRIu64
                                         " MiB and %" PRIu64 " MiB are in use", name, capacity >> 20, catalogue->memory.budget >> 20,
                                         catalogue->memory.used >> 20);
                catalogue_wait(catalogue, &catalogue->moved, ROOM_LOOK_MS);
        }
        return NEBULA_OK;
}

/* image NULL: there was only the room for it. */
static void give_back(struct catalogue *catalogue, struct image *image, uint64_t capacity)
{
        if (image)
                memory_bury(&catalogue->memory, image);
        catalogue_lock(catalogue);
        memory_unreserve(&catalogue->memory, capacity);
        catalogue_unlock(catalogue);
}

/* A fresh image for a file that is read back, mapped at *ret_data; no lock held. */
static enum nebula_status new_image(struct catalogue *catalogue, const char *name, uint64_t size, struct image **ret_image,
                                    void **ret_data, struct nebula_error *error)
{
        uint64_t capacity = memory_capacity(size);
        struct image *image = NULL;
        enum nebula_status status;

        catalogue_lock(catalogue);
        catalogue->memory.wanting++;
        status = room_for(catalogue, capacity, name, error);
        catalogue->memory.wanting--;
        catalogue_unlock(catalogue);
        if (status)
                return status;
        status = memory_create(&catalogue->memory, capacity, false, &image, error);
        if (!status)
                status = memory_map(image, ret_data, error);
        if (!status) {
                *ret_image = image;
                return NEBULA_OK;
        }
        give_back(catalogue, image, capacity);
        return status;
}

/* It holds the file, or goes. */
static void end_image(struct catalogue *catalogue, struct image *image, enum nebula_status status, bool from_peer,
                      struct image **ret_image)
{
        if (status) {
                give_back(catalogue, image, image->capacity);
                return;
        }
        image->restored = image->exposed = true;
        image->from_peer = from_peer;
        memory_unmap(image);
        *ret_image = image;
}

static bool same_writing(const struct manifest *manifest, const char *name, uint64_t generation)
{
        for (size_t i = 0; i < manifest->file_count; i++)
                if (!strcmp(manifest->files[i].name, name))
                        return manifest->files[i].generation == generation;
        return false;
}

/* From storage into a fresh image; no lock held. `generation` is that of the file, which may be carried over. */
static enum nebula_status read_back(struct catalogue *catalogue, struct job *job, const char *tag, uint64_t generation,
                                    const char *name, struct image **ret_image, struct record_file *ret_file,
                                    struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct record_file file = { 0 };
        struct image *image;
        struct store *store;
        void *data;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (!status)
                status = manifest_load(store, tag, &manifest, error);
        if (!status && !same_writing(&manifest, name, generation))
                status = error_set(error, NEBULA_NOT_FOUND, 0,
                                   "checkpoint \"%.200s\" was written again since it was found: look it up once more", tag);
        if (!status)
                status = manifest_load_file(store, &manifest, name, &file, error);
        if (!status)
                status = new_image(catalogue, name, file.size, &image, &data, error);
        if (status)
                goto done;
        status = manifest_read_file(store, &manifest, &file, data, error);
        end_image(catalogue, image, status, false, ret_image);
        if (!status) {
                *ret_file = file;
                memset(&file, 0, sizeof file);
        }
done:
        record_file_done(&file);
        manifest_done(&manifest);
        return status;
}

/* The same from a peer's memory. */
static enum nebula_status read_remote(struct catalogue *catalogue, struct job *job, const struct version *version, const char *name,
                                      uint64_t size, struct image **ret_image, struct nebula_error *error)
{
        struct image *image;
        void *data;
        enum nebula_status status = new_image(catalogue, name, size, &image, &data, error);

        if (status)
                return status;
        status = replica_fetch(catalogue, job, version->tag, version->generation, version->sequence, name, data, size, error);
        end_image(catalogue, image, status, true, ret_image);
        return status;
}

/* Lock held on entry and return, free while reading. `version` is pinned. */
static enum nebula_status bring_back(struct catalogue *catalogue, struct version *version, const char *name,
                                     struct nebula_error *error)
{
        struct agent_file *file = version_file(version, name);
        struct record_file stored = { 0 };
        struct image *image = NULL;
        uint64_t generation, size;
        enum nebula_status status = NEBULA_NOT_FOUND;

        while (file->reading) {
                catalogue_wait(catalogue, &catalogue->moved, -1);
                file = version_file(version, name);
        }
        if (file->image)
                return NEBULA_OK; /* another rank's request brought it */
        file->reading = true;
        generation = file->generation;
        size = file->size;
        catalogue_unlock(catalogue);
        if (version->remote) {
                struct nebula_error failure = { 0 };

                status = read_remote(catalogue, version->job, version, name, size, &image, &failure);
                if (status && error)
                        *error = failure;
                if (status)
                        log_event(LOG_LEVEL_WARN, "\"%s\" of %s does not come from a peer, storage is tried: %s", name, version->tag,
                                  failure.message);
        }
        if (status && (!version->remote || version->job->persist_path[0]))
                status = read_back(catalogue, version->job, version->tag, generation, name, &image, &stored, error);
        catalogue_lock(catalogue);
        file = version_file(version, name);
        file->reading = false;
        if (!status) {
                if (!image->from_peer) {
                        file->format = stored.is_zip ? IPC_FORMAT_ZIP : IPC_FORMAT_RAW;
                        file->size = stored.size;
                }
                image->job = version->job;
                memory_add(&catalogue->memory, image);
                memory_hold(image);
                file->image = image;
        }
        record_file_done(&stored);
        pthread_cond_broadcast(&catalogue->moved);
        return status;
}

/*
 * The stored file itself, for a trainer that reads it straight into its own memory: fresh shared pages cost as much as
 * the disk, and a copy of them more. Who asks for a file next gets an image, since then it is worth sharing.
 */
static enum nebula_status lend_stored(struct catalogue *catalogue, struct job *job, const char *tag, const char *name,
                                      uint64_t generation, struct ipc_opened **ret_opened, int *ret_fd, struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct record_file file = { 0 };
        struct ipc_opened *opened = NULL;
        bool is_direct = false;
        struct store *store;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (!status && !store->ops->open_read)
                status = NEBULA_UNAVAILABLE;
        if (!status)
                status = manifest_load(store, tag, &manifest, error);
        if (!status && !same_writing(&manifest, name, generation))
                status = NEBULA_NOT_FOUND;
        if (!status)
                status = manifest_load_file(store, &manifest, name, &file, error);
        if (!status)
                opened = calloc(1, sizeof *opened + file.chunk_count * sizeof opened->crc64[0]);
        if (!status && !opened)
                status = NEBULA_NO_MEMORY;
        if (!status)
                status = manifest_open_file(store, &manifest, &file, ret_fd, &is_direct, error);
        if (!status) {
                *opened = (struct ipc_opened){ .size = file.size, .format = file.is_zip ? IPC_FORMAT_ZIP : IPC_FORMAT_RAW,
                                               .source = IPC_SOURCE_STORAGE, .chunk_bytes = file.chunk_bytes,
                                               .chunk_count = (uint32_t)file.chunk_count, .is_direct = is_direct };
                memcpy(opened->crc64, file.chunks, file.chunk_count * sizeof opened->crc64[0]);
                *ret_opened = opened;
        } else {
                free(opened);
        }
        record_file_done(&file);
        manifest_done(&manifest);
        return status;
}

static void list_names(const struct version *version, char *text, size_t size)
{
        size_t used = 0;

        text[0] = 0;
        for (size_t i = 0; i < version->file_count && used < size; i++)
                used += (size_t)snprintf(text + used, size - used, "%s%s", i ? ", " : "", version->files[i].name);
}

/* The complete version behind a handle that only began its tag. */
static struct version *complete_one(struct version *version, const char *name)
{
        struct version *best = NULL;

        if (version_file(version, name) && (version_file(version, name)->image || version->stored || version->remote))
                return version;
        for (struct version *other = version->job->versions; other; other = other->next)
                if (!strcmp(other->tag, version->tag) && version_file(other, name) &&
                    (version_whole_in_memory(other) || other->stored || other->remote) && (!best || other->generation > best->generation))
                        best = other;
        return best;
}

enum nebula_status restore_open(struct catalogue *catalogue, const struct ipc_open *request, struct ipc_opened **ret_opened,
                                int *ret_fd, struct nebula_error *error)
{
        struct version *version, *source;
        struct agent_file *file;
        struct ipc_opened *opened = NULL;
        bool from_storage = false;
        char names[300];
        enum nebula_status status = NEBULA_OK;

        catalogue_lock(catalogue);
        version = catalogue_version(catalogue, request->version_id);
        if (!version) {
                catalogue_unlock(catalogue);
                return error_set(error, NEBULA_NOT_FOUND, 0, "this checkpoint is not known to the agent any more: look it up again");
        }
        source = complete_one(version, request->name);
        if (!source) {
                list_names(version, names, sizeof names);
                status = error_set(error, NEBULA_NOT_FOUND, 0, "checkpoint \"%.150s\" has no file \"%.100s\"; it has: %.200s",
                                   version->tag, request->name, *names ? names : "none");
                catalogue_unlock(catalogue);
                return status;
        }
        source->pins++;
        file = version_file(source, request->name);
        if (request->reads_storage && !file->image && !file->reading && !file->lent && !source->remote) {
                uint64_t generation = file->generation;

                file->lent = true;
                catalogue_unlock(catalogue);
                lend_stored(catalogue, source->job, source->tag, request->name, generation, &opened, ret_fd, NULL);
                catalogue_lock(catalogue);
                if (opened)
                        goto done;
                file = version_file(source, request->name); /* the long way tells what is wrong */
        }
        if (!file->image) {
                from_storage = true;
                status = bring_back(catalogue, source, request->name, error);
                file = version_file(source, request->name);
        }
        if (!status)
                opened = calloc(1, sizeof *opened);
        if (!status && !opened)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an answer");
        if (!status)
                status = memory_open_read_only(file->image, ret_fd, error);
        if (!status) {
                enum ipc_source from = file->image->from_peer ? IPC_SOURCE_PEER :
                                       from_storage || file->image->restored ? IPC_SOURCE_STORAGE : IPC_SOURCE_MEMORY;

                *opened = (struct ipc_opened){ .size = file->size, .format = (uint32_t)file->format, .source = from };
        }
done:
        source->pins--;
        catalogue_signal(catalogue);
        catalogue_unlock(catalogue);
        if (status)
                free(opened);
        else
                *ret_opened = opened;
        return status;
}
