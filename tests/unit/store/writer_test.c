/* The steps by which a version is written: what its index entry and its entry of the log are after a step failed, or another program came first. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/index.h"
#include "store/manifest_check.h"
#include "store/manifest_keys.h"
#include "store/record.h"
#include "store/scan.h"
#include "store/store_mem.h"
#include "store/writer_private.h"
#include "tap.h"
#include "watched.h"

#define URL "mem://writer"

static struct store *store;
static struct nebula_error error;

/* One file, "f", of rank 0. */
struct source {
        struct writer writer;
        const char *run;
        bool puts_nothing; /* as if another program had removed the file */
        bool is_first;     /* the writer knows of no version of the tag */
};

static enum nebula_status describe(void *argument, struct nebula_error *failure)
{
        struct source *source = argument;
        struct writer *writer = &source->writer;
        struct writer_share *share = writer_add_share(writer, failure);
        struct record *record = &share->record;

        record->files = calloc(1, sizeof *record->files);
        record->ranks = calloc(1, sizeof *record->ranks);
        if (!record->files || !record->ranks)
                abort();
        record->file_count = record->rank_count = 1;
        strcpy(record->tag, "t");
        strcpy(record->job, "j");
        strcpy(record->run, source->run);
        writing_name("j", source->run, 1, 1, record->writing);
        record->number = writer->manifest.number;
        record->world = 1;
        strcpy(record->files[0].name, "f");
        record->files[0].size = 1;
        record->files[0].chunk_bytes = 4096;
        record->files[0].chunk_count = 1;
        record->files[0].chunks = calloc(1, sizeof *record->files[0].chunks);
        return writer_is_apart(writer, "f", &record->files[0].is_apart, failure);
}

static enum nebula_status publish(void *argument, struct nebula_error *failure)
{
        struct source *source = argument;
        const struct record *record = &source->writer.shares[0].record;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = file_key("t", record->files[0].is_apart ? record->writing : NULL, "f", key, failure);

        if (status || source->puts_nothing)
                return status;
        status = store->ops->put(store, key, source->run, 1, source->is_first ? STORE_IF_ABSENT : STORE_ALWAYS, NULL, NULL, failure);
        source->writer.is_overtaken = status == NEBULA_BUSY;
        return status;
}

static const struct writer_source of_one_file = { .describe = describe, .publish = publish };

static void begin_as(struct source *source, const char *run, uint64_t sequence, bool is_first)
{
        struct manifest *manifest = &source->writer.manifest;

        *source = (struct source){ .run = run, .is_first = is_first };
        if (writer_init(&source->writer, store, &of_one_file, source, "t", &error))
                abort();
        strcpy(manifest->tag, "t");
        strcpy(manifest->job, "j");
        strcpy(manifest->run, run);
        manifest->world = 1;
        manifest->step = -1;
        if (!is_first && writer_begin(&source->writer, &error))
                abort();
        manifest->writing = source->writer.before.manifest.writing + 1;
        manifest->sequence = sequence;
}

static void begin(struct source *source, const char *run, uint64_t sequence)
{
        begin_as(source, run, sequence, false);
}

static enum nebula_status run(struct source *source)
{
        return writer_run(&source->writer, source->is_first ? WRITER_FIRST : WRITER_COPY, &error);
}

static void set_up(void)
{
        if (store_mem.open(URL, &store, &error))
                abort();
        store_mem_forget(URL);
}

static size_t count(const char *prefix)
{
        struct store_list list;
        size_t result;

        if (store_list_all(store, prefix, true, &list, &error))
                abort();
        result = list.count;
        store_list_done(&list);
        return result;
}

static bool is_newest(const char *wanted_run)
{
        struct manifest found = { 0 };
        struct manifest_scan scan = { 0 };
        int64_t index;
        bool result = !manifest_scan_index(store, &scan, &error) && !manifest_scan_load_newest(store, &scan, "j", &found, &index, &error) &&
                      !strcmp(found.run, wanted_run);

        manifest_scan_done(&scan);
        manifest_done(&found);
        return result;
}

