/* Ranks that leave, by the end of their process or for another job, and the versions that wait for them. */
#include <stdlib.h>
#include <string.h>

#include "agent/clients/session.h"
#include "agent/commit/commit.h"
#include "agent/commit/commit_end.h"
#include "agent/commit/commit_rule.h"
#include "agent/commit/slots_private.h"
#include "agent/pulse/pulse.h"
#include "os/os.h"

void commit_session_began(const struct session *session)
{
        struct job *job = session->job;

        if (strcmp(job->runs->gone_run, session->run))
                job->runs->gone_count = 0;
        memcpy(job->runs->gone_run, session->run, sizeof job->runs->gone_run);
        for (size_t i = 0; i < job->runs->gone_count; i++)
                if (job->runs->gone[i].rank == session->rank)
                        job->runs->gone[i--] = job->runs->gone[--job->runs->gone_count];
}

static bool has_come_back(const struct session *session)
{
        for (const struct session *other = session->job->sessions; other; other = other->next)
                if (other != session && other->rank == session->rank && other->role == IPC_ROLE_TRAINER &&
                    other->connection_count)
                        return true;
        return false;
}

/* If the allocation fails, versions wait for this rank until their time is up. */
static void remember_gone(const struct session *session)
{
        struct job *job = session->job;
        struct gone *gone;

        if (!session->run[0] || strcmp(session->run, job->run) || has_come_back(session))
                return;
        commit_session_began(session);
        gone = realloc(job->runs->gone, (job->runs->gone_count + 1) * sizeof *gone);
        if (!gone)
                return;
        gone[job->runs->gone_count++] = (struct gone){ session->rank, session->pid };
        job->runs->gone = gone;
}

void commit_close_open(struct catalogue *catalogue, struct job *job, uint32_t rank, const char *except)
{
        for (struct version *version = job->live; version; version = version->next_live) {
                struct part *part = version_open(version) ? version_part(version, rank) : NULL;

                if (version->file_goal != NEBULA_FILES_OPEN || !part || part->closed ||
                    (except && !strcmp(version->tag, except)) || (!part->file_count && !version_rank_copies(version, rank)))
                        continue;
                part->closed = true;
                version_mark(catalogue, version);
                commit_check(catalogue, version);
        }
}

void commit_close_dead(struct catalogue *catalogue, struct job *job)
{
        for (struct version *version = job->versions; version; version = version->next) {
                bool closes = false;

                if (!version_open(version) || version->file_goal != NEBULA_FILES_OPEN)
                        continue;
                for (size_t i = 0; i < version->part_count; i++) {
                        struct part *part = &version->parts[i];

                        /* The end of the connection decides about a file that the rank still copies, or has not begun. */
                        if (part->closed || !part->file_count || version_rank_copies(version, part->rank) ||
                            catalogue_may_live(part->seen_pid))
                                continue;
                        part->closed = closes = true;
                }
                if (!closes)
                        continue;
                version_mark(catalogue, version);
                commit_check(catalogue, version);
        }
}

static void remove_part(struct version *version, struct part *part)
{
        *part = version->parts[--version->part_count];
}

bool commit_rank_ended(struct catalogue *catalogue, struct version *version, uint32_t rank)
{
        struct part *part = version_part(version, rank);
        const struct image_loan *loan;

        if (!part || !version_open(version))
                return true;
        loan = version_loan_of(version, rank);
        if (loan) {
                version->is_deserted = rank != 0;
                version_fail(catalogue, version, NEBULA_FAILED, "rank %u (process %u) ended before \"%s\" was whole and committed",
                             part->rank, part->pid, loan->name);
        } else if (part->closed) {
                return true;
        } else if (!version->file_count && !version->loans && version->part_count == 1 && !version->pins) {
                version_forget_memory(catalogue, version);
                version_free(catalogue, version); /* the session only attached to the job, perhaps to read */
                return false;
        } else if (version->file_goal == NEBULA_FILES_OPEN) {
                if (part->file_count)
                        part->closed = true;
                else
                        remove_part(version, part);
                commit_check(catalogue, version);
        } else {
                version->is_deserted = rank != 0;
                version_fail(catalogue, version, NEBULA_FAILED, "rank %u (process %u) ended before it committed \"%s\"",
                             part->rank, part->pid, version->tag);
        }
        return true;
}

/* No rank is left that could complete these versions. */
static void job_deserted(struct catalogue *catalogue, struct job *job)
{
        for (struct version *version = job->versions; version; version = version->next)
                if (version_open(version) && !version->adopted) {
                        commit_check(catalogue, version);
                        if (version_open(version) && !version->is_spread)
                                version_fail(catalogue, version, NEBULA_FAILED,
                                             "all trainers left before checkpoint \"%s\" was complete", version->tag);
                }
        job->idle_since_ns = os->now_ns();
}

/* If one trainer has ended, the others soon end, too. The next run's trainers may come before the last has left. */
static void want_newest(struct job *job)
{
        struct version *newest = NULL;

        for (struct version *version = job->versions; version; version = version->next)
                if (version->in_memory && lifecycle_complete(version->life.state) &&
                    (!newest || version->sequence > newest->sequence))
                        newest = version;
        if (newest)
                newest->wanted = true;
}

/* Converts a time of the machine's monotonic clock to seconds since 1970. */
static double wall_at(int64_t at_ns)
{
        return catalogue_now() - (double)(os->now_ns() - at_ns) / 1e9;
}

void commit_session_ended(struct catalogue *catalogue, struct session *session)
{
        struct version *next;

        remember_gone(session);
        for (struct version *version = session->job->versions; version; version = next) {
                struct part *part = version_part(version, session->rank);

                next = version->next;
                if (version_open(version) && !part)
                        commit_fail_without(catalogue, version);
                if (version_open(version) && part && part->nonce == session->nonce &&
                    commit_rank_ended(catalogue, version, session->rank))
                        next = version->next; /* the completion of this version may have freed the next one in the list */
        }
        if (!session->job->trainer_count) {
                int64_t stepped_ns = pulse_end_run(session->job);

                session->job->runs->stopped = wall_at(session->left_ns);
                session->job->runs->stepped = stepped_ns ? wall_at(stepped_ns) : 0;
                job_deserted(catalogue, session->job);
        }
        want_newest(session->job);
        catalogue_signal_job(catalogue, session->job);
}
