#include <stdlib.h>

#include "agent/catalogue/catalogue.h"
#include "agent/clients/history.h"
#include "agent/clients/location.h"
#include "agent/clients/verdict.h"
#include "agent/rooms.h"

static void end(struct catalogue *catalogue)
{
        location_done(catalogue);
        free(catalogue->evictions);
}

const struct room clients_room = { .job_slots = { { offsetof(struct job, verdict), sizeof(struct job_verdict) },
                                                  { offsetof(struct job, location), sizeof(struct job_location) } },
                                   .job_begins = location_note, .job_works = history_pending, .catalogue_ends = end };
