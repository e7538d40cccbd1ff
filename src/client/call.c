/* Sends a request, and repeats it at the next agent if its agent dies. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "os/os.h"

#define RETRY_PAUSE_MIN_MS 1000
#define RETRY_PAUSE_MAX_MS 60000
#define TIMEOUT_MAX_MS ((int64_t)1000 * 86400 * 365 * 100) /* a longer time is no limit */

static enum nebula_status give(struct nebula_error *error, const struct nebula_error *failure)
{
        if (error)
                *error = *failure;
        return failure->status;
}

enum nebula_status session_break(struct nebula_session *session, struct nebula_error *error, const char *format, ...)
{
        char text[sizeof error->message];
        va_list arguments;

        va_start(arguments, format);
        vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        session->is_broken = true;
        error_set(&session->failure, NEBULA_UNAVAILABLE, 0, "checkpointing is off, since %.400s", text);
        client_wire_close(&session->wire);
        return give(error, &session->failure);
}

static enum nebula_status open_wire(struct nebula_session *session, struct client_wire *wire, struct nebula_error *error)
{
        struct client_settings settings;
        enum nebula_status status;

        lock_take(&session->settings_lock);
        settings = session->settings;
        vars_hold(settings.variables);
        lock_give(&session->settings_lock);
        status = client_wire_open(wire, &settings, error);
        if (status == NEBULA_OK)
                wire->log = session->settings.place.log; /* points into settings that live as long as the session */
        vars_drop(settings.variables);
        return status;
}

/* Connects to the agent. If none can be started, every save would wait for one, so the pause between attempts grows. */
enum nebula_status session_connect(struct nebula_session *session, struct nebula_error *error)
{
        enum nebula_status status;

        if (session->is_broken)
                return give(error, &session->failure);
        if (session->wire.fd >= 0)
                return NEBULA_OK;
        if (session->retry_pause_ms > 0 && os->now_ns() < session->retry_at_ns)
                return give(error, &session->failure);
        status = open_wire(session, &session->wire, &session->failure);
        if (status == NEBULA_OK) {
                session->retry_pause_ms = 0;
                return status;
        }
        session->retry_pause_ms = session->retry_pause_ms ? 2 * session->retry_pause_ms : RETRY_PAUSE_MIN_MS;
        if (session->retry_pause_ms > RETRY_PAUSE_MAX_MS)
                session->retry_pause_ms = RETRY_PAUSE_MAX_MS;
        session->retry_at_ns = os->now_ns() + session->retry_pause_ms * 1000000;
        return give(error, &session->failure);
}

static bool is_interrupted(const struct client_call *call, struct client_wire *wire)
{
        const struct nebula_session *session = call->checkpoint->session;

        return session->is_interrupted &&
               client_wire_is_interrupted(wire, call->timeout_ms, session->is_interrupted, session->interrupted_argument);
}

static enum nebula_status try_call(struct client_wire *wire, const struct client_call *call, bool *ret_broken,
                                   struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        *ret_broken = false;
        if (call->checkpoint && !call->begins)
                status = checkpoint_renew(call->checkpoint, wire, ret_broken, error);
        if (status == NEBULA_OK && call->type == IPC_COMMIT)
                status = checkpoint_check(call->checkpoint, error);
        if (status != NEBULA_OK)
                return status;
        if (call->version_id)
                *call->version_id = checkpoint_is_known(call->checkpoint, wire) ? atomic_load(&call->checkpoint->version_id) : 0;
        status = client_wire_send(wire, call->type, call->request, call->size, ret_broken, error);
        if (status != NEBULA_OK)
                return status;
        if (call->meanwhile)
                call->meanwhile(call->argument);
        if (call->type == IPC_IMAGE && is_interrupted(call, wire))
                return error_set(error, NEBULA_UNAVAILABLE, 0, "a signal has interrupted the wait for memory");
        return client_wire_await(wire, call->type, call->timeout_ms, ret_broken, error);
}

/* An agent that does not answer in time counts as unreachable: another request to it would only double the wait. */
static enum nebula_status silent(enum nebula_status status, bool is_broken, struct nebula_error *error)
{
        if (status == NEBULA_TIMEOUT && is_broken && error)
                error->status = NEBULA_UNAVAILABLE;
        return status == NEBULA_TIMEOUT && is_broken ? NEBULA_UNAVAILABLE : status;
}

static enum nebula_status call_now(struct nebula_session *session, const struct client_call *call, struct nebula_error *error)
{
        enum nebula_status status;
        bool is_broken = false;

        for (int tries = 0; tries < 2; tries++) {
                status = session_connect(session, error);
                if (status != NEBULA_OK)
                        return status;
                status = try_call(&session->wire, call, &is_broken, error);
                if (!is_broken || status == NEBULA_TIMEOUT)
                        break;
        }
        return silent(status, is_broken, error);
}

