#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/commit.h"
#include "agent/clients/history.h"
#include "agent/clients/location.h"
#include "agent/log.h"
#include "agent/memory/survival_log.h"
#include "agent/publish/publish.h"
#include "agent/catalogue/retention.h"
#include "agent/clients/session.h"
#include "agent/persist/lease.h"
#include "agent/persist/storage.h"
#include "agent/persist/worker.h"
#include "agent/commit/world.h"
#include "os/os.h"
#include "os/thread.h"

#define SECOND_NS 1000000000
#define OWNER_CHECK_NS (2 * (int64_t)SECOND_NS)  /* for trainers of an earlier agent to reconnect */
#define SESSION_GRACE_NS (2 * (int64_t)SECOND_NS) /* a client whose connection broke reconnects at once */
#define SPARE_IDLE_NS (30 * (int64_t)SECOND_NS)   /* a trainer that restarts finds its spare images warm */
#define RETRY_FIRST_NS (SECOND_NS / 2)
#define RETRY_MOST_NS (30 * (int64_t)SECOND_NS)

static int64_t earlier(int64_t a, int64_t b)
{
        return a < b ? a : b;
}

static bool to_persist(const struct version *version)
{
        return version->in_memory && !version->stored && !version->superseded && lifecycle_complete(version->life.state) &&
               version->life.state != NEBULA_STATE_DURABLE && version->job->persist_path[0];
}

/* Whether anything is pending, or anything that has not failed since `since_ns`. */
static bool is_pending(const struct catalogue *catalogue, const struct job *job, int64_t since_ns)
{
        if (job->persist.is_busy && (!job->persist.version || job->persist.version->persist.failed_ns < since_ns))
                return true;
        if (publish_pending((struct catalogue *)catalogue, (struct job *)job, since_ns))
                return true;
        for (const struct version *version = job->live; version; version = version->next_live)
                if (to_persist(version) && version_unsaved(version) && version->persist.failed_ns < since_ns)
                        return true;
        return false;
}

bool worker_pending(const struct catalogue *catalogue, const struct job *only)
{
        for (const struct job *job = catalogue->jobs; job; job = job->next)
                if ((!only || job == only) && is_pending(catalogue, job, INT64_MAX))
                        return true;
        return false;
}

bool worker_draining(const struct catalogue *catalogue, int64_t since_ns)
{
        for (const struct job *job = catalogue->jobs; job; job = job->next)
                if (is_pending(catalogue, job, since_ns))
                        return true;
        return false;
}

static void want(struct job *job)
{
        for (struct version *version = job->live; version; version = version->next_live)
                version->persist.wanted = version->persist.wanted || to_persist(version);
}

/* A client waits, so the next attempts do not wait for a long back-off. */
static void try_now(struct job *job)
{
        for (struct version *version = job->live; version; version = version->next_live)
                version->persist.retry_at_ns = 0;
}

void worker_want(struct version *version)
{
        version->persist.wanted = true;
}

void worker_want_now(struct version *version)
{
        version->persist.wanted = true;
        version->persist.retry_at_ns = 0;
}

void worker_want_all(struct catalogue *catalogue, struct job *only)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                if (!only || job == only) {
                        want(job);
                        try_now(job);
                }
        catalogue_signal(catalogue);
}

/* All nodes of a version persist it or none does, so one node decides (world.c). A version that could not be written waits by itself:
 * its obstacle, or its size, need not concern the others. */
static bool is_ready(const struct version *version, int64_t now, int64_t *due)
{
        int64_t at = version->persist.retry_at_ns;

        if (!to_persist(version) || (version->nodes.spread && !version->persist.wanted))
                return false;
        if (version->nodes.spread && version->nodes.poll_at_ns > at)
                at = version->nodes.poll_at_ns;
        if (at <= now)
                return true;
        *due = earlier(*due, at);
        return false;
}

/* The version that is still being copied and would be written as soon as it is complete. Asked for when nothing else is to be written. */
static struct version *version_ahead(const struct catalogue *catalogue, const struct job *job, int64_t now, int64_t *due)
{
        struct persist_entry entry = { .committed = true };
        int64_t at;

