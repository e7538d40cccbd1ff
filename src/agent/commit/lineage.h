/*
 * lineage.h - which line of history (line.h) a version belongs to.
 *
 * A version of a tag global_step<n> continues the line of the newest one, unless its job has gone back: it is of an earlier step than the
 * newest. Then a new line begins after the step that its ranks have read. If that step is not known or is not smaller, the line begins
 * after the step before the version's own. Exceptions, unless the ranks have read a file of an older version since the newest was committed:
 *
 *      the run saves a tag that it has saved before, or
 *      it began the newest after this version: saves at the same time may be committed in any order.
 *
 * A run that has read the newest may also add files to an earlier version, which then keeps its other files.
 *
 * Called with the catalogue's lock held.
 */
#ifndef NB_AGENT_COMMIT_LINEAGE_H
#define NB_AGENT_COMMIT_LINEAGE_H

#include "agent/catalogue/catalogue.h"

/* Call when the session's rank has read a file of `version`. */
void lineage_read(struct session *session, const struct version *version, enum ipc_source source);
/* Call when the session's rank saves to `version` or closes its part. */
void lineage_save(struct version *version, const struct session *session);
/* The step that `version` would go back to if it were committed now; LINEAGE_GOES_ON: none. */
#define LINEAGE_GOES_ON INT64_MIN
int64_t lineage_goes_back(const struct version *version);
/* The line that `version` would have if it were committed with `sequence`. If it goes back to step `after`, a line begins with it. */
void lineage_find(const struct version *version, uint64_t sequence, int64_t after, struct line *ret_line);
/* Sets the line of a version that this node alone commits with `sequence`. */
void lineage_set(struct version *version, uint64_t sequence);

#endif
