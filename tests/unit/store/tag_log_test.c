/* The log of one tag: entries are created and never replaced, the largest number decides, and numbers continue after a removal. */
#include "golden.h"
#include "store/manifest_load.h"
#include "store/sweep.h"
#include "versions.h"
#include "watched.h"

static enum nebula_status create(const char *tag, uint64_t number, const char *text)
{
        return tag_log_create(store, tag, number, text, strlen(text), &error);
}

static uint64_t newest(const char *tag)
{
        uint64_t number = UINT64_MAX;

        CHECK(!tag_log_number(store, tag, &number, &error));
        return number;
}

static uint64_t next(const char *tag, uint64_t after)
{
        uint64_t number = UINT64_MAX;

        CHECK(!tag_log_next(store, tag, after, &number, &error));
        return number;
}

/* The newest entry is not sound, and the message contains both texts. */
static bool is_unsound(const char *tag, const char *one, const char *other)
{
        struct tag_log log = { 0 };
        struct manifest manifest;
        bool result = !tag_log_head(store, tag, &log, &error) && log.is_unsound && !log.is_removal && log.unsound.status == NEBULA_CORRUPT &&
                      strstr(log.unsound.message, one) && strstr(log.unsound.message, other);

        if (!result)
                printf("# \"%s\" has entry %u: %s\n", tag, (unsigned)log.number, log.unsound.message);
        tag_log_done(&log);
        return result && manifest_load(store, tag, &manifest, &error) == NEBULA_CORRUPT && strstr(error.message, one);
}

static void enter_removal(const char *tag, uint64_t number)
{
        struct removal removal = { .number = number };
        char *text;
        size_t size;

        strcpy(removal.tag, tag);
        if (removal_format(&removal, &text, &size, NULL) || tag_log_create(store, tag, number, text, size, NULL))
                abort();
        free(text);
}

ON_EACH_STORE(a_log_is_empty_until_its_first_entry)
{
        struct tag_log log = { .number = 7, .is_removal = true };

        CHECK(newest("t") == 0 && next("t", 0) == 1);
        REQUIRE(!tag_log_head(store, "t", &log, &error));
        CHECK(!log.number && !log.is_removal && !log.is_unsound && !log.manifest.sequence);
        CHECK(tag_log_entry(store, "t", 1, &log, &error) == NEBULA_NOT_FOUND);
        tag_log_done(&log);
        CHECK(holds_nothing("t"));
}

ON_EACH_STORE(an_entry_is_created_and_never_replaced)
{
        size_t size;
        char *text;

        CHECK(create("t", 1, "one") == NEBULA_OK && create("t", 1, "another") == NEBULA_BUSY && create("t", 1, "one") == NEBULA_BUSY);
        text = bytes_of("t/.nebula/manifest-1.json", &size);
        CHECK(text && size == 3 && !memcmp(text, "one", 3));
        free(text);
        CHECK(create("u", 1, "of another tag") == NEBULA_OK && create("t/u", 1, "x") == NEBULA_OK && has("t%2Fu/.nebula/manifest-1.json"));
}

ON_EACH_STORE(the_largest_number_decides)
{
        struct tag_log log;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        REQUIRE(!tag_log_head(store, "t", &log, &error));
        CHECK(log.number == 1 && !log.is_removal && !log.is_unsound && !strcmp(log.manifest.run, "a") && log.manifest.number == 1);
        tag_log_done(&log);
        enter_removal("t", 9);
        enter_removal("t", 10); /* by number, not by the bytes of the name */
        REQUIRE(!tag_log_head(store, "t", &log, &error));
        CHECK(log.number == 10 && log.is_removal && !log.is_unsound && newest("t") == 10 && next("t", 10) == 11);
        tag_log_done(&log);
        CHECK(holds_nothing("t"));
        REQUIRE(!tag_log_entry(store, "t", 1, &log, &error));
        CHECK(log.number == 1 && !strcmp(log.manifest.run, "a"));
        tag_log_done(&log);
        CHECK(tag_log_entry(store, "t", 2, &log, &error) == NEBULA_NOT_FOUND);
        CHECK(!tag_log_take_back(store, "t", 10, &error) && newest("t") == 9 && !tag_log_take_back(store, "t", 10, &error));
        CHECK(!tag_log_take_back(store, "t", 9, &error) && holds("t", "a"));
}

