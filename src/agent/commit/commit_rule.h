/*
 * commit_rule.h - decides when a version is complete. No other file commits a version on its node.
 *
 * A rank begins a tag, saves files, and closes its part; no rank waits for
 * another. A version is complete when nothing is still being copied and
 *
 *      N > 0                     N distinct files were captured, over all ranks
 *      NEBULA_FILES_ALL_RANKS    every rank of the world closed its part
 *      NEBULA_FILES_OPEN         every part that was begun is closed, and no other rank is about to begin one
 *
 * All functions need the catalogue's lock.
 */
#ifndef NB_AGENT_COMMIT_COMMIT_RULE_H
#define NB_AGENT_COMMIT_COMMIT_RULE_H

#include "agent/catalogue/catalogue.h"

/* Closes open-ended versions that have been quiet. Returns when to call again; INT64_MAX: no need. */
int64_t commit_quiet(struct catalogue *catalogue, struct job *job, int64_t now_ns);
/* Completes `version` if its rule is met. */
void commit_check(struct catalogue *catalogue, struct version *version);
/* Whether WAIT for `state` by this session is over. */
bool commit_rank_reached(const struct version *version, const struct session *session, enum nebula_state state);
/* Whether the version will be complete as soon as the running copies end, with no file carried over, unless a rank dies or saves more.
 * Some of it can then be written to storage already. */
bool commit_foreseen(const struct catalogue *catalogue, struct version *version);
/* Whether every part is closed or its rank still copies: the last copy may then complete the version. */
bool commit_parts_end(const struct version *version);
/* Fails a version that waits for a rank that left before it had begun the version. */
void commit_fail_without(struct catalogue *catalogue, struct version *version);

#endif
