#include <dirent.h>
#include <glob.h>
#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

#include "agent/agent_client.h"
#include "os/bulk.h"
#include "sum/sum.h"
#include "tap.h"

static struct test_place place;

static struct agent *start(void)
{
        struct nebula_error error = { 0 };
        struct agent *agent = NULL;

        if (agent_start(&place.place, true, &agent, &error))
                printf("# %s\n", error.message);
        return agent;
}

static void a_saved_version_is_committed_loaded_and_durable(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_found found;
        uint64_t version;
        int source = -1;

        place_init(&place);
        agent = start();
        REQUIRE(agent);
        client_init(&client, &place, 11);
        REQUIRE(!client_connect(&client, &place));
        version = begin(&client, "global_step5", NEBULA_FILES_ALL_RANKS);
        REQUIRE(version);
        CHECK(find(&client, "", "", &found) == NEBULA_NOT_FOUND);
        CHECK(!save(&client, version, "model.pt", 3, FILE_BYTES));
        CHECK(state_of(&client, version) == NEBULA_STATE_CAPTURING);
        CHECK(!wait_for(&client, version, NEBULA_STATE_CAPTURED, 0));
        CHECK(!of_version(&client, IPC_COMMIT, version));
        CHECK(!wait_for(&client, version, NEBULA_STATE_COMMITTED, 0));
        REQUIRE(!find(&client, "", "", &found));
        CHECK(found.version_id == version && found.step == 5 && !strcmp(found.tag, "global_step5"));
        CHECK(!load(&client, version, "model.pt", 3, FILE_BYTES, &source));
        CHECK(source == IPC_SOURCE_MEMORY);
        CHECK(load(&client, version, "other.pt", 3, FILE_BYTES, NULL) == NEBULA_NOT_FOUND);
        CHECK(strstr(client.error.message, "model.pt"));
        CHECK(!wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        CHECK(state_of(&client, version) == NEBULA_STATE_DURABLE);
        client_done(&client);
        agent_stop(agent, true);

        /* Another agent starts, with nothing in memory. */
        agent = start();
        REQUIRE(agent);
        client_init(&client, &place, 12);
        REQUIRE(!client_connect(&client, &place));
        REQUIRE(!find(&client, "", "", &found));
        CHECK(found.step == 5 && found.state == NEBULA_STATE_DURABLE);
        CHECK(!load(&client, found.version_id, "model.pt", 3, FILE_BYTES, &source));
        CHECK(source == IPC_SOURCE_STORAGE);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void the_first_reader_gets_the_stored_file_and_the_next_one_an_image(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_open request = { .reads_storage = true };
        struct ipc_opened *opened;
        struct ipc_found found;
        uint64_t version;
        int source = -1;
        _Alignas(BULK_PAGE_BYTES) static unsigned char data[FILE_BYTES];
        size_t wrong = 0;

        NEEDS_FILES("an object has no descriptor");
        place_init(&place);
        agent = start();
        client_init(&client, &place, 21);
        REQUIRE(agent && !client_connect(&client, &place));
        REQUIRE(!save_whole(&client, "global_step5", 3, &version));
        CHECK(!wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        client_done(&client);
        agent_stop(agent, true);
        agent = start();
        client_init(&client, &place, 22);
        REQUIRE(agent && !client_connect(&client, &place));
        REQUIRE(!find(&client, "", "", &found));

        request.version_id = found.version_id;
        strcpy(request.name, "model.pt");
        REQUIRE(!ask(&client, IPC_OPEN, &request, sizeof request));
        opened = client.frame.payload;
        CHECK(opened->source == IPC_SOURCE_STORAGE && opened->size == FILE_BYTES && opened->chunk_bytes);
        CHECK(opened->chunk_count == (FILE_BYTES + opened->chunk_bytes - 1) / opened->chunk_bytes);
        REQUIRE(opened->chunk_count == 1);
        CHECK(!bulk_read(client.frame.fd, opened->is_direct, data, false, FILE_BYTES, opened->chunk_bytes, NULL, NULL, NULL));
        CHECK(sum_crc64(0, data, FILE_BYTES) == opened->crc64[0]);
        for (size_t i = 0; i < FILE_BYTES; i++)
                wrong += data[i] != byte_at(3, i);
        CHECK(!wrong);

        CHECK(!ask(&client, IPC_OPEN, &request, sizeof request));
        opened = client.frame.payload;
        CHECK(!opened->chunk_bytes && !opened->chunk_count);
        CHECK(!load(&client, found.version_id, "model.pt", 3, FILE_BYTES, &source));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static bool enter(struct test_client *client, uint64_t nonce)
{
        client_init(client, &place, nonce);
        return !client_connect(client, &place);
}

static void a_part_closes_with_the_next_tag_and_n_files_complete_a_version(void)
{
        struct test_client client;
        struct agent *agent;
        uint64_t first, second, counted;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 21));
        first = begin(&client, "a", NEBULA_FILES_OPEN);
        CHECK(!save(&client, first, "x", 1, 1000));
        CHECK(state_of(&client, first) == NEBULA_STATE_CAPTURING);
        second = begin(&client, "b", NEBULA_FILES_OPEN);
        CHECK(second != first);
        CHECK(state_of(&client, first) >= NEBULA_STATE_COMMITTED);
        CHECK(!save(&client, second, "x", 2, 1000));
        CHECK(!flush(&client, "", 10000));
        CHECK(state_of(&client, second) == NEBULA_STATE_DURABLE);
        counted = begin(&client, "c", 2);
        CHECK(!save(&client, counted, "x", 3, 1000));
        CHECK(!of_version(&client, IPC_COMMIT, counted));
        CHECK(!save(&client, counted, "x", 4, 1000)); /* the same name again replaces the file and does not count twice */
        CHECK(state_of(&client, counted) == NEBULA_STATE_CAPTURING);
        CHECK(!save(&client, counted, "y", 5, 1000));
        CHECK(!wait_for(&client, counted, NEBULA_STATE_COMMITTED, 1000));
        CHECK(!load(&client, counted, "x", 4, 1000, NULL));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void a_tag_written_again_is_a_version_that_carries_over(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_found found;
        struct ipc_granted loan;
        uint64_t first;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 31));
        first = begin(&client, "last", NEBULA_FILES_ALL_RANKS);
        CHECK(!save(&client, first, "model.pt", 1, FILE_BYTES));
        CHECK(!save(&client, first, "optimizer.pt", 2, FILE_BYTES));
        CHECK(!of_version(&client, IPC_COMMIT, first));
        CHECK(!wait_for(&client, first, NEBULA_STATE_DURABLE, 10000));
        CHECK(begin(&client, "last", NEBULA_FILES_ALL_RANKS) == first);
        CHECK(!copy_image(&client, first, "model.pt", 3, FILE_BYTES, &loan));
        CHECK(loan.version_id != first);
        CHECK(!captured(&client, loan.image_id));
        CHECK(!find(&client, "", "last", &found) && found.version_id == first); /* not visible until whole */
        CHECK(!of_version(&client, IPC_COMMIT, loan.version_id));
        REQUIRE(!find(&client, "", "last", &found));
        CHECK(found.version_id == loan.version_id && found.writing == 2);
        CHECK(!load(&client, found.version_id, "model.pt", 3, FILE_BYTES, NULL));
        CHECK(!load(&client, found.version_id, "optimizer.pt", 2, FILE_BYTES, NULL));
        CHECK(!flush(&client, "last", 10000));
        client_done(&client);
        agent_stop(agent, true);

        agent = start();
        REQUIRE(agent && enter(&client, 32));
        REQUIRE(!find(&client, "", "", &found));
        CHECK(found.writing == 2);
        CHECK(!load(&client, found.version_id, "model.pt", 3, FILE_BYTES, NULL));
        CHECK(!load(&client, found.version_id, "optimizer.pt", 2, FILE_BYTES, NULL));
        /* An agent that knows the earlier writings only from storage makes a third one. */
        CHECK(!save_whole(&client, "last", 4, NULL));
        CHECK(!flush(&client, "last", 10000));
        REQUIRE(!find(&client, "", "", &found));
        CHECK(found.writing == 3);
        CHECK(!load(&client, found.version_id, "model.pt", 4, FILE_BYTES, NULL));
        CHECK(!load(&client, found.version_id, "optimizer.pt", 2, FILE_BYTES, NULL));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void a_tag_that_only_storage_has_is_rewritten_as_its_writer_asks(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_found found;
        struct ipc_granted loan;
        uint64_t version;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 35));
        CHECK(!save_whole(&client, "t", 1, NULL) && !flush(&client, "t", 10000));
        client_done(&client);
        agent_stop(agent, true);
        agent = start();
        REQUIRE(agent && enter(&client, 36));
        REQUIRE(!find(&client, "", "t", &found));
        version = begin(&client, "t", 2);
        CHECK(version == found.version_id);
        CHECK(!copy_image(&client, version, "x", 2, 1000, &loan) && !captured(&client, loan.image_id));
        CHECK(!of_version(&client, IPC_COMMIT, loan.version_id));
        CHECK(state_of(&client, loan.version_id) == NEBULA_STATE_CAPTURING); /* two files were announced */
        CHECK(!save(&client, loan.version_id, "y", 3, 1000));
        CHECK(!flush(&client, "t", 10000));
        REQUIRE(!find(&client, "", "t", &found));
        CHECK(found.writing == 2 && !load(&client, found.version_id, "model.pt", 1, FILE_BYTES, NULL));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

/* As if an agent was killed after it had logged the first loan, and the trainer asks the next agent again. */
static void an_image_that_is_asked_for_again_is_the_only_one_waited_for(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_granted lost, loan;
        uint64_t version;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 37));
        version = begin(&client, "t", NEBULA_FILES_ALL_RANKS);
        CHECK(!copy_image(&client, version, "x", 2, 1000, &lost)); /* and never says that it is captured */
        CHECK(!copy_image(&client, version, "x", 3, 1000, &loan) && !captured(&client, loan.image_id));
        CHECK(!of_version(&client, IPC_COMMIT, loan.version_id));
        CHECK(!wait_for(&client, loan.version_id, NEBULA_STATE_COMMITTED, 5000));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

