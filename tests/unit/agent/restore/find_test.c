/* The newest version just after the process that saved it has died, before the agent has seen its connection end. */
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent/agent_catalogue.h"
#include "agent/agent_storage.h"
#include "agent/commit/ancestry.h"
#include "agent/commit/lineage.h"
#include "agent/log.h"
#include "agent/restore/restore.h"
#include "agent/restore/slots_private.h"
#include "store/manifest_load.h"
#include "store/manifest_remove.h"
#include "store/tag_log.h"
#include "tap.h"

static uint32_t dead_pid(void)
{
        pid_t pid = fork();

        if (!pid)
                _exit(0);
        if (pid < 0 || waitpid(pid, NULL, 0) != pid)
                abort();
        return (uint32_t)pid;
}

/* Saves t2 open-ended as process `pid`, which is still connected. Returns the newest version that another process finds. */
static int64_t newest_after(uint32_t pid, bool copies)
{
        static struct ipc_find find;
        struct ipc_found found = { .step = -2 };
        struct session other = { .nonce = 2, .pid = os->pid(), .rank = 0, .world = 1, .connection_count = 1, .role = IPC_ROLE_TOOL };
        struct version *version;
        struct bench bench;
        uint64_t id;

        bench_init(&bench, NULL, "");
        if (!bench_version(&bench, "step1", 1, 0))
                abort();
        bench.session.seen_pid = pid;
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "step2", NEBULA_FILES_OPEN, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        if (!id || bench_save(&bench, &id, "a", 3))
                abort();
        if (copies) {
                struct ipc_image request = { .version_id = id, .size = BENCH_FILE_BYTES, .format = IPC_FORMAT_RAW, .name = "b" };
                struct image_loan *loan;

                catalogue_lock(&bench.catalogue);
                if (image_loan_open(&bench.catalogue, &bench.session, &request, never, NULL, &version, &loan, &bench.error))
                        abort();
                catalogue_unlock(&bench.catalogue);
        }
        other.job = bench.job;
        CHECK(!restore_find(&bench.catalogue, &other, &find, &found, &bench.error));
        bench_done(&bench, true);
        return found.step;
}

static void the_newest_version_of_a_process_that_died_is_found_at_once(void)
{
        CHECK(newest_after(dead_pid(), false) == 2);
}

static void a_living_rank_may_add_to_the_version(void)
{
        CHECK(newest_after(os->pid(), false) == 1);
}

/* The rank is in another pid namespace than the agent, so only the end of its connection ends its part. */
static void a_rank_in_another_namespace_may_live_and_add_to_the_version(void)
{
        CHECK(newest_after(0, false) == 1);
}

static void an_incomplete_copy_is_not_complete(void)
{
        CHECK(newest_after(dead_pid(), true) == 1);
}

static _Atomic int failures; /* calls that fail from now on */

static int opendir_that_fails(const char *root, const char *key, struct os_dir **ret_dir)
{
        return failures > 0 && failures-- ? -EIO : os_linux.opendir_below(root, key, ret_dir);
}

static void fail_times(struct store *store, int times)
{
        static struct mem_faults faults;
        bool fails = times > 0;
        static struct os_table table;

        table = os_linux;
        table.opendir_below = opendir_that_fails;
        failures = times;
        faults = (struct mem_faults){ .fail_at = 1, .goes_on = times > 1 };
        if (storage_is_mem())
                store_mem_faults(store, fails ? &faults : NULL);
        else
                os = fails ? &table : &os_linux;
}

static void fail(struct store *store, bool fails)
{
        fail_times(store, fails ? INT_MAX : 0);
}

/* Node a has global_step10 of run a in memory, run b has made global_step20 and 30 durable elsewhere, and run c comes back to node a. */
struct turn {
        struct bench here, elsewhere;
        char storage[256];
};

static void as_run(struct bench *bench, const char *run)
{
        struct session *session = &bench->session;

        session->role = IPC_ROLE_TRAINER;
        session->has_begun = false;
        strcpy(session->run, run);
        strcpy(bench->job->run, run);
        ancestry_begin(bench->job, run);
}

