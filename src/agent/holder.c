#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/holder.h"
#include "agent/log.h"
#include "agent/worker.h"
#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"

#define CONNECTION_MAX 64   /* one owner, or a few after losses, and who looks for a lost copy */
#define KEY_MAX 64
#define COMPLAIN_NS 1000000000 /* a scanner of ports gets a line a second at most */
#define SLICE_MS 1000

/* What one node gave us of one version. */
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
        bool dropped;          /* goes when nobody reads it */
        uint64_t age;          /* order of arrival */
};
struct connection {
        struct holder *holder;
        struct peer *peer;
        int fd;
        char from[80];
        struct copy *incoming; /* not listed yet */
        uint32_t file;         /* the next piece is of this one, */
        uint64_t offset;       /* from here */
        bool is_owner;         /* it offered something */
        struct nebula_error trouble; /* with the pieces; said at SEAL */
};
struct holder {
        struct catalogue *catalogue;
        char node[IPC_NAME_MAX];
        struct member own;
        pthread_t listener;
        int listen_fd; /* < 0: the door is shut */
        pthread_mutex_t holder_lock;
        pthread_cond_t ended;
        struct tls_key keys[KEY_MAX];
        size_t key_count;
        struct copy *copies;
        uint64_t budget, used, next_age;
        struct connection *connections[CONNECTION_MAX];
        uint32_t connection_count;
        int64_t complained_ns;
        uint32_t unsaid;
        bool stopping;
};

static size_t piece_count(uint64_t size)
{
        return (size_t)((size + PEER_PIECE_BYTES - 1) / PEER_PIECE_BYTES);
}

static uint64_t capacity_of(const struct peer_copy *what)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < what->file_count; i++) {
                uint64_t capacity = what->files[i].held ? memory_capacity(what->files[i].size) : 0;

                if (capacity > UINT64_MAX / 4 || sum > UINT64_MAX / 4)
                        return UINT64_MAX;
                sum += capacity;
        }
        return sum;
}

/* One line per second at most; the next one says how many were not written. */
static void complain(struct holder *holder, const char *from, const struct nebula_error *error)
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

/* Copies. */

static void copy_free(struct holder *holder, struct copy *copy)
{
        struct catalogue *catalogue = holder->catalogue;

        if (!copy)
                return;
        catalogue_lock(catalogue);
        catalogue->memory.settling++;
        catalogue_unlock(catalogue);
        for (size_t i = 0; i < copy->what.file_count; i++) {
                if (copy->images && copy->images[i])
                        memory_bury(&catalogue->memory, copy->images[i]);
                if (copy->chunks)
                        free(copy->chunks[i]);
        }
        catalogue_lock(catalogue);
        memory_unreserve(&catalogue->memory, copy->capacity);
        catalogue->memory.settling--;
        catalogue_signal(catalogue); /* a save may wait for room */
        catalogue_unlock(catalogue);
        free(copy->images);
        free(copy->chunks);
        peer_copy_done(&copy->what);
        free(copy);
}

/* Takes copies that nobody reads and that `goes` names off the list, for copy_free. holder_lock held. */
static struct copy *collect_dropped(struct holder *holder)
{
        struct copy *taken = NULL;

        for (struct copy **link = &holder->copies; *link;) {
                struct copy *copy = *link;

                if (!copy->dropped || copy->users) {
                        link = &copy->next;
                        continue;
                }
                *link = copy->next;
                holder->used -= copy->capacity;
                copy->next = taken;
                taken = copy;
        }
        return taken;
}

static void free_all(struct holder *holder, struct copy *taken)
{
        while (taken) {
                struct copy *next = taken->next;

                copy_free(holder, taken);
                taken = next;
        }
}

static bool owner_connected(const struct holder *holder, const struct copy *copy)
{
        for (size_t i = 0; i < CONNECTION_MAX; i++) {
                const struct connection *connection = holder->connections[i];

                if (connection && connection->is_owner && connection->peer && !strcmp(connection->peer->hello.node, copy->what.owner))
                        return true;
        }
        return false;
}

