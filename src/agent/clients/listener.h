/*
 * listener.h - the agent's socket, and the one thread that reads from all clients.
 *
 * Ranks of a node save together: what comes at one moment is answered in one go, by a thread that is awake. A request that may
 * wait gets a thread for as long as it takes, and its client comes back when that was answered.
 */
#ifndef NB_AGENT_CLIENTS_LISTENER_H
#define NB_AGENT_CLIENTS_LISTENER_H

#include "agent/catalogue/catalogue.h"

struct listener;

/* listen_fd stays the caller's. */
enum nebula_status listener_start(struct catalogue *catalogue, int listen_fd, struct listener **ret_listener, struct nebula_error *error);
/* The socket and all clients that are there, so that the thread ends. Lock held; to be called again until it has: threads may be
 * between two requests. */
void listener_shut(struct listener *listener);
bool listener_has_ended(const struct listener *listener); /* lock held */
void listener_free(struct listener *listener);            /* one that has ended */

#endif
