/*
 * log.h - where the agent's log goes; its lines are base/log.h's.
 *
 * The file is appended to and, once larger than 8 MiB at start, kept as
 * agent.log.1. Without an open log (in tests) lines go nowhere.
 */
#ifndef NB_AGENT_LOG_H
#define NB_AGENT_LOG_H

#include "base/log.h"

/* 0 or negative errno. "-": standard error. */
int log_open(const char *path);
void log_close(void);

#endif
