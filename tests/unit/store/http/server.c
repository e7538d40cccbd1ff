#include "store/http/server.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#define LINKS_MAX 512
#define HEAD_MAX (64u << 10)

struct server_link {
        struct server *server;
        pthread_t thread;
        int fd;
        SSL *ssl;
        unsigned number;
        char *head;
        size_t head_size; /* bytes of the head, and of the body that came with it */
};

struct server {
        server_handler *handler;
        void *argument;
        int fd, port;
        pthread_t thread;
        atomic_uint requests, connections;
        atomic_bool stops;
        pthread_mutex_t lock; /* guards the links */
        struct server_link *links[LINKS_MAX];
        size_t link_count;
        SSL_CTX *context;
        X509 *certificate;
};

static ssize_t link_read(struct server_link *link, void *data, size_t size)
{
        return link->ssl ? SSL_read(link->ssl, data, (int)size) : read(link->fd, data, size);
}

static bool link_write(struct server_link *link, const char *data, size_t size)
{
        while (size) {
                size_t piece = size < 1 << 20 ? size : 1 << 20;
                ssize_t done = link->ssl ? SSL_write(link->ssl, data, (int)piece) : send(link->fd, data, piece, MSG_NOSIGNAL);

                if (done <= 0)
                        return false;
                data += done;
                size -= (size_t)done;
        }
        return true;
}

void server_raw(struct server_call *call, const void *data, size_t size)
{
        if (!link_write(call->link, data, size))
                call->is_over = true;
}

void server_answer(struct server_call *call, int status, const char *fields, const void *body, size_t size)
{
        char head[4096];
        int length = snprintf(head, sizeof head, "HTTP/1.1 %d Said\r\n%sContent-Length: %zu\r\n\r\n", status, fields, size);

        server_raw(call, head, (size_t)length);
        if (size && strcmp(call->method, "HEAD"))
                server_raw(call, body, size);
}

void server_say(struct server_call *call, int status, const char *fields, const char *text)
{
        server_answer(call, status, fields, text, strlen(text));
}

void server_close(struct server_call *call)
{
        call->is_over = true;
}

