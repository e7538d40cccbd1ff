/* The survival log of a version: at whatever point an agent is killed, the next one reads a state that the version had. */
#include <errno.h>

#include "agent/agent_catalogue.h"
#include "agent/clients/history.h"
#include "agent/commit/ancestry.h"
#include "agent/memory/survival_record.h"
#include "tap.h"

static char root[64], memory[96];

/* The survival log of a version with two files, and where in it each record ends. */
static char *make_note(struct bench *bench, size_t *ret_size, size_t *ends, size_t *ret_count)
{
        struct version *version;
        char path[200], *note = NULL;
        uint64_t size;

        snprintf(root, sizeof root, "/dev/shm/nebula-note-XXXXXX");
        if (!mkdtemp(root))
                abort();
        snprintf(memory, sizeof memory, "%s/memory", root);
        bench_init(bench, memory, "");
        version = bench_version(bench, "t", 1, 2);
        if (!version)
                abort();
        snprintf(path, sizeof path, "%s/%016llx.version", memory, (unsigned long long)version->id);
        if (os_read_file(path, 1 << 20, &note, ret_size) < 0)
                abort();
        *ret_count = 0;
        for (size_t at = 0; at < *ret_size; at += size) {
                memcpy(&size, note + at + 8, sizeof size);
                ends[(*ret_count)++] = at + size;
        }
        return note;
}

/* Starts another agent's catalogue on this log. Returns 0: it finds nothing; 100: the whole version; else the number of files and parts so
 * far. */
static int read_again(const char *note, size_t size)
{
        struct nebula_error error;
        struct version *version;
        struct bench after;
        int found = 0;

        bench_init(&after, NULL, "");
        strcpy(after.catalogue.memory->directory, memory);
        memory_stop_removing(after.catalogue.memory, false); /* the next round needs the images, too */
        if (!survival_record_read(&after.catalogue, 7, note, size, &error)) {
                version = after.job->versions;
                found = 1 + 2 * (int)version->file_count + (version->loans != NULL);
                CHECK(version->id == 7 && !strcmp(version->tag, "t") && version->part_count == 1);
                if (lifecycle_complete(version->life.state)) {
                        found = 100;
                        CHECK(version->file_count == 2 && version->parts[0].closed && version->sequence && !version->loans);
                }
        } else {
                CHECK(error.status == NEBULA_CORRUPT && !after.job->versions);
        }
        bench_done(&after, false);
        return found;
}

/* Writes the survival log. It is in the file when this returns. */
static void note_again(struct bench *bench, struct version *version)
{
        catalogue_lock(&bench->catalogue);
        survival_log_write(&bench->catalogue, version);
        catalogue_unlock(&bench->catalogue);
}

static void a_note_that_was_cut_off_gives_the_last_whole_state(void)
{
        struct bench bench;
        size_t size, ends[32], count;
        char *note = make_note(&bench, &size, ends, &count);
        size_t whole = 0;
        int states[33] = { 0 };

        CHECK(count > 4);
        for (size_t i = 0; i < count; i++) {
                states[i + 1] = read_again(note, ends[i]);
                CHECK(states[i + 1] > 0);
        }
        CHECK(states[count] == 100);
        for (size_t cut = 0; cut < size; cut++) {
                while (whole < count && ends[whole] <= cut)
                        whole++;
                CHECK(read_again(note, cut) == states[whole]);
        }
        free(note);
        bench_done(&bench, true);
        os_remove_tree(root);
}

