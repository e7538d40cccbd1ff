/*
 * listener.h - the agent's socket, and the one thread that reads from all clients.
 *
 * The ranks of a node save together, so requests that come at the same moment are answered by one thread that is awake. A
 * request that can block runs on its own thread; its client returns to the listener when the request was answered.
 */
#ifndef NB_AGENT_CLIENTS_LISTENER_H
#define NB_AGENT_CLIENTS_LISTENER_H

#include "agent/catalogue/catalogue.h"

struct listener;

/* The caller keeps listen_fd open. */
enum nebula_status listener_start(struct catalogue *catalogue, int listen_fd, struct listener **ret_listener, struct nebula_error *error);
/* Shuts the socket and all client connections down, so that the thread ends. Call it with the lock held, again and
 * again until listener_has_ended: threads may be between two requests. */
void listener_shut(struct listener *listener);
bool listener_has_ended(const struct listener *listener); /* lock held */
void listener_free(struct listener *listener);            /* only after it has ended */

#endif
