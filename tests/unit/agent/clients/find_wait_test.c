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

/* The agent knows what each rank of its node has closed. */
static void a_search_waits_for_no_rank_of_its_node_and_names_it(void)
{
        struct ipc_found found;
        struct job job;
        uint64_t first, second;

        job_init(&job);
        REQUIRE(close_part(&job.first, "global_step1", NEBULA_FILES_ALL_RANKS));
        CHECK(search(&job.first, "global_step1", &found) == NEBULA_NOT_FOUND && search(&job.first, "", &found) == NEBULA_NOT_FOUND);
        first = close_part(&job.second, "global_step1", NEBULA_FILES_ALL_RANKS);
        second = close_part(&job.first, "global_step2", NEBULA_FILES_ALL_RANKS);
        REQUIRE(first && second);
        CHECK(!search(&job.first, "", &found) && found.version_id == first && found.passed_count == 1);
        CHECK(!strcmp(found.passed[0].tag, "global_step2") && !strcmp(found.passed[0].reason, "waits for rank 1 of 2"));
        CHECK(close_part(&job.second, "global_step2", NEBULA_FILES_ALL_RANKS) == second);
        CHECK(!search(&job.first, "", &found) && found.version_id == second && !found.passed_count);
        job_done(&job);
}

/* The second rank closes its part while its copy runs. */
static uint64_t copying(struct job *job, struct ipc_granted *loan)
{
        uint64_t version = close_part(&job->first, "global_step1", NEBULA_FILES_ALL_RANKS);

        return version && begin(&job->second, "global_step1", NEBULA_FILES_ALL_RANKS) == version &&
               !copy_image(&job->second, version, "r1.pt", 2, FILE_BYTES, loan) && !of_version(&job->second, IPC_COMMIT, version) ? version : 0;
}

static void a_search_waits_until_the_copies_of_another_rank_end(void)
{
        for (int ends_well = 0; ends_well < 2; ends_well++) {
                struct ipc_granted loan = { 0 };
                struct ipc_found found;
                struct job job;
                uint64_t version;

                job_init(&job);
                version = copying(&job, &loan);
                REQUIRE(version);
                send_search(&job.first, ends_well ? "global_step1" : "");
                CHECK(is_waiting(&job.first));
                if (ends_well) {
                        CHECK(!captured(&job.second, loan.image_id));
                        CHECK(!answer_of(&job.first, &found) && found.version_id == version);
                } else {
                        client_done(&job.second);
                        CHECK(answer_of(&job.first, &found) == NEBULA_NOT_FOUND);
                }
                job_done(&job);
        }
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

TAP_MAIN(TEST(a_search_waits_for_no_rank_of_its_node_and_names_it), TEST(a_search_waits_until_the_copies_of_another_rank_end),
         TEST(a_search_waits_for_no_version_that_its_process_has_not_closed))
