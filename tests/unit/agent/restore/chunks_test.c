/* A trainer needs parts of a file that lies in an object store: the agent reads these and no others, once for all trainers. */
#include <pthread.h>

#include "agent/agent_catalogue.h"
#include "agent/agent_storage.h"
#include "agent/catalogue/memory_policy.h"
#include "agent/memory/page_maker.h"
#include "agent/restore/restore.h"
#include "image/image.h"
#include "store/counts.h"
#include "store/manifest_load.h"
#include "store/manifest_remove.h"
#include "tap.h"

#define CHUNKS 5u
#define SIZE ((CHUNKS - 1) * (uint64_t)IMAGE_CHUNK_BYTES + 12345)

struct shelf {
        struct bench bench;
        char storage[256];
        uint64_t version_id;
};

static uint64_t bytes_read(void)
{
        struct store_counts counts;

        for (size_t index = 0; store_counts_next(&index, &counts);)
                if (!strcmp(counts.scheme, "mem"))
                        return counts.read_bytes;
        return 0;
}

/* A stored version with one file, which has left memory. */
static void shelf_init(struct shelf *shelf)
{
        struct version *version;
        uint64_t id;

        storage_make(shelf->storage);
        bench_init(&shelf->bench, NULL, shelf->storage);
        catalogue_lock(&shelf->bench.catalogue);
        version = commit_begin(&shelf->bench.catalogue, &shelf->bench.session, "step1", NEBULA_FILES_ALL_RANKS, &shelf->bench.error);
        id = version ? version->id : 0;
        catalogue_unlock(&shelf->bench.catalogue);
        if (!id || bench_save_bytes(&shelf->bench, &id, "a", 3, SIZE))
                abort();
        catalogue_lock(&shelf->bench.catalogue);
        version = catalogue_version(&shelf->bench.catalogue, id);
        if (!version || commit_part(&shelf->bench.catalogue, &shelf->bench.session, version, &shelf->bench.error))
                abort();
        catalogue_unlock(&shelf->bench.catalogue);
        if (bench_persist(&shelf->bench, version))
                abort();
        version_forget_memory(&shelf->bench.catalogue, version);
        shelf->version_id = id;
}

static void shelf_done(struct shelf *shelf)
{
        bench_done(&shelf->bench, true);
        storage_remove(shelf->storage);
}

struct opened {
        uint64_t size, image_id;
        uint32_t chunk_bytes, chunk_count;
        const unsigned char *data;
};

static enum nebula_status open_file(struct shelf *shelf, bool reads_parts, struct opened *ret_opened)
{
        struct ipc_open request = { .version_id = shelf->version_id, .reads_storage = reads_parts ? IPC_READS_PARTS : IPC_READS_WHOLE, .name = "a" };
        struct ipc_opened *opened;
        void *data;
        int fd;
        enum nebula_status status = restore_open(&shelf->bench.catalogue, &shelf->bench.session, &request, &opened, &fd, &shelf->bench.error);

        if (status)
                return status;
        if (os->map(fd, 0, SIZE, OS_MAP_READ | OS_MAP_PRIVATE, &data))
                abort();
        os->close(fd);
        *ret_opened = (struct opened){ opened->size, opened->image_id, opened->chunk_bytes, opened->chunk_count, data };
        free(opened);
        return NEBULA_OK;
}

static void close_file(const struct opened *opened)
{
        os->unmap((void *)(uintptr_t)opened->data, SIZE);
}

static enum nebula_status fetch(struct shelf *shelf, uint64_t image_id, uint32_t first, uint32_t count)
{
        struct ipc_fetch request = { .image_id = image_id, .run_count = 1, .runs = { { first, count } } };

        return restore_fetch(&shelf->bench.catalogue, &request, &shelf->bench.error);
}

static bool has_chunk(const struct opened *opened, uint32_t chunk)
{
        uint64_t offset = chunk * (uint64_t)IMAGE_CHUNK_BYTES, end = offset + IMAGE_CHUNK_BYTES < SIZE ? offset + IMAGE_CHUNK_BYTES : SIZE;

        for (; offset < end; offset++)
                if (opened->data[offset] != bench_byte(3, offset))
                        return false;
        return true;
}

static uint64_t memory_used(const struct shelf *shelf)
{
        return shelf->bench.catalogue.memory->used;
}

