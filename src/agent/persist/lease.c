/* Leases in storage of the versions that readers of this node hold, for the agents of other nodes that remove versions. */
#include "agent/persist/lease.h"

#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/persist/slots_private.h"
#include "agent/persist/storage.h"
#include "os/os.h"
#include "store/leases.h"

/* A lease that this agent has written, or is about to write. */
struct lease {
        struct lease *next;
        char tag[IPC_NAME_MAX];
        uint64_t id;
        int64_t due_ns;  /* 0: it was not written yet */
        bool is_written;
};

/* Whether readers hold the version, and another agent may remove it. One in the memory of peers may become durable any time. */
static bool is_leased(const struct job *job, const struct version *version)
{
        return version->leases && (version->stored || version->is_remote) && !version->is_gone && !job->is_remover && !job->storage->refuses_leases;
}

static bool is_wanted(const struct job *job, const char *tag)
{
        for (const struct version *version = job->versions; version; version = version->next)
                if (is_leased(job, version) && !strcmp(version->tag, tag))
                        return true;
        return false;
}

bool lease_pending(const struct job *job)
{
        bool is_so = job->storage->leases != NULL;

        for (const struct version *version = job->versions; version && !is_so; version = version->next)
                is_so = is_leased(job, version);
        return is_so;
}

static void add_new(struct job *job)
{
        for (const struct version *version = job->versions; version; version = version->next) {
                struct lease *lease = job->storage->leases;

                if (!is_leased(job, version))
                        continue;
                while (lease && strcmp(lease->tag, version->tag))
                        lease = lease->next;
                if (lease || !(lease = calloc(1, sizeof *lease)))
                        continue;
                os->random(&lease->id, sizeof lease->id);
                strcpy(lease->tag, version->tag);
                lease->next = job->storage->leases;
                job->storage->leases = lease;
        }
}

/* A reader that may not write to its storage goes without leases. Where it could write before, its key may have expired: it tries again. */
static void put_failed(struct job *job, const struct nebula_error *error)
{
        if (store_class(error) != STORE_NEVER || job->storage->has_taken_leases)
                return;
        job->storage->refuses_leases = true;
        log_event(LOG_LEVEL_INFO, "%s takes no leases, so agents of other nodes may remove what a reader of this node reads: %s", job->persist_path,
                  error->message);
}

/* Writes or drops one lease. Lock held; released meanwhile. `lease` was taken from the list. */
static void carry_out(struct catalogue *catalogue, struct job *job, struct lease *lease, bool is_put)
{
        struct nebula_error error = { 0 };
        struct store *store;
        enum nebula_status status;

        job->persist->is_busy = true;
        catalogue_unlock(catalogue);
        status = storage_open(catalogue, job, &store, &error);
        if (!status && is_put)
                status = lease_put(store, lease->tag, lease->id, &error);
        else if (!status)
                lease_drop(store, lease->tag, lease->id);
        catalogue_lock(catalogue);
        job->persist->is_busy = false;
        if (!is_put) {
                free(lease);
                return;
        }
        if (status)
                put_failed(job, &error);
        else
                job->storage->has_taken_leases = true;
        lease->is_written = lease->is_written || !status;
        lease->due_ns = os->now_ns() + LEASE_RENEW_NS / (status ? 8 : 1);
        lease->next = job->storage->leases;
        job->storage->leases = lease;
}

bool lease_work(struct catalogue *catalogue, struct job *job, int64_t now, int64_t *due)
{
        add_new(job);
        for (struct lease **link = &job->storage->leases; *link;) {
                struct lease *lease = *link;
                bool is_put = is_wanted(job, lease->tag);

                if (is_put && lease->due_ns > now) {
                        *due = lease->due_ns < *due ? lease->due_ns : *due;
                        link = &lease->next;
                        continue;
                }
                *link = lease->next;
                if (!is_put && !lease->is_written) {
                        free(lease);
                        continue;
                }
                carry_out(catalogue, job, lease, is_put);
                return true;
        }
        return false;
}

void lease_forget(struct job *job)
{
        for (struct lease *lease; (lease = job->storage->leases);) {
                job->storage->leases = lease->next;
                free(lease);
        }
}
