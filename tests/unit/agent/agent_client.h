/*
 * agent_client.h - a trainer for tests of the agent: raw requests over the real socket, and an agent to talk to, on threads or as a
 * process to kill.
 */
#ifndef NB_TESTS_AGENT_CLIENT_H
#define NB_TESTS_AGENT_CLIENT_H

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent/agent.h"
#include "agent/agent_storage.h"
#include "agent/memory/memory.h"
#include "os/os.h"

#define FILE_BYTES (300u * 1024 + 17) /* neither a multiple of a page nor of a chunk */

struct test_place {
        struct ipc_place place;
        char root[64], storage[96], output[96];
};

static inline void place_init(struct test_place *to)
{
        memset(to, 0, sizeof *to);
        snprintf(to->root, sizeof to->root, "/tmp/nebula-agent-test-XXXXXX");
        if (!mkdtemp(to->root))
                abort();
        storage_beside(to->root, to->storage, sizeof to->storage);
        snprintf(to->output, sizeof to->output, "%s/output", to->root);
        snprintf(to->place.directory, sizeof to->place.directory, "%s/run", to->root);
        snprintf(to->place.socket, sizeof to->place.socket, "%s/run/agent.sock", to->root);
        snprintf(to->place.lock, sizeof to->place.lock, "%s/run/agent.lock", to->root);
        snprintf(to->place.log, sizeof to->place.log, "%s/run/agent.log", to->root);
        snprintf(to->place.memory, sizeof to->place.memory, "%s/memory", to->root);
        mkdir(to->place.directory, 0700);
}

static inline void place_done(struct test_place *place)
{
        char own[96];

        storage_beside(place->root, own, sizeof own); /* place->storage may belong to another place */
        if (storage_is_mem())
                storage_remove(own);
        os_remove_tree(place->root);
}

/* Starts an agent in a process of its own, as the command does. It is ready when this returns. */
static inline pid_t agent_fork(const struct test_place *place)
{
        pid_t pid;

        fflush(stdout);
        pid = fork();
        if (!pid) {
                char *argv[] = { "agent", "--foreground", NULL };

                setenv("NEBULA_RUNTIME_DIR", place->place.directory, 1);
                setenv("NEBULA_MEMORY_DIR", place->place.memory, 1);
                unsetenv("NEBULA_NODE_ID");
                if (!freopen(place->place.log, "a", stderr))
                        _exit(9);
                _exit(agent_main(2, argv));
        }
        for (int i = 0; i < 6000; i++) {
                int fd = os->connect(place->place.socket);

                if (fd >= 0) {
                        os->close(fd);
                        return pid;
                }
                usleep(10000);
        }
        abort();
}

static inline int agent_end(pid_t pid, int signal_number)
{
        int status = 0;

        kill(pid, signal_number);
        waitpid(pid, &status, 0);
        return status;
}

/* An agent that a test ends: a process, or threads of this process if it holds the storage (agent_storage.h). */
struct test_agent {
        pid_t pid;
        struct agent *threads;
};

static inline struct test_agent agent_run(const struct test_place *place)
{
        struct test_agent agent = { 0 };

        if (!storage_is_mem())
                agent.pid = agent_fork(place);
        else if (agent_start(&place->place, true, &agent.threads, NULL))
                abort();
        return agent;
}

/* Threads cannot be killed. With SIGKILL they end and leave the same files to the next agent as a killed process. Returns the status of
 * waitpid. */
static inline int agent_finish(struct test_agent agent, int signal_number)
{
        if (!agent.threads)
                return agent_end(agent.pid, signal_number);
        agent_stop(agent.threads, signal_number == SIGTERM && agent_drain(agent.threads));
        return 0;
}

struct test_client {
        int fd;
        struct ipc_frame frame;
        struct nebula_error error;
        struct ipc_hello hello;
};

/* Sends a request. The answer is in client->frame. */
static inline enum nebula_status ask(struct test_client *client, enum ipc_type type, const void *payload, size_t size)
{
        enum nebula_status status = ipc_send(client->fd, type, NEBULA_OK, payload, size, -1, &client->error);

        if (!status)
                status = ipc_receive(client->fd, &client->frame, &client->error);
        if (!status && client->frame.header.status) {
                size_t length = client->frame.header.size;

                if (length >= sizeof client->error.message)
                        length = sizeof client->error.message - 1;
                client->error.status = status = (enum nebula_status)client->frame.header.status;
                memcpy(client->error.message, client->frame.payload, length);
                client->error.message[length] = 0;
        }
        return status;
}

static inline void client_init(struct test_client *client, const struct test_place *place, uint64_t nonce)
{
        memset(client, 0, sizeof *client);
        client->fd = -1;
        client->frame.fd = -1;
        client->hello = (struct ipc_hello){ .version = IPC_VERSION, .role = IPC_ROLE_TRAINER, .pid = (uint32_t)getpid(), .world = 1,
                                            .local_world = 1, .retention_count = 2, .session_nonce = nonce };
        snprintf(client->hello.persist_path, sizeof client->hello.persist_path, "%s", place->storage);
        snprintf(client->hello.output_dir, sizeof client->hello.output_dir, "%s", place->output);
}

static inline enum nebula_status client_connect(struct test_client *client, const struct test_place *place)
{
        client->fd = os->connect(place->place.socket);
        if (client->fd < 0)
                return NEBULA_UNAVAILABLE;
        return ask(client, IPC_HELLO, &client->hello, sizeof client->hello);
}

static inline void client_done(struct test_client *client)
{
        ipc_frame_done(&client->frame);
        if (client->fd >= 0)
                os->close(client->fd);
        client->fd = -1;
}

