/* One connection to the agent: finds the agent or starts it, greets it, sends requests. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "client/client.h"
#include "os/os.h"

/* For finding, starting and greeting an agent together. A start takes some milliseconds on a healthy machine. */
#define OPEN_LIMIT_MS 10000
#define GREET_LEAST_MS 2000 /* for the answer of an agent that was reached at the end of this time */
#define START_PAUSE_MS 300 /* between two attempts to start an agent: another one may just be ending */
#define START_COUNT_MAX 3
#define INTERRUPT_PAUSE_MS 200 /* Ctrl-C during a wait for memory is noticed within that time */
#define PAUSE_MIN_MS 2
#define PAUSE_MAX_MS 200

/*
 * The connections of this process. A forked child closes them: otherwise it would keep its parent's connections open, and
 * the agent would go on waiting for a trainer that has ended.
 */
static struct lock list_lock = LOCK_INIT(LOCK_WIRES); /* guards the list */
static struct listed {
        int fd;
        uint64_t device, inode;
} *list;
static size_t list_count, list_room;
static unsigned fork_count; /* number of forks between the first process and this one */

static bool is_of_number(int fd, uint64_t device, uint64_t inode)
{
        struct os_stat stat;

        return !os->fstat(fd, &stat) && stat.device == device && stat.inode == inode;
}

void client_wires_before_fork(void)
{
        lock_take(&list_lock);
}

void client_wires_after_fork(bool is_child)
{
        if (is_child) {
                while (list_count > 0) {
                        const struct listed *last = &list[--list_count];

                        if (is_of_number(last->fd, last->device, last->inode))
                                os->close(last->fd);
                }
                fork_count++;
        }
        lock_give(&list_lock);
}

/* Called after connecting, because connecting can hang at a stopped agent, and a fork would wait for list_lock. If
 * the list cannot grow, the connection works, but children do not close it. */
static void list_wire(const struct client_wire *wire)
{
        struct listed *larger;

        lock_take(&list_lock);
        if (list_count == list_room) {
                larger = realloc(list, (list_room + 8) * sizeof *list);
                list = larger ? larger : list;
                list_room += larger ? 8 : 0;
        }
        if (list_count < list_room)
                list[list_count++] = (struct listed){ wire->fd, wire->device, wire->inode };
        lock_give(&list_lock);
}

/* The caller holds list_lock. A fork closes the connections of the parent when the child begins. */
static bool is_open(const struct client_wire *wire)
{
        return wire->fork_count == fork_count && is_of_number(wire->fd, wire->device, wire->inode);
}

static void close_listed(const struct client_wire *wire)
{
        lock_take(&list_lock);
        for (size_t i = 0; wire->fork_count == fork_count && i < list_count; i++)
                if (list[i].fd == wire->fd && list[i].inode == wire->inode) {
                        list[i] = list[--list_count];
                        break;
                }
        if (is_open(wire))
                os->close(wire->fd);
        lock_give(&list_lock);
}

bool client_wire_is_open(const struct client_wire *wire)
{
        bool result;

        lock_take(&list_lock);
        result = is_open(wire);
        lock_give(&list_lock);
        return result;
}

void client_wire_close(struct client_wire *wire)
{
        if (wire->fd >= 0)
                close_listed(wire);
        ipc_frame_done(&wire->frame);
        wire->fd = -1;
        wire->agent_nonce = 0;
}

/* Writes a line into the agent's log. A stopped agent holds a save up for CLIENT_ANSWER_MS and cannot write it itself. */
static void say_silent(struct client_wire *wire)
{
        int fd = os->open(wire->log, OS_WRITE | OS_APPEND | OS_NOFOLLOW);

        wire->log = NULL;
        if (fd < 0)
                return;
        log_line(fd, LOG_LEVEL_WARN, "process %u waits for the agent (process %u), which has not answered for %d s: it is "
                                     "stopped, or waits for memory or storage",
                 os->pid(), wire->agent_pid, CLIENT_SILENT_MS / 1000);
        os->close(fd);
}

/* Whether an answer comes within CLIENT_SILENT_MS. */
static bool answers_soon(const struct client_wire *wire)
{
        int64_t until_ns = os->now_ns() + (int64_t)CLIENT_SILENT_MS * 1000000, left_ms = CLIENT_SILENT_MS;
        int ready;

        do {
                ready = os->poll(wire->fd, left_ms);
                left_ms = (until_ns - os->now_ns()) / 1000000;
        } while (ready == -EINTR && left_ms > 0);
        return ready != 0 && ready != -EINTR;
}

