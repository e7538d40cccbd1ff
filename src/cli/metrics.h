/*
 * metrics.h - metrics of this node's agent and of the history of one storage path, in Prometheus' format.
 *
 * Only the verdict has labels whose values come from a user, the job and its path: no tag or step is one, so the number of series does not
 * grow. docs/operate.md lists the metrics; docs/grafana.json and docs/alerts.yml use their names, and a test compares all three.
 *
 * Threads: any thread may call. All calls are for one path and history: what is read from storage is kept for a storage that hangs later.
 */
#ifndef NB_CLI_METRICS_H
#define NB_CLI_METRICS_H

#include "nebula.h"

/* The text of one scrape (exposition format 0.0.4); the caller frees it. `path` "": only the agent. `history`: the file; NULL: that of
 * the path. If the agent or the history is missing, their metrics are left out. NULL: no memory. */
char *metrics_text(const char *path, const char *history, size_t *ret_size);

#endif
