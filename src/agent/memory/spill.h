/*
 * spill.h - images for what does not fit into the memory tier (on_full="stream").
 *
 * Such an image is a file without a name on a local disk: the trainer copies
 * into its mapping as into any other image, and the kernel writes pages out as
 * it needs them, so the page cache is the ring and its dirty limit the size of
 * it; a disk that is slow slows that copy, and memory stays bounded, also by a
 * cgroup's limit. All space is allocated beforehand: a full disk is an error
 * here and never a signal in the trainer. Having no name, it leaves no debris,
 * whoever dies; until its version is durable it survives trainers, not the agent.
 *
 * It lies in $NEBULA_SPILL_DIR, else in the storage path when that is a local
 * disk. Memory-backed and network file systems are refused, since the first
 * saves no memory and a fault of the second would be a signal in the trainer.
 *
 * Called without the lock. The caller lists the image with memory_add.
 */
#ifndef NB_AGENT_MEMORY_SPILL_H
#define NB_AGENT_MEMORY_SPILL_H

#include "agent/memory/memory.h"

enum nebula_status spill_create(const char *persist_path, uint64_t capacity, struct image **ret_image, struct nebula_error *error);

#endif
