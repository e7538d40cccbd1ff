#include <errno.h>

#include "os/os.h"
#include "os/os_crash.h"
#include "tap.h"
#include "test_dir.h"

#define SEEDS 64

static char base[256], root[300], after[300], file[400], seen[400];

static void begin(void)
{
        test_dir_make_quick(base);
        snprintf(root, sizeof root, "%s/root", base);
        snprintf(after, sizeof after, "%s/after", base);
        snprintf(file, sizeof file, "%s/file", root);
        snprintf(seen, sizeof seen, "%s/file", after);
        if (os->mkdir(root, 0700) || os_crash_begin(root))
                abort();
}

static void end(void)
{
        os_crash_free();
        test_dir_remove(base);
}

/* The text of the file in the state that survives; "-" when there is none. */
static void survivor(uint64_t seed, char text[64])
{
        char *data;
        size_t size;

        if (os_crash_materialise(os_crash_position(), seed, after))
                abort();
        strcpy(text, "-");
        if (os_read_file(seen, 1 << 20, &data, &size))
                return;
        snprintf(text, 64, "%s", data);
        free(data);
}

static int put(const char *text, bool with_sync)
{
        int fd = os->open(file, OS_WRITE | OS_CREATE);
        int result = fd < 0 ? fd : os_write_at(fd, text, strlen(text), 0);

        if (!result && with_sync)
                result = os_sync(fd);
        os->close(fd);
        return result;
}

static void unsynced_data_may_be_lost_or_kept(void)
{
        char text[64];
        bool is_lost = false, is_kept = false, is_empty = false;

        begin();
        CHECK(put("text", false) == 0);
        os_crash_end();
        survivor(OS_CRASH_ALL_LOST, text);
        CHECK(!strcmp(text, "-"));
        survivor(OS_CRASH_ALL_KEPT, text);
        CHECK(!strcmp(text, "text"));
        for (uint64_t seed = 2; seed < SEEDS; seed++) {
                survivor(seed, text);
                is_lost |= !strcmp(text, "-");
                is_kept |= !strcmp(text, "text");
                is_empty |= !strcmp(text, "");
        }
        CHECK(is_lost && is_kept && is_empty);
        end();
}

static void a_synced_file_needs_its_directory_synced_too(void)
{
        char text[64];
        bool is_lost = false;

        begin();
        CHECK(put("text", true) == 0);
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
                survivor(seed, text);
                is_lost |= !strcmp(text, "-");
                CHECK(!strcmp(text, "-") || !strcmp(text, "text"));
        }
        CHECK(is_lost);
        CHECK(os_sync_dir(root) == 0);
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
                survivor(seed, text);
                CHECK(!strcmp(text, "text"));
        }
        os_crash_end();
        end();
}

static void an_overwrite_may_be_torn(void)
{
        static char old[8192], new[8192];
        bool is_torn = false;
        int fd;

        memset(old, 'o', sizeof old);
        memset(new, 'n', sizeof new);
        begin();
        fd = os->open(file, OS_WRITE | OS_CREATE);
        REQUIRE(fd >= 0);
        CHECK(!os_write_at(fd, old, sizeof old, 0) && !os_sync(fd) && !os_sync_dir(root));
        CHECK(!os_write_at(fd, new, sizeof new, 0));
        os->close(fd);
        os_crash_end();
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
                char *data;
                size_t size, news = 0;

                REQUIRE(os_crash_materialise(os_crash_position(), seed, after) == 0);
                REQUIRE(os_read_file(seen, 1 << 20, &data, &size) == 0);
                CHECK(size == sizeof old);
                for (size_t i = 0; i < size; i++)
                        news += data[i] == 'n';
                CHECK(news % 512 == 0);
                is_torn |= news && news < size;
                free(data);
        }
        CHECK(is_torn);
        end();
}

static void an_exchange_happens_or_does_not(void)
{
        char other[400], other_after[400], text[64];
        bool is_old = false, is_new = false;
        struct os_stat found;

        begin();
        snprintf(other, sizeof other, "%s/other", root);
        snprintf(other_after, sizeof other_after, "%s/other", after);
        CHECK(!put("text", true) && !os->mkdir(other, 0700) && !os_sync_dir(root));
        CHECK(os->exchange(file, other) == 0);
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
                bool has_old;

                survivor(seed, text);
                has_old = !strcmp(text, "text");
                CHECK(!os_linux.stat(other_after, false, &found));
                CHECK(has_old ? found.kind == OS_KIND_DIRECTORY : found.kind == OS_KIND_FILE && found.size == 4);
                is_old |= has_old;
                is_new |= !has_old;
        }
        CHECK(is_old && is_new);
        CHECK(os_sync_dir(root) == 0);
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
                survivor(seed, text);
                CHECK(!os_linux.stat(other_after, false, &found) && found.kind == OS_KIND_FILE);
        }
        os_crash_end();
        end();
}

