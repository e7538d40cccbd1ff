/* Leases of a reader's versions in storage. */
#include <errno.h>

#include "agent/agent_catalogue.h"
#include "agent/persist/worker.h"
#include "tap.h"
#include "test_dir.h"

static bool refuses;
static int64_t later_ns;

static int refusing_open(const char *root, const char *key, int flags)
{
        return refuses && flags & OS_CREATE ? -EACCES : os_linux.open_below(root, key, flags);
}

static int64_t later(void)
{
        return os_linux.now_ns() + later_ns;
}

static bool has_lease(const char *storage)
{
        char name[300];
        struct os_dir *dir;
        bool is_any = false;

        if (os->opendir_below(storage, ".nebula/leases/step1", &dir))
                return false;
        while (os->readdir(dir, name, sizeof name) > 0)
                is_any |= strlen(name) == 16;
        os->closedir(dir);
        return is_any;
}

static void work(struct bench *bench)
{
        catalogue_lock(&bench->catalogue);
        bench->job->is_remover = bench->job->scan_due = bench->job->retain_due = false;
        catalogue_unlock(&bench->catalogue);
        worker_run(&bench->catalogue, bench->job);
}

/* fault (Storage): Storage refuses for a while what the agent of a reader writes, because its key has expired.
 * result: Later the agent goes on to lease the version that the reader holds. */
static void a_lease_that_storage_has_taken_is_written_again_after_it_was_refused(void)
{
        struct os_table table = os_linux;
        char directory[256], storage[300], path[400];
        struct version *version;
        struct bench bench;

        test_dir_make(directory);
        snprintf(storage, sizeof storage, "%s/storage", directory);
        table.open_below = refusing_open;
        table.now_ns = later;
        os = &table;
        bench_init(&bench, NULL, storage);
        version = bench_version(&bench, "step1", 1, 0);
        REQUIRE(version && !bench_persist(&bench, version));
        version->leases = 1;
        work(&bench);
        CHECK(has_lease(storage));
        snprintf(path, sizeof path, "%s/.nebula/leases", storage);
        os_remove_tree(path);
        refuses = true;
        later_ns = 300 * SECOND_NS;
        work(&bench);
        CHECK(!has_lease(storage));
        refuses = false;
        later_ns = 600 * SECOND_NS;
        work(&bench);
        CHECK(has_lease(storage));
        version->leases = 0;
        bench_done(&bench, true);
        os = &os_linux;
        test_dir_remove(directory);
}

TAP_MAIN(TEST(a_lease_that_storage_has_taken_is_written_again_after_it_was_refused))
