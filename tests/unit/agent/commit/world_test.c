/* A world of two ranks. The launcher says that each rank is alone on its node. The way of the commit depends on whether that is true. */
#include "agent/agent_client.h"
#include "store/announce.h"
#include "store/document.h"
#include "store/manifest.h"
#include "store/manifest_keys.h"
#include "store/record.h"
#include "tap.h"

#define AT_MOST_MS 20000 /* longer than every wait of this test, so that an endless wait is noticed */

static struct test_place place, other; /* two nodes */

static bool enter(struct test_client *client, const struct test_place *at, uint32_t rank, double interval)
{
        client_init(client, at, 100 + rank);
        client->hello.rank = rank;
        client->hello.world = 2;
        client->hello.persist_interval_s = interval;
        strcpy(client->hello.run, "r");
        return !client_connect(client, at);
}

/* Begins, saves one file, commits. */
static uint64_t save_named(struct test_client *client, const char *tag, int64_t goal, const char *name, unsigned seed)
{
        uint64_t version = begin(client, tag, goal);
        struct ipc_granted loan;

        if (!version || copy_image(client, version, name, seed, FILE_BYTES, &loan) || captured(client, loan.image_id))
                return 0;
        return of_version(client, IPC_COMMIT, loan.version_id) ? 0 : loan.version_id;
}

/* Saves a file that is named after the rank. */
static uint64_t save_share(struct test_client *client, const char *tag, int64_t goal, unsigned seed)
{
        char name[32];

        snprintf(name, sizeof name, "%u.pt", client->hello.rank);
        return save_named(client, tag, goal, name, seed);
}

static const char *document_key(const char *tag, const char *name)
{
        static char key[300];

        snprintf(key, sizeof key, "%s/.nebula/%s", tag, name);
        return key;
}

/* Whether a document of the tag appears soon. */
static bool document_comes(const char *tag, const char *name)
{
        for (int i = 0; i < 6000; i++) {
                if (storage_has(place.storage, document_key(tag, name)))
                        return true;
                usleep(10000);
        }
        return false;
}

/* The first document whose name begins so, as document_key: "captured-", "committed-". NULL: none. */
static const char *find_document(const char *tag, const char *prefix)
{
        static char key[300];
        struct store_list list = storage_list(place.storage, document_key(tag, prefix));
        bool is_there = list.count > 0;

        if (is_there)
                snprintf(key, sizeof key, "%s", list.entries[0].key);
        store_list_done(&list);
        return is_there ? key : NULL;
}

/* Whether a document of the rank's node appears soon, with this rank as the lowest. */
static bool captured_comes(const char *tag, uint32_t rank)
{
        char part[16];

        snprintf(part, sizeof part, "-%05u-", rank);
        for (int i = 0; i < 6000; i++) {
                const char *key = find_document(tag, "captured-");

                if (key && strstr(key, part))
                        return true;
                usleep(10000);
        }
        return false;
}

/* Kills the agent and starts another one, which knows only the survival logs. */
static struct test_agent agent_again(struct test_agent agent)
{
        agent_finish(agent, SIGKILL);
        return agent_run(&place);
}

static void a_version_that_was_announced_before_the_other_rank_of_the_node_joined_becomes_durable(void)
{
        static const int64_t goals[] = { NEBULA_FILES_ALL_RANKS, NEBULA_FILES_OPEN, 2 };

        for (size_t i = 0; i < 2 * sizeof goals / sizeof *goals; i++) {
                int64_t goal = goals[i / 2];
                bool agent_dies = i % 2;
                struct test_client zero, one;
                uint64_t version;
                struct test_agent agent;

                place_init(&place);
                agent = agent_run(&place);
                REQUIRE(enter(&zero, &place, 0, 0));
                version = save_share(&zero, "t", goal, 1);
                REQUIRE(version && captured_comes("t", 0));
                if (agent_dies) {
                        client_done(&zero);
                        agent = agent_again(agent);
                        REQUIRE(enter(&zero, &place, 0, 0));
                }
                REQUIRE(enter(&one, &place, 1, 0));
                CHECK(save_share(&one, "t", goal, 2) == version);
                CHECK(!flush(&one, "", AT_MOST_MS) && !flush(&zero, "t", AT_MOST_MS));
                CHECK(state_of(&zero, version) == NEBULA_STATE_DURABLE && document_comes("t", "manifest-1.json"));
                CHECK(!load(&zero, version, "1.pt", 2, FILE_BYTES, NULL) && !load(&one, version, "0.pt", 1, FILE_BYTES, NULL));
                client_done(&zero);
                client_done(&one);
                CHECK(agent_finish(agent, SIGTERM) == 0);
                place_done(&place);
        }
}

