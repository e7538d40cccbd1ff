/*
 * A removal makes an entry of the log first, and then removes only the objects that were there before it. A later call completes an
 * interrupted one.
 */
#include "store/manifest_keys.h"
#include "store/manifest_remove.h"
#include "store/sweep.h"
#include "full.h"
#include "versions.h"
#include "watched.h"

static uint64_t last_removal(const char *directory)
{
        uint64_t number = UINT64_MAX;

        CHECK(!tag_log_removed(store, directory, &number, &error));
        return number;
}

/* Whether Nebula's objects and the files of its records are gone. */
static bool is_all_gone(const char *directory)
{
        char prefix[300];

        snprintf(prefix, sizeof prefix, "%s/", directory);
        return !count_objects(prefix);
}

ON_EACH_STORE(a_removal_takes_all_that_is_nebulas_and_nothing_else)
{
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .carries = true, .names = { "x" } });
        write_torn((struct author){ .tag = "t", .run = "c", .after = "b", .names = { "z" } }); /* a writing that never ended */
        have("t/.nebula/committed-w0123456789abcdef-1.json", "{}");
        have("t/.nebula/captured-w0123456789abcdef-1-00000-fedcba9876543210.json", "{}");
        have("t/.nebula/sweep-0000000000000001.json", "{}");
        have("t/.nebula/w0123456789abcdef-1-00000000.claim-00003.json", "{}");
        have("t/.nebula/w0123456789abcdef-1-00000000/x", "1");
        have("t/foreign", "x");
        have("t/.nebula/foreign", "x");
        have("tt/x", "x");
        CHECK(!remove_version("t") && holds_nothing("t"));
        CHECK(has("t/foreign") && has("t/.nebula/foreign") && count_objects("t/") == 2 && has("tt/x"));
        CHECK(last_removal("t") == 3 && count_objects(".nebula/removed/") == 1);
}

/* Its files were replaced by views of a later writing of the tag. */
ON_EACH_STORE(a_removal_takes_the_manifest_of_format_1_too)
{
        have("t/.nebula/manifest.json", "{}");
        have("t/.nebula/rank-00000.json", "{}");
        have("t/.nebula/rank-00000.g2.json", "{}");
        have("t/.nebula/notes.json", "of a user");
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        CHECK(holds("t", "a") && !remove_version("t") && holds_nothing("t"));
        CHECK(has("t/.nebula/notes.json") && count_objects("t/") == 1);
}

ON_EACH_STORE(of_a_writing_in_place_that_never_ended_the_files_go_too)
{
        struct author torn = { .tag = "t", .run = "b", .names = { "y", "z" } };

        write_torn(torn);
        drop("t/z");
        have("t/z", "of another length: a user's");
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        CHECK(has("t/y") && !remove_version("t") && !has("t/y") && has("t/z") && count_objects("t/") == 1);
}

ON_EACH_STORE(the_numbers_of_the_log_go_on_after_a_removal)
{
        struct manifest manifest;

        for (uint64_t round = 0; round < 3; round++) {
                write_version((struct author){ .tag = "t/u", .run = "a", .sequence = 50 + round, .names = { "x" } });
                load("t/u", &manifest);
                CHECK(manifest.number == 1 + 2 * round && holds("t/u", "a") && shows("t%2Fu", "x", "a"));
                manifest_done(&manifest);
                CHECK(!remove_version("t/u") && last_removal("t%2Fu") == 2 + 2 * round && is_all_gone("t%2Fu"));
        }
        CHECK(count_objects(".nebula/removed/") == 1);
}

/* Only the first entry of a log names files in place: afterwards another writer may still write a view there. */
ON_EACH_STORE(after_a_removal_no_file_of_a_manifest_lies_in_place)
{
        struct manifest manifest;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        CHECK(!remove_version("t") && !has("t/x"));
        write_version((struct author){ .tag = "t", .run = "a", .sequence = 100, .names = { "x" } });
        load("t", &manifest);
        CHECK(manifest.files[0].is_apart && shows("t", "x", "a"));
        have("t/x", "an old view");
        CHECK(holds("t", "a"));
        manifest_done(&manifest);
}