/* The file is saved again while it is still being copied, so both copies run for a while. */
static void an_image_that_was_requested_again_is_lent_only_once(void)
{
        struct test_client zero, one;
        struct agent *agent;
        struct ipc_granted first, again, other;
        uint64_t version;

        place_init(&place);
        agent = start();
        client_init(&zero, &place, 39);
        client_init(&one, &place, 40);
        zero.hello.world = one.hello.world = zero.hello.local_world = one.hello.local_world = 2;
        one.hello.rank = 1;
        REQUIRE(agent && !client_connect(&zero, &place) && !client_connect(&one, &place));
        version = begin(&zero, "t", NEBULA_FILES_ALL_RANKS);
        CHECK(!copy_image(&zero, version, "x", 2, 1000, &first) && !copy_image(&zero, version, "x", 3, 1000, &again));
        CHECK(!copy_image(&one, version, "y", 4, 1000, &other) && other.image_id != first.image_id);
        CHECK(!copy_image(&zero, version, "z", 5, 1000, &other) && other.image_id != first.image_id);
        client_done(&zero);
        client_done(&one);
        agent_stop(agent, true);
        place_done(&place);
}

static void a_version_of_two_ranks_waits_for_both_and_either_may_save_nothing(void)
{
        struct test_client zero, one;
        struct agent *agent;
        uint64_t version, again;
        struct ipc_granted loan;

        place_init(&place);
        agent = start();
        client_init(&zero, &place, 41);
        client_init(&one, &place, 42);
        zero.hello.world = one.hello.world = 2;
        one.hello.rank = 1;
        REQUIRE(agent && !client_connect(&zero, &place) && !client_connect(&one, &place));
        version = begin(&zero, "t", NEBULA_FILES_ALL_RANKS);
        CHECK(begin(&one, "t", NEBULA_FILES_ALL_RANKS) == version);
        CHECK(!save(&zero, version, "zero.pt", 1, 5000));
        CHECK(!of_version(&zero, IPC_COMMIT, version));
        CHECK(state_of(&zero, version) == NEBULA_STATE_CAPTURING);
        CHECK(wait_for(&zero, version, NEBULA_STATE_COMMITTED, 20) == NEBULA_TIMEOUT);
        CHECK(!wait_for(&zero, version, NEBULA_STATE_CAPTURED, 0));
        CHECK(!of_version(&one, IPC_COMMIT, version));
        CHECK(!wait_for(&zero, version, NEBULA_STATE_COMMITTED, 0));

        /* The tag is written again. Rank 1 saves nothing and commits before rank 0 has begun. */
        CHECK(begin(&one, "t", NEBULA_FILES_ALL_RANKS) == version);
        CHECK(!of_version(&one, IPC_COMMIT, version));
        again = begin(&zero, "t", NEBULA_FILES_ALL_RANKS);
        CHECK(!copy_image(&zero, again, "zero.pt", 2, 5000, &loan) && !captured(&zero, loan.image_id));
        CHECK(!of_version(&zero, IPC_COMMIT, loan.version_id));
        CHECK(!wait_for(&zero, loan.version_id, NEBULA_STATE_COMMITTED, 0));
        client_done(&zero);
        client_done(&one);
        agent_stop(agent, true);
        place_done(&place);
}

/* The number of a process that has ended, like a rank that a framework killed or that ran out of memory. */
static uint32_t dead_pid(void)
{
        pid_t pid = fork();

        if (!pid)
                _exit(0);
        waitpid(pid, NULL, 0);
        return (uint32_t)pid;
}

static bool enter_as(struct test_client *client, uint64_t nonce, uint32_t rank, uint32_t pid)
{
        client_init(client, &place, nonce);
        client->hello.world = client->hello.local_world = 2;
        client->hello.rank = rank;
        client->hello.pid = pid;
        strcpy(client->hello.run, "r");
        return !client_connect(client, &place);
}

static void a_version_fails_when_a_rank_that_it_waits_for_ends_before_it_began(void)
{
        static struct test_client first, second;
        struct agent *agent;
        struct ipc_granted loan;
        uint64_t version;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter_as(&first, 401, 0, (uint32_t)getpid()) && enter_as(&second, 402, 1, dead_pid()));
        version = begin(&first, "global_step1", NEBULA_FILES_ALL_RANKS);
        CHECK(!save(&first, version, "a", 1, 5000) && !of_version(&first, IPC_COMMIT, version));
        CHECK(wait_for(&first, version, NEBULA_STATE_COMMITTED, 100) == NEBULA_TIMEOUT);
        client_done(&second);
        CHECK(wait_for(&first, version, NEBULA_STATE_COMMITTED, 20000) == NEBULA_FAILED);
        CHECK(strstr(first.error.message, "rank 1 "));

        /* It ends before the others begin. */
        version = begin(&first, "global_step2", NEBULA_FILES_ALL_RANKS);
        CHECK(!save(&first, version, "a", 2, 5000) && of_version(&first, IPC_COMMIT, version) != NEBULA_TIMEOUT);
        CHECK(wait_for(&first, version, NEBULA_STATE_COMMITTED, 20000) == NEBULA_FAILED);
        CHECK(strstr(first.error.message, "rank 1 "));

        /* One rank may save all N files. */
        version = begin(&first, "global_step3", 1);
        CHECK(!save(&first, version, "a", 3, 5000) && !wait_for(&first, version, NEBULA_STATE_COMMITTED, 20000));

        /* It comes back, in the same run. */
        REQUIRE(enter_as(&second, 403, 1, (uint32_t)getpid()));
        version = begin(&first, "global_step4", NEBULA_FILES_ALL_RANKS);
        CHECK(!save(&first, version, "a", 4, 5000) && !of_version(&first, IPC_COMMIT, version));
        CHECK(wait_for(&first, version, NEBULA_STATE_COMMITTED, 100) == NEBULA_TIMEOUT);
        CHECK(!copy_image(&second, version, "b", 5, 5000, &loan) && !captured(&second, loan.image_id));
        CHECK(!of_version(&second, IPC_COMMIT, version) && !wait_for(&first, version, NEBULA_STATE_COMMITTED, 20000));
        client_done(&second);
        client_done(&first);
        agent_stop(agent, true);
        place_done(&place);
}

