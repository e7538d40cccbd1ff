/*
 * manifest_keys.h - the keys of a version's objects. All are made from names.
 */
#ifndef NB_STORE_MANIFEST_KEYS_H
#define NB_STORE_MANIFEST_KEYS_H

#include "store/manifest.h"

/* The name of a writing: job, run, the n-th writing of the tag in that run, and the n-th try of it. */
void writing_name(const char *job, const char *run, uint64_t writing, uint32_t attempt, char ret_name[WRITING_MAX]);
/* The common prefix of the names of all tries of one writing. */
void writing_prefix(const char *job, const char *run, uint64_t writing, char ret_prefix[WRITING_MAX]);

/* Keys, from the encoded tag. NEBULA_INVALID: too long. */
enum nebula_status record_key(const char *directory, const char *writing, uint32_t first_rank, char ret_key[MANIFEST_KEY_MAX],
                              struct nebula_error *error);
/* The key of the record until its files are in place. Other nodes wait for it there. */
enum nebula_status claim_key(const char *directory, const char *writing, uint32_t first_rank, char ret_key[MANIFEST_KEY_MAX],
                             struct nebula_error *error);
/* The key of a file in place or, with a writing, apart. */
enum nebula_status file_key(const char *directory, const char *writing, const char *name, char ret_key[MANIFEST_KEY_MAX],
                            struct nebula_error *error);
/* The key of a file of the version. */
enum nebula_status manifest_file_key(const struct manifest *manifest, const struct manifest_file *file, char ret_key[MANIFEST_KEY_MAX],
                                     struct nebula_error *error);

/* The same, relative to the tag's directory. */
enum nebula_status manifest_file_path(const struct manifest *manifest, const struct manifest_file *file, char ret_path[MANIFEST_KEY_MAX],
                                      struct nebula_error *error);

#endif
