/* Which ranks the captured documents cover, and how often each of them is read. */
#include "agent/commit/node_documents.h"
#include "store/versions.h"
#include "store/watched.h"

#include "agent/commit/coverage.h"
#include "agent/commit/world.h"
#include "agent/commit/world_private.h"
#include "store/store_mem.h"

#define WORLD 8

static struct captured_rank own_ranks[] = { { 0, 1 }, { 1, 1 } };
static struct captured own = { .of = { .tag = "t", .job = "j", .run = "r", .writing = 1, .world = WORLD }, .host = "h", .pid = 1,
                               .sequence = 1000, .ranks = own_ranks, .rank_count = 1 };

/* The document of a node with so many ranks from `first` on. */
static void captures(uint32_t first, uint32_t count, const char *run)
{
        struct captured_rank ranks[WORLD];
        struct captured captured = own;
        char path[ANNOUNCE_PATH_MAX], key[300], *text;
        size_t size;

        snprintf(captured.of.run, sizeof captured.of.run, "%s", run);
        captured.ranks = ranks;
        captured.rank_count = count;
        for (uint32_t i = 0; i < count; i++)
                ranks[i] = (struct captured_rank){ first + i, 1 };
        if (captured_format(&captured, &text, &size, &error))
                abort();
        captured_path(&captured, text, size, path);
        snprintf(key, sizeof key, "t/%s", path);
        if (put(key, text, STORE_IF_ABSENT))
                abort();
        free(text);
}

/* A look finds so many ranks covered, and reads so many documents. */
static bool covers(struct coverage *coverage, uint32_t count, uint64_t reads)
{
        uint64_t before = watched.of_kind[CALL_GET];

        return !coverage_look(store, &own, coverage, &error) && coverage->count == count && watched.of_kind[CALL_GET] - before == reads;
}

ON_EACH_STORE(a_look_reads_only_documents_that_are_new)
{
        struct coverage *coverage = coverage_new(WORLD);

        REQUIRE(coverage);
        own.rank_count = 1;
        watched_begin(store);
        captures(0, 1, "r");
        captures(2, 2, "r");
        captures(4, 1, "before"); /* counts for nothing */
        CHECK(covers(coverage, 3, 3));
        CHECK(coverage->nodes == 2 && coverage->files == 3);
        CHECK(covers(coverage, 3, 0));
        captures(6, 1, "r");
        CHECK(covers(coverage, 4, 1));
        CHECK(coverage->nodes == 3 && coverage->files == 4);
        watched_end(store);
        coverage_free(coverage);
}

static void withdraw(uint32_t first)
{
        char prefix[ANNOUNCE_PATH_MAX], key[MANIFEST_KEY_MAX];
        struct store_list list;

        captured_prefix(&own.of, prefix);
        snprintf(key, sizeof key, "t/%s%05u-", prefix, first);
        if (store_list_all(store, key, false, &list, &error))
                abort();
        for (size_t i = 0; i < list.count; i++)
                drop(list.entries[i].key);
        store_list_done(&list);
}

ON_EACH_STORE(a_later_document_of_a_node_adds_ranks_and_no_node)
{
        struct coverage *coverage = coverage_new(WORLD);

        REQUIRE(coverage);
        own.rank_count = 1;
        watched_begin(store);
        captures(2, 1, "r");
        captures(4, 1, "r");
        CHECK(covers(coverage, 3, 2) && coverage->nodes == 3);
        captures(2, 2, "r"); /* a rank more */
        CHECK(covers(coverage, 4, 1) && coverage->nodes == 3 && coverage->files == 4);
        own.rank_count = 2; /* of this node, too */
        own_ranks[0].files = 3;
        CHECK(covers(coverage, 5, 0) && coverage->nodes == 3 && coverage->files == 7);
        watched_end(store);
        own_ranks[0].files = 1;
        coverage_free(coverage);
        coverage = coverage_new(WORLD); /* in whatever order they are read */
        REQUIRE(coverage && !coverage_look(store, &own, coverage, &error));
        CHECK(coverage->count == 5 && coverage->nodes == 3 && coverage->files == 5);
        coverage_free(coverage);
}

