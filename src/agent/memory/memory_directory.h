/*
 * memory_directory.h - the directory of the memory tier, which one agent at a time holds by the lock of its file `lock`.
 */
#ifndef NB_AGENT_MEMORY_MEMORY_DIRECTORY_H
#define NB_AGENT_MEMORY_MEMORY_DIRECTORY_H

#include <stddef.h>

struct memory;

/* Creates the directory if there is none, checks owner and mode, locks it, and measures it. On failure returns a negative errno, and *ret_why
 * says why; memory->lock_fd is to be closed if it is not -1. */
int memory_directory_take(struct memory *memory, const char *directory, char *ret_why, size_t why_size);
/* Sets how much of the directory images may take: its free space and their own. On failure returns a negative errno and changes nothing. */
int memory_directory_measure(struct memory *memory);

#endif