static void a_version_that_is_written_has_its_index_entry_and_that_of_the_version_before_is_gone(void)
{
        struct source source;

        set_up();
        for (uint64_t sequence = 1; sequence <= 2; sequence++) {
                begin(&source, sequence == 1 ? "a" : "b", sequence);
                CHECK(!run(&source) && count(INDEX_PREFIX) == 1 && is_newest(source.run));
                writer_done(&source.writer);
        }
        store_close(store);
}

static void a_version_whose_files_were_removed_is_taken_back_with_its_index_entry(void)
{
        struct source source;

        set_up();
        begin(&source, "a", 1);
        source.puts_nothing = true;
        CHECK(run(&source) == NEBULA_STORAGE && source.writer.is_taken_back && source.writer.is_overtaken);
        CHECK(!count("t/.nebula/manifest-") && !count(INDEX_PREFIX));
        writer_done(&source.writer);
        store_close(store);
}

/* The request may have succeeded although it seems to have failed: a search must see the version then. */
static void a_search_finds_the_version_of_an_entry_whose_request_fails(void)
{
        struct source source;
        uint64_t calls;

        set_up();
        begin(&source, "a", 1);
        store_mem_faults(store, &(struct mem_faults){ 0 });
        CHECK(!run(&source));
        calls = store_mem_writes(store);
        writer_done(&source.writer);
        for (uint64_t at = 1; at <= calls; at++) {
                store_mem_forget(URL);
                begin(&source, "a", 1);
                store_mem_faults(store, &(struct mem_faults){ .lose_at = at });
                run(&source);
                store_mem_faults(store, NULL);
                CHECK(!count("t/.nebula/manifest-") || is_newest("a"));
                writer_done(&source.writer);
        }
        store_close(store);
}

/* Another program writes between this writer's last look and its entry. */
static struct source other;
static bool is_same;

static void write_before_the_entry(struct store *self, enum watched_call call, const char *key)
{
        (void)self;
        if (call != CALL_PUT || !strstr(key, "t/.nebula/manifest-"))
                return;
        watched.before = NULL;
        begin(&other, is_same ? "a" : "b", is_same ? 1 : 2);
        if (run(&other))
                abort();
        writer_done(&other.writer);
}

static void if_another_program_made_the_entry_first_only_the_index_entry_of_that_one_stays(void)
{
        for (int i = 0; i < 2; i++) {
                struct source source;

                set_up();
                is_same = i;
                begin(&source, "a", 1);
                watched_begin(store);
                watched.before = write_before_the_entry;
                CHECK(run(&source) == NEBULA_STORAGE && source.writer.is_overtaken && !source.writer.is_taken_back);
                watched_end(store);
                CHECK(count(INDEX_PREFIX) == 1 && is_newest(is_same ? "a" : "b"));
                writer_done(&source.writer);
                store_close(store);
        }
}

static void write_whole(const char *by, uint64_t sequence)
{
        struct source source;

        begin(&source, by, sequence);
        if (run(&source))
                abort();
        writer_done(&source.writer);
}

static bool has_text(const char *key, const char *wanted)
{
        char *text;
        size_t size;
        bool result = !store->ops->get(store, key, 100, &text, &size, NULL, &error);

        if (result) {
                result = size == strlen(wanted) && !memcmp(text, wanted, size);
                free(text);
        }
        return result;
}

static void a_first_writing_takes_four_writes_and_the_last_look(void)
{
        struct source source;

        set_up();
        begin_as(&source, "a", 1, true);
        watched_begin(store);
        CHECK(!run(&source) && watched.of_kind[CALL_PUT] == 4 && watched.calls == 4 + watched.of_kind[CALL_LIST]);
        watched_end(store);
        CHECK(count(INDEX_PREFIX) == 1 && is_newest("a") && has_text("t/f", "a"));
        writer_done(&source.writer);
        store_close(store);
}

