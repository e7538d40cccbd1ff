/*
 * session.h - one connection: what a client asks, one function per request.
 *
 * Most requests are answered at once, and a connection that sends none costs nothing: one thread (listener.h) reads all
 * of them. What may wait for storage, for memory or for another process is left to a thread that may.
 */
#ifndef NB_AGENT_CLIENTS_SESSION_H
#define NB_AGENT_CLIENTS_SESSION_H

#include "agent/catalogue/catalogue.h"

struct connection;
enum session_step {
        SESSION_IDLE,  /* until something can be received, or it is to be looked at */
        SESSION_SLOW,  /* session_serve goes on */
        SESSION_ENDED, /* it is of no more use */
};

/* NULL: no memory. fd stays the caller's, who has counted it in connection_count. */
struct connection *session_open(struct catalogue *catalogue, int fd);
/* `has_come`: something can be received. Answers what has come as far as that needs no waiting. */
enum session_step session_read(struct connection *connection, bool has_come);
/* One request, on a thread that may wait. */
enum session_step session_serve(struct connection *connection);
/* When session_look is due, for a client that waits with a limit; INT64_MAX: never. */
int64_t session_look_ns(const struct connection *connection);
enum session_step session_look(struct connection *connection);
void session_close(struct connection *connection);
/* What can be said of a client's process by `seen_pid` (catalogue.h): true also when it cannot be seen. Then its connection tells. */
bool session_may_live(uint32_t seen_pid);

#endif
