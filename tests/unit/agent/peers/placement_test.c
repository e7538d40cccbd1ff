#include "agent/peers/placement.h"
#include "tap.h"

#define NODE_COUNT 256

static char names[NODE_COUNT][32];
static const char *members[NODE_COUNT];

static void make_members(void)
{
        for (size_t i = 0; i < NODE_COUNT; i++) {
                snprintf(names[i], sizeof names[i], "gpu-node-%03zu", i);
                members[i] = names[i];
        }
}

/* Returns the name of the first server. "": there is none. */
static const char *server(const char *const *list, size_t count, const char *self)
{
        static size_t order[NODE_COUNT + 1];

        return placement_order(list, count, self, order) ? list[order[0]] : "";
}

static void no_node_holds_its_own_copy_and_each_holds_exactly_one(void)
{
        int held[NODE_COUNT] = { 0 };

        make_members();
        for (size_t i = 0; i < NODE_COUNT; i++) {
                const char *name = server(members, NODE_COUNT, members[i]);

                REQUIRE(*name);
                CHECK(strcmp(name, members[i]));
                held[atoi(name + strlen("gpu-node-"))]++;
        }
        for (size_t i = 0; i < NODE_COUNT; i++)
                CHECK(held[i] == 1);
}

static void the_order_of_the_list_plays_no_part(void)
{
        const char *reversed[NODE_COUNT];

        make_members();
        for (size_t i = 0; i < NODE_COUNT; i++)
                reversed[i] = members[NODE_COUNT - 1 - i];
        for (size_t i = 0; i < NODE_COUNT; i++)
                CHECK(!strcmp(server(members, NODE_COUNT, members[i]), server(reversed, NODE_COUNT, members[i])));
}

static void a_member_that_goes_moves_only_the_copies_that_it_held(void)
{
        const char *fewer[NODE_COUNT];

        make_members();
        for (size_t gone = 0; gone < NODE_COUNT; gone += 17) {
                size_t count = 0, moved = 0;

                for (size_t i = 0; i < NODE_COUNT; i++)
                        if (i != gone)
                                fewer[count++] = members[i];
                for (size_t i = 0; i < count; i++) {
                        const char *before = server(members, NODE_COUNT, fewer[i]);
                        const char *after = server(fewer, count, fewer[i]);

                        CHECK(!strcmp(before, after) || !strcmp(before, members[gone]));
                        moved += strcmp(before, after) != 0;
                }
                CHECK(moved == 1);
        }
}

static void a_replacement_finds_every_member_and_the_lost_ones_holder_first(void)
{
        size_t order[NODE_COUNT];
        const char *others[NODE_COUNT];
        size_t count = 0;

        make_members();
        for (size_t i = 0; i < NODE_COUNT; i++)
                if (i != 40)
                        others[count++] = members[i];
        /* A node with the same name comes back. It asks the same peer first, whether or not its record still exists. */
        CHECK(placement_order(others, count, members[40], order) == count);
        CHECK(!strcmp(others[order[0]], server(members, NODE_COUNT, members[40])));
}

static void a_node_without_others_has_no_holder(void)
{
        const char *one[] = { "a", "a" };
        const char *two[] = { "b", "b", "a" };
        size_t order[3];

        CHECK(placement_order(one, 2, "a", order) == 0);
        CHECK(placement_order(NULL, 0, "a", order) == 0);
        CHECK(placement_order(two, 3, "a", order) == 1 && !strcmp(two[order[0]], "b"));
}

/* Names with consecutive numbers, as in a rack: few of them are neighbours on the ring. */
static void neighbours_by_name_are_spread(void)
{
        size_t next = 0;

        make_members();
        for (size_t i = 0; i < NODE_COUNT; i++) {
                int distance = atoi(server(members, NODE_COUNT, members[i]) + strlen("gpu-node-")) - (int)i;

                next += distance >= -2 && distance <= 2;
        }
        CHECK(next < NODE_COUNT / 10);
}

TAP_MAIN(TEST(no_node_holds_its_own_copy_and_each_holds_exactly_one), TEST(the_order_of_the_list_plays_no_part),
         TEST(a_member_that_goes_moves_only_the_copies_that_it_held),
         TEST(a_replacement_finds_every_member_and_the_lost_ones_holder_first), TEST(a_node_without_others_has_no_holder),
         TEST(neighbours_by_name_are_spread))
