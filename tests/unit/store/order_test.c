#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/order.h"
#include "tap.h"

static struct order_entry entry(const char *tag, uint64_t sequence)
{
        return order_entry(tag, sequence, NULL);
}

static void stay_of(const struct order_entry *entries, size_t count, uint32_t last, uint64_t every, bool *stay)
{
        struct order_rule rule = { .last = last, .every = every };

        if (!order_stay(entries, count, &rule, last != 0, stay, NULL))
                abort();
}

static void newest_follows_steps_then_commits(void)
{
        struct order_entry entries[] = { entry("global_step10", 5), entry("global_step30", 1), entry("global_step20", 9) };

        CHECK(order_newest(entries, 3) == 1);
        entries[1].counts = false;
        CHECK(order_newest(entries, 3) == 2);
        CHECK(order_newest(entries, 0) == -1);
}

static void between_steps_and_names_the_later_commit_is_newest(void)
{
        struct order_entry entries[] = { entry("global_step30", 4), entry("a", 5), entry("b", 3), entry("global_step10", 9) };

        CHECK(order_newest(entries, 4) == 1);
        entries[1].sequence = 2;
        CHECK(order_newest(entries, 4) == 0);
}

static void a_number_in_another_tag_is_no_step_to_follow(void)
{
        struct order_entry entries[] = { entry("v10", 1), entry("v9", 2), entry("checkpoint-3", 3) };

        CHECK(order_newest(entries, 3) == 2);
        CHECK(entries[0].step == 10); /* with keep_every = 10, it is a multiple */
        CHECK(order_is_newest_of(&entries[1], &entries[0]) && !order_is_newest_of(&entries[0], &entries[1]));
        entries[0] = entry("global_step10", 1);
        entries[1] = entry("global_step9", 2);
        CHECK(order_is_newest_of(&entries[0], &entries[1]));
}

/* step30 is newer than step20 by its step, step20 than "a" by its commit, and "a" than step30 by its commit: no comparison of two sorts them. */
static void a_list_has_one_order_where_comparisons_would_run_in_a_circle(void)
{
        struct order_entry entries[] = { entry("a", 2), entry("global_step20", 3), entry("global_step30", 1) };
        size_t order[3], count;

        REQUIRE(order_sort(entries, 3, order, &count) && count == 3);
        CHECK(order[0] == 0 && order[1] == 2 && order[2] == 1);
        CHECK(order_newest(entries, 3) == (int64_t)order[0]);
}

static void storage_keeps_all_unless_reported(void)
{
        struct order_entry entries[] = { entry("global_step1", 1), entry("global_step2", 2), entry("global_step3", 3) };
        bool stay[3];

        stay_of(entries, 3, 0, 2, stay);
        CHECK(stay[0] && stay[1] && stay[2]);
        stay_of(entries, 3, 1, 0, stay);
        CHECK(!stay[0] && !stay[1] && stay[2]);
}

static void storage_keeps_multiples_the_newest_and_the_latest(void)
{
        struct order_entry entries[] = { entry("global_step100", 1), entry("global_step150", 2), entry("global_step200", 3),
                                         entry("global_step120", 4), entry("global_step130", 5) };
        bool stay[5];

        entries[1].counts = false;
        stay_of(entries, 5, 1, 100, stay);
        CHECK(stay[0]); /* a multiple of 100 */
        CHECK(stay[1]); /* of another job */
        CHECK(stay[2]); /* the newest */
        CHECK(!stay[3]);
        CHECK(stay[4]); /* the latest commit, by a run that was rolled back */
}

static void an_abandoned_version_takes_no_other_version_s_place_in_storage(void)
{
        struct line line = { .count = 1, .forks = { { 4, 300 } } };
        struct order_entry entries[] = { entry("global_step300", 1), entry("global_step350", 2), entry("global_step400", 3),
                                         order_entry("global_step310", 4, &line), order_entry("global_step320", 5, &line) };
        bool stay[5];

        CHECK(order_newest(entries, 5) == 4);
        REQUIRE(order_mark(entries, 5));
        CHECK(!entries[0].is_abandoned && entries[1].is_abandoned && entries[2].is_abandoned && !entries[3].is_abandoned);
        stay_of(entries, 5, 2, 100, stay);
        CHECK(stay[0] && !stay[1] && !stay[2] && stay[3] && stay[4]);
        REQUIRE(order_mark(entries, 4));
        stay_of(entries, 4, 2, 0, stay); /* only one version was saved since then, so the user may still want the abandoned ones */
        CHECK(stay[0] && stay[1] && stay[2] && stay[3]);
        stay_of(entries, 5, 3, 0, stay);
        CHECK(stay[0] && stay[1] && stay[2]);
        entries[3].counts = entries[4].counts = false;
        REQUIRE(order_mark(entries, 5));
        CHECK(!entries[2].is_abandoned && order_newest(entries, 5) == 2);
}

