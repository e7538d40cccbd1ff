/* A thread for each visitor, and the secrets that they may hold. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/holder_private.h"
#include "agent/log.h"
#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"

#define COMPLAIN_NS 1000000000 /* a scanner of ports gets a line a second at most */
#define SLICE_MS 1000

/* One line per second at most; the next one says how many were not written. */
void holder_complain(struct holder *holder, const char *from, const struct nebula_error *error)
{
        int64_t now = os->now_ns();
        uint32_t unsaid = 0;
        bool say;

        pthread_mutex_lock(&holder->holder_lock);
        say = !holder->complained_ns || now - holder->complained_ns >= COMPLAIN_NS;
        if (say) {
                unsaid = holder->unsaid;
                holder->unsaid = 0;
                holder->complained_ns = now;
        } else {
                holder->unsaid++;
        }
        pthread_mutex_unlock(&holder->holder_lock);
        if (say && unsaid)
                log_event(LOG_LEVEL_WARN, "turned the peer at %s away: %s (and %u more)", from, error->message, unsaid);
        else if (say)
                log_event(LOG_LEVEL_WARN, "turned the peer at %s away: %s", from, error->message);
}

static bool find_key(void *argument, const char *identity, struct tls_key *ret_key)
{
        struct holder *holder = argument;
        bool found = false;

        pthread_mutex_lock(&holder->holder_lock);
        for (size_t i = 0; i < holder->key_count && !found; i++)
                if (!strcmp(holder->keys[i].identity, identity)) {
                        *ret_key = holder->keys[i];
                        found = true;
                }
        pthread_mutex_unlock(&holder->holder_lock);
        return found;
}

bool holder_is_stopping(struct holder *holder)
{
        bool stopping;

        pthread_mutex_lock(&holder->holder_lock);
        stopping = holder->stopping;
        pthread_mutex_unlock(&holder->holder_lock);
        return stopping;
}

static void converse(struct visitor *visitor)
{
        struct holder *holder = visitor->holder;
        struct nebula_error error = { 0 };
        struct peer *peer;
        bool is_sent_away;
        int fd;
        enum nebula_status status = peer_serve(visitor->fd, find_key, holder, holder->node, holder->catalogue->agent_nonce, &peer, &error);

        pthread_mutex_lock(&holder->holder_lock);
        fd = visitor->fd;
        visitor->fd = -1; /* to be closed, or the peer's */
        visitor->peer = status ? NULL : peer;
        visitor->is_proven = !status;
        is_sent_away = visitor->is_sent_away;
        pthread_mutex_unlock(&holder->holder_lock);
        if (status) {
                os->close(fd);
                if (is_sent_away)
                        error_set(&error, NEBULA_BUSY, 0, "it did not prove that it holds the secret, and others wait");
                if (!holder_is_stopping(holder))
                        holder_complain(holder, visitor->from, &error);
                return;
        }
        while (!status && !holder_is_stopping(holder)) {
                int ready = tls_wait(peer->tls, SLICE_MS);

                if (!ready)
                        continue;
                status = peer_receive(peer, &error);
                if (!status)
                        status = holder_serve(visitor, &error);
        }
        if (status != NEBULA_UNAVAILABLE && !holder_is_stopping(holder))
                holder_complain(holder, visitor->from, &error);
        else if (visitor->incoming)
                log_event(LOG_LEVEL_WARN, "node \"%s\" vanished in the middle of a copy of %s, which is dropped: %s", peer->hello.node,
                          visitor->incoming->what.tag, error.message);
        holder_drop_incoming(visitor);
        holder_own_close(visitor);
        pthread_mutex_lock(&holder->holder_lock);
        visitor->peer = NULL;
        pthread_mutex_unlock(&holder->holder_lock);
        peer_free(peer);
}

static void *visitor_main(void *argument)
{
        struct visitor *visitor = argument;
        struct holder *holder = visitor->holder;
        struct catalogue *catalogue = holder->catalogue;

        converse(visitor);
        catalogue_lock(catalogue);
        catalogue->peer_count--;
        catalogue_signal(catalogue);
        catalogue_unlock(catalogue);
        pthread_mutex_lock(&holder->holder_lock);
        for (size_t i = 0; i < VISITOR_MAX; i++)
                if (holder->visitors[i] == visitor)
                        holder->visitors[i] = NULL;
        free(visitor);
        holder->visitor_count--;
        pthread_cond_broadcast(&holder->ended);
        pthread_mutex_unlock(&holder->holder_lock);
        return NULL;
}

