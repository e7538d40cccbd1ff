/*
 * history.h - checkpointHistories.csv, which agents write: one line per version that has ended (docs/formats.md).
 *
 * Several nodes may write one file, each the share of its ranks: lines of one writing of a version are joined. Columns are found by their
 * names. A field that is missing or not a number is 0. Lines of another form are skipped.
 *
 * Threads: no shared state.
 */
#ifndef NB_CLI_HISTORY_H
#define NB_CLI_HISTORY_H

#include "nebula.h"

/* The tier from which the ranks read the version that they resumed from; the slowest one, if there were several. */
enum history_tier { HISTORY_TIER_UNKNOWN, HISTORY_TIER_MEMORY, HISTORY_TIER_PEER, HISTORY_TIER_STORAGE, HISTORY_TIERS };
extern const char *const history_tier_names[HISTORY_TIERS];

struct history_row {
        char tag[256], result[32];
        int64_t step; /* -1: none */
        uint64_t sequence, size;
        double blocked_s, persist_s;
        double begun, captured, committed, durable; /* seconds since 1970; 0: not reached */
        double stopped, stepped, read;              /* the same; 0: unknown */
        int64_t read_step;
        enum history_tier read_tier;
};
struct history {
        struct history_row *rows; /* in order of `begun` */
        size_t count;
};

/* `given`: the file; NULL: that of the storage path `path`, in NEBULA_OUTPUT_DIR or <path>/.nebula. */
enum nebula_status history_load(const char *given, const char *path, struct history *ret_history, struct nebula_error *error);
void history_done(struct history *history);

#endif
