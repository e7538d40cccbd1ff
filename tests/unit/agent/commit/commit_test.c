/* How versions become complete, and the effect on other versions. */
#include <errno.h>
#include <unistd.h>

#include "agent/agent_catalogue.h"
#include "agent/agent_storage.h"
#include "agent/clients/events.h"
#include "agent/clients/report.h"
#include "agent/clients/verdict.h"
#include "agent/commit/ancestry.h"
#include "agent/commit/carry_over.h"
#include "agent/commit/commit_end.h"
#include "agent/commit/commit_rule.h"
#include "agent/commit/lineage.h"
#include "agent/commit/node_documents.h"
#include "agent/commit/world.h"
#include "agent/persist/worker.h"
#include "base/error.h"
#include "store/announce.h"
#include "store/manifest_load.h"
#include "store/tag_log.h"
#include "tap.h"
#include "test_dir.h"

/* Saves one file by rank 0, which completes its version. */
/* 0: the version wrote the file itself. */
static uint64_t origin_of(const struct manifest *manifest, const char *name)
{
        return manifest_file_origin(manifest, manifest_find_file(manifest, name));
}

static bool save_one(struct bench *bench, unsigned seed)
{
        struct version *version;
        char tag[32];
        uint64_t id;

        snprintf(tag, sizeof tag, "global_step%u", seed);
        version = commit_begin(&bench->catalogue, &bench->session, tag, 1, &bench->error);
        id = version ? version->id : 0;
        return id && !bench_save(bench, &id, "a", seed);
}

/* One rank saves to an open-ended version, and another rank saves hundreds of versions after that. */
static void begin_long(struct bench *bench, struct session *other)
{
        uint64_t id = 0;

        bench_init(bench, NULL, "");
        bench->job->settings.world = bench->session.world = 2;
        *other = bench->session;
        other->nonce = 2;
        other->rank = 1;
        CHECK(save_one(bench, 1));
        bench->session = *other;
        id = commit_begin(&bench->catalogue, other, "final", NEBULA_FILES_OPEN, &bench->error)->id;
        CHECK(!bench_save(bench, &id, "b", 1));
        bench->session.nonce = 1;
        bench->session.rank = 0;
        for (unsigned i = 2; i < TOMBSTONE_MAX + 5; i++)
                CHECK(save_one(bench, i));
        for (struct version *version = bench->job->versions; version; version = version->next)
                version->recorded = !version->in_memory; /* as in a long history: the next check forgets the oldest */
}

static size_t count_complete(const struct bench *bench, const char *tag)
{
        size_t count = 0;

        for (const struct version *version = bench->job->versions; version; version = version->next)
                count += !strcmp(version->tag, tag) && lifecycle_complete(version->life.state);
        return count;
}

static void an_old_open_version_is_closed_while_older_ones_are_forgotten(void)
{
        struct session other;
        struct bench bench;

        begin_long(&bench, &other);
        commit_session_ended(&bench.catalogue, &other);
        CHECK(count_complete(&bench, "final") == 1 && count_complete(&bench, "global_step1") == 0);
        bench_done(&bench, true);

        begin_long(&bench, &other);
        commit_close_open(&bench.catalogue, bench.job, 1, NULL);
        CHECK(count_complete(&bench, "final") == 1 && count_complete(&bench, "global_step1") == 0);
        bench_done(&bench, true);

        begin_long(&bench, &other);
        for (struct version *version = bench.job->versions; version; version = version->next)
                if (!strcmp(version->tag, "final")) {
                        version->adopted = true;
                        version->parts[0].pid = version->parts[0].seen_pid = 0x7ffffffe;
                }
        CHECK(!survival_log_check_owners(&bench.catalogue, bench.job));
        CHECK(count_complete(&bench, "final") == 1 && count_complete(&bench, "global_step1") == 0);
        bench_done(&bench, true);
}

static void an_open_version_waits_for_a_connected_rank_of_its_job_alone_that_has_not_begun_it(void)
{
        for (size_t is_own = 0; is_own < 2; is_own++) {
                struct session other;
                struct bench bench;
                struct job *job;
                uint64_t id;

                bench_init(&bench, NULL, "");
                bench.job->settings.world = bench.session.world = 2;
                other = bench.session;
                other.nonce = 2;
                other.rank = 1;
                other.role = IPC_ROLE_TRAINER;
                other.connection_count = 1;
                other.next = NULL;
                job = is_own ? bench.job : catalogue_job_get(&bench.catalogue, "", "another");
                other.job = job;
                job->sessions = &other;
                id = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_OPEN, &bench.error)->id;
                CHECK(!bench_save(&bench, &id, "a", 1));
                catalogue_lock(&bench.catalogue);
                CHECK(!commit_part(&bench.catalogue, &bench.session, catalogue_version(&bench.catalogue, id), &bench.error));
                CHECK(count_complete(&bench, "t") == !is_own);
                job->sessions = NULL;
                catalogue_unlock(&bench.catalogue);
                bench_done(&bench, true);
        }
}

static void a_version_of_all_ranks_waits_for_a_rank_that_has_not_even_connected(void)
{
        struct bench bench;
        uint64_t id;

        for (uint32_t world = 1; world < 3; world++) {
                bench_init(&bench, NULL, "");
                bench.job->settings.world = bench.session.world = world;
                id = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_ALL_RANKS, &bench.error)->id;
                CHECK(!bench_save(&bench, &id, "a", 1));
                catalogue_lock(&bench.catalogue);
                CHECK(!commit_part(&bench.catalogue, &bench.session, catalogue_version(&bench.catalogue, id), &bench.error));
                CHECK(count_complete(&bench, "t") == (world == 1));
                catalogue_unlock(&bench.catalogue);
                bench_done(&bench, true);
        }
}

/* Rank 0 and rank 1 have a loan each. Rank 1 saved last, so its loan comes first in the list. */
static void a_rank_that_ends_is_named_with_the_file_that_it_was_copying(void)
{
        struct ipc_image request = { .size = BENCH_FILE_BYTES, .format = IPC_FORMAT_RAW };
        struct version *version = NULL;
        struct image_loan *loan;
        struct bench bench;

        bench_init(&bench, NULL, "");
        bench.session.world = 2;
        catalogue_lock(&bench.catalogue);
        for (uint32_t rank = 0; rank < 2; rank++) {
                bench.session.rank = rank;
                bench.session.nonce = rank + 1;
                version = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_ALL_RANKS, &bench.error);
                REQUIRE(version);
                request.version_id = version->id;
                snprintf(request.name, sizeof request.name, "of rank %u", rank);
                REQUIRE(!image_loan_open(&bench.catalogue, &bench.session, &request, never, NULL, &version, &loan, &bench.error));
        }
        CHECK(commit_rank_ended(&bench.catalogue, version, 0));
        CHECK(version->life.state == NEBULA_STATE_FAILED && strstr(version->error.message, "of rank 0"));
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

/* Rank 0 has begun a version, and saves after rank 1 has ended: that is one failed version, and no second one. */
static void a_version_that_had_nothing_when_a_rank_ended_fails_once(void)
{
        for (unsigned has_begun = 0; has_begun < 2; has_begun++) {
                struct session other;
                struct bench bench;
                size_t failed = 0, superseded = 0;
                uint64_t id;

                bench_init(&bench, NULL, "");
                bench.job->settings.world = bench.session.world = 2;
                strcpy(bench.job->run, "one");
                strcpy(bench.session.run, "one");
                other = bench.session;
                other.nonce = 2;
                other.rank = 1;
                bench_join(&bench);
                catalogue_lock(&bench.catalogue);
                if (has_begun)
                        REQUIRE(commit_begin(&bench.catalogue, &other, "t", NEBULA_FILES_ALL_RANKS, &bench.error));
                id = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_ALL_RANKS, &bench.error)->id;
                commit_session_ended(&bench.catalogue, &other);
                catalogue_unlock(&bench.catalogue);
                CHECK(!bench_save(&bench, &id, "a", 1));
                catalogue_lock(&bench.catalogue);
                commit_part(&bench.catalogue, &bench.session, catalogue_version(&bench.catalogue, id), &bench.error);
                for (const struct version *version = bench.job->versions; version; version = version->next) {
                        failed += version->life.state == NEBULA_STATE_FAILED;
                        superseded += version->superseded;
                }
                CHECK(superseded == has_begun && failed == 1 + superseded);
                verdict_update(&bench.catalogue, bench.job);
                CHECK(strstr(bench.job->verdict->reason, "t failed: rank 1") && !strstr(bench.job->verdict->reason, "in a row"));
                catalogue_unlock(&bench.catalogue);
                bench_leave(&bench);
                bench_done(&bench, true);
        }
}

