/* A search leaves its list of the storage path to the first scan of a run. */
#include "agent/agent_catalogue.h"
#include "agent/agent_storage.h"
#include "agent/persist/due.h"
#include "tap.h"

static char path[256];
static struct store *store;
static struct bench bench;
static struct search_begun begun;
static struct manifest_scan list;

/* Another agent saves a version. */
static bool save_elsewhere(const char *tag)
{
        struct bench other;
        struct version *version;
        bool is_saved;

        bench_init(&other, NULL, path);
        version = bench_version(&other, tag, 1, 2);
        is_saved = version && !bench_persist(&other, version);
        bench_done(&other, true);
        return is_saved;
}

/* A search begins, and lists a path with version "a". */
static bool search(void)
{
        storage_make(path);
        if (!save_elsewhere("a"))
                return false;
        bench_init(&bench, NULL, path);
        bench.job->scan_due = true;
        store = storage_look(path);
        return storage_search_begins(&bench.catalogue, bench.job, &begun) && !manifest_scan_index(store, &list, &bench.error);
}

static void done(void)
{
        store_close(store);
        bench_done(&bench, true);
        storage_remove(path);
}

static void the_first_scan_takes_the_list_of_a_search(void)
{
        REQUIRE(search() && save_elsewhere("b"));
        storage_search_ends(&bench.catalogue, bench.job, &list, &begun);
        CHECK(!storage_scan(&bench.catalogue, bench.job, &bench.error) && job_stored(bench.job, "a") && !job_stored(bench.job, "b"));
        done();
}

static void the_first_scan_waits_for_a_search_that_hangs_and_not_for_ever(void)
{
        int64_t due = INT64_MAX;

        REQUIRE(search());
        CHECK(!due_scan(bench.job, begun.ns, &due) && due == begun.ns + STORAGE_SEARCH_NS);
        CHECK(due_scan(bench.job, begun.ns + STORAGE_SEARCH_NS, &due));
        storage_search_ends(&bench.catalogue, bench.job, &list, &begun);
        CHECK(due_scan(bench.job, begun.ns, &due));
        done();
}

static void a_list_that_is_older_than_the_last_version_does_not_hide_it(void)
{
        struct version *version;

        REQUIRE(search());
        version = bench_version(&bench, "b", 3, 4);
        REQUIRE(version && !storage_scan(&bench.catalogue, bench.job, &bench.error) && !bench_persist(&bench, version));
        storage_search_ends(&bench.catalogue, bench.job, &list, &begun);
        CHECK(!storage_scan(&bench.catalogue, bench.job, &bench.error) && job_stored(bench.job, "a") && job_stored(bench.job, "b"));
        done();
}

/* An old list would have a sweep take files of a version that has become complete since for the rest of a write. */
static void a_list_that_lay_too_long_is_made_anew(void)
{
        REQUIRE(search() && save_elsewhere("b"));
        begun.ns -= STORAGE_SEARCH_NS;
        storage_search_ends(&bench.catalogue, bench.job, &list, &begun);
        CHECK(!storage_scan(&bench.catalogue, bench.job, &bench.error) && job_stored(bench.job, "b"));
        done();
}

static void a_search_that_failed_takes_no_list_away_from_one_that_did_not(void)
{
        struct search_begun other;

        REQUIRE(search() && save_elsewhere("b") && storage_search_begins(&bench.catalogue, bench.job, &other));
        storage_search_ends(&bench.catalogue, bench.job, &list, &begun);
        storage_search_ends(&bench.catalogue, bench.job, NULL, &other);
        CHECK(!storage_scan(&bench.catalogue, bench.job, &bench.error) && job_stored(bench.job, "a") && !job_stored(bench.job, "b"));
        done();
}

TAP_MAIN(TEST(the_first_scan_takes_the_list_of_a_search), TEST(the_first_scan_waits_for_a_search_that_hangs_and_not_for_ever),
         TEST(a_list_that_is_older_than_the_last_version_does_not_hide_it), TEST(a_list_that_lay_too_long_is_made_anew),
         TEST(a_search_that_failed_takes_no_list_away_from_one_that_did_not))
