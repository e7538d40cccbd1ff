/* Versions that storage has damaged, on a storage that answers slowly. */
#include "agent/agent_client.h"
#include "agent/catalogue/catalogue.h"
#include "tap.h"

#define CHUNK ((size_t)4 << 20)
#define CHUNKS 5

static struct test_place place;
static struct test_client client;
static struct agent *agent;
static _Atomic bool is_held; /* the file's chunks are not read as long as the agent does not end */
static _Atomic int read_count;

static struct catalogue *its_catalogue(void)
{
        return (struct catalogue *)agent; /* its first member */
}

static bool is_stopping(void)
{
        bool is_so;

        catalogue_lock(its_catalogue());
        is_so = its_catalogue()->stopping;
        catalogue_unlock(its_catalogue());
        return is_so;
}

static bool has_doubts(void)
{
        bool is_so;

        catalogue_lock(its_catalogue());
        is_so = its_catalogue()->doubted_count > 0;
        catalogue_unlock(its_catalogue());
        return is_so;
}

static int held_open(const char *root, const char *key, int flags)
{
        if (is_held && !strcmp(key, "step1/m")) {
                read_count++;
                while (is_held && !is_stopping())
                        usleep(1000);
        }
        return os_linux.open_below(root, key, flags);
}

static uint32_t one_cpu(void)
{
        return 1;
}

static void damage(void)
{
        char path[256];
        FILE *file;

        snprintf(path, sizeof path, "%s/step1/m", place.storage);
        file = fopen(path, "r+");
        REQUIRE(file && !fseek(file, (long)((CHUNKS - 1) * CHUNK), SEEK_SET) && fputc(~byte_at(1, (CHUNKS - 1) * CHUNK), file) != EOF);
        fclose(file);
        catalogue_lock(its_catalogue());
        catalogue_judge_copies(its_catalogue(), its_catalogue()->jobs->persist_path, "step1", 0, false, "a reader has found damage");
        catalogue_unlock(its_catalogue());
}

static void set_up(void)
{
        static struct os_table table;
        struct nebula_error error;
        uint64_t version;

        if (!table.open_below) { /* once: a thread of the agent before may still read the table */
                table = os_linux;
                table.open_below = held_open;
                table.cpu_count = one_cpu; /* so two threads read */
        }
        os = &table;
        read_count = 0;
        place_init(&place);
        client_init(&client, &place, 1);
        REQUIRE(!agent_start(&place.place, true, &agent, &error) && !client_connect(&client, &place));
        version = begin(&client, "step1", 1);
        REQUIRE(version && !save(&client, version, "m", 1, CHUNKS * CHUNK) && !wait_for(&client, version, NEBULA_STATE_DURABLE, 60000));
        is_held = true;
        damage();
        for (int i = 0; i < 6000 && read_count < 2; i++)
                usleep(10000);
        CHECK(read_count == 2);
}

static void tear_down(void)
{
        client_done(&client);
        agent_stop(agent, true);
        place_done(&place);
        os = &os_linux;
        is_held = false;
}

/* fault (Storage): Storage answers slowly while the agent compares a damaged version with it.
 * result: Newer versions become durable meanwhile, and an agent that is to end ends. */
static void new_versions_become_durable_while_a_damaged_one_is_compared_with_slow_storage(void)
{
        uint64_t version;

        set_up();
        version = begin(&client, "step2", 1);
        REQUIRE(version && !save(&client, version, "m", 2, FILE_BYTES));
        CHECK(!wait_for(&client, version, NEBULA_STATE_DURABLE, 20000));
        is_held = false;
        for (int i = 0; i < 6000 && has_doubts(); i++)
                usleep(10000);
        CHECK(!has_doubts());
        tear_down();
}

static void the_comparison_with_storage_ends_with_the_agent_after_the_chunk_that_is_read(void)
{
        set_up();
        tear_down();
        CHECK(read_count == 2);
}

TAP_MAIN(TEST(new_versions_become_durable_while_a_damaged_one_is_compared_with_slow_storage),
         TEST(the_comparison_with_storage_ends_with_the_agent_after_the_chunk_that_is_read))
