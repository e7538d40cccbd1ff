/*
 * mapped.h - the read-only bytes of a stored object or of a file in the agent's memory. They
 * are mapped if the store is a directory, else read into memory. A page of a mapped file that cannot be read becomes zeros:
 * call mapped_end before anything is said about the bytes.
 */
#ifndef NB_CLI_MAPPED_H
#define NB_CLI_MAPPED_H

#include "store/store.h"

struct cli_agent;

struct mapped {
        void *data; /* NULL if the object is empty */
        uint64_t size;
        int watch; /* of a mapped file (os->watch_map), else -1 */
};

enum nebula_status mapped_open(struct store *store, const char *key, struct mapped *ret_mapped, struct nebula_error *error);
enum nebula_status mapped_open_path(const char *path, struct mapped *ret_mapped, struct nebula_error *error);
/* Checks the image and fills in the CRC-32s that the agent has not filled in yet. */
enum nebula_status mapped_open_memory(struct cli_agent *agent, uint64_t version_id, const char *name, struct mapped *ret_mapped,
                                      struct nebula_error *error);
/* Returns `status`, unless a part of the file could not be read: then nothing that was found in the bytes counts. `place` names the file. The
 * caller no longer reads the bytes. */
enum nebula_status mapped_end(struct mapped *mapped, const char *place, enum nebula_status status, struct nebula_error *error);
void mapped_close(struct mapped *mapped);

#endif
