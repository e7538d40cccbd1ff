/*
 * peer.h - one connection between two agents: frames over TLS.
 *
 * peer_open connects and exchanges HELLO, peer_serve does it from the other
 * side. Each direction numbers its frames. After any failure the connection is
 * of no more use and is freed by peer_free. No send or receive takes longer
 * than PEER_SILENCE_MS without a byte moving, so a peer that is half there holds a thread no longer.
 *
 * Threads: one at a time, but peer_shutdown, which ends what another thread waits for.
 */
#ifndef NB_AGENT_PEERS_PEER_H
#define NB_AGENT_PEERS_PEER_H

#include "agent/peers/member.h"
#include "agent/peers/peer_frame.h"
#include "agent/peers/tls.h"

#define PEER_SILENCE_MS 20000
#define PEER_CONNECT_MS 2000
#define PEER_HANDSHAKE_MS 5000

struct peer {
        int fd;
        struct tls *tls;
        struct tls_key key;      /* under which it was opened */
        struct peer_hello hello; /* the other end's */
        uint64_t sent, received; /* frames */
        struct peer_header header; /* of the frame that came last */
        struct peer_data data;     /* of a DATA frame; its bytes wait for peer_take */
        char *body;                /* of any other; a NUL follows it */
        size_t capacity;
};

/* If the other end closes the connection before it has said HELLO, this opens another, a few times within PEER_HANDSHAKE_MS. */
enum nebula_status peer_open(const struct member *member, const struct tls_key *key, const struct peer_hello *own,
                             struct peer **ret_peer, struct nebula_error *error);
/* The socket is the peer's from then on; after a failure it still is the caller's. */
enum nebula_status peer_serve(int fd, bool (*find)(void *argument, const char *identity, struct tls_key *ret_key), void *argument,
                              const char *own_node, uint64_t own_nonce, struct peer **ret_peer, struct nebula_error *error);
enum nebula_status peer_send(struct peer *peer, enum peer_type type, const char *text, size_t size, struct nebula_error *error);
enum nebula_status peer_send_answer(struct peer *peer, enum nebula_status status, const char *message, struct nebula_error *error);
enum nebula_status peer_send_data(struct peer *peer, const struct peer_data *data, const void *bytes, size_t size,
                                  struct nebula_error *error);
/* The next frame: peer->header, and peer->body or peer->data. */
enum nebula_status peer_receive(struct peer *peer, struct nebula_error *error);
/* The bytes of the DATA frame that came, into place, with their checksum compared. NULL: they are read and dropped. */
enum nebula_status peer_take(struct peer *peer, void *bytes, struct nebula_error *error);
size_t peer_take_size(const struct peer *peer);
/* Sends and receives an ANSWER. Its refusal is *ret_refusal (NEBULA_OK: none), and no failure of the connection. */
enum nebula_status peer_ask(struct peer *peer, enum peer_type type, const char *text, size_t size, struct peer_answer *ret_answer,
                            struct nebula_error *error);
bool peer_gone(struct peer *peer); /* of a connection on which nothing is due */
void peer_shutdown(struct peer *peer);
void peer_free(struct peer *peer);

#endif