/* Containers: the number by which the agent sees the process of a connection, and that process's pid namespace. The agent itself is in the
 * first. */
static atomic_bool is_contained;
static atomic_uint seen_pid;

static int peer_of_container(int fd, uint32_t *ret_uid, uint32_t *ret_pid)
{
        int result = os_linux.peer(fd, ret_uid, ret_pid);

        if (is_contained)
                *ret_pid = seen_pid;
        return result;
}

static int namespace_of_container(const char *path, char *text, size_t size)
{
        if (!is_contained || strncmp(path, "/proc/", 6) || !strstr(path, "/ns/pid"))
                return os_linux.readlink(path, text, size);
        return snprintf(text, size, "pid:[%d]", strstr(path, "self") ? 1 : 2);
}

/* As start, with containers from the moment on that is_contained is set. */
static struct agent *start_with_containers(void)
{
        static struct os_table table;

        if (!table.peer) {
                table = os_linux;
                table.peer = peer_of_container;
                table.readlink = namespace_of_container;
        }
        is_contained = false;
        os = &table;
        return start();
}

static void stop_with_containers(struct agent *agent)
{
        agent_stop(agent, true);
        os = &os_linux;
}

/* Whether the part of rank 1 stays open when rank 0 searches the newest version. Rank 1 calls itself `own_pid`, and the agent sees it as
 * `as_pid`. */
static bool stays_open(uint32_t own_pid, uint32_t as_pid)
{
        static struct test_client first, second;
        static struct ipc_find find;
        struct agent *agent;
        uint64_t version;
        bool is_open;

        place_init(&place);
        agent = start_with_containers();
        seen_pid = (uint32_t)getpid();
        if (!agent || !enter_as(&first, 501, 0, (uint32_t)getpid()))
                abort();
        is_contained = true;
        seen_pid = as_pid;
        if (!enter_as(&second, 502, 1, own_pid))
                abort();
        is_contained = false;
        version = begin(&first, "step1", NEBULA_FILES_OPEN);
        CHECK(begin(&second, "step1", NEBULA_FILES_OPEN) == version);
        CHECK(!save(&first, version, "a", 1, 5000) && !save(&second, version, "b", 2, 5000) && !of_version(&first, IPC_COMMIT, version));
        is_open = ask(&first, IPC_FIND, &find, sizeof find) == NEBULA_NOT_FOUND;
        CHECK(!of_version(&second, IPC_COMMIT, version) && !wait_for(&first, version, NEBULA_STATE_COMMITTED, 20000));
        client_done(&second);
        client_done(&first);
        stop_with_containers(agent);
        place_done(&place);
        return is_open;
}

/* fault: as test_a_search_closes_no_part_of_a_live_rank_in_another_pid_namespace */
static void a_rank_in_another_pid_namespace_is_judged_by_what_the_agent_sees_of_it(void)
{
        CHECK(stays_open((uint32_t)getpid(), (uint32_t)getpid()));
        CHECK(stays_open(dead_pid(), (uint32_t)getpid()));  /* no process has that number in this namespace */
        CHECK(stays_open(dead_pid(), 0));                   /* the agent cannot see the process */
        CHECK(!stays_open((uint32_t)getpid(), dead_pid())); /* in this namespace another process has that number */
}

/* fault: as test_a_search_closes_no_part_of_a_live_rank_in_another_pid_namespace */
static void trainers_of_two_containers_that_have_one_number_are_told_apart(void)
{
        static struct test_client first, second;
        struct agent *agent;

        place_init(&place);
        agent = start_with_containers();
        is_contained = true;
        seen_pid = (uint32_t)getpid();
        REQUIRE(agent && enter_as(&first, 601, 0, 7));
        seen_pid = (uint32_t)getppid();
        CHECK(!enter_as(&second, 602, 0, 7) && strstr(second.error.message, "already is rank 0"));
        client_done(&second);
        seen_pid = (uint32_t)getpid(); /* the same process, which has executed the program again */
        CHECK(enter_as(&second, 603, 0, 7));
        is_contained = false;
        client_done(&second);
        client_done(&first);
        stop_with_containers(agent);
        place_done(&place);
}

/* Saves one file as the version global_step<step>, and waits until that is durable. Returns the file's image. */
static uint64_t save_durable(struct test_client *client, unsigned step, uint64_t *ret_version)
{
        struct ipc_granted loan = { 0 };
        char tag[32];

        snprintf(tag, sizeof tag, "global_step%u", step);
        CHECK(!copy_image(client, begin(client, tag, NEBULA_FILES_ALL_RANKS), "m", step, FILE_BYTES, &loan));
        CHECK(!captured(client, loan.image_id));
        CHECK(!of_version(client, IPC_COMMIT, loan.version_id));
        CHECK(!wait_for(client, loan.version_id, NEBULA_STATE_DURABLE, 10000));
        if (ret_version)
                *ret_version = loan.version_id;
        return loan.image_id;
}

static int image_count(void)
{
        DIR *directory = opendir(place.place.memory);
        int count = 0;

        for (struct dirent *entry; directory && (entry = readdir(directory));)
                count += strstr(entry->d_name, ".img") != NULL;
        if (directory)
                closedir(directory);
        return count;
}

static uint64_t image_bytes(void)
{
        DIR *directory = opendir(place.place.memory);
        struct stat info;
        uint64_t bytes = 0;

        for (struct dirent *entry; directory && (entry = readdir(directory));)
                if (strstr(entry->d_name, ".img") && !fstatat(dirfd(directory), entry->d_name, &info, 0))
                        bytes += (uint64_t)info.st_blocks * 512;
        if (directory)
                closedir(directory);
        return bytes;
}

/* After the first version the page maker makes a spare image, with its pages. */
static void await_spare(void)
{
        for (int i = 0; i < 6000 && (image_count() < 2 || image_bytes() < 2 * FILE_BYTES); i++)
                os->sleep_ms(10);
        os->sleep_ms(20); /* it becomes free */
}

static void steady_memory_is_the_retained_versions_and_their_images_serve_again(void)
{
        struct test_client client;
        struct agent *agent;
        uint64_t ids[8];

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 51));
        for (unsigned i = 0; i < 8; i++) {
                ids[i] = save_durable(&client, i, NULL);
                await_spare();
        }
        for (unsigned i = 4; i < 8; i++)
                CHECK(ids[i] == ids[i - 2] && ids[i] != ids[i - 1]);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void an_image_that_a_loader_has_mapped_is_never_written_again(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_open request = { 0 };
        unsigned char *data;
        size_t changed = 0;
        uint64_t version;
        char tag[32];

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 61));
        REQUIRE(!save_whole(&client, "global_step1", 1, &version));
        request.version_id = version;
        strcpy(request.name, "model.pt");
        REQUIRE(!ask(&client, IPC_OPEN, &request, sizeof request));
        data = mmap(NULL, FILE_BYTES, PROT_READ, MAP_PRIVATE, client.frame.fd, 0);
        REQUIRE(data != MAP_FAILED);
        CHECK(mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, client.frame.fd, 0) == MAP_FAILED);
        for (unsigned i = 2; i < 7; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i);
                CHECK(!save_whole(&client, tag, i, &version));
                CHECK(!wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        }
        for (size_t i = 0; i < FILE_BYTES; i++)
                changed += data[i] != byte_at(1, i);
        CHECK(!changed);
        munmap(data, FILE_BYTES);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void an_image_that_loaders_have_given_back_serves_again(void)
{
        struct test_client client, reader;
        struct agent *agent;
        struct ipc_open request = { 0 };
        uint64_t ids[8];
        void *data;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 63));
        client_init(&reader, &place, 64);
        reader.hello.role = IPC_ROLE_READER;
        REQUIRE(!client_connect(&reader, &place));
        strcpy(request.name, "m");
        for (unsigned i = 0; i < 8; i++) {
                ids[i] = save_durable(&client, i, &request.version_id);
                REQUIRE(!ask(&reader, IPC_OPEN, &request, sizeof request));
                data = mmap(NULL, FILE_BYTES, PROT_READ, MAP_PRIVATE, reader.frame.fd, 0);
                REQUIRE(data != MAP_FAILED);
                ipc_frame_done(&reader.frame);
                munmap(data, FILE_BYTES);
                await_spare();
        }
        for (unsigned i = 4; i < 8; i++)
                CHECK(ids[i] == ids[i - 2] && ids[i] != ids[i - 1]);
        client_done(&reader);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

