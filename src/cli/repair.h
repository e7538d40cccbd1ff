/*
 * repair.h - gives damaged files of a stored version their bytes back: from the agent's memory, which asks other nodes' memory, too, or from
 * another storage that has the version. Every byte is compared with the version's own checksums first, so it does not matter whose it is.
 *
 * In a directory it writes the damaged chunks into the file, so that other names of the file are repaired, too. In an object store it removes the object and
 * writes it again. If that is interrupted, the file is missing, and a later call repairs it.
 *
 * Threads: no shared state.
 */
#ifndef NB_CLI_REPAIR_H
#define NB_CLI_REPAIR_H

#include <jansson.h>

#include "cli/target.h"

/* `version`: the result of check_version (check.h). Repairs its damaged files, and checks them again: a file that is sound then gets "ok": true, no damage,
 * and "repaired": the source. `from` NULL: memory alone. */
void repair_version(struct store *store, const struct manifest *manifest, struct store *from, json_t *version);

#endif
