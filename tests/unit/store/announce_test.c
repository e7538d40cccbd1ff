#include "store/announce.h"

#include "golden.h"

static void the_golden_captured_document_of_version_2_0_is_read_and_written_again(void)
{
        struct captured captured;
        char *text, *again;
        size_t size, again_size;

        text = golden("captured-2.0.json", &size);
        REQUIRE(!captured_parse(text, size, &captured, NULL));
        CHECK(!strcmp(captured.of.tag, "global_step500") && !strcmp(captured.of.run, "r1") && captured.of.writing == 2);
        CHECK(captured.of.world == 8 && captured.sequence == 1766312345160000000 && captured.pid == 4711);
        CHECK(!strcmp(captured.host, "node-b") && captured.goes_back && captured.after == 450);
        REQUIRE(captured.rank_count == 2);
        CHECK(captured.ranks[0].rank == 4 && captured.ranks[0].files == 2 && captured.ranks[1].rank == 5 && !captured.ranks[1].files);
        REQUIRE(!captured_format(&captured, &again, &again_size, NULL));
        CHECK(again_size == size && !memcmp(text, again, size));
        captured_done(&captured);
        free(again);
        free(text);
}

static void the_golden_committed_document_of_version_2_0_is_read_and_written_again(void)
{
        struct committed committed;
        char *text, *again;
        size_t size, again_size;

        text = golden("committed-2.0.json", &size);
        REQUIRE(!committed_parse(text, size, &committed, NULL));
        CHECK(committed.persist && committed.rank_count == 3 && committed.ranks[2] == 5);
        CHECK(committed.node_count == 2 && committed.line.count == 1 && committed.line.forks[0].after == 450);
        REQUIRE(!committed_format(&committed, &again, &again_size, NULL));
        CHECK(again_size == size && !memcmp(text, again, size));
        committed_done(&committed);
        free(again);
        free(text);
}

static enum nebula_status parse_captured(const char *text, size_t size, struct nebula_error *error)
{
        struct captured captured = { 0 };
        enum nebula_status status = captured_parse(text, size, &captured, error);

        captured_done(&captured);
        return status;
}

static enum nebula_status parse_committed(const char *text, size_t size, struct nebula_error *error)
{
        struct committed committed = { 0 };
        enum nebula_status status = committed_parse(text, size, &committed, error);

        committed_done(&committed);
        return status;
}

static void every_flipped_bit_and_every_cut_is_found(void)
{
        size_t size;
        char *text = golden("captured-2.0.json", &size);

        check_damage(parse_captured, "captured-2.0.json");
        check_damage(parse_committed, "committed-2.0.json");
        CHECK(parse_committed(text, size, NULL) == NEBULA_CORRUPT); /* one is not the other */
        free(text);
}

static enum nebula_status parse_ranks(const char *ranks)
{
        char body[1024];

        snprintf(body, sizeof body,
                 "{\"nebula\":\"captured\",\"version\":\"2.0\",\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"writing\":1,\"world\":4,"
                 "\"sequence\":1,\"host\":\"\",\"pid\":1,\"ranks\":%s", ranks);
        return parse_sealed(parse_captured, body);
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

/* Parses a committed document with this member and these ranks. */
static enum nebula_status parse_with(const char *member, const char *ranks)
{
        char body[1024];

