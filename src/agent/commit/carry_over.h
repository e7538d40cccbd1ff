/*
 * carry_over.h - adds to a tag that is written again the files of its previous writing
 * that the new one does not write, from memory or from storage.
 *
 * All functions need the catalogue's lock.
 */
#ifndef NB_AGENT_COMMIT_CARRY_OVER_H
#define NB_AGENT_COMMIT_CARRY_OVER_H

#include "agent/catalogue/catalogue.h"

/* Adds to a version the files of the newest whole writing before it that it did not write, from memory or storage. */
void carry_over(struct version *version);
/* Whether this node knows of no other version of the tag. */
bool carry_over_is_first(const struct version *version);
/* Whether files of the tag's version in storage are still to be added, because a scan has to read its manifest first. */
bool carry_over_awaits(const struct version *version);
/* For versions that were committed before storage was known: adds files of the tag's version in storage. At the first scan it also
 * makes these versions newer than all stored ones. */
void carry_over_stored(struct catalogue *catalogue, struct job *job, bool is_first);
/* Gives a version the sequence of its manifest. If storage had a later version, that is larger than the one before. Then the versions after it
 * get still larger ones: their order stays. */
void carry_over_renumber(struct catalogue *catalogue, struct version *version, uint64_t sequence);

#endif
