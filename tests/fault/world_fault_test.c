/*
 * Two nodes write one version together. Each of their requests to an object store fails once, or succeeds and its answer gets lost.
 * Both nodes end with the version durable and complete. When the tag is written again, it is the older or the newer version at every
 * moment.
 */
#include "agent/agent_catalogue.h"
#include "agent/commit/world.h"
#include "store/manifest_load.h"
#include "store/store_mem.h"
#include "store/tag_log.h"
#include "tap.h"

#define STORAGE "mem://world-fault"
#define ROUNDS_MAX 60

static struct bench nodes[2];
static struct version *versions[2];

static void begin_node(uint32_t i)
{
        struct store *store;

        bench_init(&nodes[i], NULL, STORAGE);
        nodes[i].catalogue.takeover_s = 30;
        nodes[i].catalogue.sweep_age_s = 900;
        nodes[i].job->settings.world = nodes[i].session.world = 2;
        nodes[i].job->settings.local_world = 1;
        nodes[i].session.rank = i;
        nodes[i].session.nonce = i + 1;
        strcpy(nodes[i].job->run, "r");
        strcpy(nodes[i].session.run, "r");
        if (storage_open(&nodes[i].catalogue, nodes[i].job, &store, NULL))
                abort();
}

static void begin(void)
{
        store_mem_allow();
        store_mem_forget(STORAGE);
        for (uint32_t i = 0; i < 2; i++)
                begin_node(i);
}

static void end(void)
{
        for (int i = 0; i < 2; i++)
                bench_done(&nodes[i], true);
}

/* Each rank saves one file: a or b. */
static void save(unsigned seed)
{
        for (unsigned i = 0; i < 2; i++) {
                versions[i] = bench_version(&nodes[i], "step1", i ? 0 : seed, i ? seed + 1 : 0);
                if (!versions[i] || !versions[i]->is_spread)
                        abort();
        }
}

/* The worker's work, without its pauses. */
static void work(int i)
{
        struct version *version = versions[i];
        int64_t due = INT64_MAX;
        bool is_complete;

        catalogue_lock(&nodes[i].catalogue);
        for (int j = 0; j < 3; j++) {
                version->nodes->poll_at_ns = version->persist->retry_at_ns = 0;
                world_work(&nodes[i].catalogue, nodes[i].job, os->now_ns(), &due);
        }
        is_complete = lifecycle_complete(version->life.state) && !version->stored;
        catalogue_unlock(&nodes[i].catalogue);
        if (is_complete)
                bench_persist(&nodes[i], version);
}

/* The seed of the version in storage; 0: none; -1: incomplete or a mixture. */
static int seed_in_storage(const unsigned *seeds)
{
        struct store *store = nodes[0].job->storage->store;
        struct manifest manifest = { 0 };
        struct nebula_error error;
        enum nebula_status status = manifest_load(store, "step1", &manifest, &error);
        int result = -1;

        if (status)
                return status == NEBULA_NOT_FOUND ? 0 : -1;
        for (; *seeds; seeds++)
                if (manifest.file_count == 2 && stored_holds(store, &manifest, "a", *seeds) && stored_holds(store, &manifest, "b", *seeds + 1))
                        result = (int)*seeds;
        manifest_done(&manifest);
        return result;
}

static bool loses_answers;
static uint64_t left; /* requests, or writes, until one fails; 0: it has failed */

/* Only the agents' requests count. */
static void work_with_fault(int i)
{
        struct store *store = nodes[0].job->storage->store;
        struct mem_faults faults = { .fail_at = loses_answers ? 0 : left, .lose_at = loses_answers ? left : 0 };
        uint64_t used;

        store_mem_faults(store, &faults);
        work(i);
        used = loses_answers ? store_mem_writes(store) : store_mem_calls(store);
        store_mem_faults(store, NULL);
        left = used < left ? left - used : 0;
}

static void make_durable(const unsigned *seeds, bool is_written_again)
{
        for (int round = 0; round < ROUNDS_MAX && !(versions[0]->stored && versions[1]->stored); round++) {
                int found;

                work_with_fault(round % 2);
                found = seed_in_storage(seeds);
                CHECK(is_written_again ? found > 0 : found >= 0);
        }
        CHECK(versions[0]->stored && versions[1]->stored && seed_in_storage(seeds) == (is_written_again ? 5 : 1));
}

/* Another agent has taken the place of that of node 0, if `is_new`. It does not know how often the run wrote the tag. */
static bool write_once(uint64_t at, bool is_new)
{
        static const unsigned first[] = { 1, 0 }, both[] = { 1, 5, 0 };
        bool was_hit;

        begin();
        left = is_new ? 0 : at;
        save(1);
        make_durable(first, false);
        if (is_new) {
                bench_done(&nodes[0], true);
                begin_node(0);
                left = at;
        }
        save(5);
        make_durable(both, true);
        was_hit = !left;
        if (tap_failed_checks)
                printf("# %s %d: %s; %s\n", loses_answers ? "the answer is lost to write" : "request", (int)at, nodes[0].error.message,
                       nodes[1].error.message);
        end();
        return was_hit;
}

/*
 * fault (Storage): Another agent takes the place of a node's agent in the middle of a run, and storage fails while it
 * counts how often the run wrote the tag.
 * result: It announces its version when it has counted. The older version of the tag is not taken for it.
 */