static void save_durable(struct bench *bench, const char *tag, unsigned seed)
{
        struct version *version = bench_version(bench, tag, seed, 0);

        if (!version || bench_persist(bench, version))
                abort();
}

static void turn_init(struct turn *turn)
{
        storage_make(turn->storage);
        bench_init(&turn->here, NULL, turn->storage);
        bench_init(&turn->elsewhere, NULL, turn->storage);
        as_run(&turn->here, "a");
        save_durable(&turn->here, "global_step10", 1);
        as_run(&turn->elsewhere, "b");
        if (storage_scan(&turn->elsewhere.catalogue, turn->elsewhere.job, NULL))
                abort();
        save_durable(&turn->elsewhere, "global_step20", 2);
        save_durable(&turn->elsewhere, "global_step30", 3);
        as_run(&turn->here, "c");
}

static struct ipc_found turn_find(struct turn *turn, const char *tag)
{
        static struct ipc_find find;
        struct ipc_found found = { .step = -2 };

        strcpy(find.tag, tag);
        CHECK(!restore_find(&turn->here.catalogue, &turn->here.session, &find, &found, &turn->here.error));
        return found;
}

static void turn_done(struct turn *turn)
{
        bench_done(&turn->here, true);
        bench_done(&turn->elsewhere, true);
        storage_remove(turn->storage);
}

/*
 * fault (Storage): A job comes back to a node whose memory has an older step, and storage is slow, or fails for a
 * moment.
 * result: The search waits for storage, up to a minute, and tries again. So it finds the newest step.
 */
static void a_search_that_fails_once_is_repeated_before_memory_answers(void)
{
        struct ipc_found found;
        struct turn turn;

        turn_init(&turn);
        fail_times(turn.here.job->storage->store, 1);
        found = turn_find(&turn, "");
        fail_times(turn.here.job->storage->store, 0);
        CHECK(found.step == 30 && !found.passed_count);
        turn_done(&turn);
}

/* Memory has an older version, whole. The newer ones in storage have lost a file. */
static void a_version_from_memory_says_which_newer_ones_in_storage_are_damaged(void)
{
        struct ipc_found found;
        struct turn turn;

        turn_init(&turn);
        REQUIRE(!store_remove_one(turn.here.job->storage->store, "global_step20/a", NULL));
        REQUIRE(!store_remove_one(turn.here.job->storage->store, "global_step30/a", NULL));
        found = turn_find(&turn, "");
        CHECK(found.step == 10 && found.passed_count == 2 && !strcmp(found.passed[0].tag, "global_step30"));
        turn_done(&turn);
}

static bool is_stored(const struct turn *turn, const char *tag)
{
        char key[300];

        snprintf(key, sizeof key, "%s/a", tag);
        return storage_has(turn->storage, key);
}

/*
 * fault (Storage): A job comes back to a node whose memory has an older step, and storage cannot be read at all.
 * result: The version from memory is loaded. `passed_over` and the log name the failure. Once storage can be read,
 * `keep_last` removes nothing of the runs that had gone on.
 */
static void what_a_blind_resume_abandons_is_not_removed(void)
{
        struct ipc_found found;
        struct turn turn;

        turn_init(&turn);
        fail(turn.here.job->storage->store, true);
        found = turn_find(&turn, "");
        CHECK(found.step == 10 && found.passed_count == 1 && strstr(found.passed[0].reason, turn.storage));
        found = turn_find(&turn, "global_step10");
        CHECK(found.step == 10 && found.passed_count == 1);
        fail(turn.here.job->storage->store, false);
        lineage_read(&turn.here.session, catalogue_version(&turn.here.catalogue, found.version_id), IPC_SOURCE_MEMORY);
        bench_keep(turn.here.job, 1);
        for (unsigned step = 11; step < 14; step++) {
                char tag[32];

                snprintf(tag, sizeof tag, "global_step%u", step);
                REQUIRE(bench_version(&turn.here, tag, step, 0) && !storage_scan(&turn.here.catalogue, turn.here.job, NULL));
                REQUIRE(!bench_persist(&turn.here, turn.here.job->versions));
                bench_retain(&turn.here);
        }
        CHECK(is_stored(&turn, "global_step20") && is_stored(&turn, "global_step30") && is_stored(&turn, "global_step13"));
        CHECK(!is_stored(&turn, "global_step10") && !is_stored(&turn, "global_step12"));
        CHECK(turn_find(&turn, "").step == 13);
        turn_done(&turn);
}

