/* A real agent on a machine that refuses memory, or whose clock goes backwards, as a table of system calls simulates it. */
#include <errno.h>
#include <stdatomic.h>

#include "agent/agent_client.h"
#include "tap.h"

static struct test_place place;
static struct os_table table;
static const struct os_table *before;
static _Atomic int64_t clock_offset_ns, time_passed_ns;
static atomic_uint refused_count;
static atomic_bool memory_is_refused;
static char hanging[96], slow[96], broken[96]; /* storage paths with that fault; "": none */
static char blocked[128]; /* making this directory fails with blocked_result */
static atomic_int blocked_result;
static _Atomic int64_t slow_until_ns;
static atomic_bool hangs, descriptors_are_refused, sockets_are_refused, pages_are_slow, pages_are_made;

static int refuse_memfd(const char *name)
{
        return memory_is_refused ? -ENOSYS : before->memfd(name);
}

static int refuse_allocate(int fd, uint64_t offset, uint64_t size)
{
        return memory_is_refused ? -ENOSPC : before->allocate(fd, offset, size);
}

/* The image that a save waits for gets its pages later. */
static int refuse_truncate(int fd, uint64_t size)
{
        return memory_is_refused && size >= MEMORY_ROUND ? -ENOSPC : before->truncate(fd, size);
}

static bool is_below(const char *path, const char *directory)
{
        return *directory && !strncmp(path, directory, strlen(directory));
}

static bool is_late_or_never(const char *path, int flags)
{
        while ((flags & OS_WRITE) && ((hangs && is_below(path, hanging)) || (is_below(path, slow) && before->now_ns() < slow_until_ns)))
                before->sleep_ms(5);
        if ((flags & OS_WRITE) && is_below(path, broken)) {
                refused_count++;
                return true;
        }
        return false;
}

static int open_late_or_never(const char *path, int flags)
{
        return is_late_or_never(path, flags) ? -EIO : before->open(path, flags);
}

static int open_below_late_or_never(const char *root, const char *key, int flags)
{
        char path[4096];

        snprintf(path, sizeof path, "%s/%s", root, key);
        return is_late_or_never(path, flags) ? -EIO : before->open_below(root, key, flags);
}

static int refuse_directory(const char *root, const char *key, uint32_t mode)
{
        char path[4096];

        snprintf(path, sizeof path, "%s/%s", root, key);
        return is_below(path, blocked) && blocked_result ? blocked_result : before->mkdir_below(root, key, mode);
}

static int refuse_to_listen(const char *path)
{
        return sockets_are_refused ? -ENOBUFS : before->listen(path);
}

static int advise_slowly(void *data, uint64_t size, enum os_advice advice)
{
        int result = before->advise(data, size, advice);

        if (pages_are_slow && advice == OS_ADVISE_POPULATE_WRITE) {
                pages_are_made = true;
                before->sleep_ms(100);
        }
        return result;
}

static int refuse_duplicate(int fd)
{
        return descriptors_are_refused ? -EMFILE : before->duplicate(fd);
}

static int64_t shifted_wall_ns(void)
{
        return before->wall_ns() + clock_offset_ns;
}

static int64_t shifted_now_ns(void)
{
        return before->now_ns() + time_passed_ns;
}

static bool has_few_descriptors;

static int probe(enum os_probe what, uint64_t *ret_value)
{
        if (what != OS_PROBE_DESCRIPTORS || !has_few_descriptors)
                return before->probe(what, ret_value);
        *ret_value = 64;
        return 0;
}

static struct agent *start(void)
{
        struct nebula_error error = { 0 };
        struct agent *agent = NULL;

        if (agent_start(&place.place, true, &agent, &error))
                printf("# %s\n", error.message);
        return agent;
}

static void begin_bad(void)
{
        place_init(&place);
        before = os;
        table = *os;
        table.memfd = refuse_memfd;
        table.allocate = refuse_allocate;
        table.truncate = refuse_truncate;
        table.open = open_late_or_never;
        table.open_below = open_below_late_or_never;
        table.listen = refuse_to_listen;
        table.mkdir_below = refuse_directory;
        table.advise = advise_slowly;
        table.duplicate = refuse_duplicate;
        table.probe = probe;
        table.wall_ns = shifted_wall_ns;
        table.now_ns = shifted_now_ns;
        memory_is_refused = false;
        clock_offset_ns = 0;
        os = &table;
}

