/* Versions that lose some of their files, and stay the versions that they were. */
#include <errno.h>

#include "store/scan.h"
#include "store/thin.h"
#include "full.h"
#include "versions.h"

static enum nebula_status thin(const char *tag, const char *pattern, uint64_t *ret_bytes)
{
        struct manifest manifest, now = { 0 };
        enum nebula_status status;

        load(tag, &manifest);
        status = thin_version(store, &manifest, pattern, &now, ret_bytes, &error);
        if (!status)
                CHECK(now.sequence == manifest.sequence && !strcmp(now.run, manifest.run));
        manifest_done(&now);
        manifest_done(&manifest);
        return status;
}

static bool has_file(const char *tag, const char *name)
{
        struct manifest manifest;
        bool result;

        load(tag, &manifest);
        result = manifest_find_file(&manifest, name);
        manifest_done(&manifest);
        return result;
}

static bool is_newest(const char *tag)
{
        struct manifest_scan scan;
        bool result;

        if (manifest_scan(store, &scan, &error))
                return false;
        result = scan.count && !strcmp(scan.manifests[manifest_scan_newest(&scan, NULL)].tag, tag);
        manifest_scan_done(&scan);
        return result;
}

ON_EACH_STORE(a_thin_version_keeps_its_other_files_its_place_and_its_index_entry)
{
        struct manifest manifest;
        struct record_file file;
        uint64_t bytes;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "model", "optimizer.00000.pt", "optimizer.00001.pt" } });
        write_version((struct author){ .tag = "u", .run = "b", .names = { "model" } });
        CHECK(count_objects(".nebula/index/") == 2);
        CHECK(!thin("t", "optimizer*", &bytes) && bytes == 2 * FILE_BYTES);
        CHECK(holds("t", "a") && has_file("t", "model") && !has_file("t", "optimizer.00000.pt") && is_newest("u"));
        CHECK(has("t/model") && !has("t/optimizer.00000.pt") && !has("t/optimizer.00001.pt"));
        CHECK(count_objects(".nebula/index/") == 2);
        load("t", &manifest);
        CHECK(thin_has(&manifest, "optimizer*") && !thin_has(&manifest, "optimizer"));
        CHECK(manifest_load_file(store, &manifest, "optimizer.00000.pt", &file, &error) == NEBULA_NOT_FOUND && strstr(error.message, "optimizer*"));
        manifest_done(&manifest);
        CHECK(!thin("t", "optimizer*", &bytes) && !bytes && holds("t", "a")); /* again */
        CHECK(!remove_version("t") && holds_nothing("t") && !count_objects("t/"));
}

/* The version was written twice: its files lie apart, and have views. */
ON_EACH_STORE(files_apart_and_files_that_were_carried_over_go_too)
{
        uint64_t bytes;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "model", "optimizer", "rng" } });
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .carries = true, .names = { "model", "scheduler" } });
        CHECK(!thin("t", "[os]*", &bytes) && bytes == 2 * FILE_BYTES && holds("t", "b"));
        CHECK(has_file("t", "model") && has_file("t", "rng") && !has_file("t", "optimizer") && !has_file("t", "scheduler"));
        CHECK(!has("t/optimizer") && !has("t/scheduler"));
        CHECK(!thin("t", "rng", &bytes) && bytes == FILE_BYTES && holds("t", "b") && !has("t/rng"));
        write_version((struct author){ .tag = "t", .run = "c", .after = "b", .carries = true, .names = { "optimizer" } });
        CHECK(holds("t", "c") && has_file("t", "model") && has_file("t", "optimizer"));
}

ON_EACH_STORE(a_version_is_not_thinned_to_nothing)
{
        uint64_t bytes;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        CHECK(thin("t", "*", &bytes) == NEBULA_INVALID && !bytes && holds("t", "a") && has_file("t", "y"));
}

