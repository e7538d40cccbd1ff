/* Series of step times as real jobs have them. No healthy one counts as hung, and each that stops does, soon after its limit. */
#include <math.h>

#include "agent/pulse/pace.h"
#include "tap.h"

#define SECOND ((int64_t)1000000000)
#define LEAST (60 * SECOND)

/* A job and its clock. The agent looks every second. */
struct job {
        struct pace pace;
        int64_t now, work_ns; /* work_ns: since the last beat */
        uint64_t beats, random;
        const char *phase;
        bool has_hung;
};

static void begin(struct job *job)
{
        *job = (struct job){ .now = 1000 * SECOND, .phase = "", .random = 88172645463325252u };
}

static void pass(struct job *job, double seconds)
{
        int64_t until = job->now + (int64_t)(seconds * 1e9);

        while (job->now < until) {
                int64_t next = (job->now / SECOND + 1) * SECOND;

                if (next > until) {
                        job->now = until;
                        break;
                }
                job->now = next;
                pace_see(&job->pace, job->beats, job->phase, job->now, SECOND);
                job->has_hung |= pace_hangs(&job->pace, job->now, LEAST);
        }
}

static void step(struct job *job, double seconds)
{
        pass(job, seconds);
        job->beats++;
}

static void in_phase(struct job *job, const char *phase, double seconds)
{
        job->phase = phase;
        pass(job, seconds);
        job->phase = "";
}

static double uniform(struct job *job)
{
        job->random ^= job->random << 13;
        job->random ^= job->random >> 7;
        job->random ^= job->random << 17;
        return ((double)(job->random >> 11) + 0.5) / 9007199254740992.0;
}

static double normal(struct job *job)
{
        return sqrt(-2 * log(uniform(job))) * cos(6.283185307179586 * uniform(job));
}

/* How long after the last step it counts as hung. */
static double hang(struct job *job)
{
        int64_t since = job->now;

        while (!job->has_hung && job->now < since + 100000 * SECOND)
                pass(job, 1);
        return (double)(job->now - since) / 1e9;
}

static void even_steps_never_hang_and_a_stop_is_noticed_at_the_limit(void)
{
        static const double seconds[] = { 0.01, 0.3, 1, 5, 30, 200 };

        for (size_t i = 0; i < sizeof seconds / sizeof *seconds; i++) {
                double limit = seconds[i] * 10 > 60 ? seconds[i] * 10 : 60, found;
                struct job job;

                begin(&job);
                for (int n = 0; n < 5000; n++)
                        step(&job, seconds[i]);
                CHECK(!job.has_hung);
                found = hang(&job);
                if (found < limit - 2 || found > 1.5 * limit)
                        printf("# steps of %g s: noticed after %g s, the limit is %g s\n", seconds[i], found, limit);
                CHECK(found >= limit - 2 && found <= 1.5 * limit);
        }
}

static void compilations_are_no_hang_also_in_the_middle(void)
{
        struct job job;

        begin(&job);
        step(&job, 1);
        step(&job, 900); /* the first one compiles */
        for (int n = 0; n < 3000; n++)
                step(&job, n % 700 == 699 ? 400 : 0.5);
        CHECK(!job.has_hung);
}

static void evaluations_with_a_name_are_no_hang_however_long_the_first_one_is(void)
{
        struct job job;

        begin(&job);
        for (int n = 1; n < 5000; n++) {
                step(&job, 1);
                if (n % 1000 == 0)
                        in_phase(&job, "evaluate", 1200 + 600 * uniform(&job));
        }
        CHECK(!job.has_hung);
}

static void an_evaluation_without_a_name_is_taken_for_a_hang_once_at_most(void)
{
        struct job job;

        begin(&job);
        for (int n = 1; n < 5000; n++) {
                step(&job, 1);
                if (n % 1000 == 0) {
                        pass(&job, 300);
                        step(&job, 1);
                        CHECK(job.has_hung == (n == 1000));
                        job.has_hung = false;
                }
        }
        CHECK(!job.has_hung);
}

static void short_evaluations_without_a_name_are_no_hang(void)
{
        struct job job;

        begin(&job);
        for (int n = 1; n < 5000; n++) {
                step(&job, 0.4);
                if (n % 500 == 0)
                        pass(&job, 50);
        }
        CHECK(!job.has_hung);
}

static void stragglers_with_long_tails_are_no_hang(void)
{
        static const double sigmas[] = { 0.2, 0.7, 1.0 };

        for (size_t i = 0; i < sizeof sigmas / sizeof *sigmas; i++) {
                struct job job;

                begin(&job);
                for (int n = 0; n < 50000; n++)
                        step(&job, 1.5 * exp(sigmas[i] * normal(&job)));
                CHECK(!job.has_hung);
        }
}

static void a_machine_that_gets_slower_step_by_step_is_no_hang(void)
{
        struct job job;

        begin(&job);
        for (double seconds = 1; seconds < 2000; seconds *= 1.2)
                for (int n = 0; n < 20; n++)
                        step(&job, seconds);
        CHECK(!job.has_hung);
}

static void saves_on_storage_that_becomes_slow_are_no_hang(void)
{
        struct job job;

        begin(&job);
        for (int n = 1; n < 20000; n++) {
                step(&job, 1);
                if (n % 100 == 0)
                        in_phase(&job, "save", n < 10000 ? 0.5 + uniform(&job) : 100 + 400 * uniform(&job)); /* it waits for memory */
        }
        CHECK(!job.has_hung);
}

static void a_phase_that_never_ends_is_a_hang(void)
{
        struct job job;

        begin(&job);
        for (int n = 0; n < 100; n++) {
                step(&job, 1);
                in_phase(&job, "save", 2);
        }
        job.phase = "save";
        CHECK(hang(&job) <= 1.5 * 600);
}

static void a_machine_that_stood_still_is_no_hang(void)
{
        struct job job;

        begin(&job);
        for (int n = 0; n < 200; n++)
                step(&job, 1);
        pass(&job, 5);
        job.now += 7200 * SECOND; /* nobody looked */
        step(&job, 5);
        step(&job, 1);
        CHECK(!job.has_hung);
        CHECK(hang(&job) <= 1.5 * 120);
}

static void a_trainer_that_rests_or_has_made_no_step_is_not_watched(void)
{
        struct job job;

        begin(&job);
        pass(&job, 10000);
        for (int n = 0; n < 200; n++)
                step(&job, 1);
        job.beats = 0;
        pass(&job, 10000);
        CHECK(!job.has_hung);
}

int main(void)
{
        static const struct tap_test tests[] = {
                TEST(even_steps_never_hang_and_a_stop_is_noticed_at_the_limit),
                TEST(compilations_are_no_hang_also_in_the_middle),
                TEST(evaluations_with_a_name_are_no_hang_however_long_the_first_one_is),
                TEST(an_evaluation_without_a_name_is_taken_for_a_hang_once_at_most),
                TEST(short_evaluations_without_a_name_are_no_hang),
                TEST(stragglers_with_long_tails_are_no_hang),
                TEST(a_machine_that_gets_slower_step_by_step_is_no_hang),
                TEST(saves_on_storage_that_becomes_slow_are_no_hang),
                TEST(a_phase_that_never_ends_is_a_hang),
                TEST(a_machine_that_stood_still_is_no_hang),
                TEST(a_trainer_that_rests_or_has_made_no_step_is_not_watched),
        };

        return tap_run(tests, sizeof tests / sizeof *tests);
}
