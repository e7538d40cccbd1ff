/*
 * The power fails at every moment while two versions are persisted and one of them is written again. Versions that were
 * reported as durable load. The rewritten tag is the old or the new version, never a mixture, also after the next agent's
 * start. That start's sweep leaves no file of an unfinished version.
 */
/*
 * fault (Storage): Power loss at any point.
 * result: The newest durable version or the one before it can be loaded.
 */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <time.h>
#include <sys/stat.h>

#include "agent/agent_catalogue.h"
#include "agent/restore/restore.h"
#include "os/os_crash.h"
#include "os/os_fault.h"
#include "store/manifest_load.h"
#include "tap.h"

#define SEEDS os_crash_seeds(12) /* more with NEBULA_TEST_NIGHTLY=1 */

static char root[64], other[96], storage[96];
static bool has_failed; /* a system call failed: a view that cannot be made does not fail its version */

/* The file at <tag>/a: 0: none; 1: of the first writing; 2: of the second, as a view; -1: anything else. */
static int view_of(const char *tag)
{
        static const unsigned seeds[] = { 1, 5 };
        char path[200], *data;
        size_t size;
        int result = -1;

        snprintf(path, sizeof path, "%s/%s/a", other, tag);
        if (os_read_file(path, 1 << 20, &data, &size))
                return 0;
        for (int i = 0; i < 2 && size == BENCH_FILE_BYTES && result < 0; i++) {
                size_t same = 0;

                while (same < size && (unsigned char)data[same] == bench_byte(seeds[i], same))
                        same++;
                result = same == size ? i + 1 : -1;
        }
        free(data);
        return result;
}

/* 0: absent; 1: the first writing; 2: the second; -1: anything else. */
static int writing_of(struct store *store, const char *tag, unsigned a1, unsigned a2, unsigned b)
{
        struct nebula_error error;
        struct manifest manifest = { 0 };
        enum nebula_status status = manifest_load(store, tag, &manifest, &error);
        int result = -1;

        if (status == NEBULA_NOT_FOUND)
                return 0;
        if (!status && stored_holds(store, &manifest, "b", b)) {
                if (manifest.writing == 1 && stored_holds(store, &manifest, "a", a1))
                        result = 1;
                else if (a2 && manifest.writing == 2 && stored_holds(store, &manifest, "a", a2))
                        result = 2;
        }
        manifest_done(&manifest);
        return result;
}

/* The tag that a restarted job finds: 't' or 'u'; '-': none; '!': a failure. */
static char newest_tag(struct bench *bench)
{
        static struct ipc_find find;
        struct session session = { .nonce = 2, .pid = os->pid(), .world = 1, .connection_count = 1, .role = IPC_ROLE_TOOL, .job = bench->job };
        struct ipc_found found;
        enum nebula_status status = restore_find(&bench->catalogue, &session, &find, &found, &bench->error);

        return !status ? found.tag[0] : status == NEBULA_NOT_FOUND ? '-' : '!';
}

static int age(const char *path, const struct stat *stat, int kind, struct FTW *where)
{
        const struct timespec hour_ago = { .tv_sec = time(NULL) - 3600 };

        return utimensat(AT_FDCWD, path, (const struct timespec[]){ hour_ago, hour_ago }, AT_SYMLINK_NOFOLLOW);
}

/* As found, or after the start of an agent an hour later. */
static bool holds_now(uint64_t at, uint64_t seed, const uint64_t *durable, bool is_started)
{
        struct store *store;
        struct bench bench;
        int t, u, view;
        char newest;
        bool good;

        if (is_started && nftw(other, age, 16, FTW_PHYS))
                return false;
        bench_init(&bench, NULL, other);
        bench.catalogue.sweep_age_s = 0;
        if (storage_open(&bench.catalogue, bench.job, &store, NULL) || (is_started && storage_scan(&bench.catalogue, bench.job, &bench.error)))
                return false;
        t = writing_of(store, "t", 1, 5, 2);
        u = writing_of(store, "u", 3, 0, 4);
        view = view_of("t");
        newest = newest_tag(&bench);
        good = view >= 0 && (!t || view) && (is_started && !has_failed ? view == t : view <= t || !t) && (at < durable[2] || view == 2 || has_failed);
        good = good && newest == (t == 2 ? 't' : u ? 'u' : t ? 't' : '-');
        good = good && t >= 0 && u >= 0 && (at < durable[0] || t) && (at < durable[1] || u) && (at < durable[2] || t == 2);
        if (!good)
                printf("# position %d, seed %d, %s: t is %d, u is %d, at t/a lies %d, the newest is %c\n", (int)at, (int)seed,
                       is_started ? "after a start" : "as found", t, u, view, newest);
        bench_done(&bench, true);
        return good;
}

static bool holds(uint64_t at, uint64_t seed, const uint64_t *durable)
{
        return holds_now(at, seed, durable, false) && holds_now(at, seed, durable, true);
}

/* From now on the changes in `storage` are recorded. */
static bool begin(struct bench *bench)
{
        snprintf(root, sizeof root, "/dev/shm/nebula-crash-XXXXXX");
        if (!mkdtemp(root))
                return false;
        snprintf(storage, sizeof storage, "%s/storage", root);
        snprintf(other, sizeof other, "%s-after", root);
        if (os->mkdir(storage, 0755))
                return false;
        bench_init(bench, NULL, storage);
        return !os_crash_begin(storage);
}

