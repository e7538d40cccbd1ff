/* What is due to be written to storage. */
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/retention.h"
#include "agent/commit/commit.h"
#include "agent/commit/commit_rule.h"
#include "agent/commit/world.h"
#include "agent/persist/due.h"
#include "agent/persist/mend.h"
#include "agent/persist/slots_private.h"
#include "agent/persist/storage.h"
#include "agent/publish/publish.h"
#include "os/os.h"

#define RETRY_FIRST_NS INT64_C(500000000)
#define RETRY_MOST_NS (30 * SECOND_NS)
#define SEARCH_BEGINS_NS SECOND_NS /* a program that begins with a search has begun it by then */

static int64_t earlier(int64_t a, int64_t b)
{
        return a < b ? a : b;
}

int64_t due_back_off(uint32_t attempt)
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

bool due_is_unwritten(const struct version *version)
{
        return version->in_memory && !version->stored && !version->superseded && lifecycle_complete(version->life.state) &&
               version->life.state != NEBULA_STATE_DURABLE && version->job->persist_path[0];
}

/* Whether anything is pending, or anything that has not failed since `since_ns`. */
static bool is_pending(const struct catalogue *catalogue, const struct job *job, int64_t since_ns)
{
        if (job->persist->is_busy && (!job->persist->version || job->persist->version->persist->failed_ns < since_ns))
                return true;
        if (mend_pending(job, since_ns))
                return true;
        if (publish_pending((struct catalogue *)catalogue, (struct job *)job, since_ns))
                return true;
        for (const struct version *version = job->live; version; version = version->next_live)
                if (due_is_unwritten(version) && version_unsaved(version) && version->persist->failed_ns < since_ns)
                        return true;
        return false;
}

bool due_of(const struct catalogue *catalogue, const struct job *job)
{
        return is_pending(catalogue, job, INT64_MAX);
}

bool due_any(const struct catalogue *catalogue)
{
        return due_draining(catalogue, INT64_MAX);
}

bool due_draining(const struct catalogue *catalogue, int64_t since_ns)
{
        for (const struct job *job = catalogue->jobs; job; job = job->next)
                if (is_pending(catalogue, job, since_ns))
                        return true;
        return false;
}

void due_want(struct job *job)
{
        for (struct version *version = job->live; version; version = version->next_live)
                version->wanted = version->wanted || due_is_unwritten(version);
}

/* A client waits, so the next attempts do not wait for a long back-off. */
static void try_now(struct job *job)
{
        for (struct version *version = job->live; version; version = version->next_live)
                version->persist->retry_at_ns = 0;
}

void due_want_now(struct version *version)
{
        version->wanted = true;
        version->persist->retry_at_ns = 0;
}

void due_want_all(struct catalogue *catalogue, struct job *only)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                if (!only || job == only) {
                        due_want(job);
                        try_now(job);
                }
        catalogue_signal(catalogue);
}

/* All nodes of a version persist it or none does, so one node decides (world.c). A version that could not be written waits by itself:
 * its obstacle, or its size, need not concern the others. */
static bool is_ready(const struct version *version, uint64_t stored_sequence, int64_t now, int64_t *due)
{
        int64_t at = version->persist->retry_at_ns;

        if (!due_is_unwritten(version) || (version->is_spread && !version->wanted) || version_is_overtaken_by(version, stored_sequence))
                return false;
        if (version->is_spread && world_poll_at_ns(version) > at)
                at = world_poll_at_ns(version);
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

        if (!job->persist_path[0] || job->persist->attempt || catalogue->draining)
                return NULL;
        for (struct version *version = job->live; version; version = version->next_live) {
                if (version->persist->tried_ahead || !commit_foreseen(catalogue, version))
                        continue;
                entry.wanted = version->wanted;
                if (persist_due(&entry, 1, (int64_t)(job->settings.persist_interval_s * 1e9), job->persist->last_start_ns, now, &at) == 0)
                        return version;
                *due = earlier(*due, at);
        }
        return NULL;
}

static struct version *due_version(struct job *job, int64_t now, int64_t *due)
{
        struct persist_entry *entries;
        struct version **versions;
        uint64_t stored_sequence = version_stored_sequence(job);
        size_t count = 0, used = 0;
        int64_t at, index;

        for (struct version *version = job->live; version; version = version->next_live)
                count += is_ready(version, stored_sequence, now, due);
        if (!count)
                return NULL;
        entries = calloc(count, sizeof *entries);
        versions = calloc(count, sizeof *versions);
        for (struct version *version = job->live; entries && versions && version; version = version->next_live)
                if (is_ready(version, stored_sequence, now, due)) {
                        entries[used] = (struct persist_entry){ version->sequence, true, version->wanted };
                        versions[used++] = version;
                }
        index = persist_due(entries, used, (int64_t)(job->settings.persist_interval_s * 1e9), job->persist->last_start_ns, now, &at);
        *due = earlier(*due, at);
        struct version *version = index < 0 ? NULL : versions[index];

        free(entries);
        free(versions);
        return version;
}

/* The next version of the lane's jobs. Jobs take turns: the one that started to write longest ago comes first. */
struct version *due_next(const struct catalogue *catalogue, const struct lane *lane, bool is_ahead, int64_t now, int64_t *due)
{
        struct version *next = NULL;

        for (struct job *job = lane->jobs; job; job = job->next_in_lane) {
                struct version *version = is_ahead ? version_ahead(catalogue, job, now, due) : due_version(job, now, due);

                if (version && (!next || job->persist->last_start_ns < next->job->persist->last_start_ns))
                        next = version;
        }
        return next;
}

/* Most programs begin with a search, which lists the path, too. Each request to a far storage costs money and time. A program that saves first
 * does not wait. */
static int64_t search_until(const struct job *job)
{
        if (job->storage->searches)
                return job->storage->search_ns + STORAGE_SEARCH_NS;
        return strstr(job->persist_path, "://") && !job->versions && job->storage->asked_ns ? job->storage->asked_ns + SEARCH_BEGINS_NS : 0;
}

bool due_scan(const struct job *job, int64_t now, int64_t *due)
{
        int64_t at = search_until(job) > job->storage->scan_at_ns ? search_until(job) : job->storage->scan_at_ns;

        if (!job->scan_due)
                return false;
        if (at > now)
                *due = earlier(*due, at);
        return at <= now;
}

bool due_other(struct catalogue *catalogue, const struct version *version)
{
        const struct lane *lane = version->job->lane;
        int64_t now = os->now_ns(), due = INT64_MAX;
        const struct version *next = due_next(catalogue, lane, false, now, &due);

        for (struct job *job = lane->jobs; job; job = job->next_in_lane)
                if (due_scan(job, now, &due) || publish_pending(catalogue, job, INT64_MAX))
                        return true;
        return next && next != version;
}
