/* A live agent with hostile or faulty clients: it still serves the next client. */
#include <fcntl.h>
#include <sys/ioctl.h>

#include "agent/agent_client.h"
#include "tap.h"

static struct test_place place;
static struct test_client client;
static pid_t pid;

static void begin_agent(void)
{
        place_init(&place);
        pid = agent_fork(&place);
}

/* A new trainer saves and loads a version in memory. Each seed has a tag of its own. */
static bool serves(uint64_t nonce, unsigned seed)
{
        uint64_t version = 0;
        const char *step = "connect";
        enum nebula_status status;
        char tag[32];

        snprintf(tag, sizeof tag, "tag%u", seed);
        client_init(&client, &place, nonce);
        status = client_connect(&client, &place);
        if (!status) {
                step = "save";
                version = begin(&client, tag, NEBULA_FILES_ALL_RANKS);
                status = version ? save(&client, version, "a", seed, FILE_BYTES) : client.error.status;
        }
        if (!status) {
                step = "commit";
                status = of_version(&client, IPC_COMMIT, version);
        }
        if (!status)
                status = wait_for(&client, version, NEBULA_STATE_COMMITTED, 10000);
        if (!status) {
                step = "load";
                status = load(&client, version, "a", seed, FILE_BYTES, NULL);
        }
        if (status)
                printf("# %s: status %d: %s\n", step, status, client.error.message);
        client_done(&client);
        return !status;
}

static void end_agent(void)
{
        CHECK(kill(pid, 0) == 0);
        CHECK(agent_end(pid, SIGTERM) == 0);
        place_done(&place);
}

static uint32_t random_state = 1;

static uint32_t next_random(void)
{
        random_state = random_state * 1664525u + 1013904223u;
        return random_state >> 8;
}

static void fill(void *data, size_t size)
{
        for (size_t i = 0; i < size; i++)
                ((unsigned char *)data)[i] = (unsigned char)next_random();
}

/* Sends a header that announces `size` bytes, and `sent` bytes after it. */
static int knock(uint16_t type, uint32_t size, uint32_t sent)
{
        struct ipc_header header = { .magic = IPC_MAGIC, .type = type, .size = size };
        static char payload[1 << 16];
        int fd = os->connect(place.place.socket);

        if (fd < 0)
                return fd;
        fill(payload, sizeof payload);
        os->send(fd, &header, sizeof header, -1);
        for (uint32_t at = 0; at < sent; at += sizeof payload)
                if (os->send(fd, payload, sent - at < sizeof payload ? sent - at : sizeof payload, -1) < 0)
                        break;
        return fd;
}

/*
 * fault (The machine and other users): Garbage, torn requests, or thousands of connections come to the socket.
 * result: Each costs its own connection only. The agent serves the next client.
 */
static void garbage_and_frames_of_any_size_end_their_connection_only(void)
{
        char noise[300];
        int held[64];

        begin_agent();
        for (int i = 0; i < 64; i++) {
                int fd = os->connect(place.place.socket);

                REQUIRE(fd >= 0);
                fill(noise, sizeof noise);
                os->send(fd, noise, 1 + next_random() % sizeof noise, -1);
                os->close(fd);
        }
        os->close(knock(IPC_HELLO, UINT32_MAX, 100));
        os->close(knock(IPC_HELLO, IPC_PAYLOAD_MAX, 100));
        os->close(knock(IPC_HELLO, IPC_PAYLOAD_MAX, IPC_PAYLOAD_MAX));
        os->close(knock(60000, 0, 0));
        for (int i = 0; i < 64; i++) /* half a request each, and then nothing */
                held[i] = knock((uint16_t)(1 + i % IPC_TYPE_LAST), 4096, 1000);
        CHECK(serves(1, 1));
        for (int i = 0; i < 64; i++)
                os->close(held[i]);
        CHECK(serves(2, 2));
        end_agent();
}

/* fault: as garbage_and_frames_of_any_size_end_their_connection_only */
static void requests_of_the_right_size_with_wrong_contents_are_refused(void)
{
        begin_agent();
        for (unsigned round = 0; round < 400; round++) {
                static char payload[1 << 16];
                enum ipc_type type = (enum ipc_type)(1 + round % IPC_TYPE_LAST);
                size_t size = ipc_request_size(type);

                if (type == IPC_STOP || size > sizeof payload)
                        continue;
                client_init(&client, &place, 100 + round);
                if (round & 1)
                        CHECK(!client_connect(&client, &place));
                else
                        client.fd = os->connect(place.place.socket);
                fill(payload, sizeof payload);
                payload[size ? size - 1 : 0] = 0;
                /* Expects an answer or a closed connection. It does not wait for the end of a wait request. */
                if (!ipc_send(client.fd, type, NEBULA_OK, payload, size, -1, NULL) && os->poll(client.fd, 100) == 1)
                        ipc_receive(client.fd, &client.frame, &client.error);
                client_done(&client);
        }
        CHECK(serves(1, 1));
        end_agent();
}

