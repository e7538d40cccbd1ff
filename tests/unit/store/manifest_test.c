/* A version in storage: loads its manifest and records, reads and checks its files, and reports the place of damage. */
#include "store/manifest_check.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_read.h"
#include "store/record.h"
#include "store/verify.h"
#include "versions.h"
#include "watched.h"

static enum nebula_status read_file(const struct manifest *manifest, const char *name, void *data)
{
        struct record_file recorded = { 0 };
        enum nebula_status status = manifest_load_file(store, manifest, name, &recorded, &error);

        if (!status)
                status = manifest_read_file(store, manifest, &recorded, data, &error);
        record_file_done(&recorded);
        return status;
}

static bool reads_back(const struct manifest *manifest, const char *name, const char *run)
{
        struct author writer = { .run = run };
        char data[FILE_BYTES], expected[FILE_BYTES];

        fill(expected, sizeof expected, &writer, name);
        return !read_file(manifest, name, data) && !memcmp(data, expected, sizeof data);
}

/* Version 1 has x and y. Version 2, of a later run, has a new x, z, and the carried-over y. */
static void write_two(struct manifest *ret_manifest)
{
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .carries = true, .names = { "x", "z" } });
        load("t", ret_manifest);
}

ON_EACH_STORE(a_version_is_loaded_as_it_was_committed)
{
        struct manifest manifest;
        const struct manifest_file *x, *y;

        CHECK(manifest_load(store, "t", &manifest, &error) == NEBULA_NOT_FOUND && strstr(error.message, "\"t\""));
        write_two(&manifest);
        CHECK(manifest.number == 2 && manifest.writing == 'b' && !strcmp(manifest.run, "b") && manifest.file_count == 3 && manifest.record_count == 2);
        x = manifest_find_file(&manifest, "x");
        y = manifest_find_file(&manifest, "y");
        CHECK(x && !manifest_file_origin(&manifest, x) && x->is_apart && y && manifest_file_origin(&manifest, y) && !y->is_apart && x->record != y->record);
        CHECK(!manifest_find_file(&manifest, "w") && !manifest_find_file(&manifest, "") && !manifest_find_file(&manifest, "zz"));
        manifest_done(&manifest);
}

/* Nothing is replaced: each reader gets one complete version, even while the other is written. */
ON_EACH_STORE(readers_have_one_of_two_versions_whole_while_the_second_is_written)
{
        struct author writer = { .tag = "t", .run = "b", .after = "a", .carries = true, .names = { "x", "z" } };
        struct manifest one;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        load("t", &one);
        while (writer.at < AT_CHECK) {
                author_step(&writer);
                CHECK(holds("t", writer.at < AT_CHECK ? "a" : "b") && !manifest_verify(store, &one, NULL, NULL, NULL, &error));
        }
        CHECK(manifest_is_gone(store, &one));
        author_run(&writer);
        CHECK(holds("t", "b"));
        author_done(&writer);
        manifest_done(&one);
}

ON_EACH_STORE(a_file_is_read_back_where_its_manifest_says)
{
        struct manifest manifest;
        char data[FILE_BYTES];

        write_two(&manifest);
        CHECK(reads_back(&manifest, "x", "b") && reads_back(&manifest, "z", "b") && reads_back(&manifest, "y", "a"));
        CHECK(read_file(&manifest, "absent", data) == NEBULA_NOT_FOUND && strstr(error.message, "absent"));
        manifest_done(&manifest);
}

ON_EACH_STORE(an_open_file_has_the_same_bytes)
{
        struct manifest manifest;
        struct record_file recorded;
        struct author writer = { .run = "b" };
        char data[FILE_BYTES], expected[FILE_BYTES], key[MANIFEST_KEY_MAX];
        bool is_direct;
        int fd;

        if (!(features & STORE_LENDS_FD))
                return;
        write_two(&manifest);
        REQUIRE(!manifest_load_file(store, &manifest, "x", &recorded, &error) && !manifest_file_key(&manifest, manifest_find_file(&manifest, "x"), key, &error));
        REQUIRE(!manifest_open_file(store, &manifest, &recorded, false, &fd, &is_direct, &error));
        fill(expected, sizeof expected, &writer, "x");
        CHECK(is_direct || (!os_read_at(fd, data, sizeof data, 0) && !memcmp(data, expected, sizeof expected)));
        os->close(fd);
        replace(key, "cut", 3);
        CHECK(manifest_open_file(store, &manifest, &recorded, false, &fd, &is_direct, &error) == NEBULA_CORRUPT && strstr(error.message, key));
        record_file_done(&recorded);
        manifest_done(&manifest);
}

