/*
 * memory_policy.h - which versions and images leave memory, and which images are made ahead of time. By the rules of retention.h; the
 * catalogue's lock is held.
 */
#ifndef NB_AGENT_CATALOGUE_MEMORY_POLICY_H
#define NB_AGENT_CATALOGUE_MEMORY_POLICY_H

#include "agent/catalogue/catalogue.h"

#define TOMBSTONE_MAX 256 /* per job; a tombstone takes a few KiB */

/* Applies the job's retention to its memory, turns versions into tombstones, and drops tombstones beyond
 * TOMBSTONE_MAX. */
void policy_retain(struct catalogue *catalogue, struct job *job);
/* The same for a save that has begun: its version takes one of the places, and free images stay for it. `version`: that of the save. */
void policy_make_way(struct catalogue *catalogue, const struct version *version);
/* For versions that were found in storage: drops those beyond TOMBSTONE_MAX, and the images of all but the last few. */
void policy_tidy(struct catalogue *catalogue, struct job *job);
/* Frees the version, of any job, whose loss costs least. False: none can leave memory now. */
bool policy_reclaim(struct catalogue *catalogue);
/* Gives back the memory of the versions that storage has; keeps the newest if keeps_newest. The job can still load them from
 * storage. `why`: for its programs, or NULL if it has ended. False: there is no such version. */
bool policy_release(struct catalogue *catalogue, struct job *job, bool keeps_newest, const char *why);
/* Gives back one restored image that no thread is reading. */
bool policy_drop_restored(struct catalogue *catalogue);
/* Gives back one image that no version needs: a free one, or a restored one. */
bool policy_drop_spare(struct catalogue *catalogue);
/* The session's next versions will have a file of `size` bytes: its images are made in the background. */
void policy_hint(struct catalogue *catalogue, struct session *session, uint64_t size);
/* The session has found a version in storage, from which its job resumes: its first save will probably have files of the same sizes.
 * Their images are made when the load is over. */
void policy_foresee(struct catalogue *catalogue, struct session *session, uint64_t version_id);
/* Wakes the page maker for sessions whose load is over. Returns when to call again. */
int64_t policy_foreseen_due(struct catalogue *catalogue, struct job *job, int64_t now_ns);
/* A finished free image for a file which this session has hinted. No process that lives has it mapped. NULL: none.
 * *ret_left_count: how many the session still waits for, without this one. */
struct image *policy_spare_image(struct catalogue *catalogue, const struct session *session, uint32_t *ret_left_count);
/* Versions of the job show from now on how much memory it needs. */
void policy_forget_hints(struct job *job);
/* With the next signal, the page maker looks whether the job needs spare images. */
void policy_want_spares(struct catalogue *catalogue, struct job *job);
/* Size of the next spare image to make for the job; 0: none. */
uint64_t policy_spare_bytes(struct catalogue *catalogue, struct job *job);
/* An image that is reused and whose pages can be joined now: no thread writes to it or writes it to storage. NULL: none. */
struct image *policy_small_image(const struct catalogue *catalogue);

#endif
