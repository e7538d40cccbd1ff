#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/peers/peer.h"
#include "base/error.h"
#include "os/os.h"
#include "sum/sum.h"

#define AGAIN_MAX 5       /* so often a connection that the other end closed at once is opened again */
#define AGAIN_FIRST_MS 10 /* and twice as long before each further time */

static struct peer *peer_new(int fd)
{
        struct peer *peer = calloc(1, sizeof *peer);

        if (peer)
                peer->fd = fd;
        return peer;
}

void peer_free(struct peer *peer)
{
        if (!peer)
                return;
        peer_tls_free(peer->tls);
        if (peer->fd >= 0)
                os->close(peer->fd);
        free(peer->body);
        free(peer);
}

void peer_shutdown(struct peer *peer)
{
        os->shutdown(peer->fd);
}

bool peer_gone(struct peer *peer)
{
        return peer_tls_wait(peer->tls, 0) != 0;
}

static enum nebula_status send_header(struct peer *peer, enum peer_type type, size_t size, uint64_t crc64, struct nebula_error *error)
{
        struct peer_header header = { .type = type, .number = ++peer->sent, .size = (uint32_t)size, .crc64 = crc64 };
        uint8_t bytes[PEER_HEADER_BYTES];

        peer_header_write(&header, bytes);
        return peer_tls_send(peer->tls, bytes, sizeof bytes, error);
}

enum nebula_status peer_send(struct peer *peer, enum peer_type type, const char *text, size_t size, struct nebula_error *error)
{
        enum nebula_status status;

        if (size > PEER_TEXT_MAX)
                return error_set(error, NEBULA_INVALID, 0, "%zu bytes are too much for a frame", size);
        status = send_header(peer, type, size, sum_crc64(0, text, size), error);
        return status ? status : peer_tls_send(peer->tls, text, size, error);
}

enum nebula_status peer_send_data(struct peer *peer, const struct peer_data *data, const void *bytes, size_t size,
                                  struct nebula_error *error)
{
        uint8_t head[PEER_HEAD_BYTES];
        enum nebula_status status;

        peer_data_write(data, head);
        status = send_header(peer, PEER_DATA, sizeof head + size, sum_crc64(0, head, sizeof head), error);
        if (!status)
                status = peer_tls_send(peer->tls, head, sizeof head, error);
        return status ? status : peer_tls_send(peer->tls, bytes, size, error);
}

enum nebula_status peer_send_answer(struct peer *peer, enum nebula_status answer_status, const char *message, struct nebula_error *error)
{
        struct peer_answer answer = { .status = answer_status };
        char *text;
        size_t size;
        enum nebula_status status;

        snprintf(answer.message, sizeof answer.message, "%s", message ? message : "");
        status = peer_answer_format(&answer, &text, &size, NULL);
        if (status) { /* a name that was cut in the middle of a character, say */
                answer.message[0] = 0;
                status = peer_answer_format(&answer, &text, &size, error);
        }
        if (status)
                return status;
        status = peer_send(peer, PEER_ANSWER, text, size, error);
        free(text);
        return status;
}

static enum nebula_status need_body(struct peer *peer, size_t size, struct nebula_error *error)
{
        char *body;

        if (peer->capacity > size)
                return NEBULA_OK;
        body = realloc(peer->body, size + 1);
        if (!body)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a frame of %zu bytes", size);
        peer->body = body;
        peer->capacity = size + 1;
        return NEBULA_OK;
}

size_t peer_take_size(const struct peer *peer)
{
        return peer->header.size - PEER_HEAD_BYTES;
}

enum nebula_status peer_receive(struct peer *peer, struct nebula_error *error)
{
        uint8_t bytes[PEER_HEADER_BYTES], head[PEER_HEAD_BYTES];
        enum nebula_status status = peer_tls_receive(peer->tls, bytes, sizeof bytes, PEER_SILENCE_MS, error);
        uint64_t crc64;

        if (!status)
                status = peer_header_read(bytes, peer->received + 1, &peer->header, error);
        if (status)
                return status;
        peer->received++;
        if (peer->header.type == PEER_DATA) {
                status = peer_tls_receive(peer->tls, head, sizeof head, PEER_SILENCE_MS, error);
                if (status)
                        return status;
                crc64 = sum_crc64(0, head, sizeof head);
                peer_data_read(head, &peer->data);
        } else {
                status = need_body(peer, peer->header.size, error);
                if (!status)
                        status = peer_tls_receive(peer->tls, peer->body, peer->header.size, PEER_SILENCE_MS, error);
                if (status)
                        return status;
                peer->body[peer->header.size] = 0;
                crc64 = sum_crc64(0, peer->body, peer->header.size);
        }
        if (crc64 != peer->header.crc64)
                return error_set(error, NEBULA_CORRUPT, 0, "a frame's checksum is wrong");
        return NEBULA_OK;
}

enum nebula_status peer_take(struct peer *peer, void *bytes, struct nebula_error *error)
{
        size_t size = peer_take_size(peer);
        char dropped[4096];
        enum nebula_status status = NEBULA_OK;

