/*
 * coverage.h - which ranks of a version the captured documents of all nodes cover.
 *
 * Only the worker that looks at the documents uses it, without the lock. It remembers each document that it has read by the store's
 * stamp, so a look reads those documents alone that are new. If a document has changed or gone, the next look reads all again.
 */
#ifndef NB_AGENT_COMMIT_COVERAGE_H
#define NB_AGENT_COMMIT_COVERAGE_H

#include "store/announce.h"

struct coverage_document;

/* The sum of the captured documents of one version. */
struct coverage {
        uint8_t *ranks; /* of the world: 1 when covered */
        uint32_t count, world;
        uint64_t files, generation, sequence, documents;
        bool goes_back; /* the earliest step that one of the documents goes back to */
        int64_t after;
        struct coverage_document *read; /* those that it was made from, ascending */
        size_t read_count;
        uint64_t own_files; /* of this node's document */
        size_t own_ranks;
};

/* NULL: no memory. */
struct coverage *coverage_new(uint32_t world);
void coverage_free(struct coverage *coverage);
/* Adds this node's ranks, and reads the documents of other nodes. NEBULA_INVALID: another job or run writes that tag. */
enum nebula_status coverage_look(struct store *store, const struct captured *own, struct coverage *coverage, struct nebula_error *error);

#endif
