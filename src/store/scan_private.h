/*
 * scan_private.h - the manifests of all tags of one listing, for manifest_scan.
 *
 *      struct loading loading;
 *      status = loading_init(&loading, store, &tags, options, &known, error);
 *      loading_run(&loading);
 *      ... loading.states, loading.manifests, loading.failures ...
 *      loading_done(&loading);
 *
 * First it finds the newest entry of each tag's log (tag_log_look). Then it reads these entries, the tags with the largest steps first. A
 * service over the network is asked for many at once.
 *
 * Ownership: `known` gives the manifests that are taken over; its other ones stay the caller's. Threads: loading_run makes its own, and
 * ends them before it returns.
 */
#ifndef NB_STORE_SCAN_PRIVATE_H
#define NB_STORE_SCAN_PRIVATE_H

#include <stdatomic.h>

#include "store/scan.h"
#include "store/tag_log.h"

enum load_state { LOAD_WAITS, LOAD_HAS_MANIFEST, LOAD_FAILED };
struct loading {
        struct store *store;
        const struct store_list *list;               /* the tags' directories */
        const struct manifest_scan_options *options; /* NULL: the defaults */
        struct tag_head *heads;         /* one per tag, as are the next four */
        bool *has_head;
        atomic_uchar *states;           /* of enum load_state; a manifest is complete before its state says so */
        struct manifest *manifests;
        struct nebula_error **failures;
        uint32_t *order;                /* the tags, those with the largest steps first */
        struct manifest **known;        /* by tag */
        bool *taken;                    /* one per known manifest */
        size_t known_count;
        atomic_size_t next, done;       /* steps of the work that were begun, and that were ended */
        atomic_bool stops;              /* the scan has failed: no more is read */
};

enum nebula_status loading_init(struct loading *loading, struct store *store, const struct store_list *list,
                                const struct manifest_scan_options *options, struct manifest_scan *known, struct nebula_error *error);
void loading_run(struct loading *loading);
void loading_done(struct loading *loading);
/* The first failure that says something about the storage, and nothing about one tag. NULL: there is none. */
const struct nebula_error *loading_failure(const struct loading *loading);
/* Whether a failure says something about the storage. */
bool loading_ends(const struct nebula_error *failure);

/* The order of a scan. */
int scan_compare(const void *a, const void *b);

#endif
