/*
 * persist_source_private.h - the files of earlier versions that may have some of a plan's bytes already.
 */
#ifndef NB_AGENT_PERSIST_PERSIST_SOURCE_PRIVATE_H
#define NB_AGENT_PERSIST_PERSIST_SOURCE_PRIVATE_H

#include "agent/persist/persist_plan_private.h"

/* Finds sources for the files. If that fails, the files have none. */
void plan_find_sources(struct plan *plan);
/* Whether the chunk at that offset has the same bytes in the file's source. */
bool plan_source_has(const struct plan_file *file, uint64_t offset, uint64_t crc64);
void plan_drop_source(struct plan_file *file);
/* Call when the files are in storage. The share of bytes that they had in common with their sources decides when the worker searches for
 * sources again. Lock held. */
void plan_report_common(struct job *job, const struct plan *plan);

#endif