ON_EACH_STORE(a_removal_again_is_fine_and_takes_nothing_of_other_programs)
{
        struct manifest manifest;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        load("t", &manifest);
        CHECK(!manifest_remove(store, &manifest, &error) && !manifest_remove(store, &manifest, &error) && is_all_gone("t"));
        have("t/x", "of a user");
        write_torn((struct author){ .tag = "t", .run = "b", .names = { "y" } });
        CHECK(!manifest_remove(store, &manifest, &error) && !manifest_end_removal(store, "t", &error));
        CHECK(has("t/x") && count_objects("t/") == 3 && holds_nothing("t"));
        manifest_done(&manifest);
}

ON_EACH_STORE(a_version_that_was_written_again_is_not_removed_in_the_name_of_the_old_one)
{
        struct manifest old;
        size_t count;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        load("t", &old);
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x" } });
        count = count_objects("");
        CHECK(manifest_remove(store, &old, &error) == NEBULA_BUSY && strstr(error.message, "\"t\"") && count_objects("") == count && holds("t", "b"));
        CHECK(!manifest_end_removal(store, "t", &error) && holds("t", "b")); /* there is none */
        CHECK(!remove_version("t") && is_all_gone("t"));
        manifest_done(&old);
}

/* It may be a later writing in a newer format. */
ON_EACH_STORE(what_cannot_be_looked_at_is_not_removed)
{
        struct manifest manifest;
        size_t count;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        load("t", &manifest);
        have("t/.nebula/manifest-2.json", "damaged");
        count = count_objects("");
        CHECK(manifest_remove(store, &manifest, &error) == NEBULA_CORRUPT && strstr(error.message, "t/.nebula/manifest-2.json"));
        CHECK(manifest_end_removal(store, "t", &error) == NEBULA_OK && count_objects("") == count);
        manifest_done(&manifest);
}

ON_EACH_STORE(objects_of_another_user_stay)
{
        static const char *const keys_of_all[] = { "t/x", "t/.nebula/committed-w0123456789abcdef-1.json" };

        for (size_t i = 0; i < 2; i++) {
                struct manifest manifest;

                begin_anew();
                write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
                have("t/.nebula/committed-w0123456789abcdef-1.json", "{}");
                load("t", &manifest);
                watched_begin(store);
                watched.foreign = keys_of_all[i];
                CHECK(!manifest_remove(store, &manifest, &error));
                watched_end(store);
                CHECK(has(keys_of_all[i]) && !has(keys_of_all[1 - i]) && holds_nothing("t"));
                manifest_done(&manifest);
        }
}

/* A writer may still be writing it. */
ON_EACH_STORE(a_young_temporary_object_stays_until_a_sweep)
{
        size_t swept;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        have("t/.nebula/tmp-9-1", "x");
        CHECK(!remove_version("t") && has("t/.nebula/tmp-9-1") && count_objects("t/") == 1);
        CHECK(!manifest_sweep(store, ANY_AGE, &swept, &error) && is_all_gone("t"));
}

static const char *replaced;

static void replace_meanwhile(struct store *one, enum watched_call call, const char *key)
{
        if (call == CALL_REMOVE && replaced && !strcmp(key, replaced)) {
                replaced = NULL;
                if (watched.real->put(one, key, "of another program", 18, STORE_ALWAYS, NULL, NULL, NULL))
                        abort();
        }
}

ON_EACH_STORE(an_object_goes_only_while_it_is_the_one_that_was_there_before_the_entry)
{
        static const char *const keys_of_all[] = { "t/x", "t/.nebula/committed-w0123456789abcdef-1.json", "t/.nebula/wdb274cd68a4c31cc-97-00000000.record-00000.json" };

        for (size_t i = 0; i < 3; i++) {
                struct manifest manifest;

                begin_anew();
                write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
                have("t/.nebula/committed-w0123456789abcdef-1.json", "{}");
                load("t", &manifest);
                REQUIRE(has(keys_of_all[i]));
                watched_begin(store);
                watched.before = replace_meanwhile;
                replaced = keys_of_all[i];
                CHECK(!manifest_remove(store, &manifest, &error) && !replaced);
                watched_end(store);
                CHECK(has(keys_of_all[i]) && count_objects("t/") == 1 && holds_nothing("t"));
                manifest_done(&manifest);
        }
}

