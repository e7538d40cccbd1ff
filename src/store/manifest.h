/*
 * manifest.h - what is complete in storage: records and manifests, read,
 * written and checked. docs/formats.md is the specification.
 *
 * Reading accepts hostile bytes: every size, count and string is bounded, and
 * the self-checksum is compared first. Strings in the structs are owned by
 * them; _done frees and is fine on a zeroed struct.
 *
 * Threads: no shared state.
 */
#ifndef NB_STORE_MANIFEST_H
#define NB_STORE_MANIFEST_H

#include "image/image.h"
#include "store/line.h"
#include "store/store.h"

#define MANIFEST_KEY_MAX 1200 /* bytes of a key that a manifest leads to, its NUL included */
#define MANIFEST_DIRECTORY ".nebula"

/* A file as its rank's record describes it, with one CRC-64 per chunk. */
struct record_file {
        char name[256], path[600]; /* path: relative to the tag's directory, encoded */
        uint64_t size;
        bool is_zip;
        uint32_t chunk_bytes;
        uint64_t *chunks;
        size_t chunk_count;
};
struct record {
        char tag[256], job[256], run[256];
        uint64_t generation;
        uint32_t rank, world;
        struct record_file *files;
        size_t file_count;
        double begun, captured, persisted; /* seconds since 1970 */
};
struct manifest_file {
        char name[256], path[600];
        uint64_t size, generation;
        uint32_t rank;
};
struct manifest_record {
        char path[600];
        uint64_t size, generation, crc64; /* of the record's text */
        uint32_t rank;
};
struct manifest {
        char tag[256], job[256], run[256];
        char host[256]; /* that wrote it; "": not known, or several did */
        uint64_t generation, sequence;
        int64_t step; /* -1: none */
        uint32_t world;
        struct line line;
        bool is_damaged;   /* its files are not as it says: who looks for the newest finds that out */
        bool is_abandoned; /* by a later line of its job; a scan finds that out, no document says it */
        struct manifest_file *files;
        size_t file_count;
        struct manifest_record *records;
        size_t record_count;
};

enum nebula_status record_format(const struct record *record, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status record_parse(const char *text, size_t size, struct record *ret_record, struct nebula_error *error);
void record_done(struct record *record);
enum nebula_status manifest_format(const struct manifest *manifest, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status manifest_parse(const char *text, size_t size, struct manifest *ret_manifest, struct nebula_error *error);
void manifest_done(struct manifest *manifest);
/* "rank-00003.json", "rank-00003.g2.json" behind MANIFEST_DIRECTORY "/". */
void record_path(uint32_t rank, uint64_t generation, char ret_path[64]);
/* The same record until its files are in place, where others wait for it: "claim-00003.json". */
void claim_path(uint32_t rank, uint64_t generation, char ret_path[64]);

/* Loads <tag>/.nebula/manifest.json. NEBULA_NOT_FOUND when there is none, NEBULA_CORRUPT when it is not sound. */
enum nebula_status manifest_load(struct store *store, const char *tag, struct manifest *ret_manifest, struct nebula_error *error);
/* Loads the record that manifest->records[index] names, and compares its checksum. */
enum nebula_status manifest_load_record(struct store *store, const struct manifest *manifest, size_t index,
                                        struct record *ret_record, struct nebula_error *error);
/* The chunk checksums of one file: finds and loads its record. */
enum nebula_status manifest_load_file(struct store *store, const struct manifest *manifest, const char *name,
                                      struct record_file *ret_file, struct nebula_error *error);
/* The file of that name, or NULL; it stays the manifest's. */
const struct manifest_file *manifest_find_file(const struct manifest *manifest, const char *name);
/* Moves what a loaded record says about `file` out of it, for who reads many files of one record. */
enum nebula_status record_take_file(struct record *record, const struct manifest_file *file,
                                    struct record_file *ret_file, struct nebula_error *error);
void record_file_done(struct record_file *file);
/* Where the bytes of a file are right now: waiting in g<generation>/, or in place. The key includes the tag's directory. */
enum nebula_status manifest_file_key(struct store *store, const struct manifest *manifest, const struct manifest_file *file,
                                     char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error);
/* A settle has moved the file since `key` was said: what was not found there, or only half of it, is to be looked at again. */
bool manifest_file_moved(struct store *store, const struct manifest *manifest, const struct manifest_file *file, const char *key);
/* The file is where it should be, and as long: else NEBULA_NOT_FOUND or NEBULA_CORRUPT. */
enum nebula_status manifest_check_file(struct store *store, const struct manifest *manifest, const struct manifest_file *file,
                                       struct nebula_error *error);
/* Retention takes versions away, and trainers write tags again, while they are looked at: what is missing, or is other bytes,
 * in one that this manifest does not stand for any more is no damage. False also where storage does not tell. */
bool manifest_is_gone(struct store *store, const struct manifest *manifest);
/* Step 5 of "Order of writing": moves waiting files into place, removes what no manifest names. Idempotent. */
enum nebula_status manifest_settle(struct store *store, const struct manifest *manifest, struct nebula_error *error);

/* Reads a whole file into `data` (mapped, recorded->size bytes) and checks every chunk; a mismatch names file and offset.
 * `recorded` comes from manifest_load_file. */
enum nebula_status manifest_read_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      void *data, struct nebula_error *error);
/* The same file as a descriptor, for a store that has open_read; who reads it checks it. */
enum nebula_status manifest_open_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      int *ret_fd, bool *ret_direct, struct nebula_error *error);
/* Reads and checks every file, without keeping it; calls `report` per file. Goes on after a bad file; returns the first failure. */
enum nebula_status manifest_verify(struct store *store, const struct manifest *manifest,
                                   void (*report)(void *argument, const struct manifest_file *file, enum nebula_status status,
                                                  const struct nebula_error *error),
                                   void *argument, struct nebula_error *error);
