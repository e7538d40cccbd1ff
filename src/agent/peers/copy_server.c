/* The threads that serve connected peers, and the secrets that these may hold. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/peers/copy_server_private.h"
#include "agent/peers/slots_private.h"
#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"

#define COMPLAIN_NS SECOND_NS /* a port scanner causes at most one line a second */
#define SLICE_MS 1000

/* One line per second at most; the next one says how many were not written. */
void copy_server_complain(struct copy_server *server, const char *from, const struct nebula_error *error)
{
        int64_t now = os->now_ns();
        uint32_t unlogged = 0;
        bool say;

        lock_take(&server->copy_server_lock);
        say = !server->complained_ns || now - server->complained_ns >= COMPLAIN_NS;
        if (say) {
                unlogged = server->unlogged;
                server->unlogged = 0;
                server->complained_ns = now;
        } else {
                server->unlogged++;
        }
        lock_give(&server->copy_server_lock);
        if (say && unlogged)
                log_event(LOG_LEVEL_WARN, "turned the peer at %s away: %s (and %u more)", from, error->message, unlogged);
        else if (say)
                log_event(LOG_LEVEL_WARN, "turned the peer at %s away: %s", from, error->message);
}

static bool find_key(void *argument, const char *identity, struct tls_key *ret_key)
{
        struct copy_server *server = argument;
        bool found = false;

        lock_take(&server->copy_server_lock);
        for (size_t i = 0; i < server->key_count && !found; i++)
                if (!strcmp(server->keys[i].identity, identity)) {
                        *ret_key = server->keys[i];
                        found = true;
                }
        lock_give(&server->copy_server_lock);
        return found;
}

bool copy_server_is_stopping(struct copy_server *server)
{
        bool stopping;

        lock_take(&server->copy_server_lock);
        stopping = server->stopping;
        lock_give(&server->copy_server_lock);
        return stopping;
}

static void converse(struct visitor *visitor)
{
        struct copy_server *server = visitor->server;
        struct nebula_error error = { 0 };
        struct peer *peer;
        bool is_sent_away;
        int64_t heard_ns;
        int fd;
        enum nebula_status status = peer_serve(visitor->fd, find_key, server, server->node, server->catalogue->agent_nonce, &peer, &error);

        lock_take(&server->copy_server_lock);
        fd = visitor->fd;
        visitor->fd = -1; /* to be closed, or the peer's */
        visitor->peer = status ? NULL : peer;
        visitor->is_proven = !status;
        is_sent_away = visitor->is_sent_away;
        lock_give(&server->copy_server_lock);
        if (status) {
                os->close(fd);
                if (is_sent_away)
                        error_set(&error, NEBULA_BUSY, 0, "it did not prove that it holds the secret, and others wait");
                if (!copy_server_is_stopping(server))
                        copy_server_complain(server, visitor->from, &error);
                return;
        }
        heard_ns = os->now_ns();
        while (!status && !copy_server_is_stopping(server)) {
                int ready = peer_tls_wait(peer->tls, SLICE_MS);

                if (!ready && os->now_ns() - heard_ns >= server->hold_ns)
                        copy_server_own_close(visitor); /* a save may need the memory; the next request opens the file again */
                if (!ready)
                        continue;
                status = peer_receive(peer, &error);
                if (!status)
                        status = copy_server_serve(visitor, &error);
                heard_ns = os->now_ns();
        }
        if (status != NEBULA_UNAVAILABLE && !copy_server_is_stopping(server))
                copy_server_complain(server, visitor->from, &error);
        else if (visitor->incoming)
                log_event(LOG_LEVEL_WARN, "node \"%s\" vanished in the middle of a copy of %s, which is dropped: %s", peer->hello.node,
                          visitor->incoming->what.tag, error.message);
        copy_server_drop_incoming(visitor);
        copy_server_own_close(visitor);
        lock_take(&server->copy_server_lock);
        visitor->peer = NULL;
        lock_give(&server->copy_server_lock);
        peer_free(peer);
}

static void *visitor_main(void *argument)
{
        struct visitor *visitor = argument;
        struct copy_server *server = visitor->server;
        struct catalogue *catalogue = server->catalogue;

        converse(visitor);
        peer_tls_thread_end();
        catalogue_lock(catalogue);
        catalogue->peer_count--;
        catalogue_signal(catalogue);
        catalogue_unlock(catalogue);
        lock_take(&server->copy_server_lock);
        for (size_t i = 0; i < VISITOR_MAX; i++)
                if (server->visitors[i] == visitor)
                        server->visitors[i] = NULL;
        free(visitor);
        server->visitor_count--;
        pthread_cond_broadcast(&server->ended);
        lock_give(&server->copy_server_lock);
        return NULL;
}

