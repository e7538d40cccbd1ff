/*
 * On an object store, each request of writing, rewriting, removing and finding a version fails once, or all from there on fail, or a
 * write succeeds and its answer gets lost. Afterwards earlier durable versions can be loaded, no version is incomplete, the next try
 * succeeds, and a sweep leaves no debris.
 */
#include "agent/agent_catalogue.h"
#include "agent/restore/restore.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/scan.h"
#include "store/store_mem.h"
#include "store/tag_log.h"
#include "tap.h"

#define STORAGE "mem://fault"

/* How the k-th request or write fails. */
enum way { FAILS, FAILS_FROM_THERE_ON, ANSWER_IS_LOST, WAY_COUNT };

static enum way way;
static uint64_t at; /* k */
static struct bench bench;

static void tell(const char *what)
{
        printf("# %s: way %d, k is %d: %s\n", what, (int)way, (int)at, bench.error.message);
}

static void start_faults(void)
{
        struct mem_faults faults = { .fail_at = way == ANSWER_IS_LOST ? 0 : at, .goes_on = way == FAILS_FROM_THERE_ON,
                                     .lose_at = way == ANSWER_IS_LOST ? at : 0 };
        struct store *store;

        if (storage_open(&bench.catalogue, bench.job, &store, NULL))
                abort();
        store_mem_faults(store, &faults);
}

/* Whether there were that many calls. */
static bool end_faults(void)
{
        struct store *store = bench.job->storage->store;
        bool was_hit = (way == ANSWER_IS_LOST ? store_mem_writes(store) : store_mem_calls(store)) >= at;

        store_mem_faults(store, NULL);
        return was_hit;
}

static void begin(void)
{
        store_mem_allow();
        store_mem_forget(STORAGE);
        bench_init(&bench, NULL, STORAGE);
}

/* The agent is killed: the next one knows only what storage has. */
static void next_agent(void)
{
        bench_done(&bench, true);
        bench_init(&bench, NULL, STORAGE);
        bench.catalogue.sweep_age_s = 0;
        if (storage_scan(&bench.catalogue, bench.job, &bench.error))
                abort();
}

/* The seed of file a of a tag whose file b is of seed `b`; 0: there is no such version; -1: it is damaged. */
static int seed_of(const char *tag, const unsigned *seeds, unsigned b)
{
        struct manifest manifest = { 0 };
        struct nebula_error error;
        enum nebula_status status = manifest_load(bench.job->storage->store, tag, &manifest, &error);
        int result = -1;

        if (status)
                return status == NEBULA_NOT_FOUND ? 0 : -1;
        for (; *seeds && stored_holds(bench.job->storage->store, &manifest, "b", b); seeds++)
                if (stored_holds(bench.job->storage->store, &manifest, "a", *seeds))
                        result = (int)*seeds;
        manifest_done(&manifest);
        return result;
}

static bool is_named(const struct manifest *manifest, const char *private, const char *key)
{
        const struct manifest_entry entry = manifest_entry(private);

        return entry.kind == ENTRY_MANIFEST ? entry.number == manifest->number : manifest_names(manifest, &entry, key);
}

/* Whether the object belongs to an older entry that a failed writer has not removed. A later writing or a removal removes it. */
static bool is_named_before(const struct manifest *manifest, const char *tag, const char *private, const char *key)
{
        bool result = false;

        for (uint64_t number = 1; number < manifest->number && !result; number++) {
                struct tag_log log = { 0 };

                if (tag_log_entry(bench.job->storage->store, tag, number, &log, NULL))
                        continue;
                result = !log.is_unsound && !log.is_removal && is_named(&log.manifest, private, key);
                tag_log_done(&log);
        }
        return result;
}

/* Whether each object of a tag is named by a log entry or is a view. Without a version there must be none. */
static bool is_tidy(const char *tag)
{
        struct manifest manifest = { 0 };
        struct store_list list;
        char prefix[64];
        bool result = true;

        snprintf(prefix, sizeof prefix, "%s/", tag);
        manifest_load(bench.job->storage->store, tag, &manifest, NULL);
        if (store_list_all(bench.job->storage->store, prefix, true, &list, NULL))
                abort();
        for (size_t i = 0; i < list.count; i++) {
                const char *key = list.entries[i].key, *private = manifest_behind_private(key, tag);
                bool is_fine = private ? is_named(&manifest, private, key) || is_named_before(&manifest, tag, private, key) : manifest_find_file(&manifest, key + strlen(prefix)) != NULL;

                if (!is_fine)
                        printf("# %s is left\n", key);
                result = result && is_fine;
        }
        store_list_done(&list);
        manifest_done(&manifest);
        return result;
}

/* Whether <tag>/<name> holds these bytes, for a program that does not read manifests. */
static bool view_holds(const char *key, unsigned seed)
{
        char *data;
        size_t size;
        bool same;

        if (bench.job->storage->store->ops->get(bench.job->storage->store, key, 1 << 20, &data, &size, NULL, NULL))
                return false;
        same = size == BENCH_FILE_BYTES;
        for (size_t i = 0; same && i < size; i++)
                same = (unsigned char)data[i] == bench_byte(seed, i);
        free(data);
        return same;
}