/* fault: as garbage_and_frames_of_any_size_end_their_connection_only */
static void thousands_of_connections_leave_room_again(void)
{
        static int fds[5000];
        int open = 0;

        begin_agent();
        while (open < 5000 && (fds[open] = os->connect(place.place.socket)) >= 0)
                open++;
        CHECK(open > 1000);
        for (int i = 0; i < open; i++)
                os->close(fds[i]);
        for (int i = 0; i < 5000 && kill(pid, 0) == 0; i++) { /* until the agent's threads have noticed */
                client_init(&client, &place, 7);
                if (!client_connect(&client, &place))
                        break;
                client_done(&client);
                usleep(20000);
        }
        client_done(&client);
        CHECK(serves(1, 1));
        end_agent();
}

/* The socket's buffer is full of answers, so a thread that sends the next one blocks in the middle of it. */
static void stop_reading_answers_to(enum ipc_type type)
{
        char request[sizeof(struct ipc_header) + sizeof(struct ipc_report)] = { 0 };
        struct ipc_header header = { .magic = IPC_MAGIC, .type = (uint16_t)type, .size = (uint32_t)ipc_request_size(type) };
        struct test_client deaf;

        begin_agent();
        client_init(&deaf, &place, 50);
        REQUIRE(!client_connect(&deaf, &place));
        memcpy(request, &header, sizeof header);
        fcntl(deaf.fd, F_SETFL, O_NONBLOCK);
        for (int i = 0, full = 0; i < 100000 && full < 20; i++) { /* until the agent reads no more requests */
                full = os->send(deaf.fd, request, sizeof header + header.size, -1) < 0 ? full + 1 : 0;
                if (full)
                        usleep(10000);
        }
        CHECK(serves(1, 1));
        end_agent(); /* the agent can still be ended */
        client_done(&deaf);
}

/*
 * fault (The machine and other users): A client reads no answers, or is stopped in the middle of a save.
 * result: No other client waits for it, and the agent ends when told to.
 */
static void a_client_that_stops_reading_blocks_no_other_client(void)
{
        stop_reading_answers_to(IPC_REPORT);
        stop_reading_answers_to(IPC_STATE);
}

/* Sends requests and reads no answer, until the buffer has no room for another answer or `most` answers have come. Returns their number. */
static int leave_answers(struct test_client *deaf, uint64_t version, int most)
{
        struct {
                struct ipc_header header;
                struct ipc_version version;
        } request = { { .magic = IPC_MAGIC, .type = IPC_STATE, .size = sizeof request.version }, { version } };
        int unread = 0, before = -1, count = 0;

        while (count < most && unread > before) {
                before = unread;
                CHECK(os->send(deaf->fd, &request, sizeof request, -1) == sizeof request);
                for (int i = 0; i < 200 && unread == before; i++) {
                        usleep(1000);
                        ioctl(deaf->fd, FIONREAD, &unread);
                }
                count += unread > before;
        }
        return count;
}

/* The answer to its WAIT would come from a thread that all other clients need. */
static void a_waiting_client_that_reads_nothing_blocks_no_other_client(void)
{
        struct {
                struct ipc_header header;
                struct ipc_wait wait;
        } request = { { .magic = IPC_MAGIC, .type = IPC_WAIT, .size = sizeof request.wait },
                      { .timeout_ms = -1, .state = NEBULA_STATE_COMMITTED } };
        struct ipc_fail fail = { .reason = "it is over" };
        struct test_client deaf[2];
        int most = 100000;

        begin_agent();
        for (uint32_t i = 0; i < 2; i++) { /* the first client finds out how many answers the buffer can hold */
                client_init(&deaf[i], &place, 60 + i);
                deaf[i].hello.rank = i;
                deaf[i].hello.world = 2;
                REQUIRE(!client_connect(&deaf[i], &place));
                request.wait.version_id = begin(&deaf[i], "never", NEBULA_FILES_ALL_RANKS);
                most = leave_answers(&deaf[i], request.wait.version_id, most);
        }
        CHECK(os->send(deaf[1].fd, &request, sizeof request, -1) == sizeof request);
        usleep(100000);
        client_init(&client, &place, 62);
        REQUIRE(!client_connect(&client, &place));
        fail.version_id = request.wait.version_id;
        CHECK(os->send(client.fd, &(struct ipc_header){ .magic = IPC_MAGIC, .type = IPC_FAIL, .size = sizeof fail },
                       sizeof(struct ipc_header), -1) > 0 && os->send(client.fd, &fail, sizeof fail, -1) == sizeof fail);
        CHECK(os->poll(client.fd, 10000) == 1);
        client_done(&client);
        CHECK(serves(1, 1));
        end_agent();
        client_done(&deaf[0]);
        client_done(&deaf[1]);
}

