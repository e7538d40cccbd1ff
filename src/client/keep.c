/* Pins and removals of one tag, beside the rules of the options. The agent does the work. */
#include "base/error.h"
#include "client/client.h"

#define KEEP_MS 600000 /* a removal waits for the version that is being written */

static enum nebula_status keep(nebula_session *session, enum ipc_keep_what what, const char *tag, const char *reason, struct nebula_error *error)
{
        struct client_wire wire = { .fd = -1 };
        struct ipc_keep request = { .what = what };
        struct client_call call = {
                .type = IPC_KEEP, .request = &request, .size = sizeof request, .timeout_ms = KEEP_MS,
        };
        enum nebula_status status;

        if (!session || !tag || !*tag)
                return error_set(error, NEBULA_INVALID, 0, "to pin, unpin or remove a checkpoint needs a session and a tag");
        status = client_text(request.tag, sizeof request.tag, tag, "the tag", error);
        if (status == NEBULA_OK)
                status = client_text(request.reason, sizeof request.reason, reason, "the reason of a pin", error);
        if (status != NEBULA_OK)
                return status;
        status = session_call_alone(session, &wire, &call, error);
        session_wire_done(session, &wire);
        return status;
}

enum nebula_status nebula_session_pin(nebula_session *session, const char *tag, const char *reason, struct nebula_error *ret_error)
{
        return keep(session, IPC_KEEP_PIN, tag, reason, ret_error);
}

enum nebula_status nebula_session_unpin(nebula_session *session, const char *tag, struct nebula_error *ret_error)
{
        return keep(session, IPC_KEEP_UNPIN, tag, NULL, ret_error);
}

enum nebula_status nebula_session_remove(nebula_session *session, const char *tag, struct nebula_error *ret_error)
{
        return keep(session, IPC_KEEP_REMOVE, tag, NULL, ret_error);
}