/* An agent may be sending the version to a peer, directly from its pages. */
static void a_version_that_another_node_let_go_keeps_its_images_while_they_are_read(void)
{
        struct version *version, *newer;
        int64_t due = INT64_MAX;
        struct bench bench;

        bench_init(&bench, NULL, "/nonexistent");
        version = bench_version(&bench, "global_step1", 1, 0);
        newer = bench_version(&bench, "global_step2", 2, 0);
        REQUIRE(version && newer);
        newer->stored = true;
        version_move(&bench.catalogue, newer, NEBULA_STATE_DURABLE);
        version->is_spread = version->persist->recorded_here = version->wanted = version->nodes->wanted_reported = true;
        version->nodes->waiting_since_ns = os->now_ns() - 60000000000;
        version->pins++;
        catalogue_lock(&bench.catalogue);
        world_work(&bench.catalogue, bench.job, os->now_ns(), &due);
        CHECK(version->in_memory && version->files[0].image);
        version->pins--;
        world_work(&bench.catalogue, bench.job, os->now_ns(), &due);
        CHECK(!version->in_memory && version->superseded);
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

/* Storage could not be listed before. When it can, a worker or a loader has pinned the version. */
static void a_pinned_version_gets_the_files_that_storage_turns_out_to_hold(void)
{
        struct version *version;
        struct bench bench;
        char storage[256];

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version && !bench_persist(&bench, version));
        bench_done(&bench, true);

        bench_init(&bench, NULL, storage);
        version = bench_version(&bench, "t", 3, 0);
        REQUIRE(version);
        version->pins++;
        CHECK(!storage_scan(&bench.catalogue, bench.job, &bench.error));
        version->pins--;
        CHECK(!bench_persist(&bench, version));
        CHECK(bench.job->known.count == 1 && manifest_find_file(bench.job->known.list[0], "b"));
        CHECK(bench.job->known.count == 1 && stored_holds(bench.job->storage->store, bench.job->known.list[0], "b", 2));
        bench_done(&bench, true);
        storage_remove(storage);
}

/* An earlier run has left versions in storage. This run writes the same tag twice before it lists storage: `again` shares file b with
 * `first`. */
static bool write_twice_before_the_scan(struct bench *bench, const char *storage, struct version **ret_first, struct version **ret_again)
{
        struct version *version;

        bench_init(bench, NULL, storage);
        version = bench_version(bench, "t", 1, 2);
        if (!version || bench_persist(bench, version))
                return false;
        bench_done(bench, true);

        bench_init(bench, NULL, storage);
        *ret_first = bench_version(bench, "t", 3, 4);
        *ret_again = bench_version(bench, "t", 5, 0);
        return *ret_first && *ret_again && !storage_scan(&bench->catalogue, bench->job, &bench->error);
}

/*
 * fault (Arguments of the caller): A run writes a tag twice before it could read storage, where an earlier run left
 * that tag.
 * result: Both stay newer than the version in storage, and the older never follows the newer. Files that carry over are
 * of this run.
 */
/* The numbers of the writings do not help: the earlier run counted from one, too. */
static void a_file_of_an_earlier_run_is_not_taken_for_one_that_carries_over(void)
{
        struct version *first, *again;
        uint64_t sequence;
        struct bench bench;
        char storage[256];

        storage_make(storage);
        REQUIRE(write_twice_before_the_scan(&bench, storage, &first, &again));
        CHECK(!bench_persist(&bench, again));
        CHECK(stored_holds(bench.job->storage->store, bench.job->known.list[0], "a", 5));
        CHECK(stored_holds(bench.job->storage->store, bench.job->known.list[0], "b", 4));
        sequence = again->sequence;
        again = bench_version(&bench, "t", 6, 0); /* b is in storage now, and is not written again */
        REQUIRE(again && !bench_persist(&bench, again));
        CHECK(origin_of(bench.job->known.list[0], "b") == sequence);
        CHECK(stored_holds(bench.job->storage->store, bench.job->known.list[0], "b", 4));
        bench_done(&bench, true);
        storage_remove(storage);
}

/* The same after an agent was killed in between: the next agent knows only the survival log. */
static void a_file_of_an_earlier_run_is_not_taken_for_one_that_was_taken_over(void)
{
        struct version *first, *again;
        char storage[256], memory[256];
        struct bench bench;

        storage_make(storage);
        test_dir_make_quick(memory);
        bench_init(&bench, NULL, storage);
        first = bench_version(&bench, "t", 1, 2);
        REQUIRE(first && !bench_persist(&bench, first));
        bench_done(&bench, true);
        bench_init(&bench, memory, storage);
        REQUIRE(bench_version(&bench, "t", 3, 4) && bench_version(&bench, "t", 5, 0));
        bench_done(&bench, false);

        bench_init(&bench, memory, storage);
        again = bench.job->versions;
        REQUIRE(again && again->writing == 2 && !storage_scan(&bench.catalogue, bench.job, &bench.error));
        CHECK(!bench_persist(&bench, again));
        CHECK(stored_holds(bench.job->storage->store, bench.job->known.list[0], "b", 4));
        bench_done(&bench, true);
        test_dir_remove(memory);
        storage_remove(storage);
}

/* The earlier writing became durable in the meantime, and then the agent was killed. */
static void a_file_that_has_become_durable_is_carried_over_and_not_written_again(void)
{
        char storage[256], memory[256];
        struct version *first, *again;
        uint64_t sequence;
        struct bench bench;

        storage_make(storage);
        test_dir_make_quick(memory);
        for (int killed = 0; killed < 2; killed++) {
                bench_init(&bench, memory, storage);
                first = bench_version(&bench, "t", 1, 2);
                again = bench_version(&bench, "t", 3, 0);
                REQUIRE(first && again && !bench_persist(&bench, first));
                sequence = first->sequence;
                if (killed) {
                        bench_done(&bench, false);
                        bench_init(&bench, memory, storage);
                        again = bench.job->versions;
                        REQUIRE(again && again->writing == 2);
                }
                CHECK(!bench_persist(&bench, again));
                CHECK(origin_of(bench.job->known.list[0], "b") == sequence);
                CHECK(stored_holds(bench.job->storage->store, bench.job->known.list[0], "b", 2));
                bench_done(&bench, true);
                storage_remove(storage);
        }
        test_dir_remove(memory);
}

/* The clock is behind the times of versions in storage, which an earlier run or another machine wrote. */
static void versions_that_become_newer_than_storage_keep_their_order(void)
{
        struct version *version, *newer, *newest;
        struct bench bench;
        char storage[256];

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        bench.job->last_sequence = UINT64_C(1) << 61;
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version && !bench_persist(&bench, version));
        bench_done(&bench, true);

        for (unsigned ahead = 0; ahead < 2; ahead++) {
                bench_init(&bench, NULL, storage);
                version = bench_version(&bench, "u", 3, 4);
                newer = bench_version(&bench, "v", 5, 6);
                if (ahead)
                        bench.job->last_sequence = UINT64_C(1) << 62;
                newest = bench_version(&bench, "w", 7, 8);
                REQUIRE(version && newer && newest && !storage_scan(&bench.catalogue, bench.job, &bench.error));
                CHECK(version->sequence > UINT64_C(1) << 61 && newer->sequence > version->sequence && newest->sequence > newer->sequence);
                CHECK(bench.job->last_sequence == newest->sequence);
                bench_done(&bench, true);
        }
        storage_remove(storage);
}

/* Puts a manifest of that sequence, with no file, into storage. */
static bool plant(const char *storage, const char *tag, const char *job_name, uint64_t sequence)
{
        struct manifest manifest = { .number = 1, .writing = 1, .step = name_step(tag), .world = 1, .sequence = sequence };
        struct store *store;
        size_t size;
        char *text;
        bool done;

        strcpy(manifest.tag, tag);
        strcpy(manifest.job, job_name);
        if (store_open(storage, &store, NULL) || manifest_format(&manifest, &text, &size, NULL))
                return false;
        done = !tag_log_create(store, tag, 1, text, size, NULL);
        free(text);
        store_close(store);
        return done;
}