#define BIG_CHUNKS 5u
#define BIG_CHUNK_BYTES 4096u

/* A file of several chunks, and a manifest with only this file. */
static void write_big(struct manifest *ret_manifest)
{
        static char data[BIG_CHUNKS * BIG_CHUNK_BYTES - 1000];
        uint64_t sums[BIG_CHUNKS];
        struct record_rank rank = { 0, 1, 2 };
        struct record_file file = { .name = "x", .size = sizeof data, .chunk_bytes = BIG_CHUNK_BYTES, .chunks = sums, .chunk_count = BIG_CHUNKS };
        struct record record = { .tag = "t", .number = 1, .world = 1, .ranks = &rank, .rank_count = 1, .files = &file, .file_count = 1 };
        struct manifest manifest = { .tag = "t", .number = 1, .writing = 1, .sequence = 1, .step = -1, .world = 1 };
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;

        for (size_t i = 0; i < sizeof data; i++)
                data[i] = (char)(i * 31 + i / 251);
        for (size_t i = 0; i < BIG_CHUNKS; i++)
                sums[i] = sum_crc64(0, data + i * BIG_CHUNK_BYTES, i + 1 < BIG_CHUNKS ? BIG_CHUNK_BYTES : BIG_CHUNK_BYTES - 1000);
        replace("t/x", data, sizeof data);
        writing_name("", "", 1, 0, record.writing);
        if (record_format(&record, &text, &size, NULL) || record_key("t", record.writing, 0, key, NULL))
                abort();
        replace(key, text, size);
        if (manifest_reserve(&manifest, 1, 1, NULL) ||
            manifest_add_file(&manifest, &(struct manifest_file){ .name = "x", .size = sizeof data }, NULL))
                abort();
        manifest.records[manifest.record_count++] = (struct manifest_record){ .size = size, .crc64 = sum_crc64(0, text, size), .sequence = 1 };
        strcpy(manifest.records[0].writing, record.writing);
        free(text);
        if (manifest_format(&manifest, &text, &size, NULL) || tag_log_create(store, "t", 1, text, size, NULL))
                abort();
        free(text);
        manifest_done(&manifest);
        load("t", ret_manifest);
}

ON_EACH_STORE(a_flipped_byte_is_named_with_its_file_and_offset)
{
        struct manifest manifest;
        char data[BIG_CHUNKS * BIG_CHUNK_BYTES];

        write_big(&manifest);
        CHECK(!read_file(&manifest, "x", data) && !manifest_verify(store, &manifest, NULL, NULL, NULL, &error));
        flip("t/x", 2 * BIG_CHUNK_BYTES + 9);
        CHECK(read_file(&manifest, "x", data) == NEBULA_CORRUPT && strstr(error.message, "t/x") && strstr(error.message, "8192"));
        flip("t/x", 4 * BIG_CHUNK_BYTES);
        CHECK(manifest_verify(store, &manifest, NULL, NULL, NULL, &error) == NEBULA_CORRUPT && strstr(error.message, "8192")); /* the first */
        manifest_done(&manifest);
}

ON_EACH_STORE(a_file_of_another_length_is_found)
{
        struct manifest manifest;
        const struct manifest_file *file;
        char data[BIG_CHUNKS * BIG_CHUNK_BYTES] = { 0 };

        write_big(&manifest);
        file = &manifest.files[0];
        REQUIRE(!read_file(&manifest, "x", data));
        CHECK(!manifest_check_present(store, &manifest, &error));
        replace("t/x", data, file->size - 1);
        CHECK(read_file(&manifest, "x", data) == NEBULA_CORRUPT);
        CHECK(manifest_check_present(store, &manifest, &error) == NEBULA_CORRUPT && manifest_check_all(store, &manifest, &error) == NEBULA_CORRUPT);
        CHECK(manifest_verify(store, &manifest, NULL, NULL, NULL, &error) == NEBULA_CORRUPT && strstr(error.message, "cut off"));
        replace("t/x", data, file->size + 1);
        CHECK(manifest_verify(store, &manifest, NULL, NULL, NULL, &error) == NEBULA_CORRUPT && manifest_check_present(store, &manifest, &error) == NEBULA_CORRUPT);
        drop("t/x");
        CHECK(manifest_verify(store, &manifest, NULL, NULL, NULL, &error) == NEBULA_NOT_FOUND && read_file(&manifest, "x", data) == NEBULA_NOT_FOUND);
        CHECK(manifest_check_present(store, &manifest, &error) == NEBULA_NOT_FOUND && strstr(error.message, "\"x\""));
        manifest_done(&manifest);
}

