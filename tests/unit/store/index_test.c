/* What a search finds by the index, whatever the index has: nothing, too much, something old, or damage. */
#include "store/index.h"
#include "store/scan.h"
#include "store/sweep.h"
#include "versions.h"
#include "watched.h"

static void save(const char *tag, uint64_t sequence)
{
        write_version((struct author){ .tag = tag, .run = "a", .sequence = sequence, .names = { "x" } });
}

static void save_step(unsigned step)
{
        char tag[32];

        snprintf(tag, sizeof tag, "global_step%u", step);
        save(tag, step);
}

/* The sequence of the newest version that can be read; 0: none. *ret_rest: so many objects were not at rest. */
static uint64_t newest(size_t *ret_count, size_t *ret_rest)
{
        struct manifest_scan scan;
        struct manifest manifest = { 0 };
        int64_t index;
        uint64_t sequence = 0;

        if (manifest_scan_index(store, &scan, &error))
                abort();
        if (!manifest_scan_load_newest(store, &scan, NULL, &manifest, &index, &error))
                sequence = manifest.sequence;
        *ret_count = scan.count;
        *ret_rest = scan.rest.count;
        manifest_done(&manifest);
        manifest_scan_done(&scan);
        return sequence;
}

static bool finds(uint64_t sequence, size_t wanted_count, size_t wanted_rest)
{
        size_t count, rest;
        uint64_t found = newest(&count, &rest);

        if (found == sequence && count == wanted_count && rest == wanted_rest)
                return true;
        printf("# finds %" PRIu64 " of %zu, %zu not at rest\n", found, count, rest);
        return false;
}

/* Copies of the entry of a tag in the index. */
static void key_of(const char *tag, char ret_key[MANIFEST_KEY_MAX])
{
        struct manifest_scan scan;
        struct store_list list;
        char part[300];

        if (store_list_all(store, INDEX_PREFIX, true, &list, &error) || manifest_scan(store, &scan, &error))
                abort();
        *ret_key = 0;
        snprintf(part, sizeof part, "/%s/", tag);
        for (size_t i = 0; i < list.count; i++)
                if (strstr(list.entries[i].key, part))
                        snprintf(ret_key, MANIFEST_KEY_MAX, "%s", list.entries[i].key);
        manifest_scan_done(&scan);
        store_list_done(&list);
        if (!*ret_key)
                abort();
}

static void forget(const char *tag)
{
        char key[MANIFEST_KEY_MAX];

        key_of(tag, key);
        drop(key);
}

static void sweep(void)
{
        size_t removed;

        CHECK(!manifest_sweep(store, ANY_AGE, &removed, &error));
}

/*
 * fault (Storage): The index lacks an entry, has one too much, an old one, or none at all, or its agent died before its last step.
 * result: Readers find all versions. They read the log of each tag that has no entry, or several, and that of the newest version before
 * they take it. A sweep mends the index.
 */
ON_EACH_STORE(a_version_without_an_entry_is_found_and_a_sweep_makes_its_entry)
{
        save_step(1);
        save_step(2);
        CHECK(finds(2, 2, 0));
        forget("global_step2");
        CHECK(finds(2, 2, 1));
        sweep();
        CHECK(finds(2, 2, 0) && count_objects(INDEX_PREFIX) == 2);
}

ON_EACH_STORE(without_an_index_all_versions_are_found)
{
        for (unsigned i = 1; i <= 5; i++) {
                char tag[32];

                save_step(i);
                snprintf(tag, sizeof tag, "global_step%u", i);
                forget(tag);
        }
        CHECK(finds(5, 5, 5));
        sweep();
        CHECK(finds(5, 5, 0));
}

ON_EACH_STORE(an_agent_that_was_killed_before_its_last_step_leaves_a_version_that_is_found)
{
        struct author writer = { .tag = "global_step2", .run = "a", .sequence = 2, .names = { "x" } };

        save_step(1);
        author_run_to(&writer, AT_SHOW);
        author_done(&writer);
        CHECK(finds(2, 2, 1));
}

/*
 * fault: as a_version_without_an_entry_is_found_and_a_sweep_makes_its_entry
 */
ON_EACH_STORE(a_write_of_the_tag_that_stopped_anywhere_hides_neither_version)
{
        for (enum author_at at = AT_PLACE; at <= AT_SHOW; at++) {
                struct author writer = { .tag = "t", .run = "a", .sequence = 30, .names = { "x", "y" } };
                size_t count, rest;

                begin_anew();
                save("t", 20);
                save("u", 10);
                author_run_to(&writer, at);
                author_done(&writer);
                CHECK(newest(&count, &rest) == (at <= AT_COMMIT ? 20 : 30) && count == 2);
        }
}

