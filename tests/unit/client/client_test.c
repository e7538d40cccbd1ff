#include "nebula.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "capture/cow.h"
#include "client/client.h"
#include "fake_agent.h"
#include "os/ending.h"
#include "tap.h"

static struct nebula_error error;
static struct nebula_options options;
static nebula_session *session;
static nebula_checkpoint *checkpoint;
static char own_path[IPC_PATH_MAX];

static void start(void)
{
        nebula_options_init(&options);
        options.persist_path = "/storage";
        options.agent_path = "/nonexistent/nebula"; /* the real one must not be started by accident */
        memset(&error, 0, sizeof error);
        fake_start();
        session = NULL;
        if (nebula_session_open(&options, &session, &error) != NEBULA_OK) {
                printf("# %s\n", error.message);
                abort();
        }
}

static void end(void)
{
        nebula_checkpoint_free(checkpoint);
        checkpoint = NULL;
        nebula_session_close(session);
        fake_stop();
}

static bool ok(enum nebula_status status)
{
        if (status != NEBULA_OK)
                printf("# %s: %s\n", nebula_status_name(status), error.message);
        return status == NEBULA_OK;
}

/* Whether the agent has these bytes under a name. */
static bool holds(const char *tag, const char *name, const void *data, size_t size)
{
        nebula_checkpoint *found = NULL;
        nebula_map *map = NULL;
        bool same = false;

        if (ok(nebula_checkpoint_find(session, tag, NULL, &found, &error)) &&
            ok(nebula_checkpoint_map(found, name, &map, &error)))
                same = nebula_map_size(map) == size && (size == 0 || !memcmp(nebula_map_data(map), data, size));
        nebula_map_free(map);
        nebula_checkpoint_free(found);
        return same;
}

static bool save(const char *tag, const char *name, const void *data, size_t size)
{
        struct nebula_range range = { data, size };
        bool saved;

        nebula_checkpoint_free(checkpoint);
        checkpoint = NULL;
        saved = ok(nebula_checkpoint_begin(session, tag, NEBULA_FILES_ALL_RANKS, &checkpoint, &error)) &&
                ok(nebula_checkpoint_save_bytes(checkpoint, name, &range, 1, &error)) &&
                ok(nebula_checkpoint_commit(checkpoint, &error));
        return saved;
}

static void the_agent_is_told_what_was_asked_for(void)
{
        start();
        CHECK(fake.hello.version == IPC_VERSION && fake.hello.role == IPC_ROLE_TRAINER);
        CHECK(fake.hello.pid == os->pid() && fake.hello.world == 1 && fake.hello.retention_count == 1);
        CHECK(strcmp(fake.hello.persist_path, "/storage") == 0 && fake.hello.session_nonce != 0);
        end();
}

static void a_file_of_bytes_is_the_ranges_in_order(void)
{
        struct nebula_range ranges[] = { { "one", 3 }, { "", 0 }, { NULL, 0 }, { "two", 3 } };

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "a/b", ranges, 4, &error)));
        CHECK(fake.captured.blocked_ns > 0 && fake.captured.copy_ns > 0);
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
        CHECK(holds("t", "a/b", "onetwo", 6));
        end();
}

static void an_empty_file_can_be_saved_and_read(void)
{
        start();
        CHECK(save("t", "empty", "", 0));
        CHECK(holds("t", "empty", "", 0));
        end();
}

static void tensors_come_back_with_shape_and_values(void)
{
        float values[6] = { 1, 2, 3, 4, 5, 6 };
        int64_t step = 42;
        struct nebula_tensor tensors[] = {
                { .name = "u", .dtype = NEBULA_DTYPE_F32, .dim_count = 2, .shape = { 2, 3 }, .data = values },
                { .name = "step", .dtype = NEBULA_DTYPE_I64, .dim_count = 0, .data = &step },
                { .name = "none", .dtype = NEBULA_DTYPE_U8, .dim_count = 1, .shape = { 0 }, .data = NULL },
        };
        struct nebula_tensor read = { 0 };
        nebula_map *map = NULL;

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_tensors(checkpoint, "state.pt", tensors, 3, &error)));
        values[0] = 99; /* too late to matter */
        step = 0;
        REQUIRE(ok(nebula_checkpoint_map(checkpoint, "state.pt", &map, &error)));
        CHECK(ok(nebula_map_tensor(map, "u", &read, &error)));
        CHECK(read.dtype == NEBULA_DTYPE_F32 && read.dim_count == 2 && read.shape[0] == 2 && read.shape[1] == 3);
        CHECK(((const float *)read.data)[0] == 1.0f && ((const float *)read.data)[5] == 6.0f);
        CHECK(ok(nebula_map_tensor(map, "step", &read, &error)) && *(const int64_t *)read.data == 42);
        CHECK(ok(nebula_map_tensor(map, "none", &read, &error)) && read.shape[0] == 0);
        CHECK(nebula_map_tensor(map, "absent", &read, &error) == NEBULA_NOT_FOUND);
        nebula_map_free(map);
        end();
}

static void plain_bytes_hold_no_tensors(void)
{
        struct nebula_tensor read;
        nebula_map *map = NULL;

        start();
        CHECK(save("t", "raw", "abc", 3));
        REQUIRE(ok(nebula_checkpoint_map(checkpoint, "raw", &map, &error)));
        CHECK(nebula_map_tensor(map, "u", &read, &error) == NEBULA_INVALID);
        nebula_map_free(map);
        end();
}

static void a_hundred_thousand_storages_are_no_trouble(void)
{
        size_t count = 100000;
        struct nebula_range *ranges = malloc(count * sizeof *ranges);
        char *data = malloc(count);

        for (size_t i = 0; i < count; i++) {
                data[i] = (char)i;
                ranges[i] = (struct nebula_range){ data + i, 1 };
        }
        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_pickle(checkpoint, "many", "\x80\x02}.", 4, ranges, count, &error)));
        end();
        free(ranges);
        free(data);
}

