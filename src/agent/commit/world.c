#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/commit/commit.h"
#include "agent/commit/lineage.h"
#include "agent/commit/node_documents.h"
#include "agent/commit/slots_private.h"
#include "agent/commit/world_private.h"
#include "agent/log.h"
#include "agent/persist/progress.h"
#include "agent/persist/storage.h"
#include "base/error.h"
#include "base/text.h"
#include "os/os.h"

#define POLL_FIRST_NS (5 * SECOND_NS / 1000)
#define LIST_AFTER_NS SECOND_NS        /* a node that does not commit only looks to name the missing ranks */

static int64_t back_off(uint32_t count)
{
        int64_t delay = POLL_FIRST_NS;

        while (count-- && delay < WORLD_POLL_MOST_NS)
                delay += delay / 2;
        return delay < WORLD_POLL_MOST_NS ? delay : WORLD_POLL_MOST_NS;
}

bool world_leads(const struct version *version)
{
        return version->nodes->leads;
}

int64_t world_waiting_since_ns(const struct version *version)
{
        return version->nodes->waiting_since_ns;
}

int64_t world_heard_ns(const struct version *version)
{
        return version->nodes->heard_ns;
}

int64_t world_poll_at_ns(const struct version *version)
{
        return version->nodes->poll_at_ns;
}

uint32_t world_poll_count(const struct version *version)
{
        return version->nodes->poll_count;
}

void world_look_later(struct version *version, int64_t now_ns)
{
        version->nodes->poll_at_ns = now_ns + back_off(version->nodes->poll_count++);
}

void world_await(struct version *version)
{
        version->nodes->waiting_since_ns = os->now_ns();
        version->nodes->poll_count = 0;
}

uint64_t world_announce_sequence(const struct version *version)
{
        return version->nodes->announce_sequence;
}

void world_adopt(struct version *version, uint64_t announce_sequence, bool is_spread)
{
        version->nodes->announce_sequence = announce_sequence;
        version->is_spread = version->nodes->to_announce = is_spread;
        version->nodes->waiting_since_ns = version->nodes->heard_ns = os->now_ns();
}

/* The number of ranks of the job that have a session on this node. */
static uint32_t ranks_here(const struct version *version)
{
        uint32_t count = (uint32_t)version->part_count;

        for (const struct session *session = version->job->sessions; session; session = session->next)
                count += session->role == IPC_ROLE_TRAINER && session->connection_count &&
                         session->rank < version->world && !version_part((struct version *)version, session->rank);
        return count;
}

/* Some launchers say of every rank that it is alone on its node, so the agent also counts the ranks that are here. A version that was
 * announced stays announced, even if all ranks turn out to be here: agents that have read the announcement wait for the decision,
 * and so does the persist worker. */
bool world_is_spread(const struct catalogue *catalogue, const struct version *version)
{
        return version->is_spread || (version->world > 1 && version->job->persist_path[0] && version->job->settings.local_world < version->world &&
                                   ranks_here(version) < version->world);
}

uint64_t world_next_writing(const struct job *job, const char *tag, const char *run)
{
        const struct manifest *stored = known_find(&job->known, tag);
        uint64_t writing = 0;

        for (const struct version *version = job_may_have(job, tag) ? job->versions : NULL; version; version = version->next)
                if (!version->is_remote && !strcmp(version->tag, tag) && !strcmp(version->run, run) && version->writing > writing)
                        writing = version->writing;
        if (stored && !strcmp(stored->run, run) && stored->writing > writing)
                writing = stored->writing;
        return writing + 1;
}

void world_captured(struct catalogue *catalogue, struct version *version)
{
        size_t size = 0;

        for (size_t i = 0; i < version->part_count; i++)
                size += 1 + version->parts[i].file_count;
        if (version->is_spread && version->nodes->announced_size == size)
                return;
        version->nodes->announced_size = size;
        version->nodes->to_announce = version->is_spread = true;
        version->in_memory = true; /* even if its ranks saved nothing: other nodes wait for their records */
        version->nodes->poll_count = 0;
        version->nodes->poll_at_ns = 0;
        version->nodes->waiting_since_ns = version->nodes->heard_ns = os->now_ns();
        if (!version->nodes->announce_sequence)
                version->nodes->announce_sequence = job_next_sequence(version->job);
        if (version->life.state == NEBULA_STATE_CAPTURING)
                version_move(catalogue, version, NEBULA_STATE_CAPTURED);
        version_changed(catalogue, version);
}

