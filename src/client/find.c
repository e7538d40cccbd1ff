/* Looking for a checkpoint that is complete: in memory first, then in storage. The agent does the looking. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "image/image.h"

static enum nebula_status find(nebula_session *session, const char *tag, const char *persist_path,
                               nebula_checkpoint **ret_checkpoint, struct nebula_error *error)
{
        struct client_wire wire = { .fd = -1 };
        struct ipc_find request = { 0 };
        struct client_call call = {
                .type = IPC_FIND, .request = &request, .size = sizeof request, .timeout_ms = -1,
        };
        struct nebula_checkpoint *checkpoint;
        const struct ipc_found *found;
        enum nebula_status status;

        status = copies_settle(session, 0, -1, error); /* what this process has committed can be found by it */
        if (status == NEBULA_OK)
                status = client_persist_path(request.persist_path, persist_path, error);
        if (status == NEBULA_OK)
                status = client_text(request.tag, sizeof request.tag, tag, "the tag", error);
        if (status != NEBULA_OK)
                return status;
        checkpoint = calloc(1, sizeof *checkpoint);
        if (!checkpoint)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a checkpoint's handle");
        status = session_call_alone(session, &wire, &call, error);
        if (status != NEBULA_OK) {
                free(checkpoint);
                goto close_wire;
        }
        found = wire.frame.payload;
        checkpoint->session = session;
        checkpoint->file_count = NEBULA_FILES_OPEN; /* should the caller add to it */
        checkpoint->is_found = true;
        checkpoint->user_count = 1;
        memcpy(checkpoint->persist_path, request.persist_path, sizeof checkpoint->persist_path);
        memcpy(checkpoint->tag, found->tag, sizeof checkpoint->tag);
        checkpoint_know(checkpoint, found->version_id, wire.agent_nonce);
        *ret_checkpoint = checkpoint;
close_wire:
        session_wire_done(session, &wire);
        return status;
}

enum nebula_status nebula_checkpoint_latest(nebula_session *session, const char *persist_path,
                                            nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error)
{
        if (!session || !ret_checkpoint)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_latest needs a session and a place for "
                                 "the checkpoint");
        return find(session, NULL, persist_path, ret_checkpoint, ret_error);
}

enum nebula_status nebula_checkpoint_find(nebula_session *session, const char *tag, const char *persist_path,
                                          nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error)
{
        enum nebula_status status;
        char encoded[256];

        if (!session || !tag || !ret_checkpoint)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_find needs a session, a tag and a place "
                                 "for the checkpoint");
        status = name_encode(tag, encoded, ret_error);
        return status == NEBULA_OK ? find(session, tag, persist_path, ret_checkpoint, ret_error) : status;
}