        if (!job->persist_path[0] || job->persist.attempt || catalogue->draining)
                return NULL;
        for (struct version *version = job->live; version; version = version->next_live) {
                if (version->persist.tried_ahead || !commit_foreseen(catalogue, version))
                        continue;
                entry.wanted = version->persist.wanted;
                if (persist_due(&entry, 1, (int64_t)(job->settings.persist_interval_s * 1e9), job->persist.last_start_ns, now, &at) == 0)
                        return version;
                *due = earlier(*due, at);
        }
        return NULL;
}

static struct version *due_version(struct job *job, int64_t now, int64_t *due)
{
        struct persist_entry *entries;
        struct version **versions;
        size_t count = 0, used = 0;
        int64_t at, index;

        for (struct version *version = job->live; version; version = version->next_live)
                count += is_ready(version, now, due);
        if (!count)
                return NULL;
        entries = calloc(count, sizeof *entries);
        versions = calloc(count, sizeof *versions);
        for (struct version *version = job->live; entries && versions && version; version = version->next_live)
                if (is_ready(version, now, due)) {
                        entries[used] = (struct persist_entry){ version->sequence, true, version->persist.wanted };
                        versions[used++] = version;
                }
        index = persist_due(entries, used, (int64_t)(job->settings.persist_interval_s * 1e9), job->persist.last_start_ns, now, &at);
        *due = earlier(*due, at);
        struct version *version = index < 0 ? NULL : versions[index];

        free(entries);
        free(versions);
        return version;
}

/* The next version of the lane's jobs. Jobs take turns: the one that started to write longest ago comes first. */
static struct version *next_version(const struct catalogue *catalogue, const struct lane *lane, bool is_ahead, int64_t now, int64_t *due)
{
        struct version *next = NULL;

        for (struct job *job = catalogue->jobs; job; job = job->next) {
                struct version *version = job->lane != lane ? NULL : is_ahead ? version_ahead(catalogue, job, now, due)
                                                                              : due_version(job, now, due);

                if (version && (!next || job->persist.last_start_ns < next->job->persist.last_start_ns))
                        next = version;
        }
        return next;
}

bool worker_has_other(struct catalogue *catalogue, const struct version *version)
{
        const struct lane *lane = version->job->lane;
        int64_t now = os->now_ns(), due = INT64_MAX;
        const struct version *next = next_version(catalogue, lane, false, now, &due);

        for (struct job *job = catalogue->jobs; job; job = job->next)
                if (job->lane == lane && ((job->storage.scan_due && job->storage.scan_at_ns <= now) || publish_pending(catalogue, job, INT64_MAX)))
                        return true;
        return next && next != version;
}

/* 0.5 s, doubling to 30 s. A random quarter more or less keeps many agents from asking at the same moment. */
static int64_t back_off(uint32_t attempt)
{
        int64_t delay = RETRY_FIRST_NS;
        uint32_t random = 0;

        while (attempt-- > 1 && delay < RETRY_MOST_NS)
                delay *= 2;
        if (delay > RETRY_MOST_NS)
                delay = RETRY_MOST_NS;
        os->random(&random, sizeof random);
        return delay * 3 / 4 + (int64_t)((double)delay / 2 * ((double)random / UINT32_MAX));
}

/* The time since which attempts fail. The newest version may have come when storage had failed for long, so its own time counts, or a
 * job's last version would get one attempt. Older versions only take memory. */
static int64_t tried_since(const struct job *job, const struct version *version)
{
        for (const struct version *other = job->live; other; other = other->next_live)
                if (to_persist(other) && other->sequence > version->sequence)
                        return earlier(job->persist.failing_since_ns, version->persist.failing_since_ns);
        return version->persist.failing_since_ns;
}

