#include <errno.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/conf.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "os/os.h"
#include "tap.h"

static struct nebula_error error;

static void an_error_says_what_and_why(void)
{
        CHECK(error_set(&error, NEBULA_NO_SPACE, ENOSPC, "writing %s", "x.pt") == NEBULA_NO_SPACE);
        CHECK(error.status == NEBULA_NO_SPACE && error.sys_errno == ENOSPC && error.http_status == 0);
        CHECK(strcmp(error.message, "writing x.pt: No space left on device") == 0);
        error_prefix(&error, "tag %d", 7);
        CHECK(strcmp(error.message, "tag 7: writing x.pt: No space left on device") == 0);
        CHECK(error_set(NULL, NEBULA_BUSY, 0, "nobody asks") == NEBULA_BUSY);
        error_prefix(NULL, "nobody asks");
}

static void an_error_may_quote_the_one_before(void)
{
        error_set(&error, NEBULA_FAILED, 0, "inner");
        error_set(&error, NEBULA_FAILED, 0, "outer (%s)", error.message);
        CHECK(strcmp(error.message, "outer (inner)") == 0);
}

static void a_long_message_is_cut_between_characters(void)
{
        char text[1024];

        for (size_t shift = 0; shift < 4; shift++) {
                memset(text, 'a', shift);
                for (size_t k = shift; k + 3 < sizeof text; k += 3)
                        memcpy(text + k, "\xe2\x82\xac", 4); /* the euro sign */
                error_set(&error, NEBULA_FAILED, 0, "%s", text);
                CHECK(strlen(error.message) > 500 && strlen(error.message) < sizeof error.message);
                CHECK(text_is_utf8(error.message, strlen(error.message)));
                error_prefix(&error, "p");
                CHECK(text_is_utf8(error.message, strlen(error.message)));
                error_set(&error, NEBULA_FAILED, 0, "%.31s and more", text);
                CHECK(text_is_utf8(error.message, strlen(error.message)) && strstr(error.message, " and more"));
        }
}

static void errnos_fall_into_their_groups(void)
{
        CHECK(error_status_of_errno(ENOSPC) == NEBULA_NO_SPACE && error_status_of_errno(EDQUOT) == NEBULA_NO_SPACE);
        CHECK(error_status_of_errno(ENOENT) == NEBULA_NOT_FOUND);
        CHECK(error_status_of_errno(ENOMEM) == NEBULA_NO_MEMORY);
        CHECK(error_status_of_errno(EIO) == NEBULA_STORAGE && error_status_of_errno(EROFS) == NEBULA_STORAGE);
}

static void every_status_and_state_has_a_name(void)
{
        static const int statuses[] = { 0, 10, 11, 20, 21, 22, 23, 30, 31, 40, 41, 50 };

        for (size_t k = 0; k < sizeof statuses / sizeof statuses[0]; k++)
                CHECK(strcmp(nebula_status_name((enum nebula_status)statuses[k]), "unknown") != 0);
        for (int state = NEBULA_STATE_CAPTURING; state <= NEBULA_STATE_FAILED; state++)
                CHECK(strcmp(nebula_state_name((enum nebula_state)state), "unknown") != 0);
        CHECK(strcmp(nebula_state_name(NEBULA_STATE_DURABLE), "durable") == 0);
        CHECK(strcmp(nebula_status_name((enum nebula_status)999), "unknown") == 0);
}

static void sizes_are_read_as_people_write_them(void)
{
        static const struct {
                const char *text;
                uint64_t bytes;
        } right[] = { { "0", 0 }, { "4096", 4096 }, { "512M", 512u << 20 }, { "4G", UINT64_C(4) << 30 }, { "4g", UINT64_C(4) << 30 },
                      { "1.5 GiB", UINT64_C(3) << 29 }, { "2TB", UINT64_C(2) << 40 }, { " 7 KB ", 7168 }, { "10B", 10 } };
        static const char *const wrong[] = { "", "G", "-1", "4X", "4 G x", "nan", "0x10", "1e3", "9999999999T", "4GG", "4iB", "." };
        uint64_t bytes;

        for (size_t k = 0; k < sizeof right / sizeof right[0]; k++)
                CHECK(conf_parse_size("X", right[k].text, &bytes, &error) == NEBULA_OK && bytes == right[k].bytes);
        bytes = 77;
        for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
                CHECK(conf_parse_size("NEBULA_X", wrong[k], &bytes, &error) == NEBULA_INVALID && bytes == 77);
                CHECK(strstr(error.message, "NEBULA_X") != NULL);
        }
}

static void durations_are_read_as_people_write_them(void)
{
        static const struct {
                const char *text;
                double seconds;
        } right[] = { { "0", 0 }, { "100", 100 }, { "2.5", 2.5 }, { "250ms", 0.25 }, { "90s", 90 }, { "15 m", 900 }, { "1H", 3600 }, { "2d", 172800 } };
        static const char *const wrong[] = { "", "s", "-5", "5x", "5 m 3", "inf", "1:30", "mm" };
        double seconds;

        for (size_t k = 0; k < sizeof right / sizeof right[0]; k++)
                CHECK(conf_parse_duration("X", right[k].text, &seconds, &error) == NEBULA_OK && seconds == right[k].seconds);
        for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++)
                CHECK(conf_parse_duration("X", wrong[k], &seconds, &error) == NEBULA_INVALID);
}