ON_EACH_STORE(what_only_looks_like_an_entry_is_none)
{
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        have("t/.nebula/manifest-02.json", "x");
        have("t/.nebula/manifest-999999999999999999.json", "x"); /* no log gets there, and there would be no next number */
        have("t/.nebula/manifest-3.json.bak", "x");
        have("t/.nebula/manifest-4.json/x", "x");
        have("t/.nebula/manifest-.json", "x");
        CHECK(newest("t") == 1 && holds("t", "a"));
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x" } });
        CHECK(newest("t") == 2 && holds("t", "b") && has("t/.nebula/manifest-999999999999999999.json"));
}

/* A writer's error names the problem and the place. */
ON_EACH_STORE(behind_the_last_number_there_is_no_entry)
{
        struct author writer = { .tag = "t", .run = "a", .names = { "x" } };
        char *text;
        size_t size;

        have("t/.nebula/manifest-281474976710656.json", "x");
        CHECK(newest("t") == DOCUMENT_NUMBER_MAX);
        author_run_to(&writer, AT_COMMIT);
        CHECK(manifest_format(&writer.real.manifest, &text, &size, &error) == NEBULA_INVALID && strstr(error.message, "impossible number"));
        author_done(&writer);
}

/* A completed removal leaves only this number of the tag. */
ON_EACH_STORE(the_numbers_of_an_empty_log_go_on_behind_the_last_removal)
{
        uint64_t removed;

        CHECK(!tag_log_removed(store, "t", &removed, &error) && removed == 0);
        CHECK(!tag_log_set_removed(store, "t", 7, &error) && !tag_log_removed(store, "t", &removed, &error) && removed == 7);
        CHECK(has(".nebula/removed/t/7") && newest("t") == 0 && next("t", 0) == 8 && next("t", 6) == 8 && next("t", 7) == 8 && next("t", 9) == 10);
        CHECK(!tag_log_set_removed(store, "t", 12, &error) && next("t", 0) == 13 && !has(".nebula/removed/t/7"));
        CHECK(!tag_log_set_removed(store, "t", 5, &error) && next("t", 0) == 13); /* a removal that slept completes after a later one */
        CHECK(next("u", 0) == 1 && !tag_log_removed(store, "u", &removed, &error) && removed == 0);
        CHECK(!tag_log_sweep(store, INT64_C(3600000000000), &error) && next("t", 0) == 13);
        CHECK(!tag_log_sweep(store, INT64_C(-3600000000000), &error) && next("t", 0) == 1 && !has(".nebula/removed/t/12")); /* all are older than in an hour */
        have(".nebula/removed/u/x", "x");
        have(".nebula/removed/u/-3", "x");
        have(".nebula/removed/u/3x", "x");
        have(".nebula/removed/u/999999999999999999", "x");
        have(".nebula/removed/u/281474976710657", "x");
        CHECK(next("u", 0) == 1);
}

ON_EACH_STORE(an_entry_at_or_below_the_last_removal_is_dead)
{
        struct author writer = { .tag = "t", .run = "a", .names = { "x" } };

        author_run_to(&writer, AT_COMMIT);
        CHECK(writer.real.manifest.number == 1 && !tag_log_set_removed(store, "t", 2, &error)); /* another version was written and removed */
        author_step(&writer);
        CHECK(writer.at == AT_CHECK && writer.real.manifest.number == 1);
        author_step(&writer);
        CHECK(!writer.is_durable && newest("t") == 0); /* taken back */
        author_run(&writer);
        CHECK(writer.is_durable && writer.real.manifest.number == 3 && holds("t", "a"));
        author_done(&writer);
}

