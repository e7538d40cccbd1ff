/*
 * events.h - the events for a program's own log: a checkpoint became durable,
 * will never become durable, or waits long for other ranks; a rule has removed
 * one from storage; storage fails. There is no queue: the events are derived
 * from the versions, the job's last removals and its last failure.
 */
#ifndef NB_AGENT_CLIENTS_EVENTS_H
#define NB_AGENT_CLIENTS_EVENTS_H

#include "agent/catalogue/catalogue.h"

/* Finds the first event after `since`, in seconds since 1970. False: there is none yet. Lock held. */
bool event_next(const struct catalogue *catalogue, struct job *job, double since, struct ipc_event *ret_event);
/* The same for a reader of a path: commits and durable versions of all its jobs. */
bool event_next_for_reader(const struct catalogue *catalogue, const char *path, double since, struct ipc_event *ret_event);
/* Whether a version has not changed for so long that the ranks it waits for may never come. */
bool event_is_late(const struct catalogue *catalogue, const struct version *version);
/* Notes when each version was found to wait long for other ranks. */
void event_look_for_late(const struct catalogue *catalogue, struct job *job);

#endif
