/* Events of the background work on checkpoints. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "os/os.h"

struct nebula_watch {
        struct client_settings settings;
        struct client_wire wire;
        double since;
};

enum nebula_status nebula_watch_open(nebula_session *session, nebula_watch **ret_watch, struct nebula_error *ret_error)
{
        struct nebula_watch *watch;
        int result;

        if (!session || !ret_watch)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_watch_open needs a session and a place for the watch");
        watch = calloc(1, sizeof *watch);
        if (!watch)
                return error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for a watch");
        lock_take(&session->settings_lock);
        watch->settings = session->settings;
        lock_give(&session->settings_lock);
        watch->settings.hello.role = IPC_ROLE_TOOL;
        watch->settings.is_idle = true;
        watch->wire.fd = -1;
        watch->since = (double)os->wall_ns() / 1e9;
        result = os->random(&watch->settings.hello.session_nonce, sizeof watch->settings.hello.session_nonce);
        if (result < 0) {
                free(watch);
                return error_set(ret_error, NEBULA_UNAVAILABLE, -result, "no random number can be had");
        }
        *ret_watch = watch;
        return NEBULA_OK;
}

enum nebula_status nebula_watch_next(nebula_watch *watch, int64_t timeout_ms, struct nebula_event *ret_event,
                                     struct nebula_error *ret_error)
{
        struct ipc_watch request = { .timeout_ms = timeout_ms };
        const struct ipc_event *event;
        enum nebula_status status = NEBULA_OK;
        bool is_broken = false;

        if (!watch || !ret_event)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_watch_next needs a watch and a place for the event");
        request.since = watch->since;
        if (watch->wire.fd < 0 && watch->settings.is_inline)
                status = client_start_inline(&watch->settings.place, ret_error);
        if (watch->wire.fd < 0 && status == NEBULA_OK)
                status = client_wire_open(&watch->wire, &watch->settings, ret_error);
        if (status == NEBULA_OK)
                status = client_wire_call(&watch->wire, IPC_WATCH, &request, sizeof request, client_patience_ms(timeout_ms), &is_broken,
                                          ret_error);
        if (is_broken && ret_error)
                ret_error->status = NEBULA_UNAVAILABLE;
        if (status != NEBULA_OK)
                return is_broken ? NEBULA_UNAVAILABLE : status;
        event = watch->wire.frame.payload;
        watch->since = event->at;
        *ret_event = (struct nebula_event){ .kind = (enum nebula_event_kind)event->kind, .at = event->at, .seconds = event->seconds,
                                            .size = event->size };
        memcpy(ret_event->tag, event->tag, sizeof ret_event->tag);
        memcpy(ret_event->text, event->text, sizeof ret_event->text);
        return NEBULA_OK;
}

void nebula_watch_close(nebula_watch *watch)
{
        if (!watch)
                return;
        client_wire_close(&watch->wire);
        free(watch);
}
