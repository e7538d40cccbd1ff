#include "agent/peers/tls.h"

#include <errno.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"

#define CIPHER_ID "\x13\x01" /* TLS_AES_128_GCM_SHA256: its hash is the one that a plain key implies */

struct tls {
        SSL_CTX *context;
        SSL *ssl;
        int fd;
        int64_t until_ns;   /* of the receive that runs */
        int sys_errno;      /* of the last failed call on the socket; 0: none */
        bool ended, late, unknown;
        struct tls_key key; /* the one in use */
        bool (*find)(void *argument, const char *identity, struct tls_key *ret_key);
        void *argument;
};

static BIO_METHOD *socket_method;
static pthread_once_t socket_once = PTHREAD_ONCE_INIT;

static int socket_write(BIO *bio, const char *data, int size)
{
        struct tls *tls = BIO_get_data(bio);
        int64_t sent;

        do
                sent = os->send(tls->fd, data, (size_t)size, -1);
        while (sent == -EINTR);
        if (sent < 0)
                tls->sys_errno = (int)-sent;
        return sent < 0 ? -1 : (int)sent;
}

static int socket_read(BIO *bio, char *data, int size)
{
        struct tls *tls = BIO_get_data(bio);
        int64_t received;
        int passed = -1;

        do {
                int64_t left_ms = (tls->until_ns - os->now_ns()) / 1000000;
                int ready = left_ms > 0 ? os->poll(tls->fd, left_ms) : 0;

                if (!ready) {
                        tls->late = true;
                        return -1;
                }
                received = ready == -EINTR ? -EINTR : ready < 0 ? ready : os->receive(tls->fd, data, (size_t)size, &passed);
                if (passed >= 0)
                        os->close(passed);
        } while (received == -EINTR);
        if (received < 0)
                tls->sys_errno = (int)-received;
        tls->ended = tls->ended || received == 0;
        return received < 0 ? -1 : (int)received;
}

static long socket_control(BIO *bio, int command, long number, void *pointer)
{
        (void)bio;
        (void)number;
        (void)pointer;
        return command == BIO_CTRL_FLUSH;
}

static void make_method(void)
{
        socket_method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "agent socket");
        if (socket_method && !(BIO_meth_set_write(socket_method, socket_write) && BIO_meth_set_read(socket_method, socket_read) &&
                               BIO_meth_set_ctrl(socket_method, socket_control))) {
                BIO_meth_free(socket_method);
                socket_method = NULL;
        }
}

static enum nebula_status derive(const void *secret, size_t size, const char *purpose, uint8_t ret_digest[TLS_KEY_BYTES],
                                 struct nebula_error *error)
{
        unsigned length = TLS_KEY_BYTES;

        if (size > INT32_MAX || !HMAC(EVP_sha256(), secret, (int)size, (const unsigned char *)purpose, strlen(purpose), ret_digest, &length))
                return error_set(error, NEBULA_INTERNAL, 0, "a key cannot be derived from the secret");
        return NEBULA_OK;
}

enum nebula_status peer_tls_key_init(struct tls_key *key, const void *secret, size_t size, struct nebula_error *error)
{
        uint8_t digest[TLS_KEY_BYTES];
        enum nebula_status status;

        if (size < TLS_SECRET_MIN)
                return error_set(error, NEBULA_INVALID, 0, "a secret has at least %d bytes, this one has %zu", TLS_SECRET_MIN, size);
        status = derive(secret, size, "nebula peer key", key->key, error);
        if (!status)
                status = derive(secret, size, "nebula peer identity", digest, error);
        for (size_t i = 0; !status && i < 16; i++) {
                static const char digits[] = "0123456789abcdef";

                key->identity[2 * i] = digits[digest[i] >> 4];
                key->identity[2 * i + 1] = digits[digest[i] & 15];
        }
        key->identity[sizeof key->identity - 1] = 0;
        return status;
}

