/* The record of a node as a text: a written text can be read, an inconsistent one is refused. */
#include "golden.h"
#include "store/manifest.h"
#include "store/manifest_keys.h"
#include "store/record.h"

#define CHUNK 4096u

static enum nebula_status parse_record(const char *text, size_t size, struct nebula_error *error)
{
        struct record record = { 0 };
        enum nebula_status status = record_parse(text, size, &record, error);

        record_done(&record);
        return status;
}

static void a_record_comes_back_as_it_was_written(void)
{
        uint64_t chunks[3] = { 1, 0xffffffffffffffff, 0x00f1000000000000 };
        struct record_rank ranks[2] = { { 1, 1766312345.120001, 1766312345.16 }, { 3, 0, 0 } };
        struct record_file files[2] = {
                { .name = "a/b", .size = 2 * CHUNK + 1, .rank = 3, .is_zip = true, .chunk_bytes = CHUNK, .chunks = chunks, .chunk_count = 3,
                  .mark = { "12-34" }, .referred = CHUNK },
                { .name = "empty", .rank = 1, .is_apart = true, .chunk_bytes = CHUNK },
        };
        struct record written = { .tag = "t", .job = "j", .run = "r", .writing = WRITING, .number = 7, .world = 4, .persisted = 1,
                                  .ranks = ranks, .rank_count = 2, .files = files, .file_count = 2 };
        struct record read;
        char *text;
        size_t size;

        REQUIRE(record_format(&written, &text, &size, NULL) == NEBULA_OK);
        CHECK(size == strlen(text) && text[size - 1] == '\n' && document_is(text, "record") && !document_is(text, "manifest"));
        REQUIRE(record_parse(text, size, &read, NULL) == NEBULA_OK);
        CHECK(!strcmp(read.tag, "t") && !strcmp(read.job, "j") && !strcmp(read.run, "r") && !strcmp(read.writing, WRITING));
        CHECK(read.number == 7 && read.world == 4 && read.persisted == 1);
        REQUIRE(read.rank_count == 2 && read.file_count == 2);
        for (size_t i = 0; i < 2; i++)
                CHECK(read.ranks[i].rank == ranks[i].rank && read.ranks[i].begun == ranks[i].begun && read.ranks[i].captured == ranks[i].captured);
        CHECK(!strcmp(read.files[0].name, "a/b") && read.files[0].rank == 3 && read.files[0].is_zip && !read.files[0].is_apart);
        CHECK(read.files[0].size == 2 * CHUNK + 1 && read.files[0].chunk_count == 3 && !memcmp(read.files[0].chunks, chunks, sizeof chunks));
        CHECK(!strcmp(read.files[0].mark.text, "12-34") && read.files[0].referred == CHUNK);
        CHECK(!*read.files[1].mark.text && !read.files[1].referred);
        CHECK(!read.files[1].is_zip && read.files[1].is_apart && read.files[1].rank == 1 && !read.files[1].size && !read.files[1].chunk_count);
        record_done(&read);
        free(text);
}

static void the_golden_record_of_version_2_0_is_read(void)
{
        struct record record;
        size_t size;
        char *text = golden("record-2.0.json", &size);

        REQUIRE(record_parse(text, size, &record, NULL) == NEBULA_OK);
        CHECK(!strcmp(record.tag, "global_step500") && !strcmp(record.job, "gpt") && !strcmp(record.run, "r1"));
        CHECK(!strcmp(record.writing, "w7fb1b9bf9793b267-2-9c0a77e1") && record.world == 8 && record.number == 4 && record.persisted == 1766312346.5);
        REQUIRE(record.rank_count == 2 && record.file_count == 2);
        CHECK(record.ranks[0].rank == 2 && record.ranks[0].begun == 1766312345.0625 && record.ranks[1].rank == 3 && record.ranks[1].captured == 1766312345.25);
        CHECK(!strcmp(record.files[0].name, "model/rank3 \xc3\xa9.pt") && record.files[0].is_zip && !record.files[0].is_apart);
        CHECK(record.files[0].size == 10240 && record.files[0].chunk_count == 3 && record.files[0].chunk_bytes == 4096);
        CHECK(record.files[0].chunks[2] == 0x8c20d15db235e17c);
        CHECK(!strcmp(record.files[1].name, "empty") && record.files[1].is_apart && record.files[1].rank == 3);
        record_done(&record);
        free(text);
}

/* The manifest was made from that record. The name of the writing comes from the job, the run and the number. */
static void the_golden_manifest_names_the_golden_record(void)
{
        struct manifest manifest;
        char writing[WRITING_MAX];
        size_t size, record_size;
        char *text = golden("manifest-2.0.json", &size), *record_text = golden("record-2.0.json", &record_size);

        REQUIRE(manifest_parse(text, size, &manifest, NULL) == NEBULA_OK);
        CHECK(manifest.records[0].size == record_size && manifest.records[0].crc64 == sum_crc64(0, record_text, record_size));
        writing_name("gpt", "r1", 2, 0x9c0a77e1, writing);
        CHECK(!strcmp(manifest.records[0].writing, writing));
        manifest_done(&manifest);
        free(text);
        free(record_text);
}

static void writing_the_golden_record_again_gives_the_same_bytes(void)
{
        struct record record;
        size_t size, again_size;
        char *text = golden("record-2.0.json", &size), *again;

        REQUIRE(!record_parse(text, size, &record, NULL) && !record_format(&record, &again, &again_size, NULL));
        CHECK(again_size == size && !memcmp(text, again, size));
        record_done(&record);
        free(text);
        free(again);
}

static void every_flipped_bit_and_every_cut_is_found(void)
{
        check_damage(parse_record, "record-2.0.json");
}

