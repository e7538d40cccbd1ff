/* Runs of one job that write the same tags: one after the other, as after a restart, or at the same time, by mistake. */
#include <pthread.h>

#include "agent/agent_client.h"
#include "store/manifest.h"
#include "store/manifest_load.h"
#include "tap.h"

#define AT_MOST_MS 30000 /* longer than every wait of this test */

static struct test_place place, other; /* two nodes */
static struct test_agent agent, agent_other;

static void nodes_init(void)
{
        place_init(&place);
        place_init(&other);
        strcpy(other.storage, place.storage);
        agent = agent_run(&place);
        agent_other = agent_run(&other);
}

static void nodes_done(void)
{
        CHECK(agent_finish(agent, SIGTERM) == 0 && agent_finish(agent_other, SIGTERM) == 0);
        place_done(&place);
        place_done(&other);
}

static bool enter_as(struct test_client *client, const struct test_place *at, const char *run, double interval, uint32_t keep_last)
{
        static uint64_t nonce = 1000;

        client_init(client, at, ++nonce);
        client->hello.persist_interval_s = interval;
        client->hello.keep_last = keep_last;
        client->hello.retention_count = 8;
        strcpy(client->hello.run, run);
        return !client_connect(client, at);
}

static bool enter(struct test_client *client, const struct test_place *at, const char *run)
{
        return enter_as(client, at, run, 0, 0);
}

/* Saves a version. Whether it becomes durable. */
static bool save_durable(struct test_client *client, const char *tag, unsigned seed)
{
        uint64_t version;

        return !save_whole(client, tag, seed, &version) && !wait_for(client, version, NEBULA_STATE_DURABLE, AT_MOST_MS);
}

/* Saves a version. Whether it fails and names `run` as the reason. */
static bool save_gives_way(struct test_client *client, const char *tag, unsigned seed, const char *run)
{
        uint64_t version;

        return !save_whole(client, tag, seed, &version) && wait_for(client, version, NEBULA_STATE_DURABLE, AT_MOST_MS) == NEBULA_FAILED &&
               strstr(client->error.message, run) && strstr(client->error.message, tag) && state_of(client, version) == NEBULA_STATE_FAILED;
}

/* Whether a job that starts on a node with nothing in memory finds this version. */
static bool storage_holds(const char *tag, unsigned seed, const char *run)
{
        struct manifest manifest = { 0 };
        struct test_place fresh;
        struct test_client client = { .fd = -1, .frame.fd = -1 };
        struct ipc_found found;
        struct store *store;
        bool holds;
        struct test_agent reader;

        if (store_open(place.storage, &store, NULL))
                return false;
        holds = !manifest_load(store, tag, &manifest, NULL) && !strcmp(manifest.run, run);
        manifest_done(&manifest);
        store_close(store);
        place_init(&fresh);
        strcpy(fresh.storage, place.storage);
        reader = agent_run(&fresh);
        holds = holds && enter(&client, &fresh, "reader") && !find(&client, "", tag, &found) &&
                !load(&client, found.version_id, "model.pt", seed, FILE_BYTES, NULL);
        client_done(&client);
        agent_finish(reader, SIGTERM);
        place_done(&fresh);
        return holds;
}

/*
 * fault (Arguments of the caller): An agent hangs, or its storage is slow, with a version in memory. The job goes on on
 * another node and makes the same tag durable.
 * result: The first agent gives way: storage keeps the later run's version. Its own version fails. Log, `wait`, `flush`
 * and `.error` name tag, job, run and host. The same holds for the agent that takes its memory over.
 */
/* Node a hangs with a version in memory, and the job continues on node b. Then a comes back, or its agent is killed and another one adopts
 * the version. */