static void a_rename_leaves_one_name_at_least(void)
{
        char below[400], moved[400], moved_after[400], text[64];
        bool is_old = false, is_new = false, is_both = false;
        struct os_stat found;

        begin();
        snprintf(below, sizeof below, "%s/below", root);
        snprintf(moved, sizeof moved, "%s/below/moved", root);
        snprintf(moved_after, sizeof moved_after, "%s/below/moved", after);
        CHECK(!os_make_dirs(below, 0700) && !put("text", true) && !os_sync_dir(root));
        CHECK(os->rename(file, moved) == 0);
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
                bool has_old, has_new;

                survivor(seed, text);
                has_old = strcmp(text, "-");
                has_new = !os_linux.stat(moved_after, false, &found);
                CHECK(has_old || has_new);
                is_old |= has_old && !has_new;
                is_new |= has_new && !has_old;
                is_both |= has_old && has_new;
        }
        CHECK(is_old && is_new && is_both);
        CHECK(os_sync_dir(below) == 0);
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
                survivor(seed, text);
                CHECK(!os_linux.stat(moved_after, false, &found) && found.size == 4);
        }
        os_crash_end();
        end();
}

static void a_file_in_a_directory_that_was_not_synced_is_gone(void)
{
        char below[400], deep[400], deep_after[400];
        struct os_stat found;
        int fd;

        begin();
        snprintf(below, sizeof below, "%s/below", root);
        snprintf(deep, sizeof deep, "%s/below/file", root);
        snprintf(deep_after, sizeof deep_after, "%s/below/file", after);
        CHECK(os->mkdir(below, 0700) == 0);
        fd = os->open(deep, OS_WRITE | OS_CREATE);
        CHECK(fd >= 0 && !os_sync(fd) && !os_sync_dir(below));
        os->close(fd);
        CHECK(os_crash_materialise(os_crash_position(), OS_CRASH_ALL_LOST, after) == 0);
        CHECK(os_linux.stat(deep_after, false, &found) == -ENOENT);
        CHECK(os_sync_dir(root) == 0);
        CHECK(os_crash_materialise(os_crash_position(), OS_CRASH_ALL_LOST, after) == 0);
        CHECK(os_linux.stat(deep_after, false, &found) == 0);
        os_crash_end();
        end();
}

static void every_earlier_moment_can_be_asked_for(void)
{
        char text[64];
        uint64_t first;

        begin();
        CHECK(!put("one", true) && !os_sync_dir(root));
        first = os_crash_position();
        CHECK(!put("two", true));
        os_crash_end();
        survivor(OS_CRASH_ALL_LOST, text);
        CHECK(!strcmp(text, "two"));
        CHECK(os_crash_materialise(first, OS_CRASH_ALL_KEPT, after) == 0);
        {
                char *data;
                size_t size;

                REQUIRE(os_read_file(seen, 100, &data, &size) == 0);
                CHECK(!strcmp(data, "one"));
                free(data);
        }
        CHECK(os_crash_materialise(first + 1000, 0, after) == -EINVAL);
        end();
}

static void existing_files_are_durable(void)
{
        char text[64];

        begin();
        CHECK(put("text", false) == 0);
        os_crash_end();
        os_crash_free();
        REQUIRE(os_crash_begin(root) == 0);
        os_crash_end();
        CHECK(os_crash_position() == 0);
        survivor(OS_CRASH_ALL_LOST, text);
        CHECK(!strcmp(text, "text"));
        end();
}

TAP_MAIN(TEST(unsynced_data_may_be_lost_or_kept), TEST(a_synced_file_needs_its_directory_synced_too),
         TEST(an_overwrite_may_be_torn), TEST(a_rename_leaves_one_name_at_least), TEST(an_exchange_happens_or_does_not),
         TEST(a_file_in_a_directory_that_was_not_synced_is_gone), TEST(every_earlier_moment_can_be_asked_for),
         TEST(existing_files_are_durable))