bool client_wire_is_interrupted(struct client_wire *wire, int64_t timeout_ms, int (*is_interrupted)(void *argument), void *argument)
{
        int64_t begun_ns = os->now_ns(), waited_ms = 0;
        int ready = os->poll(wire->fd, INTERRUPT_PAUSE_MS);

        while ((ready == 0 || ready == -EINTR) && (timeout_ms < 0 || waited_ms < timeout_ms)) {
                if (is_interrupted(argument)) {
                        client_wire_close(wire);
                        return true;
                }
                waited_ms = (os->now_ns() - begun_ns) / 1000000;
                if (waited_ms >= CLIENT_SILENT_MS && wire->log)
                        say_silent(wire);
                ready = os->poll(wire->fd, INTERRUPT_PAUSE_MS);
        }
        return false;
}

static void give_up(struct client_wire *wire, struct nebula_error *error)
{
        error_prefix(error, "the agent (process %u)", wire->agent_pid);
        client_wire_close(wire);
}

enum nebula_status client_wire_send(struct client_wire *wire, enum ipc_type type, const void *request, size_t size, bool *ret_broken,
                                    struct nebula_error *error)
{
        enum nebula_status status = client_wire_is_open(wire) ? ipc_send(wire->fd, type, NEBULA_OK, request, size, -1, error) :
                                    error_set(error, NEBULA_UNAVAILABLE, 0, "the program closed the connection: close only descriptors "
                                              "that your program opened");

        *ret_broken = status != NEBULA_OK;
        if (*ret_broken)
                give_up(wire, error);
        return status;
}

enum nebula_status client_wire_await(struct client_wire *wire, enum ipc_type type, int64_t timeout_ms, bool *ret_broken,
                                     struct nebula_error *error)
{
        enum nebula_status status;

        if ((timeout_ms == CLIENT_ANSWER_MS || type == IPC_IMAGE) && wire->log) {
                timeout_ms = answers_soon(wire) ? -1 : timeout_ms - CLIENT_SILENT_MS; /* -1: the answer is there and only has to be read */
                if (timeout_ms >= 0)
                        say_silent(wire);
        }
        status = ipc_await(wire->fd, type, timeout_ms, &wire->frame, ret_broken, error);
        if (*ret_broken)
                give_up(wire, error);
        return status;
}

enum nebula_status client_wire_call(struct client_wire *wire, enum ipc_type type, const void *request, size_t size,
                                    int64_t timeout_ms, bool *ret_broken, struct nebula_error *error)
{
        enum nebula_status status = client_wire_send(wire, type, request, size, ret_broken, error);

        return status ? status : client_wire_await(wire, type, timeout_ms, ret_broken, error);
}

enum nebula_status client_make_greeting(const struct ipc_hello *hello, const struct vars *variables, char **ret_greeting, size_t *ret_size,
                                        struct nebula_error *error)
{
        size_t size;
        const char *text = vars_text(variables, &size);
        char *greeting = malloc(sizeof *hello + size);

        if (!greeting)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a session");
        memcpy(greeting, hello, sizeof *hello);
        memcpy(greeting + sizeof *hello, text, size);
        *ret_greeting = greeting;
        *ret_size = sizeof *hello + size;
        return NEBULA_OK;
}

void client_forget_greeting(char *greeting, size_t size)
{
        if (greeting)
                explicit_bzero(greeting, size);
        free(greeting);
}

static enum nebula_status greet(struct client_wire *wire, const struct client_settings *settings, int64_t timeout_ms,
                                bool *ret_broken, struct nebula_error *error)
{
        const struct ipc_welcome *welcome;
        enum nebula_status status;
        char *greeting = NULL;
        size_t size = 0;

        *ret_broken = false;
        status = ipc_place_check_peer(wire->fd, &settings->place, &wire->agent_pid, error);
        if (status == NEBULA_OK)
                status = client_make_greeting(&settings->hello, settings->variables, &greeting, &size, error);
        if (status == NEBULA_OK)
                status = client_wire_call(wire, IPC_HELLO, greeting, size, timeout_ms, ret_broken, error);
        client_forget_greeting(greeting, size);
        if (status != NEBULA_OK)
                return status;
        welcome = wire->frame.payload;
        if (welcome->version != IPC_VERSION)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the agent (process %u) speaks version %u of the protocol, "
                                 "this library version %u: end it with `nebula stop`", welcome->agent_pid,
                                 welcome->version, IPC_VERSION);
        wire->agent_nonce = welcome->agent_nonce;
        wire->agent_pid = welcome->agent_pid;
        return NEBULA_OK;
}