static void a_run_that_was_started_again_elsewhere_replaces_nothing_of_the_later_one(void)
{
        for (unsigned i = 0; i < 4; i++) {
                bool is_killed = i & 1, has_older = i & 2;
                struct test_client a, b;
                uint64_t version;

                nodes_init();
                if (has_older) { /* both nodes write the tag again */
                        REQUIRE(enter(&a, &place, "w") && save_durable(&a, "t", 9));
                        client_done(&a);
                }
                REQUIRE(enter_as(&a, &place, "a", 3600, 0));
                REQUIRE(!save_whole(&a, "first", 1, &version) && !flush(&a, "first", AT_MOST_MS));
                REQUIRE(!save_whole(&a, "t", 2, &version) && !wait_for(&a, version, NEBULA_STATE_COMMITTED, AT_MOST_MS));
                if (is_killed) {
                        client_done(&a);
                        agent_finish(agent, SIGKILL);
                }
                REQUIRE(enter(&b, &other, "b") && save_durable(&b, "t", 3));
                if (is_killed) {
                        agent = agent_run(&place);
                        REQUIRE(enter_as(&a, &place, "a", 3600, 0));
                        a.hello.session_nonce = 1;
                        flush(&a, "t", AT_MOST_MS);
                } else {
                        CHECK(flush(&a, "t", AT_MOST_MS) == NEBULA_FAILED && strstr(a.error.message, "\"b\""));
                        CHECK(state_of(&a, version) == NEBULA_STATE_FAILED);
                }
                CHECK(storage_holds("t", 3, "b"));
                client_done(&a);
                client_done(&b);
                nodes_done();
        }
}

/* fault: as a_run_that_was_started_again_elsewhere_replaces_nothing_of_the_later_one */
/* The durable version comes from storage. The one in memory belongs to a history that was not continued. */
static void a_job_that_comes_back_to_the_node_loads_what_is_durable(void)
{
        struct test_client a, b, c;
        struct ipc_found found;

        nodes_init();
        REQUIRE(enter_as(&a, &place, "a", 3600, 0) && !save_whole(&a, "global_step1", 1, NULL) && !flush(&a, "", AT_MOST_MS));
        REQUIRE(!save_whole(&a, "global_step2", 2, NULL));
        client_done(&a);
        agent_finish(agent, SIGKILL);
        REQUIRE(enter(&b, &other, "b") && save_durable(&b, "global_step2", 3));
        agent = agent_run(&place);
        REQUIRE(enter(&c, &place, "c"));
        CHECK(!find(&c, "", "", &found) && !strcmp(found.tag, "global_step2"));
        CHECK(!load(&c, found.version_id, "model.pt", 3, FILE_BYTES, NULL));
        CHECK(!find(&c, "", "global_step2", &found) && !load(&c, found.version_id, "model.pt", 3, FILE_BYTES, NULL));
        CHECK(save_durable(&c, "global_step2", 4));
        client_done(&b);
        client_done(&c);
        nodes_done();
}

/*
 * fault (Arguments of the caller): A job that is started again writes tags of its earlier run again.
 * result: It replaces them, also versions that the earlier run made durable late. A run that has loaded the other's
 * checkpoint replaces them, too.
 */
static void a_job_that_is_started_again_writes_the_tags_of_the_run_before_again(void)
{
        for (unsigned elsewhere = 0; elsewhere < 2; elsewhere++) {
                struct test_client a, b;
                struct ipc_found found;

                nodes_init();
                REQUIRE(enter(&a, &place, "a") && save_durable(&a, "t", 1) && save_durable(&a, "u", 2));
                client_done(&a);
                REQUIRE(enter(&b, elsewhere ? &other : &place, "b"));
                CHECK(save_durable(&b, "t", 3) && save_durable(&b, "u", 4) && save_durable(&b, "u", 5));
                CHECK(!find(&b, "", "u", &found) && found.writing == 2);
                CHECK(storage_holds("t", 3, "b") && storage_holds("u", 5, "b"));
                client_done(&b);
                nodes_done();
        }
}