/*
 * fault (Storage): Storage does not answer at a resume, and memory has an older version only.
 * result: The job loads the older version, and training goes on. `agent.log` names both.
 */
/* The newer version has left memory, and storage does not answer. The load takes the older one and logs that. */
static void an_older_checkpoint_is_taken_with_a_word_when_storage_fails(void)
{
        static struct ipc_find find;
        struct session other = { .nonce = 2, .pid = os->pid(), .world = 1, .connection_count = 1, .role = IPC_ROLE_TOOL };
        char storage[256], directory[256], path[300], *text;
        struct version *newer;
        struct ipc_found found;
        struct bench bench;
        size_t size;

        storage_make(storage);
        test_dir_make_quick(directory);
        bench_init(&bench, NULL, storage);
        REQUIRE(bench_version(&bench, "step1", 1, 0));
        newer = bench_version(&bench, "step2", 2, 0);
        REQUIRE(newer && !bench_persist(&bench, newer));
        version_forget_memory(&bench.catalogue, newer);
        other.job = bench.job;
        CHECK(!restore_find(&bench.catalogue, &other, &find, &found, &bench.error) && found.step == 2);
        snprintf(path, sizeof path, "%s/agent.log", directory);
        REQUIRE(!log_open(path));
        fail(bench.job->storage->store, true);
        CHECK(!restore_find(&bench.catalogue, &other, &find, &found, &bench.error) && found.step == 1);
        fail(bench.job->storage->store, false);
        log_close();
        REQUIRE(!os_read_file(path, 65536, &text, &size));
        CHECK(strstr(text, "step1") && strstr(text, "step2") && strstr(text, storage));
        free(text);
        bench_done(&bench, true);
        storage_remove(storage);
        test_dir_remove(directory);
}

static const struct store_ops *stored_ops;
static struct manifest goes; /* this version is removed when a caller looks at its objects; no tag: none is */

/* Removes that version between the read of its manifest and the read of its objects. */
static void remove_looked_at(struct store *store, const char *key)
{
        struct manifest victim = goes;

        if (!*goes.tag || strncmp(key, goes.tag, strlen(goes.tag)))
                return;
        *goes.tag = 0;
        if (manifest_remove(store, &victim, NULL))
                abort();
}

static enum nebula_status list_after_removal(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                                             struct nebula_error *error)
{
        if (deep && !strstr(prefix, MANIFEST_DIRECTORY))
                remove_looked_at(store, prefix);
        return stored_ops->list(store, prefix, deep, from, ret_page, error);
}

static enum nebula_status get_after_removal(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                            struct store_stamp *ret_stamp, struct nebula_error *error)
{
        if (strstr(key, ".record-"))
                remove_looked_at(store, key);
        return stored_ops->get(store, key, limit, ret_text, ret_size, ret_stamp, error);
}

struct shelf { /* versions that only storage has */
        struct bench bench;
        struct session other;
        struct store_ops ops;
        char storage[256];
};

static void shelf_init(struct shelf *shelf, int count)
{
        struct bench *bench = &shelf->bench;

        storage_make(shelf->storage);
        bench_init(bench, NULL, shelf->storage);
        for (int step = 1; step <= count; step++) {
                char tag[16];
                struct version *version;

                snprintf(tag, sizeof tag, "step%d", step);
                version = bench_version(bench, tag, (unsigned)step, (unsigned)step + 8);
                if (!version || bench_persist(bench, version))
                        abort();
                version_forget_memory(&bench->catalogue, version);
        }
        shelf->other = (struct session){ .nonce = 2, .pid = os->pid(), .world = 1, .connection_count = 1, .role = IPC_ROLE_TOOL,
                                         .job = bench->job };
        stored_ops = bench->job->storage->store->ops;
        shelf->ops = *stored_ops;
        shelf->ops.list = list_after_removal;
        shelf->ops.get = get_after_removal;
        bench->job->storage->store->ops = &shelf->ops;
}