static bool lists(const struct committed *committed, uint32_t rank)
{
        for (size_t i = 0; i < committed->rank_count; i++)
                if (committed->ranks[i] == rank)
                        return true;
        return false;
}

/* Fails the version if the node that committed did not know of a rank of this node with files: these would never reach storage. Lock
 * held. */
static bool fail_unlisted(struct catalogue *catalogue, struct version *version, const struct committed *committed)
{
        for (size_t i = 0; i < version->part_count; i++) {
                const struct part *part = &version->parts[i];

                if (!part->file_count || lists(committed, part->rank))
                        continue;
                version_fail(catalogue, version, NEBULA_FAILED,
                             "checkpoint \"%.150s\" was committed without what rank %" PRIu32 " (process %" PRIu32
                             ") saved to it: the files came too late", version->tag, part->rank, part->pid);
                return true;
        }
        return false;
}

void world_give_up(struct catalogue *catalogue, struct version *version)
{
        if (version->life.state != NEBULA_STATE_FAILED || version->adopted || !world_is_spread(catalogue, version))
                return;
        version->nodes->to_give_up = version->is_spread = true;
        version->nodes->poll_count = 0;
        version->nodes->poll_at_ns = 0;
        catalogue_signal_job(catalogue, version->job);
}

/* Lock held. */
static void adopt(struct catalogue *catalogue, struct version *version, const struct committed *committed)
{
        struct job *job = version->job;

        if (version_open(version) && *committed->given_up) {
                version_fail(catalogue, version, NEBULA_FAILED, "%s", committed->given_up);
                return;
        }
        if (!version_open(version) || fail_unlisted(catalogue, version, committed))
                return;
        version->sequence = committed->sequence;
        version->line = committed->line;
        world_keep_decision(version, committed);
        job_saw_sequence(job, committed->sequence);
        if (committed->persist) {
                version->wanted = true;
                version->nodes->wanted_reported = true;
                job->runs->spread_start_ns = os->now_ns();
        } else if (!job->trainer_count) {
                version->wanted = true; /* no trainer is left: the newest version becomes durable */
        }
        memset(&version->error, 0, sizeof version->error);
        version->nodes->poll_count = 0;
        version->nodes->poll_at_ns = os->now_ns();
        policy_want_spares(catalogue, job);
        if (version->loans) {
                log_event(LOG_LEVEL_WARN, "%s was committed without the files that this node was still copying", version->tag);
                version_drop_loans(catalogue, version);
        }
        if (version->life.state == NEBULA_STATE_CAPTURING)
                version_move(catalogue, version, NEBULA_STATE_CAPTURED);
        version_move(catalogue, version, NEBULA_STATE_COMMITTED);
        policy_retain(catalogue, job);
}

static bool goal_met(struct catalogue *catalogue, const struct version *version, const struct coverage *coverage,
                     int64_t now)
{
        int64_t goal, heard_ns;

        catalogue_lock(catalogue); /* a rank that begins the version may set its goal, and one that captures moves heard_ns */
        goal = version->file_goal;
        heard_ns = version->nodes->heard_ns;
        catalogue_unlock(catalogue);
        if (goal > 0)
                return coverage->files >= (uint64_t)goal;
        if (coverage->count >= version->world)
                return true;
        /* An open-ended version waits a limited time for ranks that have not begun it. */
        return goal == NEBULA_FILES_OPEN && now - heard_ns >= (int64_t)catalogue->quiet_s * SECOND_NS;
}

static void look_again(struct version *version, int64_t now)
{
        version->nodes->poll_at_ns = now + back_off(version->nodes->poll_count++);
}

