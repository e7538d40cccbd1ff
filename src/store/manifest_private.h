/*
 * manifest_private.h - what the files of the manifest module share.
 * Nobody else includes it.
 */
#ifndef NB_STORE_MANIFEST_PRIVATE_H
#define NB_STORE_MANIFEST_PRIVATE_H

#include "store/manifest.h"

#define MANIFEST_CHUNK_MAX (64u << 20) /* a reader holds one chunk per thread */

/* Whether a document says what its name gives: where a file lies follows from its name alone, so no document leads anywhere else. */
bool manifest_path_is_of(const char *path, const char *name);

/* What an entry of a .nebula directory is, by its name. */
enum manifest_entry_kind {
        ENTRY_FOREIGN,
        ENTRY_MANIFEST,
        ENTRY_RECORD,     /* rank-N.json, rank-N.gM.json */
        ENTRY_CLAIM,      /* claim-N.json, claim-N.gM.json: a record whose files are not all in place */
        ENTRY_TEMPORARY,  /* tmp-... */
        ENTRY_COMMITTING, /* captured-N.json, captured-N.wM.json, committed.json: what agents told each other on the way */
        ENTRY_GENERATION, /* gN: a directory of files that wait */
};
/* *ret_generation is set for records, claims and directories of a generation. */
enum manifest_entry_kind manifest_entry_kind(const char *name, uint64_t *ret_generation);
static inline bool manifest_has_generation(enum manifest_entry_kind kind)
{
        return kind == ENTRY_RECORD || kind == ENTRY_CLAIM || kind == ENTRY_GENERATION;
}

/* Joins an encoded tag directory and a path into a key; NEBULA_INVALID when it is too long. */
enum nebula_status manifest_key(char ret_key[MANIFEST_KEY_MAX], const char *directory, const char *path,
                                struct nebula_error *error);
/* Where a file of that generation waits before it is settled. */
enum nebula_status manifest_waiting_key(char ret_key[MANIFEST_KEY_MAX], const char *directory, uint64_t generation,
                                        const char *path, struct nebula_error *error);

/*
 * Removes from <directory>/.nebula the entries of the kinds whose bits are set
 * and whose generation is in the range (only records, claims and directories have one), but not
 * what `keep` names, nor what was changed after `before_ns`.
 */
enum nebula_status manifest_clear_private(struct store *store, const struct manifest *keep, const char *directory,
                                          uint64_t generation_min, uint64_t generation_max,
                                          unsigned kinds, int64_t before_ns, struct nebula_error *error);
/* The tag that lives in this directory of a storage path; false for what no tag encodes to. */
bool manifest_tag_of(const struct old_entry *entry, char ret_tag[256]);

#endif