static void shelf_goes(struct shelf *shelf, const char *tag)
{
        if (manifest_load(shelf->bench.job->storage->store, tag, &goes, NULL))
                abort();
}

static enum nebula_status shelf_find(struct shelf *shelf, const char *tag, struct ipc_found *found)
{
        static struct ipc_find find;

        strcpy(find.tag, tag);
        return restore_find(&shelf->bench.catalogue, &shelf->other, &find, found, &shelf->bench.error);
}

static void shelf_done(struct shelf *shelf)
{
        CHECK(!*goes.tag);
        manifest_done(&goes);
        shelf->bench.job->storage->store->ops = stored_ops;
        bench_done(&shelf->bench, true);
        storage_remove(shelf->storage);
}

/* Retention removes an old version while a client asks for it. The version is reported as missing, not as damaged. */
static void a_version_that_is_removed_while_it_is_looked_at_is_not_found(void)
{
        struct ipc_found found;
        struct shelf shelf;

        shelf_init(&shelf, 2);
        shelf_goes(&shelf, "step1");
        CHECK(shelf_find(&shelf, "step1", &found) == NEBULA_NOT_FOUND);
        CHECK(!shelf_find(&shelf, "step2", &found) && found.step == 2);
        shelf_done(&shelf);
}

static void the_newest_is_looked_for_again_when_it_is_removed_meanwhile(void)
{
        struct ipc_found found;
        struct shelf shelf;

        shelf_init(&shelf, 2);
        shelf_goes(&shelf, "step2");
        CHECK(!shelf_find(&shelf, "", &found) && found.step == 1);
        manifest_done(&goes);
        shelf_goes(&shelf, "step1");
        CHECK(shelf_find(&shelf, "", &found) == NEBULA_NOT_FOUND); /* so training begins from the start */
        shelf_done(&shelf);
}

static void a_version_that_is_removed_between_finding_and_reading_is_to_be_looked_up_again(void)
{
        struct ipc_opened *opened = NULL;
        struct ipc_open open = { .name = "a" };
        struct ipc_found found;
        struct shelf shelf;
        int fd = -1;

        shelf_init(&shelf, 1);
        REQUIRE(!shelf_find(&shelf, "step1", &found));
        shelf_goes(&shelf, "step1");
        open.version_id = found.version_id;
        CHECK(restore_open(&shelf.bench.catalogue, NULL, &open, &opened, &fd, &shelf.bench.error) == NEBULA_NOT_FOUND);
        CHECK(strstr(shelf.bench.error.message, "look it up once more"));
        shelf_done(&shelf);
}

/* Loads file `name` by the version's number. Returns the seed of its bytes, or -1 if the loader must look the version up again. */
static int seed_of(struct bench *bench, uint64_t version_id, const char *name)
{
        struct ipc_opened *opened = NULL;
        struct ipc_open open = { .version_id = version_id };
        unsigned char *data;
        int fd = -1, seed = -2;

        strcpy(open.name, name);
        if (restore_open(&bench->catalogue, NULL, &open, &opened, &fd, &bench->error))
                return strstr(bench->error.message, "look it up once more") ? -1 : -2;
        if (opened->size == BENCH_FILE_BYTES && !os->map(fd, 0, opened->size, OS_MAP_READ, (void **)&data)) {
                for (int k = 1; k < 16 && seed < 0; k++)
                        seed = data[0] == bench_byte((unsigned)k, 0) && data[BENCH_FILE_BYTES - 1] == bench_byte((unsigned)k, BENCH_FILE_BYTES - 1) ? k : seed;
                os->unmap(data, opened->size);
        }
        os->close(fd);
        free(opened);
        return seed;
}

