/*
 * hang_news.h - the nodes of a job that hangs notify each other which of their ranks lags behind.
 *
 *   .nebula/hangs/<node>.json   in storage: the last hang of that node. The agent replaces it at the next one.
 *
 * Every node writes its own document. The node of rank 0 reads those of the others, so a job of n nodes makes some 2 n requests. A document counts
 * if it is of the same start of the job and about as old as the reader's own, by the clock of storage.
 *
 * Called without the lock. Threads: no shared state.
 */
#ifndef NB_AGENT_PULSE_HANG_NEWS_H
#define NB_AGENT_PULSE_HANG_NEWS_H

#include "ipc/ipc.h"
#include "store/store.h"

#define HANG_FILE_MAX 300

struct hang_news {
        char node[IPC_NAME_MAX], run[IPC_NAME_MAX];
        char file[HANG_FILE_MAX]; /* with the stacks, on that node */
        uint32_t rank, ranks;     /* the one that lags behind, and how many count steps on that node */
        uint64_t beats, step;
        double silent_s;
        char phase[64];
};

/* Removes the documents that are so old. */
#define HANG_NEWS_REST_NS (7 * 86400 * SECOND_NS)
enum nebula_status hang_news_sweep(struct store *store, int64_t age_ns, struct nebula_error *error);
enum nebula_status hang_news_tell(struct store *store, const struct hang_news *own, struct nebula_error *error);
/*
 * Waits until the nodes of all `world` ranks have reported, but no longer than wait_ms, and returns the rank that lags behind most. `fresh_ns`: how much
 * older or younger than the own document another one may be.
 */
enum nebula_status hang_news_last(struct store *store, const struct hang_news *own, uint32_t world, int64_t fresh_ns, int64_t wait_ms,
                                  struct hang_news *ret_last, uint32_t *ret_ranks, struct nebula_error *error);

#endif
