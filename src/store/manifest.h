/*
 * manifest.h - the versions in storage: records and manifests, read, written,
 * checked and removed. docs/formats.md is the specification.
 *
 * A tag has a log: the objects <tag>/.nebula/manifest-<n>.json. Each is created
 * and never replaced (tag_log.h). The entry with the largest n decides. It is a
 * manifest, and the tag holds that version, or it is a removal.
 *
 * A file lies at <tag>/<name>, or apart: at <tag>/.nebula/<writing>/<name>. The
 * manifest says which. All keys follow from names, none is taken from a document.
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
#include "store/line.h"
#include "store/store.h"

#define MANIFEST_KEY_MAX 1200 /* bytes of a key, its NUL included */
#define MANIFEST_DIRECTORY ".nebula"
#define MANIFEST_NAME_MAX 256
#define WRITING_MAX 64        /* bytes of the name of a writing, its NUL included */
#define WRITING_RUN_CHARS 17  /* the first of them name the job and run */

/* A file as its node's record describes it, with one CRC-64 per chunk. */
struct record_file {
        char name[MANIFEST_NAME_MAX];
        uint64_t size;
        uint32_t rank, chunk_bytes;
        bool is_zip;
        bool is_apart; /* lies below its writing, since <tag>/<name> was taken or may be a view */
        struct store_mark mark; /* that its upload left; "": none */
        uint64_t referred;      /* bytes of it that were in storage already */
        uint64_t *chunks;
        size_t chunk_count;
};
/* A rank whose share the record covers, also if it saved no file. Times are seconds since 1970. */
struct record_rank {
        uint32_t rank;
        double begun, captured;
};
/* What one agent has written of a version. */
struct record {
        char tag[256], job[256], run[256], writing[WRITING_MAX];
        uint64_t number; /* that the next entry of the tag's log had when the files were begun: a removal since may take them */
        uint64_t generation;
        uint32_t world;
        double persisted; /* seconds since 1970 */
        struct record_rank *ranks; /* ascending, at least one: the first names the record */
        size_t rank_count;
        struct record_file *files;
        size_t file_count;
        uint32_t *by_name; /* indices of the files by their names; NULL: not sorted (a record that is being made) */
};
struct manifest_file {
        const char *name;     /* the manifest's */
        uint64_t size, generation; /* generation: of the version that wrote it */
        uint32_t rank;
        uint32_t record;      /* index of the record that describes it */
        bool is_apart;
};
struct manifest_record {
        char writing[WRITING_MAX];
        uint64_t size, crc64; /* of the record's text */
        uint64_t generation;
        uint32_t rank;        /* the lowest that it covers */
};
struct manifest_names; /* the memory of the names */
struct manifest {
        char tag[256], job[256], run[256];
        char host[256]; /* of the agent that wrote it; "": not known, or several did */
        uint64_t number; /* of its entry in the tag's log */
        uint64_t generation, sequence; /* generation: which writing of the tag, as the job counts; larger than that of the entry before */
        int64_t step; /* -1: none */
        uint32_t world;
        uint64_t referred; /* bytes of the files of this generation that were not sent, since storage had them already */
        struct line line;
        bool is_damaged;   /* its files are not as it says: a search for the newest finds that out */
        bool is_abandoned; /* by a later line of its job; a scan finds that out, no document says it */
        struct manifest_file *files;
        size_t file_count;
        struct manifest_record *records;
        size_t record_count;
        struct manifest_names *names;
        uint32_t *by_name; /* indices of the files by their names; NULL: not sorted (a manifest that is being made) */
};

