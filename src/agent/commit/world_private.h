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
/* Describes this node's ranks. False: there is nothing to describe. Call captured_done in both cases. */
bool world_describe(const struct version *version, struct captured *captured);

/* Remembers the decision, so that no node needs its document any more. If the allocation fails, it is read again. */
void world_keep_decision(struct version *version, const struct committed *committed);

/* node_documents.c: each document is created if it is absent */
/* ret_path: the document's. */
enum nebula_status world_write_captured(struct store *store, struct captured *captured, char ret_path[ANNOUNCE_PATH_MAX],
                                        struct nebula_error *error);
/* *ret_count: the last writing of the tag in this run that other nodes have committed with ranks of `own`; 0: none. */
enum nebula_status world_count_writings(struct store *store, const struct captured *own, uint64_t *ret_count, struct nebula_error *error);
enum nebula_status world_report_wanted(struct store *store, const struct announce_of *of, struct nebula_error *error);
enum nebula_status world_is_wanted(struct store *store, const struct announce_of *of, bool *ret_is_wanted, struct nebula_error *error);
/* Decides, unless another node has: then *ret_committed is that node's decision. All agents compute the same numbers from the documents,
 * unless storage holds the tag already. */
enum nebula_status world_commit_document(struct store *store, const struct captured *own, const struct coverage *coverage, const struct line *line,
                                         bool persist, struct committed *ret_committed, struct nebula_error *error);
/* Decides that the writing was given up, unless a node has decided before. */
enum nebula_status world_write_given_up(struct store *store, const struct committed *given_up, struct nebula_error *error);
/* Removes the document with that path; "": all documents of this writing under the ranks of `own`. */
void world_remove_captured(struct store *store, const struct captured *own, const char *path);

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
