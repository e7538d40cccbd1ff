/*
 * storage.h - a job's storage. One worker opens it once, scans it when the job begins, and writes to it.
 *
 *      storage_open     the job's store, opened at first use; stays open. Other variables (storage_take_variables) make another store
 *      storage_scan     lists the complete versions, completes half-done settings in place, and removes old
 *                       temporary files of this user's agents. Worker only.
 *
 * Call none of these with the lock held; they take it for what they read and change.
 */
#ifndef NB_AGENT_PERSIST_STORAGE_H
#define NB_AGENT_PERSIST_STORAGE_H

#include "agent/catalogue/catalogue.h"
#include "store/trust.h"

struct manifest_scan;
struct store;
struct unfinished;
struct vars;

enum nebula_status storage_open(struct catalogue *catalogue, struct job *job, struct store **ret_store,
                                struct nebula_error *error);
/* What a reader of the job's versions wants of signatures. If storage cannot be opened, the settings and the store before say so: a failure makes no
 * policy less strict. */
enum trust_policy storage_policy(struct catalogue *catalogue, struct job *job);
/* Lock held. The variables of clouds that a session has brought count for the job from now on. NULL changes nothing. */
void storage_take_variables(struct job *job, struct vars *variables);
/* Lock held. `job` has no session of its own yet: it takes those of another job. */
void storage_share_variables(struct job *job, const struct job *from);
void storage_close(struct job *job);
/* Lock held. As in struct store; from the survival log of the agent before. */
uint32_t storage_mount_length(const struct job *job);
void storage_adopt_mount(struct job *job, uint32_t mount_length);
enum nebula_status storage_scan(struct catalogue *catalogue, struct job *job, struct nebula_error *error);
/* The first scan of a run waits so long for a search, and takes no list that was begun longer ago. */
#define STORAGE_SEARCH_NS (30 * SECOND_NS)
/* When a search began to list the path. */
struct search_begun {
        uint64_t asked; /* the job's scans_asked */
        int64_t ns;
};
/* A search is about to list the whole path. True: the first scan of the run is due, and waits for the list of the search: storage_search_ends must
 * follow. */
bool storage_search_begins(struct catalogue *catalogue, struct job *job, struct search_begun *ret_begun);
/* Takes the list over, whose newest version is read and not brief. NULL: the search has failed, and the scan makes a list of its own. */
void storage_search_ends(struct catalogue *catalogue, struct job *job, struct manifest_scan *scan, const struct search_begun *begun);
/* Keeps the failure for the job's status and counts it (lock held). is_new: the agent notifies clients that follow events. */
void storage_failed(struct catalogue *catalogue, struct job *job, const struct nebula_error *error, bool is_new);
/* Ends uploads that no version needs any more. Worker only. */
void storage_end_uploads(struct catalogue *catalogue, struct job *job, const struct unfinished *list);

#endif