        snprintf(body, sizeof body,
                 "{\"nebula\":\"committed\",\"version\":\"2.0\",\"tag\":\"t\",\"job\":\"\",\"run\":\"\",\"writing\":1,\"world\":4,"
                 "\"sequence\":1,\"persist\":true,%s\"ranks\":%s", member, ranks);
        return parse_sealed(parse_committed, body);
}

static void a_committed_document_says_how_many_nodes_write_records(void)
{
        uint32_t ranks[] = { 0, 3 };
        struct committed written = { .of = { .tag = "t", .writing = 1, .world = 4 }, .sequence = 1, .ranks = ranks,
                                     .rank_count = 2 }, read = { 0 };

        for (size_t nodes = 0; nodes <= DOCUMENT_WORLD_MAX; nodes += DOCUMENT_WORLD_MAX / 2) {
                char *text;
                size_t size;

                written.node_count = nodes; /* 0: not known */
                REQUIRE(!committed_format(&written, &text, &size, NULL) && !committed_parse(text, size, &read, NULL));
                CHECK(read.node_count == nodes && read.rank_count == 2 && read.ranks[1] == 3);
                committed_done(&read);
                free(text);
        }
        CHECK(parse_with("\"nodes\":2,", "[0,3]") == NEBULA_OK);
        CHECK(parse_with("", "[0,3]") == NEBULA_CORRUPT && parse_with("\"nodes\":null,", "[0,3]") == NEBULA_CORRUPT);
        CHECK(parse_with("\"nodes\":-1,", "[0,3]") == NEBULA_CORRUPT && parse_with("\"nodes\":1048577,", "[0,3]") == NEBULA_CORRUPT);
        CHECK(parse_with("\"nodes\":\"2\",", "[0,3]") == NEBULA_CORRUPT && parse_with("\"nodes\":1.5,", "[0,3]") == NEBULA_CORRUPT);
}

static void ranks_of_a_committed_document_that_do_not_add_up_are_refused(void)
{
        CHECK(parse_with("\"nodes\":1,", "[]") == NEBULA_CORRUPT && parse_with("\"nodes\":1,", "[4]") == NEBULA_CORRUPT);
        CHECK(parse_with("\"nodes\":1,", "[1,1]") == NEBULA_CORRUPT && parse_with("\"nodes\":1,", "[2,1]") == NEBULA_CORRUPT);
        CHECK(parse_with("\"nodes\":1,", "[-1]") == NEBULA_CORRUPT && parse_with("\"nodes\":1,", "[[1]]") == NEBULA_CORRUPT);
}

static void a_documents_name_says_its_writing(void)
{
        struct captured captured = { .of = { .job = "j", .run = "r", .writing = 12 }, .ranks = &(struct captured_rank){ .rank = 4 }, .rank_count = 1 };
        char path[ANNOUNCE_PATH_MAX], prefix[ANNOUNCE_PATH_MAX];
        struct announce_name name;

        captured_path(&captured, "text", 4, path);
        captured_prefix(&captured.of, prefix);
        CHECK(!strncmp(path, ".nebula/captured-w", 18) && strstr(path, "-12-00004-") && !strncmp(path, prefix, strlen(prefix)));
        CHECK(announce_name_parse(path + 8, &name) && name.number == 12 && name.rank == 4 && strstr(prefix, name.writing));
        captured_path(&captured, "next", 4, prefix);
        CHECK(strcmp(path, prefix)); /* another document has another name */
        committed_path(&captured.of, path);
        committed_prefix(&captured.of, prefix);
        CHECK(announce_name_parse(path + 8, &name) && name.number == 12 && !strncmp(path, prefix, strlen(prefix)) && !strcmp(path + strlen(prefix), "12.json"));
        wanted_path(&captured.of, path);
        CHECK(announce_name_parse(path + 8, &name) && name.number == 12);
}

/* The version's manifest would hold it, and readers refuse such a manifest. */
static void a_line_that_began_after_its_version_is_refused(void)
{
        uint32_t ranks[] = { 0 };
        struct committed committed = { .of = { .tag = "global_step5", .writing = 1, .world = 1 }, .sequence = 2000,
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

TAP_MAIN(TEST(a_line_that_began_after_its_version_is_refused), TEST(the_golden_captured_document_of_version_2_0_is_read_and_written_again),
         TEST(the_golden_committed_document_of_version_2_0_is_read_and_written_again),
         TEST(every_flipped_bit_and_every_cut_is_found), TEST(a_committed_document_says_how_many_nodes_write_records),
         TEST(ranks_that_do_not_add_up_are_refused), TEST(ranks_of_a_committed_document_that_do_not_add_up_are_refused),
         TEST(a_documents_name_says_its_writing))
