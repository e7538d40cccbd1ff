/* The greeting of a client: the session that it belongs to, its process, its job and its settings. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/clients/location.h"
#include "agent/clients/session_private.h"
#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/commit/commit_end.h"
#include "agent/log.h"
#include "agent/peers/replica.h"
#include "agent/persist/storage.h"
#include "agent/pulse/pulse.h"
#include "base/error.h"
#include "base/text.h"
#include "base/vars.h"
#include "os/os.h"
#include "store/place.h"
#include "store/store.h"
#include "store/thin.h"

#define RIVAL_GONE_NS 500000000 /* a connection that was just closed is not seen to be gone at once */

/* If no driver knows the path, the agent answers that at once, and not with each checkpoint that is never stored. Does
 * not look at the storage. */
static enum nebula_status check_path(const char *path, struct vars *variables, struct nebula_error *error)
{
        struct store *store;
        struct vars *before = vars_enter(variables ? variables : vars_now());
        enum nebula_status status = *path ? store_open(path, &store, error) : NEBULA_OK;

        vars_leave(before);
        if (*path && !status)
                store_close(store);
        return status;
}

static enum nebula_status check_hello(const struct ipc_hello *hello, struct vars *variables, struct nebula_error *error)
{
        struct thin_rules items;

        if (!hello->session_nonce)
                return error_set(error, NEBULA_INVALID, 0, "a session needs a nonce");
        if (hello->role == IPC_ROLE_TRAINER && (!hello->world || hello->world > WORLD_MAX || hello->rank >= hello->world))
                return error_set(error, NEBULA_INVALID, 0, "rank %u does not exist in a world of %u: give a rank from 0 to world - 1", hello->rank, hello->world);
        if (hello->replica_count > REPLICA_MAX)
                return error_set(error, NEBULA_INVALID, 0, "%u copies in other nodes' memory are too many: at most %d are possible",
                                 hello->replica_count, REPLICA_MAX);
        if (!(hello->persist_interval_s >= 0) || hello->persist_interval_s > 1e9)
                return error_set(error, NEBULA_INVALID, 0, "a persist interval of %.0f s is not allowed: give 0 to 10^9 s",
                                 hello->persist_interval_s);
        if (thin_parse(hello->keep_items, &items, error)) {
                error_prefix(error, "keep_items");
                return NEBULA_INVALID;
        }
        if (hello->keep_best_count && !text_is_utf8(hello->keep_best, strlen(hello->keep_best)))
                return error_set(error, NEBULA_INVALID, 0, "the metric of keep_best is not valid UTF-8");
        return check_path(hello->persist_path, variables, error);
}

static bool is_in_my_pid_namespace(uint32_t pid)
{
        char path[64], mine[64], theirs[64];

        snprintf(path, sizeof path, "/proc/%u/ns/pid", pid);
        return os->readlink("/proc/self/ns/pid", mine, sizeof mine) > 0 && os->readlink(path, theirs, sizeof theirs) > 0 && !strcmp(mine, theirs);
}

/* The client's pid as the agent sees it. A client in another pid namespace (a container) reports a pid that is
 * another process here, or none. For a child of the session's process, the greeting has the parent's pid. */
static uint32_t seen_pid(const struct connection *connection, const struct ipc_hello *hello)
{
        uint32_t uid, pid = 0;

        if (os->peer(connection->fd, &uid, &pid) < 0 || !pid || pid == hello->pid)
                return pid;
        return is_in_my_pid_namespace(pid) ? hello->pid : pid;
}

/* Refuses a second trainer that is the same rank of a job: both would overwrite each other's checkpoints. */
static enum nebula_status check_rival(const struct job *job, const struct ipc_hello *hello, uint32_t seen, struct nebula_error *error)
{
        for (const struct session *other = job->sessions; other; other = other->next) {
                if (other->role != IPC_ROLE_TRAINER || other->rank != hello->rank ||
                    IPC_NONCE_FAMILY(other->nonce) == IPC_NONCE_FAMILY(hello->session_nonce) ||
                    (seen && other->seen_pid == seen))
                        continue;
                if (other->connection_count && catalogue_may_live(other->seen_pid))
                        return error_set(error, NEBULA_INVALID, 0,
                                         "process %u already is rank %u of job \"%.60s\" in %.120s, and process %u wants to be "
                                         "the same rank: end one of the two, or give one a `job` name of its own", other->pid, other->rank,
                                         job->name, job->persist_path[0] ? job->persist_path : "memory", hello->pid);
        }
        return NEBULA_OK;
}

