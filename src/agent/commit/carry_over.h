/*
 * carry_over.h - what a tag that is written again keeps of its writing before: the
 * files that the new one does not write, from memory or from storage.
 *
 * All functions need the catalogue's lock.
 */
#ifndef NB_AGENT_COMMIT_CARRY_OVER_H
#define NB_AGENT_COMMIT_CARRY_OVER_H

#include "agent/catalogue/catalogue.h"

/* What storage is known to have of a tag of this job; NULL: nothing. */
const struct manifest *carry_over_stored_manifest(const struct job *job, const char *tag);
/* Adds to a version what the newest whole generation before it holds, in memory or in storage. */
void carry_over(struct version *version);
/* Adds what an older generation in storage holds to versions that were committed before storage was known, and at the first
 * scan makes them newer than all that lies there. */
void carry_over_stored(struct catalogue *catalogue, struct job *job, bool is_first);

#endif