/* The step that a restarted job finds. */
static int64_t newest_step(enum nebula_status *ret_status)
{
        static struct ipc_find find;
        struct session other = { .nonce = 2, .pid = os->pid(), .world = 1, .connection_count = 1, .role = IPC_ROLE_TOOL, .job = bench.job };
        struct ipc_found found = { .step = -1 };

        *ret_status = restore_find(&bench.catalogue, &other, &find, &found, &bench.error);
        return *ret_status ? -1 : found.step;
}

/* Runs `once` for every k and each way in which it fails. */
static void sweep(bool (*once)(void))
{
        for (way = FAILS; way < WAY_COUNT && !tap_failed_checks; way++) {
                at = 0;
                do
                        at++;
                while (once() && !tap_failed_checks);
                CHECK(at > 1);
        }
}

static bool write_once(void)
{
        static const unsigned seeds[] = { 1, 0 };
        enum nebula_status status, found;
        struct version *version;
        bool was_hit;

        begin();
        version = bench_version(&bench, "step1", 1, 2);
        if (!version)
                abort();
        start_faults();
        status = bench_persist(&bench, version);
        was_hit = end_faults();
        CHECK(status ? seed_of("step1", seeds, 2) >= 0 : seed_of("step1", seeds, 2) == 1);
        CHECK(!status || !bench_persist(&bench, version)); /* the next try */
        CHECK(seed_of("step1", seeds, 2) == 1 && view_holds("step1/a", 1) && view_holds("step1/b", 2));
        next_agent();
        CHECK(newest_step(&found) == 1 && seed_of("step1", seeds, 2) == 1 && is_tidy("step1"));
        if (tap_failed_checks)
                tell("writing");
        bench_done(&bench, true);
        return was_hit;
}

static void a_version_becomes_durable_with_the_next_try(void)
{
        sweep(write_once);
}

/* The agent and its memory are lost. */
static bool die_once(void)
{
        static const unsigned seeds[] = { 1, 0 };
        struct version *version;
        bool was_hit;

        begin();
        version = bench_version(&bench, "step1", 1, 2);
        if (!version)
                abort();
        start_faults();
        bench_persist(&bench, version);
        was_hit = end_faults();
        next_agent();
        CHECK(seed_of("step1", seeds, 2) >= 0 && is_tidy("step1"));
        version = bench_version(&bench, "step1", 1, 2); /* the next run saves it again */
        CHECK(version && !bench_persist(&bench, version) && seed_of("step1", seeds, 2) == 1 && is_tidy("step1"));
        if (tap_failed_checks)
                tell("writing and dying");
        bench_done(&bench, true);
        return was_hit;
}

static void a_dead_agent_leaves_a_whole_version_or_swept_debris(void)
{
        sweep(die_once);
}

/* Of two tags without steps, the one written last is the newest. */
static bool rewrite_once(void)
{
        static const unsigned seeds[] = { 1, 5, 0 };
        struct version *version;
        enum nebula_status status;
        struct ipc_found found = { 0 };
        static struct ipc_find find;
        struct session other = { .nonce = 2, .pid = os->pid(), .world = 1, .connection_count = 1, .role = IPC_ROLE_TOOL };
        int seed;
        bool was_hit;

        begin();
        version = bench_version(&bench, "best", 1, 2);
        if (!version || bench_persist(&bench, version))
                abort();
        version = bench_version(&bench, "last", 3, 4);
        if (!version || bench_persist(&bench, version))
                abort();
        version = bench_version(&bench, "best", 5, 0);
        if (!version)
                abort();
        start_faults();
        status = bench_persist(&bench, version);
        was_hit = end_faults();
        seed = seed_of("best", seeds, 2);
        CHECK(status ? seed > 0 : seed == 5);
        CHECK(!status || !bench_persist(&bench, version));
        CHECK(seed_of("best", seeds, 2) == 5 && view_holds("best/b", 2));
        next_agent();
        other.job = bench.job;
        CHECK(!restore_find(&bench.catalogue, &other, &find, &found, &bench.error) && !strcmp(found.tag, "best"));
        CHECK(seed_of("best", seeds, 2) == 5 && is_tidy("best") && is_tidy("last"));
        if (tap_failed_checks)
                tell("writing again");
        bench_done(&bench, true);
        return was_hit;
}

static void a_tag_that_is_written_again_is_the_older_or_the_newer_version_and_the_newest_after_that(void)
{
        sweep(rewrite_once);
}