/* Removes a version so that a crash in between leaves no half that looks whole: manifest first, then the rest; only
 * what the manifest and records name, temp files of ours, and directories that are empty then. Foreign files stay.
 * Where another program has begun to write the tag again only the manifest goes: the rest is that writing's to take over, or a sweep's.
 * NEBULA_BUSY, and nothing is touched: the tag was written again since that manifest was loaded. Nor is it where that cannot be
 * told: storage failed, or what lies there now is damaged or of a newer version. */
enum nebula_status manifest_remove(struct store *store, const struct manifest *manifest, struct nebula_error *error);

#define MANIFEST_BROKEN_MAX 8 /* described by a scan: who looks for a checkpoint is told of few, the log has all */
struct manifest_broken {
        char tag[256]; /* as the directory is called */
        char reason[512];
};
/* All sound manifests of a storage path, oldest first by sequence; broken ones are counted, and the first of them described. */
struct manifest_scan {
        struct manifest *manifests;
        size_t count;
        size_t broken_count;
        char broken[512];
        size_t link_count; /* symbolic links beside them, which are not followed, and the name of the first */
        char link[256];
        struct manifest_broken broken_list[MANIFEST_BROKEN_MAX];
        size_t bare_count;
        char bare[MANIFEST_BROKEN_MAX][256]; /* tags global_step<n> of directories without a manifest: those with the largest n, largest first */
};
/* A directory without a manifest that was a checkpoint, as far as can be seen: it has files and nothing of Nebula's, or records and none
 * that is being written. Then *ret_broken tells. */
bool manifest_is_bare(struct store *store, const char *tag, struct manifest_broken *ret_broken);
enum nebula_status manifest_scan(struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error);
void manifest_scan_done(struct manifest_scan *scan);
/* Marks what later lines have abandoned, of each job for itself. A scan does so; who changes the list does it again. */
void manifest_scan_mark(struct manifest_scan *scan);
/* Index of the newest: of the tags global_step<n> the one with the largest n of the line that began last, or the youngest other tag,
 * whichever has the later sequence; -1 when empty. What is abandoned comes only when nothing else is left, and what is
 * marked as damaged never. */
int64_t manifest_scan_newest(const struct manifest_scan *scan, const char *job);
/* Debris: versions with no manifest whose files only we can have made (.nebula/ inside), older than `age_ns`; removes ours, keeps what is foreign.
 * *ret_removed: how many versions (or stray temporary files) that were. A file in place that no record or claim names stays. */
enum nebula_status manifest_sweep(struct store *store, int64_t age_ns, size_t *ret_removed, struct nebula_error *error);
/* The same for one tag. */
enum nebula_status manifest_sweep_tag(struct store *store, const char *tag, int64_t age_ns, size_t *ret_removed,
                                      struct nebula_error *error);
/* Removes a tag's .nebula and its directory if they are empty. */
void manifest_remove_directories(struct store *store, const char *directory);

#endif
