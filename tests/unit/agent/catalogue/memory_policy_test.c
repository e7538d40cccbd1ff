/* In a long run, a bounded number of tombstones stays. They still answer, and no request walks over them. */
#include "agent/catalogue/memory_policy.h"
#include "agent/agent_catalogue.h"
#include "agent/clients/history.h"
#include "agent/memory/page_maker.h"
#include "agent/persist/due.h"
#include "agent/persist/mend.h"
#include "image/image.h"
#include "tap.h"
#include "test_dir.h"

static size_t live_count(const struct job *job)
{
        size_t count = 0;

        for (const struct version *version = job->live; version; version = version->next_live)
                count++;
        return count;
}

static size_t version_count(const struct job *job)
{
        size_t count = 0;

        for (const struct version *version = job->versions; version; version = version->next)
                count++;
        return count;
}

static void tombstones_are_bounded_and_answer_and_disturb_no_other_version(void)
{
        const unsigned count = 3 * TOMBSTONE_MAX;
        uint64_t ids[3 * TOMBSTONE_MAX];
        struct bench bench;
        char tag[32];

        bench_init(&bench, NULL, "");
        for (unsigned i = 0; i < count; i++) {
                struct version *version;

                snprintf(tag, sizeof tag, "step%u", i);
                version = bench_version(&bench, tag, 1, 0);
                REQUIRE(version);
                ids[i] = version->id;
                history_flush(&bench.catalogue, bench.job->lane);
                CHECK(live_count(bench.job) <= 4);
                CHECK(version_count(bench.job) <= TOMBSTONE_MAX + 4);
        }
        CHECK(!catalogue_version(&bench.catalogue, ids[0]));
        for (unsigned i = count - TOMBSTONE_MAX; i < count; i++)
                CHECK(catalogue_version(&bench.catalogue, ids[i]));
        CHECK(bench.job->tombstone_count + live_count(bench.job) == version_count(bench.job));
        bench_done(&bench, true);
}

static void a_new_tag_is_mostly_known_to_be_new_and_one_that_is_there_never(void)
{
        const unsigned count = 2 * TOMBSTONE_MAX;
        struct bench bench;
        size_t counted = 0;
        unsigned walks = 0;
        char tag[32];

        bench_init(&bench, NULL, "");
        for (unsigned i = 0; i < count; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                walks += job_may_have(bench.job, tag);
                REQUIRE(bench_version(&bench, tag, 1, 0));
                history_flush(&bench.catalogue, bench.job->lane);
        }
        CHECK(walks < count / 4);
        for (const struct version *version = bench.job->versions; version; version = version->next)
                CHECK(job_may_have(bench.job, version->tag));
        for (size_t i = 0; i < TAG_SLOTS; i++)
                counted += bench.job->tag_counts[i];
        CHECK(counted == version_count(bench.job)); /* forgotten versions do not count */
        bench_done(&bench, true);
}

static void a_tombstone_that_is_written_again_is_the_next_writing(void)
{
        struct version *version;
        struct bench bench;
        char tag[32];

        bench_init(&bench, NULL, "");
        for (unsigned i = 0; i < 10; i++) {
                snprintf(tag, sizeof tag, "step%u", i % 5);
                version = bench_version(&bench, tag, 1, 0);
                REQUIRE(version);
                CHECK(version->writing == 1 + i / 5);
                history_flush(&bench.catalogue, bench.job->lane);
        }
        CHECK(bench.job->tombstone_count >= 6);
        bench_done(&bench, true);
}

/* The tombstone remembers a rank that commits a complete tag again without a file. The next writing does not wait for that rank. */
static void a_tombstone_remembers_the_ranks_that_added_nothing(void)
{
        struct version *first, *again;
        struct session other;
        struct bench bench;
        char tag[32];

        bench_init(&bench, NULL, "");
        bench.session.world = bench.job->settings.world = 2;
        other = bench.session;
        other.rank = 1;
        other.nonce = 2;
        bench.session.next = NULL;
        for (unsigned i = 0; i < 6; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                first = bench_version(&bench, tag, 1, 0);
                REQUIRE(first && !commit_part(&bench.catalogue, &other, first, &bench.error));
                CHECK(first->life.state == NEBULA_STATE_COMMITTED);
                history_flush(&bench.catalogue, bench.job->lane);
        }
        for (first = bench.job->versions; first && strcmp(first->tag, "step0");)
                first = first->next;
        REQUIRE(first && first->is_tombstone);
        REQUIRE(!commit_part(&bench.catalogue, &other, first, &bench.error));
        again = bench_version(&bench, "step0", 2, 0);
        REQUIRE(again && again != first);
        CHECK(again->writing == 2 && again->life.state == NEBULA_STATE_COMMITTED);
        /* The rank has begun the tag again, so the earlier commit no longer counts for it. */
        REQUIRE(!commit_part(&bench.catalogue, &other, again, &bench.error));
        CHECK(commit_begin(&bench.catalogue, &other, "step0", NEBULA_FILES_ALL_RANKS, &bench.error) == again);
        CHECK(!again->idle_count);
        bench_done(&bench, true);
}

