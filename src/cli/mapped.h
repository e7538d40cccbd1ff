/*
 * mapped.h - the read-only bytes of a stored object or of a file in the agent's memory. They
 * are mapped if the store is a directory, else read into memory.
 */
#ifndef NB_CLI_MAPPED_H
#define NB_CLI_MAPPED_H

#include "store/store.h"

struct cli_agent;

struct mapped {
        void *data; /* NULL if the object is empty */
        uint64_t size;
};

enum nebula_status mapped_open(struct store *store, const char *key, struct mapped *ret_mapped, struct nebula_error *error);
enum nebula_status mapped_open_path(const char *path, struct mapped *ret_mapped, struct nebula_error *error);
/* Checks the image and fills in the CRC-32s that the agent has not filled in yet. */
enum nebula_status mapped_open_memory(struct cli_agent *agent, uint64_t version_id, const char *name, struct mapped *ret_mapped,
                                      struct nebula_error *error);
void mapped_close(struct mapped *mapped);

#endif