/* fault: as a_job_that_is_started_again_writes_the_tags_of_the_run_before_again */
/* The agent of the earlier run was slow. The new run has loaded a version of that run. */
static void a_run_replaces_what_the_one_before_had_committed_and_made_durable_late(void)
{
        struct test_client a, b;

        nodes_init();
        REQUIRE(enter_as(&a, &place, "a", 3600, 0) && !save_whole(&a, "first", 1, NULL) && !flush(&a, "", AT_MOST_MS));
        REQUIRE(!save_whole(&a, "t", 2, NULL));
        REQUIRE(enter(&b, &other, "b") && save_durable(&b, "other", 7));
        CHECK(!flush(&a, "t", AT_MOST_MS) && storage_holds("t", 2, "a"));
        CHECK(save_durable(&b, "t", 3) && storage_holds("t", 3, "b"));
        client_done(&a);
        client_done(&b);
        nodes_done();
}

/*
 * fault (Arguments of the caller): Two jobs write the same tags to one path at once, by mistake, on two nodes.
 * result: Each tag has the version of one job, whole. The job that comes second fails that version and names the other
 * run. A version never has files of both. `keep_last` of one job removes no version of the other.
 */
static void two_jobs_on_one_path_leave_each_others_tags_alone_and_are_reported(void)
{
        struct test_client a, b;

        nodes_init();
        REQUIRE(enter_as(&a, &place, "a", 0, 2) && save_durable(&a, "global_step1", 1));
        REQUIRE(enter_as(&b, &other, "b", 0, 2) && save_durable(&b, "global_step0", 8)); /* b has found a's first version, and a continues */
        CHECK(save_durable(&a, "global_step2", 2));
        CHECK(save_gives_way(&b, "global_step2", 3, "\"a\""));
        CHECK(flush(&b, "", AT_MOST_MS) == NEBULA_FAILED && strstr(b.error.message, "\"a\""));
        CHECK(save_durable(&b, "global_step3", 4));
        CHECK(!flush(&b, "", AT_MOST_MS)); /* b was told */
        CHECK(save_gives_way(&a, "global_step3", 5, "\"b\""));
        CHECK(save_durable(&b, "global_step4", 6) && save_durable(&b, "global_step5", 7));
        CHECK(storage_holds("global_step2", 2, "a") && storage_holds("global_step5", 7, "b"));
        client_done(&a);
        client_done(&b);
        nodes_done();
}

struct racer {
        struct test_client client;
        unsigned seed, durable, failed;
};

static void *race(void *argument)
{
        struct racer *racer = argument;

        for (unsigned i = 0; i < 12; i++) {
                uint64_t version;
                char tag[32];

                snprintf(tag, sizeof tag, "tag%u", i);
                if (save_whole(&racer->client, tag, racer->seed, &version))
                        continue;
                if (!wait_for(&racer->client, version, NEBULA_STATE_DURABLE, AT_MOST_MS))
                        racer->durable |= 1u << i;
                else if (state_of(&racer->client, version) == NEBULA_STATE_FAILED)
                        racer->failed |= 1u << i;
        }
        return NULL;
}

/* fault: as two_jobs_on_one_path_leave_each_others_tags_alone_and_are_reported */
static void of_two_jobs_that_write_a_tag_at_the_same_time_one_has_it_whole_and_the_other_is_reported(void)
{
        struct racer racers[2] = { { .seed = 1 }, { .seed = 2 } };
        pthread_t threads[2];

        nodes_init();
        REQUIRE(enter(&racers[0].client, &place, "a") && enter(&racers[1].client, &other, "b"));
        /* Now both agents have looked at storage. A version that an agent finds there at first counts as one of a run before. */
        REQUIRE(save_durable(&racers[0].client, "a", 1) && save_durable(&racers[1].client, "b", 2));
        for (unsigned i = 0; i < 2; i++)
                REQUIRE(!pthread_create(&threads[i], NULL, race, &racers[i]));
        for (unsigned i = 0; i < 2; i++)
                pthread_join(threads[i], NULL);
        CHECK((racers[0].durable ^ racers[1].durable) == 0xfff);
        CHECK(racers[0].failed == racers[1].durable && racers[1].failed == racers[0].durable);
        for (unsigned i = 0; i < 12; i++) {
                bool is_a = racers[0].durable & 1u << i;
                char tag[32];

                snprintf(tag, sizeof tag, "tag%u", i);
                CHECK(storage_holds(tag, is_a ? 1 : 2, is_a ? "a" : "b"));
        }
        client_done(&racers[0].client);
        client_done(&racers[1].client);
        nodes_done();
}

