/*
 * scan.h - all versions of a storage path.
 */
#ifndef NB_STORE_SCAN_H
#define NB_STORE_SCAN_H

#include "store/manifest.h"

#define MANIFEST_BROKEN_MAX 8 /* described by a scan; the log has all */
struct manifest_broken {
        char tag[256]; /* the directory's name */
        char reason[512];
};
/* All sound manifests of a storage path, oldest first by sequence. Broken ones are counted, and the first of them described. */
struct manifest_scan {
        struct manifest *manifests;
        size_t count;
        size_t broken_count;
        char broken[512];
        size_t link_count; /* symbolic links in the root, which are not followed, and the name of the first */
        char link[256];
        struct manifest_broken broken_list[MANIFEST_BROKEN_MAX];
        size_t bare_count;
        char bare[MANIFEST_BROKEN_MAX][256]; /* tags global_step<n> without a version: those with the largest n, in descending order */
        uint64_t confirmed;        /* the caller's: the sequence of the newest version, once its manifest was read */
        struct store_list doubted; /* tags whose entries of the index were wrong: their logs are read */
        struct store_list rest; /* of a scan by the index, for a sweep: the tags that are not at rest, and entries of the index and of the root that do not belong there */
};
/* Whether a directory without a version seems to have been a checkpoint: it has files and no object of Nebula's, or records and no sign
 * of a running writing. Then *ret_broken describes it. */
bool manifest_is_bare(struct store *store, const char *tag, struct manifest_broken *ret_broken);
/* Reads each manifest. */
enum nebula_status manifest_scan(struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error);
/* Takes the versions from the index, and reads the manifests of those tags alone that the index does not describe (index.h), and one of each
 * line of history. All manifests are brief. Those from the index are hints: damage of a manifest shows when it is read. */
enum nebula_status manifest_scan_index(struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error);
/* Reads the manifest of one of its versions. NEBULA_BUSY: the log of the tag says otherwise, or is broken, and the scan was corrected. */
enum nebula_status manifest_scan_confirm(struct store *store, struct manifest_scan *scan, size_t index, struct manifest *ret_manifest,
                                         struct nebula_error *error);
/* Reads the manifest of the newest version of the job (NULL: of any). If it is gone, another one may have taken its place, so the path is scanned again.
 * NEBULA_BUSY: versions come and go faster than that. NEBULA_NOT_FOUND: there
 * is none that can be read; the scan counts those that are broken. */
enum nebula_status manifest_scan_load_newest(struct store *store, struct manifest_scan *scan, const char *job, struct manifest *ret_manifest,
                                             int64_t *ret_index, struct nebula_error *error);

struct manifest_scan_options {
        bool by_index; /* as manifest_scan_index */
        /* NULL, or called on the caller's thread about once a second while manifests are read. `newest`: those read so far of the largest
         * steps, at most MANIFEST_TOLD_MAX, in the order of a scan. `read` of `count` tags were looked at. */
        void (*report)(void *argument, const struct manifest_scan *newest, size_t read, size_t count);
        void *argument;
};
#define MANIFEST_TOLD_MAX 5000
/* Scans a path again. `scan` is the result of the scan before, or zeroed, or has manifests of another origin. Takes over the manifests whose
 * entries are still the newest ones of their logs, without reading them. If `stamp` of a manifest is 0, the number of its entry decides. After a failure `scan` has the manifests that are known so far, for the next call. */
enum nebula_status manifest_scan_again(struct store *store, const struct manifest_scan_options *options, struct manifest_scan *scan,
                                       struct nebula_error *error);
void manifest_scan_done(struct manifest_scan *scan);
/* Marks the versions of each job that its later lines have abandoned. A scan does this. False: no memory. */
bool manifest_scan_mark(struct manifest_scan *scan);
/* The entries of the scan, in its order, as far as they were marked. The caller frees them; they use the scan. NULL: no memory. */
struct order_entry *manifest_scan_entries(const struct manifest_scan *scan);
/* Index of the newest version of the job (NULL: of any); -1: none. A damaged one is never the newest. */
int64_t manifest_scan_newest(const struct manifest_scan *scan, const char *job);

#endif
