/* Lanes: whose threads a change of one job wakes, how long a lane lives, and that many jobs know their directories. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "agent/agent_catalogue.h"
#include "agent/clients/location.h"
#include "os/os.h"
#include "tap.h"

#define LANES 40
#define DIRECTORIES 600 /* more than the spellings that the agent remembers */

struct sleeper {
        struct catalogue *catalogue;
        struct lane *lane;
        pthread_cond_t *cond;
        pthread_t thread;
        int wakes;
        bool sleeps, ends;
};

static void *sleep_on(void *argument)
{
        struct sleeper *sleeper = argument;

        catalogue_lock(sleeper->catalogue);
        sleeper->sleeps = true; /* the lock is released when it does */
        while (!sleeper->ends) {
                lock_wait_for(&sleeper->catalogue->catalogue_lock, sleeper->cond, -1);
                sleeper->wakes++;
        }
        catalogue_unlock(sleeper->catalogue);
        return NULL;
}

/* Waits until the sleeper sleeps and has been woken so often, and no more. */
static bool comes(struct sleeper *sleeper, int wakes)
{
        for (int i = 0; i < 10000; i++) {
                bool is_there;

                catalogue_lock(sleeper->catalogue);
                is_there = sleeper->sleeps && sleeper->wakes >= wakes;
                catalogue_unlock(sleeper->catalogue);
                if (is_there)
                        return sleeper->wakes == wakes;
                os->sleep_ms(1);
        }
        return false;
}

static struct job *job_at(struct catalogue *catalogue, int number)
{
        char path[64];

        snprintf(path, sizeof path, "/storage/%d", number);
        return catalogue_job_get(catalogue, path, "");
}

static void a_change_wakes_the_threads_of_its_lane_and_those_of_all_lanes_only_if_two_change_at_once(void)
{
        static struct sleeper workers[LANES], watchers[LANES];
        static struct bench bench;
        struct job *jobs[LANES];

        bench_init(&bench, NULL, "");
        for (int i = 0; i < LANES; i++) {
                jobs[i] = job_at(&bench.catalogue, i);
                REQUIRE(jobs[i]);
                workers[i] = (struct sleeper){ &bench.catalogue, jobs[i]->lane, &jobs[i]->lane->work };
                watchers[i] = (struct sleeper){ &bench.catalogue, jobs[i]->lane, &jobs[i]->lane->event };
                REQUIRE(!pthread_create(&workers[i].thread, NULL, sleep_on, &workers[i]) &&
                        !pthread_create(&watchers[i].thread, NULL, sleep_on, &watchers[i]));
                REQUIRE(comes(&workers[i], 0) && comes(&watchers[i], 0));
        }
        catalogue_lock(&bench.catalogue);
        catalogue_signal_job(&bench.catalogue, jobs[7]);
        catalogue_signal_event(&bench.catalogue, jobs[7]);
        catalogue_unlock(&bench.catalogue);
        CHECK(comes(&workers[7], 1) && comes(&watchers[7], 1));
        catalogue_lock(&bench.catalogue);
        catalogue_signal_event(&bench.catalogue, jobs[8]);
        catalogue_unlock(&bench.catalogue);
        CHECK(comes(&watchers[8], 1));
        for (int i = 0; i < LANES; i++)
                CHECK(comes(&workers[i], i == 7) && comes(&watchers[i], i == 7 || i == 8));
        catalogue_lock(&bench.catalogue);
        catalogue_signal_job(&bench.catalogue, jobs[3]);
        catalogue_signal_worker(&bench.catalogue, jobs[LANES - 1]);
        catalogue_unlock(&bench.catalogue);
        for (int i = 0; i < LANES; i++)
                CHECK(comes(&workers[i], i == 7 ? 2 : 1) && comes(&watchers[i], i == 7 || i == 8));
        catalogue_lock(&bench.catalogue);
        for (int i = 0; i < LANES; i++)
                workers[i].ends = watchers[i].ends = true;
        catalogue_signal_work(&bench.catalogue);
        catalogue_signal_event(&bench.catalogue, NULL);
        catalogue_unlock(&bench.catalogue);
        for (int i = 0; i < LANES; i++) {
                pthread_join(workers[i].thread, NULL);
                pthread_join(watchers[i].thread, NULL);
        }
        bench_done(&bench, true);
}

static void the_lane_of_a_path_without_jobs_serves_the_next_path(void)
{
        static struct bench bench;
        struct lane *lane;
        size_t count = 0;

        bench_init(&bench, NULL, "");
        lane = job_at(&bench.catalogue, 0)->lane;
        CHECK(catalogue_job_get(&bench.catalogue, "/storage/0", "other")->lane == lane && job_at(&bench.catalogue, 1)->lane != lane);
        catalogue_lock(&bench.catalogue);
        bench.catalogue.linger_s = 0;
        catalogue_forget_jobs(&bench.catalogue, os->now_ns());
        CHECK(!catalogue_job(&bench.catalogue, "/storage/0", "") && !lane->jobs);
        lane->is_running = lane->waited_in_vain = true;
        CHECK(job_at(&bench.catalogue, 2)->lane != lane);
        lane->is_running = false;
        for (const struct lane *one = bench.catalogue.lanes; one; one = one->next)
                count++;
        for (int i = 3; i < 6 && !lane->jobs; i++)
                job_at(&bench.catalogue, i);
        CHECK(lane->jobs && !lane->waited_in_vain);
        for (const struct lane *one = bench.catalogue.lanes; one; one = one->next)
                count--;
        CHECK(!count);
        catalogue_unlock(&bench.catalogue);
        bench.job = NULL;
        bench_done(&bench, true);
}

/* A disk that is mounted at /a and at /b. */
static int stat_mounted(const char *path, bool follow, struct os_stat *stat)
{
        (void)follow;
        *stat = (struct os_stat){ .kind = OS_KIND_DIRECTORY, .device = 5, .inode = 1 };
        if ((path[1] == 'a' || path[1] == 'b') && path[2] == '/')
                stat->inode = 100 + (uint64_t)atoi(path + 3);
        return 0;
}

static void the_directories_of_more_jobs_than_spellings_are_remembered_are_known_at_another_mount(void)
{
        static struct os_table table;
        static struct bench bench;
        char path[IPC_PATH_MAX], wanted[64];
        size_t known = 0;

        table = os_linux;
        table.stat = stat_mounted;
        bench_init(&bench, NULL, "");
        os = &table;
        for (int i = 0; i < DIRECTORIES; i++) {
                struct job *job;

                snprintf(path, sizeof path, "/a/%d", i);
                location_resolve(&bench.catalogue, path);
                job = catalogue_job_get(&bench.catalogue, path, "");
                REQUIRE(job);
                catalogue_lock(&bench.catalogue);
                location_note(&bench.catalogue, job);
                catalogue_unlock(&bench.catalogue);
        }
        for (int i = 0; i < DIRECTORIES; i++) {
                snprintf(path, sizeof path, "/b/%d", i);
                snprintf(wanted, sizeof wanted, "/a/%d", i);
                location_resolve(&bench.catalogue, path);
                known += !strcmp(path, wanted);
        }
        os = &os_linux;
        CHECK(known == DIRECTORIES);
        bench_done(&bench, true);
}

TAP_MAIN(TEST(a_change_wakes_the_threads_of_its_lane_and_those_of_all_lanes_only_if_two_change_at_once),
         TEST(the_lane_of_a_path_without_jobs_serves_the_next_path),
         TEST(the_directories_of_more_jobs_than_spellings_are_remembered_are_known_at_another_mount))
