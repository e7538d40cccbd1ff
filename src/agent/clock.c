#include <inttypes.h>
#include <stdlib.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/clients/verdict.h"
#include "agent/clock.h"
#include "agent/commit/commit.h"
#include "agent/commit/commit_end.h"
#include "agent/commit/commit_rule.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/memory/shortage.h"
#include "agent/memory/survival_log.h"
#include "agent/persist/due.h"
#include "agent/persist/memory_scrub.h"
#include "agent/persist/worker.h"
#include "agent/pulse/pulse.h"
#include "os/os.h"

#define OWNER_CHECK_NS (2 * SECOND_NS)  /* for trainers of an earlier agent to reconnect */
#define SESSION_GRACE_NS (2 * SECOND_NS) /* a client whose connection broke reconnects at once */
#define FIRST_CLIENT_NS (5 * SECOND_NS)
#define SPARE_IDLE_NS (30 * SECOND_NS)   /* a trainer that restarts finds its spare images warm */

static int64_t earlier(int64_t a, int64_t b)
{
        return a < b ? a : b;
}

static void end_session(struct catalogue *catalogue, struct session *session)
{
        if (session->role == IPC_ROLE_TRAINER) {
                log_event(LOG_LEVEL_INFO, "rank %u (process %u) has left job \"%s\" in %s", session->rank, session->pid, session->job->name,
                          session->job->persist_path);
                commit_session_ended(catalogue, session);
        }
        catalogue_session_set(session, NULL, session->role, 0);
        free(session);
}

static int64_t end_sessions(struct catalogue *catalogue, struct job *job, int64_t now)
{
        int64_t due = INT64_MAX;

        for (struct session *session = job->sessions, *next; session; session = next) {
                next = session->next;
                if (session->connection_count)
                        continue;
                if (now < session->left_ns + SESSION_GRACE_NS && catalogue_may_live(session->seen_pid))
                        due = earlier(due, session->left_ns + SESSION_GRACE_NS);
                else
                        end_session(catalogue, session);
        }
        return due;
}

/* A job whose trainers have left may restart and load its newest version. Its memory counts against the machine and the cgroup, where
 * the next job needs it. So the newest version stays as long as an idle agent stays, and the others leave memory at once. Versions
 * that storage does not have stay. */
static int64_t release_ended(struct catalogue *catalogue, struct job *job, int64_t now)
{
        int64_t since = job->idle_since_ns > catalogue->started_ns ? job->idle_since_ns : catalogue->started_ns;
        int64_t until = since + (int64_t)catalogue->linger_s * SECOND_NS;
        bool is_kept = now < until;

        if (!job->live || job->trainer_session_count)
                return INT64_MAX;
        if (policy_release(catalogue, job, is_kept, NULL) && !is_kept)
                log_event(LOG_LEVEL_INFO, "versions of job \"%s\" in %s leave memory: no trainer has connected for %" PRIu64 " s", job->name,
                          job->persist_path, catalogue->linger_s);
        return is_kept ? until : INT64_MAX;
}

static int64_t release_idle(struct catalogue *catalogue, struct job *job, int64_t now)
{
        int64_t spare_ns = (int64_t)catalogue->linger_s * SECOND_NS < SPARE_IDLE_NS ? (int64_t)catalogue->linger_s * SECOND_NS : SPARE_IDLE_NS;
        int64_t due = release_ended(catalogue, job, now);

        if (job->trainer_count || !memory_free_bytes(catalogue->memory, job))
                return due;
        if (now < job->idle_since_ns + spare_ns)
                return earlier(due, job->idle_since_ns + spare_ns);
        for (struct image *image = memory_next_free(catalogue->memory, NULL, job), *next; image; image = next) {
                next = memory_next_free(catalogue->memory, image, job);
                memory_doom(catalogue->memory, image);
        }
        pthread_cond_signal(&catalogue->pages);
        return due;
}

/* All that concerns a job is looked at before the next job: each comes into the processor's caches once. */
static int64_t look_at_jobs(struct catalogue *catalogue, int64_t now)
{
        int64_t due = INT64_MAX;

        while (!catalogue->connection_count && policy_drop_restored(catalogue))
                pthread_cond_signal(&catalogue->pages);
        for (struct job **link = &catalogue->jobs, *job; (job = *link);) {
                due = earlier(due, end_sessions(catalogue, job, now));
                due = earlier(due, commit_quiet(catalogue, job, now));
                if (survival_log_check_owners(catalogue, job))
                        due = earlier(due, now + OWNER_CHECK_NS);
                due = earlier(due, release_idle(catalogue, job, now));
                due = earlier(due, policy_foreseen_due(catalogue, job, now));
                if (catalogue_forget_job(catalogue, link, now, &due))
                        continue;
                due = earlier(due, worker_start(catalogue, job, now));
                link = &job->next;
        }
        return due;
}

/* The time when the agent may end by itself; INT64_MAX while it is needed. The process that started it is about to connect. */
static int64_t check_linger(struct catalogue *catalogue, int64_t now)
{
        bool is_new = catalogue->idle_since_ns == catalogue->started_ns;
        int64_t until, linger_ns = (int64_t)catalogue->linger_s * SECOND_NS;

        if (catalogue->connection_count || catalogue->peer_count || due_any(catalogue) || catalogue->in_process) {
                catalogue->idle_since_ns = now;
                return INT64_MAX;
        }
        until = catalogue->idle_since_ns + (is_new && linger_ns < FIRST_CLIENT_NS ? FIRST_CLIENT_NS : linger_ns);
        if (now < until)
                return until;
        if (catalogue->end && !catalogue->ends_itself) {
                catalogue->ends_itself = true;
                log_event(LOG_LEVEL_INFO, "the agent had nothing to do for %" PRIu64 " s: it ends", catalogue->linger_s);
                catalogue->end(catalogue);
        }
        return INT64_MAX;
}

void *clock_main(void *argument)
{
        struct catalogue *catalogue = argument;

        catalogue_lock(catalogue);
        while (!catalogue->stopping) {
                int64_t now = os->now_ns(), due = INT64_MAX;

                due = earlier(due, look_at_jobs(catalogue, now));
                due = earlier(due, shortage_look(catalogue, now));
                due = earlier(due, memory_scrub_look(catalogue, now));
                due = earlier(due, pulse_look(catalogue, now));
                due = earlier(due, verdict_look(catalogue, now));
                due = earlier(due, check_linger(catalogue, now));
                now = os->now_ns();
                if (!catalogue->stopping && due > now)
                        catalogue_wait(catalogue, &catalogue->clock, due == INT64_MAX ? -1 : (due - now) / 1000000 + 1);
        }
        while (catalogue->lane_count)
                catalogue_wait(catalogue, &catalogue->clock, -1);
        catalogue_unlock(catalogue);
        return NULL;
}