enum nebula_status session_call(struct nebula_session *session, const struct client_call *call,
                                struct nebula_error *error)
{
        session_report_unsent(session, false, NULL); /* if no agent can be reached, the call below finds that out again */
        return call_now(session, call, error);
}

void session_report_later(struct nebula_session *session, struct client_copy *copy)
{
        atomic_fetch_add(&copy->checkpoint->user_count, 1);
        atomic_store(&session->unsent, copy);
}

void session_forget_unsent(struct nebula_session *session)
{
        struct client_copy *copy = atomic_exchange(&session->unsent, NULL);

        if (!copy)
                return;
        nebula_checkpoint_free(copy->checkpoint);
        free(copy);
}

/* Saves the file in the image again, at a new agent: the image may hold the only copy, because other ranks' agents may be gone too. */
static void report_once_more(struct nebula_session *session)
{
        struct client_copy *copy = atomic_load(&session->unsent);
        nebula_checkpoint *checkpoint = copy->checkpoint;

        if (!atomic_load(&checkpoint->saved_version_id) && copies_ready(session) == NEBULA_OK) {
                atomic_store(&session->unsent, NULL);
                copies_add(session, copy); /* its thread may free it at once */
                nebula_checkpoint_free(checkpoint); /* the list of copies holds it */
        } else {
                atomic_store(&checkpoint->is_torn, true);
        }
}

enum nebula_status session_report_unsent(struct nebula_session *session, bool commits, struct nebula_error *error)
{
        struct client_copy *copy = atomic_load(&session->unsent);
        struct client_call call = { .type = IPC_CAPTURED, .size = sizeof copy->captured, .timeout_ms = CLIENT_ANSWER_MS };
        enum nebula_status status;

        if (!copy)
                return NEBULA_OK;
        copy->captured.commits = commits;
        call.request = &copy->captured;
        status = call_now(session, &call, error);
        if (status == NEBULA_UNAVAILABLE)
                return status; /* the next request tries again, perhaps at an agent that has adopted the image */
        if (status == NEBULA_OK)
                checkpoint_saved(copy->checkpoint, commits);
        else if (status != NEBULA_NOT_FOUND)
                atomic_store(&copy->checkpoint->is_torn, true);
        else if (session->wire.agent_nonce != copy->agent_nonce && !atomic_load(&copy->checkpoint->is_given_up))
                report_once_more(session);
        session_forget_unsent(session);
        return status;
}

void session_report_all(struct nebula_session *session)
{
        if (!atomic_load(&session->unsent))
                return;
        lock_take(&session->request_lock);
        session_report_unsent(session, false, NULL);
        lock_give(&session->request_lock);
}

/* Takes the connection that was kept: a new one costs the agent a thread. False: there is none. */
static bool take_idle_wire(struct nebula_session *session, struct client_wire *wire)
{
        lock_take(&session->settings_lock);
        *wire = session->idle_wire;
        session->idle_wire = (struct client_wire){ .fd = -1 };
        lock_give(&session->settings_lock);
        return wire->fd >= 0;
}

void session_wire_done(struct nebula_session *session, struct client_wire *wire)
{
        ipc_frame_done(&wire->frame); /* frees the buffer: a report may be large */
        lock_take(&session->settings_lock);
        if (session->idle_wire.fd < 0) {
                session->idle_wire = *wire;
                *wire = (struct client_wire){ .fd = -1 };
        }
        lock_give(&session->settings_lock);
        client_wire_close(wire);
}

enum nebula_status session_call_alone(struct nebula_session *session, struct client_wire *wire,
                                      const struct client_call *call, struct nebula_error *error)
{
        enum nebula_status status;
        bool is_broken = false;
        /* A kept connection's agent may have died long before this request, so its failure does not count. */
        int tries = wire->fd < 0 && take_idle_wire(session, wire) ? -1 : 0;

        for (; tries < 2; tries++) {
                status = wire->fd >= 0 ? NEBULA_OK : open_wire(session, wire, error);
                if (status != NEBULA_OK)
                        return status;
                status = try_call(wire, call, &is_broken, error);
                if (!is_broken || status == NEBULA_TIMEOUT)
                        break;
        }
        return silent(status, is_broken, error);
}

enum nebula_status session_report(struct nebula_session *session, const struct client_call *call,
                                struct nebula_error *error)
{
        enum nebula_status status;

        lock_take(&session->request_lock);
        status = session_call(session, call, error);
        lock_give(&session->request_lock);
        return status;
}

int64_t client_patience_ms(int64_t timeout_ms)
{
        return timeout_ms < 0 || timeout_ms > TIMEOUT_MAX_MS ? -1 : timeout_ms + CLIENT_GRACE_MS;
}

enum nebula_status client_take_text(const struct ipc_frame *frame, char **ret_text, struct nebula_error *error)
{
        size_t size = frame->header.size;
        char *text = malloc(size + 1);

        if (!text)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a text of %zu bytes", size);
        memcpy(text, frame->payload, size);
        text[size] = '\0';
        *ret_text = text;
        return NEBULA_OK;
}