struct verdicts {
        size_t good, bad;
        char last_bad[MANIFEST_NAME_MAX];
};

static void count_verdict(void *argument, const struct manifest_file *file, enum nebula_status status, const struct nebula_error *failure)
{
        struct verdicts *verdicts = argument;

        (void)failure;
        if (status)
                snprintf(verdicts->last_bad, sizeof verdicts->last_bad, "%s", file->name);
        if (status)
                verdicts->bad++;
        else
                verdicts->good++;
}

static struct verdicts verify(const struct manifest *manifest, enum nebula_status expected)
{
        struct verdicts verdicts = { 0 };

        CHECK(manifest_verify(store, manifest, NULL, count_verdict, &verdicts, &error) == expected);
        return verdicts;
}

ON_EACH_STORE(verify_goes_on_after_a_bad_file_and_a_bad_record)
{
        struct manifest manifest;
        struct verdicts verdicts;
        char key[MANIFEST_KEY_MAX];

        write_two(&manifest);
        verdicts = verify(&manifest, NEBULA_OK);
        CHECK(verdicts.good == 3 && !verdicts.bad);
        REQUIRE(!manifest_file_key(&manifest, manifest_find_file(&manifest, "x"), key, &error));
        flip(key, 1);
        verdicts = verify(&manifest, NEBULA_CORRUPT);
        CHECK(verdicts.good == 2 && verdicts.bad == 1 && !strcmp(verdicts.last_bad, "x"));
        drop(key);
        verdicts = verify(&manifest, NEBULA_NOT_FOUND);
        CHECK(verdicts.good == 2 && verdicts.bad == 1);
        REQUIRE(!record_key("t", manifest.records[manifest_find_file(&manifest, "y")->record].writing, 0, key, &error));
        flip(key, 40);
        verdicts = verify(&manifest, NEBULA_NOT_FOUND);
        CHECK(verdicts.good == 1 && verdicts.bad == 2 && !strcmp(verdicts.last_bad, "y"));
        drop(key);
        verdicts = verify(&manifest, NEBULA_NOT_FOUND);
        CHECK(verdicts.good == 1 && verdicts.bad == 2);
        manifest_done(&manifest);
}

ON_EACH_STORE(a_record_is_the_one_that_the_manifest_was_made_from)
{
        struct author other = { .tag = "t", .run = "b", .names = { "x" } };
        struct manifest manifest;
        struct record record;
        char key[MANIFEST_KEY_MAX], other_key[MANIFEST_KEY_MAX];

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        load("t", &manifest);
        REQUIRE(!record_key("t", manifest.records[0].writing, 0, key, &error));
        REQUIRE(!manifest_load_record(store, &manifest, 0, &record, &error));
        CHECK(!strcmp(record.run, "a") && record.file_count == 1);
        record_done(&record);
        begin_anew();
        write_torn(other); /* sound in itself */
        writing_name("", "b", 'b', 0, other.writing);
        REQUIRE(!record_key("t", other.writing, 0, other_key, &error));
        copy_object(other_key, key);
        CHECK(manifest_load_record(store, &manifest, 0, &record, &error) == NEBULA_CORRUPT && strstr(error.message, key));
        have(key, "short");
        CHECK(manifest_load_record(store, &manifest, 0, &record, &error) == NEBULA_CORRUPT && strstr(error.message, "bytes"));
        drop(key);
        CHECK(manifest_load_record(store, &manifest, 0, &record, &error) == NEBULA_NOT_FOUND);
        manifest_done(&manifest);
}

/* A hostile manifest may name an existing record, with its checksum, but with another writing or rank. */
ON_EACH_STORE(a_record_at_a_place_that_is_not_its_own_is_refused)
{
        struct manifest manifest;
        struct manifest_record *entry;
        struct record record;
        char key[MANIFEST_KEY_MAX], other_key[MANIFEST_KEY_MAX];

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        load("t", &manifest);
        entry = &manifest.records[0];
        REQUIRE(!record_key("t", entry->writing, 0, key, &error));
        entry->rank = 1;
        REQUIRE(!record_key("t", entry->writing, 1, other_key, &error));
        copy_object(key, other_key);
        CHECK(manifest_load_record(store, &manifest, 0, &record, &error) == NEBULA_CORRUPT && strstr(error.message, "its name says otherwise"));
        entry->rank = 0;
        writing_name("", "other", 1, 0, entry->writing);
        REQUIRE(!record_key("t", entry->writing, 0, other_key, &error));
        copy_object(key, other_key);
        CHECK(manifest_load_record(store, &manifest, 0, &record, &error) == NEBULA_CORRUPT);
        writing_name("", "a", 'a', 0, entry->writing);
        strcpy(manifest.tag, "u");
        REQUIRE(!record_key("u", entry->writing, 0, other_key, &error));
        copy_object(key, other_key);
        CHECK(manifest_load_record(store, &manifest, 0, &record, &error) == NEBULA_CORRUPT);
        manifest_done(&manifest);
}

