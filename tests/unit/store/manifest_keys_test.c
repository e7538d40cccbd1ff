/* The keys of a version's objects, and the kind of an object by its key: both follow from names alone. */
#include "store/document.h"
#include "store/manifest_keys.h"
#include "store/manifest_private.h"
#include "store/tag_log.h"
#include "tap.h"

#define WRITING "w0123456789abcdef-12-0badcafe"

static enum manifest_entry_kind kind_of(const char *name)
{
        return manifest_entry(name).kind;
}

static void a_writing_is_named_by_its_job_run_number_and_try(void)
{
        char one[WRITING_MAX], other[WRITING_MAX], prefix[WRITING_MAX];

        writing_name("job", "run", 12, 0xbadcafe, one);
        writing_prefix("job", "run", 12, prefix);
        CHECK(writing_is_sound(one) && !writing_is_sound(prefix) && !strncmp(one, prefix, strlen(prefix)) && !strcmp(one + strlen(prefix), "0badcafe"));
        writing_name("job", "run", 12, 0xbadcaff, other);
        CHECK(strcmp(one, other) && !strncmp(other, prefix, strlen(prefix)));
        writing_name("job", "run", 1, 0xbadcafe, other);
        CHECK(strncmp(other, prefix, strlen(prefix)) && !strncmp(one, other, WRITING_RUN_CHARS)); /* "-1-" is not the beginning of "-12-" */
        writing_name("job", "run2", 12, 0xbadcafe, other);
        CHECK(strncmp(one, other, WRITING_RUN_CHARS));
        writing_name("jobr", "un", 12, 0xbadcafe, other); /* the two are not run together */
        CHECK(strncmp(one, other, WRITING_RUN_CHARS));
        writing_name("", "", UINT64_C(9999999999999999999), UINT32_MAX, other);
        CHECK(writing_is_sound(other) && strlen(other) < WRITING_MAX);
}

static void every_key_that_is_made_is_known_for_what_it_is(void)
{
        struct manifest_entry entry;
        char key[MANIFEST_KEY_MAX];

        REQUIRE(!record_key("t%2Fu", WRITING, 3, key, NULL));
        CHECK(!strcmp(key, "t%2Fu/.nebula/" WRITING ".record-00003.json"));
        entry = manifest_entry(manifest_behind_private(key, "t%2Fu"));
        CHECK(entry.kind == ENTRY_RECORD && entry.rank == 3 && !strcmp(entry.writing, WRITING));
        REQUIRE(!record_key("t", WRITING, 1048575, key, NULL));
        entry = manifest_entry(manifest_behind_private(key, "t"));
        CHECK(entry.kind == ENTRY_RECORD && entry.rank == 1048575);
        REQUIRE(!claim_key("t", WRITING, 3, key, NULL));
        entry = manifest_entry(manifest_behind_private(key, "t"));
        CHECK(entry.kind == ENTRY_CLAIM && entry.rank == 3 && !strcmp(entry.writing, WRITING));
        REQUIRE(!tag_log_key("t", 1234567890123, key, NULL));
        CHECK(!strcmp(key, "t/.nebula/manifest-1234567890123.json"));
        entry = manifest_entry(manifest_behind_private(key, "t"));
        CHECK(entry.kind == ENTRY_MANIFEST && entry.number == 1234567890123);
        REQUIRE(!file_key("t", WRITING, "a/b", key, NULL));
        CHECK(!strcmp(key, "t/.nebula/" WRITING "/a%2Fb"));
        entry = manifest_entry(manifest_behind_private(key, "t"));
        CHECK(entry.kind == ENTRY_APART && !strcmp(entry.writing, WRITING));
        REQUIRE(!file_key("t", NULL, ".nebula", key, NULL));
        CHECK(!strcmp(key, "t/%2Enebula") && !manifest_behind_private(key, "t") && !strcmp(manifest_behind(key, "t"), "%2Enebula"));
}

