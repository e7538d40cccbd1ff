/*
 * commit.h - decides when a version is complete. No other file commits a version on its node.
 *
 * A rank begins a tag, saves files, and closes its part; no rank waits for
 * another. A version is complete when nothing is still being copied and
 *
 *      N > 0                     N distinct files were captured, over all ranks
 *      NEBULA_FILES_ALL_RANKS    every rank of the world closed its part
 *      NEBULA_FILES_OPEN         every part that was begun is closed, and no other rank is about to begin one
 *
 * A tag that is saved again starts the next generation, a version of its own;
 * files that it does not write carry over from the generation before (carry_over.h) when it
 * becomes complete. A rank that has nothing to write may close the complete tag again
 * before another rank's first save has begun the next generation. The version
 * remembers that (idle_parts), so that the next generation does not wait for this rank.
 *
 * All functions need the catalogue's lock.
 */
#ifndef NB_AGENT_COMMIT_COMMIT_H
#define NB_AGENT_COMMIT_COMMIT_H

#include "agent/catalogue/catalogue.h"

/* BEGIN of one rank: returns the tag's version that the rank may add to, or a new one. NULL with an error: an impossible tag or goal,
 * or a failed allocation. */
struct version *commit_begin(struct catalogue *catalogue, struct session *session, const char *tag, int64_t file_goal,
                             struct nebula_error *error);
/* Returns the tag's version of this writing in memory or, if that is gone, of the next later one. Changes nothing. NULL:
 * NEBULA_NOT_FOUND. */
struct version *commit_known(struct job *job, const char *tag, uint64_t generation, struct nebula_error *error);
/* The version that a file saved to `version` becomes part of: `version` itself, or the next generation. */
struct version *commit_target(struct catalogue *catalogue, struct session *session, struct version *version,
                              struct nebula_error *error);
/* Lends `image` for a file. */
struct image_loan *commit_loan(struct catalogue *catalogue, struct session *session, struct version *version,
                               const struct ipc_image *request, struct image *image, struct nebula_error *error);
/* Ends a loan whose image its trainer never got. */
void commit_end_loan(struct catalogue *catalogue, struct version *version, struct image_loan *loan);
/* Call when the loan's image holds the whole file. If this file was the last of its rank's part, the part closes. */
enum nebula_status commit_captured(struct catalogue *catalogue, struct version *version, struct image_loan *loan,
                                   const struct ipc_captured *request, struct nebula_error *error);
/* Call when the beginning of the loan's image is final. */
enum nebula_status commit_copied(struct catalogue *catalogue, struct version *version, struct image_loan *loan,
                                 const struct ipc_copied *request, struct nebula_error *error);
/* COMMIT of one rank. */
enum nebula_status commit_part(struct catalogue *catalogue, struct session *session, struct version *version,
                               struct nebula_error *error);
/* Closes the open-ended parts of a rank, except that of tag `except`; NULL: all. */
void commit_close_open(struct catalogue *catalogue, struct job *job, uint32_t rank, const char *except);
/* Call when the rank's process has ended: closes, removes or fails its part. False: the version held nothing and was freed. */
bool commit_rank_ended(struct catalogue *catalogue, struct version *version, uint32_t rank);
/* Closes the open-ended parts of processes that have died. The agent may not have read the end of their connections yet. */
void commit_close_dead(struct catalogue *catalogue, struct job *job);
/* Call when a trainer has joined its job, or has left it by its end or for another job. */
void commit_session_began(const struct session *session);
void commit_session_ended(struct catalogue *catalogue, struct session *session);
/* Closes open-ended versions that have been quiet. Returns when to call again; INT64_MAX: no need. */
int64_t commit_quiet(struct catalogue *catalogue, int64_t now_ns);
/* Completes `version` if its rule is met. */
void commit_check(struct catalogue *catalogue, struct version *version);
/* Whether WAIT for `state` by this session is over. */
bool commit_rank_reached(const struct version *version, const struct session *session, enum nebula_state state);
/* Whether the version will be complete as soon as the running copies end, with no file carried over, unless a rank dies or saves more.
 * Some of it can then be written to storage already. */
bool commit_foreseen(const struct catalogue *catalogue, struct version *version);
/* Whether every part is closed or its rank still copies: the last copy may then complete the version. */
bool commit_parts_end(const struct version *version);

#endif
