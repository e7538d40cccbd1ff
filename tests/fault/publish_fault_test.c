/*
 * Every system call of publishing fails once, in each way that it can, or fails from there on until the agent
 * ends. The file at the path is complete, staged files are not lost, and the next attempt succeeds and leaves no
 * temporary file.
 */
/*
 * fault (Storage): Any system call of publishing fails, or the agent dies there.
 * result: A published path holds the old or the new file, whole. Staged files are not lost. The next try or agent
 * finishes and leaves no debris.
 */
#include <errno.h>

#include "agent/publish/publish_list.h"
#include "agent/agent_publish.h"
#include "os/os_fault.h"
#include "tap.h"

static const int errors[] = { EIO, ENOSPC, ENOMEM, EINTR, OS_FAULT_SHORT };
static const unsigned seeds[] = { 1, 5, 0 };

static char root[64], storage[96], memory[96], file[96], directory[96], staging[96];
static struct bench bench;

/* The way a file gets to its path. */
static enum way { COPY, COPY_STORED, SHARE, WAY_COUNT } way;

static int share_blocks(int fd, int from)
{
        static char data[BENCH_FILE_BYTES];

        return os_linux.pread(from, data, sizeof data, 0) == sizeof data && os_linux.pwrite(fd, data, sizeof data, 0) == sizeof data ?
                       0 : -EIO;
}

static int share_nothing(int fd, int from)
{
        (void)fd;
        (void)from;
        return -EOPNOTSUPP;
}

static struct os_table ways_table;

static void use(enum way wanted)
{
        way = wanted;
        ways_table = os_linux;
        ways_table.clone = way == SHARE ? share_blocks : share_nothing;
        os = &ways_table;
}

/* Storage has the version, and memory no longer. */
static void forget_memory(struct version *version)
{
        catalogue_lock(&bench.catalogue);
        version->stored = true; /* as the worker says when it is */
        version_forget_memory(&bench.catalogue, version);
        catalogue_unlock(&bench.catalogue);
}

/* File and directory of the first version are published; publishing those of the second is requested. */
static void fresh(void)
{
        struct version *first, *second;

        snprintf(root, sizeof root, "/dev/shm/nebula-fault-XXXXXX");
        if (!mkdtemp(root))
                abort();
        snprintf(storage, sizeof storage, "%s/storage", root);
        snprintf(memory, sizeof memory, "%s/memory", root);
        snprintf(file, sizeof file, "%s/x", root);
        snprintf(directory, sizeof directory, "%s/best", root);
        snprintf(staging, sizeof staging, "%s/.staging", root);
        bench_init(&bench, memory, storage);
        bench.catalogue.sweep_age_s = 900;
        first = bench_version(&bench, "t1", 1, 2);
        stage(staging, "a");
        if (!first || ask(&bench, first, "a", file, "") || ask(&bench, first, "", directory, staging) || bench_persist(&bench, first) ||
            !work(&bench, 9))
                abort();
        second = bench_version(&bench, "t2", 5, 2);
        stage(staging, "b");
        if (!second || ask(&bench, second, "a", file, "") || ask_removal(&bench, directory) ||
            ask(&bench, second, "", directory, staging) || bench_persist(&bench, second))
                abort();
        if (way == COPY_STORED)
                forget_memory(second);
}

static void check_between(void)
{
        char x = look_file(file, seeds), best = look_directory(directory, seeds);

        CHECK(x == 'a' || x == 'b');
        CHECK(best == 'a' || best == 'b');
}

static void check_end(void)
{
        CHECK(look_file(file, seeds) == 'b');
        CHECK(look_directory(directory, seeds) == 'b');
        CHECK(debris_in(root) == 0);
}

static bool sweep_once(int error, uint64_t at)
{
        struct os_fault fault = { .at = at, .error = error };
        bool hit;

        fresh();
        os_fault_begin(&fault);
        work(&bench, 9);
        hit = os_fault_end();
        check_between();
        CHECK(work(&bench, 9)); /* the next try */
        check_end();
        if (tap_failed_checks)
                printf("# way %d: %s with %d at %d\n", (int)way, os_fault_where(), error, (int)at);
        bench_done(&bench, true);
        os_remove_tree(root);
        return hit;
}

