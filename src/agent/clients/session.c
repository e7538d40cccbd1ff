#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/clients/location.h"
#include "agent/clients/report.h"
#include "agent/clients/waits_private.h"
#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/commit/lineage.h"
#include "agent/commit/world.h"
#include "agent/memory/image_loan.h"
#include "agent/memory/memory.h"
#include "agent/persist/records.h"
#include "agent/publish/publish.h"
#include "agent/publish/publish_list.h"
#include "agent/restore/restore.h"
#include "base/error.h"
#include "os/os.h"
#include "store/place.h"

/* A waiting client sends nothing, so if its connection is readable the client has closed it. */
bool session_client_gone(void *argument)
{
        const struct connection *connection = argument;

        return os->poll(connection->fd, 0) == 1;
}

static enum nebula_status request_begin(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        const struct ipc_begin *begin = payload;
        struct version *version;

        catalogue_lock(connection->catalogue);
        version = begin->writing ? commit_known(connection->session, begin->tag, begin->writing, error) :
                                   commit_begin(connection->catalogue, connection->session, begin->tag, begin->file_count, error);
        if (version)
                answer->body.begun = (struct ipc_begun){ version->id, version->writing };
        catalogue_unlock(connection->catalogue);
        answer->size = sizeof answer->body.begun;
        return version ? NEBULA_OK : error->status;
}

static void list_live(const struct catalogue *catalogue, const struct session *session, struct ipc_granted *granted)
{
        for (const struct image *image = catalogue->memory->images; image && granted->live_count < IPC_LIVE_MAX; image = image->next)
                if (image->owner_nonce == session->nonce)
                        granted->live_ids[granted->live_count++] = image->id;
}

/* Lock held on entry and return, released while an image without a descriptor is opened. */
static enum nebula_status duplicate(struct catalogue *catalogue, struct image *image, int *ret_fd, struct nebula_error *error)
{
        enum nebula_status status;

        if (image->fd >= 0)
                return image_duplicate(image, ret_fd, error);
        memory_hold(image);
        catalogue_unlock(catalogue);
        status = image_duplicate(image, ret_fd, error);
        catalogue_lock(catalogue);
        memory_drop(catalogue->memory, image);
        return status;
}

static enum nebula_status request_image(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        struct ipc_granted *granted = &answer->body.granted;
        struct version *version = NULL;
        struct image_loan *loan;
        enum nebula_status status;

        catalogue_lock(catalogue);
        status = image_loan_open(catalogue, connection->session, payload, connection->may_wait ? session_client_gone : NULL, connection,
                                 &version, &loan, error);
        answer->version_id = version ? version->id : 0;
        if (!status && !loan) {
                ((struct ipc_image *)connection->frame.payload)->version_id = version->id; /* this request may have begun the version */
                answer->is_slow = true;
        } else if (!status) {
                granted->image_id = loan->image->id;
                granted->version_id = version->id;
                granted->writing = version->writing;
                granted->capacity_bytes = loan->image->capacity;
                granted->lacks_pages = loan->image->lacks_pages;
                list_live(catalogue, connection->session, granted);
                /* A duplicate, because the image may be freed before the answer is sent. */
                status = duplicate(catalogue, loan->image, &answer->fd, error);
                if (status && (version = catalogue_version_of_image(catalogue, granted->image_id, &loan)) != NULL)
                        commit_end_loan(catalogue, version, loan);
        }
        catalogue_unlock(catalogue);
        answer->size = sizeof *granted;
        return status;
}

/* Finds a version whose image is complete, for a CAPTURED that an earlier agent recorded but did not answer before it was killed. */
static struct version *version_captured(const struct session *session, uint64_t image_id)
{
        for (struct version *version = session->job->live; version; version = version->next_live)
                for (size_t i = 0; i < version->file_count; i++) {
                        const struct agent_file *file = &version->files[i];

                        if (file->image && file->image->id == image_id && file->rank == session->rank && !file->origin)
                                return version;
                }
        return NULL;
}

static enum nebula_status captured_again(struct connection *connection, const struct ipc_captured *captured,
                                         struct nebula_error *error)
{
        struct version *version = version_captured(connection->session, captured->image_id);

        if (!version)
                return error_set(error, NEBULA_NOT_FOUND, 0, "the agent does not hold this image any more: save the file again");
        if (!captured->commits || !version_open(version) || version_part(version, connection->session->rank)->closed)
                return NEBULA_OK;
        return commit_part(connection->catalogue, connection->session, version, error);
}

