#include <errno.h>

#include "agent/agent_catalogue.h"
#include "agent/clients/history.h"
#include "tap.h"
#include "test_dir.h"

static char base[256], storage[300], output[320], file[360];
static struct bench bench;

static void begin(void)
{
        test_dir_make_quick(base);
        snprintf(storage, sizeof storage, "%s/storage", base);
        snprintf(output, sizeof output, "%s/.nebula", storage);
        snprintf(file, sizeof file, "%s/checkpointHistories.csv", output);
        bench_init(&bench, NULL, storage);
        snprintf(bench.job->output_dir, sizeof bench.job->output_dir, "%s", output);
}

static void end(void)
{
        bench_done(&bench, true);
        test_dir_remove(base);
}

static void end_version(const char *tag)
{
        struct version *version = bench_version(&bench, tag, 1, 0);

        REQUIRE(version);
        catalogue_lock(&bench.catalogue);
        version_fail(&bench.catalogue, version, NEBULA_STORAGE, "storage is gone");
        catalogue_unlock(&bench.catalogue);
        history_flush(&bench.catalogue, bench.job->lane);
}

static int lines(void)
{
        char *text;
        size_t size;
        int count = 0;

        if (os_read_file(file, 1 << 20, &text, &size))
                return 0;
        for (size_t i = 0; i < size; i++)
                count += text[i] == '\n';
        free(text);
        return count;
}

/* fault: as a_root_whose_mount_has_gone_takes_nothing_until_it_is_back */
/* A mount point without its file system is an empty directory of the disk below. */
static void a_line_makes_nothing_in_a_storage_path_that_has_nothing(void)
{
        struct os_stat stat;

        begin();
        end_version("a");
        CHECK(os->stat(storage, false, &stat) == -ENOENT);
        REQUIRE(!os->mkdir(storage, 0755));
        end_version("b");
        CHECK(os->stat(output, false, &stat) == -ENOENT);
        end();
}

static int64_t full_disk(int fd, const void *data, size_t size)
{
        (void)fd;
        (void)data;
        return size ? -ENOSPC : 0;
}

static void a_history_beside_storage_goes_on_when_there_is_room_again(void)
{
        struct os_table table = *os;
        struct version *version;

        begin();
        version = bench_version(&bench, "a", 1, 0);
        REQUIRE(version && !bench_persist(&bench, version));
        history_flush(&bench.catalogue, bench.job->lane);
        CHECK(lines() == 2);
        table.write = full_disk;
        os = &table;
        end_version("b");
        os = &os_linux;
        CHECK(lines() == 2);
        end_version("c");
        CHECK(lines() == 3);
        end();
}

static int64_t half_a_write(int fd, const void *data, size_t size)
{
        return os_linux.write(fd, data, size / 2);
}

static bool has_line(const char *tag)
{
        char *text, begin[40];
        size_t size;
        bool found;

        if (os_read_file(file, 1 << 20, &text, &size))
                return false;
        snprintf(begin, sizeof begin, "\n\"%s\",", tag);
        found = strstr(text, begin) != NULL;
        free(text);
        return found;
}

static void a_line_that_a_full_disk_cuts_harms_no_other(void)
{
        struct os_table table = *os;
        struct version *version;

        begin();
        version = bench_version(&bench, "a", 1, 0);
        REQUIRE(version && !bench_persist(&bench, version));
        table.write = half_a_write;
        os = &table;
        history_flush(&bench.catalogue, bench.job->lane);
        os = &os_linux;
        CHECK(lines() == 0); /* not even a part of the header */
        end_version("b");
        CHECK(lines() == 2 && has_line("b"));
        os = &table;
        end_version("c");
        os = &os_linux;
        end_version("d");
        CHECK(lines() == 4 && has_line("d"));
        end();
}

TAP_MAIN(TEST(a_line_makes_nothing_in_a_storage_path_that_has_nothing), TEST(a_history_beside_storage_goes_on_when_there_is_room_again),
         TEST(a_line_that_a_full_disk_cuts_harms_no_other))