static void numbers_are_plain_ones(void)
{
        static const char *const wrong[] = { "", "fast", "-5", "5x", "inf", "nan", "0x10", "1e3", "2 5" };
        double value = 7;

        CHECK(conf_parse_number("X", " 0.5 ", &value, &error) == NEBULA_OK && value == 0.5);
        for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++)
                CHECK(conf_parse_number("X", wrong[k], &value, &error) == NEBULA_INVALID && value == 0.5);
}

static void counts_have_a_limit(void)
{
        uint64_t count;

        CHECK(conf_parse_count("X", " 12 ", 12, &count, &error) == NEBULA_OK && count == 12);
        CHECK(conf_parse_count("X", "18446744073709551615", UINT64_MAX, &count, &error) == NEBULA_OK && count == UINT64_MAX);
        CHECK(conf_parse_count("X", "18446744073709551616", UINT64_MAX, &count, &error) == NEBULA_INVALID);
        CHECK(conf_parse_count("X", "13", 12, &count, &error) == NEBULA_INVALID);
        CHECK(conf_parse_count("X", "-1", 12, &count, &error) == NEBULA_INVALID);
        CHECK(conf_parse_count("X", "", 12, &count, &error) == NEBULA_INVALID);
        CHECK(conf_parse_count("X", "1.0", 12, &count, &error) == NEBULA_INVALID);
}

static void an_empty_environment_variable_counts_as_unset(void)
{
        setenv("NEBULA_TEST_X", "", 1);
        CHECK(conf_env("NEBULA_TEST_X") == NULL);
        setenv("NEBULA_TEST_X", "v", 1);
        CHECK(strcmp(conf_env("NEBULA_TEST_X"), "v") == 0);
        unsetenv("NEBULA_TEST_X");
        CHECK(conf_env("NEBULA_TEST_X") == NULL);
}

static void bytes_grow_and_are_handed_over(void)
{
        struct buf buf = { 0 };
        size_t size = 99;
        char *data;

        for (int k = 0; k < 1000; k++)
                buf_add_text(&buf, "abc");
        buf_add_byte(&buf, 'd');
        buf_add_le(&buf, 0x0102030405060708, 8);
        data = buf_take(&buf, &size);
        REQUIRE(data != NULL);
        CHECK(size == 3009 && data[2999] == 'c' && data[3000] == 'd' && data[3001] == 8 && data[3008] == 1 && data[3009] == '\0');
        CHECK(buf.data == NULL && buf.size == 0);
        free(data);
        data = buf_take(&buf, &size);
        CHECK(data != NULL && size == 0 && *data == '\0');
        free(data);
}

static void running_out_of_memory_is_remembered(void)
{
        struct buf buf = { 0 };
        size_t size = 99;

        buf_add_text(&buf, "abc");
        buf_add(&buf, "x", SIZE_MAX - 1);
        CHECK(buf.failed);
        buf_add_text(&buf, "more");
        CHECK(buf_take(&buf, &size) == NULL && size == 99);
}

static void an_unprintable_character_becomes_a_question_mark(void)
{
        char text[] = "\033[31m\n\x7f\xff gr\xc3\xb6\xc3\x9f" "e \xe2\x82 \xed\xa0\x80 \xc3";

        text_make_printable(text);
        CHECK(strcmp(text, "?[31m??? gr\xc3\xb6\xc3\x9f" "e ?? ??? ?") == 0);
        char marks[] = "\xe2\x80\xaegpj.exe \xc2\x9b" "31m a\xe2\x80\x8b" "b \xef\xbb\xbf\xd9\x85\xf0\x9f\x98\x80";

        text_make_printable(marks);
        CHECK(strcmp(marks, "?gpj.exe ?31m a?b ?\xd9\x85\xf0\x9f\x98\x80") == 0);
        CHECK(text_is_utf8(text, strlen(text)) && !text_is_utf8("\xc3", 1) && text_is_utf8("\xf0\x9f\x98\x80", 4));
}

static void a_cell_that_a_spreadsheet_would_compute_is_told_and_its_apostrophe_comes_off(void)
{
        static const char *const formulas[] = { "=1", "+1", "-1", "@a", " =1", "'=1", "' '-1", ("\xef\xbc\x9d" "1"), "\xef\xbc\x8b", "\xef\xbc\x8d", "\xef\xbc\xa0" };
        static const char *const plain[] = { "", "'", " ", "a=1", "'a", "' a=", "1-1", "\xef\xbc", "\xef\xbc\x9e" };
        char cell[32];

        for (size_t i = 0; i < sizeof formulas / sizeof *formulas; i++) {
                CHECK(text_is_formula(formulas[i]));
                snprintf(cell, sizeof cell, "'%s", formulas[i]);
                CHECK(strcmp(text_cell_content(cell), formulas[i]) == 0);
        }
        for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
                CHECK(!text_is_formula(plain[i]) && text_cell_content(plain[i]) == plain[i]);
}

