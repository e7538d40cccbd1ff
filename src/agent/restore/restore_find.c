/* Finding a version: in this node's memory, in peers', in storage. */
#include <string.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/commit/commit_end.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/memory/survival_log.h"
#include "agent/peers/copy_finder.h"
#include "agent/peers/replica.h"
#include "agent/persist/progress.h"
#include "agent/persist/storage.h"
#include "agent/restore/answers.h"
#include "agent/restore/restore_private.h"
#include "base/error.h"
#include "image/image.h"
#include "os/os.h"

#define LOOKS_MAX 100 /* each look after the first is due to a version that memory has lost */

static struct order_entry entry_of(const struct version *version)
{
        return order_entry(version->tag, version->sequence, &version->line);
}

/* True if memory has only this node's share of a version of several nodes, and all ranks are on this node now: no node has the rest.
 * The agent does not know which ranks took part in an open-ended version. */
static bool lacks_shares(const struct job *job, const struct version *version)
{
        if (!version->is_spread || version->stored || job->settings.local_world < job->settings.world)
                return false;
        if (version->file_goal > 0)
                return version->file_count < (uint64_t)version->file_goal;
        return version->file_goal == NEBULA_FILES_ALL_RANKS && version->part_count < version->world;
}

static bool is_candidate(const struct job *job, const struct session *session, const struct ipc_find *wanted, const struct version *version)
{
        const char *tag = wanted->tag;

        return version_whole_in_memory(version) && (!version->is_gone || wanted->sequence) && (!version->superseded || wanted->sequence) &&
               !lacks_shares(job, version) && (!*tag || !strcmp(tag, version->tag)) &&
               (!version->gives_way || !strcmp(version->run, session->run)) && /* else storage has the tag, written by a run that continues */
               (version_wanted(wanted, version->sequence) || version->first_sequence == wanted->sequence);
}

/* The newest that is known, in memory and in storage. */
struct newest {
        struct order_best memory, stored;
};

static struct newest newest_known(struct job *job, const struct session *session, const struct ipc_find *wanted)
{
        struct newest newest = { .stored = job->known.newest };

        for (struct version *version = job->versions; version; version = version->next) {
                struct order_entry entry = entry_of(version);

                if (is_candidate(job, session, wanted, version))
                        order_add(&newest.memory, &entry, version);
        }
        return newest;
}

/* The version has no line yet, because storage was not read since its run began. It will continue the line of the newest in storage, or begin a
 * new one. */
static bool is_ahead(const struct version *version)
{
        return version && version->line_due && !strcmp(version->run, ancestry_newest(version->job));
}

/* The newest of memory and storage; NULL: it is in storage alone, or there is none. */
static struct version *newest_of_both(const struct newest *newest)
{
        struct order_best best = newest->memory;
        const char *in_storage = "";

        for (size_t kind = 0; kind < 2; kind++) {
                if (!newest->stored.what[kind])
                        continue;
                if (kind == 0 && is_ahead(newest->memory.what[0]))
                        continue;
                order_add(&best, &newest->stored.entries[kind], in_storage);
        }
        return order_best(&best, NULL) == in_storage ? NULL : (struct version *)order_best(&best, NULL);
}

/* Whether the newest is in storage alone, as far as the agent knows. `also`: the newest that a search has found there; NULL: none. */
static bool storage_is_newer(struct job *job, const struct session *session, const struct order_entry *also)
{
        static const struct ipc_find any;
        struct newest newest = newest_known(job, session, &any);

        if (also) { /* the list may be older */
                newest.stored = (struct order_best){ 0 };
                order_add(&newest.stored, also, also);
        }
        return (newest.stored.what[0] || newest.stored.what[1]) && !newest_of_both(&newest);
}

static struct version *newest_in_memory(struct job *job, const struct session *session, const struct ipc_find *wanted)
{
        struct version *best = NULL;

        if (!*wanted->tag) {
                struct newest newest = newest_known(job, session, wanted);

                best = newest_of_both(&newest);
                return best ? best : (struct version *)order_best(&newest.memory, NULL);
        }
        for (struct version *version = job->versions; version; version = version->next)
                if (is_candidate(job, session, wanted, version) && (!best || version->sequence > best->sequence))
                        best = version;
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
        if (session->role == IPC_ROLE_READER ? false : found || !strcmp(path, own->persist_path))
                return found;
        for (job = catalogue->jobs; job; job = job->next) {
                struct version *version = strcmp(job->persist_path, path) ? NULL : newest_in_memory(job, session, wanted);

                if (version && (!found || version->sequence > found->sequence))
                        found = version;
        }
        return found;
}

