/*
 * commit_end.h - ranks that leave, and the versions that wait for them. The lock is held.
 */
#ifndef NB_AGENT_COMMIT_COMMIT_END_H
#define NB_AGENT_COMMIT_COMMIT_END_H

#include "agent/catalogue/catalogue.h"

/* Closes the open-ended parts of a rank, except that of tag `except`; NULL: all. */
void commit_close_open(struct catalogue *catalogue, struct job *job, uint32_t rank, const char *except);
/* Call when the rank's process has ended: closes, removes or fails its part. False: the version held nothing and was freed. */
bool commit_rank_ended(struct catalogue *catalogue, struct version *version, uint32_t rank);
/* Closes the open-ended parts of processes that have died. The agent may not have read the end of their connections yet. */
void commit_close_dead(struct catalogue *catalogue, struct job *job);
/* Call when a trainer has joined its job, or has left it by its end or for another job. */
void commit_session_began(const struct session *session);
void commit_session_ended(struct catalogue *catalogue, struct session *session);

#endif