static void a_request_in_pieces_blocks_no_other_client(void)
{
        struct {
                struct ipc_header header;
                struct ipc_begin begin;
        } request = { { .magic = IPC_MAGIC, .type = IPC_BEGIN, .size = sizeof request.begin }, { .file_count = 1, .tag = "slow" } };
        struct test_client slow;
        const char *bytes = (const char *)&request;

        begin_agent();
        client_init(&slow, &place, 51);
        slow.hello.rank = 1;
        slow.hello.world = 2;
        REQUIRE(!client_connect(&slow, &place));
        for (size_t i = 0; i < sizeof request; i++) {
                CHECK(os->send(slow.fd, bytes + i, 1, -1) == 1);
                if (i % 100 == 50)
                        CHECK(serves(1, (unsigned)i));
        }
        CHECK(!ipc_receive(slow.fd, &slow.frame, &slow.error) && slow.frame.header.type == IPC_BEGIN && !slow.frame.header.status);
        client_done(&slow);
        end_agent();
}

/* Whether the agent hangs up on a client that sends `type` when it waits for a version. */
static bool ends_who_asks_while_waiting(enum ipc_type type, bool at_once)
{
        char payload[sizeof(struct ipc_hello)] = { 0 };
        struct ipc_header header = { .magic = IPC_MAGIC, .type = IPC_WAIT, .size = sizeof(struct ipc_wait) };
        struct ipc_wait wait = { .timeout_ms = -1, .state = NEBULA_STATE_COMMITTED };
        struct test_client hasty;
        bool is_ended;

        client_init(&hasty, &place, 52);
        if (client_connect(&hasty, &place))
                return false;
        wait.version_id = begin(&hasty, "never", NEBULA_FILES_ALL_RANKS);
        memcpy(payload, &header, sizeof header);
        memcpy(payload + sizeof header, &wait, sizeof wait);
        header = (struct ipc_header){ .magic = IPC_MAGIC, .type = (uint16_t)type, .size = (uint32_t)ipc_request_size(type) };
        memcpy(payload + sizeof header + sizeof wait, &header, sizeof header);
        if (at_once) {
                os->send(hasty.fd, payload, 2 * sizeof header + sizeof wait + header.size, -1);
        } else {
                os->send(hasty.fd, payload, sizeof header + sizeof wait, -1);
                CHECK(os->poll(hasty.fd, 50) == 0);
                os->send(hasty.fd, payload + sizeof header + sizeof wait, sizeof header + header.size, -1);
        }
        is_ended = os->poll(hasty.fd, 10000) == 1 && ipc_receive(hasty.fd, &hasty.frame, &hasty.error) == NEBULA_UNAVAILABLE;
        client_done(&hasty);
        return is_ended;
}

static void a_client_that_asks_during_its_wait_is_disconnected(void)
{
        begin_agent();
        CHECK(ends_who_asks_while_waiting(IPC_STATE, true) && ends_who_asks_while_waiting(IPC_STATE, false));
        CHECK(ends_who_asks_while_waiting(IPC_FLUSH, true) && ends_who_asks_while_waiting(IPC_FLUSH, false));
        CHECK(serves(1, 1));
        end_agent();
}

static int thread_count(void)
{
        char path[64], line[256];
        int count = 0;
        FILE *file;

        snprintf(path, sizeof path, "/proc/%d/status", pid);
        file = fopen(path, "r");
        while (file && fgets(line, sizeof line, file) && sscanf(line, "Threads: %d", &count) != 1)
                ;
        if (file)
                fclose(file);
        return count;
}

static void clients_that_ask_nothing_cost_no_threads(void)
{
        static struct test_client clients[200];

        begin_agent();
        for (uint32_t i = 0; i < 200; i++) {
                client_init(&clients[i], &place, 100 + i);
                clients[i].hello.rank = i;
                clients[i].hello.world = 200;
                REQUIRE(!client_connect(&clients[i], &place));
        }
        for (int i = 0; i < 5000 && thread_count() > 50; i++) /* the last ones to be greeted */
                usleep(10000);
        CHECK(thread_count() > 0 && thread_count() <= 50);
        for (int i = 0; i < 200; i++)
                client_done(&clients[i]);
        end_agent();
}

