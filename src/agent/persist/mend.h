/*
 * mend.h - versions whose files in storage a reader has found damaged (enum version_copy).
 *
 * The agent compares the files that this node's memory has with storage, and writes the damaged ones again. If it has written one, it compares
 * the other files of the version, too: the version is whole if all of them are. If storage fails, it tries again, as long as for a version that
 * cannot be written. Until it has an answer, the version stays in memory.
 *
 * That reads whole files and may take minutes. So it has a thread of its own, one for each storage path, and new versions become durable
 * meanwhile. The thread ends between two chunks if the agent ends, or the version is written again or removed. The next agent begins anew.
 */
#ifndef NB_AGENT_PERSIST_MEND_H
#define NB_AGENT_PERSIST_MEND_H

#include "agent/catalogue/catalogue.h"

/* Starts the thread for the versions of the lane that are due. *due is lowered to when to call again. Lock held. */
void mend_start(struct catalogue *catalogue, struct lane *lane, int64_t now, int64_t *due);
/* Compares one version of the lane on the calling thread, if one is due. False: none is, and *due is lowered to when the next one is. Lock held
 * on entry and return, released meanwhile. */
bool mend_work(struct catalogue *catalogue, const struct lane *lane, int64_t now, int64_t *due);
/* Whether a version of the job waits for that, and its last attempt has not failed since `since_ns`. Lock held. */
bool mend_pending(const struct job *job, int64_t since_ns);

#endif