static void callers_mistakes_are_named_and_sent_nowhere(void)
{
        struct nebula_range missing = { NULL, 5 };
        char long_name[400];
        int sent;

        memset(long_name, 'x', sizeof long_name);
        long_name[sizeof long_name - 1] = '\0';
        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        sent = fake_seen(IPC_BEGIN) + fake_seen(IPC_IMAGE);
        CHECK(nebula_checkpoint_begin(session, "", 1, &checkpoint, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_begin(session, long_name, 1, &checkpoint, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_begin(session, "\xff\xfe", 1, &checkpoint, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_begin(session, "t", 0, &checkpoint, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_begin(session, "t", -3, &checkpoint, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_begin(NULL, "t", 1, &checkpoint, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_save_bytes(checkpoint, "", &missing, 0, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_save_bytes(checkpoint, long_name, &missing, 0, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_save_bytes(checkpoint, "n", &missing, 1, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_save_bytes(checkpoint, "n", NULL, 1, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_save_pickle(checkpoint, "n", NULL, 0, NULL, 0, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_save_tensors(checkpoint, "n", NULL, 2, &error) == NEBULA_INVALID);
        CHECK(nebula_checkpoint_save_bytes(checkpoint, "n", &missing, 1, NULL) == NEBULA_INVALID); /* no error wanted */
        CHECK(sent == fake_seen(IPC_BEGIN) + fake_seen(IPC_IMAGE));
        end();
}

static void options_that_make_no_sense_are_refused(void)
{
        nebula_session *none = NULL;

        nebula_options_init(&options);
        options.rank = 1;
        CHECK(nebula_session_open(&options, &none, &error) == NEBULA_INVALID && strstr(error.message, "rank"));
        nebula_options_init(&options);
        options.retention_count = 0;
        CHECK(nebula_session_open(&options, &none, &error) == NEBULA_INVALID);
        nebula_options_init(&options);
        options.persist_interval_s = -1;
        CHECK(nebula_session_open(&options, &none, &error) == NEBULA_INVALID);
        nebula_options_init(&options);
        options.persist_path = "relative/path";
        CHECK(nebula_session_open(&options, &none, &error) == NEBULA_INVALID && strstr(error.message, "absolute"));
        nebula_options_init(&options);
        options.struct_size = 8;
        CHECK(nebula_session_open(&options, &none, &error) == NEBULA_INVALID);
        CHECK(nebula_session_open(NULL, &none, &error) == NEBULA_INVALID);
        nebula_options_init(NULL);
        CHECK(none == NULL);
}

/* Documents are JSON: no checkpoint could be written. A directory's name may be any bytes. */
static void names_that_no_document_can_hold_are_refused_when_they_are_given(void)
{
        nebula_session *none = NULL;
        const char **const texts[] = { &options.persist_path, &options.job, &options.run };

        for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
                nebula_options_init(&options);
                *texts[i] = "/caf\xe9";
                CHECK(nebula_session_open(&options, &none, &error) == NEBULA_INVALID && strstr(error.message, "is not valid UTF-8"));
        }
        CHECK(none == NULL);
        start();
        options.output_dir = "/caf\xe9";
        CHECK(ok(nebula_session_configure(session, &options, &error)));
        options.job = "caf\xe9";
        CHECK(nebula_session_configure(session, &options, &error) == NEBULA_INVALID);
        options.job = "caf\xc3\xa9";
        CHECK(ok(nebula_session_configure(session, &options, &error)));
        end();
}

static void equal_settings_send_nothing_and_new_ones_apply(void)
{
        start();
        CHECK(ok(nebula_session_configure(session, &options, &error)));
        CHECK(fake_seen(IPC_CONFIGURE) == 0);
        options.persist_interval_s = 7;
        CHECK(ok(nebula_session_configure(session, &options, &error)));
        CHECK(fake_seen(IPC_CONFIGURE) == 1 && fake.hello.persist_interval_s == 7.0);
        CHECK(ok(nebula_session_configure(session, &options, &error)));
        CHECK(fake_seen(IPC_CONFIGURE) == 1);
        end();
}

static void the_agents_refusal_is_passed_on_in_its_words(void)
{
        struct nebula_range range = { "abc", 3 };

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        fake.refuse[IPC_IMAGE] = NEBULA_NO_MEMORY;
        CHECK(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error) == NEBULA_NO_MEMORY);
        CHECK(error.status == NEBULA_NO_MEMORY && strcmp(error.message, "the fake agent refuses") == 0);
        CHECK(fake_seen(IPC_IMAGE) == 1 && fake_seen(IPC_HELLO) == 1); /* a no is final */
        end();
}

/* Each connection is a thread of the agent. */
static void waits_one_after_the_other_share_a_connection(void)
{
        start();
        CHECK(save("t", "n", "abc", 3));
        for (int i = 0; i < 3; i++)
                CHECK(ok(nebula_checkpoint_wait(checkpoint, NEBULA_STATE_COMMITTED, 1000, &error)));
        CHECK(fake_seen(IPC_WAIT) == 3 && fake_seen(IPC_HELLO) == 2); /* the session's, and that of the waits */
        end();
}

static const struct os_table *real_os;
static atomic_bool is_late;

/* As if the first look took its five seconds. */
static int poll_late(int fd, int64_t timeout_ms)
{
        return timeout_ms == CLIENT_SILENT_MS && atomic_load(&is_late) ? 0 : real_os->poll(fd, timeout_ms);
}

/*
 * fault (The machine and other users): The agent is stopped (SIGSTOP) while a trainer saves.
 * result: After 5 s `agent.log` says which process waits for which. The call fails after a minute, or after 15 minutes
 * if it may have to wait for memory. Training goes on.
 */
static void an_agent_that_is_silent_is_named_once_in_its_log(void)
{
        struct os_table late = *os;
        char path[IPC_PATH_MAX], expected[100], *text = NULL, *line;
        size_t size;
        int fd;

        real_os = os;
        late.poll = poll_late;
        os = &late; /* while no other thread looks at it */
        start();
        snprintf(path, sizeof path, "%s/agent.log", getenv("NEBULA_RUNTIME_DIR"));
        fd = os->open(path, OS_WRITE | OS_CREATE);
        REQUIRE(fd >= 0);
        os->close(fd);
        CHECK(save("a", "n", "abc", 3));
        atomic_store(&is_late, true);
        CHECK(save("b", "n", "abc", 3));
        CHECK(save("c", "n", "abc", 3));
        atomic_store(&is_late, false);
        REQUIRE(!os_read_file(path, 4096, &text, &size));
        snprintf(expected, sizeof expected, "warn process %u waits for the agent", os->pid());
        line = strstr(text, expected);
        CHECK(line && !strstr(line + 1, expected));
        free(text);
        end();
        os = real_os;
}

static atomic_llong clock_ahead_ns;
static atomic_int busy_connects, greeting_polls;

static int64_t now_ahead(void)
{
        return real_os->now_ns() + atomic_load(&clock_ahead_ns);
}

/* The first attempt takes almost all of the time that there is. */
static int connect_busy(const char *path)
{
        if (atomic_fetch_sub(&busy_connects, 1) <= 0)
                return real_os->connect(path);
        atomic_fetch_add(&clock_ahead_ns, 9900000000);
        return -EAGAIN;
}

static void sleep_for_long(int64_t time_ms)
{
        atomic_fetch_add(&clock_ahead_ns, 200000000);
        real_os->sleep_ms(time_ms);
}

static int poll_counted(int fd, int64_t timeout_ms)
{
        atomic_fetch_add(&greeting_polls, 1);
        return real_os->poll(fd, timeout_ms);
}

/* A wait without a limit would not poll. */
static void an_agent_that_is_reached_late_has_limited_time_for_its_answer(void)
{
        struct os_table busy = *os;
        int status = -1;
        pid_t child;

        start();
        child = fork();
        if (child == 0) {
                nebula_session *late = NULL;

                alarm(20);
                real_os = os;
                busy.now_ns = now_ahead;
                busy.connect = connect_busy;
                busy.sleep_ms = sleep_for_long;
                busy.poll = poll_counted;
                os = &busy;
                atomic_store(&busy_connects, 1);
                if (nebula_session_open(&options, &late, &error) != NEBULA_OK)
                        _exit(2);
                _exit(atomic_load(&greeting_polls) > 0 && atomic_load(&busy_connects) < 0 ? 0 : 1);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        end();
}

static void a_kept_connection_whose_agent_is_gone_is_no_try(void)
{
        start();
        CHECK(save("t", "n", "abc", 3));
        CHECK(ok(nebula_checkpoint_wait(checkpoint, NEBULA_STATE_COMMITTED, 1000, &error)));
        fake_dies_at(IPC_IMAGE, 1); /* while the connection of that wait is kept */
        CHECK(save("t2", "n", "abc", 3));
        fake_dies_at(IPC_WAIT, 1);
        CHECK(ok(nebula_checkpoint_wait(checkpoint, NEBULA_STATE_COMMITTED, 1000, &error)));
        CHECK(fake_deaths_left(IPC_WAIT) == 0);
        end();
}

/* Everything a job does, once. */
static bool whole_job(const char *tag)
{
        enum nebula_state state = NEBULA_STATE_FAILED;
        char *text = NULL, empty[40];
        bool done;

        snprintf(empty, sizeof empty, "%s-empty", tag);
        nebula_checkpoint_free(checkpoint);
        checkpoint = NULL;
        done = ok(nebula_checkpoint_begin(session, empty, NEBULA_FILES_ALL_RANKS, &checkpoint, &error)) &&
               ok(nebula_checkpoint_commit(checkpoint, &error)); /* nothing saved: a BEGIN of its own */
        done = done && save(tag, "n", tag, strlen(tag)) && ok(nebula_checkpoint_state(checkpoint, &state, &error)) &&
               state == NEBULA_STATE_COMMITTED &&
               ok(nebula_checkpoint_wait(checkpoint, NEBULA_STATE_COMMITTED, 1000, &error)) &&
               ok(nebula_session_flush(session, NULL, 1000, &error)) &&
               ok(nebula_checkpoint_report(checkpoint, &text, &error)) && !strcmp(text, "{\"a\":1}");
        nebula_text_free(text);
        text = NULL;
        done = done && ok(nebula_session_report(session, NEBULA_REPORT_STATUS, NULL, &text, &error)) &&
               !strcmp(text, "{\"a\":1}");
        nebula_text_free(text);
        options.persist_interval_s += 1;
        return done && ok(nebula_session_configure(session, &options, &error)) && holds(tag, "n", tag, strlen(tag));
}

/*
 * fault (Deaths): The agent is killed while it commits.
 * result: The client repeats the request at the next agent, whichever request it was.
 */
static void an_agent_that_dies_at_any_request_is_survived(void)
{
        static const enum ipc_type types[] = { IPC_CONFIGURE, IPC_BEGIN, IPC_IMAGE, IPC_CAPTURED, IPC_COMMIT, IPC_WAIT,
                                               IPC_STATE, IPC_FIND, IPC_OPEN, IPC_FLUSH, IPC_REPORT, IPC_DESCRIBE };

        start();
        for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
                uint64_t nonce = fake.hello.session_nonce;
                char tag[32];

                snprintf(tag, sizeof tag, "step%zu", i);
                fake_dies_at(types[i], 1);
                CHECK(whole_job(tag));
                CHECK(fake_deaths_left(types[i]) == 0);           /* it did die */
                CHECK(fake.hello.session_nonce == nonce);    /* and the agent recognizes the session */
        }
        end();
}

/* fault: as test_an_agent_that_was_stopped_between_a_save_and_its_commit_costs_nothing */
static void a_lost_image_is_captured_again(void)
{
        start();
        fake.forgets = true;
        fake_dies_at(IPC_CAPTURED, 1);
        CHECK(save("t", "n", "value", 5));
        CHECK(ok(nebula_session_settle(session, -1, &error)));
        CHECK(fake_seen(IPC_IMAGE) == 2 && fake.commit_count == 1 && fake.captured_at_commit == 1);
        CHECK(holds("t", "n", "value", 5));
        end();
}

static bool save_one_of_all(const char *tag, int64_t count)
{
        static const struct nebula_range range = { "abc", 3 };

        return ok(nebula_checkpoint_begin(session, tag, count, &checkpoint, &error)) &&
               ok(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error));
}

static void the_commit_of_a_rank_brings_the_word_that_its_file_is_whole(void)
{
        start();
        CHECK(save_one_of_all("t", NEBULA_FILES_ALL_RANKS));
        CHECK(fake_seen(IPC_CAPTURED) == 0);
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
        CHECK(fake_seen(IPC_CAPTURED) == 1 && fake_seen(IPC_COMMIT) == 0);
        CHECK(fake.commit_count == 1 && fake.captured_at_commit == 1);
        end();
}

/* The agent is told at once of a file that is complete without a commit, or may be when its rank ends. */
static void only_a_commit_that_must_follow_is_waited_for(void)
{
        start();
        CHECK(save_one_of_all("one", 1) && fake_seen(IPC_CAPTURED) == 1);
        nebula_checkpoint_free(checkpoint);
        CHECK(save_one_of_all("open", NEBULA_FILES_OPEN) && fake_seen(IPC_CAPTURED) == 2);
        end();
}

static void every_request_follows_the_message_that_a_file_is_complete(void)
{
        static const struct nebula_range range = { "abc", 3 };
        nebula_checkpoint *first;
        char *text;

        start();
        CHECK(save_one_of_all("t", NEBULA_FILES_ALL_RANKS));
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "another", &range, 1, &error)) && fake_seen(IPC_CAPTURED) == 1);
        CHECK(nebula_checkpoint_wait(checkpoint, NEBULA_STATE_COMMITTED, 0, &error) == NEBULA_TIMEOUT);
        CHECK(fake_seen(IPC_CAPTURED) == 2 && fake.commit_count == 0);
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)) && fake_seen(IPC_COMMIT) == 1 && fake.captured_at_commit == 2);
        first = checkpoint;
        CHECK(save_one_of_all("next", NEBULA_FILES_ALL_RANKS) && fake_seen(IPC_CAPTURED) == 2);
        CHECK(ok(nebula_checkpoint_report(first, &text, &error)) && fake_seen(IPC_CAPTURED) == 3);
        nebula_text_free(text);
        nebula_checkpoint_free(first);
        nebula_checkpoint_free(checkpoint);
        CHECK(save_one_of_all("last", NEBULA_FILES_ALL_RANKS));
        CHECK(ok(nebula_session_flush(session, NULL, -1, &error)) && fake_seen(IPC_CAPTURED) == 4);
        end();
}

static void a_file_that_no_agent_could_be_told_of_is_not_forgotten_for_the_next(void)
{
        static const struct nebula_range range = { "abc", 3 };

        start();
        CHECK(save_one_of_all("t", NEBULA_FILES_ALL_RANKS));
        fake_dies_at(IPC_CAPTURED, 2); /* and no third is tried for one request */
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "another", &range, 1, &error)) && !fake_deaths_left(IPC_CAPTURED));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)) && fake.commit_count == 1 && fake.captured_at_commit == 2);
        end();
}

