/*
 * Every system call of saving, persisting, recovering and retaining fails once, in each way that it can. Then
 * earlier durable versions can still be loaded, no version is a mixture, and the next attempt succeeds.
 */
/*
 * fault (Storage): Any system call fails.
 * result: Durable versions can be loaded, no version is a mixture, and the next try succeeds.
 */
#include <errno.h>

#include "agent/agent_catalogue.h"
#include "os/os_fault.h"
#include "store/manifest_load.h"
#include "store/manifest_read.h"
#include "store/record.h"
#include "store/scan.h"
#include "tap.h"

static const int errors[] = { EIO, ENOSPC, ENOMEM, EINTR, OS_FAULT_SHORT };

static char root[64], storage[96], memory[96];

static void fresh(void)
{
        snprintf(root, sizeof root, "/dev/shm/nebula-fault-XXXXXX");
        if (!mkdtemp(root))
                abort();
        snprintf(storage, sizeof storage, "%s/storage", root);
        snprintf(memory, sizeof memory, "%s/memory", root);
}

/* The writing of tag t in storage: 0: none; 1; 2; -1: anything else. */
static int stored_writing(void)
{
        struct nebula_error error;
        struct manifest manifest = { 0 };
        struct store *store;
        int result = 0;

        if (store_open(storage, &store, &error))
                return -1;
        if (!manifest_load(store, "t", &manifest, &error)) {
                bool first = stored_holds(store, &manifest, "a", 1), second = stored_holds(store, &manifest, "a", 3);

                result = !stored_holds(store, &manifest, "b", 2) ? -1 : first ? 1 : second ? 2 : -1;
        } else if (error.status != NEBULA_NOT_FOUND) {
                result = -1;
        }
        manifest_done(&manifest);
        store_close(store);
        return result;
}

static bool sweep_persist(int error, uint64_t at)
{
        struct os_fault fault = { .at = at, .error = error };
        struct version *version;
        struct bench bench;
        enum nebula_status status;
        int writing;
        bool hit;

        fresh();
        bench_init(&bench, NULL, storage);
        version = bench_version(&bench, "t", 1, 2);
        if (!version || bench_persist(&bench, version))
                abort();
        version = bench_version(&bench, "t", 3, 0);
        if (!version)
                abort();
        os_fault_begin(&fault);
        status = storage_scan(&bench.catalogue, bench.job, &bench.error);
        if (!status)
                status = bench_persist(&bench, version);
        hit = os_fault_end();
        writing = stored_writing();
        CHECK(status ? writing >= 1 : writing == 2);
        if (tap_failed_checks)
                printf("# %s with %d at %d: status %d, then writing %d: %s\n", os_fault_where(), error, (int)at, status, writing,
                       bench.error.message);
        if (status) {
                CHECK(!bench_persist(&bench, version)); /* the next try */
                CHECK(stored_writing() == 2);
        }
        bench_done(&bench, true);
        os_remove_tree(root);
        return hit;
}

static void a_version_that_replaces_another_persists_or_leaves_the_older_one(void)
{
        for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
                uint64_t at = 1;

                while (sweep_persist(errors[i], at) && !tap_failed_checks)
                        at += os_fault_step(errors[i]); /* NEBULA_TEST_NIGHTLY=1: each */
                CHECK(at > 1);
        }
}

#define LARGE_BYTES ((1u << 20) + 333)

/* The seed of the large file in storage, of `seeds`; 0: none; -1: anything else. */
static int large_seed(const unsigned *seeds)
{
        static _Alignas(4096) unsigned char data[2u << 20];
        struct manifest manifest = { 0 };
        struct record_file file = { 0 };
        struct nebula_error error;
        struct store *store;
        int result = -1;

        if (store_open(storage, &store, &error))
                return -1;
        if (manifest_load(store, "t", &manifest, &error))
                result = error.status == NEBULA_NOT_FOUND ? 0 : -1;
        else if (!manifest_load_file(store, &manifest, "a", &file, NULL) && file.size == LARGE_BYTES &&
                 !manifest_read_file(store, &manifest, &file, data, NULL))
                for (; *seeds && result < 0; seeds++)
                        result = data[0] == bench_byte(*seeds, 0) && data[LARGE_BYTES - 1] == bench_byte(*seeds, LARGE_BYTES - 1) ? (int)*seeds : -1;
        record_file_done(&file);
        manifest_done(&manifest);
        store_close(store);
        return result;
}

static struct version *save_large(struct bench *bench, unsigned seed)
{
        struct version *version;
        uint64_t id;

        catalogue_lock(&bench->catalogue);
        version = commit_begin(&bench->catalogue, &bench->session, "t", NEBULA_FILES_ALL_RANKS, &bench->error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench->catalogue);
        if (!id || bench_save_bytes(bench, &id, "a", seed, LARGE_BYTES))
                abort();
        catalogue_lock(&bench->catalogue);
        version = catalogue_version(&bench->catalogue, id);
        if (!version || commit_part(&bench->catalogue, &bench->session, version, &bench->error))
                abort();
        catalogue_unlock(&bench->catalogue);
        return version;
}