/*
 * fault: as a_version_without_an_entry_is_found_and_a_sweep_makes_its_entry
 */
ON_EACH_STORE(an_entry_of_a_tag_that_is_gone_counts_for_nothing_and_a_sweep_removes_it)
{
        char key[MANIFEST_KEY_MAX];

        save_step(1);
        save_step(2);
        key_of("global_step2", key);
        CHECK(!remove_version("global_step2") && !has(key));
        have(key, "\n");
        CHECK(finds(1, 1, 1));
        sweep();
        CHECK(!has(key) && finds(1, 1, 0));
}

/*
 * fault: as a_version_without_an_entry_is_found_and_a_sweep_makes_its_entry
 */
ON_EACH_STORE(of_two_entries_of_a_tag_the_log_decides)
{
        char key[MANIFEST_KEY_MAX];

        save("t", 20);
        save("u", 10);
        key_of("t", key);
        CHECK(!remove_version("t"));
        save("t", 5);
        have(key, "\n");
        CHECK(finds(10, 2, 3)); /* the tag, and both entries */
        sweep();
        CHECK(!has(key) && finds(10, 2, 0));
}

/* As of an agent that slept before its last step, while another one died before it.
 *
 * fault: as a_version_without_an_entry_is_found_and_a_sweep_makes_its_entry
 */
ON_EACH_STORE(an_old_entry_alone_is_no_answer)
{
        char key[MANIFEST_KEY_MAX];

        save("t", 20);
        save("u", 10);
        key_of("t", key);
        CHECK(!remove_version("t"));
        CHECK(!has(key));
        save("t", 5);
        forget("t");
        have(key, "\n");
        CHECK(finds(10, 2, 0));
        CHECK(!remove_version("t"));
        write_torn((struct author){ .tag = "t", .run = "b", .names = { "x" } });
        have(key, "\n");
        CHECK(finds(10, 1, 0));
}

ON_EACH_STORE(a_damaged_manifest_is_passed_over_although_it_has_an_entry)
{
        struct manifest_scan scan;
        struct manifest manifest;
        int64_t index;

        save_step(1);
        save_step(2);
        flip("global_step2/.nebula/manifest-1.json", 30);
        REQUIRE(!manifest_scan_index(store, &scan, &error) && scan.count == 2);
        REQUIRE(!manifest_scan_load_newest(store, &scan, NULL, &manifest, &index, &error));
        CHECK(manifest.sequence == 1 && scan.count == 1 && scan.broken_count == 1 && !strcmp(scan.broken_list[0].tag, "global_step2"));
        manifest_done(&manifest);
        manifest_scan_done(&scan);
        drop("global_step2/.nebula/manifest-1.json");
        CHECK(finds(1, 1, 0));
}

static bool same(const struct manifest *a, const struct manifest *b)
{
        return !strcmp(a->tag, b->tag) && !strcmp(a->job, b->job) && !strcmp(a->run, b->run) && !strcmp(a->thinned, b->thinned) && a->number == b->number &&
               a->writing == b->writing && a->sequence == b->sequence && a->step == b->step && a->world == b->world &&
               manifest_count(a) == manifest_count(b) && manifest_size(a) == manifest_size(b) && manifest_written(a) == manifest_written(b);
}

ON_EACH_STORE(an_entry_says_what_the_manifest_says_whatever_the_names_are)
{
        static const char *const names[] = { "", "a", "job-x/y", "run-", "\xc3\xa9\xe6\x97\xa5", "a%2Fb", ".", "..", "latest", "-", "x y*?&=+" };

        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
                struct manifest one = { .number = 7, .writing = 9, .sequence = 1766312345160000000, .world = 8, .is_brief = true, .all_files = 3, .size = 100,
                                        .written = 60 }, found;
                char directory[256];
                struct index index;

                begin_anew();
                strcpy(one.tag, *names[i] ? names[i] : "global_step12");
                strcpy(one.job, names[i]);
                strcpy(one.run, names[i]);
                strcpy(one.thinned, i % 2 ? "optimizer*,x-1" : "");
                one.step = name_step(one.tag);
                if (name_encode(one.tag, directory, &error))
                        abort();
                REQUIRE(!index_put(store, &one, &error) && !index_load(store, &index, &error));
                CHECK(index_find(&index, directory, &found) && same(&one, &found));
                index_done(&index);
                CHECK(!index_remove(store, &one, &error) && !count_objects(INDEX_PREFIX));
        }
}