ON_EACH_STORE(an_entry_that_is_damaged_is_told_with_its_place)
{
        char *text = calloc(1, DOCUMENT_TEXT_MAX + 2);

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        flip("t/.nebula/manifest-1.json", 30);
        CHECK(is_unsound("t", "t/.nebula/manifest-1.json", "damaged"));
        have("cut/.nebula/manifest-3.json", "{\"nebula\"");
        CHECK(is_unsound("cut", "cut/.nebula/manifest-3.json", "cut off"));
        have("removed/.nebula/manifest-1.json", "{\"nebula\":\"removal\",\"version\":\"2.0\",\"tag\":\"removed\",\"number\":1,\"crc64\":\"0123456789abcdef\"}\n");
        CHECK(is_unsound("removed", "manifest-1.json", "damaged"));
        memset(text, ' ', DOCUMENT_TEXT_MAX + 1);
        have("long/.nebula/manifest-1.json", text);
        CHECK(is_unsound("long", "long/.nebula/manifest-1.json", ""));
        free(text);
        write_version((struct author){ .tag = "t", .run = "b", .names = { "x" } }); /* the next save writes the tag anew */
        CHECK(holds("t", "b") && newest("t") == 2);
}

ON_EACH_STORE(an_entry_of_another_place_is_refused_and_says_why)
{
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        copy_object("t/.nebula/manifest-1.json", "copy/.nebula/manifest-1.json");
        CHECK(is_unsound("copy", "belongs to \"t\"", "renamed or copied"));
        copy_object("t/.nebula/manifest-1.json", "t/.nebula/manifest-2.json");
        CHECK(is_unsound("t", "has number 1", "renamed or copied"));
        enter_removal("u", 1);
        copy_object("u/.nebula/manifest-1.json", "v/.nebula/manifest-1.json");
        CHECK(is_unsound("v", "belongs to \"u\"", "renamed or copied")); /* nor does a removal count for another tag */
        copy_object("u/.nebula/manifest-1.json", "u/.nebula/manifest-2.json");
        CHECK(is_unsound("u", "has number 1", ""));
}

ON_EACH_STORE(a_document_of_version_1_is_refused_with_the_version)
{
        size_t size;
        char *text = seal("{\"nebula\":\"manifest\",\"version\":\"1.0\",\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"generation\":1,\"step\":-1,\"world\":1,"
                          "\"sequence\":5,\"files\":[],\"records\":[]", &size);

        replace("t/.nebula/manifest-1.json", text, size);
        CHECK(is_unsound("t", "version 1.0", "older Nebula"));
        free(text);
}

/* The directory is no checkpoint, not free, and not debris; the error says how to write the tag. */
ON_EACH_STORE(a_directory_of_format_1_is_told_with_what_to_do)
{
        size_t swept;

        if (!(features & STORE_PATHS)) /* format 1 was written only to files */
                return;
        have("t/x", "0123456789");
        have("t/.nebula/rank-00000.json", "{}");
        have("t/.nebula/manifest.json", "{}");
        CHECK(newest("t") == 0 && is_unsound("t", "t/.nebula/manifest.json", "format 1") && is_unsound("t", "torch.load", "remove its directory .nebula"));
        CHECK(!manifest_sweep(store, ANY_AGE, &swept, &error) && swept == 0 && has("t/.nebula/rank-00000.json") && has("t/x"));
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        CHECK(holds("t", "a") && shows("t", "x", "a"));
}

static unsigned rounds;

/* The newest entry is removed after the listing, and another is made. */
static void go_on(struct store *one, enum watched_call call, const char *key)
{
        struct store_victim victim = { .key = key };
        char later[64];

        if (call != CALL_GET || !rounds)
                return;
        rounds--;
        snprintf(later, sizeof later, "t/.nebula/manifest-%u.json", 10 - rounds);
        if (watched.real->remove(one, &victim, 1, NULL) || watched.real->put(one, later, "x", 1, STORE_IF_ABSENT, NULL, NULL, NULL))
                abort();
}

ON_EACH_STORE(a_log_that_goes_on_while_it_is_read_is_read_to_its_end)
{
        struct tag_log log;

        have("t/.nebula/manifest-1.json", "x");
        watched_begin(store);
        watched.before = go_on;
        rounds = 8;
        CHECK(!tag_log_head(store, "t", &log, &error) && log.number == 10 && log.is_unsound);
        watched_end(store);
}

