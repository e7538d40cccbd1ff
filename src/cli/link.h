/*
 * link.h - asking the running agent. Nothing here starts one: without an
 * agent, link_open says NEBULA_UNAVAILABLE and *ret_link stays NULL. One that
 * is there but silent, a stopped one say, is waited for a few seconds.
 *
 * Threads: one at a time per link.
 */
#ifndef NB_CLI_LINK_H
#define NB_CLI_LINK_H

#include <jansson.h>

#include "ipc/ipc.h"

struct link;

/* persist_path NULL or "": what the agent knows of all jobs. */
enum nebula_status link_open(const char *persist_path, struct link **ret_link, struct nebula_error *error);
/* Whether link_open failed because no agent runs, and not because one could not be talked to. */
bool link_is_absent(const struct nebula_error *error);
/*
 * After link_open failed: whether it was because the agent speaks another version of the protocol. Then it was asked to end
 * by a signal, which every version understands: it persists first.
 */
bool link_end_other_version(const struct nebula_error *error, uint32_t *ret_pid);
void link_close(struct link *link);
/* For what works without an agent, too: false when there is none, and after a line on stderr when one is there that
 * cannot be talked to. */
bool link_open_if_any(const char *persist_path, struct link **ret_link);
uint32_t link_agent_pid(const struct link *link);
/* Its number in this process's pid namespace; 0: it cannot be seen from here. */
uint32_t link_seen_pid(const struct link *link);
/* Whether the agent that had it runs. */
bool link_agent_is_there(uint32_t seen_pid);

enum nebula_status link_report(struct link *link, enum nebula_report report, const char *persist_path,
                               json_t **ret_report, struct nebula_error *error);
enum nebula_status link_find(struct link *link, const char *persist_path, const char *tag,
                             struct ipc_found *ret_found, struct nebula_error *error);
/*
 * Looks for `tag` (NULL, "latest": the newest) in the agent's memory; only what is younger than `than`, the sequence of
 * the version that storage has (0: none). NEBULA_NOT_FOUND when there is none. The caller decrefs *ret_description.
 */
enum nebula_status link_find_younger(struct link *link, const char *persist_path, const char *tag, uint64_t than,
                                     uint64_t *ret_version_id, json_t **ret_description, struct nebula_error *error);
enum nebula_status link_describe(struct link *link, uint64_t version_id, json_t **ret_description,
                                 struct nebula_error *error);
/* The bytes of a file, read-only; the fd is the caller's. */
enum nebula_status link_file(struct link *link, uint64_t version_id, const char *name, struct ipc_opened *ret_opened,
                             int *ret_fd, struct nebula_error *error);
/* Tells the agent to end, which it does when it has done what is to be done first: link_stopped says whether it has. Until then it
 * changes its mind when the link is closed. */
enum nebula_status link_stop(struct link *link, bool now, struct nebula_error *error);
/* Waits for its answer for at most `timeout_ms`; *ret_done: it is there, and the status is what it says. */
enum nebula_status link_stopped(struct link *link, int64_t timeout_ms, bool *ret_done, struct nebula_error *error);

/* Fields of what the agent reports: 0, "" or NULL where it says nothing. */
const char *text_of(const json_t *object, const char *key);
double number_of(const json_t *object, const char *key);
/* Whether a version of the report lies there. */
bool lies_in(const json_t *version, const char *source); /* "memory", "storage" */

#endif
