/* Finds a complete checkpoint: in memory first, then in storage. The agent does the search. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "image/image.h"

struct nebula_checkpoint *checkpoint_found(nebula_session *session, const struct client_wire *wire, const struct ipc_found *found)
{
        struct nebula_checkpoint *checkpoint = calloc(1, sizeof *checkpoint);

        if (!checkpoint)
                return NULL;
        checkpoint->session = session;
        checkpoint->file_count = NEBULA_FILES_OPEN; /* in case the caller adds files to it */
        checkpoint->is_found = checkpoint->is_open_ended = true;
        checkpoint->user_count = 1;
        checkpoint->sequence = found->sequence;
        memcpy(checkpoint->tag, found->tag, sizeof checkpoint->tag);
        if (found->passed_count) {
                checkpoint->passed = calloc(found->passed_count, sizeof *checkpoint->passed);
                if (!checkpoint->passed) {
                        free(checkpoint);
                        return NULL;
                }
                checkpoint->passed_count = found->passed_count;
                memcpy(checkpoint->passed, found->passed, found->passed_count * sizeof *checkpoint->passed);
        }
        checkpoint_know(checkpoint, found->version_id, wire->agent_nonce);
        return checkpoint;
}

static enum nebula_status find(nebula_session *session, const char *tag, uint64_t sequence,
                               const char *persist_path, nebula_checkpoint **ret_checkpoint, struct nebula_error *error)
{
        struct client_wire wire = { .fd = -1 };
        struct ipc_find request = { .sequence = sequence, .waits = !sequence };
        struct client_call call = {
                .type = IPC_FIND, .request = &request, .size = sizeof request, .timeout_ms = -1,
        };
        struct nebula_checkpoint *checkpoint;
        enum nebula_status status;

        status = copies_await(session, 0, -1, error); /* so that the agent knows all that this process has committed */
        if (status == NEBULA_OK)
                status = client_persist_path(request.persist_path, persist_path, error);
        if (status == NEBULA_OK)
                status = client_text(request.tag, sizeof request.tag, tag, "the tag", error);
        if (status != NEBULA_OK)
                return status;
        status = session_call_alone(session, &wire, &call, error);
        if (status == NEBULA_OK) {
                checkpoint = checkpoint_found(session, &wire, wire.frame.payload);
                if (checkpoint) {
                        memcpy(checkpoint->persist_path, request.persist_path, sizeof checkpoint->persist_path);
                        *ret_checkpoint = checkpoint;
                } else {
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a checkpoint's handle");
                }
        }
        session_wire_done(session, &wire);
        return status;
}

enum nebula_status nebula_checkpoint_latest(nebula_session *session, const char *persist_path,
                                            nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error)
{
        if (!session || !ret_checkpoint)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_latest needs a session and a place for "
                                 "the checkpoint");
        return find(session, NULL, 0, persist_path, ret_checkpoint, ret_error);
}

int nebula_checkpoint_passed_over(const nebula_checkpoint *checkpoint, uint32_t index, const char **ret_tag, const char **ret_reason)
{
        if (!checkpoint || index >= checkpoint->passed_count)
                return 0;
        *ret_tag = checkpoint->passed[index].tag;
        *ret_reason = checkpoint->passed[index].reason;
        return 1;
}

enum nebula_status nebula_checkpoint_find(nebula_session *session, const char *tag, const char *persist_path,
                                          nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error)
{
        return nebula_checkpoint_find_version(session, tag, 0, persist_path, ret_checkpoint, ret_error);
}

enum nebula_status nebula_checkpoint_find_version(nebula_session *session, const char *tag, uint64_t sequence, const char *persist_path,
                                                  nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error)
{
        enum nebula_status status;
        char encoded[256];

        if (!session || !tag || !ret_checkpoint)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_find needs a session, a tag and a place "
                                 "for the checkpoint");
        status = name_encode(tag, encoded, ret_error);
        return status == NEBULA_OK ? find(session, tag, sequence, persist_path, ret_checkpoint, ret_error) : status;
}
