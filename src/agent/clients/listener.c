#include <errno.h>
#include <stdlib.h>

#include "agent/clients/listener.h"
#include "agent/clients/session.h"
#include "agent/log.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"

#define EVENTS_AT_ONCE 64
#define RETRY_MS 100 /* pause before a failed call is repeated, for lack of descriptors or memory for example */

struct client {
        struct listener *listener;
        struct connection *connection;
        size_t slot;
        int fd;
        bool is_out;            /* another thread works on its request */
        enum session_step step; /* the result of that thread's work */
};
struct listener {
        struct catalogue *catalogue;
        int listen_fd, set;
        pthread_t thread;
        int64_t look_ns;   /* when to look at the first waiting client; INT64_MAX: never */
        int64_t accept_ns; /* when to accept again; INT64_MAX: accepting now */
        bool is_stopping;
        bool has_ended;                      /* guarded by the catalogue's lock */
        struct client *clients[SESSION_MAX]; /* NULL: a free place */
};

/* Admits only this user's processes; others get no answer. */
static bool admitted(int fd)
{
        uint32_t uid = 0, pid = 0;

        if (os->peer(fd, &uid, &pid) < 0 || uid != os->uid()) {
                log_event(LOG_LEVEL_WARN, "refused process %u of user %u, which is not this agent's user", pid, uid);
                return false;
        }
        return true;
}

static bool take_slot(struct listener *listener, struct client *client)
{
        struct catalogue *catalogue = listener->catalogue;
        bool is_free;

        catalogue_lock(catalogue);
        while (client->slot < SESSION_MAX && listener->clients[client->slot])
                client->slot++;
        is_free = client->slot < SESSION_MAX && !catalogue->stopping;
        if (is_free) {
                listener->clients[client->slot] = client;
                catalogue->connection_count++;
        }
        catalogue_unlock(catalogue);
        return is_free;
}

static void give_slot(struct client *client)
{
        struct catalogue *catalogue = client->listener->catalogue;

        catalogue_lock(catalogue);
        client->listener->clients[client->slot] = NULL;
        catalogue->connection_count--;
        if (!catalogue->connection_count || catalogue->stopping)
                catalogue_signal(catalogue); /* the agent may have to end later, or ends now */
        catalogue_unlock(catalogue);
}

/* Takes fd over, unless it returns false. */
static bool client_begin(struct listener *listener, int fd)
{
        struct client *client = calloc(1, sizeof *client);

        if (!client)
                return false;
        client->listener = listener;
        client->fd = fd;
        client->connection = session_open(listener->catalogue, fd);
        if (!client->connection)
                goto undo_client;
        if (!take_slot(listener, client))
                goto undo_connection;
        if (os->watch(listener->set, fd, client, OS_WATCH_READ) >= 0)
                return true;
        give_slot(client);
undo_connection:
        session_close(client->connection);
undo_client:
        free(client);
        return false;
}

static void client_end(struct client *client)
{
        os->watch(client->listener->set, client->fd, NULL, OS_WATCH_END);
        session_close(client->connection);
        give_slot(client);
        os->close(client->fd);
        free(client);
}

static void *serve_main(void *argument)
{
        struct client *client = argument;
        int set = client->listener->set, fd = client->fd;

        client->step = session_serve(client->connection);
        while (os->watch(set, fd, client, OS_WATCH_ONCE) < 0) /* from here on the listener may be freed */
                os->sleep_ms(RETRY_MS);
        return NULL;
}

static enum session_step hand_over(struct client *client)
{
        os->watch(client->listener->set, client->fd, NULL, OS_WATCH_END);
        client->is_out = !os_thread_start(NULL, serve_main, client, false);
        return client->is_out ? SESSION_SLOW : SESSION_ENDED;
}

static enum session_step take_back(struct client *client)
{
        client->is_out = false;
        if (client->step == SESSION_ENDED || os->watch(client->listener->set, client->fd, client, OS_WATCH_READ) < 0)
                return SESSION_ENDED;
        return session_read(client->connection, false);
}

static void go_on(struct client *client, enum session_step step)
{
        struct listener *listener = client->listener;
        int64_t look_ns = step == SESSION_IDLE ? session_look_ns(client->connection) : INT64_MAX;

        if (look_ns < listener->look_ns)
                listener->look_ns = look_ns;
        if (step == SESSION_SLOW)
                step = hand_over(client);
        if (step == SESSION_ENDED)
                client_end(client);
}