static void fill_found(const struct session *session, const struct version *version, struct ipc_found *found)
{
        memset(found, 0, sizeof *found);
        found->version_id = version->id;
        found->sequence = version->sequence;
        found->writing = strcmp(version->run, session->run) ? 0 : version->writing;
        found->step = version->step;
        found->state = (uint32_t)version->life.state;
        strcpy(found->tag, version->tag);
}

/* Whether the answer from memory needs no look at storage: the version is of this run, this run has just compared it, or no storage path is set.
 * A reader that is no trainer of the newest run cannot know what other nodes have written since. */
static bool is_known(const struct session *session, const struct version *version)
{
        const struct job *job = version->job;

        bool is_recent = os->now_ns() - job->scanned_ns < STORAGE_SEARCH_NS; /* a trainer may search long after its run has begun */

        return !job->persist_path[0] || (session->role == IPC_ROLE_TRAINER && session->job == job && !strcmp(session->run, ancestry_newest(job)) &&
                                         (ancestry_is_of_newest(version) || (is_recent && ancestry_is_compared(version))));
}

/* Describes the version that storage has. Lock held. */
static enum nebula_status take_stored(struct catalogue *catalogue, const struct session *session, struct job *job, const struct stored *stored,
                                      struct ipc_found *ret_found, struct nebula_error *error)
{
        struct version *version = catalogue_stored(catalogue, job, &stored->manifest);

        if (!version)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe checkpoint \"%s\"", stored->manifest.tag);
        ancestry_set_compared(version);
        fill_found(session, version, ret_found);
        passed_report(&stored->passed, ret_found);
        if (job == session->job && !session->has_begun)
                ancestry_follow(session, version->run, version->sequence);
        if (job == session->job && session->role == IPC_ROLE_TRAINER)
                ancestry_set_unseen(session->job, 0);
        policy_tidy(catalogue, job);
        return NEBULA_OK;
}

/* The newest that peers hold. */
static enum nebula_status find_remote(struct catalogue *catalogue, struct job *job, const struct session *session,
                                      const struct ipc_find *wanted, struct ipc_found *found, struct order_entry *ret_entry)
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
                fill_found(session, version, found);
                *ret_entry = order_entry(version->tag, version->sequence, &version->line);
                policy_tidy(catalogue, job); /* a reader that follows finds many */
        }
        catalogue_unlock(catalogue);
        return version ? NEBULA_OK : NEBULA_NOT_FOUND;
}

/* The version that a search has found in the memory of this node or of its peers. */
struct in_memory {
        bool is_there;
        bool is_enough;    /* no need to look at storage */
        bool stored_first; /* prefer the stored files of a version to those in memory */
        struct ipc_found found;
        struct order_entry entry;
};

static struct order_entry stored_entry(const struct manifest *manifest)
{
        return order_entry(manifest->tag, manifest->sequence, &manifest->line);
}

/* The agent may have forgotten the version meanwhile, and with it the tag. */
static struct order_entry found_entry(const struct in_memory *memory)
{
        struct order_entry entry = memory->entry;

        entry.tag = memory->found.tag;
        return entry;
}

/* The agent reports to the program that the version from memory may not be the newest: a job that waited for its storage could not train. Lock held. */
static void take_unseen(struct job *job, const struct session *session, const struct ipc_find *wanted, const struct in_memory *memory, const struct nebula_error *why,
                        struct ipc_found *ret_found)
{
        const struct manifest *known = *wanted->tag ? NULL : known_newest(&job->known);
        struct order_entry of_memory = found_entry(memory), of_stored = known ? stored_entry(known) : of_memory;
        struct passed passed = { 0 };

