/* Hands out a version's files: an image in memory, one that is read back from storage, or the stored file itself. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/commit/ancestry.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/memory/page_maker.h"
#include "agent/peers/copy_finder.h"
#include "agent/peers/joint_read.h"
#include "agent/peers/replica.h"
#include "agent/persist/persist_seal.h"
#include "agent/persist/storage.h"
#include "agent/restore/restore_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/manifest_load.h"
#include "store/manifest_read.h"
#include "store/record.h"
#include "store/signature.h"

/* So long a reader waits for another one that reads the file: this, and the time that the file takes at a slow rate. */
#define READING_NS (120 * SECOND_NS)
#define READING_BYTES_PER_S (4u << 20)
#define ROOM_LOOK_MS 500 /* a thread that returns pages signals that */

enum nebula_status restore_reserve(struct catalogue *catalogue, uint64_t bytes, const char *name, struct nebula_error *error)
{
        bool named;

        while (!memory_reserve(catalogue->memory, bytes, &named)) {
                if (page_maker_discard(catalogue) || policy_reclaim(catalogue))
                        continue;
                if (catalogue->stopping || !memory_follows(catalogue->memory))
                        return error_set(error, NEBULA_NO_MEMORY, 0,
                                         "\"%.200s\" needs %" PRIu64 " MiB of memory to be read into; the budget is %" PRIu64
                                         " MiB and %" PRIu64 " MiB are in use", name, (bytes >> 20) + 1, catalogue->memory->budget >> 20,
                                         catalogue->memory->used >> 20);
                catalogue_wait(catalogue, &catalogue->moved, ROOM_LOOK_MS);
        }
        return NEBULA_OK;
}

/* image NULL: only its room was reserved. */
static void give_back(struct catalogue *catalogue, struct image *image, uint64_t capacity)
{
        if (image)
                memory_release(catalogue->memory, image);
        catalogue_lock(catalogue);
        memory_unreserve(catalogue->memory, capacity);
        catalogue_unlock(catalogue);
}

/* Makes an image for a file that is read back, mapped at *ret_data. No lock held. */
static enum nebula_status new_image(struct catalogue *catalogue, const char *name, uint64_t size, struct image **ret_image,
                                    void **ret_data, struct nebula_error *error)
{
        uint64_t capacity = memory_capacity(size);
        struct image *image = NULL;
        enum nebula_status status;

        catalogue_lock(catalogue);
        catalogue->memory->wanting++;
        status = restore_reserve(catalogue, capacity, name, error);
        catalogue->memory->wanting--;
        catalogue_unlock(catalogue);
        if (status)
                return status;
        status = memory_create(catalogue->memory, capacity, false, &image, error);
        if (!status)
                status = image_map(image, ret_data, error);
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
        image_unmap(image);
        *ret_image = image;
}

void restore_want(const struct version *version, const struct agent_file *file, struct wanted *ret_wanted)
{
        *ret_wanted = (struct wanted){ .origin = version_file_sequence(version, file), .sequence = version->stored ? version->sequence : 0 };
        snprintf(ret_wanted->tag, sizeof ret_wanted->tag, "%s", version->tag);
        snprintf(ret_wanted->name, sizeof ret_wanted->name, "%s", file->name);
}

static bool same_writing(const struct manifest *manifest, const struct wanted *wanted)
{
        const struct manifest_file *file = manifest_find_file(manifest, wanted->name);

        return file && manifest_file_sequence(manifest, file) == wanted->origin && (!wanted->sequence || manifest->sequence == wanted->sequence);
}

enum nebula_status restore_gone(const char *tag, struct nebula_error *error)
{
        return error_set(error, NEBULA_NOT_FOUND, 0,
                         "checkpoint \"%.200s\" was removed or written again since it was found: look it up once more", tag);
}

enum nebula_status restore_manifest(struct store *store, const struct wanted *wanted, struct manifest *ret_manifest, struct nebula_error *error)
{
        enum nebula_status status = manifest_load(store, wanted->tag, ret_manifest, error);

        return status == NEBULA_NOT_FOUND || (!status && !same_writing(ret_manifest, wanted)) ? restore_gone(wanted->tag, error) : status;
}

enum nebula_status restore_record(struct store *store, const struct wanted *wanted, struct manifest *ret_manifest, struct record_file *ret_file,
                                  struct nebula_error *error)
{
        enum nebula_status status = restore_manifest(store, wanted, ret_manifest, error);

        return status ? status : manifest_load_file(store, ret_manifest, wanted->name, ret_file, error);
}

