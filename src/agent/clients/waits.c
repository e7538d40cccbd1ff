#include <inttypes.h>
#include <string.h>

#include "agent/clients/events.h"
#include "agent/clients/evictions.h"
#include "agent/clients/location.h"
#include "agent/clients/waits_private.h"
#include "agent/commit/commit.h"
#include "agent/commit/commit_rule.h"
#include "agent/commit/node_documents.h"
#include "agent/commit/world.h"
#include "agent/log.h"
#include "agent/peers/replica.h"
#include "agent/persist/due.h"
#include "agent/persist/progress.h"
#include "agent/publish/publish.h"
#include "base/error.h"
#include "os/os.h"

#define FIND_OPEN_NS 30000000000 /* an incomplete version fails long before this */
#define FIRST_SCAN_NS 2000000000 /* after that, each request compares the version that it needs with storage by itself */
#define MISSING_CURE \
        " (each rank is to commit, with or without files; if one rank alone saves, it gives init() world=1)"
#define WAIT_SLICE_MS 1000 /* pause between checks that the waiting client is still there */

enum nebula_status wait_durable_refused(const struct version *version, struct nebula_error *error)
{
        if (!version->job->persist_path[0])
                return error_set(error, NEBULA_INVALID, 0, "checkpoint \"%.200s\" cannot become durable: no persistent storage path is set",
                                 version->tag);
        if (version->is_remote)
                return error_set(error, NEBULA_FAILED, 0,
                                 "checkpoint \"%.200s\" is only in other nodes' memory, and this node does not make it durable",
                                 version->tag);
        if (version->superseded)
                return error_set(error, NEBULA_FAILED, 0,
                                 "checkpoint \"%.200s\" left memory for a newer one before it was due to be persisted", version->tag);
        return NEBULA_OK;
}

/* Why a version can never get a copy on another node; NEBULA_OK: it can. Asks for the copy. */
static enum nebula_status replica_refused(struct catalogue *catalogue, struct version *version, struct nebula_error *error)
{
        if (!version->job->settings.replica_count)
                return error_set(error, NEBULA_INVALID, 0, "this job asks for no copies in other nodes' memory (replica_count)");
        if (lifecycle_complete(version->life.state) && !version->in_memory)
                return error_set(error, NEBULA_FAILED, 0, "checkpoint \"%.200s\" left memory before a copy was made", version->tag);
        if (replica_want(version))
                catalogue_signal_job(catalogue, version->job);
        return NEBULA_OK;
}

enum nebula_status wait_timeout(const struct version *version, struct nebula_error *error)
{
        struct job_progress storage = job_progress(version->job);
        const char *trouble = replica_trouble(version);
        bool has_failed = version_progress(version).attempt;
        char missing[160];

        world_missing(version, missing, sizeof missing);
        if (missing[0])
                return error_set(error, NEBULA_TIMEOUT, 0, "checkpoint \"%.100s\" is %s; it %s" MISSING_CURE, version->tag,
                                 nebula_state_name(version->life.state), missing);
        if (version_open(version))
                return error_set(error, NEBULA_TIMEOUT, 0,
                                 "checkpoint \"%.100s\" is %s; it waits for a commit, for files that were announced, or for a "
                                 "copy in progress",
                                 version->tag, nebula_state_name(version->life.state));
        if (*trouble)
                return error_set(error, NEBULA_TIMEOUT, 0, "checkpoint \"%.100s\" is %s; it has no copy on another node: %.250s",
                                 version->tag, nebula_state_name(version->life.state), trouble);
        if (has_failed || storage.error->message[0])
                return error_set(error, NEBULA_TIMEOUT, 0, "checkpoint \"%.100s\" is %s; storage fails: %.350s", version->tag,
                                 nebula_state_name(version->life.state),
                                 has_failed ? version->error.message : storage.error->message);
        return error_set(error, NEBULA_TIMEOUT, 0, "checkpoint \"%.150s\" is %s%s%.250s", version->tag,
                         nebula_state_name(version->life.state), version->error.message[0] ? "; " : "", version->error.message);
}

bool wait_others_are_silent(const struct catalogue *catalogue, const struct version *version)
{
        return version_open(version) && version->is_spread && os->now_ns() - world_heard_ns(version) >= (int64_t)catalogue->give_up_s * SECOND_NS;
}

enum nebula_status wait_in_vain(const struct catalogue *catalogue, const struct version *version, struct nebula_error *error)
{
        enum nebula_status status = wait_timeout(version, error);

        error_prefix(error, "the agent gave up, because other nodes have sent nothing for %" PRIu64 " s", catalogue->give_up_s);
        return status;
}

