/* Deltas between two states of the same tensors. */
#include <stdlib.h>
#include <string.h>

#include "delta/delta.h"
#include "delta/delta_block.h"
#include "delta/delta_lanes.h"
#include "sum/sum.h"
#include "tap.h"

#define STATE (400 * 1000)

static uint32_t random_state = 1;

static uint32_t draw(void)
{
        random_state = random_state * 1664525 + 1013904223;
        return random_state >> 8;
}

/* Two states; `percent` of the elements differ. Small: only in their low byte. */
struct pair {
        uint8_t *base, *next;
        struct delta_part parts[4];
        size_t count;
};

static struct pair make_pair(uint32_t width, double percent, bool is_small)
{
        struct pair pair = { .base = malloc(STATE), .next = malloc(STATE), .count = 4 };
        uint64_t at = 64;

        for (size_t i = 0; i < STATE; i++)
                pair.base[i] = (uint8_t)draw();
        memcpy(pair.next, pair.base, STATE);
        for (size_t i = 0; i < pair.count; i++) { /* an empty part, a short one, one block, several with a rest */
                uint64_t elements = (uint64_t[]){ 0, 37, DELTA_BLOCK, 3 * DELTA_BLOCK + 1001 }[i];

                pair.parts[i] = (struct delta_part){ .offset = at, .from = at, .size = elements * width, .width = width };
                at += elements * width + 3; /* at an odd address */
                for (uint64_t e = 0; e < elements; e++) {
                        uint8_t *element = pair.next + pair.parts[i].offset + e * width;

                        if (draw() % 100000 < percent * 1000)
                                for (uint32_t byte = 0; byte < (is_small ? 1 : width); byte++)
                                        element[byte] ^= (uint8_t)draw();
                }
        }
        return pair;
}

static enum nebula_status apply(uint8_t *state, uint64_t *sum, const void *delta, size_t size, struct nebula_error *error)
{
        return delta_apply(state, STATE, sum, &(struct delta_bytes){ delta, size }, 1, error);
}

static void pair_done(struct pair *pair)
{
        free(pair->base);
        free(pair->next);
}

static void a_delta_gives_the_exact_state_for_each_width_and_density(void)
{
        static const double percents[] = { 0, 0.01, 0.3, 1, 3, 12, 30, 70, 100 };

        for (size_t i = 0; i < sizeof percents / sizeof *percents; i++)
                for (uint32_t width = 1; width <= 4; width *= 2)
                        for (int small = 0; small < 2; small++) {
                                struct pair pair = make_pair(width, percents[i], small);
                                uint64_t sum;
                                void *delta;
                                size_t size;

                                delta_sums(pair.base, pair.parts, pair.count);
                                sum = delta_state_sum(pair.parts, pair.count);
                                REQUIRE(!delta_make(pair.base, pair.next, STATE, pair.parts, pair.count, UINT64_MAX, &delta, &size, NULL));
                                CHECK(!apply(pair.base, &sum, delta, size, NULL));
                                CHECK(!memcmp(pair.base, pair.next, STATE) && sum == delta_state_sum(pair.parts, pair.count));
                                free(delta);
                                pair_done(&pair);
                        }
}

/* Blocks of all lengths around those of the loops: the encoding is the same on all processors, and either applies it. */
static void both_kinds_of_loops_encode_a_block_the_same_and_apply_it_exactly(void)
{
        static const double percents[] = { 0, 0.1, 1, 10, 14, 50, 100 };
        const struct delta_lanes *fast = delta_avx512() ? delta_avx512() : &delta_portable;

        for (size_t i = 0; i < sizeof percents / sizeof *percents; i++)
                for (uint32_t width = 1; width <= 4; width *= 2)
                        for (size_t round = 0; round < 16; round++) {
                                struct pair pair = make_pair(width, percents[i], round % 2);
                                size_t count = round < 10 ? 1 + draw() % 200 : DELTA_BLOCK - draw() % 3 * 31, at = pair.parts[3].from;
                                uint8_t one[DELTA_BLOCK_MOST], other[DELTA_BLOCK_MOST];
                                size_t size = delta_block_make_with(&delta_portable, pair.base + at, pair.next + at, count, width, one);

                                REQUIRE(delta_block_make_with(fast, pair.base + at, pair.next + at, count, width, other) == size);
                                REQUIRE(!memcmp(one, other, size));
                                for (int k = 0; k < 2; k++) {
                                        uint8_t *state = malloc(count * width);
                                        const uint8_t *in = one;

                                        memcpy(state, pair.base + at, count * width);
                                        CHECK(delta_block_apply_with(k ? fast : &delta_portable, state, count, width, &in, one + size));
                                        CHECK(in == one + size && !memcmp(state, pair.next + at, count * width));
                                        free(state);
                                }
                                pair_done(&pair);
                        }
}