/* Reads a file from storage into a new image. No lock held. */
static enum nebula_status read_back(struct catalogue *catalogue, struct job *job, const struct wanted *wanted, struct image **ret_image,
                                    struct record_file *ret_file, struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct record_file file = { 0 };
        struct image *image;
        struct store *store;
        void *data;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (!status)
                status = restore_record(store, wanted, &manifest, &file, error);
        if (!status)
                status = new_image(catalogue, wanted->name, file.size, &image, &data, error);
        if (status)
                goto done;
        status = manifest_read_file(store, &manifest, &file, data, error);
        image->vouched = file.is_signed;
        end_image(catalogue, image, status, false, ret_image);
        if (!status || status == NEBULA_CORRUPT) { /* what it should be */
                *ret_file = file;
                memset(&file, 0, sizeof file);
        }
done:
        if ((status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT) && manifest.file_count && manifest_is_gone(store, &manifest))
                status = restore_gone(wanted->tag, error);
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
        status = replica_fetch(catalogue, job, version->tag, version->sequence, name, data, size, error);
        end_image(catalogue, image, status, true, ret_image);
        return status;
}

/* Lock held. The file was `reading`. */
static void place_image(struct catalogue *catalogue, struct version *version, struct agent_file *file, struct image *image)
{
        image->job = version->job;
        memory_add(catalogue->memory, image);
        memory_hold(image);
        file->image = image;
}

/* After a node was lost, a peer's memory has its files, also if storage has them. It is faster, and storage may charge for reads. Does nothing
 * if no peer has the file of this pinned version. Lock held on entry and return, released meanwhile. */
static void bring_from_peer(struct catalogue *catalogue, struct version *version, const char *name)
{
        struct agent_file *file = version_file(version, name);
        struct nebula_error failure = { 0 };
        struct image *image = NULL;
        enum ipc_format format;
        uint64_t size;

        if (file->image || file->reading || !replica_locate(catalogue, version, name, &size, &format))
                return;
        file = version_file(version, name);
        if (file->image || file->reading)
                return;
        file->reading = true;
        catalogue_unlock(catalogue);
        if (read_remote(catalogue, version->job, version, name, size, &image, &failure))
                log_event(LOG_LEVEL_WARN, "\"%s\" of %s could not be read from a peer, the agent reads it from storage: %s", name, version->tag,
                          failure.message);
        catalogue_lock(catalogue);
        file = version_file(version, name);
        file->reading = false;
        if (image) {
                file->format = format;
                file->size = size;
                place_image(catalogue, version, file, image);
        }
        pthread_cond_broadcast(&catalogue->moved);
}

/* Reads a file of a pinned version back into memory. Lock held on entry and return, released while reading. */
static enum nebula_status bring_back(struct catalogue *catalogue, struct version *version, const char *name,
                                     struct nebula_error *error)
{
        struct agent_file *file = version_file(version, name);
        struct record_file stored = { 0 };
        struct image *image = NULL;
        struct wanted wanted;
        uint64_t size;
        int64_t until_ns;
        bool is_spoilt = false, is_damaged = false;
        struct nebula_error failure = { 0 };
        enum nebula_status status = NEBULA_NOT_FOUND;

