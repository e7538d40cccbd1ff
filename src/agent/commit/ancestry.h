/*
 * ancestry.h - which runs of a job its newest run came after: those of which it found a version, in memory or in storage, when it
 * began, or loaded one since. What such a run had committed by then is the newer run's to write again, and to carry files over
 * from; what any other run has written is not, also where clocks say that it is older.
 *
 * A run that is not known to have come before, and of which a manifest has appeared since this run began, goes on somewhere: two
 * jobs write to one path. It is a rival, and retention leaves its versions alone.
 *
 * All functions need the catalogue's lock, but for ancestry_check, which takes it.
 */
#ifndef NB_AGENT_COMMIT_ANCESTRY_H
#define NB_AGENT_COMMIT_ANCESTRY_H

#include "agent/catalogue/catalogue.h"

/* Call for the first trainer of a run; storage is then scanned for that run. If an allocation fails, the run has no ancestors. */
void ancestry_begin(struct job *job, const char *run);
/* Whether a run begins with the trainer that has just said HELLO. `known`: its session was here before. */
bool ancestry_begins(const struct catalogue *catalogue, const struct job *job, const struct ipc_hello *hello, bool known);
/* Call when an agent adopts what a run that began at `begun` left in memory. */
void ancestry_adopt(struct job *job, const char *run, uint64_t begun);
/* Call after storage was scanned for the newest run; job->storage.stored is the result. */
void ancestry_looked(struct job *job);
/* Records that the newest run came after all that `run` had committed up to sequence `until`. */
void ancestry_add(struct job *job, const char *run, uint64_t until);
/* Call when a session has loaded a version, or has found it before it began its first own one. */
void ancestry_follow(const struct session *session, const char *run, uint64_t sequence);

/* Whether this version may replace the version that `run` committed as `sequence`, and may carry its files over. */
bool ancestry_covers(const struct version *version, const char *run, uint64_t sequence);
/* Whether the newest run may replace that version. */
bool ancestry_run_covers(const struct job *job, const char *run, uint64_t sequence);
/* The sequence of the stored writing that the version may replace. It is kept, since another run is about to begin. */
uint64_t ancestry_base(const struct version *version);
bool ancestry_is_rival(const struct job *job, const char *run);
void ancestry_set_rival(struct job *job, const char *run);
/* NEBULA_INVALID: the version must not replace `manifest`, which is in storage. The error names both runs, and says if the stored one
 * is a later writing of the version's own run. */
enum nebula_status ancestry_judge(struct version *version, const struct manifest *manifest, struct nebula_error *error);
enum nebula_status ancestry_check(struct catalogue *catalogue, struct version *version, const struct manifest *manifest,
                                 struct nebula_error *error);
/* Fails the version in favour of the stored one. Only the version's own run can still load it. */
void ancestry_give_way(struct catalogue *catalogue, struct version *version, const struct manifest *manifest, const char *why);
void ancestry_done(struct job *job);

#endif