/* A version of a killed run may become complete while the next run's ranks agree on an older version, and load it. */
static void nothing_goes_while_the_ranks_of_a_new_run_have_begun_nothing(void)
{
        struct session *next = calloc(1, sizeof *next);
        struct version *agreed, *version;
        struct bench bench;
        char tag[32];

        bench_init(&bench, NULL, "");
        bench.job->settings.retention_count = 2;
        agreed = bench_version(&bench, "step1", 1, 0);
        REQUIRE(agreed && next);
        *next = bench.session;
        next->nonce = 2;
        next->has_begun = false;
        catalogue_lock(&bench.catalogue);
        next->next = bench.job->sessions;
        bench.job->sessions = next;
        catalogue_unlock(&bench.catalogue);
        for (unsigned i = 2; i < 5; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                REQUIRE(bench_version(&bench, tag, 1, 0));
                CHECK(version_whole_in_memory(agreed));
        }
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, next, "step2", NEBULA_FILES_ALL_RANKS, &bench.error);
        policy_retain(&bench.catalogue, bench.job);
        CHECK(version && !version_whole_in_memory(agreed));
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

static struct os_table table;
static struct bench *failing; /* its versions fail while the agent gets memory for them */

static int fail_meanwhile(int fd, uint64_t offset, uint64_t size)
{
        int result = os_linux.allocate(fd, offset, size);

        if (!failing)
                return result;
        catalogue_lock(&failing->catalogue);
        version_fail(&failing->catalogue, failing->job->versions, NEBULA_FAILED, "another rank gave it up");
        catalogue_unlock(&failing->catalogue);
        return result;
}

static int local_space(const char *path, struct os_space *ret_space)
{
        int result = os_linux.space(path, ret_space);

        ret_space->fs_type = 0xef53;
        return result;
}

static size_t image_count(const struct bench *bench)
{
        size_t count = 0;

        for (const struct image *image = bench->catalogue.memory->images; image; image = image->next)
                count++;
        return count;
}

/* A version that fails while it gets its image. */
static bool save_in_vain(struct bench *bench, const char *tag)
{
        struct version *version;

        failing = bench;
        version = bench_version(bench, tag, 1, 0);
        failing = NULL;
        return !version && bench->error.status == NEBULA_FAILED;
}

static void memory_got_for_a_file_that_is_then_refused_stays_with_the_job_and_leaves_the_disk(void)
{
        char directory[256];
        struct bench bench;

        test_dir_make(directory);
        setenv("NEBULA_SPILL_DIR", directory, 1);
        table = os_linux;
        table.allocate = fail_meanwhile;
        table.space = local_space;
        os = &table;
        bench_init(&bench, NULL, "");
        CHECK(save_in_vain(&bench, "refused") && image_count(&bench) == 1);
        REQUIRE(bench_version(&bench, "a", 1, 0));
        catalogue_lock(&bench.catalogue);
        page_maker_discard(&bench.catalogue);
        catalogue_unlock(&bench.catalogue);
        CHECK(image_count(&bench) == 1 && bench.catalogue.memory->used == memory_capacity(BENCH_FILE_BYTES));
        bench.job->settings.on_full = NEBULA_ON_FULL_STREAM;
        bench.catalogue.memory->budget = 1; /* no file fits, and no save waits for memory */
        bench.session.nonce = 2;
        CHECK(save_in_vain(&bench, "streamed") && image_count(&bench) <= 1);
        for (const struct image *image = bench.catalogue.memory->images; image; image = image->next)
                CHECK(!image->spilled);
        os = &os_linux;
        bench_done(&bench, true);
        unsetenv("NEBULA_SPILL_DIR");
        test_dir_remove(directory);
}

