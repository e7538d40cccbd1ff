/*
 * manifest_private.h - what the files of the manifest module share. Only they include it.
 */
#ifndef NB_STORE_MANIFEST_PRIVATE_H
#define NB_STORE_MANIFEST_PRIVATE_H

#include "store/manifest.h"

#define MANIFEST_CHUNK_MAX (64u << 20) /* a reader holds one chunk per thread */

/* The kinds of objects below <tag>/.nebula/, by their names. */
enum manifest_entry_kind {
        ENTRY_FOREIGN,
        ENTRY_MANIFEST,   /* manifest-<n>.json */
        ENTRY_RECORD,     /* <writing>.record-<rank>.json */
        ENTRY_CLAIM,      /* <writing>.claim-<rank>.json: a record; not all of its files are in place */
        ENTRY_APART,      /* <writing>/<name> */
        ENTRY_TEMPORARY,  /* of the driver (store_is_temporary) */
        ENTRY_COMMITTING, /* node documents (announce.h) */
        ENTRY_SIGNATURE,  /* signature-<sequence>-<key>.json (signature.h) */
        ENTRY_SWEEP,      /* sweep-<hex>.json: a sweep is removing debris of this tag */
};
struct manifest_entry {
        enum manifest_entry_kind kind;
        uint64_t number;           /* of a manifest; the sequence of a signature's version */
        char writing[WRITING_MAX]; /* of a record, a claim, or a file apart; of a node document without the number of a try */
        uint32_t rank;             /* of a record or claim */
};
bool writing_is_sound(const char *name);
/* `name`: the key after <tag>/.nebula/. */
struct manifest_entry manifest_entry(const char *name);
/* Whether it is a document of format 1: a manifest, record or claim. Only a removal of the tag reads and removes these. */
bool manifest_is_format_1(const char *name);
/* The part of a key after "<directory>/"; NULL: the key is elsewhere. */
const char *manifest_behind(const char *key, const char *directory);
/* The part of a key after "<directory>/.nebula/"; NULL: the key is elsewhere. */
const char *manifest_behind_private(const char *key, const char *directory);

/* The lists of files and records in a manifest's text (manifest_lists.c). */
struct buf;
/* Adds them after the members of the document's head. False: a name is not UTF-8, or memory is out. */
bool manifest_lists_write(const struct manifest *manifest, struct buf *to);
/* Reads them from a text whose seal was checked into the empty `manifest`. The entries are sound, except that the sequence of none was
 * compared with that of the manifest. *ret_rest: the text with two empty lists. False: the text is written in another way, or memory is
 * out; the caller calls manifest_done. */
bool manifest_lists_read(const char *text, size_t size, struct manifest *manifest, struct buf *ret_rest);

/* Whether this object below .nebula belongs to a manifest (NULL: none): a record, a file that lies apart, or a signature. */
bool manifest_names_record(const struct manifest *manifest, const struct manifest_entry *entry);
bool manifest_names(const struct manifest *manifest, const struct manifest_entry *entry, const char *key);
/* Joins an encoded tag and a path into a key; NEBULA_INVALID when it is too long. */
enum nebula_status manifest_key(char ret_key[MANIFEST_KEY_MAX], const char *directory, const char *path,
                                struct nebula_error *error);
/* The tag of an entry of the root's listing; false: no tag has that encoded name. */
bool manifest_tag_of(const struct store_entry *entry, char ret_tag[256]);

/* The objects that one removal removes; their keys are copies. */
struct victims {
        struct store_victim *list;
        size_t count, capacity;
};
enum nebula_status victims_add(struct victims *victims, const struct store_entry *entry, struct nebula_error *error);
/* Removes records and claims last: if the removal is interrupted, they still name the files in place. */
enum nebula_status victims_remove(struct victims *victims, struct store *store, struct nebula_error *error);
void victims_done(struct victims *victims);
/* Adds the objects in place that a record or claim names, if their sizes fit. Skips names that a manifest in `keep` has. */
enum nebula_status victims_add_recorded(struct victims *victims, struct store *store, const char *tag, const char *record_key,
                                        const struct manifest *keep, size_t keep_count, const struct store_list *objects,
                                        struct nebula_error *error);
/* manifest_remove; without a manifest, completes a removal that was interrupted. */
enum nebula_status manifest_remove_tag(struct store *store, const char *tag, const struct manifest *manifest, struct nebula_error *error);

#endif
