#include <stdio.h>
#include <string.h>

#include "agent/event.h"

/* When this version's fate was decided; 0: it is not, or nobody is to be told. */
static double decided_at(const struct version *version)
{
        if (version->life.state == NEBULA_STATE_DURABLE)
                return lifecycle_at(&version->life, NEBULA_STATE_DURABLE);
        /* One that never was complete is told of by who could not complete it. */
        if (version->life.state == NEBULA_STATE_FAILED && lifecycle_at(&version->life, NEBULA_STATE_COMMITTED) > 0)
                return lifecycle_at(&version->life, NEBULA_STATE_FAILED);
        return 0;
}

static void fill(const struct version *version, double at, struct ipc_event *event)
{
        bool is_durable = version->life.state == NEBULA_STATE_DURABLE;

        *event = (struct ipc_event){ .at = at, .size = version_size(version),
                                     .kind = is_durable ? NEBULA_EVENT_DURABLE : NEBULA_EVENT_LOST };
        if (is_durable)
                event->seconds = version->persist_seconds;
        strcpy(event->tag, version->tag);
        if (!is_durable)
                snprintf(event->text, sizeof event->text, "%s", version->error.message);
}

bool event_next(const struct job *job, double since, struct ipc_event *ret_event)
{
        const struct version *first = NULL;

        for (const struct version *version = job->versions; version; version = version->next)
                if (decided_at(version) > since && (!first || decided_at(version) < decided_at(first)))
                        first = version;
        if (job->store_error.message[0] && job->store_error_at > since && (!first || job->store_error_at < decided_at(first))) {
                *ret_event = (struct ipc_event){ .at = job->store_error_at, .kind = NEBULA_EVENT_STORAGE };
                snprintf(ret_event->text, sizeof ret_event->text, "%s", job->store_error.message);
                return true;
        }
        if (first)
                fill(first, decided_at(first), ret_event);
        return first != NULL;
}