static void uploads_that_were_begun_are_known_to_the_next_agent(void)
{
        const char *key = "t/m.pt", *text = "0123456789abcdef upload";
        struct bench bench, after;
        struct nebula_error error;
        struct version *version;
        char path[200], *note = NULL;
        size_t size, ends[32], count;

        free(make_note(&bench, &size, ends, &count));
        version = bench.job->versions;
        version->persist->unfinished.attempt = 7;
        REQUIRE(unfinished_set(&version->persist->unfinished, key, "earlier") && unfinished_set(&version->persist->unfinished, key, text));
        note_again(&bench, version);
        snprintf(path, sizeof path, "%s/%016llx.version", memory, (unsigned long long)version->id);
        REQUIRE(os_read_file(path, 1 << 20, &note, &size) >= 0);
        bench_init(&after, NULL, "");
        strcpy(after.catalogue.memory->directory, memory);
        memory_stop_removing(after.catalogue.memory, false);
        REQUIRE(!survival_record_read(&after.catalogue, 7, note, size, &error));
        version = after.job->versions;
        CHECK(version->persist->unfinished.count == 1 && version->persist->unfinished.attempt == 7);
        CHECK(!strcmp(unfinished_find(&version->persist->unfinished, key), text) && !unfinished_find(&version->persist->unfinished, "t/n.pt"));
        version_forget_memory(&after.catalogue, version); /* the worker ends its uploads */
        CHECK(!version->persist->unfinished.count && after.job->storage->ended.count == 1);
        bench_done(&after, false);
        free(note);
        bench_done(&bench, true);
        os_remove_tree(root);
}

static void a_byte_that_flipped_is_seen(void)
{
        struct bench bench;
        size_t size, ends[32], count;
        char *note = make_note(&bench, &size, ends, &count);
        int before = read_again(note, ends[count - 2]);

        for (size_t at = ends[count - 2]; at < size; at++) {
                note[at] ^= 0x10;
                CHECK(read_again(note, size) == before);
                note[at] ^= 0x10;
        }
        CHECK(read_again(note, size) == 100);
        free(note);
        bench_done(&bench, true);
        os_remove_tree(root);
}

static void a_note_does_not_grow_without_end(void)
{
        struct os_stat stat;
        struct bench bench;
        size_t size, ends[32], count;
        char *note = make_note(&bench, &size, ends, &count), path[200];
        struct version *version = bench.job->versions;

        free(note);
        snprintf(path, sizeof path, "%s/%016llx.version", memory, (unsigned long long)version->id);
        for (int i = 0; i < 1000; i++) {
                note_again(&bench, version);
                CHECK(!os->stat(path, false, &stat) && stat.size <= 65536 + 1024);
        }
        CHECK(!os_read_file(path, 1 << 20, &note, &size) && read_again(note, size) == 100);
        free(note);
        /* Another program removes the log: the next change writes it again. */
        CHECK(!os->unlink(path));
        note_again(&bench, version);
        CHECK(!os_read_file(path, 1 << 20, &note, &size) && read_again(note, size) == 100);
        free(note);
        bench_done(&bench, true);
        os_remove_tree(root);
}

/* The manifest named these files when the version became durable. This node never had their images. */
static void a_durable_version_with_files_of_other_nodes_is_taken_over(void)
{
        struct bench bench;
        size_t size, ends[32], count;
        char *note = make_note(&bench, &size, ends, &count), path[200];
        struct version *version = bench.job->versions;
        struct agent_file *other = version_file_add(version, "of another node");

        free(note);
        REQUIRE(other);
        other->rank = 1;
        other->size = 1;
        version_move(&bench.catalogue, version, NEBULA_STATE_DURABLE);
        snprintf(path, sizeof path, "%s/%016llx.version", memory, (unsigned long long)version->id);
        REQUIRE(!os_read_file(path, 1 << 20, &note, &size));
        bench_done(&bench, false);

        bench_init(&bench, memory, "");
        version = bench.job->versions;
        CHECK(version && version->in_memory && version->stored && version->file_count == 3);
        CHECK(version && version->files[0].image && version->files[1].image && !version->files[2].image);
        free(note);
        bench_done(&bench, true);
        os_remove_tree(root);
}

