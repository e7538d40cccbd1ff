/* Scans of a storage path while versions come and go, and entries that are not versions. */
#include <stdatomic.h>
#include <unistd.h>

#include "store/manifest_private.h"
#include "store/scan.h"
#include "versions.h"
#include "watched.h"

static void save(const char *tag, uint64_t sequence)
{
        write_version((struct author){ .tag = tag, .run = "a", .sequence = sequence, .names = { "x" } });
}

/* Sequence of the newest version; 0: none. */
static uint64_t newest_sequence(void)
{
        struct manifest_scan scan;
        uint64_t sequence = 0;
        int64_t newest;

        if (manifest_scan(store, &scan, &error))
                abort();
        newest = manifest_scan_newest(&scan, NULL);
        if (newest >= 0)
                sequence = scan.manifests[newest].sequence;
        manifest_scan_done(&scan);
        return sequence;
}

ON_EACH_STORE(a_scan_lists_the_sound_oldest_first_and_counts_the_broken)
{
        struct manifest_scan scan;

        save("global_step20", 30);
        save("global_step100", 20);
        save("removed", 25);
        write_torn((struct author){ .tag = "torn", .run = "a", .sequence = 40, .names = { "x" } });
        save("broken", 50);
        flip("broken/.nebula/manifest-1.json", 30);
        CHECK(!remove_version("removed"));
        have("latest", "global_step20\n");
        have("foreign/file", "x");
        have(".nebula/secret", "x");
        REQUIRE(manifest_scan(store, &scan, &error) == NEBULA_OK);
        REQUIRE(scan.count == 2);
        CHECK(!strcmp(scan.manifests[0].tag, "global_step100") && !strcmp(scan.manifests[1].tag, "global_step20"));
        CHECK(scan.broken_count == 1 && strstr(scan.broken, "broken/.nebula/manifest-1.json") && !strcmp(scan.broken_list[0].tag, "broken"));
        CHECK(manifest_scan_newest(&scan, "") == 0 && manifest_scan_newest(&scan, NULL) == 0); /* the larger step, committed before */
        CHECK(manifest_scan_newest(&scan, "other") == -1);
        manifest_scan_done(&scan);
        save("best9", 25);
        REQUIRE(manifest_scan(store, &scan, &error) == NEBULA_OK && scan.count == 3);
        CHECK(!strcmp(scan.manifests[manifest_scan_newest(&scan, NULL)].tag, "best9")); /* committed after global_step100 */
        scan.manifests[manifest_scan_newest(&scan, NULL)].is_damaged = true;
        CHECK(!strcmp(scan.manifests[manifest_scan_newest(&scan, NULL)].tag, "global_step100"));
        manifest_scan_done(&scan);
        manifest_scan_done(&scan);
}

ON_EACH_STORE(a_scan_of_nothing_is_empty)
{
        struct manifest_scan scan;

        enum nebula_status status = manifest_scan(store, &scan, &error);

        /* The first file makes the directory of a storage path. */
        CHECK(status == (features & STORE_PATHS ? NEBULA_NOT_FOUND : NEBULA_OK));
        if (status)
                return;
        CHECK(!scan.count && !scan.broken_count && !scan.bare_count && !scan.link_count && manifest_scan_newest(&scan, NULL) == -1);
        manifest_scan_done(&scan);
}

static int stat_entry_damaged(struct os_dir *listing, const char *name, struct os_stat *ret_stat)
{
        return strcmp(name, "global_step30") ? os_linux.stat_entry(listing, name, ret_stat) : -EUCLEAN;
}

static int opendir_damaged(const char *root, const char *key, struct os_dir **ret_dir)
{
        return strncmp(key, "global_step30", 13) ? os_linux.opendir_below(root, key, ret_dir) : -EUCLEAN;
}

ON_EACH_STORE(a_directory_whose_inode_is_damaged_hides_no_version_and_is_named)
{
        const struct os_table *before = os;
        struct os_table table = *os;
        struct manifest_scan scan;

        if (!(features & STORE_PATHS))
                return;
        save("global_step20", 20);
        save("global_step30", 30);
        table.stat_entry = stat_entry_damaged;
        table.opendir_below = opendir_damaged;
        os = &table;
        CHECK(manifest_scan(store, &scan, &error) == NEBULA_OK);
        os = before;
        REQUIRE(scan.count == 1 && scan.broken_count == 1);
        CHECK(!strcmp(scan.manifests[0].tag, "global_step20") && !strcmp(scan.broken_list[0].tag, "global_step30") &&
              strstr(scan.broken_list[0].reason, "global_step30"));
        manifest_scan_done(&scan);
}