ON_EACH_STORE(a_tag_that_was_written_again_is_not_thinned_by_an_older_look)
{
        struct manifest manifest, now = { 0 };
        uint64_t bytes;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        load("t", &manifest);
        write_version((struct author){ .tag = "t", .run = "b", .after = "a", .names = { "x", "y" } });
        CHECK(thin_version(store, &manifest, "y", &now, &bytes, &error) == NEBULA_BUSY && holds("t", "b") && has_file("t", "y"));
        CHECK(!remove_version("t") && thin_version(store, &manifest, "y", &now, &bytes, &error) == NEBULA_BUSY && holds_nothing("t"));
        manifest_done(&manifest);
}

static const struct store_ops *plain;

static enum nebula_status remove_nothing(struct store *self, const struct store_victim *victims, size_t count, struct nebula_error *failure)
{
        if (!strncmp(victims[0].key, ".nebula/index/", 14))
                return plain->remove(self, victims, count, failure);
        return error_set(failure, NEBULA_STORAGE, EIO, "a removal fails");
}

/* As if the agent had been killed between the entry and the removals. */
ON_EACH_STORE(files_that_an_interrupted_thinning_left_go_with_the_next_one)
{
        struct store_ops ops = *store->ops;
        uint64_t bytes;

        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        plain = store->ops;
        ops.remove = remove_nothing;
        store->ops = &ops;
        CHECK(!thin("t", "y", &bytes) && holds("t", "a") && !has_file("t", "y") && has("t/y"));
        store->ops = plain;
        CHECK(!thin("t", "y", &bytes) && !bytes && !has("t/y") && holds("t", "a"));
}

/* fault (Storage): The file system is full to the last block, and versions are thinned to make room.
 * result: The new entry of the log takes the block that it needs from the index, which is whole again afterwards. */
ON_EACH_STORE(a_version_is_thinned_on_a_full_file_system)
{
        uint64_t bytes;

        if (!(features & STORE_PATHS))
                return;
        write_version((struct author){ .tag = "t", .run = "a", .names = { "x", "y" } });
        write_version((struct author){ .tag = "u", .run = "b", .names = { "x" } });
        write_version((struct author){ .tag = "v", .run = "c", .names = { "x" } });
        fill_store(-1);
        CHECK(!thin("t", "y", &bytes) && bytes == FILE_BYTES);
        empty_store();
        CHECK(!has("t/y") && !has_file("t", "y") && holds("t", "a") && holds("u", "b") && holds("v", "c"));
        CHECK(count_objects(".nebula/index/") == 3);
}

static void rules_are_read_as_the_settings_have_them(void)
{
        static const char *const wrong[] = { "optimizer", "=2", "a=0", "a=-1", "a=x", "a=1 ", "a=99999999999", ",", "a=1,,b=2",
                                             "a=1,b=1,c=1,d=1,e=1,f=1,g=1,h=1,i=1" };
        struct thin_rules rules;
        char text[300];

        CHECK(!thin_parse("", &rules, &error) && !rules.count);
        CHECK(!thin_parse("optimizer*=2,*/optim_states.pt=10", &rules, &error) && rules.count == 2);
        CHECK(!strcmp(rules.list[0].pattern, "optimizer*") && rules.list[0].last == 2 && rules.list[1].last == 10);
        for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
                CHECK(thin_parse(wrong[i], &rules, &error) == NEBULA_INVALID);
        memset(text, 'a', sizeof text);
        strcpy(text + THIN_TEXT_MAX, "=1");
        CHECK(thin_parse(text, &rules, &error) == NEBULA_INVALID);
}

TAP_MAIN(TEST(a_thin_version_keeps_its_other_files_its_place_and_its_index_entry), TEST(files_apart_and_files_that_were_carried_over_go_too),
         TEST(a_version_is_not_thinned_to_nothing), TEST(a_tag_that_was_written_again_is_not_thinned_by_an_older_look),
         TEST(files_that_an_interrupted_thinning_left_go_with_the_next_one), TEST(a_version_is_thinned_on_a_full_file_system),
         TEST(rules_are_read_as_the_settings_have_them))
