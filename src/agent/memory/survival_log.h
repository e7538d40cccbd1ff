/*
 * survival_log.h - what the next agent must know about a version that lies in memory.
 *
 * Beside its images each version has <id>.version in the memory directory
 * (survival_record.h), which grows by a record at each change and is replaced by a
 * rename before it grows long. A start-up scan takes over what the last whole
 * records describe and whose images are whole in size: committed versions as
 * they were, open ones as long as their owner lives, for it will come back.
 * Everything else of ours is debris and goes, unless something could not be read
 * just now; names that are not ours are left alone.
 *
 * A survival log that cannot be written costs only that protection: it is logged, and
 * nothing fails.
 */
#ifndef NB_AGENT_MEMORY_SURVIVAL_LOG_H
#define NB_AGENT_MEMORY_SURVIVAL_LOG_H

#include "agent/catalogue/catalogue.h"

void survival_log_write(struct catalogue *catalogue, struct version *version);
void survival_log_remove(struct catalogue *catalogue, struct version *version);
/* Whether another agent, which has the memory directory, has versions of this storage path there. Without the lock. */
bool note_rival_has(const struct catalogue *catalogue, const char *persist_path);
/* The survival log that was written last, which stays open. */
void survival_log_close(struct catalogue *catalogue);
/* At start, before any thread. */
void survival_log_adopt_all(struct catalogue *catalogue);
/* Fails adopted open versions whose owners have gone. True when some wait still. */
bool survival_log_check_owners(struct catalogue *catalogue);

#endif
