/* One damaged file or record gets its bytes back, and a repair that fails leaves it as it was. */
#include "os/os_crash.h"
#include "store/repair_object.h"
#include "versions.h"

static char good[FILE_BYTES];
static struct manifest manifest;
static struct record_file recorded;
static char key[MANIFEST_KEY_MAX];

/* Writes "t" with the file "x", which lies apart if `is_apart`. */
static void begin(bool is_apart)
{
        struct author writer = { .tag = "t", .run = "a", .names = { "x" } };

        fill(good, sizeof good, &writer, "x");
        if (is_apart)
                have("t/x", "of another program");
        write_version(writer);
        manifest = (struct manifest){ 0 };
        recorded = (struct record_file){ 0 };
        if (manifest_load(store, "t", &manifest, &error) || manifest_load_file(store, &manifest, "x", &recorded, &error) ||
            manifest_file_key(&manifest, manifest_find_file(&manifest, "x"), key, &error))
                abort();
}

static void end(void)
{
        record_file_done(&recorded);
        manifest_done(&manifest);
}

static enum nebula_status repair(void)
{
        const struct repair_source source = { .data = good, .size = sizeof good };

        return repair_object(store, &manifest, key, &recorded, &source, &error);
}

static bool is_whole(void)
{
        static const struct verify_watch none;

        return !verify_file(store, key, &recorded, &none, &error);
}

ON_EACH_STORE(a_damaged_file_gets_its_bytes_back)
{
        begin(false);
        flip(key, 7);
        CHECK(!is_whole() && !repair() && is_whole());
        end();
}

/* Somebody has removed its directory, too. */
ON_EACH_STORE(a_missing_file_that_lies_apart_comes_back)
{
        begin(true);
        REQUIRE(strstr(key, "/.nebula/"));
        drop(key);
        CHECK(!repair() && is_whole());
        end();
}

static enum nebula_status repair_from(struct store *from)
{
        struct repair_source source = { .from = from };

        strcpy(source.key, "there");
        return repair_object(store, &manifest, key, &recorded, &source, &error);
}

ON_EACH_STORE(a_copy_in_another_store_gives_the_bytes)
{
        struct store *from;

        begin(false);
        store_mem_allow();
        REQUIRE(!store_open("mem://copies", &from, &error));
        REQUIRE(!from->ops->put(from, "there", good, sizeof good, STORE_ALWAYS, NULL, NULL, &error));
        flip(key, 7);
        CHECK(!repair_from(from) && is_whole());
        drop(key);
        CHECK(!repair_from(from) && is_whole());
        store_close(from);
        store_mem_forget("mem://copies");
        end();
}

static const struct store_ops *real;

static enum nebula_status has_no_room(struct store *at, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                                      struct nebula_error *failure)
{
        (void)objects;
        (void)count;
        (void)ret_upload;
        return error_set(failure, NEBULA_NO_SPACE, 0, "%s is full", at->root);
}

/* The other bytes of the file may still be of use. */
ON_EACH_STORE(storage_that_has_no_room_keeps_the_damaged_file)
{
        struct store_ops full = *store->ops;
        struct store *from;

        begin(false);
        flip(key, 7);
        store_mem_allow();
        REQUIRE(!store_open("mem://copies", &from, &error));
        REQUIRE(!from->ops->put(from, "there", good, sizeof good, STORE_ALWAYS, NULL, NULL, &error));
        real = store->ops;
        full.upload = has_no_room;
        store->ops = &full;
        repair();
        CHECK(has(key));
        repair_from(from);
        CHECK(has(key));
        store->ops = real;
        store_close(from);
        store_mem_forget("mem://copies");
        end();
}

/* fault (Storage): The power fails right after a missing file was repaired.
 * result: The file is there, with its bytes. */
static void a_repaired_file_survives_a_loss_of_power(void)
{
        char after[300];
        uint64_t at;

        store = begin_file();
        features = store->ops->features(store);
        begin(false);
        drop(key);
        REQUIRE(!os_crash_begin(kind_root));
        CHECK(!repair());
        at = os_crash_position();
        os_crash_end();
        store_close(store);
        snprintf(after, sizeof after, "%.250s-after", kind_dir);
        for (uint64_t seed = 0; seed < os_crash_seeds(20); seed++) {
                REQUIRE(!os_crash_materialise(at, seed, after));
                store = open_kind(after);
                CHECK(is_whole());
                store_close(store);
        }
        os_crash_free();
        test_dir_remove(after);
        end();
        end_file();
}

static bool has_record(void)
{
        struct record record = { 0 };
        bool is_sound = !manifest_load_record(store, &manifest, 0, &record, NULL);

        record_done(&record);
        return is_sound;
}

/* The key of the only record, and its bytes, which the caller frees. */
static char *take_record(char ret_key[MANIFEST_KEY_MAX], size_t *ret_size)
{
        if (record_key("t", manifest.records[0].writing, manifest.records[0].rank, ret_key, &error))
                abort();
        return bytes_of(ret_key, ret_size);
}

ON_EACH_STORE(a_record_gets_the_bytes_that_its_manifest_names_and_no_others)
{
        char at[MANIFEST_KEY_MAX], *text;
        size_t size;

        begin(false);
        text = take_record(at, &size);
        flip(at, 40);
        CHECK(!has_record() && !repair_record(store, &manifest, 0, text, size, &error) && has_record());
        drop(at);
        text[40] ^= 1;
        CHECK(repair_record(store, &manifest, 0, text, size, &error) == NEBULA_INVALID && !has(at));
        text[40] ^= 1;
        CHECK(repair_record(store, &manifest, 0, text, size - 1, &error) == NEBULA_INVALID && !has(at));
        CHECK(!repair_record(store, &manifest, 0, text, size, &error) && has_record());
        free(text);
        end();
}

ON_EACH_STORE(a_record_of_a_version_that_was_removed_or_written_again_does_not_come_back)
{
        char at[MANIFEST_KEY_MAX], *text;
        size_t size;

        begin(false);
        text = take_record(at, &size);
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x" } });
        store_remove_one(store, at, NULL);
        CHECK(repair_record(store, &manifest, 0, text, size, &error) == NEBULA_BUSY && !has(at) && holds("t", "b"));
        CHECK(!remove_version("t"));
        CHECK(repair_record(store, &manifest, 0, text, size, &error) == NEBULA_BUSY && !has(at) && holds_nothing("t"));
        free(text);
        end();
}

TAP_MAIN(TEST(a_damaged_file_gets_its_bytes_back), TEST(a_missing_file_that_lies_apart_comes_back), TEST(a_copy_in_another_store_gives_the_bytes),
         TEST(storage_that_has_no_room_keeps_the_damaged_file), TEST(a_repaired_file_survives_a_loss_of_power),
         TEST(a_record_gets_the_bytes_that_its_manifest_names_and_no_others),
         TEST(a_record_of_a_version_that_was_removed_or_written_again_does_not_come_back))
