/*
 * world_private.h - what the files of world.h share.
 *
 *      world.c            the rule: announce, look, commit
 *      node_documents.c  what the nodes read and write of each other in storage
 *      world_end.c        a version that nobody completes, or makes durable, and what is left of one
 *
 * The lock is held where a version is taken, unless said otherwise; it is free where a store is.
 */
#ifndef NB_AGENT_COMMIT_WORLD_PRIVATE_H
#define NB_AGENT_COMMIT_WORLD_PRIVATE_H

#include "agent/commit/world.h"
#include "store/announce.h"

#define SECOND_NS 1000000000
#define WORLD_POLL_MOST_NS ((int64_t)SECOND_NS)

/* What the captured documents of one version say together. */
struct coverage {
        uint8_t *ranks; /* of the world: 1 when covered */
        uint32_t count;
        uint64_t files, generation, sequence, documents;
        bool goes_back; /* as one of them says at least: to the earliest step of these */
        int64_t after;
};

/* world.c */
void world_fill_of(const struct version *version, struct announce_of *of);
/* What this node says of its ranks; false when there is nothing to say. Done with captured_done in either case. */
bool world_describe(const struct version *version, struct captured *captured);

/* node_documents.c */
enum nebula_status world_write_captured(struct store *store, struct captured *captured, struct nebula_error *error);
enum nebula_status world_write_committed(struct store *store, const struct committed *committed, struct nebula_error *error);
/* Own document and those of other nodes. NEBULA_INVALID: another job, or another run, writes that tag. */
enum nebula_status world_look_around(struct store *store, const struct captured *own, struct coverage *coverage, struct nebula_error *error);
/* What this node has adopted, as it would write it: `persist` when it wants the version durable. Without ranks: it does not know them.
 * Done with committed_done. Lock held. */
void world_describe_committed(const struct version *version, struct committed *ret_committed);
/* Makes the document say what `own` says, unless a later writing has taken its place. *ret_told: nobody is left to be told. */
enum nebula_status world_repair_committed(struct store *store, const struct committed *own, bool *ret_told, struct nebula_error *error);
/* All agents come to the same numbers: the documents', unless storage holds the tag already. */
enum nebula_status world_commit_document(struct store *store, const struct captured *own, const struct coverage *coverage, const struct line *line,
                                         bool persist, struct committed *ret_committed, struct nebula_error *error);
/* The document of that name, if it is of this writing: another job's, or an earlier writing's, has the same name. */
void world_remove_captured(struct store *store, const struct captured *own, uint32_t rank);

/* world_end.c */
/* The newest version of the job that is complete and younger than this one, or NULL. */
const struct version *world_newer_complete(const struct version *version);
/* Whether an open version will never be whole: it has failed then. */
bool world_is_hopeless(struct catalogue *catalogue, struct version *version, int64_t now);
/* Committed on this node, and a newer one has become durable: the other nodes will not write it any more. */
bool world_is_given_up(const struct version *version, int64_t now);
/* Any node may want a version durable: then all must persist it. Gives the lock up meanwhile. */
void world_exchange_wanted(struct catalogue *catalogue, struct version *version, int64_t now);
/* Takes away what lies in storage of a version that nothing more becomes of. False: nothing is due. Gives the lock up meanwhile. */
bool world_tidy(struct catalogue *catalogue, struct version *version, int64_t now, int64_t *due);

#endif
