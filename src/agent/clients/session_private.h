/*
 * session_private.h - what the two files behind session.h share.
 *
 *   session.c       requests that are answered at once, and the table of all
 *   waits.c  requests that wait for a change, and notice when their client has gone
 */
#ifndef NB_AGENT_CLIENTS_SESSION_PRIVATE_H
#define NB_AGENT_CLIENTS_SESSION_PRIVATE_H

#include <semaphore.h>

#include "agent/catalogue/catalogue.h"
#include "agent/clients/session.h"

struct connection {
        struct waiter waiter; /* first: it is the connection */
        struct catalogue *catalogue;
        int fd;
        struct session *session; /* NULL until HELLO */
        struct ipc_inbox inbox;
        struct ipc_frame frame;
        bool has_request; /* in the frame, which session_serve is to answer */
        bool may_wait;    /* the thread that answers */

        /* A WAIT that was not over at once. Whoever ends it answers; another thread posts `answered` when the answer is sent. */
        bool has_waited;       /* and what became of it was not looked at yet */
        int64_t wait_until_ns; /* INT64_MAX: no limit */
        int64_t look_ns;       /* at it; INT64_MAX: never */
        sem_t answered;
        bool is_waiting; /* guarded by the catalogue's lock, as is what follows */
        bool has_asked;  /* for the version to be persisted at once */
        struct ipc_wait wait;
        enum nebula_status wait_status;
        struct nebula_error wait_error;
};
/* What a request answers when it succeeds; on_done frees it. */
struct answer {
        const void *data;
        size_t size;
        int fd; /* closed after sending; -1: none */
        char *text; /* freed after sending */
        bool is_text; /* all of the answer, and of any size */
        bool is_later; /* somebody else answers */
        bool is_slow;  /* what is left of the request has to wait */
        uint64_t version_id; /* that was begun, should the request be refused; 0: none */
        union {
                struct ipc_welcome welcome;
                struct ipc_begun begun;
                struct ipc_granted granted;
                struct ipc_state state;
                struct ipc_found found;
                struct ipc_found_path found_path;
                struct ipc_event event;
        } body;
};

/* The version with this number; NULL, with an error, when it has been forgotten. Lock held. */
struct version *session_version(struct connection *connection, uint64_t id, struct nebula_error *error);
/* `argument`: the connection. */
bool session_client_gone(void *argument);
/* The client asks for something else, or has gone. SESSION_ENDED: it did so while it waited; SESSION_SLOW: session_await_answer. */
enum session_step session_end_wait(struct connection *connection);
/* Returns once what lies in storage is known too, or soon: what memory holds may be older than that, or carry files over from it. */
void session_await_scan(struct connection *connection);
/* Returns when whoever answers the WAIT of this connection is done with it. */
void session_await_answer(struct connection *connection);

typedef enum nebula_status request_run(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error);

request_run request_wait, request_flush, request_stop, request_find_path, request_watch;

#endif
