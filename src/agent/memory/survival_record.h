/*
 * survival_record.h - one version as the bytes of its survival log (docs/formats.md).
 *
 * A survival log is read by the next agent on the same machine and by nobody else, and
 * written several times for every file that is saved, with the catalogue's lock
 * held. So it is numbers as they lie in memory, one after the other, between a
 * head with their size and a checksum of all before it.
 *
 * A survival log holds such records one after the other; the last whole one counts.
 */
#ifndef NB_AGENT_MEMORY_SURVIVAL_RECORD_H
#define NB_AGENT_MEMORY_SURVIVAL_RECORD_H

#include "agent/catalogue/catalogue.h"

/* Bytes that the caller frees; NULL: no memory. first_file: the version's files before that one are left to the records before. */
void *survival_record_format(const struct version *version, size_t first_file, size_t *ret_size);
/* Adds the version `id` that `data` describes to the catalogue, and takes over its images. On failure nothing is added
 * but perhaps the job, and images that nobody holds; NEBULA_CORRUPT: the survival log will never be of use. */
enum nebula_status survival_record_read(struct catalogue *catalogue, uint64_t id, const void *data, size_t size,
                                    struct nebula_error *error);

#endif