static void attempt_failed(struct catalogue *catalogue, struct version *version, const struct nebula_error *error, int64_t now)
{
        struct job *job = version->job;

        if (version->ancestry.gives_way) { /* which is no fault of storage */
                version_fail(catalogue, version, error->status, "%s", error->message);
                return;
        }
        storage_failed(catalogue, job, error, true);
        if (error->status == NEBULA_INVALID || error->status == NEBULA_CORRUPT) {
                version_fail(catalogue, version, error->status, "%s", error->message);
                return;
        }
        if (!job->persist.attempt++)
                job->persist.failing_since_ns = now;
        if (!version->persist.attempt++)
                version->persist.failing_since_ns = now;
        version->persist.failed_ns = now;
        version->persist.retry_at_ns = now + back_off(version->persist.attempt);
        log_event(LOG_LEVEL_WARN, "%s cannot be written, the agent tries again in %.1f s: %s", version->tag, (double)(version->persist.retry_at_ns - now) / 1e9,
                  error->message);
        if (now - tried_since(job, version) >= (int64_t)catalogue->give_up_s * SECOND_NS) {
                version_fail(catalogue, version, error->status, "the agent gave up after %" PRIu64 " s of tries: %.400s",
                             catalogue->give_up_s, error->message);
                version->error.sys_errno = error->sys_errno;
                version->error.http_status = error->http_status;
        } else {
                version->error = *error;
        }
        catalogue_signal(catalogue);
}

/* Call when this node's share is in storage. A node that has died for good sends no word, so the wait for it is as long as that for
 * storage. */
static void await_others(struct catalogue *catalogue, struct version *version, const struct nebula_error *error, int64_t now)
{
        if (now - version->nodes.waiting_since_ns >= (int64_t)catalogue->give_up_s * SECOND_NS) {
                version_fail(catalogue, version, NEBULA_FAILED, "the agent gave up after %" PRIu64 " s: %.400s", catalogue->give_up_s, error->message);
                return;
        }
        version->error = *error;
        version->nodes.poll_at_ns = now + world_back_off(version->nodes.poll_count++);
}

/* Saves to this storage may wait for memory again. So may saves of jobs without storage: every durable version makes room for them. */
static void end_vain_waits(struct catalogue *catalogue, const struct lane *lane)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                if (job->lane == lane || !job->persist_path[0])
                        job->lane->waited_in_vain = false;
}

static void attempt_succeeded(struct catalogue *catalogue, struct job *job, struct version *version, double seconds)
{
        version->persist.seconds = seconds;
        version->persist.bytes = version_size(version);
        version->stored = true;
        memset(&version->error, 0, sizeof version->error);
        memset(&job->storage.error, 0, sizeof job->storage.error);
        job->persist.attempt = version->persist.attempt = 0;
        end_vain_waits(catalogue, job->lane);
        version_move(catalogue, version, NEBULA_STATE_DURABLE);
        for (struct version *other = job->live; other; other = other->next_live)
                if (!strcmp(other->tag, version->tag))
                        version_give_way(catalogue, other, version->generation, version->sequence);
        log_event(LOG_LEVEL_INFO, "%s generation %" PRIu64 " is durable: %" PRIu64 " MiB in %.2f s", version->tag, version->generation,
                 version->persist.bytes >> 20, seconds);
}

static bool is_spilled(const struct version *version)
{
        for (size_t i = 0; i < version->file_count; i++)
                if (version->files[i].image && version->files[i].image->spilled)
                        return true;
        return false;
}

/* Applies the rules for versions in storage. False: that is not due. */
static bool retain(struct catalogue *catalogue, struct job *job)
{
        bool has_more;

        if (!job->settings.rule_count)
                job->storage.retain_due = false;
        if (!job->storage.retain_due || catalogue_resumes(catalogue, job))
                return false;
        job->storage.retain_due = false;
        job->persist.is_busy = true;
        catalogue_unlock(catalogue);
        has_more = storage_retain(catalogue, job);
        catalogue_lock(catalogue);
        job->storage.retain_due |= has_more;
        job->persist.is_busy = false;
        catalogue_signal(catalogue);
        return true;
}

/* Removes a version for a client that waits. False: none does. */
static bool remove_asked(struct catalogue *catalogue, struct job *job)
{
        struct asked_removal *removal = job->storage.asked;

        if (!removal)
                return false;
        job->storage.asked = removal->next;
        removal->is_taken = true;
        job->persist.is_busy = true;
        catalogue_unlock(catalogue);
        removal->status = storage_remove_tag(catalogue, job, removal->tag, &removal->error);
        catalogue_lock(catalogue);
        removal->is_done = true;
        job->persist.is_busy = false;
        catalogue_signal(catalogue);
        return true;
}