/* Two files of one checkpoint must not come from two writings. */
static void a_handle_leads_to_no_other_writing_of_its_tag(void)
{
        struct version *first;
        struct bench bench;
        uint64_t id;

        bench_init(&bench, NULL, "");
        first = bench_version(&bench, "best", 1, 2);
        REQUIRE(first);
        id = first->id;
        CHECK(seed_of(&bench, id, "a") == 1);
        REQUIRE(bench_version(&bench, "best", 3, 4) && bench_version(&bench, "best", 5, 6));
        version_forget_memory(&bench.catalogue, catalogue_version(&bench.catalogue, id));
        CHECK(seed_of(&bench, id, "b") == -1);
        bench_done(&bench, true);
}

static void a_handle_that_only_began_its_tag_leads_to_the_one_before(void)
{
        struct version *begun;
        struct bench bench;

        bench_init(&bench, NULL, "");
        REQUIRE(bench_version(&bench, "best", 1, 2));
        catalogue_lock(&bench.catalogue);
        begun = commit_begin(&bench.catalogue, &bench.session, "best", NEBULA_FILES_OPEN, &bench.error);
        catalogue_unlock(&bench.catalogue);
        REQUIRE(begun);
        CHECK(seed_of(&bench, begun->id, "b") == 2);
        bench_done(&bench, true);
}

/* Another agent of the same run writes the tag again. It finds nothing in storage, so it counts the writings from one. */
static void a_tag_that_was_removed_and_written_again_with_its_number_is_another_one(void)
{
        struct manifest removed = { 0 };
        struct ipc_found found, again;
        struct version *version;
        struct bench writer;
        struct shelf shelf;

        shelf_init(&shelf, 1);
        REQUIRE(!shelf_find(&shelf, "step1", &found));
        CHECK(seed_of(&shelf.bench, found.version_id, "a") == 1);
        REQUIRE(!manifest_load(shelf.bench.job->storage->store, "step1", &removed, NULL));
        REQUIRE(!manifest_remove(shelf.bench.job->storage->store, &removed, NULL));
        bench_init(&writer, NULL, shelf.storage);
        version = bench_version(&writer, "step1", 7, 8);
        REQUIRE(version && !bench_persist(&writer, version) && version->writing == removed.writing);
        CHECK(seed_of(&shelf.bench, found.version_id, "b") == -1);
        CHECK(!shelf_find(&shelf, "step1", &again) && again.version_id != found.version_id);
        CHECK(seed_of(&shelf.bench, again.version_id, "a") == 7);
        bench_done(&writer, true);
        manifest_done(&removed);
        shelf_done(&shelf);
}

/* Writes the newest version again. The earlier entry of its log is removed, as after every writing. */
static void write_again(struct shelf *shelf, const char *tag)
{
        struct store *store = shelf->bench.job->storage->store;
        struct manifest manifest = { 0 };
        char *text;
        size_t size;

        if (manifest_load(store, tag, &manifest, NULL))
                abort();
        manifest.number++;
        manifest.writing++;
        manifest.sequence++;
        if (manifest_format(&manifest, &text, &size, NULL) || tag_log_create(store, tag, manifest.number, text, size, NULL) ||
            tag_log_take_back(store, tag, manifest.number - 1, NULL))
                abort();
        free(text);
        manifest_done(&manifest);
}

static void an_agent_does_not_grow_with_the_versions_that_a_reader_follows(void)
{
        struct ipc_found found;
        struct shelf shelf;
        size_t versions = 0, images = 0;

        shelf_init(&shelf, 1);
        for (int i = 0; i < TOMBSTONE_MAX + 50; i++) {
                static struct ipc_open open = { .name = "a" };
                struct ipc_opened *opened = NULL;
                int fd = -1;

                write_again(&shelf, "step1");
                CHECK(!shelf_find(&shelf, "", &found));
                open.version_id = found.version_id;
                if (i % 50 == 0) { /* by an image, as for the second reader */
                        CHECK(!restore_open(&shelf.bench.catalogue, NULL, &open, &opened, &fd, &shelf.bench.error));
                        os->close(fd);
                        free(opened);
                }
        }
        for (const struct version *version = shelf.bench.job->versions; version; version = version->next)
                versions++;
        for (const struct image *image = shelf.bench.catalogue.memory->images; image; image = image->next)
                images += image->restored;
        CHECK(versions <= TOMBSTONE_MAX + 4 && images <= 3);
        CHECK(!shelf_find(&shelf, "", &found));
        shelf_done(&shelf);
}

