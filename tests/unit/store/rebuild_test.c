/* Manifests that are damaged or missing, and are made again from records, the index and memory. */
/* fault: as test_a_damaged_or_missing_manifest_is_made_again_from_its_records */
#include <errno.h>

#include "store/index.h"
#include "store/rebuild.h"
#include "store/thin.h"
#include "versions.h"

static struct author two_files(const char *run, const char *after)
{
        return (struct author){ .tag = "t", .run = run, .after = after, .names = { "x", "y" } };
}

static void drop_index(void)
{
        struct store_list list;

        if (store_list_all(store, ".nebula/index/", true, &list, NULL))
                abort();
        for (size_t i = 0; i < list.count; i++)
                drop(list.entries[i].key);
        store_list_done(&list);
}

/* The index has one entry of the tag, and it is that of its manifest. */
static bool is_at_rest(const char *tag)
{
        struct manifest manifest, row = { 0 };
        struct index index;
        bool result;

        load(tag, &manifest);
        if (index_load(store, &index, NULL))
                abort();
        result = index_find(&index, tag, &row) && row.number == manifest.number && row.sequence == manifest.sequence;
        index_done(&index);
        manifest_done(&row);
        manifest_done(&manifest);
        return result;
}

static enum nebula_status rebuild(const struct manifest *known)
{
        error = (struct nebula_error){ 0 };
        return rebuild_manifest(store, "t", known, true, &error);
}

ON_EACH_STORE(a_damaged_manifest_is_made_again_as_the_next_entry)
{
        struct manifest before, now;

        write_version(two_files("a", NULL));
        load("t", &before);
        flip("t/.nebula/manifest-1.json", 40);
        CHECK(!rebuild_is_lost(store, "t") && !rebuild(NULL) && holds("t", "a") && is_at_rest("t"));
        load("t", &now);
        CHECK(now.number == 2 && now.sequence == before.sequence && now.writing == before.writing && now.step == before.step && now.world == before.world);
        CHECK(!has("t/.nebula/manifest-1.json") && count_objects(".nebula/index/") == 1);
        manifest_done(&before);
        manifest_done(&now);
        replace("t/.nebula/manifest-2.json", "", 0);
        CHECK(!rebuild(NULL) && holds("t", "a") && is_at_rest("t") && has("t/.nebula/manifest-3.json"));
        CHECK(rebuild(NULL) == NEBULA_BUSY); /* it is sound */
        CHECK(!remove_version("t") && holds_nothing("t") && !count_objects("t/"));
}

ON_EACH_STORE(a_missing_manifest_takes_its_place_again_byte_by_byte)
{
        size_t size, now;
        char *text, *again;

        write_version(two_files("a", NULL));
        write_version(two_files("b", "a")); /* its files lie apart */
        text = bytes_of("t/.nebula/manifest-2.json", &size);
        drop("t/.nebula/manifest-2.json");
        CHECK(holds_nothing("t") && rebuild_is_lost(store, "t") && !rebuild(NULL) && holds("t", "b") && is_at_rest("t"));
        again = bytes_of("t/.nebula/manifest-2.json", &now);
        CHECK(again && now == size && !memcmp(text, again, size));
        free(text);
        free(again);
        CHECK(!rebuild_is_lost(store, "t") && shows("t", "x", "b"));
}

ON_EACH_STORE(a_removed_version_is_not_lost_and_does_not_come_back)
{
        write_version(two_files("a", NULL));
        CHECK(!remove_version("t") && !rebuild_is_lost(store, "t") && rebuild(NULL) == NEBULA_NOT_FOUND && holds_nothing("t"));
        CHECK(rebuild_manifest(store, "never", NULL, true, &error) == NEBULA_NOT_FOUND);
}

ON_EACH_STORE(a_thinned_version_stays_thin)
{
        struct manifest manifest, now = { 0 };
        uint64_t bytes;

        write_version(two_files("a", NULL));
        load("t", &manifest);
        CHECK(!thin_version(store, &manifest, "y", &now, &bytes, &error));
        flip("t/.nebula/manifest-2.json", 40);
        CHECK(!rebuild(NULL) && holds("t", "a") && is_at_rest("t"));
        manifest_done(&manifest);
        manifest_done(&now);
        load("t", &manifest);
        CHECK(manifest.file_count == 1 && thin_has(&manifest, "y") && !manifest_find_file(&manifest, "y"));
        manifest_done(&manifest);
}

static bool refuses(const struct manifest *known, const char *why)
{
        enum nebula_status status = rebuild(known);

        if (status != NEBULA_CORRUPT || !strstr(error.message, why))
                printf("# %d: %s\n", status, error.message);
        return status == NEBULA_CORRUPT && strstr(error.message, why) && strstr(error.message, "t/.nebula/manifest-") && strstr(error.message, "--from");
}

