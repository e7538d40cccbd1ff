/*
 * verified.h - when each version was last verified: <root>/.nebula/verified.json, one small document for all tags.
 *
 *      json_t *verified = verified_load(store);
 *      if (verified_find(verified, tag, sequence, &one)) ...
 *      verified_note(notes, tag, sequence, &one);             // `notes` begins as json_object()
 *      verified_store(store, notes, known, &error);           // adds the notes to what is stored
 *
 * The sequence names one writing of a tag: an entry about an earlier one does not count. The document is a hint for people. If two commands
 * store it at the same moment, the entries of one may be lost, and these versions are verified once more.
 *
 * Threads: no shared state.
 */
#ifndef NB_CLI_VERIFIED_H
#define NB_CLI_VERIFIED_H

#include <jansson.h>

#include "store/scan.h"

struct verified {
        double at;     /* when the check began, seconds since 1970; never in the future */
        bool ok;       /* no damage so far */
        uint64_t done; /* files that were checked; fewer than the version has: a check stopped, and goes on behind them */
};

/* Never NULL unless memory is short; empty if there is no such document, or if it cannot be read. */
json_t *verified_load(struct store *store);
bool verified_find(const json_t *verified, const char *tag, uint64_t sequence, struct verified *ret_one);
void verified_note(json_t *notes, const char *tag, uint64_t sequence, const struct verified *one);
/* `known`: all versions of the store, so that entries about others go; NULL: not known. */
enum nebula_status verified_store(struct store *store, const json_t *notes, const struct manifest_scan *known, struct nebula_error *error);
/* Of all whole checks: the number of versions that were damaged, and the time of the latest; 0: none. */
void verified_sum(const json_t *verified, size_t *ret_damaged, double *ret_latest);

#endif
