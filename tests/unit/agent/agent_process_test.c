/* The agent's promises when it or a trainer is killed: real processes, real SIGKILL. */
#include <errno.h>
#include <limits.h>

#include "agent/agent_client.h"
#include "tap.h"

static struct test_place place;

static bool enter(struct test_client *client, uint64_t nonce)
{
        client_init(client, &place, nonce);
        return !client_connect(client, &place);
}

/* Runs `work` in a trainer process, which then ends without closing its session. */
static void trainer(void (*work)(struct test_client *client), uint64_t nonce)
{
        int status = 0;
        pid_t pid;

        fflush(stdout);
        pid = fork();
        if (!pid) {
                struct test_client client;

                if (!enter(&client, nonce))
                        _exit(1);
                work(&client);
                kill(getpid(), SIGKILL);
        }
        CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
}

static size_t count_names(const char *directory, const char *suffix)
{
        struct os_dir *dir;
        char name[300];
        size_t count = 0;

        if (os->opendir(directory, &dir) < 0)
                return 0;
        while (os->readdir(dir, name, sizeof name) > 0)
                count += strlen(name) > strlen(suffix) && !strcmp(name + strlen(name) - strlen(suffix), suffix);
        os->closedir(dir);
        return count;
}

static void committed_versions_survive_sigkill_of_the_agent(void)
{
        struct test_client client;
        struct ipc_found found;
        uint64_t version;
        int source = -1;
        pid_t pid;

        place_init(&place);
        pid = agent_fork(&place);
        client_init(&client, &place, 1);
        client.hello.persist_path[0] = 0; /* no storage path: only memory can have the version */
        REQUIRE(!client_connect(&client, &place));
        REQUIRE(!save_whole(&client, "global_step7", 7, &version));
        agent_end(pid, SIGKILL);
        client_done(&client);

        pid = agent_fork(&place);
        REQUIRE(!client_connect(&client, &place));
        REQUIRE(!find(&client, "", "", &found));
        CHECK(found.version_id == version && found.state == NEBULA_STATE_COMMITTED);
        CHECK(!load(&client, version, "model.pt", 7, FILE_BYTES, &source));
        CHECK(source == IPC_SOURCE_MEMORY);
        CHECK(!save_whole(&client, "global_step8", 8, NULL));
        client_done(&client);
        CHECK(agent_end(pid, SIGTERM) == 0);
        CHECK(count_names(place.place.memory, ".img") == 0);
        place_done(&place);
}

/* Puts a file in the place of the storage directory. unlink() removes it. */
static bool block_storage(void)
{
        FILE *file = fopen(place.storage, "w");

        return file && !fclose(file);
}

