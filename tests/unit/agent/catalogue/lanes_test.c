/* Lanes: whose threads a change of one job wakes, how long a lane lives, and that many jobs know their directories. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/agent_catalogue.h"
#include "agent/clients/location.h"
#include "os/os.h"
#include "tap.h"
#include "test_dir.h"

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
        int64_t due = INT64_MAX;
        size_t count = 0;

        bench_init(&bench, NULL, "");
        lane = job_at(&bench.catalogue, 0)->lane;
        CHECK(catalogue_job_get(&bench.catalogue, "/storage/0", "other")->lane == lane && job_at(&bench.catalogue, 1)->lane != lane);
        catalogue_lock(&bench.catalogue);
        bench.catalogue.linger_s = 0;
        for (struct job **link = &bench.catalogue.jobs; *link;)
                if (!catalogue_forget_job(&bench.catalogue, link, os->now_ns(), &due))
                        link = &(*link)->next;
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

static uint64_t inode_of_1 = 101;   /* of /a/1 and /b/1; 0: the directory does not exist */
static atomic_bool link_hangs;
static const char *link_leads_to = ""; /* the link /link */

/* A disk that is mounted at /a and at /b, and two directories to which a link may lead. */
static int stat_mounted(const char *path, bool follow, struct os_stat *stat)
{
        bool is_link = !strcmp(path, "/link");

        while (is_link && link_hangs)
                os_linux.sleep_ms(10);
        *stat = (struct os_stat){ .kind = is_link && !follow ? OS_KIND_LINK : OS_KIND_DIRECTORY, .device = 5, .inode = 1 };
        if (!strcmp(path, "/x") || !strcmp(path, "/y"))
                stat->inode = 5000 + (uint64_t)path[1];
        else if ((!strncmp(path, "/a/", 3) || !strncmp(path, "/b/", 3)))
                stat->inode = !strcmp(path + 3, "1") ? inode_of_1 : 100 + (uint64_t)atoi(path + 3);
        else if (!is_link && strcmp(path, "/a") && strcmp(path, "/b"))
                return os_linux.stat(path, follow, stat);
        return stat->inode ? 0 : -ENOENT;
}

static int read_link(const char *path, char *text, size_t size)
{
        return strcmp(path, "/link") ? os_linux.readlink(path, text, size) : snprintf(text, size, "%s", link_leads_to);
}

static void begin_mounted(struct bench *bench)
{
        static struct os_table table;

        table = os_linux;
        table.stat = stat_mounted;
        table.readlink = read_link;
        bench_init(bench, NULL, "");
        os = &table;
}

static void end_mounted(struct bench *bench)
{
        os = &os_linux;
        bench_done(bench, true);
}

/* As a trainer's greeting does. */
static struct job *greet(struct bench *bench, const char *spelling)
{
        char path[IPC_PATH_MAX];
        struct job *job;

        snprintf(path, sizeof path, "%s", spelling);
        location_resolve(&bench->catalogue, path);
        catalogue_lock(&bench->catalogue);
        job = catalogue_job_get(&bench->catalogue, path, "");
        snprintf(job->spelling, sizeof job->spelling, "%s", spelling);
        catalogue_unlock(&bench->catalogue);
        return job;
}

static void the_directories_of_more_jobs_than_spellings_are_remembered_are_known_at_another_mount(void)
{
        static struct bench bench;
        size_t known = 0;

        begin_mounted(&bench);
        for (int mount = 0; mount < 2; mount++)
                for (int i = 0; i < DIRECTORIES; i++) {
                        char path[64], wanted[64];

                        snprintf(path, sizeof path, "/%c/%d", 'a' + mount, i);
                        snprintf(wanted, sizeof wanted, "/a/%d", i);
                        known += !strcmp(greet(&bench, path)->persist_path, wanted);
                }
        CHECK(known == 2 * DIRECTORIES);
        end_mounted(&bench);
}

static void a_directory_that_was_made_again_is_known_at_another_mount(void)
{
        static struct bench bench;
        struct job *job;

        begin_mounted(&bench);
        job = greet(&bench, "/a/1");
        inode_of_1 = 0; /* it is removed, and the next run begins */
        CHECK(greet(&bench, "/a/1") == job);
        inode_of_1 = 200; /* its first version makes the directory */
        location_learn(&bench.catalogue, job);
        CHECK(greet(&bench, "/b/1") == job);
        end_mounted(&bench);
        inode_of_1 = 101;
}

static void another_mount_of_the_directory_of_an_adopted_job_is_known(void)
{
        static struct bench first, second;
        char memory[300];

        test_dir_make(memory);
        begin_mounted(&first);
        bench_done(&first, true);
        bench_init(&first, memory, "/a/1");
        REQUIRE(bench_version(&first, "t", 1, 1));
        bench_done(&first, false);
        bench_init(&second, memory, "");
        REQUIRE(catalogue_job(&second.catalogue, "/a/1", ""));
        CHECK(!strcmp(greet(&second, "/b/1")->persist_path, "/a/1"));
        end_mounted(&second);
        test_dir_remove(memory);
}

static void a_link_that_hangs_leads_where_it_led_last(void)
{
        static struct bench bench;
        struct job *x, *y;

        begin_mounted(&bench);
        link_leads_to = "/x";
        x = greet(&bench, "/link");
        link_leads_to = "/y";
        y = greet(&bench, "/link");
        CHECK(x != y && !strcmp(y->persist_path, "/y"));
        link_leads_to = "/x";
        CHECK(greet(&bench, "/link") == x);
        link_hangs = true;
        CHECK(greet(&bench, "/link") == x);
        for (int i = 0; i < DIRECTORIES; i++) {
                char path[64];

                snprintf(path, sizeof path, "/a/%d", i);
                greet(&bench, path);
        }
        CHECK(!strcmp(greet(&bench, "/link")->spelling, "/link")); /* one of the two jobs whose spelling it is, and no third one */
        CHECK(!catalogue_job(&bench.catalogue, "/link", ""));
        link_hangs = false;
        os_linux.sleep_ms(100); /* the looks that hung end before the table goes */
        end_mounted(&bench);
}

TAP_MAIN(TEST(a_change_wakes_the_threads_of_its_lane_and_those_of_all_lanes_only_if_two_change_at_once),
         TEST(the_lane_of_a_path_without_jobs_serves_the_next_path),
         TEST(the_directories_of_more_jobs_than_spellings_are_remembered_are_known_at_another_mount),
         TEST(a_directory_that_was_made_again_is_known_at_another_mount), TEST(another_mount_of_the_directory_of_an_adopted_job_is_known),
         TEST(a_link_that_hangs_leads_where_it_led_last))