static void want_durable(struct connection *connection, struct version *version)
{
        if (version->wanted)
                return;
        if (connection->has_asked)
                version->wanted = true;
        else
                due_want_now(version);
        connection->has_asked = true;
        catalogue_signal_job(connection->catalogue, version->job);
}

/* Checks the wait once. True: it is over, with *ret_status. Otherwise asks for what it waits for. */
static bool wait_over(struct connection *connection, enum nebula_status *ret_status, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        enum nebula_state state = (enum nebula_state)connection->wait.state;
        struct version *version = session_version(connection, connection->wait.version_id, error);
        bool is_publishing = version && state == NEBULA_STATE_DURABLE && version->stored && publish_waits(version);

        *ret_status = NEBULA_OK;
        if (!version)
                *ret_status = NEBULA_NOT_FOUND;
        else if (version->life.state == NEBULA_STATE_FAILED)
                *ret_status = version_failure(version, error);
        else if (!is_publishing && commit_rank_reached(version, connection->session, state)) {
                if (state == NEBULA_STATE_DURABLE)
                        *ret_status = publish_failure(version->job, version, error);
                return true;
        } else if (state == NEBULA_STATE_REPLICATED)
                *ret_status = replica_refused(catalogue, version, error);
        else if (state == NEBULA_STATE_DURABLE && !is_publishing)
                *ret_status = wait_durable_refused(version, error);
        if (!*ret_status && (catalogue->stopping || catalogue->broken))
                *ret_status = error_set(error, NEBULA_UNAVAILABLE, 0, "the agent is ending");
        if (!*ret_status && state == NEBULA_STATE_DURABLE)
                want_durable(connection, version);
        if (!*ret_status && wait_others_are_silent(catalogue, version))
                *ret_status = wait_in_vain(catalogue, version, error);
        return *ret_status != NEBULA_OK;
}

enum nebula_status wait_slice(struct connection *connection, pthread_cond_t *cond, int64_t until_ns, bool *ret_timeout, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        int64_t left_ms = until_ns == INT64_MAX ? WAIT_SLICE_MS : (until_ns - os->now_ns()) / 1000000;

        *ret_timeout = until_ns != INT64_MAX && left_ms <= 0;
        if (*ret_timeout)
                return NEBULA_OK;
        catalogue_wait(catalogue, cond, left_ms < WAIT_SLICE_MS ? left_ms : WAIT_SLICE_MS);
        if (catalogue->stopping || catalogue->broken)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the agent is ending");
        if (session_client_gone(connection))
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the client is gone");
        return NEBULA_OK;
}

int64_t wait_deadline(int64_t timeout_ms)
{
        return timeout_ms < 0 || timeout_ms > INT64_MAX / 2000000 ? INT64_MAX : os->now_ns() + timeout_ms * 1000000;
}

static void look_later(struct connection *connection)
{
        int64_t slice_ns = os->now_ns() + (int64_t)WAIT_SLICE_MS * 1000000;

        connection->look_ns = connection->wait_until_ns < slice_ns ? connection->wait_until_ns : slice_ns;
}

static bool waiter_is_over(struct waiter *waiter)
{
        struct connection *connection = (struct connection *)waiter;

        if (!wait_over(connection, &connection->wait_status, &connection->wait_error))
                return false;
        connection->is_waiting = false;
        return true;
}

static void send_wait_answer(struct connection *connection)
{
        if (connection->wait_status)
                ipc_send_error(connection->fd, IPC_WAIT, &connection->wait_error, 0, NULL);
        else
                ipc_send(connection->fd, IPC_WAIT, NEBULA_OK, NULL, 0, -1, NULL);
}

/* Sends the answer. A failed send means that the connection has ended; the thread that reads it finds that too. */
static void waiter_report(struct waiter *waiter)
{
        struct connection *connection = (struct connection *)waiter;

        send_wait_answer(connection);
        sem_post(&connection->answered);
}

enum nebula_status request_wait(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error)
{
        const struct ipc_wait *request = payload;
        struct catalogue *catalogue = connection->catalogue;
        enum nebula_status status;

        if (request->state > NEBULA_STATE_DURABLE)
                return error_set(error, NEBULA_INVALID, 0, "there is no state %u to wait for", request->state);
        /* The thread that ends the wait sends the answer, and must not block. If may_wait is not set, this was checked before. */
        if (connection->may_wait && os->can_send(connection->fd) != 1)
                return error_set(error, NEBULA_INVALID, 0, "a client must read the answers to its earlier requests before it waits");
        catalogue_lock(catalogue);
        connection->wait = *request;
        connection->wait_until_ns = wait_deadline(request->timeout_ms);
        connection->has_asked = false;
        connection->is_waiting = connection->has_waited = answer->is_later = !wait_over(connection, &status, error);
        if (connection->is_waiting) {
                look_later(connection);
                connection->waiter.is_over = waiter_is_over;
                connection->waiter.notify = waiter_report;
                catalogue_await(catalogue, &connection->waiter, request->version_id, (enum nebula_state)request->state);
        }
        catalogue_unlock(catalogue);
        return status;
}