static void end_bad(void)
{
        os = before;
        place_done(&place);
}

/*
 * fault (Memory): The memory directory is full, and memfds are refused.
 * result: That save fails, and says what was tried. The next one may succeed.
 */
static void memory_that_the_machine_refuses_fails_that_save_alone(void)
{
        struct test_client client;
        struct ipc_granted loan;
        struct ipc_found found;
        struct agent *agent;
        uint64_t first, version;

        begin_bad();
        agent = start();
        client_init(&client, &place, 1);
        REQUIRE(agent && !client_connect(&client, &place));
        REQUIRE(!save_whole(&client, "global_step1", 1, &first));
        REQUIRE(!wait_for(&client, first, NEBULA_STATE_DURABLE, 10000));
        memory_is_refused = true;
        version = begin(&client, "global_step2", NEBULA_FILES_ALL_RANKS);
        REQUIRE(version);
        CHECK(copy_image(&client, version, "m", 2, 39u << 20, &loan) == NEBULA_NO_MEMORY);
        CHECK(strstr(client.error.message, "40 MiB") && strstr(client.error.message, "memory directory"));
        CHECK(!find(&client, "", "", &found) && !strcmp(found.tag, "global_step1"));
        memory_is_refused = false;
        CHECK(!load(&client, found.version_id, "model.pt", 1, FILE_BYTES, NULL)); /* from storage, because it has left memory */
        CHECK(!save_whole(&client, "global_step3", 3, NULL));
        client_done(&client);
        agent_stop(agent, true);
        end_bad();
}

static void an_image_that_never_reached_its_trainer_does_not_keep_its_version_open(void)
{
        struct ipc_granted loan;
        struct test_client client;
        struct agent *agent;
        uint64_t version;

        begin_bad();
        agent = start();
        client_init(&client, &place, 1);
        REQUIRE(agent && !client_connect(&client, &place));
        version = begin(&client, "global_step1", NEBULA_FILES_ALL_RANKS);
        REQUIRE(version && !save(&client, version, "model", 1, FILE_BYTES));
        descriptors_are_refused = true;
        CHECK(copy_image(&client, version, "optimizer", 2, FILE_BYTES, &loan) == NEBULA_NO_MEMORY);
        descriptors_are_refused = false;
        CHECK(!of_version(&client, IPC_COMMIT, version) && !wait_for(&client, version, NEBULA_STATE_COMMITTED, 1000));
        CHECK(!load(&client, version, "model", 1, FILE_BYTES, NULL));
        client_done(&client);
        agent_stop(agent, true);
        end_bad();
}

/* From the 33rd image on, each is opened for its trainer by its name. lock_check_files ends an agent that opens it under the catalogue's lock. */
static void images_that_are_not_open_are_opened_without_the_catalogues_lock(void)
{
        struct test_client client;
        struct agent *agent;
        uint64_t version;
        char name[16];

        begin_bad();
        has_few_descriptors = true;
        agent = start();
        client_init(&client, &place, 1);
        REQUIRE(agent && !client_connect(&client, &place));
        version = begin(&client, "global_step1", NEBULA_FILES_ALL_RANKS);
        for (unsigned i = 0; i < 60; i++) {
                snprintf(name, sizeof name, "m%u", i);
                REQUIRE(!save(&client, version, name, i, FILE_BYTES));
        }
        CHECK(!of_version(&client, IPC_COMMIT, version) && !wait_for(&client, version, NEBULA_STATE_DURABLE, 30000));
        CHECK(!load(&client, version, "m59", 59, FILE_BYTES, NULL));
        client_done(&client);
        agent_stop(agent, true);
        has_few_descriptors = false;
        end_bad();
}