static size_t size_of_delta(uint32_t width, double percent, bool is_small)
{
        struct pair pair = make_pair(width, percent, is_small);
        void *delta;
        size_t size;

        if (delta_make(pair.base, pair.next, STATE, pair.parts, pair.count, UINT64_MAX, &delta, &size, NULL))
                return SIZE_MAX;
        free(delta);
        pair_done(&pair);
        return size;
}

static void a_delta_of_few_changes_is_small(void)
{
        size_t whole = 2 * (37 + DELTA_BLOCK + 3 * DELTA_BLOCK + 1001);

        CHECK(size_of_delta(2, 0, false) < whole / 100);
        CHECK(size_of_delta(2, 1, false) * 100 < 3 * whole); /* for 1 % changed at most 3 % of the bytes */
        CHECK(size_of_delta(2, 30, true) * 100 < 30 * whole); /* the upper bytes cost nothing */
        CHECK(size_of_delta(2, 100, false) < whole + 1000);
}

static void a_delta_beyond_its_limit_is_not_made_and_the_sums_are_right(void)
{
        struct pair pair = make_pair(2, 50, false);
        struct delta_part again[4];
        void *delta = &pair;
        size_t size = 1;

        REQUIRE(!delta_make(pair.base, pair.next, STATE, pair.parts, pair.count, 1000, &delta, &size, NULL));
        CHECK(!delta && !size);
        memcpy(again, pair.parts, sizeof again);
        delta_sums(pair.next, again, pair.count);
        CHECK(delta_state_sum(again, pair.count) == delta_state_sum(pair.parts, pair.count));
        pair_done(&pair);
}

static void a_delta_is_refused_by_another_state_and_changes_nothing(void)
{
        struct pair pair = make_pair(2, 1, false);
        uint8_t *before = malloc(STATE);
        uint64_t sum = 12345;
        struct nebula_error error;
        void *delta;
        size_t size;

        delta_sums(pair.base, pair.parts, pair.count);
        REQUIRE(!delta_make(pair.base, pair.next, STATE, pair.parts, pair.count, UINT64_MAX, &delta, &size, NULL));
        memcpy(before, pair.base, STATE);
        CHECK(apply(pair.base, &sum, delta, size, &error) == NEBULA_INVALID && sum == 12345);
        CHECK(!memcmp(before, pair.base, STATE));
        free(before);
        free(delta);
        pair_done(&pair);
}

/* A changed state has the sum of the base in this test, as after a fault of its memory. */
static void a_state_that_was_damaged_is_found_also_where_the_delta_changes_nothing(void)
{
        struct pair pair = make_pair(2, 1, false);
        uint64_t sum;
        void *delta;
        size_t size;

        delta_sums(pair.base, pair.parts, pair.count);
        sum = delta_state_sum(pair.parts, pair.count);
        REQUIRE(!delta_make(pair.base, pair.next, STATE, pair.parts, pair.count, UINT64_MAX, &delta, &size, NULL));
        pair.base[pair.parts[3].offset + 5] ^= 1;
        CHECK(apply(pair.base, &sum, delta, size, NULL) == NEBULA_CORRUPT);
        free(delta);
        pair_done(&pair);
}