/* The writer sleeps between its files and its manifest. It finds the removal, finished or not, and writes all files again. */
ON_EACH_STORE(a_removal_while_a_writer_sleeps_takes_its_files_and_the_writer_finds_out)
{
        for (enum author_at at = AT_PLACE; at <= AT_CHECK; at++) {
                struct author writer = { .tag = "t", .run = "b", .after = "a", .names = { "x", "y" } };

                begin_anew();
                write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
                author_run_to(&writer, at);
                CHECK(!remove_version("t") && holds_nothing("t") && is_all_gone("t"));
                author_run(&writer);
                CHECK(writer.is_durable && holds("t", "b") && shows("t", "x", "b") && shows("t", "y", "b"));
                CHECK(!remove_version("t") && is_all_gone("t"));
                author_done(&writer);
        }
}

/* Before the k-th call of the removal, another program completes it or writes the tag again. */
static uint64_t acts_at;
static void (*act)(void);

static void act_meanwhile(struct store *one, enum watched_call call, const char *key)
{
        (void)call;
        (void)key;
        if (!acts_at || atomic_load(&watched.calls) + 1 != acts_at)
                return;
        acts_at = 0;
        one->ops = watched.real;
        act();
        one->ops = &watched.ops;
}

static void write_again(void)
{
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .carries = true, .names = { "x", "y" } });
}

static void end_and_write_again(void)
{
        CHECK(!manifest_end_removal(store, "t", &error));
        write_again();
}

static void a_tag_that_is_written_again_stays_whole(void)
{
        bool has_acted = true;

        for (uint64_t k = 1; has_acted; k++) {
                struct manifest manifest;
                enum nebula_status status;

                begin_anew();
                write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "keep" } });
                load("t", &manifest);
                watched_begin(store);
                watched.before = act_meanwhile;
                acts_at = k;
                status = manifest_remove(store, &manifest, &error);
                has_acted = !acts_at;
                watched_end(store);
                if (has_acted) {
                        CHECK((!status || status == NEBULA_BUSY) && holds("t", "b"));
                        CHECK(status != NEBULA_BUSY || shows("t", "keep", "a")); /* it stays, with its carried-over files */
                } else {
                        CHECK(!status && holds_nothing("t"));
                }
                manifest_done(&manifest);
        }
}

ON_EACH_STORE(a_tag_that_is_written_again_while_it_is_removed_is_whole)
{
        act = write_again;
        a_tag_that_is_written_again_stays_whole();
        act = end_and_write_again;
        a_tag_that_is_written_again_stays_whole();
}

/* ---- interrupted ---- */

enum ending { BY_A_REMOVAL, BY_A_SWEEP, BY_END_REMOVAL, BY_A_WRITER, ENDINGS };

static void end_it(enum ending ending, const struct manifest *manifest)
{
        size_t swept;

        switch (ending) {
        case BY_A_REMOVAL:
                CHECK(!manifest_remove(store, manifest, &error));
                break;
        case BY_A_SWEEP:
                CHECK(!manifest_sweep(store, ANY_AGE, &swept, &error));
                break;
        case BY_END_REMOVAL:
                CHECK(!manifest_end_removal(store, "t", &error));
                break;
        default:
                write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x" } });
                CHECK(holds("t", "b") && shows("t", "x", "b") && !remove_version("t"));
        }
}

