/*
 * session_private.h - shared by the files behind session.h.
 *
 *  session.c   requests that are answered at once, and the table of all requests
 *  greeting.c  the first request of a connection, and new settings
 *  waits.c     requests that wait for a change, and notice when their client is gone
 *  flush.c     the one of them that waits for several versions
 *  find.c      searches, which wait for the versions that their process has closed
 *  keep.c      pins, and removals that a program asks for
 */
#ifndef NB_AGENT_CLIENTS_SESSION_PRIVATE_H
#define NB_AGENT_CLIENTS_SESSION_PRIVATE_H

#include <semaphore.h>

#include "agent/catalogue/catalogue.h"
#include "agent/clients/session.h"

struct connection {
        struct waiter waiter; /* the first member: a pointer to it is one to the connection */
        struct catalogue *catalogue;
        int fd;
        struct session *session; /* NULL until HELLO */
        struct ipc_inbox inbox;
        struct ipc_frame frame;
        bool has_request; /* session_serve must answer the request in the frame */
        bool may_wait;    /* the running thread may block */

        /* A WAIT that did not end at once. The thread that ends it sends the answer and then posts `answered`. */
        bool has_waited;       /* and the connection has not handled its end yet */
        int64_t wait_until_ns; /* INT64_MAX: no timeout */
        int64_t look_ns;       /* when session_look is due; INT64_MAX: never */
        sem_t answered;
        bool is_waiting; /* this and all below: guarded by the catalogue's lock */
        bool has_asked;  /* it has asked to persist the version at once */
        struct ipc_wait wait;
        enum nebula_status wait_status;
        struct nebula_error wait_error;
};
/* The answer to a request that succeeded; on_done frees it. */
struct answer {
        const void *data;
        size_t size;
        int fd; /* closed after sending; -1: none */
        char *text; /* freed after sending */
        bool is_text; /* the text is the whole answer, of any size */
        bool is_later; /* another thread sends the answer */
        bool is_slow;  /* the rest of the request may block */
        uint64_t version_id; /* the version that the request began, for an error answer; 0: none */
        union {
                struct ipc_welcome welcome;
                struct ipc_begun begun;
                struct ipc_granted granted;
                struct ipc_spare_image spare;
                struct ipc_state state;
                struct ipc_found found;
                struct ipc_found_path found_path;
                struct ipc_event event;
        } body;
};

/* The version with this id. NULL and an error if the agent has forgotten it. Lock held. */
struct version *session_version(struct connection *connection, uint64_t id, struct nebula_error *error);
/* `argument` is the connection. */
bool session_client_gone(void *argument);
typedef enum nebula_status request_run(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error);

request_run request_hello, request_configure;
request_run request_flush;
request_run request_find;
request_run request_keep;
request_run request_compared;

#endif