void server_reset(struct server_call *call)
{
        struct linger linger = { .l_onoff = 1 };

        setsockopt(call->link->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
        call->is_over = true;
}

void server_stall(struct server_call *call, int64_t ms)
{
        for (; ms > 0 && !atomic_load(&call->server->stops); ms -= 10)
                usleep(10000);
}

const char *server_field(const struct server_call *call, const char *name, char *value, size_t size)
{
        size_t length = strlen(name);

        *value = 0;
        for (const char *line = strstr(call->head, "\r\n"); line && line[2]; line = strstr(line + 2, "\r\n"))
                if (!strncasecmp(line + 2, name, length) && line[2 + length] == ':') {
                        line += 2 + length + 1;
                        line += strspn(line, " ");
                        snprintf(value, size, "%.*s", (int)strcspn(line, "\r"), line);
                        break;
                }
        return value;
}

/* Reads the head of the next request. Bytes behind it stay in link->head. False: the connection has ended. */
static bool read_head(struct server_link *link, size_t *ret_size)
{
        for (;;) {
                char *end = memmem(link->head, link->head_size, "\r\n\r\n", 4);
                ssize_t got;

                if (end) {
                        *ret_size = (size_t)(end - link->head) + 4;
                        return true;
                }
                if (link->head_size == HEAD_MAX)
                        return false;
                got = link_read(link, link->head + link->head_size, HEAD_MAX - link->head_size);
                if (got <= 0)
                        return false;
                link->head_size += (size_t)got;
        }
}

static char *read_body(struct server_link *link, size_t head_size, size_t size)
{
        char *body = malloc(size + 1);
        size_t done = link->head_size - head_size < size ? link->head_size - head_size : size;

        memcpy(body, link->head + head_size, done);
        memmove(link->head, link->head + head_size + done, link->head_size - head_size - done);
        link->head_size -= head_size + done;
        while (done < size) {
                ssize_t got = link_read(link, body + done, size - done);

                if (got <= 0) {
                        free(body);
                        return NULL;
                }
                done += (size_t)got;
        }
        body[size] = 0;
        return body;
}

/* False: the connection is over. */
static bool serve_one(struct server_link *link)
{
        struct server_call call = { .server = link->server, .connection = link->number, .link = link };
        char *head, *body, *target, length[32];
        size_t size;

        if (!read_head(link, &size))
                return false;
        head = strndup(link->head, size);
        call.head = head;
        call.body_size = strtoul(server_field(&call, "content-length", length, sizeof length), NULL, 10);
        body = read_body(link, size, call.body_size);
        if (!body) {
                free(head);
                return false;
        }
        call.body = body;
        sscanf(head, "%15s", call.method);
        target = strdup(head + strcspn(head, " ") + 1);
        target[strcspn(target, " ")] = 0;
        call.target = target;
        call.number = atomic_fetch_add(&link->server->requests, 1) + 1;
        link->server->handler(&call, link->server->argument);
        free(target);
        free(body);
        free(head);
        return !call.is_over;
}

static void *serve(void *argument)
{
        struct server_link *link = argument;

        if (link->server->context) {
                link->ssl = SSL_new(link->server->context);
                SSL_set_fd(link->ssl, link->fd);
        }
        if (!link->ssl || SSL_accept(link->ssl) == 1)
                while (serve_one(link))
                        ;
        pthread_mutex_lock(&link->server->lock);
        SSL_free(link->ssl);
        close(link->fd);
        link->fd = -1;
        pthread_mutex_unlock(&link->server->lock);
        return NULL;
}

static void free_link(struct server_link *link)
{
        pthread_join(link->thread, NULL);
        free(link->head);
        free(link);
}

/* Lock held: takes away connections that have ended, whose threads want nothing more. */
static void forget_ended(struct server *server)
{
        size_t left = 0;

        for (size_t i = 0; i < server->link_count; i++)
                if (server->links[i]->fd < 0)
                        free_link(server->links[i]);
                else
                        server->links[left++] = server->links[i];
        server->link_count = left;
}

static void *accept_all(void *argument)
{
        struct server *server = argument;
        int fd, one = 1;

        while ((fd = accept(server->fd, NULL, NULL)) >= 0) {
                struct server_link *link = calloc(1, sizeof *link);

                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                link->server = server;
                link->fd = fd;
                link->head = malloc(HEAD_MAX + 1);
                pthread_mutex_lock(&server->lock);
                if (server->link_count == LINKS_MAX)
                        forget_ended(server);
                if (atomic_load(&server->stops) || server->link_count == LINKS_MAX) {
                        pthread_mutex_unlock(&server->lock);
                        close(fd);
                        free(link->head);
                        free(link);
                        continue;
                }
                link->number = atomic_fetch_add(&server->connections, 1) + 1;
                server->links[server->link_count++] = link;
                pthread_create(&link->thread, NULL, serve, link);
                pthread_mutex_unlock(&server->lock);
        }
        return NULL;
}

static void make_certificate(struct server *server)
{
        EVP_PKEY *key = EVP_EC_gen("P-256");
        X509 *certificate = X509_new();
        X509V3_CTX context;
        X509_EXTENSION *names;

        ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
        X509_set_version(certificate, 2);
        X509_gmtime_adj(X509_getm_notBefore(certificate), -3600);
        X509_gmtime_adj(X509_getm_notAfter(certificate), 86400);
        X509_set_pubkey(certificate, key);
        X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC, (const unsigned char *)"localhost", -1, -1, 0);
        X509_set_issuer_name(certificate, X509_get_subject_name(certificate));
        X509V3_set_ctx(&context, certificate, certificate, NULL, NULL, 0);
        names = X509V3_EXT_conf_nid(NULL, &context, NID_subject_alt_name, "DNS:localhost");
        X509_add_ext(certificate, names, -1);
        X509_EXTENSION_free(names);
        X509_sign(certificate, key, EVP_sha256());
        server->context = SSL_CTX_new(TLS_server_method());
        SSL_CTX_use_certificate(server->context, certificate);
        SSL_CTX_use_PrivateKey(server->context, key);
        server->certificate = certificate;
        EVP_PKEY_free(key);
}

bool server_certificate(const struct server *server, const char *path)
{
        FILE *file = fopen(path, "w");
        bool done = file && PEM_write_X509(file, server->certificate) == 1;

        return file && !fclose(file) && done;
}

struct server *server_start(server_handler *handler, void *argument, bool is_tls)
{
        struct server *server = calloc(1, sizeof *server);
        struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        socklen_t size = sizeof address;

        signal(SIGPIPE, SIG_IGN); /* OpenSSL's writes */
        server->handler = handler;
        server->argument = argument;
        pthread_mutex_init(&server->lock, NULL);
        if (is_tls)
                make_certificate(server);
        server->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (bind(server->fd, (struct sockaddr *)&address, sizeof address) || listen(server->fd, 256) ||
            getsockname(server->fd, (struct sockaddr *)&address, &size))
                abort();
        server->port = ntohs(address.sin_port);
        pthread_create(&server->thread, NULL, accept_all, server);
        return server;
}

int server_port(const struct server *server)
{
        return server->port;
}

unsigned server_requests(struct server *server)
{
        return atomic_load(&server->requests);
}

unsigned server_connections(struct server *server)
{
        return atomic_load(&server->connections);
}

void server_stop(struct server *server)
{
        if (!server)
                return;
        atomic_store(&server->stops, true);
        shutdown(server->fd, SHUT_RDWR);
        pthread_join(server->thread, NULL);
        close(server->fd);
        pthread_mutex_lock(&server->lock);
        for (size_t i = 0; i < server->link_count; i++)
                if (server->links[i]->fd >= 0)
                        shutdown(server->links[i]->fd, SHUT_RDWR);
        pthread_mutex_unlock(&server->lock);
        for (size_t i = 0; i < server->link_count; i++)
                free_link(server->links[i]);
        X509_free(server->certificate);
        SSL_CTX_free(server->context);
        pthread_mutex_destroy(&server->lock);
        free(server);
}