/* The agent has adopted the images before it fails. The sanitizers check that it frees everything. */
static void an_agent_that_cannot_listen_leaves_memory_to_the_next_one(void)
{
        struct nebula_error error = { 0 };
        struct ipc_granted loan;
        struct ipc_found found;
        struct test_client client;
        struct agent *agent;
        uint64_t version;
        int source = -1;

        begin_bad();
        agent = start();
        client_init(&client, &place, 1);
        client.hello.persist_path[0] = 0;
        REQUIRE(agent && !client_connect(&client, &place) && !save_whole(&client, "global_step1", 1, NULL));
        version = begin(&client, "global_step2", NEBULA_FILES_ALL_RANKS);
        REQUIRE(version && !copy_image(&client, version, "model.pt", 2, FILE_BYTES, &loan));
        agent_stop(agent, false);
        client_done(&client);

        sockets_are_refused = true;
        CHECK(agent_start(&place.place, true, &agent, &error) == NEBULA_UNAVAILABLE);
        sockets_are_refused = false;
        agent = start();
        REQUIRE(agent && !client_connect(&client, &place) && !find(&client, "", "", &found));
        CHECK(!load(&client, found.version_id, "model.pt", 1, FILE_BYTES, &source) && source == IPC_SOURCE_MEMORY);
        CHECK(!captured(&client, loan.image_id) && !of_version(&client, IPC_COMMIT, version));
        CHECK(!find(&client, "", "", &found) && !strcmp(found.tag, "global_step2"));
        client_done(&client);
        agent_stop(agent, true);
        end_bad();
}

static bool newest_is(struct test_client *client, const char *tag, unsigned seed)
{
        struct ipc_found found;

        return !find(client, "", "", &found) && !strcmp(found.tag, tag) &&
               !load(client, found.version_id, "model.pt", seed, FILE_BYTES, NULL);
}

/* Lets time pass, and wakes the workers. */
static void let_pass(int64_t seconds)
{
        struct test_client other;

        time_passed_ns += seconds * 1000000000;
        client_init(&other, &place, 2);
        other.hello.role = IPC_ROLE_TOOL;
        CHECK(!client_connect(&other, &place));
        client_done(&other);
}

/* Lets the longest back-off pass, several times if needed. Whether the version reaches the state. */
static bool reaches(struct test_client *client, uint64_t version, enum nebula_state state)
{
        for (int i = 0; i < 6000 && state_of(client, version) != (int)state; i++) {
                if (i % 200 == 0)
                        let_pass(40);
                before->sleep_ms(5);
        }
        return state_of(client, version) == (int)state;
}

/* Lets the longest back-off pass in the same way. Whether the worker has tried storage again, without success. */
static bool is_tried(void)
{
        unsigned count = refused_count;

        for (int i = 0; i < 6000 && refused_count == count; i++) {
                if (i % 200 == 0)
                        let_pass(40);
                before->sleep_ms(5);
        }
        return refused_count > count;
}

static void the_newest_version_is_not_given_up_for_what_storage_failed_before_it(void)
{
        struct test_client client;
        uint64_t first, second, third;
        struct agent *agent;

        begin_bad();
        snprintf(broken, sizeof broken, "%s", place.storage);
        agent = start();
        client_init(&client, &place, 1);
        REQUIRE(agent && !client_connect(&client, &place));
        REQUIRE(!save_whole(&client, "global_step1", 1, &first));
        CHECK(is_tried() && is_tried() && state_of(&client, first) == NEBULA_STATE_COMMITTED);
        let_pass(600);
        CHECK(reaches(&client, first, NEBULA_STATE_FAILED));
        REQUIRE(!save_whole(&client, "global_step2", 2, &second));
        CHECK(is_tried() && is_tried() && state_of(&client, second) == NEBULA_STATE_COMMITTED);
        REQUIRE(!save_whole(&client, "global_step3", 3, &third));
        CHECK(reaches(&client, second, NEBULA_STATE_FAILED));
        CHECK(is_tried() && is_tried() && state_of(&client, third) == NEBULA_STATE_COMMITTED);
        broken[0] = 0;
        CHECK(reaches(&client, third, NEBULA_STATE_DURABLE));
        client_done(&client);
        agent_stop(agent, true);
        time_passed_ns = 0;
        end_bad();
}

