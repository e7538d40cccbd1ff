/*
 * history.h - one line per version in <output_dir>/checkpointHistories.csv,
 * when it is known how it ended: durable, superseded (left memory before it was
 * due to be persisted) or failed; memory, when the job has no storage path.
 *
 * An output directory that cannot be written is logged once and costs nothing more. One in the storage path is tried again with
 * each version, and only where storage is seen to be there.
 */
#ifndef NB_AGENT_CLIENTS_HISTORY_H
#define NB_AGENT_CLIENTS_HISTORY_H

#include <jansson.h>

#include "agent/catalogue/catalogue.h"

/* One object with the columns of the file. */
json_t *history_json(const struct version *version);
/* Something of the job has ended and is not recorded (lock held). */
bool history_pending(const struct job *job);
/* Appends what has ended and is not recorded of the lane's jobs. Takes the lock; the file is written without it. */
void history_flush(struct catalogue *catalogue, const struct lane *lane);

#endif
