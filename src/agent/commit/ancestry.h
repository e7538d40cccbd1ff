/*
 * ancestry.h - the earlier runs of a job.
 *
 * The newest run came after another run if it found a version of that run at its start, in memory or in storage, or has loaded one
 * since. It may write the tags of such a run again, and carry over their files, if they were committed before. It may not do so with
 * the versions of any other run, even if a clock says that they are older.
 *
 * If a manifest of another run appears after this run began, and this run did not come after that one, both write to one path at the
 * same time. The other run is a rival, and retention does not remove its versions.
 *
 * All functions except ancestry_check need the catalogue's lock. ancestry_check takes it.
 */
#ifndef NB_AGENT_COMMIT_ANCESTRY_H
#define NB_AGENT_COMMIT_ANCESTRY_H

#include "agent/catalogue/catalogue.h"

/* Call for the first trainer of a run; storage is then scanned for that run. If an allocation fails, the run has no ancestors. */
void ancestry_begin(struct job *job, const char *run);
/* Whether a run begins with the trainer that has just said HELLO. `known`: its session was here before. */
bool ancestry_begins(const struct catalogue *catalogue, const struct job *job, const struct ipc_hello *hello, bool known);
/* Call when an agent adopts the versions in memory of a run that began at `begun`. */
void ancestry_adopt(struct job *job, const char *run, uint64_t begun);
/* The newest run; "": none has begun. */
const char *ancestry_newest(const struct job *job);
/* The sequence at which it began; 0: none has. */
uint64_t ancestry_begun(const struct job *job);
/* How many runs have begun here. */
uint64_t ancestry_number(const struct job *job);
/* Storage could not be read when a trainer took the version of this sequence as the newest; 0: it could. */
void ancestry_set_unseen(struct job *job, uint64_t sequence);
/* Call when the version has become that sequence in storage: a later writing of its tag on this node may replace it, whichever run it belongs to. */
void ancestry_stored(struct version *version, uint64_t sequence);
/* For the survival log: what the version may replace, and the id of the version whose files it takes over later. */
uint64_t ancestry_carries_from(const struct version *version);
void ancestry_restore(struct version *version, uint64_t base_sequence, uint64_t carries_from);
/* The runs whose versions stay, because they go on elsewhere. The caller frees them. NULL: no memory. */
struct rival {
        char run[IPC_NAME_MAX];
};
struct rival *ancestry_rivals(const struct job *job, size_t *ret_count);
/* Call after each scan of storage; job->known is the result. Only the first one since the newest run began counts. */
void ancestry_looked(struct job *job);
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
/*
 * Memory remembers writings of a tag, and another node may have written the tag since. So the newest run compares a version in memory with
 * the tag's entry in storage before it loads the version or takes over its files. A version of the newest run itself needs no comparison.
 */
enum ancestry_order {
        ANCESTRY_SAME,    /* storage has this version */
        ANCESTRY_LATER,   /* this version follows the one in storage */
        ANCESTRY_EARLIER, /* storage has a later writing: nothing may be taken from this one */
};
enum ancestry_order ancestry_compare(const struct version *version, const struct manifest *manifest);
/* The same, and notes the result: a version that is earlier is replaced (version_replaced). */
enum ancestry_order ancestry_note(struct catalogue *catalogue, struct version *version, const struct manifest *manifest);
/* Notes that storage has no writing of the version's tag that the newest run did not know. */
void ancestry_set_compared(struct version *version);
/* Whether the newest run has begun it. */
bool ancestry_is_of_newest(const struct version *version);
/* Whether the newest run has compared the version with storage, or has written it. */
bool ancestry_is_compared(const struct version *version);
/* NEBULA_INVALID: the version must not replace `manifest`, which is in storage. The error names both runs, and says if the stored one
 * is a later writing of the version's own run. */
enum nebula_status ancestry_judge(struct version *version, const struct manifest *manifest, struct nebula_error *error);
enum nebula_status ancestry_check(struct catalogue *catalogue, struct version *version, const struct manifest *manifest,
                                 struct nebula_error *error);
/* Fails the version in favour of the stored one. Only the version's own run can still load it. */
void ancestry_give_way(struct catalogue *catalogue, struct version *version, const struct manifest *manifest, const char *why);
void ancestry_done(struct job *job);

#endif