/*
 * fault (Storage): A manifest has a sequence of a far future.
 * result: The sequences of the agent's other jobs do not move. Versions of its own job stay readable.
 */
static void a_manifest_of_a_far_future_moves_the_sequences_of_no_other_job(void)
{
        const uint64_t now = (uint64_t)os->wall_ns();
        struct version *version;
        struct bench bench;
        struct job *other;
        char storage[256], beside[256];

        storage_make(storage);
        storage_make(beside);
        REQUIRE(plant(storage, "evil", "somebody", DOCUMENT_SEQUENCE_MAX) && plant(beside, "evil", "", DOCUMENT_SEQUENCE_MAX));
        bench_init(&bench, NULL, storage);
        other = catalogue_job_get(&bench.catalogue, beside, "");
        REQUIRE(other && !storage_scan(&bench.catalogue, other, &bench.error) && !storage_scan(&bench.catalogue, bench.job, &bench.error));
        CHECK(other->known.count == 1 && bench.job->known.count == 1);
        version = bench_version(&bench, "t", 1, 2);
        CHECK(version && version->sequence >= now && version->sequence < now + UINT64_C(60000000000));
        bench_done(&bench, true);
        storage_remove(storage);
        storage_remove(beside);
}

/* fault: as a_manifest_of_a_far_future_moves_the_sequences_of_no_other_job */
/* No sequence is later than that one. Versions become durable all the same, and can be read. */
static void after_the_last_sequence_there_is_versions_are_still_readable(void)
{
        struct manifest manifest = { 0 };
        struct version *version;
        struct bench bench;
        char storage[256];

        storage_make(storage);
        REQUIRE(plant(storage, "evil", "", DOCUMENT_SEQUENCE_MAX));
        bench_init(&bench, NULL, storage);
        version = bench_version(&bench, "before", 1, 2);
        REQUIRE(version && !storage_scan(&bench.catalogue, bench.job, &bench.error));
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version && !bench_persist(&bench, version) && !manifest_load(bench.job->storage->store, "t", &manifest, &bench.error));
        CHECK(stored_holds(bench.job->storage->store, &manifest, "a", 1));
        manifest_done(&manifest);
        version = bench_version(&bench, "evil", 1, 2); /* this version would need a later sequence */
        REQUIRE(version);
        CHECK(bench_persist(&bench, version) == NEBULA_INVALID && strstr(bench.error.message, "impossible numbers"));
        bench_done(&bench, true);
        storage_remove(storage);
}

/* fault: as a_file_of_an_earlier_run_is_not_taken_for_one_that_carries_over */
static void an_older_writing_that_storage_was_not_known_to_gives_way_to_the_newer_one(void)
{
        struct version *first, *again;
        struct bench bench;
        char storage[256];

        storage_make(storage);
        REQUIRE(write_twice_before_the_scan(&bench, storage, &first, &again));
        CHECK(first->sequence < again->sequence);
        CHECK(!bench_persist(&bench, again));
        version_give_way(&bench.catalogue, first, again->sequence);
        CHECK(first->superseded);
        bench_done(&bench, true);
        storage_remove(storage);
}

/* The manifest says that this version wrote the file, so a loader finds them after they have left memory. */
static void a_file_that_was_carried_over_from_memory_alone_is_known_as_storage_has_it(void)
{
        struct version *again;
        struct bench bench;
        char storage[256];

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        REQUIRE(bench_version(&bench, "t", 1, 2));
        again = bench_version(&bench, "t", 3, 0);
        REQUIRE(again && !bench_persist(&bench, again));
        CHECK(!origin_of(bench.job->known.list[0], "b") && !version_file(again, "b")->origin);
        bench_done(&bench, true);
        storage_remove(storage);
}

/* The version has left memory, and storage has it. */
static void a_stored_version_that_is_being_written_again_is_not_removed(void)
{
        struct version *first, *again, *other;
        struct bench bench;
        char storage[256];

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        first = bench_version(&bench, "best", 1, 2);
        REQUIRE(first && !bench_persist(&bench, first));
        other = bench_version(&bench, "last", 3, 4);
        REQUIRE(other);
        version_forget_memory(&bench.catalogue, first);
        again = bench_version(&bench, "best", 5, 0);
        REQUIRE(again && !bench_persist(&bench, other));
        bench_keep(bench.job, 1);
        bench_retain(&bench);
        CHECK(!bench_persist(&bench, again));
        CHECK(bench.job->known.count == 2 && stored_holds(bench.job->storage->store, bench.job->known.list[1], "b", 2));
        bench_retain(&bench);
        CHECK(bench.job->known.count == 1);
        bench_done(&bench, true);
        storage_remove(storage);
}

static const struct store_ops *stored_ops;
static const char *unremovable; /* storage does not remove the object whose key has this ending */

static enum nebula_status remove_all_but_one(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error)
{
        for (size_t i = 0; i < count; i++) {
                enum nebula_status status;

                if (strstr(victims[i].key, unremovable))
                        return error_set(error, NEBULA_STORAGE, EPERM, "%s stays", victims[i].key);
                status = stored_ops->remove(store, &victims[i], 1, error);
                if (status)
                        return status;
        }
        return NEBULA_OK;
}

/*
 * fault (Storage): Retention cannot remove a version.
 * result: The version stays, and the log says why. Retention tries again after the next version.
 */
static void a_failed_removal_by_retention_is_tried_again_after_the_next_version(void)
{
        static const char *const refused[] = { "x/a", ".record-00000.json", "/manifest-1.json" };

        for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
                struct version *version;
                struct store_ops ops;
                struct bench bench;
                char storage[256];

                storage_make(storage);
                bench_init(&bench, NULL, storage);
                bench_keep(bench.job, 1);
                version = bench_version(&bench, "x", 1, 0);
                REQUIRE(version && !bench_persist(&bench, version));
                version = bench_version(&bench, "y", 2, 0);
                REQUIRE(version && !bench_persist(&bench, version));
                unremovable = refused[i];
                stored_ops = bench.job->storage->store->ops;
                ops = *stored_ops;
                ops.remove = remove_all_but_one;
                bench.job->storage->store->ops = &ops;
                for (int turn = 0; turn < 2; turn++)
                        bench_retain(&bench);
                bench.job->storage->store->ops = stored_ops;
                CHECK(storage_count(storage, "x", unremovable + 1, NULL) == 1);
                CHECK(bench.job->known.count + bench.job->storage->half_removed_count == 2);
                CHECK(!strcmp(bench.job->known.list[bench.job->known.count - 1]->tag, "y"));
                bench_retain(&bench);
                CHECK(!storage_count(storage, "x/", "", NULL));
                CHECK(bench.job->known.count == 1 && !bench.job->storage->half_removed_count);
                bench_done(&bench, true);
                storage_remove(storage);
        }
}

static size_t sweep_count; /* lists of the numbers of all removals */

static enum nebula_status list_counted(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                                       struct nebula_error *error)
{
        sweep_count += deep && !from && !strcmp(prefix, ".nebula/removed/");
        return stored_ops->list(store, prefix, deep, from, ret_page, error);
}

static int64_t hours;

static int64_t now_in_hours(void)
{
        return os_linux.now_ns() + hours * 3600 * INT64_C(1000000000);
}

/* Their number does not grow with the versions that were removed: the sweep reads the numbers of all removals of a week. */
static void an_agent_sweeps_the_numbers_of_removals_once_an_hour(void)
{
        struct os_table table = *os;
        const struct os_table *real = os;
        unsigned saves = getenv("NEBULA_TEST_NIGHTLY") ? 300 : 100;
        struct version *version;
        struct store_ops ops;
        struct bench bench;
        char storage[256], tag[32];

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        bench_keep(bench.job, 1);
        version = bench_version(&bench, "first", 1, 0);
        REQUIRE(version && !bench_persist(&bench, version));
        stored_ops = bench.job->storage->store->ops;
        ops = *stored_ops;
        ops.list = list_counted;
        bench.job->storage->store->ops = &ops;
        table.now_ns = now_in_hours;
        os = &table;
        for (hours = 0; hours < 3; hours++) {
                sweep_count = 0;
                for (unsigned i = 0; i < saves; i++) {
                        snprintf(tag, sizeof tag, "h%u-%u", (unsigned)hours, i);
                        version = bench_version(&bench, tag, i + 1, 0);
                        REQUIRE(version && !bench_persist(&bench, version));
                        CHECK(!bench_retain(&bench));
                }
                CHECK(bench.job->known.count == 1 && sweep_count == (hours > 0));
        }
        os = real;
        bench.job->storage->store->ops = stored_ops;
        bench_done(&bench, true);
        storage_remove(storage);
}

