/* While the machine is short of memory, durable bytes leave the memory tier, the newest version last. */
#include "agent/agent_catalogue.h"
#include "agent/clients/events.h"
#include "agent/memory/page_maker.h"
#include "agent/memory/shortage.h"
#include "tap.h"
#include "test_dir.h"

#define LATER_NS INT64_C(10000000000)
#define PLENTY (UINT64_C(64) << 30)

static struct os_table table;
static struct bench bench;
static char directory[256];
static uint64_t left_bytes;
static uint32_t stalled;

static uint64_t memory_free(void)
{
        return left_bytes;
}

static uint32_t memory_stalled(void)
{
        return stalled;
}

/* Four versions in memory: storage has the first three, and one image is free. */
static void begin(struct version *versions[4])
{
        static const char *const tags[] = { "step0", "step1", "step2", "step3" };

        test_dir_make(directory);
        table = os_linux;
        table.memory_free = memory_free;
        table.memory_stalled = memory_stalled;
        os = &table;
        left_bytes = PLENTY;
        stalled = 0;
        bench_init(&bench, NULL, directory);
        bench.job->settings.retention_count = 8;
        for (unsigned i = 0; i < 4; i++) {
                versions[i] = bench_version(&bench, tags[i], i + 1, 0);
                if (versions[i] && i < 3)
                        bench_persist(&bench, versions[i]);
        }
        bench_version(&bench, "step4", 5, 0);
        catalogue_lock(&bench.catalogue);
        version_fail(&bench.catalogue, bench.job->versions, NEBULA_CORRUPT, "it leaves its image free");
        page_maker_discard(&bench.catalogue);
        catalogue_unlock(&bench.catalogue);
}

static void end(void)
{
        bench_done(&bench, true);
        test_dir_remove(directory);
        os = &os_linux;
}

/* The agent looks again, some time later. Returns how many versions memory has then. */
static size_t look(void)
{
        static int64_t now_ns;
        size_t count = 0;

        now_ns += LATER_NS;
        catalogue_lock(&bench.catalogue);
        shortage_look(&bench.catalogue, now_ns);
        CHECK(shortage_look(&bench.catalogue, now_ns + 1) > now_ns + 1); /* not again at once */
        page_maker_discard(&bench.catalogue);
        for (const struct version *version = bench.job->versions; version; version = version->next)
                count += version->in_memory;
        catalogue_unlock(&bench.catalogue);
        return count;
}

/* fault (The machine and other users): The machine or the cgroup is short of memory.
 * result: Memory that no version needs goes first, then versions that storage has, the newest last: they load from storage. Versions that
 * storage does not have stay. An event and `nebula status` say why. */
static void durable_bytes_leave_while_the_machine_is_short_of_memory_and_the_newest_last(void)
{
        struct version *versions[4];
        struct ipc_event event = { 0 };

        begin(versions);
        REQUIRE(versions[0] && versions[3] && memory_next_free(&bench.memory, NULL, NULL));
        CHECK(look() == 4 && memory_next_free(&bench.memory, NULL, NULL) && !bench.memory.is_short);
        left_bytes = MEMORY_LEFT - 1;
        CHECK(look() == 4 && !memory_next_free(&bench.memory, NULL, NULL) && bench.memory.is_short);
        CHECK(look() == 1 && versions[3]->in_memory && bench.memory.used == memory_capacity(BENCH_FILE_BYTES));
        CHECK(event_next(&bench.catalogue, bench.job, lifecycle_at(&versions[2]->life, NEBULA_STATE_DURABLE), &event));
        CHECK(bench.job->findings[FINDING_LEFT_MEMORY].count == 3);
        CHECK(strstr(bench.job->findings[FINDING_LEFT_MEMORY].text, "127 MiB are free"));
        CHECK(look() == 1); /* storage lacks it */
        REQUIRE(!bench_persist(&bench, versions[3]));
        left_bytes = PLENTY;
        CHECK(look() == 1 && !bench.memory.is_short);
        left_bytes = 0;
        CHECK(look() == 0 && !bench.memory.used);
        end();
}

static void waits_for_memory_count_only_if_little_is_left(void)
{
        struct version *versions[4];

        begin(versions);
        REQUIRE(versions[0] && versions[3]);
        bench.memory.used = 1 << 30; /* as of a large job */
        stalled = 500;
        CHECK(look() == 4 && !bench.memory.is_short);
        left_bytes = 1 << 29;
        stalled = 99;
        CHECK(look() == 4 && !bench.memory.is_short);
        stalled = 100;
        CHECK(look() == 4 && bench.memory.is_short && look() == 1);
        end();
}

static void a_version_that_a_program_reads_and_those_that_a_run_resumes_from_stay(void)
{
        struct version *versions[4];

        begin(versions);
        REQUIRE(versions[0] && versions[3]);
        left_bytes = 0;
        versions[1]->pins++;
        CHECK(look() == 4 && look() == 2 && versions[1]->in_memory);
        versions[1]->pins--;
        CHECK(look() == 1);
        end();
        begin(versions);
        REQUIRE(versions[0] && versions[3]);
        left_bytes = 0;
        bench.session.has_begun = false;
        bench_join(&bench);
        CHECK(look() == 4 && look() == 4);
        bench.session.has_begun = true;
        CHECK(look() == 1);
        bench_leave(&bench);
        end();
}

TAP_MAIN(TEST(durable_bytes_leave_while_the_machine_is_short_of_memory_and_the_newest_last), TEST(waits_for_memory_count_only_if_little_is_left),
         TEST(a_version_that_a_program_reads_and_those_that_a_run_resumes_from_stay))
