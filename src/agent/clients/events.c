#include <stdio.h>
#include <string.h>

#include "agent/clients/events.h"
#include "agent/commit/node_documents.h"
#include "agent/memory/memory.h"
#include "agent/persist/progress.h"
#include "agent/persist/retain.h"
#include "agent/pulse/pulse.h"

#include "agent/commit/commit.h"
#include "agent/commit/world.h"
#include "os/os.h"

bool event_is_late(const struct catalogue *catalogue, const struct version *version)
{
        return os->now_ns() - version->activity_ns >= (int64_t)catalogue->takeover_s * SECOND_NS;
}

/* Whether ranks of this node have closed their parts and the missing parts may never come. The trainers then go on,
 * and nothing is stored. */
static bool waits_for_long(const struct catalogue *catalogue, const struct version *version)
{
        bool any_closed = false;

        if (version->file_goal == NEBULA_FILES_OPEN || version->loans || version->is_remote || strcmp(version->run, version->job->run))
                return false;
        for (size_t i = 0; i < version->part_count; i++)
                any_closed = any_closed || (version->parts[i].closed && !version->parts[i].spoken_for);
        return any_closed && event_is_late(catalogue, version);
}

void event_look_for_late(const struct catalogue *catalogue, struct job *job)
{
        for (struct version *version = job->live; version; version = version->next_live) {
                char missing[160];

                if (version->late_at > 0 || !version_open(version) || !waits_for_long(catalogue, version))
                        continue;
                world_missing(version, missing, sizeof missing);
                if (!missing[0])
                        continue;
                version->late_at = catalogue_now();
        }
}

/* When the version's fate was decided, or when it was found to wait for long. 0: neither, or no program needs to know. */
static double decided_at(const struct version *version)
{
        if (version_open(version))
                return version->late_at;
        if (version->life.state == NEBULA_STATE_DURABLE)
                return lifecycle_at(&version->life, NEBULA_STATE_DURABLE);
        /* Other versions that failed before they were complete are no events: the rank that could not complete one reports it. */
        if (version->life.state == NEBULA_STATE_FAILED &&
            (lifecycle_at(&version->life, NEBULA_STATE_COMMITTED) > 0 || (version->is_deserted && !strcmp(version->run, version->job->run))))
                return lifecycle_at(&version->life, NEBULA_STATE_FAILED);
        return 0;
}

static double committed_at(const struct version *version)
{
        return version->in_memory && lifecycle_complete(version->life.state) ? lifecycle_at(&version->life, NEBULA_STATE_COMMITTED) : 0;
}

/* Finds the first event after `since` that is of interest to a reader: a version is complete in memory, or durable. */
bool event_next_for_reader(const struct catalogue *catalogue, const char *path, double since, struct ipc_event *ret_event)
{
        bool is_any = false;

        for (const struct job *job = catalogue->jobs; job; job = job->next)
                for (const struct version *version = strcmp(job->persist_path, path) ? NULL : job->versions; version; version = version->next) {
                        double at[] = { committed_at(version), lifecycle_at(&version->life, NEBULA_STATE_DURABLE) };

                        for (int i = 0; i < 2; i++) {
                                if (at[i] <= since || (is_any && at[i] >= ret_event->at))
                                        continue;
                                is_any = true;
                                *ret_event = (struct ipc_event){ .at = at[i], .size = version_size(version),
                                                                 .kind = i ? NEBULA_EVENT_DURABLE : NEBULA_EVENT_COMMITTED };
                                strcpy(ret_event->tag, version->tag);
                        }
                }
        return is_any;
}

static void fill(const struct version *version, double at, struct ipc_event *event)
{
        bool is_durable = version->life.state == NEBULA_STATE_DURABLE;

        *event = (struct ipc_event){ .at = at, .size = version_size(version),
                                     .kind = is_durable           ? NEBULA_EVENT_DURABLE :
                                             version_open(version) ? NEBULA_EVENT_LATE :
                                                                    NEBULA_EVENT_LOST };
        if (is_durable)
                event->seconds = version_progress(version).seconds;
        strcpy(event->tag, version->tag);
        if (event->kind == NEBULA_EVENT_LATE)
                world_missing(version, event->text, sizeof event->text);
        else if (!is_durable)
                snprintf(event->text, sizeof event->text, "%s", version->error.message);
}

static bool is_first(double at, double since, const struct ipc_event *event)
{
        return at > since && (event->at <= 0 || at < event->at);
}

bool event_next(const struct catalogue *catalogue, struct job *job, double since, struct ipc_event *ret_event)
{
        static const enum nebula_event_kind kinds[] = { [FINDING_ROTTEN] = NEBULA_EVENT_ROTTEN, [FINDING_STALE] = NEBULA_EVENT_STALE,
                                                        [FINDING_NOT_FINITE] = NEBULA_EVENT_NOT_FINITE,
                                                        [FINDING_LEFT_MEMORY] = NEBULA_EVENT_LEFT_MEMORY };
        const struct removed *removed = retain_removed(job, since);
        struct job_progress storage = job_progress(job);
        const struct pulse_hang *hang = pulse_hang(job);
        const struct version *first = NULL;

        event_look_for_late(catalogue, job);
        *ret_event = (struct ipc_event){ 0 };
        if (job->rival_seen_at > since) {
                *ret_event = (struct ipc_event){ .at = job->rival_seen_at, .kind = NEBULA_EVENT_OTHER_AGENT };
                snprintf(ret_event->text, sizeof ret_event->text, "%s", catalogue->memory->rival);
                return true;
        }
        for (const struct version *version = job->versions; version; version = version->next)
                if (decided_at(version) > since && (!first || decided_at(version) < decided_at(first)))
                        first = version;
        if (first)
                fill(first, decided_at(first), ret_event);
        if (removed && is_first(removed->at, since, ret_event)) {
                *ret_event = (struct ipc_event){ .at = removed->at, .kind = NEBULA_EVENT_REMOVED, .size = removed->size };
                strcpy(ret_event->tag, removed->tag);
                strcpy(ret_event->text, removed->rules);
        }
        if (storage.error->message[0] && is_first(storage.error_at, since, ret_event)) {
                *ret_event = (struct ipc_event){ .at = storage.error_at, .kind = NEBULA_EVENT_STORAGE };
                snprintf(ret_event->text, sizeof ret_event->text, "%s", storage.error->message);
        }
        if (is_first(hang->since, since, ret_event)) {
                *ret_event = (struct ipc_event){ .at = hang->since, .kind = NEBULA_EVENT_HUNG };
                snprintf(ret_event->text, sizeof ret_event->text, "%s", hang->text);
        }
        for (int i = 0; i < FINDING_KINDS; i++) {
                const struct finding *finding = &job->findings[i];

                if (!is_first(finding->at, since, ret_event))
                        continue;
                *ret_event = (struct ipc_event){ .at = finding->at, .kind = kinds[i] };
                snprintf(ret_event->tag, sizeof ret_event->tag, "%s", finding->tag);
                snprintf(ret_event->text, sizeof ret_event->text, "%s", finding->text);
        }
        return ret_event->at > 0;
}
