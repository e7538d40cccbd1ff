/* A version of tens of thousands of files: each is found, and carried over. */
#include "agent/agent_catalogue.h"
#include "tap.h"

#define STORED_COUNT 32768u

/* What storage would list: a job of 16,384 ranks, two files each. */
static void make_manifest(struct manifest *manifest)
{
        memset(manifest, 0, sizeof *manifest);
        strcpy(manifest->tag, "step1");
        manifest->generation = manifest->sequence = manifest->world = 1;
        manifest->step = 1;
        manifest->files = calloc(STORED_COUNT, sizeof *manifest->files);
        if (!manifest->files)
                abort();
        for (; manifest->file_count < STORED_COUNT; manifest->file_count++) {
                struct manifest_file *file = &manifest->files[manifest->file_count];

                snprintf(file->name, sizeof file->name, "zero_pp_rank_%zu_mp_rank_00_optim_states.pt", manifest->file_count);
                strcpy(file->path, file->name);
                file->size = manifest->file_count;
                file->generation = 1;
        }
}

static void each_of_many_files_is_found_and_carried_over(void)
{
        struct manifest *manifest;
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
        bench.job->stored = (struct manifest_scan){ .manifests = manifest, .count = 1 };
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
        CHECK(version->file_count == STORED_COUNT); /* one is new, and all others are carried over */
        for (unsigned i = 0; i < STORED_COUNT; i++) {
                const struct agent_file *file;

                snprintf(name, sizeof name, "zero_pp_rank_%u_mp_rank_00_optim_states.pt", i);
                file = version_file(version, name);
                found = found && file && !strcmp(file->name, name) && file->size == (i == 7 ? BENCH_FILE_BYTES : i) &&
                        file->generation == (i == 7 ? 2 : 1);
        }
        CHECK(found && !version_file(version, "zero_pp_rank_32768_mp_rank_00_optim_states.pt"));
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

TAP_MAIN(TEST(each_of_many_files_is_found_and_carried_over))