static bool reports(struct test_client *client, const char *text)
{
        struct ipc_report request = { .report = NEBULA_REPORT_VERSIONS };

        return !ask(client, IPC_REPORT, &request, sizeof request) &&
               memmem(client->frame.payload, client->frame.header.size, text, strlen(text));
}

/* Two nodes with a durable version, and a committed one that becomes durable only when a client asks for it. */
static uint64_t commit_on_two_nodes(struct test_client *zero, struct test_client *one, struct test_agent *ret_agent, struct test_agent *ret_other)
{
        uint64_t version, before;

        place_init(&place);
        place_init(&other);
        strcpy(other.storage, place.storage);
        *ret_agent = agent_run(&place);
        *ret_other = agent_run(&other);
        if (!enter(zero, &place, 0, 3600) || !enter(one, &other, 1, 3600))
                return 0;
        before = save_share(zero, "before", NEBULA_FILES_ALL_RANKS, 1);
        if (!before || !save_share(one, "before", NEBULA_FILES_ALL_RANKS, 2) ||
            wait_for(zero, before, NEBULA_STATE_DURABLE, AT_MOST_MS))
                return 0;
        version = save_share(zero, "t", NEBULA_FILES_ALL_RANKS, 3);
        before = save_share(one, "t", NEBULA_FILES_ALL_RANKS, 4);
        if (!version || !before || wait_for(one, before, NEBULA_STATE_COMMITTED, AT_MOST_MS) ||
            wait_for(zero, version, NEBULA_STATE_COMMITTED, AT_MOST_MS))
                return 0;
        return version;
}

/*
 * fault (Storage): Another node is lost for good, with its share of a committed version.
 * result: `flush` and `wait` name the missing rank. The version fails after `NEBULA_PERSIST_GIVE_UP` and stays in
 * memory. If that node makes it durable later, readers find it.
 */
static void a_version_of_a_dead_node_fails_and_names_its_rank_and_becomes_durable_if_the_node_comes_back(void)
{
        struct test_client zero, one;
        struct ipc_found found;
        uint64_t version;
        struct test_agent agent, other_agent;

        setenv("NEBULA_PERSIST_GIVE_UP", "3", 1);
        setenv("NEBULA_TAKEOVER_S", "1", 1);
        version = commit_on_two_nodes(&zero, &one, &agent, &other_agent);
        REQUIRE(version);
        agent_finish(other_agent, SIGKILL);
        client_done(&one);
        CHECK(flush(&zero, "", 1500) == NEBULA_TIMEOUT && strstr(zero.error.message, "rank 1"));
        CHECK(wait_for(&zero, version, NEBULA_STATE_DURABLE, 0) == NEBULA_TIMEOUT && strstr(zero.error.message, "rank 1"));
        CHECK(flush(&zero, "", AT_MOST_MS) == NEBULA_FAILED && strstr(zero.error.message, "rank 1"));
        CHECK(wait_for(&zero, version, NEBULA_STATE_DURABLE, 0) == NEBULA_FAILED);

        other_agent = agent_run(&other);
        CHECK(document_comes("t", "manifest-1.json"));
        CHECK(reports(&zero, "\"failed\",\"source\":[\"memory\",\"storage\"]")); /* so that ranks can agree on it */
        CHECK(!find(&zero, place.storage, "t", &found) && found.state == NEBULA_STATE_DURABLE);
        CHECK(!load(&zero, found.version_id, "0.pt", 3, FILE_BYTES, NULL) && !load(&zero, found.version_id, "1.pt", 4, FILE_BYTES, NULL));
        client_done(&zero);
        CHECK(agent_finish(agent, SIGTERM) == 0 && agent_finish(other_agent, SIGTERM) == 0);
        unsetenv("NEBULA_PERSIST_GIVE_UP");
        unsetenv("NEBULA_TAKEOVER_S");
        place_done(&place);
        place_done(&other);
}