        *ret_found = memory->found;
        if (!order_is_newest_of(&of_memory, &of_stored)) {
                log_event(LOG_LEVEL_ERROR, "FALLING BACK to %s, an older checkpoint than %s, which cannot be read from %s: %s", memory->found.tag,
                          known->tag, job->persist_path, why->message);
                passed_add(&passed, strcmp(known->tag, memory->found.tag) ? known->tag : PASSED_UNSEEN, why->message);
        } else {
                log_event(LOG_LEVEL_ERROR, "%s is taken from memory: %s may have a newer one, and cannot be read: %s", memory->found.tag,
                          job->persist_path, why->message);
                passed_add(&passed, PASSED_UNSEEN, why->message);
        }
        passed_report(&passed, ret_found);
        if (!*wanted->tag && session->role == IPC_ROLE_TRAINER)
                ancestry_set_unseen(job, memory->entry.sequence);
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

        if (!catalogue->memory->rival[0] || !survival_log_rival_has(catalogue, path))
                return;
        catalogue_lock(catalogue);
        is_new = job->rival_seen_at == 0;
        if (is_new)
                job->rival_seen_at = catalogue_moment(catalogue);
        catalogue_signal_event(catalogue, job);
        catalogue_unlock(catalogue);
        if (is_new)
                log_event(LOG_LEVEL_WARN, "another agent (%s) has versions of %s in %s", catalogue->memory->rival, path,
                          catalogue->memory->rival_directory);
}

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
                fill_found(session, version, &memory.found);
                memory.entry = entry_of(version);
                if (request->sequence && session->role == IPC_ROLE_TRAINER && session->job == version->job)
                        ancestry_set_compared(version); /* the ranks have agreed on it, by what they found in storage and memory */
                /* another node may have made it durable since */
                memory.stored_first = version->life.state == NEBULA_STATE_FAILED && version_progress(version).recorded_here;
                memory.is_enough = !version->job->persist_path[0] || (request->sequence && !memory.stored_first) ||
                                   (!memory.stored_first && is_known(session, version) &&
                                    (request->tag[0] || (version->job->is_scanned && !storage_is_newer(version->job, session, NULL))));
        }
        if (!own && *path)
                job = catalogue_job_get(catalogue, path, own_job->name);
        if (job && job != own_job)
                storage_share_variables(job, own_job);
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

enum verdict { TAKE_MEMORY, TAKE_STORED, LOOK_AGAIN };

static bool has_all_images(const struct version *version)
{
        for (size_t i = 0; i < version->file_count; i++)
                if (!version->files[i].image)
                        return false;
        return true;
}

/* Another program has removed the version from storage. Lock held. */
static enum verdict lose(struct version *version)
{
        log_event(LOG_LEVEL_WARN, "%s is not in %s any more: another program has removed or moved its directory", version->tag,
                  version->job->persist_path);
        version->stored = false;
        version->is_gone = version->in_memory;
        return LOOK_AGAIN;
}

/* Judges by the newest entry of the tag's log. A version that is replaced or gone is not found again. Lock held. */
static enum verdict judge_by_tag(struct catalogue *catalogue, struct version *version, enum nebula_status status, const struct manifest *manifest,
                                 bool is_by_tag)
{
        if (status == NEBULA_NOT_FOUND && (version->stored || !has_all_images(version))) /* files that it kept from the tag are gone, too */
                return lose(version);
        if (status == NEBULA_NOT_FOUND)
                ancestry_set_compared(version);
        if (status || strcmp(manifest->job, version->job->name))
                return TAKE_MEMORY;
        if (ancestry_note(catalogue, version, manifest) == ANCESTRY_EARLIER)
                return is_by_tag ? TAKE_STORED : LOOK_AGAIN;
        return TAKE_MEMORY;
}

/* Which one is the answer: memory's or storage's. Lock held. */
static enum verdict judge(struct catalogue *catalogue, const struct session *session, const struct ipc_find *request, const struct in_memory *memory, const struct stored *stored)
{
        struct version *version = memory->is_there ? catalogue_version(catalogue, memory->found.version_id) : NULL;
        struct order_entry of_memory, of_stored = { 0 };