static void a_first_writing_replaces_no_version_that_it_did_not_know(void)
{
        struct source source;

        for (int is_free = 0; is_free < 2; is_free++) { /* the name of the file: then the entry stops the writer */
                set_up();
                write_whole("b", 2);
                if (is_free && store_remove_one(store, "t/f", &error))
                        abort();
                begin_as(&source, "a", 1, true);
                CHECK(run(&source) && source.writer.is_overtaken && !source.writer.is_taken_back);
                CHECK(count("t/.nebula/manifest-") == 1 && count(INDEX_PREFIX) == 1 && is_newest("b"));
                CHECK(is_free || (has_text("t/f", "b") && count("t/.nebula/") == 2)); /* nothing names that file but its version */
                writer_done(&source.writer);
                store_close(store);
        }
}

/* Only the newest of several entries is kept, so the number 1 is free. */
static void a_first_writing_gives_way_to_a_later_entry_of_the_log(void)
{
        struct source source;

        set_up();
        write_whole("b", 2);
        write_whole("c", 3);
        CHECK(count("t/.nebula/manifest-1") == 0 && count("t/.nebula/manifest-2") == 1);
        if (store_remove_one(store, "t/f", &error))
                abort();
        begin_as(&source, "a", 1, true);
        CHECK(run(&source) == NEBULA_STORAGE && source.writer.is_overtaken && source.writer.is_taken_back);
        CHECK(count(INDEX_PREFIX) == 1 && is_newest("c"));
        writer_done(&source.writer);
        store_close(store);
}

static void a_first_writing_is_not_durable_under_the_number_of_a_removal(void)
{
        struct source source;

        set_up();
        if (store_put_text(store, ".nebula/removed/t/1", "\n", STORE_ALWAYS, &error))
                abort();
        begin_as(&source, "a", 1, true);
        CHECK(run(&source) == NEBULA_STORAGE && source.writer.is_overtaken && source.writer.is_taken_back);
        CHECK(!count("t/.nebula/manifest-") && !count(INDEX_PREFIX));
        writer_done(&source.writer);
        begin(&source, "b", 1);
        CHECK(!run(&source) && source.writer.manifest.number == 2 && is_newest("b"));
        writer_done(&source.writer);
        store_close(store);
}

/* Puts the record of a rank that saved no file. */
static void put_record(const char *run, uint32_t rank, uint32_t attempt, uint64_t number, uint32_t world)
{
        struct record_rank ranks[] = { { rank, 1, 2 } };
        struct record record = { .tag = "t", .number = number, .world = world, .persisted = 3, .ranks = ranks, .rank_count = 1 };
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;

        strcpy(record.run, run);
        writing_name("", "a", 1, attempt, record.writing);
        if (record_key("t", record.writing, rank, key, NULL) || record_format(&record, &text, &size, NULL) ||
            store->ops->put(store, key, text, size, STORE_IF_ABSENT, NULL, NULL, &error))
                abort();
        free(text);
}

/* Gathers the records of two ranks for entry 3. `ret_manifest` may be NULL. */
static enum nebula_status gather(size_t *ret_records, struct manifest *ret_manifest)
{
        static const uint32_t ranks[] = { 0, 1 };
        char prefix[WRITING_MAX];
        const struct writer_goal goal = { .prefix = prefix, .ranks = ranks, .rank_count = 2, .world = 2, .is_late = true };
        struct writer writer;
        enum nebula_status status;

        if (writer_init(&writer, store, &of_one_file, NULL, "t", &error))
                abort();
        strcpy(writer.manifest.tag, "t");
        strcpy(writer.manifest.run, "a");
        writer.manifest.number = 3;
        writer.manifest.sequence = 1;
        writing_prefix("", "a", 1, prefix);
        writer.goal = &goal;
        status = writer_gather(&writer, &error);
        *ret_records = writer.manifest.record_count;
        if (ret_manifest) {
                *ret_manifest = writer.manifest;
                memset(&writer.manifest, 0, sizeof writer.manifest);
        }
        writer_done(&writer);
        return status;
}

