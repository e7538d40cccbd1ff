/*
 * Connections that have not yet proven that they hold a secret. Any program that reaches the port can open them, so their
 * resources are bounded, and a new connection takes the place of an old one:
 *
 *   silent    has sent nothing: it takes a descriptor, for SILENT_NS at most
 *   unproven  has begun to speak: it takes a thread, too, until the handshake is over (PEER_HANDSHAKE_MS)
 *
 * If there is no room, the oldest connection of the host that has most is closed. An agent speaks as soon as it is connected,
 * so silent connections of its own host do not push it out, and connections of other hosts never do.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "agent/peers/copy_server_private.h"
#include "base/error.h"
#include "os/os.h"
#include "sum/sum.h"

#define SILENT_MAX 128                /* several times as many as the nodes of a job open at once: 16 ask at a time (copy_finder.c) */
#define SILENT_NS (2 * SECOND_NS) /* an agent speaks at once; the network needs less */
#define UNPROVEN_MAX 32               /* threads; a handshake takes milliseconds */
#define HANDSHAKE_NS INT64_C(100000000) /* for so long a handshake is not ended in favour of its own host's next one */
#define EVENTS_AT_ONCE 64
#define ACCEPTED_AT_ONCE 32
#define SLICE_MS 1000
#define CROWDED_MS 10                 /* no descriptor is left */

struct guest {
        int fd; /* -1: the place is free */
        char from[80];
        uint64_t host;
        int64_t since_ns;
};
struct copy_listener {
        struct copy_server *server;
        int set;
        size_t count;
        struct guest guests[SILENT_MAX];
};

/* A number for the host of a text "host:port". */
static uint64_t host_of(const char *from)
{
        const char *end = strrchr(from, ':');

        return sum_crc64(0, from, end ? (size_t)(end - from) : strlen(from));
}

/* One that could go. */
struct candidate {
        uint64_t host;
        int64_t since_ns;
        size_t index;
};

/* The index of the oldest connection of the host that has most. */
static size_t choose(const struct candidate *candidates, size_t count)
{
        size_t best = 0, most = 0;

        for (size_t i = 0; i < count; i++) {
                size_t same = 0;

                for (size_t j = 0; j < count; j++)
                        same += candidates[i].host == candidates[j].host;
                if (same > most || (same == most && candidates[i].since_ns < candidates[best].since_ns)) {
                        best = i;
                        most = same;
                }
        }
        return candidates[best].index;
}

bool copy_server_make_room(struct copy_server *server, const char *from)
{
        struct candidate unproven[VISITOR_MAX];
        struct visitor *visitor;
        size_t count = 0;

        for (size_t i = 0; i < VISITOR_MAX; i++) {
                visitor = server->visitors[i];
                if (visitor && !visitor->is_proven && !visitor->is_sent_away)
                        unproven[count++] = (struct candidate){ host_of(visitor->from), visitor->since_ns, i };
        }
        if (count < UNPROVEN_MAX)
                return true;
        visitor = server->visitors[choose(unproven, count)];
        if (host_of(visitor->from) == host_of(from) && os->now_ns() - visitor->since_ns < HANDSHAKE_NS)
                return false;
        visitor->is_sent_away = true; /* its thread ends soon */
        if (visitor->fd >= 0)
                os->shutdown(visitor->fd);
        return true;
}

/* Removes a guest from the list; the caller owns its descriptor. */
static int take_out(struct copy_listener *listener, struct guest *guest)
{
        int fd = guest->fd;

        os->watch(listener->set, fd, guest, OS_WATCH_END);
        guest->fd = -1;
        listener->count--;
        return fd;
}

static void send_away(struct copy_listener *listener, struct guest *guest, const char *why)
{
        struct nebula_error error = { 0 };

        snprintf(error.message, sizeof error.message, "%s", why);
        os->close(take_out(listener, guest));
        copy_server_complain(listener->server, guest->from, &error);
}

static void send_one_away(struct copy_listener *listener)
{
        struct candidate silent[SILENT_MAX];
        size_t count = 0;

        for (size_t i = 0; i < SILENT_MAX; i++)
                if (listener->guests[i].fd >= 0)
                        silent[count++] = (struct candidate){ listener->guests[i].host, listener->guests[i].since_ns, i };
        send_away(listener, &listener->guests[choose(silent, count)], "it said nothing, and others wait");
}