/* Another thread or forked child of the rank begins a tag while the save makes its image. */
static int begin_meanwhile(int fd, uint64_t offset, uint64_t size)
{
        int result = os_linux.allocate(fd, offset, size);

        if (!failing)
                return result;
        catalogue_lock(&failing->catalogue);
        commit_begin(&failing->catalogue, &failing->session, "b", NEBULA_FILES_OPEN, &failing->error);
        catalogue_unlock(&failing->catalogue);
        failing = NULL;
        return result;
}

static void a_file_that_gets_its_memory_after_its_version_was_committed_belongs_to_the_next_writing(void)
{
        struct version *version;
        struct bench bench;
        uint64_t first, id = 0;

        table = os_linux;
        table.allocate = begin_meanwhile;
        os = &table;
        bench_init(&bench, NULL, "");
        bench.job->settings.retention_count = 4;
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "a", NEBULA_FILES_OPEN, &bench.error);
        first = id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        REQUIRE(id && !bench_save(&bench, &id, "0", 1) && id == first);
        failing = &bench;
        CHECK(!bench_save(&bench, &id, "1", 2) && !failing);
        os = &os_linux;
        catalogue_lock(&bench.catalogue);
        CHECK(catalogue_version(&bench.catalogue, first)->life.state == NEBULA_STATE_COMMITTED);
        version = catalogue_version(&bench.catalogue, id);
        REQUIRE(version && id != first && version->writing == 2);
        CHECK(!commit_part(&bench.catalogue, &bench.session, version, &bench.error) && version->life.state == NEBULA_STATE_COMMITTED);
        CHECK(version->file_count == 2 && version_file(version, "0") && version_file(version, "1"));
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
}

static size_t in_memory(const struct bench *bench)
{
        size_t count = 0;

        for (const struct version *version = bench->job->versions; version; version = version->next)
                count += version->in_memory;
        return count;
}

/* fault: as test_runs_that_have_ended_give_their_memory_back_while_others_go_on */
static void of_a_job_that_has_ended_memory_keeps_the_newest_for_some_time_and_what_storage_lacks(void)
{
        struct version *version;
        char directory[256];
        struct bench bench;

        test_dir_make(directory);
        bench_init(&bench, NULL, directory);
        bench.job->settings.retention_count = 4;
        for (unsigned i = 0; i < 3; i++) {
                version = bench_version(&bench, i == 0 ? "step0" : i == 1 ? "step1" : "step2", i + 1, 0);
                REQUIRE(version && (i == 1 || !bench_persist(&bench, version)));
                if (i != 1)
                        version_move(&bench.catalogue, version, NEBULA_STATE_DURABLE);
                version->stored = i != 1;
        }
        catalogue_lock(&bench.catalogue);
        CHECK(in_memory(&bench) == 3);
        version->pins++; /* a loader reads the version */
        CHECK(policy_release(&bench.catalogue, bench.job, true, NULL) && in_memory(&bench) == 2);
        CHECK(!policy_release(&bench.catalogue, bench.job, true, NULL) && !policy_release(&bench.catalogue, bench.job, false, NULL));
        CHECK(in_memory(&bench) == 2 && version->in_memory);
        version->pins--;
        CHECK(policy_release(&bench.catalogue, bench.job, false, NULL) && in_memory(&bench) == 1 && !version->in_memory);
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
        test_dir_remove(directory);
}

static void what_a_later_writing_takes_over_stays_in_memory_until_storage_was_read(void)
{
        struct version *before, *later;
        char directory[256];
        struct bench bench;

        test_dir_make(directory);
        bench_init(&bench, NULL, directory);
        bench.job->settings.retention_count = 1;
        before = bench_version(&bench, "step0", 1, 0);
        REQUIRE(before && !bench_persist(&bench, before));
        version_move(&bench.catalogue, before, NEBULA_STATE_DURABLE);
        before->stored = before->is_awaited = true;
        later = bench_version(&bench, "step1", 2, 0);
        REQUIRE(later && !bench_persist(&bench, later));
        version_move(&bench.catalogue, later, NEBULA_STATE_DURABLE);
        later->stored = true;
        catalogue_lock(&bench.catalogue);
        policy_retain(&bench.catalogue, bench.job);
        CHECK(before->in_memory && later->in_memory);
        CHECK(policy_release(&bench.catalogue, bench.job, true, NULL) && !before->in_memory); /* a save needs its memory */
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
        test_dir_remove(directory);
}

