/* What of a long run stays: a bounded number of tombstones, which answer, and which no request has to walk past. */
#include "agent/agent_catalogue.h"
#include "agent/history.h"
#include "agent/keeper.h"
#include "tap.h"
#include "test_dir.h"

static size_t live_count(const struct job *job)
{
        size_t count = 0;

        for (const struct version *version = job->live; version; version = version->next_live)
                count++;
        return count;
}

static size_t version_count(const struct job *job)
{
        size_t count = 0;

        for (const struct version *version = job->versions; version; version = version->next)
                count++;
        return count;
}

static void tombstones_are_bounded_answer_and_are_in_nobodys_way(void)
{
        const unsigned count = 3 * TOMBSTONE_MAX;
        uint64_t ids[3 * TOMBSTONE_MAX];
        struct bench bench;
        char tag[32];

        bench_init(&bench, NULL, "");
        for (unsigned i = 0; i < count; i++) {
                struct version *version;

                snprintf(tag, sizeof tag, "step%u", i);
                version = bench_version(&bench, tag, 1, 0);
                REQUIRE(version);
                ids[i] = version->id;
                history_flush(&bench.catalogue, bench.job->lane);
                CHECK(live_count(bench.job) <= 4);
                CHECK(version_count(bench.job) <= TOMBSTONE_MAX + 4);
        }
        CHECK(!catalogue_version(&bench.catalogue, ids[0]));
        for (unsigned i = count - TOMBSTONE_MAX; i < count; i++)
                CHECK(catalogue_version(&bench.catalogue, ids[i]));
        CHECK(bench.job->tombstone_count + live_count(bench.job) == version_count(bench.job));
        bench_done(&bench, true);
}

static void a_new_tag_is_mostly_known_to_be_new_and_one_that_is_there_never(void)
{
        const unsigned count = 2 * TOMBSTONE_MAX;
        struct bench bench;
        size_t counted = 0;
        unsigned walks = 0;
        char tag[32];

        bench_init(&bench, NULL, "");
        for (unsigned i = 0; i < count; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                walks += job_may_have(bench.job, tag);
                REQUIRE(bench_version(&bench, tag, 1, 0));
                history_flush(&bench.catalogue, bench.job->lane);
        }
        CHECK(walks < count / 4);
        for (const struct version *version = bench.job->versions; version; version = version->next)
                CHECK(job_may_have(bench.job, version->tag));
        for (size_t i = 0; i < TAG_SLOTS; i++)
                counted += bench.job->tag_counts[i];
        CHECK(counted == version_count(bench.job)); /* those that are forgotten are not counted any more */
        bench_done(&bench, true);
}

static void a_tombstone_that_is_written_again_is_the_next_generation(void)
{
        struct version *version;
        struct bench bench;
        char tag[32];

        bench_init(&bench, NULL, "");
        for (unsigned i = 0; i < 10; i++) {
                snprintf(tag, sizeof tag, "step%u", i % 5);
                version = bench_version(&bench, tag, 1, 0);
                REQUIRE(version);
                CHECK(version->generation == 1 + i / 5);
                history_flush(&bench.catalogue, bench.job->lane);
        }
        CHECK(bench.job->tombstone_count >= 6);
        bench_done(&bench, true);
}

/* A rank that commits a whole tag again without a file is remembered there, and not waited for by the next generation. */
static void a_tombstone_remembers_who_had_nothing_to_add(void)
{
        struct version *first, *again;
        struct session other;
        struct bench bench;
        char tag[32];

        bench_init(&bench, NULL, "");
        bench.session.world = bench.job->world = 2;
        other = bench.session;
        other.rank = 1;
        other.nonce = 2;
        bench.session.next = NULL;
        for (unsigned i = 0; i < 6; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                first = bench_version(&bench, tag, 1, 0);
                REQUIRE(first && !commit_part(&bench.catalogue, &other, first, &bench.error));
                CHECK(first->life.state == NEBULA_STATE_COMMITTED);
                history_flush(&bench.catalogue, bench.job->lane);
        }
        for (first = bench.job->versions; first && strcmp(first->tag, "step0");)
                first = first->next;
        REQUIRE(first && first->is_tombstone);
        REQUIRE(!commit_part(&bench.catalogue, &other, first, &bench.error));
        again = bench_version(&bench, "step0", 2, 0);
        REQUIRE(again && again != first);
        CHECK(again->generation == 2 && again->life.state == NEBULA_STATE_COMMITTED);
        /* It has begun the tag anew: it is not spoken for any more. */
        REQUIRE(!commit_part(&bench.catalogue, &other, again, &bench.error));
        CHECK(commit_begin(&bench.catalogue, &other, "step0", NEBULA_FILES_ALL_RANKS, &bench.error) == again);
        CHECK(!again->idle_count);
        bench_done(&bench, true);
}