/* fault: as a_client_that_stops_reading_blocks_no_other_client */
static void an_incomplete_save_fails_when_its_trainer_is_gone(void)
{
        struct ipc_granted loan;
        uint64_t version;
        pid_t trainer;
        int status;

        begin_agent();
        fflush(stdout);
        trainer = fork();
        if (!trainer) {
                client_init(&client, &place, 60);
                if (client_connect(&client, &place) || !(version = begin(&client, "t", NEBULA_FILES_ALL_RANKS)) ||
                    copy_image(&client, version, "a", 9, FILE_BYTES, &loan))
                        _exit(1);
                raise(SIGSTOP);
                _exit(0);
        }
        REQUIRE(waitpid(trainer, &status, WUNTRACED) == trainer && WIFSTOPPED(status));
        client_init(&client, &place, 61);
        client.hello.rank = 1;
        client.hello.world = 2;
        CHECK(!client_connect(&client, &place)); /* another rank continues meanwhile */
        CHECK((version = begin(&client, "u", 1)) && !save(&client, version, "a", 3, FILE_BYTES) &&
              !of_version(&client, IPC_COMMIT, version) && !wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        client_done(&client);
        kill(trainer, SIGKILL);
        waitpid(trainer, &status, 0);
        CHECK(serves(62, 4));
        end_agent();
}

/*
 * fault (The machine and other users): The runtime directory is removed while the agent runs.
 * result: Sessions go on. New sessions get an agent of their own, which does not use the first one's memory.
 */
static void without_its_runtime_directory_an_agent_goes_on_and_the_next_one_keeps_off_its_memory(void)
{
        struct test_client first;
        uint64_t version;
        pid_t second;

        begin_agent();
        client_init(&first, &place, 70);
        REQUIRE(!client_connect(&first, &place));
        CHECK(!os_remove_tree(place.place.directory) && !mkdir(place.place.directory, 0700));
        second = agent_fork(&place);
        CHECK(serves(71, 1));
        CHECK((version = begin(&first, "old", NEBULA_FILES_ALL_RANKS)) && !save(&first, version, "a", 5, FILE_BYTES) &&
              !of_version(&first, IPC_COMMIT, version) && !wait_for(&first, version, NEBULA_STATE_DURABLE, 10000) &&
              !load(&first, version, "a", 5, FILE_BYTES, NULL));
        CHECK(agent_end(second, SIGTERM) == 0);
        CHECK(!load(&first, version, "a", 5, FILE_BYTES, NULL));
        client_done(&first);
        end_agent();
}

/*
 * fault (Memory): The memory directory is removed while the agent runs, as by systemd's `RemoveIPC` at logout.
 * result: Versions in memory can still be loaded and become durable. New versions are memfds, which end with the agent.
 */
/* systemd removes the files in this way at a user's logout (RemoveIPC=yes). */
static void without_its_memory_directory_an_agent_still_saves_and_loads(void)
{
        struct ipc_found before;
        uint64_t version;

        begin_agent();
        CHECK(serves(80, 1));
        for (int i = 0; i < 1000 && os_remove_tree(place.place.memory); i++)
                ; /* the agent may be creating a file there at this moment */
        CHECK(access(place.place.memory, F_OK));
        client_init(&client, &place, 82);
        REQUIRE(!client_connect(&client, &place));
        REQUIRE(!find(&client, "", "tag1", &before));
        CHECK(!load(&client, before.version_id, "a", 1, FILE_BYTES, NULL));
        client_done(&client);
        CHECK(serves(81, 2));
        client_init(&client, &place, 83);
        REQUIRE(!client_connect(&client, &place));
        version = begin(&client, "u", NEBULA_FILES_ALL_RANKS);
        CHECK(version && !save(&client, version, "a", 3, FILE_BYTES) && !of_version(&client, IPC_COMMIT, version));
        CHECK(!wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        client_done(&client);
        end_agent();
}

TAP_MAIN(TEST(garbage_and_frames_of_any_size_end_their_connection_only),
         TEST(requests_of_the_right_size_with_wrong_contents_are_refused), TEST(thousands_of_connections_leave_room_again),
         TEST(a_client_that_stops_reading_blocks_no_other_client), TEST(a_waiting_client_that_reads_nothing_blocks_no_other_client),
         TEST(a_request_in_pieces_blocks_no_other_client),
         TEST(a_client_that_asks_during_its_wait_is_disconnected), TEST(clients_that_ask_nothing_cost_no_threads),
         TEST(an_incomplete_save_fails_when_its_trainer_is_gone),
         TEST(without_its_runtime_directory_an_agent_goes_on_and_the_next_one_keeps_off_its_memory),
         TEST(without_its_memory_directory_an_agent_still_saves_and_loads))