/* The tier that the version's ranks had loaded from, as the next agent's history says it; -1: it does not know. */
static void check_tier(int tier)
{
        static const char *const names[] = { "", "memory", "peer", "storage" };
        size_t size, ends[32], count;
        struct version *version;
        struct bench bench;
        const char *told;
        json_t *row;

        free(make_note(&bench, &size, ends, &count));
        version = bench.job->versions;
        version->base = (struct lineage_base){ .read_at = 1, .step = 3, .has_source = tier >= 0 };
        version->base.source = tier >= 0 ? (enum ipc_source)tier : IPC_SOURCE_MEMORY;
        note_again(&bench, version);
        bench_done(&bench, false);

        bench_init(&bench, memory, "");
        version = bench.job->versions;
        REQUIRE(version && version->base.read_at == 1);
        row = history_json(version);
        told = json_string_value(json_object_get(row, "read_tier"));
        CHECK(told && !strcmp(told, names[tier + 1]));
        json_decref(row);
        bench_done(&bench, true);
        os_remove_tree(root);
}

/* The stored version of its tag that it may replace. */
static void the_next_agent_knows_which_stored_version_a_version_follows(void)
{
        size_t size, ends[32], count;
        struct version *version;
        struct bench bench;

        free(make_note(&bench, &size, ends, &count));
        version = bench.job->versions;
        ancestry_restore(version, 7, 0);
        note_again(&bench, version);
        bench_done(&bench, false);

        bench_init(&bench, memory, "");
        version = bench.job->versions;
        REQUIRE(version);
        CHECK(ancestry_base(version) == 7 && ancestry_covers(version, "an earlier run", 7) && !ancestry_covers(version, "an earlier run", 8));
        bench_done(&bench, true);
        os_remove_tree(root);
}

static void the_next_agent_knows_the_tier_that_a_version_was_loaded_from(void)
{
        check_tier(-1);
        check_tier(IPC_SOURCE_MEMORY);
        check_tier(IPC_SOURCE_PEER);
        check_tier(IPC_SOURCE_STORAGE);
}

/* The size of a record must not depend on the number of earlier files: with 32,768 files the log would grow quadratically. */
static void a_file_more_is_noted_alone(void)
{
        const unsigned count = 700;
        struct bench bench;
        struct version *version;
        char path[200], name[20], *note;
        uint64_t id, written = 0, last = 0;
        size_t size;

        snprintf(root, sizeof root, "/dev/shm/nebula-note-XXXXXX");
        if (!mkdtemp(root))
                abort();
        snprintf(memory, sizeof memory, "%s/memory", root);
        bench_init(&bench, memory, "");
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "t", NEBULA_FILES_ALL_RANKS, &bench.error);
        id = version->id;
        for (unsigned i = 0; i < count; i++) {
                struct agent_file *file;

                snprintf(name, sizeof name, "f%u", i);
                file = version_file_add(version, name);
                if (!file)
                        abort();
                file->size = i;
                file->origin = 1; /* only storage has it */
                version->in_memory = true;
                survival_log_write(&bench.catalogue, version);
                written += version->survival->bytes > last ? version->survival->bytes - last : version->survival->bytes;
                last = version->survival->bytes;
        }
        catalogue_unlock(&bench.catalogue);
        CHECK(written < count * 1024u);
        snprintf(path, sizeof path, "%s/%016llx.version", memory, (unsigned long long)id);
        CHECK(!os_read_file(path, 1 << 20, &note, &size) && size == last);
        for (int changed = 0; changed < 2; changed++) {
                struct nebula_error error;
                struct bench after;
                bool same = true;

                bench_init(&after, NULL, "");
                strcpy(after.catalogue.memory->directory, memory);
                REQUIRE(!survival_record_read(&after.catalogue, 7, note, size, &error));
                version = after.job->versions;
                CHECK(version->file_count == count);
                for (unsigned i = 0; i < count; i++) {
                        const struct agent_file *file;

                        snprintf(name, sizeof name, "f%u", i);
                        file = version_file(version, name);
                        same = same && file && file->size == (changed && i == 3 ? 99 : i);
                }
                CHECK(same);
                bench_done(&after, false);
                free(note);
                /* The log has the new state of a file that is written again. */
                version = catalogue_version(&bench.catalogue, id);
                version_file_change(&bench.catalogue, version, version_file(version, "f3"));
                version_file(version, "f3")->size = 99;
                note_again(&bench, version);
                CHECK(!os_read_file(path, 1 << 20, &note, &size));
        }
        free(note);
        bench_done(&bench, true);
        os_remove_tree(root);
}

