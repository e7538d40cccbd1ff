/*
 * The power fails at every moment of removing a version, of writing its tag again, and of a sweep. The newest version that can be
 * loaded is the last durable one, or a complete one after it. Removed versions do not come back. The next start leaves no debris.
 */
#include "agent/agent_catalogue.h"
#include "agent/restore/restore.h"
#include "base/error.h"
#include "os/os_crash.h"
#include "store/manifest_load.h"
#include "store/manifest_remove.h"
#include "store/sweep.h"
#include "tap.h"

#define SEEDS os_crash_seeds(8) /* more with NEBULA_TEST_NIGHTLY=1 */
#define STEPS 4

static char root[64], other[96], storage[96];

/* For each step: since when it has been durable, about to be removed, and removed; UINT64_MAX: never. */
struct life {
        uint64_t durable, goes, gone;
};
static struct life lives[STEPS + 1];

static void tag_of(unsigned step, char ret_tag[32])
{
        snprintf(ret_tag, 32, "step%u", step);
}

static void begin(struct bench *bench)
{
        snprintf(root, sizeof root, "/dev/shm/nebula-crash-XXXXXX");
        if (!mkdtemp(root))
                abort();
        snprintf(storage, sizeof storage, "%s/storage", root);
        snprintf(other, sizeof other, "%s-after", root);
        for (unsigned step = 0; step <= STEPS; step++)
                lives[step] = (struct life){ UINT64_MAX, UINT64_MAX, UINT64_MAX };
        if (os->mkdir(storage, 0755))
                abort();
        bench_init(bench, NULL, storage);
        bench->catalogue.sweep_age_s = 0;
        if (os_crash_begin(storage))
                abort();
}

static struct version *save(struct bench *bench, unsigned step)
{
        struct version *version;
        char tag[32];

        tag_of(step, tag);
        version = bench_version(bench, tag, step, step + 20);
        if (!version)
                abort();
        return version;
}

static void write_step(struct bench *bench, unsigned step)
{
        CHECK(!bench_persist(bench, save(bench, step)));
        lives[step].durable = os_crash_position();
        lives[step].goes = lives[step].gone = UINT64_MAX;
}

static const struct store_ops *stored_ops;

static enum nebula_status refuse_manifest(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                          const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        if (strstr(key, "/manifest-"))
                return error_set(error, NEBULA_STORAGE, 0, "no manifest");
        return stored_ops->put(store, key, data, size, condition, seen, ret_stamp, error);
}

/* As an agent that is killed before the manifest. */
static void write_half(struct bench *bench, unsigned step)
{
        struct store *store = bench->job->storage->store;
        struct store_ops ops;

        stored_ops = store->ops;
        ops = *stored_ops;
        ops.put = refuse_manifest;
        store->ops = &ops;
        CHECK(bench_persist(bench, save(bench, step)) == NEBULA_STORAGE);
        store->ops = stored_ops;
}

static void remove_step(struct bench *bench, unsigned step)
{
        struct manifest manifest = { 0 };
        char tag[32];

        tag_of(step, tag);
        lives[step].goes = os_crash_position();
        CHECK(!manifest_load(bench->job->storage->store, tag, &manifest, NULL) && !manifest_remove(bench->job->storage->store, &manifest, &bench->error));
        manifest_done(&manifest);
        lives[step].gone = os_crash_position();
}

/* 0: absent; 1: whole; -1: damaged. */
static int look(struct store *store, unsigned step)
{
        struct manifest manifest = { 0 };
        struct nebula_error error;
        char tag[32];
        enum nebula_status status;
        int result;

        tag_of(step, tag);
        status = manifest_load(store, tag, &manifest, &error);
        if (status)
                return status == NEBULA_NOT_FOUND ? 0 : -1;
        result = stored_holds(store, &manifest, "a", step) && stored_holds(store, &manifest, "b", step + 20) ? 1 : -1;
        manifest_done(&manifest);
        return result;
}

static bool is_allowed(int found, const struct life *life, uint64_t at)
{
        if (at >= life->durable && at <= life->goes)
                return found == 1;
        if (at >= life->gone && life->gone >= life->durable)
                return found == 0;
        return found >= 0;
}

