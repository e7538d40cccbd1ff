/*
 * publish_list.h - a job's list of requests, in memory and in the memory directory. The lock is held, except where a comment says otherwise.
 */
#ifndef NB_AGENT_PUBLISH_PUBLISH_LIST_H
#define NB_AGENT_PUBLISH_PUBLISH_LIST_H

#include "agent/publish/publish.h"

/* Checks that a path can be published: absolute and in plain form. */
enum nebula_status publish_check_path(const char *path, struct nebula_error *error);
/* Call for a list that could not be written. It only means that the list does not survive the agent. */
void publish_lose_list(int result);
/* Call at start, after the survival logs and before any thread. */
void publish_adopt_all(struct catalogue *catalogue);
/* At the end: removes the lists from the memory directory. Call without the lock. */
void publish_forget(struct catalogue *catalogue);
/* Frees the lists in memory; call before catalogue_done. */
void publish_done(struct catalogue *catalogue);
/* NULL: an allocation failed. */
struct publish *publish_append(struct job *job, enum publish_kind kind, const char *path, const char *staging,
                               struct nebula_error *error);
void publish_erase(struct job *job, struct publish *gone);
/* Describes the list, which catalogue_unlock writes to the memory directory (memory_files.h). */
void publish_keep_list(struct catalogue *catalogue, const struct job *job);

#endif
