/*
 * rebuild.h - makes the manifest of a version again, if the newest entry of its tag's log is damaged or missing.
 *
 * The records of the writing name its files. The rest of the manifest comes from the entry of the index, from `known` (what an agent's memory
 * has of the version), or from both. The new manifest must have the number of files, their bytes, the run, the writing and the sequence that these
 * say. Otherwise nothing is written, and the error has the key and says why. Without the index, records of an earlier entry count only if the damaged
 * entry names their writing: else it may be a removal. A file that carries over has a record of an earlier writing, so such a
 * version is not rebuilt.
 *
 * The new manifest is the next entry of the log, or takes the place of a missing one. It is created if that name is free, so no newer version is
 * replaced. If a rebuild is interrupted, a later one finds the same records. Two at once: one makes the entry.
 *
 * Threads: no shared state. Errors are the store's.
 */
#ifndef NB_STORE_REBUILD_H
#define NB_STORE_REBUILD_H

#include "store/manifest.h"

/* Whether the index has a version of the tag whose manifest is missing, though no removal has ended since. */
bool rebuild_is_lost(struct store *store, const char *tag);
/* `known`: NULL, or head and files of the version of that tag in memory; some files may be missing. `was_durable` false: memory does not know whether it
 * was written, so without the index the rest of the damaged manifest must name its records. NEBULA_CORRUPT: it is not proven what the
 * manifest was. NEBULA_NOT_FOUND: no manifest is missing. NEBULA_BUSY: the entry is sound, or the tag was written again or removed meanwhile. */
enum nebula_status rebuild_manifest(struct store *store, const char *tag, const struct manifest *known, bool was_durable, struct nebula_error *error);

#endif