static char *whole_document(const char *tag, const char *prefix, size_t *ret_size)
{
        const char *key = find_document(tag, prefix);

        return key ? storage_read(place.storage, key, ret_size) : NULL;
}

static bool is_wanted(const char *tag)
{
        return find_document(tag, "wanted-") != NULL;
}

/* A client asks for a durable version, and its agent has told the other node. That node's agent is stopped and has not read it. */
static bool report_who_is_stopped(struct test_client *zero, const char *tag, pid_t stopped)
{
        kill(stopped, SIGSTOP);
        if (flush(zero, tag, 0) != NEBULA_TIMEOUT)
                return false;
        for (int i = 0; i < 10000 && !is_wanted(tag); i++)
                usleep(10000);
        return is_wanted(tag);
}

enum late { EARLIER_RUN, EARLIER_WRITING, REMOVED, LATE_COUNT };

/* Another agent's decision appears, or a program removes this version's. */
static void disturb_decision(const char *tag, enum late what)
{
        struct committed committed = { 0 };
        size_t size;
        char path[ANNOUNCE_PATH_MAX], key[300], *text;
        const char *found = find_document(tag, "committed-");

        snprintf(key, sizeof key, "%s", found ? found : "");
        text = storage_read(place.storage, key, &size);
        if (!text || committed_parse(text, size, &committed, NULL))
                abort();
        free(text);
        committed.sequence--;
        if (what == EARLIER_RUN)
                strcpy(committed.of.run, "before");
        if (what == EARLIER_WRITING)
                committed.of.writing += 7; /* as an agent counts that knows of others */
        if (committed_format(&committed, &text, &size, NULL))
                abort();
        committed_path(&committed.of, path);
        if (what == REMOVED)
                storage_take_away(place.storage, key);
        else
                storage_write(place.storage, document_key(tag, path + strlen(MANIFEST_DIRECTORY "/")), text, size);
        free(text);
        committed_done(&committed);
}

/*
 * fault (Storage): An agent is stopped while it decides on a version of several nodes, and writes its decision late; or
 * a program removes the decision.
 * result: A decision is never replaced, and those of other writings have other names. The nodes that wait create a
 * removed one again. The version becomes durable.
 */
static void what_other_agents_decide_and_a_removal_of_the_decision_block_no_version(void)
{
        NEEDS_FILES("a process is stopped");
        for (enum late what = 0; what < LATE_COUNT; what++) {
                struct test_client zero, one;
                struct test_agent agent, other_agent;

                REQUIRE(commit_on_two_nodes(&zero, &one, &agent, &other_agent));
                REQUIRE(report_who_is_stopped(&zero, "t", other_agent.pid));
                disturb_decision("t", what);
                kill(other_agent.pid, SIGCONT);
                CHECK(!flush(&zero, "t", AT_MOST_MS) && !flush(&one, "t", AT_MOST_MS));
                client_done(&zero);
                client_done(&one);
                CHECK(agent_finish(agent, SIGTERM) == 0 && agent_finish(other_agent, SIGTERM) == 0);
                place_done(&place);
                place_done(&other);
        }
}

/* Removes the record of this node, and leaves a copy as the agent of an older run would write it if it was stopped and then continues. */
static bool take_record(const char *tag)
{
        char key[512], prefix[64], *text;
        struct record record = { 0 };
        size_t size;

        snprintf(prefix, sizeof prefix, "%s/.nebula/", tag);
        for (int i = 0; i < 10000 && !storage_count(place.storage, prefix, ".record-00000.json", key); i++)
                usleep(10000);
        text = storage_read(place.storage, key, &size);
        if (!text || record_parse(text, size, &record, NULL))
                return false;
        free(text);
        storage_take_away(place.storage, key);
        strcpy(record.run, "before");
        if (record_format(&record, &text, &size, NULL))
                return false;
        storage_write(place.storage, key, text, size);
        free(text);
        record_done(&record);
        return true;
}