ON_EACH_STORE(a_directory_of_format_1_counts_as_broken)
{
        struct manifest_scan scan;

        if (!(features & STORE_PATHS))
                return;
        have("global_step5/.nebula/manifest.json", "{}");
        have("global_step5/x", "x");
        REQUIRE(!manifest_scan(store, &scan, &error));
        CHECK(!scan.count && scan.broken_count == 1 && strstr(scan.broken_list[0].reason, "format 1"));
        manifest_scan_done(&scan);
}

ON_EACH_STORE(tags_without_a_version_are_told_from_the_largest_step_on)
{
        struct manifest_scan scan;
        struct manifest_broken bare;
        char key[64];

        for (int i = 1; i <= 10; i++) {
                snprintf(key, sizeof key, "global_step%d/x", i);
                have(key, "x");
        }
        have("other/x", "x");
        REQUIRE(!manifest_scan(store, &scan, &error));
        REQUIRE(scan.bare_count == MANIFEST_BROKEN_MAX);
        CHECK(!strcmp(scan.bare[0], "global_step10") && !strcmp(scan.bare[1], "global_step9") && !strcmp(scan.bare[7], "global_step3"));
        manifest_scan_done(&scan);
        CHECK(manifest_is_bare(store, "global_step7", &bare) && !strcmp(bare.tag, "global_step7") && strstr(bare.reason, "no .nebula directory"));
}

