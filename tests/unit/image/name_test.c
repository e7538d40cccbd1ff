#include <stdint.h>

#include "image/image.h"
#include "tap.h"

static struct nebula_error error;

static void names_go_to_path_components_and_back(void)
{
        static const char *const pairs[][2] = {
                { "global_step500", "global_step500" },
                { "a/b", "a%2Fb" },
                { "100%", "100%25" },
                { "..", "%2E." },
                { ".", "%2E" },
                { ".metadata", ".metadata" },
                { ".nebula", "%2Enebula" },
                { ".nebula-tmp-1", "%2Enebula-tmp-1" },
                { "sub/.nebula", "sub%2F.nebula" },
                { "a.b", "a.b" },
                { "latest", "%6Catest" },
                { "latest2", "latest2" },
                { "my latest", "my latest" },
                { "x\ny\x7f", "x%0Ay%7F" },
                { "\xc3\xa9\xf0\x9f\x9a\x80", "\xc3\xa9\xf0\x9f\x9a\x80" },
                { "-rf", "-rf" },
        };

        for (size_t k = 0; k < sizeof pairs / sizeof pairs[0]; k++) {
                char text[256] = "", name[256] = "";

                CHECK(name_encode(pairs[k][0], text, &error) == NEBULA_OK);
                CHECK(strcmp(text, pairs[k][1]) == 0);
                CHECK(name_decode(text, name, &error) == NEBULA_OK);
                CHECK(strcmp(name, pairs[k][0]) == 0);
        }
}

static void names_that_no_file_system_holds_are_refused(void)
{
        char long_name[300], text[256] = "untouched";

        memset(long_name, 'a', sizeof long_name);
        long_name[256] = '\0';
        CHECK(name_encode(long_name, text, &error) == NEBULA_INVALID);
        long_name[255] = '\0';
        long_name[7] = '/'; /* 257 encoded */
        CHECK(name_encode(long_name, text, &error) == NEBULA_INVALID);
        CHECK(name_encode("", text, &error) == NEBULA_INVALID);
        CHECK(strcmp(text, "untouched") == 0);
        long_name[7] = 'a';
        CHECK(name_encode(long_name, text, &error) == NEBULA_OK);
        CHECK(strlen(text) == 255);
}

static void bytes_that_are_not_utf8_are_refused(void)
{
        static const char *const names[] = { "\xff", "a\xc3", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                             "\xf0\x80\x80\xaf", "\x80", "\xe2\x82" };
        char text[256];

        for (size_t k = 0; k < sizeof names / sizeof names[0]; k++)
                CHECK(name_encode(names[k], text, &error) == NEBULA_INVALID);
}

static void texts_that_are_not_written_by_encoding_are_refused(void)
{
        static const char *const texts[] = { "", "a/b", ".nebula", "..", "latest", "a%2fb", "a%", "a%2", "a%41", "%00", "a\n", "%FF" };
        char name[256];

        for (size_t k = 0; k < sizeof texts / sizeof texts[0]; k++)
                CHECK(name_decode(texts[k], name, &error) == NEBULA_INVALID);
}

static void steps_are_read_from_the_end_of_a_tag(void)
{
        CHECK(name_step("global_step500") == 500);
        CHECK(name_step("step12") == 12);
        CHECK(name_step("checkpoint-12") == 12);
        CHECK(name_step("global_step0") == 0);
        CHECK(name_step("9223372036854775807") == INT64_MAX);
        CHECK(name_step("step9223372036854775808") == -1);
        CHECK(name_step("global_step") == -1);
        CHECK(name_step("step12b") == -1);
        CHECK(name_step("") == -1);
        CHECK(name_follows_step("global_step500") && name_follows_step("global_step0"));
        CHECK(!name_follows_step("step500") && !name_follows_step("checkpoint-500") && !name_follows_step("my_global_step500"));
        CHECK(!name_follows_step("global_step") && !name_follows_step("global_step5b5") && !name_follows_step("global_step9223372036854775808"));
}

TAP_MAIN(TEST(names_go_to_path_components_and_back), TEST(names_that_no_file_system_holds_are_refused),
         TEST(bytes_that_are_not_utf8_are_refused), TEST(texts_that_are_not_written_by_encoding_are_refused),
         TEST(steps_are_read_from_the_end_of_a_tag))
