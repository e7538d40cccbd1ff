/*
 * store_mem.h - the driver `mem`, for tests: the strictest object store, and one that fails as it is told.
 *
 * It has no rename, no directories, no links and no descriptors. The first page of each list is empty, and the others hold 3 entries. Its
 * clock is ahead of this machine's, and counts in whole seconds. It has conditions, stamps and copies.
 *
 * All stores of one URL mem://name see the same objects, which live as long as the process: a test can close a store and open it
 * again, as an agent that starts anew. Faults are the URL's too.
 */
#ifndef NB_STORE_STORE_MEM_H
#define NB_STORE_STORE_MEM_H

#include "store/store.h"

extern const struct store_ops store_mem;

#define STORE_MEM_STALE_MAX 64

/* A call is one request that a real store would get: each object that is published or removed is one. A write is a call that changes
 * something. Both are counted from store_mem_faults on. */
struct mem_faults {
        int64_t latency_ms;      /* of each call */
        uint64_t throttle_every; /* the calls with these numbers fail with http_status 503 and have no effect; 0: none */
        uint64_t fail_at;        /* this call fails with http_status 500 and has no effect; 0: none */
        bool goes_on;            /* the later calls fail, too */
        uint64_t lose_at;        /* this write succeeds, but is answered with NEBULA_TIMEOUT; 0: none */
        /* Lists do not show that many of the last writes, STORE_MEM_STALE_MAX at most. Set it, or lists_late, before the first call of features,
         * which then lacks STORE_LISTS_FRESH. */
        uint64_t stale_writes;
        bool lists_late; /* lists may be stale at another time */
        size_t page_entries;     /* 0: 3 */
};

/* From now on, store_open opens mem:// URLs. */
void store_mem_allow(void);
/* Removes all objects of the URL, and its faults. */
void store_mem_forget(const char *url);
/* NULL: none. */
void store_mem_faults(struct store *store, const struct mem_faults *faults);
/* The number of calls, failed ones included. */
uint64_t store_mem_calls(struct store *store);
uint64_t store_mem_writes(struct store *store);

#endif
