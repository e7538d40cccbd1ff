/*
 * manifest.h - a version in storage: its manifest. docs/formats.md is the specification.
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
        uint64_t sequence;    /* of the version that wrote it and its files */
        uint32_t rank;        /* the lowest rank that it covers */
};
struct manifest_names; /* owns the memory of the names */
struct manifest {
        char tag[256], job[256], run[256];
        char host[256]; /* of the agent that wrote it; "": unknown, or several agents */
        uint64_t number; /* of its entry in the tag's log */
        uint64_t sequence, writing; /* writing: the n-th of the tag in this run */
        int64_t step; /* -1: none */
        uint32_t world;
        uint64_t referred; /* bytes of the files of this writing that were taken from a source in storage, not sent */
        struct line line;
        char thinned[THIN_TEXT_MAX]; /* patterns of files that were removed from the version, with commas between them; "": none (thin.h) */
        bool is_damaged;   /* its files differ from the manifest; set by a search for the newest version */
        bool is_abandoned; /* by a later line of its job; set by a scan, not stored */
        bool is_brief;     /* without the lists of files and records (manifest_make_brief) */
        uint64_t stamp;    /* the checksum of the stamp of its entry, set by a scan (tag_log.h) */
        uint64_t size, written; /* is_brief: the results of manifest_size and manifest_written, */
        size_t all_files;       /* and of manifest_count */
        struct manifest_file *files;
        size_t file_count;
        struct manifest_record *records;
        size_t record_count;
        struct manifest_names *names;
        uint32_t *by_name; /* indices of the files by their names; NULL: not sorted, because the manifest is not complete */
};

enum nebula_status manifest_format(const struct manifest *manifest, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status manifest_parse(const char *text, size_t size, struct manifest *ret_manifest, struct nebula_error *error);
void manifest_done(struct manifest *manifest);
/* Frees the lists of files and records. The results of the functions below stay. */
void manifest_make_brief(struct manifest *manifest);
void manifest_copy_brief(const struct manifest *manifest, struct manifest *ret_copy);
/* Makes room for that many more files and records. NEBULA_NO_MEMORY: the manifest is unchanged. */
enum nebula_status manifest_reserve(struct manifest *manifest, size_t files, size_t records, struct nebula_error *error);
/* Adds a copy of `file` and of its name; manifest_reserve has made room. NEBULA_NO_MEMORY. */
enum nebula_status manifest_add_file(struct manifest *manifest, const struct manifest_file *file, struct nebula_error *error);

/* Call this after the last manifest_add_file: it makes manifest_find_file fast. NEBULA_NO_MEMORY: the search stays slow. */
enum nebula_status manifest_sort_names(struct manifest *manifest, struct nebula_error *error);

/* The number of its files. */
size_t manifest_count(const struct manifest *manifest);
/* The bytes of all files. */
uint64_t manifest_size(const struct manifest *manifest);
/* The bytes that this writing of the tag has sent to storage. */
uint64_t manifest_written(const struct manifest *manifest);

/* The sequence of the version that wrote the file. _origin: 0 if that is this version. */
uint64_t manifest_file_sequence(const struct manifest *manifest, const struct manifest_file *file);
uint64_t manifest_file_origin(const struct manifest *manifest, const struct manifest_file *file);
#endif
