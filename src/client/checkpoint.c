/* Handles of checkpoints: a tag, and the agent's id of its version. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "image/image.h"
#include "os/ending.h"

/* Whether a flush at the same agent began after the last save. A flush of all tags does not cover a version that other ranks have not
 * committed. */
static bool is_flushed(const struct nebula_checkpoint *checkpoint)
{
        struct nebula_session *session = checkpoint->session;
        uint64_t nonce = atomic_load(&checkpoint->saved_agent_nonce), flush = atomic_load(&checkpoint->saved_flush);
        const struct client_flushed *flushed = &session->flushed;
        bool result;

        lock_take(&session->settings_lock);
        result = (session->settings.hello.world == 1 && flushed->all > flush && flushed->all_nonce == nonce) ||
                 (flushed->one > flush && flushed->one_nonce == nonce && !strcmp(flushed->tag, checkpoint->tag));
        lock_give(&session->settings_lock);
        return result;
}

void checkpoint_know(struct nebula_checkpoint *checkpoint, uint64_t version_id, uint64_t agent_nonce)
{
        uint64_t saved_id = atomic_load(&checkpoint->saved_version_id);

        if (saved_id && version_id && version_id != saved_id && agent_nonce != atomic_load(&checkpoint->saved_agent_nonce) &&
            !is_flushed(checkpoint))
                atomic_store(&checkpoint->is_torn, true); /* an agent that adopts versions keeps their ids */
        atomic_store(&checkpoint->version_id, version_id);
        atomic_store(&checkpoint->agent_nonce, agent_nonce);
}

void checkpoint_saved(struct nebula_checkpoint *checkpoint, bool is_committed)
{
        struct nebula_session *session = checkpoint->session;

        lock_take(&session->settings_lock);
        atomic_store(&checkpoint->saved_flush, session->flushed.begun);
        lock_give(&session->settings_lock);
        atomic_store(&checkpoint->saved_agent_nonce, atomic_load(&checkpoint->agent_nonce));
        atomic_store(&checkpoint->saved_version_id,
                     is_committed || checkpoint->file_count > 0 ? 0 : atomic_load(&checkpoint->version_id));
        if (is_committed || checkpoint->file_count > 0)
                atomic_store(&checkpoint->done_writing, atomic_load(&checkpoint->begun_writing));
        atomic_store(&checkpoint->is_uncommitted, !is_committed);
}

enum nebula_status checkpoint_check(const struct nebula_checkpoint *checkpoint, struct nebula_error *error)
{
        return !atomic_load(&checkpoint->is_torn) ? NEBULA_OK :
               error_set(error, NEBULA_FAILED, 0, "files of checkpoint \"%.200s\" were lost with an agent that has ended: begin it "
                         "again and save all of them", checkpoint->tag);
}

bool checkpoint_is_known(const struct nebula_checkpoint *checkpoint, const struct client_wire *wire)
{
        return atomic_load(&checkpoint->agent_nonce) == wire->agent_nonce;
}

static void know_begun(struct nebula_checkpoint *checkpoint, const struct client_wire *wire)
{
        const struct ipc_begun *begun = wire->frame.payload;

        atomic_store(&checkpoint->begun_writing, begun->writing);
        checkpoint_know(checkpoint, begun->version_id, wire->agent_nonce);
}

/* done_writing not 0: only finds a version that the agent has. */
static enum nebula_status begin(struct nebula_checkpoint *checkpoint, uint64_t done_writing, struct client_wire *wire,
                                bool *ret_broken, struct nebula_error *error)
{
        struct ipc_begin request = { .file_count = checkpoint->file_count, .writing = done_writing };
        enum nebula_status status;

        memcpy(request.tag, checkpoint->tag, sizeof request.tag);
        status = client_wire_call(wire, IPC_BEGIN, &request, sizeof request, CLIENT_ANSWER_MS, ret_broken, error);
        if (status == NEBULA_OK)
                know_begun(checkpoint, wire);
        return status;
}

/* sequence 0: any. least not 0: an earlier writing of the tag, or one of another run, is NEBULA_NOT_FOUND. */
static enum nebula_status find_again(struct nebula_checkpoint *checkpoint, uint64_t sequence, uint64_t least, struct client_wire *wire,
                                     bool *ret_broken, struct nebula_error *error)
{
        struct ipc_find request = { .sequence = sequence };
        const struct ipc_found *found;
        enum nebula_status status;

        memcpy(request.tag, checkpoint->tag, sizeof request.tag);
        memcpy(request.persist_path, checkpoint->persist_path, sizeof request.persist_path);
        status = client_wire_call(wire, IPC_FIND, &request, sizeof request, CLIENT_ANSWER_MS, ret_broken, error);
        if (status != NEBULA_OK)
                return status;
        found = wire->frame.payload;
        if (found->writing < least)
                return error_set(error, NEBULA_NOT_FOUND, 0, "there is only an earlier writing of this tag, or one of another run");
        checkpoint_know(checkpoint, found->version_id, wire->agent_nonce);
        return NEBULA_OK;
}