static void each_changed_byte_of_a_delta_and_each_cut_is_found(void)
{
        struct pair pair = make_pair(2, 0.5, true);
        uint8_t *state = malloc(STATE), *delta;
        uint64_t first;
        size_t size;
        void *made;

        delta_sums(pair.base, pair.parts, pair.count);
        first = delta_state_sum(pair.parts, pair.count);
        REQUIRE(!delta_make(pair.base, pair.next, STATE, pair.parts, pair.count, UINT64_MAX, &made, &size, NULL));
        delta = made;
        for (size_t i = 0; i < size; i++) {
                uint64_t sum = first;
                bool is_cut = i % 2;
                enum nebula_status status;

                memcpy(state, pair.base, STATE);
                delta[i] ^= is_cut ? 0 : (uint8_t)(1 << i % 8);
                status = apply(state, &sum, delta, is_cut ? i : size, NULL);
                CHECK(status == NEBULA_CORRUPT || status == NEBULA_INVALID);
                delta[i] ^= is_cut ? 0 : (uint8_t)(1 << i % 8);
        }
        free(state);
        free(delta);
        pair_done(&pair);
}

#define CHAIN 35 /* more than one pass applies */

struct chain {
        struct pair pair;
        uint8_t *first;
        uint64_t sum; /* of `first` */
        struct delta_bytes deltas[CHAIN];
};

/* Deltas from `first` to pair.next. */
static struct chain make_chain(void)
{
        struct chain chain = { .pair = make_pair(2, 1, false), .first = malloc(STATE) };
        struct pair *pair = &chain.pair;

        memcpy(chain.first, pair->base, STATE);
        delta_sums(pair->base, pair->parts, pair->count);
        chain.sum = delta_state_sum(pair->parts, pair->count);
        for (size_t i = 0; i < CHAIN; i++) {
                void *delta;
                size_t size;

                for (size_t n = 0; n < 40 && i; n++)
                        pair->next[pair->parts[3].offset + draw() % pair->parts[3].size] ^= (uint8_t)draw();
                CHECK(!delta_make(pair->base, pair->next, STATE, pair->parts, pair->count, UINT64_MAX, &delta, &size, NULL));
                chain.deltas[i] = (struct delta_bytes){ delta, size };
                memcpy(pair->base, pair->next, STATE);
        }
        return chain;
}

static void chain_done(struct chain *chain)
{
        for (size_t i = 0; i < CHAIN; i++)
                free((void *)chain->deltas[i].data);
        free(chain->first);
        pair_done(&chain->pair);
}

static void one_call_applies_many_deltas(void)
{
        struct chain chain = make_chain();

        CHECK(!delta_apply(chain.first, STATE, &chain.sum, chain.deltas, CHAIN, NULL));
        CHECK(!memcmp(chain.first, chain.pair.next, STATE) && chain.sum == delta_state_sum(chain.pair.parts, chain.pair.count));
        chain_done(&chain);
}

/* A rank that has some of the tensors keeps them close together. */
static void ranks_with_parts_of_a_state_make_deltas_of_their_own(void)
{
        struct pair pair = make_pair(2, 3, false);

        for (size_t rank = 0; rank < 2; rank++) {
                struct delta_part parts[2] = { pair.parts[rank ? 1 : 2], pair.parts[3] };
                uint64_t half = parts[1].size / 4 * 2, sum;
                uint8_t *base = malloc(STATE), *next = malloc(STATE);
                void *delta;
                size_t size;

                parts[1].offset += rank ? half : 0; /* each rank has one half of the last tensor */
                parts[1].size = rank ? parts[1].size - half : half;
                parts[0].from = 0;
                parts[1].from = parts[0].size;
                for (size_t i = 0; i < 2; i++) {
                        memcpy(base + parts[i].from, pair.base + parts[i].offset, parts[i].size);
                        memcpy(next + parts[i].from, pair.next + parts[i].offset, parts[i].size);
                }
                delta_sums(base, parts, 2);
                sum = delta_state_sum(parts, 2);
                REQUIRE(!delta_make(base, next, STATE, parts, 2, UINT64_MAX, &delta, &size, NULL));
                CHECK(!apply(pair.base, &sum, delta, size, NULL) && sum == delta_state_sum(parts, 2));
                free(delta);
                free(base);
                free(next);
        }
        CHECK(!memcmp(pair.base, pair.next, STATE));
        pair_done(&pair);
}