ON_EACH_STORE(a_checkpoint_without_its_manifest_is_bare_and_one_on_the_way_is_not)
{
        struct manifest_broken bare;

        CHECK(!manifest_is_bare(store, "absent", &bare));
        write_torn((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        CHECK(manifest_is_bare(store, "t", &bare) && strstr(bare.reason, "no manifest"));
        have("t/.nebula/captured-w0123456789abcdef-1-00000-fedcba9876543210.json", "{}");
        CHECK(!manifest_is_bare(store, "t", &bare));
        have("u/.nebula/w0123456789abcdef-1-00000000.claim-00000.json", "{}");
        have("u/x", "x");
        CHECK(!manifest_is_bare(store, "u", &bare));
        have("v/.nebula/manifest-1.json", "{}");
        have("v/x", "x");
        CHECK(!manifest_is_bare(store, "v", &bare));
        have("w/.nebula/w0123456789abcdef-1-00000000.record-00000.json", "{}");
        CHECK(!manifest_is_bare(store, "w", &bare)); /* no file that a program could read */
}

/* No operation follows a link, so its target is not part of the store. */
ON_EACH_STORE(links_beside_the_tags_are_counted_and_not_followed)
{
        struct manifest_scan scan;
        char path[400];

        save("t", 1);
        if (!(features & STORE_PATHS))
                return;
        snprintf(path, sizeof path, "%s/behind", store->root);
        REQUIRE(!symlink("t", path));
        REQUIRE(!manifest_scan(store, &scan, &error));
        CHECK(scan.count == 1 && !scan.broken_count && scan.link_count == 1 && !strcmp(scan.link, "behind"));
        manifest_scan_done(&scan);
}

/*
 * fault (Storage): The path is a mount point with root's `lost+found`.
 * result: That directory is no checkpoint, also for a user who may not enter it.
 */
static void lost_and_found_of_another_user_is_no_checkpoint(void)
{
        char name[] = "lost+found", tag[256];
        struct store_entry entry = { .key = name, .is_prefix = true, .is_foreign = true };

        CHECK(!manifest_tag_of(&entry, tag));
        entry.is_foreign = false;
        CHECK(manifest_tag_of(&entry, tag) && !strcmp(tag, name)); /* somebody's tag */
        entry.is_link = true;
        CHECK(!manifest_tag_of(&entry, tag));
        entry = (struct store_entry){ .key = name };
        CHECK(!manifest_tag_of(&entry, tag)); /* a file */
}

static void a_directory_that_no_tag_is_encoded_as_is_no_tag(void)
{
        static char const *const names[] = { ".nebula", "%6d", "a%", "%2enebula", "..", "latest" };
        char tag[256];

        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
                struct store_entry entry = { .key = (char *)(uintptr_t)names[i], .is_prefix = true };

                CHECK(!manifest_tag_of(&entry, tag));
        }
        CHECK(manifest_tag_of(&(struct store_entry){ .key = (char[]){ "a%2Fb" }, .is_prefix = true }, tag) && !strcmp(tag, "a/b"));
}

/* ---- while versions come and go ---- */

static struct {
        void (*then)(void); /* called as another program just before a manifest is read; once, unless it is set again */
        size_t root_lists, round;
} meanwhile;

static void act(struct store *one, enum watched_call call, const char *key)
{
        void (*then)(void) = meanwhile.then;

        meanwhile.root_lists += call == CALL_LIST && !*key;
        if (call != CALL_GET || !then)
                return;
        meanwhile.then = NULL;
        one->ops = watched.real;
        then();
        one->ops = &watched.ops;
}

static void begin_meanwhile(void (*then)(void))
{
        memset(&meanwhile, 0, sizeof meanwhile);
        meanwhile.then = then;
        watched_begin(store);
        watched.before = act;
}

static void save_the_next(void)
{
        char tag[32], before[32];

        snprintf(before, sizeof before, "global_step%zu", ++meanwhile.round);
        snprintf(tag, sizeof tag, "global_step%zu", meanwhile.round + 1);
        save(tag, meanwhile.round + 1);
        CHECK(!remove_version(before));
        if (meanwhile.round % 5)
                meanwhile.then = save_the_next;
}

/* As with keep_last=1: the only version is another one at each look. */
ON_EACH_STORE(a_scan_finds_what_took_the_place_of_what_it_had_listed)
{
        save("global_step1", 1);
        begin_meanwhile(save_the_next);
        CHECK(newest_sequence() == 6 && meanwhile.round == 5);
        meanwhile.then = save_the_next;
        CHECK(newest_sequence() == 11 && meanwhile.round == 10);
        watched_end(store);
}

static void go_on_for_ever(void)
{
        save_the_next();
        meanwhile.then = go_on_for_ever;
}

ON_EACH_STORE(a_scan_ends_also_where_versions_come_and_go_for_ever)
{
        save("global_step1", 1);
        begin_meanwhile(go_on_for_ever);
        newest_sequence();
        CHECK(meanwhile.round > 10 && meanwhile.round < 30);
        watched_end(store);
}

static void complete_a(void)
{
        save("a", 20);
        drop("b/.nebula/manifest-1.json");
}

/* Both directories exist all the time. */
ON_EACH_STORE(a_scan_finds_what_was_completed_after_its_look_when_the_other_is_being_removed)
{
        write_torn((struct author){ .tag = "a", .run = "b", .names = { "x" } });
        save("b", 10);
        begin_meanwhile(complete_a); /* when b is read, after a */
        CHECK(newest_sequence() == 20);
        watched_end(store);
}

ON_EACH_STORE(a_scan_of_what_stands_still_reads_each_manifest_once)
{
        char name[32];

        for (int i = 0; i < 8; i++) {
                snprintf(name, sizeof name, "foreign%d/file", i);
                have(name, "x");
        }
        save("global_step1", 1);
        save("global_step2", 2);
        begin_meanwhile(NULL);
        CHECK(newest_sequence() == 2 && atomic_load(&watched.of_kind[CALL_GET]) == 2);
        watched_end(store);
}

/* A version that could not be read is counted; none is taken for absent. */
ON_EACH_STORE(a_scan_that_meets_a_failure_of_storage_tells_it)
{
        bool has_failed = true;

        save("global_step1", 1);
        save("global_step2", 2);
        for (uint64_t k = 1; has_failed; k++) {
                struct manifest_scan scan = { 0 };
                enum nebula_status status;

                watched_begin(store);
                watched_fail(CALL_FAILS, k);
                status = manifest_scan(store, &scan, &error);
                has_failed = atomic_load(&watched.calls) >= k;
                watched_end(store);
                CHECK(!status || status == NEBULA_STORAGE);
                CHECK(status || scan.count + scan.broken_count == 2);
                manifest_scan_done(&scan);
        }
}

/* ---- again ---- */

ON_EACH_STORE(a_scan_by_the_index_reads_no_manifest_of_a_tag_at_rest)
{
        static const struct manifest_scan_options brief = { .by_index = true };
        struct manifest_scan scan = { 0 };

        for (unsigned i = 1; i <= 6; i++) {
                char tag[32];

                snprintf(tag, sizeof tag, "global_step%u", i);
                save(tag, i);
        }
        REQUIRE(!manifest_scan_again(store, &brief, &scan, &error) && scan.count == 6);
        CHECK(manifest_count(&scan.manifests[0]) == 1 && !scan.manifests[0].files && manifest_size(&scan.manifests[0]) == FILE_BYTES &&
              manifest_written(&scan.manifests[0]) == FILE_BYTES);
        begin_meanwhile(NULL);
        REQUIRE(!manifest_scan_again(store, &brief, &scan, &error));
        CHECK(scan.count == 6 && !atomic_load(&watched.of_kind[CALL_GET]) && manifest_size(&scan.manifests[5]) == FILE_BYTES);
        watched_end(store);
        write_version((struct author){ .tag = "global_step3", .run = "a", .sequence = 30, .names = { "x", "y" } }); /* a second entry of its log */
        save("global_step7", 31);
        CHECK(!remove_version("global_step1"));
        begin_meanwhile(NULL);
        REQUIRE(!manifest_scan_again(store, &brief, &scan, &error));
        CHECK(scan.count == 6 && !strcmp(scan.manifests[0].tag, "global_step2") && scan.manifests[4].sequence == 30 && manifest_count(&scan.manifests[4]) == 2 &&
              !strcmp(scan.manifests[5].tag, "global_step7"));
        CHECK(!atomic_load(&watched.of_kind[CALL_GET]));
        watched_end(store);
        manifest_scan_done(&scan);
}

/* The manifest of a tag that was removed and written again elsewhere can have the same number. */
ON_EACH_STORE(a_scan_again_reads_an_entry_that_was_replaced)
{
        struct manifest_scan scan = { 0 };

        save("t", 1);
        REQUIRE(!manifest_scan_again(store, NULL, &scan, &error) && scan.count == 1);
        flip("t/.nebula/manifest-1.json", 30);
        REQUIRE(!manifest_scan_again(store, NULL, &scan, &error));
        CHECK(!scan.count && scan.broken_count == 1);
        manifest_scan_done(&scan);
}

ON_EACH_STORE(a_scan_that_failed_keeps_what_it_knew_and_what_it_read)
{
        struct manifest_scan scan = { 0 };
        uint64_t gets;

        for (unsigned i = 1; i <= 4; i++) {
                char tag[32];

                snprintf(tag, sizeof tag, "global_step%u", i);
                save(tag, i);
        }
        REQUIRE(!manifest_scan_again(store, NULL, &scan, &error));
        save("global_step5", 5);
        for (uint64_t k = 1; k < 8; k++) {
                watched_begin(store);
                watched_fail(CALL_FAILS, k);
                manifest_scan_again(store, NULL, &scan, &error);
                watched_end(store);
                CHECK(scan.count >= 3);
        }
        REQUIRE(!manifest_scan_again(store, NULL, &scan, &error) && scan.count == 5);
        begin_meanwhile(NULL);
        REQUIRE(!manifest_scan_again(store, NULL, &scan, &error) && scan.count == 5);
        gets = atomic_load(&watched.of_kind[CALL_GET]);
        watched_end(store);
        CHECK(!gets);
        manifest_scan_done(&scan);
}

static const struct store_ops *quick_ops;
static atomic_int running, most_running;
static const char *failing; /* the tag whose manifest cannot be read now */

static enum nebula_status slow_get(struct store *from, const char *key, size_t limit, char **ret_text, size_t *ret_size, struct store_stamp *ret_stamp,
                                   struct nebula_error *ret_error)
{
        int now = atomic_fetch_add(&running, 1) + 1, most = atomic_load(&most_running);
        enum nebula_status status;

        while (now > most && !atomic_compare_exchange_weak(&most_running, &most, now))
                continue;
        usleep(20000);
        if (failing && !strncmp(key, failing, strlen(failing)))
                status = error_set(ret_error, NEBULA_STORAGE, 0, "the service is busy");
        else
                status = quick_ops->get(from, key, limit, ret_text, ret_size, ret_stamp, ret_error);
        if (status == NEBULA_STORAGE && ret_error)
                ret_error->http_status = 503;
        atomic_fetch_sub(&running, 1);
        return status;
}

static enum nebula_status reach_nothing(struct store *from, struct store_reach *ret_reach, struct nebula_error *ret_error)
{
        (void)from;
        (void)ret_reach;
        return error_set(ret_error, NEBULA_UNAVAILABLE, 0, "no service");
}

/* The calls of take_reported, which a scan makes while it reads. */
static struct {
        size_t calls, read, count, first;
        bool newest_first;
} told;

static void take_reported(void *argument, const struct manifest_scan *newest, size_t read, size_t count)
{
        (void)argument;
        if (!told.calls++)
                told.first = newest->count;
        told.newest_first = told.newest_first && read >= told.read && (!newest->count || newest->manifests[newest->count - 1].step == 300);
        told.read = read;
        told.count = count;
}

static void a_scan_that_takes_long_tells_the_newest_versions_first(void)
{
        static const struct manifest_scan_options options = { .report = take_reported };
        struct manifest_scan scan = { 0 };
        struct store_ops ops;

        store = begin_mem_with(&(struct mem_faults){ .page_entries = 1000 });
        for (unsigned i = 1; i <= 300; i++) {
                char tag[32];

                snprintf(tag, sizeof tag, "global_step%u", i);
                save(tag, i);
        }
        quick_ops = store->ops;
        ops = *quick_ops;
        ops.get = slow_get; /* by one thread: 20 ms each */
        store->ops = &ops;
        told.newest_first = true;
        REQUIRE(!manifest_scan_again(store, &options, &scan, &error) && scan.count == 300);
        CHECK(told.calls && told.newest_first && told.count == 300 && told.first > 0 && told.first < 300);
        store->ops = quick_ops;
        manifest_scan_done(&scan);
        store_close(store);
        end_mem();
}

static void a_service_over_the_network_is_asked_for_many_manifests_at_once(void)
{
        struct manifest_scan scan;
        struct store_ops ops;
        char tag[32];

        store = begin_mem();
        for (unsigned i = 0; i < 60; i++) {
                snprintf(tag, sizeof tag, "tag%02u", i * 7 % 60);
                save(tag, 100 + i);
        }
        CHECK(!remove_version("tag07"));
        flip("tag14/.nebula/manifest-1.json", 30);
        quick_ops = store->ops;
        ops = *quick_ops;
        ops.get = slow_get;
        ops.reach = reach_nothing;
        store->ops = &ops;
        REQUIRE(manifest_scan(store, &scan, &error) == NEBULA_OK);
        CHECK(scan.count == 58 && scan.broken_count == 1 && strstr(scan.broken, "tag14") && most_running >= 8 && most_running <= 64);
        for (size_t i = 0; i < scan.count; i++) {
                unsigned saved = (unsigned)scan.manifests[i].sequence - 100;

                snprintf(tag, sizeof tag, "tag%02u", saved * 7 % 60);
                CHECK(!strcmp(scan.manifests[i].tag, tag) && (!i || scan.manifests[i - 1].sequence < scan.manifests[i].sequence));
        }
        manifest_scan_done(&scan);
        failing = "tag30";
        CHECK(manifest_scan(store, &scan, &error) == NEBULA_STORAGE && strstr(error.message, "the service is busy"));
        failing = NULL;
        store->ops = quick_ops;
        store_close(store);
        end_mem();
}

TAP_MAIN(TEST(a_scan_lists_the_sound_oldest_first_and_counts_the_broken),
         TEST(a_scan_of_nothing_is_empty), TEST(a_directory_of_format_1_counts_as_broken), TEST(a_directory_whose_inode_is_damaged_hides_no_version_and_is_named),
         TEST(tags_without_a_version_are_told_from_the_largest_step_on), TEST(a_checkpoint_without_its_manifest_is_bare_and_one_on_the_way_is_not),
         TEST(links_beside_the_tags_are_counted_and_not_followed), TEST(lost_and_found_of_another_user_is_no_checkpoint), TEST(a_directory_that_no_tag_is_encoded_as_is_no_tag),
         TEST(a_scan_finds_what_took_the_place_of_what_it_had_listed), TEST(a_scan_ends_also_where_versions_come_and_go_for_ever),
         TEST(a_scan_finds_what_was_completed_after_its_look_when_the_other_is_being_removed),
         TEST(a_scan_of_what_stands_still_reads_each_manifest_once),
         TEST(a_scan_by_the_index_reads_no_manifest_of_a_tag_at_rest), TEST(a_scan_again_reads_an_entry_that_was_replaced),
         TEST(a_scan_that_failed_keeps_what_it_knew_and_what_it_read), TEST(a_scan_that_takes_long_tells_the_newest_versions_first), TEST(a_scan_that_meets_a_failure_of_storage_tells_it), TEST(a_service_over_the_network_is_asked_for_many_manifests_at_once))
