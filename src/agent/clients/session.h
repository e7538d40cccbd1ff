/*
 * session.h - one client connection; one function per request.
 *
 * Most requests are answered at once. One thread (listener.h) reads all connections, so a silent connection costs
 * nothing. A request that may wait for storage, memory or another process runs on its own thread.
 */
#ifndef NB_AGENT_CLIENTS_SESSION_H
#define NB_AGENT_CLIENTS_SESSION_H

#include "agent/catalogue/catalogue.h"

struct connection;
enum session_step {
        SESSION_IDLE,  /* nothing to do until bytes arrive or session_look is due */
        SESSION_SLOW,  /* call session_serve on a thread that may block */
        SESSION_ENDED, /* close the connection */
};

/* NULL: an allocation failed. The caller keeps fd, and has counted it in connection_count. */
struct connection *session_open(struct catalogue *catalogue, int fd);
/* `has_come`: bytes can be received. Answers the requests that have come, as far as that does not block. */
enum session_step session_read(struct connection *connection, bool has_come);
/* Serves one request, on a thread that may block. */
enum session_step session_serve(struct connection *connection);
void session_close(struct connection *connection);
/* When session_look is due, for a client that waits with a timeout; INT64_MAX: never. */
int64_t session_look_ns(const struct connection *connection);
enum session_step session_look(struct connection *connection);

#endif