static void the_chunks_that_are_asked_for_are_read_once_and_no_others(void)
{
        struct shelf shelf;
        struct opened first, second;
        uint64_t before, used;

        shelf_init(&shelf);
        REQUIRE(!open_file(&shelf, true, &first));
        CHECK(first.size == SIZE && first.chunk_count == CHUNKS && first.image_id);
        before = bytes_read();
        used = memory_used(&shelf);
        CHECK(!fetch(&shelf, first.image_id, 1, 1) && has_chunk(&first, 1) && bytes_read() - before == IMAGE_CHUNK_BYTES);
        CHECK(memory_used(&shelf) - used == IMAGE_CHUNK_BYTES);
        REQUIRE(!open_file(&shelf, true, &second));
        CHECK(second.image_id == first.image_id && has_chunk(&second, 1));
        CHECK(!fetch(&shelf, second.image_id, 1, 1) && bytes_read() - before == IMAGE_CHUNK_BYTES);
        CHECK(!fetch(&shelf, second.image_id, 1, 2) && has_chunk(&first, 2) && bytes_read() - before == 2 * IMAGE_CHUNK_BYTES);
        CHECK(!has_chunk(&first, 0) && !has_chunk(&first, 4));
        CHECK(fetch(&shelf, first.image_id, CHUNKS, 1) == NEBULA_INVALID && fetch(&shelf, first.image_id, 2, UINT32_MAX) == NEBULA_INVALID);
        close_file(&first);
        close_file(&second);
        shelf_done(&shelf);
}

static void who_needs_the_whole_file_gets_the_rest_of_it(void)
{
        struct shelf shelf;
        struct opened part, whole;
        uint64_t before;

        shelf_init(&shelf);
        REQUIRE(!open_file(&shelf, true, &part));
        before = bytes_read();
        CHECK(!fetch(&shelf, part.image_id, 3, 1));
        REQUIRE(!open_file(&shelf, false, &whole));
        CHECK(!whole.image_id && !whole.chunk_bytes && bytes_read() - before == SIZE);
        for (uint32_t i = 0; i < CHUNKS; i++)
                CHECK(has_chunk(&whole, i) && has_chunk(&part, i));
        CHECK(!fetch(&shelf, part.image_id, 0, CHUNKS) && bytes_read() - before == SIZE);
        close_file(&whole);
        REQUIRE(!open_file(&shelf, true, &whole));
        CHECK(!whole.chunk_bytes && bytes_read() - before == SIZE);
        close_file(&whole);
        close_file(&part);
        shelf_done(&shelf);
}

static void an_image_that_had_to_make_room_is_to_be_opened_again(void)
{
        struct shelf shelf;
        struct opened first, second;
        uint64_t used;

        shelf_init(&shelf);
        catalogue_lock(&shelf.bench.catalogue);
        while (policy_reclaim(&shelf.bench.catalogue) || page_maker_discard(&shelf.bench.catalogue))
                ;
        catalogue_unlock(&shelf.bench.catalogue);
        used = memory_used(&shelf);
        REQUIRE(!open_file(&shelf, true, &first));
        CHECK(!fetch(&shelf, first.image_id, 0, 2));
        catalogue_lock(&shelf.bench.catalogue);
        CHECK(policy_drop_restored(&shelf.bench.catalogue) && !policy_drop_restored(&shelf.bench.catalogue));
        page_maker_discard(&shelf.bench.catalogue);
        catalogue_unlock(&shelf.bench.catalogue);
        CHECK(memory_used(&shelf) == used && has_chunk(&first, 1));
        CHECK(fetch(&shelf, first.image_id, 0, 1) == NEBULA_BUSY);
        REQUIRE(!open_file(&shelf, true, &second));
        CHECK(second.image_id != first.image_id && !fetch(&shelf, second.image_id, 0, 1) && has_chunk(&second, 0));
        close_file(&first);
        close_file(&second);
        shelf_done(&shelf);
}