static inline uint64_t begin(struct test_client *client, const char *tag, int64_t count)
{
        struct ipc_begin request = { .file_count = count };

        snprintf(request.tag, sizeof request.tag, "%s", tag);
        if (ask(client, IPC_BEGIN, &request, sizeof request))
                return 0;
        return ((struct ipc_begun *)client->frame.payload)->version_id;
}

static inline unsigned char byte_at(unsigned seed, size_t i)
{
        return (unsigned char)(seed * 131u + i * 7u + i / 4096u);
}

/* Sends IMAGE and copies the file into the image. The loan is in *ret_loan. */
static inline enum nebula_status copy_image(struct test_client *client, uint64_t version, const char *name, unsigned seed,
                                            size_t size, struct ipc_granted *ret_loan)
{
        struct ipc_image request = { .version_id = version, .size = size, .format = IPC_FORMAT_RAW };
        enum nebula_status status;
        unsigned char *data;

        snprintf(request.name, sizeof request.name, "%s", name);
        status = ask(client, IPC_IMAGE, &request, sizeof request);
        if (status)
                return status;
        memcpy(ret_loan, client->frame.payload, sizeof *ret_loan);
        data = mmap(NULL, ret_loan->capacity_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, client->frame.fd, 0);
        if (data == MAP_FAILED)
                return NEBULA_NO_MEMORY;
        for (size_t i = 0; i < size; i++)
                data[i] = byte_at(seed, i);
        munmap(data, ret_loan->capacity_bytes);
        return NEBULA_OK;
}

static inline enum nebula_status captured(struct test_client *client, uint64_t image)
{
        struct ipc_captured request = { .image_id = image, .blocked_ns = 1000000, .copy_ns = 2000000, .cpu_ns = 1500000 };

        return ask(client, IPC_CAPTURED, &request, sizeof request);
}

static inline enum nebula_status save(struct test_client *client, uint64_t version, const char *name, unsigned seed, size_t size)
{
        struct ipc_granted loan;
        enum nebula_status status = copy_image(client, version, name, seed, size, &loan);

        return status ? status : captured(client, loan.image_id);
}

static inline enum nebula_status of_version(struct test_client *client, enum ipc_type type, uint64_t version)
{
        struct ipc_commit request = { .version_id = version, .has_saved = 1 }; /* the others have the id alone */

        return ask(client, type, &request, type == IPC_COMMIT ? sizeof request : sizeof(struct ipc_version));
}

static inline int state_of(struct test_client *client, uint64_t version)
{
        if (of_version(client, IPC_STATE, version))
                return -1;
        return (int)((struct ipc_state *)client->frame.payload)->state;
}

static inline enum nebula_status wait_for(struct test_client *client, uint64_t version, enum nebula_state state, int64_t timeout_ms)
{
        struct ipc_wait request = { .version_id = version, .timeout_ms = timeout_ms, .state = state };

        return ask(client, IPC_WAIT, &request, sizeof request);
}

static inline enum nebula_status flush(struct test_client *client, const char *tag, int64_t timeout_ms)
{
        struct ipc_flush request = { .timeout_ms = timeout_ms };

        snprintf(request.tag, sizeof request.tag, "%s", tag);
        return ask(client, IPC_FLUSH, &request, sizeof request);
}

static inline enum nebula_status find(struct test_client *client, const char *path, const char *tag, struct ipc_found *ret_found)
{
        struct ipc_find request = { 0 };
        enum nebula_status status;

        snprintf(request.persist_path, sizeof request.persist_path, "%s", path);
        snprintf(request.tag, sizeof request.tag, "%s", tag);
        status = ask(client, IPC_FIND, &request, sizeof request);
        if (!status)
                memcpy(ret_found, client->frame.payload, sizeof *ret_found);
        return status;
}

/* Opens a file and compares its bytes. *ret_source says where it came from. */
static inline enum nebula_status load(struct test_client *client, uint64_t version, const char *name, unsigned seed, size_t size,
                                      int *ret_source)
{
        struct ipc_open request = { .version_id = version };
        struct ipc_opened opened;
        enum nebula_status status;
        unsigned char *data;

        snprintf(request.name, sizeof request.name, "%s", name);
        status = ask(client, IPC_OPEN, &request, sizeof request);
        if (status)
                return status;
        memcpy(&opened, client->frame.payload, sizeof opened);
        if (ret_source)
                *ret_source = (int)opened.source;
        if (opened.size != size)
                return NEBULA_CORRUPT;
        data = mmap(NULL, size, PROT_READ, MAP_SHARED, client->frame.fd, 0);
        if (data == MAP_FAILED)
                return NEBULA_NO_MEMORY;
        for (size_t i = 0; i < size && !status; i++)
                if (data[i] != byte_at(seed, i))
                        status = NEBULA_CORRUPT;
        munmap(data, size);
        return status;
}

static inline enum nebula_status save_whole(struct test_client *client, const char *tag, unsigned seed, uint64_t *ret_version)
{
        uint64_t version = begin(client, tag, NEBULA_FILES_ALL_RANKS);
        struct ipc_granted loan;
        enum nebula_status status = version ? copy_image(client, version, "model.pt", seed, FILE_BYTES, &loan) : client->error.status;

        if (ret_version)
                *ret_version = 0;
        if (!status)
                status = captured(client, loan.image_id);
        if (!status)
                status = of_version(client, IPC_COMMIT, loan.version_id);
        if (ret_version && !status)
                *ret_version = loan.version_id;
        return status;
}

#endif
