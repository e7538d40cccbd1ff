/*
 * answers.h - the ranks of a node load one version.
 *
 * They search one after the other, and another node may make a version durable, or write a tag again, in between. So until a run on one node has
 * committed a version, all its ranks get the answer that the first of them got: for the newest of a path, for each tag, and for the list of
 * versions. A minute after all of them have asked, a search is a new question. Ranks that ask again and again in step get each answer equally
 * often. If not all ask, a rank that asks again a minute later asks anew, for all.
 *
 * "There is none" is an answer for ranks that ask within ten seconds. A rank that asks again after it asks anew.
 *
 * Call all functions with the catalogue's lock held.
 */
#ifndef NB_AGENT_RESTORE_ANSWERS_H
#define NB_AGENT_RESTORE_ANSWERS_H

#include "agent/catalogue/catalogue.h"

enum answer_kind { ANSWER_OPEN, ANSWER_VERSION, ANSWER_NONE };

/* Whether the session's answers about a path ("": its own) are those of the job's other ranks. */
bool answers_are_shared(const struct session *session, const char *path);
/* The answer that a rank has got. ANSWER_OPEN: no rank has asked. */
enum answer_kind answers_given(const struct session *session, const struct ipc_find *request, struct ipc_found *ret_found);
/* Call when the session is about to get this answer. found: NULL: there is none. False: a rank has got another one meanwhile. `was_given`: it is
 * the one of answers_given. Without memory for it, it is not shared. */
bool answers_give(const struct session *session, const struct ipc_find *request, const struct ipc_found *found, bool was_given);
/* Call if the version cannot be found any more. False: another rank has got it, so this one may not get another. */
bool answers_forget(const struct session *session, const struct ipc_find *request);
/* Call if a reader has found the version damaged: the next answer is another one, for all ranks. */
void answers_doubt(const struct session *session, const struct ipc_find *request);
/* The versions of a path that the ranks choose from, by the hashes of their tags, sorted: those of the first rank's list. The caller frees
 * ret_listed->tags. False: no memory, and the list is not shared. */
struct listed {
        uint64_t *tags;
        size_t count;
};
bool answers_listed(const struct session *session, const char *path, const struct listed *own, struct listed *ret_listed);
bool listed_has(const struct listed *listed, uint64_t tag);
uint64_t listed_hash(const char *tag);
void listed_sort(struct listed *listed);
void answers_end(struct job *job);

#endif
