#include <stdlib.h>

#include "agent/catalogue/retention.h"
#include "tap.h"

static struct retain_entry entry(const char *tag, uint64_t sequence)
{
        return (struct retain_entry){ .order = order_entry(tag, sequence, NULL), .durable = true };
}

static void memory_keeps_the_latest_commits(void)
{
        struct retain_entry entries[] = { entry("global_step1", 1), entry("global_step2", 2), entry("global_step3", 3) };
        bool drop[3];

        retain_memory(entries, 3, 2, drop);
        CHECK(drop[0] && !drop[1] && !drop[2]);
        retain_memory(entries, 3, 1, drop);
        CHECK(drop[0] && drop[1] && !drop[2]);
}

static void memory_never_drops_what_is_unsaved_busy_or_the_only_one(void)
{
        struct retain_entry entries[] = { entry("global_step1", 1), entry("global_step2", 2), entry("global_step3", 3), entry("global_step4", 4) };
        bool drop[4];

        entries[0].unsaved = true;
        entries[1].busy = true;
        entries[3].order.counts = false; /* being captured */
        retain_memory(entries, 4, 1, drop);
        CHECK(!drop[0] && !drop[1] && !drop[2] && !drop[3]);
}

/* fault: as test_a_trainer_killed_in_the_middle_of_a_save_resumes_from_the_version_before */
static void a_save_takes_the_place_of_the_newest_only_if_storage_has_it(void)
{
        struct retain_entry entries[] = { entry("global_step1", 1), entry("global_step2", 2) };
        bool drop[2];

        retain_memory(entries, 2, 0, drop);
        CHECK(drop[0] && drop[1]);
        entries[1].busy = true; /* a reader has it */
        retain_memory(entries, 2, 0, drop);
        CHECK(drop[0] && !drop[1]);
        entries[1].busy = entries[1].durable = false;
        retain_memory(entries, 2, 0, drop);
        CHECK(drop[0] && !drop[1]);
        entries[0].unsaved = true;
        retain_memory(entries, 2, 0, drop);
        CHECK(!drop[0] && !drop[1]);
}

static void a_rolled_back_run_keeps_its_own_versions_and_the_newest(void)
{
        struct retain_entry entries[] = { entry("global_step200", 1), entry("global_step110", 2), entry("global_step120", 3) };
        bool drop[3];

        retain_memory(entries, 3, 1, drop);
        CHECK(!drop[0]); /* a restart would load this one */
        CHECK(drop[1] && !drop[2]);
}

static void the_victim_is_the_oldest_that_storage_has(void)
{
        struct retain_entry entries[] = { entry("global_step1", 1), entry("global_step2", 2), entry("global_step3", 3) };

        entries[0].durable = false;
        CHECK(retain_victim(entries, 3) == 1);
        entries[1].durable = false;
        CHECK(retain_victim(entries, 3) == 2); /* even the newest, because storage has it */
        entries[2].durable = false;
        CHECK(retain_victim(entries, 3) == 0); /* superseded, and no client asked for it */
        entries[0].unsaved = entries[1].unsaved = true;
        CHECK(retain_victim(entries, 3) == -1);
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

/* With as many as this, comparing each with each takes a minute. */
static void memory_keeps_the_latest_of_many(void)
{
        enum { COUNT = 200000 };
        struct retain_entry *entries = calloc(COUNT, sizeof *entries);
        bool *drop = calloc(COUNT, sizeof *drop), is_right = true;

        for (uint64_t i = 0; i < COUNT; i++) {
                entries[i] = entry("a", i * 7919 % COUNT + 1); /* each sequence once, in no order */
                entries[i].order.counts = entries[i].order.sequence % 2;
        }
        retain_memory(entries, COUNT, 1000, drop);
        for (size_t i = 0; i < COUNT; i++)
                is_right = is_right && drop[i] == (entries[i].order.counts && entries[i].order.sequence < COUNT - 1999);
        CHECK(is_right);
        retain_memory(entries, COUNT, COUNT, drop);
        for (size_t i = 0; i < COUNT; i++)
                is_right = is_right && !drop[i];
        CHECK(is_right);
        free(entries);
        free(drop);
}

TAP_MAIN(TEST(memory_keeps_the_latest_commits), TEST(memory_keeps_the_latest_of_many), TEST(memory_never_drops_what_is_unsaved_busy_or_the_only_one),
         TEST(a_save_takes_the_place_of_the_newest_only_if_storage_has_it),
         TEST(a_rolled_back_run_keeps_its_own_versions_and_the_newest), TEST(the_victim_is_the_oldest_that_storage_has),
         TEST(every_version_is_persisted_in_order_without_an_interval), TEST(with_an_interval_the_newest_goes_when_it_has_passed),
         TEST(a_version_that_a_client_waits_for_goes_first))