        if (!memory->is_there)
                return TAKE_STORED;
        if (!version)
                return LOOK_AGAIN;
        if (!stored->status)
                of_stored = stored_entry(&stored->manifest);
        of_memory = found_entry(memory);
        if (version->is_remote || memory->stored_first)
                return !stored->status && order_is_newest_of(&of_stored, &of_memory) ? TAKE_STORED : TAKE_MEMORY;
        if (request->tag[0])
                return judge_by_tag(catalogue, version, stored->status, &stored->manifest, true);
        if (!stored->status && strcmp(stored->manifest.tag, version->tag) && storage_is_newer(version->job, session, &of_stored))
                return TAKE_STORED;
        if (!stored->status && !strcmp(stored->manifest.tag, version->tag))
                return judge_by_tag(catalogue, version, stored->status, &stored->manifest, false);
        return judge_by_tag(catalogue, version, stored->also_status, &stored->also, false);
}

/* Storage may have a newer version that is damaged: the agent reports that to the program. */
static void take_memory(const struct in_memory *memory, const struct stored *stored, struct ipc_found *ret_found)
{
        *ret_found = memory->found;
        passed_report(&stored->passed, ret_found);
}

/* A policy for signatures may refuse files that are whole, so its searches prove no damage. */
static void judge_copies(struct catalogue *catalogue, const struct job *job, const char *tag, const struct stored *stored)
{
        if (*tag && stored->status == NEBULA_CORRUPT)
                catalogue_judge_copies(catalogue, job->persist_path, tag, 0, false, stored->error.message);
        for (uint32_t i = 0; i < stored->passed.count; i++)
                catalogue_judge_copies(catalogue, job->persist_path, stored->passed.list[i].tag, 0, false, stored->passed.list[i].reason);
}

/* Looks into storage, and takes the newer one of what is there and what memory has. False: look again. */
static bool look_into_storage(struct catalogue *catalogue, const struct session *session, struct job *job, const char *path, bool own,
                              const struct ipc_find *request, const struct in_memory *memory, struct ipc_found *ret_found,
                              enum nebula_status *ret_status, struct nebula_error *error)
{
        struct search_scope scope = { .any_job = !own || session->role == IPC_ROLE_READER };
        enum verdict verdict = TAKE_MEMORY;
        struct stored stored;
        bool proves_damage;

        if (!memory->is_there) {
                restore_look(catalogue, job, request, &scope, &stored);
        } else {
                if (!request->tag[0])
                        memcpy(scope.also, memory->found.tag, sizeof scope.also);
                restore_look_patiently(catalogue, job, request, &scope, &stored);
        }
        *ret_status = NEBULA_OK;
        proves_damage = storage_policy(catalogue, job) == TRUST_OFF;
        catalogue_lock(catalogue);
        if (proves_damage)
                judge_copies(catalogue, job, request->tag, &stored);
        if (memory->is_there && stored.status && stored.status != NEBULA_NOT_FOUND)
                take_unseen(job, session, request, memory, &stored.error, ret_found);
        else if ((verdict = judge(catalogue, session, request, memory, &stored)) == TAKE_MEMORY)
                take_memory(memory, &stored, ret_found);
        else if (verdict == TAKE_STORED && !stored.status)
                *ret_status = take_stored(catalogue, session, job, &stored, ret_found, error);
        else if (verdict == TAKE_STORED && stored.status == NEBULA_NOT_FOUND && !request->tag[0])
                *ret_status = error_set(error, NEBULA_NOT_FOUND, 0, "there is no complete checkpoint in memory or in %.300s", path);
        else if (verdict == TAKE_STORED && (*ret_status = stored.status) && error)
                *error = stored.error;
        catalogue_unlock(catalogue);
        stored_done(&stored);
        return verdict != LOOK_AGAIN;
}

/* One look. False: look again. */
static bool find_once(struct catalogue *catalogue, const struct session *session, const struct ipc_find *request, struct ipc_found *ret_found,
                      enum nebula_status *ret_status, struct nebula_error *error)
{
        const char *path;
        struct in_memory memory;
        struct job *job, *own_job;
        bool own, is_done = true;

