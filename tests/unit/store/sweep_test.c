/*
 * A sweep removes the debris of interrupted writings once all of it is old. Objects that a log entry names stay, and so do other
 * programs' objects.
 */
#include "agent/pulse/hang_news.h"
#include "store/manifest_keys.h"
#include "store/manifest_remove.h"
#include "store/scan.h"
#include "store/sweep.h"
#include "versions.h"
#include "watched.h"

static size_t sweep(int64_t age_ns)
{
        size_t removed = 99;

        CHECK(!manifest_sweep(store, age_ns, &removed, &error));
        return removed;
}

static char *key_of_record(const char *run, uint32_t attempt, char ret_key[MANIFEST_KEY_MAX])
{
        char writing[WRITING_MAX];

        writing_name("", run, (unsigned char)run[0], attempt, writing);
        if (record_key("t", writing, 0, ret_key, NULL))
                abort();
        return ret_key;
}

ON_EACH_STORE(debris_goes_when_it_is_old_and_stays_while_it_is_young)
{
        char record[MANIFEST_KEY_MAX];

        write_version((struct author){ .tag = "whole", .run = "a", .names = { "x" } });
        write_torn((struct author){ .tag = "t", .run = "b", .names = { "x", "y" } });
        have("t/mine", "x");
        have("whole/.nebula/w0123456789abcdef-1-00000000/x", "1");
        have("whole/.nebula/tmp-1-1", "x");
        have(".nebula-tmp-1-1", "x");
        have("foreign/x", "x");
        have("foreign/.nebula/x", "x");
        CHECK(sweep(HOUR_NS) == 0 && has(key_of_record("b", 0, record)) && has("t/x") && has("whole/.nebula/tmp-1-1") && has(".nebula-tmp-1-1"));
        CHECK(sweep(ANY_AGE) == 3);
        CHECK(!has("t/x") && !has("t/y") && has("t/mine") && count_objects("t/") == 1);
        CHECK(holds("whole", "a") && count_objects("whole/") == 3 && !has(".nebula-tmp-1-1") && count_objects("foreign/") == 2);
        CHECK(sweep(ANY_AGE) == 0);
}

ON_EACH_STORE(what_nodes_told_each_other_of_a_hang_goes_when_it_is_old)
{
        have(".nebula/hangs/a.json", "x");
        have(".nebula/settings-.json", "x");
        CHECK(!hang_news_sweep(store, HOUR_NS, &error) && has(".nebula/hangs/a.json"));
        CHECK(!hang_news_sweep(store, ANY_AGE, &error) && !has(".nebula/hangs/a.json") && has(".nebula/settings-.json"));
}

static bool goes_on(void *argument, const char *key)
{
        return !strcmp(key, argument);
}

ON_EACH_STORE(a_temporary_object_with_which_the_caller_goes_on_stays)
{
        struct manifest_scan scan;
        size_t removed = 99;

        have(".nebula-tmp-1-1", "x");
        have(".nebula-tmp-2-2", "x");
        REQUIRE(!manifest_scan_index(store, &scan, &error));
        CHECK(!manifest_sweep_rest(store, &scan.rest, ANY_AGE, true, goes_on, (void *)(uintptr_t)".nebula-tmp-1-1", &removed, &error) && removed == 1);
        CHECK(has(".nebula-tmp-1-1") && !has(".nebula-tmp-2-2"));
        manifest_scan_done(&scan);
}

ON_EACH_STORE(each_kind_of_debris_goes)
{
        static const char *const debris[] = {
                "t/.nebula/w0123456789abcdef-1-00000000.record-00000.json", "t/.nebula/w0123456789abcdef-1-00000000.claim-00000.json",
                "t/.nebula/w0123456789abcdef-1-00000000/x", "t/.nebula/committed-w0123456789abcdef-1.json", "t/.nebula/captured-w0123456789abcdef-2-00003-fedcba9876543210.json", "t/.nebula/wanted-w0123456789abcdef-1.json", "t/.nebula/tmp-1-1",
                "t/.nebula/sweep-0123456789abcdef.json", /* of a sweep that died */
        };

        for (size_t with_version = 0; with_version < 2; with_version++) {
                for (size_t i = 0; i < sizeof debris / sizeof *debris; i++) {
                        begin_anew();
                        if (with_version)
                                write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
                        have(debris[i], "x");
                        CHECK(sweep(ANY_AGE) == 1 && !has(debris[i]));
                        CHECK(with_version ? holds("t", "a") && count_objects("t/") == 3 : !count_objects("t/"));
                }
        }
}

