#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit.h"
#include "agent/grant.h"
#include "agent/log.h"
#include "agent/publish.h"
#include "agent/report.h"
#include "agent/restore.h"
#include "agent/session.h"
#include "agent/worker.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"

#define FIND_OPEN_NS 30000000000 /* a version that nobody completes fails long before */
#define WAIT_SLICE_MS 1000 /* between looks at whether a waiting client is still there */

struct connection {
        struct catalogue *catalogue;
        int fd;
        struct session *session; /* NULL until HELLO */
        struct ipc_frame frame;
};
/* What a request answers when it succeeds; on_done frees it. */
struct answer {
        const void *data;
        size_t size;
        int fd; /* closed after sending; -1: none */
        char *text;
        union {
                struct ipc_welcome welcome;
                struct ipc_begun begun;
                struct ipc_granted granted;
                struct ipc_state state;
                struct ipc_found found;
                struct ipc_opened opened;
                struct ipc_found_path found_path;
        } body;
};

/* A client that waits sends nothing, so whatever can be read is its end. */
static bool client_gone(void *argument)
{
        const struct connection *connection = argument;

        return os->poll(connection->fd, 0) == 1;
}

static void strip_slashes(char *path)
{
        size_t length = strlen(path);

        while (length > 1 && path[length - 1] == '/')
                path[--length] = 0;
}

static enum nebula_status check_hello(const struct ipc_hello *hello, struct nebula_error *error)
{
        if (hello->version != IPC_VERSION)
                return error_set(error, NEBULA_INVALID, 0, "this agent speaks version %u and the client %u: end it with `nebula stop`",
                                 IPC_VERSION, hello->version);
        if (!hello->session_nonce)
                return error_set(error, NEBULA_INVALID, 0, "a session needs a nonce");
        if (hello->role == IPC_ROLE_TRAINER && (!hello->world || hello->world > WORLD_MAX || hello->rank >= hello->world))
                return error_set(error, NEBULA_INVALID, 0, "rank %u of world %u is impossible", hello->rank, hello->world);
        if (!(hello->persist_interval_s >= 0) || hello->persist_interval_s > 1e9)
                return error_set(error, NEBULA_INVALID, 0, "a persist interval is seconds, 0 or more");
        return NEBULA_OK;
}

/* Two trainers that write one job's files would ruin each other's checkpoints. */
static enum nebula_status check_rival(struct catalogue *catalogue, const struct job *job, const struct ipc_hello *hello,
                                      struct nebula_error *error)
{
        for (struct session *other = catalogue->sessions; other; other = other->next) {
                if (other->job != job || other->role != IPC_ROLE_TRAINER || other->rank != hello->rank ||
                    other->nonce == hello->session_nonce || other->pid == hello->pid)
                        continue;
                if (other->connection_count && os->alive(other->pid))
                        return error_set(error, NEBULA_INVALID, 0,
                                         "process %u already is rank %u of job \"%.60s\" in %.120s, and process %u wants to be it "
                                         "too: end one of them, or give one a `job` name of its own", other->pid, other->rank,
                                         job->name, job->persist_path[0] ? job->persist_path : "memory", hello->pid);
        }
        return NEBULA_OK;
}

/* Sessions of this rank that have no connection any more make way at once. */
static void replace_gone(struct catalogue *catalogue, const struct job *job, const struct ipc_hello *hello)
{
        for (struct session *other = catalogue->sessions; other; other = other->next)
                if (other->job == job && other->role == IPC_ROLE_TRAINER && other->rank == hello->rank &&
                    other->nonce != hello->session_nonce && !other->connection_count) {
                        other->left_ns = INT64_MIN / 2; /* the worker's grace for it is over */
                        commit_session_ended(catalogue, other);
                }
}

static void apply_settings(struct catalogue *catalogue, struct job *job, const struct ipc_hello *hello)
{
        strcpy(job->output_dir, hello->output_dir);
        strcpy(job->run, hello->run);
        job->persist_interval_s = hello->persist_interval_s;
        job->retention_count = hello->retention_count ? hello->retention_count : 1;
        job->keep_last = hello->keep_last;
        job->keep_every = hello->keep_every;
        job->on_full = hello->on_full;
        job->replica_count = hello->replica_count;
        job->world = hello->world;
        job->local_world = hello->local_world;
        job->history_broken = false;
        if (job->persist_path[0] && !job->scanned)
                job->scan_due = true;
        if (hello->memory_bytes)
                memory_configure(&catalogue->memory, hello->memory_bytes);
}