/* The agent may have dropped the version from memory after it was durable, or have ended with the only copy.
 * Beginning the tag again would make a version without files that no rank would ever commit. */
static enum nebula_status look_again(struct nebula_checkpoint *checkpoint, uint64_t done_writing, struct client_wire *wire,
                                     bool *ret_broken, struct nebula_error *error)
{
        enum nebula_status status = begin(checkpoint, done_writing, wire, ret_broken, error);

        if (status == NEBULA_NOT_FOUND)
                status = find_again(checkpoint, 0, done_writing, wire, ret_broken, error);
        return status != NEBULA_NOT_FOUND ? status :
               error_set(error, NEBULA_FAILED, 0, "checkpoint \"%.200s\" was committed, and neither memory nor storage has it any more",
                         checkpoint->tag);
}

enum nebula_status checkpoint_renew(struct nebula_checkpoint *checkpoint, struct client_wire *wire, bool *ret_broken,
                                    struct nebula_error *error)
{
        uint64_t done_writing = atomic_load(&checkpoint->done_writing);

        *ret_broken = false;
        if (checkpoint_is_known(checkpoint, wire))
                return NEBULA_OK;
        if (atomic_load(&checkpoint->is_found))
                return find_again(checkpoint, checkpoint->sequence, 0, wire, ret_broken, error);
        return done_writing ? look_again(checkpoint, done_writing, wire, ret_broken, error) :
                                 begin(checkpoint, 0, wire, ret_broken, error);
}

void checkpoint_image_call(struct nebula_checkpoint *checkpoint, const char name[IPC_NAME_MAX], struct ipc_image *request,
                           struct client_call *ret_call)
{
        request->file_count = checkpoint->file_count;
        memcpy(request->tag, checkpoint->tag, sizeof request->tag);
        memcpy(request->name, name, sizeof request->name);
        *ret_call = (struct client_call){
                .type = IPC_IMAGE, .request = request, .size = sizeof *request, .version_id = &request->version_id,
                .checkpoint = checkpoint, .begins = true, .timeout_ms = CLIENT_IMAGE_MS,
        };
}

void checkpoint_know_image(struct nebula_checkpoint *checkpoint, const struct client_wire *wire)
{
        const struct ipc_granted *granted = wire->frame.payload;
        bool is_granted = granted && wire->frame.header.status == NEBULA_OK;
        uint64_t version_id = 0;

        if (granted) /* otherwise there was no answer */
                version_id = is_granted ? granted->version_id : ipc_refused_version(&wire->frame);
        if (is_granted)
                atomic_store(&checkpoint->begun_writing, granted->writing);
        if (version_id)
                checkpoint_know(checkpoint, version_id, wire->agent_nonce);
}

/* Tells the agent now of an open-ended checkpoint of several ranks, because the commits of other ranks wait for each
 * rank that has begun. Any other checkpoint is begun with its first request, so that the first save waits for one
 * answer and not for two. */
static enum nebula_status report_begun(struct nebula_checkpoint *checkpoint, struct nebula_error *error)
{
        struct nebula_session *session = checkpoint->session;
        struct ipc_begin request = { .file_count = checkpoint->file_count };
        struct client_call call = {
                .type = IPC_BEGIN, .request = &request, .size = sizeof request, .timeout_ms = CLIENT_ANSWER_MS,
        };
        enum nebula_status status;

        memcpy(request.tag, checkpoint->tag, sizeof request.tag);
        copies_lock_after_commit(session, checkpoint->tag);
        status = session_connect(session, error);
        checkpoint->is_open_ended = checkpoint->file_count == NEBULA_FILES_OPEN && session->settings.hello.world > 1;
        if (status == NEBULA_OK && checkpoint->is_open_ended) {
                status = session_call(session, &call, error);
                if (status == NEBULA_OK)
                        know_begun(checkpoint, &session->wire);
        }
        lock_give(&session->request_lock);
        return status;
}