static void a_file_that_no_agent_could_be_told_of_is_captured_again_by_one_that_forgot_it(void)
{
        static const struct nebula_range range = { "xyz", 3 };

        start();
        fake.forgets = true;
        CHECK(save_one_of_all("t", NEBULA_FILES_ALL_RANKS));
        fake_dies_at(IPC_CAPTURED, 2);
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "another", &range, 1, &error)));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)) && ok(nebula_session_settle(session, -1, &error)));
        CHECK(fake.commit_count == 1 && fake.captured_at_commit == 2 && fake_seen(IPC_IMAGE) == 3);
        CHECK(holds("t", "n", "abc", 3) && holds("t", "another", "xyz", 3));
        end();
}

static void a_file_that_no_agent_could_be_told_of_outlives_the_leave_of_its_session(void)
{
        start();
        fake.forgets = true;
        CHECK(save_one_of_all("t", NEBULA_FILES_ALL_RANKS));
        fake_dies_at(IPC_CAPTURED, 2);
        nebula_session_leave(session);
        CHECK(!fake_deaths_left(IPC_CAPTURED));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)) && ok(nebula_session_settle(session, -1, &error)));
        CHECK(fake.commit_count == 1 && fake.captured_at_commit == 1 && holds("t", "n", "abc", 3));
        end();
}

static void a_file_that_is_saved_again_when_its_session_leaves_is_whole(void)
{
        start();
        fake.forgets = true;
        CHECK(save_one_of_all("t", NEBULA_FILES_ALL_RANKS));
        fake_dies_at(IPC_CAPTURED, 1);
        nebula_session_leave(session);
        CHECK(!fake_deaths_left(IPC_CAPTURED) && fake_seen(IPC_IMAGE) == 2);
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)) && ok(nebula_session_settle(session, -1, &error)));
        CHECK(fake.commit_count == 1 && fake.captured_at_commit == 1 && holds("t", "n", "abc", 3));
        end();
}

static void a_file_that_is_saved_again_before_a_change_of_job_is_of_the_job_before(void)
{
        start();
        fake.forgets = true;
        CHECK(save_one_of_all("t", NEBULA_FILES_ALL_RANKS));
        fake_dies_at(IPC_CAPTURED, 1);
        options.job = "another";
        CHECK(ok(nebula_session_configure(session, &options, &error)) && !fake_deaths_left(IPC_CAPTURED));
        CHECK(fake_seen(IPC_IMAGE) == 2 && fake.captured_at_configure == 1);
        CHECK(ok(nebula_session_settle(session, -1, &error)) && fake_seen(IPC_IMAGE) == 2 && fake_seen(IPC_CONFIGURE) == 1);
        end();
}

static void a_commit_says_whether_its_checkpoint_has_saved_a_file_since_the_last(void)
{
        struct nebula_range range = { "abc", 3 };

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)) && ok(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error)));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)) && fake_seen(IPC_COMMIT) == 1 && fake.commit_has_saved);
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)) && fake_seen(IPC_COMMIT) == 2 && !fake.commit_has_saved);
        nebula_checkpoint_free(checkpoint);
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)) && fake_seen(IPC_COMMIT) == 3 && !fake.commit_has_saved);
        end();
}

static void a_version_that_failed_before_the_commit_is_said_to_have_failed(void)
{
        start();
        CHECK(save_one_of_all("t", NEBULA_FILES_ALL_RANKS));
        fake.refuse[IPC_CAPTURED] = NEBULA_NOT_FOUND;
        fake.refuse[IPC_COMMIT] = NEBULA_FAILED;
        CHECK(nebula_checkpoint_commit(checkpoint, &error) == NEBULA_FAILED && fake_seen(IPC_IMAGE) == 1);
        end();
}

/* A caller that writes the second of three ranges itself, when it is waited for. */
static struct filling {
        char *to;
        int fill_count, filled_count, released_count, unmapped_count;
        bool fill_fails, filled_fails, was_lost;
        _Atomic bool may_end, is_closed;
        nebula_checkpoint *asks;
} filling;

static enum nebula_status filling_fill(void *argument, void *image, uint64_t image_bytes, const uint64_t *offsets,
                                       struct nebula_error *ret_error)
{
        struct filling *at = argument;

        at->fill_count++;
        at->to = (char *)image + offsets[1];
        if (at->fill_fails || offsets[2] + 3 > image_bytes)
                return error_set(ret_error, NEBULA_NOT_FOUND, 0, "no device");
        return NEBULA_OK;
}

static enum nebula_status filling_fill_one(void *argument, void *image, uint64_t image_bytes, const uint64_t *offsets,
                                           struct nebula_error *ret_error)
{
        struct filling *at = argument;

        (void)image_bytes, (void)ret_error;
        at->to = (char *)image + offsets[0];
        return NEBULA_OK;
}

static enum nebula_status filling_filled(void *argument, struct nebula_error *ret_error)
{
        struct filling *at = argument;

        while (!atomic_load(&at->may_end))
                usleep(1000);
        at->filled_count++;
        if (at->filled_fails)
                return error_set(ret_error, NEBULA_TIMEOUT, 0, "the device is gone");
        memcpy(at->to, "device", 6);
        return NEBULA_OK;
}

static void filling_release(void *argument, const struct nebula_error *failure)
{
        struct filling *at = argument;

        at->released_count++;
        at->was_lost = failure && strstr(failure->message, "the device is gone");
}

static void closing_release(void *argument, const struct nebula_error *failure)
{
        struct filling *at = argument;

        at->was_lost |= failure != NULL;
        if (at->released_count++ == 0)
                nebula_session_close(session);
}

static void closing_unmapping(void *argument, void *image)
{
        struct filling *at = argument;

        (void)image;
        atomic_store(&at->is_closed, at->released_count == 2);
}

static void filling_unmapping(void *argument, void *image)
{
        struct filling *at = argument;

        at->unmapped_count += (char *)image <= at->to && at->to <= (char *)image + 4096;
}

static enum nebula_status fill_save_as(const char *name, bool may_overlap, bool may_end)
{
        static const struct nebula_range ranges[] = { { "the ", 4 }, { NULL, 6 }, { "'s.", 3 } };
        const struct nebula_keep keep = { .release = filling_release, .argument = &filling, .fill = filling_fill,
                                          .filled = filling_filled, .may_overlap = may_overlap };

        atomic_store(&filling.may_end, may_end);
        return nebula_checkpoint_save_bytes_kept(checkpoint, name, ranges, 3, &keep, &error);
}

static enum nebula_status fill_save(bool may_overlap, bool may_end)
{
        return fill_save_as("n", may_overlap, may_end);
}

static void bytes_that_the_caller_fills_are_in_the_file(void)
{
        for (int may_overlap = 0; may_overlap < 2; may_overlap++) {
                filling = (struct filling){ 0 };
                start();
                nebula_session_watch_images(session, filling_unmapping, &filling);
                CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
                CHECK(ok(fill_save(may_overlap, !may_overlap)));
                CHECK(fake_seen(IPC_CAPTURED) == !may_overlap); /* an overlapped save has returned before the end */
                atomic_store(&filling.may_end, true);
                CHECK(ok(nebula_session_settle(session, -1, &error)));
                CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
                CHECK(holds("t", "n", "the device's.", 13));
                CHECK(filling.fill_count == 1 && filling.filled_count == 1 && filling.released_count == 1);
                CHECK(filling.unmapped_count == 0);
                end();
                CHECK(filling.unmapped_count == 1);
        }
}

static void a_failed_fill_fails_the_save_or_later_the_checkpoint(void)
{
        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        filling = (struct filling){ .fill_fails = true };
        CHECK(fill_save(true, true) == NEBULA_FAILED && !strcmp(error.message, "no device"));
        CHECK(filling.fill_count == 1 && filling.filled_count == 0 && filling.released_count == 0);
        filling = (struct filling){ .filled_fails = true };
        CHECK(fill_save(false, true) == NEBULA_FAILED && !strcmp(error.message, "the device is gone"));
        CHECK(filling.filled_count == 1 && filling.released_count == 0);
        CHECK(fake_seen(IPC_ABANDON) == 2);
        filling = (struct filling){ .filled_fails = true };
        CHECK(ok(fill_save(true, true)));
        CHECK(ok(nebula_session_settle(session, -1, &error)));
        CHECK(filling.filled_count == 1 && filling.released_count == 1 && filling.was_lost);
        CHECK(fake_seen(IPC_ABANDON) == 3 && fake_seen(IPC_CAPTURED) == 0);
        end();
}

/* Two files are being copied, and committed. */
static bool commit_while_copying(const char *tag)
{
        filling = (struct filling){ 0 };
        return ok(nebula_checkpoint_begin(session, tag, 2, &checkpoint, &error)) && ok(fill_save_as("a", true, false)) &&
               ok(fill_save_as("b", true, false)) && ok(nebula_checkpoint_commit(checkpoint, &error));
}

static void a_commit_during_copies_goes_with_the_last(void)
{
        start();
        CHECK(commit_while_copying("t"));
        CHECK(fake.commit_count == 0 && fake_seen(IPC_CAPTURED) == 0);
        atomic_store(&filling.may_end, true);
        CHECK(ok(nebula_session_settle(session, -1, &error)));
        CHECK(fake.commit_count == 1 && fake.captured_at_commit == 2 && fake_seen(IPC_COMMIT) == 0);
        CHECK(holds("t", "b", "the device's.", 13)); /* the other one shares its place in the test */
        end();
}

static atomic_bool may_release;

static void waiting_release(void *argument, const struct nebula_error *failure)
{
        (void)argument, (void)failure;
        while (!atomic_load(&may_release))
                usleep(1000);
}