static void a_chain_without_one_of_its_deltas_is_refused(void)
{
        struct chain chain = make_chain();
        uint8_t *before = malloc(STATE);
        struct delta_bytes gap[CHAIN - 1];
        uint64_t sum = chain.sum;

        memcpy(before, chain.first, STATE);
        for (size_t missing = 0; missing < CHAIN - 1; missing++) {
                enum nebula_status status;

                memcpy(chain.first, before, STATE);
                memcpy(gap, chain.deltas, missing * sizeof *gap);
                memcpy(gap + missing, chain.deltas + missing + 1, (CHAIN - 1 - missing) * sizeof *gap);
                sum = chain.sum;
                status = delta_apply(chain.first, STATE, &sum, gap, CHAIN - 1, NULL);
                CHECK(status == NEBULA_CORRUPT || status == NEBULA_INVALID);
                if (status == NEBULA_INVALID)
                        CHECK(!memcmp(before, chain.first, STATE) && sum == chain.sum);
        }
        free(before);
        chain_done(&chain);
}

static void a_state_that_was_damaged_is_found_also_by_a_chain(void)
{
        struct chain chain = make_chain();

        chain.first[chain.pair.parts[1].offset] ^= 1;
        CHECK(delta_apply(chain.first, STATE, &chain.sum, chain.deltas, 2, NULL) == NEBULA_CORRUPT);
        chain_done(&chain);
}

/* Gives the delta the sum of its bytes, as a hostile writer would. */
static void sum_again(uint8_t *delta, size_t size)
{
        uint64_t sum = sum_crc64(0, delta + 16, size - 16);

        memcpy(delta + 8, &sum, 8);
}

static void parts_that_overlap_or_differ_within_a_chain_are_refused(void)
{
        struct chain chain = make_chain();
        uint8_t *second = (uint8_t *)chain.deltas[1].data;
        uint64_t sum = chain.sum, offset;

        memcpy(&offset, second + 48 + 40, 8); /* of part 1 */
        offset--;
        memcpy(second + 48 + 40, &offset, 8);
        sum_again(second, chain.deltas[1].size);
        CHECK(delta_apply(chain.first, STATE, &sum, chain.deltas, 2, NULL) == NEBULA_CORRUPT && sum == chain.sum);
        offset = chain.pair.parts[3].offset - 1; /* the last byte of the part before */
        while (offset >= chain.pair.parts[2].offset + chain.pair.parts[2].size)
                offset--;
        memcpy((uint8_t *)chain.deltas[0].data + 48 + 3 * 40, &offset, 8);
        sum_again((uint8_t *)chain.deltas[0].data, chain.deltas[0].size);
        CHECK(apply(chain.first, &sum, chain.deltas[0].data, chain.deltas[0].size, NULL) == NEBULA_CORRUPT && sum == chain.sum);
        chain_done(&chain);
}

TAP_MAIN(TEST(a_delta_gives_the_exact_state_for_each_width_and_density),
                TEST(both_kinds_of_loops_encode_a_block_the_same_and_apply_it_exactly), TEST(a_delta_of_few_changes_is_small),
         TEST(a_delta_beyond_its_limit_is_not_made_and_the_sums_are_right), TEST(a_delta_is_refused_by_another_state_and_changes_nothing),
         TEST(a_state_that_was_damaged_is_found_also_where_the_delta_changes_nothing),
         TEST(each_changed_byte_of_a_delta_and_each_cut_is_found), TEST(one_call_applies_many_deltas),
         TEST(ranks_with_parts_of_a_state_make_deltas_of_their_own),
         TEST(a_chain_without_one_of_its_deltas_is_refused), TEST(a_state_that_was_damaged_is_found_also_by_a_chain),
         TEST(parts_that_overlap_or_differ_within_a_chain_are_refused))