ON_EACH_STORE(what_the_version_names_stays_whichever_writing_it_is_of)
{
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y", "z" } });
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .carries = true, .names = { "y" } });
        write_version((struct author){ .tag = "t", .run = "c", .after = "b", .carries = true, .names = { "z" } });
        have("t/.nebula/committed-w0123456789abcdef-1.json", "{}");
        CHECK(sweep(ANY_AGE) == 1 && !has("t/.nebula/committed-w0123456789abcdef-1.json"));
        CHECK(holds("t", "c") && shows("t", "x", "a") && shows("t", "y", "b") && shows("t", "z", "c"));
}

/* A file in place is removed only if a removed record names it, its size fits, and no version names it. */
ON_EACH_STORE(a_file_in_place_that_is_not_known_to_be_debris_stays)
{
        write_torn((struct author){ .tag = "t", .run = "b", .names = { "x", "y", "z" } });
        drop("t/z");
        have("t/z", "of another length");
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        have("t/w", "of a user");
        CHECK(sweep(ANY_AGE) == 1 && !has("t/y") && has("t/z") && has("t/w") && holds("t", "a") && shows("t", "x", "a"));
}

/* A running writer may use older objects beside its newest one. */
ON_EACH_STORE(nothing_goes_beside_what_is_young_or_another_users)
{
        char record[MANIFEST_KEY_MAX];

        write_torn((struct author){ .tag = "t", .run = "b", .names = { "x" } });
        have("t/.nebula/committed-w0123456789abcdef-1.json", "{}");
        watched_begin(store);
        watched.foreign = "t/.nebula/committed-w0123456789abcdef-1.json";
        CHECK(sweep(ANY_AGE) == 0);
        watched_end(store);
        CHECK(has("t/x") && has(key_of_record("b", 0, record)));
        if (features & STORE_PATHS) { /* the times of mem's clock are whole seconds */
                os->sleep_ms(60);
                have("t/.nebula/committed-w0123456789abcdef-1.json", "{}");
                CHECK(sweep(30 * INT64_C(1000000)) == 0 && has("t/x"));
                os->sleep_ms(60);
                CHECK(sweep(30 * INT64_C(1000000)) == 1 && !has("t/x"));
        }
}

/* A person may still want its files. */
ON_EACH_STORE(a_tag_whose_log_cannot_be_read_is_left_alone)
{
        size_t count;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x" } });
        have("t/.nebula/committed-w0123456789abcdef-1.json", "{}");
        flip("t/.nebula/manifest-2.json", 30);
        count = count_objects("");
        CHECK(sweep(ANY_AGE) == 0 && count_objects("") == count);
        flip("t/.nebula/manifest-2.json", 30);
        have("t/.nebula/manifest-1.json", "damaged"); /* it is unknown which files an older one names */
        count = count_objects("");
        CHECK(sweep(ANY_AGE) == 0 && count_objects("") == count && holds("t", "b"));
}

/* The writer of the newest entry may still take it back. */
ON_EACH_STORE(the_versions_before_the_newest_entry_stay_while_its_writer_may_live)
{
        struct author writer = { .tag = "t", .run = "b", .after = "a", .names = { "x" } };

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        author_run_to(&writer, AT_CHECK);
        have("t/.nebula/committed-w0123456789abcdef-1.json", "{}");
        CHECK(sweep(HOUR_NS) == 0 && holds("t", "b") && !tag_log_take_back(store, "t", 2, &error));
        CHECK(holds("t", "a") && shows("t", "y", "a"));
        author_done(&writer);
}

static int64_t late_ns(void)
{
        return os_linux.now_ns() + HOUR_NS;
}

/*
 * fault (Storage): A tag was written again, and the power goes after its new version is durable, before <tag>/<name> shows the new bytes.
 * result: The sweep of a later start makes the views of the new version, and removes what the version before alone had.
 */
ON_EACH_STORE(a_sweep_ends_the_work_of_a_writer_that_died_after_its_entry)
{
        struct author writer = { .tag = "t", .run = "b", .after = "a", .names = { "x" } };
        const struct os_table *before = os;
        struct os_table late = *os;
        char record[MANIFEST_KEY_MAX];

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "z" } });
        author_run_to(&writer, AT_CHECK);
        CHECK(sweep(ANY_AGE) == 0 && holds("t", "b"));
        watched_begin(store);
        watched.ahead_ns = HOUR_NS;
        CHECK(sweep(HOUR_NS / 2) == 1 && holds("t", "b") && !has("t/z") && !has(key_of_record("a", 0, record)) && shows("t", "x", "b"));
        CHECK(sweep(HOUR_NS / 2) == 0);
        watched_end(store);
        have("t/.nebula/sweep-0123456789abcdef.json", "{}");
        late.now_ns = late_ns;
        os = &late;
        author_run(&writer); /* it lives after all, and finds a sweep at work */
        os = before;
        CHECK(holds("t", "b") && shows("t", "x", "b"));
        author_done(&writer);
}

