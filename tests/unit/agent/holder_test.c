/* Copies that are kept for other nodes, and their budget. */
#include "agent/agent_catalogue.h"
#include "agent/holder_private.h"
#include "tap.h"

#define COPY_BYTES (1u << 20)

/* An offer of one file by that node. */
static struct copy *offer(struct holder *holder, const char *node, const char *tag, uint64_t size, struct nebula_error *error)
{
        struct peer *peer = calloc(1, sizeof *peer);
        struct peer_copy what = { .files = calloc(1, sizeof *what.files), .file_count = 1 };
        struct copy *copy;

        if (!peer || !what.files)
                abort();
        snprintf(peer->hello.node, sizeof peer->hello.node, "%s", node);
        snprintf(what.tag, sizeof what.tag, "%s", tag);
        what.files[0] = (struct peer_file){ .name = "a", .size = size, .held = true };
        copy = holder_copy_new(holder, peer, &what, error);
        peer_copy_done(&what);
        free(peer);
        return copy;
}

/* It came whole. */
static bool keep(struct holder *holder, const char *node, const char *tag)
{
        struct copy *copy = offer(holder, node, tag, COPY_BYTES, NULL);

        if (!copy)
                return false;
        copy->age = holder->next_age++;
        copy->next = holder->copies;
        holder->copies = copy;
        return true;
}

static bool holds(const struct holder *holder, const char *tag)
{
        for (const struct copy *copy = holder->copies; copy; copy = copy->next)
                if (!strcmp(copy->what.tag, tag))
                        return true;
        return false;
}

static void a_copy_that_no_room_can_be_made_for_costs_no_other_copy(void)
{
        struct nebula_error error = { 0 };
        struct holder *holder;
        struct copy *taken;
        struct bench bench;

        bench_init(&bench, NULL, "");
        REQUIRE(!holder_new(&bench.catalogue, "here", &holder, &error));
        REQUIRE(keep(holder, "lost1", "old") && keep(holder, "lost2", "young"));
        holder->budget = holder->used;
        CHECK(!offer(holder, "third", "large", 3 * holder->used, &error) && error.status == NEBULA_NO_MEMORY);
        CHECK(holds(holder, "old") && holds(holder, "young"));
        /* One that fits takes the place of the oldest. */
        taken = offer(holder, "third", "small", COPY_BYTES, &error);
        CHECK(taken && !holds(holder, "old") && holds(holder, "young"));
        if (taken) {
                taken->next = holder->copies;
                holder->copies = taken;
        }
        holder_free(holder);
        bench_done(&bench, true);
}

TAP_MAIN(TEST(a_copy_that_no_room_can_be_made_for_costs_no_other_copy))
