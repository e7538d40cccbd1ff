/*
 * world_private.h - declarations that the files behind world.h share.
 *
 *      world.c            the rule: announce, look, commit
 *      node_documents.c   the documents by which nodes tell each other of a version
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

#define SECOND_NS 1000000000
#define WORLD_POLL_MOST_NS ((int64_t)SECOND_NS)

/* world.c */
void world_fill_of(const struct version *version, struct announce_of *of);
/* Describes this node's ranks. False: there is nothing to describe. Call captured_done in both cases. */
bool world_describe(const struct version *version, struct captured *captured);

/* node_documents.c */
enum nebula_status world_write_captured(struct store *store, struct captured *captured, struct nebula_error *error);
/* Describes the commit that this node has adopted, with `persist` if it wants the version durable. It has no ranks if an earlier agent
 * adopted it. Free it with committed_done. Lock held. */
void world_describe_committed(const struct version *version, struct committed *ret_committed);
/* Writes `own` as the document, unless a later writing has replaced that. *ret_told: the document tells the nodes to persist, or none
 * needs to be told any more. */
enum nebula_status world_repair_committed(struct store *store, const struct committed *own, bool *ret_told, struct nebula_error *error);
/* All agents compute the same numbers from the documents, unless storage holds the tag already. */
enum nebula_status world_commit_document(struct store *store, const struct captured *own, const struct coverage *coverage, const struct line *line,
                                         bool persist, struct committed *ret_committed, struct nebula_error *error);
/* Removes the document if it is of this writing. Another job's, or an earlier writing's, has the same name. */
void world_remove_captured(struct store *store, const struct captured *own, uint32_t rank);

/* world_end.c */
/* Whether an open version can never be whole. It has then been failed. */
bool world_is_hopeless(struct catalogue *catalogue, struct version *version, int64_t now);
/* Whether a version that is committed here has been overtaken by a newer durable one: the other nodes no longer write it. */
bool world_is_given_up(const struct version *version, int64_t now);
/* If one node wants a version durable, all must persist it; this exchanges the wish. Releases the lock meanwhile. */
void world_exchange_wanted(struct catalogue *catalogue, struct version *version, int64_t now);
/* Removes the documents of a version that has ended. False: nothing is due. Releases the lock meanwhile. */
bool world_tidy(struct catalogue *catalogue, struct version *version, int64_t now, int64_t *due);

#endif