        until_ns = os->now_ns() + READING_NS + (int64_t)(file->size / READING_BYTES_PER_S) * SECOND_NS;
        while (file->reading) {
                if (catalogue->stopping || os->now_ns() > until_ns)
                        return error_set(error, NEBULA_TIMEOUT, 0, "another rank's request still reads \"%.100s\" of \"%.150s\": storage or a peer does not answer",
                                         name, version->tag);
                catalogue_wait(catalogue, &catalogue->moved, 1000);
                file = version_file(version, name);
        }
        if (file->image)
                return NEBULA_OK; /* another rank's request brought it */
        file->reading = true;
        restore_want(version, file, &wanted);
        size = file->size;
        catalogue_unlock(catalogue);
        if (version->is_remote) {
                status = read_remote(catalogue, version->job, version, name, size, &image, &failure);
                is_spoilt = status == NEBULA_CORRUPT;
                if (status && error)
                        *error = failure;
                if (status)
                        log_event(LOG_LEVEL_WARN, "\"%s\" of %s could not be read from a peer, the agent tries storage: %s", name, version->tag,
                                  failure.message);
        }
        if (status && (!version->is_remote || version->job->persist_path[0])) {
                status = read_back(catalogue, version->job, &wanted, &image, &stored, &failure);
                is_damaged = status == NEBULA_CORRUPT && storage_policy(catalogue, version->job) == TRUST_OFF; /* else a signature can be missing */
                if (status && error)
                        *error = failure;
        }
        if (status == NEBULA_CORRUPT && !version->is_remote && version->job->settings.replica_count && *stored.name &&
            storage_policy(catalogue, version->job) != TRUST_REQUIRE && !read_remote(catalogue, version->job, version, name, stored.size, &image, NULL)) {
                log_event(LOG_LEVEL_WARN, "\"%s\" of %s is damaged in storage, and another node's memory has its bytes", name, version->tag);
                status = NEBULA_OK;
        }
        if (is_spoilt && status == NEBULA_NOT_FOUND)
                status = error_set(error, NEBULA_CORRUPT, 0, "\"%.100s\" of checkpoint \"%.150s\" is damaged in the memory of the node that keeps its copy, and "
                                   "storage does not have this version: look the checkpoint up once more, and an older one is found", name, version->tag);
        catalogue_lock(catalogue);
        file = version_file(version, name);
        file->reading = false;
        if (!status) {
                if (*stored.name) {
                        file->format = stored.is_zip ? IPC_FORMAT_ZIP : IPC_FORMAT_RAW;
                        file->size = stored.size;
                }
                place_image(catalogue, version, file, image);
        }
        if (is_damaged)
                version_judge_copy(catalogue, version, false, failure.message);
        record_file_done(&stored);
        pthread_cond_broadcast(&catalogue->moved);
        return status;
}

/*
 * Opens the stored file itself, for a trainer that reads it directly into its own memory: new shared pages cost as much time as
 * the disk, and a copy of them costs more. is_shared: other processes read the file, too.
 */