/* A file wastes at most a page, or a sixteenth of its size if it is large. Only a file that can use huge pages is rounded up to them. */
static void a_file_takes_the_memory_that_it_needs(void)
{
        static const uint64_t sizes[] = { 0, 1, 790, 4096, 4097, 65536, 300000, 1 << 20, (2 << 20) + 5, 21 << 20, 300u << 20, UINT64_C(5) << 30 };

        CHECK(memory_capacity(790) == MEMORY_PAGE && memory_capacity(0) == MEMORY_PAGE);
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                uint64_t need = image_size_with_sums(sizes[i]), capacity = memory_capacity(sizes[i]);

                CHECK(capacity >= need && capacity % MEMORY_PAGE == 0 && capacity - need <= MEMORY_PAGE + need / MEMORY_ROUND_PART);
                CHECK(need < 16 * MEMORY_ROUND || capacity % MEMORY_ROUND == 0);
        }
}

/* Begins, saves `count` files and commits. NULL: a save failed. */
static struct version *version_of_many(struct bench *bench, const char *tag, unsigned count)
{
        struct version *version;
        char name[32];
        bool is_saved;
        uint64_t id;

        catalogue_lock(&bench->catalogue);
        version = commit_begin(&bench->catalogue, &bench->session, tag, NEBULA_FILES_ALL_RANKS, &bench->error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench->catalogue);
        for (unsigned i = 0; i < count && version; i++) {
                snprintf(name, sizeof name, "f%u", i);
                if (bench_save_bytes(bench, &id, name, i + 1, 790))
                        version = NULL;
        }
        catalogue_lock(&bench->catalogue);
        is_saved = version;
        version = catalogue_version(&bench->catalogue, id); /* a later writing, if the tag existed */
        if (version && !is_saved)
                version_fail(&bench->catalogue, version, NEBULA_FAILED, "a save failed");
        is_saved = is_saved && version && !commit_part(&bench->catalogue, &bench->session, version, &bench->error);
        catalogue_unlock(&bench->catalogue);
        return is_saved ? version : NULL;
}

static size_t bury_and_count(struct bench *bench)
{
        catalogue_lock(&bench->catalogue);
        page_maker_discard(&bench->catalogue);
        catalogue_unlock(&bench->catalogue);
        return image_count(bench);
}

/* fault: as test_small_files_take_the_pages_that_they_need */
static void small_images_serve_again_and_take_a_page_each(void)
{
        const unsigned count = 3000;
        struct bench bench;
        char tag[32];

        bench_init(&bench, NULL, "");
        bench.catalogue.memory->descriptor_limit = UINT32_MAX; /* images are memfds in this test */
        bench.job->settings.retention_count = 2;
        for (unsigned i = 0; i < 6; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                REQUIRE(version_of_many(&bench, tag, count));
                CHECK(bury_and_count(&bench) <= 3 * count);
                CHECK(bench.catalogue.memory->used == image_count(&bench) * MEMORY_PAGE);
        }
        CHECK(bench.job->versions->files[0].image->served > 0 && bench.job->versions->files[count - 1].image->served > 0);
        bench_done(&bench, true);
}

/* The images of a job after three versions. Each is durable before the next begins, or all become durable at the end. */
static size_t images_of_three(uint32_t retention_count, bool is_late)
{
        struct version *versions[3];
        char directory[256], tag[32];
        struct bench bench;
        size_t count;

        test_dir_make(directory);
        bench_init(&bench, NULL, directory);
        bench.job->settings.retention_count = retention_count;
        for (unsigned i = 0; i < 3; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                versions[i] = bench_version(&bench, tag, i + 1, 0);
                CHECK(versions[i] && (is_late || !bench_persist(&bench, versions[i])));
                CHECK(version_whole_in_memory(versions[i])); /* the newest */
                CHECK(!is_late || bury_and_count(&bench) == i + 1); /* storage lacks the others */
        }
        for (unsigned i = 0; i < 3 && is_late; i++)
                CHECK(!bench_persist(&bench, versions[i]));
        catalogue_lock(&bench.catalogue);
        policy_retain(&bench.catalogue, bench.job); /* as the worker does */
        CHECK(policy_spare_bytes(&bench.catalogue, bench.job) == 0);
        CHECK(version_whole_in_memory(versions[2]) && in_memory(&bench) == (is_late ? 2 : retention_count));
        catalogue_unlock(&bench.catalogue);
        count = bury_and_count(&bench);
        bench_done(&bench, true);
        test_dir_remove(directory);
        return count;
}

