/*
 * history.h - writes one line per version to <output_dir>/checkpointHistories.csv when the version has ended: durable;
 * superseded (it left memory before it was due to be persisted); failed; or memory, for a job without a storage path.
 *
 * If the output directory cannot be written, the agent logs that once and does not try again. A history in the storage
 * path is tried again with each version, but only if the storage is seen to be there.
 */
#ifndef NB_AGENT_CLIENTS_HISTORY_H
#define NB_AGENT_CLIENTS_HISTORY_H

#include <jansson.h>

#include "agent/catalogue/catalogue.h"

/* A JSON object with the columns of the file. */
json_t *history_json(const struct version *version);
/* Whether a version of the job has ended and is not recorded yet (lock held). */
bool history_pending(const struct job *job);
/* Appends the versions of the lane's jobs that have ended and are not recorded. Takes the lock; writes the file without it. */
void history_flush(struct catalogue *catalogue, const struct lane *lane);

#endif
