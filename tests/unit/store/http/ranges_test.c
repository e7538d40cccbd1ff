/* The parts of an object with a source. */
#include <string.h>

#include "store/object/object.h"
#include "tap.h"

#define CHUNK (4u << 20)
#define CHUNKS_MAX 64u

static struct bulk_feed feed = { .chunk_bytes = CHUNK };
static uint8_t fates[CHUNKS_MAX];

static struct object_upload make(uint64_t size, uint64_t part_min, uint64_t part_bytes)
{
        static struct store_source source;

        return (struct object_upload){ .size = size, .feed = &feed, .source = &source, .fates = fates, .part_min = part_min, .part_bytes = part_bytes };
}

/* Chunks become final in this order; the parts must be the same as if all had been final at first. */
static void check_parts(const char *text, uint64_t rest, uint64_t part_min, uint64_t part_bytes, uint64_t *ret_sent)
{
        size_t count = strlen(text);
        uint64_t size = (count - 1) * CHUNK + rest, at = 0;
        struct object_upload object = make(size, part_min, part_bytes);
        struct object_range range;

        *ret_sent = 0;
        memset(fates, OBJECT_NOT_FINAL, sizeof fates);
        for (size_t i = 0; i <= count && at < size; i++) {
                while (at < size && object_next_range(&object, &range)) {
                        CHECK(range.offset == at && range.size && range.index == object.taken - 1);
                        at += range.size;
                        CHECK(at <= size && (at == size || range.size >= part_min));
                        CHECK(range.size <= (range.refers ? 64u << 20 : part_bytes) + part_min);
                        for (uint64_t chunk = range.offset / CHUNK; chunk <= (at - 1) / CHUNK; chunk++)
                                CHECK(fates[chunk] != OBJECT_NOT_FINAL && (!range.refers || text[chunk] == '='));
                        *ret_sent += range.refers ? 0 : range.size;
                }
                if (i < count)
                        fates[i] = text[i] == '=' ? OBJECT_SAME : OBJECT_DIFFERS;
        }
        CHECK(at == size && object.taken <= size / part_min + 1);
}

static void only_what_differs_is_sent_and_what_a_part_needs(void)
{
        static const struct {
                const char *chunks; /* '=': the same */
                uint64_t part_min, sent; /* MiB */
        } cases[] = {
                { "==========", 4, 0 }, { "xxxxxxxxxx", 4, 37 }, { "====x=====", 4, 4 }, { "x====x===x", 4, 9 }, { "=x=x=x=x=x", 4, 17 },
                { "==========", 5, 0 }, { "====x=====", 5, 5 }, { "====xxx===", 5, 12 }, { "x====x====", 5, 10 },
                { "=x========", 5, 8 },  /* 4 MiB are no part */
                { "==x=x=====", 5, 12 }, /* nor are the 3 MiB that stay between */
                { "=========x", 5, 1 },
        };
        uint64_t sent;

        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
                check_parts(cases[i].chunks, 1u << 20, cases[i].part_min << 20, 8u << 20, &sent);
                CHECK(sent == cases[i].sent << 20);
                if (sent != cases[i].sent << 20)
                        printf("# %s: %llu MiB\n", cases[i].chunks, (unsigned long long)sent >> 20);
        }
}

static void any_pattern_becomes_parts_that_a_service_takes(void)
{
        static const uint64_t minima[] = { 4u << 20, 5u << 20, 9u << 20 };
        unsigned random = 1;
        char text[CHUNKS_MAX + 1];
        uint64_t sent;

        for (unsigned round = 0; round < 3000; round++) {
                unsigned count = 1 + round % CHUNKS_MAX, share = round / 7 % 8;

                for (unsigned i = 0; i < count; i++) {
                        random = random * 1103515245 + 12345;
                        text[i] = (random >> 16) % 8 < share ? 'x' : '=';
                }
                text[count] = 0;
                check_parts(text, 1 + random % CHUNK, minima[round % 3], 16u << 20, &sent);
        }
}

/* 1 GiB, and a tensor of 10 MiB that begins anywhere. */
static void one_part_in_a_hundred_costs_less_than_two(void)
{
        char text[CHUNKS_MAX + 1];
        uint64_t sent;

        for (uint64_t begin = CHUNK; begin + (10u << 20) < 60ull * CHUNK; begin += 777777) {
                for (unsigned i = 0; i < CHUNKS_MAX; i++)
                        text[i] = (i + 1ull) * CHUNK > begin && i * (uint64_t)CHUNK < begin + (10u << 20) ? 'x' : '=';
                text[CHUNKS_MAX] = 0;
                check_parts(text, CHUNK, 5u << 20, 8u << 20, &sent);
                CHECK(sent <= 20u << 20); /* of 1 GiB less than 2 %; this object has 256 MiB, which are the same after it */
        }
}

TAP_MAIN(TEST(only_what_differs_is_sent_and_what_a_part_needs), TEST(any_pattern_becomes_parts_that_a_service_takes),
         TEST(one_part_in_a_hundred_costs_less_than_two))