/* holder_lock held. The oldest copies go whose owners have gone. True: there is room. */
static bool make_room(struct holder *holder, uint64_t capacity, struct copy **ret_taken)
{
        while (holder->used > holder->budget || capacity > holder->budget - holder->used) {
                struct copy *oldest = NULL, *taken, *last;

                for (struct copy *copy = holder->copies; copy; copy = copy->next)
                        if (!copy->users && !owner_connected(holder, copy) && (!oldest || copy->age < oldest->age))
                                oldest = copy;
                if (!oldest)
                        return false;
                oldest->dropped = true;
                taken = last = collect_dropped(holder);
                while (last && last->next)
                        last = last->next;
                if (last) {
                        last->next = *ret_taken;
                        *ret_taken = taken;
                }
        }
        return true;
}

static bool same_scope(const struct copy *copy, const struct peer *peer)
{
        return !strcmp(copy->identity, peer->key.identity) && !strcmp(copy->job, peer->hello.job) && !strcmp(copy->path, peer->hello.path);
}

static enum nebula_status fill_copy(struct holder *holder, struct copy *copy, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        copy->images = calloc(copy->what.file_count + 1, sizeof *copy->images);
        copy->chunks = calloc(copy->what.file_count + 1, sizeof *copy->chunks);
        if (!copy->images || !copy->chunks)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe a copy");
        for (size_t i = 0; !status && i < copy->what.file_count; i++) {
                const struct peer_file *file = &copy->what.files[i];
                void *data;

                if (!file->held)
                        continue;
                status = memory_create(&holder->catalogue->memory, memory_capacity(file->size), false, &copy->images[i], error);
                if (!status)
                        status = memory_map(copy->images[i], &data, error);
                copy->chunks[i] = calloc(piece_count(file->size) + 1, sizeof *copy->chunks[i]);
                if (!status && !copy->chunks[i])
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe a copy");
        }
        return status;
}

/* Room for an offered version; NULL with the reason. */
static struct copy *copy_new(struct holder *holder, const struct peer *peer, struct peer_copy *offer, struct nebula_error *error)
{
        struct catalogue *catalogue = holder->catalogue;
        struct copy *copy = calloc(1, sizeof *copy), *taken = NULL;
        uint64_t capacity = capacity_of(offer);
        bool fits, named, reserved = false;

        if (!copy) {
                error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe a copy");
                return NULL;
        }
        pthread_mutex_lock(&holder->holder_lock);
        fits = make_room(holder, capacity, &taken);
        if (fits)
                holder->used += capacity;
        pthread_mutex_unlock(&holder->holder_lock);
        free_all(holder, taken);
        if (fits) {
                catalogue_lock(catalogue);
                do
                        reserved = memory_reserve(&catalogue->memory, capacity, &named);
                while (!reserved && worker_bury(catalogue));
                catalogue_unlock(catalogue);
        }
        if (!reserved) {
                pthread_mutex_lock(&holder->holder_lock);
                holder->used -= fits ? capacity : 0;
                error_set(error, NEBULA_NO_MEMORY, 0,
                          "\"%.100s\" needs %" PRIu64 " MiB here, and of %" PRIu64 " MiB for copies %" PRIu64 " are in use: raise "
                          "NEBULA_PEER_MEMORY or NEBULA_MEMORY_BUFFER_SIZE", offer->tag, capacity >> 20, holder->budget >> 20,
                          holder->used >> 20);
                pthread_mutex_unlock(&holder->holder_lock);
                free(copy);
                return NULL;
        }
        copy->capacity = capacity;
        copy->what = *offer;
        memset(offer, 0, sizeof *offer);
        copy->owner_id = copy->what.id;
        copy->owner_nonce = peer->hello.nonce;
        copy->what.id = memory_random_id();
        snprintf(copy->what.owner, sizeof copy->what.owner, "%s", peer->hello.node);
        strcpy(copy->identity, peer->key.identity);
        strcpy(copy->job, peer->hello.job);
        strcpy(copy->path, peer->hello.path);
        if (!fill_copy(holder, copy, error))
                return copy;
        pthread_mutex_lock(&holder->holder_lock);
        holder->used -= capacity;
        pthread_mutex_unlock(&holder->holder_lock);
        copy_free(holder, copy);
        return NULL;
}