static void with_one_version_in_retention_only_the_newest_and_what_storage_lacks_take_memory(void)
{
        CHECK(images_of_three(1, false) == 1);
        CHECK(images_of_three(1, true) == 2); /* the next save may be late, too */
        CHECK(images_of_three(2, false) == 2);
        CHECK(images_of_three(2, true) == 2);
}

static void late_saves_use_the_same_images_in_turn_until_storage_keeps_up(uint32_t retention_count)
{
        struct version *version, *slow;
        int64_t due_ns = INT64_MAX;
        char directory[256], tag[32];
        struct bench bench;
        size_t count = 0;

        test_dir_make(directory);
        bench_init(&bench, NULL, directory);
        bench.job->settings.retention_count = retention_count;
        bench.job->settings.persist_interval_s = 100;
        slow = bench_version(&bench, "step0", 1, 0);
        REQUIRE(slow);
        slow->pins++; /* the worker writes it */
        for (unsigned i = 1; i < 12; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                version = bench_version(&bench, tag, i + 1, 0);
                REQUIRE(version);
                CHECK(version_whole_in_memory(version) && version_whole_in_memory(slow) && (i < 4 || bury_and_count(&bench) == count));
                CHECK(i < 4 || version->files[0].image->served);
                count = bury_and_count(&bench);
                CHECK(count <= retention_count + 2);
        }
        slow->pins--;
        for (unsigned i = 12; i < 24; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                CHECK(!bench_persist(&bench, version));
                CHECK(!due_of(&bench.catalogue, bench.job)); /* the version before is overtaken */
                CHECK(!due_next(&bench.catalogue, bench.job->lane, false, os->now_ns(), &due_ns));
                version = bench_version(&bench, tag, i + 1, 0);
                REQUIRE(version && version_whole_in_memory(version));
        }
        CHECK(bury_and_count(&bench) == retention_count);
        bench_done(&bench, true);
        test_dir_remove(directory);
}

/* fault (Storage): Storage is slower than the saves, or does not answer, while a job saves.
 * result: Versions that storage does not have stay in memory: the newest, and those that were asked for. The saves use the same images in turn. */
static void images_of_late_saves_serve_again_and_go_when_storage_keeps_up(void)
{
        late_saves_use_the_same_images_in_turn_until_storage_keeps_up(1);
        late_saves_use_the_same_images_in_turn_until_storage_keeps_up(2);
}

/* A save begins while the version before is in memory, which leaves memory for it, or stays. */
static void save_after(bool is_durable, bool is_leased, bool is_to_stay)
{
        struct version *version;
        char directory[256];
        struct bench bench;

        test_dir_make(directory);
        bench_init(&bench, NULL, directory);
        version = bench_version(&bench, "step0", 1, 0);
        REQUIRE(version && (!is_durable || !bench_persist(&bench, version)));
        version->leases = is_leased;
        REQUIRE(bench_version(&bench, "step1", 2, 0));
        CHECK(bury_and_count(&bench) == 1u + is_to_stay && version->in_memory == is_to_stay);
        bench_done(&bench, true);
        test_dir_remove(directory);
}

static void a_save_takes_the_memory_of_the_version_before_if_storage_has_it_and_no_reader(void)
{
        save_after(true, false, false);
        save_after(true, true, true);
        save_after(false, false, true);
}

/* A job whose storage refuses has its other nodes alone: one may be lost before its peers have the newest version. */
static void the_version_before_stays_beside_the_newest_while_storage_refuses_all(void)
{
        struct version *version;
        char directory[256], tag[32];
        struct bench bench;

        test_dir_make(directory);
        bench_init(&bench, NULL, directory);
        for (unsigned i = 0; i < 20; i++) {
                snprintf(tag, sizeof tag, "step%u", i);
                version = bench_version(&bench, tag, i + 1, 0);
                REQUIRE(version && version_whole_in_memory(version));
                CHECK(in_memory(&bench) == (i ? 2 : 1));
                catalogue_lock(&bench.catalogue);
                version_fail(&bench.catalogue, version, NEBULA_STORAGE, "storage refuses");
                policy_retain(&bench.catalogue, bench.job);
                catalogue_unlock(&bench.catalogue);
                CHECK(version->failed_by_storage && in_memory(&bench) == (i ? 2 : 1));
        }
        bench_done(&bench, true);
        test_dir_remove(directory);
}

