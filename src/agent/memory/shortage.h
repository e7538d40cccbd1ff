/*
 * shortage.h - gives bytes back that the machine needs more than checkpoints do.
 *
 * The machine, or the agent's cgroup, is short of memory if hardly any is left, or if little is left and all threads wait for memory
 * for a tenth of the time. Every 2 seconds, as long as that is so, the agent gives back one of these, the first that there is:
 *
 *     1. images that no version uses, and copies of what storage has
 *     2. versions that storage has, but not the newest of its job
 *     3. the newest, if storage has it
 *
 * Loads of these versions then come from storage. The page maker makes no images ahead of time meanwhile.
 */
#ifndef NB_AGENT_MEMORY_SHORTAGE_H
#define NB_AGENT_MEMORY_SHORTAGE_H

#include "agent/catalogue/catalogue.h"

/* Lock held; does no slow work. Returns when to call again. */
int64_t shortage_look(struct catalogue *catalogue, int64_t now_ns);

#endif
