/*
 * tls.h - an encrypted stream between two agents that know one secret. No other file knows OpenSSL's TLS.
 *
 * TLS 1.3 with a pre-shared key, ephemeral Diffie-Hellman, no certificates and no
 * tickets. So an end without the key cannot complete the handshake, a recorded
 * connection cannot be decrypted later, and each connection has its own keys.
 * The identity is sent in clear; it is a digest of the key, by which an end that
 * serves several jobs finds the right key.
 *
 *      peer_tls_key_init      from the bytes of a secret
 *      peer_tls_connect / peer_tls_accept on a connected socket, which stays the caller's
 *      peer_tls_send, peer_tls_receive: all bytes, or an error; after an error the stream is unusable
 *      peer_tls_free
 *
 * Threads: one at a time per stream. Errors: NEBULA_UNAVAILABLE (the other end is gone or
 * silent), NEBULA_INVALID (it does not hold the key), NEBULA_CORRUPT (its bytes were changed on the way).
 */
#ifndef NB_AGENT_PEERS_TLS_H
#define NB_AGENT_PEERS_TLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nebula.h"

#define TLS_KEY_BYTES 32
#define TLS_SECRET_MIN 16 /* bytes of a secret; fewer can be guessed */

struct tls;
struct tls_key {
        uint8_t key[TLS_KEY_BYTES];
        char identity[2 * 16 + 1]; /* hex */
};

enum nebula_status peer_tls_key_init(struct tls_key *key, const void *secret, size_t size, struct nebula_error *error);
enum nebula_status peer_tls_connect(int fd, const struct tls_key *key, int64_t timeout_ms, struct tls **ret_tls, struct nebula_error *error);
/* Calls `find` for the key of the client's identity; `find` returns false if it is unknown. *ret_key: the key that was used. */
enum nebula_status peer_tls_accept(int fd, bool (*find)(void *argument, const char *identity, struct tls_key *ret_key), void *argument,
                              int64_t timeout_ms, struct tls **ret_tls, struct tls_key *ret_key, struct nebula_error *error);
enum nebula_status peer_tls_send(struct tls *tls, const void *data, size_t size, struct nebula_error *error);
/* timeout_ms: for all of it. */
enum nebula_status peer_tls_receive(struct tls *tls, void *data, size_t size, int64_t timeout_ms, struct nebula_error *error);
/* 1: bytes or the end of the stream can be read; 0: none came in time. */
int peer_tls_wait(struct tls *tls, int64_t timeout_ms);
void peer_tls_free(struct tls *tls);
/* A thread that had streams calls this before it reports its end. It frees OpenSSL's data of the thread, which would else be freed
 * some time later. */
void peer_tls_thread_end(void);

#endif