/* It only looks which of them the remover has removed. */
static void an_agent_that_is_not_the_remover_removes_nothing_however_many_versions_are_over(void)
{
        struct version *version;
        struct bench bench;
        char storage[256], tag[32];

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        for (unsigned i = 0; i < 40; i++) {
                snprintf(tag, sizeof tag, "t%u", i);
                version = bench_version(&bench, tag, i + 1, 0);
                REQUIRE(version && !bench_persist(&bench, version));
        }
        bench_keep(bench.job, 1);
        bench.job->is_remover = false;
        CHECK(!bench_retain(&bench) && bench.job->known.count == 40);
        bench.job->is_remover = true;
        CHECK(!bench_retain(&bench) && bench.job->known.count == 1);
        bench_done(&bench, true);
        storage_remove(storage);
}

/* So it may still replace that one when it is written. */
static void a_version_follows_the_stored_one_of_its_tag_also_after_another_run_has_begun(void)
{
        struct version *stored, *version;
        struct bench bench;
        char storage[256];
        uint64_t sequence;

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        strcpy(bench.session.run, "a");
        ancestry_begin(bench.job, "a");
        stored = bench_version(&bench, "t", 1, 2);
        REQUIRE(stored && !bench_persist(&bench, stored));
        sequence = stored->sequence;
        strcpy(bench.session.run, "b");
        ancestry_begin(bench.job, "b");
        version = bench_version(&bench, "t", 3, 4);
        REQUIRE(version && !strcmp(version->run, "b"));
        CHECK(ancestry_covers(version, "a", sequence) && ancestry_base(version) == sequence);
        bench.job->is_scanned = true;
        ancestry_begin(bench.job, "c");
        CHECK(!bench.job->is_scanned); /* other nodes may have written since */
        CHECK(ancestry_covers(version, "a", sequence) && !ancestry_covers(version, "a", sequence + 1) && ancestry_base(version) == sequence);
        bench_done(&bench, true);
        storage_remove(storage);
}

/* This agent wrote the earlier one itself, whatever runs have begun since. */
static void a_version_follows_an_earlier_one_of_its_tag_that_becomes_durable_late(void)
{
        struct version *first, *version, *other;
        struct bench bench;
        uint64_t late;

        bench_init(&bench, NULL, "");
        strcpy(bench.session.run, "a");
        ancestry_begin(bench.job, "a");
        first = bench_version(&bench, "t", 1, 2);
        strcpy(bench.session.run, "b");
        ancestry_begin(bench.job, "b");
        version = bench_version(&bench, "t", 3, 4);
        other = bench_version(&bench, "u", 5, 6);
        REQUIRE(first && version && other);
        ancestry_begin(bench.job, "c");
        CHECK(!ancestry_covers(version, "a", first->sequence));
        ancestry_stored(first, first->sequence);
        CHECK(ancestry_covers(version, "a", first->sequence) && !ancestry_covers(other, "a", first->sequence));
        /* Storage had its tag already, so it got a higher number while it was written. */
        strcpy(bench.session.run, "c");
        version = bench_version(&bench, "v", 7, 8);
        late = ancestry_begun(bench.job) + UINT64_C(1000000000000);
        REQUIRE(version && !ancestry_covers(version, "a", late));
        ancestry_stored(first, late);
        CHECK(ancestry_covers(version, "a", late));
        bench_done(&bench, true);
}