/* Interrupts a removal after its entry. */
static void enter_removal_of(const struct manifest *manifest)
{
        for (uint64_t k = 1; !holds_nothing("t"); k++) {
                watched_begin(store);
                watched_fail(PROGRAM_DIES, k);
                manifest_remove(store, manifest, NULL);
                watched_end(store);
        }
}

/* Versions before a removal will be removed, even while both entries exist. */
ON_EACH_STORE(the_versions_before_a_removal_do_not_stay_behind_a_later_one)
{
        struct author later = { .tag = "t", .run = "b", .names = { "x" } };
        struct manifest manifest;
        char record[MANIFEST_KEY_MAX];

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        load("t", &manifest);
        enter_removal_of(&manifest);
        author_run_to(&later, AT_SHOW); /* and dies */
        REQUIRE(has("t/y") && has("t/.nebula/manifest-1.json") && has("t/.nebula/manifest-2.json") && has(key_of_record("a", 0, record)));
        CHECK(sweep(ANY_AGE) == 1 && holds("t", "b") && !has("t/y") && !has(record));
        author_done(&later);
        manifest_done(&manifest);
}

ON_EACH_STORE(a_removal_that_was_interrupted_is_ended)
{
        struct removal removal = { "t", 2 };
        char *text;
        size_t size;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        have("t/foreign", "x");
        if (removal_format(&removal, &text, &size, NULL) || tag_log_create(store, "t", 2, text, size, NULL))
                abort();
        free(text);
        CHECK(sweep(HOUR_NS) == 0 && has("t/x")); /* it may go on */
        CHECK(sweep(ANY_AGE) == 1 && !has("t/x") && count_objects("t/") == 1 && has(".nebula/removed/t/3"));
        CHECK(sweep(ANY_AGE) == 0);
}

ON_EACH_STORE(of_a_removal_that_ended_but_for_its_entry_that_goes_too)
{
        struct removal removal = { "t", 2 };
        char *text;
        size_t size;

        if (removal_format(&removal, &text, &size, NULL) || tag_log_create(store, "t", 2, text, size, NULL) ||
            tag_log_set_removed(store, "t", 2, NULL))
                abort();
        free(text);
        CHECK(sweep(ANY_AGE) == 1 && !count_objects("t/"));
}