static int64_t hours;

static int64_t now_in_hours(void)
{
        return os_linux.now_ns() + hours * 3600 * SECOND_NS;
}

/* The step that a rank of the present run finds; -1: none, -2: it is refused. */
static int64_t rank_finds(struct shelf *shelf, uint32_t rank, const char *tag)
{
        struct ipc_find find = { 0 };
        struct ipc_found found;
        enum nebula_status status;

        shelf->other.rank = rank;
        strcpy(find.tag, tag);
        status = restore_find(&shelf->bench.catalogue, &shelf->other, &find, &found, &shelf->bench.error);
        return !status ? found.step : status == NEBULA_UNAVAILABLE ? -2 : -1;
}

static void begin_run(struct shelf *shelf, const char *run)
{
        strcpy(shelf->other.run, run);
        catalogue_lock(&shelf->bench.catalogue);
        ancestry_begin(shelf->bench.job, run);
        catalogue_unlock(&shelf->bench.catalogue);
}

/* Another node makes it durable. */
static void write_elsewhere(struct shelf *shelf, const char *tag)
{
        struct bench bench;
        struct version *version;

        bench_init(&bench, NULL, shelf->storage);
        if (storage_scan(&bench.catalogue, bench.job, &bench.error) || !(version = bench_version(&bench, tag, 7, 0)) || bench_persist(&bench, version))
                abort();
        bench_done(&bench, true);
}

/* Other nodes write while the ranks of this one look. */
static void all_ranks_of_a_node_get_one_answer(void)
{
        struct os_table table = *os;
        const struct os_table *real = os;
        struct version *version;
        struct shelf shelf;

        shelf_init(&shelf, 1);
        shelf.other.role = IPC_ROLE_TRAINER;
        shelf.other.world = shelf.bench.job->settings.local_world = 2;
        table.now_ns = now_in_hours;
        os = &table;
        begin_run(&shelf, "r1");
        CHECK(rank_finds(&shelf, 0, "") == 1 && rank_finds(&shelf, 0, "step2") == -1);
        write_elsewhere(&shelf, "step2");
        hours++;
        CHECK(rank_finds(&shelf, 1, "") == 1 && rank_finds(&shelf, 1, "step2") == 2 && rank_finds(&shelf, 0, "step2") == 2);
        CHECK(rank_finds(&shelf, 0, "") == 1);
        hours++;
        CHECK(rank_finds(&shelf, 1, "") == 2 && rank_finds(&shelf, 0, "") == 2); /* a new question */
        write_elsewhere(&shelf, "step3");
        begin_run(&shelf, "r2");
        CHECK(rank_finds(&shelf, 1, "") == 3 && rank_finds(&shelf, 0, "") == 3);

        begin_run(&shelf, "r3");
        CHECK(rank_finds(&shelf, 0, "step3") == 3);
        write_elsewhere(&shelf, "step3");
        CHECK(rank_finds(&shelf, 1, "step3") == -2 && strstr(shelf.bench.error.message, "start the job again"));
        CHECK(rank_finds(&shelf, 0, "step3") == 3); /* no other rank had the one before */
        CHECK(rank_finds(&shelf, 1, "step3") == 3);

        begin_run(&shelf, "r4");
        CHECK(rank_finds(&shelf, 0, "") == 3);
        catalogue_lock(&shelf.bench.catalogue);
        for (version = shelf.bench.job->versions; version; version = version->next)
                if (!strcmp(version->tag, "step3"))
                        version_judge_copy(&shelf.bench.catalogue, version, false, "a reader has found damage");
        catalogue_unlock(&shelf.bench.catalogue);
        write_elsewhere(&shelf, "step4");
        CHECK(rank_finds(&shelf, 1, "") == 4 && rank_finds(&shelf, 0, "") == 4);
        os = real;
        shelf_done(&shelf);
}