static bool interrupt(enum watched_failure how, uint64_t k, enum ending ending)
{
        struct manifest manifest;
        enum nebula_status status;
        bool has_failed;

        begin_anew();
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        write_version((struct author){ .tag = "t", .run = "a", .sequence = 100, .carries = true, .names = { "x" } });
        have("t/foreign", "x");
        load("t", &manifest);
        watched_begin(store);
        watched_fail(how, k);
        status = manifest_remove(store, &manifest, &error);
        has_failed = atomic_load(&watched.calls) >= k;
        watched_end(store);
        CHECK(!status || (has_failed && (status == NEBULA_STORAGE || status == NEBULA_TIMEOUT)));
        /* Either a complete version or none; no version lacks files. */
        CHECK(holds_nothing("t") || (status && holds("t", "a")));
        if (!holds("t", "a") || ending == BY_A_REMOVAL || ending == BY_A_WRITER) {
                end_it(ending, &manifest);
                CHECK(holds_nothing("t") && has("t/foreign") && count_objects("t/") == 1);
                CHECK(!status || last_removal("t") >= 3);
                write_version((struct author){ .tag = "t", .run = "c", .names = { "x" } });
                CHECK(holds("t", "c"));
        }
        manifest_done(&manifest);
        return has_failed;
}

ON_EACH_STORE(an_interrupted_removal_leaves_a_whole_version_or_none_and_is_ended_by_the_next_one)
{
        for (enum watched_failure how = 0; how < WATCHED_FAILURES; how++)
                for (enum ending ending = 0; ending < ENDINGS; ending++)
                        for (uint64_t k = 1; interrupt(how, k, ending); k++)
                                continue;
}

/* An object that has one of the version's names but differs from its record is not the version's any more. */
ON_EACH_STORE(a_removal_that_is_ended_by_another_takes_no_users_file_in_the_versions_name)
{
        struct manifest manifest;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        load("t", &manifest);
        for (uint64_t k = 1; !holds_nothing("t"); k++) { /* the removal is interrupted after its entry */
                watched_begin(store);
                watched_fail(PROGRAM_DIES, k);
                manifest_remove(store, &manifest, NULL);
                watched_end(store);
        }
        REQUIRE(has("t/x") && has("t/y"));
        drop("t/x");
        have("t/x", "of a user");
        CHECK(!manifest_remove(store, &manifest, &error) && has("t/x") && !has("t/y") && count_objects("t/") == 1);
        manifest_done(&manifest);
}

static bool has_ended;

/* Another removal takes the number that this one is about to use, and completes. */
static void end_another(struct store *one, enum watched_call call, const char *key)
{
        if (call != CALL_PUT || has_ended || strcmp(key, "t/.nebula/manifest-2.json"))
                return;
        has_ended = true;
        one->ops = watched.real;
        drop("t/.nebula/manifest-1.json");
        CHECK(!tag_log_set_removed(store, "t", 2, &error));
        one->ops = &watched.ops;
}

ON_EACH_STORE(a_removal_whose_number_another_has_used_removes_nothing)
{
        struct manifest manifest;
        struct author later = { .tag = "t", .run = "b", .after = "a", .names = { "z" } };
        char key[MANIFEST_KEY_MAX];

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        load("t", &manifest);
        author_run_to(&later, AT_COMMIT);
        REQUIRE(!file_key("t", later.writing, "z", key, &error) && has(key));
        watched_begin(store);
        watched.before = end_another;
        has_ended = false;
        CHECK(!manifest_remove(store, &manifest, &error) && has_ended);
        watched_end(store);
        CHECK(has(key) && !has("t/.nebula/manifest-2.json") && holds_nothing("t") && last_removal("t") == 2);
        author_done(&later);
        manifest_done(&manifest);
}

/* ---- objects that one try has put ---- */

static void forsake(enum watched_failure how, uint64_t k, bool *ret_has_failed)
{
        struct author failed = { .tag = "t", .run = "b", .after = "a", .names = { "y", "z" } };

        begin_anew();
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        author_run_to(&failed, AT_COMMIT);
        have("t/foreign", "x");
        watched_begin(store);
        watched_fail(how, k);
        manifest_forsake(store, "t", failed.writing);
        *ret_has_failed = k && atomic_load(&watched.calls) >= k;
        watched_end(store);
        CHECK(holds("t", "a") && has("t/foreign"));
        manifest_forsake(store, "t", failed.writing);
        CHECK(holds("t", "a") && shows("t", "x", "a") && has("t/foreign"));
        CHECK(count_objects("t/") == 4); /* a manifest, a record, x, and the foreign object */
        author_done(&failed);
}

