/*
 * commit_private.h - what the files of commit.h share.
 *
 *      commit.c       what a rank does: begin, save, close its part
 *      commit_rule.c  when a version is complete
 *      commit_end.c   ranks that leave
 *
 * The lock is held.
 */
#ifndef NB_AGENT_COMMIT_COMMIT_PRIVATE_H
#define NB_AGENT_COMMIT_COMMIT_PRIVATE_H

#include "agent/commit/commit.h"

/* commit.c */
/* A file that this rank is still copying; NULL: none. */
const struct image_loan *commit_loan_of(const struct version *version, uint32_t rank);
bool commit_rank_copies(const struct version *version, uint32_t rank);
/* Tells all when the version moves on, and notes what has changed, once: nobody has heard of it before the lock is given back. */
void commit_check_and_note(struct catalogue *catalogue, struct version *version);

/* commit_end.c */
/* Fails a version that waits for a rank which left before it had begun it. */
void commit_fail_without(struct catalogue *catalogue, struct version *version);

#endif
