/* A world of two ranks, and launchers that say of each that it is alone on its node: whether it is decides how they commit. */
#include "agent/agent_client.h"
#include "tap.h"

#define AT_MOST_MS 20000 /* no less than all that is waited for here, so that what would last for ever is told apart */

static struct test_place place;

static bool enter(struct test_client *client, const struct test_place *at, uint32_t rank)
{
        client_init(client, at, 100 + rank);
        client->hello.rank = rank;
        client->hello.world = 2;
        strcpy(client->hello.run, "r");
        return !client_connect(client, at);
}

/* Begins, saves one file of the rank's name, commits. */
static uint64_t save_share(struct test_client *client, const char *tag, int64_t goal, unsigned seed)
{
        char name[32];
        uint64_t version = begin(client, tag, goal);
        struct ipc_granted grant;

        snprintf(name, sizeof name, "%u.pt", client->hello.rank);
        if (!version || copy_image(client, version, name, seed, FILE_BYTES, &grant) || captured(client, grant.image_id))
                return 0;
        return of_version(client, IPC_COMMIT, grant.version_id) ? 0 : grant.version_id;
}

/* Whether a document of the tag appears soon. */
static bool document_comes(const char *tag, const char *name)
{
        char path[300];

        snprintf(path, sizeof path, "%s/%s/.nebula/%s", place.storage, tag, name);
        for (int i = 0; i < 1000; i++) {
                if (!access(path, F_OK))
                        return true;
                usleep(10000);
        }
        return false;
}

/* Its note is all that the next agent knows. */
static pid_t agent_again(pid_t pid)
{
        agent_end(pid, SIGKILL);
        return agent_fork(&place);
}

static void a_version_that_was_announced_before_the_other_rank_of_the_node_joined_becomes_durable(void)
{
        static const int64_t goals[] = { NEBULA_FILES_ALL_RANKS, NEBULA_FILES_OPEN, 2 };

        for (size_t i = 0; i < 2 * sizeof goals / sizeof *goals; i++) {
                int64_t goal = goals[i / 2];
                bool agent_dies = i % 2;
                struct test_client zero, one;
                uint64_t version;
                pid_t pid;

                place_init(&place);
                pid = agent_fork(&place);
                REQUIRE(enter(&zero, &place, 0));
                version = save_share(&zero, "t", goal, 1);
                REQUIRE(version && document_comes("t", "captured-00000.json"));
                if (agent_dies) {
                        client_done(&zero);
                        pid = agent_again(pid);
                        REQUIRE(enter(&zero, &place, 0));
                }
                REQUIRE(enter(&one, &place, 1));
                CHECK(save_share(&one, "t", goal, 2) == version);
                CHECK(!flush(&one, "", AT_MOST_MS) && !flush(&zero, "t", AT_MOST_MS));
                CHECK(state_of(&zero, version) == NEBULA_STATE_DURABLE && document_comes("t", "manifest.json"));
                CHECK(!load(&zero, version, "1.pt", 2, FILE_BYTES, NULL) && !load(&one, version, "0.pt", 1, FILE_BYTES, NULL));
                client_done(&zero);
                client_done(&one);
                CHECK(agent_end(pid, SIGTERM) == 0);
                place_done(&place);
        }
}

TAP_MAIN(TEST(a_version_that_was_announced_before_the_other_rank_of_the_node_joined_becomes_durable))