ON_EACH_STORE(a_try_that_is_given_up_takes_its_own_with_it_and_nothing_else)
{
        for (enum watched_failure how = 0; how < WATCHED_FAILURES; how++) {
                bool has_failed = true;

                for (uint64_t k = 1; has_failed; k++)
                        forsake(how, k, &has_failed);
        }
}

ON_EACH_STORE(a_try_in_place_that_is_given_up_leaves_the_names_free_but_for_those_of_the_version)
{
        struct author failed = { .tag = "t", .run = "b", .names = { "x", "y", "z" } };

        author_run_to(&failed, AT_COMMIT);
        drop("t/z");
        have("t/z", "of a user");
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        manifest_forsake(store, "t", failed.writing);
        CHECK(holds("t", "a") && shows("t", "x", "a") && !has("t/y") && has("t/z"));
        author_done(&failed);
}

ON_EACH_STORE(nothing_is_taken_from_a_tag_whose_log_cannot_be_read)
{
        struct author failed = { .tag = "t", .run = "b", .names = { "x" } };
        size_t count;

        author_run_to(&failed, AT_COMMIT);
        have("t/.nebula/manifest-1.json", "damaged");
        count = count_objects("");
        manifest_forsake(store, "t", failed.writing);
        CHECK(count_objects("") == count);
        author_done(&failed);
}

/* fault (Storage): The file system is full to the last block, and versions are removed to make room.
 * result: The removal takes the blocks that it needs from the index, and makes its entries again. */
ON_EACH_STORE(a_version_is_removed_from_a_full_file_system)
{
        struct manifest manifest = { 0 };

        if (!(features & STORE_PATHS))
                return;
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        write_version((struct author){ .tag = "u", .run = "b", .names = { "x" } });
        write_version((struct author){ .tag = "v", .run = "c", .names = { "x" } });
        REQUIRE(!manifest_load(store, "t", &manifest, &error));
        fill_store(-1); /* its own entry of the index is not enough */
        CHECK(!manifest_remove(store, &manifest, &error));
        empty_store();
        CHECK(!has("t/x") && !has("t/y") && count_objects("t/") == 0 && holds("u", "b") && holds("v", "c"));
        CHECK(count_objects(".nebula/index/") == 2);
        manifest_done(&manifest);
}

TAP_MAIN(TEST(a_version_is_removed_from_a_full_file_system), TEST(a_removal_takes_all_that_is_nebulas_and_nothing_else), TEST(a_removal_takes_the_manifest_of_format_1_too), TEST(of_a_writing_in_place_that_never_ended_the_files_go_too),
         TEST(the_numbers_of_the_log_go_on_after_a_removal), TEST(after_a_removal_no_file_of_a_manifest_lies_in_place),
         TEST(a_removal_again_is_fine_and_takes_nothing_of_other_programs),
         TEST(a_version_that_was_written_again_is_not_removed_in_the_name_of_the_old_one), TEST(what_cannot_be_looked_at_is_not_removed),
         TEST(objects_of_another_user_stay), TEST(a_young_temporary_object_stays_until_a_sweep),
         TEST(an_object_goes_only_while_it_is_the_one_that_was_there_before_the_entry),
         TEST(a_removal_while_a_writer_sleeps_takes_its_files_and_the_writer_finds_out),
         TEST(a_tag_that_is_written_again_while_it_is_removed_is_whole),
         TEST(an_interrupted_removal_leaves_a_whole_version_or_none_and_is_ended_by_the_next_one),
         TEST(a_removal_that_is_ended_by_another_takes_no_users_file_in_the_versions_name),
         TEST(a_removal_whose_number_another_has_used_removes_nothing), TEST(a_try_that_is_given_up_takes_its_own_with_it_and_nothing_else),
         TEST(a_try_in_place_that_is_given_up_leaves_the_names_free_but_for_those_of_the_version),
         TEST(nothing_is_taken_from_a_tag_whose_log_cannot_be_read))
