/*
 * node_documents.h - the documents in storage by which the nodes of a version notify each other of it. Each is created if it is absent.
 *
 * Functions that take a version need the lock. Functions that take a store need it free.
 */
#ifndef NB_AGENT_COMMIT_NODE_DOCUMENTS_H
#define NB_AGENT_COMMIT_NODE_DOCUMENTS_H

#include "agent/catalogue/catalogue.h"
#include "agent/commit/coverage.h"
#include "store/announce.h"

/* Describes this node's ranks. False: there is nothing to describe. Call captured_done in both cases. */
bool world_describe(const struct version *version, struct captured *captured);
/* Remembers the decision, so that no node needs its document any more. If the allocation fails, it is read again. */
void world_keep_decision(struct version *version, const struct committed *committed);
/* ret_path: the document's. */
enum nebula_status world_write_captured(struct store *store, struct captured *captured, char ret_path[ANNOUNCE_PATH_MAX],
                                        struct nebula_error *error);
/* *ret_count: the last writing of the tag in this run that other nodes have committed with ranks of `own`; 0: none. *ret_without: the last one that
 * they have committed without them. */
enum nebula_status world_count_writings(struct store *store, const struct captured *own, bool counts_removed, uint64_t *ret_count,
                                        uint64_t *ret_without, struct nebula_error *error);
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
/* Call while this node waits for others to make a version durable, without the lock. A program that removed the tag may have removed the decision
 * that the others wait for: this writes it again. */
void world_report_again(struct catalogue *catalogue, struct store *store, struct version *version);
/* Describes the commit that this node has adopted, with `persist` if it wants the version durable. It has no ranks if an earlier agent
 * adopted it. Free it with committed_done. Lock held. */
void world_describe_committed(const struct version *version, struct committed *ret_committed);
/* NEBULA_NOT_FOUND: no node has decided on that writing. */
enum nebula_status world_read_committed(struct store *store, const struct announce_of *of, struct committed *ret_committed, struct nebula_error *error);
void world_fill_of(const struct version *version, struct announce_of *of);
/* Writes "waits for ranks 2, 5 of 8"; empty if the version does not wait. */
void world_missing(const struct version *version, char *text, size_t size);

#endif