static void drop_incoming(struct connection *connection)
{
        struct holder *holder = connection->holder;

        if (!connection->incoming)
                return;
        pthread_mutex_lock(&holder->holder_lock);
        holder->used -= connection->incoming->capacity;
        pthread_mutex_unlock(&holder->holder_lock);
        copy_free(holder, connection->incoming);
        connection->incoming = NULL;
}

/* Requests. Each answers; a failure ends the connection. */

static enum nebula_status serve_offer(struct connection *connection, struct nebula_error *error)
{
        struct holder *holder = connection->holder;
        struct peer *peer = connection->peer;
        struct nebula_error refusal = { 0 };
        struct peer_copy offer;
        bool there = false;
        enum nebula_status status = peer_copy_parse(peer->body, peer->header.size, &offer, error);

        if (status)
                return status;
        drop_incoming(connection);
        pthread_mutex_lock(&holder->holder_lock);
        connection->is_owner = true;
        for (struct copy *copy = holder->copies; copy; copy = copy->next)
                there = there || (same_scope(copy, peer) && copy->owner_id == offer.id && !copy->dropped &&
                                  copy->what.sequence == offer.sequence && !strcmp(copy->what.owner, peer->hello.node));
        pthread_mutex_unlock(&holder->holder_lock);
        if (there) {
                peer_copy_done(&offer);
                return peer_send_answer(peer, NEBULA_BUSY, "it is here already", error);
        }
        connection->incoming = copy_new(holder, peer, &offer, &refusal);
        peer_copy_done(&offer);
        connection->file = 0;
        connection->offset = 0;
        connection->trouble = (struct nebula_error){ 0 };
        if (!connection->incoming)
                log_event(LOG_LEVEL_WARN, "no room for a copy of node \"%s\": %s", peer->hello.node, refusal.message);
        return peer_send_answer(peer, connection->incoming ? NEBULA_OK : refusal.status, refusal.message, error);
}

/* Goes on to the file that the next piece must be of. */
static void next_file(struct connection *connection)
{
        const struct peer_copy *what = &connection->incoming->what;

        while (connection->file < what->file_count &&
               (!what->files[connection->file].held || connection->offset >= what->files[connection->file].size)) {
                connection->file++;
                connection->offset = 0;
        }
}

static enum nebula_status serve_data(struct connection *connection, struct nebula_error *error)
{
        struct peer *peer = connection->peer;
        struct copy *copy = connection->incoming;
        size_t size = peer_take_size(peer);
        const struct peer_file *file;
        uint64_t left;
        enum nebula_status status;

        if (!copy || connection->trouble.status)
                return peer_take(peer, NULL, error);
        next_file(connection);
        file = connection->file < copy->what.file_count ? &copy->what.files[connection->file] : NULL;
        left = file ? file->size - connection->offset : 0;
        if (!file || peer->data.file != connection->file || peer->data.offset != connection->offset ||
            size != (left < PEER_PIECE_BYTES ? left : PEER_PIECE_BYTES)) {
                error_set(&connection->trouble, NEBULA_CORRUPT, 0, "a piece of file %u at offset %" PRIu64 " is out of turn",
                          peer->data.file, peer->data.offset);
                return peer_take(peer, NULL, error);
        }
        status = peer_take(peer, (char *)copy->images[connection->file]->data + connection->offset, &connection->trouble);
        if (status && status != NEBULA_CORRUPT) {
                if (error)
                        *error = connection->trouble;
                return status;
        }
        copy->chunks[connection->file][connection->offset / PEER_PIECE_BYTES] = peer->data.crc64;
        connection->offset += size;
        return NEBULA_OK;
}