static void persist_one(struct catalogue *catalogue, struct version *version)
{
        struct job *job = version->job;
        struct nebula_error error = { 0 };
        int64_t start = os->now_ns(), last_start = job->persist.last_start_ns;
        enum nebula_status status = NEBULA_OK;
        bool scanned = job->storage.is_scanned, is_ahead = commit_open(version), is_over = false;

        version->persist.tried_ahead = true;
        job->persist.last_start_ns = start;
        job->persist.is_busy = true;
        job->persist.version = version;
        version->pins++;
        catalogue_unlock(catalogue);
        if (!scanned)
                status = storage_scan(catalogue, job, &error); /* generation numbers must be later than storage's */
        catalogue_lock(catalogue);
        is_over = version->superseded || version->life.state == NEBULA_STATE_FAILED; /* storage has a later writing, or another run's */
        catalogue_unlock(catalogue);
        if (!status && !is_over)
                status = storage_persist(catalogue, job, version, &error);
        if (!status)
                location_learn(catalogue, job->persist_path);
        catalogue_lock(catalogue);
        version->pins--;
        job->persist.is_busy = false;
        job->persist.version = NULL;
        if (!version->in_memory)
                unfinished_move(&version->persist.unfinished, &job->storage.ended);
        if (version->superseded || version->life.state == NEBULA_STATE_FAILED || (is_ahead && status)) {
                job->persist.last_start_ns = last_start; /* the attempt came before the commit; the version is written again when it is complete */
        } else if (status == NEBULA_BUSY) {
                await_others(catalogue, version, &error, os->now_ns());
        } else if (status) {
                job->persist.last_start_ns = last_start; /* it stays due: the back-off decides when, not the interval */
                attempt_failed(catalogue, version, &error, os->now_ns());
        } else {
                attempt_succeeded(catalogue, job, version, (double)(os->now_ns() - start) / 1e9);
        }
        if (version->stored && !version->pins && is_spilled(version))
                version_forget_memory(catalogue, version); /* retention counts it now */
        catalogue_retain(catalogue, job, job->settings.retention_count);
        catalogue_signal(catalogue);
        if (!status)
                retain(catalogue, job);
}

static bool scan_is_due(const struct job *job, int64_t now, int64_t *due)
{
        if (!job->storage.scan_due)
                return false;
        if (job->storage.scan_at_ns > now)
                *due = earlier(*due, job->storage.scan_at_ns);
        return job->storage.scan_at_ns <= now;
}

static void scan_one(struct catalogue *catalogue, struct job *job)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;

        job->storage.scan_due = false;
        job->persist.is_busy = true;
        catalogue_unlock(catalogue);
        status = storage_scan(catalogue, job, &error);
        if (!status)
                location_learn(catalogue, job->persist_path);
        catalogue_lock(catalogue);
        job->persist.is_busy = false;
        if (status) {
                job->storage.scan_due = true;
                job->storage.scan_at_ns = os->now_ns() + back_off(++job->storage.scan_attempt);
                log_event(LOG_LEVEL_WARN, "%s cannot be listed yet, the agent tries again: %s", job->persist_path, error.message);
        } else {
                job->storage.scan_at_ns = 0;
                job->storage.scan_attempt = 0;
        }
        catalogue_signal(catalogue);
}

static void end_uploads(struct catalogue *catalogue, struct job *job)
{
        struct unfinished ended = job->storage.ended;

        job->storage.ended = (struct unfinished){ 0 };
        job->persist.is_busy = true;
        catalogue_unlock(catalogue);
        storage_end_uploads(catalogue, job, &ended);
        unfinished_done(&ended);
        catalogue_lock(catalogue);
        job->persist.is_busy = false;
}

