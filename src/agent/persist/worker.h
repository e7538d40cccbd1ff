/*
 * worker.h - the persist workers: one for each storage path in use.
 *
 * A worker persists the versions that are due (due.h), retries with back-off, removes old versions from storage and
 * writes the history. Storage that hangs holds up its own jobs and no others. A worker ends when its jobs have no
 * session and no work, or when catalogue->stopping is set.
 */
#ifndef NB_AGENT_PERSIST_WORKER_H
#define NB_AGENT_PERSIST_WORKER_H

#include "agent/catalogue/catalogue.h"

/* Starts workers for the storage paths that need one. Returns when to call again; INT64_MAX: no need. Lock held. */
int64_t worker_start(struct catalogue *catalogue, struct job *job, int64_t now_ns);
/* Does all that is due for the job's storage path, on the calling thread: for an agent without threads, as in some tests. */
void worker_run(struct catalogue *catalogue, struct job *job);

#endif
