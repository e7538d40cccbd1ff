#include "agent/catalogue/retention.h"
#include "tap.h"

static struct retain_entry entry(int64_t step, uint64_t sequence)
{
        return (struct retain_entry){ .step = step, .follows_step = step >= 0, .sequence = sequence, .complete = true, .durable = true };
}

static void newest_follows_steps_then_commits(void)
{
        struct retain_entry entries[] = { entry(10, 5), entry(30, 1), entry(20, 9) };

        CHECK(retain_newest(entries, 3) == 1);
        entries[1].complete = false;
        CHECK(retain_newest(entries, 3) == 2);
        CHECK(retain_newest(entries, 0) == -1);
}

static void between_steps_and_names_the_later_commit_is_newest(void)
{
        struct retain_entry entries[] = { entry(30, 4), entry(-1, 5), entry(-1, 3), entry(10, 9) };

        CHECK(retain_newest(entries, 4) == 1);
        entries[1].sequence = 2;
        CHECK(retain_newest(entries, 4) == 0);
}

static void a_number_in_another_tag_is_no_step_to_follow(void)
{
        struct retain_entry entries[] = { retain_complete("v10", 1, NULL), retain_complete("v9", 2, NULL), retain_complete("checkpoint-3", 3, NULL) };

        CHECK(retain_newest(entries, 3) == 2);
        CHECK(entries[0].step == 10); /* with keep_every = 10, it is a multiple */
        CHECK(retain_is_newer(&entries[1], &entries[0]) && !retain_is_newer(&entries[0], &entries[1]));
        entries[0] = retain_complete("global_step10", 1, NULL);
        entries[1] = retain_complete("global_step9", 2, NULL);
        CHECK(retain_is_newer(&entries[0], &entries[1]));
}

static void memory_keeps_the_latest_commits(void)
{
        struct retain_entry entries[] = { entry(1, 1), entry(2, 2), entry(3, 3) };
        bool drop[3];

        retain_memory(entries, 3, 2, drop);
        CHECK(drop[0] && !drop[1] && !drop[2]);
        retain_memory(entries, 3, 1, drop);
        CHECK(drop[0] && drop[1] && !drop[2]);
}

static void memory_never_drops_what_is_unsaved_busy_or_the_only_one(void)
{
        struct retain_entry entries[] = { entry(1, 1), entry(2, 2), entry(3, 3), entry(4, 4) };
        bool drop[4];

        entries[0].unsaved = true;
        entries[1].busy = true;
        entries[3].complete = false; /* being captured */
        retain_memory(entries, 4, 0, drop);
        CHECK(!drop[0] && !drop[1] && !drop[2] && !drop[3]);
}

static void a_rolled_back_run_keeps_its_own_versions_and_the_newest(void)
{
        struct retain_entry entries[] = { entry(200, 1), entry(110, 2), entry(120, 3) };
        bool drop[3];

        retain_memory(entries, 3, 1, drop);
        CHECK(!drop[0]); /* a restart would load this one */
        CHECK(drop[1] && !drop[2]);
}

static void the_victim_is_the_oldest_that_storage_has(void)
{
        struct retain_entry entries[] = { entry(1, 1), entry(2, 2), entry(3, 3) };

        entries[0].durable = false;
        CHECK(retain_victim(entries, 3) == 1);
        entries[1].durable = false;
        CHECK(retain_victim(entries, 3) == 2); /* even the newest, because storage has it */
        entries[2].durable = false;
        CHECK(retain_victim(entries, 3) == 0); /* superseded, and no client asked for it */
        entries[0].unsaved = entries[1].unsaved = true;
        CHECK(retain_victim(entries, 3) == -1);
}

static void storage_keeps_all_unless_told(void)
{
        struct retain_entry entries[] = { entry(1, 1), entry(2, 2), entry(3, 3) };
        bool drop[3];

        retain_storage(entries, 3, 0, 2, drop);
        CHECK(!drop[0] && !drop[1] && !drop[2]);
        retain_storage(entries, 3, 1, 0, drop);
        CHECK(drop[0] && drop[1] && !drop[2]);
}

