#include "cli/cli_agent.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "os/os.h"
#include "os/process.h"

#define GREETING_MS 5000 /* an agent answers a greeting at once, even if its storage hangs */

struct cli_agent {
        int fd;
        struct ipc_frame frame;
        uint32_t agent_pid; /* the pid that the agent reports */
        uint32_t seen_pid;  /* its pid in this process's pid namespace; 0: not visible there */
};

static enum nebula_status ask_within(struct cli_agent *agent, enum ipc_type type, const void *request, size_t size,
                                     int64_t timeout_ms, struct nebula_error *error)
{
        bool is_broken;

        return ipc_call(agent->fd, type, request, size, timeout_ms, &agent->frame, &is_broken, error);
}

/* Sends a request and receives the answer into agent->frame. No timeout: stop persists first. */
static enum nebula_status ask(struct cli_agent *agent, enum ipc_type type, const void *request, size_t size,
                              struct nebula_error *error)
{
        return ask_within(agent, type, request, size, -1, error);
}

static enum nebula_status say_hello(struct cli_agent *agent, const char *persist_path, struct nebula_error *error)
{
        struct ipc_hello *hello = calloc(1, sizeof *hello);
        const struct ipc_welcome *welcome;
        enum nebula_status status;

        if (!hello)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to talk to the agent");
        hello->version = IPC_VERSION;
        hello->role = IPC_ROLE_TOOL;
        hello->pid = os->pid();
        hello->world = hello->local_world = hello->retention_count = 1;
        os->random(&hello->session_nonce, sizeof hello->session_nonce);
        snprintf(hello->persist_path, sizeof hello->persist_path, "%s", persist_path ? persist_path : "");
        status = ask_within(agent, IPC_HELLO, hello, sizeof *hello, GREETING_MS, error);
        free(hello);
        if (status)
                return status;
        welcome = agent->frame.payload;
        agent->agent_pid = welcome->agent_pid;
        return NEBULA_OK;
}

enum nebula_status cli_agent_open(const char *persist_path, struct cli_agent **ret_agent, struct nebula_error *error)
{
        struct ipc_place place;
        struct cli_agent *agent;
        enum nebula_status status = ipc_place_find(&place, error);
        uint32_t pid = 0;
        int fd;

        if (status)
                return status;
        fd = ipc_place_connect(&place);
        if (fd == -ENOENT || fd == -ECONNREFUSED)
                return error_set(error, NEBULA_UNAVAILABLE, -fd, "no agent is running (%s)", place.socket);
        if (fd < 0)
                return error_set(error, NEBULA_UNAVAILABLE, -fd, "the agent cannot be reached on %s (its log is %s)", place.socket, place.log);
        agent = calloc(1, sizeof *agent);
        if (!agent) {
                os->close(fd);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to talk to the agent");
        }
        agent->fd = fd;
        status = ipc_place_check_peer(fd, &place, &pid, error);
        agent->seen_pid = pid;
        if (!status)
                status = say_hello(agent, persist_path, error);
        if (status == NEBULA_TIMEOUT)
                status = error_set(error, NEBULA_UNAVAILABLE, 0, "the agent (pid %u) has not answered for %d s: it is stopped or "
                                   "hangs; its log is %s", pid, GREETING_MS / 1000, place.log);
        if (status) {
                cli_agent_close(agent);
                return status;
        }
        *ret_agent = agent;
        return NEBULA_OK;
}

bool cli_agent_is_absent(const struct nebula_error *error)
{
        return error->status == NEBULA_UNAVAILABLE && (error->sys_errno == ENOENT || error->sys_errno == ECONNREFUSED);
}

bool cli_agent_open_if_any(const char *persist_path, struct cli_agent **ret_agent)
{
        struct nebula_error error;

        if (!cli_agent_open(persist_path, ret_agent, &error))
                return true;
        if (!cli_agent_is_absent(&error))
                cli_complain("%s; only storage is looked at", error.message);
        return false;
}

