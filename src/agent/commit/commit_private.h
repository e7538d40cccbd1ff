/*
 * commit_private.h - declarations that the files behind commit.h share.
 *
 *      commit.c       the requests of a rank: begin, save, close its part
 *      commit_rule.c  when a version is complete
 *      commit_end.c   ranks that leave
 *
 * The lock is held.
 */
#ifndef NB_AGENT_COMMIT_COMMIT_PRIVATE_H
#define NB_AGENT_COMMIT_COMMIT_PRIVATE_H

#include "agent/commit/commit.h"


/* commit_end.c */
/* Fails a version that waits for a rank that left before it had begun the version. */
void commit_fail_without(struct catalogue *catalogue, struct version *version);

#endif