/* Makes the session object by which OpenSSL takes a pre-shared key. */
static SSL_SESSION *session_of(SSL *ssl, const struct tls_key *key)
{
        const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, (const unsigned char *)CIPHER_ID);
        SSL_SESSION *session = cipher ? SSL_SESSION_new() : NULL;

        if (session && SSL_SESSION_set1_master_key(session, key->key, sizeof key->key) && SSL_SESSION_set_cipher(session, cipher) &&
            SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION))
                return session;
        SSL_SESSION_free(session);
        return NULL;
}

/* Client: offers the key. */
static int use_key(SSL *ssl, const EVP_MD *digest, const unsigned char **id, size_t *id_size, SSL_SESSION **session)
{
        struct tls *tls = SSL_get_app_data(ssl);

        (void)digest;
        *session = session_of(ssl, &tls->key);
        *id = (const unsigned char *)tls->key.identity;
        *id_size = strlen(tls->key.identity);
        return *session != NULL;
}

/* On the server: looks up the client's identity. If there is no session, the handshake continues and fails for want of a certificate. */
static int find_key(SSL *ssl, const unsigned char *identity, size_t size, SSL_SESSION **session)
{
        struct tls *tls = SSL_get_app_data(ssl);
        char text[sizeof tls->key.identity];

        *session = NULL;
        tls->unknown = true;
        if (size != sizeof text - 1)
                return 1;
        memcpy(text, identity, size);
        text[size] = 0;
        if (!tls->find(tls->argument, text, &tls->key))
                return 1;
        tls->unknown = false;
        *session = session_of(ssl, &tls->key);
        return *session != NULL;
}

static enum nebula_status failure(struct tls *tls, int result, const char *what, struct nebula_error *error)
{
        int reason = SSL_get_error(tls->ssl, result);
        unsigned long code = ERR_peek_last_error();
        char text[200] = "";

        if (code)
                ERR_error_string_n(code, text, sizeof text);
        ERR_clear_error();
        if (tls->late)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s: the peer is silent", what);
        if (tls->sys_errno)
                return error_set(error, NEBULA_UNAVAILABLE, tls->sys_errno, "%s", what);
        if (tls->ended || reason == SSL_ERROR_ZERO_RETURN)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s: the peer has closed the connection", what);
        return error_set(error, NEBULA_CORRUPT, 0, "%s: the data that came is not the data that the peer sent: %s", what,
                         *text ? text : "it was changed on the way");
}

static struct tls *peer_tls_new(int fd, bool server)
{
        struct tls *tls = calloc(1, sizeof *tls);
        BIO *bio = NULL;

        pthread_once(&socket_once, make_method);
        if (!tls)
                return NULL;
        tls->fd = fd;
        tls->context = socket_method ? SSL_CTX_new(server ? TLS_server_method() : TLS_client_method()) : NULL;
        if (!tls->context || !SSL_CTX_set_min_proto_version(tls->context, TLS1_3_VERSION) ||
            !SSL_CTX_set_ciphersuites(tls->context, "TLS_AES_128_GCM_SHA256") || !SSL_CTX_set_num_tickets(tls->context, 0))
                goto undo;
        /* A server that offers a certificate is not one of ours. No authority is trusted, so verification refuses it. */
        if (!server)
                SSL_CTX_set_verify(tls->context, SSL_VERIFY_PEER, NULL);
        SSL_CTX_set_session_cache_mode(tls->context, SSL_SESS_CACHE_OFF);
        if (server)
                SSL_CTX_set_psk_find_session_callback(tls->context, find_key);
        else
                SSL_CTX_set_psk_use_session_callback(tls->context, use_key);
        tls->ssl = SSL_new(tls->context);
        bio = tls->ssl ? BIO_new(socket_method) : NULL;
        if (!bio)
                goto undo;
        BIO_set_data(bio, tls);
        BIO_set_init(bio, 1);
        SSL_set_bio(tls->ssl, bio, bio);
        SSL_set_app_data(tls->ssl, tls);
        return tls;
undo:
        peer_tls_free(tls);
        return NULL;
}