static enum nebula_status serve_seal(struct connection *connection, struct nebula_error *error)
{
        struct holder *holder = connection->holder;
        struct peer *peer = connection->peer;
        struct copy *copy = connection->incoming, *taken;
        struct nebula_error refusal = connection->trouble;

        if (!copy)
                error_set(&refusal, NEBULA_INVALID, 0, "nothing was offered");
        if (copy)
                next_file(connection);
        if (copy && !refusal.status && connection->file < copy->what.file_count)
                error_set(&refusal, NEBULA_CORRUPT, 0, "file \"%.100s\" has not come whole", copy->what.files[connection->file].name);
        if (refusal.status) {
                drop_incoming(connection);
                log_event(LOG_LEVEL_WARN, "a copy that node \"%s\" sent is not kept: %s", peer->hello.node, refusal.message);
                return peer_send_answer(peer, refusal.status, refusal.message, error);
        }
        pthread_mutex_lock(&holder->holder_lock);
        /* Sent anew, by an agent that did not know of it: the older one goes. */
        for (struct copy *other = holder->copies; other; other = other->next)
                if (same_scope(other, peer) && other->owner_id == copy->owner_id && !strcmp(other->what.owner, copy->what.owner))
                        other->dropped = true;
        copy->age = holder->next_age++;
        copy->next = holder->copies;
        holder->copies = copy;
        connection->incoming = NULL;
        taken = collect_dropped(holder);
        pthread_mutex_unlock(&holder->holder_lock);
        free_all(holder, taken);
        log_event(LOG_LEVEL_INFO, "holds %s generation %" PRIu64 " for node \"%s\"", copy->what.tag, copy->what.generation, peer->hello.node);
        return peer_send_answer(peer, NEBULA_OK, "", error);
}

static enum nebula_status serve_keep(struct connection *connection, struct nebula_error *error)
{
        struct holder *holder = connection->holder;
        struct peer *peer = connection->peer;
        struct peer_keep keep;
        struct copy *taken;
        enum nebula_status status = peer_keep_parse(peer->body, peer->header.size, &keep, error);

        if (status)
                return status;
        pthread_mutex_lock(&holder->holder_lock);
        for (struct copy *copy = holder->copies; copy; copy = copy->next) {
                bool kept = !same_scope(copy, peer) || strcmp(copy->what.owner, peer->hello.node);

                for (size_t i = 0; !kept && i < keep.count; i++)
                        kept = keep.ids[i] == copy->owner_id;
                copy->dropped = copy->dropped || !kept;
        }
        taken = collect_dropped(holder);
        pthread_mutex_unlock(&holder->holder_lock);
        free_all(holder, taken);
        peer_keep_done(&keep);
        return peer_send_answer(peer, NEBULA_OK, "", error);
}

static enum nebula_status serve_list(struct connection *connection, struct nebula_error *error)
{
        struct holder *holder = connection->holder;
        struct peer_listing listing = { 0 };
        char *text = NULL;
        size_t size, count = 0;
        enum nebula_status status = NEBULA_OK;

        pthread_mutex_lock(&holder->holder_lock);
        for (const struct copy *copy = holder->copies; copy; copy = copy->next)
                count++;
        listing.copies = calloc(count + 1, sizeof *listing.copies);
        for (const struct copy *copy = holder->copies; listing.copies && copy; copy = copy->next)
                if (same_scope(copy, connection->peer) && !copy->dropped && listing.count < PEER_COPY_MAX)
                        listing.copies[listing.count++] = copy->what; /* newest first; the files stay the copy's */
        status = listing.copies ? peer_listing_format(&listing, &text, &size, error) :
                                  error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a listing");
        pthread_mutex_unlock(&holder->holder_lock);
        free(listing.copies);
        if (!status)
                status = peer_send(connection->peer, PEER_LISTED, text, size, error);
        free(text);
        return status;
}