static void a_version_that_was_waiting_for_storage_is_persisted_by_the_next_agent(void)
{
        struct test_client client;
        struct ipc_found found;
        uint64_t version;
        pid_t pid;

        place_init(&place);
        REQUIRE(block_storage());
        pid = agent_fork(&place);
        REQUIRE(enter(&client, 2));
        REQUIRE(!save_whole(&client, "global_step7", 7, &version));
        CHECK(wait_for(&client, version, NEBULA_STATE_DURABLE, 100) == NEBULA_TIMEOUT);
        agent_end(pid, SIGKILL);
        client_done(&client);
        unlink(place.storage);
        pid = agent_fork(&place);
        REQUIRE(!client_connect(&client, &place));
        CHECK(!wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        CHECK(!find(&client, "", "", &found) && found.version_id == version);
        client_done(&client);
        CHECK(agent_end(pid, SIGTERM) == 0);
        place_done(&place);
}

static void a_save_that_the_agent_died_under_goes_on_with_the_next_one(void)
{
        struct test_client client;
        struct ipc_granted first, second;
        uint64_t version;
        pid_t pid;

        place_init(&place);
        pid = agent_fork(&place);
        REQUIRE(enter(&client, 3));
        version = begin(&client, "t", NEBULA_FILES_ALL_RANKS);
        CHECK(!copy_image(&client, version, "a", 1, FILE_BYTES, &first) && !captured(&client, first.image_id));
        CHECK(!copy_image(&client, version, "b", 2, FILE_BYTES, &second));
        CHECK(begin(&client, "t", NEBULA_FILES_ALL_RANKS) == version); /* the agent answers when the survival log has the loan */
        agent_end(pid, SIGKILL);
        client_done(&client);
        pid = agent_fork(&place);
        REQUIRE(!client_connect(&client, &place));
        CHECK(begin(&client, "t", NEBULA_FILES_ALL_RANKS) == version);
        CHECK(!captured(&client, second.image_id));
        CHECK(captured(&client, 12345) == NEBULA_NOT_FOUND);
        CHECK(!of_version(&client, IPC_COMMIT, version));
        CHECK(!wait_for(&client, version, NEBULA_STATE_DURABLE, 10000));
        CHECK(!load(&client, version, "a", 1, FILE_BYTES, NULL));
        CHECK(!load(&client, version, "b", 2, FILE_BYTES, NULL));
        client_done(&client);
        CHECK(agent_end(pid, SIGTERM) == 0);
        place_done(&place);
}

static void save_and_commit(struct test_client *client)
{
        save_whole(client, "global_step1", 1, NULL);
}

static void save_only(struct test_client *client)
{
        save(client, begin(client, "global_step2", NEBULA_FILES_ALL_RANKS), "model.pt", 2, FILE_BYTES);
}

static void save_open_ended(struct test_client *client)
{
        save(client, begin(client, "global_step3", NEBULA_FILES_OPEN), "model.pt", 3, FILE_BYTES);
}

static void half_copied(struct test_client *client)
{
        struct ipc_granted loan;

        copy_image(client, begin(client, "global_step4", NEBULA_FILES_OPEN), "model.pt", 4, FILE_BYTES, &loan);
}

/* fault: as test_a_trainer_killed_at_any_moment_leaves_a_whole_checkpoint */
static void a_killed_trainer_leaves_its_committed_versions_and_no_half_ones(void)
{
        struct test_client client;
        struct ipc_found found;
        pid_t pid;

        place_init(&place);
        pid = agent_fork(&place);
        trainer(save_and_commit, 10);
        trainer(save_only, 11);
        REQUIRE(enter(&client, 12)); /* replaces the dead trainers at once */
        REQUIRE(!find(&client, "", "", &found));
        CHECK(found.step == 1);
        CHECK(!load(&client, found.version_id, "model.pt", 1, FILE_BYTES, NULL));
        client_done(&client);
        trainer(save_open_ended, 13);
        trainer(half_copied, 14);
        REQUIRE(enter(&client, 15));
        REQUIRE(!find(&client, "", "", &found));
        CHECK(found.step == 3); /* the version was complete when its trainer ended */
        CHECK(!load(&client, found.version_id, "model.pt", 3, FILE_BYTES, NULL));
        CHECK(!flush(&client, "", 10000));
        client_done(&client);
        CHECK(agent_end(pid, SIGTERM) == 0);
        place_done(&place);
}

static bool comes_to(size_t image_count)
{
        for (int i = 0; i < 5000 && count_names(place.place.memory, ".img") != image_count; i++)
                os->sleep_ms(10);
        return count_names(place.place.memory, ".img") == image_count;
}

/* The second save after the load cannot have that image. The agent makes a new one before the save asks for it. */
static void an_image_that_a_loader_keeps_is_replaced_ahead_of_need(void)
{
        struct test_client client;
        uint64_t version;
        int kept;
        pid_t pid;

        place_init(&place);
        pid = agent_fork(&place);
        REQUIRE(enter(&client, 22));
        CHECK(!save_whole(&client, "global_step1", 1, NULL));
        CHECK(comes_to(2));
        CHECK(!save_whole(&client, "global_step2", 2, &version));
        CHECK(!flush(&client, "", 10000));
        CHECK(!load(&client, version, "model.pt", 2, FILE_BYTES, NULL));
        kept = dup(client.frame.fd);
        CHECK(!save_whole(&client, "global_step3", 3, NULL));
        CHECK(comes_to(3));
        CHECK(!save_whole(&client, "global_step4", 4, NULL));
        CHECK(comes_to(2));
        close(kept);
        client_done(&client);
        CHECK(agent_end(pid, SIGTERM) == 0);
        place_done(&place);
}

static void the_next_agent_removes_incomplete_copies_of_dead_trainers(void)
{
        struct test_client client;
        struct ipc_found found;
        char path[4200];
        FILE *file;
        pid_t pid;

        place_init(&place);
        pid = agent_fork(&place);
        trainer(half_copied, 20);
        agent_end(pid, SIGKILL);
        CHECK(count_names(place.place.memory, ".img") <= 1);
        snprintf(path, sizeof path, "%s/0000000000000abc.img", place.place.memory); /* an image that no survival log names */
        file = fopen(path, "w");
        REQUIRE(file);
        fclose(file);
        snprintf(path, sizeof path, "%s/somebody-elses.img", place.place.memory);
        file = fopen(path, "w");
        REQUIRE(file);
        fclose(file);
        pid = agent_fork(&place);
        REQUIRE(enter(&client, 21)); /* the agent accepts a connection at once, and answers when it has cleaned up the tier */
        CHECK(count_names(place.place.memory, ".img") == 1 && !access(path, F_OK));
        CHECK(count_names(place.place.memory, ".version") == 0);
        CHECK(find(&client, "", "", &found) == NEBULA_NOT_FOUND);
        client_done(&client);
        CHECK(agent_end(pid, SIGTERM) == 0);
        CHECK(!access(path, F_OK)); /* foreign files stay */
        place_done(&place);
}

static void two_trainers_with_one_rank_are_told_of_each_other(void)
{
        struct test_client client;
        int fds[2], status = 0;
        char byte;
        pid_t agent, rival;

        place_init(&place);
        agent = agent_fork(&place);
        REQUIRE(!pipe(fds));
        fflush(stdout);
        rival = fork();
        if (!rival) {
                struct test_client other;
                bool in = enter(&other, 30);

                if (write(fds[1], &in, 1) == 1)
                        pause();
                _exit(0);
        }
        CHECK(read(fds[0], &byte, 1) == 1 && byte);
        client_init(&client, &place, 31);
        CHECK(client_connect(&client, &place) == NEBULA_INVALID);
        CHECK(strstr(client.error.message, "job") && strstr(client.error.message, "process"));
        client_done(&client);
        strcpy(client.hello.job, "other");
        CHECK(!client_connect(&client, &place)); /* another job name is allowed */
        client_done(&client);
        client_init(&client, &place, 30 + (UINT64_C(5) << 40)); /* a process that the first one has forked */
        CHECK(!client_connect(&client, &place));
        client_done(&client);
        kill(rival, SIGKILL);
        waitpid(rival, &status, 0);
        CHECK(enter(&client, 32));
        client_done(&client);
        close(fds[0]);
        close(fds[1]);
        CHECK(agent_end(agent, SIGTERM) == 0);
        place_done(&place);
}

static void a_trainer_that_is_just_leaving_makes_way_for_the_next(void)
{
        struct test_client client;
        int fds[2];
        char byte;
        pid_t agent, leaving;

        place_init(&place);
        agent = agent_fork(&place);
        REQUIRE(!pipe(fds));
        fflush(stdout);
        leaving = fork();
        if (!leaving) {
                struct test_client other;
                bool in = enter(&other, 33);

                if (write(fds[1], &in, 1) != 1)
                        _exit(1);
                usleep(100000);
                client_done(&other);
                for (;;)
                        pause();
        }
        CHECK(read(fds[0], &byte, 1) == 1 && byte);
        CHECK(enter(&client, 34));
        client_done(&client);
        agent_end(leaving, SIGKILL);
        CHECK(agent_end(agent, SIGTERM) == 0);
        close(fds[0]);
        close(fds[1]);
        place_done(&place);
}

static void stop_persists_answers_and_ends_and_stop_now_drops_memory(void)
{
        struct test_client client;
        struct ipc_stop stop = { 0 };
        struct ipc_found found;
        int status = -1;
        pid_t pid;

        place_init(&place);
        pid = agent_fork(&place);
        client_init(&client, &place, 40);
        client.hello.persist_interval_s = 1000;
        REQUIRE(!client_connect(&client, &place));
        CHECK(!save_whole(&client, "global_step1", 1, NULL) && !save_whole(&client, "global_step2", 2, NULL));
        CHECK(!ask(&client, IPC_STOP, &stop, sizeof stop));
        waitpid(pid, &status, 0);
        CHECK(status == 0);
        client_done(&client);
        CHECK(count_names(place.place.memory, ".img") == 0 && access(place.place.socket, F_OK));

        pid = agent_fork(&place);
        REQUIRE(!client_connect(&client, &place));
        CHECK(!find(&client, "", "", &found) && found.step == 2);
        CHECK(!save_whole(&client, "global_step3", 3, NULL));
        stop.now = 1;
        CHECK(!ask(&client, IPC_STOP, &stop, sizeof stop));
        waitpid(pid, &status, 0);
        CHECK(status == 0 && count_names(place.place.memory, ".img") == 0);
        client_done(&client);
        place_done(&place);
}

/*
 * fault (Storage): Storage fails for longer than `NEBULA_PERSIST_GIVE_UP`, and the agent is killed, told to end, or not
 * needed any more.
 * result: The version that the agent gave up stays in memory. If storage has no newer version, an agent that ends
 * leaves memory as it is. The next agent loads the version and tries anew. `nebula stop --now` and a restart of the
 * machine drop it.
 */
static void a_version_that_storage_refused_goes_to_the_next_agent_and_is_persisted_later(void)
{
        for (int killed = 0; killed < 2; killed++) {
                struct test_client client;
                struct ipc_found found;
                uint64_t version;
                pid_t pid;

                place_init(&place);
                setenv("NEBULA_PERSIST_GIVE_UP", "1", 1);
                REQUIRE(block_storage());
                pid = agent_fork(&place);
                REQUIRE(enter(&client, 48) && !save_whole(&client, "t", 1, &version));
                CHECK(flush(&client, "t", 20000) == NEBULA_STORAGE && state_of(&client, version) == NEBULA_STATE_FAILED);
                client_done(&client);
                agent_end(pid, killed ? SIGKILL : SIGTERM);

                unsetenv("NEBULA_PERSIST_GIVE_UP");
                REQUIRE(!unlink(place.storage));
                pid = agent_fork(&place);
                REQUIRE(enter(&client, 49));
                CHECK(!find(&client, "", "t", &found) && !load(&client, found.version_id, "model.pt", 1, FILE_BYTES, NULL));
                CHECK(!flush(&client, "", 20000) && state_of(&client, found.version_id) == NEBULA_STATE_DURABLE);
                client_done(&client);
                CHECK(agent_end(pid, SIGTERM) == 0 && count_names(place.place.memory, ".img") == 0);
                place_done(&place);
        }
}

/*
 * fault (Arguments of the caller): A tag is written again while an older writing of it still waits to be persisted.
 * result: Once the newer one is durable, the older never follows it into storage, also not by the next agent.
 */
/* A client may have asked for the newer writing only. */
static void an_older_writing_of_a_tag_never_follows_a_newer_one_into_storage(void)
{
        for (int killed = 0; killed < 2; killed++) {
                struct test_client client;
                struct ipc_found found;
                uint64_t newer;
                pid_t pid;

                place_init(&place);
                pid = agent_fork(&place);
                client_init(&client, &place, 47);
                client.hello.persist_interval_s = 1000;
                REQUIRE(!client_connect(&client, &place));
                CHECK(!save_whole(&client, "first", 1, &newer) && !wait_for(&client, newer, NEBULA_STATE_DURABLE, 10000));
                CHECK(!save_whole(&client, "t", 2, NULL) && !save_whole(&client, "t", 3, &newer));
                CHECK(!wait_for(&client, newer, NEBULA_STATE_DURABLE, 10000));
                client_done(&client);
                if (killed) {
                        agent_end(pid, SIGKILL);
                        pid = agent_fork(&place);
                }
                CHECK(agent_end(pid, SIGTERM) == 0);

                pid = agent_fork(&place);
                REQUIRE(!client_connect(&client, &place));
                CHECK(!find(&client, "", "t", &found) && !load(&client, found.version_id, "model.pt", 3, FILE_BYTES, NULL));
                client_done(&client);
                CHECK(agent_end(pid, SIGTERM) == 0);
                place_done(&place);
        }
}

static void stop_now_ends_an_agent_that_a_signal_had_told_to_finish(void)
{
        struct test_client client;
        struct ipc_stop stop = { .now = 1 };
        int status = -1;
        pid_t pid, ended = 0;

        place_init(&place);
        setenv("NEBULA_STORE_MBPS", "0.001", 1); /* minutes */
        pid = agent_fork(&place);
        unsetenv("NEBULA_STORE_MBPS");
        REQUIRE(enter(&client, 45));
        CHECK(!save_whole(&client, "global_step1", 1, NULL));
        kill(pid, SIGTERM);
        usleep(300000);
        CHECK(waitpid(pid, &status, WNOHANG) == 0); /* the agent finishes the write first */
        CHECK(!ask(&client, IPC_STOP, &stop, sizeof stop));
        for (int i = 0; i < 6000 && !ended; i++) {
                usleep(10000);
                ended = waitpid(pid, &status, WNOHANG);
        }
        CHECK(ended == pid && status == 0 && count_names(place.place.memory, ".img") == 0);
        if (!ended)
                agent_end(pid, SIGKILL);
        client_done(&client);
        place_done(&place);
}

static void a_second_daemon_finds_the_first_and_succeeds(void)
{
        struct test_client client;
        struct ipc_stop stop = { .now = 1 };
        char *argv[] = { "agent", "--daemon", NULL };
        int status = -1;

        place_init(&place);
        setenv("NEBULA_RUNTIME_DIR", place.place.directory, 1);
        setenv("NEBULA_MEMORY_DIR", place.place.memory, 1);
        for (int i = 0; i < 2; i++) {
                pid_t pid;

                fflush(stdout);
                pid = fork();
                if (!pid)
                        _exit(agent_main(2, argv));
                waitpid(pid, &status, 0);
                CHECK(status == 0);
        }
        REQUIRE(enter(&client, 50));
        CHECK(!save_whole(&client, "global_step1", 1, NULL));
        CHECK(!ask(&client, IPC_STOP, &stop, sizeof stop));
        client_done(&client);
        for (int i = 0; i < 500; i++) {
                int fd = os->open(place.place.lock, OS_READ | OS_WRITE);
                int locked = fd < 0 ? fd : os->lock(fd, OS_LOCK_ALONE);

                os->close(fd);
                if (locked >= 0)
                        break; /* the daemon has ended */
                usleep(10000);
        }
        CHECK(access(place.place.socket, F_OK) && count_names(place.place.memory, ".img") == 0);
        place_done(&place);
}

static unsigned count_in_log(const char *text)
{
        FILE *log = fopen(place.place.log, "r");
        unsigned count = 0;
        char line[1000];

        while (log && fgets(line, sizeof line, log))
                count += strstr(line, text) != NULL;
        if (log)
                fclose(log);
        return count;
}

static void an_agent_takes_the_memory_that_a_dying_one_still_holds(void)
{
        struct test_client client;
        char path[PATH_MAX + 8];
        int status, held[2];
        pid_t agent, dying;

        place_init(&place);
        snprintf(path, sizeof path, "%s/lock", place.place.memory);
        REQUIRE(!pipe(held) && !(mkdir(place.place.memory, 0700) && errno != EEXIST));
        dying = fork();
        if (!dying) {
                int fd = os->open(path, OS_READ | OS_WRITE | OS_CREATE);
                bool is_held = fd >= 0 && !os->lock(fd, OS_LOCK_ALONE);

                if (write(held[1], &is_held, 1) != 1)
                        _exit(1);
                usleep(150000);
                _exit(0);
        }
        REQUIRE(read(held[0], &status, 1) == 1);
        agent = agent_fork(&place);
        REQUIRE(enter(&client, 60));
        CHECK(!save_whole(&client, "global_step1", 1, NULL) && count_names(place.place.memory, ".img") > 0);
        client_done(&client);
        kill(agent, SIGKILL);
        waitpid(agent, &status, 0);
        waitpid(dying, &status, 0);
        close(held[0]);
        close(held[1]);
        place_done(&place);
}

static void an_agent_that_does_not_linger_waits_for_the_client_that_started_it(void)
{
        struct test_client client;
        int status = -1;
        pid_t pid;

        place_init(&place);
        setenv("NEBULA_AGENT_LINGER", "0", 1);
        pid = agent_fork(&place);
        unsetenv("NEBULA_AGENT_LINGER");
        usleep(300000);
        REQUIRE(enter(&client, 60));
        client_done(&client);
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        place_done(&place);
}

static void an_agent_that_is_not_needed_ends_by_itself_and_says_so_once(void)
{
        struct test_client client;
        int status = -1;
        pid_t pid;

        place_init(&place);
        setenv("NEBULA_AGENT_LINGER", "1", 1);
        pid = agent_fork(&place);
        unsetenv("NEBULA_AGENT_LINGER");
        REQUIRE(enter(&client, 60));
        CHECK(!save_whole(&client, "global_step1", 1, NULL));
        usleep(1300000);
        CHECK(waitpid(pid, &status, WNOHANG) == 0); /* a trainer is connected */
        client_done(&client);
        for (int i = 0; i < 6000 && waitpid(pid, &status, WNOHANG) == 0; i++)
                usleep(10000);
        CHECK(status == 0 && count_names(place.place.memory, ".img") == 0 && access(place.place.socket, F_OK));
        CHECK(count_in_log("had nothing to do") == 1);
        place_done(&place);
}

TAP_MAIN(TEST(committed_versions_survive_sigkill_of_the_agent),
         TEST(a_version_that_was_waiting_for_storage_is_persisted_by_the_next_agent),
         TEST(a_save_that_the_agent_died_under_goes_on_with_the_next_one),
         TEST(a_killed_trainer_leaves_its_committed_versions_and_no_half_ones),
         TEST(an_image_that_a_loader_keeps_is_replaced_ahead_of_need),
         TEST(the_next_agent_removes_incomplete_copies_of_dead_trainers),
         TEST(two_trainers_with_one_rank_are_told_of_each_other),
         TEST(a_trainer_that_is_just_leaving_makes_way_for_the_next),
         TEST(stop_persists_answers_and_ends_and_stop_now_drops_memory),
         TEST(a_version_that_storage_refused_goes_to_the_next_agent_and_is_persisted_later),
         TEST(an_older_writing_of_a_tag_never_follows_a_newer_one_into_storage),
         TEST(stop_now_ends_an_agent_that_a_signal_had_told_to_finish), TEST(a_second_daemon_finds_the_first_and_succeeds),
         TEST(an_agent_takes_the_memory_that_a_dying_one_still_holds),
         TEST(an_agent_that_does_not_linger_waits_for_the_client_that_started_it),
         TEST(an_agent_that_is_not_needed_ends_by_itself_and_says_so_once))
