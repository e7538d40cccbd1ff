/*
 * coverage.h - which ranks of a version the captured documents of all nodes cover.
 *
 * Only the worker that looks at the documents uses it, without the lock. A document never changes, so a look reads those documents alone
 * that are new. If one has gone, because its node has withdrawn it, the next look reads all again.
 */
#ifndef NB_AGENT_COMMIT_COVERAGE_H
#define NB_AGENT_COMMIT_COVERAGE_H

#include "store/announce.h"

struct coverage_document;

/* The sum of the captured documents of one version. */
struct coverage {
        uint64_t *ranks; /* of the world: 1 + the rank's number of files when covered */
        uint32_t count, world;
        uint64_t files, sequence, nodes;
        bool goes_back; /* the earliest step that one of the documents goes back to */
        int64_t after;
        struct coverage_document *read; /* those that it was made from, ascending */
        size_t read_count;
};

/* NULL: no memory. */
struct coverage *coverage_new(uint32_t world);
void coverage_free(struct coverage *coverage);
/* Adds this node's ranks, and reads the documents of other nodes. NEBULA_INVALID: another job or run writes that tag. */
enum nebula_status coverage_look(struct store *store, const struct captured *own, struct coverage *coverage, struct nebula_error *error);

#endif