static enum nebula_status request_captured(struct connection *connection, const void *payload, struct answer *answer,
                                           struct nebula_error *error)
{
        const struct ipc_captured *captured = payload;
        struct version *version;
        struct image_loan *loan;
        enum nebula_status status;

        catalogue_lock(connection->catalogue);
        version = catalogue_version_of_image(connection->catalogue, captured->image_id, &loan);
        if (version && loan->nonce == connection->session->nonce)
                status = commit_captured(connection->catalogue, version, loan, captured, error);
        else
                status = captured_again(connection, captured, error);
        catalogue_unlock(connection->catalogue);
        return status;
}

static enum nebula_status request_copied(struct connection *connection, const void *payload, struct answer *answer,
                                         struct nebula_error *error)
{
        const struct ipc_copied *copied = payload;
        struct version *version;
        struct image_loan *loan;
        enum nebula_status status;

        catalogue_lock(connection->catalogue);
        version = catalogue_version_of_image(connection->catalogue, copied->image_id, &loan);
        if (version && loan->nonce == connection->session->nonce)
                status = commit_copied(connection->catalogue, version, loan, copied, error);
        else
                status = error_set(error, NEBULA_NOT_FOUND, 0, "the agent does not know this image");
        catalogue_unlock(connection->catalogue);
        return status;
}

static enum nebula_status request_prepare(struct connection *connection, const void *payload, struct answer *answer,
                                          struct nebula_error *error)
{
        const struct ipc_prepare *prepare = payload;

        catalogue_lock(connection->catalogue);
        policy_hint(connection->catalogue, connection->session, prepare->size);
        catalogue_unlock(connection->catalogue);
        return NEBULA_OK;
}

static enum nebula_status request_spare(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        struct ipc_spare_image *spare = &answer->body.spare;
        enum nebula_status status = NEBULA_OK;
        struct image *image;
        uint64_t before = 0;

        catalogue_lock(connection->catalogue);
        image = policy_spare_image(connection->catalogue, connection->session, &spare->left_count);
        if (image) {
                before = image->owner_nonce;
                image->owner_nonce = connection->session->nonce; /* now, so that no other session gets it meanwhile */
                spare->image_id = image->id;
                spare->capacity_bytes = image->capacity;
                status = duplicate(connection->catalogue, image, &answer->fd, error);
        }
        if (image && status)
                image->owner_nonce = before;
        catalogue_unlock(connection->catalogue);
        answer->size = sizeof *spare;
        return status;
}

static enum nebula_status request_abandon(struct connection *connection, const void *payload, struct answer *answer,
                                          struct nebula_error *error)
{
        const struct ipc_abandon *abandon = payload;
        struct version *version;
        struct image_loan *loan;

        catalogue_lock(connection->catalogue);
        version = catalogue_version_of_image(connection->catalogue, abandon->image_id, &loan);
        if (version && loan->nonce == connection->session->nonce)
                version_fail(connection->catalogue, version, NEBULA_FAILED, "\"%.100s\" could not be copied: %.350s", loan->name,
                             abandon->reason);
        catalogue_unlock(connection->catalogue);
        return NEBULA_OK;
}

struct version *session_version(struct connection *connection, uint64_t id, struct nebula_error *error)
{
        struct version *version = catalogue_version(connection->catalogue, id);

        if (!version)
                error_set(error, NEBULA_NOT_FOUND, 0, "the agent does not know this checkpoint any more: look it up again");
        return version;
}

static enum nebula_status request_commit(struct connection *connection, const void *payload, struct answer *answer,
                                         struct nebula_error *error)
{
        const struct ipc_commit *request = payload;
        struct version *version;
        enum nebula_status status = NEBULA_NOT_FOUND;

        catalogue_lock(connection->catalogue);
        version = session_version(connection, request->version_id, error);
        if (version && version->job != connection->session->job)
                status = error_set(error, NEBULA_INVALID, 0, "checkpoint \"%.200s\" belongs to another job", version->tag);
        else if (version)
                status = (request->has_saved ? commit_part : commit_nothing)(connection->catalogue, connection->session, version, error);
        catalogue_unlock(connection->catalogue);
        return status;
}

static enum nebula_status request_fail(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error)
{
        const struct ipc_fail *request = payload;
        struct version *version;
        enum nebula_status status = NEBULA_OK;