bool holder_start_visit(struct holder *holder, int fd, const char *from)
{
        struct visitor *visitor = calloc(1, sizeof *visitor);
        size_t slot = 0;
        bool started = false;

        if (!visitor)
                return false;
        visitor->holder = holder;
        visitor->fd = fd;
        visitor->since_ns = os->now_ns();
        snprintf(visitor->from, sizeof visitor->from, "%s", from);
        catalogue_lock(holder->catalogue);
        holder->catalogue->peer_count++;
        catalogue_unlock(holder->catalogue);
        pthread_mutex_lock(&holder->holder_lock);
        if (!holder_make_room(holder, from))
                slot = VISITOR_MAX;
        while (slot < VISITOR_MAX && holder->visitors[slot])
                slot++;
        if (slot < VISITOR_MAX && !holder->stopping && !os_thread_start(NULL, visitor_main, visitor, false)) {
                holder->visitors[slot] = visitor;
                holder->visitor_count++;
                started = true;
        }
        pthread_mutex_unlock(&holder->holder_lock);
        if (!started) {
                catalogue_lock(holder->catalogue);
                holder->catalogue->peer_count--;
                catalogue_unlock(holder->catalogue);
                free(visitor);
        }
        return started;
}

enum nebula_status holder_new(struct catalogue *catalogue, const char *node, struct holder **ret_holder, struct nebula_error *error)
{
        const char *text = conf_env("NEBULA_PEER_MEMORY");
        struct holder *holder = calloc(1, sizeof *holder);
        enum nebula_status status = NEBULA_OK;

        if (!holder)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for copies");
        holder->catalogue = catalogue;
        holder->listen_fd = -1;
        holder->budget = catalogue->memory.budget / 2;
        if (text)
                status = conf_parse_size("NEBULA_PEER_MEMORY", text, &holder->budget, error);
        if (status) {
                free(holder);
                return status;
        }
        snprintf(holder->node, sizeof holder->node, "%s", node);
        pthread_mutex_init(&holder->holder_lock, NULL);
        os_cond_init(&holder->ended);
        *ret_holder = holder;
        return NEBULA_OK;
}

enum nebula_status holder_open(struct holder *holder, struct member *ret_own, struct nebula_error *error)
{
        const char *setting = conf_env("NEBULA_LISTEN");
        struct member own = { 0 };
        struct door *door;
        int fd, result = 0;
        enum nebula_status status = NEBULA_OK;

