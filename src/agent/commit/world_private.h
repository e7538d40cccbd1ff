/*
 * world_private.h - declarations that the files behind world.h share.
 *
 *      world.c            the rule: announce, look, commit
 *      node_documents.c   the documents by which nodes notify each other of a version
 *      coverage.c         which ranks these documents cover
 *      world_end.c        versions that no node completes or makes durable, and their remains
 *
 * Functions that take a version need the lock, unless a comment says otherwise. Functions that take a store need it free.
 */
#ifndef NB_AGENT_COMMIT_WORLD_PRIVATE_H
#define NB_AGENT_COMMIT_WORLD_PRIVATE_H

#include "agent/commit/coverage.h"
#include "agent/commit/world.h"
#include "store/announce.h"

#define WORLD_POLL_MOST_NS SECOND_NS

/* world_end.c */
/* Whether an open version can never be whole. It has then been failed. */
bool world_cannot_complete(struct catalogue *catalogue, struct version *version, int64_t now);
/* Whether a version that is committed here has been overtaken by a newer durable one: the other nodes no longer write it. */
bool world_is_given_up(const struct version *version, int64_t now);
/* If one node wants a version durable, all must persist it; this exchanges the wish. Releases the lock meanwhile. */
void world_exchange_wanted(struct catalogue *catalogue, struct version *version, int64_t now);
/* Removes the documents of a version that has ended. False: nothing is due. Releases the lock meanwhile. */
bool world_tidy(struct catalogue *catalogue, struct version *version, int64_t now, int64_t *due);

#endif
