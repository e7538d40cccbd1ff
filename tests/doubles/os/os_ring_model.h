/*
 * os_ring_model.h - rings for the tables that fail calls and lose writes. These tables then see a request in a ring as a
 * pread or pwrite. For tests only. Misuse of a ring aborts.
 */
#ifndef NB_OS_OS_RING_MODEL_H
#define NB_OS_OS_RING_MODEL_H

#include "os/os.h"

int os_ring_model_open(uint32_t depth, struct os_ring **ret_ring);
int os_ring_model_register(struct os_ring *ring, const struct os_ring_buffer *buffers, uint32_t count);
int os_ring_model_submit(struct os_ring *ring);
/* Sets all ring members of `table`. */
void os_ring_model_use(struct os_table *table);

#endif
