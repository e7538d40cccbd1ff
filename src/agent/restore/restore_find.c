/* Finding a version: in this node's memory, in peers', in storage. */
#include <inttypes.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/memory/survival_log.h"
#include "agent/restore/passed_over.h"
#include "agent/peers/replica.h"
#include "agent/restore/restore.h"
#include "agent/catalogue/retention.h"
#include "agent/persist/storage.h"
#include "base/error.h"
#include "store/index.h"

#define LOOKS_MAX 20 /* attempts, if each version that is found is removed before it can be checked */

static bool is_newer(const struct version *a, const struct version *b)
{
        const struct retain_entry entries[2] = { retain_complete(a->tag, a->sequence, &a->line), retain_complete(b->tag, b->sequence, &b->line) };

        return retain_is_newer(&entries[0], &entries[1]);
}

/* True if memory has only this node's share of a version of several nodes, and all ranks are on this node now: no node has the rest.
 * The agent does not know which ranks took part in an open-ended version. */
static bool lacks_shares(const struct job *job, const struct version *version)
{
        if (!version->nodes.spread || version->stored || job->settings.local_world < job->settings.world)
                return false;
        if (version->file_goal > 0)
                return version->file_count < (uint64_t)version->file_goal;
        return version->file_goal == NEBULA_FILES_ALL_RANKS && version->part_count < version->world;
}

static struct version *newest_in_memory(struct job *job, const struct session *session, const struct ipc_find *wanted)
{
        const char *tag = wanted->tag;
        struct version *best = NULL;

        for (struct version *version = job->versions; version; version = version->next) {
                if (!version_whole_in_memory(version) || (version->is_gone && !*tag) || lacks_shares(job, version) || (*tag && strcmp(tag, version->tag)) ||
                    (version->ancestry.gives_way && strcmp(version->run, session->run)) || /* storage has the tag, written by a run that continues */
                    !version_wanted(wanted, version->generation, version->sequence))
                        continue;
                /* Of one tag, the larger generation is the newer one. */
                if (!best || (*tag ? version->generation > best->generation :
                                     is_newer(version, best)))
                        best = version;
        }
        return best;
}

static struct version *find_in_memory(struct catalogue *catalogue, const struct session *session, const char *path,
                                      const struct ipc_find *wanted)
{
        const struct job *own = session->job;
        struct version *found = NULL;
        struct job *job = catalogue_job(catalogue, path, own->name);

        if (job)
                found = newest_in_memory(job, session, wanted);
        if (found || !strcmp(path, own->persist_path))
                return found;
        for (job = catalogue->jobs; job; job = job->next) {
                struct version *version = strcmp(job->persist_path, path) ? NULL : newest_in_memory(job, session, wanted);

                if (version && (!found || version->sequence > found->sequence))
                        found = version;
        }
        return found;
}

enum nebula_status restore_check_files(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        enum nebula_status status = manifest_check_present(store, manifest, &failure);

        if (status == NEBULA_NOT_FOUND)
                status = failure.status = NEBULA_CORRUPT;
        if (status == NEBULA_CORRUPT && manifest_is_gone(store, manifest))
                status = error_set(&failure, NEBULA_BUSY, 0, "checkpoint \"%.100s\" was removed or written again while it was looked at in %.150s",
                                   manifest->tag, store->root);
        if (status && error)
                *error = failure;
        return status;
}

/* Finds the newest version whose files are all there. Marks newer ones as damaged and describes them in `passed`. NEBULA_NOT_FOUND:
 * there is none. */
static enum nebula_status newest_sound(struct store *store, struct manifest_scan *scan, const char *job, bool any_job, struct passed *passed,
                                       int64_t *ret_index, struct nebula_error *error)
{
        for (;;) {
                struct nebula_error failure = { 0 };
                int64_t index = manifest_scan_newest(scan, job);
                enum nebula_status status;

                if (index < 0 && any_job)
                        index = manifest_scan_newest(scan, NULL);
                *ret_index = index;
                status = index < 0 ? NEBULA_NOT_FOUND : restore_check_files(store, &scan->manifests[index], &failure);
                if (status != NEBULA_CORRUPT) {
                        if (status && error)
                                *error = failure;
                        return status;
                }
                log_event(LOG_LEVEL_ERROR, "FALLING BACK to an older checkpoint than %s: %s", scan->manifests[index].tag, failure.message);
                passed_add(passed, scan->manifests[index].tag, failure.message);
                scan->manifests[index].is_damaged = true;
        }
}

/* Finds the newest version by one listing instead of a read of every manifest. If anything looks unusual, it leaves the search to the
 * scan, which can name the fault. */
static bool indexed_newest(struct store *store, const char *job, struct manifest *ret_manifest)
{
        struct manifest manifest;

        if (index_newest(store, job, &manifest, NULL))
                return false;
        if (restore_check_files(store, &manifest, NULL)) {
                manifest_done(&manifest);
                return false;
        }
        *ret_manifest = manifest;
        return true;
}

