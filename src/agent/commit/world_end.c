#include <string.h>

#include "agent/commit/commit.h"
#include "agent/commit/node_documents.h"
#include "agent/commit/slots_private.h"
#include "agent/commit/world_private.h"
#include "agent/log.h"
#include "agent/persist/progress.h"
#include "agent/persist/storage.h"
#include "os/os.h"
#include "store/sweep.h"

#define WANTED_POLL_NS (5 * SECOND_NS)   /* shortest pause between two looks for another node's wish that a version becomes durable */
#define WANTED_LEAST_NS (SECOND_NS / 20)
#define BEHIND_NS (5 * SECOND_NS)        /* how long a listing may be stale after a newer version is complete */

/* The newest complete version of the job that is younger than this one; NULL: none. */
static const struct version *newer_complete(const struct version *version)
{
        for (const struct version *other = version->job->versions; other; other = other->next)
                if (other != version && lifecycle_complete(other->life.state) && !(other->is_remote && !strcmp(other->tag, version->tag)) &&
                    other->sequence > (version->sequence ? version->sequence : version->nodes->announce_sequence))
                        return other;
        return NULL;
}

bool world_cannot_complete(struct catalogue *catalogue, struct version *version, int64_t now)
{
        const struct version *newer = newer_complete(version);
        int64_t patience = (int64_t)catalogue->takeover_s * SECOND_NS;
        char missing[160];

        world_missing(version, missing, sizeof missing);
        if (!newer)
                version->nodes->behind_ns = 0;
        else if (!version->nodes->behind_ns)
                version->nodes->behind_ns = now;
        if (newer && now - version->nodes->behind_ns >= BEHIND_NS) {
                version_fail(catalogue, version, NEBULA_FAILED, "the checkpoint did not become complete (%s), and the newer \"%.150s\" did",
                             missing, newer->tag);
                return true;
        }
        if ((strcmp(version->run, version->job->run) || !version->job->trainer_count) &&
            now - version->nodes->waiting_since_ns > 2 * patience) {
                version_fail(catalogue, version, NEBULA_FAILED, "its run ended before checkpoint \"%.150s\" was complete (%s)",
                             version->tag, missing);
                return true;
        }
        return false;
}

/* A flush usually comes soon after a version is complete, so the pause is a quarter of the version's age. */
static int64_t wanted_delay(const struct version *version, int64_t now)
{
        int64_t delay = (now - version->nodes->waiting_since_ns) / 4;

        if (delay < WANTED_LEAST_NS)
                return WANTED_LEAST_NS;
        return delay < WANTED_POLL_NS ? delay : WANTED_POLL_NS;
}

/* Whether all nodes know that the version must become durable. Notifies them if `wanted`. A decision that an earlier agent adopted is read again. */
static enum nebula_status exchange(struct store *store, const struct announce_of *of, bool wanted, struct committed *decision, bool *ret_reported,
                                   struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        if (!decision->rank_count)
                status = world_read_committed(store, of, decision, error);
        *ret_reported = !status && decision->persist;
        if (*ret_reported || (status && status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT))
                return status;
        if (!wanted)
                return world_is_wanted(store, of, ret_reported, error);
        status = world_report_wanted(store, of, error);
        *ret_reported = !status;
        return status;
}

void world_exchange_wanted(struct catalogue *catalogue, struct version *version, int64_t now)
{
        struct nebula_error error = { 0 };
        struct committed decision;
        struct announce_of of;
        struct store *store;
        bool wanted = version->wanted, notified = false;

        world_describe_committed(version, &decision);
        decision.persist = false; /* as far as this node knows: adopt looks at the document */
        of = decision.of;
        version->pins++;
        catalogue_unlock(catalogue);
        if (!storage_open(catalogue, version->job, &store, &error))
                exchange(store, &of, wanted, &decision, &notified, &error);
        catalogue_lock(catalogue);
        version->pins--;
        if (!version->nodes->decided && decision.rank_count)
                world_keep_decision(version, &decision);
        committed_done(&decision);
        version->nodes->wanted_reported = notified;
        version->nodes->report_failed = wanted && !notified;
        if (notified)
                version->wanted = true;
        version->nodes->poll_at_ns = now + (version->wanted && !notified ? WORLD_POLL_MOST_NS : version->wanted ? 0 : wanted_delay(version, now));
        catalogue_signal_job(catalogue, version->job);
}

/*
 * Removes the captured documents of this node. An agent that may not have written them all looks for those of its ranks. `late`: the version was
 * committed, and no node makes it durable; its objects are removed when all of them are old enough and no node works on the tag.
 */
static void clean(struct catalogue *catalogue, struct version *version, bool late)
{
        int64_t age_ns = (int64_t)catalogue->sweep_age_s * SECOND_NS;
        struct captured own;
        struct store *store;
        bool in_use = false, described = world_describe(version, &own);
        char path[ANNOUNCE_PATH_MAX];
        size_t removed = 0;

        snprintf(path, sizeof path, "%s", version->nodes->announced_more ? "" : version->nodes->announced);
        for (const struct version *other = version->job->versions; other; other = other->next)
                in_use = in_use || (other != version && !other->is_remote && !strcmp(other->tag, version->tag) && other->life.state != NEBULA_STATE_FAILED);
        version->pins++;
        catalogue_unlock(catalogue);
        if (described && !storage_open(catalogue, version->job, &store, NULL)) {
                if (!late)
                        world_remove_captured(store, &own, path);
                else if (!in_use)
                        manifest_sweep_tag(store, own.of.tag, age_ns, &removed, NULL);
        }
        captured_done(&own);
        catalogue_lock(catalogue);
        version->pins--;
}

bool world_tidy(struct catalogue *catalogue, struct version *version, int64_t now, int64_t *due)
{
        bool late = version->nodes->withdrawn;

        if (!version->stored && !newer_complete(version))
                return false;
        if (late && version->nodes->poll_at_ns > now) {
                *due = version->nodes->poll_at_ns < *due ? version->nodes->poll_at_ns : *due;
                return false;
        }
        /* before the commit, nodes wrote only documents of it */
        version->is_spread = !late && !version->stored && version->sequence;
        version->nodes->poll_at_ns = now + ((int64_t)catalogue->sweep_age_s + 1) * SECOND_NS;
        version->nodes->withdrawn = true;
        clean(catalogue, version, late);
        return true;
}

bool world_is_given_up(const struct version *version, int64_t now)
{
        const struct version *newer = newer_complete(version);

        return version_progress(version).recorded_here && !version->pins && newer && newer->life.state == NEBULA_STATE_DURABLE &&
               now - version->nodes->waiting_since_ns > 2 * WANTED_POLL_NS;
}
