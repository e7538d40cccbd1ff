/*
 * manifest.h - the versions in storage: records and manifests, read, written,
 * checked and removed. docs/formats.md is the specification.
 *
 * A tag has a log: the objects <tag>/.nebula/manifest-<n>.json. Each is created
 * and never replaced (tag_log.h). The entry with the largest n decides. It is a
 * manifest, and the tag holds that version, or it is a removal.
 *
 * A file lies at <tag>/<name>, or apart: at <tag>/.nebula/<writing>/<name>. The
 * manifest says which. All keys are made from names; no document contains a key.
 *
 * Readers accept hostile bytes: every size, count and string is bounded, and the
 * document's own checksum is compared first. Strings in the structs are owned by
 * them; _done frees and is fine on a zeroed struct.
 *
 * Threads: no shared state.
 */
#ifndef NB_STORE_MANIFEST_H
#define NB_STORE_MANIFEST_H

#include "image/image.h"
#include "store/order.h"
#include "store/store.h"

#define MANIFEST_KEY_MAX 1200 /* bytes of a key, its NUL included */
#define MANIFEST_DIRECTORY ".nebula"
#define MANIFEST_NAME_MAX 256
#define THIN_TEXT_MAX 128     /* bytes of patterns of removed files, with a NUL */
#define WRITING_MAX 64        /* bytes of the name of a writing, its NUL included */
#define WRITING_RUN_CHARS 17  /* the first characters name the job and run */

/* A file as its node's record describes it, with one CRC-64 per chunk. */
struct record_file {
        char name[MANIFEST_NAME_MAX];
        uint64_t size;
        uint32_t rank, chunk_bytes;
        bool is_zip;
        bool is_apart; /* lies below its writing, because <tag>/<name> was taken or may be a view */
        struct store_mark mark; /* of its upload; "": none */
        uint64_t referred;      /* its bytes that were taken from a source in storage, not sent */
        uint64_t *chunks;
        size_t chunk_count;
};
/* A rank whose share the record covers, even if it saved no file. Times are seconds since 1970. */
struct record_rank {
        uint32_t rank;
        double begun, captured;
};
/* The share of a version that one agent has written. */
struct record {
        char tag[256], job[256], run[256], writing[WRITING_MAX];
        uint64_t number; /* number of the next log entry when the files were begun: a later removal may remove them */
        uint64_t generation;
        uint32_t world;
        double persisted; /* seconds since 1970 */
        struct record_rank *ranks; /* ascending, at least one: the first is in the record's name */
        size_t rank_count;
        struct record_file *files;
        size_t file_count;
        uint32_t *by_name; /* indices of the files by their names; NULL: not sorted, because the record is not complete */
};
struct manifest_file {
        const char *name;     /* the manifest's */
        uint64_t size;
        uint32_t rank;
        uint32_t record;      /* index of the record that describes it */
        bool is_apart;
};
struct manifest_record {
        char writing[WRITING_MAX];
        uint64_t size, crc64; /* of the record's text */
        uint64_t generation;  /* of the version that wrote it and its files */
        uint32_t rank;        /* the lowest rank that it covers */
};
struct manifest_names; /* owns the memory of the names */
struct manifest {
        char tag[256], job[256], run[256];
        char host[256]; /* of the agent that wrote it; "": unknown, or several agents */
        uint64_t number; /* of its entry in the tag's log */
        uint64_t generation, sequence; /* generation: the n-th whole writing of the tag; larger than that of the entry before */
        int64_t step; /* -1: none */
        uint32_t world;
        uint64_t referred; /* bytes of the files of this generation that were taken from a source in storage, not sent */
        struct line line;
        char thinned[THIN_TEXT_MAX]; /* patterns of files that were removed from the version, with commas between them; "": none (thin.h) */
        bool is_damaged;   /* its files differ from the manifest; set by a search for the newest version */
        bool is_abandoned; /* by a later line of its job; set by a scan, not stored */
        bool is_brief;     /* without the lists of files and records (manifest_make_brief) */
        uint64_t stamp;    /* the checksum of the stamp of its entry, set by a scan (tag_log.h) */
        uint64_t size, written; /* is_brief: the results of manifest_size and manifest_written */
        struct manifest_file *files;
        size_t file_count;
        struct manifest_record *records;
        size_t record_count;
        struct manifest_names *names;
        uint32_t *by_name; /* indices of the files by their names; NULL: not sorted, because the manifest is not complete */
};