        if (holder->listen_fd >= 0) {
                *ret_own = holder->own;
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
        snprintf(own.node, sizeof own.node, "%s", holder->node);
        own.nonce = holder->catalogue->agent_nonce;
        fd = os->tcp_listen(own.address, own.port, &own.port);
        if (fd < 0)
                return error_set(error, NEBULA_UNAVAILABLE, -fd, "cannot listen for peers at %.100s:%u", own.address, own.port);
        /* Bound to every address: others need one that leads here. */
        if (!strcmp(own.address, "0.0.0.0") || !strcmp(own.address, "::"))
                os->host_address(own.address, sizeof own.address);
        door = holder_door_new(holder, fd, error);
        if (!door) {
                os->close(fd);
                return NEBULA_UNAVAILABLE;
        }
        holder->listen_fd = fd;
        result = os_thread_start(&holder->listener, holder_door_main, door, false);
        if (result < 0) {
                holder_door_free(door);
                os->close(fd);
                holder->listen_fd = -1;
                return error_set(error, NEBULA_UNAVAILABLE, -result, "cannot start a thread for peers");
        }
        holder->own = own;
        log_event(LOG_LEVEL_INFO, "node \"%s\" keeps copies for peers at %s:%u, up to %" PRIu64 " MiB", own.node, own.address, own.port,
                  holder->budget >> 20);
        *ret_own = own;
        return NEBULA_OK;
}

/* Lock of the catalogue held. Somebody may ask for what this node has of such a job. */
static bool has_job(const struct catalogue *catalogue, const char *identity)
{
        for (const struct job *job = catalogue->jobs; job; job = job->next) {
                if (strcmp(job->peer_identity, identity))
                        continue;
                if (catalogue_session_count(catalogue, job))
                        return true;
                for (const struct version *version = job->versions; version; version = version->next)
                        if (version->in_memory)
                                return true;
        }
        return false;
}

/* holder_lock held. A copy is kept for it, or comes just now. */
static bool has_copy(const struct holder *holder, const char *identity)
{
        for (const struct copy *copy = holder->copies; copy; copy = copy->next)
                if (!strcmp(copy->identity, identity))
                        return true;
        for (size_t i = 0; i < VISITOR_MAX; i++)
                if (holder->visitors[i] && holder->visitors[i]->peer && !strcmp(holder->visitors[i]->peer->key.identity, identity))
                        return true;
        return false;
}

/* holder_lock held. The secrets of jobs that are over go; who trains again brings its own along. */
static void forget_keys(struct holder *holder)
{
        size_t kept = 0;

        catalogue_lock(holder->catalogue);
        for (size_t i = 0; i < holder->key_count; i++)
                if (has_job(holder->catalogue, holder->keys[i].identity) || has_copy(holder, holder->keys[i].identity))
                        holder->keys[kept++] = holder->keys[i];
        catalogue_unlock(holder->catalogue);
        if (holder->key_count)
                explicit_bzero(holder->keys + kept, (holder->key_count - kept) * sizeof *holder->keys);
        holder->key_count = kept;
}

static bool has_key(const struct holder *holder, const char *identity)
{
        for (size_t i = 0; i < holder->key_count; i++)
                if (!strcmp(holder->keys[i].identity, identity))
                        return true;
        return false;
}

/* holder_lock held. What the array was before does not stay behind in memory. */
static enum nebula_status grow_keys(struct holder *holder, struct nebula_error *error)
{
        size_t capacity = holder->key_capacity ? 2 * holder->key_capacity : 16;
        struct tls_key *grown;

        if (holder->key_count < holder->key_capacity)
                return NEBULA_OK;
        if (holder->key_count >= KEY_MAX)
                return error_set(error, NEBULA_INVALID, 0, "this agent serves the secrets of %d jobs already", KEY_MAX);
        grown = calloc(capacity, sizeof *grown);
        if (!grown)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a secret");
        if (holder->key_count) {
                memcpy(grown, holder->keys, holder->key_count * sizeof *grown);
                explicit_bzero(holder->keys, holder->key_count * sizeof *grown);
        }
        free(holder->keys);
        holder->keys = grown;
        holder->key_capacity = capacity;
        return NEBULA_OK;
}

enum nebula_status holder_add_key(struct holder *holder, const struct tls_key *key, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        pthread_mutex_lock(&holder->holder_lock);
        if (!has_key(holder, key->identity)) {
                forget_keys(holder);
                status = grow_keys(holder, error);
                if (!status)
                        holder->keys[holder->key_count++] = *key;
        }
        pthread_mutex_unlock(&holder->holder_lock);
        return status;
}

void holder_free(struct holder *holder)
{
        if (!holder)
                return;
        pthread_mutex_lock(&holder->holder_lock);
        holder->stopping = true;
        if (holder->listen_fd >= 0)
                os->shutdown(holder->listen_fd);
        while (holder->visitor_count) {
                for (size_t i = 0; i < VISITOR_MAX; i++) {
                        struct visitor *visitor = holder->visitors[i];

                        if (visitor && visitor->peer)
                                peer_shutdown(visitor->peer);
                        else if (visitor && visitor->fd >= 0)
                                os->shutdown(visitor->fd);
                }
                os_cond_wait(&holder->ended, &holder->holder_lock, 100);
        }
        pthread_mutex_unlock(&holder->holder_lock);
        if (holder->listen_fd >= 0) {
                pthread_join(holder->listener, NULL);
                os->close(holder->listen_fd);
        }
        holder_copies_free(holder, holder->copies);
        if (holder->keys)
                explicit_bzero(holder->keys, holder->key_capacity * sizeof *holder->keys);
        free(holder->keys);
        pthread_cond_destroy(&holder->ended);
        pthread_mutex_destroy(&holder->holder_lock);
        free(holder);
}