/* What a killed run left may become complete while the next run's ranks agree on an older version, and load it. */
static void nothing_goes_while_the_ranks_of_a_new_run_have_begun_nothing(void)
{
        struct session *next = calloc(1, sizeof *next);
        struct version *agreed, *version;
        struct bench bench;
        char tag[32];

        bench_init(&bench, NULL, "");
        bench.job->retention_count = 2;
        agreed = bench_version(&bench, "step1", 1, 0);
        REQUIRE(agreed && next);
        *next = bench.session;
        next->nonce = 2;
        next->has_begun = false;
        catalogue_lock(&bench.catalogue);
        next->next = bench.catalogue.sessions;
        bench.catalogue.sessions = next;
        catalogue_unlock(&bench.catalogue);
        for (unsigned i = 2; i < 5; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                REQUIRE(bench_version(&bench, tag, 1, 0));
                CHECK(version_whole_in_memory(agreed));
        }
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, next, "step2", NEBULA_FILES_ALL_RANKS, &bench.error);
        catalogue_retain(&bench.catalogue, bench.job, bench.job->retention_count);
        CHECK(version && !version_whole_in_memory(agreed));
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

static struct os_table table;
static struct bench *failing; /* whose versions fail while memory is got for them */

static int fail_meanwhile(int fd, uint64_t offset, uint64_t size)
{
        int result = os_linux.allocate(fd, offset, size);

        if (!failing)
                return result;
        catalogue_lock(&failing->catalogue);
        version_fail(&failing->catalogue, failing->job->versions, NEBULA_FAILED, "another rank gave it up");
        catalogue_unlock(&failing->catalogue);
        return result;
}

static int local_space(const char *path, struct os_space *ret_space)
{
        int result = os_linux.space(path, ret_space);

        ret_space->fs_type = 0xef53;
        return result;
}

static size_t image_count(const struct bench *bench)
{
        size_t count = 0;

        for (const struct image *image = bench->catalogue.memory.images; image; image = image->next)
                count++;
        return count;
}

/* A version that fails while it gets its image. */
static bool save_in_vain(struct bench *bench, const char *tag)
{
        struct version *version;

        failing = bench;
        version = bench_version(bench, tag, 1, 0);
        failing = NULL;
        return !version && bench->error.status == NEBULA_FAILED;
}

static void what_was_got_for_a_file_that_is_refused_then_is_the_job_s_to_use_and_leaves_the_disk(void)
{
        char directory[256];
        struct bench bench;

        test_dir_make(directory);
        setenv("NEBULA_SPILL_DIR", directory, 1);
        table = os_linux;
        table.allocate = fail_meanwhile;
        table.space = local_space;
        os = &table;
        bench_init(&bench, NULL, "");
        CHECK(save_in_vain(&bench, "refused") && image_count(&bench) == 1);
        REQUIRE(bench_version(&bench, "a", 1, 0));
        catalogue_lock(&bench.catalogue);
        keeper_bury(&bench.catalogue);
        catalogue_unlock(&bench.catalogue);
        CHECK(image_count(&bench) == 1 && bench.catalogue.memory.used == memory_capacity(BENCH_FILE_BYTES));
        bench.job->on_full = NEBULA_ON_FULL_STREAM;
        bench.catalogue.memory.budget = 1; /* no file fits, and none waits for room */
        bench.session.nonce = 2;
        CHECK(save_in_vain(&bench, "streamed") && image_count(&bench) <= 1);
        for (const struct image *image = bench.catalogue.memory.images; image; image = image->next)
                CHECK(!image->spilled);
        os = &os_linux;
        bench_done(&bench, true);
        unsetenv("NEBULA_SPILL_DIR");
        test_dir_remove(directory);
}

TAP_MAIN(TEST(what_was_got_for_a_file_that_is_refused_then_is_the_job_s_to_use_and_leaves_the_disk),
         TEST(tombstones_are_bounded_answer_and_are_in_nobodys_way),
         TEST(a_new_tag_is_mostly_known_to_be_new_and_one_that_is_there_never),
        TEST(a_tombstone_that_is_written_again_is_the_next_generation),
         TEST(a_tombstone_remembers_who_had_nothing_to_add),
         TEST(nothing_goes_while_the_ranks_of_a_new_run_have_begun_nothing))
