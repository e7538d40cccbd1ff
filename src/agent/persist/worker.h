/*
 * worker.h - the clock thread and the persist workers.
 *
 * worker_main keeps the clock: parts that have gone quiet, sessions that do not
 * come back, the end of an idle agent. It sleeps until the earliest of these, and
 * calls no storage.
 *
 * For each storage path in use it starts a worker. A worker persists the versions
 * that are due (retention.h), retries with back-off, removes old versions from
 * storage and writes the history. Storage that hangs holds up its own jobs and no
 * others. A worker ends when its jobs have no session and no work.
 *
 * All threads end when catalogue->stopping is set, worker_main last.
 */
#ifndef NB_AGENT_PERSIST_WORKER_H
#define NB_AGENT_PERSIST_WORKER_H

#include "agent/catalogue/catalogue.h"

void *worker_main(void *catalogue);
/* Does all that is due for the job's storage path, on the calling thread: for an agent without threads, as in some tests. */
void worker_run(struct catalogue *catalogue, struct job *job);
/* Whether a version waits to be persisted, or is being persisted (lock held). job NULL: of any job. */
bool worker_pending(const struct catalogue *catalogue, const struct job *job);
/* Whether such a version has not failed since `since_ns`: it may still become durable, even if other versions and paths fail (lock held). */
bool worker_draining(const struct catalogue *catalogue, int64_t since_ns);
/* Whether the worker of this version's storage has other work (lock held). */
bool worker_has_other(struct catalogue *catalogue, const struct version *version);
/* The version shall become durable before the interval has passed, and the next attempt does not wait for the pause after a failure (lock
 * held). catalogue_signal wakes the worker. */
void worker_want_now(struct version *version);
/* Marks every committed version that is in memory as wanted (lock held). */
void worker_want_all(struct catalogue *catalogue, struct job *job);

#endif