static void objects_of_other_programs_are_foreign(void)
{
        static const char *const names[] = {
                "", "x", "manifest-.json", "manifest-0.json", "manifest-01.json", "manifest-1.json.bak", "manifest-1", "manifest--1.json",
                "manifest-281474976710657.json", "manifest-999999999999999999.json", "manifest-9999999999999999999.json", "manifest-1.json/x",
                "manifest.json", "rank-00000.json", "rank-00003.g2.json", "claim-00000.json", "g2/x", /* of format 1 */
                "manifest.json.bak", "rank-.json", "rank-1.g.json", "rank-1.gx.json", "rank-00000.json/x", "claim-x.json",
                WRITING, WRITING "x", WRITING "/a/b", WRITING ".record-.json", WRITING ".record-4294967296.json",
                WRITING ".record-00001.json.bak", WRITING ".records-00001.json", WRITING ".claim--1.json", "w0123456789abcdef-12-0badcafX/x",
                "captured-.json", "captured-w0123456789abcdef-1.json", "captured-w0123456789abcdef-1-2.json", "captured-w0123456789abcdef-1-2-0123456789abcde.json",
                "captured-w0123456789abcdef-1-4294967296-0123456789abcdef.json", "captured-w0123456789abcdef-1-2-0123456789abcdef.jsonx",
                "committed.json", "committed-w0123456789abcdef.json", "committed-w0123456789abcdef-1.jsonx", "committed-w0123456789abcdef-.json",
                "wanted-w0123456789abcde-1.json", "wanted-w0123456789abcdef-1-.json", "latest",
        };

        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
                CHECK(kind_of(names[i]) == ENTRY_FOREIGN);
                CHECK(manifest_is_format_1(names[i]) == (!strcmp(names[i], "manifest.json") || !strcmp(names[i], "rank-00000.json") || !strcmp(names[i], "claim-00000.json") ||
                                                         !strcmp(names[i], "rank-00003.g2.json")));
                if (kind_of(names[i]) != ENTRY_FOREIGN)
                        printf("# %s is taken for one of ours\n", names[i]);
        }
        CHECK(kind_of("manifest-281474976710656.json") == ENTRY_MANIFEST);
        CHECK(kind_of("captured-w0123456789abcdef-12-00004-fedcba9876543210.json") == ENTRY_COMMITTING);
        CHECK(kind_of("committed-w0123456789abcdef-12.json") == ENTRY_COMMITTING && kind_of("wanted-w0123456789abcdef-12.json") == ENTRY_COMMITTING);
        CHECK(kind_of("tmp-1-2") == ENTRY_TEMPORARY && kind_of("sweep-00.json") == ENTRY_SWEEP);
}

static void a_key_that_is_too_long_is_refused(void)
{
        char directory[MANIFEST_KEY_MAX], name[300], key[MANIFEST_KEY_MAX];
        struct nebula_error error;

        memset(directory, 'd', sizeof directory - 1);
        directory[sizeof directory - 1] = 0;
        CHECK(record_key(directory, WRITING, 0, key, &error) == NEBULA_INVALID && strstr(error.message, "too long"));
        CHECK(claim_key(directory, WRITING, 0, key, NULL) == NEBULA_INVALID && tag_log_key(directory, 1, key, NULL) == NEBULA_INVALID);
        CHECK(file_key(directory, NULL, "x", key, NULL) == NEBULA_INVALID && file_key(directory, WRITING, "x", key, NULL) == NEBULA_INVALID);
        directory[255] = 0;
        memset(name, 'n', 255);
        name[255] = 0;
        CHECK(!file_key(directory, WRITING, name, key, NULL)); /* the longest of each */
        name[255] = 'n';
        name[256] = 0;
        CHECK(file_key("t", NULL, name, key, NULL) == NEBULA_INVALID && file_key("t", NULL, "", key, NULL) == NEBULA_INVALID);
}

static void a_file_has_the_key_that_its_manifest_says(void)
{
        struct manifest_record records[] = { { .writing = WRITING }, { .writing = "w0123456789abcdef-1-00000000" } };
        struct manifest manifest = { .tag = "t/u", .records = records, .record_count = 2 };
        struct manifest_file place = { .name = "x", .record = 1 }, apart = { .name = "x/y", .record = 1, .is_apart = true };
        char key[MANIFEST_KEY_MAX], path[MANIFEST_KEY_MAX];

        CHECK(!manifest_file_key(&manifest, &place, key, NULL) && !strcmp(key, "t%2Fu/x"));
        CHECK(!manifest_file_path(&manifest, &place, path, NULL) && !strcmp(path, "x"));
        CHECK(!manifest_file_key(&manifest, &apart, key, NULL) && !strcmp(key, "t%2Fu/.nebula/w0123456789abcdef-1-00000000/x%2Fy"));
        CHECK(!manifest_file_path(&manifest, &apart, path, NULL) && !strcmp(path, ".nebula/w0123456789abcdef-1-00000000/x%2Fy"));
}

TAP_MAIN(TEST(a_writing_is_named_by_its_job_run_number_and_try), TEST(every_key_that_is_made_is_known_for_what_it_is),
         TEST(objects_of_other_programs_are_foreign), TEST(a_key_that_is_too_long_is_refused), TEST(a_file_has_the_key_that_its_manifest_says))