/* fault: as test_an_obstacle_in_the_place_of_a_tag_blocks_only_that_version_and_is_named */
/* The test runs for every kind of obstacle in the place of one tag. */
static void a_version_whose_place_is_blocked_holds_up_no_other_version(void)
{
        static const int results[] = { -EACCES, -EPERM, -ENOTDIR, -ELOOP, -ENAMETOOLONG, -EDQUOT, -ENOSPC, -EIO };
        struct test_client client;
        struct agent *agent;
        uint64_t first, later;
        char tag[32];

        begin_bad();
        snprintf(blocked, sizeof blocked, "%s/global_step0", place.storage);
        agent = start();
        client_init(&client, &place, 1);
        client.hello.retention_count = 16;
        REQUIRE(agent && !client_connect(&client, &place));
        for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
                blocked_result = results[i];
                snprintf(blocked, sizeof blocked, "%s/global_step%zu", place.storage, 2 * i);
                snprintf(tag, sizeof tag, "global_step%zu", 2 * i);
                REQUIRE(!save_whole(&client, tag, 1, &first));
                CHECK(wait_for(&client, first, NEBULA_STATE_DURABLE, 200) == NEBULA_TIMEOUT);
                CHECK(strstr(client.error.message, tag));
                snprintf(tag, sizeof tag, "global_step%zu", 2 * i + 1);
                REQUIRE(!save_whole(&client, tag, 1, &later));
                CHECK(!wait_for(&client, later, NEBULA_STATE_DURABLE, 10000));
                CHECK(state_of(&client, first) == NEBULA_STATE_COMMITTED);
                blocked_result = 0;
                CHECK(!wait_for(&client, first, NEBULA_STATE_DURABLE, 10000));
        }
        client_done(&client);
        agent_stop(agent, true);
        blocked[0] = 0;
        end_bad();
}

static bool is_stored(const char *storage, const char *tag)
{
        char path[300];

        snprintf(path, sizeof path, "%s/%s/.nebula/manifest-1.json", storage, tag);
        return !access(path, F_OK);
}

/*
 * fault (Storage): Storage fails for one path, and the agent is told to end (SIGTERM, `nebula stop`).
 * result: The agent first finishes the versions of other paths, and other versions of that path, however long that
 * takes. It tries each failed version once more. On SIGTERM it then ends, and leaves versions that are not durable in
 * memory. On `nebula stop` it goes on, and says why.
 */
static void an_agent_that_ends_finishes_what_can_be_written_although_other_storage_fails(void)
{
        struct test_client bad, good;
        struct agent *agent;

        begin_bad();
        snprintf(broken, sizeof broken, "%.64s/broken", place.root);
        snprintf(slow, sizeof slow, "%.64s/slow", place.root);
        snprintf(blocked, sizeof blocked, "%.64s/slow/global_step1", place.root);
        blocked_result = -EACCES;
        slow_until_ns = INT64_MAX;
        agent = start();
        client_init(&bad, &place, 1);
        strcpy(bad.hello.persist_path, broken);
        client_init(&good, &place, 3);
        strcpy(good.hello.persist_path, slow);
        REQUIRE(agent && !client_connect(&bad, &place) && !client_connect(&good, &place));
        REQUIRE(!save_whole(&bad, "global_step1", 1, NULL) && is_tried());
        /* The first of these versions cannot be written either. The worker tries it before the second one. */
        REQUIRE(!save_whole(&good, "global_step1", 1, NULL) && !save_whole(&good, "global_step2", 1, NULL));
        client_done(&bad);
        client_done(&good);
        slow_until_ns = before->now_ns() + 1500000000;
CHECK(!agent_drain(agent)); /* the drain says that a version is left */
        CHECK(is_stored(slow, "global_step2"));
        CHECK(!is_stored(slow, "global_step1") && !is_stored(broken, "global_step1"));
        agent_stop(agent, false);
        broken[0] = slow[0] = blocked[0] = 0;
        time_passed_ns = 0;
        end_bad();
}

static void a_failed_write_is_not_delayed_to_the_next_interval(void)
{
        struct test_client client;
        struct agent *agent;
        uint64_t version;

        begin_bad();
        snprintf(broken, sizeof broken, "%s", place.storage);
        agent = start();
        client_init(&client, &place, 1);
        client.hello.persist_interval_s = 3600;
        REQUIRE(agent && !client_connect(&client, &place));
        REQUIRE(!save_whole(&client, "global_step1", 1, &version));
        CHECK(is_tried() && state_of(&client, version) == NEBULA_STATE_COMMITTED);
        broken[0] = 0;
        CHECK(reaches(&client, version, NEBULA_STATE_DURABLE));
        client_done(&client);
        agent_stop(agent, true);
        time_passed_ns = 0;
        end_bad();
}

