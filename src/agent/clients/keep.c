/* Pins of one tag, and removals that a program asks for: both beside the rules. And what a program has found in storage. */
#include <string.h>

#include "agent/clients/session_private.h"
#include "agent/persist/retain.h"
#include "agent/persist/storage.h"
#include "base/error.h"
#include "store/pins.h"

/* The path's worker removes, as it does by the rules. */
static enum nebula_status remove_tag(struct catalogue *catalogue, struct job *job, const char *tag, struct nebula_error *error)
{
        struct asked_removal removal = { 0 };

        strcpy(removal.tag, tag);
        retain_ask(job, &removal);
        catalogue_signal_job(catalogue, job);
        while (!removal.is_done && (removal.is_taken || !catalogue->stopping))
                catalogue_wait(catalogue, &catalogue->moved, -1);
        if (removal.is_done) {
                *error = removal.error;
                return removal.status;
        }
        retain_unask(job, &removal);
        return error_set(error, NEBULA_UNAVAILABLE, 0, "the agent ends: \"%s\" is not removed", tag);
}

static enum nebula_status set_pin(struct catalogue *catalogue, struct job *job, const struct ipc_keep *request, struct nebula_error *error)
{
        struct store *store;
        enum nebula_status status;

        catalogue_create_as(job);
        catalogue_unlock(catalogue);
        status = storage_open(catalogue, job, &store, error);
        if (!status)
                status = request->what == IPC_KEEP_PIN ? pin_put(store, request->tag, request->reason, error) :
                                                         pin_remove(store, request->tag, NULL, error);
        catalogue_lock(catalogue);
        return status;
}

enum nebula_status request_keep(struct connection *connection, const void *payload, struct answer *answer, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        const struct ipc_keep *request = payload;
        struct job *job;
        enum nebula_status status;

        catalogue_lock(catalogue);
        job = connection->session->job;
        job->pins++;
        if (!job->persist_path[0])
                status = error_set(error, NEBULA_INVALID, 0, "this session has no storage path, and versions are pinned in storage and removed from it");
        else if (request->what > IPC_KEEP_REMOVE)
                status = error_set(error, NEBULA_INVALID, 0, "there is no request %u about what storage keeps", request->what);
        else
                status = request->what == IPC_KEEP_REMOVE ? remove_tag(catalogue, job, request->tag, error) : set_pin(catalogue, job, request, error);
        job->pins--;
        catalogue_unlock(catalogue);
        (void)answer;
        return status;
}

enum nebula_status request_compared(struct connection *connection, const void *payload, struct answer *answer, struct nebula_error *error)
{
        struct catalogue *catalogue = connection->catalogue;
        const struct ipc_compared *request = payload;

        catalogue_lock(catalogue);
        catalogue_judge_copies(catalogue, connection->session->job->persist_path, request->tag, request->sequence, request->is_whole,
                               "a program has compared its files with their checksums");
        catalogue_unlock(catalogue);
        (void)answer;
        (void)error;
        return NEBULA_OK;
}