static void the_best_stay_and_a_metric_that_none_has_removes_nothing(void)
{
        struct order_entry entries[] = { entry("global_step1", 1), entry("global_step2", 2), entry("global_step3", 3), entry("global_step4", 4),
                                         entry("global_step5", 5) };
        double metrics[] = { 3, 1, NAN, 1, -INFINITY };
        struct order_rule rule = { .last = 1, .best = 2, .metrics = metrics };
        bool stay[5];

        REQUIRE(order_stay(entries, 5, &rule, 1, stay, NULL));
        CHECK(!stay[0] && !stay[1] && !stay[2] && stay[3] && stay[4]); /* of equal ones the newer */
        rule.best_is_largest = true;
        REQUIRE(order_stay(entries, 5, &rule, 1, stay, NULL));
        CHECK(stay[0] && !stay[1] && !stay[2] && stay[3] && stay[4]);
        for (size_t i = 0; i < 5; i++)
                metrics[i] = NAN;
        REQUIRE(order_stay(entries, 5, &rule, 1, stay, NULL));
        CHECK(stay[0] && stay[1] && stay[2] && stay[3] && stay[4]);
}

static void what_one_of_two_rules_names_stays(void)
{
        struct order_entry entries[] = { entry("global_step1", 1), entry("global_step2", 2), entry("global_step3", 3), entry("global_step4", 4) };
        double metrics[] = { 4, 1, 2, 3 };
        struct order_rule rules[] = { { .last = 2 }, { .last = 1, .best = 1, .metrics = metrics } };
        bool stay[4];

        REQUIRE(order_stay(entries, 4, rules, 2, stay, NULL));
        CHECK(!stay[0] && stay[1] && stay[2] && stay[3]);
}

#define AT(days, hours) ((uint64_t)(((days) * 24 + (hours)) * 3600) * 1000000000 + 1)

static void the_newest_of_each_hour_day_and_week_stays_and_the_reasons_are_told(void)
{
        /* Day 4 is Monday, 1970-01-05. */
        struct order_entry entries[] = { entry("global_step1", AT(3, 5)),  entry("global_step2", AT(4, 1)),  entry("global_step3", AT(4, 23)),
                                         entry("global_step4", AT(5, 10)), entry("global_step5", AT(5, 11)), entry("global_step6", AT(5, 11) + 1) };
        struct order_rule rule = { .last = 1, .daily = 2 };
        unsigned why[6];
        bool stay[6];

        REQUIRE(order_stay(entries, 6, &rule, 1, stay, why));
        CHECK(!stay[0] && !stay[1] && stay[2] && !stay[3] && !stay[4] && stay[5]);
        CHECK(why[2] == ORDER_WHY_DAILY && why[5] == (ORDER_WHY_NEWEST | ORDER_WHY_LAST | ORDER_WHY_DAILY) && !why[0]);
        rule = (struct order_rule){ .last = 1, .weekly = 9 };
        REQUIRE(order_stay(entries, 6, &rule, 1, stay, why));
        CHECK(stay[0] && !stay[1] && !stay[2] && !stay[3] && !stay[4] && stay[5] && why[0] == ORDER_WHY_WEEKLY);
        rule = (struct order_rule){ .last = 1, .hourly = 3 };
        REQUIRE(order_stay(entries, 6, &rule, 1, stay, why));
        CHECK(!stay[0] && !stay[1] && stay[2] && stay[3] && !stay[4] && stay[5] && why[3] == ORDER_WHY_HOURLY);
        rule = (struct order_rule){ .last = 1, .within_s = 3601 };
        REQUIRE(order_stay(entries, 6, &rule, 1, stay, why));
        CHECK(!stay[2] && stay[3] && stay[4] && stay[5] && why[4] == ORDER_WHY_WITHIN);
        entries[2].is_abandoned = true; /* its day has another one */
        rule = (struct order_rule){ .last = 1, .daily = 2 };
        REQUIRE(order_stay(entries, 6, &rule, 1, stay, why));
        CHECK(stay[1] && !stay[2] && why[1] == ORDER_WHY_DAILY);
}

#define MANY 40
#define ROUNDS 2000

/* The same rules as sentences over pairs, in the square and cube of the number of versions. */
static bool model_is_before(const struct order_entry *a, const struct order_entry *b)
{
        if (a->began != b->began && a->follows_step)
                return a->began > b->began;
        if (a->step != b->step && a->follows_step)
                return a->step > b->step;
        return a->sequence > b->sequence;
}

/* The newest of those that are left. */
static size_t model_next(const struct order_entry *entries, size_t count, const bool *taken, bool is_abandoned)
{
        size_t best[2] = { count, count };

        for (size_t i = 0; i < count; i++) {
                size_t *of_kind = &best[!entries[i].follows_step];

                if (entries[i].counts && !taken[i] && entries[i].is_abandoned == is_abandoned &&
                    (*of_kind == count || model_is_before(&entries[i], &entries[*of_kind])))
                        *of_kind = i;
        }
        if (best[0] == count || best[1] == count)
                return best[0] == count ? best[1] : best[0];
        return entries[best[0]].sequence >= entries[best[1]].sequence ? best[0] : best[1];
}

