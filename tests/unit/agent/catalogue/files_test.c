/* The files of a version: tens of thousands can be found and carried over, each belongs to one rank, and a version
 * counts as stored only if storage has all of them. */
#include <fcntl.h>
#include <unistd.h>

#include "agent/agent_catalogue.h"
#include "agent/agent_storage.h"
#include "base/log.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/scan.h"
#include "tap.h"

#define STORED_COUNT 32768u

/* Makes the manifest of a job of 16,384 ranks with two files each, as storage would list it. */
static void make_manifest(struct manifest *ret_manifest)
{
        struct manifest manifest = { .tag = "step1", .number = 1, .writing = 1, .sequence = 1, .step = 1, .world = 1 };
        char *text;
        size_t size;

        if (manifest_reserve(&manifest, STORED_COUNT, 1, NULL))
                abort();
        manifest.records[manifest.record_count++] = (struct manifest_record){ .sequence = 1 };
        writing_name("", "", 1, 1, manifest.records[0].writing);
        for (unsigned i = 0; i < STORED_COUNT; i++) {
                char name[MANIFEST_NAME_MAX];
                struct manifest_file file = { .name = name, .size = i };

                snprintf(name, sizeof name, "zero_pp_rank_%u_mp_rank_00_optim_states.pt", i);
                if (manifest_add_file(&manifest, &file, NULL))
                        abort();
        }
        if (manifest_format(&manifest, &text, &size, NULL) || manifest_parse(text, size, ret_manifest, NULL))
                abort();
        free(text);
        manifest_done(&manifest);
}