/*
 * fault (The machine and other users): The clock goes backwards.
 * result: Later commits stay newer, also for the next agent. No work in progress is swept, and no event is lost.
 */
static void a_clock_that_goes_backwards_makes_nothing_older(void)
{
        struct test_client client;
        struct agent *agent;

        begin_bad();
        agent = start();
        client_init(&client, &place, 2);
        REQUIRE(agent && !client_connect(&client, &place));
        REQUIRE(!save_whole(&client, "monday", 1, NULL));
        clock_offset_ns = -3600ll * 1000000000;
        REQUIRE(!save_whole(&client, "sunday", 2, NULL));
        CHECK(newest_is(&client, "sunday", 2));
        CHECK(!flush(&client, "", 10000));
        client_done(&client);
        agent_stop(agent, true);

        /* The next agent knows the versions only from storage, and its clock is behind their times. */
        clock_offset_ns = -7200ll * 1000000000;
        agent = start();
        REQUIRE(agent && !client_connect(&client, &place));
        CHECK(newest_is(&client, "sunday", 2));
        REQUIRE(!save_whole(&client, "saturday", 3, NULL));
        CHECK(!flush(&client, "", 10000));
        CHECK(newest_is(&client, "saturday", 3));
        client_done(&client);
        agent_stop(agent, true);
        agent = start();
        REQUIRE(agent && !client_connect(&client, &place));
        CHECK(newest_is(&client, "saturday", 3));
        client_done(&client);
        agent_stop(agent, true);
        end_bad();
}

/* fault: as a_clock_that_goes_backwards_makes_nothing_older */
static void a_clock_that_goes_backwards_hides_no_event(void)
{
        struct ipc_watch request = { .since = (double)os->wall_ns() / 1e9, .timeout_ms = 10000 };
        struct test_client client;
        struct agent *agent;
        char tag[32];

        begin_bad();
        agent = start();
        client_init(&client, &place, 2);
        REQUIRE(agent && !client_connect(&client, &place));
        for (unsigned i = 1; i < 4; i++) {
                const struct ipc_event *event;

                snprintf(tag, sizeof tag, "global_step%u", i);
                REQUIRE(!save_whole(&client, tag, i, NULL));
                CHECK(!flush(&client, "", 10000) && !ask(&client, IPC_WATCH, &request, sizeof request));
                event = client.frame.payload;
                CHECK(event->kind == NEBULA_EVENT_DURABLE && !strcmp(event->tag, tag) && event->at > request.since);
                request.since = event->at;
                request.timeout_ms = 100; /* it is durable before a client asks for it */
                clock_offset_ns -= 3600ll * 1000000000;
        }
        client_done(&client);
        agent_stop(agent, true);
        end_bad();
}

/* fault: as a_clock_that_goes_backwards_makes_nothing_older */
static void a_clock_that_goes_backwards_sweeps_no_work_in_progress(void)
{
        struct test_client client;
        struct agent *agent;
        char path[300];
        FILE *file;

        begin_bad();
        snprintf(path, sizeof path, "%s/global_step9/.nebula", place.storage);
        CHECK(!os_make_dirs(path, 0755));
        snprintf(path, sizeof path, "%s/global_step9/.nebula/tmp-1-1", place.storage);
        file = fopen(path, "w");
        REQUIRE(file);
        fclose(file);
        clock_offset_ns = -3600ll * 1000000000;
        agent = start();
        client_init(&client, &place, 3);
        REQUIRE(agent && !client_connect(&client, &place));
        REQUIRE(!save_whole(&client, "global_step1", 1, NULL));
        CHECK(!flush(&client, "", 10000));
        CHECK(access(path, F_OK) == 0);
        client_done(&client);
        agent_stop(agent, true);
        end_bad();
}

/* Sets the memory budget of the next agent: memory for `count` images. */
static void room_for_images(unsigned count)
{
        char text[32];

        snprintf(text, sizeof text, "%llu", (unsigned long long)(count * memory_capacity(FILE_BYTES)));
        setenv("NEBULA_MEMORY_BUFFER_SIZE", text, 1);
}

