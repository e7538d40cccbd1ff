#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/clients/history.h"
#include "agent/clients/location.h"
#include "agent/commit/commit.h"
#include "agent/commit/world.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/persist/due.h"
#include "agent/persist/lease.h"
#include "agent/persist/mend.h"
#include "agent/persist/persist.h"
#include "agent/persist/progress.h"
#include "agent/persist/retain.h"
#include "agent/persist/slots_private.h"
#include "agent/persist/storage.h"
#include "agent/persist/worker.h"
#include "agent/publish/publish.h"
#include "os/os.h"
#include "os/thread.h"

#define RULES_QUICK_NS (SECOND_NS / 1000)
#define RULES_REST_MOST_NS SECOND_NS

static int64_t earlier(int64_t a, int64_t b)
{
        return a < b ? a : b;
}

/* The time since which attempts fail. The newest version may have come when storage had failed for long, so its own time counts, or a
 * job's last version would get one attempt. Older versions only take memory. */
static int64_t tried_since(const struct job *job, const struct version *version)
{
        for (const struct version *other = job->live; other; other = other->next_live)
                if (due_is_unwritten(other) && other->sequence > version->sequence)
                        return earlier(job->persist->failing_since_ns, version->persist->failing_since_ns);
        return version->persist->failing_since_ns;
}

static void attempt_failed(struct catalogue *catalogue, struct version *version, const struct nebula_error *error, int64_t now)
{
        struct job *job = version->job;

        if (version->gives_way) { /* which is no fault of storage */
                version_fail(catalogue, version, error->status, "%s", error->message);
                return;
        }
        storage_failed(catalogue, job, error, true);
        if (error->status == NEBULA_INVALID || error->status == NEBULA_CORRUPT) {
                version_fail(catalogue, version, error->status, "%s", error->message);
                return;
        }
        if (!job->persist->attempt++)
                job->persist->failing_since_ns = now;
        if (!version->persist->attempt++)
                version->persist->failing_since_ns = now;
        version->persist->failed_ns = now;
        version->persist->retry_at_ns = now + due_back_off(version->persist->attempt);
        if (job->persist->attempt == 1) /* the verdict repeats it */
                log_event(LOG_LEVEL_WARN, "%s cannot be written, the agent tries again: %s", version->tag, error->message);
        if (now - tried_since(job, version) >= (int64_t)catalogue->give_up_s * SECOND_NS) {
                version_fail(catalogue, version, error->status, "the agent gave up after %" PRIu64 " s of tries: %.400s",
                             catalogue->give_up_s, error->message);
                version->error.sys_errno = error->sys_errno;
                version->error.http_status = error->http_status;
        } else {
                version->error = *error;
        }
        catalogue_signal_job(catalogue, version->job);
}

/* Call when this node's share is in storage. A node that has died for good sends no word, so the wait for it is as long as that for
 * storage. */
static void await_others(struct catalogue *catalogue, struct version *version, const struct nebula_error *error, int64_t now)
{
        if (now - world_waiting_since_ns(version) >= (int64_t)catalogue->give_up_s * SECOND_NS) {
                version_fail(catalogue, version, NEBULA_FAILED, "the agent gave up after %" PRIu64 " s: %.400s", catalogue->give_up_s, error->message);
                return;
        }
        version->error = *error;
        world_look_later(version, now);
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
        version->persist->seconds = seconds;
        version->persist->bytes = version_size(version);
        version->stored = true;
        memset(&version->error, 0, sizeof version->error);
        memset(&job->storage->error, 0, sizeof job->storage->error);
        job->persist->attempt = version->persist->attempt = 0;
        end_vain_waits(catalogue, job->lane);
        version_move(catalogue, version, NEBULA_STATE_DURABLE);
        for (struct version *other = job->live; other; other = other->next_live)
                if (!strcmp(other->tag, version->tag))
                        version_give_way(catalogue, other, version->sequence);
        log_event(LOG_LEVEL_INFO, "%s is durable: %" PRIu64 " MiB in %.2f s", version->tag,
                  version->persist->bytes >> 20, seconds);
}

static bool is_spilled(const struct version *version)
{
        for (size_t i = 0; i < version->file_count; i++)
                if (version->files[i].image && version->files[i].image->spilled)
                        return true;
        return false;
}

static void retain_failed(struct job *job, const struct nebula_error *error)
{
        job->storage->retain_at_ns = os->now_ns() + due_back_off(++job->storage->retain_attempt);
        log_event(LOG_LEVEL_WARN, "the rules that remove checkpoints from %s cannot be applied yet, the agent tries again: %s", job->persist_path,
                  error->message);
}

