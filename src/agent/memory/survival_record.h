/*
 * survival_record.h - one version as a record of its survival log (docs/formats.md).
 *
 * Only the next agent on the same machine reads a survival log. Records are made several
 * times per saved file, with the catalogue's lock held, so they must be fast to make. A
 * record is a head with its size, numbers as they lie in memory, and a checksum of all
 * of these.
 *
 * A log holds several records; the last complete one counts.
 */
#ifndef NB_AGENT_MEMORY_SURVIVAL_RECORD_H
#define NB_AGENT_MEMORY_SURVIVAL_RECORD_H

#include "agent/catalogue/catalogue.h"

/* Returns bytes that the caller frees; NULL: an allocation failed. Files before first_file are left out, because
 * earlier records hold them. */
void *survival_record_format(const struct version *version, size_t first_file, size_t *ret_size);
/* Adds the version `id` that `data` describes to the catalogue and adopts its images. On failure it may have added
 * only the job, and images without users. NEBULA_CORRUPT: the log can never be used. */
enum nebula_status survival_record_read(struct catalogue *catalogue, uint64_t id, const void *data, size_t size,
                                    struct nebula_error *error);

#endif
