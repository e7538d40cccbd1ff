/*
 * index.h - what the versions of a storage path are, in the names of empty objects: so a list tells it, and no manifest is read.
 *
 *      <root>/.nebula/index/job-<job>/run-<run>/<tag>/<sequence>-<line>-<number>-<writing>-<world>-<files>-<size>-<written>[-<thinned>]
 *
 * A tag with exactly one entry is at rest: its log says what the entry says, and no write has left anything behind. An agent removes the entry
 * before it writes or removes the tag, and makes the new one as its last step. So a tag without an entry, or with several, is read as if there were
 * no index.
 *
 * The index is a hint all the same: a program can remove a tag without it, and an agent can sleep before its last step. The log of the tag decides
 * when a version is loaded or removed. A version whose names are too long for a key has no entry.
 *
 * Threads: no shared state. Errors are the store's.
 */
#ifndef NB_STORE_INDEX_H
#define NB_STORE_INDEX_H

#include "store/manifest.h"

#define INDEX_PREFIX MANIFEST_DIRECTORY "/index/"

struct index_row {
        const char *directory; /* the tag's; a slash follows */
        size_t length;
        struct store_entry *entry;
};
struct index {
        struct store_list keys;
        struct index_row *rows; /* by their directories */
        size_t count;
};

enum nebula_status index_put(struct store *store, const struct manifest *manifest, struct nebula_error *error);
enum nebula_status index_remove(struct store *store, const struct manifest *manifest, struct nebula_error *error);
enum nebula_status index_load(struct store *store, struct index *ret_index, struct nebula_error *error);
/* Makes the missing entry of a tag at rest. */
void index_mend(struct store *store, const char *tag);
/* The version of a tag with one entry, as a brief manifest without its host. Its line has the last fork alone, with INDEX_AFTER in place of the
 * step. False: the tag is not at rest. */
#define INDEX_AFTER INT64_MAX
bool index_find(const struct index *index, const char *directory, struct manifest *ret_manifest);
/* Whether index_find takes this row. */
bool index_takes(const struct index *index, size_t row);
void index_done(struct index *index);

#endif
