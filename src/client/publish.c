/* Checkpoints at paths that a framework chose. The agent publishes; this file sends the requests. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"

enum nebula_status nebula_checkpoint_publish(nebula_checkpoint *checkpoint, const char *name, const char *path,
                                             const char *staging, struct nebula_error *ret_error)
{
        struct ipc_publish request = { 0 };
        struct client_call call = {
                .type = IPC_PUBLISH, .request = &request, .size = sizeof request, .version_id = &request.version_id,
                .checkpoint = checkpoint, .timeout_ms = CLIENT_ANSWER_MS,
        };
        enum nebula_status status;

        if (!checkpoint || !path || (name && !*name))
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_publish needs a checkpoint and a path");
        status = client_text(request.name, sizeof request.name, name, "the file's name", ret_error);
        if (status == NEBULA_OK)
                status = client_text(request.path, sizeof request.path, path, "the path", ret_error);
        if (status == NEBULA_OK)
                status = client_text(request.staging, sizeof request.staging, staging, "the staging directory", ret_error);
        return status == NEBULA_OK ? session_report(checkpoint->session, &call, ret_error) : status;
}

enum nebula_status nebula_session_unpublish(nebula_session *session, const char *path, struct nebula_error *ret_error)
{
        struct ipc_path request = { 0 };
        struct client_call call = {
                .type = IPC_UNPUBLISH, .request = &request, .size = sizeof request, .timeout_ms = CLIENT_ANSWER_MS,
        };
        enum nebula_status status;

        if (!session || !path)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_session_unpublish needs a session and a path");
        status = client_text(request.path, sizeof request.path, path, "the path", ret_error);
        return status == NEBULA_OK ? session_report(session, &call, ret_error) : status;
}

enum nebula_status nebula_session_find_published(nebula_session *session, const char *path,
                                                 nebula_checkpoint **ret_checkpoint, char ret_name[256],
                                                 struct nebula_error *ret_error)
{
        struct client_wire wire = { .fd = -1 };
        struct ipc_path request = { 0 };
        struct client_call call = {
                .type = IPC_FIND_PATH, .request = &request, .size = sizeof request, .timeout_ms = -1,
        };
        struct nebula_checkpoint *checkpoint;
        const struct ipc_found_path *found;
        enum nebula_status status;

        if (!session || !path || !ret_checkpoint || !ret_name)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_session_find_published needs a session, a path and a "
                                 "place for what is found");
        status = client_text(request.path, sizeof request.path, path, "the path", ret_error);
        if (status != NEBULA_OK)
                return status;
        status = session_call_alone(session, &wire, &call, ret_error);
        if (status == NEBULA_OK) {
                found = wire.frame.payload;
                checkpoint = checkpoint_found(session, &wire, &found->found);
                if (checkpoint) {
                        memcpy(ret_name, found->name, sizeof found->name);
                        *ret_checkpoint = checkpoint;
                } else {
                        status = error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for a checkpoint's handle");
                }
        }
        session_wire_done(session, &wire);
        return status;
}