static void each_of_many_files_is_found_and_carried_over(void)
{
        struct manifest *manifest;
        struct manifest_scan scan;
        struct version *stored, *version;
        struct bench bench;
        char name[IPC_NAME_MAX];
        uint64_t id;
        bool found = true;

        bench_init(&bench, NULL, "");
        manifest = calloc(1, sizeof *manifest);
        if (!manifest)
                abort();
        make_manifest(manifest);
        scan = (struct manifest_scan){ .manifests = manifest, .count = 1 };
        REQUIRE(known_new(&scan, bench.job->name, &bench.job->known));
        manifest = bench.job->known.list[0];
        catalogue_lock(&bench.catalogue);
        stored = catalogue_stored(&bench.catalogue, bench.job, manifest);
        version = commit_begin(&bench.catalogue, &bench.session, "step1", NEBULA_FILES_ALL_RANKS, &bench.error);
        catalogue_unlock(&bench.catalogue);
        REQUIRE(stored && version && stored->file_count == STORED_COUNT);
        id = version->id;
        REQUIRE(!bench_save(&bench, &id, "zero_pp_rank_7_mp_rank_00_optim_states.pt", 3));
        catalogue_lock(&bench.catalogue);
        version = catalogue_version(&bench.catalogue, id);
        CHECK(!commit_part(&bench.catalogue, &bench.session, version, &bench.error));
        CHECK(version->file_count == STORED_COUNT); /* one file is new, and all others are carried over */
        for (unsigned i = 0; i < STORED_COUNT; i++) {
                const struct agent_file *file;

                snprintf(name, sizeof name, "zero_pp_rank_%u_mp_rank_00_optim_states.pt", i);
                file = version_file(version, name);
                found = found && file && !strcmp(file->name, name) && file->size == (i == 7 ? BENCH_FILE_BYTES : i) &&
                        file->origin == (i == 7 ? 0 : 1);
        }
        CHECK(found && !version_file(version, "zero_pp_rank_32768_mp_rank_00_optim_states.pt"));
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

static enum nebula_status save_as(struct bench *bench, uint64_t id, uint32_t rank, const char *name, bool copies)
{
        struct ipc_image request = { .version_id = id, .size = 100, .format = IPC_FORMAT_RAW };
        struct ipc_captured done = { 0 };
        struct version *version;
        struct image_loan *loan;
        enum nebula_status status;

        strcpy(request.name, name);
        bench->session.rank = rank;
        bench->session.nonce = rank + 1;
        catalogue_lock(&bench->catalogue);
        status = image_loan_open(&bench->catalogue, &bench->session, &request, never, NULL, &version, &loan, &bench->error);
        if (!status && !copies)
                status = commit_captured(&bench->catalogue, version, loan, &done, &bench->error);
        catalogue_unlock(&bench->catalogue);
        return status;
}

static void a_name_that_a_rank_saves_again_counts_once(void)
{
        struct version *version;
        struct bench bench;
        uint64_t id;

        bench_init(&bench, NULL, "");
        bench.session.world = bench.job->settings.world = 2;
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", 2, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        CHECK(!save_as(&bench, id, 0, "a.pt", false));
        CHECK(!save_as(&bench, id, 0, "a.pt", false));
        CHECK(version->file_count == 1 && version->life.state < NEBULA_STATE_COMMITTED);
        CHECK(!save_as(&bench, id, 0, "b.pt", false));
        CHECK(version->file_count == 2 && version->life.state == NEBULA_STATE_COMMITTED);
        bench_done(&bench, true);
}

/* Returns the lines that the agent has logged since the last call. */
static const char *logged(int fd)
{
        static char text[4096];
        int64_t size = os->read(fd, text, sizeof text - 1);

        text[size > 0 ? size : 0] = '\0';
        return text;
}

/*
 * fault (Arguments of the caller): Two ranks of one node save one name.
 * result: The last file counts, whole. The log warns and names both ranks.
 */
static void a_name_that_another_rank_saved_is_replaced_and_the_log_names_both(void)
{
        struct version *version;
        struct bench bench;
        uint64_t id;
        int ends[2];

        if (pipe2(ends, O_NONBLOCK)) /* a line that is missing is not waited for */
                abort();
        bench_init(&bench, NULL, "");
        log_to(ends[1], LOG_LEVEL_WARN);
        bench.session.world = bench.job->settings.world = 3;
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_ALL_RANKS, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        CHECK(!save_as(&bench, id, 0, "model.pt", false));
        CHECK(!save_as(&bench, id, 0, "model.pt", false)); /* the rank's own file: no log line */
        CHECK(!save_as(&bench, id, 1, "model.pt", false));
        CHECK(strstr(logged(ends[0]), "t: rank 1 replaces file \"model.pt\" that rank 0 has saved"));
        CHECK(!save_as(&bench, id, 2, "shard.pt", true));
        CHECK(!save_as(&bench, id, 1, "shard.pt", true)); /* also while the file is being copied */
        CHECK(strstr(logged(ends[0]), "t: rank 1 replaces file \"shard.pt\" that rank 2 has saved"));
        CHECK(version_file(version, "model.pt")->rank == 1 && version->file_count == 1);
        log_to(-1, LOG_LEVEL_WARN);
        bench_done(&bench, true);
        close(ends[0]);
        close(ends[1]);
}

/* A framework may save several files at once. Another trainer of the rank's number has loans of its own. */
static void only_the_name_that_a_trainer_saves_again_loses_its_earlier_copy(void)
{
        struct version *version;
        struct bench bench;
        uint64_t id;

        bench_init(&bench, NULL, "");
        bench.session.world = bench.job->settings.world = 2;
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", 3, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        CHECK(!save_as(&bench, id, 0, "a.pt", true) && !save_as(&bench, id, 0, "b.pt", true) && !save_as(&bench, id, 1, "a.pt", true));
        CHECK(version->loans && version->loans->next && version->loans->next->next && !version->loans->next->next->next);
        CHECK(!save_as(&bench, id, 0, "a.pt", true));
        CHECK(version->loans->next->next && !version->loans->next->next->next);
        bench_done(&bench, true);
}

/* The views, the removal and the next version search each file by name. */
static void a_manifest_that_was_just_written_is_sorted_as_one_that_was_read(void)
{
        static const char *const names[] = { "c", "a", "b" };
        struct version *version;
        struct bench bench;
        char storage[256];
        uint64_t id;

        storage_make(storage);
        bench_init(&bench, NULL, storage);
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", 3, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        for (unsigned i = 0; i < 3; i++)
                REQUIRE(id && !bench_save(&bench, &id, names[i], i));
        REQUIRE(!bench_persist(&bench, catalogue_version(&bench.catalogue, id)) && bench.job->known.count == 1);
        CHECK(bench.job->known.list[0]->by_name && manifest_find_file(bench.job->known.list[0], "a"));
        bench_done(&bench, true);
        storage_remove(storage);
}

static const struct store_ops *stored_ops;
static const char *taken; /* another program removes the object whose key has this ending, as soon as the manifest exists */
static bool damages;      /* the other program writes other bytes in its place */

static void take_away(struct store *store)
{
        struct store_list list;
        size_t count = 0;

        if (store_list_all(store, "step1/", true, &list, NULL))
                abort();
        for (size_t i = 0; i < list.count; i++) {
                if (!strstr(list.entries[i].key, taken))
                        continue;
                count++;
                if (damages ? stored_ops->put(store, list.entries[i].key, "{}", 2, STORE_ALWAYS, NULL, NULL, NULL) :
                              store_remove_one(store, list.entries[i].key, NULL))
                        abort();
        }
        if (count != 1)
                abort();
        store_list_done(&list);
}

static enum nebula_status put_and_lose(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                       const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        enum nebula_status status = stored_ops->put(store, key, data, size, condition, seen, ret_stamp, error);

        if (taken && strstr(key, "/manifest-")) {
                take_away(store);
                taken = NULL;
        }
        return status;
}

/* fault: as a_removal_takes_nothing_of_a_version_that_was_committed_behind_it */
/* Such a program began to remove the tag before it was written again, or saves a file of the same name. */
static void a_version_is_not_durable_when_another_program_has_removed_or_replaced_some_of_it(void)
{
        static const struct { const char *what; bool damages; } objects[] = {
                { "step1/b", false }, { ".record-00000.json", false }, { "/manifest-1.json", false },
                { "step1/b", true }, { ".record-00000.json", true },
        };

        for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) {
                struct manifest manifest = { 0 };
                struct version *version;
                struct store_ops ops;
                struct store *store;
                struct bench bench;
                char storage[256];

                storage_make(storage);
                bench_init(&bench, NULL, storage);
                REQUIRE(!storage_open(&bench.catalogue, bench.job, &store, NULL));
                stored_ops = store->ops;
                ops = *stored_ops;
                ops.put = put_and_lose;
                store->ops = &ops;
                version = bench_version(&bench, "step1", 1, 2);
                REQUIRE(version);
                taken = objects[i].what;
                damages = objects[i].damages;
                CHECK(bench_persist(&bench, version) == NEBULA_STORAGE && !taken);
                CHECK(!bench_persist(&bench, version)); /* the next try */
                CHECK(!manifest_load(store, "step1", &manifest, NULL) && manifest.file_count == 2);
                CHECK(stored_holds(store, &manifest, "a", 1) && stored_holds(store, &manifest, "b", 2));
                manifest_done(&manifest);
                store->ops = stored_ops;
                bench_done(&bench, true);
                storage_remove(storage);
        }
}

TAP_MAIN(TEST(only_the_name_that_a_trainer_saves_again_loses_its_earlier_copy), TEST(a_version_is_not_durable_when_another_program_has_removed_or_replaced_some_of_it),
         TEST(each_of_many_files_is_found_and_carried_over),
         TEST(a_manifest_that_was_just_written_is_sorted_as_one_that_was_read), TEST(a_name_that_a_rank_saves_again_counts_once),
         TEST(a_name_that_another_rank_saved_is_replaced_and_the_log_names_both))