/* Records of an earlier try, of another run and of another world lie beside them, and two tries of rank 0. */
static void a_manifest_names_the_records_of_its_own_entry_run_and_world_once_for_each_rank(void)
{
        size_t records;

        set_up();
        put_record("a", 0, 1, 3, 2);
        put_record("a", 1, 2, 2, 2);
        put_record("a", 1, 3, 4, 2);
        put_record("b", 1, 4, 3, 2);
        put_record("a", 1, 5, 3, 4);
        CHECK(gather(&records, NULL) == NEBULA_BUSY && records == 1 && strstr(error.message, "rank 1"));
        put_record("a", 0, 6, 3, 2);
        put_record("a", 1, 7, 3, 2);
        CHECK(!gather(&records, NULL) && records == 2);
        store_close(store);
}

/* It may have taken the files of that record for debris. */
static void a_sweep_since_the_first_record_of_this_version_is_noticed_and_an_older_one_is_not(void)
{
        struct manifest manifest;
        size_t records;

        set_up();
        put_record("a", 0, 1, 3, 2);
        os->sleep_ms(1001); /* times of this store are seconds */
        if (store_put_text(store, "t/.nebula/sweep-00000000000000aa.json", "x", STORE_ALWAYS, &error))
                abort();
        os->sleep_ms(1001); /* times of this store are seconds */
        put_record("a", 1, 2, 3, 2);
        REQUIRE(!gather(&records, &manifest));
        if (store_put_text(store, "t/.nebula/manifest-3.json", "x", STORE_ALWAYS, &error))
                abort();
        CHECK(manifest_check_all(store, &manifest, &error) == NEBULA_BUSY);
        manifest.sequence = manifest.records[manifest.records[1].rank].sequence = 2; /* the older record is of an earlier version */
        CHECK(!manifest_check_all(store, &manifest, &error));
        manifest.sequence = 1;
        CHECK(!store_remove_one(store, "t/.nebula/sweep-00000000000000aa.json", &error) && !manifest_check_all(store, &manifest, &error));
        manifest_done(&manifest);
        store_close(store);
}

static void of_a_version_that_is_written_again_only_its_own_records_go(void)
{
        struct writer writer = { .directory = "t" };
        size_t records;

        set_up();
        put_record("a", 0, 1, 3, 2);
        put_record("a", 1, 2, 3, 2);
        REQUIRE(!gather(&records, &writer.manifest) && count("t/.nebula/w") == 2);
        writer.store = store;
        writer.manifest.sequence = writer.manifest.records[0].sequence = 2;
        writer_drop_records(&writer);
        CHECK(count("t/.nebula/w") == 1);
        manifest_done(&writer.manifest);
        store_close(store);
}

TAP_MAIN(TEST(of_a_version_that_is_written_again_only_its_own_records_go), TEST(a_sweep_since_the_first_record_of_this_version_is_noticed_and_an_older_one_is_not), TEST(a_manifest_names_the_records_of_its_own_entry_run_and_world_once_for_each_rank),
         TEST(a_version_that_is_written_has_its_index_entry_and_that_of_the_version_before_is_gone),
         TEST(a_version_whose_files_were_removed_is_taken_back_with_its_index_entry),
         TEST(a_search_finds_the_version_of_an_entry_whose_request_fails),
         TEST(if_another_program_made_the_entry_first_only_the_index_entry_of_that_one_stays),
         TEST(a_first_writing_takes_four_writes_and_the_last_look),
         TEST(a_first_writing_replaces_no_version_that_it_did_not_know),
         TEST(a_first_writing_gives_way_to_a_later_entry_of_the_log),
         TEST(a_first_writing_is_not_durable_under_the_number_of_a_removal))