/* Storage had a later version of another run, so the first one got a larger number in its manifest. */
static void the_order_of_a_runs_versions_stays_when_one_gets_a_larger_number(void)
{
        struct version *first, *again, *other;
        struct bench bench;

        bench_init(&bench, NULL, "");
        first = bench_version(&bench, "t", 1, 0);
        other = bench_version(&bench, "u", 2, 0);
        again = bench_version(&bench, "t", 0, 3);
        REQUIRE(first && other && again);
        catalogue_lock(&bench.catalogue);
        carry_over_renumber(&bench.catalogue, first, again->sequence + SECOND_NS);
        CHECK(first->sequence < other->sequence && other->sequence < again->sequence);
        version_give_way(&bench.catalogue, again, first->sequence);
        CHECK(!again->superseded);
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

/* A process of the run before still saves. */
static void a_version_is_of_the_run_of_its_session_also_if_the_job_has_a_later_run(void)
{
        struct version *version;
        struct bench bench;

        bench_init(&bench, NULL, "");
        strcpy(bench.job->run, "later");
        strcpy(bench.session.run, "earlier");
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", 2, &bench.error);
        CHECK(version && !strcmp(version->run, "earlier") && version->writing == 1);
        strcpy(bench.session.run, "later");
        bench.session.nonce = 2;
        version = commit_begin(&bench.catalogue, &bench.session, "u", 2, &bench.error);
        CHECK(version && !strcmp(version->run, "later") && version->writing == 1);
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

static const char *unlisted; /* lists of keys with this beginning fail */

static enum nebula_status list_but_some(struct store *store, const char *prefix, bool deep, const char *from, struct store_page *ret_page,
                                        struct nebula_error *error)
{
        if (!strncmp(prefix, unlisted, strlen(unlisted)))
                return error_set(error, NEBULA_STORAGE, EIO, "\"%s\" cannot be listed", prefix);
        return stored_ops->list(store, prefix, deep, from, ret_page, error);
}

/* If the last version is durable, nothing else makes the rules due. */
static void rules_that_could_not_be_applied_stay_due(void)
{
        static const char *const refused[] = { "", ".nebula/pins" };

        for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
                struct version *version;
                struct store_ops ops;
                struct bench bench;
                char storage[256];

                storage_make(storage);
                bench_init(&bench, NULL, storage);
                bench_keep(bench.job, 1);
                version = bench_version(&bench, "x", 1, 0);
                REQUIRE(version && !bench_persist(&bench, version));
                version = bench_version(&bench, "y", 2, 0);
                REQUIRE(version && !bench_persist(&bench, version));
                unlisted = refused[i];
                stored_ops = bench.job->storage->store->ops;
                ops = *stored_ops;
                ops.list = list_but_some;
                bench.job->storage->store->ops = &ops;
                bench.job->retain_due = bench.job->is_scanned = true;
                worker_run(&bench.catalogue, bench.job);
                CHECK(bench.job->known.count == 2 && bench.job->retain_due && bench.job->storage->retain_at_ns);
                bench.job->storage->store->ops = stored_ops;
                bench.job->storage->retain_at_ns = 1; /* the pause is over */
                worker_run(&bench.catalogue, bench.job);
                CHECK(bench.job->known.count == 1 && !bench.job->retain_due && !bench.job->storage->retain_at_ns);
                bench_done(&bench, true);
                storage_remove(storage);
        }
}

/* A report is JSON. With half a character in the reason, the version would be missing from every list. */
static void the_reason_of_a_failure_is_reported_even_if_cut_within_a_character(void)
{
        char tag[] = "x\u4e16\u754c", *text = NULL;
        struct version *version;
        struct bench bench;

        bench_init(&bench, NULL, "");
        version = commit_begin(&bench.catalogue, &bench.session, tag, 1, &bench.error);
        REQUIRE(version);
        version_fail(&bench.catalogue, version, NEBULA_FAILED, "\"%.5s\" failed", version->tag);
        CHECK(!report_version(&bench.catalogue, version->id, &text, &bench.error) && strstr(text, "x\u4e16") && strstr(text, "failed"));
        free(text);
        bench_done(&bench, true);
}

/* A rank begins an open-ended version long after all others. Another node decides that the version is complete. */
static void a_file_still_being_copied_when_other_nodes_commit_is_not_part_of_the_version(void)
{
        struct committed committed = { .of = { .tag = "t", .world = 3, .writing = 1 }, .sequence = 5,
                                       .ranks = (uint32_t[]){ 0, 1 }, .rank_count = 2 };
        struct ipc_image request = { .size = BENCH_FILE_BYTES, .format = IPC_FORMAT_RAW, .name = "late" };
        char storage[256], path[ANNOUNCE_PATH_MAX], key[300], *text;
        struct version *version;
        struct image_loan *loan;
        struct bench bench;
        uint64_t id = 0;
        size_t size;

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        bench.job->settings.world = bench.session.world = 3;
        bench.session.rank = 1;
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_OPEN, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        REQUIRE(id && !bench_save(&bench, &id, "b", 1));
        catalogue_lock(&bench.catalogue);
        REQUIRE(!commit_part(&bench.catalogue, &bench.session, version, &bench.error) && version->is_spread);
        bench.session.rank = 2;
        bench.session.nonce = 2;
        request.version_id = id;
        REQUIRE(!image_loan_open(&bench.catalogue, &bench.session, &request, never, NULL, &version, &loan, &bench.error));
        REQUIRE(version->id == id && version->loans);
        catalogue_unlock(&bench.catalogue);
        REQUIRE(!committed_format(&committed, &text, &size, &bench.error));
        committed_path(&committed.of, path);
        snprintf(key, sizeof key, "t/%s", path);
        storage_write(storage, key, text, size);
        free(text);
        catalogue_lock(&bench.catalogue);
        for (int i = 0; i < 5 && version_open(version); i++) {
                int64_t due = INT64_MAX;

                world_work(&bench.catalogue, bench.job, INT64_MAX / 2, &due);
        }
        CHECK(version->life.state == NEBULA_STATE_COMMITTED && version->file_count == 1);
        CHECK(!version->loans);
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
        storage_remove(storage);
}

/* As rank `rank` of two: begins, saves a file unless `name` is NULL, and commits if `commits`. */
static struct version *share(struct bench *bench, uint32_t rank, const char *name, bool commits)
{
        struct version *version;
        uint64_t id;

        bench->session.rank = rank;
        bench->session.nonce = rank + 1;
        version = commit_begin(&bench->catalogue, &bench->session, "t", NEBULA_FILES_ALL_RANKS, &bench->error);
        id = version ? version->id : 0;
        if (!id || (name && bench_save(bench, &id, name, rank + 1)))
                return NULL;
        version = catalogue_version(&bench->catalogue, id);
        return version && commits && commit_part(&bench->catalogue, &bench->session, version, &bench->error) ? NULL : version;
}

/* The late rank may be on this node, and join after the node has announced its other ranks. */
static void files_that_a_late_rank_does_not_write_again_carry_over(void)
{
        struct version *first, *again;
        struct bench bench;

        bench_init(&bench, NULL, "/nonexistent");
        bench.job->settings.world = bench.session.world = 2;
        first = share(&bench, 0, "a", false);
        REQUIRE(first && share(&bench, 1, "b", true) == first && share(&bench, 0, NULL, true) == first);
        REQUIRE(!first->is_spread && first->life.state == NEBULA_STATE_COMMITTED);
        again = share(&bench, 0, "a", true);
        REQUIRE(again && again != first && again->is_spread && !version_file(again, "b"));
        CHECK(share(&bench, 1, NULL, true) == again && version_open(again));
        CHECK(version_file(again, "b") && version_file(again, "b")->image == version_file(first, "b")->image);
        bench_done(&bench, true);
}

/* Other nodes may know the writing from memory. All nodes must count the same number, or they never commit together. */
static void a_writing_that_was_found_in_storage_is_counted_once(void)
{
        struct version *version;
        struct bench bench;
        char storage[256];

        storage_make(storage);
        for (int found = 0; found < 2; found++) {
                bench_init(&bench, NULL, storage);
                strcpy(bench.job->run, "r");
                strcpy(bench.session.run, "r");
                REQUIRE(!storage_scan(&bench.catalogue, bench.job, &bench.error));
                if (!found) {
                        version = bench_version(&bench, "t", 1, 2);
                        REQUIRE(version && version->writing == 1 && !bench_persist(&bench, version));
                } else {
                        struct manifest stored;

                        REQUIRE(!manifest_load(bench.job->storage->store, "t", &stored, &bench.error));
                        CHECK(catalogue_stored(&bench.catalogue, bench.job, &stored));
                        manifest_done(&stored);
                        version = bench_version(&bench, "t", 3, 4);
                        CHECK(version && version->writing == 2);
                }
                bench_done(&bench, true);
        }
        storage_remove(storage);
}

/* Nodes exchange their documents through storage. Without it no agent ever writes the version, so no failed write would report the problem. */
static void a_watch_reports_that_nodes_cannot_commit_because_of_storage(void)
{
        struct ipc_event event = { 0 };
        int64_t due = INT64_MAX;
        struct version *version;
        struct bench bench;
        char storage[256] = "/dev/null/storage";

        if (storage_is_mem()) {
                storage_make(storage);
                storage_block(storage);
        }
        bench_init(&bench, NULL, storage);
        bench.catalogue.takeover_s = 30;
        bench.job->settings.world = bench.session.world = 2;
        version = bench_version(&bench, "t", 1, 0);
        REQUIRE(version && version->is_spread);
        catalogue_lock(&bench.catalogue);
        CHECK(!event_next(&bench.catalogue, bench.job, 0, &event));
        CHECK(world_work(&bench.catalogue, bench.job, os->now_ns(), &due));
        CHECK(event_next(&bench.catalogue, bench.job, 0, &event) && event.kind == NEBULA_EVENT_STORAGE);
        CHECK(world_work(&bench.catalogue, bench.job, INT64_MAX / 2, &due));
        CHECK(!event_next(&bench.catalogue, bench.job, event.at, &event));
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

static struct version *asked; /* a client asks for all ranks of this version while the agent checks which ranks have captured */
static struct catalogue *asking;

static enum nebula_status list_while_it_is_begun(struct store *store, const char *prefix, bool deep, const char *from,
                                                 struct store_page *ret_page, struct nebula_error *error)
{
        if (asked) {
                catalogue_lock(asking);
                asked->file_goal = NEBULA_FILES_ALL_RANKS;
                catalogue_unlock(asking);
        }
        asked = NULL;
        return stored_ops->list(store, prefix, deep, from, ret_page, error);
}

static void a_goal_that_is_set_while_an_open_ended_version_is_looked_at_counts(void)
{
        struct version *version;
        struct bench bench;
        struct store_ops ops;
        struct store *store;
        char storage[256];
        int64_t due = INT64_MAX;
        uint64_t id;

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        bench.job->settings.world = bench.session.world = 2;
        bench.job->settings.local_world = 1;
        bench.catalogue.quiet_s = 0;
        bench.catalogue.takeover_s = 30;
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_OPEN, &bench.error);
        REQUIRE(version);
        id = version->id;
        catalogue_unlock(&bench.catalogue);
        REQUIRE(!bench_save(&bench, &id, "a", 1));
        catalogue_lock(&bench.catalogue);
        REQUIRE(!commit_part(&bench.catalogue, &bench.session, version, &bench.error) && version->is_spread);
        CHECK(world_work(&bench.catalogue, bench.job, os->now_ns(), &due) && !version->nodes->to_announce);
        catalogue_unlock(&bench.catalogue);
        REQUIRE(!storage_open(&bench.catalogue, bench.job, &store, NULL));
        catalogue_lock(&bench.catalogue);
        stored_ops = store->ops;
        ops = *stored_ops;
        ops.list = list_while_it_is_begun;
        store->ops = &ops;
        asked = version;
        asking = &bench.catalogue;
        CHECK(world_work(&bench.catalogue, bench.job, os->now_ns(), &due) && !asked);
        store->ops = stored_ops;
        CHECK(version->life.state == NEBULA_STATE_CAPTURED);
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
        storage_remove(storage);
}

/* A launcher says of each rank that it is alone on its node. */
static void a_version_has_no_other_nodes_if_trainers_of_all_its_ranks_are_connected_here(void)
{
        struct version *version;
        struct session other;
        struct bench bench;
        char storage[256];

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        bench.job->settings.world = bench.session.world = 2;
        bench.job->settings.local_world = 1;
        other = bench.session;
        other.rank = 1;
        other.nonce = 2;
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_ALL_RANKS, &bench.error);
        REQUIRE(version);
        version->is_spread = false;
        CHECK(world_is_spread(&bench.catalogue, version));
        bench.job->sessions = &other;
        CHECK(!world_is_spread(&bench.catalogue, version));
        other.role = IPC_ROLE_READER;
        CHECK(world_is_spread(&bench.catalogue, version));
        other.role = IPC_ROLE_TRAINER;
        other.connection_count = 0; /* it has gone */
        CHECK(world_is_spread(&bench.catalogue, version));
        other.connection_count = 1;
        other.rank = 2; /* of a larger world before */
        CHECK(world_is_spread(&bench.catalogue, version));
        other.rank = 0; /* has a part of it */
        CHECK(world_is_spread(&bench.catalogue, version));
        bench.job->sessions = NULL;
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
        storage_remove(storage);
}