/* After a resume, no save can use the images that the trainer has mapped. */
static void a_load_has_another_image_made_for_the_saves_to_come(void)
{
        struct test_client client;
        struct agent *agent;
        uint64_t version;

        place_init(&place);
        agent = start();
        client_init(&client, &place, 62);
        client.hello.retention_count = 1;
        REQUIRE(agent && !client_connect(&client, &place));
        for (unsigned i = 1; i < 3; i++) {
                REQUIRE(!save_whole(&client, i == 1 ? "global_step1" : "global_step2", i, &version));
                CHECK(!wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        }
        for (int i = 0; i < 6000 && image_count() != 1; i++)
                os->sleep_ms(10);
        os->sleep_ms(200);
        CHECK(image_count() == 1); /* as many as versions are kept */
        CHECK(!load(&client, version, "model.pt", 2, FILE_BYTES, NULL));
        for (int i = 0; i < 5000 && image_count() == 1; i++)
                os->sleep_ms(10);
        os->sleep_ms(100);
        CHECK(image_count() == 2);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void a_file_that_can_never_fit_is_refused_with_both_numbers(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_granted loan;
        uint64_t version;

        place_init(&place);
        agent = start();
        client_init(&client, &place, 71);
        client.hello.memory_bytes = 8 << 20;
        client.hello.persist_path[0] = 0;
        REQUIRE(agent && !client_connect(&client, &place));
        version = begin(&client, "big", NEBULA_FILES_ALL_RANKS);
        CHECK(copy_image(&client, version, "m", 1, 9 << 20, &loan) == NEBULA_NO_MEMORY);
        CHECK(strstr(client.error.message, "10 MiB") && strstr(client.error.message, "8 MiB"));
        /* The only complete version is in memory only, so it stays. A second one that needs its memory fails at once. */
        CHECK(!copy_image(&client, version, "m", 1, 5 << 20, &loan) && !captured(&client, loan.image_id));
        CHECK(!of_version(&client, IPC_COMMIT, loan.version_id));
        version = begin(&client, "second", NEBULA_FILES_ALL_RANKS);
        CHECK(copy_image(&client, version, "m", 1, 5 << 20, &loan) == NEBULA_NO_MEMORY);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void a_full_tier_waits_for_what_becomes_durable(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_granted loan;
        char tag[32];

        place_init(&place);
        agent = start();
        client_init(&client, &place, 72);
        client.hello.memory_bytes = 7 << 20; /* memory for one image of 6 MiB, not for two */
        REQUIRE(agent && !client_connect(&client, &place));
        for (unsigned i = 1; i < 5; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i);
                CHECK(!copy_image(&client, begin(&client, tag, NEBULA_FILES_ALL_RANKS), "m", i, 5 << 20, &loan));
                CHECK(!captured(&client, loan.image_id) && !of_version(&client, IPC_COMMIT, loan.version_id));
        }
        CHECK(!flush(&client, "", 10000));
        CHECK(!load(&client, loan.version_id, "m", 4, 5 << 20, NULL));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static enum nebula_status captured_and_committed(struct test_client *client, uint64_t image)
{
        struct ipc_captured request = { .image_id = image, .commits = true };

        return ask(client, IPC_CAPTURED, &request, sizeof request);
}

/* The thread sanitizer checks this test, too. */
static void waits_are_answered_in_any_order(void)
{
        static struct test_client client, waiting[2];
        struct agent *agent;
        char tag[32];

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 79) && enter(&waiting[0], 79) && enter(&waiting[1], 79));
        for (unsigned i = 0; i < 4; i++) {
                struct ipc_wait request = { .timeout_ms = 10000, .state = NEBULA_STATE_COMMITTED };

                snprintf(tag, sizeof tag, "global_step%u", i);
                request.version_id = begin(&client, tag, NEBULA_FILES_ALL_RANKS);
                for (unsigned j = 0; j < 2; j++) {
                        CHECK(!ipc_send(waiting[(i + j) % 2].fd, IPC_WAIT, NEBULA_OK, &request, sizeof request, -1, NULL));
                        usleep(20000);
                }
                CHECK(!save(&client, request.version_id, "m", i, 5000) && !of_version(&client, IPC_COMMIT, request.version_id));
                for (unsigned j = 0; j < 2; j++)
                        CHECK(!ipc_receive(waiting[j].fd, &waiting[j].frame, NULL) && !waiting[j].frame.header.status);
        }
        client_done(&waiting[0]);
        client_done(&waiting[1]);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

/* The answer to the first message may be lost with a killed agent. */
static void a_file_that_is_whole_may_be_said_to_be_so_again(void)
{
        static struct test_client client;
        struct agent *agent;
        struct ipc_granted loan = { 0 };
        uint64_t version;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 78));
        version = begin(&client, "t", NEBULA_FILES_ALL_RANKS);
        CHECK(!copy_image(&client, version, "m", 1, 5000, &loan) && !captured(&client, loan.image_id));
        CHECK(!captured(&client, loan.image_id) && state_of(&client, version) < NEBULA_STATE_COMMITTED);
        CHECK(!captured_and_committed(&client, loan.image_id));
        CHECK(!wait_for(&client, version, NEBULA_STATE_COMMITTED, 10000));
        CHECK(!captured_and_committed(&client, loan.image_id));
        CHECK(begin(&client, "t", NEBULA_FILES_ALL_RANKS) == version); /* no other version was begun */
        CHECK(!load(&client, version, "m", 1, 5000, NULL));
        CHECK(captured(&client, loan.image_id + 1) == NEBULA_NOT_FOUND);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

/* Another connection of a session. It asks while the first one copies. */
struct second {
        struct test_client client;
        pthread_t thread;
        enum nebula_status status;
};

static void *save_second(void *argument)
{
        struct second *second = argument;
        struct ipc_granted loan;

        second->status = copy_image(&second->client, begin(&second->client, "global_step2", NEBULA_FILES_ALL_RANKS), "m", 2, 5 << 20, &loan);
        return NULL;
}

static void a_full_tier_waits_for_a_copy_that_may_bring_its_commit(void)
{
        static struct test_client client;
        static struct second second;
        struct agent *agent;
        struct ipc_granted loan;

        place_init(&place);
        agent = start();
        client_init(&client, &place, 75);
        client_init(&second.client, &place, 75);
        client.hello.memory_bytes = second.client.hello.memory_bytes = 7 << 20; /* memory for one image of 6 MiB, not for two */
        REQUIRE(agent && !client_connect(&client, &place) && !client_connect(&second.client, &place));
        CHECK(!copy_image(&client, begin(&client, "global_step1", NEBULA_FILES_ALL_RANKS), "m", 1, 5 << 20, &loan));
        REQUIRE(!pthread_create(&second.thread, NULL, save_second, &second));
        usleep(200000);
        CHECK(!captured_and_committed(&client, loan.image_id));
        pthread_join(second.thread, NULL);
        CHECK(!second.status);
        client_done(&second.client);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void *flush_second(void *argument)
{
        struct second *second = argument;

        second->status = flush(&second->client, "", 10000);
        return NULL;
}

/* Rank 1 knows that rank 0 has committed, for example by a barrier. The agent hears of that commit with the last copy. */
static void a_flush_waits_for_another_rank_s_copy_that_may_bring_its_commit(void)
{
        static struct test_client client;
        static struct second second;
        struct agent *agent;
        struct ipc_granted loan;
        uint64_t version;

        place_init(&place);
        agent = start();
        client_init(&client, &place, 76);
        client_init(&second.client, &place, 77);
        client.hello.world = second.client.hello.world = client.hello.local_world = second.client.hello.local_world = 2;
        client.hello.persist_interval_s = second.client.hello.persist_interval_s = 1000;
        second.client.hello.rank = 1;
        REQUIRE(agent && !client_connect(&client, &place) && !client_connect(&second.client, &place));
        version = begin(&second.client, "t", NEBULA_FILES_ALL_RANKS);
        CHECK(!copy_image(&client, begin(&client, "t", NEBULA_FILES_ALL_RANKS), "a", 1, 5000, &loan));
        CHECK(!save(&second.client, version, "b", 2, 5000) && !of_version(&second.client, IPC_COMMIT, version));
        REQUIRE(!pthread_create(&second.thread, NULL, flush_second, &second));
        usleep(200000);
        CHECK(!captured_and_committed(&client, loan.image_id));
        pthread_join(second.thread, NULL);
        CHECK(!second.status && state_of(&client, version) == NEBULA_STATE_DURABLE);
        client_done(&second.client);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void a_rank_that_commits_alone_is_told_whom_a_version_waits_for(void)
{
        static struct test_client client, other;
        struct ipc_watch request = { .timeout_ms = 10000 };
        const struct ipc_event *event;
        struct agent *agent;
        uint64_t version;
        int64_t begun;

        setenv("NEBULA_TAKEOVER_S", "1", 1);
        place_init(&place);
        agent = start();
        client_init(&client, &place, 78);
        client_init(&other, &place, 79);
        client.hello.world = other.hello.world = client.hello.local_world = other.hello.local_world = 3;
        other.hello.rank = 1;
        REQUIRE(agent && !client_connect(&client, &place) && !client_connect(&other, &place));
        version = begin(&client, "t", NEBULA_FILES_ALL_RANKS);
        CHECK(!save(&client, version, "a", 1, 5000));
        CHECK(!flush(&client, "", 10000)); /* this rank has not committed: it may be about to save more */
        CHECK(!of_version(&client, IPC_COMMIT, version));
        CHECK(flush(&client, "", 100) == NEBULA_TIMEOUT && strstr(client.error.message, "waits for ranks 1, 2 of 3"));
        CHECK(!flush(&other, "", 100)); /* the other rank has no part in the version */
        begun = os->now_ns();
        CHECK(flush(&client, "", -1) == NEBULA_TIMEOUT && strstr(client.error.message, "waits for ranks 1, 2 of 3"));
        CHECK(flush(&client, "", -1) == NEBULA_TIMEOUT); /* and does not wait for it a second time */
        CHECK(os->now_ns() - begun < 5000000000 && strstr(client.error.message, "world=1"));
        CHECK(!ask(&client, IPC_WATCH, &request, sizeof request));
        event = client.frame.payload;
        CHECK(event->kind == NEBULA_EVENT_LATE && !strcmp(event->tag, "t") && !strcmp(event->text, "waits for ranks 1, 2 of 3"));
        request = (struct ipc_watch){ .since = event->at, .timeout_ms = 1200 };
        CHECK(ask(&client, IPC_WATCH, &request, sizeof request) == NEBULA_TIMEOUT); /* the event comes once */
        CHECK(state_of(&client, version) == NEBULA_STATE_CAPTURING);
        client_done(&other);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
        unsetenv("NEBULA_TAKEOVER_S");
}

/* Otherwise the next writing of the tag would count that rank's part as closed before it has saved. */
static void a_commit_behind_the_file_that_completed_a_version_is_of_that_version(void)
{
        static struct test_client client, other;
        struct agent *agent;
        uint64_t version, first;

        place_init(&place);
        agent = start();
        client_init(&client, &place, 80);
        client_init(&other, &place, 81);
        client.hello.world = other.hello.world = client.hello.local_world = other.hello.local_world = 2;
        other.hello.rank = 1;
        REQUIRE(agent && !client_connect(&client, &place) && !client_connect(&other, &place));
        first = begin(&client, "t", 2);
        CHECK(!save(&client, first, "a", 1, 5000) && !save(&other, begin(&other, "t", 2), "b", 2, 5000));
        CHECK(!of_version(&other, IPC_COMMIT, first) && !of_version(&client, IPC_COMMIT, first));
        CHECK(state_of(&client, first) >= NEBULA_STATE_COMMITTED);
        version = begin(&client, "t", NEBULA_FILES_ALL_RANKS);
        CHECK(!save(&client, version, "a", 3, 5000));
        CHECK(!flush(&other, "t", 10000)); /* the earlier writing */
        version = begin(&client, "t", NEBULA_FILES_ALL_RANKS);
        CHECK(version != first && !of_version(&client, IPC_COMMIT, version));
        CHECK(state_of(&client, version) < NEBULA_STATE_COMMITTED);
        client_done(&other);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void on_full_skip_fails_that_version_and_says_so(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_granted loan;
        uint64_t version;

        place_init(&place);
        agent = start();
        client_init(&client, &place, 73);
        client.hello.memory_bytes = 7 << 20;
        client.hello.persist_path[0] = 0;
        client.hello.on_full = NEBULA_ON_FULL_SKIP;
        REQUIRE(agent && !client_connect(&client, &place));
        CHECK(!copy_image(&client, begin(&client, "a", NEBULA_FILES_ALL_RANKS), "m", 1, 5 << 20, &loan));
        CHECK(!captured(&client, loan.image_id) && !of_version(&client, IPC_COMMIT, loan.version_id));
        version = begin(&client, "b", NEBULA_FILES_ALL_RANKS);
        CHECK(copy_image(&client, version, "m", 2, 5 << 20, &loan) == NEBULA_NO_MEMORY);
        CHECK(state_of(&client, version) == NEBULA_STATE_FAILED);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static enum nebula_status first_image(struct test_client *client, const char *tag, const char *name, int64_t count, uint64_t size)
{
        struct ipc_image request = { .size = size, .format = IPC_FORMAT_RAW, .file_count = count };

        snprintf(request.tag, sizeof request.tag, "%s", tag);
        snprintf(request.name, sizeof request.name, "%s", name);
        return ask(client, IPC_IMAGE, &request, sizeof request);
}

static void a_first_image_begins_its_version_and_a_refusal_names_it(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_granted granted;
        uint64_t version;

        place_init(&place);
        agent = start();
        client_init(&client, &place, 74);
        client.hello.memory_bytes = 7 << 20;
        client.hello.persist_path[0] = 0;
        client.hello.on_full = NEBULA_ON_FULL_SKIP;
        REQUIRE(agent && !client_connect(&client, &place));
        CHECK(!first_image(&client, "a", "m", NEBULA_FILES_ALL_RANKS, 5 << 20));
        granted = *(const struct ipc_granted *)client.frame.payload;
        CHECK(begin(&client, "a", NEBULA_FILES_ALL_RANKS) == granted.version_id); /* that one and no other */
        CHECK(!captured(&client, granted.image_id) && !of_version(&client, IPC_COMMIT, granted.version_id));
        CHECK(state_of(&client, granted.version_id) == NEBULA_STATE_COMMITTED);
        CHECK(first_image(&client, "b", "m", NEBULA_FILES_ALL_RANKS, 5 << 20) == NEBULA_NO_MEMORY);
        version = ipc_refused_version(&client.frame);
        CHECK(version && state_of(&client, version) == NEBULA_STATE_FAILED);
        CHECK(of_version(&client, IPC_COMMIT, version) == NEBULA_FAILED);
        CHECK(first_image(&client, "b", "", NEBULA_FILES_ALL_RANKS, 1) == NEBULA_INVALID && !ipc_refused_version(&client.frame));
        CHECK(first_image(&client, "", "m", NEBULA_FILES_ALL_RANKS, 1) == NEBULA_INVALID);
        CHECK(first_image(&client, "c", "m", 0, 1) == NEBULA_INVALID && first_image(&client, "c", "m", -3, 1) == NEBULA_INVALID);
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void a_failing_storage_costs_nothing_and_is_tried_again(void)
{
        struct test_client client;
        struct agent *agent;
        uint64_t version;

        place_init(&place);
        storage_block(place.storage);
        agent = start();
        REQUIRE(agent && enter(&client, 81));
        REQUIRE(!save_whole(&client, "global_step1", 1, &version));
        CHECK(wait_for(&client, version, NEBULA_STATE_DURABLE, 300) == NEBULA_TIMEOUT);
        CHECK(strstr(client.error.message, "storage fails"));
        CHECK(state_of(&client, version) == NEBULA_STATE_COMMITTED);
        CHECK(!load(&client, version, "model.pt", 1, FILE_BYTES, NULL));
        storage_unblock(place.storage);
        CHECK(!wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void a_damaged_newest_version_gives_way_to_the_older_one(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_found found;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 91));
        CHECK(!save_whole(&client, "global_step1", 1, NULL) && !save_whole(&client, "global_step2", 2, NULL));
        CHECK(!flush(&client, "", 10000));
        client_done(&client);
        agent_stop(agent, true);
        storage_write(place.storage, "global_step2/model.pt", "torn", 4);
        agent = start();
        REQUIRE(agent && enter(&client, 92));
        REQUIRE(!find(&client, "", "", &found));
        CHECK(found.step == 1);
        CHECK(find(&client, "", "global_step2", &found) == NEBULA_CORRUPT);
        CHECK(strstr(client.error.message, "model.pt"));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void a_flipped_byte_in_storage_is_found_by_file_and_offset(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_found found;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 93));
        CHECK(!save_whole(&client, "global_step1", 1, NULL) && !flush(&client, "", 10000));
        client_done(&client);
        agent_stop(agent, true);
        storage_damage(place.storage, "global_step1/model.pt", 1234);
        agent = start();
        REQUIRE(agent && enter(&client, 94));
        REQUIRE(!find(&client, "", "", &found));
        CHECK(load(&client, found.version_id, "model.pt", 1, FILE_BYTES, NULL) == NEBULA_CORRUPT);
        CHECK(strstr(client.error.message, "model.pt"));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void storage_retention_keeps_the_last_and_the_multiples(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_found found;
        uint64_t version;
        char tag[32];

        place_init(&place);
        agent = start();
        client_init(&client, &place, 95);
        client.hello.keep_last = 2;
        client.hello.keep_every = 4;
        REQUIRE(agent && !client_connect(&client, &place));
        for (unsigned i = 3; i < 9; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i);
                CHECK(!save_whole(&client, tag, i, &version) && !wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        }
        client_done(&client);
        agent_drain(agent);
        agent_stop(agent, true);
        agent = start();
        REQUIRE(agent && enter(&client, 96));
        for (unsigned i = 3; i < 9; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i);
                CHECK((find(&client, "", tag, &found) == NEBULA_OK) == (i == 4 || i >= 7));
        }
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

/* A version with a metric. `metric`: its JSON value. */
static bool save_with_metric(struct test_client *client, const char *tag, const char *metric)
{
        char text[128];
        struct ipc_granted loan;
        uint64_t version = begin(client, tag, NEBULA_FILES_ALL_RANKS);
        size_t size = (size_t)snprintf(text, sizeof text, "{\"nebula\":\"metadata\",\"metrics\":{\"loss\":%s},\"metadata\":{}}", metric);

        if (!version || copy_image(client, version, "nebula-metadata.json", 1, size, &loan) ||
            pwrite(client->frame.fd, text, size, 0) != (ssize_t)size)
                return false;
        return !captured(client, loan.image_id) && !of_version(client, IPC_COMMIT, version) && !wait_for(client, version, NEBULA_STATE_DURABLE, 10000);
}

/* The next event of that kind after `*at`, which becomes its time. */
static const struct ipc_event *next_event(struct test_client *client, enum nebula_event_kind kind, double *at)
{
        for (;;) {
                struct ipc_watch request = { .since = *at, .timeout_ms = 10000 };
                const struct ipc_event *event = client->frame.payload;

                if (ask(client, IPC_WATCH, &request, sizeof request))
                        return NULL;
                event = client->frame.payload;
                *at = event->at;
                if (event->kind == (uint32_t)kind)
                        return event;
        }
}

static void the_best_by_a_metric_stay_and_an_event_names_the_rules_that_removed_the_others(void)
{
        static const char *const metrics[] = { "3", "-2.5", "\"inf\"", "\"-inf\"", "null", "[1]", "1e3" };
        struct test_client client;
        struct ipc_found found;
        struct agent *agent;
        double at = 0;
        char tag[32];

        place_init(&place);
        agent = start();
        client_init(&client, &place, 195);
        client.hello.keep_last = 1;
        client.hello.keep_best_count = 2;
        strcpy(client.hello.keep_best, "loss");
        REQUIRE(agent && !client_connect(&client, &place));
        for (unsigned i = 0; i < 7; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i);
                CHECK(save_with_metric(&client, tag, metrics[i]));
        }
        for (unsigned i = 0; i < 4; i++) { /* 2, 0, 4, 5: each as soon as a better or a newer one is there */
                const struct ipc_event *event = next_event(&client, NEBULA_EVENT_REMOVED, &at);

                REQUIRE(event && !strcmp(event->text, "keep_last=1, keep_best=Best('loss', 'min', 2)"));
        }
        client_done(&client);
        agent_stop(agent, true);
        agent = start();
        REQUIRE(agent && enter(&client, 196));
        for (unsigned i = 0; i < 7; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i);
                CHECK((find(&client, "", tag, &found) == NEBULA_OK) == (i == 1 || i == 3 || i == 6));
        }
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static enum nebula_status keep(struct test_client *client, uint32_t what, const char *tag)
{
        struct ipc_keep request = { .what = what, .reason = "why" };

        strcpy(request.tag, tag);
        return ask(client, IPC_KEEP, &request, sizeof request);
}

static void what_a_client_pins_stays_and_what_it_removes_is_gone(void)
{
        struct ipc_report pins = { .report = NEBULA_REPORT_PINS };
        struct test_client client;
        struct agent *agent;
        uint64_t version;
        double at = 0;
        const struct ipc_event *event;
        char tag[32];

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 197));
        for (unsigned i = 1; i < 4; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i);
                CHECK(!save_whole(&client, tag, i, &version) && !wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        }
        CHECK(!keep(&client, IPC_KEEP_PIN, "global_step1") && !ask(&client, IPC_REPORT, &pins, sizeof pins));
        CHECK(strstr(client.frame.payload, "global_step1") && strstr(client.frame.payload, "why"));
        CHECK(keep(&client, IPC_KEEP_REMOVE, "global_step1") == NEBULA_INVALID && strstr(client.error.message, "pinned"));
        CHECK(keep(&client, IPC_KEEP_REMOVE, "global_step3") == NEBULA_INVALID && strstr(client.error.message, "newest"));
        CHECK(!keep(&client, IPC_KEEP_REMOVE, "global_step2"));
        CHECK(keep(&client, IPC_KEEP_REMOVE, "global_step2") == NEBULA_NOT_FOUND);
        event = next_event(&client, NEBULA_EVENT_REMOVED, &at);
        CHECK(event && !strcmp(event->tag, "global_step2"));
        CHECK(!keep(&client, IPC_KEEP_UNPIN, "global_step1") && !keep(&client, IPC_KEEP_UNPIN, "global_step1"));
        CHECK(!keep(&client, IPC_KEEP_REMOVE, "global_step1"));
        CHECK(keep(&client, 9, "global_step3") == NEBULA_INVALID && keep(&client, IPC_KEEP_PIN, "") == NEBULA_INVALID);
        client_done(&client);
        client_init(&client, &place, 198);
        client.hello.persist_path[0] = 0;
        REQUIRE(!client_connect(&client, &place));
        CHECK(keep(&client, IPC_KEEP_PIN, "global_step3") == NEBULA_INVALID && strstr(client.error.message, "no storage path"));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static void an_interval_leaves_versions_in_memory_until_flushed(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_found found;
        uint64_t versions[4];
        char tag[32], path[256], text[4096] = "";
        FILE *file;

        place_init(&place);
        agent = start();
        client_init(&client, &place, 97);
        client.hello.persist_interval_s = 1000;
        REQUIRE(agent && !client_connect(&client, &place));
        for (unsigned i = 0; i < 4; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i);
                CHECK(!save_whole(&client, tag, i, &versions[i]));
                if (!i)
                        CHECK(!wait_for(&client, versions[0], NEBULA_STATE_DURABLE, 10000));
        }
        CHECK(state_of(&client, versions[3]) == NEBULA_STATE_COMMITTED);
        CHECK(wait_for(&client, versions[1], NEBULA_STATE_DURABLE, 1000) == NEBULA_FAILED); /* dropped for a newer version */
        CHECK(!flush(&client, "", 10000));
        CHECK(state_of(&client, versions[3]) == NEBULA_STATE_DURABLE);
        client_done(&client);
        agent_stop(agent, true);
        (void)found;
        snprintf(path, sizeof path, "%s/checkpointHistories.csv", place.output);
        file = fopen(path, "r");
        REQUIRE(file);
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
        CHECK(strstr(text, "\"global_step0\",0,") && strstr(text, ",superseded,") && strstr(text, ",durable,1.000,2.000,1.500,"));
        place_done(&place);
}

static void another_path_never_hits_this_jobs_memory(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_found found;
        char other[256];

        place_init(&place);
        snprintf(other, sizeof other, "%s/other", place.root);
        agent = start();
        REQUIRE(agent && enter(&client, 98));
        CHECK(!save_whole(&client, "global_step1", 1, NULL) && !flush(&client, "", 10000));
        CHECK(find(&client, other, "", &found) == NEBULA_NOT_FOUND);
        strcat(other, "/../storage"); /* another spelling of the path, so another job, which finds the version in storage */
        CHECK(!mkdir(place.output, 0755) || 1);
        client_done(&client);
        client_init(&client, &place, 99);
        snprintf(client.hello.persist_path, sizeof client.hello.persist_path, "%s/elsewhere", place.root);
        REQUIRE(!client_connect(&client, &place));
        CHECK(find(&client, "", "", &found) == NEBULA_NOT_FOUND);
        REQUIRE(!find(&client, place.storage, "", &found));
        CHECK(!load(&client, found.version_id, "model.pt", 1, FILE_BYTES, NULL));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static bool reports(struct test_client *client, enum nebula_report report, const char *tag)
{
        struct ipc_report request = { .report = report };
        char text[80];

        snprintf(text, sizeof text, "{\"tag\":\"%s\"", tag);
        return !ask(client, IPC_REPORT, &request, sizeof request) &&
               memmem(client->frame.payload, client->frame.header.size, text, strlen(text));
}

static void the_report_of_memory_leaves_out_what_only_storage_has(void)
{
        struct test_client client;
        struct agent *agent;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter(&client, 51));
        for (unsigned i = 0; i < 6; i++)
                save_durable(&client, i, NULL);
        CHECK(reports(&client, NEBULA_REPORT_VERSIONS, "global_step5") && reports(&client, NEBULA_REPORT_MEMORY, "global_step5"));
        CHECK(reports(&client, NEBULA_REPORT_VERSIONS, "global_step0") && !reports(&client, NEBULA_REPORT_MEMORY, "global_step0"));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

static bool reports_job(struct test_client *client, const char *name)
{
        struct ipc_report request = { .report = NEBULA_REPORT_STATUS };
        char text[80];

        snprintf(text, sizeof text, "\"job\":\"%s\",\"path\"", name);
        return !ask(client, IPC_REPORT, &request, sizeof request) &&
               memmem(client->frame.payload, client->frame.header.size, text, strlen(text));
}

/* Whether the agent counts trainers of that job. */
static bool trains_in(struct test_client *client, const char *name)
{
        struct ipc_report request = { .report = NEBULA_REPORT_STATUS };
        json_t *told = ask(client, IPC_REPORT, &request, sizeof request) ? NULL : json_loadb(client->frame.payload, client->frame.header.size, 0, NULL), *job;
        bool result = !told;
        size_t i;

        json_array_foreach(json_object_get(told, "jobs"), i, job)
                if (!strcmp(json_string_value(json_object_get(job, "job")), name))
                        result = json_integer_value(json_object_get(job, "trainer_count")) > 0;
        json_decref(told);
        return result;
}

static bool enter_job(struct test_client *client, const char *job, uint64_t nonce)
{
        client_init(client, &place, nonce);
        strcpy(client->hello.job, job);
        client->hello.replica_count = !strcmp(job, "copied");
        client->hello.memory_bytes = 3 * memory_capacity(FILE_BYTES); /* memory for three versions */
        snprintf(client->hello.persist_path, sizeof client->hello.persist_path, "%s/%s", place.root, job);
        return !client_connect(client, &place);
}

static int count_members(const char *job)
{
        char pattern[300];
        glob_t found;
        int count;

        snprintf(pattern, sizeof pattern, "%s/%s/.nebula/nodes/*", place.root, job);
        count = glob(pattern, 0, NULL, &found) ? 0 : (int)found.gl_pathc;
        globfree(&found);
        return count;
}

static _Atomic int64_t passed_ns; /* of the agent's clock, without anybody waiting for it */

static int64_t now_after_that(void)
{
        return os_linux.now_ns() + passed_ns;
}

static struct agent *start_with_a_clock(void)
{
        static struct os_table table;

        if (!table.now_ns) {
                table = os_linux;
                table.now_ns = now_after_that;
        }
        passed_ns = 0;
        os = &table;
        return start();
}

/* Another job comes and goes, so that the agent always has something to do. */
static void a_job_without_trainers_is_forgotten_when_its_memory_is_empty(void)
{
        struct test_client client, other;
        struct ipc_found found, looked;
        struct agent *agent;
        char path[256], tag[32];

        setenv("NEBULA_AGENT_LINGER", "600", 1);
        place_init(&place);
        agent = start_with_a_clock();
        unsetenv("NEBULA_AGENT_LINGER");
        REQUIRE(agent && enter_job(&other, "long", 110) && enter_job(&client, "looked", 112));
        CHECK(!save_whole(&client, "global_step1", 2, NULL) && !flush(&client, "", 10000));
        client_done(&client);
        REQUIRE(enter_job(&client, "short", 111));
        CHECK(!save_whole(&client, "global_step1", 1, NULL) && !flush(&client, "", 10000));
        client_done(&client);
        REQUIRE(enter_job(&client, "copied", 114));
        CHECK(!save_whole(&client, "global_step1", 1, NULL) && !flush(&client, "", 10000));
        for (int i = 0; i < 1000 && count_members("copied") != 1; i++)
                usleep(100000);
        CHECK(count_members("copied") == 1);
        client_done(&client);
        for (int i = 0; i < 6000 && (trains_in(&other, "short") || trains_in(&other, "copied")); i++)
                usleep(10000);
        passed_ns += INT64_C(900000000000);
        CHECK(!save_whole(&other, "global_step9", 3, NULL) && !flush(&other, "", 10000));
        CHECK(reports_job(&other, "short") && reports_job(&other, "copied")); /* for as long again as their versions are in memory */
        snprintf(path, sizeof path, "%s/looked", place.root);
        REQUIRE(!find(&other, path, "", &looked)); /* a client with a handle may load the version later */
        for (int i = 0; i < 4; i++) {
                snprintf(tag, sizeof tag, "global_step%d", i);
                CHECK(!save_whole(&other, tag, 3, NULL) && !flush(&other, "", 10000));
        }
        for (int i = 0; i < 600 && (reports_job(&other, "short") || reports_job(&other, "copied")); i++) {
                passed_ns += INT64_C(60000000000);
                CHECK(!flush(&other, "", 10000));
                usleep(100000);
        }
        CHECK(!reports_job(&other, "copied") && !count_members("copied")); /* this node has left the nodes of that job */
        CHECK(!reports_job(&other, "short") && reports_job(&other, "long") && reports_job(&other, "looked"));
        CHECK(!load(&other, looked.version_id, "model.pt", 2, FILE_BYTES, NULL));

        REQUIRE(enter_job(&client, "short", 113));
        REQUIRE(!find(&client, "", "", &found) && found.step == 1);
        CHECK(!load(&client, found.version_id, "model.pt", 1, FILE_BYTES, NULL));
        CHECK(!save_whole(&client, "global_step1", 4, NULL) && !flush(&client, "", 10000));
        CHECK(!find(&client, "", "", &found) && found.writing == 2);
        client_done(&client);
        client_done(&other);
        agent_stop(agent, true);
        os = &os_linux;
        place_done(&place);
}

static void a_commit_after_the_drain_of_an_ending_agent_goes_to_the_next_agent(void)
{
        struct test_client client;
        struct agent *agent;
        struct ipc_found found;

        place_init(&place);
        agent = start();
        REQUIRE(agent);
        client_init(&client, &place, 11);
        REQUIRE(!client_connect(&client, &place));
        CHECK(agent_drain(agent)); /* nothing is there yet */
        storage_block(place.storage); /* so that it cannot become durable */
        REQUIRE(!save_whole(&client, "global_step7", 7, NULL));
        client_done(&client);
        agent_stop(agent, true);
        storage_unblock(place.storage);

        agent = start();
        REQUIRE(agent);
        client_init(&client, &place, 12);
        REQUIRE(!client_connect(&client, &place));
        CHECK(!find(&client, "", "", &found) && found.step == 7);
        CHECK(!load(&client, found.version_id, "model.pt", 7, FILE_BYTES, NULL));
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
}

/* Opens a session for a rank of a job with several ranks on this node. Each session is another run. */
static bool enter_rank(struct test_client *client, uint64_t nonce, uint32_t rank, uint32_t world)
{
        client_init(client, &place, nonce);
        client->hello.rank = rank;
        client->hello.world = client->hello.local_world = world;
        strcpy(client->hello.run, "r1");
        return !client_connect(client, &place);
}

static void a_rank_that_connects_anew_is_waited_for(void)
{
        struct test_client first, second;
        struct agent *agent;
        uint64_t version, own;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter_rank(&first, 1, 0, 2) && enter_rank(&second, 2, 1, 2));
        version = begin(&first, "global_step1", NEBULA_FILES_ALL_RANKS);
        REQUIRE(version && !save(&first, version, "a.pt", 1, FILE_BYTES) && !of_version(&first, IPC_COMMIT, version));
        client_done(&second);
        REQUIRE(enter_rank(&second, 3, 1, 2)); /* at once: it may be the same process with another session */
        CHECK(state_of(&first, version) != NEBULA_STATE_FAILED);
        own = begin(&second, "global_step1", NEBULA_FILES_ALL_RANKS);
        CHECK(own == version && !save(&second, own, "b.pt", 2, FILE_BYTES) && !of_version(&second, IPC_COMMIT, own));
        CHECK(!wait_for(&first, version, NEBULA_STATE_COMMITTED, 1000));
        client_done(&first);
        client_done(&second);
        agent_stop(agent, true);
        place_done(&place);
}

static void a_rank_beyond_the_world_of_an_open_version_begins_its_own(void)
{
        struct test_client first, second;
        struct agent *agent;
        struct ipc_granted loan = { 0 };
        uint64_t version, own;

        place_init(&place);
        agent = start();
        REQUIRE(agent && enter_rank(&first, 1, 0, 2));
        version = begin(&first, "global_step1", NEBULA_FILES_ALL_RANKS);
        REQUIRE(version && !save(&first, version, "a.pt", 1, FILE_BYTES));
        REQUIRE(enter_rank(&second, 2, 5, 8));
        own = begin(&second, "global_step1", NEBULA_FILES_ALL_RANKS);
        REQUIRE(own && !copy_image(&second, own, "b.pt", 2, FILE_BYTES, &loan));
        CHECK(loan.version_id != version);
        client_done(&first);
        client_done(&second);
        agent_stop(agent, true);
        place_done(&place);
}

TAP_MAIN(TEST(a_rank_that_connects_anew_is_waited_for), TEST(a_rank_beyond_the_world_of_an_open_version_begins_its_own),
         TEST(a_commit_after_the_drain_of_an_ending_agent_goes_to_the_next_agent), TEST(a_job_without_trainers_is_forgotten_when_its_memory_is_empty),
         TEST(the_report_of_memory_leaves_out_what_only_storage_has), TEST(a_saved_version_is_committed_loaded_and_durable),
         TEST(the_first_reader_gets_the_stored_file_and_the_next_one_an_image),
         TEST(a_part_closes_with_the_next_tag_and_n_files_complete_a_version),
         TEST(a_tag_written_again_is_a_version_that_carries_over),
         TEST(a_tag_that_only_storage_has_is_rewritten_as_its_writer_asks),
         TEST(an_image_that_is_asked_for_again_is_the_only_one_waited_for),
         TEST(an_image_that_was_requested_again_is_lent_only_once),
         TEST(a_version_of_two_ranks_waits_for_both_and_either_may_save_nothing),
         TEST(a_version_fails_when_a_rank_that_it_waits_for_ends_before_it_began),
         TEST(a_rank_in_another_pid_namespace_is_judged_by_what_the_agent_sees_of_it),
         TEST(trainers_of_two_containers_that_have_one_number_are_told_apart),
         TEST(steady_memory_is_the_retained_versions_and_their_images_serve_again),
         TEST(an_image_that_a_loader_has_mapped_is_never_written_again), TEST(an_image_that_loaders_have_given_back_serves_again),
         TEST(a_load_has_another_image_made_for_the_saves_to_come),
         TEST(a_file_that_can_never_fit_is_refused_with_both_numbers), TEST(a_full_tier_waits_for_what_becomes_durable),
         TEST(a_file_that_is_whole_may_be_said_to_be_so_again), TEST(waits_are_answered_in_any_order),
         TEST(a_full_tier_waits_for_a_copy_that_may_bring_its_commit),
         TEST(a_flush_waits_for_another_rank_s_copy_that_may_bring_its_commit),
         TEST(a_rank_that_commits_alone_is_told_whom_a_version_waits_for),
         TEST(a_commit_behind_the_file_that_completed_a_version_is_of_that_version),
         TEST(on_full_skip_fails_that_version_and_says_so),
         TEST(a_first_image_begins_its_version_and_a_refusal_names_it), TEST(a_failing_storage_costs_nothing_and_is_tried_again),
         TEST(a_damaged_newest_version_gives_way_to_the_older_one),
         TEST(a_flipped_byte_in_storage_is_found_by_file_and_offset),
         TEST(storage_retention_keeps_the_last_and_the_multiples),
         TEST(the_best_by_a_metric_stay_and_an_event_names_the_rules_that_removed_the_others),
         TEST(what_a_client_pins_stays_and_what_it_removes_is_gone), TEST(an_interval_leaves_versions_in_memory_until_flushed),
         TEST(another_path_never_hits_this_jobs_memory))
