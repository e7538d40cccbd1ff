#include "store/announce.h"

#include <inttypes.h>

#include "sum/sum.h"
#include "tap.h"

static char *golden(const char *name, size_t *ret_size)
{
        char path[1024];
        const char *slash = strrchr(__FILE__, '/');
        FILE *file;
        char *text;

        snprintf(path, sizeof path, "%.*s/../../golden/%s", (int)(slash - __FILE__), __FILE__, name);
        file = fopen(path, "rb");
        if (!file && !strncmp(path, "../", 3))
                file = fopen(path + 3, "rb");
        if (!file)
                return NULL;
        text = calloc(1, 4096);
        *ret_size = fread(text, 1, 4095, file);
        fclose(file);
        return text;
}

static void the_golden_captured_document_of_version_1_0_is_read_and_written_again(void)
{
        struct captured captured;
        char *text, *again;
        size_t size, again_size;

        text = golden("captured-1.0.json", &size);
        REQUIRE(text && !captured_parse(text, size, &captured, NULL));
        CHECK(!strcmp(captured.of.tag, "global_step500") && !strcmp(captured.of.run, "r1") && captured.of.writing == 2);
        CHECK(captured.of.world == 8 && captured.generation == 3 && captured.sequence == 1766312345160000000);
        REQUIRE(captured.rank_count == 2);
        CHECK(captured.ranks[0].rank == 4 && captured.ranks[0].files == 2 && captured.ranks[1].rank == 5 && !captured.ranks[1].files);
        REQUIRE(!captured_format(&captured, &again, &again_size, NULL));
        CHECK(again_size == size && !memcmp(text, again, size));
        captured_done(&captured);
        free(again);
        free(text);
}

static void the_golden_committed_document_of_version_1_0_is_read_and_written_again(void)
{
        struct committed committed;
        char *text, *again;
        size_t size, again_size;

        text = golden("committed-1.0.json", &size);
        REQUIRE(text && !committed_parse(text, size, &committed, NULL));
        CHECK(committed.persist && committed.generation == 3 && committed.rank_count == 3 && committed.ranks[2] == 5);
        REQUIRE(!committed_format(&committed, &again, &again_size, NULL));
        CHECK(again_size == size && !memcmp(text, again, size));
        committed_done(&committed);
        free(again);
        free(text);
}

static void every_flipped_bit_is_found(void)
{
        struct captured captured;
        size_t size;
        char *text = golden("captured-1.0.json", &size);

        REQUIRE(text);
        for (size_t bit = 0; bit < size * 8; bit++) {
                text[bit / 8] = (char)(text[bit / 8] ^ (1 << bit % 8));
                CHECK(captured_parse(text, size, &captured, NULL) != NEBULA_OK);
                text[bit / 8] = (char)(text[bit / 8] ^ (1 << bit % 8));
        }
        free(text);
}

static enum nebula_status parse_ranks(const char *ranks)
{
        struct captured captured = { 0 };
        char text[1024];
        size_t size = (size_t)snprintf(text, sizeof text,
                                       "{\"nebula\":\"captured\",\"version\":\"1.0\",\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"writing\":1,"
                                       "\"world\":4,\"generation\":1,\"sequence\":1,\"host\":\"\",\"pid\":1,\"ranks\":%s", ranks);
        enum nebula_status status;

        size += (size_t)snprintf(text + size, sizeof text - size, ",\"crc64\":\"%016" PRIx64 "\"}\n", sum_crc64(0, text, size));
        status = captured_parse(text, size, &captured, NULL);
        captured_done(&captured);
        return status;
}

static void ranks_that_do_not_add_up_are_refused(void)
{
        CHECK(parse_ranks("[[0,1],[3,0]]") == NEBULA_OK);
        CHECK(parse_ranks("[]") != NEBULA_OK);
        CHECK(parse_ranks("[[4,1]]") != NEBULA_OK);
        CHECK(parse_ranks("[[1,1],[1,1]]") != NEBULA_OK);
        CHECK(parse_ranks("[[2,1],[1,1]]") != NEBULA_OK);
        CHECK(parse_ranks("[[-1,1]]") != NEBULA_OK);
        CHECK(parse_ranks("[[1]]") != NEBULA_OK && parse_ranks("[1]") != NEBULA_OK && parse_ranks("7") != NEBULA_OK);
        CHECK(parse_ranks("[[1,-1]]") != NEBULA_OK && parse_ranks("[[1,99999999999]]") != NEBULA_OK);
}

static void a_documents_name_says_its_writing(void)
{
        char path[64];

        captured_path(4, 1, path);
        CHECK(!strcmp(path, ".nebula/captured-00004.json") && captured_is_of(path + 8, 1) && !captured_is_of(path + 8, 2));
        captured_path(4, 12, path);
        CHECK(!strcmp(path, ".nebula/captured-00004.w12.json") && captured_is_of(path + 8, 12) && !captured_is_of(path + 8, 1));
        CHECK(!captured_is_of("captured-.json", 1) && !captured_is_of("rank-00004.json", 1));
}

/* The version would get a manifest that says so, which no reader takes. */
static void a_line_that_began_after_its_version_is_refused(void)
{
        uint32_t ranks[] = { 0 };
        struct committed committed = { .of = { .tag = "global_step5", .writing = 1, .world = 1 }, .generation = 1, .sequence = 2000,
                                       .ranks = ranks, .rank_count = 1 }, read = { 0 };

        committed.line.count = 1;
        committed.line.forks[0] = (struct line_fork){ .began = 2000, .after = 4 };
        for (int i = 0; i < 2; i++) {
                char *text;
                size_t size;

                REQUIRE(!committed_format(&committed, &text, &size, NULL));
                CHECK(committed_parse(text, size, &read, NULL) == (i ? NEBULA_CORRUPT : NEBULA_OK));
                committed_done(&read);
                free(text);
                committed.sequence--;
        }
}

TAP_MAIN(TEST(a_line_that_began_after_its_version_is_refused), TEST(the_golden_captured_document_of_version_1_0_is_read_and_written_again),
         TEST(the_golden_committed_document_of_version_1_0_is_read_and_written_again),
         TEST(every_flipped_bit_is_found),
         TEST(ranks_that_do_not_add_up_are_refused),
         TEST(a_documents_name_says_its_writing))