/* Does one piece of storage work of the lane. False: none is due. */
static bool work_once(struct catalogue *catalogue, const struct lane *lane, int64_t now, int64_t *due)
{
        struct version *version;

        for (struct job *job = catalogue->jobs; job; job = job->next) {
                if (job->lane != lane)
                        continue;
                catalogue_create_as(job);
                if (world_work(catalogue, job, now, due))
                        return true;
        }
        for (struct job *job = catalogue->jobs; job; job = job->next)
                if (job->lane == lane && scan_is_due(job, now, due)) {
                        catalogue_create_as(job);
                        scan_one(catalogue, job);
                        return true;
                }
        for (struct job *job = catalogue->jobs; job; job = job->next)
                if (job->lane == lane && job->storage.ended.count) {
                        end_uploads(catalogue, job);
                        return true;
                }
        /* Frameworks wait for published files, which cost a link each. Removals make room. */
        for (struct job *job = catalogue->jobs; job; job = job->next) {
                if (job->lane != lane)
                        continue;
                catalogue_create_as(job);
                if (publish_work(catalogue, job, now, due))
                        return true;
        }
        for (struct job *job = catalogue->jobs; job; job = job->next)
                if (job->lane == lane && remove_asked(catalogue, job))
                        return true;
        for (struct job *job = catalogue->jobs; job; job = job->next) {
                if (job->lane != lane)
                        continue;
                catalogue_create_as(job);
                if (lease_work(catalogue, job, now, due))
                        return true;
        }
        version = next_version(catalogue, lane, false, now, due);
        if (!version)
                version = next_version(catalogue, lane, true, now, due);
        for (struct job *job = catalogue->jobs; job && !version; job = job->next)
                if (job->lane == lane && retain(catalogue, job))
                        return true;
        if (!version)
                return false;
        catalogue_create_as(version->job);
        persist_one(catalogue, version);
        return true;
}

void worker_run(struct catalogue *catalogue, struct job *job)
{
        int64_t due = INT64_MAX;

        catalogue_lock(catalogue);
        while (work_once(catalogue, job->lane, os->now_ns(), &due))
                ;
        catalogue_unlock(catalogue);
}

static bool lane_is_needed(const struct catalogue *catalogue, const struct lane *lane)
{
        for (const struct job *job = catalogue->jobs; job; job = job->next) {
                if (job->lane != lane)
                        continue;
                if (catalogue_session_count(catalogue, job) || job->storage.scan_due || worker_pending(catalogue, job) || history_pending(job) ||
                    job->storage.ended.count || job->storage.asked || job->storage.retain_due || lease_pending(job))
                        return true;
                for (const struct version *version = job->versions; version; version = version->next)
                        if (version->nodes.spread)
                                return true;
        }
        return false;
}

static void *lane_main(void *argument)
{
        struct lane *lane = argument;
        struct catalogue *catalogue = lane->catalogue;

        catalogue_lock(catalogue);
        while (!catalogue->stopping && lane_is_needed(catalogue, lane)) {
                int64_t now = os->now_ns(), due = INT64_MAX;
                uint64_t changes;

                for (struct job *job = catalogue->draining ? catalogue->jobs : NULL; job; job = job->next)
                        if (job->lane == lane)
                                want(job);
                if (work_once(catalogue, lane, now, &due))
                        continue;
                changes = catalogue->change_count;
                catalogue_unlock(catalogue);
                history_flush(catalogue, lane);
                catalogue_lock(catalogue);
                now = os->now_ns();
                if (!catalogue->stopping && catalogue->change_count == changes && due > now)
                        catalogue_wait(catalogue, &catalogue->work, due == INT64_MAX ? -1 : (due - now) / 1000000 + 1);
        }
        if (catalogue->stopping) {
                catalogue_unlock(catalogue);
                history_flush(catalogue, lane);
                catalogue_lock(catalogue);
        }
        lane->is_running = false;
        catalogue->lane_count--;
        catalogue_signal(catalogue);
        catalogue_unlock_last(catalogue);
        return NULL;
}

/* Starts workers for the lanes that need one. Returns when to look again; INT64_MAX: no need. */
static int64_t start_lanes(struct catalogue *catalogue, int64_t now)
{
        int64_t due = INT64_MAX;

        for (struct lane *lane = catalogue->lanes; lane; lane = lane->next) {
                if (lane->is_running || !lane_is_needed(catalogue, lane))
                        continue;
                if (os_thread_start(NULL, lane_main, lane, false)) {
                        due = now + SECOND_NS; /* out of threads or memory */
                        continue;
                }
                lane->is_running = true; /* it waits for the lock */
                catalogue->lane_count++;
        }
        return due;
}

static int64_t end_sessions(struct catalogue *catalogue, int64_t now)
{
        int64_t due = INT64_MAX;

        for (struct session **link = &catalogue->sessions; *link;) {
                struct session *session = *link;

                if (session->connection_count) {
                        link = &session->next;
                } else if (now < session->left_ns + SESSION_GRACE_NS && session_may_live(session->seen_pid)) {
                        due = earlier(due, session->left_ns + SESSION_GRACE_NS);
                        link = &session->next;
                } else {
                        *link = session->next;
                        if (session->role == IPC_ROLE_TRAINER) {
                                log_event(LOG_LEVEL_INFO, "rank %u (process %u) has left job \"%s\" in %s", session->rank, session->pid,
                                         session->job->name, session->job->persist_path);
                                commit_session_ended(catalogue, session);
                        }
                        free(session);
                }
        }
        return due;
}

