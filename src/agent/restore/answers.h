/*
 * answers.h - the ranks of a node load one version.
 *
 * They search one after the other, and another node may make a version durable, or write a tag again, in between. So until a run has committed a
 * version, all its ranks on this node get the version that the first of them has found: one for the newest, and one for each tag. A rank that asks
 * again a minute later asks anew, for all.
 *
 * Call all functions with the catalogue's lock held.
 */
#ifndef NB_AGENT_RESTORE_ANSWERS_H
#define NB_AGENT_RESTORE_ANSWERS_H

#include "agent/catalogue/catalogue.h"

/* Whether the answer to this search has to be that of the session's other ranks. */
bool answers_are_shared(const struct session *session, const struct ipc_find *request);
/* The answer that a rank has got. False: there is none. */
bool answers_given(const struct session *session, const struct ipc_find *request, struct ipc_found *ret_found);
/* Call when the session is about to get this answer. False: a rank has got another one meanwhile. `was_given`: it is the one of answers_given.
 * Without memory for it, it is not shared. */
bool answers_give(const struct session *session, const struct ipc_find *request, const struct ipc_found *found, bool was_given);
/* Call if the version cannot be found any more. False: another rank has got it, so this one may not get another. */
bool answers_forget(const struct session *session, const struct ipc_find *request);
/* Call if a reader has found the version damaged: the next answer is another one, for all ranks. */
void answers_doubt(const struct session *session, const struct ipc_find *request);
void answers_end(struct job *job);

#endif