static enum nebula_status shake_hands(struct tls *tls, bool server, int64_t timeout_ms, struct nebula_error *error)
{
        int result;

        tls->until_ns = os->now_ns() + timeout_ms * 1000000;
        ERR_clear_error();
        result = server ? SSL_accept(tls->ssl) : SSL_connect(tls->ssl);
        /* Reused: the key carried it. */
        if (result == 1 && SSL_session_reused(tls->ssl))
                return NEBULA_OK;
        if (server && tls->unknown)
                return error_set(error, NEBULA_INVALID, 0, "the peer holds another secret: is NEBULA_SECRET_FILE the same on all nodes?");
        if (result == 1)
                return error_set(error, NEBULA_INVALID, 0, "the peer did not prove that it holds the secret");
        if (!tls->late && !tls->sys_errno && !tls->ended)
                return failure(tls, result, server ? "the TLS handshake with the peer failed" :
                                                     "the TLS handshake with the peer failed; the peer may hold another secret", error);
        return failure(tls, result, "the TLS handshake with the peer failed", error);
}

enum nebula_status peer_tls_connect(int fd, const struct tls_key *key, int64_t timeout_ms, struct tls **ret_tls, struct nebula_error *error)
{
        struct tls *tls = peer_tls_new(fd, false);
        enum nebula_status status;

        if (!tls)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an encrypted connection");
        tls->key = *key;
        status = shake_hands(tls, false, timeout_ms, error);
        if (status)
                peer_tls_free(tls);
        else
                *ret_tls = tls;
        return status;
}

enum nebula_status peer_tls_accept(int fd, bool (*find)(void *argument, const char *identity, struct tls_key *ret_key), void *argument,
                              int64_t timeout_ms, struct tls **ret_tls, struct tls_key *ret_key, struct nebula_error *error)
{
        struct tls *tls = peer_tls_new(fd, true);
        enum nebula_status status;

        if (!tls)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an encrypted connection");
        tls->find = find;
        tls->argument = argument;
        tls->unknown = true;
        status = shake_hands(tls, true, timeout_ms, error);
        if (status) {
                peer_tls_free(tls);
        } else {
                *ret_key = tls->key;
                *ret_tls = tls;
        }
        return status;
}

enum nebula_status peer_tls_send(struct tls *tls, const void *data, size_t size, struct nebula_error *error)
{
        size_t sent;
        int result;

        if (!size)
                return NEBULA_OK;
        tls->until_ns = os->now_ns() + 20 * SECOND_NS; /* a write may have to read, if the peer updates its keys */
        ERR_clear_error();
        result = SSL_write_ex(tls->ssl, data, size, &sent);
        return result == 1 ? NEBULA_OK : failure(tls, result, "sending to the peer", error);
}

enum nebula_status peer_tls_receive(struct tls *tls, void *data, size_t size, int64_t timeout_ms, struct nebula_error *error)
{
        char *to = data;

        tls->until_ns = os->now_ns() + timeout_ms * 1000000;
        while (size) {
                size_t received;
                int result;

                ERR_clear_error();
                result = SSL_read_ex(tls->ssl, to, size, &received);
                if (result != 1)
                        return failure(tls, result, "receiving from the peer", error);
                to += received;
                size -= received;
        }
        return NEBULA_OK;
}

int peer_tls_wait(struct tls *tls, int64_t timeout_ms)
{
        int ready;

        if (SSL_has_pending(tls->ssl))
                return 1;
        do
                ready = os->poll(tls->fd, timeout_ms);
        while (ready == -EINTR && timeout_ms < 0);
        return ready != 0;
}

void peer_tls_free(struct tls *tls)
{
        if (!tls)
                return;
        SSL_free(tls->ssl);
        SSL_CTX_free(tls->context);
        explicit_bzero(&tls->key, sizeof tls->key); /* a memset is left out before free */
        free(tls);
}

void peer_tls_thread_end(void)
{
        OPENSSL_thread_stop();
}
