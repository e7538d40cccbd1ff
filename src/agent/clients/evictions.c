#include "agent/clients/evictions.h"

#include <stdio.h>
#include <stdlib.h>

#include "agent/catalogue/catalogue.h"
#include "agent/log.h"
#include "base/error.h"
#include "os/os.h"

#define PAUSE_NS SECOND_NS /* Azure asks its users for one question a second */
#define WARN_AFTER 30       /* failures in a row */

static void note_failure(struct catalogue *catalogue, struct evictions *evictions, const struct nebula_error *failure)
{
        evictions->kept[0] = 0;
        evictions->error = *failure;
        if (++evictions->failures != WARN_AFTER)
                return;
        evictions->failed_at = catalogue_moment(catalogue);
        log_event(LOG_LEVEL_WARN, "the metadata service does not answer, so no eviction is noticed: %s", failure->message);
}

static void note_answer(struct catalogue *catalogue, struct evictions *evictions, const struct notice *notice)
{
        evictions->failures = 0;
        evictions->failed_at = 0;
        if (!notice->is_there) {
                evictions->noticed_at = 0;
        } else if (evictions->noticed_at <= 0) {
                evictions->noticed_at = catalogue_moment(catalogue);
                log_event(LOG_LEVEL_INFO, "%s: this machine is to go within %.0f s", notice->text, notice->seconds);
        }
        evictions->notice = *notice;
}

struct evictions *evictions_of(struct catalogue *catalogue, enum nebula_cloud cloud)
{
        if (!catalogue->evictions)
                catalogue->evictions = calloc(NOTICE_CLOUDS, sizeof *catalogue->evictions);
        return catalogue->evictions ? &catalogue->evictions[cloud] : NULL;
}

enum nebula_status evictions_ask(struct catalogue *catalogue, enum nebula_cloud cloud, struct nebula_error *error)
{
        struct evictions *evictions = evictions_of(catalogue, cloud);
        struct nebula_error failure = { 0 };
        struct notice notice;
        enum nebula_status status;

        if (!evictions)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to ask a cloud");
        if (evictions->is_being_asked || os->now_ns() < evictions->due_ns)
                return NEBULA_OK;
        evictions->is_being_asked = true;
        catalogue_unlock(catalogue);
        status = notice_get(cloud, evictions->kept, &notice, &failure);
        catalogue_lock(catalogue);
        evictions->is_being_asked = false;
        evictions->due_ns = os->now_ns() + PAUSE_NS;
        if (status)
                note_failure(catalogue, evictions, &failure);
        else
                note_answer(catalogue, evictions, &notice);
        catalogue_signal_event(catalogue, NULL);
        if (status == NEBULA_INVALID && error)
                *error = failure;
        return status == NEBULA_INVALID ? status : NEBULA_OK;
}

bool evictions_event(const struct evictions *evictions, double since, struct ipc_event *ret_event)
{
        if (evictions->is_being_asked)
                return false;
        if (evictions->noticed_at > since) {
                *ret_event = (struct ipc_event){ .at = evictions->noticed_at, .seconds = evictions->notice.seconds, .kind = NEBULA_EVENT_EVICTION };
                snprintf(ret_event->text, sizeof ret_event->text, "%s", evictions->notice.text);
                return true;
        }
        if (evictions->failed_at > since) {
                *ret_event = (struct ipc_event){ .at = evictions->failed_at, .kind = NEBULA_EVENT_METADATA };
                snprintf(ret_event->text, sizeof ret_event->text, "%s", evictions->error.message);
                return true;
        }
        return false;
}