static struct session *session_get(struct catalogue *catalogue, const struct ipc_hello *hello)
{
        struct session *session = catalogue_session(catalogue, hello->session_nonce);

        if (session)
                return session;
        session = calloc(1, sizeof *session);
        if (!session)
                return NULL;
        session->nonce = hello->session_nonce;
        session->since = catalogue_now();
        session->next = catalogue->sessions;
        catalogue->sessions = session;
        return session;
}

static enum nebula_status enter(struct connection *connection, struct ipc_hello *hello, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        struct session *session, before;
        struct job *job;
        enum nebula_status status = check_hello(hello, error);

        if (status)
                return status;
        strip_slashes(hello->persist_path);
        job = catalogue_job_get(catalogue, hello->persist_path, hello->job);
        if (!job)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a job");
        if (hello->role == IPC_ROLE_TRAINER) {
                status = check_rival(catalogue, job, hello, error);
                if (status)
                        return status;
                replace_gone(catalogue, job, hello);
        }
        session = connection->session ? connection->session : session_get(catalogue, hello);
        if (!session)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a session");
        before = *session;
        session->job = job;
        if (before.job && before.job != job && before.role == IPC_ROLE_TRAINER)
                commit_session_ended(catalogue, &before); /* a new path or name: what was open there closes */
        session->pid = hello->pid;
        session->rank = hello->rank;
        session->world = hello->world;
        session->role = hello->role;
        if (!connection->session)
                session->connection_count++;
        connection->session = session;
        if (hello->role == IPC_ROLE_TRAINER)
                apply_settings(catalogue, job, hello);
        catalogue_signal(catalogue);
        return NEBULA_OK;
}

static enum nebula_status request_hello(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        struct ipc_hello *hello = malloc(sizeof *hello); /* large for a thread's stack */
        bool known;
        enum nebula_status status;

        if (!hello)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a session");
        memcpy(hello, payload, sizeof *hello);
        catalogue_lock(catalogue);
        known = catalogue_session(catalogue, hello->session_nonce) != NULL;
        status = enter(connection, hello, error);
        catalogue_unlock(catalogue);
        if (!status && !known && hello->role == IPC_ROLE_TRAINER)
                log_event(LOG_LEVEL_INFO, "rank %u of %u (process %u) has joined job \"%s\", storage %s", hello->rank, hello->world, hello->pid,
                         hello->job, hello->persist_path[0] ? hello->persist_path : "none");
        free(hello);
        answer->body.welcome = (struct ipc_welcome){ catalogue->agent_nonce, os->pid(), IPC_VERSION };
        answer->size = sizeof answer->body.welcome;
        return status;
}

static enum nebula_status request_configure(struct connection *connection, const void *payload, struct answer *answer,
                                            struct nebula_error *error)
{
        enum nebula_status status = request_hello(connection, payload, answer, error);

        answer->size = 0;
        return status;
}

static enum nebula_status request_begin(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        const struct ipc_begin *begin = payload;
        struct version *version;
        char encoded[256];
        enum nebula_status status = name_encode(begin->tag, encoded, error);

        if (status)
                return status;
        if (begin->file_count < NEBULA_FILES_ALL_RANKS || !begin->file_count)
                return error_set(error, NEBULA_INVALID, 0, "checkpoint \"%s\" cannot have %" PRId64 " files", begin->tag,
                                 begin->file_count);
        catalogue_lock(connection->catalogue);
        version = commit_begin(connection->catalogue, connection->session, begin->tag, begin->file_count, error);
        if (version)
                answer->body.begun.version_id = version->id;
        catalogue_unlock(connection->catalogue);
        answer->size = sizeof answer->body.begun;
        return version ? NEBULA_OK : error->status;
}

static void list_live(const struct catalogue *catalogue, const struct session *session, struct ipc_granted *granted)
{
        for (const struct image *image = catalogue->memory.images; image && granted->live_count < IPC_LIVE_MAX; image = image->next)
                if (image->owner_nonce == session->nonce)
                        granted->live_ids[granted->live_count++] = image->id;
}