/* Starts an agent with two jobs, a path for each, and memory for two images. The first job has saved, and its storage hangs. */
static bool start_crowded(struct agent **ret_agent, struct test_client *stuck, struct test_client *other)
{
        begin_bad();
        snprintf(hanging, sizeof hanging, "%.64s/hanging", place.root);
        snprintf(slow, sizeof slow, "%.64s/slow", place.root);
        hangs = true;
        slow_until_ns = INT64_MAX;
        room_for_images(2);
        setenv("NEBULA_MEMORY_WAIT", "1", 1);
        *ret_agent = start();
        unsetenv("NEBULA_MEMORY_BUFFER_SIZE");
        unsetenv("NEBULA_MEMORY_WAIT");
        client_init(stuck, &place, 1);
        strcpy(stuck->hello.persist_path, hanging);
        client_init(other, &place, 2);
        strcpy(other->hello.persist_path, slow);
        return *ret_agent && !client_connect(stuck, &place) && !client_connect(other, &place) &&
               !save_whole(stuck, "global_step1", 1, NULL);
}

static void end_crowded(struct agent *agent, struct test_client *stuck, struct test_client *other)
{
        hangs = false;
        slow_until_ns = 0;
        client_done(stuck);
        client_done(other);
        agent_stop(agent, true);
        hanging[0] = slow[0] = 0;
        end_bad();
}

static void the_room_that_a_save_reclaims_is_not_taken_for_a_spare_image(void)
{
        struct test_client stuck, other;
        struct agent *agent;

        REQUIRE(start_crowded(&agent, &stuck, &other));
        CHECK(!save_whole(&other, "global_step1", 1, NULL)); /* while the first job's spare is being made */
        end_crowded(agent, &stuck, &other);
}

/* No version may leave memory, and no write is running. The only memory to come is a spare image whose pages are being made. */
static void a_spare_image_that_is_being_made_is_waited_for(void)
{
        struct test_client first, second;
        struct ipc_found found;
        struct agent *agent;
        FILE *file;

        begin_bad();
        client_init(&second, &place, 2);
        snprintf(second.hello.persist_path, sizeof second.hello.persist_path, "%.64s/other", place.root);
        agent = start();
        REQUIRE(agent && !client_connect(&second, &place) && !save_whole(&second, "global_step1", 1, NULL));
        CHECK(!flush(&second, "", 10000));
        client_done(&second);
        agent_stop(agent, true);

        file = fopen(place.storage, "w"); /* nothing can be stored there */
        REQUIRE(file);
        fclose(file);
        pages_are_slow = true;
        for (int loads = 0; loads < 2; loads++) {
                room_for_images(2);
                agent = start();
                unsetenv("NEBULA_MEMORY_BUFFER_SIZE");
                client_init(&first, &place, 1);
                pages_are_made = false;
                REQUIRE(agent && !client_connect(&first, &place) && !client_connect(&second, &place));
                CHECK(!find(&second, "", "global_step1", &found) && !save_whole(&first, "global_step1", 1, NULL));
                for (int i = 0; i < 10000 && !pages_are_made; i++)
                        usleep(1000);
                CHECK(pages_are_made);
                CHECK(!(loads ? load(&second, found.version_id, "model.pt", 1, FILE_BYTES, NULL) :
                                save_whole(&second, "global_step2", 2, NULL)));
                client_done(&first);
                client_done(&second);
                agent_stop(agent, true);
        }
        pages_are_slow = false;
        end_bad();
}

/* fault: as test_a_trainer_waits_once_for_storage_that_hangs_and_not_at_every_save */
static void storage_that_hangs_fails_no_saves_of_other_jobs(void)
{
        struct test_client stuck, other;
        struct agent *agent;

        REQUIRE(start_crowded(&agent, &stuck, &other));
        CHECK(!save_whole(&other, "global_step1", 1, NULL));
        CHECK(save_whole(&stuck, "global_step2", 2, NULL) == NEBULA_NO_MEMORY); /* the save has waited for its time limit */
        slow_until_ns = os->now_ns() + 200000000;
        CHECK(!save_whole(&other, "global_step2", 2, NULL));
        hangs = false;
        CHECK(!flush(&stuck, "", 10000));
        CHECK(!save_whole(&stuck, "global_step4", 4, NULL));
        end_crowded(agent, &stuck, &other);
}