/* Call when its time is over or a check is due. True: answer the client here. */
static bool wait_slice_over(struct connection *connection)
{
        bool over = wait_over(connection, &connection->wait_status, &connection->wait_error);

        if (!over && os->now_ns() >= connection->wait_until_ns) {
                connection->wait_status = wait_timeout(catalogue_version(connection->catalogue, connection->wait.version_id),
                                                       &connection->wait_error);
                over = true;
        }
        if (over) {
                catalogue_forget_waiter(connection->catalogue, &connection->waiter);
                connection->is_waiting = false;
        }
        return over;
}

int64_t session_look_ns(const struct connection *connection)
{
        return connection->look_ns;
}

enum session_step session_look(struct connection *connection)
{
        struct catalogue *catalogue = connection->catalogue;
        bool is_over;

        catalogue_lock(catalogue);
        is_over = connection->is_waiting && wait_slice_over(connection);
        if (connection->is_waiting)
                look_later(connection);
        else
                connection->look_ns = INT64_MAX;
        catalogue_unlock(catalogue);
        if (is_over) {
                connection->has_waited = false;
                send_wait_answer(connection);
        }
        return catalogue->broken ? SESSION_ENDED : SESSION_IDLE;
}

enum session_step session_end_wait(struct connection *connection)
{
        struct catalogue *catalogue = connection->catalogue;
        bool was_waiting;

        if (!connection->has_waited)
                return SESSION_IDLE;
        catalogue_lock(catalogue);
        was_waiting = connection->is_waiting;
        if (was_waiting)
                catalogue_forget_waiter(catalogue, &connection->waiter);
        connection->is_waiting = false;
        catalogue_unlock(catalogue);
        connection->has_waited = !was_waiting && sem_trywait(&connection->answered);
        return was_waiting ? SESSION_ENDED : connection->has_waited ? SESSION_SLOW : SESSION_IDLE;
}

void session_await_answer(struct connection *connection)
{
        while (connection->has_waited && sem_wait(&connection->answered))
                ;
        connection->has_waited = false;
}

/* The first reason among the versions that are still pending; NULL: none is. */
static const struct nebula_error *failure_of(const struct catalogue *catalogue)
{
        const struct nebula_error *found = NULL;

        for (const struct job *job = catalogue->jobs; job; job = job->next) {
                if (!due_of(catalogue, job))
                        continue;
                for (const struct version *version = job->live; version && !found; version = version->next_live)
                        if (version_unsaved(version) && version->error.message[0])
                                found = &version->error;
                found = found ? found : job_progress(job).error;
        }
        return found;
}

enum nebula_status request_stop(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error)
{
        const struct ipc_stop *request = payload;
        struct catalogue *catalogue = connection->catalogue;
        int64_t since_ns = os->now_ns();
        enum nebula_status status = NEBULA_OK;
        bool timeout;

        catalogue_lock(catalogue);
        log_event(LOG_LEVEL_INFO, "%s", request->now ? "a request came to end at once" : "a request came to end");
        if (!request->now) {
                catalogue->draining++;
                due_want_all(catalogue, NULL);
                while (!status && due_draining(catalogue, since_ns))
                        status = wait_slice(connection, &catalogue->moved, INT64_MAX, &timeout, error);
                if (!status && due_any(catalogue)) {
                        const struct nebula_error *why = failure_of(catalogue);

                        status = error_set(error, why && why->status ? why->status : NEBULA_STORAGE, 0,
                                           "not everything could be persisted, the agent goes on: %.380s", why ? why->message : "");
                }
                if (status)
                        catalogue->draining--; /* a signal may ask for it, too */
        }
        catalogue_signal(catalogue);
        catalogue_unlock(catalogue);
        return status;
}

/* Whether the first scan of the job's storage is due or running: it may change which version is the newest. */
static bool first_scan_matters(const struct job *job)
{
        if (!job->persist_path[0] || job->is_scanned || !job->versions)
                return false;
        return job->scan_due ? !job_progress(job).attempt : job_progress(job).is_scanning;
}

void session_await_scan(struct connection *connection)
{
        struct catalogue *catalogue = connection->catalogue;
        int64_t until = os->now_ns() + FIRST_SCAN_NS;
        bool timeout = false;
        struct job *job;

        catalogue_lock(catalogue);
        job = connection->session->job;
        job->pins++; /* another connection may move the session to another job meanwhile */
        while (!timeout && first_scan_matters(job) && !wait_slice(connection, &catalogue->moved, until, &timeout, NULL))
                ;
        job->pins--;
        catalogue_unlock(catalogue);
}