bool cli_agent_end_other_version(const struct nebula_error *error, uint32_t *ret_pid)
{
        struct ipc_place place;
        uint32_t pid = 0;
        bool is_reported;
        int fd;

        if (error->status != NEBULA_UNAVAILABLE || error->sys_errno != IPC_OTHER_VERSION || ipc_place_find(&place, NULL))
                return false;
        fd = ipc_place_connect(&place);
        if (fd < 0)
                return false;
        is_reported = !ipc_place_check_peer(fd, &place, &pid, NULL) && !os_process_end(pid);
        os->close(fd);
        if (is_reported)
                *ret_pid = pid;
        return is_reported;
}

void cli_agent_close(struct cli_agent *agent)
{
        if (!agent)
                return;
        ipc_frame_done(&agent->frame);
        os->close(agent->fd);
        free(agent);
}

uint32_t cli_agent_seen_pid(const struct cli_agent *agent)
{
        return agent->seen_pid;
}

bool cli_agent_is_there(uint32_t seen_pid)
{
        struct ipc_place place;
        int fd, result;

        if (seen_pid)
                return os->alive(seen_pid);
        if (ipc_place_find(&place, NULL))
                return false;
        fd = os->open(place.lock, OS_READ | OS_WRITE | OS_NOFOLLOW);
        if (fd < 0)
                return false;
        result = os->lock(fd, OS_LOCK_ALONE); /* an agent holds this lock until it ends */
        os->close(fd);
        return result < 0;
}

uint32_t cli_agent_pid(const struct cli_agent *agent)
{
        return agent->agent_pid;
}

static enum nebula_status take_json(struct cli_agent *agent, json_t **ret_value, struct nebula_error *error)
{
        size_t size = agent->frame.header.size;
        const char *text = agent->frame.payload;
        json_error_t problem;
        json_t *value;

        while (size && !text[size - 1])
                size--; /* the text may include its NUL */
        value = json_loadb(text, size, 0, &problem);
        if (!value)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the agent's report is not JSON: %s", problem.text);
        *ret_value = value;
        return NEBULA_OK;
}

enum nebula_status cli_agent_report(struct cli_agent *agent, enum nebula_report report, const char *persist_path,
                                    json_t **ret_report, struct nebula_error *error)
{
        struct ipc_report request = { .report = report };
        enum nebula_status status;

        snprintf(request.persist_path, sizeof request.persist_path, "%s", persist_path ? persist_path : "");
        status = ask(agent, IPC_REPORT, &request, sizeof request, error);
        return status ? status : take_json(agent, ret_report, error);
}

static enum nebula_status find(struct cli_agent *agent, const char *persist_path, const char *tag,
                               struct ipc_found *ret_found, struct nebula_error *error)
{
        struct ipc_find request = { 0 };
        enum nebula_status status;

        snprintf(request.persist_path, sizeof request.persist_path, "%s", persist_path ? persist_path : "");
        snprintf(request.tag, sizeof request.tag, "%s", tag && strcmp(tag, "latest") ? tag : "");
        status = ask(agent, IPC_FIND, &request, sizeof request, error);
        if (!status)
                memcpy(ret_found, agent->frame.payload, sizeof *ret_found);
        return status;
}

enum nebula_status cli_agent_describe(struct cli_agent *agent, uint64_t version_id, json_t **ret_description, struct nebula_error *error)
{
        struct ipc_version request = { .version_id = version_id };
        enum nebula_status status = ask(agent, IPC_DESCRIBE, &request, sizeof request, error);

        return status ? status : take_json(agent, ret_description, error);
}

enum nebula_status cli_agent_records(struct cli_agent *agent, uint64_t version_id, json_t **ret_texts, struct nebula_error *error)
{
        struct ipc_version request = { .version_id = version_id };
        enum nebula_status status = ask(agent, IPC_RECORDS, &request, sizeof request, error);

        return status ? status : take_json(agent, ret_texts, error);
}

enum nebula_status cli_agent_compared(struct cli_agent *agent, const char *tag, uint64_t sequence, bool is_whole, struct nebula_error *error)
{
        struct ipc_compared request = { .sequence = sequence, .is_whole = is_whole };