/* The clock of the node that wrote the earlier one was ahead. */
static void of_two_writings_of_one_run_the_one_that_was_begun_later_may_replace_the_other(void)
{
        struct manifest stored = { .tag = "t", .number = 1, .writing = 2, .world = 1 };
        struct version *version;
        struct bench bench;

        bench_init(&bench, NULL, "");
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version);
        strcpy(stored.run, version->run);
        stored.sequence = version->sequence + 1;
        version->writing = 1;
        CHECK(ancestry_judge(version, &stored, &bench.error) == NEBULA_INVALID && strstr(bench.error.message, "a later writing"));
        version->writing = 3;
        CHECK(!ancestry_judge(version, &stored, &bench.error));
        bench_done(&bench, true);
}

static void a_look_at_a_committed_version_begins_nothing(void)
{
        struct version *first, *second;
        struct bench bench;
        uint64_t id;

        bench_init(&bench, NULL, "");
        for (unsigned i = 0; i < 2; i++) {
                first = commit_begin(&bench.catalogue, &bench.session, "t", 1, &bench.error);
                REQUIRE(first);
                id = first->id;
                REQUIRE(!bench_save(&bench, &id, "a", i));
        }
        bench.error.status = NEBULA_OK;
        first = commit_known(&bench.session, "t", 1, &bench.error);
        second = commit_known(&bench.session, "t", 2, &bench.error);
        CHECK(first && first->writing == 1 && second && second->writing == 2 && !bench.error.status);
        CHECK(!commit_known(&bench.session, "t", 3, &bench.error) && bench.error.status == NEBULA_NOT_FOUND);
        bench.error.status = NEBULA_OK;
        CHECK(!commit_known(&bench.session, "u", 1, &bench.error) && bench.error.status == NEBULA_NOT_FOUND);
        CHECK(count_complete(&bench, "t") == 2 && count_complete(&bench, "u") == 0);
        CHECK(bench.job->versions == second && second->next == first && !first->next);
        bench_done(&bench, true);
}

/* Each rank of the world saves its own file, and rank 0 also one that only the first writing has. */
static struct version *save_as_world(struct bench *bench, const char *run, uint32_t world, unsigned seed, bool has_model)
{
        struct version *version = NULL;
        uint64_t id = 0;
        char name[32];

        bench->job->settings.world = bench->job->settings.local_world = bench->session.world = world;
        strcpy(bench->session.run, run);
        strcpy(bench->job->run, run);
        for (uint32_t rank = 0; rank < world; rank++) {
                bench->session.rank = rank;
                bench->session.nonce = 100 * seed + rank;
                version = commit_begin(&bench->catalogue, &bench->session, "t", NEBULA_FILES_ALL_RANKS, &bench->error);
                id = version ? version->id : 0;
                snprintf(name, sizeof name, "rng%u", rank);
                if (!id || bench_save(bench, &id, name, seed + rank) || (!rank && has_model && bench_save(bench, &id, "model", seed)))
                        return NULL;
                version = catalogue_version(&bench->catalogue, id);
                if (!version || commit_part(&bench->catalogue, &bench->session, version, &bench->error))
                        return NULL;
        }
        return version;
}

static bool has_stored(const struct bench *bench, const char *name)
{
        return bench->job->known.count == 1 && manifest_find_file(bench->job->known.list[0], name);
}

/*
 * fault (Arguments of the caller): A tag is written again by fewer ranks, or by a run that knows nothing of the one
 * before.
 * result: These files do not carry over: those of ranks that do not exist any more, and those of a run after which this
 * one did not come.
 */
/* Tested from memory, and from storage alone. */
static void files_of_ranks_that_are_no_more_do_not_carry_over(void)
{
        for (unsigned i = 0; i < 3; i++) {
                struct version *version;
                struct bench bench;
                char storage[256];

                storage_make(storage);
                bench_init(&bench, NULL, storage);
                version = save_as_world(&bench, "r", 4, 1, true);
                REQUIRE(version && (i == 2 || !bench_persist(&bench, version)));
                CHECK(i == 2 || (has_stored(&bench, "rng3") && has_stored(&bench, "model")));
                if (i == 1) {
                        bench_done(&bench, true);
                        bench_init(&bench, NULL, storage);
                        REQUIRE(!storage_scan(&bench.catalogue, bench.job, &bench.error));
                }
                version = save_as_world(&bench, "r", 2, 10, false);
                REQUIRE(version && !bench_persist(&bench, version));
                CHECK(has_stored(&bench, "rng0") && has_stored(&bench, "rng1") && has_stored(&bench, "model"));
                CHECK(!has_stored(&bench, "rng2") && !has_stored(&bench, "rng3") && bench.job->known.list[0]->file_count == 3);
                CHECK(stored_holds(bench.job->storage->store, bench.job->known.list[0], "rng1", 11));
                CHECK(stored_holds(bench.job->storage->store, bench.job->known.list[0], "model", 1));
                CHECK(!storage_has(storage, "t/rng3")); /* also not for a reader that does not read manifests */
                CHECK(storage_has(storage, "t/rng1"));
                bench_done(&bench, true);
                storage_remove(storage);
        }
}

/* fault: as files_of_ranks_that_are_no_more_do_not_carry_over */
/* `found`: the version existed when the run began. */
static void files_of_another_run_carry_over_if_this_one_came_after_it(void)
{
        for (unsigned found = 0; found < 2; found++) {
                struct version *version;
                struct bench bench;
                char storage[256];

                storage_make(storage);
                bench_init(&bench, NULL, storage);
                if (!found)
                        ancestry_begin(bench.job, "later");
                version = save_as_world(&bench, "first", 1, 1, true);
                REQUIRE(version);
                if (found)
                        ancestry_begin(bench.job, "later");
                version = save_as_world(&bench, "later", 1, 10, false);
                REQUIRE(version && !storage_scan(&bench.catalogue, bench.job, &bench.error) && !bench_persist(&bench, version));
                CHECK(has_stored(&bench, "rng0") && has_stored(&bench, "model") == (found == 1));
                bench_done(&bench, true);
                storage_remove(storage);
        }
}

/* Run "later" saves file a of t again, and takes b over. Run "first" has left t in this node's memory, and run "elsewhere" has made a t of its
 * own durable from another node. */
static void files_of_a_run_that_was_overtaken_elsewhere_do_not_carry_over(void)
{
        for (unsigned is_forgotten = 0; is_forgotten < 2; is_forgotten++) {
                struct version *first, *again;
                struct bench bench, elsewhere;
                char storage[256];

                storage_make(storage);
                bench_init(&bench, NULL, storage);
                strcpy(bench.session.run, "first");
                strcpy(bench.job->run, "first");
                ancestry_begin(bench.job, "first");
                first = bench_version(&bench, "t", 1, 2);
                bench_init(&elsewhere, NULL, storage);
                strcpy(elsewhere.session.run, "elsewhere");
                strcpy(elsewhere.job->run, "elsewhere");
                again = bench_version(&elsewhere, "t", 3, 4);
                REQUIRE(first && again && !bench_persist(&elsewhere, again));
                strcpy(bench.session.run, "later");
                strcpy(bench.job->run, "later");
                ancestry_begin(bench.job, "later");
                again = bench_version(&bench, "t", 5, 0);
                REQUIRE(again && ancestry_carries_from(again) == first->id);
                if (is_forgotten) {
                        version_forget_memory(&bench.catalogue, first);
                        version_free(&bench.catalogue, first);
                }
                REQUIRE(!storage_scan(&bench.catalogue, bench.job, &bench.error) && !bench_persist(&bench, again));
                CHECK(stored_holds(bench.job->storage->store, bench.job->known.list[0], "a", 5));
                CHECK(stored_holds(bench.job->storage->store, bench.job->known.list[0], "b", 4));
                bench_done(&bench, true);
                bench_done(&elsewhere, true);
                storage_remove(storage);
        }
}

