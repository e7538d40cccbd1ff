#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/catalogue/known.h"
#include "store/scan.h"
#include "tap.h"

static struct manifest manifest(const char *tag, const char *job, uint64_t sequence)
{
        struct manifest one = { .sequence = sequence, .writing = 1 };

        strcpy(one.tag, tag);
        strcpy(one.job, job);
        return one;
}

static void put(struct known_versions *known, const char *tag, const char *job, uint64_t sequence)
{
        struct manifest one = manifest(tag, job, sequence);

        if (!known_put(known, "a", &one))
                abort();
}

static void a_tag_is_found_whatever_was_put_and_taken(void)
{
        struct known_versions known = { 0 };

        put(&known, "b", "a", 3);
        put(&known, "a", "a", 2);
        put(&known, "c", "a", 1);
        CHECK(known.count == 3 && known.list[0]->sequence == 1 && known.list[2]->sequence == 3);
        CHECK(known_find(&known, "a")->sequence == 2 && !known_find(&known, "d") && !known_find(&known, ""));
        put(&known, "a", "a", 4); /* written again */
        CHECK(known.count == 3 && known_find(&known, "a")->sequence == 4 && known.list[2]->sequence == 4);
        known_free(known_take(&known, "a", "b"));
        CHECK(known.count == 2 && !known_find(&known, "b") && !known_take(&known, "a", "b"));
        known_done(&known);
}

static void only_the_newest_versions_of_the_job_keep_the_lists_of_their_files(void)
{
        struct known_versions known = { 0 };
        char tag[32];
        size_t whole = 0, others = 0;

        for (unsigned i = 1; i <= 40; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i);
                put(&known, tag, i % 3 ? "a" : "b", i);
                for (unsigned k = 0; k < KNOWN_SMALL + 1; k++)
                        CHECK(!manifest_reserve(known.list[i - 1], 1, 0, NULL) &&
                              !manifest_add_file(known.list[i - 1], &(struct manifest_file){ .name = "f" }, NULL));
                known_trim(&known, "a");
        }
        put(&known, "small", "a", 1);
        known_trim(&known, "a");
        for (size_t i = 0; i < known.count; i++) {
                whole += !known.list[i]->is_brief && !strcmp(known.list[i]->job, "a");
                others += !known.list[i]->is_brief && !strcmp(known.list[i]->job, "b");
        }
        CHECK(whole == KNOWN_WHOLE + 1 && others == 13 && !known.list[40]->is_brief);
        CHECK(known_find(&known, "global_step1")->is_brief && !known_find(&known, "small")->is_brief);
        known_done(&known);
}

/* As a look at the whole list says. */
static const struct manifest *newest_of(const struct known_versions *known)
{
        struct order_best best = { 0 };

        for (size_t i = 0; i < known->count; i++) {
                struct order_entry entry = order_entry(known->list[i]->tag, known->list[i]->sequence, &known->list[i]->line);

                entry.counts = !strcmp(known->list[i]->job, "a");
                order_add(&best, &entry, known->list[i]);
        }
        return order_best(&best, NULL);
}

static void the_newest_is_that_of_the_whole_list_after_each_change(void)
{
        struct known_versions known = { 0 };
        unsigned seed = 1;
        char tag[32];

        for (uint64_t i = 1; i <= 5000; i++) {
                snprintf(tag, sizeof tag, rand_r(&seed) % 3 ? "global_step%d" : "v%d", rand_r(&seed) % 20);
                if (rand_r(&seed) % 3)
                        put(&known, tag, rand_r(&seed) % 4 ? "a" : "b", rand_r(&seed) % 8 ? i : 1 + (uint64_t)rand_r(&seed) % i);
                else
                        known_free(known_take(&known, "a", tag));
                CHECK(known_newest(&known) == newest_of(&known));
                for (size_t k = 1; k < known.count; k++)
                        if (known.list[k - 1]->sequence > known.list[k]->sequence || strcmp(known.by_tag[k - 1]->tag, known.by_tag[k]->tag) >= 0)
                                abort();
        }
        known_done(&known);
        CHECK(!known_newest(&known));
}

static void a_scan_becomes_the_list(void)
{
        struct manifest_scan scan = { .manifests = calloc(2, sizeof *scan.manifests), .count = 2 };
        struct known_versions known;

        if (!scan.manifests)
                abort();
        scan.manifests[0] = manifest("global_step2", "b", 1);
        scan.manifests[1] = manifest("global_step1", "a", 2);
        REQUIRE(known_new(&scan, "a", &known) && !scan.count && known.count == 2);
        CHECK(known_newest(&known) == known.list[1] && known_find(&known, "global_step2") == known.list[0]);
        known_done(&known);
}

TAP_MAIN(TEST(only_the_newest_versions_of_the_job_keep_the_lists_of_their_files), TEST(a_tag_is_found_whatever_was_put_and_taken), TEST(the_newest_is_that_of_the_whole_list_after_each_change),
         TEST(a_scan_becomes_the_list))
