/*
 * agent.h - the per-node agent: entry points.
 *
 *      nebula agent --daemon        starts it in the background, unless one is running; returns
 *                                   0 once its socket answers
 *      nebula agent --foreground    runs it here, its log on standard error
 *
 * Clients find it through the lock and the socket in its runtime directory (ipc.h). It ends on `nebula stop` and on
 * SIGTERM, after persisting. It also ends when no client is connected, nothing is left to persist, and NEBULA_AGENT_LINGER
 * seconds (600) have passed.
 *
 * Other settings of the environment, with their defaults:
 *
 *      NEBULA_MEMORY_BUFFER_SIZE    the memory tier's budget in bytes (K, M, G), until a session says otherwise
 *      NEBULA_PERSIST_GIVE_UP       seconds that a failing storage is tried, for the newest version from its commit on: 600
 *      NEBULA_MEMORY_WAIT           seconds that a save waits for memory: 300
 *      NEBULA_QUIET_S               seconds without news after which an open-ended version is complete: 30
 *      NEBULA_TAKEOVER_S            seconds after which any agent commits in place of the one of rank 0: 30
 *      NEBULA_SWEEP_AGE             seconds after which debris is removed from storage: 900
 */
#ifndef NB_AGENT_AGENT_H
#define NB_AGENT_AGENT_H

#include <stdbool.h>

#include "ipc/ipc.h"
#include "nebula.h"

/* The command: exit code 0, 1 (with a message on standard error) or 2 (usage). */
int agent_main(int argc, char **argv);

/* Its parts. in_process: its end does not end this process, for tests that run several agents. */
struct agent;
enum nebula_status agent_start(const struct ipc_place *place, bool in_process, struct agent **ret_agent, struct nebula_error *error);
/* Persists all committed versions, unless a request to end at once comes meanwhile. A failing version is tried
 * once. False if some failed. */
bool agent_drain(struct agent *agent);
/* Ends all threads and frees the agent. forget: also drops the memory tier; otherwise the next agent adopts it. */
void agent_stop(struct agent *agent, bool forget);

#endif