static int64_t seconds;

static int64_t now_in_seconds(void)
{
        return os_linux.now_ns() + seconds * SECOND_NS;
}

/* A shelf whose ranks 0 and 1 are on this node. */
static void shelf_init_ranks(struct shelf *shelf)
{
        shelf_init(shelf, 1);
        shelf->other.role = IPC_ROLE_TRAINER;
        shelf->other.world = shelf->bench.job->settings.local_world = 2;
        begin_run(shelf, "r1");
}

static void that_there_is_none_is_an_answer_for_the_other_ranks(void)
{
        struct os_table table = *os;
        const struct os_table *real = os;
        struct shelf shelf;

        shelf_init_ranks(&shelf);
        table.now_ns = now_in_seconds;
        os = &table;
        seconds = 0;
        CHECK(rank_finds(&shelf, 0, "step2") == -1);
        write_elsewhere(&shelf, "step2");
        CHECK(rank_finds(&shelf, 1, "step2") == -1 && strstr(shelf.bench.error.message, "another rank"));
        CHECK(rank_finds(&shelf, 0, "step2") == 2 && rank_finds(&shelf, 1, "step2") == 2); /* they may have waited for it */
        CHECK(rank_finds(&shelf, 0, "step3") == -1);
        write_elsewhere(&shelf, "step3");
        seconds += 9;
        CHECK(rank_finds(&shelf, 1, "step3") == -1);
        CHECK(rank_finds(&shelf, 0, "step4") == -1);
        write_elsewhere(&shelf, "step4"); /* or rank 0 has copied it */
        seconds += 11;
        CHECK(rank_finds(&shelf, 1, "step4") == 4);
        os = real;
        shelf_done(&shelf);
}

static void ranks_that_ask_in_step_get_each_answer_equally_often(void)
{
        struct os_table table = *os;
        const struct os_table *real = os;
        struct shelf shelf;

        shelf_init_ranks(&shelf);
        table.now_ns = now_in_seconds;
        os = &table;
        seconds = 0;
        CHECK(rank_finds(&shelf, 0, "") == 1 && rank_finds(&shelf, 1, "") == 1);
        write_elsewhere(&shelf, "step2");
        seconds += 59;
        CHECK(rank_finds(&shelf, 0, "") == 1);
        seconds += 2;
        CHECK(rank_finds(&shelf, 1, "") == 1);
        CHECK(rank_finds(&shelf, 0, "") == 2 && rank_finds(&shelf, 1, "") == 2);
        begin_run(&shelf, "r2"); /* only one of its ranks asks */
        CHECK(rank_finds(&shelf, 1, "") == 2);
        write_elsewhere(&shelf, "step3");
        CHECK(rank_finds(&shelf, 1, "") == 2);
        seconds += 61;
        CHECK(rank_finds(&shelf, 1, "") == 3);
        os = real;
        shelf_done(&shelf);
}

/* Ranks come and go one by one; or all have restarted, and the launcher has given the run its old name. */
static void an_answer_outlives_a_beginning_for_the_ranks_that_have_not_got_it(void)
{
        struct shelf shelf;

        shelf_init(&shelf, 1);
        shelf.other.role = IPC_ROLE_TRAINER;
        shelf.other.world = shelf.bench.job->settings.local_world = 2;
        begin_run(&shelf, "r1");
        CHECK(rank_finds(&shelf, 0, "") == 1);
        write_elsewhere(&shelf, "step2");
        begin_run(&shelf, "r1");
        CHECK(rank_finds(&shelf, 1, "") == 1 && rank_finds(&shelf, 0, "") == 1);
        begin_run(&shelf, "r1");
        CHECK(rank_finds(&shelf, 1, "") == 2 && rank_finds(&shelf, 0, "") == 2);
        write_elsewhere(&shelf, "step3");
        begin_run(&shelf, "r1");
        begin_run(&shelf, "r2");
        CHECK(rank_finds(&shelf, 0, "") == 3);
        write_elsewhere(&shelf, "step4");
        begin_run(&shelf, "r2");
        CHECK(rank_finds(&shelf, 0, "") == 4); /* it has got the one before: it has restarted */
        shelf_done(&shelf);
}

