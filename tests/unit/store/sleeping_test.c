/*
 * Writers, removers and sweeps of one tag. Each may sleep before any of its calls for any time, while the others go on. A version
 * that a writer has called durable stays complete and the newest, unless a removal was meant for it, or a later run has written the
 * tag again. tests/model/storage_model.py explores a model of this; this test runs the functions themselves.
 */
#include "sleepers.h"
#include "store/manifest_load.h"
#include "store/manifest_remove.h"
#include "store/sweep.h"
#include "store/verify.h"
#include "versions.h"

#define PROGRAMS_MAX 3

struct story {
        struct author writers[2];
        size_t writer_count;
        void (*others[2])(void *argument);
        size_t other_count;
        bool has_version; /* run "a" has written the tag before */
        bool is_whole;    /* explore every moment, which takes long */
        size_t schedules;
        const char *problem; /* the last one */
};

/* Versions that were called durable. */
static struct claim {
        const char *run;
        uint64_t number;
} claims[8];
static size_t claim_count;
static uint64_t meant[8]; /* the numbers of the versions that removers will remove or have removed */
static size_t meant_count;

static void run_writer(void *argument)
{
        struct author *writer = argument;

        while (author_goes_on(writer)) {
                bool was_durable = writer->is_durable;

                author_step(writer);
                if (writer->is_durable && !was_durable)
                        claims[claim_count++] = (struct claim){ writer->run, writer->real.manifest.number };
        }
}

/* As retention and `nebula prune` do: loads each version before it removes it. */
static void run_remover(void *argument)
{
        struct manifest manifest;
        uint64_t *own = &meant[meant_count++];

        (void)argument;
        *own = 0;
        if (manifest_load(store, "t", &manifest, NULL))
                return;
        *own = manifest.number;
        if (manifest_remove(store, &manifest, NULL) == NEBULA_BUSY)
                *own = 0;
        manifest_done(&manifest);
}

static bool is_meant(uint64_t number)
{
        bool result = false;

        for (size_t i = 0; i < meant_count; i++)
                result = result || meant[i] >= number;
        return result;
}

static void run_sweep(void *argument)
{
        size_t removed;

        (void)argument;
        manifest_sweep(store, ANY_AGE, &removed, NULL);
}

/* Another agent of the run finds the version in the log, and does not know whether it was called durable: a restarted agent, or one of
 * another node that made the same manifest. */
static void run_finder(void *argument)
{
        struct author finder = { .tag = "t", .run = "a" };

        (void)argument;
        author_step(&finder);
        if (finder.at == AT_CHECK)
                author_step(&finder);
        author_done(&finder);
}

static bool may_follow(const struct story *story, const char *run, const char *earlier)
{
        for (size_t i = 0; i < story->writer_count; i++)
                if (!strcmp(story->writers[i].run, run))
                        return story->writers[i].mistake == GIVES_NO_WAY ? !strcmp(run, earlier) : author_may_follow(&story->writers[i], earlier);
        return false;
}

/* The promise that is broken, or NULL. With stale lists a call may be unable to read the log, but must report that. */
static const char *broken_promise(const struct story *story)
{
        struct manifest head = { 0 };
        enum nebula_status status = manifest_load(store, "t", &head, NULL);
        const char *problem = NULL;

        if (status && status != NEBULA_NOT_FOUND)
                return features & STORE_LISTS_FRESH ? "the log cannot be read" : NULL;
        for (size_t i = 0; i < claim_count && !problem; i++) {
                const struct claim *claim = &claims[i];

                if (is_meant(claim->number))
                        continue;
                if (status)
                        problem = "a durable version is gone";
                else if (head.number < claim->number)
                        problem = "an older version has replaced a durable one";
                else if (head.number == claim->number && (strcmp(head.run, claim->run) || manifest_verify(store, &head, NULL, NULL, NULL, NULL)))
                        problem = "a durable version is not whole";
                else if (!may_follow(story, head.run, claim->run))
                        problem = "a durable version was replaced by a run that did not come after its own";
        }
        manifest_done(&head);
        return problem;
}

/* The conditions when all programs have ended. A file in place that lost its record belongs to no version, and stays. */
static const char *broken_end(const struct story *story)
{
        struct manifest head;
        const char *problem = broken_promise(story);
        size_t removed;

        if (!problem && !manifest_load(store, "t", &head, NULL)) {
                if (manifest_verify(store, &head, NULL, NULL, NULL, NULL))
                        problem = "the newest version is not whole";
                for (size_t i = 0; i < head.file_count && !problem && (features & STORE_LISTS_FRESH); i++)
                        if (!shows("t", head.files[i].name, head.run))
                                problem = "a view is older than the newest version";
                if (!problem && manifest_remove(store, &head, NULL))
                        problem = "the newest version cannot be removed";
                manifest_done(&head);
        }
        if (!problem && manifest_sweep(store, ANY_AGE, &removed, NULL))
                problem = "the debris cannot be swept";
        if (!problem && count_objects("t/.nebula/"))
                problem = "something of Nebula's is left behind the last removal";
        return problem;
}