bool copy_server_start_visit(struct copy_server *server, int fd, const char *from)
{
        struct visitor *visitor = calloc(1, sizeof *visitor);
        size_t slot = 0;
        bool started = false;

        if (!visitor)
                return false;
        visitor->server = server;
        visitor->fd = fd;
        visitor->since_ns = os->now_ns();
        snprintf(visitor->from, sizeof visitor->from, "%s", from);
        catalogue_lock(server->catalogue);
        server->catalogue->peer_count++;
        catalogue_unlock(server->catalogue);
        lock_take(&server->copy_server_lock);
        if (!copy_server_make_room(server, from))
                slot = VISITOR_MAX;
        while (slot < VISITOR_MAX && server->visitors[slot])
                slot++;
        if (slot < VISITOR_MAX && !server->stopping && !os_thread_start(NULL, visitor_main, visitor, false)) {
                server->visitors[slot] = visitor;
                server->visitor_count++;
                started = true;
        }
        lock_give(&server->copy_server_lock);
        if (!started) {
                catalogue_lock(server->catalogue);
                server->catalogue->peer_count--;
                catalogue_unlock(server->catalogue);
                free(visitor);
        }
        return started;
}

enum nebula_status copy_server_new(struct catalogue *catalogue, const char *node, struct copy_server **ret_server, struct nebula_error *error)
{
        const char *text = conf_env("NEBULA_PEER_MEMORY");
        struct copy_server *server = calloc(1, sizeof *server);
        enum nebula_status status = NEBULA_OK;

        if (!server)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for copies");
        server->catalogue = catalogue;
        server->listen_fd = -1;
        server->hold_ns = PEER_SILENCE_MS * INT64_C(1000000);
        server->budget = catalogue->memory->budget / 2;
        if (text)
                status = conf_parse_size("NEBULA_PEER_MEMORY", text, &server->budget, error);
        if (status) {
                free(server);
                return status;
        }
        snprintf(server->node, sizeof server->node, "%s", node);
        lock_init(&server->copy_server_lock, LOCK_COPY_SERVER);
        os_cond_init(&server->ended);
        *ret_server = server;
        return NEBULA_OK;
}

enum nebula_status copy_server_open(struct copy_server *server, struct member *ret_own, struct nebula_error *error)
{
        const char *setting = conf_env("NEBULA_LISTEN");
        struct member own = { 0 };
        struct copy_listener *listener;
        int fd, result = 0;
        enum nebula_status status = NEBULA_OK;

        if (server->listen_fd >= 0) {
                *ret_own = server->own;
                return NEBULA_OK;
        }
        if (setting)
                status = member_parse("NEBULA_LISTEN", setting, &own, error);
        else if (conf_env("NEBULA_NODE_ID"))
                strcpy(own.address, "127.0.0.1");
        else
                result = os->host_address(own.address, sizeof own.address);
        if (status)
                return status;
        if (result < 0)
                return error_set(error, NEBULA_UNAVAILABLE, -result, "this host's address is not known: set NEBULA_LISTEN");
        snprintf(own.node, sizeof own.node, "%s", server->node);
        own.nonce = server->catalogue->agent_nonce;
        fd = os->tcp_listen(own.address, own.port, &own.port);
        if (fd < 0)
                return error_set(error, NEBULA_UNAVAILABLE, -fd, "cannot listen for peers at %.100s:%u", own.address, own.port);
        /* The listener is bound to every address; other nodes need one that leads here. */
        if (!strcmp(own.address, "0.0.0.0") || !strcmp(own.address, "::"))
                os->host_address(own.address, sizeof own.address);
        listener = copy_server_listener_new(server, fd, error);
        if (!listener) {
                os->close(fd);
                return NEBULA_UNAVAILABLE;
        }
        server->listen_fd = fd;
        result = os_thread_start(&server->listener, copy_server_listener_main, listener, false);
        if (result < 0) {
                copy_server_listener_free(listener);
                os->close(fd);
                server->listen_fd = -1;
                return error_set(error, NEBULA_UNAVAILABLE, -result, "cannot start a thread for peers");
        }
        server->own = own;
        log_event(LOG_LEVEL_INFO, "node \"%s\" keeps copies for peers at %s:%u, up to %" PRIu64 " MiB", own.node, own.address, own.port,
                  server->budget >> 20);
        *ret_own = own;
        return NEBULA_OK;
}