        catalogue_lock(connection->catalogue);
        version = session_version(connection, request->version_id, error);
        if (!version) {
                status = NEBULA_NOT_FOUND;
        } else if (version_open(version)) {
                version_fail(connection->catalogue, version, NEBULA_FAILED, "%s", request->reason);
                world_give_up(connection->catalogue, version);
        } else if (version->life.state != NEBULA_STATE_FAILED) {
                status = error_set(error, NEBULA_INVALID, 0, "checkpoint \"%.300s\" is complete and cannot be marked as failed", version->tag);
        }
        catalogue_unlock(connection->catalogue);
        return status;
}

static enum nebula_status request_state(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        const struct ipc_version *request = payload;
        struct version *version;

        catalogue_lock(connection->catalogue);
        version = session_version(connection, request->version_id, error);
        if (version)
                answer->body.state.state = (uint32_t)(version->is_gone ? NEBULA_STATE_FAILED : version->life.state);
        catalogue_unlock(connection->catalogue);
        answer->size = sizeof answer->body.state;
        return version ? NEBULA_OK : NEBULA_NOT_FOUND;
}

/* Records that this run continues from the version that it loads. */
static void note_read(struct connection *connection, uint64_t version_id, enum ipc_source source)
{
        const struct version *version;

        catalogue_lock(connection->catalogue);
        version = catalogue_version(connection->catalogue, version_id);
        if (version && connection->session->role == IPC_ROLE_TRAINER)
                lineage_read(connection->session, version, source);
        if (version && version->job == connection->session->job && strcmp(version->run, connection->session->run))
                ancestry_follow(connection->session, version->run, version->sequence);
        catalogue_unlock(connection->catalogue);
}

static enum nebula_status request_open(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error)
{
        const struct ipc_open *request = payload;
        struct ipc_opened *opened = NULL;
        enum nebula_status status = restore_open(connection->catalogue, connection->session, payload, &opened, &answer->fd, error);

        if (!status) {
                answer->data = answer->text = (char *)opened;
                answer->size = sizeof *opened + (opened->image_id ? 0 : opened->chunk_count) * sizeof opened->crc64[0];
                note_read(connection, request->version_id, (enum ipc_source)opened->source);
        }
        return status;
}

static enum nebula_status request_fetch(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        (void)answer;
        return restore_fetch(connection->catalogue, payload, error);
}

static enum nebula_status take_text(struct answer *answer, struct nebula_error *error)
{
        answer->data = answer->text;
        answer->size = strlen(answer->text);
        answer->is_text = true;
        if (answer->size > IPC_REPORT_MAX)
                return error_set(error, NEBULA_INVALID, 0, "the report is too long (%zu bytes)", answer->size);
        return NEBULA_OK;
}

static enum nebula_status request_report(struct connection *connection, const void *payload, struct answer *answer,
                                         struct nebula_error *error)
{
        const struct ipc_report *request = payload;
        char path[IPC_PATH_MAX];
        enum nebula_status status;

        strcpy(path, request->persist_path);
        location_resolve(connection->catalogue, path);
        status = report_text(connection->catalogue, connection->session, (enum nebula_report)request->report, path, &answer->text, error);

        return status ? status : take_text(answer, error);
}

static enum nebula_status request_describe(struct connection *connection, const void *payload, struct answer *answer,
                                           struct nebula_error *error)
{
        const struct ipc_version *request = payload;
        enum nebula_status status = report_version(connection->catalogue, request->version_id, &answer->text, error);

        return status ? status : take_text(answer, error);
}

static enum nebula_status request_records(struct connection *connection, const void *payload, struct answer *answer, struct nebula_error *error)
{
        const struct ipc_version *request = payload;
        enum nebula_status status = records_report(connection->catalogue, request->version_id, &answer->text, error);

        return status ? status : take_text(answer, error);
}

static enum nebula_status request_publish(struct connection *connection, const void *payload, struct answer *answer,
                                          struct nebula_error *error)
{
        struct ipc_publish *request = malloc(sizeof *request); /* too large for a thread's stack */
        struct version *version;
        enum nebula_status status = NEBULA_NOT_FOUND;