/* A program was removing the tag when it was written again, and removes the new record. Only this node can write it again. */
static void a_record_that_another_program_removes_is_written_again_and_one_of_an_older_run_is_not_taken_for_it(void)
{
        struct test_client zero, one;
        struct ipc_found found;
        struct test_agent agent, other_agent;

        NEEDS_FILES("a process is stopped");
        REQUIRE(commit_on_two_nodes(&zero, &one, &agent, &other_agent));
        REQUIRE(report_who_is_stopped(&zero, "t", other_agent.pid) && take_record("t"));
        kill(other_agent.pid, SIGCONT);
        CHECK(!flush(&zero, "t", AT_MOST_MS) && !flush(&one, "t", AT_MOST_MS));
        CHECK(!find(&zero, place.storage, "t", &found) && !load(&zero, found.version_id, "0.pt", 3, FILE_BYTES, NULL));
        client_done(&zero);
        client_done(&one);
        CHECK(agent_finish(agent, SIGTERM) == 0 && agent_finish(other_agent, SIGTERM) == 0);
        place_done(&place);
        place_done(&other);
}

/*
 * fault (The machine and other users): The agent of one of several nodes is stopped in the middle of a run, and a tag
 * is written again.
 * result: The nodes go on to write it together, however often they had.
 */
/* The agent of a node ended in between. The next one does not know how often the run wrote the tag, nor, until it has listed storage, the
 * versions there. */
static void nodes_go_on_to_write_a_tag_together_when_the_agent_of_one_has_forgotten_how_often_they_did(void)
{
        for (unsigned written = 1; written < 4; written++) {
                struct test_client zero, one;
                uint64_t version = 0, other_version = 0;
                struct ipc_found found;
                struct test_agent agent, other_agent;

                place_init(&place);
                place_init(&other);
                strcpy(other.storage, place.storage);
                agent = agent_run(&place);
                other_agent = agent_run(&other);
                REQUIRE(enter(&zero, &place, 0, 0) && enter(&one, &other, 1, 0));
                for (unsigned i = 0; i <= written; i++) {
                        if (i == written) {
                                client_done(&zero);
                                CHECK(agent_finish(agent, SIGTERM) == 0);
                                agent = agent_run(&place);
                                REQUIRE(enter(&zero, &place, 0, 0));
                        }
                        version = save_share(&zero, "t", NEBULA_FILES_ALL_RANKS, 10 + i);
                        other_version = save_share(&one, "t", NEBULA_FILES_ALL_RANKS, 20 + i);
                        CHECK(version && !wait_for(&zero, version, NEBULA_STATE_DURABLE, AT_MOST_MS));
                        CHECK(other_version && !wait_for(&one, other_version, NEBULA_STATE_DURABLE, AT_MOST_MS));
                }
                client_done(&zero);
                client_done(&one);
                CHECK(agent_finish(agent, SIGTERM) == 0 && agent_finish(other_agent, SIGTERM) == 0);
                agent = agent_run(&place); /* with nothing in memory */
                REQUIRE(enter(&zero, &place, 0, 0) && !find(&zero, "", "t", &found) && found.writing == written + 1);
                CHECK(!load(&zero, found.version_id, "0.pt", 10 + written, FILE_BYTES, NULL));
                CHECK(!load(&zero, found.version_id, "1.pt", 20 + written, FILE_BYTES, NULL));
                client_done(&zero);
                CHECK(agent_finish(agent, SIGTERM) == 0);
                place_done(&place);
                place_done(&other);
        }
}

