/* The rule by which a version is complete, and forecasts of it. */
#include "agent/catalogue/memory_policy.h"
#include "agent/commit/commit_rule.h"
#include "agent/commit/slots_private.h"
#include "agent/memory/memory.h"
#include <string.h>

#include "agent/commit/carry_over.h"
#include "agent/commit/commit.h"
#include "agent/commit/lineage.h"
#include "agent/commit/world.h"
#include "os/os.h"

#define MISSING_RANK_NS 2000000000 /* an open-ended version gives ranks that are connected this long to begin */

static bool all_parts_closed(const struct version *version)
{
        for (size_t i = 0; i < version->part_count; i++)
                if (!version->parts[i].closed)
                        return false;
        return version->part_count > 0;
}

bool commit_parts_end(const struct version *version)
{
        for (size_t i = 0; i < version->part_count; i++)
                if (!version->parts[i].closed && !version_rank_copies(version, version->parts[i].rank))
                        return false;
        return true;
}

/* Whether a connected rank has not begun this version: it may be about to. */
static bool ranks_to_come(struct version *version)
{
        if (version->part_count >= version->world)
                return false;
        for (const struct session *session = version->job->sessions; session; session = session->next)
                if (session->role == IPC_ROLE_TRAINER && session->connection_count &&
                    !version_part(version, session->rank))
                        return true;
        return false;
}

static bool every_rank_closed(const struct version *version)
{
        size_t closed = 0;

        for (size_t i = 0; i < version->part_count; i++)
                closed += version->parts[i].closed && version->parts[i].rank < version->world;
        return closed >= version->world;
}

/* This node's share of a version is whole. */
static bool share_met(const struct catalogue *catalogue, struct version *version)
{
        if (version->loans)
                return false;
        if (version->file_goal > 0)
                return version->file_count > 0;
        return all_parts_closed(version) && (!ranks_to_come(version) ||
                                             (version->file_goal == NEBULA_FILES_OPEN &&
                                              os->now_ns() - version->activity_ns >= MISSING_RANK_NS));
}

/* The rule of the header, for one node. */
static bool rule_met(const struct catalogue *catalogue, struct version *version)
{
        if (version->loans)
                return false;
        if (version->world > 1 && !version->job->persist_path[0] && version->job->settings.local_world &&
            version->job->settings.local_world < version->world)
                /* The nodes share no storage, so they cannot notify each other: each has its share, and resume compares them. */
                return share_met(catalogue, version) && version->part_count >= version->job->settings.local_world;
        if (version->file_goal > 0)
                return version->file_count >= (uint64_t)version->file_goal;
        if (version->file_goal == NEBULA_FILES_ALL_RANKS)
                return every_rank_closed(version);
        return all_parts_closed(version) && (!ranks_to_come(version) ||
                                             os->now_ns() - version->activity_ns >= MISSING_RANK_NS);
}

/* True if the rank's part closes with the file that it copies now. */
static bool will_close(const struct version *version, const struct part *part)
{
        bool closes = part->closed;

        for (const struct image_loan *loan = version->loans; loan; loan = loan->next)
                closes = closes || (loan->rank == part->rank && loan->commits);
        return closes;
}

/* Whether rule_met will hold when the running copies are complete. */
static bool rule_will_be_met(const struct catalogue *catalogue, struct version *version)
{
        uint64_t files = version->file_count;
        size_t closing = 0;

        for (const struct image_loan *loan = version->loans; loan; loan = loan->next) {
                if (version_file(version, loan->name))
                        return false; /* saved again */
                files++;
        }
        for (size_t i = 0; i < version->part_count; i++)
                closing += will_close(version, &version->parts[i]);
        if (version->file_goal > 0)
                return files >= (uint64_t)version->file_goal;
        if (version->file_goal == NEBULA_FILES_ALL_RANKS)
                return closing >= version->world;
        return closing == version->part_count && !ranks_to_come(version);
}

