/*
 * manifest_load.h - loads a version's manifest and records, and finds files in them.
 */
#ifndef NB_STORE_MANIFEST_LOAD_H
#define NB_STORE_MANIFEST_LOAD_H

#include "store/record.h"

/* Loads the version that a tag holds. NEBULA_NOT_FOUND: none; NEBULA_CORRUPT: the newest entry of its log is not sound. */
enum nebula_status manifest_load(struct store *store, const char *tag, struct manifest *ret_manifest, struct nebula_error *error);
/* Loads the record that manifest->records[index] names, and compares its checksum. */
enum nebula_status manifest_load_record(struct store *store, const struct manifest *manifest, size_t index,
                                        struct record *ret_record, struct nebula_error *error);
/* Finds and loads the record of one file: its chunk checksums. */
enum nebula_status manifest_load_file(struct store *store, const struct manifest *manifest, const char *name,
                                      struct record_file *ret_file, struct nebula_error *error);
/* Indices of the files, in the order of their records; the caller frees it. NULL: no memory. */
uint32_t *manifest_files_by_record(const struct manifest *manifest);
/* The file of that name, or NULL; the manifest owns it. */
const struct manifest_file *manifest_find_file(const struct manifest *manifest, const char *name);
/* Moves the description of `file` out of a loaded record. This works once per file. It serves a reader of many files of one record. */
enum nebula_status record_take_file(struct record *record, const struct manifest_file *file,
                                    struct record_file *ret_file, struct nebula_error *error);
/* Whether this is no longer the version of its tag: retention may have removed it, or a trainer may have written the tag again, while it
 * was read. Then missing or other bytes are no damage. False also if storage does not answer. */
bool manifest_is_gone(struct store *store, const struct manifest *manifest);

#endif
