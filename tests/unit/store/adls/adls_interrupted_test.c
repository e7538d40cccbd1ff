/* An upload is interrupted in its middle. A later one goes on with what was flushed, and with nothing else. */
#include <pthread.h>

#include "os/os.h"
#include "store/adls/adls_private.h"
#include "tap.h"

#define PART BULK_REQUEST_BYTES
#define PARTS 12u
#define SIZE (PARTS * (uint64_t)PART - 1000)
#define KEY "t/m.pt"

static struct nebula_error error;
static struct store *store;
static char *data, told[STORE_RESUME_MAX];
static pthread_mutex_t told_lock = PTHREAD_MUTEX_INITIALIZER;

static void tell(void *argument, const char *key, const char *text, bool is_last)
{
        pthread_mutex_lock(&told_lock);
        snprintf(told, sizeof told, "%s", text);
        pthread_mutex_unlock(&told_lock);
}

struct writer {
        pthread_t thread;
        struct bulk_feed feed;
        struct store_upload *upload;
        const char *former;
        struct store_written written;
        enum nebula_status status;
        struct nebula_error error;
};

static void *write_large(void *argument)
{
        struct writer *writer = argument;
        struct store_resume resume = { writer->former, tell, NULL };
        struct store_object object = { .key = KEY, .data = data, .size = SIZE, .feed = &writer->feed, .ret_written = &writer->written, .resume = &resume };

        writer->status = store->ops->upload(store, &object, 1, &writer->upload, &writer->error);
        return NULL;
}

static struct object_store *driver(void)
{
        return (struct object_store *)store;
}

/* The key of the temporary file that `told` names; "": none. */
static const char *place(void)
{
        static char key[STORE_RESUME_MAX];

        pthread_mutex_lock(&told_lock);
        snprintf(key, sizeof key, "%.*s", (int)strcspn(told, " "), told);
        pthread_mutex_unlock(&told_lock);
        return key;
}

/* The flushed bytes of the temporary file. */
static uint64_t flushed(void)
{
        struct store_entry entry = { 0 };
        uint64_t size;

        if (!*place() || store->ops->stat(store, place(), &entry, NULL))
                return 0;
        size = entry.size;
        store_entry_done(&entry);
        return size;
}

/* Uploads the first `count` parts. The upload fails when it has flushed. */
static void interrupt(struct writer *writer, unsigned count)
{
        *told = 0;
        REQUIRE(!bulk_feed_init_pieces(&writer->feed, SIZE) && !pthread_create(&writer->thread, NULL, write_large, writer));
        for (unsigned i = 0; i < count; i++)
                bulk_feed_report(&writer->feed, i * (uint64_t)PART);
        while (!flushed())
                os->sleep_ms(5);
        bulk_feed_end(&writer->feed);
        pthread_join(writer->thread, NULL);
        bulk_feed_done(&writer->feed);
        CHECK(writer->status == NEBULA_STORAGE && writer->written.resumed == 0);
}

/* Uploads everything, and publishes it. Returns the bytes that it did not send. */
static uint64_t complete(const char *former)
{
        struct writer writer = { .former = former };
        char *back = malloc(SIZE);

        if (!back || bulk_feed_init_pieces(&writer.feed, SIZE))
                abort();
        bulk_feed_report_all(&writer.feed);
        write_large(&writer);
        bulk_feed_done(&writer.feed);
        if (writer.status)
                printf("# %s\n", writer.error.message);
        CHECK(writer.status == NEBULA_OK && store->ops->publish(store, writer.upload, &error) == NEBULA_OK);
        CHECK(store->ops->read(store, KEY, back, 0, SIZE, &error) == NEBULA_OK && !memcmp(back, data, SIZE));
        free(back);
        return writer.written.resumed;
}

static void begin(void)
{
        char root[100];
        unsigned number;

        adls_limits.part_bytes = adls_limits.part_bytes_good = PART;
        os->random(&number, sizeof number);
        snprintf(root, sizeof root, "abfss://nebula@datalake.dfs.core.windows.net/run/%08x", number);
        data = malloc(SIZE);
        if (!data || store_adls.open(root, &store, &error))
                abort();
        for (uint64_t i = 0; i < SIZE; i++)
                data[i] = (char)(i * 2654435761u >> 13);
}