/* A program's lock, Python's for one, may be held by a thread that has crashed and waits for the copies. */
static void a_release_that_waits_holds_up_no_other_copy_and_no_commit(void)
{
        static const struct nebula_range ranges[] = { { "the ", 4 }, { NULL, 6 }, { "'s.", 3 } };
        const struct nebula_keep keep = { .release = waiting_release, .argument = &filling, .fill = filling_fill,
                                          .filled = filling_filled, .may_overlap = true };

        start();
        filling = (struct filling){ .may_end = true };
        atomic_store(&may_release, false);
        CHECK(ok(nebula_checkpoint_begin(session, "t", 2, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, "a", ranges, 3, &keep, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, "b", ranges, 3, &keep, &error)));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
        CHECK(ending_wait(20000));
        CHECK(fake.commit_count == 1 && fake.captured_at_commit == 2);
        CHECK(nebula_session_settle(session, 0, &error) == NEBULA_TIMEOUT); /* which is about the program's memory, too */
        atomic_store(&may_release, true);
        CHECK(ok(nebula_session_settle(session, -1, &error)));
        end();
}

/* Whether the copy can take it along or its thread has to tell it afterwards. */
static void a_commit_while_the_last_copy_is_told_is_told_once(void)
{
        start();
        filling = (struct filling){ 0 };
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(ok(fill_save(true, false)));
        pthread_mutex_lock(&fake.lock); /* no answer */
        atomic_store(&filling.may_end, true);
        usleep(50000);
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
        pthread_mutex_unlock(&fake.lock);
        CHECK(ok(nebula_session_settle(session, -1, &error)));
        CHECK(fake.commit_count == 1 && fake.captured_at_commit == 1);
        end();
}

static void *end_filling_soon(void *argument)
{
        usleep(50000);
        atomic_store((atomic_bool *)argument, true);
        return NULL;
}

static void a_tag_is_not_begun_again_before_its_commit_is_reported(void)
{
        struct nebula_checkpoint *first;
        pthread_t thread;

        start();
        CHECK(commit_while_copying("t"));
        first = checkpoint;
        REQUIRE(!pthread_create(&thread, NULL, end_filling_soon, &filling.may_end));
        CHECK(ok(nebula_checkpoint_begin(session, "t", 2, &checkpoint, &error)));
        CHECK(fake.commit_count == 1 && fake.captured_at_commit == 2);
        pthread_join(thread, NULL);
        nebula_checkpoint_free(first);
        end();
}

static void asking_release(void *argument, const struct nebula_error *failure)
{
        enum nebula_state state;
        struct filling *at = argument;

        at->was_lost |= failure || nebula_checkpoint_state(at->asks, &state, NULL);
        at->released_count++;
}

/* No lock of the library is held, as nebula.h promises: a thread that waits for that commit blocks no other. */
static void a_release_may_ask_while_the_tag_waits_to_be_begun_again(void)
{
        static const struct nebula_range ranges[] = { { "the ", 4 }, { NULL, 6 }, { "'s.", 3 } };
        const struct nebula_keep keep = { .release = asking_release, .argument = &filling, .fill = filling_fill,
                                          .filled = filling_filled, .may_overlap = true };
        nebula_checkpoint *first;
        pthread_t thread;

        start();
        filling = (struct filling){ 0 };
        CHECK(ok(nebula_checkpoint_begin(session, "t", 2, &first, &error)));
        filling.asks = first;
        CHECK(ok(nebula_checkpoint_save_bytes_kept(first, "a", ranges, 3, &keep, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes_kept(first, "b", ranges, 3, &keep, &error)));
        CHECK(ok(nebula_checkpoint_commit(first, &error)));
        REQUIRE(!pthread_create(&thread, NULL, end_filling_soon, &filling.may_end));
        CHECK(ok(nebula_checkpoint_begin(session, "t", 2, &checkpoint, &error)));
        CHECK(ok(nebula_session_settle(session, -1, &error)));
        CHECK(filling.released_count == 2 && !filling.was_lost && fake.commit_count == 1);
        pthread_join(thread, NULL);
        nebula_checkpoint_free(first);
        end();
}

/* The save that finds the list of copies full copies before it returns; it waits for no copy, whose `release` may wait for this save. */
static void a_release_may_ask_while_a_save_finds_no_room(void)
{
        static const struct nebula_range ranges[] = { { "the ", 4 }, { NULL, 6 }, { "'s.", 3 } };
        struct filling last = { .may_end = true };
        struct nebula_keep keep = { .release = asking_release, .argument = &filling, .fill = filling_fill,
                                    .filled = filling_filled, .may_overlap = true };
        pthread_t thread;

        start();
        filling = (struct filling){ 0 };
        CHECK(ok(nebula_checkpoint_begin(session, "t", CLIENT_COPY_MAX + 1, &checkpoint, &error)));
        filling.asks = last.asks = checkpoint;
        for (unsigned i = 0; i <= CLIENT_COPY_MAX; i++) {
                char name[16];

                snprintf(name, sizeof name, "%u", i);
                if (i == CLIENT_COPY_MAX) {
                        keep.argument = &last;
                        REQUIRE(!pthread_create(&thread, NULL, end_filling_soon, &filling.may_end));
                }
                CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, name, ranges, 3, &keep, &error)));
        }
        CHECK(ok(nebula_session_settle(session, -1, &error)));
        CHECK(filling.released_count == CLIENT_COPY_MAX && last.released_count == 1 && !filling.was_lost && !last.was_lost);
        pthread_join(thread, NULL);
        end();
}

static enum nebula_status settled[2], latest_found[2];

static void settling_release(void *argument, const struct nebula_error *failure)
{
        struct filling *at = argument;
        nebula_checkpoint *latest = NULL;

        at->was_lost |= failure != NULL;
        settled[at->released_count] = nebula_session_settle(session, -1, NULL);
        latest_found[at->released_count++] = nebula_checkpoint_latest(session, NULL, &latest, NULL);
        nebula_checkpoint_free(latest);
}

/* They are made on the thread on which the release runs. */
static void a_release_is_told_that_it_cannot_wait_for_later_copies(void)
{
        static const struct nebula_range ranges[] = { { "the ", 4 }, { NULL, 6 }, { "'s.", 3 } };
        const struct nebula_keep keep = { .release = settling_release, .argument = &filling, .fill = filling_fill,
                                          .filled = filling_filled, .may_overlap = true };

        start();
        filling = (struct filling){ 0 };
        CHECK(ok(nebula_checkpoint_begin(session, "t", 2, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, "a", ranges, 3, &keep, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, "b", ranges, 3, &keep, &error)));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
        atomic_store(&filling.may_end, true);
        CHECK(ok(nebula_session_settle(session, -1, &error)));
        CHECK(filling.released_count == 2 && !filling.was_lost);
        CHECK(settled[0] == NEBULA_BUSY && latest_found[0] == NEBULA_BUSY && settled[1] == NEBULA_OK && latest_found[1] == NEBULA_OK);
        end();
}

static void unlocked_release(void *argument, const struct nebula_error *failure)
{
        struct filling *at = argument;

        at->was_lost = !lock_try(&session->request_lock); /* which asking would wait for, for ever */
        if (at->was_lost)
                return;
        lock_give(&session->request_lock);
        asking_release(argument, failure);
        if (at->released_count == 2)
                nebula_session_close(session);
}

static void a_release_before_the_save_returns_may_ask_and_close_the_session(void)
{
        static const struct nebula_range range = { "abc", 3 };
        const struct nebula_keep keep = { .release = unlocked_release, .argument = &filling };

        start();
        filling = (struct filling){ 0 };
        CHECK(ok(nebula_checkpoint_begin(session, "t", 2, &checkpoint, &error)));
        filling.asks = checkpoint;
        CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, "a", &range, 1, &keep, &error)) && filling.released_count == 1);
        CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, "b", &range, 1, &keep, &error)));
        CHECK(filling.released_count == 2 && !filling.was_lost);
        nebula_checkpoint_free(checkpoint);
        checkpoint = NULL;
        fake_stop();
}

/* The first file is complete at the new agent before the second: the checkpoint must not count as complete then. */
static void an_agent_that_dies_before_the_copies_end_is_told_of_the_commit_last(void)
{
        start();
        fake.forgets = true;
        CHECK(commit_while_copying("t"));
        fake_dies_at(IPC_CAPTURED, 1);
        atomic_store(&filling.may_end, true);
        CHECK(ok(nebula_session_settle(session, -1, &error)));
        CHECK(fake_seen(IPC_IMAGE) == 4 && filling.released_count == 2 && !filling.was_lost);
        CHECK(fake.commit_count == 1 && fake.captured_at_commit == 2);
        end();
}

static bool two_files(int64_t count, const char *second)
{
        struct nebula_range range = { "abc", 3 };

        return ok(nebula_checkpoint_begin(session, "t", count, &checkpoint, &error)) &&
               ok(nebula_checkpoint_save_bytes(checkpoint, "a", &range, 1, &error)) &&
               (!second || ok(nebula_checkpoint_save_bytes(checkpoint, second, &range, 1, &error)));
}

/* Such as an agent that was told to end: it keeps durable versions, and drops incomplete ones. */
static void a_checkpoint_whose_files_went_with_an_agent_is_never_called_whole(void)
{
        struct nebula_range range = { "abc", 3 };

        start();
        fake.forgets = true;
        CHECK(two_files(NEBULA_FILES_ALL_RANKS, NULL));
        fake_dies_at(IPC_IMAGE, 1);
        CHECK(nebula_checkpoint_save_bytes(checkpoint, "b", &range, 1, &error) == NEBULA_FAILED && strstr(error.message, "lost"));
        CHECK(fake_seen(IPC_ABANDON) == 1);
        CHECK(nebula_checkpoint_commit(checkpoint, &error) == NEBULA_FAILED && fake.commit_count == 0);
        nebula_checkpoint_free(checkpoint);
        CHECK(two_files(NEBULA_FILES_ALL_RANKS, "b")); /* begun again, with all of them */
        fake_dies_at(IPC_CAPTURED, 1);
        CHECK(nebula_checkpoint_commit(checkpoint, &error) == NEBULA_FAILED && fake.commit_count == 0 && fake_seen(IPC_FAIL) > 0);
        nebula_checkpoint_free(checkpoint);
        CHECK(two_files(NEBULA_FILES_ALL_RANKS, "b") && ok(nebula_checkpoint_commit(checkpoint, &error)));
        fake_dies_at(IPC_STATE, 1);
        nebula_checkpoint_state(checkpoint, &(enum nebula_state){ 0 }, NULL); /* the next agent gives it another number */
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "c", &range, 1, &error))); /* all that was saved before is committed */
        end();
}