bool commit_foreseen(const struct catalogue *catalogue, struct version *version)
{
        bool has_begun = false;

        if (!version_open(version) || !carry_over_is_first(version) || version->adopted || version->is_spread ||
            world_is_spread((struct catalogue *)catalogue, version))
                return false;
        for (const struct image_loan *loan = version->loans; loan; loan = loan->next) {
                if (loan->image->spilled)
                        return false;
                has_begun = has_begun || atomic_load(&loan->image->copied);
        }
        return has_begun && rule_will_be_met(catalogue, version);
}

/* A rank that this version waits for and that left before it had begun the version; NULL: none. */
static const struct gone *missed_rank(struct version *version)
{
        const struct job *job = version->job;

        if (version->file_goal != NEBULA_FILES_ALL_RANKS || version->adopted || strcmp(version->run, job->runs->gone_run))
                return NULL;
        for (size_t i = 0; i < job->runs->gone_count; i++)
                if (job->runs->gone[i].rank < version->world && !version_part(version, job->runs->gone[i].rank))
                        return &job->runs->gone[i];
        return NULL;
}

/* Whether a rank has saved or committed. Before that a version has nothing that can be lost, and the rank's save fails it once. */
static bool has_something(const struct version *version)
{
        bool any = version->file_count || version->loans;

        for (size_t i = 0; i < version->part_count; i++)
                any |= version->parts[i].closed;
        return any;
}

void commit_fail_without(struct catalogue *catalogue, struct version *version)
{
        const struct gone *gone = missed_rank(version);

        if (!gone || !has_something(version))
                return;
        version->is_deserted = gone->rank != 0;
        version_fail(catalogue, version, NEBULA_FAILED, "rank %u (process %u) ended before it began \"%s\"", gone->rank, gone->pid,
                     version->tag);
}

void commit_check(struct catalogue *catalogue, struct version *version)
{
        if (version_open(version))
                commit_fail_without(catalogue, version);
        if (!version_open(version))
                return;
        if (world_is_spread(catalogue, version)) {
                if (share_met(catalogue, version)) {
                        version->is_spread = true;
                        if (version->nodes->carried_parts != version->part_count)
                                carry_over(version);
                        version->nodes->carried_parts = version->part_count;
                        world_captured(catalogue, version);
                }
                return;
        }
        if (!rule_met(catalogue, version))
                return;
        if (!version->file_count) {
                version_fail(catalogue, version, NEBULA_FAILED, "nothing was saved to checkpoint \"%s\"", version->tag);
                return;
        }
        if (version->life.state == NEBULA_STATE_CAPTURING)
                version_move(catalogue, version, NEBULA_STATE_CAPTURED);
        carry_over(version);
        lineage_set(version, job_next_sequence(version->job));
        version->sequence = version->job->last_sequence;
        version_move(catalogue, version, NEBULA_STATE_COMMITTED);
        policy_forget_hints(version->job);
        policy_retain(catalogue, version->job);
        if (policy_spare_bytes(catalogue, version->job))
                policy_want_spares(catalogue, version->job);
        version_changed(catalogue, version); /* there may be room now, and pages to give back */
}

int64_t commit_quiet(struct catalogue *catalogue, struct job *job, int64_t now_ns)
{
        int64_t quiet_ns = (int64_t)catalogue->quiet_s * SECOND_NS, due = INT64_MAX;

        for (struct version *version = job->live; version; version = version->next_live) {
                int64_t at;

                if (!version_open(version) || version->file_goal != NEBULA_FILES_OPEN || version->loans || !version->file_count || version->is_spread)
                        continue;
                at = version->activity_ns + (all_parts_closed(version) ? MISSING_RANK_NS : quiet_ns);
                if (at > now_ns) {
                        due = at < due ? at : due;
                        continue;
                }
                for (size_t i = 0; i < version->part_count; i++)
                        version->parts[i].closed = true;
                commit_check(catalogue, version);
        }
        return due;
}

bool commit_rank_reached(const struct version *version, const struct session *session, enum nebula_state state)
{
        if (lifecycle_reached(version->life.state, state))
                return true;
        return state == NEBULA_STATE_CAPTURED && version->life.state == NEBULA_STATE_CAPTURING && session->job == version->job &&
               version_part((struct version *)version, session->rank) &&
               version_part((struct version *)version, session->rank)->file_count && !version_rank_copies(version, session->rank);
}
