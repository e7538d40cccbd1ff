/*
 * counts.h - counts this process's requests to storage by kind of store, operation and outcome.
 *
 * store_count makes a store count from then on. A request is one operation of store.h, so an upload of many parts is one request. Repeated
 * HTTP requests are counted separately. Bytes are those read or sent, except those that a trainer reads through a lent descriptor.
 *
 * Threads: any, all at once.
 */
#ifndef NB_STORE_COUNTS_H
#define NB_STORE_COUNTS_H

#include <stdatomic.h>

#include "store/store.h"

enum store_operation {
        STORE_OP_PUT, STORE_OP_GET, STORE_OP_UPLOAD, STORE_OP_PUBLISH, STORE_OP_READ, STORE_OP_OPEN, STORE_OP_LIST, STORE_OP_STAT,
        STORE_OP_REMOVE, STORE_OP_CLOCK, STORE_OP_COPY, STORE_OPERATIONS
};
enum store_outcome {
        STORE_OUTCOME_SUCCESS,
        STORE_OUTCOME_ABSENT,  /* NEBULA_NOT_FOUND */
        STORE_OUTCOME_REFUSED, /* NEBULA_BUSY: a condition does not hold */
        STORE_OUTCOME_FAILURE,
        STORE_OUTCOMES
};
extern const char *const store_operation_names[STORE_OPERATIONS];
extern const char *const store_outcome_names[STORE_OUTCOMES];

/* Of one kind of store. */
struct store_counts {
        const char *scheme;
        uint64_t requests[STORE_OPERATIONS][STORE_OUTCOMES];
        uint64_t read_bytes, written_bytes;
        uint64_t retries; /* HTTP requests that were sent again */
};

void store_count(struct store *store);
/* The next counted kind of store. *index: 0 at first. False: there are no more. */
bool store_counts_next(size_t *index, struct store_counts *ret_counts);
/* The counter for http_request.retries. NULL: the store is not counted. */
atomic_ullong *store_counts_retries(const struct store *store);

#endif