static bool has_trainers(const struct catalogue *catalogue, const struct job *job)
{
        const struct session *session = catalogue->sessions;

        while (session && (session->job != job || session->role != IPC_ROLE_TRAINER))
                session = session->next;
        return session != NULL;
}

/* A job whose trainers have left may restart and load its newest version. Its memory counts against the machine and the cgroup, where
 * the next job needs it. So the newest version stays as long as an idle agent stays, and the others leave memory at once. Versions
 * that storage does not have stay. */
static int64_t release_ended(struct catalogue *catalogue, struct job *job, int64_t now)
{
        int64_t since = job->idle_since_ns > catalogue->started_ns ? job->idle_since_ns : catalogue->started_ns;
        int64_t until = since + (int64_t)catalogue->linger_s * SECOND_NS;
        bool is_kept = now < until;

        if (!job->live || has_trainers(catalogue, job))
                return INT64_MAX;
        if (catalogue_release(catalogue, job, is_kept) && !is_kept)
                log_event(LOG_LEVEL_INFO, "versions of job \"%s\" in %s leave memory: no trainer has connected for %" PRIu64 " s", job->name,
                          job->persist_path, catalogue->linger_s);
        return is_kept ? until : INT64_MAX;
}

static int64_t release_idle(struct catalogue *catalogue, int64_t now)
{
        int64_t spare_ns = (int64_t)catalogue->linger_s * SECOND_NS < SPARE_IDLE_NS ? (int64_t)catalogue->linger_s * SECOND_NS : SPARE_IDLE_NS;
        int64_t due = INT64_MAX;

        while (!catalogue->connection_count && catalogue_drop_restored(catalogue))
                pthread_cond_signal(&catalogue->pages);
        for (struct job *job = catalogue->jobs; job; job = job->next) {
                due = earlier(due, release_ended(catalogue, job, now));
                if (catalogue_session_count(catalogue, job) || !memory_free_bytes(&catalogue->memory, job))
                        continue;
                if (now < job->idle_since_ns + spare_ns) {
                        due = earlier(due, job->idle_since_ns + spare_ns);
                        continue;
                }
                for (struct image *image = memory_next_free(&catalogue->memory, NULL, job), *next; image; image = next) {
                        next = memory_next_free(&catalogue->memory, image, job);
                        memory_doom(&catalogue->memory, image);
                }
                pthread_cond_signal(&catalogue->pages);
        }
        return due;
}

/* The time when the agent may end by itself; INT64_MAX while it is needed. */
static int64_t check_linger(struct catalogue *catalogue, int64_t now)
{
        int64_t until;

        if (catalogue->connection_count || catalogue->peer_count || worker_pending(catalogue, NULL) || catalogue->in_process) {
                catalogue->idle_since_ns = now;
                return INT64_MAX;
        }
        until = catalogue->idle_since_ns + (int64_t)catalogue->linger_s * SECOND_NS;
        if (now < until)
                return until;
        if (catalogue->end && !catalogue->ends_itself) {
                catalogue->ends_itself = true;
                log_event(LOG_LEVEL_INFO, "the agent had nothing to do for %" PRIu64 " s: it ends", catalogue->linger_s);
                catalogue->end(catalogue);
        }
        return INT64_MAX;
}

void *worker_main(void *argument)
{
        struct catalogue *catalogue = argument;

        catalogue_lock(catalogue);
        while (!catalogue->stopping) {
                int64_t now = os->now_ns(), due = INT64_MAX;

                due = earlier(due, end_sessions(catalogue, now));
                due = earlier(due, commit_quiet(catalogue, now));
                if (survival_log_check_owners(catalogue))
                        due = earlier(due, now + OWNER_CHECK_NS);
                due = earlier(due, release_idle(catalogue, now));
                due = earlier(due, catalogue_forget_jobs(catalogue, now));
                due = earlier(due, start_lanes(catalogue, now));
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
