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
        bool is_of_cloud;
        enum nebula_cloud cloud;
        struct lock lock; /* guards the members below; the connection is closed under it */
        int waiting_fd;   /* of the waiting call; -1: no call is waiting */
        bool is_stopped;
};

/* Sets the connection that is being waited on; -1: none. False: the watch is stopped. */
static bool set_waiting(struct nebula_watch *watch, int fd)
{
        bool is_stopped;

        lock_take(&watch->lock);
        is_stopped = watch->is_stopped;
        watch->waiting_fd = fd;
        lock_give(&watch->lock);
        return !is_stopped;
}

void client_watch_stop(nebula_watch *watch)
{
        lock_take(&watch->lock);
        watch->is_stopped = true;
        if (watch->waiting_fd >= 0 && client_wire_is_open(&watch->wire))
                os->shutdown(watch->waiting_fd);
        lock_give(&watch->lock);
}

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
        watch->settings.variables = NULL; /* a tool brings none */
        lock_give(&session->settings_lock);
        if (watch->settings.hello.role == IPC_ROLE_TRAINER)
                watch->settings.hello.role = IPC_ROLE_TOOL;
        watch->settings.is_idle = true;
        watch->since = (double)os->wall_ns() / 1e9;
        watch->wire.fd = watch->waiting_fd = -1;
        lock_init(&watch->lock, LOCK_WATCH);
        result = os->random(&watch->settings.hello.session_nonce, sizeof watch->settings.hello.session_nonce);
        if (result < 0) {
                lock_done(&watch->lock);
                free(watch);
                return error_set(ret_error, NEBULA_UNAVAILABLE, -result, "the system gives no random number");
        }
        *ret_watch = watch;
        return NEBULA_OK;
}

enum nebula_status nebula_watch_open_cloud(nebula_session *session, enum nebula_cloud cloud, nebula_watch **ret_watch,
                                           struct nebula_error *ret_error)
{
        enum nebula_status status = nebula_watch_open(session, ret_watch, ret_error);

        if (status != NEBULA_OK)
                return status;
        (*ret_watch)->settings.is_idle = false; /* the cloud is asked by an agent only */
        (*ret_watch)->since = 0; /* a notice that is there already counts */
        (*ret_watch)->is_of_cloud = true;
        (*ret_watch)->cloud = cloud;
        return NEBULA_OK;
}

/* Asks and waits. A connection that broke is closed when client_watch_stop cannot shut it down any more. */
static enum nebula_status await_event(struct nebula_watch *watch, const struct ipc_watch *request, bool *ret_broken,
                                      struct nebula_error *error)
{
        struct client_wire *wire = &watch->wire;
        enum nebula_status status;

        *ret_broken = true;
        if (!set_waiting(watch, wire->fd))
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the watch was stopped");
        status = ipc_send(wire->fd, IPC_WATCH, NEBULA_OK, request, sizeof *request, -1, error);
        *ret_broken = status != NEBULA_OK;
        if (status == NEBULA_OK)
                status = ipc_await(wire->fd, IPC_WATCH, client_patience_ms(request->timeout_ms), &wire->frame, ret_broken, error);
        set_waiting(watch, -1);
        if (*ret_broken) {
                error_prefix(error, "the agent (process %u)", wire->agent_pid);
                client_wire_close(wire);
        }
        return status;
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
        request.is_of_cloud = watch->is_of_cloud;
        request.cloud = (uint32_t)watch->cloud;
        if (watch->wire.fd >= 0 && !client_wire_is_open(&watch->wire))
                client_wire_close(&watch->wire);
        if (watch->wire.fd < 0)
                status = client_wire_open(&watch->wire, &watch->settings, ret_error);
        if (status == NEBULA_OK)
                status = await_event(watch, &request, &is_broken, ret_error);
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
        lock_done(&watch->lock);
        free(watch);
}