static void look_at_all(struct listener *listener, int64_t now_ns)
{
        listener->look_ns = INT64_MAX;
        for (size_t i = 0; i < SESSION_MAX; i++) {
                struct client *client = listener->clients[i]; /* only this thread changes them */

                if (client && !client->is_out)
                        go_on(client, session_look_ns(client->connection) <= now_ns ? session_look(client->connection) : SESSION_IDLE);
        }
}

static void accept_one(struct listener *listener)
{
        struct catalogue *catalogue = listener->catalogue;
        int fd = os->accept(listener->listen_fd);

        catalogue_lock(catalogue);
        listener->is_stopping = catalogue->stopping;
        catalogue_unlock(catalogue);
        if (fd >= 0 && (listener->is_stopping || !admitted(fd) || !client_begin(listener, fd)))
                os->close(fd);
        if (!listener->is_stopping && (fd >= 0 || fd == -EINTR))
                return;
        os->watch(listener->set, listener->listen_fd, NULL, OS_WATCH_END);
        if (!listener->is_stopping)
                listener->accept_ns = os->now_ns() + (int64_t)RETRY_MS * 1000000;
}

static bool is_over(struct listener *listener)
{
        bool result;

        if (!listener->is_stopping)
                return false;
        catalogue_lock(listener->catalogue);
        result = !listener->catalogue->connection_count;
        catalogue_unlock(listener->catalogue);
        return result;
}

static int64_t pause_ms(const struct listener *listener)
{
        int64_t until_ns = listener->look_ns < listener->accept_ns ? listener->look_ns : listener->accept_ns, left_ns;

        if (until_ns == INT64_MAX)
                return -1;
        left_ns = until_ns - os->now_ns();
        return left_ns > 0 ? left_ns / 1000000 + 1 : 0;
}

/* Does the work that is due by the clock. */
static void look_at_clock(struct listener *listener)
{
        int64_t now_ns = listener->look_ns < INT64_MAX || listener->accept_ns < INT64_MAX ? os->now_ns() : 0;

        if (listener->look_ns <= now_ns)
                look_at_all(listener, now_ns);
        if (listener->accept_ns <= now_ns) {
                listener->accept_ns = INT64_MAX;
                if (os->watch(listener->set, listener->listen_fd, listener, OS_WATCH_READ) < 0)
                        listener->accept_ns = now_ns + (int64_t)RETRY_MS * 1000000;
        }
}

static void *listener_main(void *argument)
{
        struct listener *listener = argument;
        void *keys[EVENTS_AT_ONCE];

        while (!is_over(listener)) {
                int count = os->watch_wait(listener->set, keys, EVENTS_AT_ONCE, pause_ms(listener));

                if (count < 0 && count != -EINTR)
                        os->sleep_ms(RETRY_MS);
                for (int i = 0; i < count; i++) {
                        struct client *client = keys[i];

                        if (keys[i] == listener)
                                accept_one(listener);
                        else
                                go_on(client, client->is_out ? take_back(client) : session_read(client->connection, true));
                }
                look_at_clock(listener);
        }
        catalogue_lock(listener->catalogue);
        listener->has_ended = true;
        catalogue_signal(listener->catalogue);
        catalogue_unlock(listener->catalogue);
        return NULL;
}

enum nebula_status listener_start(struct catalogue *catalogue, int listen_fd, struct listener **ret_listener, struct nebula_error *error)
{
        struct listener *listener = calloc(1, sizeof *listener);
        int result;

        if (!listener)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the agent's socket");
        *listener = (struct listener){ .catalogue = catalogue, .listen_fd = listen_fd, .look_ns = INT64_MAX, .accept_ns = INT64_MAX };
        result = listener->set = os->watch_open();
        if (result < 0)
                goto undo_listener;
        result = os->watch(listener->set, listen_fd, listener, OS_WATCH_READ);
        if (result >= 0)
                result = os_thread_start(&listener->thread, listener_main, listener, false);
        if (result < 0)
                goto undo_set;
        *ret_listener = listener;
        return NEBULA_OK;

undo_set:
        os->close(listener->set);
undo_listener:
        free(listener);
        return error_set(error, NEBULA_UNAVAILABLE, -result, "cannot wait for clients");
}

void listener_shut(struct listener *listener)
{
        os->shutdown(listener->listen_fd);
        for (size_t i = 0; i < SESSION_MAX; i++)
                if (listener->clients[i])
                        os->shutdown(listener->clients[i]->fd);
}

bool listener_has_ended(const struct listener *listener)
{
        return listener->has_ended;
}

void listener_free(struct listener *listener)
{
        pthread_join(listener->thread, NULL);
        os->close(listener->set);
        free(listener);
}
