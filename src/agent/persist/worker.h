/*
 * worker.h - the threads that work behind the sessions' backs.
 *
 * worker_main keeps the clock for everything that happens by itself: parts that
 * have gone quiet, sessions that do not come back, the linger. It sleeps until
 * the earliest of these, and touches no storage.
 *
 * For each storage path in use it runs a worker, a thread that persists: it picks
 * what is due (retention.h), retries with back-off, removes old versions from
 * storage, writes the history. A storage that hangs holds its own jobs up and no
 * others. A worker ends when its jobs have no session and nothing to do.
 *
 * All end when catalogue->stopping is set, worker_main after the workers.
 */
#ifndef NB_AGENT_PERSIST_WORKER_H
#define NB_AGENT_PERSIST_WORKER_H

#include "agent/catalogue/catalogue.h"

void *worker_main(void *catalogue);
/* Something is to be persisted, or on its way (lock held). job NULL: any. */
bool worker_pending(const struct catalogue *catalogue, const struct job *job);
/* Likewise, and it has not failed since then: it may still become durable, whatever other versions and paths do (lock held). */
bool worker_draining(const struct catalogue *catalogue, int64_t since_ns);
/* The storage of this version has something else to do by now (lock held). */
bool worker_has_other(struct catalogue *catalogue, const struct version *version);
/* The version is to become durable, whatever the interval says (lock held). catalogue_signal wakes the worker. */
void worker_want(struct version *version);
/* worker_want, and the next attempt does not wait for the pause after a failure (lock held). */
void worker_want_now(struct version *version);
/* Marks every committed version that is in memory as wanted (lock held). */
void worker_want_all(struct catalogue *catalogue, struct job *job);

#endif