/* fault: as nodes_go_on_to_write_a_tag_together_when_the_agent_of_one_has_forgotten_how_often_they_did */
/* A program has removed the tag meanwhile, and with it the documents by which the next agent counts. */
static void nodes_go_on_to_write_a_removed_tag_together_when_the_agent_of_one_has_forgotten_it(void)
{
        struct ipc_keep removal = { .what = IPC_KEEP_REMOVE, .tag = "t" };
        struct test_agent agent, other_agent;
        struct test_client zero, one;
        uint64_t version, other_version;

        place_init(&place);
        place_init(&other);
        strcpy(other.storage, place.storage);
        agent = agent_run(&place);
        other_agent = agent_run(&other);
        REQUIRE(enter(&zero, &place, 0, 0) && enter(&one, &other, 1, 0));
        for (unsigned i = 0; i < 6; i++) {
                const char *tag = i % 3 == 2 ? "newest" : "t"; /* the newest version would not be removed */

                version = save_share(&zero, tag, NEBULA_FILES_ALL_RANKS, 10 + i);
                other_version = save_share(&one, tag, NEBULA_FILES_ALL_RANKS, 20 + i);
                CHECK(version && !wait_for(&zero, version, NEBULA_STATE_DURABLE, AT_MOST_MS));
                CHECK(other_version && !wait_for(&one, other_version, NEBULA_STATE_DURABLE, AT_MOST_MS));
                if (i % 3 < 2)
                        continue;
                CHECK(!ask(&zero, IPC_KEEP, &removal, sizeof removal) && !find_document("t", "manifest-"));
                client_done(&one);
                CHECK(agent_finish(other_agent, SIGTERM) == 0);
                other_agent = agent_run(&other);
                REQUIRE(enter(&one, &other, 1, 0));
        }
        client_done(&zero);
        client_done(&one);
        CHECK(agent_finish(agent, SIGTERM) == 0 && agent_finish(other_agent, SIGTERM) == 0);
        place_done(&place);
        place_done(&other);
}

static bool gives_up(const struct test_client *client, enum nebula_status status)
{
        return status == NEBULA_TIMEOUT && strstr(client->error.message, "gave up") && strstr(client->error.message, "rank 1 of 2");
}

/*
 * fault (Storage): Another node is lost for good before it captured its share.
 * result: `flush` and `wait` name the missing rank. They wait no longer than `NEBULA_PERSIST_GIVE_UP` after the last
 * news of other nodes. If that rank comes after all, the version is completed.
 */
static void a_version_of_which_another_node_never_captured_its_share_is_waited_for_so_long_and_complete_should_it_come(void)
{
        struct test_client zero, one;
        uint64_t version;
        struct test_agent agent, other_agent;

        setenv("NEBULA_PERSIST_GIVE_UP", "1", 1);
        place_init(&place);
        place_init(&other);
        strcpy(other.storage, place.storage);
        agent = agent_run(&place);
        REQUIRE(enter(&zero, &place, 0, 0));
        version = save_share(&zero, "t", NEBULA_FILES_ALL_RANKS, 1);
        REQUIRE(version);
        CHECK(gives_up(&zero, flush(&zero, "", AT_MOST_MS)));
        CHECK(gives_up(&zero, wait_for(&zero, version, NEBULA_STATE_COMMITTED, AT_MOST_MS)));
        CHECK(gives_up(&zero, flush(&zero, "t", AT_MOST_MS)));
        CHECK(state_of(&zero, version) == NEBULA_STATE_CAPTURED);

        other_agent = agent_run(&other);
        REQUIRE(enter(&one, &other, 1, 0));
        CHECK(save_share(&one, "t", NEBULA_FILES_ALL_RANKS, 2) && !flush(&one, "t", AT_MOST_MS));
        CHECK(document_comes("t", "manifest-1.json"));
        for (int i = 0; i < 10000 && state_of(&zero, version) != NEBULA_STATE_DURABLE; i++)
                usleep(10000);
        CHECK(!wait_for(&zero, version, NEBULA_STATE_DURABLE, AT_MOST_MS) && !flush(&zero, "t", AT_MOST_MS));
        client_done(&zero);
        client_done(&one);
        CHECK(agent_finish(agent, SIGTERM) == 0 && agent_finish(other_agent, SIGTERM) == 0);
        unsetenv("NEBULA_PERSIST_GIVE_UP");
        place_done(&place);
        place_done(&other);
}

