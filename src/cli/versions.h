/*
 * versions.h - all versions that can be loaded: those in storage and those in
 * the running agent's memory. A version in both is listed once.
 */
#ifndef NB_CLI_VERSIONS_H
#define NB_CLI_VERSIONS_H

#include <jansson.h>

#include "cli/table.h"
#include "cli/target.h"
#include "store/pins.h"
#include "store/scan.h"

struct version {
        char tag[256], job[256];
        int64_t step; /* -1: none */
        uint64_t number, size, written; /* number: its entry in the tag's log; 0: it is not in storage.
                                         * written: bytes that had to be sent to storage; equals `size` until the version is there */
        size_t file_count;
        char state[16]; /* a state of nebula.h */
        double committed; /* seconds since 1970; 0: not yet */
        double moved;     /* when it was committed; if it was not, when it was begun */
        uint64_t sequence; /* 0: not committed yet */
        struct line line;
        bool in_memory, in_storage, is_abandoned; /* is_abandoned: its job has gone back to an earlier step */
        double verified_at; /* when it was verified as a whole, seconds since 1970; 0: never */
        bool verified_ok;
        char error[256]; /* why it failed or waits; "": neither */
};
struct versions {
        char path[TARGET_PATH_MAX]; /* the storage path; "": only the agent was asked */
        struct version *list;       /* oldest first */
        size_t count;
        size_t broken_count; /* unreadable manifests */
        char broken[512];    /* message about the first of them */
        bool has_agent;
        json_t *verdicts;    /* the agent's, on the jobs of the path; NULL: none */
        struct pins pins;    /* of the storage path */
        json_t **metrics;    /* per version: its metrics, or NULL; NULL: not requested (versions_load_metrics) */
        json_t **signatures; /* per version: what vouch_list says, or NULL; NULL: not requested (versions_load_signatures) */
};

/* If storage cannot be read, *ret_versions has what the agent holds in memory; versions_done is called in any case. A missing agent is no error. A missing storage path is no error if an agent answers. ask_agent false: reads only storage. */
enum nebula_status versions_load(const char *given_path, bool ask_agent, struct versions *ret_versions, struct nebula_error *error);
/* Called about once a second while storage is read. `newest`: some thousand of the newest versions that are known so far, without pins.
 * `read` of `count` tags in storage were looked at. */
struct versions_progress {
        void (*report)(void *argument, const struct versions *newest, size_t read, size_t count);
        void *argument;
};
/* The same for a program that asks again and again: `seen` begins zeroed, is the caller's (manifest_scan_done), and spares reading the
 * manifests that have not changed. `progress` may be NULL. */
enum nebula_status versions_load_again(const char *given_path, bool ask_agent, const struct versions_progress *progress,
                                       struct manifest_scan *seen, struct versions *ret_versions, struct nebula_error *error);
/* Reads the metrics of the versions in storage, with two requests each. A version without that file has none. */
void versions_load_metrics(struct versions *versions);
/* Reads who has signed the versions in storage, with two requests each. Without `always`: only if this user trusts a key. Call it after
 * versions_sort_by_metric. */
void versions_load_signatures(struct versions *versions, bool always);
/* The best first, those without the metric last. Call versions_load_metrics before. False: none has it. */
bool versions_sort_by_metric(struct versions *versions, const char *metric, bool largest_first);
void versions_done(struct versions *versions);
/* A checksum of all that versions_json shows, without metrics: if two are equal, nothing has changed. */
uint64_t versions_sum(const struct versions *versions);
json_t *versions_json(const struct versions *versions);
/* Prints what people need first: the verdicts, and the newest version that can be loaded if it is not the last row. */
void versions_print_head(const struct versions *versions);
/* Prints a table for people, from versions->list[first] on. */
void versions_print(const struct versions *versions, size_t first);
/* Prints one line about the newest version that can be loaded, and one about newer ones that cannot. */
void versions_print_newest(const struct versions *versions);

#endif