ON_EACH_STORE(names_that_are_too_long_for_a_key_have_no_entry)
{
        struct manifest one = { .tag = "t", .number = 1, .writing = 1, .sequence = 1, .world = 1 };

        memset(one.job, 'j', 252);
        CHECK(!index_put(store, &one, &error) && !count_objects(INDEX_PREFIX) && !index_remove(store, &one, &error));
}

/* A person or another program may have put anything there. */
ON_EACH_STORE(a_key_that_no_agent_makes_is_no_entry)
{
        static const char *const keys[] = {
                "x", "job-/run-", "job-/run-/t/", "job-/run-/t/1", "a/b/t/0000000000000000001-0-1-1-1-1-1-1", "job-/run-/t/1-0-1-1-1-1-1-1",
                "job-/run-/t/0000000000000000000-0-1-1-1-1-1-1", "job-/run-/t/0000000000000000001-2-1-1-1-1-1-1", "job-/run-/t/0000000000000000001-0-0-1-1-1-1-1",
                "job-/run-/t/0000000000000000001-0-1-1-0-1-1-1", "job-/run-/t/0000000000000000001-0-1-1-1-1-9999999999999999999-1",
                "job-/run-/t/0000000000000000001-0-1-1-1-1-1-1-", "job-/run-/t/0000000000000000001-0-1-1-1-1-1-1x", "job-/run-/t/0000000000000000001-0-1-1-01-1-1-1",
                "job-%2e/run-/t/0000000000000000001-0-1-1-1-1-1-1", "job-/run-/t/0000000000000000001-0-1-1-1-1-1-1/x",
        };

        for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
                struct manifest found;
                struct index index;
                char key[300];

                if (keys[i][strlen(keys[i]) - 1] == '/')
                        continue;
                begin_anew();
                snprintf(key, sizeof key, INDEX_PREFIX "%s", keys[i]);
                have(key, "\n");
                REQUIRE(!index_load(store, &index, &error));
                CHECK(!index_find(&index, "t", &found));
                index_done(&index);
        }
}

/* Each removal makes room for the next version, as with keep_last=1. It comes before any call of the search. */
static struct {
        unsigned round, pause, left;
} churn;

static void go_on(struct store *one, enum watched_call call, const char *key)
{
        (void)call;
        (void)key;
        if (churn.pause++ % 3 || !churn.left)
                return;
        churn.left--;
        one->ops = watched.real;
        save_step(churn.round + 1);
        {
                char tag[32];

                snprintf(tag, sizeof tag, "global_step%u", churn.round++);
                CHECK(!remove_version(tag));
        }
        one->ops = &watched.ops;
}

ON_EACH_STORE(a_search_finds_what_took_the_place_of_what_it_had_listed)
{
        for (unsigned first = 0; first < 3; first++) {
                size_t count, rest;

                begin_anew();
                save_step(1);
                churn.round = 1;
                churn.pause = first;
                churn.left = 5;
                watched_begin(store);
                watched.before = go_on;
                CHECK(newest(&count, &rest) == churn.round && churn.round > 1);
                watched_end(store);
        }
}

static uint64_t began;

static void save_line(const char *tag, uint64_t sequence)
{
        struct author writer = { .tag = tag, .run = "a", .sequence = sequence, .names = { "x" } };

        author_run_to(&writer, AT_PLACE);
        if (began)
                line_fork(&writer.real.manifest.line, began, 3);
        author_run(&writer);
        CHECK(writer.is_durable);
        author_done(&writer);
}

ON_EACH_STORE(one_manifest_of_each_line_tells_what_was_abandoned)
{
        struct manifest_scan scan;
        size_t abandoned = 0;

        began = 0;
        for (unsigned i = 1; i <= 6; i++)
                save_step(i);
        began = 10;
        save_line("global_step4", 10);
        save_line("global_step5", 11);
        watched_begin(store);
        REQUIRE(!manifest_scan_index(store, &scan, &error));
        CHECK(atomic_load(&watched.of_kind[CALL_GET]) == 1);
        watched_end(store);
        for (size_t i = 0; i < scan.count; i++)
                abandoned += scan.manifests[i].is_abandoned;
        CHECK(scan.count == 6 && abandoned == 1 && scan.manifests[manifest_scan_newest(&scan, NULL)].step == 5);
        CHECK(scan.manifests[5].line.count == 1 && scan.manifests[5].line.forks[0].after == 3);
        manifest_scan_done(&scan);
}