enum nebula_status record_format(const struct record *record, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status record_parse(const char *text, size_t size, struct record *ret_record, struct nebula_error *error);
void record_done(struct record *record);
void record_file_done(struct record_file *file);
enum nebula_status manifest_format(const struct manifest *manifest, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status manifest_parse(const char *text, size_t size, struct manifest *ret_manifest, struct nebula_error *error);
void manifest_done(struct manifest *manifest);
/* Frees the lists of files and records. Their counts stay, and so do the sums of bytes. */
void manifest_make_brief(struct manifest *manifest);
void manifest_copy_brief(const struct manifest *manifest, struct manifest *ret_copy);
/* Makes room for that many more files and records. NEBULA_NO_MEMORY: the manifest is unchanged. */
enum nebula_status manifest_reserve(struct manifest *manifest, size_t files, size_t records, struct nebula_error *error);
/* Adds a copy of `file` and of its name; manifest_reserve has made room. NEBULA_NO_MEMORY. */
enum nebula_status manifest_add_file(struct manifest *manifest, const struct manifest_file *file, struct nebula_error *error);

/* Call this after the last manifest_add_file: it makes manifest_find_file fast. NEBULA_NO_MEMORY: the search stays slow. */
enum nebula_status manifest_sort_names(struct manifest *manifest, struct nebula_error *error);

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

/* The bytes of all files. */
uint64_t manifest_size(const struct manifest *manifest);
/* The bytes that this writing of the tag has sent to storage. */
uint64_t manifest_written(const struct manifest *manifest);

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
/* The generation of the version that wrote the file. */
uint64_t manifest_file_generation(const struct manifest *manifest, const struct manifest_file *file);
/* The file of that name, or NULL; the manifest owns it. */
const struct manifest_file *manifest_find_file(const struct manifest *manifest, const char *name);
/* Moves the description of `file` out of a loaded record. This works once per file. It serves a reader of many files of one record. */
enum nebula_status record_take_file(struct record *record, const struct manifest_file *file,
                                    struct record_file *ret_file, struct nebula_error *error);
/* Checks with one listing that all files and records of the manifest exist with the right sizes: else NEBULA_NOT_FOUND or
 * NEBULA_CORRUPT. */
enum nebula_status manifest_check_present(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* The same after the commit, and checks that no entry followed: then the version is durable. NEBULA_NOT_FOUND: an object is missing, a
 * newer entry was made, or a removal has ended. NEBULA_BUSY: all objects exist, but a running sweep may remove some of them. Then the
 * caller takes the version back, unless another agent may have called it durable: such a version is checked again later. */
enum nebula_status manifest_check_all(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* Whether this is no longer the version of its tag: retention may have removed it, or a trainer may have written the tag again, while it
 * was read. Then missing or other bytes are no damage. False also if storage does not answer. */
bool manifest_is_gone(struct store *store, const struct manifest *manifest);

/* Reads a whole file into `data` (mapped, recorded->size bytes) and checks every chunk; a mismatch names file and offset.
 * `recorded` comes from manifest_load_file. */
enum nebula_status manifest_read_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      void *data, struct nebula_error *error);
/* The key of the file's object, which must exist with the right size. For manifest_read_chunks. */
enum nebula_status manifest_locate_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                        char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error);
/* Reads and checks ranges of whole chunks. `data`: the address of the file's first byte. For stores with read_chunks. */
enum nebula_status manifest_read_chunks(struct store *store, const char *key, const struct record_file *recorded, void *data,
                                        const struct store_range *ranges, size_t count, struct nebula_error *error);
/* Bytes of files that both have read in this process, those of running reads included. */
uint64_t manifest_read_bytes(void);
/* Opens the file as a descriptor (STORE_LENDS_FD); the reader checks the bytes. is_shared: as of the store's open_read. */
enum nebula_status manifest_open_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      bool is_shared, int *ret_fd, bool *ret_direct, struct nebula_error *error);
/* Reads and checks files without keeping their bytes; calls `report` per file. `wanted`: by index in manifest->files; NULL: all. Goes on after a
 * bad file; returns the first failure. */
enum nebula_status manifest_verify(struct store *store, const struct manifest *manifest, const bool *wanted,
                                   void (*report)(void *argument, const struct manifest_file *file, enum nebula_status status,
                                                  const struct nebula_error *error),
                                   void *argument, struct nebula_error *error);

/* Enters a removal into the tag's log, then removes the objects that the log and its records name, and Nebula's own objects. Other
 * programs' files stay. Each object is removed only if it is the one that was there before the entry. NEBULA_BUSY: nothing was removed,
 * because the tag was written again since the manifest was loaded, or is being removed. */
enum nebula_status manifest_remove(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* Completes a removal that was interrupted. Does nothing if the newest entry of the log is not a removal. */
enum nebula_status manifest_end_removal(struct store *store, const char *tag, struct nebula_error *error);
/* Removes the objects of one try of a writing, for a try that no manifest will name. */
void manifest_forsake(struct store *store, const char *tag, const char *writing);
/* Call this after a commit. Copies the committed bytes of each file that lies apart to <tag>/<name>, if the store can copy, and removes
 * objects that only earlier entries named. NEBULA_BUSY: another entry was made. If that happened during the call, this call may have put
 * older bytes over its views, so they are made again. */
enum nebula_status manifest_publish(struct store *store, const struct manifest *manifest, const struct manifest *before,
                                    struct nebula_error *error);
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
};
/* Whether a directory without a version seems to have been a checkpoint: it has files and no object of Nebula's, or records and no sign
 * of a running writing. Then *ret_broken describes it. */
bool manifest_is_bare(struct store *store, const char *tag, struct manifest_broken *ret_broken);
enum nebula_status manifest_scan(struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error);

struct manifest_scan_options {
        bool is_brief; /* the manifests are made brief */
        /* NULL, or called on the caller's thread about once a second while manifests are read. `newest`: those read so far of the largest
         * steps, at most MANIFEST_TOLD_MAX, in the order of a scan. `read` of `count` tags were looked at. */
        void (*tell)(void *argument, const struct manifest_scan *newest, size_t read, size_t count);
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
/* Removes the debris of interrupted writings: Nebula's objects that no log entry names and that are older than `age_ns` by the store's
 * clock. *ret_removed: the number of tags, and of stray temporary objects, that had some. A file in place stays if no record or claim
 * names it. */
enum nebula_status manifest_sweep(struct store *store, int64_t age_ns, size_t *ret_removed, struct nebula_error *error);
/* The same, but uploads of keys that the caller goes on with stay, and so do temporary objects of such keys. */
enum nebula_status manifest_sweep_but(struct store *store, int64_t age_ns, bool (*goes_on)(void *argument, const char *key), void *argument,
                                      size_t *ret_removed, struct nebula_error *error);
/* The same for one tag. */
enum nebula_status manifest_sweep_tag(struct store *store, const char *tag, int64_t age_ns, size_t *ret_removed,
                                      struct nebula_error *error);

#endif
