/* Searches of a process that has closed its part of a version, before the other ranks have closed theirs. */
#include <poll.h>

#include "agent/agent_client.h"
#include "tap.h"

#define STILL_MS 300 /* an agent that does not wait answers within milliseconds */

static struct test_place place;

/* Two ranks on one node. */
struct job {
        struct agent *agent;
        struct test_client first, second;
};

static bool enter(struct test_client *client, uint64_t nonce, uint32_t rank)
{
        client_init(client, &place, nonce);
        client->hello.rank = rank;
        client->hello.world = client->hello.local_world = 2;
        strcpy(client->hello.run, "r1");
        return !client_connect(client, &place);
}

static void job_init(struct job *job)
{
        place_init(&place);
        if (agent_start(&place.place, true, &job->agent, NULL) || !enter(&job->first, 1, 0) || !enter(&job->second, 2, 1))
                abort();
}

static void job_done(struct job *job)
{
        client_done(&job->first);
        client_done(&job->second);
        agent_stop(job->agent, true);
        place_done(&place);
}

static uint64_t close_part(struct test_client *client, const char *tag, int64_t goal)
{
        uint64_t version = begin(client, tag, goal);
        char name[16];

        snprintf(name, sizeof name, "r%u.pt", client->hello.rank);
        return version && !save(client, version, name, client->hello.rank + 1, FILE_BYTES) && !of_version(client, IPC_COMMIT, version) ? version : 0;
}

static uint64_t complete(struct job *job, const char *tag)
{
        uint64_t version = close_part(&job->first, tag, NEBULA_FILES_ALL_RANKS);

        return version == close_part(&job->second, tag, NEBULA_FILES_ALL_RANKS) ? version : 0;
}

static void send_search(struct test_client *client, const char *tag)
{
        struct ipc_find request = { .waits = 1 };

        snprintf(request.tag, sizeof request.tag, "%s", tag);
        if (ipc_send(client->fd, IPC_FIND, NEBULA_OK, &request, sizeof request, -1, &client->error))
                abort();
}

static bool is_waiting(const struct test_client *client)
{
        struct pollfd answer = { .fd = client->fd, .events = POLLIN };

        return !poll(&answer, 1, STILL_MS);
}

static enum nebula_status answer_of(struct test_client *client, struct ipc_found *ret_found)
{
        enum nebula_status status = ipc_receive(client->fd, &client->frame, &client->error);

        if (status)
                return status;
        memset(ret_found, 0, sizeof *ret_found);
        if (!client->frame.header.status)
                memcpy(ret_found, client->frame.payload, sizeof *ret_found);
        else
                snprintf(client->error.message, sizeof client->error.message, "%.*s", (int)client->frame.header.size, (const char *)client->frame.payload);
        return (enum nebula_status)client->frame.header.status;
}

static enum nebula_status search(struct test_client *client, const char *tag, struct ipc_found *ret_found)
{
        send_search(client, tag);
        return answer_of(client, ret_found);
}

/* fault: as test_ranks_on_two_nodes_that_search_right_after_their_saves_get_the_same_answer */
static void a_search_waits_until_the_other_ranks_have_closed_their_parts(void)
{
        static const char *const tags[] = { "global_step2", "" };
        struct ipc_found found;
        struct job job;

        for (size_t i = 0; i < 2; i++) {
                uint64_t version;

                job_init(&job);
                REQUIRE(complete(&job, "global_step1"));
                version = close_part(&job.first, "global_step2", NEBULA_FILES_ALL_RANKS);
                send_search(&job.first, tags[i]);
                CHECK(is_waiting(&job.first));
                CHECK(version && close_part(&job.second, "global_step2", NEBULA_FILES_ALL_RANKS) == version);
                CHECK(!answer_of(&job.first, &found) && found.version_id == version && !found.passed_count);
                CHECK(!search(&job.second, tags[i], &found) && found.version_id == version);
                job_done(&job);
        }
}

