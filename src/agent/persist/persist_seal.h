/*
 * persist_seal.h - checksums of a version's file, for another room that sends it. Without the lock.
 */
#ifndef NB_AGENT_PERSIST_PERSIST_SEAL_H
#define NB_AGENT_PERSIST_PERSIST_SEAL_H

#include "agent/catalogue/catalogue.h"

/* Seals a file of a pinned version. Returns its image, mapped and held until storage_unseal, and a copy of its checksums, which the
 * caller frees. The version itself may lose them at any time. Any thread. */
enum nebula_status storage_seal(struct catalogue *catalogue, struct version *version, const char *name,
                                struct image **ret_image, uint64_t **ret_chunks, struct nebula_error *error);
void storage_unseal(struct catalogue *catalogue, struct image *image);

/* Maps an image for a thread that reads it; other threads may map it at the same time. After NEBULA_OK the thread calls sealing_unmap, which may
 * keep the mapping for the next time. */
enum nebula_status sealing_map(struct catalogue *catalogue, struct image *image, void **ret_data, struct nebula_error *error);
void sealing_unmap(struct catalogue *catalogue, struct image *image);

#endif