static void a_file_that_went_with_an_agent_fails_the_copies_after_it(void)
{
        start();
        fake.forgets = true;
        CHECK(two_files(NEBULA_FILES_ALL_RANKS, NULL));
        filling = (struct filling){ 0 };
        CHECK(ok(fill_save_as("b", true, false)) && ok(nebula_checkpoint_commit(checkpoint, &error)));
        fake_dies_at(IPC_CAPTURED, 1);
        atomic_store(&filling.may_end, true);
        CHECK(ok(nebula_session_settle(session, -1, &error)));
        CHECK(fake.commit_count == 0 && fake_seen(IPC_ABANDON) == 1 && filling.released_count == 1);
        end();
}

/* fault: as test_a_checkpoint_that_lost_a_file_with_an_agent_that_was_stopped_is_not_called_whole */
/* The next agent has no memory for the first of two files, or dies, too, when it is told of it. */
static void a_copy_that_is_lost_with_an_agent_is_the_end_of_its_checkpoint(void)
{
        for (int deaths = 1; deaths <= 2; deaths++) {
                start();
                fake.forgets = true;
                filling = (struct filling){ 0 };
                CHECK(ok(nebula_checkpoint_begin(session, "t", NEBULA_FILES_ALL_RANKS, &checkpoint, &error)));
                CHECK(ok(fill_save_as("a", true, false)) && ok(fill_save_as("b", true, false)));
                CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
                fake.image_refusals = deaths == 1;
                fake_dies_at(IPC_CAPTURED, deaths);
                atomic_store(&filling.may_end, true);
                CHECK(ok(nebula_session_settle(session, -1, &error)));
                CHECK(filling.released_count == 2 && fake.image_refusals == 0 && fake_deaths_left(IPC_CAPTURED) == 0);
                CHECK(fake.commit_count == 0 && (deaths == 2 || fake_seen(IPC_FAIL) > 0));
                CHECK(nebula_checkpoint_commit(checkpoint, &error) == NEBULA_FAILED && fake.commit_count == 0);
                end();
        }
}

static void counting_release(void *argument, const struct nebula_error *failure)
{
        *(int *)argument += failure ? 1000 : 1;
}

#define LARGE_BYTES ((size_t)160 << 20)

#define LARGE_SAVES 6

/* `make test` runs this program with the address sanitizer and without. */
static bool is_too_slow(void)
{
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
        return !getenv("NEBULA_TEST_NIGHTLY");
#endif
#endif
        return false;
}

/* Saves LARGE_BYTES again and again, and with `overwrites` changes each block at once, so that it waits for all of
 * them. How many copies the agent heard of before they were whole; without `overwrites`, it saves until one was heard
 * of. One may be over before the thread that tells has the processor; not every time. */
static int copies_heard_of(bool overwrites)
{
        int released = 0, heard_of = 0, saves = 0;
        const struct nebula_keep keep = { .release = counting_release, .argument = &released };
        char *data = mmap(NULL, LARGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        struct nebula_range range = { data, LARGE_BYTES };
        char tag[32];

        if (data == MAP_FAILED)
                return -1;
        setenv("NEBULA_CAPTURE", "cow", 1);
        start();
        for (; saves < LARGE_SAVES && (overwrites || !heard_of); saves++) {
                int before = fake_seen(IPC_COPIED);

                snprintf(tag, sizeof tag, "t%d", saves);
                memset(data, 'a', LARGE_BYTES);
                CHECK(ok(nebula_checkpoint_begin(session, tag, NEBULA_FILES_ALL_RANKS, &checkpoint, &error)));
                CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, "n", &range, 1, &keep, &error)));
                CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
                for (size_t at = 0; overwrites && at < LARGE_BYTES; at += 1u << 20)
                        ((volatile char *)data)[at] = 'b';
                CHECK(ok(nebula_session_settle(session, -1, &error)));
                nebula_checkpoint_free(checkpoint);
                checkpoint = NULL;
                heard_of += fake_seen(IPC_COPIED) > before;
        }
        CHECK(fake.torn_count == 0 && released == saves && fake.commit_count == saves);
        CHECK(fake.wrong_sum_count == 0 && (!sum_copies_both() || fake.summed_bytes > LARGE_BYTES / 10 * 9));
        end();
        unsetenv("NEBULA_CAPTURE");
        munmap(data, LARGE_BYTES);
        return heard_of;
}

static void the_agent_hears_how_much_of_a_large_file_is_copied(void)
{
        if (is_too_slow())
                SKIP("takes minutes with the address sanitizer: NEBULA_TEST_NIGHTLY=1");
        if (cow_available(NULL) != NEBULA_OK) {
                printf("# no userfaultfd here\n");
                return;
        }
        CHECK(copies_heard_of(false) > 0);
        CHECK(fake.copied.size >= 32u << 20 && fake.copied.size <= LARGE_BYTES && fake.copied.commits);
}

/* Unless no write has waited for a while: on a busy machine that happens in the middle of a copy, too. Then the test looks again. */
static void the_agent_hears_of_no_copy_that_the_program_waits_for(void)
{
        int heard_of = LARGE_SAVES;

        if (is_too_slow())
                SKIP("takes minutes with the address sanitizer: NEBULA_TEST_NIGHTLY=1");
        if (cow_available(NULL) != NEBULA_OK) {
                printf("# no userfaultfd here\n");
                return;
        }
        for (int looks = 0; looks < 12 && heard_of > LARGE_SAVES / 2; looks++)
                heard_of = copies_heard_of(true);
        CHECK(heard_of >= 0 && heard_of <= LARGE_SAVES / 2);
}

static void an_immediate_copy_is_summed_too_if_that_costs_nothing(void)
{
        char *data = malloc(LARGE_BYTES);
        struct nebula_range range = { data, LARGE_BYTES };

        REQUIRE(data);
        memset(data, 'a', LARGE_BYTES);
        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error)));
        CHECK(fake.wrong_sum_count == 0 && fake.summed_bytes == (sum_copies_both_unnoticed() ? LARGE_BYTES : 0));
        end();
        free(data);
}

/* Such as one that has failed the version meanwhile. */
static void an_agent_that_does_not_want_to_hear_of_it_is_told_when_all_is_copied(void)
{
        int released = 0;
        const struct nebula_keep keep = { .release = counting_release, .argument = &released };
        char *data = mmap(NULL, LARGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        struct nebula_range range = { data, LARGE_BYTES };

        REQUIRE(data != MAP_FAILED);
        setenv("NEBULA_CAPTURE", "cow", 1);
        start();
        fake.refuse[IPC_COPIED] = NEBULA_NOT_FOUND;
        memset(data, 'a', LARGE_BYTES);
        CHECK(ok(nebula_checkpoint_begin(session, "t", NEBULA_FILES_ALL_RANKS, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, "n", &range, 1, &keep, &error)));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)) && ok(nebula_session_settle(session, -1, &error)));
        CHECK(fake_seen(IPC_COPIED) <= 1 && released == 1 && fake.commit_count == 1);
        end();
        unsetenv("NEBULA_CAPTURE");
        munmap(data, LARGE_BYTES);
}

static void a_session_that_a_release_closes_waits_for_the_other_copies(void)
{
        static struct filling closing; /* the thread of the copies unmaps another image after the test has ended */
        static const struct nebula_range range = { NULL, 6 };
        const struct nebula_keep keep = { .release = closing_release, .argument = &closing, .fill = filling_fill_one,
                                          .filled = filling_filled, .may_overlap = true };

        start();
        nebula_session_watch_images(session, closing_unmapping, &closing);
        CHECK(ok(nebula_checkpoint_begin(session, "t", 2, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, "a", &range, 1, &keep, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes_kept(checkpoint, "b", &range, 1, &keep, &error)));
        atomic_store(&closing.may_end, true);
        for (int i = 0; i < 20000 && !atomic_load(&closing.is_closed); i++)
                usleep(5000);
        REQUIRE(atomic_load(&closing.is_closed));
        CHECK(fake_seen(IPC_CAPTURED) == 2 && closing.released_count == 2 && !closing.was_lost);
        nebula_checkpoint_free(checkpoint);
        checkpoint = NULL;
        fake_stop();
}

static void a_lost_image_is_filled_again_while_the_save_runs(void)
{
        filling = (struct filling){ 0 };
        start();
        fake.forgets = true;
        fake_dies_at(IPC_CAPTURED, 1);
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(ok(fill_save(false, true)));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
        CHECK(filling.fill_count == 2 && filling.filled_count == 2 && filling.released_count == 1);
        CHECK(holds("t", "n", "the device's.", 13));
        end();
}

static void a_version_that_the_agent_forgot_is_begun_again(void)
{
        struct nebula_range range = { "abc", 3 };

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error)));
        pthread_mutex_lock(&fake.lock);
        fake_forget();
        pthread_mutex_unlock(&fake.lock);
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error)));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
        CHECK(fake_seen(IPC_IMAGE) == 3 && holds("t", "n", "abc", 3));
        end();
}

/* The ranks of an open-ended checkpoint wait for the ranks that have begun; other checkpoints need not be begun early. */
static void only_open_ended_checkpoints_of_several_ranks_are_begun_before_their_first_save(void)
{
        struct nebula_range range = { "abc", 3 };

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", NEBULA_FILES_OPEN, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error)));
        CHECK(fake_seen(IPC_BEGIN) == 0 && fake_seen(IPC_IMAGE) == 1);
        nebula_checkpoint_free(checkpoint);
        options.world = 2;
        CHECK(ok(nebula_session_configure(session, &options, &error)));
        CHECK(ok(nebula_checkpoint_begin(session, "u", NEBULA_FILES_ALL_RANKS, &checkpoint, &error)));
        CHECK(fake_seen(IPC_BEGIN) == 0);
        nebula_checkpoint_free(checkpoint);
        CHECK(ok(nebula_checkpoint_begin(session, "v", NEBULA_FILES_OPEN, &checkpoint, &error)));
        CHECK(fake_seen(IPC_BEGIN) == 1);
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error)));
        CHECK(fake_seen(IPC_BEGIN) == 1 && fake_seen(IPC_IMAGE) == 2);
        options.world = 1;
        end();
}

