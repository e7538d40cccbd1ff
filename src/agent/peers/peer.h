/*
 * peer.h - one connection between two agents: frames over TLS.
 *
 * peer_open connects and exchanges HELLO; peer_serve does the same on the other
 * side. Each direction numbers its frames. After any failure the connection is
 * unusable: free it with peer_free. A send or receive fails if no byte moves for
 * PEER_SILENCE_MS, so a peer that hangs blocks a thread no longer than that.
 *
 * Threads: one at a time. Only peer_shutdown may be called from another thread; it
 * ends the wait of the first one.
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
        struct tls_key key;      /* the key of the connection */
        struct peer_hello hello; /* of the other end */
        uint64_t sent, received; /* frames */
        struct peer_header header; /* of the last received frame */
        struct peer_data data;     /* of a DATA frame; its bytes wait for peer_take */
        char *body;                /* of any other frame; a NUL follows it */
        size_t capacity;
};

/* If the other end closes the connection before it has said HELLO, this opens another, a few times within PEER_HANDSHAKE_MS. */
enum nebula_status peer_open(const struct member *member, const struct tls_key *key, const struct peer_hello *own,
                             struct peer **ret_peer, struct nebula_error *error);
/* Takes over the socket. After a failure the caller still owns it. */
enum nebula_status peer_serve(int fd, bool (*find)(void *argument, const char *identity, struct tls_key *ret_key), void *argument,
                              const char *own_node, uint64_t own_nonce, struct peer **ret_peer, struct nebula_error *error);
enum nebula_status peer_send(struct peer *peer, enum peer_type type, const char *text, size_t size, struct nebula_error *error);
enum nebula_status peer_send_answer(struct peer *peer, enum nebula_status status, const char *message, struct nebula_error *error);
enum nebula_status peer_send_data(struct peer *peer, const struct peer_data *data, const void *bytes, size_t size,
                                  struct nebula_error *error);
/* Receives the next frame into peer->header, and peer->body or peer->data. */
enum nebula_status peer_receive(struct peer *peer, struct nebula_error *error);
/* Receives the bytes of the last DATA frame and compares their checksum. NULL: reads and drops them. */
enum nebula_status peer_take(struct peer *peer, void *bytes, struct nebula_error *error);
size_t peer_take_size(const struct peer *peer);
/* Sends and receives an ANSWER. Its refusal is *ret_refusal (NEBULA_OK: none), and no failure of the connection. */
enum nebula_status peer_ask(struct peer *peer, enum peer_type type, const char *text, size_t size, struct peer_answer *ret_answer,
                            struct nebula_error *error);
bool peer_gone(struct peer *peer); /* of a connection on which nothing is due */
void peer_shutdown(struct peer *peer);
void peer_free(struct peer *peer);

#endif
