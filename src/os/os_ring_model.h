/*
 * os_ring_model.h - rings for the tables that fail calls and lose writes: what goes through a ring is then seen by them as any pread
 * and pwrite. For tests only. Misuse of a ring aborts.
 */
#ifndef NB_OS_OS_RING_MODEL_H
#define NB_OS_OS_RING_MODEL_H

#include "os/os.h"

int os_ring_model_open(uint32_t depth, struct os_ring **ret_ring);
int os_ring_model_register(struct os_ring *ring, const struct os_ring_buffer *buffers, uint32_t count);
int os_ring_model_submit(struct os_ring *ring);
/* All members of the table, but for those of the three above that it has replaced. */
void os_ring_model_use(struct os_table *table);

#endif