/* A client asked for three files. Those of the version in storage carry over once the version is complete. */
static void a_version_that_is_saved_while_storage_is_read_waits_for_the_files_that_were_asked_for(void)
{
        struct version *version;
        struct bench bench;
        char storage[256];
        uint64_t id;

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version && !bench_persist(&bench, version));
        bench_done(&bench, true);

        bench_init(&bench, NULL, storage);
        version = commit_begin(&bench.catalogue, &bench.session, "t", 3, &bench.error);
        id = version ? version->id : 0;
        REQUIRE(id && !bench_save(&bench, &id, "a", 3) && !storage_scan(&bench.catalogue, bench.job, &bench.error));
        CHECK(!bench_save(&bench, &id, "c", 4) && version_open(version));
        CHECK(!bench_save(&bench, &id, "d", 5) && version->life.state == NEBULA_STATE_COMMITTED && version_file(version, "b"));
        bench_done(&bench, true);
        storage_remove(storage);
}

static void a_later_step_of_another_job_in_the_same_storage_begins_no_line(void)
{
        struct version *version;
        struct bench bench;
        char storage[256];

        storage_make(storage);
        REQUIRE(plant(storage, "global_step9", "somebody", 1));
        bench_init(&bench, NULL, storage);
        version = bench_version(&bench, "global_step5", 1, 2);
        REQUIRE(version && !storage_scan(&bench.catalogue, bench.job, &bench.error));
        CHECK(!version->line.count);
        bench_done(&bench, true);
        storage_remove(storage);
}

/* Any other node leaves the decision to it for a time. */
static void the_node_to_which_rank_0_is_connected_leads_before_rank_0_saves(void)
{
        for (uint32_t rank = 0; rank < 2; rank++) {
                struct version *version;
                struct bench bench;
                char storage[256];

                storage_make(storage);
                bench_init(&bench, NULL, storage);
                bench.catalogue.takeover_s = 30;
                bench.job->settings.world = bench.session.world = 3;
                version = share(&bench, 1, "b", true);
                REQUIRE(version && version->is_spread);
                bench.session.role = IPC_ROLE_TRAINER;
                bench.session.rank = rank;
                bench_join(&bench);
                catalogue_lock(&bench.catalogue);
                for (int i = 0; i < 2; i++) /* it announces, and looks */
                        CHECK(world_work(&bench.catalogue, bench.job, os->now_ns(), &(int64_t){ INT64_MAX }));
                CHECK(version->nodes->leads == !rank);
                catalogue_unlock(&bench.catalogue);
                bench_leave(&bench);
                bench_done(&bench, true);
                storage_remove(storage);
        }
}

/* Files are written ahead of a commit that the running copies complete. A rank that has not connected may never save, and a tag that has a version may
 * carry files over. */
static void a_commit_is_foreseen_if_no_other_rank_and_no_earlier_version_matters(void)
{
        for (unsigned i = 0; i < 3; i++) {
                struct ipc_image request = { .size = BENCH_FILE_BYTES, .format = IPC_FORMAT_RAW, .name = "a" };
                struct version *version;
                struct image_loan *loan;
                struct bench bench;

                bench_init(&bench, NULL, "");
                REQUIRE(i != 1 || bench_version(&bench, "t", 1, 2));
                bench.job->settings.world = bench.session.world = 1 + i / 2;
                catalogue_lock(&bench.catalogue);
                version = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_ALL_RANKS, &bench.error);
                REQUIRE(version);
                request.version_id = version->id;
                REQUIRE(!image_loan_open(&bench.catalogue, &bench.session, &request, never, NULL, &version, &loan, &bench.error));
                CHECK(!commit_foreseen(&bench.catalogue, version));
                REQUIRE(!commit_copied(&bench.catalogue, version, loan, &(struct ipc_copied){ .size = 4096, .commits = 1 }, &bench.error));
                CHECK(commit_foreseen(&bench.catalogue, version) == !i);
                catalogue_unlock(&bench.catalogue);
                bench_done(&bench, true);
        }
}

/* It loads step 1, which abandons step 3, and then step 3 after all. */
static void a_run_that_goes_back_to_an_abandoned_version_continues_the_line_of_that_one(void)
{
        struct version *read[2], *version;
        struct bench bench;

        bench_init(&bench, NULL, "");
        read[0] = bench_version(&bench, "global_step1", 1, 0);
        read[1] = bench_version(&bench, "global_step3", 2, 0);
        REQUIRE(read[0] && read[1] && bench_version(&bench, "global_step9", 3, 0));
        for (unsigned i = 0; i < 2; i++) {
                lineage_read(&bench.session, read[i], IPC_SOURCE_MEMORY);
                version = bench_version(&bench, i ? "global_step4" : "global_step5", 4 + i, 0);
                CHECK(version && version->line.count == 1 && version->line.forks[0].after == read[i]->step);
        }
        bench_done(&bench, true);
}

/* No rank has read a version. Each run begins anew, and saves the later step first. */
static void a_run_goes_back_to_the_step_to_which_the_run_before_it_went_back(void)
{
        struct version *version = NULL;
        struct bench bench;
        uint64_t began = 0;

        bench_init(&bench, NULL, "");
        for (unsigned i = 0; i < 2; i++) {
                strcpy(bench.session.run, i ? "b" : "a");
                ancestry_begin(bench.job, bench.session.run);
                REQUIRE(bench_version(&bench, i ? "global_step3" : "global_step2", 1 + 2 * i, 0));
                version = bench_version(&bench, "global_step1", 2 + 2 * i, 0);
                REQUIRE(version && version->line.count == 1 && version->line.forks[0].after == 0);
                CHECK(line_began(&version->line) > began);
                began = line_began(&version->line);
        }
        bench_done(&bench, true);
}

/* The ledger of lost time needs it. */
static void a_version_says_when_the_trainers_before_it_ended(void)
{
        struct version *version;
        struct bench bench;
        double before;

        bench_init(&bench, NULL, "");
        version = bench_version(&bench, "global_step1", 1, 0);
        CHECK(version && version->stopped == 0);
        before = catalogue_now();
        bench.session.left_ns = os->now_ns();
        catalogue_lock(&bench.catalogue);
        commit_session_ended(&bench.catalogue, &bench.session);
        catalogue_unlock(&bench.catalogue);
        version = bench_version(&bench, "global_step2", 2, 0);
        CHECK(version && version->stopped > before - 1 && version->stopped <= version->parts[0].begun);
        bench_done(&bench, true);
}

/* In one request. */
static void a_rank_closes_its_part_with_its_last_file(void)
{
        struct ipc_image request = { .size = BENCH_FILE_BYTES, .format = IPC_FORMAT_RAW, .name = "a" };
        struct ipc_captured done = { .commits = 1 };
        struct version *version;
        struct image_loan *loan;
        struct bench bench;

        bench_init(&bench, NULL, "");
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_ALL_RANKS, &bench.error);
        REQUIRE(version);
        request.version_id = version->id;
        REQUIRE(!image_loan_open(&bench.catalogue, &bench.session, &request, never, NULL, &version, &loan, &bench.error));
        CHECK(!commit_captured(&bench.catalogue, version, loan, &done, &bench.error) && version->life.state == NEBULA_STATE_COMMITTED);
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

/* Rank 0 has nothing to save to the next writing of a tag, and says so before rank 1 begins it. */
static void a_rank_that_commits_nothing_after_a_counted_version_takes_part_in_the_next(void)
{
        struct version *version;
        struct bench bench;
        uint64_t id;

        bench_init(&bench, NULL, "");
        bench.job->settings.world = bench.session.world = 2;
        for (uint32_t rank = 0; rank < 2; rank++) {
                bench.session.rank = rank;
                bench.session.nonce = rank + 1;
                version = commit_begin(&bench.catalogue, &bench.session, "t", 2, &bench.error);
                id = version ? version->id : 0;
                REQUIRE(id && !bench_save(&bench, &id, rank ? "b" : "a", rank));
        }
        REQUIRE(version->life.state == NEBULA_STATE_COMMITTED);
        for (uint32_t rank = 0; rank < 2; rank++) {
                bench.session.rank = rank;
                bench.session.nonce = rank + 1;
                CHECK(!commit_part(&bench.catalogue, &bench.session, version, &bench.error));
        }
        CHECK(share(&bench, 0, NULL, true) == version);
        version = share(&bench, 1, "c", true);
        CHECK(version && version->writing == 2 && version->life.state == NEBULA_STATE_COMMITTED);
        bench_done(&bench, true);
}

