/*
 * session_private.h - what the two files behind session.h share.
 *
 *   session.c       requests that are answered at once, and the table of all
 *   session_wait.c  requests that wait for a change, and notice when their client has gone
 */
#ifndef NB_AGENT_SESSION_PRIVATE_H
#define NB_AGENT_SESSION_PRIVATE_H

#include <semaphore.h>

#include "agent/catalogue.h"
#include "agent/session.h"

struct connection {
        struct waiter waiter; /* first: it is the connection */
        struct catalogue *catalogue;
        int fd;
        struct session *session; /* NULL until HELLO */
        struct ipc_inbox inbox;
        bool has_come; /* something can be received, as poll has just said */
        struct ipc_frame frame;

        /* A WAIT that is not over. Whoever ends it answers, and posts `answered` when the answer is sent. */
        sem_t answered;
        bool is_waiting; /* guarded by the catalogue's lock, as is what follows */
        bool is_told;    /* by another thread */
        bool has_asked;  /* for the version to be persisted at once */
        struct ipc_wait wait;
        int64_t wait_until_ns; /* INT64_MAX: no limit */
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
        bool is_later; /* another thread answers */
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
/* Returns when the WAIT of this connection was answered. False: the connection is of no more use. */
bool session_await_answer(struct connection *connection);

typedef enum nebula_status request_run(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error);

request_run request_wait, request_flush, request_stop, request_find_path, request_watch;

#endif