static enum nebula_status lend_stored(struct catalogue *catalogue, struct job *job, const struct wanted *wanted, bool is_shared,
                                      struct ipc_opened **ret_opened, int *ret_fd, struct nebula_error *error)
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
                status = restore_record(store, wanted, &manifest, &file, error);
        if (!status)
                opened = calloc(1, sizeof *opened + file.chunk_count * sizeof opened->crc64[0]);
        if (!status && !opened)
                status = NEBULA_NO_MEMORY;
        if (!status)
                status = manifest_open_file(store, &manifest, &file, is_shared, ret_fd, &is_direct, error);
        if (!status) {
                *opened = (struct ipc_opened){ .size = file.size, .format = file.is_zip ? IPC_FORMAT_ZIP : IPC_FORMAT_RAW,
                                               .source = IPC_SOURCE_STORAGE, .chunk_bytes = file.chunk_bytes,
                                               .chunk_count = (uint32_t)file.chunk_count, .is_direct = is_direct, .origin = wanted->origin };
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

/* The version that a handle loads from. If its own writing has no files yet, that is the complete version before it; otherwise its own
 * writing, if that is complete. NULL: none. */
static struct version *complete_one(struct version *version, const char *name)
{
        struct version *best = NULL;

        if (version_file(version, name) && (version_file(version, name)->image || version->stored || version->is_remote))
                return version;
        for (struct version *other = version->job->versions; other; other = other->next)
                if (!strcmp(other->tag, version->tag) && version_file(other, name) &&
                    (version->sequence ? version_is(other, version->sequence) : !other->superseded) &&
                    (version_whole_in_memory(other) || other->stored || other->is_remote) && (!best || other->sequence > best->sequence))
                        best = other;
        return best;
}

enum nebula_status restore_lend(struct catalogue *catalogue, struct image *image, int *ret_fd, struct nebula_error *error)
{
        enum nebula_status status;

        memory_hold(image);
        catalogue_unlock(catalogue);
        status = image_open_read_only(image, ret_fd, error);
        catalogue_lock(catalogue);
        if (!status)
                image_set_lent(image, *ret_fd);
        memory_drop(catalogue->memory, image);
        return status;
}

/* Whether other ranks of the reader's job are on this node, or will be. Lock held. */
static bool has_company(const struct session *session)
{
        if (session->role != IPC_ROLE_TRAINER)
                return false;
        for (const struct session *other = session->job->sessions; other; other = other->next)
                if (other->pid != session->pid && other->connection_count && other->role == IPC_ROLE_TRAINER)
                        return true;
        return session->job->settings.local_world > 1;
}

/* Lends a file of a pinned version to the reader. Lock held on entry and return, released meanwhile. *ret_opened is NULL if that fails. */
static void lend(struct catalogue *catalogue, struct version *source, const char *name, bool is_shared, struct ipc_opened **ret_opened,
                 int *ret_fd)
{
        struct agent_file *file = version_file(source, name);
        struct wanted wanted;

        restore_want(source, file, &wanted);
        file->lent = true;
        catalogue_unlock(catalogue);
        lend_stored(catalogue, source->job, &wanted, is_shared, ret_opened, ret_fd, NULL);
        catalogue_lock(catalogue);
}

/* Whether `source` may be older than the tag's version in storage. The program has begun the tag itself: a version that a search has found is
 * compared. */
static bool may_be_older(const struct session *session, const struct version *source)
{
        return session && session->role == IPC_ROLE_TRAINER && source->job == session->job && source->job->persist_path[0] && !source->is_remote &&
               !strcmp(session->run, ancestry_newest(source->job)) && !ancestry_is_compared(source);
}

/* Finds the version as a search by its tag does. Lock held on entry and return, released meanwhile. */
static struct version *find_by_tag(struct catalogue *catalogue, const struct session *session, const struct version *version, const char *name)
{
        struct ipc_find *find = calloc(1, sizeof *find);
        struct ipc_found *found = calloc(1, sizeof *found);
        struct version *source = NULL;

        if (find && found) {
                snprintf(find->tag, sizeof find->tag, "%s", version->tag);
                catalogue_unlock(catalogue);
                if (restore_find(catalogue, session, find, found, NULL))
                        found->version_id = 0;
                catalogue_lock(catalogue);
                source = found->version_id ? catalogue_version(catalogue, found->version_id) : NULL;
        }
        free(find);
        free(found);
        return source && version_file(source, name) ? complete_one(source, name) : NULL;
}

/* The version of which the reader gets the file. Lock held on entry and return, released while storage or other nodes are asked. */
static enum nebula_status find_source(struct catalogue *catalogue, const struct session *session, const struct ipc_open *request,
                                      struct version **ret_source, struct nebula_error *error)
{
        struct version *version = catalogue_version(catalogue, request->version_id);
        char names[300];

        if (!version)
                return error_set(error, NEBULA_NOT_FOUND, 0, "this checkpoint is not known to the agent any more: look it up again");
        *ret_source = complete_one(version, request->name);
        if (!*ret_source && replica_gather(catalogue, version)) /* another node may have saved it */
                *ret_source = complete_one(version, request->name);
        if (*ret_source ? may_be_older(session, *ret_source) : session && !version->sequence && version->job == session->job) {
                *ret_source = find_by_tag(catalogue, session, version, request->name);
                version = catalogue_version(catalogue, request->version_id);
        }
        if (*ret_source)
                return NEBULA_OK;
        if (!version)
                return error_set(error, NEBULA_NOT_FOUND, 0, "this checkpoint is not known to the agent any more: look it up again");
        if (version_file(version, request->name) && version->sequence)
                return restore_gone(version->tag, error);
        list_names(version, names, sizeof names);
        return error_set(error, NEBULA_NOT_FOUND, 0, "checkpoint \"%.150s\" has no file \"%.100s\"; it has: %.200s", version->tag, request->name,
                         *names ? names : "none");
}

/* Compares an image with the signature of its version in storage. No lock held; the image is held. */
static enum nebula_status match_image(struct catalogue *catalogue, struct job *job, const struct wanted *wanted, struct image *image,
                                      struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct record_file file = { 0 };
        struct store *store;
        void *data;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (!status)
                status = restore_record(store, wanted, &manifest, &file, error);
        if (!status && file.is_signed && file.size > image->capacity)
                status = error_set(error, NEBULA_CORRUPT, 0, "\"%.200s\" is not what was signed: it is shorter", wanted->name);
        if (!status && file.is_signed) {
                status = sealing_map(catalogue, image, &data, error);
                if (!status) {
                        status = signature_match(&file, data, error);
                        image->vouched = !status;
                        sealing_unmap(catalogue, image);
                }
        }
        record_file_done(&file);
        manifest_done(&manifest);
        return status;
}

/* This is the one place where bytes that this node has not saved itself meet the policy before a reader gets them: what a session with another
 * policy has read, and what came from another node, are in the same memory. Lock held on entry and return, released meanwhile. */
static enum nebula_status vouch(struct catalogue *catalogue, struct version *source, const char *name, enum trust_policy policy,
                                struct nebula_error *error)
{
        struct agent_file *file = version_file(source, name);
        struct nebula_error failure = { 0 };
        struct image *image = file->image;
        struct wanted wanted;
        enum nebula_status status;

        if (policy == TRUST_OFF || image->vouched || (!image->restored && !source->is_remote))
                return NEBULA_OK;
        restore_want(source, file, &wanted);
        memory_hold(image);
        catalogue_unlock(catalogue);
        status = match_image(catalogue, source->job, &wanted, image, &failure);
        catalogue_lock(catalogue);
        memory_drop(catalogue->memory, image);
        if (status == NEBULA_NOT_FOUND && policy == TRUST_PREFER)
                return NEBULA_OK;
        if (status && error) {
                *error = failure;
                error_prefix(error, "%s", source->tag);
        }
        return status;
}

/* Lends the image of a file. Lock held on entry and return, released meanwhile. *ret_opened may be written on failure, too. */
static enum nebula_status lend_image(struct catalogue *catalogue, struct version *source, const struct agent_file *file, bool from_storage,
                                     struct ipc_opened **ret_opened, int *ret_fd, struct nebula_error *error)
{
        enum ipc_source from = file->image->from_peer ? IPC_SOURCE_PEER :
                               from_storage || file->image->restored ? IPC_SOURCE_STORAGE : IPC_SOURCE_MEMORY;

        *ret_opened = calloc(1, sizeof **ret_opened);
        if (!*ret_opened)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an answer");
        **ret_opened = (struct ipc_opened){ .size = file->size, .format = (uint32_t)file->format, .source = from,
                                            .origin = version_file_sequence(source, file) };
        return restore_lend(catalogue, file->image, ret_fd, error);
}

enum nebula_status restore_open(struct catalogue *catalogue, const struct session *session, const struct ipc_open *request,
                                struct ipc_opened **ret_opened, int *ret_fd, struct nebula_error *error)
{
        struct version *source;
        struct agent_file *file;
        struct ipc_opened *opened = NULL;
        bool from_storage = false, can_lend, is_shared;
        enum trust_policy policy;
        enum nebula_status status;

        catalogue_lock(catalogue);
        status = find_source(catalogue, session, request, &source, error);
        if (status) {
                catalogue_unlock(catalogue);
                return status;
        }
        source->pins++;
        catalogue_unlock(catalogue);
        policy = storage_policy(catalogue, source->job);
        catalogue_lock(catalogue);
        if (policy != TRUST_REQUIRE)
                bring_from_peer(catalogue, source, request->name);
        file = version_file(source, request->name);
        can_lend = session && request->reads_storage && !source->is_remote && policy == TRUST_OFF;
        is_shared = can_lend && (file->lent || has_company(session));
        if (can_lend && !file->image && !file->reading && (!is_shared || request->reads_storage == IPC_READS_PARTS))
                lend(catalogue, source, request->name, is_shared, &opened, ret_fd);
        if (!opened && can_lend && request->reads_storage == IPC_READS_PARTS && !version_file(source, request->name)->image)
                chunks_open(catalogue, source, request->name, &opened, ret_fd, NULL);
        if (opened)
                goto done;
        file = version_file(source, request->name);
        if (!file->image && !file->sparse && source->stored && !source->is_remote && policy == TRUST_OFF && joint_wanted(catalogue, source->job) &&
            session && session->role == IPC_ROLE_TRAINER)
                chunks_prepare(catalogue, source, request->name, NULL);
        file = version_file(source, request->name);
        if (!file->image && file->sparse) {
                chunks_complete(catalogue, source, request->name, NULL);
                file = version_file(source, request->name);
        }
        if (!file->image) { /* if lending failed, this says what is wrong */
                from_storage = true;
                status = bring_back(catalogue, source, request->name, error);
                file = version_file(source, request->name);
        }
        if (status == NEBULA_NO_MEMORY && can_lend)
                lend(catalogue, source, request->name, true, &opened, ret_fd);
        if (opened) {
                status = NEBULA_OK;
                goto done;
        }
        if (!status && !file->image->restored && !(session && session->role == IPC_ROLE_READER)) {
                file->image->kept = true;
                policy_want_spares(catalogue, source->job); /* the next save may come soon */
        }
        if (!status)
                status = vouch(catalogue, source, request->name, policy, error);
        file = version_file(source, request->name);
        if (!status)
                status = lend_image(catalogue, source, file, from_storage, &opened, ret_fd, error);
done:
        source->pins--;
        catalogue_signal_job(catalogue, source->job);
        catalogue_unlock(catalogue);
        if (status)
                free(opened);
        else
                *ret_opened = opened;
        return status;
}