static void a_durable_version_loads_after_every_power_loss(void)
{
        uint64_t durable[3], last;
        struct version *version;
        struct bench bench;

        REQUIRE(begin(&bench));
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version && !bench_persist(&bench, version));
        durable[0] = os_crash_position();
        version = bench_version(&bench, "u", 3, 4);
        REQUIRE(version && !bench_persist(&bench, version));
        durable[1] = os_crash_position();
        version = bench_version(&bench, "t", 5, 0);
        REQUIRE(version && !bench_persist(&bench, version));
        durable[2] = last = os_crash_position();
        os_crash_end();
        bench_done(&bench, true);
        for (uint64_t at = 0; at <= last && !tap_failed_checks; at++)
                for (uint64_t seed = 0; seed < SEEDS; seed++) {
                        REQUIRE(!os_crash_materialise(at, seed, other));
                        CHECK(holds(at, seed, durable));
                }
        os_crash_free();
        os_remove_tree(root);
        os_remove_tree(other);
}

/* Whether the manifest names every file outside .nebula. */
static bool has_only_what_is_named(struct store *store, const char *tag)
{
        struct manifest manifest = { 0 };
        struct store_list list = { 0 };
        char prefix[300];
        bool good = true;

        snprintf(prefix, sizeof prefix, "%s/", tag);
        manifest_load(store, tag, &manifest, NULL);
        if (store_list_all(store, prefix, false, &list, NULL))
                abort();
        for (size_t i = 0; i < list.count; i++)
                good = good && (list.entries[i].is_prefix || manifest_find_file(&manifest, list.entries[i].key + strlen(prefix)));
        store_list_done(&list);
        manifest_done(&manifest);
        return good;
}

static bool next_start_sweeps(uint64_t at, uint64_t seed)
{
        struct bench bench;
        struct store *store;
        bool good;

        bench_init(&bench, NULL, other);
        bench.catalogue.sweep_age_s = 0;
        good = !storage_scan(&bench.catalogue, bench.job, &bench.error) && !storage_open(&bench.catalogue, bench.job, &store, NULL) &&
               has_only_what_is_named(store, "t");
        bench_done(&bench, true);
        if (!good)
                printf("# position %d, seed %d: something is left\n", (int)at, (int)seed);
        return good;
}

/*
 * fault (Storage): Power loss, or death of the agent, before a version is complete.
 * result: The sweep of a later start removes the remains once they are 15 minutes old. It knows them, because every
 * file in place was in a record first.
 */
static void nothing_that_was_not_completed_stays_after_a_sweep(void)
{
        struct version *version;
        struct bench bench;
        uint64_t last;

        REQUIRE(begin(&bench));
        version = bench_version(&bench, "t", 1, 0);
        REQUIRE(version && !bench_persist(&bench, version));
        version = bench_version(&bench, "t", 0, 2); /* a file that the first writing did not have */
        REQUIRE(version && !bench_persist(&bench, version));
        last = os_crash_position();
        os_crash_end();
        bench_done(&bench, true);
        for (uint64_t at = 0; at <= last && !tap_failed_checks; at++)
                for (uint64_t seed = 0; seed < SEEDS; seed++) {
                        REQUIRE(!os_crash_materialise(at, seed, other));
                        CHECK(next_start_sweeps(at, seed));
                }
        os_crash_free();
        os_remove_tree(root);
        os_remove_tree(other);
}

/* The k-th fsync fails, and the next try reports the version durable. False: there were fewer. */
static bool fails_once(uint64_t k, bool writes_again)
{
        struct os_fault fault = { .calls = "fsync", .at = k, .error = EIO };
        uint64_t durable[3] = { UINT64_MAX, UINT64_MAX, UINT64_MAX }, at;
        struct version *version;
        struct bench bench;
        bool hit;

        if (!begin(&bench))
                abort();
        version = bench_version(&bench, "t", 1, 2);
        if (writes_again && version && !bench_persist(&bench, version))
                version = bench_version(&bench, "t", 5, 0);
        if (!version)
                abort();
        os_fault_begin(&fault);
        if (bench_persist(&bench, version)) {
                hit = os_fault_end();
                CHECK(!bench_persist(&bench, version));
        } else {
                hit = os_fault_end();
        }
        has_failed = hit;
        durable[writes_again ? 2 : 0] = at = os_crash_position();
        os_crash_end();
        bench_done(&bench, true);
        for (uint64_t seed = 0; seed < 4; seed++) {
                CHECK(!os_crash_materialise(at, seed, other));
                CHECK(holds(at, seed, durable));
        }
        os_crash_free();
        os_remove_tree(root);
        os_remove_tree(other);
        return hit;
}

/*
 * fault (Storage): A sync of a directory fails, the next try succeeds, then the power fails.
 * result: The version that the second try called durable can be loaded.
 */
static void a_version_that_a_second_try_calls_durable_loads_after_a_power_loss(void)
{
        for (int writes_again = 0; writes_again < 2; writes_again++) {
                uint64_t k = 0;

                while (fails_once(++k, writes_again) && !tap_failed_checks)
                        ;
                if (tap_failed_checks)
                        printf("# fsync %d of a %s writing\n", (int)k, writes_again ? "second" : "first");
                CHECK(k > 5);
        }
}

TAP_MAIN(TEST(a_durable_version_loads_after_every_power_loss), TEST(a_version_that_a_second_try_calls_durable_loads_after_a_power_loss),
         TEST(nothing_that_was_not_completed_stays_after_a_sweep))