static void changes_under_one_lock_are_one_record_that_the_file_has_when_the_lock_is_released(void)
{
        struct bench bench;
        struct version *version;
        char path[200];
        struct os_stat stat;
        uint64_t before;

        snprintf(root, sizeof root, "/dev/shm/nebula-note-XXXXXX");
        if (!mkdtemp(root))
                abort();
        snprintf(memory, sizeof memory, "%s/memory", root);
        bench_init(&bench, memory, "");
        version = bench_version(&bench, "t", 1, 2);
        REQUIRE(version);
        snprintf(path, sizeof path, "%s/%016llx.version", memory, (unsigned long long)version->id);
        catalogue_lock(&bench.catalogue);
        before = version->survival->bytes;
        version_mark(&bench.catalogue, version);
        version_mark_files(&bench.catalogue, version);
        version_changed(&bench.catalogue, version);
        CHECK(version->survival->bytes == before);
        catalogue_unlock(&bench.catalogue);
        CHECK(version->survival->bytes > before && version->survival->bytes <= before + version->survival->begun_bytes + 1024);
        CHECK(!os->stat(path, false, &stat) && stat.size == version->survival->bytes);

        catalogue_lock(&bench.catalogue);
        version_mark(&bench.catalogue, version);
        version_forget_memory(&bench.catalogue, version);
        CHECK(!os->stat(path, false, &stat));
        catalogue_unlock(&bench.catalogue);
        CHECK(os->stat(path, false, &stat) == -ENOENT);
        bench_done(&bench, true);
        os_remove_tree(root);
}

static const struct version *of_tag(const struct bench *bench, const char *tag)
{
        const struct version *version = bench->job->versions;

        while (version && strcmp(version->tag, tag))
                version = version->next;
        return version;
}

/* The trainer has its answer and copies into the image. The agent is killed before or after it has logged the loan. */
static void an_agent_is_killed(bool is_noted)
{
        struct ipc_image request = { .size = BENCH_FILE_BYTES, .file_count = NEBULA_FILES_ALL_RANKS, .tag = "later", .name = "a" };
        size_t size, ends[32], count;
        char path[200];
        struct bench bench;
        struct version *version;
        struct image_loan *loan;
        struct os_stat stat;

        free(make_note(&bench, &size, ends, &count));
        catalogue_lock(&bench.catalogue);
        REQUIRE(!image_loan_open(&bench.catalogue, &bench.session, &request, never, NULL, &version, &loan, &bench.error));
        catalogue_unlock(&bench.catalogue);
        snprintf(path, sizeof path, "%s/%016llx.img", memory, (unsigned long long)loan->image->id);
        if (is_noted)
                image_loan_record(&bench.catalogue, version->id);
        bench_done(&bench, false);

        bench_init(&bench, memory, "");
        CHECK((of_tag(&bench, "later") != NULL) == is_noted);
        CHECK((os->stat(path, false, &stat) == 0) == is_noted);
        REQUIRE(of_tag(&bench, "t"));
        CHECK(lifecycle_complete(of_tag(&bench, "t")->life.state));
        bench_done(&bench, true);
        os_remove_tree(root);
}

/* Maps the image as a trainer maps a loaded file: pages that it has not touched show later changes of the file. */
static unsigned char *map_first_image(const struct bench *bench)
{
        struct image *image = bench->job->versions->files[0].image;
        void *data;
        int fd;

        if (image)
                image->exposed = true;
        if (!image || image_open_read_only(image, &fd, NULL) || os->map(fd, 0, BENCH_FILE_BYTES, OS_MAP_READ | OS_MAP_PRIVATE, &data))
                abort();
        os->close(fd);
        return data;
}

