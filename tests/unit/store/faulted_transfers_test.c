/* Transfers to a server that simulates faults (NEBULA_TEST_FAULTS, tests/servers/http_server.py): each is right, or fails. */
#include "base/error.h"
#include "kinds.h"
#include "store/http/faults.h"
#include "store/http/http.h"
#include "store/object/object.h"
#include "sum/sum.h"

#define SIZE ((70u << 10) + 777)
#define CHUNK (16u << 10)

static enum nebula_status check_chunk(void *argument, const void *data, uint64_t offset, uint64_t size, const uint64_t *crc64,
                                      struct nebula_error *ret_error)
{
        return memcmp((const char *)argument + offset, data, size) || *crc64 != sum_crc64(0, data, size) ?
                       error_set(ret_error, NEBULA_CORRUPT, 0, "chunk at %llu", (unsigned long long)offset) : NEBULA_OK;
}

static void be_quick(void)
{
        struct http_settings settings = http_settings_now();

        settings.pause_ms = 2;
        settings.pause_max_ms = 20;
        settings.halve_ms = 20;
        settings.quiet_ms = settings.answer_ms = 10000; /* the server sums in Python, on a machine that may be busy */
        settings.hedge_ms = 60000;
        http_settings_set(&settings);
        kind_limits->read_bytes = 4 * CHUNK;
        if (!kind_parts_min)
                kind_limits->part_bytes = kind_limits->part_bytes_good = 32u << 10;
}

/* Whether the object was uploaded and read back. */
static bool transfer(unsigned number, const char *data, char *back)
{
        char key[32];
        struct store_object object = { .key = key, .data = data, .size = SIZE };
        struct store_upload *upload;
        enum nebula_status status;

        snprintf(key, sizeof key, "t%u/m.pt", number);
        memset(back, 0, SIZE);
        status = store->ops->upload(store, &object, 1, &upload, &error);
        if (!status)
                status = store->ops->publish(store, upload, &error);
        CHECK(status != NEBULA_BUSY); /* no other writer */
        if (!status)
                status = store->ops->read_bulk(store, key, back, SIZE, CHUNK, check_chunk, (void *)(uintptr_t)data, &error);
        if (status)
                printf("# %u: %s\n", number, error.message);
        else
                CHECK(!memcmp(data, back, SIZE));
        CHECK(store_remove_one(store, key, &error) == NEBULA_OK);
        return !status;
}

static void no_fault_makes_wrong_bytes(void)
{
        unsigned count = fault_transfers(), good = 0;
        char *data = malloc(SIZE + 50), *back = malloc(SIZE);

        for (size_t i = 0; i < SIZE + 50; i++)
                data[i] = (char)(i * 2654435761u >> 13);
        store = kinds[0].begin();
        be_quick();
        for (unsigned i = 0; i < count; i++) {
                good += transfer(i, data + i % 50, back);
                if (i % 100 == 99)
                        printf("# %u of %u transfers\n", good, i + 1);
        }
        CHECK(good > count * 9 / 10);
        store_close(store);
        kinds[0].end();
        free(data);
        free(back);
}

TAP_MAIN(TEST(no_fault_makes_wrong_bytes))