static void storage_trouble(struct catalogue *catalogue, struct version *version, const struct nebula_error *error)
{
        struct job *job = version->job;
        bool is_new;

        if (error->status == NEBULA_INVALID) {
                version_fail(catalogue, version, error->status, "%s", error->message);
                return;
        }
        is_new = version->nodes->poll_count == 0 || job_progress(job).error->status == NEBULA_OK; /* not at each look */
        if (is_new)
                log_event(LOG_LEVEL_WARN, "%s waits for storage: %s", version->tag, error->message);
        storage_failed(catalogue, job, error, is_new);
        progress_failed(version, os->now_ns());
        version->nodes->poll_count = version->nodes->poll_count < 14 ? 14 : version->nodes->poll_count;
        look_again(version, os->now_ns());
}

/* Whether ranks of this node took part in that writing of the version's tag, or in a later one before it. */
static bool took_part(const struct version *version, uint64_t writing)
{
        for (const struct version *older = version->next; older; older = older->next)
                if (older->part_count && older->writing >= writing && !strcmp(older->tag, version->tag) && !strcmp(older->run, version->run))
                        return true;
        return false;
}

/* A save that the last open-ended writing did not wait for is of that one, though this agent has learned from storage that it is durable: with the
 * next one it would be mixed with later saves of the other nodes. */
static bool came_too_late(const struct version *version, uint64_t count, uint64_t without)
{
        return version->file_goal == NEBULA_FILES_OPEN && without > count && version->writing == without + 1 && !took_part(version, without);
}

/*
 * Before the first announcement. A commit with ranks of this node, of which this version has not been announced, is of an earlier writing. This
 * agent may not know that writing if an agent before it made it. Other nodes count it, too. Lock held; released meanwhile.
 */
static enum nebula_status count_writings(struct catalogue *catalogue, struct version *version, struct nebula_error *error)
{
        struct captured own;
        struct store *store;
        uint64_t before = version->writing, count = 0, without = 0;
        bool is_first = before == 1; /* as far as this agent knows */
        enum nebula_status status;

        if (version->nodes->is_counted || version->adopted)
                return NEBULA_OK;
        world_describe(version, &own);
        version->pins++;
        catalogue_unlock(catalogue);
        status = storage_open(catalogue, version->job, &store, error);
        if (!status)
                status = world_count_writings(store, &own, is_first, &count, &without, error);
        captured_done(&own);
        catalogue_lock(catalogue);
        version->pins--;
        if (status)
                return status;
        version->nodes->is_counted = true;
        if (count >= version->writing)
                version->writing = count + 1;
        if (came_too_late(version, count, without))
                version->writing = without;
        for (const struct version *older = version->next; older; older = older->next)
                if (older->part_count && older->writing >= version->writing && !strcmp(older->tag, version->tag) && !strcmp(older->run, version->run))
                        version->writing = older->writing + 1;
        if (version->writing != before)
                version_mark(catalogue, version);
        return NEBULA_OK;
}

/* A write that fails may have written the document. */
static void note_announced(struct version *version, const char *path)
{
        struct version_nodes *nodes = version->nodes;

        nodes->announced_more = nodes->announced_more || version->adopted || (*nodes->announced && strcmp(nodes->announced, path));
        snprintf(nodes->announced, sizeof nodes->announced, "%s", path);
}

static enum nebula_status write_captured(struct catalogue *catalogue, struct version *version, struct captured *captured, struct nebula_error *error)
{
        char path[ANNOUNCE_PATH_MAX] = "";
        struct store *store;
        enum nebula_status status;

        version->pins++;
        catalogue_unlock(catalogue);
        status = storage_open(catalogue, version->job, &store, error);
        if (!status)
                status = world_write_captured(store, captured, path, error);
        catalogue_lock(catalogue);
        version->pins--;
        if (*path)
                note_announced(version, path);
        return status;
}