static enum nebula_status request_image(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        struct ipc_granted *granted = &answer->body.granted;
        struct version *version;
        struct grant *grant;
        enum nebula_status status;

        catalogue_lock(catalogue);
        status = grant_image(catalogue, connection->session, payload, client_gone, connection, &version, &grant, error);
        if (!status) {
                granted->image_id = grant->image->id;
                granted->version_id = version->id;
                granted->capacity_bytes = grant->image->capacity;
                list_live(catalogue, connection->session, granted);
                /* A duplicate, for the image may be given up before the answer is sent. */
                status = memory_duplicate(&catalogue->memory, grant->image, &answer->fd, error);
        }
        catalogue_unlock(catalogue);
        answer->size = sizeof *granted;
        return status;
}

static enum nebula_status request_captured(struct connection *connection, const void *payload, struct answer *answer,
                                           struct nebula_error *error)
{
        const struct ipc_captured *captured = payload;
        struct version *version;
        struct grant *grant;
        enum nebula_status status;

        catalogue_lock(connection->catalogue);
        version = catalogue_version_of_image(connection->catalogue, captured->image_id, &grant);
        if (version && grant->nonce == connection->session->nonce)
                status = commit_captured(connection->catalogue, version, grant, captured, error);
        else
                status = error_set(error, NEBULA_NOT_FOUND, 0, "the agent does not hold this image any more: save the file again");
        catalogue_unlock(connection->catalogue);
        return status;
}

static enum nebula_status request_abandon(struct connection *connection, const void *payload, struct answer *answer,
                                          struct nebula_error *error)
{
        const struct ipc_abandon *abandon = payload;
        struct version *version;
        struct grant *grant;

        catalogue_lock(connection->catalogue);
        version = catalogue_version_of_image(connection->catalogue, abandon->image_id, &grant);
        if (version && grant->nonce == connection->session->nonce)
                version_fail(connection->catalogue, version, NEBULA_FAILED, "\"%.100s\" could not be copied: %.350s", grant->name,
                             abandon->reason);
        catalogue_unlock(connection->catalogue);
        return NEBULA_OK;
}

static struct version *known_version(struct connection *connection, uint64_t id, struct nebula_error *error)
{
        struct version *version = catalogue_version(connection->catalogue, id);

        if (!version)
                error_set(error, NEBULA_NOT_FOUND, 0, "this checkpoint is not known to the agent any more: look it up again");
        return version;
}

static enum nebula_status request_commit(struct connection *connection, const void *payload, struct answer *answer,
                                         struct nebula_error *error)
{
        const struct ipc_version *request = payload;
        struct version *version;
        enum nebula_status status = NEBULA_NOT_FOUND;

        catalogue_lock(connection->catalogue);
        version = known_version(connection, request->version_id, error);
        if (version && version->job != connection->session->job)
                status = error_set(error, NEBULA_INVALID, 0, "checkpoint \"%.200s\" belongs to another job", version->tag);
        else if (version)
                status = commit_part(connection->catalogue, connection->session, version, error);
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
        version = known_version(connection, request->version_id, error);
        if (!version)
                status = NEBULA_NOT_FOUND;
        else if (commit_open(version))
                version_fail(connection->catalogue, version, NEBULA_FAILED, "%s", request->reason);
        else if (version->life.state != NEBULA_STATE_FAILED)
                status = error_set(error, NEBULA_INVALID, 0, "checkpoint \"%.300s\" is complete and stays", version->tag);
        catalogue_unlock(connection->catalogue);
        return status;
}

/* Why a version will never be durable as things stand; NEBULA_OK: it may be. */
static enum nebula_status durable_refused(const struct version *version, struct nebula_error *error)
{
        if (!version->job->persist_path[0])
                return error_set(error, NEBULA_INVALID, 0, "checkpoint \"%.200s\" cannot become durable: no persistent storage path is set",
                                 version->tag);
        if (version->superseded)
                return error_set(error, NEBULA_FAILED, 0,
                                 "checkpoint \"%.200s\" left memory for a newer one before it was due to be persisted", version->tag);
        return NEBULA_OK;
}