        if (!request)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a request");
        memcpy(request, payload, sizeof *request);
        if (!(status = publish_check_path(request->path, error)) && *request->staging)
                status = publish_check_path(request->staging, error);
        if (status)
                goto done;
        location_resolve_parent(connection->catalogue, request->path);
        location_resolve_parent(connection->catalogue, request->staging);
        catalogue_lock(connection->catalogue);
        version = session_version(connection, request->version_id, error);
        if (version)
                status = publish_request(connection->catalogue, version, request, error);
        catalogue_unlock(connection->catalogue);
done:
        free(request);
        return status;
}

static enum nebula_status request_unpublish(struct connection *connection, const void *payload, struct answer *answer,
                                            struct nebula_error *error)
{
        const struct ipc_path *request = payload;
        char path[IPC_PATH_MAX];
        enum nebula_status status = publish_check_path(request->path, error);

        if (status)
                return status;
        strcpy(path, request->path);
        location_resolve_parent(connection->catalogue, path);
        catalogue_lock(connection->catalogue);
        status = publish_remove(connection->catalogue, connection->session->job, path, error);
        catalogue_unlock(connection->catalogue);
        return status;
}

static const struct {
        request_run *run;
        bool is_quick; /* does not block, or sets answer.is_slow or answer.is_later instead */
        bool is_of_storage; /* the answer depends on the content of storage */
        bool is_reading;    /* changes nothing: a reader may ask */
} requests[] = {
        [IPC_HELLO] = { request_hello, false, false, true }, [IPC_CONFIGURE] = { request_configure, false, false, true },
        [IPC_BEGIN] = { request_begin, true },        [IPC_IMAGE] = { request_image, true },
        [IPC_CAPTURED] = { request_captured, true },  [IPC_COPIED] = { request_copied, true },
        [IPC_ABANDON] = { request_abandon, true },    [IPC_COMMIT] = { request_commit, true },
        [IPC_FAIL] = { request_fail, true },          [IPC_WAIT] = { request_wait, true, false, true },
        [IPC_STATE] = { request_state, true, false, true }, [IPC_FIND] = { request_find, false, true, true },
        [IPC_OPEN] = { request_open, false, true, true }, [IPC_FLUSH] = { request_flush, false },
        [IPC_REPORT] = { request_report, false, true, true }, [IPC_DESCRIBE] = { request_describe, false, true, true },
        [IPC_STOP] = { request_stop, false },         [IPC_PUBLISH] = { request_publish, false },
        [IPC_UNPUBLISH] = { request_unpublish, false }, [IPC_FIND_PATH] = { request_find_path, false, false, true },
        [IPC_WATCH] = { request_watch, false, false, true }, [IPC_PREPARE] = { request_prepare, true },
        [IPC_FETCH] = { request_fetch, false, false, true }, [IPC_SPARE] = { request_spare, true },
        [IPC_KEEP] = { request_keep, false },         [IPC_COMPARED] = { request_compared, true },
        [IPC_RECORDS] = { request_records, false, false, true },
};

/* Clears only the bytes that are sent: the largest answer takes kilobytes, most take none. */
static void answer_init(struct answer *answer, enum ipc_type type)
{
        size_t size = ipc_answer_size(type);

        answer->data = &answer->body;
        answer->size = 0;
        answer->fd = -1;
        answer->text = NULL;
        answer->is_text = answer->is_later = answer->is_slow = false;
        answer->version_id = 0;
        memset(&answer->body, 0, size < sizeof answer->body ? size : sizeof answer->body);
}

/* Call after the answer was sent. */
static void end_as_reported(struct connection *connection)
{
        const struct ipc_stop *request = connection->frame.payload;
        struct catalogue *catalogue = connection->catalogue;

        catalogue_lock(catalogue);
        catalogue->dropping |= request->now != 0;
        catalogue_signal(catalogue); /* a signal may have asked for the end before, and the thread that saw it waits for storage */
        catalogue_unlock(catalogue);
        if (catalogue->end)
                catalogue->end(catalogue);
}

/* Serves the request in the frame. */
static enum session_step serve_one(struct connection *connection)
{
        enum ipc_type type = (enum ipc_type)connection->frame.header.type;
        struct nebula_error error = { 0 };
        struct answer answer;
        enum nebula_status status, sent;