static size_t count_objects(struct store *store, unsigned step)
{
        struct store_list list;
        char prefix[40];
        size_t count;

        snprintf(prefix, sizeof prefix, "step%u/", step);
        if (store_list_all(store, prefix, true, &list, NULL))
                abort();
        count = list.count;
        store_list_done(&list);
        return count;
}

/* The step that a restarted job finds without memory; -1: none. */
static int64_t newest(struct bench *bench)
{
        static struct ipc_find find;
        struct session session = { .nonce = 2, .pid = os->pid(), .world = 1, .connection_count = 1, .role = IPC_ROLE_TOOL, .job = bench->job };
        struct ipc_found found;
        enum nebula_status status = restore_find(&bench->catalogue, &session, &find, &found, &bench->error);

        return !status ? found.step : status == NEBULA_NOT_FOUND ? -1 : -2;
}

/* As found, or after the next start. */
static bool holds(struct bench *bench, uint64_t at, bool is_swept)
{
        int64_t newest_step = -1;
        bool good = true;

        for (unsigned step = 1; step <= STEPS; step++) {
                int found = look(bench->job->storage->store, step);

                good = good && is_allowed(found, &lives[step], at) && (!is_swept || found || !count_objects(bench->job->storage->store, step));
                newest_step = found == 1 ? (int64_t)step : newest_step;
        }
        return good && newest(bench) == newest_step;
}

/* A completed removal leaves temporary files of its last minute to the next sweep. */
static bool start_twice(struct bench *bench)
{
        return !storage_scan(&bench->catalogue, bench->job, &bench->error) && !storage_scan(&bench->catalogue, bench->job, &bench->error);
}

static void check_state(uint64_t at, uint64_t seed)
{
        for (int round = 0; round < 2; round++) {
                struct store *store;
                struct bench bench;
                bool good;

                bench_init(&bench, NULL, other);
                bench.catalogue.sweep_age_s = 0;
                good = !storage_open(&bench.catalogue, bench.job, &store, NULL) && (!round || start_twice(&bench)) &&
                       holds(&bench, at, round);
                if (!good)
                        printf("# power lost at %d, seed %d, round %d: steps %d, %d, %d, %d, the newest %d: %s\n", (int)at, (int)seed, round,
                               look(store, 1), look(store, 2), look(store, 3), look(store, 4), (int)newest(&bench), bench.error.message);
                CHECK(good);
                bench_done(&bench, true);
        }
}

static void check_all(struct bench *bench)
{
        uint64_t last = os_crash_position();

        os_crash_end();
        bench_done(bench, true);
        for (uint64_t at = 0; at <= last && !tap_failed_checks; at++)
                for (uint64_t seed = 0; seed < SEEDS && !tap_failed_checks; seed++) {
                        REQUIRE(!os_crash_materialise(at, seed, other));
                        check_state(at, seed);
                }
        os_crash_free();
        os_remove_tree(root);
        os_remove_tree(other);
}

static void a_removed_version_is_whole_or_gone_and_the_newest_one_loads(void)
{
        struct bench bench;

        begin(&bench);
        write_step(&bench, 1);
        write_step(&bench, 2);
        remove_step(&bench, 1);
        check_all(&bench);
}

static void a_tag_that_was_removed_is_written_again(void)
{
        struct bench bench;

        begin(&bench);
        write_step(&bench, 2);
        remove_step(&bench, 2);
        write_step(&bench, 2);
        check_all(&bench);
}

static void a_sweep_takes_what_no_manifest_names_and_nothing_else(void)
{
        struct bench bench;
        size_t removed;

        begin(&bench);
        write_step(&bench, 1);
        write_half(&bench, 2);
        CHECK(!manifest_sweep(bench.job->storage->store, 0, &removed, &bench.error) && removed == 1);
        write_step(&bench, 2);
        check_all(&bench);
}

TAP_MAIN(TEST(a_removed_version_is_whole_or_gone_and_the_newest_one_loads), TEST(a_tag_that_was_removed_is_written_again),
         TEST(a_sweep_takes_what_no_manifest_names_and_nothing_else))
