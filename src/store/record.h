/*
 * record.h - the record of one agent's share of a version: its files, with their checksums. docs/formats.md is the specification.
 */
#ifndef NB_STORE_RECORD_H
#define NB_STORE_RECORD_H

#include "store/manifest.h"

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
        uint8_t sha256[32];
        bool has_sha256; /* the record says so: its agent signs versions */
        bool is_signed;  /* a signature says so, and readers compare it (signature.h) */
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
        uint32_t world;
        double persisted; /* seconds since 1970 */
        struct record_rank *ranks; /* ascending, at least one: the first is in the record's name */
        size_t rank_count;
        struct record_file *files;
        size_t file_count;
        uint32_t *by_name; /* indices of the files by their names; NULL: not sorted, because the record is not complete */
};

enum nebula_status record_format(const struct record *record, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status record_parse(const char *text, size_t size, struct record *ret_record, struct nebula_error *error);
void record_done(struct record *record);
void record_file_done(struct record_file *file);

#endif
