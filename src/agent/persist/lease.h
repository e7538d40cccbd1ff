/* lease.h - leases in storage of the versions that readers of this node hold (store/leases.h). */
#ifndef NB_AGENT_PERSIST_LEASE_H
#define NB_AGENT_PERSIST_LEASE_H

#include "agent/catalogue/catalogue.h"

/* Whether the worker is needed. Lock held. */
bool lease_pending(const struct job *job);
/* Does one piece of work: writes a lease that is due, or drops one that no reader holds. Lock held; released meanwhile. False: none is due. */
bool lease_work(struct catalogue *catalogue, struct job *job, int64_t now, int64_t *due);
/* Frees the list. The leases in storage end by themselves. */
void lease_forget(struct job *job);

#endif
