/*
 * announce.h - the node documents of one version that is being saved: small
 * documents of the agents in <tag>/.nebula/ (docs/protocol.md):
 *
 *      captured-<writing>-00004-<sum>.json   an agent: these ranks of mine have captured
 *      committed-<writing>.json              one agent: the captured documents cover the version
 *      wanted-<writing>.json                 an agent: a client waits until the version is durable
 *
 * <writing> is writing_prefix: job, run and the number of the writing. Each document is created and never replaced. An agent that has more
 * ranks to announce writes another document, which has the earlier ranks, too. <sum> is a checksum of the document.
 * Reading accepts hostile bytes, as manifest.h does; _done frees and is fine on
 * a zeroed struct. No shared state.
 */
#ifndef NB_STORE_ANNOUNCE_H
#define NB_STORE_ANNOUNCE_H

#include <stdbool.h>

#include "store/line.h"
#include "store/store.h"

/* Identifies the writing of a tag: the n-th of that run. */
struct announce_of {
        char tag[256], job[256], run[256];
        uint64_t writing;
        uint32_t world;
};
struct captured_rank {
        uint32_t rank, files; /* files: that it saved */
};
struct captured {
        struct announce_of of;
        char host[256];
        uint32_t pid;                  /* of the lowest of its ranks */
        uint64_t sequence;             /* when it captured, ns since 1970 */
        bool goes_back;                /* to step `after`, as far as this node knows: begins a new line (line.h) */
        int64_t after;
        struct captured_rank *ranks;   /* ascending */
        size_t rank_count;
};
struct committed {
        struct announce_of of;
        uint64_t sequence;
        struct line line;
        bool persist;    /* every node must make it durable; else a `wanted` document may follow */
        uint32_t *ranks; /* the ranks whose records make up the version, ascending */
        size_t rank_count;
        size_t node_count; /* nodes that write a record; 0: unknown */
        char given_up[256]; /* why a rank has given the version up: then it has no ranks, and never becomes complete; "": it has not */
};

enum nebula_status captured_format(const struct captured *captured, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status captured_parse(const char *text, size_t size, struct captured *ret_captured, struct nebula_error *error);
void captured_done(struct captured *captured);
enum nebula_status committed_format(const struct committed *committed, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status committed_parse(const char *text, size_t size, struct committed *ret_committed, struct nebula_error *error);
void committed_done(struct committed *committed);
bool announce_same(const struct announce_of *a, const struct announce_of *b);

#define ANNOUNCE_PATH_MAX 128
/* Paths after the tag's directory. */
void captured_path(const struct captured *captured, const char *text, size_t size, char ret_path[ANNOUNCE_PATH_MAX]);
void committed_path(const struct announce_of *of, char ret_path[ANNOUNCE_PATH_MAX]);
void wanted_path(const struct announce_of *of, char ret_path[ANNOUNCE_PATH_MAX]);
/* The beginning of the paths of all captured documents of that writing; of all committed documents of that run. */
void captured_prefix(const struct announce_of *of, char ret_prefix[ANNOUNCE_PATH_MAX]);
void committed_prefix(const struct announce_of *of, char ret_prefix[ANNOUNCE_PATH_MAX]);

/* A node document by the end of its key. */
struct announce_name {
        char writing[64]; /* the writing_prefix */
        uint64_t number;  /* of the writing in its run */
        uint32_t rank;    /* of a captured document: the lowest */
};
/* `name`: the key after <tag>/.nebula/. False: no node document has that name. */
bool announce_name_parse(const char *name, struct announce_name *ret_name);

#endif