static size_t model_sort(const struct order_entry *entries, size_t count, size_t *ret_order)
{
        bool taken[MANY] = { false };
        size_t used = 0;

        for (int is_abandoned = 0; is_abandoned < 2; is_abandoned++)
                for (size_t next; (next = model_next(entries, count, taken, is_abandoned)) < count;) {
                        taken[next] = true;
                        ret_order[used++] = next;
                }
        return used;
}

static bool model_stays(const struct order_entry *entries, const size_t *order, size_t used, size_t place, const struct order_rule *rule)
{
        const struct order_entry *one = &entries[order[place]];
        size_t later = 0, better = 0, current = 0;
        bool is_known = false, is_latest = true;

        for (size_t i = 0; i < used; i++) {
                const struct order_entry *other = &entries[order[i]];
                double metric = rule->best ? rule->metrics[order[i]] : NAN, own = rule->best ? rule->metrics[order[place]] : NAN;

                is_latest = is_latest && other->sequence <= one->sequence;
                is_known = is_known || !isnan(metric);
                later += !other->is_abandoned && other->sequence > one->sequence;
                current += !other->is_abandoned && i < place;
                if (!isnan(metric) && !isnan(own))
                        better += (rule->best_is_largest ? metric > own : metric < own) || (metric == own && i < place); /* NOLINT */
        }
        if (!place || is_latest || (rule->best && !is_known))
                return true;
        if (rule->best && !isnan(rule->metrics[order[place]]) && better < rule->best)
                return true;
        if (one->is_abandoned)
                return later < rule->last;
        return current < rule->last || (rule->every && one->step >= 0 && (uint64_t)one->step % rule->every == 0);
}

/* fault: as test_an_event_names_the_rule_that_removed_a_version */
static void any_list_has_the_order_and_the_rules_of_the_model(void)
{
        unsigned seed = 1;

        for (int round = 0; round < ROUNDS; round++) {
                struct order_entry entries[MANY];
                struct line lines[4] = { { 0 } };
                double metrics[MANY];
                char tags[MANY][32];
                size_t count = (size_t)rand_r(&seed) % MANY, order[MANY], wanted[MANY], used, expected;
                struct order_rule rule = { .last = 1 + (uint32_t)rand_r(&seed) % 5, .every = (uint64_t)rand_r(&seed) % 4, .metrics = metrics,
                                           .best = (uint32_t)rand_r(&seed) % 4, .best_is_largest = rand_r(&seed) % 2 };
                bool stay[MANY], is_same = true;

                for (size_t i = 1; i < 4; i++) {
                        lines[i] = lines[(size_t)rand_r(&seed) % i];
                        line_fork(&lines[i], i * 100, rand_r(&seed) % 20);
                }
                for (size_t i = 0; i < count; i++) {
                        snprintf(tags[i], sizeof tags[i], rand_r(&seed) % 4 ? "global_step%d" : "v%d", rand_r(&seed) % 30);
                        entries[i] = order_entry(tags[i], (uint64_t)(i * 7919 + (size_t)round) % 997 + 1, &lines[rand_r(&seed) % 4]);
                        entries[i].counts = rand_r(&seed) % 8 != 0;
                        entries[i].job = rand_r(&seed) % 8 ? NULL : "b";
                        metrics[i] = rand_r(&seed) % 3 ? (double)(rand_r(&seed) % 5) : NAN;
                }
                REQUIRE(order_mark(entries, count) && order_sort(entries, count, order, &used) && order_stay(entries, count, &rule, 1, stay, NULL));
                expected = model_sort(entries, count, wanted);
                CHECK(used == expected && !memcmp(order, wanted, used * sizeof *order));
                CHECK(order_newest(entries, count) == (used ? (int64_t)order[0] : -1));
                for (size_t place = 0; place < used; place++)
                        is_same = is_same && stay[order[place]] == model_stays(entries, order, used, place, &rule);
                CHECK(is_same);
        }
}

TAP_MAIN(TEST(newest_follows_steps_then_commits), TEST(between_steps_and_names_the_later_commit_is_newest),
         TEST(a_number_in_another_tag_is_no_step_to_follow), TEST(a_list_has_one_order_where_comparisons_would_run_in_a_circle),
         TEST(storage_keeps_all_unless_reported), TEST(storage_keeps_multiples_the_newest_and_the_latest),
         TEST(an_abandoned_version_takes_no_other_version_s_place_in_storage),
         TEST(the_best_stay_and_a_metric_that_none_has_removes_nothing), TEST(what_one_of_two_rules_names_stays),
         TEST(the_newest_of_each_hour_day_and_week_stays_and_the_reasons_are_told),
         TEST(any_list_has_the_order_and_the_rules_of_the_model))