/* Likewise for a copy on another node. Asks for one. */
static enum nebula_status replica_refused(struct catalogue *catalogue, struct version *version, struct nebula_error *error)
{
        if (!version->job->replica_count)
                return error_set(error, NEBULA_INVALID, 0, "no copies in other nodes' memory are asked for");
        if (lifecycle_complete(version->life.state) && !version->in_memory)
                return error_set(error, NEBULA_FAILED, 0, "checkpoint \"%.200s\" left memory before a copy was made", version->tag);
        if (!version->replica_wanted)
                catalogue_signal(catalogue);
        version->replica_wanted = true;
        return NEBULA_OK;
}

static enum nebula_status wait_timeout(const struct version *version, struct nebula_error *error)
{
        const struct job *job = version->job;

        if (version->replica_wanted && job->replica_error.message[0])
                return error_set(error, NEBULA_TIMEOUT, 0, "checkpoint \"%.100s\" is %s; it has no copy on another node: %.250s",
                                 version->tag, nebula_state_name(version->life.state), job->replica_error.message);
        return error_set(error, NEBULA_TIMEOUT, 0, "checkpoint \"%.150s\" is %s%s%.250s", version->tag,
                         nebula_state_name(version->life.state), job->store_error.message[0] ? "; storage fails: " : "",
                         job->store_error.message);
}

/* One look. True: the wait is over, with *ret_status. */
static bool wait_over(struct connection *connection, const struct ipc_wait *request, enum nebula_status *ret_status,
                      struct nebula_error *error)
{
        struct version *version = known_version(connection, request->version_id, error);

        *ret_status = NEBULA_OK;
        if (!version)
                *ret_status = NEBULA_NOT_FOUND;
        else if (version->life.state == NEBULA_STATE_FAILED)
                *ret_status = error_set(error, NEBULA_FAILED, 0, "checkpoint \"%.100s\" failed: %.380s", version->tag,
                                        version->error.message);
        else if (request->state == NEBULA_STATE_DURABLE && version->stored && publish_waits(version))
                return false;
        else if (commit_rank_reached(version, connection->session, (enum nebula_state)request->state)) {
                if (request->state == NEBULA_STATE_DURABLE)
                        *ret_status = publish_failure(version->job, version, error);
                return true;
        } else if (request->state == NEBULA_STATE_REPLICATED)
                *ret_status = replica_refused(connection->catalogue, version, error);
        else if (request->state == NEBULA_STATE_DURABLE)
                *ret_status = durable_refused(version, error);
        return *ret_status != NEBULA_OK;
}

/* Waits for a change. NEBULA_OK: look again. `left_ms` is lowered; < 0 means no limit. */
static enum nebula_status wait_slice(struct connection *connection, int64_t until_ns, bool *ret_timeout, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        int64_t left_ms = until_ns == INT64_MAX ? WAIT_SLICE_MS : (until_ns - os->now_ns()) / 1000000;

        *ret_timeout = until_ns != INT64_MAX && left_ms <= 0;
        if (*ret_timeout)
                return NEBULA_OK;
        os_cond_wait(&catalogue->moved, &catalogue->catalogue_lock, left_ms < WAIT_SLICE_MS ? left_ms : WAIT_SLICE_MS);
        if (catalogue->stopping || catalogue->broken)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the agent is ending");
        if (client_gone(connection))
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the client has gone");
        return NEBULA_OK;
}

static int64_t deadline(int64_t timeout_ms)
{
        return timeout_ms < 0 || timeout_ms > INT64_MAX / 2000000 ? INT64_MAX : os->now_ns() + timeout_ms * 1000000;
}

static enum nebula_status request_wait(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error)
{
        const struct ipc_wait *request = payload;
        struct catalogue *catalogue = connection->catalogue;
        int64_t until = deadline(request->timeout_ms);
        enum nebula_status status = NEBULA_OK;
        bool timeout = false, asked = false;

