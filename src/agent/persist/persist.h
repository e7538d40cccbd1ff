/*
 * persist.h - brings one version from memory to storage.
 */
#ifndef NB_AGENT_PERSIST_PERSIST_H
#define NB_AGENT_PERSIST_PERSIST_H

#include "agent/catalogue/catalogue.h"

/* Writes one version in the order of docs/formats.md. `version` is pinned. On success the job's list of stored versions has it, and
 * `version` carries the sequence that was written; the caller sets its state. After NEBULA_INVALID and NEBULA_CORRUPT
 * another attempt is of no use. Worker only. */
enum nebula_status storage_persist(struct catalogue *catalogue, struct job *job, struct version *version,
                                   struct nebula_error *error);

#endif