static void let_in(struct copy_listener *listener)
{
        struct copy_server *server = listener->server;
        struct guest *guest = listener->guests;
        char from[sizeof guest->from];
        int fd = os->tcp_accept(server->listen_fd, from, sizeof from);

        if (fd < 0) {
                if ((fd == -EMFILE || fd == -ENFILE) && listener->count)
                        send_one_away(listener);
                if (fd != -EINTR && fd != -ECONNABORTED && !copy_server_is_stopping(server))
                        os->sleep_ms(CROWDED_MS);
                return;
        }
        if (listener->count == SILENT_MAX)
                send_one_away(listener);
        while (guest->fd >= 0)
                guest++;
        *guest = (struct guest){ .fd = fd, .host = host_of(from), .since_ns = os->now_ns() };
        memcpy(guest->from, from, sizeof from);
        listener->count++;
        if (os->watch(listener->set, fd, guest, OS_WATCH_READ) < 0)
                send_away(listener, guest, "it cannot be watched");
}

/* Says something, or has gone. */
static void hear(struct copy_listener *listener, struct guest *guest)
{
        struct nebula_error busy = { .message = "too many peers are connected" };
        struct copy_server *server = listener->server;
        int fd;

        if (guest->fd < 0)
                return; /* sent away in the same round */
        fd = take_out(listener, guest);
        if (!copy_server_start_visit(server, fd, guest->from)) {
                os->close(fd);
                if (!copy_server_is_stopping(server))
                        copy_server_complain(server, guest->from, &busy);
        }
}

static void send_old_away(struct copy_listener *listener)
{
        int64_t before_ns = os->now_ns() - SILENT_NS;

        for (size_t i = 0; i < SILENT_MAX && listener->count; i++)
                if (listener->guests[i].fd >= 0 && listener->guests[i].since_ns < before_ns)
                        send_away(listener, &listener->guests[i], "it said nothing");
}

static void run(struct copy_listener *listener)
{
        struct copy_server *server = listener->server;
        void *keys[EVENTS_AT_ONCE];

        while (!copy_server_is_stopping(server)) {
                int count = os->watch_wait(listener->set, keys, EVENTS_AT_ONCE, SLICE_MS);
                bool knocks = false;

                if (count < 0 && count != -EINTR)
                        os->sleep_ms(CROWDED_MS);
                /* Connections with bytes to read come before new ones. */
                for (int i = 0; i < count; i++) {
                        if (keys[i] == server)
                                knocks = true;
                        else
                                hear(listener, keys[i]);
                }
                for (int i = 0; knocks && i < ACCEPTED_AT_ONCE && !copy_server_is_stopping(server); i++) {
                        let_in(listener);
                        knocks = os->poll(server->listen_fd, 0) == 1;
                }
                send_old_away(listener);
        }
}

void *copy_server_listener_main(void *argument)
{
        struct copy_listener *listener = argument;

        run(listener);
        for (size_t i = 0; i < SILENT_MAX; i++)
                if (listener->guests[i].fd >= 0)
                        os->close(listener->guests[i].fd);
        os->close(listener->set);
        free(listener);
        return NULL;
}

struct copy_listener *copy_server_listener_new(struct copy_server *server, int listen_fd, struct nebula_error *error)
{
        struct copy_listener *listener = calloc(1, sizeof *listener);
        int result;

        if (!listener) {
                error_set(error, NEBULA_NO_MEMORY, 0, "no memory for connections of peers");
                return NULL;
        }
        listener->server = server;
        for (size_t i = 0; i < SILENT_MAX; i++)
                listener->guests[i].fd = -1;
        result = listener->set = os->watch_open();
        if (result >= 0) {
                result = os->watch(listener->set, listen_fd, server, OS_WATCH_READ);
                if (!result)
                        return listener;
                os->close(listener->set);
        }
        error_set(error, NEBULA_UNAVAILABLE, -result, "cannot watch for peers");
        free(listener);
        return NULL;
}

void copy_server_listener_free(struct copy_listener *listener)
{
        os->close(listener->set);
        free(listener);
}
