/*
 * index.h - finds the newest version with one listing: <root>/.nebula/index/<order>-<line>-<job>/<tag>, an empty object per version,
 * written before its manifest. <order> counts down with the sequence, so that the newest comes first. <line> is the sequence with which
 * the version's line of history began. <job> is a checksum of the job's name.
 *
 * The index is a hint: the log of the tag decides. An entry may be stale, or early: its agent died before the manifest. Each version of
 * this format has its entry. Two tags that are written again and again differ in nothing else.
 *
 * Threads: no shared state. Errors are the store's.
 */
#ifndef NB_STORE_INDEX_H
#define NB_STORE_INDEX_H

#include "store/manifest.h"

#define INDEX_PREFIX MANIFEST_DIRECTORY "/index/"

enum nebula_status index_put(struct store *store, const struct manifest *manifest, struct nebula_error *error);
enum nebula_status index_remove(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* Loads the newest version of a job (NULL: of any). NEBULA_BUSY: the index lacks a tag or is stale,
 * so the caller has to scan. NEBULA_NOT_FOUND: the path holds no tag. */
enum nebula_status index_newest(struct store *store, const char *job, struct manifest *ret_manifest, struct nebula_error *error);
/* Removes entries of absent tags that are older than `before_ns` by the store's clock. */
enum nebula_status index_sweep(struct store *store, int64_t before_ns, struct nebula_error *error);

#endif