        snprintf(request.tag, sizeof request.tag, "%s", tag);
        return ask(agent, IPC_COMPARED, &request, sizeof request, error);
}

enum nebula_status cli_agent_find(struct cli_agent *agent, const char *persist_path, const char *tag, uint64_t *ret_version_id, struct nebula_error *error)
{
        struct ipc_found found;
        enum nebula_status status = find(agent, persist_path, tag, &found, error);

        if (!status)
                *ret_version_id = found.version_id;
        return status;
}

enum nebula_status cli_agent_find_younger(struct cli_agent *agent, const char *persist_path, const char *tag, uint64_t than,
                                          uint64_t *ret_version_id, json_t **ret_description, struct nebula_error *error)
{
        struct ipc_found found;
        json_t *description;
        enum nebula_status status = find(agent, persist_path, tag, &found, error);

        if (!status)
                status = cli_agent_describe(agent, found.version_id, &description, error);
        if (status)
                return status;
        if (!lies_in(description, "memory") ||
            (uint64_t)json_integer_value(json_object_get(description, "sequence")) <= than) {
                json_decref(description);
                return error_set(error, NEBULA_NOT_FOUND, 0, "the agent's memory has nothing newer");
        }
        *ret_version_id = found.version_id;
        *ret_description = description;
        return NEBULA_OK;
}

enum nebula_status cli_agent_wait(struct cli_agent *agent, uint64_t version_id, enum nebula_state state, int64_t timeout_ms,
                                  struct nebula_error *error)
{
        struct ipc_wait request = { .version_id = version_id, .state = state, .timeout_ms = timeout_ms };

        return ask(agent, IPC_WAIT, &request, sizeof request, error);
}

enum nebula_status cli_agent_file(struct cli_agent *agent, uint64_t version_id, const char *name, struct ipc_opened *ret_opened,
                                  int *ret_fd, struct nebula_error *error)
{
        struct ipc_open request = { .version_id = version_id };
        enum nebula_status status;

        snprintf(request.name, sizeof request.name, "%s", name);
        status = ask(agent, IPC_OPEN, &request, sizeof request, error);
        if (status)
                return status;
        if (!agent->frame.header.has_fd || agent->frame.fd < 0)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the agent sent no file for \"%s\"", name);
        memcpy(ret_opened, agent->frame.payload, sizeof *ret_opened);
        *ret_fd = agent->frame.fd;
        agent->frame.fd = -1; /* the caller owns it now */
        return NEBULA_OK;
}

enum nebula_status cli_agent_stop(struct cli_agent *agent, bool now, struct nebula_error *error)
{
        struct ipc_stop request = { .now = now };

        return ipc_send(agent->fd, IPC_STOP, NEBULA_OK, &request, sizeof request, -1, error);
}

enum nebula_status cli_agent_stopped(struct cli_agent *agent, int64_t timeout_ms, bool *ret_done, struct nebula_error *error)
{
        enum nebula_status status;
        bool is_broken;

        *ret_done = os->poll(agent->fd, timeout_ms) > 0;
        if (!*ret_done)
                return NEBULA_OK;
        status = ipc_receive(agent->fd, &agent->frame, error);
        return status ? status : ipc_answer_check(&agent->frame, IPC_STOP, &is_broken, error);
}

const char *text_of(const json_t *object, const char *key)
{
        const char *text = json_string_value(json_object_get(object, key));

        return text ? text : "";
}

double number_of(const json_t *object, const char *key)
{
        return json_number_value(json_object_get(object, key));
}

bool lies_in(const json_t *version, const char *source)
{
        const json_t *sources = json_object_get(version, "source");

        for (size_t i = 0; i < json_array_size(sources); i++) {
                const char *one = json_string_value(json_array_get(sources, i));

                if (one && !strcmp(one, source))
                        return true;
        }
        return json_is_string(sources) && !strcmp(json_string_value(sources), source);
}
