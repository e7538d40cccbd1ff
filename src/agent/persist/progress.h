/*
 * progress.h - how far versions are on their way to storage, for other rooms. The catalogue's lock is held.
 */
#ifndef NB_AGENT_PERSIST_PROGRESS_H
#define NB_AGENT_PERSIST_PROGRESS_H

#include "agent/catalogue/catalogue.h"
#include "agent/persist/unfinished.h"

struct version_progress {
        double seconds;         /* that the attempt took which made it durable */
        uint64_t bytes;         /* its size then */
        uint64_t written_bytes; /* that this agent has sent to storage for it */
        uint64_t moved_bytes;   /* that the running attempt, or the last one, has brought to storage */
        uint32_t attempt;       /* number of failed attempts */
        bool tried_ahead;       /* a write before it was complete was tried */
        bool recorded_here;     /* this node's records of it are in storage */
};
struct job_progress {
        bool is_busy, is_scanning; /* the worker is at work for the job; it lists what storage has */
        uint32_t attempt;          /* failed attempts since the last success, of any version */
        uint64_t failure_count;
        const struct nebula_error *error; /* of storage; status NEBULA_OK: it works */
        double error_at;
        int64_t failing_since_ns;         /* the first of those attempts; 0: none has failed */
        const char *damage;               /* of the versions that storage was found to have; "": none is damaged */
};

struct version_progress version_progress(const struct version *version);
struct job_progress job_progress(const struct job *job);
/* The worker begins or ends work of another room for the job. */
void progress_set_busy(struct job *job, bool is_busy);
/* Storage has answered another room's thread, or a version of several nodes could not be exchanged with the others. */
void progress_works(struct job *job);
void progress_failed(struct version *version, int64_t now_ns);

/* For the survival log. */
const struct unfinished *progress_uploads(const struct version *version);
/* The next attempt goes on with these uploads. Takes the list over. */
void progress_adopt(struct version *version, struct unfinished *uploads);

#endif