/* Makes a spare image, as the page maker does. */
static bool make_spare(struct bench *bench, uint64_t capacity)
{
        struct image *image;
        bool named;

        if (!memory_reserve(bench->catalogue.memory, capacity, &named) || memory_create(bench->catalogue.memory, capacity, named, &image, NULL))
                return false;
        image->job = bench->job;
        memory_add(bench->catalogue.memory, image);
        return true;
}

static void for_a_foretold_file_there_are_images_of_two_versions_until_the_first_commit(void)
{
        const uint64_t size = 9 << 20, capacity = memory_capacity(size);
        struct session *session;
        struct bench bench;
        struct image *taken;

        bench_init(&bench, NULL, "");
        session = &bench.session;
        bench_join(&bench);
        policy_hint(&bench.catalogue, session, bench.catalogue.memory->budget); /* two do not fit */
        CHECK(policy_spare_bytes(&bench.catalogue, bench.job) == 0 && !bench.job->spare_due);
        policy_hint(&bench.catalogue, session, size);
        CHECK(bench.job->spare_due);
        for (int i = 0; i < 2; i++) {
                CHECK(policy_spare_bytes(&bench.catalogue, bench.job) == capacity);
                REQUIRE(make_spare(&bench, capacity));
        }
        CHECK(policy_spare_bytes(&bench.catalogue, bench.job) == 0);
        policy_retain(&bench.catalogue, bench.job); /* each save does this */
        catalogue_lock(&bench.catalogue);
        CHECK(!page_maker_discard(&bench.catalogue));
        catalogue_unlock(&bench.catalogue);
        taken = memory_take(bench.catalogue.memory, size, 1, bench.job);
        REQUIRE(taken);
        memory_hold(taken);
        memory_drop(bench.catalogue.memory, taken);
        catalogue_session_set(session, bench.job, session->role, 0); /* its trainer has left: no client waits for the file */
        catalogue_lock(&bench.catalogue);
        policy_retain(&bench.catalogue, bench.job);
        CHECK(page_maker_discard(&bench.catalogue));
        catalogue_unlock(&bench.catalogue);
        catalogue_session_set(session, bench.job, session->role, 1);
        REQUIRE(session->hint_count == 1 && bench_version(&bench, "step1", 1, 0));
        CHECK(session->hint_count == 0);
        bench_leave(&bench);
        bench_done(&bench, true);
}

static void a_session_is_lent_the_spare_images_of_its_foretold_files_and_no_others(void)
{
        const uint64_t size = 9 << 20, capacity = memory_capacity(size);
        struct image *first, *second, *third;
        struct session *session, other;
        struct bench bench;
        uint32_t left;

        bench_init(&bench, NULL, "");
        session = &bench.session;
        bench_join(&bench);
        catalogue_lock(&bench.catalogue);
        CHECK(!policy_spare_image(&bench.catalogue, session, &left) && left == 0); /* it has hinted nothing */
        bench.job->settings.retention_count = 2;
        policy_hint(&bench.catalogue, session, size);
        CHECK(!policy_spare_image(&bench.catalogue, session, &left) && left == 2);
        catalogue_unlock(&bench.catalogue);
        REQUIRE(make_spare(&bench, capacity) && make_spare(&bench, 2 * capacity) && make_spare(&bench, capacity) &&
                make_spare(&bench, capacity));
        catalogue_lock(&bench.catalogue);
        first = policy_spare_image(&bench.catalogue, session, &left);
        REQUIRE(first && first->capacity == capacity && left == 1);
        first->faulting = true; /* its pages are not made yet */
        second = policy_spare_image(&bench.catalogue, session, &left);
        REQUIRE(second && second != first && second->capacity == capacity && left == 1);
        second->owner_nonce = session->nonce;
        other = (struct session){ .nonce = session->nonce + 1, .connection_count = 1, .job = bench.job };
        session->next = &other;
        first->owner_nonce = other.nonce; /* another session knows it */
        first->faulting = false;
        third = policy_spare_image(&bench.catalogue, session, &left);
        REQUIRE(third && third != first && third != second && third->capacity == capacity && left == 0);
        other.connection_count = 0; /* its process has ended: the image is as good as a new one */
        third->faulting = true;
        CHECK(policy_spare_image(&bench.catalogue, session, &left) == first && left == 0);
        third->faulting = false;
        session->next = NULL;
        first->owner_nonce = session->nonce;
        CHECK(!policy_spare_image(&bench.catalogue, session, &left) && left == 0); /* two versions are all */
        second->owner_nonce = 0;
        bench.job->settings.retention_count = 1;
        strcpy(bench.job->persist_path, "/storage"); /* storage will have the first version when the second begins: one image is enough */
        CHECK(!policy_spare_image(&bench.catalogue, session, &left) && left == 0);
        catalogue_unlock(&bench.catalogue);
        bench_leave(&bench);
        bench_done(&bench, true);
}

