/*
 * commit.h - the requests of a rank: it begins a tag, saves files, and closes its part. commit_rule.h decides when the version is complete.
 *
 * A tag that is saved again begins another writing, a version of its own;
 * files that it does not write carry over from the writing before (carry_over.h) when it
 * becomes complete. A rank that has nothing to write may close the complete tag again
 * before another rank's first save has begun the next writing. The version
 * remembers that (idle_parts), so that the next writing does not wait for this rank.
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
/* Returns the version in memory of this writing of the tag by the session's run or, if that is gone, of the next later one. Changes
 * nothing. NULL: NEBULA_NOT_FOUND. */
struct version *commit_known(const struct session *session, const char *tag, uint64_t writing, struct nebula_error *error);
/* The version that a file saved to `version` becomes part of: `version` itself, or another writing of its tag. */
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
/* COMMIT of one rank. commit_nothing: of a checkpoint that has saved no file to the version, and may be of its next writing. */
enum nebula_status commit_part(struct catalogue *catalogue, struct session *session, struct version *version,
                               struct nebula_error *error);
enum nebula_status commit_nothing(struct catalogue *catalogue, struct session *session, struct version *version,
                                  struct nebula_error *error);

#endif