static size_t begin_programs(const struct story *story, struct author writers[2], struct sleeper programs[PROGRAMS_MAX])
{
        size_t count = 0;

        claim_count = 0;
        meant_count = 0;
        begin_anew();
        if (story->has_version) {
                write_version((struct author){ .tag = "t", .run = "a", .sequence = 1, .names = { "x" } });
                claims[claim_count++] = (struct claim){ "a", 1 };
        }
        memcpy(writers, story->writers, 2 * sizeof *writers);
        for (size_t i = 0; i < story->writer_count; i++)
                programs[count++] = (struct sleeper){ .run = run_writer, .argument = &writers[i] };
        for (size_t i = 0; i < story->other_count; i++)
                programs[count++] = (struct sleeper){ .run = story->others[i] };
        sleepers_begin(store, programs, count);
        return count;
}

/* The first in `order` sleeps after `one` calls, the second after `two`. Then the third runs to its end, then the first, then the
 * second. False: one of them made fewer calls. */
static bool run_schedule(struct story *story, const size_t order[PROGRAMS_MAX], uint64_t one, uint64_t two)
{
        struct sleeper programs[PROGRAMS_MAX];
        struct author writers[2];
        size_t count = begin_programs(story, writers, programs);
        bool slept = !sleeper_let(&programs[order[0]], one);
        const char *problem = NULL;

        slept = !sleeper_let(&programs[order[1]], two) && slept;
        if (count > 2)
                sleeper_let(&programs[order[2]], WITHOUT_END);
        for (size_t i = 0; i < 2 && !problem; i++) {
                problem = broken_promise(story);
                sleeper_let(&programs[order[i]], WITHOUT_END);
        }
        sleepers_end(store, programs, count);
        if (store->ops == &store_mem) /* lists become fresh in the end */
                store_mem_faults(store, NULL);
        if (!problem)
                problem = broken_end(story);
        if (problem) {
                snprintf(error.message, sizeof error.message, "program %zu sleeps after %u calls, and %zu after %u: %s", order[0], (unsigned)one,
                         order[1], (unsigned)two, problem);
                story->problem = problem;
        }
        for (size_t i = 0; i < story->writer_count; i++)
                author_done(&writers[i]);
        story->schedules++;
        return slept && !problem;
}

/* Tests all moments, or a random part of them. */
static void run_order(struct story *story, const size_t order[PROGRAMS_MAX], uint64_t step)
{
        bool slept = true;

        for (uint64_t one = 0; slept && !story->problem; one += step > 1 ? 1 + one % 2 : 1) {
                slept = run_schedule(story, order, one, 0);
                for (uint64_t two = 1 + one % step; slept && run_schedule(story, order, one, two); two += step)
                        continue;
        }
}

static void explore(struct story *story)
{
        static const size_t orders[][PROGRAMS_MAX] = { { 0, 1, 2 }, { 1, 0, 2 }, { 0, 2, 1 }, { 2, 0, 1 }, { 1, 2, 0 }, { 2, 1, 0 } };
        bool is_large = story->writer_count + story->other_count > 2;

        for (size_t i = 0; i < (is_large ? 6 : 2); i++)
                run_order(story, orders[i], story->is_whole || getenv("NEBULA_TEST_NIGHTLY") ? 1 : is_large ? 37 : 4);
}

/* With pages of one entry there are more calls, so more moments at which a program may sleep. */
static void hold(struct story story)
{
        if (!strcmp(kind->name, "mem") || !strcmp(kind->name, "slow mem"))
                return;
        explore(&story);
        CHECK(!story.problem && story.schedules > 30);
        if (story.problem)
                printf("# %s\n", error.message);
}

#define ONE_FILE .names = { "x" }
#define A_THEN_B .writers = { { .tag = "t", .run = "a", ONE_FILE }, { .tag = "t", .run = "b", .after = "a", ONE_FILE } }, .writer_count = 2
#define A_AND_B .writers = { { .tag = "t", .run = "a", ONE_FILE }, { .tag = "t", .run = "b", ONE_FILE } }, .writer_count = 2
#define ONE_WRITER .writers = { { .tag = "t", .run = "a", ONE_FILE } }, .writer_count = 1

ON_ALL_STORES(a_run_that_came_after_another_replaces_its_version_and_is_never_replaced_by_it)
{
        hold((struct story){ A_THEN_B });
        hold((struct story){ A_THEN_B, .has_version = true });
}

ON_ALL_STORES(of_two_runs_by_mistake_one_gives_way)
{
        hold((struct story){ A_AND_B });
}

/*
 * fault (Storage): `nebula prune`, or another job's retention, removes a tag while a job writes it again.
 * result: The writer learns of the removal from the log of the tag. If all of the version is there once its manifest
 * is, the version is durable. Otherwise it is written again, also by several nodes.
 */
