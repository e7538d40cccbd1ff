/*
 * cli_agent.h - a client of the running agent. It never starts an agent: if none
 * runs, cli_agent_open returns NEBULA_UNAVAILABLE and *ret_agent stays NULL. An agent
 * that does not answer, for example a stopped one, is given a few seconds.
 *
 * Threads: one at a time per handle.
 */
#ifndef NB_CLI_CLI_AGENT_H
#define NB_CLI_CLI_AGENT_H

#include <jansson.h>

#include "ipc/ipc.h"

struct cli_agent;

/* persist_path NULL or "": everything that the agent knows, of all jobs. */
enum nebula_status cli_agent_open(const char *persist_path, struct cli_agent **ret_agent, struct nebula_error *error);
/* Whether cli_agent_open failed because no agent runs, and not because an agent does not answer. */
bool cli_agent_is_absent(const struct nebula_error *error);
/*
 * After cli_agent_open failed: whether the agent speaks another version of the protocol. If so, sends it a signal to end, which
 * every version understands; it persists first.
 */
bool cli_agent_end_other_version(const struct nebula_error *error, uint32_t *ret_pid);
void cli_agent_close(struct cli_agent *agent);
/* For commands that also work without an agent. False if there is none. If an agent runs but does not answer, prints
 * a line to stderr and returns false. */
bool cli_agent_open_if_any(const char *persist_path, struct cli_agent **ret_agent);
uint32_t cli_agent_pid(const struct cli_agent *agent);
/* Its pid in this process's pid namespace; 0: not visible there. */
uint32_t cli_agent_seen_pid(const struct cli_agent *agent);
/* Whether the agent with that pid still runs. */
bool cli_agent_is_there(uint32_t seen_pid);

enum nebula_status cli_agent_report(struct cli_agent *agent, enum nebula_report report, const char *persist_path,
                                    json_t **ret_report, struct nebula_error *error);
/*
 * Searches the agent's memory for `tag` (NULL, "latest": the newest), only for versions younger than `than`, the
 * sequence of the version in storage (0: none). NEBULA_NOT_FOUND if there is none. The caller decrefs *ret_description.
 */
enum nebula_status cli_agent_find_younger(struct cli_agent *agent, const char *persist_path, const char *tag, uint64_t than,
                                          uint64_t *ret_version_id, json_t **ret_description, struct nebula_error *error);
/* Tells the agent whether the version in the storage path of this connection is whole. */
enum nebula_status cli_agent_compared(struct cli_agent *agent, const char *tag, uint64_t sequence, bool is_whole, struct nebula_error *error);
/* The version of a tag, wherever it is. */
enum nebula_status cli_agent_find(struct cli_agent *agent, const char *persist_path, const char *tag, uint64_t *ret_version_id, struct nebula_error *error);
/* Asks the agent to describe a version, as in a report. The caller decrefs *ret_description. */
enum nebula_status cli_agent_describe(struct cli_agent *agent, uint64_t version_id, json_t **ret_description, struct nebula_error *error);
/* The texts of the version's records in storage, as far as the agent has them. The caller decrefs *ret_texts, an array. */
enum nebula_status cli_agent_records(struct cli_agent *agent, uint64_t version_id, json_t **ret_texts, struct nebula_error *error);
/* Waits until the version has reached the state. Waiting for NEBULA_STATE_DURABLE also makes the agent persist it. */
enum nebula_status cli_agent_wait(struct cli_agent *agent, uint64_t version_id, enum nebula_state state, int64_t timeout_ms,
                                  struct nebula_error *error);
/* Opens a file for reading; the caller owns the fd. */
enum nebula_status cli_agent_file(struct cli_agent *agent, uint64_t version_id, const char *name, struct ipc_opened *ret_opened,
                                  int *ret_fd, struct nebula_error *error);
/* Tells the agent to end after it has finished its work; cli_agent_stopped says whether it has. If the handle is closed
 * before that, the agent does not end. */
enum nebula_status cli_agent_stop(struct cli_agent *agent, bool now, struct nebula_error *error);
/* Waits for the agent's answer for at most `timeout_ms`. *ret_done: the answer has come, and the returned status is the agent's. */
enum nebula_status cli_agent_stopped(struct cli_agent *agent, int64_t timeout_ms, bool *ret_done, struct nebula_error *error);

/* Fields of a report: 0, "" or NULL if absent. */
const char *text_of(const json_t *object, const char *key);
double number_of(const json_t *object, const char *key);
/* Whether a version of the report is in `source`. */
bool lies_in(const json_t *version, const char *source); /* "memory", "storage" */

#endif
