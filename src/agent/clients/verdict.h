/*
 * verdict.h - one verdict on each job, for people: fine, at risk or broken; since when, why, and what to do.
 *
 *      broken    versions cannot become complete or durable, or some are damaged: a failure now costs more than the job expects; or the job hangs
 *      at risk   versions are complete, but slower or with fewer copies than the job asks for
 *
 * The verdict is computed here alone. `nebula status`, `nebula list`, `nebula metrics` and the studio print it. The agent's log has a line
 * when a trouble begins or gets worse, again after 1 min, 2 min, ... 1 h while it lasts, and one when it has ended.
 *
 * Call all functions with the catalogue's lock.
 */
#ifndef NB_AGENT_CLIENTS_VERDICT_H
#define NB_AGENT_CLIENTS_VERDICT_H

#include <jansson.h>

#include "agent/catalogue/catalogue.h"

enum verdict_state { VERDICT_FINE, VERDICT_AT_RISK, VERDICT_BROKEN };
enum verdict_kind {
        VERDICT_NONE, VERDICT_FAILED, VERDICT_LATE, VERDICT_DAMAGE, VERDICT_STORAGE, VERDICT_LAG, VERDICT_MEMORY, VERDICT_COPIES, VERDICT_RIVAL,
        VERDICT_HUNG, VERDICT_STALE,
};
struct job_verdict {
        enum verdict_state state;
        enum verdict_kind kind;
        double since; /* of the trouble, seconds since 1970 */
        char reason[768], cure[384];
        int64_t full_since_ns;       /* memory has no room for the next version; 0: it has */
        uint64_t saved_sequence;     /* of the newest complete version; 0: there was none */
        int64_t saved_step;          /* of the trainers when it was complete */
        int64_t usual_steps;         /* the most steps between two such versions; 0: not known */
        int64_t say_at_ns, pause_ns; /* when the log says it again, and how long after the last time */
};

/* Computes the verdict anew, and says in the log what has changed. */
void verdict_update(struct catalogue *catalogue, struct job *job);
/* {"state", "since", "reason", "cure"}; a job that is fine has no others than "state". */
json_t *verdict_json(const struct job *job);
/* Looks at all jobs. Returns when to look again if nothing changes. */
int64_t verdict_look(struct catalogue *catalogue, int64_t now_ns);

#endif