static bool holds(const unsigned char *data, unsigned seed)
{
        bool same = true;

        for (size_t i = 0; i < BENCH_FILE_BYTES; i++)
                same = same && data[i] == bench_byte(seed, i);
        return same;
}

/* Kills agents that often. The last agent saves more versions than memory keeps. */
static void agents_are_killed_under_a_reader(unsigned kills)
{
        size_t size, ends[32], count;
        unsigned char *mapped;
        struct bench bench;
        char tag[20];

        free(make_note(&bench, &size, ends, &count));
        mapped = map_first_image(&bench);
        for (unsigned i = 0; i < kills; i++) {
                bench_done(&bench, false);
                bench_init(&bench, memory, "");
                REQUIRE(bench.job->versions && bench.job->versions->in_memory);
        }
        for (unsigned i = 0; i < 6; i++) {
                snprintf(tag, sizeof tag, "later%u", i);
                REQUIRE(bench_version(&bench, tag, 100 + i, 200 + i));
        }
        CHECK(holds(mapped, 1));
        for (const struct version *version = bench.job->versions; version; version = version->next)
                CHECK(!version->in_memory || strcmp(version->tag, "t"));
        os->unmap(mapped, BENCH_FILE_BYTES);
        bench_done(&bench, true);
        os_remove_tree(root);
}

/* fault: as test_values_loaded_from_memory_stay_unchanged_when_agents_are_killed */
static void a_mapped_image_is_never_written_again_by_any_agent(void)
{
        for (unsigned kills = 0; kills < 3; kills++)
                agents_are_killed_under_a_reader(kills);
}

/* The next agent does not know the readers of a killed agent, so it writes to none of the images that were left, mapped or not. */
static void memory_that_was_taken_over_is_given_back_and_not_lent(void)
{
        size_t size, ends[32], count;
        uint64_t ids[2];
        struct bench bench;
        char tag[20];

        free(make_note(&bench, &size, ends, &count));
        bench_done(&bench, false);
        bench_init(&bench, memory, "");
        REQUIRE(bench.job->versions && bench.job->versions->file_count == 2);
        for (unsigned i = 0; i < 2; i++)
                ids[i] = bench.job->versions->files[i].image->id;
        for (unsigned i = 0; i < 6; i++) {
                snprintf(tag, sizeof tag, "later%u", i);
                REQUIRE(bench_version(&bench, tag, 1, 2));
                for (unsigned k = 0; k < 2; k++)
                        CHECK(bench.job->versions->files[k].image->id != ids[0] && bench.job->versions->files[k].image->id != ids[1]);
        }
        CHECK(!memory_find(bench.catalogue.memory, ids[0]) && !memory_find(bench.catalogue.memory, ids[1]));
        bench_done(&bench, true);
        os_remove_tree(root);
}

static void a_loan_that_was_not_noted_leaves_no_image(void)
{
        an_agent_is_killed(false);
        an_agent_is_killed(true);
}

static int in_another_namespace(const char *path, char *text, size_t size)
{
        return strcmp(path, "/proc/self/ns/pid") ? os_linux.readlink(path, text, size) : snprintf(text, size, "pid:[1]");
}

/* The trainer whose part is open lives, as far as the killed agent knows. `is_elsewhere`: the next agent is in another pid namespace, in
 * which that number belongs to another process, or to none. */