static void announce(struct catalogue *catalogue, struct version *version)
{
        struct nebula_error error = { 0 };
        struct captured captured;
        enum nebula_status status;
        bool is_described;

        version->nodes->to_announce = false;
        status = count_writings(catalogue, version, &error);
        if (!version_open(version))
                return;
        is_described = world_describe(version, &captured);
        if (!status && is_described)
                status = write_captured(catalogue, version, &captured, &error);
        captured_done(&captured);
        if (!is_described)
                return;
        if (status) {
                version->nodes->to_announce = true;
                storage_trouble(catalogue, version, &error);
        } else {
                progress_works(version->job);
        }
        catalogue_signal_job(catalogue, version->job);
}

/* Lock held; released meanwhile. */
static void write_given_up(struct catalogue *catalogue, struct version *version)
{
        struct committed given_up = { 0 };
        struct nebula_error error = { 0 };
        struct store *store;
        enum nebula_status status;

        world_fill_of(version, &given_up.of);
        if (!version->nodes->announce_sequence)
                version->nodes->announce_sequence = job_next_sequence(version->job);
        given_up.sequence = version->nodes->announce_sequence;
        snprintf(given_up.given_up, sizeof given_up.given_up, "%.255s", version->error.message);
        text_make_printable(given_up.given_up);
        version->pins++;
        catalogue_unlock(catalogue);
        status = storage_open(catalogue, version->job, &store, &error);
        if (!status)
                status = world_write_given_up(store, &given_up, &error);
        catalogue_lock(catalogue);
        version->pins--;
        version->nodes->to_give_up = status && status != NEBULA_INVALID;
        if (status)
                log_event(LOG_LEVEL_WARN, "the other nodes do not learn that %s was given up: %s", version->tag, error.message);
        look_again(version, os->now_ns());
}

/* The agent of rank 0 writes the documents that need one writer. */
static bool has_rank_zero(const struct version *version)
{
        bool has = version_part((struct version *)version, 0) != NULL;

        for (const struct session *session = version->job->sessions; session && !has; session = session->next)
                has = session->role == IPC_ROLE_TRAINER && session->rank == 0;
        return has;
}

static bool interval_passed(const struct job *job, int64_t now)
{
        return job->settings.persist_interval_s <= 0 || job->runs->spread_start_ns == 0 ||
               now - job->runs->spread_start_ns >= (int64_t)(job->settings.persist_interval_s * 1e9);
}

/* Documents in storage may come from nodes of another run. */
static enum nebula_status commit_for_all(struct catalogue *catalogue, struct store *store, struct version *version, const struct captured *own,
                                         struct coverage *coverage, bool persist, struct committed *ret_committed,
                                         struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        struct line line;
        int64_t after;
        bool scanned;

        catalogue_lock(catalogue);
        scanned = version->job->is_scanned;
        catalogue_unlock(catalogue);
        if (!scanned)
                status = storage_scan(catalogue, version->job, error);
        if (status)
                return status;
        catalogue_lock(catalogue);
        after = lineage_goes_back(version);
        if (coverage->goes_back && (after == LINEAGE_GOES_ON || coverage->after < after))
                after = coverage->after;
        lineage_find(version, coverage->sequence, after, &line);
        if (coverage->sequence < line_began(&line)) /* it was captured before the version that began the line, and is committed after it */
                coverage->sequence = line_began(&line);
        catalogue_unlock(catalogue);
        return world_commit_document(store, own, coverage, &line, persist, ret_committed, error);
}

/* Lock held. */
static void show_covered(struct version *version, const struct coverage *coverage)
{
        if (!version->nodes->covered)
                version->nodes->covered = calloc(version->world, 1);
        for (uint32_t rank = 0; version->nodes->covered && coverage->count && rank < version->world; rank++)
                version->nodes->covered[rank] = coverage->ranks[rank] != 0;
}