        connection->has_request = false;
        status = ipc_request_check(&connection->frame, &error);
        if (status) {
                ipc_send_error(connection->fd, type, &error, 0, NULL);
                return SESSION_ENDED;
        }
        answer_init(&answer, type);
        if (connection->session && requests[type].is_of_storage)
                session_await_scan(connection);
        if (!connection->session && type != IPC_HELLO)
                status = error_set(&error, NEBULA_INVALID, 0, "the first request of a connection is HELLO");
        else if (connection->session && connection->session->role == IPC_ROLE_SPARE && type != IPC_CONFIGURE && type != IPC_REPORT)
                status = error_set(&error, NEBULA_INVALID, 0, "a spare node has no rank yet: it saves and loads when it takes part in the job");
        else if (connection->session && connection->session->role == IPC_ROLE_READER && !requests[type].is_reading)
                status = error_set(&error, NEBULA_INVALID, 0, "a reader saves, publishes and removes nothing: nebulaml.init() or nebulaml.Session() opens a session that does");
        else
                status = requests[type].run(connection, connection->frame.payload, &answer, &error);
        if (!status && answer.is_slow)
                connection->has_request = true;
        if (!status && (answer.is_slow || answer.is_later))
                return answer.is_slow ? SESSION_SLOW : SESSION_IDLE;
        if (status)
                sent = ipc_send_error(connection->fd, type, &error, answer.version_id, NULL);
        else if (answer.is_text)
                sent = ipc_send_text(connection->fd, type, answer.text, answer.size, NULL);
        else
                sent = ipc_send(connection->fd, type, NEBULA_OK, answer.size ? answer.data : NULL, answer.size, answer.fd, NULL);
        if (answer.fd >= 0)
                os->close(answer.fd);
        free(answer.text);
        if (type == IPC_IMAGE && !status)
                image_loan_record(connection->catalogue, answer.body.granted.version_id);
        if (type == IPC_STOP && !status)
                end_as_reported(connection);
        return sent || connection->catalogue->broken ? SESSION_ENDED : SESSION_IDLE;
}

/* Serves a request that is held as a whole. Its client may not read its answers, so sending may block. */
static enum session_step serve_held(struct connection *connection)
{
        if (ipc_receive_request(connection->fd, &connection->inbox, &connection->frame, NULL))
                return SESSION_ENDED;
        connection->has_request = true;
        if (!requests[connection->frame.header.type].is_quick || os->can_send(connection->fd) != 1)
                return SESSION_SLOW;
        return serve_one(connection);
}

enum session_step session_read(struct connection *connection, bool has_come)
{
        enum session_step step = has_come ? session_end_wait(connection) : SESSION_IDLE;
        enum ipc_held held;

        if (has_come && step == SESSION_IDLE && ipc_inbox_fill(connection->fd, &connection->inbox, NULL))
                step = SESSION_ENDED;
        while (step == SESSION_IDLE && (held = ipc_inbox_held(&connection->inbox)) != IPC_HELD_PART) {
                step = session_end_wait(connection);
                if (step == SESSION_IDLE)
                        step = held == IPC_HELD_LARGE ? SESSION_SLOW : serve_held(connection);
        }
        return step;
}

enum session_step session_serve(struct connection *connection)
{
        enum session_step step;

        session_await_answer(connection);
        if (!connection->has_request && ipc_receive_request(connection->fd, &connection->inbox, &connection->frame, NULL))
                return SESSION_ENDED;
        connection->may_wait = true;
        step = serve_one(connection);
        connection->may_wait = false;
        return step;
}

struct connection *session_open(struct catalogue *catalogue, int fd)
{
        struct connection *connection = calloc(1, sizeof *connection);

        if (!connection)
                return NULL;
        connection->catalogue = catalogue;
        connection->fd = fd;
        connection->frame.fd = -1;
        connection->look_ns = INT64_MAX;
        sem_init(&connection->answered, 0, 0);
        return connection;
}

void session_close(struct connection *connection)
{
        struct catalogue *catalogue = connection->catalogue;
        struct session *session = connection->session;

        if (session_end_wait(connection) == SESSION_SLOW)
                session_await_answer(connection);
        catalogue_lock(catalogue);
        if (session)
                catalogue_session_set(session, session->job, session->role, session->connection_count - 1);
        if (session && !session->connection_count) {
                session->left_ns = os->now_ns();
                catalogue_lease(catalogue, session, 0);
                catalogue_signal_job(catalogue, session->job);
        }
        catalogue_unlock(catalogue);
        ipc_frame_done(&connection->frame);
        sem_destroy(&connection->answered);
        free(connection);
}
