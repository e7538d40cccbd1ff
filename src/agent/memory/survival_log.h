/*
 * survival_log.h - describes the versions in memory for the next agent.
 *
 * Beside its images, each version has a log <id>.version in the memory directory
 * (survival_record.h). Each change appends a record; a rename replaces the log before
 * it grows long. At start, the agent adopts the versions that the last complete
 * records describe and whose images have the right size: committed versions as they
 * were, open ones as long as their trainer lives, because it will reconnect. All
 * other files of Nebula are removed, except those that cannot be read at the moment.
 * Files with other names are left alone.
 *
 * If a log cannot be written, the agent begins it anew. If that fails, too, only that
 * protection is lost: the agent logs it, and nothing else fails.
 */
#ifndef NB_AGENT_MEMORY_SURVIVAL_LOG_H
#define NB_AGENT_MEMORY_SURVIVAL_LOG_H

#include "agent/catalogue/catalogue.h"

/* Lock held. Describes a marked version, or removes its log if it has left memory. catalogue_unlock writes that (memory_files.h). */
void survival_log_write(struct catalogue *catalogue, struct version *version);
/* Lock held. Removes the logs of all versions, for good: the agent ends and gives its memory back. */
void survival_log_forget(struct catalogue *catalogue);
/* Whether another agent holds the memory directory and has versions of this storage path there. Call without the lock. */
bool survival_log_rival_has(const struct catalogue *catalogue, const char *persist_path);
/* Lock held. Call for each task of a log that failed: the log begins anew, unless the task was to begin it. */
void survival_log_mend(struct catalogue *catalogue, const struct memory_file_task *failed);
/* Call at start, before any thread. */
void survival_log_adopt_all(struct catalogue *catalogue);
/* Fails adopted open versions whose trainers have ended. True if some still wait. */
bool survival_log_check_owners(struct catalogue *catalogue, struct job *job);

#endif
