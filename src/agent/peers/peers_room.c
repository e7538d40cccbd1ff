#include "agent/catalogue/catalogue.h"
#include "agent/peers/slots_private.h"
#include "agent/rooms.h"

static void job_configured(const struct catalogue *catalogue, struct job *job)
{
        bool is_spare = catalogue_is_spare(job);

        job->is_served |= job->settings.replica_count > 0 || is_spare;
        job->lane->catalogue->serves_jobs |= job->is_served;
        job->copies->announce_due |= is_spare || job->trainer_count == 1;
}

const struct room peers_room = {
        .job_slots = { { offsetof(struct job, copies), sizeof(struct job_copies) } },
        .version_slots = { { offsetof(struct version, copies), sizeof(struct version_copies) } },
        .job_configured = job_configured,
};