ON_EACH_STORE(a_document_that_its_node_has_withdrawn_does_not_count_any_more)
{
        struct coverage *coverage = coverage_new(WORLD);

        REQUIRE(coverage);
        own.rank_count = 1;
        captures(2, 1, "r");
        captures(4, 1, "r");
        watched_begin(store);
        CHECK(covers(coverage, 3, 2) && coverage->nodes == 3);
        withdraw(4);
        CHECK(covers(coverage, 2, 1) && coverage->nodes == 2);
        watched_end(store);
        coverage_free(coverage);
}

/* Another node has decided that the version is persisted, and has read so. */
ON_EACH_STORE(a_decision_that_cannot_be_read_is_not_replaced)
{
        struct coverage *coverage;
        struct committed committed;
        struct line line = { 0 };

        if (store->ops != &store_mem) /* only it fails a call */
                return;
        coverage = coverage_new(WORLD);
        own.rank_count = 1;
        captures(0, 1, "r");
        REQUIRE(coverage && !coverage_look(store, &own, coverage, &error));
        REQUIRE(!world_commit_document(store, &own, coverage, &line, true, &committed, &error) && committed.persist);
        committed_done(&committed);
        for (uint64_t fails = 1; fails <= 6; fails++) {
                struct mem_faults faults = { .fail_at = fails };
                enum nebula_status status;

                store_mem_faults(store, &faults);
                status = world_commit_document(store, &own, coverage, &line, false, &committed, &error);
                if (!status) {
                        CHECK(committed.persist);
                        committed_done(&committed);
                }
                store_mem_faults(store, NULL);
                CHECK(!world_read_committed(store, &own.of, &committed, &error) && committed.persist);
                committed_done(&committed);
        }
        coverage_free(coverage);
}

/* The decision of a writing of that tag: with these ranks, or given up if there is none. */
static void commits(uint64_t writing, uint32_t first, uint32_t count)
{
        uint32_t ranks[WORLD];
        struct committed committed = { .of = own.of, .sequence = 1000 + writing, .ranks = ranks, .rank_count = count };
        char path[ANNOUNCE_PATH_MAX], key[300], *text;
        size_t size;

        committed.of.writing = writing;
        for (uint32_t i = 0; i < count; i++)
                ranks[i] = first + i;
        if (!count)
                strcpy(committed.given_up, "a test");
        committed_path(&committed.of, path);
        snprintf(key, sizeof key, "t/%s", path);
        if (committed_format(&committed, &text, &size, &error) || put(key, text, STORE_IF_ABSENT))
                abort();
        free(text);
}

static bool counts(uint64_t with, uint64_t without)
{
        uint64_t count, others;

        return !world_count_writings(store, &own, false, &count, &others, &error) && count == with && others == without;
}

ON_EACH_STORE(an_agent_counts_the_writings_with_its_ranks_and_those_without_and_none_that_was_given_up)
{
        own.rank_count = 1;
        CHECK(counts(0, 0));
        commits(1, 0, 4);
        CHECK(counts(1, 0));
        commits(2, 0, 0);
        CHECK(counts(1, 0));
        commits(3, 2, 4);
        CHECK(counts(1, 3));
        commits(12, 3, 2);
        CHECK(counts(1, 12));
        commits(4, 0, 1);
        CHECK(counts(4, 12));
        commits(5, 5, 1);
        commits(13, 0, 0);
        CHECK(counts(4, 12));
}

TAP_MAIN(TEST(an_agent_counts_the_writings_with_its_ranks_and_those_without_and_none_that_was_given_up), TEST(a_look_reads_only_documents_that_are_new), TEST(a_later_document_of_a_node_adds_ranks_and_no_node),
         TEST(a_document_that_its_node_has_withdrawn_does_not_count_any_more), TEST(a_decision_that_cannot_be_read_is_not_replaced))