ON_EACH_STORE(a_record_gives_each_file_once_in_any_order_and_only_as_the_manifest_has_it)
{
        struct manifest manifest;
        struct manifest_file wrong;
        struct record_file taken;
        struct record record;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "c", "a", "b" } });
        load("t", &manifest);
        REQUIRE(!manifest_load_record(store, &manifest, 0, &record, &error));
        for (int i = 0; i < 3; i++) {
                wrong = *manifest_find_file(&manifest, "b");
                wrong.size += i == 0;
                wrong.rank += i == 1;
                wrong.is_apart ^= i == 2;
                CHECK(record_take_file(&record, &wrong, &taken, &error) == NEBULA_CORRUPT && strstr(error.message, "\"b\""));
        }
        for (const char *name = "bac"; *name; name++) {
                const struct manifest_file *file = manifest_find_file(&manifest, (char[]){ *name, 0 });

                REQUIRE(!record_take_file(&record, file, &taken, &error));
                CHECK(taken.name[0] == *name && taken.chunk_count == 1);
                record_file_done(&taken);
                CHECK(record_take_file(&record, file, &taken, &error) == NEBULA_CORRUPT);
        }
        wrong.name = "d";
        CHECK(record_take_file(&record, &wrong, &taken, &error) == NEBULA_CORRUPT && strstr(error.message, "does not hold \"d\""));
        record_done(&record);
        manifest_done(&manifest);
}

ON_EACH_STORE(a_version_is_gone_if_its_tag_holds_another_or_none)
{
        struct manifest one, two;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        load("t", &one);
        CHECK(!manifest_is_gone(store, &one));
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x" } });
        load("t", &two);
        CHECK(manifest_is_gone(store, &one) && !manifest_is_gone(store, &two));
        watched_begin(store);
        watched_fail(PROGRAM_DIES, 1); /* storage does not tell */
        CHECK(!manifest_is_gone(store, &one));
        watched_end(store);
        flip("t/.nebula/manifest-2.json", 30);
        CHECK(!manifest_is_gone(store, &two)); /* it is damaged */
        drop("t/.nebula/manifest-2.json");
        CHECK(manifest_is_gone(store, &two));
        manifest_done(&one);
        manifest_done(&two);
}

/* A program replaces the file, as torch.save does. If the bytes are shared, the old file still has them. */
ON_EACH_STORE(what_another_program_puts_over_a_view_is_no_damage)
{
        struct manifest manifest;

        write_two(&manifest);
        CHECK(shows("t", "x", "b") && shows("t", "z", "b") && shows("t", "y", "a"));
        drop("t/x");
        have("t/x", "another checkpoint");
        drop("t/z");
        CHECK(reads_back(&manifest, "x", "b") && reads_back(&manifest, "z", "b") && holds("t", "b"));
        CHECK(!manifest_check_all(store, &manifest, &error) && !manifest_check_present(store, &manifest, &error));
        manifest_done(&manifest);
}

/* ---- the last look ---- */

ON_EACH_STORE(a_durable_version_is_checked_by_one_listing)
{
        struct manifest manifest;

        write_two(&manifest);
        watched_begin(store);
        CHECK(!manifest_check_present(store, &manifest, &error));
        CHECK(!atomic_load(&watched.of_kind[CALL_STAT]) && !atomic_load(&watched.of_kind[CALL_GET]));
        watched_end(store);
        CHECK(!manifest_check_all(store, &manifest, &error));
        manifest_done(&manifest);
}