static void an_image_that_a_foretold_save_has_taken_is_no_reason_for_another(void)
{
        const uint64_t size = 9 << 20, capacity = memory_capacity(size);
        struct version *version;
        struct bench bench;
        uint64_t id;

        bench_init(&bench, NULL, "");
        bench_join(&bench);
        policy_hint(&bench.catalogue, &bench.session, size);
        REQUIRE(make_spare(&bench, capacity) && make_spare(&bench, capacity));
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "step0", NEBULA_FILES_OPEN, &bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&bench.catalogue);
        REQUIRE(id && !bench_save_bytes(&bench, &id, "model", 1, size) && bench.session.hint_count == 1);
        CHECK(policy_spare_bytes(&bench.catalogue, bench.job) == 0);
        bench_leave(&bench);
        bench_done(&bench, true);
}

static size_t open_descriptors(void)
{
        char name[300];
        struct os_dir *dir;
        size_t count = 0;

        if (os->opendir("/proc/self/fd", &dir) < 0)
                abort();
        while (os->readdir(dir, name, sizeof name) > 0)
                count++;
        os->closedir(dir);
        return count;
}

static int report_few_descriptors(enum os_probe what, uint64_t *ret_value)
{
        if (what != OS_PROBE_DESCRIPTORS)
                return os_linux.probe(what, ret_value);
        *ret_value = 64;
        return 0;
}

static bool files_hold(const struct version *version, unsigned count)
{
        bool good = version->file_count == count;

        for (unsigned i = 0; i < count && good; i++) {
                struct image *image = version->files[i].image;
                unsigned char byte;
                int fd;

                good = image && !image_open_read_only(image, &fd, NULL);
                if (!good)
                        break;
                good = !os_read_at(fd, &byte, 1, 700) && byte == bench_byte(i + 1, 700);
                os->close(fd);
        }
        return good;
}

/* fault: as test_with_1024_open_files_versions_of_many_files_become_durable_and_load */
/* The agent keeps at most half of its descriptors for open images. The other images have names, by which they are lent, written, read and
 * adopted. */
static void a_version_of_more_files_than_there_are_descriptors_is_saved_persisted_and_taken_over(void)
{
        const unsigned count = 200;
        size_t before;
        struct version *version;
        char directory[256], storage[300], memory[300];
        struct bench bench;

        test_dir_make(directory);
        snprintf(storage, sizeof storage, "%s/storage", directory);
        snprintf(memory, sizeof memory, "%s/memory", directory);
        table = os_linux;
        table.probe = report_few_descriptors;
        os = &table;
        bench_init(&bench, memory, storage);
        before = open_descriptors();
        for (unsigned i = 0; i < 4; i++) {
                char tag[32];

                snprintf(tag, sizeof tag, "step%u", i);
                version = version_of_many(&bench, tag, count);
                REQUIRE(version);
                CHECK(open_descriptors() <= before + 40 && bench.catalogue.memory->descriptor_count <= 32);
                CHECK(!bench_persist(&bench, version));
                CHECK(open_descriptors() <= before + 40 && bench.catalogue.memory->mapped_count < count);
                bury_and_count(&bench);
        }
        bench_done(&bench, false);
        bench_init(&bench, memory, storage);
        CHECK(bench.job->versions && files_hold(bench.job->versions, count) && open_descriptors() <= before + 40);
        bench_done(&bench, true);
        os = &os_linux;
        test_dir_remove(directory);
}

/* fault: as test_without_named_images_a_version_of_too_many_files_fails_alone_and_says_why */
/* Each image without a name needs a descriptor. A version that needs more than there are fails with that reason, and the next version does
 * not. */
static void memfds_for_which_there_are_no_descriptors_fail_their_version_alone(void)
{
        struct version *version;
        struct bench bench;

        table = os_linux;
        table.probe = report_few_descriptors;
        os = &table;
        bench_init(&bench, NULL, "");
        CHECK(!version_of_many(&bench, "large", 60));
        CHECK(bench.error.status == NEBULA_NO_MEMORY && strstr(bench.error.message, "of the 64 files that the agent may open"));
        for (unsigned i = 0; i < 5; i++) {
                version = version_of_many(&bench, i % 2 ? "odd" : "even", 10);
                REQUIRE(version);
                CHECK(files_hold(version, 10));
        }
        bench_done(&bench, true);
        os = &os_linux;
}