/* Rank 0 has never committed the checkpoint with its last file, and has nothing to save to the next writing. */
static void a_rank_that_never_committed_a_counted_version_does_not_hold_up_the_next(void)
{
        struct version *first, *next;
        struct bench bench;
        uint64_t id;

        bench_init(&bench, NULL, "");
        bench.job->settings.world = bench.session.world = 2;
        for (uint32_t rank = 2; rank-- > 0;) {
                bench.session.rank = rank;
                bench.session.nonce = rank + 1;
                first = commit_begin(&bench.catalogue, &bench.session, "t", 2, &bench.error);
                id = first ? first->id : 0;
                REQUIRE(id && !bench_save(&bench, &id, rank ? "b" : "a", rank));
        }
        REQUIRE(first->life.state == NEBULA_STATE_COMMITTED && share(&bench, 0, NULL, false) == first);
        CHECK(!commit_nothing(&bench.catalogue, &bench.session, first, &bench.error));
        next = share(&bench, 1, "c", true);
        CHECK(next && next->writing == 2 && next->life.state == NEBULA_STATE_COMMITTED);
        bench_done(&bench, true);
}

/* It has begun the next writing, and then commits the checkpoint with the last file after all. */
static void a_late_commit_of_a_counted_version_closes_nothing_in_the_next(void)
{
        struct version *first, *next;
        struct bench bench;
        uint64_t id;

        bench_init(&bench, NULL, "");
        bench.job->settings.world = bench.session.world = 2;
        first = commit_begin(&bench.catalogue, &bench.session, "t", 1, &bench.error);
        id = first ? first->id : 0;
        REQUIRE(id && !bench_save(&bench, &id, "a", 1) && first->life.state == NEBULA_STATE_COMMITTED);
        next = share(&bench, 0, "b", false);
        REQUIRE(next && next != first && !commit_part(&bench.catalogue, &bench.session, first, &bench.error));
        CHECK(share(&bench, 1, "c", true) == next && version_open(next) && !version_part(next, 0)->closed);
        bench_done(&bench, true);
}

/* The documents of two nodes lie in storage. */
static void a_version_that_waits_names_the_ranks_that_no_node_has_closed(void)
{
        struct bench nodes[2];
        struct version *versions[2];
        char storage[256], text[160];
        int64_t now;

        storage_make(storage);
        for (unsigned i = 0; i < 2; i++) {
                int64_t due = INT64_MAX;

                bench_init(&nodes[i], NULL, storage);
                nodes[i].catalogue.takeover_s = 30;
                nodes[i].job->settings.world = nodes[i].session.world = 3;
                versions[i] = share(&nodes[i], i, i ? "b" : "a", true);
                REQUIRE(versions[i] && versions[i]->is_spread);
                catalogue_lock(&nodes[i].catalogue);
                CHECK(world_work(&nodes[i].catalogue, nodes[i].job, os->now_ns(), &due) && !versions[i]->nodes->to_announce);
                world_missing(versions[i], text, sizeof text);
                CHECK(!strcmp(text, i ? "waits for ranks 0, 2 of 3" : "waits for ranks 1, 2 of 3"));
                catalogue_unlock(&nodes[i].catalogue);
        }
        catalogue_lock(&nodes[0].catalogue);
        now = os->now_ns();
        CHECK(world_work(&nodes[0].catalogue, nodes[0].job, now, &(int64_t){ INT64_MAX }));
        world_missing(versions[0], text, sizeof text);
        CHECK(!strcmp(text, "waits for rank 2 of 3"));
        CHECK(versions[0]->nodes->coverage); /* so it reads no document again */
        CHECK(!world_work(&nodes[0].catalogue, nodes[0].job, now, &(int64_t){ INT64_MAX })); /* it pauses */
        catalogue_unlock(&nodes[0].catalogue);
        bench_done(&nodes[0], true);
        bench_done(&nodes[1], true);
        storage_remove(storage);
}

TAP_MAIN(TEST(the_node_to_which_rank_0_is_connected_leads_before_rank_0_saves),
         TEST(a_commit_is_foreseen_if_no_other_rank_and_no_earlier_version_matters),
         TEST(a_run_that_goes_back_to_an_abandoned_version_continues_the_line_of_that_one),
         TEST(a_rank_closes_its_part_with_its_last_file),
         TEST(files_of_a_run_that_was_overtaken_elsewhere_do_not_carry_over),
         TEST(a_version_that_is_saved_while_storage_is_read_waits_for_the_files_that_were_asked_for),
         TEST(a_later_step_of_another_job_in_the_same_storage_begins_no_line),
         TEST(a_run_goes_back_to_the_step_to_which_the_run_before_it_went_back),
         TEST(the_order_of_a_runs_versions_stays_when_one_gets_a_larger_number),
         TEST(a_version_says_when_the_trainers_before_it_ended),
         TEST(a_rank_that_commits_nothing_after_a_counted_version_takes_part_in_the_next),
         TEST(a_rank_that_never_committed_a_counted_version_does_not_hold_up_the_next), TEST(a_late_commit_of_a_counted_version_closes_nothing_in_the_next),
         TEST(a_version_that_waits_names_the_ranks_that_no_node_has_closed),
         TEST(files_of_ranks_that_are_no_more_do_not_carry_over), TEST(files_of_another_run_carry_over_if_this_one_came_after_it),
         TEST(a_look_at_a_committed_version_begins_nothing),
         TEST(of_two_writings_of_one_run_the_one_that_was_begun_later_may_replace_the_other),
         TEST(a_failed_removal_by_retention_is_tried_again_after_the_next_version),
         TEST(an_agent_sweeps_the_numbers_of_removals_once_an_hour),
         TEST(rules_that_could_not_be_applied_stay_due),
         TEST(a_goal_that_is_set_while_an_open_ended_version_is_looked_at_counts),
         TEST(a_version_of_all_ranks_waits_for_a_rank_that_has_not_even_connected),
         TEST(an_open_version_waits_for_a_connected_rank_of_its_job_alone_that_has_not_begun_it),
         TEST(an_old_open_version_is_closed_while_older_ones_are_forgotten),
         TEST(a_version_that_had_nothing_when_a_rank_ended_fails_once),
         TEST(a_rank_that_ends_is_named_with_the_file_that_it_was_copying),
         TEST(a_version_that_another_node_let_go_keeps_its_images_while_they_are_read),
         TEST(a_pinned_version_gets_the_files_that_storage_turns_out_to_hold),
         TEST(a_file_of_an_earlier_run_is_not_taken_for_one_that_carries_over),
         TEST(a_file_of_an_earlier_run_is_not_taken_for_one_that_was_taken_over),
         TEST(a_file_that_has_become_durable_is_carried_over_and_not_written_again),
         TEST(an_older_writing_that_storage_was_not_known_to_gives_way_to_the_newer_one),
         TEST(a_manifest_of_a_far_future_moves_the_sequences_of_no_other_job),
         TEST(after_the_last_sequence_there_is_versions_are_still_readable), TEST(versions_that_become_newer_than_storage_keep_their_order),
         TEST(a_file_that_was_carried_over_from_memory_alone_is_known_as_storage_has_it),
         TEST(a_stored_version_that_is_being_written_again_is_not_removed),
         TEST(the_reason_of_a_failure_is_reported_even_if_cut_within_a_character),
         TEST(a_file_still_being_copied_when_other_nodes_commit_is_not_part_of_the_version),
         TEST(files_that_a_late_rank_does_not_write_again_carry_over),
         TEST(a_writing_that_was_found_in_storage_is_counted_once),
         TEST(an_agent_that_is_not_the_remover_removes_nothing_however_many_versions_are_over),
         TEST(a_version_follows_the_stored_one_of_its_tag_also_after_another_run_has_begun),
         TEST(a_version_is_of_the_run_of_its_session_also_if_the_job_has_a_later_run),
         TEST(a_version_follows_an_earlier_one_of_its_tag_that_becomes_durable_late),
         TEST(a_version_has_no_other_nodes_if_trainers_of_all_its_ranks_are_connected_here),
         TEST(a_watch_reports_that_nodes_cannot_commit_because_of_storage))
