#include "store/announce.h"
#include "store/line_document.h"
#include "store/manifest.h"
#include "store/scan.h"
#include "tap.h"

static struct line forked(const struct line *from, uint64_t began, int64_t after)
{
        struct line line = *from;

        line_fork(&line, began, after);
        return line;
}

static void a_line_holds_what_it_came_from_and_nothing_after_it(void)
{
        struct line first = { 0 }, second = forked(&first, 1000, 300), third = forked(&second, 2000, 320);

        CHECK(line_holds(&first, &first, 400) && line_holds(NULL, NULL, 400));
        CHECK(line_holds(&second, &first, 300) && !line_holds(&second, &first, 301) && line_holds(&second, &second, 310));
        CHECK(line_holds(&third, &first, 300) && !line_holds(&third, &first, 310) && line_holds(&third, &second, 320));
        CHECK(!line_holds(&third, &second, 330) && line_holds(&third, &third, 330));
        CHECK(line_began(&third) == 2000 && !line_began(&first) && third.count == 2);
}

static void going_back_again_to_an_earlier_step_leaves_the_line_between(void)
{
        struct line first = { 0 }, second = forked(&first, 1000, 300), third = forked(&second, 2000, 200), again = forked(&first, 3000, 400);

        CHECK(third.count == 1 && !line_holds(&third, &second, 310) && !line_holds(&third, &second, 150) && line_holds(&third, &first, 200));
        CHECK(!line_holds(&again, &second, 310) && line_holds(&again, &first, 350)); /* `second` had abandoned it */
}

static void the_oldest_forks_are_forgotten_and_count_as_the_first_line(void)
{
        struct line line = { 0 }, first = { 0 }, early = { 0 }, late = { 0 };

        for (uint64_t i = 1; i <= 10 * LINE_FORKS_MAX; i++) {
                line_fork(&line, i * 1000, (int64_t)i * 10);
                CHECK(line_is_sound(&line));
                if (i == 1)
                        early = line;
                if (i == 10 * LINE_FORKS_MAX - 2)
                        late = line;
        }
        CHECK(line.count == LINE_FORKS_MAX && line_holds(&line, &first, 10) && line_holds(&line, &early, 20));
        CHECK(line_holds(&line, &late, 3190) && !line_holds(&line, &late, 3191));
        CHECK(!line_holds(&line, &early, 3000));
}

static void a_line_comes_back_from_a_document(void)
{
        struct line first = { 0 }, second = forked(&first, 1000, 300);
        struct manifest manifest = { .tag = "global_step310", .number = 1, .writing = 1, .sequence = 1000, .step = 310, .world = 1, .line = second }, read;
        struct committed committed = { .of = { .tag = "global_step310", .writing = 1, .world = 1 }, .sequence = 1000, .line = second };
        struct captured captured = { .of = committed.of, .sequence = 7, .goes_back = true, .after = 300 };
        struct captured_rank rank = { 0, 1 };
        uint32_t ranks[1] = { 0 };
        char *text;
        size_t size;

        REQUIRE(!manifest_format(&manifest, &text, &size, NULL) && strstr(text, "\"line\":[[1000,300]]"));
        REQUIRE(!manifest_parse(text, size, &read, NULL));
        CHECK(read.line.count == 1 && read.line.forks[0].began == 1000 && read.line.forks[0].after == 300);
        manifest_done(&read);
        free(text);
        committed.ranks = ranks;
        committed.rank_count = captured.rank_count = 1;
        captured.ranks = &rank;
        REQUIRE(!committed_format(&committed, &text, &size, NULL) && !committed_parse(text, size, &committed, NULL));
        CHECK(committed.line.count == 1 && committed.line.forks[0].after == 300);
        committed_done(&committed);
        free(text);
        REQUIRE(!captured_format(&captured, &text, &size, NULL) && !captured_parse(text, size, &captured, NULL));
        CHECK(captured.goes_back && captured.after == 300);
        captured_done(&captured);
        free(text);
}

static void a_line_of_history_with_an_impossible_begin_is_refused(void)
{
        static const char *const bad[] = {
                "{\"line\":7}", "{\"line\":[[0,5]]}", "{\"line\":[[5,-3]]}", "{\"line\":[[5,1],[4,2]]}", "{\"line\":[[5,2],[6,2]]}",
                "{\"line\":[[5,1],[6,-2]]}", "{\"line\":[[5]]}", "{\"line\":[5]}", "{\"line\":[[-5,1]]}", "{\"line\":[[\"5\",1]]}",
        };
        struct line line;

        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
                struct document_reader reader = { .kind = "manifest" };
                json_t *body = json_loads(bad[i], 0, NULL);

                line_parse(&reader, body, &line);
                CHECK(reader.status == NEBULA_CORRUPT && !line.count);
                json_decref(body);
        }
}

static struct manifest listed(const char *tag, uint64_t sequence, const struct line *line)
{
        struct manifest manifest = { .sequence = sequence, .step = name_step(tag), .line = *line };

        snprintf(manifest.tag, sizeof manifest.tag, "%s", tag);
        return manifest;
}

static void a_scan_knows_the_newest_of_the_latest_line_and_what_it_abandoned(void)
{
        struct line first = { 0 }, second = forked(&first, 30, 300);
        struct manifest list[] = {
                listed("global_step300", 10, &first), listed("global_step400", 20, &first), listed("best", 25, &first),
                listed("global_step310", 30, &second), listed("global_step320", 40, &second),
        };
        struct manifest_scan scan = { .manifests = list, .count = 5 };

        manifest_scan_mark(&scan);
        CHECK(manifest_scan_newest(&scan, "") == 4);
        CHECK(list[1].is_abandoned && !list[0].is_abandoned && !list[2].is_abandoned && !list[3].is_abandoned);
        scan.count = 3; /* both versions of the second line turn out to be damaged: they stay marked */
        CHECK(manifest_scan_newest(&scan, "") == 2);
        scan.count = 2;
        CHECK(manifest_scan_newest(&scan, "") == 0);
        manifest_scan_mark(&scan); /* they were removed */
        CHECK(manifest_scan_newest(&scan, "") == 1);
}

TAP_MAIN(TEST(a_line_holds_what_it_came_from_and_nothing_after_it), TEST(going_back_again_to_an_earlier_step_leaves_the_line_between),
         TEST(the_oldest_forks_are_forgotten_and_count_as_the_first_line), TEST(a_line_comes_back_from_a_document),
         TEST(a_line_of_history_with_an_impossible_begin_is_refused), TEST(a_scan_knows_the_newest_of_the_latest_line_and_what_it_abandoned))