/* Ends the sessions of this rank that have no connection any more. */
static void replace_gone(struct catalogue *catalogue, const struct job *job, const struct ipc_hello *hello)
{
        for (struct session *other = job->sessions; other; other = other->next)
                if (other->role == IPC_ROLE_TRAINER && other->rank == hello->rank && other->nonce != hello->session_nonce && !other->connection_count) {
                        other->left_ns = INT64_MIN / 2; /* do not wait for it to come back */
                        commit_session_ended(catalogue, other);
                }
}

/* No trainer was here, or this rank has had another session: a person may have moved versions away meanwhile. The end of that session may not be
 * known yet. */
static bool comes_back(const struct session *session)
{
        bool was_here = false, any_here = false;

        for (const struct session *other = session->job->sessions; other; other = other->next) {
                if (other == session || other->role != IPC_ROLE_TRAINER)
                        continue;
                if (other->rank == session->rank && IPC_NONCE_FAMILY(other->nonce) != IPC_NONCE_FAMILY(session->nonce))
                        was_here = true;
                else
                        any_here = any_here || other->connection_count;
        }
        return was_here || !any_here;
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
        session->number = ++catalogue->session_number;
        return session;
}

static enum nebula_status enter(struct connection *connection, const struct ipc_hello *hello, const char *spelling, struct vars *variables,
                                struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        struct session *session, before;
        struct job *job;
        bool is_another, begins;
        uint32_t seen = seen_pid(connection, hello);
        enum nebula_status status = NEBULA_OK;

        job = catalogue_job_get(catalogue, hello->persist_path, hello->job);
        if (!job)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a job");
        if (hello->role == IPC_ROLE_TRAINER) {
                int64_t until = os->now_ns() + RIVAL_GONE_NS;

                job->pins++;
                while ((status = check_rival(job, hello, seen, error)) && os->now_ns() < until && !catalogue->stopping)
                        catalogue_wait(catalogue, &catalogue->moved, 20);
                job->pins--;
                if (status)
                        return status;
        }
        begins = hello->role == IPC_ROLE_TRAINER &&
                 ancestry_begins(catalogue, job, hello, catalogue_session(catalogue, hello->session_nonce) != NULL);
        session = connection->session ? connection->session : session_get(catalogue, hello);
        if (!session)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a session");
        before = *session;
        is_another = !connection->session && session->connection_count && before.job == job;
        catalogue_session_set(session, job, hello->role, session->connection_count + !connection->session);
        connection->session = session;
        if (before.job != job) {
                memset(&session->loaded, 0, sizeof session->loaded);
                session->given_way_reported = job->given_way_count;
        }
        if (before.job && before.job != job)
                before.job->last_guest = catalogue->session_number;
        if (before.job && before.job != job && before.role == IPC_ROLE_TRAINER)
                commit_session_ended(catalogue, &before); /* a new path or job: its part of the old one's open versions closes */
        if (session->pid != hello->pid || !session->seen_pid) /* otherwise the process is known, and this may be a forked child */
                session->seen_pid = seen;
        session->pid = hello->pid;
        session->rank = hello->rank;
        memcpy(session->run, hello->run, sizeof session->run);
        session->world = hello->world;
        session->has_begun |= !before.job && hello->has_begun; /* it reported that to an agent before this one */
        if (hello->role == IPC_ROLE_TRAINER) {
                replace_gone(catalogue, job, hello); /* this rank is here now, so versions wait for it again */
                commit_session_began(session);
        }
        if (begins)
                ancestry_begin(job, hello->run);
        if (hello->role == IPC_ROLE_TRAINER && !before.connection_count && comes_back(session))
                catalogue_job_ask_storage(job);
        catalogue->has_readers |= hello->role == IPC_ROLE_READER;
        if (hello->role == IPC_ROLE_READER && !job->trainer_count)
                storage_take_variables(job, variables); /* else those of the trainers stay */
        if (hello->role == IPC_ROLE_TRAINER && !is_another) {
                storage_take_variables(job, variables);
                catalogue_job_configure(catalogue, job, hello, spelling);
                session->rule = catalogue_rule(hello);
                catalogue_gather_rules(job);
        }
        if (hello->role == IPC_ROLE_SPARE && !is_another && !job->trainer_count) { /* else the trainers' settings stay */
                storage_take_variables(job, variables);
                catalogue_job_await(catalogue, job, hello, spelling);
        }
        if (!is_another) /* another connection of a known session, for a wait, changes nothing */
                catalogue_signal_job(catalogue, job);
        return NEBULA_OK;
}

