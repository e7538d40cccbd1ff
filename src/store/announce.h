/*
 * announce.h - the node documents of one version that is being saved: small
 * documents of the agents in <tag>/.nebula/ (docs/protocol.md):
 *
 *      captured-00004[.w2].json   an agent: my ranks of this writing have captured
 *      committed.json             one agent: the captured documents cover the version
 *
 * Documents count together only if they are of the same job, run and writing.
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
        uint64_t generation, sequence; /* generation: that this agent would give it; sequence: when it captured, ns since 1970 */
        bool goes_back;                /* to step `after`, as far as this node knows: begins a new line (line.h) */
        int64_t after;
        struct captured_rank *ranks;   /* ascending */
        size_t rank_count;
};
struct committed {
        struct announce_of of;
        uint64_t generation, sequence;
        struct line line;
        bool persist;    /* every node must make it durable; can become true later */
        uint32_t *ranks; /* the ranks whose records make up the version, ascending */
        size_t rank_count;
        size_t node_count; /* nodes that write a record; 0: unknown */
};

enum nebula_status captured_format(const struct captured *captured, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status captured_parse(const char *text, size_t size, struct captured *ret_captured, struct nebula_error *error);
void captured_done(struct captured *captured);
enum nebula_status committed_format(const struct committed *committed, char **ret_text, size_t *ret_size, struct nebula_error *error);
enum nebula_status committed_parse(const char *text, size_t size, struct committed *ret_committed, struct nebula_error *error);
void committed_done(struct committed *committed);
bool announce_same(const struct announce_of *a, const struct announce_of *b);
/* The path after the tag's directory, ".nebula/captured-00004.json". */
void captured_path(uint32_t lowest_rank, uint64_t writing, char ret_path[64]);
/* Whether an entry of a .nebula directory is the captured document of that writing. */
bool captured_is_of(const char *name, uint64_t writing);

#endif
