/* manifest_publish after a commit: <tag>/<name> gets the committed bytes, and objects that only the version before had are removed. */
#include "store/announce.h"
#include "store/manifest_keys.h"
#include "store/manifest_publish.h"
#include "versions.h"
#include "watched.h"

/* Commits; the test does the steps after that. */
static void commit(struct author *writer)
{
        author_run_to(writer, AT_SHOW);
        if (!writer->is_durable)
                abort();
}

static enum nebula_status publish(const struct author *writer)
{
        return manifest_publish(store, &writer->real.manifest, &writer->real.before.manifest, &error);
}

ON_EACH_STORE(a_file_that_lies_apart_is_shown_at_its_name)
{
        struct author writer = { .tag = "t", .run = "b", .after = "a", .names = { "x", "y" } };

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        CHECK(shows("t", "x", "a") && shows("t", "y", "a"));
        commit(&writer);
        CHECK(shows("t", "x", "a") && shows("t", "y", "a")); /* not before the commit */
        CHECK(!publish(&writer) && shows("t", "x", "b") && shows("t", "y", "b") && holds("t", "b"));
        CHECK(!publish(&writer) && shows("t", "x", "b") && holds("t", "b")); /* again is fine */
        author_done(&writer);
}

/* Nothing is copied: the writing that saved the file made its view. */
ON_EACH_STORE(a_file_that_carries_over_keeps_its_view)
{
        struct author writer = { .tag = "t", .run = "c", .after = "b", .carries = true, .names = { "z" } };

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .carries = true, .names = { "y" } });
        commit(&writer);
        watched_begin(store);
        CHECK(!publish(&writer) && atomic_load(&watched.of_kind[CALL_COPY]) == 1);
        watched_end(store);
        CHECK(shows("t", "x", "a") && shows("t", "y", "b") && shows("t", "z", "c") && holds("t", "c"));
        author_done(&writer);
}

ON_EACH_STORE(what_only_the_version_before_named_goes)
{
        struct author one = { .tag = "t", .run = "b", .after = "a", .carries = true, .names = { "x" } };
        struct author two = { .tag = "t", .run = "c", .after = "b", .carries = true, .names = { "x" } };
        char apart[MANIFEST_KEY_MAX], record[MANIFEST_KEY_MAX];

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        commit(&one);
        REQUIRE(!file_key("t", one.writing, "x", apart, &error) && !record_key("t", one.writing, 0, record, &error));
        CHECK(!publish(&one) && !has("t/.nebula/manifest-1.json") && has("t/.nebula/manifest-2.json"));
        CHECK(has(apart) && has(record) && count_objects("t/.nebula/") == 4); /* the entry, and also the record of y */
        commit(&two);
        CHECK(has(apart) && has(record));
        CHECK(!publish(&two) && !has(apart) && !has(record) && !has("t/.nebula/manifest-2.json") && count_objects("t/.nebula/") == 4);
        CHECK(holds("t", "c") && shows("t", "y", "a"));
        author_done(&one);
        author_done(&two);
}

/* A program that does not read manifests would take the file for a part of this version. */
ON_EACH_STORE(the_view_of_a_file_that_is_no_more_goes)
{
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "rng2.pt", "rng3.pt", "rng4.pt" } });
        drop("t/rng3.pt");
        have("t/rng3.pt", "of a user");
        have("t/other", "of a user");
        drop("t/rng4.pt");
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x" } });
        CHECK(!has("t/rng2.pt") && has("t/rng3.pt") && has("t/other") && holds("t", "b"));
}

ON_EACH_STORE(tries_of_the_same_writing_that_failed_go_and_other_writings_stay)
{
        struct author other = { .tag = "t", .run = "b", .names = { "y" } }, failed = { .tag = "t", .run = "a", .names = { "x" } };
        char other_record[MANIFEST_KEY_MAX], failed_record[MANIFEST_KEY_MAX], claim[MANIFEST_KEY_MAX];

        write_torn(other);
        write_torn(failed);
        writing_name("", "b", 'b', 0, other.writing);
        writing_name("", "a", 'a', 0, failed.writing);
        REQUIRE(!record_key("t", other.writing, 0, other_record, &error) && !record_key("t", failed.writing, 0, failed_record, &error));
        REQUIRE(has(other_record) && has(failed_record));
        failed.attempt = 1;
        writing_name("", "a", 'a', 1, failed.writing);
        REQUIRE(!claim_key("t", failed.writing, 0, claim, &error));
        have(claim, "{}");
        write_version((struct author){ .tag = "t", .run = "a", .attempt = 1, .names = { "x" } });
        CHECK(holds("t", "a") && shows("t", "x", "a") && !has(failed_record) && !has(claim));
        CHECK(has(other_record) && shows("t", "y", "b"));
}

ON_EACH_STORE(the_node_documents_of_the_version_before_go_and_those_of_other_writings_stay)
{
        struct announce_of before = { .run = "a", .writing = 'a' }, own = { .run = "b", .writing = 'b' }, open = { .run = "b", .writing = 'c' };
        const struct announce_of *all[] = { &before, &own, &open };
        char paths[3][ANNOUNCE_PATH_MAX + 2] = { "t/", "t/", "t/" };

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        for (size_t i = 0; i < 3; i++) {
                committed_path(all[i], paths[i] + 2);
                have(paths[i], "{}");
        }
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x" } });
        CHECK(!has(paths[0]) && has(paths[1]) && has(paths[2]) && holds("t", "b"));
}