static void after_any_failed_call_the_next_try_publishes_the_whole(void)
{
        for (int one = 0; one < WAY_COUNT && !tap_failed_checks; one++) {
                use((enum way)one);
                for (size_t i = 0; i < (one == COPY ? sizeof errors / sizeof errors[0] : 1); i++) {
                        uint64_t at = 1;

                        while (sweep_once(errors[i], at) && !tap_failed_checks)
                                at += os_fault_step(errors[i]); /* NEBULA_TEST_NIGHTLY=1: each */
                        CHECK(at > 1);
                }
        }
}

/* All calls fail from the k-th on, and then the agent is gone, as after a SIGKILL. */
static bool sweep_kill(uint64_t at)
{
        struct os_fault fault = { .at = at, .error = EIO, .goes_on = true };
        bool hit;

        fresh();
        os_fault_begin(&fault);
        work(&bench, 2);
        hit = os_fault_end();
        check_between();
        bench_done(&bench, false);
        bench_init(&bench, memory, storage);
        bench.catalogue.sweep_age_s = 900;
        publish_adopt_all(&bench.catalogue);
        CHECK(!storage_scan(&bench.catalogue, bench.job, &bench.error));
        for (struct version *version = bench.job->versions; version; version = version->next)
                if (!version->stored && lifecycle_complete(version->life.state))
                        CHECK(!bench_persist(&bench, version));
        CHECK(work(&bench, 9));
        check_end();
        if (tap_failed_checks)
                printf("# nothing works from %s on, the %d\n", os_fault_where(), (int)at);
        bench_done(&bench, true);
        os_remove_tree(root);
        return hit;
}

static void an_agent_that_dies_at_any_call_leaves_the_rest_to_the_next(void)
{
        for (int one = 0; one < WAY_COUNT && !tap_failed_checks; one++) {
                uint64_t at = 0;

                use((enum way)one);
                while (sweep_kill(++at) && !tap_failed_checks)
                        ;
                CHECK(at > 1);
        }
}

/* Removing the directory, from the first call to the last. */
static bool sweep_removal(int error, uint64_t at)
{
        struct os_fault fault = { .at = at, .error = error };
        struct os_stat stat;
        char best;
        bool hit;

        fresh();
        if (!work(&bench, 9) || ask_removal(&bench, directory))
                abort();
        os_fault_begin(&fault);
        work(&bench, 9);
        hit = os_fault_end();
        best = look_directory(directory, seeds);
        CHECK(best == 'b' || best == '-');
        CHECK(work(&bench, 9));
        CHECK(look_directory(directory, seeds) == '-' && look_file(file, seeds) == 'b' && debris_in(root) == 0);
        if (!hit) { /* the version is removed, too */
                char path[200];

                snprintf(path, sizeof path, "%s/t2", storage);
                CHECK(os->stat(path, false, &stat) == -ENOENT);
        }
        if (tap_failed_checks)
                printf("# %s with %d at %d\n", os_fault_where(), error, (int)at);
        bench_done(&bench, true);
        os_remove_tree(root);
        return hit;
}

static void a_directory_that_is_to_go_is_whole_until_it_is_gone(void)
{
        use(COPY);
        for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
                uint64_t at = 1;

                while (sweep_removal(errors[i], at) && !tap_failed_checks)
                        at += os_fault_step(errors[i]); /* NEBULA_TEST_NIGHTLY=1: each */
                CHECK(at > 1);
        }
}

static int no_exchange(const char *a, const char *b)
{
        (void)a;
        (void)b;
        return -EINVAL;
}

/* The old directory is moved aside for a moment, but nothing is lost or left over. */
static void a_file_system_without_exchange_ends_at_the_same(void)
{
        use(COPY);
        ways_table.exchange = no_exchange;
        for (uint64_t at = 1; !tap_failed_checks; at++) {
                struct os_fault fault = { .at = at, .error = EIO };
                bool hit;

                fresh();
                os_fault_begin(&fault);
                work(&bench, 9);
                hit = os_fault_end();
                CHECK(work(&bench, 9));
                check_end();
                if (tap_failed_checks)
                        printf("# %s at %d\n", os_fault_where(), (int)at);
                bench_done(&bench, true);
                os_remove_tree(root);
                if (!hit)
                        break;
        }
}

TAP_MAIN(TEST(after_any_failed_call_the_next_try_publishes_the_whole),
         TEST(an_agent_that_dies_at_any_call_leaves_the_rest_to_the_next),
         TEST(a_directory_that_is_to_go_is_whole_until_it_is_gone),
         TEST(a_file_system_without_exchange_ends_at_the_same))
