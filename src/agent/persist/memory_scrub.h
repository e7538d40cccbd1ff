/*
 * memory_scrub.h - compares images in memory with their checksums while the agent has nothing else to do. If bytes have changed, the version leaves
 * memory: storage serves it. A version that only memory has fails.
 *
 * A thread of low priority reads one image at a time, and ends when a version begins or is due. The clock starts it.
 */
#ifndef NB_AGENT_PERSIST_MEMORY_SCRUB_H
#define NB_AGENT_PERSIST_MEMORY_SCRUB_H

#include "agent/catalogue/catalogue.h"

/* Returns when to call again, as the clock's other functions. Lock held. */
int64_t memory_scrub_look(struct catalogue *catalogue, int64_t now_ns);
/* The image is compared as soon as the agent is idle. Lock held. */
void memory_scrub_soon(struct catalogue *catalogue, struct image *image);

#endif
