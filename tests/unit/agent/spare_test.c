/* Spare images: what a job that resumes from storage finds ready at its first save. */
#include "agent/agent_catalogue.h"
#include "tap.h"

static char root[64];
static struct bench bench;

/* An agent that finds a version of two files in storage and nothing in memory; rank 0 of the job is connected. */
static void begin(void)
{
        struct version *version;

        snprintf(root, sizeof root, "/dev/shm/nebula-spare-XXXXXX");
        REQUIRE(mkdtemp(root));
        bench_init(&bench, NULL, root);
        bench.job->world = 1;
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version && !bench_persist(&bench, version));
        bench_done(&bench, true);
        bench_init(&bench, NULL, root);
        bench.job->world = 1;
        bench.session.role = IPC_ROLE_TRAINER;
        bench.catalogue.sessions = &bench.session;
        REQUIRE(!storage_scan(&bench.catalogue, bench.job, &bench.error));
}

static void end(void)
{
        bench.catalogue.sessions = NULL;
        bench_done(&bench, true);
        os_remove_tree(root);
}

/* As the keeper does it: how many bytes until no more are wanted. */
static uint64_t make_all(void)
{
        struct memory *memory = &bench.catalogue.memory;
        uint64_t capacity, made = 0;
        struct image *image;
        bool named;

        while (made < 1 << 30 && (capacity = catalogue_spare_bytes(&bench.catalogue, bench.job))) {
                if (!memory_reserve(memory, capacity, &named) || memory_create(memory, capacity, named, &image, NULL))
                        break;
                image->job = bench.job;
                memory_add(memory, image);
                made += capacity;
        }
        return made;
}

static void who_resumes_finds_images_for_one_version(void)
{
        uint64_t one = memory_capacity(BENCH_FILE_BYTES);

        begin();
        CHECK(bench.job->spare_due && bench.job->spare_at_ns > os->now_ns());
        CHECK(make_all() == 2 * one);
        catalogue_retain(&bench.catalogue, bench.job, 1); /* as before each grant */
        CHECK(memory_free_bytes(&bench.catalogue.memory, bench.job) == 2 * one);
        REQUIRE(bench_version(&bench, "u", 3, 4));
        CHECK(bench.catalogue.memory.used == 2 * one && !memory_free_bytes(&bench.catalogue.memory, bench.job));
        end();
}

static void images_are_made_for_ranks_that_are_here_only(void)
{
        begin();
        bench.session.rank = 1;
        CHECK(!make_all());
        bench.session.rank = 0;
        bench.session.connection_count = 0;
        CHECK(!make_all());
        bench.session.connection_count = 1;
        bench.job->world = 2; /* other parts than were written then */
        CHECK(!make_all());
        end();
}

TAP_MAIN(TEST(who_resumes_finds_images_for_one_version), TEST(images_are_made_for_ranks_that_are_here_only))