/*
 * fault (Arguments of the caller): The ranks of one node save nothing (-2), and those of other nodes do.
 * result: The version becomes durable: the node writes records without files.
 */
static void a_node_whose_ranks_saved_nothing_holds_up_nothing(void)
{
        struct test_client zero, one;
        uint64_t version, empty;
        struct test_agent agent, other_agent;

        for (int i = 0; i < 2; i++) { /* the node that saves nothing has rank 1, or rank 0, which writes the manifest */
                struct test_client *saver = i ? &one : &zero, *idle = i ? &zero : &one;

                place_init(&place);
                place_init(&other);
                strcpy(other.storage, place.storage);
                agent = agent_run(&place);
                other_agent = agent_run(&other);
                REQUIRE(enter(&zero, &place, 0, 0) && enter(&one, &other, 1, 0));
                version = save_share(saver, "t", NEBULA_FILES_ALL_RANKS, 1);
                empty = begin(idle, "t", NEBULA_FILES_ALL_RANKS);
                REQUIRE(version && empty && !of_version(idle, IPC_COMMIT, empty));
                CHECK(!flush(saver, "t", AT_MOST_MS) && !flush(idle, "t", AT_MOST_MS) && !flush(idle, "", AT_MOST_MS));
                CHECK(!wait_for(idle, empty, NEBULA_STATE_DURABLE, AT_MOST_MS) && document_comes("t", "manifest-1.json"));
                CHECK(!load(idle, empty, i ? "1.pt" : "0.pt", 1, FILE_BYTES, NULL));
                client_done(&zero);
                client_done(&one);
                CHECK(agent_finish(agent, SIGTERM) == 0 && agent_finish(other_agent, SIGTERM) == 0);
                place_done(&place);
                place_done(&other);
        }
}

static bool names_both(struct test_client *client, uint64_t version)
{
        return wait_for(client, version, NEBULA_STATE_DURABLE, AT_MOST_MS) != NEBULA_OK && state_of(client, version) == NEBULA_STATE_FAILED &&
               strstr(client->error.message, "model.pt") && strstr(client->error.message, "rank 0") && strstr(client->error.message, "rank 1");
}

/*
 * fault (Arguments of the caller): Two ranks of different nodes save one name.
 * result: That version fails, and names both ranks and the file. The one before stays.
 */
/* Each node has its own file in memory, but storage has only one place for both. */
static void a_name_that_ranks_of_two_nodes_saved_fails_that_version_and_names_both_and_the_one_before_stays(void)
{
        struct test_client zero, one;
        uint64_t version, other_version;
        struct ipc_found found;
        struct test_agent agent, other_agent;

        setenv("NEBULA_TAKEOVER_S", "1", 1);
        place_init(&place);
        place_init(&other);
        strcpy(other.storage, place.storage);
        agent = agent_run(&place);
        other_agent = agent_run(&other);
        REQUIRE(enter(&zero, &place, 0, 0) && enter(&one, &other, 1, 0));
        version = save_share(&zero, "t", NEBULA_FILES_ALL_RANKS, 1);
        other_version = save_share(&one, "t", NEBULA_FILES_ALL_RANKS, 2);
        CHECK(version && !wait_for(&zero, version, NEBULA_STATE_DURABLE, AT_MOST_MS));
        CHECK(other_version && !wait_for(&one, other_version, NEBULA_STATE_DURABLE, AT_MOST_MS));
        version = save_named(&zero, "t", NEBULA_FILES_ALL_RANKS, "model.pt", 3);
        other_version = save_named(&one, "t", NEBULA_FILES_ALL_RANKS, "model.pt", 4);
        CHECK(version && names_both(&zero, version));
        CHECK(other_version && names_both(&one, other_version));
        client_done(&zero);
        client_done(&one);
        agent_finish(agent, SIGKILL);
        agent_finish(other_agent, SIGKILL);
        os_remove_tree(place.place.memory);
        agent = agent_run(&place); /* with nothing in memory */
        REQUIRE(enter(&zero, &place, 0, 0) && !find(&zero, "", "t", &found) && found.writing == 1);
        CHECK(!load(&zero, found.version_id, "0.pt", 1, FILE_BYTES, NULL) && !load(&zero, found.version_id, "1.pt", 2, FILE_BYTES, NULL));
        client_done(&zero);
        CHECK(agent_finish(agent, SIGTERM) == 0);
        unsetenv("NEBULA_TAKEOVER_S");
        place_done(&place);
        place_done(&other);
}