enum nebula_status nebula_checkpoint_begin(nebula_session *session, const char *tag, int64_t file_count,
                                           nebula_checkpoint **ret_checkpoint, struct nebula_error *ret_error)
{
        struct nebula_checkpoint *checkpoint;
        enum nebula_status status;
        char encoded[256];

        if (!session || !tag || !ret_checkpoint)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_begin needs a session, a tag and a "
                                 "place for the checkpoint");
        if (file_count < NEBULA_FILES_ALL_RANKS || file_count == 0)
                return error_set(ret_error, NEBULA_INVALID, 0, "%lld files cannot complete a checkpoint: give a positive "
                                 "number, NEBULA_FILES_OPEN or NEBULA_FILES_ALL_RANKS", (long long)file_count);
        status = name_encode(tag, encoded, ret_error);
        if (status != NEBULA_OK)
                return status;
        lock_take(&session->settings_lock);
        session->settings.hello.has_begun = 1; /* for an agent that comes after this one */
        lock_give(&session->settings_lock);
        checkpoint = calloc(1, sizeof *checkpoint);
        if (!checkpoint)
                return error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for a checkpoint's handle");
        checkpoint->session = session;
        checkpoint->file_count = file_count;
        checkpoint->user_count = 1;
        status = client_text(checkpoint->tag, sizeof checkpoint->tag, tag, "the tag", ret_error);
        if (status == NEBULA_OK)
                status = report_begun(checkpoint, ret_error);
        if (status != NEBULA_OK) {
                free(checkpoint);
                return status;
        }
        *ret_checkpoint = checkpoint;
        return NEBULA_OK;
}

/* Sends the commit, with the message that the last file is complete if the agent has not had it yet. The caller holds request_lock. */
static enum nebula_status report_committed(struct nebula_checkpoint *checkpoint, struct nebula_error *error)
{
        struct ipc_commit request = { .has_saved = atomic_load(&checkpoint->is_uncommitted) };
        struct client_call call = {
                .type = IPC_COMMIT, .request = &request, .size = sizeof request, .version_id = &request.version_id,
                .checkpoint = checkpoint, .timeout_ms = CLIENT_ANSWER_MS,
        };
        const struct client_copy *unsent = atomic_load(&checkpoint->session->unsent);
        enum nebula_status status = NEBULA_NOT_FOUND;

        if (unsent && unsent->checkpoint == checkpoint)
                status = session_report_unsent(checkpoint->session, true, error);
        if (status != NEBULA_NOT_FOUND)
                return status;
        if (unsent && copies_commit(checkpoint->session, checkpoint))
                return NEBULA_OK;
        status = session_call(checkpoint->session, &call, error);
        if (status == NEBULA_OK)
                checkpoint_saved(checkpoint, true);
        return status;
}

/* The last background copy sends the commit. A process that may end without waiting for copies waits here instead. */
static enum nebula_status await_copies(struct nebula_checkpoint *checkpoint, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        if (!ending_may_linger() && !copies_are_on_this_thread(checkpoint->session))
                status = copies_await(checkpoint->session, 0, ENDING_EXIT_MS, error);
        return status == NEBULA_OK ? checkpoint_check(checkpoint, error) : status;
}

/* While a file is being copied, the version cannot be complete. The commit is then sent with the message that the
 * file is complete, and the caller does not wait for an answer. */
enum nebula_status nebula_checkpoint_commit(nebula_checkpoint *checkpoint, struct nebula_error *ret_error)
{
        struct nebula_error torn;
        enum nebula_status status;
        bool is_later;

        if (!checkpoint)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_commit needs a checkpoint");
        lock_take(&checkpoint->session->request_lock);
        is_later = !checkpoint->is_open_ended && copies_commit(checkpoint->session, checkpoint);
        lock_give(&checkpoint->session->request_lock);
        if (is_later)
                return await_copies(checkpoint, ret_error);
        copies_lock_after_commit(checkpoint->session, checkpoint->tag); /* it may be another handle's commit */
        status = report_committed(checkpoint, ret_error);
        lock_give(&checkpoint->session->request_lock);
        if (status == NEBULA_OK && copies_are_under_way(checkpoint->session, checkpoint))
                status = await_copies(checkpoint, ret_error);
        if (checkpoint_check(checkpoint, &torn) != NEBULA_OK)
                nebula_checkpoint_fail(checkpoint, torn.message, NULL); /* no rank should wait for the version that was begun again */
        return status;
}