ON_EACH_STORE(a_missing_record_or_file_is_named)
{
        struct manifest manifest;
        char key[MANIFEST_KEY_MAX];

        write_two(&manifest);
        for (size_t i = 0; i < manifest.record_count; i++) {
                size_t size;
                char *text;

                REQUIRE(!record_key("t", manifest.records[i].writing, manifest.records[i].rank, key, &error));
                text = bytes_of(key, &size);
                drop(key);
                CHECK(manifest_check_present(store, &manifest, &error) == NEBULA_NOT_FOUND && strstr(error.message, key));
                CHECK(manifest_check_all(store, &manifest, &error) == NEBULA_NOT_FOUND);
                replace(key, text, size - 1);
                CHECK(manifest_check_present(store, &manifest, &error) == NEBULA_CORRUPT && manifest_check_all(store, &manifest, &error) == NEBULA_CORRUPT);
                replace(key, text, size);
                free(text);
        }
        CHECK(!manifest_check_present(store, &manifest, &error));
        for (size_t i = 0; i < manifest.file_count; i++) {
                REQUIRE(!manifest_file_key(&manifest, &manifest.files[i], key, &error));
                copy_object(key, "aside");
                drop(key);
                CHECK(manifest_check_present(store, &manifest, &error) == NEBULA_NOT_FOUND && strstr(error.message, manifest.files[i].name));
                CHECK(manifest_check_all(store, &manifest, &error) == NEBULA_NOT_FOUND);
                copy_object("aside", key);
        }
        CHECK(!manifest_check_present(store, &manifest, &error));
        manifest_done(&manifest);
}

ON_EACH_STORE(a_version_that_is_not_the_newest_entry_is_not_durable)
{
        struct manifest one;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        load("t", &one);
        have("t/.nebula/manifest-2.json", "any"); /* sound or not */
        CHECK(!manifest_check_present(store, &one, &error) && manifest_check_all(store, &one, &error) == NEBULA_NOT_FOUND);
        drop("t/.nebula/manifest-2.json");
        CHECK(!manifest_check_all(store, &one, &error) && !tag_log_set_removed(store, "t", 1, &error));
        CHECK(manifest_check_all(store, &one, &error) == NEBULA_NOT_FOUND); /* its entry is dead */
        manifest_done(&one);
}

ON_EACH_STORE(a_sweep_that_may_have_listed_the_records_is_waited_for)
{
        struct manifest manifest;

        if (features & STORE_PATHS) { /* mem counts in seconds, and tests do not wait that long */
                have("t/.nebula/sweep-0000000000000001.json", "{}"); /* begun before the records, so its listing does not contain them */
                os->sleep_ms(30);
        }
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x" } });
        load("t", &manifest);
        CHECK(!manifest_check_all(store, &manifest, &error));
        have("t/.nebula/sweep-0000000000000002.json", "{}");
        CHECK(manifest_check_all(store, &manifest, &error) == NEBULA_BUSY && strstr(error.message, "sweep-0000000000000002"));
        CHECK(!manifest_check_present(store, &manifest, &error));
        drop("t/.nebula/sweep-0000000000000002.json");
        CHECK(!manifest_check_all(store, &manifest, &error));
        manifest_done(&manifest);
}

/* If storage fails, no version is called present or durable. */
ON_EACH_STORE(a_failure_of_storage_is_no_answer_of_a_check)
{
        struct manifest manifest;

        write_two(&manifest);
        for (int all = 0; all <= 1; all++) {
                bool has_failed = true;

                for (uint64_t k = 1; has_failed; k++) {
                        watched_begin(store);
                        watched_fail(CALL_FAILS, k);
                        has_failed = (all ? manifest_check_all : manifest_check_present)(store, &manifest, &error);
                        CHECK(has_failed == (atomic_load(&watched.calls) >= k) && (!has_failed || error.status == NEBULA_STORAGE));
                        watched_end(store);
                }
        }
        manifest_done(&manifest);
}

TAP_MAIN(TEST(a_version_is_loaded_as_it_was_committed), TEST(readers_have_one_of_two_versions_whole_while_the_second_is_written),
         TEST(a_file_is_read_back_where_its_manifest_says), TEST(an_open_file_has_the_same_bytes), TEST(a_flipped_byte_is_named_with_its_file_and_offset),
         TEST(a_file_of_another_length_is_found), TEST(verify_goes_on_after_a_bad_file_and_a_bad_record),
         TEST(a_record_is_the_one_that_the_manifest_was_made_from), TEST(a_record_at_a_place_that_is_not_its_own_is_refused),
         TEST(a_record_gives_each_file_once_in_any_order_and_only_as_the_manifest_has_it), TEST(a_version_is_gone_if_its_tag_holds_another_or_none),
         TEST(what_another_program_puts_over_a_view_is_no_damage), TEST(a_durable_version_is_checked_by_one_listing),
         TEST(a_missing_record_or_file_is_named), TEST(a_version_that_is_not_the_newest_entry_is_not_durable),
         TEST(a_sweep_that_may_have_listed_the_records_is_waited_for), TEST(a_failure_of_storage_is_no_answer_of_a_check))