enum nebula_status record_format(const struct record *record, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status record_parse(const char *text, size_t size, struct record *ret_record, struct nebula_error *error);
void record_done(struct record *record);
void record_file_done(struct record_file *file);
enum nebula_status manifest_format(const struct manifest *manifest, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status manifest_parse(const char *text, size_t size, struct manifest *ret_manifest, struct nebula_error *error);
void manifest_done(struct manifest *manifest);
/* Makes room for so many files more and so many records more. NEBULA_NO_MEMORY: the manifest is as before. */
enum nebula_status manifest_reserve(struct manifest *manifest, size_t files, size_t records, struct nebula_error *error);
/* Adds a copy of `file` with a copy of its name; there is room (manifest_reserve). NEBULA_NO_MEMORY. */
enum nebula_status manifest_add_file(struct manifest *manifest, const struct manifest_file *file, struct nebula_error *error);

/* All files are added: from now on manifest_find_file is fast. NEBULA_NO_MEMORY: it stays slow. */
enum nebula_status manifest_sort_names(struct manifest *manifest, struct nebula_error *error);

/* The name of a writing: which run of which job, the n-th of the tag in that run, and which try of it. */
void writing_name(const char *job, const char *run, uint64_t writing, uint32_t attempt, char ret_name[WRITING_MAX]);
/* What the names of all tries of one writing begin with. */
void writing_prefix(const char *job, const char *run, uint64_t writing, char ret_prefix[WRITING_MAX]);

/* Keys, from the encoded tag. NEBULA_INVALID: too long. */
enum nebula_status record_key(const char *directory, const char *writing, uint32_t first_rank, char ret_key[MANIFEST_KEY_MAX],
                              struct nebula_error *error);
/* The same record until its files are in place, where other nodes wait for it. */
enum nebula_status claim_key(const char *directory, const char *writing, uint32_t first_rank, char ret_key[MANIFEST_KEY_MAX],
                             struct nebula_error *error);
/* Of a file in place, or with a writing, apart. */
enum nebula_status file_key(const char *directory, const char *writing, const char *name, char ret_key[MANIFEST_KEY_MAX],
                            struct nebula_error *error);
/* Where the bytes of a file lie. */
enum nebula_status manifest_file_key(const struct manifest *manifest, const struct manifest_file *file, char ret_key[MANIFEST_KEY_MAX],
                                     struct nebula_error *error);

/* The same behind the tag's directory. */
enum nebula_status manifest_file_path(const struct manifest *manifest, const struct manifest_file *file, char ret_path[MANIFEST_KEY_MAX],
                                      struct nebula_error *error);

/* How many bytes this writing of the tag has sent to storage. */
uint64_t manifest_written(const struct manifest *manifest);

/* Loads the version that a tag holds. NEBULA_NOT_FOUND: none; NEBULA_CORRUPT: the newest entry of its log is not sound. */
enum nebula_status manifest_load(struct store *store, const char *tag, struct manifest *ret_manifest, struct nebula_error *error);
/* Loads the record that manifest->records[index] names, and compares its checksum. */
enum nebula_status manifest_load_record(struct store *store, const struct manifest *manifest, size_t index,
                                        struct record *ret_record, struct nebula_error *error);
/* The chunk checksums of one file: finds and loads its record. */
enum nebula_status manifest_load_file(struct store *store, const struct manifest *manifest, const char *name,
                                      struct record_file *ret_file, struct nebula_error *error);
/* Indices of the files, in the order of their records, for a reader of all of them; the caller frees it. NULL: no memory. */
uint32_t *manifest_files_by_record(const struct manifest *manifest);
/* The file of that name, or NULL; it stays the manifest's. */
const struct manifest_file *manifest_find_file(const struct manifest *manifest, const char *name);
/* Moves what a loaded record says about `file` out of it, for a reader of many files of one record. It can be taken once. */
enum nebula_status record_take_file(struct record *record, const struct manifest_file *file,
                                    struct record_file *ret_file, struct nebula_error *error);
/* The file is where it should be, and as long: else NEBULA_NOT_FOUND or NEBULA_CORRUPT. */
enum nebula_status manifest_check_file(struct store *store, const struct manifest *manifest, const struct manifest_file *file,
                                       struct nebula_error *error);
/* All files and records that the manifest names are there, and as long: one listing. NEBULA_NOT_FOUND or NEBULA_CORRUPT: one is not. */
enum nebula_status manifest_check_present(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* The same after its commit, and nothing has been entered into the log since: the version is durable. NEBULA_NOT_FOUND also if an entry or
 * the end of a removal has come. NEBULA_BUSY: all is there, but a sweep goes on that may take some of it. Then a version that nobody else
 * can have called durable is taken back, and any other looked at again later. */
enum nebula_status manifest_check_all(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* Retention takes versions away, and trainers write tags again, while a reader looks at them. If this is no longer the version of its tag,
 * then missing or other bytes are no damage. False also if storage does not tell. */
bool manifest_is_gone(struct store *store, const struct manifest *manifest);

/* Reads a whole file into `data` (mapped, recorded->size bytes) and checks every chunk; a mismatch names file and offset.
 * `recorded` comes from manifest_load_file. */
enum nebula_status manifest_read_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      void *data, struct nebula_error *error);
/* The same file as a descriptor, for a store that lends them; the reader checks the bytes. */
enum nebula_status manifest_open_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      int *ret_fd, bool *ret_direct, struct nebula_error *error);
/* Reads and checks every file, without keeping it; calls `report` per file. Goes on after a bad file; returns the first failure. */
enum nebula_status manifest_verify(struct store *store, const struct manifest *manifest,
                                   void (*report)(void *argument, const struct manifest_file *file, enum nebula_status status,
                                                  const struct nebula_error *error),
                                   void *argument, struct nebula_error *error);

/*
 * Enters a removal into the tag's log, and then removes what the log and its records name, and Nebula's own objects. Foreign files stay.
 * Each object goes only while it is the one that was there before the entry.
 * NEBULA_BUSY, and nothing is touched: the tag was written again since that manifest was loaded, or is being removed.
 */
enum nebula_status manifest_remove(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* Removes what is left of a removal that did not end. Does nothing where the newest entry of the log is no removal. */
enum nebula_status manifest_end_removal(struct store *store, const char *tag, struct nebula_error *error);
/* Removes what one try of a writing has put, which no manifest will name. */
void manifest_forsake(struct store *store, const char *tag, const char *writing);
/* After a commit: <tag>/<name> shows the committed bytes of each file that lies apart, as far as the store can copy; what only entries before
 * this one named goes. NEBULA_BUSY: another entry has been made. If that happens meanwhile, its views are made again, for this call may have
 * put older bytes over them. */
enum nebula_status manifest_publish(struct store *store, const struct manifest *manifest, const struct manifest *before,
                                    struct nebula_error *error);
#define MANIFEST_BROKEN_MAX 8 /* described by a scan: a search for a checkpoint tells of few, the log has all */
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
        char bare[MANIFEST_BROKEN_MAX][256]; /* tags global_step<n> of directories without a version: those with the largest n, largest first */
};
/* Whether a directory without a version was a checkpoint, as far as can be seen: it has files and nothing of Nebula's, or records and
 * no sign of a writing that goes on. Then *ret_broken tells. */
bool manifest_is_bare(struct store *store, const char *tag, struct manifest_broken *ret_broken);
enum nebula_status manifest_scan(struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error);
void manifest_scan_done(struct manifest_scan *scan);
/* Marks what later lines have abandoned, of each job for itself. A scan does so; a caller that changes the list does it again. */
void manifest_scan_mark(struct manifest_scan *scan);
/* Index of the newest: of the tags global_step<n> the one with the largest n of the line that began last, or the youngest other tag,
 * whichever has the later sequence; -1 when empty. An abandoned version counts only when nothing else is left, and a damaged one
 * never. */
int64_t manifest_scan_newest(const struct manifest_scan *scan, const char *job);
/* Removes the debris of interrupted writings: objects of Nebula's that no entry of a log names and that are older than `age_ns`, by the
 * store's clock. *ret_removed: of how many tags, or stray temporary objects. A file in place that no record or claim names stays. */
enum nebula_status manifest_sweep(struct store *store, int64_t age_ns, size_t *ret_removed, struct nebula_error *error);
/* The same for one tag. */
enum nebula_status manifest_sweep_tag(struct store *store, const char *tag, int64_t age_ns, size_t *ret_removed,
                                      struct nebula_error *error);

#endif
