#include <errno.h>

#include "os/os.h"
#include "os/os_fault.h"
#include "tap.h"
#include "test_dir.h"

static char dir[256], path[512];

static void begin(void)
{
        test_dir_make(dir);
        snprintf(path, sizeof path, "%s/file", dir);
}

static void only_the_kth_call_fails(void)
{
        struct os_fault fault = { .at = 2, .error = EIO };
        struct os_stat found;

        os_fault_begin(&fault);
        CHECK(os->stat("/", true, &found) == 0);
        CHECK(os->stat("/", true, &found) == -EIO);
        CHECK(os->stat("/", true, &found) == 0);
        CHECK(os_fault_count() == 3);
        CHECK(os_fault_end());
        CHECK(!strcmp(os_fault_where(), "stat"));
        CHECK(os == &os_linux);
}

static void a_name_filters_what_counts(void)
{
        struct os_fault fault = { .calls = "space rename", .at = 1, .error = EIO, .goes_on = true };
        struct os_stat found;
        struct os_space space;

        os_fault_begin(&fault);
        CHECK(os->stat("/", true, &found) == 0);
        CHECK(os->space("/", &space) == -EIO);
        CHECK(os->space("/", &space) == -EIO);
        CHECK(os->rename("/nonexistent1", "/nonexistent2") == -EIO);
        CHECK(os_fault_end());
}

static void nothing_fails_when_the_count_is_past_the_end(void)
{
        struct os_fault fault = { .at = 100, .error = EIO };
        struct os_stat found;

        os_fault_begin(&fault);
        CHECK(os->stat("/", true, &found) == 0);
        CHECK(!os_fault_end());
        CHECK(!*os_fault_where());
}

/* Completed operations don't show EINTR and short counts, whichever call has them. */
static void helpers_complete_what_is_cut_short(void)
{
        static const int errors[] = { EINTR, OS_FAULT_SHORT };

        begin();
        for (size_t i = 0; i < 2; i++) {
                struct os_fault fault = { .error = errors[i] };
                bool was_hit;

                do {
                        char *data = NULL;
                        size_t size = 0;
                        int written, read;

                        fault.at++;
                        os_fault_begin(&fault);
                        written = os_write_file_atomic(path, "0123456789", 10);
                        read = os_read_file(path, 100, &data, &size);
                        was_hit = os_fault_end();
                        CHECK(written == 0);
                        CHECK(read == 0 && size == 10 && !strcmp(data, "0123456789"));
                        free(data);
                } while (was_hit);
                CHECK(fault.at > 2);
        }
        test_dir_remove(dir);
}

static void an_atomic_write_is_old_or_new_whichever_call_fails(void)
{
        static const int errors[] = { EIO, ENOSPC };

        begin();
        for (size_t i = 0; i < 2; i++) {
                struct os_fault fault = { .error = errors[i] };
                bool was_hit;

                do {
                        char *data = NULL;
                        size_t size = 0;
                        int result;

                        REQUIRE(os_write_file_atomic(path, "old", 3) == 0);
                        fault.at++;
                        os_fault_begin(&fault);
                        result = os_write_file_atomic(path, "new text", 8);
                        was_hit = os_fault_end();
                        CHECK(was_hit || !result);
                        REQUIRE(os_read_file(path, 100, &data, &size) == 0);
                        CHECK(!strcmp(data, "new text") || (result && !strcmp(data, "old")));
                        free(data);
                } while (was_hit);
        }
        test_dir_remove(dir);
}

TAP_MAIN(TEST(only_the_kth_call_fails), TEST(a_name_filters_what_counts),
         TEST(nothing_fails_when_the_count_is_past_the_end), TEST(helpers_complete_what_is_cut_short),
         TEST(an_atomic_write_is_old_or_new_whichever_call_fails))