static enum nebula_status serve_fetch(struct connection *connection, struct nebula_error *error)
{
        struct holder *holder = connection->holder;
        struct peer *peer = connection->peer;
        struct copy *copy, *taken;
        struct peer_fetch fetch;
        enum nebula_status status = peer_fetch_parse(peer->body, peer->header.size, &fetch, error);
        bool sound;

        if (status)
                return status;
        pthread_mutex_lock(&holder->holder_lock);
        copy = holder->copies;
        while (copy && (copy->what.id != fetch.copy || !same_scope(copy, peer) || copy->dropped))
                copy = copy->next;
        sound = copy && fetch.file < copy->what.file_count && copy->images[fetch.file] &&
                fetch.offset < copy->what.files[fetch.file].size && fetch.offset % PEER_PIECE_BYTES == 0;
        if (sound)
                copy->users++;
        pthread_mutex_unlock(&holder->holder_lock);
        if (!sound)
                return peer_send_answer(peer, NEBULA_NOT_FOUND, "there is no such piece here any more", error);
        struct peer_data data = { .copy = fetch.copy, .file = fetch.file, .offset = fetch.offset,
                                  .crc64 = copy->chunks[fetch.file][fetch.offset / PEER_PIECE_BYTES] };
        uint64_t left = copy->what.files[fetch.file].size - fetch.offset;

        status = peer_send_data(peer, &data, (const char *)copy->images[fetch.file]->data + fetch.offset,
                                left < PEER_PIECE_BYTES ? (size_t)left : PEER_PIECE_BYTES, error);
        pthread_mutex_lock(&holder->holder_lock);
        copy->users--;
        taken = collect_dropped(holder);
        pthread_mutex_unlock(&holder->holder_lock);
        free_all(holder, taken);
        return status;
}

typedef enum nebula_status serve_run(struct connection *connection, struct nebula_error *error);

static serve_run *const serves[] = {
        [PEER_OFFER] = serve_offer, [PEER_DATA] = serve_data, [PEER_SEAL] = serve_seal, [PEER_KEEP] = serve_keep,
        [PEER_LIST] = serve_list,   [PEER_FETCH] = serve_fetch, [PEER_ANSWER] = NULL,
};

/* The door and its visitors. */

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

static bool is_stopping(struct holder *holder)
{
        bool stopping;

        pthread_mutex_lock(&holder->holder_lock);
        stopping = holder->stopping;
        pthread_mutex_unlock(&holder->holder_lock);
        return stopping;
}

static void converse(struct connection *connection)
{
        struct holder *holder = connection->holder;
        struct nebula_error error = { 0 };
        struct peer *peer;
        enum nebula_status status = peer_serve(connection->fd, find_key, holder, holder->node, holder->catalogue->agent_nonce, &peer, &error);

        pthread_mutex_lock(&holder->holder_lock);
        connection->fd = -1; /* gone, or the peer's */
        connection->peer = status ? NULL : peer;
        pthread_mutex_unlock(&holder->holder_lock);
        if (status) {
                if (!is_stopping(holder))
                        complain(holder, connection->from, &error);
                return;
        }
        while (!status && !is_stopping(holder)) {
                int ready = tls_wait(peer->tls, SLICE_MS);

                if (!ready)
                        continue;
                status = peer_receive(peer, &error);
                if (!status && (peer->header.type == PEER_HELLO || !serves[peer->header.type]))
                        status = error_set(&error, NEBULA_CORRUPT, 0, "a frame of type %u is no request", (unsigned)peer->header.type);
                if (!status)
                        status = serves[peer->header.type](connection, &error);
        }
        if (status != NEBULA_UNAVAILABLE && !is_stopping(holder))
                complain(holder, connection->from, &error);
        else if (connection->incoming)
                log_event(LOG_LEVEL_WARN, "node \"%s\" vanished in the middle of a copy of %s, which is dropped: %s", peer->hello.node,
                          connection->incoming->what.tag, error.message);
        drop_incoming(connection);
        pthread_mutex_lock(&holder->holder_lock);
        connection->peer = NULL;
        pthread_mutex_unlock(&holder->holder_lock);
        peer_free(peer);
}

