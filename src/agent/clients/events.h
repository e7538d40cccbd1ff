/*
 * events.h - what a program's own log should say of its checkpoints: which
 * became durable, which never will, which wait for other ranks for long, and
 * that storage fails. Nothing is queued: the versions themselves, and the job's
 * last failure, are the record.
 */
#ifndef NB_AGENT_CLIENTS_EVENTS_H
#define NB_AGENT_CLIENTS_EVENTS_H

#include "agent/catalogue/catalogue.h"

/* The first that came after `since`, in seconds since 1970. False: none has. Lock held. */
bool event_next(const struct catalogue *catalogue, struct job *job, double since, struct ipc_event *ret_event);
/* Nothing has been done to a version for so long that ranks that it still waits for may never come. */
bool event_is_late(const struct catalogue *catalogue, const struct version *version);

#endif