ON_EACH_STORE(nothing_is_done_for_a_version_that_another_entry_has_followed)
{
        struct author one = { .tag = "t", .run = "b", .after = "a", .names = { "x" } };
        size_t count;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        commit(&one);
        write_version((struct author){ .tag = "t", .run = "c", .after = "b", .names = { "x" } });
        count = count_objects("");
        watched_begin(store);
        CHECK(publish(&one) == NEBULA_BUSY && strstr(error.message, "\"t\""));
        CHECK(!atomic_load(&watched.of_kind[CALL_COPY]) && !atomic_load(&watched.of_kind[CALL_REMOVE]) && !atomic_load(&watched.of_kind[CALL_PUT]));
        watched_end(store);
        CHECK(holds("t", "c") && shows("t", "x", "c") && count_objects("") == count);
        author_done(&one);
}

static unsigned copies_until;

/* Another program commits and makes its views before the k-th half of a copy. */
static void commit_meanwhile(struct store *one, enum watched_call call, const char *key)
{
        (void)key;
        if (call != CALL_COPY || !copies_until || --copies_until)
                return;
        one->ops = watched.real;
        write_version((struct author){ .tag = "t", .run = "c", .after = "b", .names = { "x", "y" } });
        one->ops = &watched.ops;
}

ON_EACH_STORE(views_are_those_of_the_newest_entry_whoever_slept)
{
        for (unsigned moment = 1; moment <= 4; moment++) {
                struct author one = { .tag = "t", .run = "b", .after = "a", .names = { "x", "y" } };

                begin_anew();
                write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
                commit(&one);
                watched_begin(store);
                watched.before = commit_meanwhile;
                copies_until = moment;
                CHECK(publish(&one) == NEBULA_BUSY && !copies_until);
                watched_end(store);
                CHECK(holds("t", "c") && shows("t", "x", "c") && shows("t", "y", "c"));
                author_done(&one);
        }
}

static unsigned without_copies(struct store *one)
{
        return watched.real->features(one) & ~(unsigned)STORE_COPIES;
}

ON_EACH_STORE(a_store_that_cannot_copy_keeps_the_older_view)
{
        struct author writer = { .tag = "t", .run = "b", .after = "a", .names = { "x" } };

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        commit(&writer);
        watched_begin(store);
        watched.ops.features = without_copies;
        CHECK(!publish(&writer) && !atomic_load(&watched.of_kind[CALL_COPY]));
        watched_end(store);
        CHECK(holds("t", "b") && shows("t", "x", "a") && !has("t/.nebula/manifest-1.json"));
        author_done(&writer);
}

/* A program whose lists are a version behind must find the next number taken. */
ON_ALL_STORES(where_lists_are_stale_one_entry_before_the_newest_stays)
{
        bool is_fresh = features & STORE_LISTS_FRESH;

        if (!strcmp(kind->name, "slow mem"))
                return;
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x" } });
        CHECK(has("t/.nebula/manifest-1.json") == !is_fresh && has("t/.nebula/manifest-2.json"));
        have("other/1", "x"); /* and a list shows the objects from before these calls */
        have("other/2", "x");
        write_version((struct author){ .tag = "t", .run = "c", .after = "b", .names = { "x" } });
        CHECK(!has("t/.nebula/manifest-1.json") && has("t/.nebula/manifest-2.json") == !is_fresh && holds("t", "c"));
}

ON_EACH_STORE(a_publish_that_fails_harms_nothing_and_a_second_ends_well)
{
        for (enum watched_failure how = 0; how < WATCHED_FAILURES; how++) {
                bool has_failed = true;

                for (uint64_t k = 1; has_failed; k++) {
                        struct author writer = { .tag = "t", .run = "b", .after = "a", .carries = true, .names = { "x" } };
                        enum nebula_status status;

                        begin_anew();
                        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
                        have("t/other", "of a user");
                        commit(&writer);
                        watched_begin(store);
                        watched_fail(how, k);
                        status = publish(&writer);
                        has_failed = atomic_load(&watched.calls) >= k;
                        watched_end(store);
                        CHECK(!status || (has_failed && (status == NEBULA_STORAGE || status == NEBULA_TIMEOUT)));
                        CHECK(holds("t", "b") && shows("t", "y", "a") && (shows("t", "x", "a") || shows("t", "x", "b")));
                        CHECK(!publish(&writer));
                        CHECK(holds("t", "b") && shows("t", "x", "b") && shows("t", "y", "a") && has("t/other") && count_objects("t/.nebula/") == 4);
                        author_done(&writer);
                }
        }
}

TAP_MAIN(TEST(the_node_documents_of_the_version_before_go_and_those_of_other_writings_stay),
         TEST(a_file_that_lies_apart_is_shown_at_its_name), TEST(a_file_that_carries_over_keeps_its_view), TEST(what_only_the_version_before_named_goes),
         TEST(the_view_of_a_file_that_is_no_more_goes), TEST(tries_of_the_same_writing_that_failed_go_and_other_writings_stay),
         TEST(nothing_is_done_for_a_version_that_another_entry_has_followed), TEST(views_are_those_of_the_newest_entry_whoever_slept),
         TEST(a_store_that_cannot_copy_keeps_the_older_view), TEST(where_lists_are_stale_one_entry_before_the_newest_stays), TEST(a_publish_that_fails_harms_nothing_and_a_second_ends_well))
