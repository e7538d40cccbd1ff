/*
 * repair.h - gives damaged files and records of a stored version their bytes back: from the agent's memory, which for files asks other nodes'
 * memory, too, or from another storage that has the version. Every byte is compared with the version's own checksums first, so it does not matter
 * whose it is.
 *
 * Threads: no shared state.
 */
#ifndef NB_CLI_REPAIR_H
#define NB_CLI_REPAIR_H

#include <jansson.h>

#include "cli/target.h"

/* Writes the damaged records of a version again, from the agent's memory or from the copy in `from` (NULL: none), and returns the source; NULL: it wrote
 * none. A record of a copy differs in names and places. So one is made from it, and put in place only if it is, byte for byte, the one that the
 * manifest names. For each that stays damaged, a line on stderr says so. */
const char *repair_records(struct store *store, const struct manifest *manifest, struct store *from);
/* The newest entry of the tag cannot be read, or is missing. Its manifest is made again from the records, the index and memory (rebuild.h). Else, if the index
 * says that it was the version which `from` (NULL: none) has, that one becomes the next entry. Returns the source of the repair. NULL: there is none, and a line
 * on stderr says why; *ret_has_changed: the tag was written again or removed meanwhile. */
const char *repair_manifest(struct store *store, const char *tag, struct store *from, bool *ret_has_changed);

/* `version`: the result of check_version (check.h). Repairs its damaged files, and checks them again: a file that is sound then gets "ok": true, no damage,
 * and "repaired": the source. `from` NULL: memory alone. */
void repair_version(struct store *store, const struct manifest *manifest, struct store *from, json_t *version);

#endif
