#include "agent/catalogue/catalogue.h"
#include "agent/peers/slots_private.h"
#include "agent/rooms.h"

static void job_configured(const struct catalogue *catalogue, struct job *job)
{
        bool is_spare = catalogue_is_spare(catalogue, job);

        job->is_served |= job->settings.replica_count > 0 || is_spare;
        job->copies->announce_due |= is_spare || catalogue_session_count(catalogue, job) == 1;
}

const struct room peers_room = {
        .job_slots = { { offsetof(struct job, copies), sizeof(struct job_copies) } },
        .version_slots = { { offsetof(struct version, copies), sizeof(struct version_copies) } },
        .job_configured = job_configured,
};
