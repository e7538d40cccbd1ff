#include "agent/catalogue/lifecycle.h"
#include "tap.h"

static void a_version_walks_the_states_in_order(void)
{
        struct lifecycle life;

        lifecycle_init(&life, NEBULA_STATE_CAPTURING, 1);
        CHECK(lifecycle_move(&life, NEBULA_STATE_CAPTURED, 2));
        CHECK(lifecycle_move(&life, NEBULA_STATE_COMMITTED, 3));
        CHECK(lifecycle_move(&life, NEBULA_STATE_REPLICATED, 4));
        CHECK(lifecycle_move(&life, NEBULA_STATE_DURABLE, 5));
        CHECK(lifecycle_sound(&life));
        CHECK(lifecycle_at(&life, NEBULA_STATE_COMMITTED) == 3);
        CHECK(lifecycle_at(&life, NEBULA_STATE_FAILED) == 0);
}

static void no_state_is_skipped_or_entered_twice(void)
{
        static const bool allowed[6][6] = {
                [NEBULA_STATE_CAPTURING] = { [NEBULA_STATE_CAPTURED] = true, [NEBULA_STATE_FAILED] = true },
                [NEBULA_STATE_CAPTURED] = { [NEBULA_STATE_COMMITTED] = true, [NEBULA_STATE_FAILED] = true },
                [NEBULA_STATE_COMMITTED] = { [NEBULA_STATE_REPLICATED] = true, [NEBULA_STATE_DURABLE] = true, [NEBULA_STATE_FAILED] = true },
                [NEBULA_STATE_REPLICATED] = { [NEBULA_STATE_DURABLE] = true, [NEBULA_STATE_FAILED] = true },
        };

        for (int from = 0; from < 6; from++)
                for (int to = 0; to < 6; to++) {
                        struct lifecycle life;

                        CHECK(lifecycle_allowed((enum nebula_state)from, (enum nebula_state)to) == allowed[from][to]);
                        lifecycle_init(&life, (enum nebula_state)from, 1);
                        CHECK(lifecycle_move(&life, (enum nebula_state)to, 2) == allowed[from][to]);
                        CHECK((int)life.state == (allowed[from][to] ? to : from));
                }
        CHECK(!lifecycle_allowed((enum nebula_state)17, NEBULA_STATE_FAILED));
}

static void a_durable_or_failed_version_never_moves_again(void)
{
        for (int to = 0; to < 6; to++) {
                CHECK(!lifecycle_allowed(NEBULA_STATE_DURABLE, (enum nebula_state)to));
                CHECK(!lifecycle_allowed(NEBULA_STATE_FAILED, (enum nebula_state)to));
        }
}

static void a_history_that_the_table_forbids_is_unsound(void)
{
        struct lifecycle life;

        lifecycle_init(&life, NEBULA_STATE_CAPTURING, 1);
        life.moves[life.move_count++] = (struct lifecycle_move){ NEBULA_STATE_DURABLE, 2 };
        CHECK(!lifecycle_sound(&life));
        life.state = NEBULA_STATE_DURABLE;
        CHECK(!lifecycle_sound(&life));
}

static void only_promises_that_hold_are_reached(void)
{
        CHECK(lifecycle_reached(NEBULA_STATE_DURABLE, NEBULA_STATE_COMMITTED));
        CHECK(!lifecycle_reached(NEBULA_STATE_COMMITTED, NEBULA_STATE_DURABLE));
        CHECK(!lifecycle_reached(NEBULA_STATE_FAILED, NEBULA_STATE_CAPTURED));
        CHECK(!lifecycle_complete(NEBULA_STATE_CAPTURED) && lifecycle_complete(NEBULA_STATE_COMMITTED));
}

TAP_MAIN(TEST(a_version_walks_the_states_in_order), TEST(no_state_is_skipped_or_entered_twice),
         TEST(a_durable_or_failed_version_never_moves_again), TEST(a_history_that_the_table_forbids_is_unsound),
         TEST(only_promises_that_hold_are_reached))