/* Catalogue's lock held. Whether this node has a job with that identity. */
static bool has_job(const struct catalogue *catalogue, const char *identity)
{
        for (const struct job *job = catalogue->jobs; job; job = job->next) {
                if (strcmp(job->copies->identity, identity))
                        continue;
                if (job->trainer_count || catalogue_is_spare(job))
                        return true;
                for (const struct version *version = job->versions; version; version = version->next)
                        if (version->in_memory)
                                return true;
        }
        return false;
}

/* copy_server_lock held. Whether a copy is kept for it, or is arriving. */
static bool has_copy(const struct copy_server *server, const char *identity)
{
        for (const struct copy *copy = server->copies; copy; copy = copy->next)
                if (!strcmp(copy->identity, identity))
                        return true;
        for (size_t i = 0; i < VISITOR_MAX; i++)
                if (server->visitors[i] && server->visitors[i]->peer && !strcmp(server->visitors[i]->peer->key.identity, identity))
                        return true;
        return false;
}

/* copy_server_lock held. Forgets the secrets of jobs that have ended. A job that trains again brings its secret along. */
static void forget_keys(struct copy_server *server)
{
        size_t kept = 0;

        catalogue_lock(server->catalogue);
        for (size_t i = 0; i < server->key_count; i++)
                if (has_job(server->catalogue, server->keys[i].identity) || has_copy(server, server->keys[i].identity))
                        server->keys[kept++] = server->keys[i];
        catalogue_unlock(server->catalogue);
        if (server->key_count)
                explicit_bzero(server->keys + kept, (server->key_count - kept) * sizeof *server->keys);
        server->key_count = kept;
}

static bool has_key(const struct copy_server *server, const char *identity)
{
        for (size_t i = 0; i < server->key_count; i++)
                if (!strcmp(server->keys[i].identity, identity))
                        return true;
        return false;
}

/* copy_server_lock held. Overwrites the old array before it is freed: it held secrets. */
static enum nebula_status grow_keys(struct copy_server *server, struct nebula_error *error)
{
        size_t capacity = server->key_capacity ? 2 * server->key_capacity : 16;
        struct tls_key *grown;

        if (server->key_count < server->key_capacity)
                return NEBULA_OK;
        if (server->key_count >= KEY_MAX)
                return error_set(error, NEBULA_INVALID, 0, "this agent serves the secrets of %d jobs already", KEY_MAX);
        grown = calloc(capacity, sizeof *grown);
        if (!grown)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a secret");
        if (server->key_count) {
                memcpy(grown, server->keys, server->key_count * sizeof *grown);
                explicit_bzero(server->keys, server->key_count * sizeof *grown);
        }
        free(server->keys);
        server->keys = grown;
        server->key_capacity = capacity;
        return NEBULA_OK;
}

enum nebula_status copy_server_add_key(struct copy_server *server, const struct tls_key *key, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        lock_take(&server->copy_server_lock);
        if (!has_key(server, key->identity)) {
                forget_keys(server);
                status = grow_keys(server, error);
                if (!status)
                        server->keys[server->key_count++] = *key;
        }
        lock_give(&server->copy_server_lock);
        return status;
}

void copy_server_free(struct copy_server *server)
{
        if (!server)
                return;
        lock_take(&server->copy_server_lock);
        server->stopping = true;
        if (server->listen_fd >= 0)
                os->shutdown(server->listen_fd);
        while (server->visitor_count) {
                for (size_t i = 0; i < VISITOR_MAX; i++) {
                        struct visitor *visitor = server->visitors[i];

                        if (visitor && visitor->peer)
                                peer_shutdown(visitor->peer);
                        else if (visitor && visitor->fd >= 0)
                                os->shutdown(visitor->fd);
                }
                lock_wait_for(&server->copy_server_lock, &server->ended, 100);
        }
        lock_give(&server->copy_server_lock);
        if (server->listen_fd >= 0) {
                pthread_join(server->listener, NULL);
                os->close(server->listen_fd);
        }
        copy_server_copies_free(server, server->copies);
        if (server->keys)
                explicit_bzero(server->keys, server->key_capacity * sizeof *server->keys);
        free(server->keys);
        pthread_cond_destroy(&server->ended);
        lock_done(&server->copy_server_lock);
        free(server);
}