static enum nebula_status stored_newest(struct store *store, const char *job, bool any_job, struct manifest *ret_manifest,
                                        struct passed *passed, struct nebula_error *error)
{
        struct manifest_scan scan = { 0 };
        int64_t index;
        enum nebula_status status;

        if (indexed_newest(store, job, ret_manifest))
                return NEBULA_OK;
        status = manifest_scan(store, &scan, error);
        if (status)
                return status;
        if (scan.broken_count)
                log_event(LOG_LEVEL_WARN, "%zu broken manifests in %s are passed over, the first: %s", scan.broken_count, store->root, scan.broken);
        *passed = (struct passed){ 0 };
        status = newest_sound(store, &scan, job, any_job, passed, &index, error);
        if (!status) {
                passed_scan(passed, store, &scan, &scan.manifests[index]);
                *ret_manifest = scan.manifests[index];
                memset(&scan.manifests[index], 0, sizeof scan.manifests[index]); /* moved out */
        } else if (status == NEBULA_NOT_FOUND && (passed->count || scan.broken_count)) {
                /* "None" makes a job start from nothing, so it must be certain. */
                status = error_set(error, NEBULA_CORRUPT, 0, "no checkpoint in %.150s can be loaded: %.300s", store->root,
                                   passed->count ? passed->list[0].reason : scan.broken);
        } else if (status == NEBULA_NOT_FOUND) {
                status = error_set(error, NEBULA_NOT_FOUND, 0, "there is no complete checkpoint in %.300s", store->root);
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
                status = restore_check_files(store, &manifest, error);
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

/* True if the agent knows, without a look, that storage may have a newer version than memory. It then looks. */
static bool storage_may_be_newer(const struct job *job, const struct version *version)
{
        const struct retain_entry known = retain_complete(version->tag, version->sequence, &version->line);
        int64_t newest = manifest_scan_newest(&job->storage.stored, job->name);
        struct retain_entry stored;

        if (newest < 0)
                return false;
        stored = retain_complete(job->storage.stored.manifests[newest].tag, job->storage.stored.manifests[newest].sequence, &job->storage.stored.manifests[newest].line);
        return retain_is_newer(&stored, &known);
}

static enum nebula_status find_stored(struct catalogue *catalogue, const struct session *session, struct job *job,
                                      const struct ipc_find *wanted, bool any_job, struct ipc_found *found,
                                      struct retain_entry *ret_entry, struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct passed passed = { 0 };
        struct version *version;
        struct store *store;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (status)
                return status;
        for (int look = 0; look < LOOKS_MAX && (!look || status == NEBULA_BUSY); look++)
                status = *wanted->tag ? stored_tag(store, wanted, job->name, any_job, &manifest, error) :
                                        stored_newest(store, job->name, any_job, &manifest, &passed, error);
        if (status)
                return status;
        catalogue_lock(catalogue);
        version = catalogue_stored(catalogue, job, &manifest);
        if (version) {
                fill_found(version, found);
                passed_tell(&passed, found);
                *ret_entry = retain_complete(version->tag, version->sequence, &version->line);
                if (job == session->job && !session->has_begun)
                        ancestry_follow(session, version->run, version->sequence);
                catalogue_tidy(catalogue, job);
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
                log_event(LOG_LEVEL_WARN, "the agent could not ask peers for copies: %s", error.message);
        catalogue_lock(catalogue);
        if (!status)
                version = catalogue_version(catalogue, id);
        if (version) {
                fill_found(version, found);
                *ret_entry = retain_complete(version->tag, version->sequence, &version->line);
        }
        catalogue_unlock(catalogue);
        return version ? NEBULA_OK : NEBULA_NOT_FOUND;
}

/* A job that waited for its storage could not train. So it continues from an older version, and the log says so. */
static void log_older(struct catalogue *catalogue, const struct job *job, const struct ipc_find *wanted, struct ipc_found *found,
                      struct retain_entry found_entry, enum nebula_status status, const char *why)
{
        const struct manifest *known = NULL;
        struct retain_entry known_entry = { 0 };
        int64_t newest;

        catalogue_lock(catalogue);
        newest = *wanted->tag ? -1 : manifest_scan_newest(&job->storage.stored, job->name);
        if (newest >= 0) {
                known = &job->storage.stored.manifests[newest];
                known_entry = retain_complete(known->tag, known->sequence, &known->line);
        }
        if (known && retain_is_newer(&known_entry, &found_entry)) {
                struct passed passed = { 0 };

                log_event(LOG_LEVEL_ERROR, "FALLING BACK to %s, an older checkpoint than %s, which cannot be read from %s: %s", found->tag,
                          known->tag, job->persist_path, why);
                passed_add(&passed, known->tag, why);
                passed_tell(&passed, found);
        } else if (status != NEBULA_NOT_FOUND) {
                log_event(LOG_LEVEL_WARN, "%s is taken from memory: %s, which may hold a newer one, cannot be listed: %s", found->tag,
                          job->persist_path, why);
        }
        catalogue_unlock(catalogue);
}

/* NULL: none. */
static void unpin(struct job *job)
{
        if (job)
                job->pins--;
}

/* Another agent of this user may have versions in its memory alone, which this one cannot find. The log says that once. Call without
 * the lock. */
static void look_for_rival(struct catalogue *catalogue, struct job *job, const char *path)
{
        bool is_new;

        if (!catalogue->memory.rival[0] || !survival_log_rival_has(catalogue, path))
                return;
        catalogue_lock(catalogue);
        is_new = job->copies.notice_at == 0;
        if (is_new)
                job->copies.notice_at = catalogue_moment(catalogue);
        catalogue_signal_event(catalogue);
        catalogue_unlock(catalogue);
        if (is_new)
                log_event(LOG_LEVEL_WARN, "another agent (%s) has versions of %s in %s", catalogue->memory.rival, path,
                          catalogue->memory.rival_directory);
}

/* The version that a search has found in the memory of this node or of its peers. */
struct in_memory {
        bool is_there;
        bool is_enough;    /* storage has nothing newer: no need to look there */
        bool stored_first; /* prefer the stored files of a version to those in memory */
        struct ipc_found found;
        struct retain_entry entry;
};

/* Looks into this node's memory, and finds the job of the path; *ret_job is NULL if there is no memory for it. Pins both jobs. */
static struct in_memory look_into_memory(struct catalogue *catalogue, const struct session *session, const char *path, bool own,
                                         const struct ipc_find *request, struct job **ret_job)
{
        struct in_memory memory = { 0 };
        struct job *own_job = session->job, *job = own_job;
        struct version *version;

        commit_close_dead(catalogue, own_job); /* the caller may have seen that process die */
        version = find_in_memory(catalogue, session, path, request);
        if (version) {
                memory.is_there = true;
                fill_found(version, &memory.found);
                memory.entry = retain_complete(version->tag, version->sequence, &version->line);
                /* another node may have made it durable since */
                memory.stored_first = version->life.state == NEBULA_STATE_FAILED && version->persist.recorded_here;
                memory.is_enough = !version->job->persist_path[0] ||
                                   (!memory.stored_first && (request->tag[0] || !storage_may_be_newer(version->job, version)));
        }
        if (!own && *path)
                job = catalogue_job_get(catalogue, path, own_job->name);
        if (job && job != own_job)
                job->last_guest = catalogue->session_number;
        if (version && version->job != own_job)
                version->job->last_guest = catalogue->session_number;
        own_job->pins++;
        if (job)
                job->pins++;
        *ret_job = job;
        return memory;
}

/* Looks into storage, and takes the newer one of what is there and what memory has. */
static enum nebula_status look_into_storage(struct catalogue *catalogue, const struct session *session, struct job *job, const char *path, bool own,
                                            const struct ipc_find *request, struct in_memory *memory, struct ipc_found *ret_found,
                                            struct nebula_error *error)
{
        struct retain_entry entry = { 0 };
        struct ipc_found stored;
        enum nebula_status status = find_stored(catalogue, session, job, request, !own, &stored, &entry, error);

        if (memory->is_there && status)
                log_older(catalogue, job, request, &memory->found, memory->entry, status, error ? error->message : "");
        if (memory->is_there && (status || (memory->stored_first ? retain_is_newer(&memory->entry, &entry) : !retain_is_newer(&entry, &memory->entry)))) {
                *ret_found = memory->found;
                return NEBULA_OK;
        }
        if (status == NEBULA_NOT_FOUND && error && !*request->tag)
                error_set(error, NEBULA_NOT_FOUND, 0, "there is no complete checkpoint in memory or in %.300s", path);
        if (!status)
                *ret_found = stored;
        return status;
}

enum nebula_status restore_find(struct catalogue *catalogue, const struct session *session, const struct ipc_find *request,
                                struct ipc_found *ret_found, struct nebula_error *error)
{
        const char *path;
        struct in_memory memory;
        struct job *job, *own_job;
        enum nebula_status status = NEBULA_OK;
        bool own;

        catalogue_lock(catalogue);
        own_job = session->job;
        path = request->persist_path[0] ? request->persist_path : own_job->persist_path;
        own = !strcmp(path, own_job->persist_path);
        memory = look_into_memory(catalogue, session, path, own, request, &job);
        catalogue_unlock(catalogue);
        look_for_rival(catalogue, own_job, job ? job->persist_path : "");
        /* this node has lost the version, or never had it: ask the other nodes */
        if (!memory.is_there && own && !find_remote(catalogue, own_job, session, request, &memory.found, &memory.entry))
                memory.is_there = memory.stored_first = true; /* peers may have no more than this node's share */
        if (memory.is_there && (memory.is_enough || (job && !*path)))
                *ret_found = memory.found;
        else if (!job)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to look in %.300s", path);
        else if (!*path)
                status = error_set(error, NEBULA_NOT_FOUND, 0, "there is no complete checkpoint%s%s in memory, and no storage path is set",
                                   *request->tag ? " " : "", request->tag);
        else
                status = look_into_storage(catalogue, session, job, path, own, request, &memory, ret_found, error);
        catalogue_lock(catalogue);
        unpin(own_job);
        unpin(job);
        catalogue_unlock(catalogue);
        return status;
}
