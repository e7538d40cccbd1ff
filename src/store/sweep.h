/*
 * sweep.h - removes what interrupted writings left.
 */
#ifndef NB_STORE_SWEEP_H
#define NB_STORE_SWEEP_H

#include "store/manifest.h"
#include "store/store.h"

/* Removes the debris of interrupted writings: Nebula's objects that no log entry names and that are older than `age_ns` by the store's
 * clock. Ends the work after a commit whose writer did not. *ret_removed: the number of tags, and of stray temporary objects, that had
 * some. A file in place stays if no record or claim names it. */
enum nebula_status manifest_sweep(struct store *store, int64_t age_ns, size_t *ret_removed, struct nebula_error *error);
/* The same, but only for objects that are not at rest: `rest` of a scan by the index. Makes the missing entries of the index. Uploads of keys that the
 * caller goes on with stay, and so do temporary objects of such keys. Numbers of removals stay unless `numbers`: all of them are listed for that. */
enum nebula_status manifest_sweep_rest(struct store *store, const struct store_list *rest, int64_t age_ns, bool numbers,
                                       bool (*goes_on)(void *argument, const char *key), void *argument, size_t *ret_removed, struct nebula_error *error);
/* The same for one tag. */
enum nebula_status manifest_sweep_tag(struct store *store, const char *tag, int64_t age_ns, size_t *ret_removed,
                                      struct nebula_error *error);

#endif