/* The variables behind the greeting, whose bytes in the frame are overwritten. NULL: none, or no memory. */
static struct vars *take_variables(struct connection *connection, const struct ipc_hello *hello)
{
        char *text = (char *)connection->frame.payload + sizeof *hello, origin[160];
        size_t size = connection->frame.header.size - sizeof *hello;
        struct vars *variables = NULL;

        snprintf(origin, sizeof origin, "the agent, process %u, has the keys and settings that process %u (rank %u) brought", os->pid(), hello->pid, hello->rank);
        if (size && hello->role != IPC_ROLE_TOOL)
                variables = vars_new(text, size, origin);
        explicit_bzero(text, size);
        return variables;
}

enum nebula_status request_hello(struct connection *connection, const void *payload, struct answer *answer, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        const char *spelling = ((const struct ipc_hello *)payload)->persist_path;
        struct ipc_hello *hello = malloc(sizeof *hello); /* too large for a thread's stack */
        struct vars *variables;
        bool known;
        enum nebula_status status;
        int pulse;

        if (!hello)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a session");
        memcpy(hello, payload, sizeof *hello);
        if (hello->role == IPC_ROLE_TRAINER) /* the signature of a command may allow less */
                place_keep(hello->persist_path);
        location_resolve(catalogue, hello->persist_path);
        if (hello->persist_path[0] != '/')
                spelling = hello->persist_path; /* a URL is the same on all nodes */
        variables = take_variables(connection, hello);
        status = check_hello(hello, variables, error); /* a driver may read a file */
        pulse = status ? -1 : pulse_open(hello, seen_pid(connection, hello));
        catalogue_lock(catalogue);
        known = catalogue_session(catalogue, hello->session_nonce) != NULL;
        if (!status)
                status = enter(connection, hello, spelling, variables, error);
        if (!status)
                pulse_take(catalogue, connection->session, pulse);
        else if (pulse >= 0)
                os->close(pulse);
        catalogue_unlock(catalogue);
        if (!status && !known && hello->role == IPC_ROLE_TRAINER)
                log_event(LOG_LEVEL_INFO, "rank %u of %u (process %u) has joined job \"%s\", storage %s", hello->rank, hello->world, hello->pid,
                         hello->job, hello->persist_path[0] ? hello->persist_path : "none");
        if (!status && !known && hello->role == IPC_ROLE_SPARE)
                log_event(LOG_LEVEL_INFO, "this node waits as a spare of job \"%s\" (process %u), storage %s", hello->job, hello->pid,
                         hello->persist_path[0] ? hello->persist_path : "none");
        free(hello);
        vars_drop(variables);
        answer->body.welcome = (struct ipc_welcome){ catalogue->agent_nonce, os->pid(), IPC_VERSION };
        answer->size = sizeof answer->body.welcome;
        return status;
}

enum nebula_status request_configure(struct connection *connection, const void *payload, struct answer *answer, struct nebula_error *error)
{
        enum nebula_status status = request_hello(connection, payload, answer, error);

        answer->size = 0;
        return status;
}