        if (request->state > NEBULA_STATE_DURABLE)
                return error_set(error, NEBULA_INVALID, 0, "there is no state %u to wait for", request->state);
        catalogue_lock(catalogue);
        while (!wait_over(connection, request, &status, error)) {
                struct version *version = catalogue_version(catalogue, request->version_id);

                if (request->state == NEBULA_STATE_DURABLE && !version->wanted) {
                        version->wanted = true;
                        if (!asked)
                                version->job->retry_at_ns = 0;
                        asked = true;
                        catalogue_signal(catalogue);
                }
                status = wait_slice(connection, until, &timeout, error);
                if (!status && timeout && !wait_over(connection, request, &status, error)) {
                        version = catalogue_version(catalogue, request->version_id);
                        status = wait_timeout(version, error);
                }
                if (status || timeout)
                        break;
        }
        catalogue_unlock(catalogue);
        return status;
}

static enum nebula_status request_state(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        const struct ipc_version *request = payload;
        struct version *version;

        catalogue_lock(connection->catalogue);
        version = known_version(connection, request->version_id, error);
        if (version)
                answer->body.state.state = (uint32_t)version->life.state;
        catalogue_unlock(connection->catalogue);
        answer->size = sizeof answer->body.state;
        return version ? NEBULA_OK : NEBULA_NOT_FOUND;
}

static enum nebula_status request_find(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error)
{
        struct ipc_find *find = malloc(sizeof *find);
        enum nebula_status status;

        if (!find)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a request");
        memcpy(find, payload, sizeof *find);
        strip_slashes(find->persist_path);
        status = restore_find(connection->catalogue, connection->session, find, &answer->body.found, error);
        free(find);
        answer->size = sizeof answer->body.found;
        return status;
}

static enum nebula_status request_open(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error)
{
        answer->size = sizeof answer->body.opened;
        return restore_open(connection->catalogue, connection->session, payload, &answer->body.opened, &answer->fd, error);
}

/* Whether this version is one that FLUSH answers for: only this rank's copying stands between it and completion. */
static bool flush_covers(const struct version *version, const struct session *session, const char *tag)
{
        const struct part *own = version_part((struct version *)version, session->rank);

        if (*tag && strcmp(tag, version->tag))
                return false;
        if (version->life.state == NEBULA_STATE_FAILED || version->superseded)
                return false;
        if (!commit_open(version))
                return (!version->stored && version->life.state != NEBULA_STATE_DURABLE) || publish_waits(version);
        if (*tag)
                return own != NULL;
        for (size_t i = 0; i < version->part_count; i++)
                if (!version->parts[i].closed)
                        return false;
        return own && (version->grants || version->file_goal == NEBULA_FILES_OPEN);
}

/* One look: asks for what is not durable. True when all is. */
static bool flush_done(struct connection *connection, const char *tag)
{
        struct job *job = connection->session->job;
        bool done = *tag || !publish_pending(connection->catalogue, job);

        for (struct version *version = job->versions; version; version = version->next)
                if (flush_covers(version, connection->session, tag)) {
                        done = false;
                        if (!version->wanted) {
                                version->wanted = true;
                                job->retry_at_ns = 0;
                                catalogue_signal(connection->catalogue);
                        }
                }
        return done;
}

/* The newest version of the tag, or of all when "": what became of it. */
static enum nebula_status flush_result(struct job *job, const char *tag, int64_t since_ns, struct nebula_error *error)
{
        for (const struct version *version = job->versions; version; version = version->next) {
                if (*tag && strcmp(tag, version->tag))
                        continue;
                if (version->life.state == NEBULA_STATE_FAILED && (*tag || (version->activity_ns >= since_ns &&
                                                                            lifecycle_at(&version->life, NEBULA_STATE_COMMITTED) > 0)))
                        return error_set(error, NEBULA_FAILED, 0, "checkpoint \"%.100s\" failed: %.380s", version->tag,
                                         version->error.message);
                if (*tag)
                        return version->stored ? publish_failure(job, version, error) : durable_refused(version, error);
        }
        return *tag ? error_set(error, NEBULA_NOT_FOUND, 0, "there is no checkpoint \"%s\" to flush", tag) :
                      publish_failure(job, NULL, error);
}

static enum nebula_status request_flush(struct connection *connection, const void *payload, struct answer *answer,
                                        struct nebula_error *error)
{
        const struct ipc_flush *request = payload;
        struct catalogue *catalogue = connection->catalogue;
        struct job *job;
        int64_t until = deadline(request->timeout_ms), since = os->now_ns();
        enum nebula_status status = NEBULA_OK;
        bool timeout = false;

