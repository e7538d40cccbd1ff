/*
 * lineage.h - which line of history (line.h) a version belongs to.
 *
 * A version of a tag global_step<n> continues the line of the newest one, unless its job has gone back: it is of an
 * earlier step than the newest, and
 *
 *      its ranks have read a file of an older version since the newest was committed, or
 *      the newest is of another run, and they have not read a file of that one.
 *
 * Then a new line begins after the step that they have read. If that step is not known, it begins after the step before the
 * version's own. A run that only saves its own steps in another order, or reads an old step and saves later ones, does not go back.
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