static void agents_that_die_again_and_again_end_in_an_error(void)
{
        struct nebula_range range = { "abc", 3 };

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        fake_dies_at(IPC_IMAGE, 100);
        CHECK(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error) == NEBULA_UNAVAILABLE);
        CHECK(fake_seen(IPC_IMAGE) == 2);
        fake_dies_at(IPC_IMAGE, 0);
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error))); /* and it comes back */
        end();
}

static void without_an_agent_calls_fail_at_once_and_say_what_was_tried(void)
{
        struct nebula_range range = { "abc", 3 };
        int64_t begun_ns;

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        fake_stop();
        CHECK(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error) == NEBULA_UNAVAILABLE);
        CHECK(strstr(error.message, "/nonexistent/nebula"));
        begun_ns = os->now_ns();
        for (int i = 0; i < 10; i++)
                CHECK(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error) == NEBULA_UNAVAILABLE);
        CHECK(os->now_ns() - begun_ns < 500000000);
        CHECK(strstr(error.message, "/nonexistent/nebula"));
        fake_start();
        end();
}

static void a_session_that_has_left_connects_again_for_what_is_still_open(void)
{
        struct nebula_range range = { "abc", 3 };
        nebula_checkpoint *found = NULL;
        nebula_map *map = NULL;

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error)));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_find(session, "t", NULL, &found, &error)));
        CHECK(ok(nebula_checkpoint_map(found, "n", &map, &error)));
        nebula_session_leave(session);
        nebula_session_leave(session);
        nebula_session_leave(NULL);
        fake_await_silence();
        CHECK(nebula_map_size(map) == 3 && !memcmp(nebula_map_data(map), "abc", 3));
        nebula_map_free(map);
        CHECK(ok(nebula_checkpoint_map(found, "n", &map, &error)));
        nebula_map_free(map);
        nebula_checkpoint_free(found);
        CHECK(holds("t", "n", "abc", 3));
        end();
}

static void an_agent_that_refuses_to_start_is_reported_with_its_exit(void)
{
        nebula_session *none = NULL;

        nebula_options_init(&options);
        options.agent_path = "/bin/false";
        CHECK(nebula_session_open(&options, &none, &error) == NEBULA_UNAVAILABLE);
        CHECK(strstr(error.message, "/bin/false") && strstr(error.message, "ended with 1"));
        CHECK(none == NULL);
}

static void an_agent_is_started_when_none_answers(void)
{
        struct nebula_range range = { "abc", 3 };

        nebula_options_init(&options);
        options.agent_path = own_path; /* main, below, then is the agent */
        session = NULL;
        REQUIRE(ok(nebula_session_open(&options, &session, &error)));
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(ok(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error)));
        CHECK(ok(nebula_checkpoint_commit(checkpoint, &error)));
        CHECK(holds("t", "n", "abc", 3));
        nebula_checkpoint_free(checkpoint);
        checkpoint = NULL;
        nebula_session_close(session);
}

static atomic_bool peer_is_other;

static int other_peer(int fd, uint32_t *ret_uid, uint32_t *ret_pid)
{
        int result = os_linux.peer(fd, ret_uid, ret_pid);

        *ret_uid += peer_is_other;
        return result;
}

/*
 * fault (The machine and other users): The trainer meets another user's agent.
 * result: It does not speak to it.
 */
static void another_users_agent_is_not_spoken_to(void)
{
        struct os_table table = *os;
        const struct os_table *before = os;
        nebula_session *other = NULL;

        table.peer = other_peer;
        os = &table;
        start();
        peer_is_other = true;
        CHECK(nebula_session_open(&options, &other, &error) == NEBULA_UNAVAILABLE && strstr(error.message, "listens"));
        CHECK(fake_seen(IPC_HELLO) == 1 && other == NULL);
        end();
        os = before;
}

static void a_broken_promise_switches_the_session_off_for_good(void)
{
        struct nebula_range range = { "abc", 3 };

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        fake.lends_too_little = true;
        CHECK(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error) == NEBULA_UNAVAILABLE);
        CHECK(strstr(error.message, "checkpointing is off"));
        fake.lends_too_little = false;
        CHECK(nebula_checkpoint_save_bytes(checkpoint, "n", &range, 1, &error) == NEBULA_UNAVAILABLE);
        CHECK(strstr(error.message, "checkpointing is off") && fake_seen(IPC_IMAGE) == 1);
        end();
}

static void *wait_for_commit(void *argument)
{
        nebula_checkpoint *waited = argument;

        return nebula_checkpoint_wait(waited, NEBULA_STATE_COMMITTED, 5000, NULL) == NEBULA_OK ? waited : NULL;
}

static void a_wait_does_not_hold_others_up(void)
{
        nebula_checkpoint *waited = NULL;
        pthread_t thread;
        void *result = NULL;

        start();
        CHECK(ok(nebula_checkpoint_begin(session, "waited", 1, &waited, &error)));
        pthread_create(&thread, NULL, wait_for_commit, waited);
        while (fake_seen(IPC_WAIT) == 0)
                os->sleep_ms(1);
        CHECK(save("other", "n", "x", 1));
        CHECK(ok(nebula_checkpoint_commit(waited, &error)));
        pthread_join(thread, &result);
        CHECK(result == waited);
        nebula_checkpoint_free(waited);
        end();
}

static void a_wait_ends_at_its_time(void)
{
        start();
        CHECK(ok(nebula_checkpoint_begin(session, "t", 1, &checkpoint, &error)));
        CHECK(nebula_checkpoint_wait(checkpoint, NEBULA_STATE_COMMITTED, 20, &error) == NEBULA_TIMEOUT);
        CHECK(nebula_checkpoint_wait(checkpoint, (enum nebula_state)77, 20, &error) == NEBULA_INVALID);
        end();
}

static void *save_often(void *argument)
{
        const char *tag = argument;
        nebula_checkpoint *own = NULL;
        struct nebula_range range = { tag, strlen(tag) };
        bool good = nebula_checkpoint_begin(session, tag, 1, &own, NULL) == NEBULA_OK;

        for (int i = 0; good && i < 20; i++)
                good = nebula_checkpoint_save_bytes(own, tag, &range, 1, NULL) == NEBULA_OK;
        good = good && nebula_checkpoint_commit(own, NULL) == NEBULA_OK;
        nebula_checkpoint_free(own);
        return good ? argument : NULL;
}

static void several_threads_save_at_once(void)
{
        static char tags[4][8] = { "a", "bb", "ccc", "dddd" };
        pthread_t threads[4];

        start();
        for (size_t i = 0; i < 4; i++)
                pthread_create(&threads[i], NULL, save_often, tags[i]);
        for (size_t i = 0; i < 4; i++) {
                void *result = NULL;

                pthread_join(threads[i], &result);
                CHECK(result == tags[i]);
        }
        for (size_t i = 0; i < 4; i++)
                CHECK(holds(tags[i], tags[i], tags[i], strlen(tags[i])));
        end();
}

