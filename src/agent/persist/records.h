/*
 * records.h - the texts of a version's records in storage, for a reader that finds one damaged: no other document has the checksums.
 *
 * The agent keeps them while memory has the version: those that this agent has written, those that it read to write the manifest, and those
 * that carry over.
 *
 * Threads: the catalogue's lock guards the list.
 */
#ifndef NB_AGENT_PERSIST_RECORDS_H
#define NB_AGENT_PERSIST_RECORDS_H

#include <jansson.h>

#include "agent/catalogue/catalogue.h"

struct plan;
struct record_text {
        char *text;
        size_t size;
        uint64_t crc64;
};
struct records {
        struct record_text *texts;
        size_t count, bytes;
};

/* Keeps a copy of the text, unless the texts of the version would take too much memory. Lock held. */
void records_keep(struct version *version, const char *text, size_t size);
/* Call when the manifest of the plan's writer is in storage: forgets the texts of records that it does not name, and reads those of this node's
 * ranks that an earlier writing or agent has made. Without the lock. */
void records_conclude(const struct plan *plan);
/* A copy of the list. NEBULA_NO_MEMORY: it is empty. Lock held. */
enum nebula_status records_copy(const struct version *version, struct records *ret_records, struct nebula_error *error);
/* Frees the list. A zeroed one is fine. */
void records_done(struct records *records);
/* The text of manifest->records[index]; NULL: none. */
const struct record_text *records_find(const struct records *records, const struct manifest *manifest, size_t index);
/* An array of the texts. */
enum nebula_status records_report(struct catalogue *catalogue, uint64_t version_id, char **ret_text, struct nebula_error *error);

#endif