static bool has_tag(const struct job *job, const char *tag)
{
        return known_find(&job->known, tag) != NULL;
}

/* fault: as test_a_version_that_was_found_damaged_in_storage_is_written_again_from_memory */
static void a_version_that_storage_has_damaged_counts_nowhere_as_durable_until_it_is_whole(void)
{
        char directory[256], storage[300], memory[300];
        struct version *first, *second;
        struct bench bench;

        test_dir_make(directory);
        snprintf(storage, sizeof storage, "%s/storage", directory);
        snprintf(memory, sizeof memory, "%s/memory", directory);
        os->mkdir(memory, 0700);
        bench_init(&bench, memory, storage);
        bench.job->settings.retention_count = 1;
        first = bench_version(&bench, "step1", 1, 0);
        REQUIRE(first && !bench_persist(&bench, first));
        catalogue_lock(&bench.catalogue);
        catalogue_judge_copies(&bench.catalogue, storage, "step1", first->sequence, false, "its file has changed");
        CHECK(first->copy == COPY_DOUBTED && !version_is_safe(first) && version_unsaved(first) && mend_pending(bench.job, INT64_MAX));
        CHECK(!policy_release(&bench.catalogue, bench.job, false, "the machine is short of memory") && first->in_memory);
        catalogue_unlock(&bench.catalogue);
        second = bench_version(&bench, "step2", 2, 0); /* its save takes no memory of the version before */
        REQUIRE(second && first->in_memory && !bench_persist(&bench, second));
        bench_keep(bench.job, 1);
        CHECK(!bench_retain(&bench) && has_tag(bench.job, "step1") && has_tag(bench.job, "step2"));
        bench_done(&bench, false);

        bench_init(&bench, memory, storage); /* the next agent knows of the damage, too */
        for (first = bench.job->versions; first && strcmp(first->tag, "step1");)
                first = first->next;
        REQUIRE(first && first->copy == COPY_DOUBTED && first->in_memory);
        catalogue_lock(&bench.catalogue);
        catalogue_judge_copies(&bench.catalogue, storage, "step1", first->sequence, true, NULL);
        CHECK(version_is_safe(first) && !version_unsaved(first) && !mend_pending(bench.job, INT64_MAX));
        catalogue_unlock(&bench.catalogue);
        bench_done(&bench, true);
        test_dir_remove(directory);
}

TAP_MAIN(TEST(a_version_that_storage_has_damaged_counts_nowhere_as_durable_until_it_is_whole),
         TEST(for_a_foretold_file_there_are_images_of_two_versions_until_the_first_commit),
         TEST(a_session_is_lent_the_spare_images_of_its_foretold_files_and_no_others),
                TEST(an_image_that_a_foretold_save_has_taken_is_no_reason_for_another),
         TEST(of_a_job_that_has_ended_memory_keeps_the_newest_for_some_time_and_what_storage_lacks),
         TEST(what_a_later_writing_takes_over_stays_in_memory_until_storage_was_read),
         TEST(with_one_version_in_retention_only_the_newest_and_what_storage_lacks_take_memory),
         TEST(images_of_late_saves_serve_again_and_go_when_storage_keeps_up),
         TEST(a_save_takes_the_memory_of_the_version_before_if_storage_has_it_and_no_reader),
         TEST(the_version_before_stays_beside_the_newest_while_storage_refuses_all),
         TEST(a_file_takes_the_memory_that_it_needs), TEST(small_images_serve_again_and_take_a_page_each),
         TEST(a_version_of_more_files_than_there_are_descriptors_is_saved_persisted_and_taken_over),
         TEST(memfds_for_which_there_are_no_descriptors_fail_their_version_alone),
         TEST(memory_got_for_a_file_that_is_then_refused_stays_with_the_job_and_leaves_the_disk),
         TEST(a_file_that_gets_its_memory_after_its_version_was_committed_belongs_to_the_next_writing),
         TEST(tombstones_are_bounded_and_answer_and_disturb_no_other_version),
         TEST(a_new_tag_is_mostly_known_to_be_new_and_one_that_is_there_never),
        TEST(a_tombstone_that_is_written_again_is_the_next_writing),
         TEST(a_tombstone_remembers_the_ranks_that_added_nothing),
         TEST(nothing_goes_while_the_ranks_of_a_new_run_have_begun_nothing))
