/* The tests count a node's requests to storage: while the node waits for the documents of others, and when it removes its own. */
#include "agent/agent_catalogue.h"
#include "agent/agent_storage.h"
#include "agent/commit/world.h"
#include "agent/persist/persist_private.h"
#include "store/counts.h"
#include "store/tag_log.h"
#include "tap.h"

static char path[256];
static struct store *store;
static struct bench bench;

/* The requests to storage so far, and those of one operation. */
static uint64_t requests(enum store_operation operation, uint64_t *ret_all)
{
        struct store_counts found;
        uint64_t of_one = 0;

        *ret_all = 0;
        for (size_t index = 0; store_counts_next(&index, &found);)
                for (int i = 0; i < STORE_OPERATIONS; i++)
                        for (int k = 0; k < STORE_OUTCOMES; k++) {
                                *ret_all += found.requests[i][k];
                                of_one += i == (int)operation ? found.requests[i][k] : 0;
                        }
        return of_one;
}

/* A version of several nodes whose record this node has written for entry 1 of its log. */
static struct version *recorded_version(void)
{
        struct version *version;

        storage_make(path);
        store = storage_look(path);
        store_count(store);
        bench_init(&bench, NULL, path);
        bench.catalogue.takeover_s = 30;
        bench.job->settings.world = bench.session.world = 2;
        version = bench_version(&bench, "t", 1, 1);
        if (!version)
                return NULL;
        version->is_spread = version->persist->recorded_here = true;
        version->persist->log_number = 1;
        version->nodes->waiting_since_ns = os->now_ns();
        return version;
}

static void done(void)
{
        bench_done(&bench, true);
        store_close(store);
        storage_remove(path);
}

/* Whether the node only waits, and how many requests it took to find that out. */
static bool only_waits(struct version *version, uint64_t *ret_count)
{
        struct part part = { .rank = 1 };
        struct plan plan = { .catalogue = &bench.catalogue, .version = version, .writer = { .store = store, .directory = "t" }, .parts = &part,
                             .part_count = 1 };
        uint64_t before, after;
        bool result;

        requests(STORE_OP_STAT, &before);
        result = persist_only_waits(&plan);
        requests(STORE_OP_STAT, &after);
        *ret_count = after - before;
        return result;
}

static void a_node_that_waits_for_the_manifest_asks_for_its_key_alone(void)
{
        struct version *version = recorded_version();
        uint64_t count, looks, looks_after, all;

        REQUIRE(version);
        looks = requests(STORE_OP_STAT, &all);
        CHECK(only_waits(version, &count) && count == 1);
        looks_after = requests(STORE_OP_STAT, &all);
        CHECK(looks_after == looks + 1);
        REQUIRE(!tag_log_create(store, "t", 1, "x", 1, NULL));
        CHECK(!only_waits(version, &count) && count == 1);
        done();
}

static void a_node_that_has_more_to_do_than_to_wait_looks_thoroughly(void)
{
        struct version *version = recorded_version();
        struct version_nodes nodes;
        struct version_persist persist;
        uint64_t count;

        REQUIRE(version);
        nodes = *version->nodes;
        persist = *version->persist;
        version->nodes->waiting_since_ns -= 2000000000; /* 2 s */
        CHECK(!only_waits(version, &count) && !count);
        *version->nodes = nodes;
        version->nodes->leads = true;
        CHECK(!only_waits(version, &count) && !count);
        *version->nodes = nodes;
        version->persist->recorded_here = false;
        CHECK(!only_waits(version, &count) && !count);
        *version->persist = persist;
        version->persist->log_number = 0; /* an agent before this one wrote the record */
        CHECK(!only_waits(version, &count) && !count);
        *version->persist = persist;
        bench.catalogue.takeover_s = 0;
        CHECK(!only_waits(version, &count) && !count);
        done();
}

/* ---- captured documents ---- */

/* The rank saves its share of "t" and closes its part; then the worker works, which announces. */
static struct version *share(uint32_t rank)
{
        char name[2] = { (char)('a' + rank), 0 };
        struct version *version;
        int64_t due = INT64_MAX;
        uint64_t id;

        bench.session.rank = rank;
        bench.session.nonce = rank + 1;
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_ALL_RANKS, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        if (!id || bench_save(&bench, &id, name, rank))
                return NULL;
        catalogue_lock(&bench.catalogue);
        version = catalogue_version(&bench.catalogue, id);
        if (commit_part(&bench.catalogue, &bench.session, version, &bench.error))
                version = NULL;
        world_work(&bench.catalogue, bench.job, os->now_ns(), &due);
        catalogue_unlock(&bench.catalogue);
        return version;
}

static size_t captured_count(void)
{
        struct store_list list = storage_list(path, "t/.nebula/captured-");
        size_t count = list.count;

        store_list_done(&list);
        return count;
}

/* So many of three ranks of this node save in this order. The node then removes its documents. Returns how many requests it made for that. */
static uint64_t requests_to_tidy(const uint32_t order[3], int ranks, size_t documents)
{
        struct version *version = NULL;
        int64_t due = INT64_MAX;
        uint64_t before, after;

        storage_make(path);
        store = storage_look(path);
        bench_init(&bench, NULL, path);
        bench.catalogue.takeover_s = 30;
        bench.job->settings.world = bench.session.world = 4;
        for (int i = 0; i < ranks; i++)
                version = share(order[i]);
        if (!version || captured_count() != documents)
                return 0;
        version->stored = true;
        requests(STORE_OP_GET, &before);
        catalogue_lock(&bench.catalogue);
        world_work(&bench.catalogue, bench.job, os->now_ns(), &due);
        catalogue_unlock(&bench.catalogue);
        requests(STORE_OP_GET, &after);
        CHECK(!captured_count());
        done();
        return after - before;
}

static void a_node_removes_its_captured_documents_and_asks_for_none_that_it_has_not_written(void)
{
        CHECK(requests_to_tidy((const uint32_t[]){ 1, 2, 3 }, 1, 1) == 1); /* it knows the only one */
        CHECK(requests_to_tidy((const uint32_t[]){ 1, 2, 3 }, 3, 3) <= 4); /* it lists them, by pages, and removes them at once */
        CHECK(requests_to_tidy((const uint32_t[]){ 3, 2, 1 }, 3, 3) <= 4);
}

TAP_MAIN(TEST(a_node_that_waits_for_the_manifest_asks_for_its_key_alone), TEST(a_node_that_has_more_to_do_than_to_wait_looks_thoroughly),
         TEST(a_node_removes_its_captured_documents_and_asks_for_none_that_it_has_not_written))