static bool remove_once(void)
{
        struct manifest_scan scan = { 0 };
        bool was_hit;

        begin();
        for (unsigned i = 1; i < 4; i++) {
                struct version *version;
                char tag[32];

                snprintf(tag, sizeof tag, "step%u", i);
                version = bench_version(&bench, tag, i, 9);
                if (!version || bench_persist(&bench, version))
                        abort();
        }
        bench_keep(bench.job, 1);
        start_faults();
        bench_retain(&bench);
        was_hit = end_faults();
        CHECK(!manifest_scan(bench.job->storage->store, &scan, &bench.error) && scan.count >= 1 && !scan.broken_count);
        for (size_t i = 0; i < scan.count; i++)
                CHECK(stored_holds(bench.job->storage->store, &scan.manifests[i], "a", (unsigned)scan.manifests[i].step) &&
                      stored_holds(bench.job->storage->store, &scan.manifests[i], "b", 9));
        CHECK(scan.count && scan.manifests[scan.count - 1].step == 3);
        manifest_scan_done(&scan);
        if (at % 2) { /* this agent, or the next one */
                bench_retain(&bench);
        } else {
                next_agent();
                bench_keep(bench.job, 1);
                bench_retain(&bench);
        }
        CHECK(is_tidy("step1") && is_tidy("step2") && is_tidy("step3"));
        CHECK(!manifest_scan(bench.job->storage->store, &scan, &bench.error) && scan.count == 1 && scan.manifests[0].step == 3);
        manifest_scan_done(&scan);
        if (tap_failed_checks)
                tell("removing");
        bench_done(&bench, true);
        return was_hit;
}

static void a_version_that_is_to_go_is_whole_or_gone_and_nothing_of_it_stays(void)
{
        sweep(remove_once);
}

/* A storage path that was copied without the objects beside its tags: all manifests are read. */
static void remove_index(void)
{
        struct store_list list;

        if (store_list_all(bench.job->storage->store, MANIFEST_DIRECTORY "/index/", true, &list, NULL))
                abort();
        for (size_t i = 0; i < list.count; i++)
                if (store_remove_one(bench.job->storage->store, list.entries[i].key, NULL))
                        abort();
        store_list_done(&list);
}

static bool has_index;

/* Memory is empty. Finding an older version than the newest would lose training. */
static bool find_once(void)
{
        enum nebula_status status;
        int64_t step;
        bool was_hit;

        begin();
        for (unsigned i = 1; i < 4; i++) {
                struct version *version;
                char tag[32];

                snprintf(tag, sizeof tag, "step%u", i);
                version = bench_version(&bench, tag, i, 9);
                if (!version || bench_persist(&bench, version))
                        abort();
        }
        next_agent();
        if (!has_index)
                remove_index();
        start_faults();
        step = newest_step(&status);
        was_hit = end_faults();
        CHECK(status ? status != NEBULA_NOT_FOUND && status != NEBULA_CORRUPT : step == 3);
        if (tap_failed_checks)
                tell("finding");
        CHECK(newest_step(&status) == 3);
        bench_done(&bench, true);
        return was_hit;
}

static void the_newest_version_is_found_or_storage_is_said_to_fail(void)
{
        for (int i = 0; i < 2 * ANSWER_IS_LOST && !tap_failed_checks; i++) {
                has_index = i % 2;
                way = (enum way)(i / 2);
                at = 0;
                do
                        at++;
                while (find_once() && !tap_failed_checks);
                CHECK(at > 1);
        }
}

/* A listing may not show yet the objects that this agent or another one has written. */
static void a_store_whose_listings_are_old_loses_no_version(void)
{
        static const uint64_t stale[] = { 1, 2, 5, 20, STORE_MEM_STALE_MAX };
        static const unsigned seeds[] = { 1, 3, 5, 0 };

        for (size_t i = 0; i < 2 * sizeof stale / sizeof *stale && !tap_failed_checks; i++) {
                struct mem_faults faults = { .stale_writes = stale[i / 2] };
                struct store *store;

                begin();
                if (storage_open(&bench.catalogue, bench.job, &store, NULL))
                        abort();
                store_mem_faults(store, &faults);
                for (size_t j = 0; seeds[j]; j++) {
                        struct version *version = bench_version(&bench, "step1", seeds[j], 2);
                        int tries = 100; /* each try writes something, so that the listing becomes fresh */

                        while (version && bench_persist(&bench, version) && --tries)
                                ;
                        CHECK(version && tries);
                        if (i % 2)
                                next_agent();
                }
                store_mem_faults(bench.job->storage->store, NULL);
                next_agent();
                /* A publish with an old listing may leave objects: that costs space, but no version. */
                CHECK(seed_of("step1", seeds, 2) == 5 && (stale[i / 2] > 1 || is_tidy("step1")));
                if (tap_failed_checks)
                        printf("# listings are %d writes old: %s\n", (int)stale[i / 2], bench.error.message);
                bench_done(&bench, true);
        }
}

TAP_MAIN(TEST(a_store_whose_listings_are_old_loses_no_version), TEST(a_version_becomes_durable_with_the_next_try), TEST(a_dead_agent_leaves_a_whole_version_or_swept_debris),
         TEST(a_tag_that_is_written_again_is_the_older_or_the_newer_version_and_the_newest_after_that),
         TEST(a_version_that_is_to_go_is_whole_or_gone_and_nothing_of_it_stays),
         TEST(the_newest_version_is_found_or_storage_is_said_to_fail))
