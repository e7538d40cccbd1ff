/*
 * versions.h - every version that a user can have back: those in storage, and
 * those that the running agent holds. One that lies in both is listed once.
 */
#ifndef NB_CLI_VERSIONS_H
#define NB_CLI_VERSIONS_H

#include <jansson.h>

#include "cli/table.h"
#include "cli/target.h"

struct version {
        char tag[256], job[256];
        int64_t step; /* -1: none */
        uint64_t generation, size;
        size_t file_count;
        char state[16]; /* a state of nebula.h */
        double committed; /* seconds since 1970; 0: not yet */
        double moved;     /* when it was committed, else when its state changed last */
        uint64_t sequence;
        struct line line;
        bool in_memory, in_storage, is_abandoned; /* is_abandoned: its job went back to an earlier step since */
        char error[256]; /* why it failed or waits, or "" */
};
struct versions {
        char path[TARGET_PATH_MAX]; /* the storage path; "" = none, only the agent was asked */
        struct version *list;       /* oldest first */
        size_t count;
        size_t broken_count; /* unsound manifests */
        char broken[512];    /* the first of them */
        bool has_agent;
};

/* A missing agent is fine; so is missing storage when an agent answers and none was named. ask_agent false: storage alone. */
enum nebula_status versions_load(const char *given_path, bool ask_agent, struct versions *ret_versions, struct nebula_error *error);
/* The same with what was read already; `report` (NEBULA_REPORT_VERSIONS) may be NULL. */
enum nebula_status versions_merge(const struct manifest_scan *scan, const json_t *report, struct versions *versions,
                                  struct nebula_error *error);
void versions_done(struct versions *versions);
json_t *versions_json(const struct versions *versions);
/* A table for people, from versions->list[first] on. */
void versions_print(const struct versions *versions, size_t first);

#endif
