/*
 * log.h - the file of the agent's log; base/log.h writes the lines.
 *
 * The file is appended to. If it is larger than 8 MiB at start, it is first
 * renamed to agent.log.1. Without an open log (in tests) lines are dropped.
 */
#ifndef NB_AGENT_LOG_H
#define NB_AGENT_LOG_H

#include "base/log.h"

/* Returns 0 or a negative errno. "-": standard error. */
int log_open(const char *path);
void log_close(void);

#endif
