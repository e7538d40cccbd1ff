/* A sweep takes the temporary file of a writer that died, and of no upload that lasts long. */
#include <pthread.h>

#include "os/os.h"
#include "store/adls/adls_private.h"
#include "store/manifest.h"
#include "store/sweep.h"
#include "tap.h"

#define SECOND_NS INT64_C(1000000000)
#define AGE_S 900 /* of what a sweep removes */
#define SIZE (9u << 20)

static struct nebula_error error;
static struct store *store;

struct writer {
        pthread_t thread;
        struct store_object object;
        struct store_upload *upload;
        enum nebula_status status;
        struct nebula_error error;
};

static void *write_large(void *argument)
{
        struct writer *writer = argument;

        writer->status = store->ops->upload(store, &writer->object, 1, &writer->upload, &writer->error);
        return NULL;
}

/* Sets the clock of tests/servers/dfs.py ahead. */
static void pass(unsigned seconds)
{
        const struct azure_store *azure = (const struct azure_store *)store;
        struct http_response response;
        char url[300];

        snprintf(url, sizeof url, "%s/clock?ahead=%u", azure->address.endpoint, seconds);
        CHECK(http_send(&(struct http_request){ .method = "POST", .url = url }, &response, &error) == NEBULA_OK && response.status == 200);
        http_response_done(&response);
}

static int64_t clock_ns(void)
{
        int64_t now_ns = 0;

        CHECK(store->ops->clock(store, &now_ns, &error) == NEBULA_OK);
        return now_ns;
}

/* The number of temporary files that were written to since. */
static unsigned young(int64_t since_ns)
{
        struct store_list list = { 0 };
        unsigned count = 0;

        CHECK(store_list_all(store, "", false, &list, &error) == NEBULA_OK);
        for (size_t i = 0; i < list.count; i++)
                count += store_is_temporary(list.entries[i].key) && list.entries[i].time_ns >= since_ns;
        store_list_done(&list);
        return count;
}

/* Lets so much time pass that a sweep would take each file that nobody touches, waits until `count` were touched, and sweeps. */
static size_t sweep_later(unsigned count)
{
        size_t removed = 99;
        int64_t later_ns;

        pass(2 * AGE_S);
        later_ns = clock_ns() - SECOND_NS;
        while (young(later_ns) < count)
                os->sleep_ms(5);
        CHECK(manifest_sweep(store, AGE_S * SECOND_NS, &removed, &error) == NEBULA_OK);
        return removed;
}

static void begin(void)
{
        char root[100];
        unsigned number;

        adls_limits.touch_ms = 20;
        os->random(&number, sizeof number);
        snprintf(root, sizeof root, "abfss://nebula@datalake.dfs.core.windows.net/run/%08x", number);
        if (store_adls.open(root, &store, &error))
                abort();
}

static void a_sweep_leaves_the_file_of_an_upload_that_lasts_long(void)
{
        char *data = calloc(1, SIZE), byte = 9;
        struct bulk_feed feed;
        struct writer writer = { .object = { "t/m.pt", data, SIZE, &feed } };

        begin();
        memset(data, 7, SIZE);
        REQUIRE(!bulk_feed_init_pieces(&feed, SIZE) && !pthread_create(&writer.thread, NULL, write_large, &writer));
        CHECK(sweep_later(1) == 0); /* before the first byte is final */
        bulk_feed_report(&feed, 0);
        bulk_feed_report(&feed, BULK_REQUEST_BYTES);
        CHECK(sweep_later(1) == 0); /* between two parts */
        bulk_feed_report(&feed, 2 * BULK_REQUEST_BYTES);
        pthread_join(writer.thread, NULL);
        bulk_feed_done(&feed);
        REQUIRE(writer.status == NEBULA_OK);
        CHECK(sweep_later(1) == 0); /* before it is published */
        CHECK(store->ops->publish(store, writer.upload, &error) == NEBULA_OK && young(0) == 0);
        CHECK(store->ops->read(store, "t/m.pt", &byte, SIZE - 1, 1, &error) == NEBULA_OK && byte == 7);
        store_close(store);
        free(data);
}

static void a_sweep_takes_the_file_of_a_writer_that_died(void)
{
        struct object_upload object = { .key = (char *)(uintptr_t)"t/m.pt" };
        struct store_upload upload = { .id = "0123456789abcdef", .count = 1 };

        begin();
        CHECK(adls_steps.begin((struct object_store *)store, &upload, &object, &error) == NEBULA_OK && young(0) == 1);
        CHECK(sweep_later(0) == 1 && young(0) == 0);
        free(object.place);
        store_close(store);
}

TAP_MAIN(TEST(a_sweep_leaves_the_file_of_an_upload_that_lasts_long), TEST(a_sweep_takes_the_file_of_a_writer_that_died))