ON_ALL_STORES(a_removal_takes_nothing_of_a_version_that_was_committed_behind_it)
{
        hold((struct story){ ONE_WRITER, .others = { run_remover }, .other_count = 1 });
        hold((struct story){ ONE_WRITER, .others = { run_remover }, .other_count = 1, .has_version = true });
}

ON_ALL_STORES(a_sweep_takes_nothing_of_a_version_whose_writer_slept)
{
        hold((struct story){ ONE_WRITER, .others = { run_sweep }, .other_count = 1 });
        hold((struct story){ ONE_WRITER, .others = { run_sweep }, .other_count = 1, .has_version = true });
        hold((struct story){ ONE_WRITER, .others = { run_sweep, run_sweep }, .other_count = 2, .has_version = true });
}

/* fault: as a_removal_takes_nothing_of_a_version_that_was_committed_behind_it */
ON_ALL_STORES(two_writers_and_a_removal)
{
        hold((struct story){ A_THEN_B, .others = { run_remover }, .other_count = 1, .has_version = true });
}

ON_ALL_STORES(two_writers_and_a_sweep)
{
        hold((struct story){ A_THEN_B, .others = { run_sweep }, .other_count = 1, .has_version = true });
}

ON_ALL_STORES(a_writer_and_two_removals)
{
        hold((struct story){ ONE_WRITER, .others = { run_remover, run_remover }, .other_count = 2, .has_version = true });
}

ON_ALL_STORES(a_writer_a_removal_and_a_sweep)
{
        hold((struct story){ ONE_WRITER, .others = { run_remover, run_sweep }, .other_count = 2, .has_version = true });
}

ON_ALL_STORES(a_version_that_another_agent_finds_stays)
{
        hold((struct story){ ONE_WRITER, .others = { run_finder, run_sweep }, .other_count = 2, .has_version = true });
        hold((struct story){ ONE_WRITER, .others = { run_finder, run_remover }, .other_count = 2, .has_version = true });
}

#define BLIND_ONE .tag = "t", .run = "a", .is_blind = true, ONE_FILE
#define BLIND .writers = { { BLIND_ONE } }, .writer_count = 1
#define BLIND_TWO .writers = { { BLIND_ONE }, { .tag = "t", .run = "b", .after = "a", .is_blind = true, ONE_FILE } }, .writer_count = 2

/* As of an agent that has listed the path before others wrote the tag or removed it. */
ON_ALL_STORES(a_writer_that_knows_of_no_version_of_the_tag_harms_none)
{
        if (!(features & STORE_LISTS_FRESH))
                return;
        hold((struct story){ BLIND_TWO });
        hold((struct story){ BLIND_TWO, .has_version = true });
        hold((struct story){ BLIND, .others = { run_remover }, .other_count = 1, .has_version = true });
        hold((struct story){ BLIND, .others = { run_sweep }, .other_count = 1 });
        hold((struct story){ BLIND, .others = { run_remover, run_remover }, .other_count = 2, .has_version = true });
        hold((struct story){ BLIND, .others = { run_finder, run_sweep }, .other_count = 2, .has_version = true });
}

/* Makes a mistake on purpose, to show that the other tests can fail. */
static void find_mistake(enum author_mistake mistake, struct story story, const char *problem)
{
        story.writers[0].mistake = story.writers[1].mistake = mistake;
        story.is_whole = true; /* until it is found */
        explore(&story);
        CHECK(story.problem && !strcmp(story.problem, problem));
        if (story.problem && strcmp(story.problem, problem))
                printf("# %s\n", error.message);
}

ON_ALL_STORES(a_writer_that_forgets_a_rule_is_found)
{
        if (strcmp(kind->name, "mem with pages of one entry"))
                return;
        find_mistake(WRITES_IN_PLACE, (struct story){ A_THEN_B, .others = { run_remover }, .other_count = 1, .has_version = true },
                     "a durable version is not whole");
        find_mistake(TRUSTS_ITS_FILES, (struct story){ ONE_WRITER, .others = { run_sweep }, .other_count = 1 }, "a durable version is not whole");
        find_mistake(GIVES_NO_WAY, (struct story){ A_AND_B }, "a durable version was replaced by a run that did not come after its own");
}

TAP_MAIN(TEST(a_run_that_came_after_another_replaces_its_version_and_is_never_replaced_by_it), TEST(of_two_runs_by_mistake_one_gives_way),
         TEST(a_removal_takes_nothing_of_a_version_that_was_committed_behind_it), TEST(a_sweep_takes_nothing_of_a_version_whose_writer_slept),
         TEST(two_writers_and_a_removal), TEST(two_writers_and_a_sweep), TEST(a_writer_and_two_removals), TEST(a_writer_a_removal_and_a_sweep),
         TEST(a_version_that_another_agent_finds_stays), TEST(a_writer_that_knows_of_no_version_of_the_tag_harms_none),
         TEST(a_writer_that_forgets_a_rule_is_found))
