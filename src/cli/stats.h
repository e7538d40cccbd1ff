/*
 * stats.h - what the versions of a storage path take: by job, by item, by month, and what rules of `nebula prune` would free. And a search for
 * the versions that have a file or a tensor of some name.
 *
 * Both return one JSON value, from which the text for people is printed too. The caller owns it.
 */
#ifndef NB_CLI_STATS_H
#define NB_CLI_STATS_H

#include <jansson.h>

#include "store/scan.h"

/*
 * {"path", "versions", "bytes", "written", "jobs": [{"job", "versions", "bytes", "written"}], "items": [{"name", "files", "bytes"}],
 *  "months": [{"month", "versions", "bytes", "written"}], "rules": [{"rule", "removed", "bytes"}]}
 *
 * bytes: of all files, also of those that a version has from an earlier one. written: the bytes that were sent to storage, so that shared
 * bytes count once. An item is the name of a file with "*" in place of each number in it.
 */
enum nebula_status stats_load(struct store *store, json_t **ret_stats, struct nebula_error *error);
void stats_print(const json_t *stats);

/* {"path", "pattern", "found": [{"tag", "step", "file", "size"} or {"tag", "step", "file", "tensor", "dtype", "shape"}], "unread": files whose tensors
 * could not be listed}. A pattern without *, ? and [ may stand anywhere in the name. Of each torch file, only the structure is read. */
enum nebula_status find_load(struct store *store, const char *pattern, json_t **ret_found, struct nebula_error *error);
void find_print(const json_t *found);

#endif
