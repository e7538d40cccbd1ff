/* Bytes that storage already has from an earlier version are not sent again, and each version is complete. */
#include <errno.h>

#include "agent/agent_client.h"
#include "image/image.h"
#include "store/manifest.h"
#include "store/manifest_load.h"
#include "store/verify.h"
#include "tap.h"

#define CHUNK ((size_t)IMAGE_CHUNK_BYTES)
#define CHUNKS 6u
#define SIZE ((CHUNKS - 1) * CHUNK + 777)
#define XFS 0x58465342

static struct test_place place;
static struct test_client client;
static struct agent *agent;
static struct os_table table;
static unsigned char *content; /* the bytes of the next save */
static _Atomic int clone_result, publish_result; /* 0: the call works; publish_result applies to one call */

static int space_of_xfs(const char *path, struct os_space *ret_space)
{
        int result = os_linux.space(path, ret_space);

        ret_space->fs_type = XFS;
        return result;
}

/* Simulates a file system that can share blocks. */
static int clone_by_copy(int fd, int from, uint64_t offset, uint64_t size)
{
        char path[64], *bytes = malloc(size);
        int other;
        int64_t count;

        if (clone_result) {
                free(bytes);
                return clone_result;
        }
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        other = os_linux.open(path, OS_WRITE);
        count = os_linux.pread(from, bytes, size, offset);
        count = os_linux.pwrite(other, bytes, (size_t)count, offset);
        os_linux.close(other);
        free(bytes);
        return (uint64_t)count == size ? 0 : -EIO;
}

static int link_once(const char *root, const char *key, const char *to_root, const char *to)
{
        int result = strstr(to, "model.pt") ? atomic_exchange(&publish_result, 0) : 0;

        return result ? result : os_linux.link_below(root, key, to_root, to);
}

static bool begin_agent(uint64_t nonce)
{
        struct nebula_error error;

        client_init(&client, &place, nonce);
        client.hello.retention_count = 4;
        return !agent_start(&place.place, true, &agent, &error) && !client_connect(&client, &place);
}

static void end_agent(void)
{
        client_done(&client);
        agent_stop(agent, true);
}

static bool set_up(uint64_t nonce)
{
        table = os_linux;
        table.space = space_of_xfs;
        table.clone_range = clone_by_copy;
        table.link_below = link_once;
        os = &table;
        clone_result = publish_result = 0;
        place_init(&place);
        content = malloc(SIZE);
        for (size_t i = 0; i < SIZE; i++)
                content[i] = byte_at(3, i);
        return begin_agent(nonce);
}

static void tear_down(void)
{
        end_agent();
        place_done(&place);
        free(content);
        os = &os_linux;
}

/* Saves `content`. True: it became durable. */
static bool save_content(const char *tag)
{
        struct ipc_image request = { .version_id = begin(&client, tag, NEBULA_FILES_ALL_RANKS), .size = SIZE, .format = IPC_FORMAT_RAW };
        struct ipc_granted loan;
        unsigned char *data;

        strcpy(request.name, "model.pt");
        if (ask(&client, IPC_IMAGE, &request, sizeof request))
                return false;
        memcpy(&loan, client.frame.payload, sizeof loan);
        data = mmap(NULL, loan.capacity_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, client.frame.fd, 0);
        if (data == MAP_FAILED)
                return false;
        memcpy(data, content, SIZE);
        munmap(data, loan.capacity_bytes);
        return !captured(&client, loan.image_id) && !of_version(&client, IPC_COMMIT, loan.version_id) &&
               !flush(&client, tag, 30000) && !wait_for(&client, loan.version_id, NEBULA_STATE_DURABLE, 30000);
}

static void count_file(void *argument, const struct manifest_file *file, enum nebula_status status, const struct nebula_error *error)
{
        (void)file;
        (void)error;
        *(int *)argument += !status;
}

/* Returns the number of bytes of the version that were sent. UINT64_MAX: the version is not complete. */
static uint64_t sent_of(const char *tag)
{
        struct store *store = storage_look(place.storage);
        struct manifest manifest = { 0 };
        struct nebula_error error;
        uint64_t sent = UINT64_MAX;
        int sound = 0;

        if (!manifest_load(store, tag, &manifest, &error) && !manifest_verify(store, &manifest, NULL, count_file, &sound, &error) && sound == 1)
                sent = manifest_written(&manifest);
        manifest_done(&manifest);
        store_close(store);
        return sent;
}

static bool holds_content(const char *key)
{
        size_t size;
        char *data = storage_read(place.storage, key, &size);
        bool same = data && size == SIZE && !memcmp(data, content, SIZE);

        free(data);
        return same;
}

