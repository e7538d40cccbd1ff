#include <stdlib.h>

#include "agent/catalogue/catalogue.h"
#include "agent/commit/ancestry.h"
#include "agent/commit/coverage.h"
#include "agent/commit/slots_private.h"
#include "agent/commit/world.h"
#include "agent/rooms.h"

static void job_ends(struct job *job)
{
        ancestry_done(job);
        free(job->runs->gone);
}

static void version_begins(struct version *version)
{
        version->ancestry->beginning = version->job->runs->beginning;
        version->writing = world_next_writing(version->job, version->tag, version->run);
}

static void version_ends(struct version *version)
{
        free(version->nodes->covered);
        coverage_free(version->nodes->coverage);
        free(version->nodes->decided);
}

const struct room commit_room = {
        .job_slots = { { offsetof(struct job, runs), sizeof(struct job_runs) } },
        .version_slots = { { offsetof(struct version, ancestry), sizeof(struct version_ancestry) },
                           { offsetof(struct version, nodes), sizeof(struct version_nodes) } },
        .job_ends = job_ends,
        .version_begins = version_begins,
        .version_ends = version_ends,
};