ON_EACH_STORE(a_line_of_which_no_manifest_can_be_read_counts_as_broken)
{
        struct manifest_scan scan;

        began = 0;
        for (unsigned i = 1; i <= 3; i++)
                save_step(i);
        began = 10;
        save_line("global_step4", 10);
        save_line("global_step5", 11);
        flip("global_step4/.nebula/manifest-1.json", 30);
        REQUIRE(!manifest_scan_index(store, &scan, &error));
        CHECK(scan.count == 4 && scan.broken_count == 1 && scan.manifests[3].line.forks[0].after == 3); /* the other one tells */
        manifest_scan_done(&scan);
        flip("global_step5/.nebula/manifest-1.json", 30);
        REQUIRE(!manifest_scan_index(store, &scan, &error));
        CHECK(scan.count == 3 && scan.broken_count == 2 && scan.manifests[manifest_scan_newest(&scan, NULL)].step == 3);
        manifest_scan_done(&scan);
}

static const struct store_ops *plain;

static enum nebula_status refuse(struct store *unused, const struct store_victim *victims, size_t count, struct nebula_error *failure)
{
        (void)unused;
        (void)victims;
        (void)count;
        return error_set(failure, NEBULA_STORAGE, EACCES, "removals are refused");
}

ON_EACH_STORE(a_store_that_refuses_removals_shows_the_newest_writing_of_a_tag)
{
        struct store_ops ops = *store->ops;

        save("t", 20);
        save("u", 10);
        plain = store->ops;
        ops.remove = refuse;
        store->ops = &ops;
        save("t", 30);
        CHECK(finds(30, 2, 3));
        store->ops = plain;
}

ON_EACH_STORE(a_store_that_refuses_removals_shows_no_version_that_was_removed)
{
        struct store_ops ops = *store->ops;
        struct manifest manifest;

        save("t", 20);
        save("u", 10);
        REQUIRE(!manifest_load(store, "t", &manifest, &error));
        plain = store->ops;
        ops.remove = refuse;
        store->ops = &ops;
        CHECK(manifest_remove(store, &manifest, &error) == NEBULA_STORAGE && finds(10, 1, 3));
        store->ops = plain;
        manifest_done(&manifest);
}

static void the_cost_of_a_search_is_that_of_two_lists_and_the_newest_manifest(void)
{
        static const unsigned counts[] = { 1, 64, 65, 1000, 1001 };
        unsigned made = 0;

        store = begin_mem_with(&(struct mem_faults){ .page_entries = 1000 });
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
                size_t count, rest;

                while (made < counts[i])
                        save_step(++made);
                watched_begin(store);
                CHECK(newest(&count, &rest) == made && count == made && !rest);
                /* The index, the root, the log of the newest tag; watched.h counts each list twice. */
                CHECK(atomic_load(&watched.calls) <= 9 && atomic_load(&watched.of_kind[CALL_GET]) == 1);
                watched_end(store);
        }
        store_close(store);
        end_mem();
}

TAP_MAIN(TEST(a_version_without_an_entry_is_found_and_a_sweep_makes_its_entry), TEST(without_an_index_all_versions_are_found),
         TEST(an_agent_that_was_killed_before_its_last_step_leaves_a_version_that_is_found), TEST(a_write_of_the_tag_that_stopped_anywhere_hides_neither_version),
         TEST(an_entry_of_a_tag_that_is_gone_counts_for_nothing_and_a_sweep_removes_it), TEST(of_two_entries_of_a_tag_the_log_decides),
         TEST(an_old_entry_alone_is_no_answer), TEST(a_damaged_manifest_is_passed_over_although_it_has_an_entry),
         TEST(an_entry_says_what_the_manifest_says_whatever_the_names_are), TEST(names_that_are_too_long_for_a_key_have_no_entry),
         TEST(a_key_that_no_agent_makes_is_no_entry), TEST(a_search_finds_what_took_the_place_of_what_it_had_listed),
         TEST(one_manifest_of_each_line_tells_what_was_abandoned), TEST(a_line_of_which_no_manifest_can_be_read_counts_as_broken),
         TEST(a_store_that_refuses_removals_shows_the_newest_writing_of_a_tag),
         TEST(a_store_that_refuses_removals_shows_no_version_that_was_removed), TEST(the_cost_of_a_search_is_that_of_two_lists_and_the_newest_manifest))