static int opendir_late(const char *root, const char *key, struct os_dir **ret_dir)
{
        before->sleep_ms(is_below(root, place.storage) ? 100 : 0);
        return before->opendir_below(root, key, ret_dir);
}

/* Storage answers the first listing slowly, and a client asks the new agent at once. */
static void a_file_that_carries_over_is_found_as_soon_as_its_tag_is_complete(void)
{
        struct test_client client;
        struct ipc_found found;
        struct agent *agent;
        uint64_t version;

        begin_bad();
        agent = start();
        client_init(&client, &place, 1);
        REQUIRE(agent && !client_connect(&client, &place));
        REQUIRE(!save_whole(&client, "global_step1", 1, NULL) && !flush(&client, "", 10000));
        client_done(&client);
        agent_stop(agent, true);
        table.opendir_below = opendir_late;
        agent = start();
        REQUIRE(agent && !client_connect(&client, &place));
        version = begin(&client, "global_step1", 1);
        REQUIRE(version && !save(&client, version, "more.pt", 2, FILE_BYTES));
        REQUIRE(!find(&client, "", "", &found) && found.version_id == version);
        CHECK(!load(&client, version, "model.pt", 1, FILE_BYTES, NULL));
        CHECK(!load(&client, version, "more.pt", 2, FILE_BYTES, NULL));
        client_done(&client);
        agent_stop(agent, true);
        end_bad();
}

static atomic_bool is_held;

static int open_without_secret(const char *root, const char *key, int flags)
{
        while (!strcmp(key, ".nebula/secret")) {
                is_held = true;
                before->sleep_ms(5);
        }
        return before->open_below(root, key, flags);
}

/* Runs in a process of its own, because one of its threads never ends. */
static void end_while_the_secret_cannot_be_read(void)
{
        struct ipc_stop request = { .now = true };
        struct test_client client;
        struct agent *agent;

        alarm(30);
        begin_bad();
        table.open_below = open_without_secret;
        agent = start();
        client_init(&client, &place, 1);
        client.hello.replica_count = 1;
        if (!agent || client_connect(&client, &place) || save_whole(&client, "global_step1", 1, NULL))
                _exit(1);
        while (!is_held)
                before->sleep_ms(5);
        if (ipc_send(client.fd, IPC_STOP, NEBULA_OK, &request, sizeof request, -1, &client.error))
                _exit(2);
        before->sleep_ms(100);
        agent_stop(agent, true);
        os = before;
        place_done(&place);
        _exit(0);
}

static void storage_that_holds_the_secret_of_the_copies_does_not_hold_up_the_end(void)
{
        pid_t child = fork();
        int status = -1;

        REQUIRE(child >= 0);
        if (!child)
                end_while_the_secret_cannot_be_read();
        REQUIRE(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TAP_MAIN(TEST(memory_that_the_machine_refuses_fails_that_save_alone),
         TEST(an_image_that_never_reached_its_trainer_does_not_keep_its_version_open),
         TEST(images_that_are_not_open_are_opened_without_the_catalogues_lock),
         TEST(the_newest_version_is_not_given_up_for_what_storage_failed_before_it),
         TEST(a_version_whose_place_is_blocked_holds_up_no_other_version),
         TEST(an_agent_that_ends_finishes_what_can_be_written_although_other_storage_fails),
         TEST(a_failed_write_is_not_delayed_to_the_next_interval),
         TEST(a_clock_that_goes_backwards_makes_nothing_older),
         TEST(a_clock_that_goes_backwards_hides_no_event),
         TEST(a_clock_that_goes_backwards_sweeps_no_work_in_progress),
         TEST(an_agent_that_cannot_listen_leaves_memory_to_the_next_one),
         TEST(the_room_that_a_save_reclaims_is_not_taken_for_a_spare_image), TEST(a_spare_image_that_is_being_made_is_waited_for),
         TEST(storage_that_hangs_fails_no_saves_of_other_jobs),
         TEST(a_file_that_carries_over_is_found_as_soon_as_its_tag_is_complete),
         TEST(storage_that_holds_the_secret_of_the_copies_does_not_hold_up_the_end))