static void look_for_commit(struct catalogue *catalogue, struct version *version, int64_t now)
{
        struct nebula_error error = { 0 };
        struct committed committed = { 0 };
        struct coverage *coverage = version->nodes->coverage ? version->nodes->coverage : coverage_new(version->world);
        struct captured own;
        struct store *store;
        bool found, decide, persist = interval_passed(version->job, now) || version->wanted;
        int64_t waited = now - version->nodes->waiting_since_ns;
        enum nebula_status status;

        decide = version->nodes->leads = has_rank_zero(version) || waited > (int64_t)catalogue->takeover_s * SECOND_NS;
        version->nodes->coverage = coverage;
        if (!world_describe(version, &own) || !coverage) {
                captured_done(&own);
                look_again(version, now);
                return;
        }
        version->pins++;
        catalogue_unlock(catalogue);
        status = storage_open(catalogue, version->job, &store, &error);
        if (!status)
                status = world_read_committed(store, &own.of, &committed, &error);
        found = !status;
        if (status == NEBULA_NOT_FOUND)
                status = NEBULA_OK;
        else if (status == NEBULA_CORRUPT) /* no node replaces it, so the version cannot become complete */
                status = error.status = NEBULA_INVALID;
        if (!status && !found && (decide || waited > LIST_AFTER_NS))
                status = coverage_look(store, &own, coverage, &error);
        if (!status && !found && decide && goal_met(catalogue, version, coverage, now)) {
                status = commit_for_all(catalogue, store, version, &own, coverage, persist, &committed, &error);
                found = !status;
        }
        catalogue_lock(catalogue);
        version->pins--;
        if (coverage->nodes > version->nodes->heard) {
                version->nodes->heard = coverage->nodes;
                version->nodes->heard_ns = now;
        }
        show_covered(version, coverage);
        if (found) {
                coverage_free(coverage);
                version->nodes->coverage = NULL;
        }
        captured_done(&own);
        if (status)
                storage_trouble(catalogue, version, &error);
        else if (found)
                adopt(catalogue, version, &committed);
        else if (!world_cannot_complete(catalogue, version, now))
                look_again(version, now);
        committed_done(&committed);
        catalogue_signal_job(catalogue, version->job);
}

static bool work_on(struct catalogue *catalogue, struct version *version, int64_t now, int64_t *due)
{
        bool open = version_open(version), waits = open || (lifecycle_complete(version->life.state) && !version->stored && !version->superseded);

        if (version->nodes->to_give_up && version->nodes->poll_at_ns > now) {
                *due = version->nodes->poll_at_ns < *due ? version->nodes->poll_at_ns : *due;
                return false;
        }
        if (version->nodes->to_give_up) {
                write_given_up(catalogue, version);
                return true;
        }
        if (version->life.state == NEBULA_STATE_FAILED || version->stored || version->superseded)
                return world_tidy(catalogue, version, now, due);
        if (!waits || (!open && version->wanted && version->nodes->wanted_reported && !world_is_given_up(version, now)))
                return false;
        if (!open && world_is_given_up(version, now)) {
                log_event(LOG_LEVEL_WARN, "%s will not become durable: another node has dropped it, and a newer checkpoint is durable", version->tag);
                version_forget_memory(catalogue, version);
                return true;
        }
        if (version->nodes->poll_at_ns > now && !(!open && version->wanted && !version->nodes->report_failed)) {
                *due = version->nodes->poll_at_ns < *due ? version->nodes->poll_at_ns : *due;
                return false;
        }
        if (version->nodes->to_announce)
                announce(catalogue, version);
        else if (open)
                look_for_commit(catalogue, version, now);
        else
                world_exchange_wanted(catalogue, version, now);
        return true;
}

bool world_work(struct catalogue *catalogue, struct job *job, int64_t now_ns, int64_t *due_ns)
{
        struct version *oldest = NULL;

        if (!job->persist_path[0])
                return false; /* the nodes share no storage to exchange documents through */
        for (struct version *version = job->versions; version; version = version->next)
                if (version->is_spread && version->nodes->to_announce && version->nodes->poll_at_ns <= now_ns && version_open(version))
                        oldest = version; /* the list is newest first: the last one found was begun first */
        if (oldest) {
                announce(catalogue, oldest);
                return true;
        }
        for (struct version *version = job->versions; version; version = version->next)
                if (version->is_spread && work_on(catalogue, version, now_ns, due_ns))
                        return true;
        return false;
}