enum nebula_status nebula_checkpoint_fail(nebula_checkpoint *checkpoint, const char *reason,
                                          struct nebula_error *ret_error)
{
        struct ipc_fail request = { 0 };
        struct client_call call = {
                .type = IPC_FAIL, .request = &request, .size = sizeof request, .version_id = &request.version_id,
                .checkpoint = checkpoint, .timeout_ms = CLIENT_ANSWER_MS,
        };
        size_t length = reason ? strlen(reason) : 0;

        if (!checkpoint)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_fail needs a checkpoint");
        if (length >= sizeof request.reason)
                length = sizeof request.reason - 1; /* the reason is for people: cut it rather than refuse it */
        if (length > 0)
                memcpy(request.reason, reason, length);
        atomic_store(&checkpoint->is_given_up, true);
        return session_report(checkpoint->session, &call, ret_error);
}

enum nebula_status nebula_checkpoint_wait(nebula_checkpoint *checkpoint, enum nebula_state state, int64_t timeout_ms,
                                          struct nebula_error *ret_error)
{
        struct client_wire wire = { .fd = -1 };
        struct ipc_wait request = { .timeout_ms = timeout_ms, .state = (uint32_t)state };
        struct client_call call = {
                .type = IPC_WAIT, .request = &request, .size = sizeof request, .version_id = &request.version_id,
                .checkpoint = checkpoint, .timeout_ms = client_patience_ms(timeout_ms),
        };
        enum nebula_status status;

        if (!checkpoint || (unsigned)state > NEBULA_STATE_FAILED)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_wait needs a checkpoint and a known state");
        session_report_all(checkpoint->session);
        status = session_call_alone(checkpoint->session, &wire, &call, ret_error);
        session_wire_done(checkpoint->session, &wire);
        return status;
}

enum nebula_status nebula_checkpoint_state(nebula_checkpoint *checkpoint, enum nebula_state *ret_state,
                                           struct nebula_error *ret_error)
{
        struct ipc_version request = { 0 };
        struct client_call call = {
                .type = IPC_STATE, .request = &request, .size = sizeof request, .version_id = &request.version_id,
                .checkpoint = checkpoint, .timeout_ms = CLIENT_ANSWER_MS,
        };
        struct nebula_session *session;
        enum nebula_status status;
        uint32_t state = 0;

        if (!checkpoint || !ret_state)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_state needs a checkpoint and a place "
                                 "for the state");
        session = checkpoint->session;
        lock_take(&session->request_lock);
        status = session_call(session, &call, ret_error);
        if (status == NEBULA_OK)
                state = ((const struct ipc_state *)session->wire.frame.payload)->state;
        if (status == NEBULA_OK && state > NEBULA_STATE_FAILED)
                status = session_break(session, ret_error, "the agent reported the unknown state %u", state);
        lock_give(&session->request_lock);
        if (status == NEBULA_FAILED) { /* the version is lost: the report says why */
                status = NEBULA_OK;
                state = NEBULA_STATE_FAILED;
        }
        if (status == NEBULA_OK)
                *ret_state = (enum nebula_state)state;
        return status;
}

enum nebula_status nebula_checkpoint_report(nebula_checkpoint *checkpoint, char **ret_text,
                                            struct nebula_error *ret_error)
{
        struct client_wire wire = { .fd = -1 };
        struct ipc_version request = { 0 };
        struct client_call call = {
                .type = IPC_DESCRIBE, .request = &request, .size = sizeof request, .version_id = &request.version_id,
                .checkpoint = checkpoint, .timeout_ms = CLIENT_ANSWER_MS,
        };
        enum nebula_status status;

        if (!checkpoint || !ret_text)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_report needs a checkpoint and a place "
                                 "for the text");
        session_report_all(checkpoint->session); /* so that the report lists every file */
        status = copies_await(checkpoint->session, 0, -1, ret_error);
        if (status == NEBULA_OK)
                status = session_call_alone(checkpoint->session, &wire, &call, ret_error);
        if (status == NEBULA_OK)
                status = client_take_text(&wire.frame, ret_text, ret_error);
        session_wire_done(checkpoint->session, &wire);
        return status;
}

uint64_t nebula_checkpoint_sequence(const nebula_checkpoint *checkpoint)
{
        return checkpoint && atomic_load(&checkpoint->is_found) ? checkpoint->sequence : 0;
}

const char *nebula_checkpoint_tag(const nebula_checkpoint *checkpoint)
{
        return checkpoint ? checkpoint->tag : "";
}

void nebula_checkpoint_free(nebula_checkpoint *checkpoint)
{
        if (!checkpoint || atomic_fetch_sub(&checkpoint->user_count, 1) != 1)
                return;
        free(checkpoint->passed);
        free(checkpoint);
}
