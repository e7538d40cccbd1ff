/*
 * server.h - an HTTP server in the test's own process. The test decides its answer to each request, faults included.
 *
 *      struct server *server = server_start(handler, argument, false);
 *      ... requests to 127.0.0.1, port server_port(server) ...
 *      server_stop(server);
 *
 * Each connection has a thread, on which the handler runs for one request at a time.
 */
#ifndef NB_TESTS_STORE_SERVER_H
#define NB_TESTS_STORE_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct server;
struct server_call {
        struct server *server;
        unsigned number;     /* of the request, from 1, over all connections */
        unsigned connection; /* from 1 */
        const char *head;    /* as it came: the request line and the fields, each with "\r\n", NUL-terminated */
        char method[16];
        const char *target;  /* path and query */
        const char *body;
        size_t body_size;
        struct server_link *link;
        bool is_over;        /* the connection ends after this request */
};
typedef void server_handler(struct server_call *call, void *argument);

/* is_tls: with a certificate of its own for "localhost", which server_certificate writes into a file. */
struct server *server_start(server_handler *handler, void *argument, bool is_tls);
int server_port(const struct server *server);
bool server_certificate(const struct server *server, const char *path);
unsigned server_requests(struct server *server);
unsigned server_connections(struct server *server);
void server_stop(struct server *server);

/* The value of a field by its name in lower case, copied; "" when there is none. */
const char *server_field(const struct server_call *call, const char *name, char *value, size_t size);
/* `fields`: "Name: value\r\n" for each, "" for none; Content-Length is added. */
void server_answer(struct server_call *call, int status, const char *fields, const void *body, size_t size);
void server_say(struct server_call *call, int status, const char *fields, const char *text);
/* Bytes as they are. */
void server_raw(struct server_call *call, const void *data, size_t size);
void server_close(struct server_call *call);
/* The other end sees a connection that was reset. */
void server_reset(struct server_call *call);
/* Nothing for so long, or until the server stops. */
void server_stall(struct server_call *call, int64_t ms);

#endif