static void storage_keeps_multiples_the_newest_the_latest_and_the_read(void)
{
        struct retain_entry entries[] = { entry(100, 1), entry(150, 2), entry(200, 3), entry(120, 4), entry(130, 5) };
        bool drop[5];

        entries[1].busy = true;
        retain_storage(entries, 5, 1, 100, drop);
        CHECK(!drop[0]); /* a multiple of 100 */
        CHECK(!drop[1]); /* being read */
        CHECK(!drop[2]); /* the newest */
        CHECK(drop[3]);
        CHECK(!drop[4]); /* the latest commit, by a run that was rolled back */
}

static void an_abandoned_version_takes_no_other_version_s_place_in_storage(void)
{
        struct line line = { .count = 1, .forks = { { 4, 300 } } };
        struct retain_entry entries[] = { entry(300, 1), entry(350, 2), entry(400, 3), entry(310, 4), entry(320, 5) };
        bool drop[5];

        entries[3].line = entries[4].line = &line;
        entries[3].line_began = entries[4].line_began = 4;
        CHECK(retain_newest(entries, 5) == 4);
        retain_mark(entries, 5);
        CHECK(!entries[0].abandoned && entries[1].abandoned && entries[2].abandoned && !entries[3].abandoned);
        retain_storage(entries, 5, 2, 100, drop);
        CHECK(!drop[0] && drop[1] && drop[2] && !drop[3] && !drop[4]);
        retain_mark(entries, 4);
        retain_storage(entries, 4, 2, 0, drop); /* only one version was saved since then, so the user may still want the abandoned ones */
        CHECK(!drop[0] && !drop[1] && !drop[2] && !drop[3]);
        retain_storage(entries, 5, 3, 0, drop);
        CHECK(!drop[0] && !drop[1] && !drop[2]);
        entries[3].complete = entries[4].complete = false;
        retain_mark(entries, 5);
        CHECK(!entries[2].abandoned && retain_newest(entries, 5) == 2);
}

static void every_version_is_persisted_in_order_without_an_interval(void)
{
        struct persist_entry entries[] = { { 3, true, false }, { 1, true, false }, { 2, true, false } };
        int64_t due;

        CHECK(persist_due(entries, 3, 0, INT64_MIN, 100, &due) == 1);
        entries[1].committed = false;
        CHECK(persist_due(entries, 3, 0, 99, 100, &due) == 2);
        CHECK(persist_due(entries, 0, 0, 99, 100, &due) == -1 && due == INT64_MAX);
}

static void with_an_interval_the_newest_goes_when_it_has_passed(void)
{
        struct persist_entry entries[] = { { 3, true, false }, { 1, true, false } };
        int64_t due;

        CHECK(persist_due(entries, 2, 50, INT64_MIN, 100, &due) == 0);
        CHECK(persist_due(entries, 2, 50, 60, 100, &due) == -1 && due == 110);
        CHECK(persist_due(entries, 2, 50, 60, 110, &due) == 0);
}

static void a_version_that_a_client_waits_for_goes_first(void)
{
        struct persist_entry entries[] = { { 3, true, true }, { 1, true, false }, { 2, true, true } };
        int64_t due;

        CHECK(persist_due(entries, 3, 1000, 99, 100, &due) == 2);
        CHECK(persist_due(entries, 3, 0, 99, 100, &due) == 2);
}

TAP_MAIN(TEST(newest_follows_steps_then_commits), TEST(between_steps_and_names_the_later_commit_is_newest),
         TEST(a_number_in_another_tag_is_no_step_to_follow),
         TEST(memory_keeps_the_latest_commits), TEST(memory_never_drops_what_is_unsaved_busy_or_the_only_one),
         TEST(a_rolled_back_run_keeps_its_own_versions_and_the_newest), TEST(the_victim_is_the_oldest_that_storage_has),
         TEST(storage_keeps_all_unless_told), TEST(storage_keeps_multiples_the_newest_the_latest_and_the_read),
         TEST(an_abandoned_version_takes_no_other_version_s_place_in_storage),
         TEST(every_version_is_persisted_in_order_without_an_interval), TEST(with_an_interval_the_newest_goes_when_it_has_passed),
         TEST(a_version_that_a_client_waits_for_goes_first))