static void no_other_document_is_a_record(void)
{
        static const char *const names[] = { "manifest-2.0.json", "removal-2.0.json", "captured-2.0.json", "committed-2.0.json" };

        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
                size_t size;
                char *text = golden(names[i], &size);

                CHECK(parse_record(text, size, NULL) == NEBULA_CORRUPT);
                free(text);
        }
}

static void nothing_is_as_good_as_done(void)
{
        struct record record = { 0 };
        struct record_file file = { 0 };

        record_done(&record);
        record_file_done(&file);
}

#define RECORD(ranks, files) \
        "{\"nebula\":\"record\",\"version\":\"2.0\",\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"writing\":\"" WRITING "\",\"number\":1," \
        "\"world\":3,\"persisted\":3.5,\"ranks\":" ranks ",\"files\":[" files "]"
#define RECORD_FILE(name, rank, size, format, chunk, crcs) \
        "{\"name\":\"" name "\",\"rank\":" #rank ",\"size\":" #size ",\"format\":\"" format "\",\"chunk_bytes\":" #chunk ",\"crc64\":[" crcs "]}"
#define SUM "\"0123456789abcdef\""

static void a_record_that_does_not_add_up_is_refused(void)
{
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", RECORD_FILE("a", 1, 4097, "raw", 4096, SUM "," SUM))) == NEBULA_OK);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", RECORD_FILE("a", 1, 4097, "raw", 4096, SUM))) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", RECORD_FILE("a", 1, 1, "raw", 0, SUM))) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", RECORD_FILE("a", 1, 1, "raw", 4294967295, SUM))) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", RECORD_FILE("a", 1, -1, "raw", 4096, ""))) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", RECORD_FILE("a", 1, 1, "tar", 4096, SUM))) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", RECORD_FILE("a", 1, 1, "raw", 4096, "\"0123456789ABCDEF\""))) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", RECORD_FILE("a", 1, 1, "raw", 4096, "17"))) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", RECORD_FILE("", 1, 1, "raw", 4096, SUM))) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", RECORD_FILE("a", 1, 1, "raw", 4096, SUM) "," RECORD_FILE("a", 1, 1, "raw", 4096, SUM))) ==
              NEBULA_CORRUPT); /* one name twice */
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2]]", "7")) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, "{\"nebula\":\"record\",\"version\":\"2.0\",\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"writing\":\"" WRITING "\","
                                         "\"number\":0,\"world\":3,\"persisted\":3.5,\"ranks\":[[1,1,2]],\"files\":[]") == NEBULA_CORRUPT);
}

static void a_record_whose_ranks_do_not_add_up_is_refused(void)
{
        CHECK(parse_sealed(parse_record, RECORD("[[0,1,2],[2,0,0.5]]", RECORD_FILE("a", 2, 0, "raw", 1, ""))) == NEBULA_OK);
        CHECK(parse_sealed(parse_record, RECORD("[[0,1,2],[2,0,0]]", RECORD_FILE("a", 1, 0, "raw", 1, ""))) == NEBULA_CORRUPT); /* not covered */
        CHECK(parse_sealed(parse_record, RECORD("[]", "")) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("7", "")) == NEBULA_CORRUPT && parse_sealed(parse_record, RECORD("[7]", "")) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[3,1,2]]", "")) == NEBULA_CORRUPT && parse_sealed(parse_record, RECORD("[[-1,1,2]]", "")) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,2],[1,1,2]]", "")) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[2,1,2],[1,1,2]]", "")) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[0,1,2],[1,1,2],[2,1,2],[2,1,2]]", "")) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1.5,1,2]]", "")) == NEBULA_CORRUPT && parse_sealed(parse_record, RECORD("[[1]]", "")) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,-1,2]]", "")) == NEBULA_CORRUPT && parse_sealed(parse_record, RECORD("[[1,1,1e300]]", "")) == NEBULA_CORRUPT);
        CHECK(parse_sealed(parse_record, RECORD("[[1,1,\"2\"]]", "")) == NEBULA_CORRUPT);
}

static void a_writing_that_is_no_name_of_one_is_refused(void)
{
        for (size_t i = 0; i < sizeof unsound_writings / sizeof *unsound_writings; i++) {
                char body[800];

                snprintf(body, sizeof body,
                         "{\"nebula\":\"record\",\"version\":\"2.0\",\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"writing\":\"%s\",\"number\":1,\"world\":2,"
                         "\"persisted\":1,\"ranks\":[[0,1,1]],\"files\":[]", unsound_writings[i]);
                CHECK(parse_sealed(parse_record, body) == NEBULA_CORRUPT);
        }
}

static void a_record_of_version_1_0_is_refused(void)
{
        CHECK(parse_sealed(parse_record, "{\"nebula\":\"record\",\"version\":\"1.0\",\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"generation\":1,\"rank\":0,"
                                         "\"world\":2,\"files\":[],\"times\":{\"begun\":1,\"captured\":2,\"persisted\":3.5}") == NEBULA_CORRUPT);
}

TAP_MAIN(TEST(a_record_comes_back_as_it_was_written), TEST(the_golden_record_of_version_2_0_is_read), TEST(the_golden_manifest_names_the_golden_record),
         TEST(writing_the_golden_record_again_gives_the_same_bytes), TEST(every_flipped_bit_and_every_cut_is_found),
         TEST(no_other_document_is_a_record), TEST(nothing_is_as_good_as_done), TEST(a_record_that_does_not_add_up_is_refused),
         TEST(a_record_whose_ranks_do_not_add_up_is_refused), TEST(a_writing_that_is_no_name_of_one_is_refused),
         TEST(a_record_of_version_1_0_is_refused))