static bool sweep_large(int error, uint64_t at)
{
        static const unsigned seeds[] = { 1, 3, 0 };
        struct os_fault fault = { .at = at, .error = error };
        struct version *version;
        struct bench bench;
        enum nebula_status status;
        int seed;
        bool hit;

        fresh();
        bench_init(&bench, NULL, storage);
        if (bench_persist(&bench, save_large(&bench, 1)))
                abort();
        version = save_large(&bench, 3);
        os_fault_begin(&fault);
        status = bench_persist(&bench, version);
        hit = os_fault_end();
        seed = large_seed(seeds);
        CHECK(status ? seed > 0 : seed == 3);
        CHECK(!status || !bench_persist(&bench, version)); /* the next try */
        CHECK(large_seed(seeds) == 3);
        if (tap_failed_checks)
                printf("# %s with %d at %d: status %d, then seed %d: %s\n", os_fault_where(), error, (int)at, status, seed, bench.error.message);
        bench_done(&bench, true);
        os_remove_tree(root);
        return hit;
}

static void a_large_file_persists_or_leaves_the_older_one_with_threads_and_with_a_ring(void)
{
        static const int large_errors[] = { EIO, ENOSPC, OS_FAULT_SHORT };
        enum bulk_engine used = bulk_engine_used();

        for (int engine = BULK_ENGINE_THREADS; engine <= BULK_ENGINE_URING; engine++)
                for (size_t i = 0; i < sizeof large_errors / sizeof *large_errors && !bulk_engine_force((enum bulk_engine)engine); i++) {
                        uint64_t at = 1;

                        while (sweep_large(large_errors[i], at) && !tap_failed_checks)
                                at += os_fault_step(large_errors[i]); /* NEBULA_TEST_NIGHTLY=1: each */
                        CHECK(at > 1);
                }
        bulk_engine_force(used);
}

static bool sweep_memory(int error, uint64_t at)
{
        struct os_fault fault = { .at = at, .error = error };
        struct version *version;
        struct bench bench;
        bool hit, saved, kept = false;

        fresh();
        bench_init(&bench, memory, storage);
        version = bench_version(&bench, "t", 1, 2);
        if (!version)
                abort();
        os_fault_begin(&fault);
        saved = bench_version(&bench, "u", 5, 6) != NULL;
        bench_done(&bench, false); /* killed */
        bench_init(&bench, memory, storage);
        hit = os_fault_end();
        bench_done(&bench, false); /* and once more, without faults */
        bench_init(&bench, memory, storage);
        for (version = bench.job->versions; version; version = version->next) {
                unsigned seed = *version->tag == 't' ? 1 : 5;
                void *data;

                if (!lifecycle_complete(version->life.state))
                        continue;
                for (size_t i = 0; i < version->file_count; i++) {
                        CHECK(version->files[i].image && !image_map(version->files[i].image, &data, NULL));
                        CHECK(((unsigned char *)data)[99] == bench_byte(seed + (*version->files[i].name == 'b'), 99));
                }
                CHECK(version->file_count == 2);
                kept = kept || *version->tag == 't';
        }
        CHECK(kept); /* it was whole before */
        if (tap_failed_checks)
                printf("# %s with %d at %d\n", os_fault_where(), error, (int)at);
        if (!hit)
                CHECK(saved && bench.job->versions && bench.job->versions->next);
        bench_done(&bench, true);
        os_remove_tree(root);
        return hit;
}

static void the_next_agent_adopts_whole_versions(void)
{
        for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
                uint64_t at = 1;

                while (sweep_memory(errors[i], at) && !tap_failed_checks)
                        at += os_fault_step(errors[i]); /* NEBULA_TEST_NIGHTLY=1: each */
                CHECK(at > 1);
        }
}

static bool sweep_retain(int error, uint64_t at)
{
        struct os_fault fault = { .at = at, .error = error };
        struct manifest_scan scan = { 0 };
        struct nebula_error failure;
        struct store *store;
        struct bench bench;
        bool hit;

        fresh();
        bench_init(&bench, NULL, storage);
        for (unsigned i = 1; i < 4; i++) {
                char tag[32];
                struct version *version;

                snprintf(tag, sizeof tag, "global_step%u", i);
                version = bench_version(&bench, tag, i, 9);
                if (!version || bench_persist(&bench, version))
                        abort();
        }
        bench_keep(bench.job, 1);
        os_fault_begin(&fault);
        bench_retain(&bench);
        hit = os_fault_end();
        CHECK(!store_open(storage, &store, &failure));
        CHECK(!manifest_scan(store, &scan, &failure) && scan.count >= 1 && !scan.broken_count);
        for (size_t i = 0; i < scan.count; i++)
                CHECK(stored_holds(store, &scan.manifests[i], "a", (unsigned)scan.manifests[i].step) &&
                      stored_holds(store, &scan.manifests[i], "b", 9));
        CHECK(scan.count && scan.manifests[scan.count - 1].step == 3);
        if (!hit)
                CHECK(scan.count == 1);
        manifest_scan_done(&scan);
        store_close(store);
        bench_done(&bench, true);
        os_remove_tree(root);
        return hit;
}

static void retention_never_leaves_half_a_version(void)
{
        for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
                uint64_t at = 1;

                while (sweep_retain(errors[i], at) && !tap_failed_checks)
                        at += os_fault_step(errors[i]); /* NEBULA_TEST_NIGHTLY=1: each */
        }
}

TAP_MAIN(TEST(a_version_that_replaces_another_persists_or_leaves_the_older_one), TEST(a_large_file_persists_or_leaves_the_older_one_with_threads_and_with_a_ring),
         TEST(the_next_agent_adopts_whole_versions),
         TEST(retention_never_leaves_half_a_version))