static bool is_given_up(struct test_client *client, uint64_t version, const char *reason)
{
        struct ipc_fail fail = { .version_id = version };

        strcpy(fail.reason, reason);
        return !ask(client, IPC_FAIL, &fail, sizeof fail);
}

/*
 * fault (Storage): A program gives a checkpoint up on one rank, because its save failed or its block raised, and other
 * ranks are on other nodes.
 * result: Its agent writes that decision into storage, unless another decision is there. The version fails on all nodes
 * within a second or so, with the reason. Later saves are not concerned.
 */
static void a_version_that_a_program_gives_up_on_one_node_fails_on_all_with_the_reason_and_the_tag_can_be_written_again(void)
{
        struct test_client zero, one;
        struct test_agent agent, other_agent;
        uint64_t first, second;

        place_init(&place);
        place_init(&other);
        strcpy(other.storage, place.storage);
        agent = agent_run(&place);
        other_agent = agent_run(&other);
        REQUIRE(enter(&zero, &place, 0, 0) && enter(&one, &other, 1, 0));
        for (int turn = 0; turn < 2; turn++) { /* the share of the other node is announced, then not yet */
                second = begin(&one, "t", NEBULA_FILES_ALL_RANKS);
                if (turn)
                        CHECK(second && is_given_up(&one, second, "the optimizer is on fire"));
                first = save_share(&zero, "t", NEBULA_FILES_ALL_RANKS, 1);
                REQUIRE(first && second);
                if (!turn)
                        CHECK(captured_comes("t", 0) && is_given_up(&one, second, "the optimizer is on fire"));
                CHECK(wait_for(&zero, first, NEBULA_STATE_COMMITTED, AT_MOST_MS) == NEBULA_FAILED);
                CHECK(strstr(zero.error.message, "the optimizer is on fire"));
        }
        first = save_share(&zero, "t", NEBULA_FILES_ALL_RANKS, 2);
        second = save_share(&one, "t", NEBULA_FILES_ALL_RANKS, 3);
        CHECK(first && !wait_for(&zero, first, NEBULA_STATE_DURABLE, AT_MOST_MS));
        CHECK(second && !wait_for(&one, second, NEBULA_STATE_DURABLE, AT_MOST_MS));
        client_done(&zero);
        client_done(&one);
        CHECK(agent_finish(agent, SIGTERM) == 0 && agent_finish(other_agent, SIGTERM) == 0);
        place_done(&place);
        place_done(&other);
}

/* Commits as an agent of rank 0 would that knows only its own rank. */
static bool commit_without_rank_one(const char *tag)
{
        struct committed committed = { .rank_count = 1 };
        struct captured captured;
        char *text;
        size_t size;
        uint32_t zero = 0;
        char path[ANNOUNCE_PATH_MAX];

        text = whole_document(tag, "captured-", &size);
        if (!text || captured_parse(text, size, &captured, NULL))
                return false;
        free(text);
        committed.of = captured.of;
        committed.sequence = captured.sequence;
        committed.ranks = &zero;
        captured_done(&captured);
        if (committed_format(&committed, &text, &size, NULL))
                return false;
        committed_path(&committed.of, path);
        storage_write(place.storage, document_key(tag, path + strlen(MANIFEST_DIRECTORY "/")), text, size);
        free(text);
        return true;
}

