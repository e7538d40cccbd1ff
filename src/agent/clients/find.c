/* FIND: the newest complete version, or that of a tag. */
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/clients/location.h"
#include "agent/clients/waits_private.h"
#include "agent/commit/node_documents.h"
#include "agent/commit/world.h"
#include "agent/restore/passed_over.h"
#include "agent/restore/restore.h"
#include "base/error.h"
#include "os/os.h"
#include "store/place.h"

#define HEAR_NS (5 * SECOND_NS) /* in less, the agents of several nodes learn of each other's commits */

/* Whether this process has closed its part, and other ranks or running copies decide whether the version becomes complete. On several nodes, an
 * open-ended one is complete after half a minute without news, for which no search waits. */
static bool is_undecided(const struct session *session, const struct version *version, const char *tag)
{
        bool ends = version_open(version) && !(version->is_spread && version->file_goal == NEBULA_FILES_OPEN);
        const struct part *own = ends ? version_part((struct version *)version, session->rank) : NULL;

        return own && own->closed && own->pid == session->pid && !strcmp(version->run, session->run) && (!*tag || !strcmp(tag, version->tag));
}

/* Whether a search that began then waits for the version no longer. Before, another node may take over its commit, or an open-ended version end. */
static bool is_silent(const struct catalogue *catalogue, const struct version *version, int64_t begun_ns)
{
        int64_t now_ns = os->now_ns();
        uint64_t limit_s = catalogue->takeover_s > catalogue->quiet_s ? catalogue->takeover_s : catalogue->quiet_s;
        int64_t heard_ns = version->is_spread ? world_heard_ns(version) : 0;

        if (heard_ns < version->activity_ns)
                heard_ns = version->activity_ns;
        if (version->is_spread && now_ns - begun_ns < HEAR_NS)
                return false;
        return now_ns - heard_ns >= (int64_t)limit_s * SECOND_NS * 3 / 2 || wait_others_are_silent(catalogue, version);
}

/* The newest version of the search's path that is undecided for this process, and silent or not; NULL: there is none. Lock held. */
static struct version *undecided(const struct connection *connection, const struct ipc_find *find, int64_t begun_ns, bool silent)
{
        const struct session *session = connection->session;
        const char *path = *find->persist_path ? find->persist_path : session->job->persist_path;

        for (struct job *job = connection->catalogue->jobs; job; job = job->next)
                for (struct version *version = strcmp(job->persist_path, path) ? NULL : job->live; version; version = version->next_live)
                        if (is_undecided(session, version, find->tag) && is_silent(connection->catalogue, version, begun_ns) == silent)
                                return version;
        return NULL;
}

/*
 * Waits for the versions that this process has closed: ranks that search after the same saves get the same answer, however far their agents are.
 * *ret_silent: the id of one for which it waits no longer; 0: there is none.
 */
static enum nebula_status await_own(struct connection *connection, const struct ipc_find *find, uint64_t *ret_silent, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        enum nebula_status status = NEBULA_OK;
        const struct version *silent;
        int64_t begun_ns = os->now_ns();
        bool timeout;

        catalogue_lock(catalogue);
        while (!status && undecided(connection, find, begun_ns, false))
                status = wait_slice(connection, &catalogue->moved, INT64_MAX, &timeout, error);
        silent = undecided(connection, find, begun_ns, true);
        *ret_silent = silent ? silent->id : 0;
        catalogue_unlock(catalogue);
        return status;
}

/* A version that is undecided may be newer than the found one, and makes NEBULA_NOT_FOUND no certain answer. Lock held. */
static enum nebula_status pass_over(const struct version *silent, enum nebula_status status, struct ipc_found *found, struct nebula_error *error)
{
        char missing[160];

        if (status == NEBULA_NOT_FOUND)
                return wait_timeout(silent, error);
        world_missing(silent, missing, sizeof missing);
        if (!status)
                passed_also(found, silent->tag, *missing ? missing : "a rank still copies its files");
        return status;
}

/* Searches again if the version that it had stopped waiting for has become complete meanwhile. */
static enum nebula_status find(struct connection *connection, const struct ipc_find *request, struct ipc_found *ret_found, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        enum nebula_status status;
        struct version *silent;
        uint64_t silent_id = 0;
        bool again;

        do {
                status = request->waits && connection->session->role == IPC_ROLE_TRAINER ? await_own(connection, request, &silent_id, error) : NEBULA_OK;
                if (status)
                        return status;
                status = restore_find(catalogue, connection->session, request, ret_found, error);
                catalogue_lock(catalogue);
                silent = silent_id ? catalogue_version(catalogue, silent_id) : NULL;
                again = silent && lifecycle_complete(silent->life.state);
                if (silent && version_open(silent))
                        status = pass_over(silent, status, ret_found, error);
                catalogue_unlock(catalogue);
        } while (again);
        return status;
}

enum nebula_status request_find(struct connection *connection, const void *payload, struct answer *answer, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        struct ipc_find *request = malloc(sizeof *request);
        enum nebula_status status;

        if (!request)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a request");
        memcpy(request, payload, sizeof *request);
        if (connection->session->role == IPC_ROLE_TRAINER)
                place_keep(request->persist_path);
        location_resolve(catalogue, request->persist_path);
        status = find(connection, request, &answer->body.found, error);
        free(request);
        if (!status) {
                catalogue_lock(catalogue);
                if (connection->session->role == IPC_ROLE_READER)
                        catalogue_lease(catalogue, connection->session, answer->body.found.version_id);
                else
                        policy_foresee(catalogue, connection->session, answer->body.found.version_id);
                catalogue_unlock(catalogue);
        }
        answer->size = sizeof answer->body.found;
        return status;
}