/* Without the index, memory says which version it was. */
ON_EACH_STORE(nothing_is_written_unless_it_is_proven_which_version_it_was)
{
        struct manifest known;
        size_t size, now;
        char *text, *kept;

        write_version(two_files("a", NULL));
        load("t", &known);
        flip("t/.nebula/manifest-1.json", 40);
        text = bytes_of("t/.nebula/manifest-1.json", &size);
        drop_index();
        CHECK(refuses(NULL, "neither the index nor the memory"));
        kept = bytes_of("t/.nebula/manifest-1.json", &now);
        CHECK(kept && now == size && !memcmp(text, kept, size) && count_objects("t/.nebula/manifest-") == 1);
        free(text);
        free(kept);
        known.files[0].size++;
        CHECK(refuses(&known, "memory has a file"));
        known.files[0].size--;
        known.world++;
        CHECK(refuses(&known, "a record of it is missing"));
        known.world--;
        CHECK(!rebuild(&known) && holds("t", "a") && is_at_rest("t"));
        manifest_done(&known);
}

/* A copy in another node's memory may be of a version that was never written. */
ON_EACH_STORE(memory_that_does_not_know_whether_it_was_durable_needs_a_sign_in_the_damaged_manifest)
{
        struct manifest known;

        write_version(two_files("a", NULL));
        load("t", &known);
        flip("t/.nebula/manifest-1.json", 40);
        drop_index();
        CHECK(!rebuild_manifest(store, "t", &known, false, &error) && holds("t", "a"));
        replace("t/.nebula/manifest-2.json", "rot", 3);
        drop_index();
        CHECK(rebuild_manifest(store, "t", &known, false, &error) == NEBULA_CORRUPT && count_objects("t/.nebula/manifest-") == 1);
        manifest_done(&known);
}

/* Another node's agent, which still has the version in memory, does not know of its removal. */
ON_EACH_STORE(a_removal_that_was_interrupted_and_whose_entry_is_damaged_is_not_taken_back)
{
        struct manifest known;

        write_version(two_files("a", NULL));
        load("t", &known);
        CHECK(!put("t/.nebula/manifest-2.json", "{\"kind\": \"remo", STORE_ALWAYS));
        drop_index();
        CHECK(refuses(&known, "a record of it is missing") && count_objects("t/.nebula/manifest-") == 2);
        manifest_done(&known);
}

ON_EACH_STORE(memory_of_another_version_does_not_count)
{
        struct manifest known;

        write_version(two_files("a", NULL));
        load("t", &known);
        write_version(two_files("b", "a"));
        flip("t/.nebula/manifest-2.json", 40);
        CHECK(!rebuild(&known) && holds("t", "b"));
        flip("t/.nebula/manifest-3.json", 40);
        drop_index();
        CHECK(rebuild(&known) == NEBULA_CORRUPT);
        manifest_done(&known);
}

/* Two runs began the entry, and one of them made it. */
ON_EACH_STORE(without_the_index_a_record_of_another_run_leaves_it_open)
{
        struct manifest known;

        write_version(two_files("a", NULL));
        write_torn(two_files("c", "a"));
        write_version(two_files("b", "a"));
        load("t", &known);
        flip("t/.nebula/manifest-2.json", 40);
        drop_index();
        CHECK(refuses(&known, "two runs"));
        manifest_done(&known);
}

ON_EACH_STORE(a_version_whose_record_is_damaged_or_that_took_files_over_is_refused)
{
        struct manifest manifest;
        char key[MANIFEST_KEY_MAX];

        write_version(two_files("a", NULL));
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .carries = true, .names = { "x" } });
        flip("t/.nebula/manifest-2.json", 40);
        CHECK(refuses(NULL, "do not name the files"));
        begin_anew();
        write_version(two_files("a", NULL));
        load("t", &manifest);
        if (record_key("t", manifest.records[0].writing, 0, key, NULL))
                abort();
        manifest_done(&manifest);
        flip(key, 40);
        flip("t/.nebula/manifest-1.json", 40);
        CHECK(refuses(NULL, "do not name the files"));
}

/* A record as a copy of the version would have it: its name does not follow from the run. */
static void put_copied_record(uint32_t attempt)
{
        struct record_rank ranks[] = { { 0, 1, 2 } };
        struct record record = { .tag = "t", .run = "a", .number = 1, .world = 1, .persisted = 3, .ranks = ranks, .rank_count = 1 };
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;

        writing_name("", "copy of a", 1, attempt, record.writing);
        if (record_key("t", record.writing, 0, key, NULL) || record_format(&record, &text, &size, NULL))
                abort();
        replace(key, text, size);
        free(text);
}