static void a_version_of_two_nodes_becomes_durable_whichever_request_fails(void)
{
        for (int i = 0; i < 4 && !tap_failed_checks; i++) {
                uint64_t at = 0;

                loses_answers = i % 2;
                while (write_once(++at, i / 2) && !tap_failed_checks)
                        ;
                CHECK(at > (i ? 10 : 20));
        }
}

static const struct store_ops *stored_ops;
static const char *taken; /* a part of the key of the object that another program removes once the manifest exists */

static enum nebula_status put_and_lose(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                       const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        enum nebula_status status = stored_ops->put(store, key, data, size, condition, seen, ret_stamp, error);
        struct store_list list;

        if (!taken || !strstr(key, "/manifest-"))
                return status;
        if (store_list_all(store, "step1/", true, &list, NULL))
                abort();
        for (size_t i = 0; i < list.count; i++)
                if (strstr(list.entries[i].key, taken) && store_remove_one(store, list.entries[i].key, NULL))
                        abort();
        store_list_done(&list);
        taken = NULL;
        return status;
}

/* A node that has waited for a second checks that its records still exist. */
static void wait_long(void)
{
        for (int i = 0; i < 2; i++) {
                catalogue_lock(&nodes[i].catalogue);
                versions[i]->nodes->waiting_since_ns -= INT64_C(2000000000);
                versions[i]->nodes->poll_count = 0;
                catalogue_unlock(&nodes[i].catalogue);
        }
        os->sleep_ms(50);
}

static void a_version_of_two_nodes_is_written_again_when_another_program_has_removed_some_of_it(void)
{
        static const char *const objects[] = { "step1/a", "step1/b", ".record-00000.json", ".record-00001.json", "/manifest-1.json" };
        static const unsigned seeds[] = { 1, 0 };

        for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) {
                struct store_ops ops;
                struct store *store;

                begin();
                store = nodes[0].job->storage->store;
                stored_ops = store->ops;
                ops = *stored_ops;
                taken = objects[i];
                ops.put = put_and_lose;
                store->ops = &ops;
                save(1);
                for (int round = 0; round < ROUNDS_MAX && !(versions[0]->stored && versions[1]->stored); round++) {
                        work(round % 2);
                        wait_long();
                }
                CHECK(!taken && versions[0]->stored && versions[1]->stored && seed_in_storage(seeds) == 1);
                if (tap_failed_checks)
                        printf("# %s: %s; %s\n", objects[i], nodes[0].error.message, nodes[1].error.message);
                store->ops = stored_ops;
                end();
        }
}

static struct store_list seen; /* by a removal that sleeps */
static int records_until_removal;

/* Once both records exist, another program lists the tag, enters its removal, and sleeps. */
static enum nebula_status put_and_enter_removal(struct store *store, const char *key, const void *data, uint64_t size,
                                                enum store_condition condition, const struct store_stamp *stamp, struct store_stamp *ret_stamp,
                                                struct nebula_error *error)
{
        enum nebula_status status = stored_ops->put(store, key, data, size, condition, stamp, ret_stamp, error);
        struct removal removal = { "step1", 1 };
        char *text;
        size_t text_size;

        if (status || !strstr(key, ".record-") || !records_until_removal || --records_until_removal)
                return status;
        if (store_list_all(store, "step1/", true, &seen, NULL) || removal_format(&removal, &text, &text_size, NULL) ||
            tag_log_create(store, "step1", 1, text, text_size, NULL))
                abort();
        free(text);
        return status;
}

static void wake_removal(struct store *store)
{
        for (size_t i = 0; i < seen.count; i++) {
                const struct store_victim victim = { seen.entries[i].key, seen.entries[i].stamp };

                if (store->ops->remove(store, &victim, 1, NULL))
                        abort();
        }
        if (tag_log_set_removed(store, "step1", 1, NULL) || tag_log_take_back(store, "step1", 1, NULL))
                abort();
        store_list_done(&seen);
}

static void objects_that_a_sleeping_removal_has_listed_are_in_no_later_manifest(void)
{
        static const unsigned seeds[] = { 1, 0 };
        struct store_ops ops;

        begin();
        stored_ops = nodes[0].job->storage->store->ops;
        ops = *stored_ops;
        ops.put = put_and_enter_removal;
        for (int i = 0; i < 2; i++)
                nodes[i].job->storage->store->ops = &ops;
        records_until_removal = 2;
        save(1);
        for (int round = 0; round < ROUNDS_MAX && !(versions[0]->stored && versions[1]->stored); round++) {
                work(round % 2);
                wait_long();
        }
        for (int i = 0; i < 2; i++)
                nodes[i].job->storage->store->ops = stored_ops;
        CHECK(!records_until_removal && seen.count && versions[0]->stored && versions[1]->stored && seed_in_storage(seeds) == 1);
        wake_removal(nodes[0].job->storage->store);
        CHECK(seed_in_storage(seeds) == 1);
        if (tap_failed_checks)
                printf("# %s; %s\n", nodes[0].error.message, nodes[1].error.message);
        end();
}

TAP_MAIN(TEST(a_version_of_two_nodes_becomes_durable_whichever_request_fails),
         TEST(a_version_of_two_nodes_is_written_again_when_another_program_has_removed_some_of_it),
         TEST(objects_that_a_sleeping_removal_has_listed_are_in_no_later_manifest))
