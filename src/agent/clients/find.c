/* FIND: the newest complete version, or that of a tag. */
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/memory_policy.h"
#include "agent/clients/location.h"
#include "agent/clients/waits_private.h"
#include "agent/commit/node_documents.h"
#include "agent/restore/passed_over.h"
#include "agent/restore/restore.h"
#include "base/error.h"
#include "os/os.h"
#include "store/place.h"

#define HEAR_NS (5 * SECOND_NS)  /* in less, the agents of several nodes learn of each other's commits */
#define COPY_NS (45 * SECOND_NS) /* a copy that takes longer hangs */

/* Whether this process has closed its part of the version, which is not complete yet. */
static bool is_undecided(const struct session *session, const struct version *version, const char *tag)
{
        const struct part *own = version_open(version) ? version_part((struct version *)version, session->rank) : NULL;

        return own && own->closed && own->pid == session->pid && !strcmp(version->run, session->run) && (!*tag || !strcmp(tag, version->tag));
}

/*
 * Whether a search that began then still waits for the version. The ranks of other nodes may have closed their parts, and this agent will hear of
 * it. Of the ranks of this node it knows: it waits only for their copies. An open-ended version is complete after a time without news, for which no
 * search waits.
 */
static bool may_be_complete(const struct version *version, int64_t begun_ns)
{
        int64_t waited_ns = os->now_ns() - begun_ns;
        char missing[160];

        if (version->file_goal == NEBULA_FILES_OPEN)
                return false;
        if (version->is_spread)
                return waited_ns < HEAR_NS;
        world_missing(version, missing, sizeof missing);
        return !*missing && waited_ns < COPY_NS;
}

/* The newest version of the search's path that is undecided for this process, and whether the search still waits for it; NULL: there is none. Lock
 * held. */
static struct version *undecided(const struct connection *connection, const struct ipc_find *find, int64_t begun_ns, bool waits)
{
        const struct session *session = connection->session;
        const char *path = *find->persist_path ? find->persist_path : session->job->persist_path;

        for (struct job *job = connection->catalogue->jobs; job; job = job->next)
                for (struct version *version = strcmp(job->persist_path, path) ? NULL : job->live; version; version = version->next_live)
                        if (is_undecided(session, version, find->tag) && may_be_complete(version, begun_ns) == waits)
                                return version;
        return NULL;
}

/*
 * Waits for the versions that this process has closed and others may have, too: ranks that search after the same saves get the same answer, however
 * far their agents are. *ret_left: the id of one for which it waits no longer; 0: there is none.
 */
static enum nebula_status await_own(struct connection *connection, const struct ipc_find *find, uint64_t *ret_left, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        enum nebula_status status = NEBULA_OK;
        const struct version *left;
        int64_t begun_ns = os->now_ns();
        bool timeout;

        catalogue_lock(catalogue);
        while (!status && undecided(connection, find, begun_ns, true))
                status = wait_slice(connection, &catalogue->moved, INT64_MAX, &timeout, error);
        left = undecided(connection, find, begun_ns, false);
        *ret_left = left ? left->id : 0;
        catalogue_unlock(catalogue);
        return status;
}

/* Names a version that is not complete and newer than the found one. Lock held. */
static void pass_over(const struct version *left, struct ipc_found *found)
{
        char missing[160];

        world_missing(left, missing, sizeof missing);
        passed_also(found, left->tag, *missing ? missing : "a rank still copies its files");
}

/* Searches again if the version that it had stopped waiting for has become complete meanwhile. */
static enum nebula_status find(struct connection *connection, const struct ipc_find *request, struct ipc_found *ret_found, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        enum nebula_status status;
        struct version *left;
        uint64_t left_id = 0;
        bool again;

        do {
                status = request->waits && connection->session->role == IPC_ROLE_TRAINER ? await_own(connection, request, &left_id, error) : NEBULA_OK;
                if (status)
                        return status;
                status = restore_find(catalogue, connection->session, request, ret_found, error);
                catalogue_lock(catalogue);
                left = left_id ? catalogue_version(catalogue, left_id) : NULL;
                again = left && lifecycle_complete(left->life.state);
                if (!status && left && version_open(left))
                        pass_over(left, ret_found);
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