        catalogue_lock(catalogue);
        job = connection->session->job;
        commit_close_open(catalogue, job, connection->session->rank, NULL);
        if (!job->persist_path[0]) {
                catalogue_unlock(catalogue);
                return *request->tag ? error_set(error, NEBULA_INVALID, 0, "nothing can be flushed: no persistent storage path is set") :
                                       NEBULA_OK;
        }
        while (!status && !timeout && !flush_done(connection, request->tag))
                status = wait_slice(connection, until, &timeout, error);
        if (!status && timeout && !flush_done(connection, request->tag))
                status = error_set(error, NEBULA_TIMEOUT, 0, "not everything is durable yet%s%.300s",
                                   job->store_error.message[0] ? "; storage fails: " : "", job->store_error.message);
        else if (!status)
                status = flush_result(job, request->tag, since, error);
        catalogue_unlock(catalogue);
        return status;
}

static enum nebula_status request_report(struct connection *connection, const void *payload, struct answer *answer,
                                         struct nebula_error *error)
{
        const struct ipc_report *request = payload;
        enum nebula_status status = report_text(connection->catalogue, connection->session, (enum nebula_report)request->report,
                                                request->persist_path, &answer->text, error);

        if (!status) {
                answer->data = answer->text;
                answer->size = strlen(answer->text);
                if (answer->size > IPC_PAYLOAD_MAX)
                        status = error_set(error, NEBULA_INVALID, 0, "the report is too long (%zu bytes)", answer->size);
        }
        return status;
}

static enum nebula_status request_describe(struct connection *connection, const void *payload, struct answer *answer,
                                           struct nebula_error *error)
{
        const struct ipc_version *request = payload;
        enum nebula_status status = report_version(connection->catalogue, request->version_id, &answer->text, error);

        if (!status) {
                answer->data = answer->text;
                answer->size = strlen(answer->text);
        }
        return status;
}

/* The first job whose storage fails; NULL: none does. */
static const struct job *failing_job(const struct catalogue *catalogue)
{
        for (const struct job *job = catalogue->jobs; job; job = job->next)
                if ((job->attempt || job->publish_attempt) && worker_pending(catalogue, job))
                        return job;
        return NULL;
}

static enum nebula_status request_stop(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error)
{
        const struct ipc_stop *request = payload;
        struct catalogue *catalogue = connection->catalogue;
        uint64_t failures = 0, failed = 0;
        enum nebula_status status = NEBULA_OK;
        bool timeout;

        catalogue_lock(catalogue);
        log_event(LOG_LEVEL_INFO, "%s", request->now ? "told to end at once" : "told to end");
        if (!request->now) {
                for (const struct job *job = catalogue->jobs; job; job = job->next)
                        failures += job->failure_count;
                catalogue->draining = true;
                worker_want_all(catalogue, NULL);
                while (!status && worker_pending(catalogue, NULL)) {
                        const struct job *job = failing_job(catalogue);

                        failed = 0;
                        for (const struct job *other = catalogue->jobs; other; other = other->next)
                                failed += other->failure_count;
                        if (job && failed > failures)
                                status = error_set(error, job->store_error.status ? job->store_error.status : NEBULA_STORAGE, 0,
                                                   "not everything could be persisted, the agent goes on: %.380s",
                                                   job->store_error.message);
                        else
                                status = wait_slice(connection, INT64_MAX, &timeout, error);
                }
                if (status)
                        catalogue->draining = false;
        }
        catalogue->dropping = request->now;
        catalogue_unlock(catalogue);
        return status;
}

static enum nebula_status request_publish(struct connection *connection, const void *payload, struct answer *answer,
                                          struct nebula_error *error)
{
        const struct ipc_publish *request = payload;
        struct version *version;
        enum nebula_status status = NEBULA_NOT_FOUND;

        catalogue_lock(connection->catalogue);
        version = known_version(connection, request->version_id, error);
        if (version)
                status = publish_request(connection->catalogue, version, request, error);
        catalogue_unlock(connection->catalogue);
        return status;
}

static enum nebula_status request_unpublish(struct connection *connection, const void *payload, struct answer *answer,
                                            struct nebula_error *error)
{
        const struct ipc_path *request = payload;
        enum nebula_status status;