static void a_part_is_open(bool is_elsewhere, uint32_t seen_pid, uint64_t patience_s, bool is_kept)
{
        struct os_table table = os_linux;
        struct version *version;
        struct bench bench;
        bool waits;

        snprintf(root, sizeof root, "/dev/shm/nebula-note-XXXXXX");
        REQUIRE(mkdtemp(root));
        snprintf(memory, sizeof memory, "%s/memory", root);
        bench_init(&bench, memory, "");
        bench.session.seen_pid = seen_pid;
        version = bench_version(&bench, "whole", 1, 2);
        REQUIRE(version);
        catalogue_lock(&bench.catalogue);
        version = commit_begin(&bench.catalogue, &bench.session, "open", NEBULA_FILES_ALL_RANKS, &bench.error);
        catalogue_unlock(&bench.catalogue);
        REQUIRE(version && !bench_save(&bench, &version->id, "a", 3));
        bench_done(&bench, false);

        table.readlink = in_another_namespace;
        os = is_elsewhere ? &table : os;
        bench_init(&bench, NULL, "");
        bench.catalogue.give_up_s = patience_s;
        strcpy(bench.catalogue.memory->directory, memory);
        survival_log_adopt_all(&bench.catalogue);
        waits = survival_log_check_owners(&bench.catalogue, bench.job);
        version = (struct version *)of_tag(&bench, "open");
        CHECK(version && version_open(version) == is_kept && waits == is_kept);
        os = &os_linux;
        bench_done(&bench, true);
        os_remove_tree(root);
}

/* fault: as test_a_search_closes_no_part_of_a_live_rank_in_another_pid_namespace */
static void a_trainer_of_another_pid_namespace_is_waited_for_and_not_judged_by_its_number(void)
{
        a_part_is_open(false, os->pid(), 0, true);
        a_part_is_open(false, 0x7ffffffe, 600, false);
        a_part_is_open(true, 0x7ffffffe, 600, true);
        a_part_is_open(true, os->pid(), 0, false);
        a_part_is_open(false, 0, 600, true);
}

static uint64_t free_bytes;

static int report_space(const char *path, struct os_space *ret_space)
{
        (void)path;
        *ret_space = (struct os_space){ .total_bytes = 10u << 20, .free_bytes = free_bytes, .block_bytes = 4096 };
        return 0;
}

/* Otherwise each agent that dies would leave less of the directory to the next one, and images without names would not survive that agent. */
static void adopted_images_do_not_make_the_memory_directory_smaller(void)
{
        const struct os_table *before = os;
        struct os_table table = *os;
        struct bench bench;
        size_t size, ends[32], count;

        table.space = report_space;
        os = &table;
        free_bytes = 5 * memory_capacity(BENCH_FILE_BYTES);
        free(make_note(&bench, &size, ends, &count));
        CHECK(bench.catalogue.memory->named_used == 2 * memory_capacity(BENCH_FILE_BYTES));
        bench_done(&bench, false);

        free_bytes = 3 * memory_capacity(BENCH_FILE_BYTES);
        bench_init(&bench, memory, "");
        bench.job->settings.retention_count = 2;
        REQUIRE(bench_version(&bench, "u", 3, 4));
        CHECK(bench.catalogue.memory->named_used == 4 * memory_capacity(BENCH_FILE_BYTES));
        bench_done(&bench, true);
        os = before;
        os_remove_tree(root);
}

TAP_MAIN(TEST(a_note_that_was_cut_off_gives_the_last_whole_state), TEST(a_byte_that_flipped_is_seen),
         TEST(uploads_that_were_begun_are_known_to_the_next_agent),
         TEST(a_note_does_not_grow_without_end),
         TEST(a_durable_version_with_files_of_other_nodes_is_taken_over),
         TEST(the_next_agent_knows_which_stored_version_a_version_follows),
         TEST(the_next_agent_knows_the_tier_that_a_version_was_loaded_from), TEST(a_file_more_is_noted_alone),
         TEST(changes_under_one_lock_are_one_record_that_the_file_has_when_the_lock_is_released),
         TEST(a_mapped_image_is_never_written_again_by_any_agent),
         TEST(memory_that_was_taken_over_is_given_back_and_not_lent), TEST(a_loan_that_was_not_noted_leaves_no_image),
         TEST(a_trainer_of_another_pid_namespace_is_waited_for_and_not_judged_by_its_number),
         TEST(adopted_images_do_not_make_the_memory_directory_smaller))