static void the_path_of_a_file_url_is_what_follows_its_scheme(void)
{
        static const char *const others[] = { "", "/a/file://b", "file:/a", "s3://a/b", "FILE:///a" };

        CHECK(!strcmp(text_local_path("file:///a/b"), "/a/b") && !*text_local_path("file://") && !strcmp(text_local_path("file://a"), "a"));
        for (size_t i = 0; i < sizeof others / sizeof *others; i++)
                CHECK(text_local_path(others[i]) == others[i]);
}

static void the_first_hidden_character_is_found(void)
{
        uint32_t character;
        size_t at, length;

        CHECK(!text_find_hidden("plain\n\x1b gr\xc3\xb6\xc3\x9f" "e \xf0\x9f\x98\x80", 19, &at, &length, &character));
        CHECK(text_find_hidden("ab\xe2\x80\xae" "c\x7f", 7, &at, &length, &character) && at == 2 && length == 3 && character == 0x202e);
        CHECK(text_find_hidden("a\xc2\x9b", 3, &at, &length, &character) && at == 1 && length == 2 && character == 0x9b);
        CHECK(text_find_hidden("\x7f", 1, &at, &length, &character) && !at && length == 1 && character == 0x7f);
        CHECK(!text_find_hidden("", 0, &at, &length, &character));
}

static char written[2048];
static size_t written_size, write_calls;

static int64_t keep_write(int fd, const void *data, size_t size)
{
        CHECK(fd == 7 && size < sizeof written);
        memcpy(written, data, size);
        written[size] = '\0';
        written_size = size;
        write_calls++;
        return (int64_t)size;
}

static int64_t fixed_time(void)
{
        return INT64_C(1795257086123000000);
}

static void a_log_line_is_one_write_that_nothing_can_forge(void)
{
        struct os_table table = *os;
        const struct os_table *real = os;
        char text[3000];

        table.write = keep_write;
        table.wall_ns = fixed_time;
        os = &table;
        log_event(LOG_LEVEL_ERROR, "to nobody");
        CHECK(write_calls == 0);
        log_to(7, LOG_LEVEL_INFO);
        log_event(LOG_LEVEL_DEBUG, "too much");
        CHECK(write_calls == 0 && !log_wants(LOG_LEVEL_DEBUG) && log_wants(LOG_LEVEL_WARN));
        log_event(LOG_LEVEL_WARN, "tag %s failed", "a\nb");
        CHECK(write_calls == 1);
        CHECK(strcmp(written, "2026-11-21T10:31:26.123Z warn tag a?b failed\n") == 0);
        memset(text, 'x', sizeof text - 1);
        text[sizeof text - 1] = '\0';
        log_event(LOG_LEVEL_INFO, "%s", text);
        CHECK(written_size == 1024 - 1 && written[written_size - 1] == '\n');
        log_to(-1, LOG_LEVEL_INFO);
        os = real;
}

static void a_thread_that_holds_its_lines_back_writes_them_in_order_with_the_time_of_the_event(void)
{
        struct os_table table = *os;
        const struct os_table *real = os;

        table.write = keep_write;
        table.wall_ns = fixed_time;
        os = &table;
        write_calls = 0;
        log_to(7, LOG_LEVEL_INFO);
        log_hold();
        log_event(LOG_LEVEL_INFO, "first");
        table.wall_ns = os_linux.wall_ns;
        log_event(LOG_LEVEL_DEBUG, "too much");
        CHECK(write_calls == 0 && log_is_held());
        log_let_go();
        CHECK(write_calls == 1 && !log_is_held() && strcmp(written, "2026-11-21T10:31:26.123Z info first\n") == 0);
        log_hold();
        log_event(LOG_LEVEL_INFO, "second");
        log_event(LOG_LEVEL_INFO, "third");
        log_let_go();
        CHECK(write_calls == 3 && strstr(written, "third"));
        log_event(LOG_LEVEL_INFO, "at once");
        CHECK(write_calls == 4);
        log_to(-1, LOG_LEVEL_INFO);
        os = real;
}

TAP_MAIN(TEST(an_error_says_what_and_why), TEST(an_error_may_quote_the_one_before), TEST(a_long_message_is_cut_between_characters),
         TEST(errnos_fall_into_their_groups), TEST(every_status_and_state_has_a_name), TEST(sizes_are_read_as_people_write_them),
         TEST(durations_are_read_as_people_write_them), TEST(numbers_are_plain_ones), TEST(counts_have_a_limit),
         TEST(an_empty_environment_variable_counts_as_unset), TEST(bytes_grow_and_are_handed_over),
         TEST(running_out_of_memory_is_remembered), TEST(an_unprintable_character_becomes_a_question_mark), TEST(the_first_hidden_character_is_found),
         TEST(the_path_of_a_file_url_is_what_follows_its_scheme), TEST(a_cell_that_a_spreadsheet_would_compute_is_told_and_its_apostrophe_comes_off),
         TEST(a_log_line_is_one_write_that_nothing_can_forge),
         TEST(a_thread_that_holds_its_lines_back_writes_them_in_order_with_the_time_of_the_event))