/* When the rules may be applied again. To decide about 100,000 versions is work: it has at most a tenth of a core. */
static int64_t rules_rest(const struct job *job, bool has_more)
{
        int64_t took_ns = job->storage->rules_ns;

        return has_more || took_ns < RULES_QUICK_NS ? 0 : os->now_ns() + (took_ns < RULES_REST_MOST_NS / 10 ? 10 * took_ns : RULES_REST_MOST_NS);
}

/* Applies the rules for versions in storage. False: that is not due. */
static bool retain(struct catalogue *catalogue, struct job *job, int64_t now, int64_t *due)
{
        struct nebula_error error;
        bool has_more;
        enum nebula_status status;

        if (!catalogue_has_rules(job))
                job->retain_due = false;
        if (!job->retain_due || !job->is_scanned || catalogue_resumes(job))
                return false;
        if (job->storage->retain_at_ns > now) {
                *due = job->storage->retain_at_ns < *due ? job->storage->retain_at_ns : *due;
                return false;
        }
        job->retain_due = false;
        job->persist->is_busy = true;
        catalogue_unlock(catalogue);
        status = storage_retain(catalogue, job, &has_more, &error);
        catalogue_lock(catalogue);
        job->retain_due |= has_more || status;
        if (status) {
                retain_failed(job, &error);
        } else {
                job->storage->retain_at_ns = rules_rest(job, has_more);
                job->storage->retain_attempt = 0;
        }
        job->persist->is_busy = false;
        catalogue_signal_job(catalogue, job);
        return true;
}

/* Removes a version for a client that waits. False: none does. */
static bool remove_asked(struct catalogue *catalogue, struct job *job)
{
        struct asked_removal *removal = retain_take(job);

        if (!removal)
                return false;
        job->persist->is_busy = true;
        catalogue_unlock(catalogue);
        removal->status = storage_remove_tag(catalogue, job, removal->tag, &removal->error);
        catalogue_lock(catalogue);
        removal->is_done = true;
        job->persist->is_busy = false;
        catalogue_signal_job(catalogue, job);
        return true;
}

static void persist_one(struct catalogue *catalogue, struct version *version)
{
        struct job *job = version->job;
        struct nebula_error error = { 0 };
        int64_t start = os->now_ns(), last_start = job->persist->last_start_ns;
        enum nebula_status status = NEBULA_OK;
        bool scanned = job->is_scanned, is_ahead = version_open(version), is_over = false;

        version->persist->tried_ahead = true;
        job->persist->last_start_ns = start;
        job->persist->is_busy = true;
        job->persist->version = version;
        version->pins++;
        catalogue_unlock(catalogue);
        if (!scanned)
                status = storage_scan(catalogue, job, &error); /* sequences must be later than storage's */
        catalogue_lock(catalogue);
        is_over = version->superseded || version->life.state == NEBULA_STATE_FAILED; /* storage has a later writing, or another run's */
        catalogue_unlock(catalogue);
        if (!status && !is_over)
                status = storage_persist(catalogue, job, version, &error);
        if (!status)
                location_learn(catalogue, job);
        catalogue_lock(catalogue);
        version->pins--;
        job->persist->is_busy = false;
        job->persist->version = NULL;
        if (!version->in_memory)
                unfinished_move(&version->persist->unfinished, &job->storage->ended);
        if (version->superseded || version->life.state == NEBULA_STATE_FAILED || (is_ahead && status)) {
                job->persist->last_start_ns = last_start; /* the attempt came before the commit; the version is written again when it is complete */
        } else if (status == NEBULA_BUSY) {
                await_others(catalogue, version, &error, os->now_ns());
        } else if (status) {
                job->persist->last_start_ns = last_start; /* it stays due: the back-off decides when, not the interval */
                attempt_failed(catalogue, version, &error, os->now_ns());
        } else {
                attempt_succeeded(catalogue, job, version, (double)(os->now_ns() - start) / 1e9);
        }
        if (version->stored && !version->pins && is_spilled(version))
                version_forget_memory(catalogue, version); /* retention counts it now */
        policy_retain(catalogue, job);
        catalogue_signal_job(catalogue, job);
        if (!status)
                retain(catalogue, job, os->now_ns(), &(int64_t){ INT64_MAX });
}

static void scan_one(struct catalogue *catalogue, struct job *job)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;

        job->scan_due = false;
        job->storage->asked_ns = 0;
        job->persist->is_busy = job->storage->is_scanning = true;
        catalogue_unlock(catalogue);
        status = storage_scan(catalogue, job, &error);
        if (!status)
                location_learn(catalogue, job);
        catalogue_lock(catalogue);
        job->persist->is_busy = job->storage->is_scanning = false;
        if (status) {
                job->scan_due = true;
                job->storage->error = error;
                job->storage->scan_at_ns = os->now_ns() + due_back_off(++job->storage->scan_attempt);
                if (job->storage->scan_attempt == 1)
                        log_event(LOG_LEVEL_WARN, "%s cannot be listed yet, the agent tries again: %s", job->persist_path, error.message);
        } else {
                if (job->storage->scan_attempt && !job->persist->attempt)
                        progress_works(job);
                job->storage->scan_at_ns = 0;
                job->storage->scan_attempt = 0;
        }
        catalogue_signal_job(catalogue, job);
}

