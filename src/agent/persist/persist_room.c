#include <jansson.h>
#include <stdlib.h>

#include "agent/persist/lease.h"
#include "agent/persist/slots_private.h"
#include "agent/persist/storage.h"
#include "agent/rooms.h"
#include "os/os.h"

static void job_begins(struct job *job)
{
        job->persist->last_start_ns = INT64_MIN;
}

static void job_configured(const struct catalogue *catalogue, struct job *job)
{
        (void)catalogue;
        if (job->scan_due && !job->storage->asked_ns)
                job->storage->asked_ns = os->now_ns();
}

static bool job_works(const struct job *job)
{
        return job->persist->is_busy || job->storage->ended.count;
}

static void job_ends(struct job *job)
{
        struct job_storage *storage = job->storage;

        json_decref(storage->metrics);
        lease_forget(job);
        free(storage->removed);
        for (size_t i = 0; i < storage->half_removed_count; i++)
                known_free(storage->half_removed[i]);
        free(storage->half_removed);
        unfinished_done(&storage->ended);
        storage_close(job);
}

static void version_leaves_memory(struct version *version)
{
        records_done(&version->persist->records);
        unfinished_move(&version->persist->unfinished, &version->job->storage->ended);
}

static void version_ends(struct version *version)
{
        records_done(&version->persist->records);
        unfinished_done(&version->persist->unfinished);
}

const struct room persist_room = {
        .job_slots = { { offsetof(struct job, storage), sizeof(struct job_storage) },
                       { offsetof(struct job, persist), sizeof(struct job_persist) } },
        .version_slots = { { offsetof(struct version, persist), sizeof(struct version_persist) } },
        .job_begins = job_begins,
        .job_configured = job_configured,
        .job_works = job_works,
        .job_ends = job_ends,
        .version_leaves_memory = version_leaves_memory,
        .version_ends = version_ends,
};