static void a_version_that_was_committed_without_the_files_of_a_rank_fails_on_its_node_and_names_it(void)
{
        static const int64_t goals[] = { NEBULA_FILES_OPEN, 2 };

        for (size_t i = 0; i < sizeof goals / sizeof *goals; i++) {
                struct test_client one;
                uint64_t version;
                struct test_agent agent;

                place_init(&place);
                agent = agent_run(&place);
                REQUIRE(enter(&one, &place, 1, 0));
                version = save_share(&one, "t", goals[i], 1);
                REQUIRE(version && captured_comes("t", 1) && commit_without_rank_one("t"));
                CHECK(wait_for(&one, version, NEBULA_STATE_COMMITTED, AT_MOST_MS) == NEBULA_FAILED);
                CHECK(strstr(one.error.message, "rank 1"));
                CHECK(state_of(&one, version) == NEBULA_STATE_FAILED);
                client_done(&one);
                agent_finish(agent, SIGKILL);
                place_done(&place);
        }
}

/* Leaves the document of another node that is still being written. */
static void leave_claim(const char *tag, char ret_name[WRITING_MAX + 32])
{
        char writing[WRITING_MAX];

        writing_name("", "r", 1, 7, writing);
        snprintf(ret_name, WRITING_MAX + 32, "%s.claim-00001.json", writing);
        storage_write(place.storage, document_key(tag, ret_name), "{}", 2);
}

static bool captured_goes(const char *tag)
{
        for (int i = 0; i < 20000 && find_document(tag, "captured-"); i++)
                usleep(10000);
        return !find_document(tag, "captured-");
}

static void a_node_that_gives_a_version_up_takes_its_own_documents_away_and_nothing_of_others(void)
{
        struct test_client zero, one;
        char claim[WRITING_MAX + 32];
        uint64_t torn;
        struct test_agent agent;

        place_init(&place);
        agent = agent_run(&place);
        REQUIRE(enter(&zero, &place, 0, 0));
        torn = save_share(&zero, "torn", NEBULA_FILES_ALL_RANKS, 1);
        REQUIRE(torn && captured_comes("torn", 0));
        leave_claim("torn", claim);
        REQUIRE(enter(&one, &place, 1, 0));
        CHECK(save_share(&zero, "t", NEBULA_FILES_ALL_RANKS, 2) && save_share(&one, "t", NEBULA_FILES_ALL_RANKS, 3));
        CHECK(!flush(&zero, "t", AT_MOST_MS) && captured_goes("torn"));
        usleep(300000);
        CHECK(state_of(&zero, torn) == NEBULA_STATE_FAILED && document_comes("torn", claim));
        client_done(&zero);
        client_done(&one);
        CHECK(agent_finish(agent, SIGTERM) == 0);
        place_done(&place);
}

TAP_MAIN(TEST(what_other_agents_decide_and_a_removal_of_the_decision_block_no_version), TEST(a_record_that_another_program_removes_is_written_again_and_one_of_an_older_run_is_not_taken_for_it),
         TEST(a_node_whose_ranks_saved_nothing_holds_up_nothing),
         TEST(a_node_that_gives_a_version_up_takes_its_own_documents_away_and_nothing_of_others),
         TEST(a_version_that_was_committed_without_the_files_of_a_rank_fails_on_its_node_and_names_it),
         TEST(a_version_that_a_program_gives_up_on_one_node_fails_on_all_with_the_reason_and_the_tag_can_be_written_again),
         TEST(a_name_that_ranks_of_two_nodes_saved_fails_that_version_and_names_both_and_the_one_before_stays),
         TEST(nodes_go_on_to_write_a_removed_tag_together_when_the_agent_of_one_has_forgotten_it),
         TEST(nodes_go_on_to_write_a_tag_together_when_the_agent_of_one_has_forgotten_how_often_they_did),
         TEST(a_version_of_which_another_node_never_captured_its_share_is_waited_for_so_long_and_complete_should_it_come),
         TEST(a_version_that_was_announced_before_the_other_rank_of_the_node_joined_becomes_durable),
         TEST(a_version_of_a_dead_node_fails_and_names_its_rank_and_becomes_durable_if_the_node_comes_back))