ON_EACH_STORE(debris_beside_a_removal_goes_with_it)
{
        struct removal removal = { "t", 2 };
        char *text;
        size_t size;

        if (removal_format(&removal, &text, &size, NULL) || tag_log_create(store, "t", 2, text, size, NULL))
                abort();
        free(text);
        if (features & STORE_PATHS)
                os->sleep_ms(30);
        else
                have("t/.nebula/committed-w0123456789abcdef-1.json", "{}"); /* if both have one time, the record alone looks like a version's */
        write_torn((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        CHECK(sweep(ANY_AGE) == 1 && !count_objects("t/"));
}

ON_EACH_STORE(one_tag_is_swept_without_the_others)
{
        size_t removed = 99;

        write_torn((struct author){ .tag = "t/u", .run = "a", .names = { "x" } });
        write_torn((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        have(".nebula-tmp-1-1", "x");
        CHECK(!manifest_sweep_tag(store, "t/u", HOUR_NS, &removed, &error) && removed == 0);
        CHECK(!manifest_sweep_tag(store, "t/u", ANY_AGE, &removed, &error) && removed == 1 && !count_objects("t%2Fu/"));
        CHECK(!manifest_sweep_tag(store, "absent", ANY_AGE, &removed, &error) && removed == 0);
        CHECK(has("t/x") && has(".nebula-tmp-1-1"));
}

/* ---- a writer at work ---- */

static struct author sleeper;
static bool has_marked;
static void (*on_mark)(void);

/* Acts when the sweep has made its sweep object. */
static void at_mark(struct store *one, enum watched_call call, const char *key)
{
        if (call != CALL_PUT || !strstr(key, "/.nebula/sweep-"))
                return;
        has_marked = true;
        one->ops = watched.real;
        on_mark();
        one->ops = &watched.ops;
}

static void commit(void)
{
        author_step(&sleeper);
        CHECK(sleeper.at == AT_CHECK);
}

ON_EACH_STORE(a_sweep_that_finds_a_new_entry_removes_nothing)
{
        begin_anew();
        sleeper = (struct author){ .tag = "t", .run = "a", .names = { "x" } };
        author_run_to(&sleeper, AT_COMMIT); /* and sleeps until all objects are old */
        watched_begin(store);
        watched.before = at_mark;
        on_mark = commit;
        has_marked = false;
        CHECK(sweep(ANY_AGE) <= 1 && has_marked);
        watched_end(store);
        CHECK(holds("t", "a") && !count_objects("t/.nebula/sweep-"));
        author_run(&sleeper);
        CHECK(sleeper.is_durable && !sleeper.attempt && holds("t", "a"));
        author_done(&sleeper);
}

static uint64_t removals_until;

/* The writer commits and checks while the sweep removes. */
static void before_a_removal(struct store *one, enum watched_call call, const char *key)
{
        if (call != CALL_REMOVE || strstr(key, "/.nebula/sweep-") || !removals_until || --removals_until)
                return;
        one->ops = watched.real;
        author_step(&sleeper);
        CHECK(sleeper.at == AT_CHECK);
        author_step(&sleeper);
        CHECK(!sleeper.is_durable);
        one->ops = &watched.ops;
}

ON_EACH_STORE(a_writer_that_finds_a_sweep_at_work_writes_again)
{
        for (uint64_t k = 1; k <= 3; k++) {
                begin_anew();
                sleeper = (struct author){ .tag = "t", .run = "a", .names = { "x", "y" } };
                author_run_to(&sleeper, AT_COMMIT);
                watched_begin(store);
                watched.before = before_a_removal;
                removals_until = k;
                CHECK(sweep(ANY_AGE) == 1 && !removals_until);
                watched_end(store);
                author_run(&sleeper);
                CHECK(sleeper.is_durable && holds("t", "a") && shows("t", "x", "a") && shows("t", "y", "a"));
                author_done(&sleeper);
        }
}

/* ---- failures ---- */

static bool fail_once(enum watched_failure how, uint64_t k)
{
        size_t removed;
        bool has_failed;

        begin_anew();
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        write_torn((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x", "z" } });
        write_torn((struct author){ .tag = "u", .run = "a", .names = { "x", "y" } });
        have("u/foreign", "x");
        watched_begin(store);
        watched_fail(how, k);
        manifest_sweep(store, ANY_AGE, &removed, &error);
        has_failed = atomic_load(&watched.calls) >= k;
        watched_end(store);
        CHECK(holds("t", "a") && shows("t", "x", "a") && has("u/foreign"));
        sweep(ANY_AGE);
        CHECK(holds("t", "a") && shows("t", "y", "a") && count_objects("t/") == 4 && count_objects("u/") == 1);
        write_version((struct author){ .tag = "t", .run = "c", .after = "a", .names = { "x" } });
        CHECK(holds("t", "c"));
        return has_failed;
}

ON_EACH_STORE(a_sweep_that_fails_harms_no_version_and_a_second_ends_well)
{
        for (enum watched_failure how = 0; how < WATCHED_FAILURES; how++)
                for (uint64_t k = 1; fail_once(how, k); k++)
                        continue;
}

static void a_sweep_of_many_sound_versions_takes_one_list_for_many_of_them(void)
{
        uint64_t before;
        char tag[32];

        store = begin_mem_with(&(struct mem_faults){ .page_entries = 1000 });
        for (unsigned i = 0; i < 100; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i);
                write_version((struct author){ .tag = tag, .run = "a", .names = { "x" } });
        }
        before = store_mem_calls(store);
        CHECK(sweep(ANY_AGE) == 0 && store_mem_calls(store) - before < 20);
        store_close(store);
        end_mem();
}

TAP_MAIN(TEST(a_sweep_of_many_sound_versions_takes_one_list_for_many_of_them), TEST(debris_goes_when_it_is_old_and_stays_while_it_is_young), TEST(what_nodes_told_each_other_of_a_hang_goes_when_it_is_old), TEST(a_temporary_object_with_which_the_caller_goes_on_stays), TEST(each_kind_of_debris_goes),
         TEST(what_the_version_names_stays_whichever_writing_it_is_of), TEST(a_file_in_place_that_is_not_known_to_be_debris_stays),
         TEST(nothing_goes_beside_what_is_young_or_another_users), TEST(a_tag_whose_log_cannot_be_read_is_left_alone),
         TEST(the_versions_before_the_newest_entry_stay_while_its_writer_may_live),
         TEST(a_sweep_ends_the_work_of_a_writer_that_died_after_its_entry),
         TEST(the_versions_before_a_removal_do_not_stay_behind_a_later_one), TEST(a_removal_that_was_interrupted_is_ended),
         TEST(of_a_removal_that_ended_but_for_its_entry_that_goes_too), TEST(debris_beside_a_removal_goes_with_it), TEST(one_tag_is_swept_without_the_others),
         TEST(a_sweep_that_finds_a_new_entry_removes_nothing), TEST(a_writer_that_finds_a_sweep_at_work_writes_again),
         TEST(a_sweep_that_fails_harms_no_version_and_a_second_ends_well))