        catalogue_lock(catalogue);
        own_job = session->job;
        path = request->persist_path[0] ? request->persist_path : own_job->persist_path;
        own = !strcmp(path, own_job->persist_path);
        memory = look_into_memory(catalogue, session, path, own, request, &job);
        catalogue_unlock(catalogue);
        look_for_rival(catalogue, own_job, job ? job->persist_path : "");
        /* this node has lost the version, or never had it: ask the other nodes */
        if (!memory.is_there && own && storage_policy(catalogue, own_job) != TRUST_REQUIRE && !find_remote(catalogue, own_job, session, request, &memory.found, &memory.entry))
                memory.is_there = memory.stored_first = true; /* peers may have no more than this node's share */
        *ret_status = NEBULA_OK;
        if (memory.is_there && (memory.is_enough || (job && !*path)))
                *ret_found = memory.found;
        else if (!job)
                *ret_status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to look in %.300s", path);
        else if (!*path)
                *ret_status = error_set(error, NEBULA_NOT_FOUND, 0, "there is no complete checkpoint%s%s in memory, and no storage path is set",
                                        *request->tag ? " " : "", request->tag);
        else
                is_done = look_into_storage(catalogue, session, job, path, own, request, &memory, ret_found, ret_status, error);
        catalogue_lock(catalogue);
        unpin(own_job);
        unpin(job);
        catalogue_unlock(catalogue);
        return is_done;
}

static enum nebula_status find(struct catalogue *catalogue, const struct session *session, const struct ipc_find *request,
                               struct ipc_found *ret_found, struct nebula_error *error)
{
        enum nebula_status status;

        for (int looks = 0; looks < LOOKS_MAX; looks++)
                if (find_once(catalogue, session, request, ret_found, &status, error))
                        return status;
        return error_set(error, NEBULA_BUSY, 0, "the checkpoints of %.300s change while they are looked at: ask again", session->job->persist_path);
}

/* Finds the version that another rank has got. False: it is gone, and no other rank has it. */
static bool find_given(struct catalogue *catalogue, const struct session *session, const struct ipc_find *request, const struct ipc_found *given,
                       struct ipc_found *ret_found, enum nebula_status *ret_status, struct nebula_error *error)
{
        struct ipc_find exact = *request;
        const struct version *version;
        bool is_doubted, is_alone;

        strcpy(exact.tag, given->tag);
        exact.sequence = given->sequence;
        *ret_status = find(catalogue, session, &exact, ret_found, error);
        catalogue_lock(catalogue);
        version = *ret_status ? NULL : catalogue_version(catalogue, ret_found->version_id);
        is_doubted = *ret_status == NEBULA_CORRUPT || (version && version->copy != COPY_TRUSTED);
        if (is_doubted)
                answers_doubt(session, request);
        is_alone = *ret_status == NEBULA_NOT_FOUND && answers_forget(session, request);
        catalogue_unlock(catalogue);
        if (is_doubted || is_alone)
                return false;
        if (*ret_status == NEBULA_NOT_FOUND)
                *ret_status = error_set(error, NEBULA_UNAVAILABLE, 0, "another rank of this node was given \"%.200s\", which was removed or written again since: "
                                        "start the job again", given->tag);
        ret_found->passed_count = given->passed_count;
        memcpy(ret_found->passed, given->passed, sizeof given->passed);
        return true;
}

enum nebula_status restore_find(struct catalogue *catalogue, const struct session *session, const struct ipc_find *request,
                                struct ipc_found *ret_found, struct nebula_error *error)
{
        enum nebula_status status;
        struct ipc_found given;
        enum answer_kind kind;
        bool is_shared, is_settled = false;

        while (!is_settled) {
                catalogue_lock(catalogue);
                is_shared = !request->sequence && answers_are_shared(session, request->persist_path);
                kind = is_shared ? answers_given(session, request, &given) : ANSWER_OPEN;
                catalogue_unlock(catalogue);
                if (kind == ANSWER_NONE)
                        status = error_set(error, NEBULA_NOT_FOUND, 0, "there was no complete checkpoint%s%.200s when another rank of this node looked",
                                           *request->tag ? " " : "", request->tag);
                else if (kind == ANSWER_OPEN)
                        status = find(catalogue, session, request, ret_found, error);
                else if (!find_given(catalogue, session, request, &given, ret_found, &status, error))
                        continue;
                catalogue_lock(catalogue);
                is_settled = !is_shared || (status && (status != NEBULA_NOT_FOUND || kind == ANSWER_VERSION)) ||
                             answers_give(session, request, status ? NULL : ret_found, kind != ANSWER_OPEN);
                catalogue_unlock(catalogue);
        }
        return status;
}