static void a_version_writes_what_differs_from_the_one_before(void)
{
        REQUIRE(set_up(71) && save_content("global_step1"));
        CHECK(sent_of("global_step1") == SIZE);
        content[2 * CHUNK + 5] ^= 1;
        CHECK(save_content("global_step2") && sent_of("global_step2") == CHUNK && holds_content("global_step2/model.pt"));
        CHECK(save_content("global_step3") && sent_of("global_step3") == 0 && holds_content("global_step3/model.pt"));
        content[SIZE - 1] ^= 1;
        CHECK(save_content("global_step3") && sent_of("global_step3") == SIZE % CHUNK); /* the tag is written again */
        end_agent();
        REQUIRE(begin_agent(72)); /* the agent knows the versions only from storage */
        content[7] ^= 1;
        CHECK(save_content("global_step4") && sent_of("global_step4") == CHUNK && holds_content("global_step4/model.pt"));
        storage_take_away(place.storage, "global_step1/model.pt");
        storage_take_away(place.storage, "global_step2/model.pt");
        CHECK(sent_of("global_step4") == CHUNK); /* the version is complete by itself */
        tear_down();
}

/*
 * fault (Storage): A new version takes over unchanged bytes of an earlier one, which is removed or overwritten
 * meanwhile, or whose storage refuses.
 * result: The agent writes the new version as a whole.
 */
static void a_source_that_is_gone_or_another_object_costs_nothing_but_sending(void)
{
        unsigned char *other;

        REQUIRE(set_up(73) && save_content("global_step1"));
        storage_take_away(place.storage, "global_step1/model.pt");
        CHECK(save_content("global_step2") && sent_of("global_step2") == SIZE && holds_content("global_step2/model.pt"));
        other = calloc(1, SIZE);
        usleep(20000); /* a tick of the file system's clock */
        storage_write(place.storage, "global_step2/model.pt", other, SIZE);
        free(other);
        CHECK(save_content("global_step3") && sent_of("global_step3") == SIZE && holds_content("global_step3/model.pt"));
        tear_down();
}

static void change_all(void)
{
        for (size_t i = 0; i < SIZE; i += CHUNK)
                content[i]++;
}

/* A comparison costs time: after two versions without equal bytes the agent skips one version, then three. */
static void a_job_that_changes_everything_is_looked_at_ever_more_seldom(void)
{
        /* 'x': all bytes differ from the version before; '=': none do; 'w': none do, and all are written all the same. */
        static const char saves[] = "xxw=xxwxwww=";
        char tag[32];

        REQUIRE(set_up(77) && save_content("global_step1"));
        for (unsigned i = 0; saves[i]; i++) {
                snprintf(tag, sizeof tag, "global_step%u", i + 2);
                if (saves[i] == 'x')
                        change_all();
                CHECK(save_content(tag) && sent_of(tag) == (saves[i] == '=' ? 0 : SIZE));
        }
        tear_down();
}

static void a_file_system_that_shares_no_blocks_gets_all_bytes(void)
{
        NEEDS_FILES("blocks of files");
        REQUIRE(set_up(74) && save_content("global_step1"));
        clone_result = -EOPNOTSUPP;
        CHECK(save_content("global_step2") && sent_of("global_step2") == SIZE && holds_content("global_step2/model.pt"));
        tear_down();
}

/* fault: as a_source_that_is_gone_or_another_object_costs_nothing_but_sending */
/* The failure comes after the store has taken bytes from the source, and before the object is visible. */
static void a_failure_before_the_publication_is_made_up_for_by_the_next_try(void)
{
        NEEDS_FILES("a link that fails");
        REQUIRE(set_up(75) && save_content("global_step1"));
        content[9] ^= 1;
        publish_result = -EIO;
        CHECK(save_content("global_step2") && sent_of("global_step2") == CHUNK && holds_content("global_step2/model.pt"));
        CHECK(!publish_result);
        tear_down();
}

/* fault: as a_source_that_is_gone_or_another_object_costs_nothing_but_sending */
/* Each call of a write fails once, also those that examine the source and take bytes from it. */
static void after_any_failed_call_the_version_is_whole(void)
{
        if (!storage_is_mem())
                SKIP("mem counts calls");
        REQUIRE(set_up(76) && save_content("global_step1"));
        for (unsigned k = 1; k <= 10; k++) {
                struct store *store = storage_look(place.storage);
                char tag[32], key[64];
                uint64_t sent;

                snprintf(tag, sizeof tag, "global_step%u", k + 1);
                snprintf(key, sizeof key, "%s/model.pt", tag);
                content[k] ^= 1;
                store_mem_faults(store, &(struct mem_faults){ .fail_at = 2 * k });
                CHECK(save_content(tag) && holds_content(key));
                store_mem_faults(store, NULL); /* a save may make fewer calls */
                store_close(store);
                sent = sent_of(tag);
                CHECK(sent >= CHUNK && sent <= SIZE);
        }
        tear_down();
}

TAP_MAIN(TEST(a_version_writes_what_differs_from_the_one_before), TEST(a_source_that_is_gone_or_another_object_costs_nothing_but_sending),
         TEST(a_job_that_changes_everything_is_looked_at_ever_more_seldom), TEST(a_file_system_that_shares_no_blocks_gets_all_bytes), TEST(a_failure_before_the_publication_is_made_up_for_by_the_next_try),
         TEST(after_any_failed_call_the_version_is_whole))
