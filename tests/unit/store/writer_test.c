/* The steps by which a version is written: what its index entry and its entry of the log are after a step failed, or another program came first. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/http/crypt.h"
#include "store/index.h"
#include "store/manifest_check.h"
#include "store/manifest_keys.h"
#include "store/record.h"
#include "store/scan.h"
#include "store/signature.h"
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
        bool is_unsummed;  /* the record has no SHA-256 */
        bool stops;        /* before it has put the file */
        bool touches;      /* the claim, as a copy does from time to time */
        bool is_claimed;   /* the claim could be read then */
        unsigned complaints;
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
        record->files[0].has_sha256 = !source->is_unsummed;
        memset(record->files[0].sha256, 7, sizeof record->files[0].sha256);
        record->files[0].chunk_bytes = 4096;
        record->files[0].chunk_count = 1;
        record->files[0].chunks = calloc(1, sizeof *record->files[0].chunks);
        return writer_is_apart(writer, "f", &record->files[0].is_apart, failure);
}

static bool has_claim(const struct record *record)
{
        struct record found = { 0 };
        char key[MANIFEST_KEY_MAX], *text;
        size_t size;
        bool result = false;

        if (claim_key("t", record->writing, 0, key, NULL) || store->ops->get(store, key, 10000, &text, &size, NULL, NULL))
                return false;
        result = !record_parse(text, size, &found, NULL) && found.file_count == record->file_count;
        record_done(&found);
        free(text);
        return result;
}

static enum nebula_status publish(void *argument, struct nebula_error *failure)
{
        struct source *source = argument;
        const struct record *record = &source->writer.shares[0].record;
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = file_key("t", record->files[0].is_apart ? record->writing : NULL, "f", key, failure);

        if (source->stops)
                return error_set(failure, NEBULA_STORAGE, 0, "it stops");
        if (source->touches) {
                writer_touch(&source->writer, &source->writer.shares[0]);
                source->is_claimed = has_claim(record);
        }
        if (status || source->puts_nothing)
                return status;
        status = store->ops->put(store, key, source->run, 1, source->is_first ? STORE_IF_ABSENT : STORE_ALWAYS, NULL, NULL, failure);
        source->writer.is_overtaken = status == NEBULA_BUSY;
        return status;
}

static void complain(void *argument, const struct nebula_error *failure)
{
        struct source *source = argument;

        (void)failure;
        source->complaints++;
}

static const struct writer_source of_one_file = { .describe = describe, .publish = publish, .complain = complain };

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
        char dropped[MANIFEST_KEY_MAX], kept[MANIFEST_KEY_MAX];
        const struct manifest_record *records;
        size_t record_count;

        set_up();
        put_record("a", 0, 1, 3, 2);
        put_record("a", 1, 2, 3, 2);
        REQUIRE(!gather(&record_count, &writer.manifest) && count("t/.nebula/w") == 2);
        writer.store = store;
        writer.manifest.sequence = writer.manifest.records[1].sequence = 2; /* the other is of the version before */
        records = writer.manifest.records;
        REQUIRE(!record_key("t", records[0].writing, records[0].rank, kept, &error) && !record_key("t", records[1].writing, records[1].rank, dropped, &error));
        writer_drop_records(&writer);
        CHECK(count(dropped) == 0 && count(kept) == 1 && count("t/.nebula/w") == 1);
        manifest_done(&writer.manifest);
        store_close(store);
}

/* A copy is then tried again. */
static void a_writer_notices_that_another_entry_has_followed_its_own(void)
{
        for (int follows = 0; follows < 2; follows++) {
                enum nebula_status status = NEBULA_OK;
                struct source source;
                size_t at = 0;

                set_up();
                write_whole("c", 1); /* of which objects go in the last step */
                begin(&source, "a", 2);
                while (!source.writer.entered_ns)
                        REQUIRE(writer_step(&source.writer, WRITER_COPY, at++, &status, &error) && !status);
                REQUIRE(writer_step(&source.writer, WRITER_COPY, at++, &status, &error) && !status); /* the check */
                if (follows)
                        write_whole("b", 3);
                CHECK(writer_step(&source.writer, WRITER_COPY, at, &status, &error) && !status && source.writer.is_followed == follows);
                CHECK(is_newest(follows ? "b" : "a") && count(INDEX_PREFIX) == 1);
                writer_done(&source.writer);
                store_close(store);
        }
}

/* The record takes the place of the claim once the files are there. */
static void a_version_that_is_written_has_a_record_and_no_claim(void)
{
        for (int is_share = 0; is_share < 2; is_share++) {
                struct store_list list;
                struct source source;

                set_up();
                begin(&source, "a", 1);
                source.writer.manifest.number = 1;
                watched_begin(store);
                REQUIRE(!writer_run(&source.writer, is_share ? WRITER_SHARE : WRITER_COPY, &error));
                watched_end(store);
                REQUIRE(!store_list_all(store, "t/.nebula/w", true, &list, &error));
                CHECK(list.count == 1 && strstr(list.entries[0].key, ".record-"));
                store_list_done(&list);
                writer_done(&source.writer);
                store_close(store);
        }
}

