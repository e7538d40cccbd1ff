/*
 * session_private.h - shared by the files behind session.h.
 *
 *  session.c   requests that are answered at once, and the table of all requests
 *  greeting.c  the first request of a connection, and new settings
 *  waits.c     requests that wait for a change, and notice when their client is gone
 *  flush.c     the one of them that waits for several versions
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
/* Call when the client sends another request or is gone. SESSION_ENDED: it did so while it waited, which breaks a
 * rule. SESSION_SLOW: call session_await_answer. */
enum session_step session_end_wait(struct connection *connection);
/* Waits until storage has been read too, for a limited time: a version in memory may be older than storage's, or
 * carry files over from it. */
void session_await_scan(struct connection *connection);
/* Waits until the thread that answers this connection's WAIT is done with the connection. */
void session_await_answer(struct connection *connection);

/* waits.c. The lock is held for all of these but the first. */
int64_t wait_deadline(int64_t timeout_ms); /* timeout_ms < 0: INT64_MAX, no limit */
/* Waits for a change. NEBULA_OK: check again, unless *ret_timeout. */
enum nebula_status wait_slice(struct connection *connection, pthread_cond_t *cond, int64_t until_ns, bool *ret_timeout, struct nebula_error *error);
/* NEBULA_TIMEOUT, and what the version waits for. */
enum nebula_status wait_timeout(const struct version *version, struct nebula_error *error);
/* Whether ranks of other nodes are missing and have been silent for so long that no call waits longer: their node may be gone for good.
 * The version stays, because the ranks may still come. */
bool wait_others_are_silent(const struct catalogue *catalogue, const struct version *version);
/* wait_timeout for such a version. */
enum nebula_status wait_in_vain(const struct catalogue *catalogue, const struct version *version, struct nebula_error *error);
/* Why a version can never become durable as things are; NEBULA_OK: it can. */
enum nebula_status wait_durable_refused(const struct version *version, struct nebula_error *error);

typedef enum nebula_status request_run(struct connection *connection, const void *payload, struct answer *answer,
                                       struct nebula_error *error);

request_run request_hello, request_configure;
request_run request_wait, request_flush, request_stop, request_find_path, request_watch;
request_run request_keep;

#endif
