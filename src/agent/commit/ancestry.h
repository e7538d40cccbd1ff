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

/* The first trainer of a run has come. Storage is to be looked through for it. No memory: it came after nobody. */
void ancestry_begin(struct job *job, const char *run);
/* A trainer says HELLO: does a run begin with it? `known`: this session was here before. */
bool ancestry_begins(const struct catalogue *catalogue, const struct job *job, const struct ipc_hello *hello, bool known);
/* An agent takes over what a run that began at `begun` left in memory. */
void ancestry_adopt(struct job *job, const char *run, uint64_t begun);
/* Storage was looked through for the newest run: job->stored is what it found. */
void ancestry_looked(struct job *job);
/* The newest run came after all that `run` had committed up to `until`. */
void ancestry_add(struct job *job, const char *run, uint64_t until);
/* A session has loaded a version, or found it before it began one of its own. */
void ancestry_follow(const struct session *session, const char *run, uint64_t sequence);

/* What `run` committed as `sequence` is this version's to replace, and to carry files over from. */
bool ancestry_covers(const struct version *version, const char *run, uint64_t sequence);
/* Likewise for the newest run. */
bool ancestry_run_covers(const struct job *job, const char *run, uint64_t sequence);
/* The stored writing that the version may replace is remembered, for another run is about to begin. */
uint64_t ancestry_base(const struct version *version);
bool ancestry_is_rival(const struct job *job, const char *run);
void ancestry_set_rival(struct job *job, const char *run);
/* NEBULA_INVALID: `manifest`, which is in storage, is not the version's to replace; the error names both runs. A run that began
 * before, and whose own later writing lies there, is told so too. */
enum nebula_status ancestry_judge(struct version *version, const struct manifest *manifest, struct nebula_error *error);
enum nebula_status ancestry_check(struct catalogue *catalogue, struct version *version, const struct manifest *manifest,
                                 struct nebula_error *error);
/* The version fails, and storage's stays: nobody is sent to this one any more but its own run. */
void ancestry_give_way(struct catalogue *catalogue, struct version *version, const struct manifest *manifest, const char *why);
void ancestry_done(struct job *job);

#endif
