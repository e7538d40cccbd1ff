/*
 * spill.h - images for versions that do not fit into the memory tier
 * (on_full="stream").
 *
 * Such an image is a nameless file on a local disk. The trainer copies into its
 * mapping as into any other image, and the kernel writes the pages to the disk. A
 * slow disk slows that copy, so memory stays bounded, also by a cgroup's limit.
 * All space is allocated beforehand: a full disk is an error here and never a
 * signal in the trainer. The file has no name, so nothing is left behind when a
 * process dies. Until its version is durable, the image survives trainers but not
 * the agent.
 *
 * The file lies in $NEBULA_SPILL_DIR, else in the storage path if that is on a
 * local disk. Memory file systems are refused, because they save no memory.
 * Network file systems are refused, because a failed access to the mapping would
 * be a signal in the trainer.
 *
 * Call without the lock. The caller lists the image with memory_add.
 */
#ifndef NB_AGENT_MEMORY_SPILL_H
#define NB_AGENT_MEMORY_SPILL_H

#include "agent/memory/memory.h"

/* may_make: the storage path may have to be made. Once it was there, only its store makes it again: its mount may have gone. */
enum nebula_status spill_create(const char *persist_path, bool may_make, uint64_t capacity, struct image **ret_image, struct nebula_error *error);

#endif