enum outcome {
        OUTCOME_FINAL,  /* greeted, or refused */
        OUTCOME_ABSENT, /* no agent listens */
        OUTCOME_AGAIN,  /* an agent listens, but was busy or just ending */
};

static enum nebula_status attempt(struct client_wire *wire, const struct client_settings *settings, int64_t left_ms,
                                  enum outcome *ret_outcome, struct nebula_error *error)
{
        const char *path = settings->place.socket;
        enum nebula_status status;
        struct os_stat stat;
        bool is_broken;
        int fd = ipc_place_connect(&settings->place), result;

        if (fd < 0) {
                *ret_outcome = fd == -ENOENT || fd == -ECONNREFUSED ? OUTCOME_ABSENT :
                               fd == -EAGAIN || fd == -EINTR ? OUTCOME_AGAIN : OUTCOME_FINAL;
                return error_set(error, NEBULA_UNAVAILABLE, -fd, "no agent can be reached on %s (its log is %s)", path,
                                 settings->place.log);
        }
        result = os->fstat(fd, &stat);
        if (result < 0) {
                os->close(fd);
                *ret_outcome = OUTCOME_FINAL;
                return error_set(error, NEBULA_UNAVAILABLE, -result, "the connection to the agent on %s cannot be examined", path);
        }
        *wire = (struct client_wire){ .fd = fd, .device = stat.device, .inode = stat.inode, .fork_count = fork_count };
        list_wire(wire);
        status = greet(wire, settings, left_ms, &is_broken, error);
        *ret_outcome = is_broken && status != NEBULA_TIMEOUT ? OUTCOME_AGAIN : OUTCOME_FINAL;
        if (status != NEBULA_OK)
                client_wire_close(wire);
        return status == NEBULA_TIMEOUT ? error_set(error, NEBULA_UNAVAILABLE, 0, "the agent on %s accepts connections, but does not "
                                                                                  "answer: see %s", path, settings->place.log) : status;
}

enum nebula_status client_wire_open(struct client_wire *wire, const struct client_settings *settings,
                                    struct nebula_error *error)
{
        int64_t end_ns = os->now_ns() + (int64_t)OPEN_LIMIT_MS * 1000000;
        struct nebula_error start_failure = { .status = NEBULA_OK };
        int64_t start_at_ns = 0, pause_ms = PAUSE_MIN_MS;
        int start_count = 0;
        enum nebula_status status;
        enum outcome outcome;
        bool is_final;

        for (;;) {
                int64_t left_ms = (end_ns - os->now_ns()) / 1000000; /* may be negative, which would be no limit */

                status = attempt(wire, settings, left_ms > GREET_LEAST_MS ? left_ms : GREET_LEAST_MS, &outcome, error);
                if (outcome == OUTCOME_FINAL || (outcome == OUTCOME_ABSENT && settings->is_idle))
                        return status;
                if (outcome == OUTCOME_ABSENT && os->now_ns() >= start_at_ns) {
                        start_at_ns = os->now_ns() + (int64_t)START_PAUSE_MS * 1000000;
                        start_failure.status = client_start_agent(settings, &is_final, &start_failure);
                        if (start_failure.status != NEBULA_OK && (is_final || ++start_count == START_COUNT_MAX))
                                break;
                        if (start_failure.status == NEBULA_OK)
                                continue; /* an agent listens already */
                }
                if (os->now_ns() >= end_ns)
                        break;
                os->sleep_ms(pause_ms);
                pause_ms = 2 * pause_ms < PAUSE_MAX_MS ? 2 * pause_ms : PAUSE_MAX_MS;
        }
        if (start_failure.status == NEBULA_OK)
                return status;
        if (error)
                *error = start_failure;
        return start_failure.status;
}