ON_EACH_STORE(of_two_records_of_a_rank_that_copies_have_made_none_is_taken)
{
        struct manifest manifest;
        char key[MANIFEST_KEY_MAX];

        write_version(two_files("a", NULL));
        load("t", &manifest);
        if (record_key("t", manifest.records[0].writing, 0, key, NULL))
                abort();
        manifest_done(&manifest);
        flip("t/.nebula/manifest-1.json", 40);
        drop(key);
        put_copied_record(1);
        CHECK(refuses(NULL, "do not name the files"));
        put_copied_record(2);
        CHECK(refuses(NULL, "the same rank"));
}

static const struct store_ops *plain;
static int calls_left;
static struct author rival;

static bool is_over(void)
{
        return calls_left-- <= 0;
}

static enum nebula_status killed_put(struct store *self, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                     const struct store_stamp *stamp, struct store_stamp *ret_stamp, struct nebula_error *failure)
{
        return is_over() ? error_set(failure, NEBULA_STORAGE, EIO, "killed") : plain->put(self, key, data, size, condition, stamp, ret_stamp, failure);
}

static enum nebula_status killed_remove(struct store *self, const struct store_victim *victims, size_t count, struct nebula_error *failure)
{
        return is_over() ? error_set(failure, NEBULA_STORAGE, EIO, "killed") : plain->remove(self, victims, count, failure);
}

/* From the k-th change on, nothing reaches storage any more. */
ON_EACH_STORE(a_rebuild_that_was_killed_is_done_by_the_next_one)
{
        for (int is_missing = 0; is_missing < 2; is_missing++) {
                int changes = 0;

                do {
                        struct store_ops ops = *store->ops;

                        begin_anew();
                        write_version(two_files("a", NULL));
                        write_version(two_files("b", "a"));
                        flip("t/.nebula/manifest-2.json", 40);
                        if (is_missing)
                                drop("t/.nebula/manifest-2.json");
                        ops = *store->ops;
                        plain = store->ops;
                        ops.put = killed_put;
                        ops.remove = killed_remove;
                        calls_left = changes++;
                        store->ops = &ops;
                        rebuild(NULL);
                        store->ops = plain;
                        rebuild(NULL);
                        CHECK(holds("t", "b") && shows("t", "y", "b"));
                } while (calls_left <= 0 && changes < 20);
                CHECK(changes > 2 && changes < 20);
        }
}

/* Another program writes the tag before the entry is made. */
static enum nebula_status late_put(struct store *self, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                   const struct store_stamp *stamp, struct store_stamp *ret_stamp, struct nebula_error *failure)
{
        if (rival.run && strstr(key, "/manifest-")) {
                struct author writer = rival;

                rival.run = NULL;
                store->ops = plain;
                write_version(writer);
        }
        return plain->put(self, key, data, size, condition, stamp, ret_stamp, failure);
}

ON_EACH_STORE(a_version_that_comes_meanwhile_stays)
{
        for (int is_missing = 0; is_missing < 2; is_missing++) {
                struct store_ops ops;

                begin_anew();
                write_version(two_files("a", NULL));
                flip("t/.nebula/manifest-1.json", 40);
                if (is_missing)
                        drop("t/.nebula/manifest-1.json");
                ops = *store->ops;
                plain = store->ops;
                ops.put = late_put;
                rival = two_files("b", "a");
                store->ops = &ops;
                CHECK(rebuild(NULL) == NEBULA_BUSY);
                store->ops = plain;
                CHECK(holds("t", "b") && shows("t", "x", "b") && rebuild(NULL) == NEBULA_BUSY);
        }
}

TAP_MAIN(TEST(a_damaged_manifest_is_made_again_as_the_next_entry), TEST(a_missing_manifest_takes_its_place_again_byte_by_byte),
         TEST(a_removed_version_is_not_lost_and_does_not_come_back), TEST(a_thinned_version_stays_thin),
         TEST(nothing_is_written_unless_it_is_proven_which_version_it_was), TEST(memory_that_does_not_know_whether_it_was_durable_needs_a_sign_in_the_damaged_manifest),
         TEST(a_removal_that_was_interrupted_and_whose_entry_is_damaged_is_not_taken_back), TEST(memory_of_another_version_does_not_count),
         TEST(without_the_index_a_record_of_another_run_leaves_it_open),
         TEST(a_version_whose_record_is_damaged_or_that_took_files_over_is_refused), TEST(of_two_records_of_a_rank_that_copies_have_made_none_is_taken),
         TEST(a_rebuild_that_was_killed_is_done_by_the_next_one),
         TEST(a_version_that_comes_meanwhile_stays))
