/*
 * session.h - one connection, from its HELLO to its end: one thread each, one
 * function per request.
 */
#ifndef NB_AGENT_SESSION_H
#define NB_AGENT_SESSION_H

#include "agent/catalogue.h"

/* Serves a connection until it ends. fd stays the caller's, who has counted it in connection_count. */
void session_serve(struct catalogue *catalogue, int fd);

#endif