static struct version *find_published(struct connection *connection, const char *path, const struct publish_look *look,
                                      char ret_name[IPC_NAME_MAX], bool *ret_open)
{
        struct catalogue *catalogue = connection->catalogue;
        struct job *own = connection->session->job;
        struct version *version = publish_find(catalogue, own, path, look, ret_name, ret_open);

        for (struct job *job = catalogue->jobs; job && !version && !*ret_open; job = job->next)
                if (job != own)
                        version = publish_find(catalogue, job, path, look, ret_name, ret_open);
        return version;
}

/* Waits for a version that is being captured: the client may have saved it just before. */
enum nebula_status request_find_path(struct connection *connection, const void *payload, struct answer *answer,
                                            struct nebula_error *error)
{
        const struct ipc_path *request = payload;
        struct ipc_found_path *found = &answer->body.found_path;
        char path[IPC_PATH_MAX];
        int64_t until = os->now_ns() + FIND_OPEN_NS;
        enum nebula_status status = NEBULA_OK;
        bool timeout = false, open = false;
        struct publish_look look;
        struct version *version;

        strcpy(path, request->path);
        location_resolve_parent(connection->catalogue, path);
        for (;;) {
                publish_look(path, &look);
                catalogue_lock(connection->catalogue);
                version = find_published(connection, path, &look, found->name, &open);
                if (version || !open || status || timeout)
                        break;
                status = wait_slice(connection, &connection->catalogue->moved, until, &timeout, error);
                catalogue_unlock(connection->catalogue);
        }
        if (version) {
                found->found = (struct ipc_found){ .version_id = version->id, .sequence = version->sequence,
                                                   .step = version->step, .state = (uint32_t)version->life.state };
                strcpy(found->found.tag, version->tag);
                status = NEBULA_OK;
        } else if (!status) {
                status = error_set(error, NEBULA_NOT_FOUND, 0, "no checkpoint was published as %.400s", request->path);
        }
        catalogue_unlock(connection->catalogue);
        answer->size = sizeof *found;
        return status;
}

/* Signalled at an event of the session's job. */
static pthread_cond_t *event_of(const struct connection *connection)
{
        return &connection->session->job->lane->event;
}

/* The next event of a cloud. The client's thread asks the cloud while the client waits. */
static enum nebula_status watch_cloud(struct connection *connection, const struct ipc_watch *request, struct answer *answer,
                                      struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        const struct evictions *evictions;
        int64_t until = wait_deadline(request->timeout_ms);
        enum nebula_status status;
        bool timeout = false;

        if (request->cloud >= NOTICE_CLOUDS)
                return error_set(error, NEBULA_INVALID, 0, "there is no cloud %u", request->cloud);
        catalogue_lock(catalogue);
        evictions = evictions_of(catalogue, (enum nebula_cloud)request->cloud);
        if (!evictions) {
                catalogue_unlock(catalogue);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to ask a cloud");
        }
        while (!(status = evictions_ask(catalogue, (enum nebula_cloud)request->cloud, error)) &&
               !evictions_event(evictions, request->since, &answer->body.event)) {
                if (os->now_ns() >= until)
                        status = error_set(error, NEBULA_TIMEOUT, 0, "no event has come");
                else
                        status = wait_slice(connection, event_of(connection), until < evictions->due_ns ? until : evictions->due_ns, &timeout, error);
                if (status)
                        break;
        }
        catalogue_unlock(catalogue);
        answer->size = sizeof answer->body.event;
        return status;
}

/* The next event for a program's own log. Does not ask for anything to happen. */
/* Lock held. */
static bool next_event(const struct connection *connection, const struct ipc_watch *request, struct ipc_event *ret_event)
{
        struct job *job = connection->session->job;

        if (connection->session->role == IPC_ROLE_READER)
                return event_next_for_reader(connection->catalogue, job->persist_path, request->since, ret_event);
        return event_next(connection->catalogue, job, request->since, ret_event);
}

enum nebula_status request_watch(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        const struct ipc_watch *request = payload;
        struct catalogue *catalogue = connection->catalogue;
        int64_t until = wait_deadline(request->timeout_ms);
        enum nebula_status status = NEBULA_OK;
        bool timeout = false;

        if (request->is_of_cloud)
                return watch_cloud(connection, request, answer, error);
        catalogue_lock(catalogue);
        while (!status && !next_event(connection, request, &answer->body.event)) {
                status = timeout ? error_set(error, NEBULA_TIMEOUT, 0, "no event has come") :
                                   wait_slice(connection, event_of(connection), until, &timeout, error);
        }
        catalogue_unlock(catalogue);
        answer->size = sizeof answer->body.event;
        return status;
}