        catalogue_lock(connection->catalogue);
        status = publish_remove(connection->catalogue, connection->session->job, request->path, error);
        catalogue_unlock(connection->catalogue);
        return status;
}

static struct version *find_published(struct connection *connection, const char *path, char ret_name[IPC_NAME_MAX],
                                      bool *ret_open)
{
        struct catalogue *catalogue = connection->catalogue;
        struct job *own = connection->session->job;
        struct version *version = publish_find(catalogue, own, path, ret_name, ret_open);

        for (struct job *job = catalogue->jobs; job && !version && !*ret_open; job = job->next)
                if (job != own)
                        version = publish_find(catalogue, job, path, ret_name, ret_open);
        return version;
}

/* A version that is just being captured is waited for: whoever asks may have saved it a moment ago. */
static enum nebula_status request_find_path(struct connection *connection, const void *payload, struct answer *answer,
                                            struct nebula_error *error)
{
        const struct ipc_path *request = payload;
        struct ipc_found_path *found = &answer->body.found_path;
        int64_t until = os->now_ns() + FIND_OPEN_NS;
        enum nebula_status status = NEBULA_OK;
        bool timeout = false, open = false;
        struct version *version;

        catalogue_lock(connection->catalogue);
        while (!(version = find_published(connection, request->path, found->name, &open)) && open && !status && !timeout)
                status = wait_slice(connection, until, &timeout, error);
        if (version) {
                found->found = (struct ipc_found){ .version_id = version->id, .generation = version->generation,
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

typedef enum nebula_status request_run(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error);

static request_run *const requests[] = {
        [IPC_HELLO] = request_hello,       [IPC_CONFIGURE] = request_configure, [IPC_BEGIN] = request_begin,
        [IPC_IMAGE] = request_image,       [IPC_CAPTURED] = request_captured,   [IPC_ABANDON] = request_abandon,
        [IPC_COMMIT] = request_commit,     [IPC_FAIL] = request_fail,           [IPC_WAIT] = request_wait,
        [IPC_STATE] = request_state,       [IPC_FIND] = request_find,           [IPC_OPEN] = request_open,
        [IPC_FLUSH] = request_flush,       [IPC_REPORT] = request_report,       [IPC_DESCRIBE] = request_describe,
        [IPC_STOP] = request_stop,
        [IPC_PUBLISH] = request_publish,   [IPC_UNPUBLISH] = request_unpublish, [IPC_FIND_PATH] = request_find_path,
};

/* False when the connection is of no more use. */
static bool serve_one(struct connection *connection)
{
        struct nebula_error error = { 0 };
        struct answer *answer = calloc(1, sizeof *answer);
        enum ipc_type type = (enum ipc_type)connection->frame.header.type;
        enum nebula_status status, sent;

        if (!answer)
                return false;
        answer->fd = -1;
        answer->data = &answer->body;
        status = ipc_request_check(&connection->frame, &error);
        if (status) {
                ipc_send_error(connection->fd, type, &error, NULL);
                free(answer);
                return false;
        }
        if (!connection->session && type != IPC_HELLO)
                status = error_set(&error, NEBULA_INVALID, 0, "the first request of a connection is HELLO");
        else
                status = requests[type](connection, connection->frame.payload, answer, &error);
        if (status)
                sent = ipc_send_error(connection->fd, type, &error, NULL);
        else
                sent = ipc_send(connection->fd, type, NEBULA_OK, answer->size ? answer->data : NULL, answer->size, answer->fd, NULL);
        if (answer->fd >= 0)
                os->close(answer->fd);
        free(answer->text);
        free(answer);
        if (type == IPC_STOP && !status && connection->catalogue->end)
                connection->catalogue->end(connection->catalogue);
        return !sent && !connection->catalogue->broken;
}

void session_serve(struct catalogue *catalogue, int fd)
{
        struct connection connection = { .catalogue = catalogue, .fd = fd, .frame = { .fd = -1 } };
        struct session *session;

        while (!ipc_receive(fd, &connection.frame, NULL) && serve_one(&connection))
                ;
        ipc_frame_done(&connection.frame);
        catalogue_lock(catalogue);
        session = connection.session;
        if (session && !--session->connection_count)
                session->left_ns = os->now_ns();
        catalogue_unlock(catalogue);
}