static void end_uploads(struct catalogue *catalogue, struct job *job)
{
        struct unfinished ended = job->storage->ended;

        job->storage->ended = (struct unfinished){ 0 };
        job->persist->is_busy = true;
        catalogue_unlock(catalogue);
        storage_end_uploads(catalogue, job, &ended);
        unfinished_done(&ended);
        catalogue_lock(catalogue);
        job->persist->is_busy = false;
}

/* Does one piece of storage work of the lane. False: none is due. */
static bool work_once(struct catalogue *catalogue, const struct lane *lane, int64_t now, int64_t *due)
{
        struct version *version;

        for (struct job *job = lane->jobs; job; job = job->next_in_lane) {
                catalogue_create_as(job);
                if (world_work(catalogue, job, now, due))
                        return true;
        }
        for (struct job *job = lane->jobs; job; job = job->next_in_lane)
                if (due_scan(job, now, due)) {
                        catalogue_create_as(job);
                        scan_one(catalogue, job);
                        return true;
                }
        for (struct job *job = lane->jobs; job; job = job->next_in_lane)
                if (job->storage->ended.count) {
                        end_uploads(catalogue, job);
                        return true;
                }
        /* Frameworks wait for published files, which cost a link each. Removals make room. */
        for (struct job *job = lane->jobs; job; job = job->next_in_lane) {
                catalogue_create_as(job);
                if (publish_work(catalogue, job, now, due))
                        return true;
        }
        for (struct job *job = lane->jobs; job; job = job->next_in_lane)
                if (remove_asked(catalogue, job))
                        return true;
        for (struct job *job = lane->jobs; job; job = job->next_in_lane) {
                catalogue_create_as(job);
                if (lease_work(catalogue, job, now, due))
                        return true;
        }
        version = due_next(catalogue, lane, false, now, due);
        if (!version)
                version = due_next(catalogue, lane, true, now, due);
        for (struct job *job = lane->jobs; job && !version; job = job->next_in_lane)
                if (retain(catalogue, job, now, due))
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
        while (work_once(catalogue, job->lane, os->now_ns(), &due) || mend_work(catalogue, job->lane, os->now_ns(), &due))
                ;
        catalogue_unlock(catalogue);
}

static bool needs_lane(const struct catalogue *catalogue, const struct job *job)
{
        if (job->trainer_count || job->scan_due || due_of(catalogue, job) || history_pending(job) || job->storage->ended.count || job->storage->asked ||
            job->retain_due || lease_pending(job))
                return true;
        for (const struct version *version = job->versions; version; version = version->next)
                if (version->is_spread)
                        return true;
        return false;
}

static bool lane_is_needed(const struct catalogue *catalogue, const struct lane *lane)
{
        for (const struct job *job = lane->jobs; job; job = job->next_in_lane)
                if (needs_lane(catalogue, job))
                        return true;
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

                for (struct job *job = catalogue->draining ? lane->jobs : NULL; job; job = job->next_in_lane)
                        due_want(job);
                mend_start(catalogue, lane, now, &due);
                if (work_once(catalogue, lane, now, &due))
                        continue;
                changes = catalogue->change_count;
                catalogue_unlock(catalogue);
                history_flush(catalogue, lane);
                catalogue_lock(catalogue);
                now = os->now_ns();
                if (!catalogue->stopping && catalogue->change_count == changes && due > now)
                        catalogue_wait(catalogue, &lane->work, due == INT64_MAX ? -1 : (due - now) / 1000000 + 1);
        }
        if (catalogue->stopping) {
                catalogue_unlock(catalogue);
                history_flush(catalogue, lane);
                catalogue_lock(catalogue);
        }
        lane->is_running = false;
        catalogue->lane_count--;
        catalogue_signal_lane(catalogue, lane);
        catalogue_unlock_last(catalogue);
        return NULL;
}

int64_t worker_start(struct catalogue *catalogue, struct job *job, int64_t now)
{
        struct lane *lane = job->lane;

        if (lane->is_running || !needs_lane(catalogue, job))
                return INT64_MAX;
        if (os_thread_start(NULL, lane_main, lane, false))
                return now + SECOND_NS; /* out of threads or memory */
        lane->is_running = true; /* it waits for the lock */
        catalogue->lane_count++;
        return INT64_MAX;
}