        if (!bytes) {
                while (!status && size) {
                        size_t piece = size < sizeof dropped ? size : sizeof dropped;

                        status = peer_tls_receive(peer->tls, dropped, piece, PEER_SILENCE_MS, error);
                        size -= piece;
                }
                return status;
        }
        status = peer_tls_receive(peer->tls, bytes, size, PEER_SILENCE_MS, error);
        if (!status && sum_crc64(0, bytes, size) != peer->data.crc64)
                status = error_set(error, NEBULA_CORRUPT, 0, "the checksum of a piece at offset %llu is wrong",
                                   (unsigned long long)peer->data.offset);
        return status;
}

enum nebula_status peer_ask(struct peer *peer, enum peer_type type, const char *text, size_t size, struct peer_answer *ret_answer,
                            struct nebula_error *error)
{
        enum nebula_status status = peer_send(peer, type, text, size, error);

        if (!status)
                status = peer_receive(peer, error);
        if (!status && peer->header.type != PEER_ANSWER)
                status = error_set(error, NEBULA_CORRUPT, 0, "the peer sent a frame of type %u instead of an answer", (unsigned)peer->header.type);
        return status ? status : peer_answer_parse(peer->body, peer->header.size, ret_answer, error);
}

static enum nebula_status send_hello(struct peer *peer, const struct peer_hello *own, struct nebula_error *error)
{
        char *text;
        size_t size;
        enum nebula_status status = peer_hello_format(own, &text, &size, error);

        if (status)
                return status;
        status = peer_send(peer, PEER_HELLO, text, size, error);
        free(text);
        return status;
}

static enum nebula_status receive_hello(struct peer *peer, struct nebula_error *error)
{
        enum nebula_status status = peer_receive(peer, error);

        if (!status && peer->header.type != PEER_HELLO)
                status = error_set(error, NEBULA_CORRUPT, 0, "a connection of a peer begins with HELLO");
        return status ? status : peer_hello_parse(peer->body, peer->header.size, &peer->hello, error);
}

/* *ret_reached: the other end has taken the connection. */
static enum nebula_status open_once(const struct member *member, const struct tls_key *key, const struct peer_hello *own, struct peer **ret_peer,
                                    bool *ret_reached, struct nebula_error *error)
{
        int fd = os->tcp_connect(member->address, member->port, PEER_CONNECT_MS);
        struct peer *peer;
        enum nebula_status status;

        *ret_reached = fd >= 0;
        if (fd < 0)
                return error_set(error, NEBULA_UNAVAILABLE, -fd, "node \"%.100s\" cannot be reached at %.100s:%u", member->node,
                                 member->address, member->port);
        peer = peer_new(fd);
        if (!peer) {
                os->close(fd);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");
        }
        peer->key = *key;
        status = peer_tls_connect(fd, key, PEER_HANDSHAKE_MS, &peer->tls, error);
        if (!status)
                status = send_hello(peer, own, error);
        if (!status)
                status = receive_hello(peer, error);
        if (status) {
                error_prefix(error, "node \"%.60s\" at %.60s:%u", member->node, member->address, member->port);
                peer_free(peer);
        } else {
                *ret_peer = peer;
        }
        return status;
}

/* A copy server that has no place left closes connections that have not spoken yet. On a busy machine that can be this one. */
enum nebula_status peer_open(const struct member *member, const struct tls_key *key, const struct peer_hello *own,
                             struct peer **ret_peer, struct nebula_error *error)
{
        int64_t until_ns = os->now_ns() + PEER_HANDSHAKE_MS * INT64_C(1000000);
        enum nebula_status status;
        bool reached;

        for (unsigned attempt = 0;; attempt++) {
                status = open_once(member, key, own, ret_peer, &reached, error);
                if (status != NEBULA_UNAVAILABLE || !reached || attempt == AGAIN_MAX || os->now_ns() >= until_ns)
                        return status;
                os->sleep_ms(AGAIN_FIRST_MS << attempt);
        }
}

enum nebula_status peer_serve(int fd, bool (*find)(void *argument, const char *identity, struct tls_key *ret_key), void *argument,
                              const char *own_node, uint64_t own_nonce, struct peer **ret_peer, struct nebula_error *error)
{
        struct peer *peer = peer_new(fd);
        struct peer_hello *own;
        enum nebula_status status;

        if (!peer)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");
        status = peer_tls_accept(fd, find, argument, PEER_HANDSHAKE_MS, &peer->tls, &peer->key, error);
        if (!status)
                status = receive_hello(peer, error);
        if (!status) {
                own = malloc(sizeof *own);
                if (own) {
                        *own = peer->hello;
                        snprintf(own->node, sizeof own->node, "%s", own_node);
                        own->nonce = own_nonce;
                        status = send_hello(peer, own, error);
                        free(own);
                } else {
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a connection");
                }
        }
        if (status) {
                peer->fd = -1; /* it stays the caller's */
                peer_free(peer);
        } else {
                *ret_peer = peer;
        }
        return status;
}
