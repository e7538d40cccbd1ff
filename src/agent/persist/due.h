/*
 * due.h - which versions wait to be written to storage, and which is next. By the rules of retention.h; the catalogue's lock is held.
 */
#ifndef NB_AGENT_PERSIST_DUE_H
#define NB_AGENT_PERSIST_DUE_H

#include "agent/catalogue/catalogue.h"

/* The pause before attempt number `attempt` + 1: 0.5 s, doubling to 30 s. A random quarter more or less keeps many agents from asking at the same
 * moment. */
int64_t due_back_off(uint32_t attempt);
/* Whether the version is complete in memory, and storage is to have it and has not. */
bool due_is_unwritten(const struct version *version);
/* Whether a version of the job waits to be persisted, or is being persisted. due_any: of any job. */
bool due_of(const struct catalogue *catalogue, const struct job *job);
bool due_any(const struct catalogue *catalogue);
/* Whether such a version has not failed since `since_ns`: it may still become durable, even if other versions and paths fail. */
bool due_draining(const struct catalogue *catalogue, int64_t since_ns);
/* The next version of the lane's jobs; NULL: none is due, and *due is lowered to when the next one is. Jobs take turns: the one that started to
 * write longest ago comes first. is_ahead: a version that is still being copied. */
struct version *due_next(const struct catalogue *catalogue, const struct lane *lane, bool is_ahead, int64_t now, int64_t *due);
/* Whether storage is to be listed now; false: *due is lowered to when it is. */
bool due_scan(const struct job *job, int64_t now, int64_t *due);
/* Whether the worker of this version's storage has other work. */
bool due_other(struct catalogue *catalogue, const struct version *version);
/* The version shall become durable before the interval has passed, and the next attempt does not wait for the pause after a failure.
 * catalogue_signal wakes the worker. */
void due_want_now(struct version *version);
/* Marks every committed version that is in memory as wanted. due_want_all: of all jobs if job is NULL, and the next attempts do not wait. */
void due_want(struct job *job);
void due_want_all(struct catalogue *catalogue, struct job *job);

#endif