/* fault: as two_jobs_on_one_path_leave_each_others_tags_alone_and_are_reported */
/* Versions of a run that has ended are removed as usual. */
static void retention_removes_nothing_of_another_run_that_goes_on(void)
{
        for (unsigned goes_on = 0; goes_on < 2; goes_on++) {
                struct test_client a, b;

                nodes_init();
                REQUIRE(enter(&a, &place, "a") && save_durable(&a, "a1", 1) && save_durable(&a, "a2", 2));
                REQUIRE(enter(&b, &other, "b") && save_durable(&b, "b0", 7)); /* a's agent has listed storage */
                if (goes_on)
                        REQUIRE(save_durable(&a, "a3", 3));
                b.hello.keep_last = 1;
                REQUIRE(!ask(&b, IPC_CONFIGURE, &b.hello, sizeof b.hello));
                CHECK(save_durable(&b, "b1", 4) && save_durable(&b, "b2", 5) && save_durable(&b, "b3", 6) && !flush(&b, "", AT_MOST_MS));
                client_done(&b);
                CHECK(agent_finish(agent_other, SIGTERM) == 0); /* the removal is done */
                agent_other = agent_run(&other);
                CHECK(storage_holds("a1", 1, "a") == goes_on && storage_holds("a2", 2, "a") == goes_on);
                CHECK(storage_holds("b3", 6, "b") && !storage_holds("b1", 4, "b"));
                client_done(&a);
                nodes_done();
        }
}

/* fault: as a_job_that_is_started_again_writes_the_tags_of_the_run_before_again */
static void a_run_that_has_loaded_a_checkpoint_of_another_goes_on_from_it(void)
{
        struct test_client a, b;
        struct ipc_found found;

        nodes_init();
        REQUIRE(enter(&b, &other, "b") && save_durable(&b, "own", 1));
        REQUIRE(enter(&a, &place, "a") && save_durable(&a, "t", 2));
        client_done(&a);
        REQUIRE(!find(&b, "", "t", &found) && !load(&b, found.version_id, "model.pt", 2, FILE_BYTES, NULL));
        CHECK(save_durable(&b, "t", 3) && storage_holds("t", 3, "b"));
        client_done(&b);
        nodes_done();
}

/* The job name distinguishes trainers of different jobs. */
static void each_of_several_jobs_of_one_path_writes_its_own_tags(void)
{
        struct test_client a, b;

        nodes_init();
        client_init(&b, &other, 7);
        strcpy(b.hello.run, "b");
        strcpy(b.hello.job, "second");
        REQUIRE(enter(&a, &place, "a") && !client_connect(&b, &other));
        CHECK(save_durable(&a, "of a", 1) && save_durable(&b, "of b", 2) && save_durable(&a, "of a", 3) && save_durable(&b, "of b", 4));
        CHECK(storage_holds("of a", 3, "a"));
        client_done(&a);
        client_done(&b);
        nodes_done();
}

TAP_MAIN(TEST(a_run_that_was_started_again_elsewhere_replaces_nothing_of_the_later_one),
         TEST(a_job_that_comes_back_to_the_node_loads_what_is_durable),
         TEST(a_job_that_is_started_again_writes_the_tags_of_the_run_before_again),
         TEST(a_run_replaces_what_the_one_before_had_committed_and_made_durable_late),
         TEST(two_jobs_on_one_path_leave_each_others_tags_alone_and_are_reported),
         TEST(of_two_jobs_that_write_a_tag_at_the_same_time_one_has_it_whole_and_the_other_is_reported),
         TEST(retention_removes_nothing_of_another_run_that_goes_on),
         TEST(a_run_that_has_loaded_a_checkpoint_of_another_goes_on_from_it),
         TEST(each_of_several_jobs_of_one_path_writes_its_own_tags))