/* No temporary file is left. */
static void end(void)
{
        struct store_list list = { 0 };

        CHECK(store_list_all(store, STORE_TEMP_TOP, false, &list, &error) == NEBULA_OK && list.count == 0);
        store_list_done(&list);
        store_close(store);
        free(data);
}

static void bytes_that_were_flushed_are_not_sent_again(void)
{
        struct writer writer = { 0 };
        char former[STORE_RESUME_MAX];
        uint64_t sent;

        begin();
        interrupt(&writer, 10);
        strcpy(former, told);
        sent = flushed();
        CHECK(sent >= 4 * (uint64_t)PART && complete(former) == sent);
        end();
}

static void a_late_append_of_the_interrupted_upload_does_not_arrive(void)
{
        struct object_range range = { .offset = 9 * (uint64_t)PART, .size = 4 };
        struct writer writer = { 0 };
        char former[STORE_RESUME_MAX], old[STORE_RESUME_MAX];

        begin();
        interrupt(&writer, 4);
        strcpy(former, told);
        strcpy(old, place());
        CHECK(adls_append(driver(), KEY, old, &range, "late", NULL, &error) == NEBULA_OK); /* before: it is dropped */
        CHECK(complete(former) == 4 * (uint64_t)PART);
        CHECK(adls_append(driver(), KEY, old, &range, "late", NULL, &error) == NEBULA_NOT_FOUND);
        end();
}

static void other_bytes_than_those_that_were_flushed_make_a_new_file(void)
{
        struct writer writer = { 0 }, second = { 0 };
        char former[STORE_RESUME_MAX];

        begin();
        interrupt(&writer, 5);
        strcpy(former, told);
        data[2 * PART + 7] ^= 1;
        second.former = former;
        REQUIRE(!bulk_feed_init_pieces(&second.feed, SIZE));
        bulk_feed_report_all(&second.feed);
        write_large(&second);
        bulk_feed_done(&second.feed);
        CHECK(second.status == NEBULA_STORAGE && store_class(&second.error) == STORE_LATER && second.written.resumed == 0);
        strcpy(former, told);
        CHECK(complete(former) == 0);
        end();
}

/* The agent died between the two requests of a flush. */
static void properties_ahead_of_the_file_do_no_harm(void)
{
        struct writer writer = { 0 };
        struct object_upload object = { .key = (char *)(uintptr_t)KEY };
        struct adls_sent sent[2] = { { 8 * (uint64_t)PART, 1234 }, { 0 } }, found;
        struct store_resume resume = { told, tell, NULL };
        char text[ADLS_SENT_SIZE], former[STORE_RESUME_MAX];

        begin();
        interrupt(&writer, 4);
        strcpy(former, told);
        /* Another upload takes the file over. `found`: how much of the object the file has. */
        object = (struct object_upload){ .id = "0123456789abcdef", .key = object.key, .place = (char *)(uintptr_t)STORE_TEMP_TOP "0123456789abcdef-0",
                                         .size = SIZE, .part_bytes = PART, .part_count = PARTS, .resume = &resume };
        REQUIRE(adls_resume(driver(), &object, &found, &error) == NEBULA_OK && found.size == 4 * (uint64_t)PART);
        sent[1] = found;
        adls_sent_text(sent, text);
        CHECK(adls_set_properties(driver(), &object, text, NULL, &error) == NEBULA_OK);
        CHECK(adls_resume_describe(driver(), &object, &error) == NEBULA_OK);
        CHECK(complete(former) == 0); /* the file has another name now */
        CHECK(store_remove_one(store, KEY, &error) == NEBULA_OK);
        CHECK(complete(object.text) == 4 * (uint64_t)PART);
        free(object.text);
        end();
}

TAP_MAIN(TEST(bytes_that_were_flushed_are_not_sent_again), TEST(a_late_append_of_the_interrupted_upload_does_not_arrive),
         TEST(other_bytes_than_those_that_were_flushed_make_a_new_file), TEST(properties_ahead_of_the_file_do_no_harm))