static void take_it_away(struct store *one, enum watched_call call, const char *key)
{
        struct store_victim victim = { .key = key };

        if (call == CALL_GET)
                watched.real->remove(one, &victim, 1, NULL);
        if (call == CALL_LIST)
                watched.real->put(one, "t/.nebula/manifest-1.json", "x", 1, STORE_ALWAYS, NULL, NULL, NULL);
}

ON_EACH_STORE(an_entry_that_is_listed_and_never_there_is_a_failure_that_passes)
{
        struct tag_log log;

        watched_begin(store);
        watched.before = take_it_away;
        CHECK(tag_log_head(store, "t", &log, &error) == NEBULA_STORAGE && store_class(&error) == STORE_LATER && strstr(error.message, "t: entry 1"));
        watched_end(store);
}

ON_EACH_STORE(a_failure_of_storage_is_told_and_is_no_state_of_the_log)
{
        struct tag_log log;
        uint64_t number;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        for (uint64_t k = 1;; k++) {
                bool has_failed;

                watched_begin(store);
                watched_fail(CALL_FAILS, k);
                has_failed = tag_log_head(store, "t", &log, &error);
                if (!has_failed)
                        tag_log_done(&log);
                CHECK(has_failed == (atomic_load(&watched.calls) >= k) && (!has_failed || (error.status == NEBULA_STORAGE && error.sys_errno == EIO)));
                watched_end(store);
                if (!has_failed)
                        break;
        }
        watched_begin(store);
        watched_fail(PROGRAM_DIES, 1);
        CHECK(tag_log_number(store, "t", &number, &error) == NEBULA_STORAGE && tag_log_next(store, "t", 0, &number, &error) == NEBULA_STORAGE);
        CHECK(tag_log_removed(store, "t", &number, &error) == NEBULA_STORAGE && tag_log_set_removed(store, "t", 1, &error) == NEBULA_STORAGE);
        CHECK(tag_log_create(store, "t", 2, "x", 1, &error) == NEBULA_STORAGE && tag_log_take_back(store, "t", 1, &error) == NEBULA_STORAGE);
        CHECK(tag_log_entry(store, "t", 1, &log, &error) == NEBULA_STORAGE);
        watched_end(store);
        CHECK(holds("t", "a"));
}

/* An entry is found although stale lists do not show it. */
static void a_list_that_is_old_hides_no_entry(void)
{
        for (uint64_t stale = 1; stale <= 8; stale++) {
                struct tag_log log;

                store = begin_mem_with(&(struct mem_faults){ .stale_writes = stale });
                features = store->ops->features(store);
                write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
                CHECK(!tag_log_head(store, "t", &log, &error) && log.number == 1 && !strcmp(log.manifest.run, "a"));
                tag_log_done(&log);
                write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x" } });
                CHECK(!tag_log_head(store, "t", &log, &error) && log.number == 2 && !strcmp(log.manifest.run, "b"));
                tag_log_done(&log);
                store_close(store);
                end_mem();
        }
}

TAP_MAIN(TEST(a_log_is_empty_until_its_first_entry), TEST(an_entry_is_created_and_never_replaced), TEST(the_largest_number_decides),
         TEST(what_only_looks_like_an_entry_is_none), TEST(behind_the_last_number_there_is_no_entry),
         TEST(the_numbers_of_an_empty_log_go_on_behind_the_last_removal), TEST(an_entry_at_or_below_the_last_removal_is_dead),
         TEST(an_entry_that_is_damaged_is_told_with_its_place), TEST(an_entry_of_another_place_is_refused_and_says_why),
         TEST(a_document_of_version_1_is_refused_with_the_version), TEST(a_directory_of_format_1_is_told_with_what_to_do),
         TEST(a_log_that_goes_on_while_it_is_read_is_read_to_its_end), TEST(an_entry_that_is_listed_and_never_there_is_a_failure_that_passes),
         TEST(a_failure_of_storage_is_told_and_is_no_state_of_the_log), TEST(a_list_that_is_old_hides_no_entry))