/* A run on several nodes may have committed what this agent does not know. */
static void ranks_of_several_nodes_look_at_storage_each_time(void)
{
        struct shelf shelf;

        shelf_init(&shelf, 1);
        shelf.other.role = IPC_ROLE_TRAINER;
        shelf.other.world = 4;
        shelf.bench.job->settings.local_world = 2;
        begin_run(&shelf, "r1");
        CHECK(rank_finds(&shelf, 0, "") == 1 && rank_finds(&shelf, 1, "") == 1);
        write_elsewhere(&shelf, "step2");
        CHECK(rank_finds(&shelf, 0, "") == 2 && rank_finds(&shelf, 1, "") == 2);
        shelf_done(&shelf);
}

/* A program that asks for each of many tags. */
static void an_agent_remembers_few_answers(void)
{
        struct shelf shelf;
        char tag[32];

        shelf_init_ranks(&shelf);
        for (int i = 0; i < 600; i++) {
                snprintf(tag, sizeof tag, "none%d", i);
                CHECK(rank_finds(&shelf, 0, tag) == -1);
        }
        CHECK(shelf.bench.job->answers->count == 256);
        CHECK(rank_finds(&shelf, 1, "step1") == 1 && rank_finds(&shelf, 1, "none599") == -1);
        shelf_done(&shelf);
}

/* Its run has looked at storage when it began. */
static void a_trainer_that_searches_late_finds_what_another_node_has_made_durable_since(void)
{
        struct os_table table = *os;
        const struct os_table *real = os;
        struct shelf shelf;

        shelf_init(&shelf, 1);
        shelf.other.role = IPC_ROLE_TRAINER;
        REQUIRE(bench_version(&shelf.bench, "step2", 1, 0));
        begin_run(&shelf, "r1");
        table.now_ns = now_in_hours;
        os = &table;
        hours = 0;
        CHECK(!storage_scan(&shelf.bench.catalogue, shelf.bench.job, &shelf.bench.error) && rank_finds(&shelf, 0, "") == 2);
        write_elsewhere(&shelf, "step3");
        hours++;
        CHECK(rank_finds(&shelf, 0, "") == 3);
        os = real;
        shelf_done(&shelf);
}

TAP_MAIN(TEST(a_trainer_that_searches_late_finds_what_another_node_has_made_durable_since), TEST(all_ranks_of_a_node_get_one_answer),
         TEST(that_there_is_none_is_an_answer_for_the_other_ranks), TEST(ranks_that_ask_in_step_get_each_answer_equally_often),
         TEST(ranks_of_several_nodes_look_at_storage_each_time),
         TEST(an_answer_outlives_a_beginning_for_the_ranks_that_have_not_got_it),
         TEST(an_agent_remembers_few_answers), TEST(a_handle_leads_to_no_other_writing_of_its_tag),
         TEST(a_handle_that_only_began_its_tag_leads_to_the_one_before),
         TEST(a_tag_that_was_removed_and_written_again_with_its_number_is_another_one),
         TEST(a_version_that_is_removed_while_it_is_looked_at_is_not_found),
         TEST(the_newest_is_looked_for_again_when_it_is_removed_meanwhile),
         TEST(a_version_that_is_removed_between_finding_and_reading_is_to_be_looked_up_again),
         TEST(an_older_checkpoint_is_taken_with_a_word_when_storage_fails),
         TEST(a_search_that_fails_once_is_repeated_before_memory_answers), TEST(what_a_blind_resume_abandons_is_not_removed),
         TEST(a_version_from_memory_says_which_newer_ones_in_storage_are_damaged),
         TEST(the_newest_version_of_a_process_that_died_is_found_at_once), TEST(a_living_rank_may_add_to_the_version), TEST(a_rank_in_another_namespace_may_live_and_add_to_the_version),
         TEST(an_incomplete_copy_is_not_complete), TEST(an_agent_does_not_grow_with_the_versions_that_a_reader_follows))