/* Another program has written the tag, or has removed its version, since the node began. */
static void a_node_puts_no_share_of_a_tag_that_was_written_meanwhile(void)
{
        for (int is_removed = 0; is_removed < 2; is_removed++) {
                struct source source;

                set_up();
                if (is_removed)
                        write_whole("c", 1);
                begin(&source, "a", 2);
                source.writer.manifest.number = 1 + is_removed;
                if (is_removed && store_remove_one(store, "t/.nebula/manifest-1.json", &error))
                        abort();
                else if (!is_removed)
                        write_whole("b", 3);
                CHECK(writer_run(&source.writer, WRITER_SHARE, &error) == NEBULA_STORAGE && source.writer.is_overtaken && !source.writer.share_count);
                CHECK(strstr(error.message, is_removed ? "was removed" : "was written by another agent"));
                writer_done(&source.writer);
                store_close(store);
        }
}

static void a_copy_that_goes_on_after_it_was_stopped_renews_its_claim(void)
{
        struct source source;

        set_up();
        for (int i = 0; i < 2; i++) {
                begin(&source, "a", 1);
                source.stops = !i;
                source.touches = i;
                CHECK(run(&source) == (i ? NEBULA_OK : NEBULA_STORAGE));
                CHECK(i ? source.is_claimed && source.writer.shares[0].is_found : has_claim(&source.writer.shares[0].record));
                writer_done(&source.writer);
        }
        store_close(store);
}

static void damage(const char *key)
{
        if (store->ops->put(store, key, "", 0, STORE_ALWAYS, NULL, NULL, &error))
                abort();
}

/* fault (Storage): A loss of power has emptied the claim or the record of a copy that was stopped.
 * result: The next copy writes the claim again. In place of the record it takes another name, and a sweep removes the record. */
static void a_copy_whose_claim_or_record_cannot_be_read_is_no_obstacle_to_the_next(void)
{
        for (int is_record = 0; is_record < 2; is_record++) {
                char key[MANIFEST_KEY_MAX];
                struct source source;

                set_up();
                begin(&source, "a", 1);
                source.stops = true;
                REQUIRE(run(&source) == NEBULA_STORAGE);
                REQUIRE(!(is_record ? record_key : claim_key)("t", source.writer.shares[0].record.writing, 0, key, &error));
                damage(key);
                writer_done(&source.writer);
                begin(&source, "a", 1);
                source.touches = true;
                CHECK(run(&source) == (is_record ? NEBULA_STORAGE : NEBULA_OK) && source.writer.is_overtaken == (is_record == 1));
                CHECK(is_record || (source.is_claimed && is_newest("a")));
                writer_done(&source.writer);
                store_close(store);
        }
}

/* A file of which this node's agent has noted no sum is not vouched for. */
static void a_version_is_signed_if_its_records_are_sealed_and_have_the_sums_of_all_files(void)
{
        struct trust trust = { .policy = TRUST_PREFER, .lock = LOCK_INIT(LOCK_TRUST) };
        uint8_t wanted[32], digest[32];
        struct source source;

        memset(wanted, 7, sizeof wanted);
        trust.own.key = crypt_key_new(CRYPT_ED25519);
        REQUIRE(trust.own.key && trust_key_id(trust.own.key, trust.own.id));
        for (int i = 0; i < 2; i++) {
                set_up();
                store->trust = &trust;
                begin(&source, "a", 1);
                source.is_unsummed = i;
                REQUIRE(!run(&source));
                CHECK(count("t/.nebula/signature-") == !i && source.complaints == (unsigned)i);
                CHECK(i || (!signature_known(store, &source.writer.manifest, "f", digest) && !memcmp(digest, wanted, sizeof wanted)));
                writer_done(&source.writer);
                store->trust = NULL;
                store_close(store);
        }
        signature_free(trust.last);
        crypt_key_free(trust.own.key);
}

TAP_MAIN(TEST(a_writer_notices_that_another_entry_has_followed_its_own), TEST(a_copy_that_goes_on_after_it_was_stopped_renews_its_claim), TEST(a_copy_whose_claim_or_record_cannot_be_read_is_no_obstacle_to_the_next), TEST(a_node_puts_no_share_of_a_tag_that_was_written_meanwhile), TEST(a_version_that_is_written_has_a_record_and_no_claim),
         TEST(a_version_is_signed_if_its_records_are_sealed_and_have_the_sums_of_all_files),
         TEST(of_a_version_that_is_written_again_only_its_own_records_go), TEST(a_sweep_since_the_first_record_of_this_version_is_noticed_and_an_older_one_is_not), TEST(a_manifest_names_the_records_of_its_own_entry_run_and_world_once_for_each_rank),
         TEST(a_version_that_is_written_has_its_index_entry_and_that_of_the_version_before_is_gone),
         TEST(a_version_whose_files_were_removed_is_taken_back_with_its_index_entry),
         TEST(a_search_finds_the_version_of_an_entry_whose_request_fails),
         TEST(if_another_program_made_the_entry_first_only_the_index_entry_of_that_one_stays),
         TEST(a_first_writing_takes_four_writes_and_the_last_look),
         TEST(a_first_writing_replaces_no_version_that_it_did_not_know),
         TEST(a_first_writing_gives_way_to_a_later_entry_of_the_log),
         TEST(a_first_writing_is_not_durable_under_the_number_of_a_removal))