static void *connection_main(void *argument)
{
        struct connection *connection = argument;
        struct holder *holder = connection->holder;
        struct catalogue *catalogue = holder->catalogue;

        converse(connection);
        catalogue_lock(catalogue);
        catalogue->peer_count--;
        catalogue_signal(catalogue);
        catalogue_unlock(catalogue);
        pthread_mutex_lock(&holder->holder_lock);
        for (size_t i = 0; i < CONNECTION_MAX; i++)
                if (holder->connections[i] == connection)
                        holder->connections[i] = NULL;
        free(connection);
        holder->connection_count--;
        pthread_cond_broadcast(&holder->ended);
        pthread_mutex_unlock(&holder->holder_lock);
        return NULL;
}

static bool start_connection(struct holder *holder, int fd, const char *from)
{
        struct connection *connection = calloc(1, sizeof *connection);
        size_t slot = 0;
        bool started = false;

        if (!connection)
                return false;
        connection->holder = holder;
        connection->fd = fd;
        snprintf(connection->from, sizeof connection->from, "%s", from);
        catalogue_lock(holder->catalogue);
        holder->catalogue->peer_count++;
        catalogue_unlock(holder->catalogue);
        pthread_mutex_lock(&holder->holder_lock);
        while (slot < CONNECTION_MAX && holder->connections[slot])
                slot++;
        if (slot < CONNECTION_MAX && !holder->stopping && !os_thread_start(NULL, connection_main, connection, false)) {
                holder->connections[slot] = connection;
                holder->connection_count++;
                started = true;
        }
        pthread_mutex_unlock(&holder->holder_lock);
        if (!started) {
                catalogue_lock(holder->catalogue);
                holder->catalogue->peer_count--;
                catalogue_unlock(holder->catalogue);
                free(connection);
        }
        return started;
}

static void *listener_main(void *argument)
{
        struct holder *holder = argument;
        struct nebula_error busy = { .message = "too many peers are connected" };
        char from[80];

        while (!is_stopping(holder)) {
                int fd = os->tcp_accept(holder->listen_fd, from, sizeof from);

                if (fd >= 0 && !start_connection(holder, fd, from)) {
                        os->close(fd);
                        if (!is_stopping(holder))
                                complain(holder, from, &busy);
                } else if (fd < 0 && fd != -EINTR && fd != -ECONNABORTED && !is_stopping(holder)) {
                        os->sleep_ms(100);
                }
        }
        return NULL;
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
        holder->listen_fd = fd;
        result = os_thread_start(&holder->listener, listener_main, holder, false);
        if (result < 0) {
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

enum nebula_status holder_add_key(struct holder *holder, const struct tls_key *key, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        bool known = false;

        pthread_mutex_lock(&holder->holder_lock);
        for (size_t i = 0; i < holder->key_count; i++)
                known = known || !strcmp(holder->keys[i].identity, key->identity);
        if (!known && holder->key_count == KEY_MAX)
                status = error_set(error, NEBULA_INVALID, 0, "this agent serves %d secrets already", KEY_MAX);
        else if (!known)
                holder->keys[holder->key_count++] = *key;
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
        while (holder->connection_count) {
                for (size_t i = 0; i < CONNECTION_MAX; i++) {
                        struct connection *connection = holder->connections[i];

                        if (connection && connection->peer)
                                peer_shutdown(connection->peer);
                        else if (connection && connection->fd >= 0)
                                os->shutdown(connection->fd);
                }
                os_cond_wait(&holder->ended, &holder->holder_lock, 100);
        }
        pthread_mutex_unlock(&holder->holder_lock);
        if (holder->listen_fd >= 0) {
                pthread_join(holder->listener, NULL);
                os->close(holder->listen_fd);
        }
        free_all(holder, holder->copies);
        memset(holder->keys, 0, sizeof holder->keys);
        pthread_cond_destroy(&holder->ended);
        pthread_mutex_destroy(&holder->holder_lock);
        free(holder);
}