static void a_chunk_that_is_damaged_fails_and_the_others_do_not(void)
{
        struct store *store;
        struct shelf shelf;
        struct opened opened;
        char *bytes;
        uint64_t used;

        shelf_init(&shelf);
        store = shelf.bench.job->storage->store;
        REQUIRE(bytes = malloc(SIZE));
        for (uint64_t i = 0; i < SIZE; i++)
                bytes[i] = (char)bench_byte(3, i);
        bytes[IMAGE_CHUNK_BYTES + 17] ^= 1;
        REQUIRE(!store->ops->put(store, "step1/a", bytes, SIZE, STORE_ALWAYS, NULL, NULL, &shelf.bench.error));
        REQUIRE(!open_file(&shelf, true, &opened));
        used = memory_used(&shelf);
        CHECK(fetch(&shelf, opened.image_id, 0, 2) == NEBULA_CORRUPT && strstr(shelf.bench.error.message, "step1/a: damaged between byte 4194304"));
        CHECK(memory_used(&shelf) == used);
        CHECK(!fetch(&shelf, opened.image_id, 0, 1) && !fetch(&shelf, opened.image_id, 2, 3) && has_chunk(&opened, 0) && has_chunk(&opened, 4));
        bytes[IMAGE_CHUNK_BYTES + 17] ^= 1;
        REQUIRE(!store->ops->put(store, "step1/a", bytes, SIZE, STORE_ALWAYS, NULL, NULL, &shelf.bench.error));
        CHECK(!fetch(&shelf, opened.image_id, 1, 1) && has_chunk(&opened, 1));
        free(bytes);
        close_file(&opened);
        shelf_done(&shelf);
}

static void a_version_that_was_removed_meanwhile_is_to_be_looked_up_again(void)
{
        struct manifest manifest;
        struct shelf shelf;
        struct opened opened;

        shelf_init(&shelf);
        REQUIRE(!open_file(&shelf, true, &opened));
        REQUIRE(!manifest_load(shelf.bench.job->storage->store, "step1", &manifest, &shelf.bench.error));
        REQUIRE(!manifest_remove(shelf.bench.job->storage->store, &manifest, &shelf.bench.error));
        CHECK(fetch(&shelf, opened.image_id, 0, 1) == NEBULA_NOT_FOUND && strstr(shelf.bench.error.message, "look it up once more"));
        manifest_done(&manifest);
        close_file(&opened);
        shelf_done(&shelf);
}

struct rank {
        struct shelf *shelf;
        uint64_t image_id;
        uint32_t first;
        enum nebula_status status;
};

static void *run_rank(void *argument)
{
        struct rank *rank = argument;
        struct ipc_fetch request = { .image_id = rank->image_id, .run_count = 1, .runs = { { rank->first, 3 } } };
        struct nebula_error error;

        rank->status = restore_fetch(&rank->shelf->bench.catalogue, &request, &error);
        return NULL;
}

static void ranks_that_ask_at_the_same_time_share_one_reading(void)
{
        static const struct mem_faults slow = { .latency_ms = 50 };
        struct rank ranks[6];
        pthread_t threads[6];
        struct shelf shelf;
        struct opened opened;
        uint64_t before;

        shelf_init(&shelf);
        REQUIRE(!open_file(&shelf, true, &opened));
        store_mem_faults(shelf.bench.job->storage->store, &slow);
        before = bytes_read();
        for (uint32_t i = 0; i < 6; i++) {
                ranks[i] = (struct rank){ &shelf, opened.image_id, i % 3, NEBULA_INTERNAL };
                REQUIRE(!pthread_create(&threads[i], NULL, run_rank, &ranks[i]));
        }
        for (uint32_t i = 0; i < 6; i++) {
                pthread_join(threads[i], NULL);
                CHECK(ranks[i].status == NEBULA_OK);
        }
        CHECK(bytes_read() - before == SIZE);
        for (uint32_t i = 0; i < CHUNKS; i++)
                CHECK(has_chunk(&opened, i));
        close_file(&opened);
        shelf_done(&shelf);
}

int main(void)
{
        static const struct tap_test tests[] = {
                TEST(the_chunks_that_are_asked_for_are_read_once_and_no_others), TEST(who_needs_the_whole_file_gets_the_rest_of_it),
                TEST(an_image_that_had_to_make_room_is_to_be_opened_again), TEST(a_chunk_that_is_damaged_fails_and_the_others_do_not),
                TEST(a_version_that_was_removed_meanwhile_is_to_be_looked_up_again), TEST(ranks_that_ask_at_the_same_time_share_one_reading),
        };

        setenv("NEBULA_TEST_STORE", "mem", 1); /* a file system lends descriptors instead */
        return tap_run(tests, sizeof tests / sizeof tests[0]);
}