static void a_search_waits_until_the_copies_of_another_rank_end(void)
{
        struct ipc_granted loan = { 0 };
        struct ipc_found found;
        struct job job;
        uint64_t version;

        job_init(&job);
        version = close_part(&job.first, "global_step1", NEBULA_FILES_OPEN);
        REQUIRE(version && begin(&job.second, "global_step1", NEBULA_FILES_OPEN) == version);
        REQUIRE(!copy_image(&job.second, version, "r1.pt", 2, FILE_BYTES, &loan));
        send_search(&job.first, "global_step1");
        CHECK(is_waiting(&job.first));
        CHECK(!captured(&job.second, loan.image_id) && !of_version(&job.second, IPC_COMMIT, version));
        CHECK(!answer_of(&job.first, &found) && found.version_id == version);
        job_done(&job);
}

static void a_search_waits_for_no_version_that_its_process_has_not_closed(void)
{
        struct ipc_found found;
        struct job job;
        uint64_t version;

        job_init(&job);
        version = complete(&job, "global_step1");
        REQUIRE(version && close_part(&job.first, "global_step2", NEBULA_FILES_ALL_RANKS));
        CHECK(!search(&job.second, "", &found) && found.version_id == version);
        CHECK(search(&job.second, "global_step2", &found) == NEBULA_NOT_FOUND);
        CHECK(!search(&job.first, "global_step1", &found) && found.version_id == version); /* another tag */
        CHECK(!find(&job.first, "", "", &found) && found.version_id == version);           /* it does not ask to wait */
        job_done(&job);
}

static void a_search_ends_when_the_version_fails(void)
{
        struct ipc_found found;
        struct job job;

        job_init(&job);
        REQUIRE(close_part(&job.first, "global_step1", NEBULA_FILES_ALL_RANKS));
        send_search(&job.first, "global_step1");
        CHECK(is_waiting(&job.first));
        client_done(&job.second);
        CHECK(answer_of(&job.first, &found) == NEBULA_NOT_FOUND);
        job_done(&job);
}

/* fault: as test_a_search_after_a_save_that_another_rank_never_makes_names_that_rank */
static void a_search_of_a_version_that_stays_incomplete_is_no_certain_none(void)
{
        struct ipc_found found;
        struct job job;
        uint64_t version;

        setenv("NEBULA_TAKEOVER_S", "1", 1);
        setenv("NEBULA_QUIET_S", "1", 1);
        job_init(&job);
        version = close_part(&job.first, "last", NEBULA_FILES_ALL_RANKS);
        REQUIRE(version);
        CHECK(search(&job.first, "last", &found) == NEBULA_TIMEOUT && strstr(job.first.error.message, "waits for rank 1 of 2"));
        CHECK(search(&job.first, "", &found) == NEBULA_TIMEOUT && strstr(job.first.error.message, "waits for rank 1 of 2"));
        CHECK(search(&job.first, "other", &found) == NEBULA_NOT_FOUND);
        REQUIRE(close_part(&job.second, "last", NEBULA_FILES_ALL_RANKS) == version);
        REQUIRE(close_part(&job.first, "last", NEBULA_FILES_ALL_RANKS)); /* the next writing */
        for (size_t i = 0; i < 2; i++) { /* the earlier writing of the tag is taken, and the answer names the later one */
                CHECK(!search(&job.first, i ? "last" : "", &found) && found.version_id == version);
                CHECK(found.passed_count == 1 && !strcmp(found.passed[0].tag, "last") && !strcmp(found.passed[0].reason, "waits for rank 1 of 2"));
        }
        job_done(&job);
        unsetenv("NEBULA_TAKEOVER_S");
        unsetenv("NEBULA_QUIET_S");
}

TAP_MAIN(TEST(a_search_waits_until_the_other_ranks_have_closed_their_parts), TEST(a_search_waits_until_the_copies_of_another_rank_end),
         TEST(a_search_waits_for_no_version_that_its_process_has_not_closed), TEST(a_search_ends_when_the_version_fails),
         TEST(a_search_of_a_version_that_stays_incomplete_is_no_certain_none))
