/* copy_server_private.h - shared by copy_server.c (threads of visitors), copy_server_listener.c (connections before their handshake),
 * copy_server_requests.c (requests), copy_server_copies.c (copies) and copy_server_own.c (this node's own versions). */
#ifndef NB_AGENT_PEERS_COPY_SERVER_PRIVATE_H
#define NB_AGENT_PEERS_COPY_SERVER_PRIVATE_H

#include <pthread.h>

#include "agent/peers/copy_server.h"
#include "os/lock.h"

#define VISITOR_MAX 256 /* one owner, or a few after losses, and nodes that look for a lost copy or read files, one connection each */
#define KEY_MAX 4096    /* jobs that have trainers or versions here, or copies: one handshake looks through 256 KiB at most */

/* A copy of one node's share of one version. */
struct copy {
        struct copy *next;
        struct peer_copy what; /* what.id: ours */
        uint64_t owner_id;     /* the version's number at its owner */
        uint64_t owner_nonce;  /* of the agent that sent it */
        char identity[sizeof((struct tls_key *)0)->identity], job[IPC_NAME_MAX], path[IPC_PATH_MAX];
        struct image **images; /* one per file; NULL where nothing is held */
        uint64_t **chunks;     /* per file, one CRC-64 per piece */
        uint64_t capacity;     /* bytes of the budget */
        uint32_t users;        /* being read */
        bool dropped;          /* freed when no thread reads it */
        uint64_t age;          /* order of arrival */
};
/* A file of this node that a visitor is reading. */
struct own_file {
        uint64_t version_id, size;
        uint32_t file;
        struct image *image; /* held and mapped; NULL: none is */
        uint64_t *chunks;    /* a CRC-64 per piece */
};
/* A piece of a file that is sent to a visitor. */
struct piece {
        const char *bytes;
        size_t size;
        uint64_t crc64;
};
/* A connected peer and the thread that serves it. */
struct visitor {
        struct copy_server *server;
        struct peer *peer;
        int fd;
        char from[80];
        struct copy *incoming; /* not listed yet */
        uint32_t file;         /* the next piece is of this one, */
        uint64_t offset;       /* from here */
        bool is_owner;         /* it offered something */
        bool is_proven;        /* it holds the secret */
        bool is_sent_away;     /* its place was needed before that */
        int64_t since_ns;
        struct own_file own;
        struct nebula_error trouble; /* with the pieces; said at SEAL */
};
struct copy_server {
        struct catalogue *catalogue;
        char node[IPC_NAME_MAX];
        struct member own;
        pthread_t listener;
        int listen_fd; /* < 0: the listener is shut */
        struct lock copy_server_lock;
        pthread_cond_t ended;
        struct tls_key *keys;
        size_t key_count, key_capacity;
        struct copy *copies;
        uint64_t budget, used, next_age;
        int64_t hold_ns; /* for so long a visitor that asks for nothing holds the file that it has read from */
        struct visitor *visitors[VISITOR_MAX];
        uint32_t visitor_count;
        int64_t complained_ns;
        uint32_t unlogged;
        bool stopping;
};

/* One line per second at most. */
void copy_server_complain(struct copy_server *server, const char *from, const struct nebula_error *error);
bool copy_server_is_stopping(struct copy_server *server);
/* Starts a thread for a connection that has begun to speak. False: there is no room, and the caller keeps the descriptor. */
bool copy_server_start_visit(struct copy_server *server, int fd, const char *from);

/* copy_server_listener.c. NULL: with the reason. A listener that is not run is freed; one that is frees itself when the server stops. */
struct copy_listener;
struct copy_listener *copy_server_listener_new(struct copy_server *server, int listen_fd, struct nebula_error *error);
void *copy_server_listener_main(void *listener);
void copy_server_listener_free(struct copy_listener *listener);
/* copy_server_lock held. If too many connections are unproven, closes one of them. False: the one from `from` must go. */
bool copy_server_make_room(struct copy_server *server, const char *from);

/* Makes room for an offered version, which then belongs to the copy; NULL with the reason. */
struct copy *copy_server_copy_new(struct copy_server *server, const struct peer *peer, struct peer_copy *offer, struct nebula_error *error);
/* Whether the copy is of the secret, job and storage path that this peer may see. */
bool copy_server_copy_is_for(const struct copy *copy, const struct peer *peer);
/* Takes dropped copies that no thread reads off the list, for copy_server_copies_free. copy_server_lock held. */
struct copy *copy_server_copies_collect(struct copy_server *server);
void copy_server_copies_free(struct copy_server *server, struct copy *taken);
/* The thread that has raised copy->users reads it no more. */
void copy_server_copy_read(struct copy_server *server, struct copy *copy);

/* Bytes of a copy that the caller reads have changed: no reader finds it any more, and its owner is to send it again. */
void copy_server_copy_spoilt(struct copy_server *server, struct copy *copy, size_t file);

/* Drops a copy that has not arrived whole. */
void copy_server_drop_incoming(struct visitor *visitor);

/* Adds this node's own versions that the visitor may see, until there are `room` copies; these have files of their own, for peer_copy_done. */
enum nebula_status copy_server_own_list(struct visitor *visitor, struct peer_listing *listing, size_t room, struct nebula_error *error);
/* False: there is none. The bytes stay where they are until the visitor's next request. */
bool copy_server_own_piece(struct visitor *visitor, const struct peer_fetch *fetch, struct piece *ret_piece);
void copy_server_own_close(struct visitor *visitor);

/* The job of this node that the visitor asks about, pinned; NULL: there is none. */
struct job *copy_server_own_job(struct visitor *visitor);
/* Answers one request; a failure ends the connection. */
enum nebula_status copy_server_serve(struct visitor *visitor, struct nebula_error *error);

#endif