static void a_forked_child_speaks_for_itself(void)
{
        int greeted, status = -1;
        pid_t child;

        start();
        CHECK(save("parent", "n", "parent", 6));
        greeted = fake_seen(IPC_HELLO);
        child = fork();
        if (child == 0) {
                bool good;

                alarm(20);
                good = save("child", "n", "child", 5);
                nebula_checkpoint_free(checkpoint);
                nebula_session_close(session);
                _exit(good ? 0 : 1);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(fake_seen(IPC_HELLO) == greeted + 1);
        CHECK(save("parent2", "n", "again", 5)); /* the parent's connection is as it was */
        CHECK(fake_seen(IPC_HELLO) == greeted + 1);
        CHECK(holds("child", "n", "child", 5) && holds("parent", "n", "parent", 6) && holds("parent2", "n", "again", 5));
        end();
}

/* fault: as test_commits_of_a_forked_child_survive_its_end */
/* It ends by _exit, past all that would wait for a copy. */
static void a_forked_child_s_save_is_whole_when_it_returns(void)
{
        int status = -1;
        pid_t child;

        start();
        child = fork();
        if (child == 0) {
                alarm(20);
                filling = (struct filling){ 0 };
                if (nebula_checkpoint_begin(session, "child", 1, &checkpoint, &error) || fill_save(true, true) ||
                    filling.filled_count != 1 || nebula_checkpoint_commit(checkpoint, &error))
                        _exit(1);
                _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(holds("child", "n", "the device's.", 13));
        end();
}

/* Whether something was sent into one of these sockets. */
static bool is_written(int sockets[][2], size_t count)
{
        bool result = false;
        char byte;

        for (size_t i = 0; i < count; i++)
                result |= recv(sockets[i][0], &byte, 1, MSG_DONTWAIT) >= 0 || recv(sockets[i][1], &byte, 1, MSG_DONTWAIT) >= 0;
        return result;
}

static void a_pulse_that_a_forked_child_closes_goes_on_in_its_parent(void)
{
        struct nebula_pulse_options how = { 0 };
        struct ipc_pulse page = { 0 };
        nebula_pulse *pulse = NULL;
        int status = -1;
        pid_t child;

        start();
        REQUIRE(ok(nebula_pulse_open(session, &how, &pulse, &error)));
        nebula_pulse_step(pulse, 7);
        child = fork();
        if (child == 0) {
                alarm(20);
                nebula_pulse_rest(pulse);
                nebula_pulse_close(pulse);
                _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(os->pread(session->settings.hello.pulse_fd, &page, sizeof page, 0) == sizeof page);
        CHECK(page.beats == 1 && page.step == 7);
        nebula_pulse_close(pulse);
        end();
}

/* As after closefrom(3). */
static void a_number_that_the_program_has_closed_and_uses_itself_is_left_alone(void)
{
        int sockets[1][2], taken, status = -1;
        pid_t child;

        start();
        CHECK(save("t", "n", "abc", 3));
        REQUIRE(!socketpair(AF_UNIX, SOCK_STREAM, 0, sockets[0]));
        taken = session->wire.fd;
        REQUIRE(dup2(sockets[0][0], taken) == taken);
        child = fork();
        if (child == 0)
                _exit(send(taken, "x", 1, 0) == 1 ? 0 : 1); /* a fork does not close it either */
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(is_written(sockets, 1));
        CHECK(save("t2", "n", "abc", 3) && session->wire.fd != taken && !is_written(sockets, 1));
        taken = session->wire.fd;
        REQUIRE(dup2(sockets[0][0], taken) == taken);
        end();
        CHECK(!is_written(sockets, 1) && send(taken, "x", 1, 0) == 1); /* it is open */
        os->close(taken);
        os->close(sockets[0][0]);
        os->close(sockets[0][1]);
}

static void a_watch_of_a_forked_child_leaves_the_numbers_of_its_parent_alone(void)
{
        struct nebula_event event;
        nebula_watch *watch = NULL;
        int status = -1;
        pid_t child;

        start();
        fake.refuse[IPC_WATCH] = NEBULA_TIMEOUT;
        REQUIRE(ok(nebula_watch_open(session, &watch, &error)));
        CHECK(nebula_watch_next(watch, 0, &event, &error) == NEBULA_TIMEOUT);
        child = fork();
        if (child == 0) {
                int sockets[16][2]; /* one has the number of the connection */
                bool is_silent;

                alarm(20);
                for (size_t i = 0; i < 16; i++)
                        if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets[i]))
                                _exit(2);
                is_silent = nebula_watch_next(watch, 0, &event, &error) == NEBULA_TIMEOUT && !is_written(sockets, 16);
                nebula_watch_close(watch);
                _exit(is_silent ? 0 : 1);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(fake_seen(IPC_WATCH) == 2);
        CHECK(nebula_watch_next(watch, 0, &event, &error) == NEBULA_TIMEOUT);
        nebula_watch_close(watch);
        fake.refuse[IPC_WATCH] = NEBULA_OK;
        end();
}

static void *hold_session(void *argument)
{
        return save("held", "n", argument, 1u << 20) ? argument : NULL;
}

static void a_fork_in_the_middle_of_a_save_locks_nothing(void)
{
        char *data = calloc(1, 1u << 20);
        pthread_t thread;
        void *result = NULL;
        int status = -1;
        pid_t child;

        start();
        pthread_mutex_lock(&fake.lock); /* the agent hangs, and with it the save */
        pthread_create(&thread, NULL, hold_session, data);
        os->sleep_ms(30);
        child = fork();
        if (child == 0) {
                nebula_session *own = session;

                alarm(20);
                nebula_session_close(own); /* would wait for ever for the thread that is not here */
                _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        pthread_mutex_unlock(&fake.lock);
        pthread_join(thread, &result);
        CHECK(result == data);
        CHECK(holds("held", "n", data, 1u << 20));
        end();
        free(data);
}

static void files_can_be_added_to_a_found_checkpoint(void)
{
        struct nebula_range range = { "more", 4 };
        nebula_checkpoint *found = NULL;

        start();
        CHECK(save("step1", "n", "abc", 3));
        CHECK(save("step2", "n", "abc", 3));
        REQUIRE(ok(nebula_checkpoint_latest(session, NULL, &found, &error)));
        CHECK(strcmp(nebula_checkpoint_tag(found), "step2") == 0);
        CHECK(ok(nebula_checkpoint_save_bytes(found, "m", &range, 1, &error)));
        CHECK(ok(nebula_checkpoint_commit(found, &error)));
        CHECK(holds("step2", "m", "more", 4) && holds("step2", "n", "abc", 3));
        nebula_checkpoint_free(found);
        end();
}

static void a_file_that_storage_lost_meanwhile_comes_from_the_agent_if_it_is_the_same(void)
{
        struct nebula_part part = { 0, 3, (char[3]){ 0 } };
        nebula_map *map = NULL;

        start();
        CHECK(save("t", "n", "abc", 3));
        fake.stored_is_gone = true;
        CHECK(holds("t", "n", "abc", 3));
        fake.was_written_again = true;
        CHECK(nebula_checkpoint_map(checkpoint, "n", &map, &error) == NEBULA_FAILED && !map && strstr(error.message, "written again"));
        REQUIRE(ok(nebula_checkpoint_map_lazily(checkpoint, "n", &map, &error)));
        CHECK(nebula_map_read(map, &part, 1, &error) == NEBULA_FAILED && strstr(error.message, "written again"));
        nebula_map_free(map);
        end();
}

/* Otherwise the map would hold bytes of two writings. */
static void a_file_whose_parts_the_agent_has_dropped_is_opened_again_only_if_it_is_the_same(void)
{
        struct nebula_part part = { 0, 3, (char[3]){ 0 } };

        start();
        CHECK(save("t", "n", "abc", 3));
        for (uint64_t later = 0; later < 2; later++) {
                nebula_map *map = NULL;

                fake.lends_parts = true;
                fake.origin = 7;
                REQUIRE(ok(nebula_checkpoint_map_lazily(checkpoint, "n", &map, &error)));
                fake.refuse[IPC_FETCH] = NEBULA_BUSY;
                fake.lends_parts = false;
                fake.origin = 7 + later;
                if (later)
                        CHECK(nebula_map_read(map, &part, 1, &error) == NEBULA_FAILED && strstr(error.message, "written again"));
                else
                        CHECK(ok(nebula_map_read(map, &part, 1, &error)) && !memcmp(part.data, "abc", 3));
                nebula_map_free(map);
        }
        end();
}

static void a_missing_checkpoint_or_file_is_not_found(void)
{
        nebula_checkpoint *found = NULL;
        nebula_map *map = NULL;

        start();
        CHECK(nebula_checkpoint_latest(session, NULL, &found, &error) == NEBULA_NOT_FOUND);
        CHECK(nebula_checkpoint_find(session, "t", "/elsewhere", &found, &error) == NEBULA_NOT_FOUND);
        CHECK(save("t", "n", "abc", 3));
        CHECK(nebula_checkpoint_map(checkpoint, "m", &map, &error) == NEBULA_NOT_FOUND);
        CHECK(found == NULL && map == NULL);
        end();
}

static void nothing_is_freed_twice_or_without_need(void)
{
        nebula_session_close(NULL);
        nebula_checkpoint_free(NULL);
        nebula_map_free(NULL);
        nebula_text_free(NULL);
        CHECK(nebula_map_data(NULL) == NULL && nebula_map_size(NULL) == 0);
}

/* -- spare images -- */

static struct spare_watch {
        atomic_int count, returned, unmapped;
        atomic_bool may_return;
        _Atomic(void *) image;
        bool closes;
} watch;

static void spare_mapped(void *argument, void *image, uint64_t capacity_bytes)
{
        struct spare_watch *self = argument;

        atomic_store(&self->image, capacity_bytes == FAKE_SPARE_BYTES && !*(char *)image ? image : NULL);
        atomic_fetch_add(&self->count, 1);
        while (!atomic_load(&self->may_return))
                os->sleep_ms(1);
        if (self->closes)
                nebula_session_close(session);
        atomic_fetch_add(&self->returned, 1);
}

static void spare_unmapping(void *argument, void *image)
{
        struct spare_watch *self = argument;

        atomic_fetch_add(&self->unmapped, 1);
}

static bool reaches(atomic_int *count, int least)
{
        for (int i = 0; i < 200000 && atomic_load(count) < least; i++)
                os->sleep_ms(1);
        return atomic_load(count) == least;
}

static void start_spares(uint32_t count, bool may_return)
{
        struct nebula_range range = { NULL, 3 << 20 };

        start();
        memset(&watch, 0, sizeof watch);
        watch.may_return = may_return;
        fake.spare_count = count;
        nebula_session_watch_spares(session, spare_mapped, &watch);
        nebula_session_watch_images(session, spare_unmapping, &watch);
        CHECK(ok(nebula_session_prepare(session, 0, &range, 1, &error)));
}

static void the_images_of_a_foretold_file_are_mapped_before_its_save(void)
{
        static char data[3 << 20];

        start_spares(2, true);
        CHECK(reaches(&watch.returned, 2) && watch.image);
        fake.lends_spare = true;
        memset(data, 7, sizeof data);
        CHECK(save("t", "f", data, sizeof data) && holds("t", "f", data, sizeof data));
        CHECK(memcmp(watch.image, data, sizeof data) == 0); /* at the address that the program was told */
        CHECK(watch.unmapped == 1); /* the agent no longer listed the first image */
        nebula_session_prepare(session, 0, &(struct nebula_range){ NULL, 1 }, 1, &error);
        fake.lends_spare = false;
        end();
        CHECK(watch.unmapped == 2 && watch.count == 2);
}

static void *save_spare(void *data)
{
        static atomic_bool saved;

        atomic_store(&saved, save("t", "f", data, 3 << 20));
        return &saved;
}

static void a_save_waits_until_its_image_is_ready(void)
{
        static char data[3 << 20];
        pthread_t thread;
        void *saved;

        start_spares(1, false);
        CHECK(reaches(&watch.count, 1));
        fake.lends_spare = true;
        pthread_create(&thread, NULL, save_spare, data);
        os->sleep_ms(100);
        CHECK(!watch.returned && !fake_seen(IPC_CAPTURED) && !fake_seen(IPC_COMMIT));
        atomic_store(&watch.may_return, true);
        pthread_join(thread, &saved);
        CHECK(atomic_load((atomic_bool *)saved) && watch.returned == 1 && holds("t", "f", data, sizeof data));
        fake.lends_spare = false;
        end();
}

static pthread_t page_thread;
static atomic_int page_calls;

/* The first call of the thread that makes pages ends when a save waits for the image. */
static int advise_until_awaited(void *data, uint64_t size, enum os_advice advice)
{
        bool is_awaited = false;

        if (advice == OS_ADVISE_POPULATE_WRITE && !atomic_load(&page_calls)) {
                page_thread = pthread_self();
                atomic_fetch_add(&page_calls, 1);
                for (int i = 0; i < 200000 && !is_awaited; i++) {
                        os->sleep_ms(1);
                        lock_take(&session->spares.spares_lock);
                        is_awaited = session->spares.is_awaited;
                        lock_give(&session->spares.spares_lock);
                }
        } else if (advice == OS_ADVISE_POPULATE_WRITE && pthread_equal(page_thread, pthread_self())) {
                atomic_fetch_add(&page_calls, 1);
        }
        return os_linux.advise(data, size, advice);
}

static void a_save_does_not_wait_for_all_pages_of_its_image(void)
{
        static char data[3 << 20];
        struct nebula_range range = { NULL, sizeof data };
        struct os_table table = os_linux;

        start();
        fake.spare_count = 1;
        fake.lends_spare = true;
        atomic_store(&page_calls, 0);
        table.advise = advise_until_awaited;
        os = &table;
        CHECK(ok(nebula_session_prepare(session, 0, &range, 1, &error)) && reaches(&page_calls, 1));
        memset(data, 7, sizeof data);
        CHECK(save("t", "f", data, sizeof data) && holds("t", "f", data, sizeof data));
        CHECK(page_calls == 1 && FAKE_SPARE_BYTES > 2 << 20);
        fake.lends_spare = false;
        end();
        os = &os_linux;
}

static void an_image_that_is_made_ready_stays_mapped_while_another_file_is_saved(void)
{
        start_spares(1, false);
        CHECK(reaches(&watch.count, 1));
        CHECK(save("t", "f", "abc", 3) && holds("t", "f", "abc", 3));
        CHECK(!watch.unmapped && !*(char *)watch.image);
        atomic_store(&watch.may_return, true);
        CHECK(reaches(&watch.returned, 1) && save("u", "f", "abc", 3));
        CHECK(watch.unmapped >= 1);
        end();
}

static void an_agent_that_has_no_image_yet_is_asked_now_and_then(void)
{
        struct nebula_range range = { NULL, 3 << 20 };
        int64_t begun_ns;

        start_spares(0, true);
        fake.spares_follow = true;
        for (int i = 0; i < 3; i++)
                CHECK(ok(nebula_session_prepare(session, 0, &range, 1, &error)));
        begun_ns = os->now_ns();
        os->sleep_ms(300);
        for (int i = 0; i < 6000 && fake_seen(IPC_SPARE) < 2; i++)
                os->sleep_ms(10);
        CHECK(fake_seen(IPC_SPARE) >= 2 && fake_seen(IPC_SPARE) < 30 + (os->now_ns() - begun_ns) / 10000000);
        fake.spares_follow = false;
        end();
}

static void a_session_ends_while_an_image_is_made_ready(void)
{
        pid_t pid;
        int status;

        start_spares(100, false);
        CHECK(reaches(&watch.count, 1));
        pid = fork();
        if (pid == 0) /* the child has no such thread, and must not wait for it */
                _exit(nebula_session_settle(session, 1000, NULL) == NEBULA_OK ? 0 : 1);
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
        atomic_store(&watch.may_return, true);
        end();
        CHECK(watch.returned == watch.count);
        CHECK(watch.unmapped == watch.returned || watch.unmapped == watch.returned + 1); /* the last one may be mapped as the session ends */

        start_spares(3, true);
        end();

        start_spares(1, false); /* `mapped` closes the session */
        watch.closes = true;
        atomic_store(&watch.may_return, true);
        CHECK(reaches(&watch.unmapped, 1));
        fake_stop();
}

static const struct tap_test tests[] = {
        TEST(the_agent_is_told_what_was_asked_for),
        TEST(a_file_of_bytes_is_the_ranges_in_order),
        TEST(an_empty_file_can_be_saved_and_read),
        TEST(tensors_come_back_with_shape_and_values),
        TEST(plain_bytes_hold_no_tensors),
        TEST(a_hundred_thousand_storages_are_no_trouble),
        TEST(callers_mistakes_are_named_and_sent_nowhere),
        TEST(options_that_make_no_sense_are_refused),
         TEST(names_that_no_document_can_hold_are_refused_when_they_are_given),
        TEST(equal_settings_send_nothing_and_new_ones_apply),
        TEST(the_agents_refusal_is_passed_on_in_its_words),
        TEST(an_agent_that_dies_at_any_request_is_survived),
        TEST(a_lost_image_is_captured_again),
        TEST(the_commit_of_a_rank_brings_the_word_that_its_file_is_whole),
        TEST(a_file_that_no_agent_could_be_told_of_is_not_forgotten_for_the_next),
        TEST(a_file_that_no_agent_could_be_told_of_is_captured_again_by_one_that_forgot_it),
        TEST(only_a_commit_that_must_follow_is_waited_for),
        TEST(every_request_follows_the_message_that_a_file_is_complete),
        TEST(a_file_that_no_agent_could_be_told_of_outlives_the_leave_of_its_session),
        TEST(a_file_that_is_saved_again_when_its_session_leaves_is_whole),
        TEST(a_file_that_is_saved_again_before_a_change_of_job_is_of_the_job_before),
        TEST(a_commit_says_whether_its_checkpoint_has_saved_a_file_since_the_last),
        TEST(a_version_that_failed_before_the_commit_is_said_to_have_failed),
        TEST(bytes_that_the_caller_fills_are_in_the_file),
        TEST(a_failed_fill_fails_the_save_or_later_the_checkpoint),
        TEST(a_session_that_a_release_closes_waits_for_the_other_copies),
        TEST(a_commit_during_copies_goes_with_the_last),
        TEST(a_release_that_waits_holds_up_no_other_copy_and_no_commit),
        TEST(a_commit_while_the_last_copy_is_told_is_told_once),
        TEST(a_tag_is_not_begun_again_before_its_commit_is_reported),
        TEST(a_release_may_ask_while_the_tag_waits_to_be_begun_again),
        TEST(a_release_may_ask_while_a_save_finds_no_room),
        TEST(a_release_is_told_that_it_cannot_wait_for_later_copies),
        TEST(a_release_before_the_save_returns_may_ask_and_close_the_session),
        TEST(an_agent_that_dies_before_the_copies_end_is_told_of_the_commit_last),
        TEST(a_checkpoint_whose_files_went_with_an_agent_is_never_called_whole),
        TEST(a_file_that_went_with_an_agent_fails_the_copies_after_it),
        TEST(a_copy_that_is_lost_with_an_agent_is_the_end_of_its_checkpoint),
        TEST(a_lost_image_is_filled_again_while_the_save_runs),
        TEST(a_version_that_the_agent_forgot_is_begun_again),
        TEST(only_open_ended_checkpoints_of_several_ranks_are_begun_before_their_first_save),
        TEST(agents_that_die_again_and_again_end_in_an_error),
        TEST(without_an_agent_calls_fail_at_once_and_say_what_was_tried),
        TEST(an_agent_that_refuses_to_start_is_reported_with_its_exit),
        TEST(a_session_that_has_left_connects_again_for_what_is_still_open),
        TEST(an_agent_is_started_when_none_answers),
        TEST(another_users_agent_is_not_spoken_to),
        TEST(a_broken_promise_switches_the_session_off_for_good),
        TEST(a_wait_does_not_hold_others_up),
        TEST(waits_one_after_the_other_share_a_connection),
        TEST(an_agent_that_is_silent_is_named_once_in_its_log),
        TEST(an_agent_that_is_reached_late_has_limited_time_for_its_answer),
        TEST(a_kept_connection_whose_agent_is_gone_is_no_try),
        TEST(a_wait_ends_at_its_time),
        TEST(several_threads_save_at_once),
        TEST(a_forked_child_speaks_for_itself),
        TEST(a_forked_child_s_save_is_whole_when_it_returns),
        TEST(a_pulse_that_a_forked_child_closes_goes_on_in_its_parent),
        TEST(a_number_that_the_program_has_closed_and_uses_itself_is_left_alone),
        TEST(a_watch_of_a_forked_child_leaves_the_numbers_of_its_parent_alone),
        TEST(a_fork_in_the_middle_of_a_save_locks_nothing),
        TEST(files_can_be_added_to_a_found_checkpoint),
        TEST(a_file_that_storage_lost_meanwhile_comes_from_the_agent_if_it_is_the_same),
        TEST(a_file_whose_parts_the_agent_has_dropped_is_opened_again_only_if_it_is_the_same),
        TEST(a_missing_checkpoint_or_file_is_not_found),
        TEST(the_images_of_a_foretold_file_are_mapped_before_its_save), TEST(a_save_waits_until_its_image_is_ready),
        TEST(a_save_does_not_wait_for_all_pages_of_its_image),
         TEST(an_image_that_is_made_ready_stays_mapped_while_another_file_is_saved),
        TEST(an_agent_that_has_no_image_yet_is_asked_now_and_then), TEST(a_session_ends_while_an_image_is_made_ready),
        TEST(nothing_is_freed_twice_or_without_need),
        /* Last: they start threads that stay, and others replace the table of system calls. */
        TEST(the_agent_hears_how_much_of_a_large_file_is_copied),
         TEST(an_immediate_copy_is_summed_too_if_that_costs_nothing), TEST(the_agent_hears_of_no_copy_that_the_program_waits_for),
        TEST(an_agent_that_does_not_want_to_hear_of_it_is_told_when_all_is_copied),
};

/* `client_test agent --daemon`: listens, goes into the background, and ends with the test's directory. */
static int be_the_agent(void)
{
        struct ipc_place place;

        if (ipc_place_find(&place, NULL) != NEBULA_OK)
                return 1;
        if (fork() == 0) {
                struct os_stat stat;

                fake_start();
                for (int i = 0; i < 10000 && os->stat(place.directory, false, &stat) == 0; i++)
                        os->sleep_ms(10);
                _exit(0);
        }
        for (int i = 0; i < 12000; i++) {
                int fd = os->connect(place.socket);

                if (fd >= 0)
                        return 0;
                os->sleep_ms(5);
        }
        return 1;
}

int main(int argc, char **argv)
{
        char directory[] = "/tmp/nebula-client-XXXXXX";
        ssize_t length = readlink("/proc/self/exe", own_path, sizeof own_path - 1);
        int result;

        if (argc == 3 && !strcmp(argv[1], "agent"))
                return be_the_agent();
        if (length < 0 || !mkdtemp(directory))
                return 1;
        setenv("NEBULA_RUNTIME_DIR", directory, 1);
        unsetenv("NEBULA_AGENT");
        unsetenv("NEBULA_NODE_ID");
        unsetenv("NEBULA_AGENT_PATH");
        result = tap_run(tests, sizeof tests / sizeof tests[0]);
        os_remove_tree(directory);
        return result;
}
