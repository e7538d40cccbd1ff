/* The file of a directory that is copied is cut off meanwhile. The copy fails with a reason, and the process lives. */
#include <unistd.h>

#include "store/transfer_private.h"
#include "versions.h"

#define CHUNKS 16u
#define BYTES (CHUNKS * CHUNK_BYTES)

static char content[BYTES];
static uint64_t sums[CHUNKS];
static struct record_file file = { .size = BYTES, .chunk_bytes = CHUNK_BYTES, .chunks = sums, .chunk_count = CHUNKS };
static struct store *to;
static const struct store_ops *to_ops;
static uint64_t copied, cut_at; /* cut_at: bytes that were compared before it */

static void cut_off(void)
{
        char path[400];

        snprintf(path, sizeof path, "%s/t/x", kind_root);
        if (truncate(path, 0))
                abort();
}

static void on_progress(void *argument, uint64_t bytes)
{
        (void)argument;
        copied += bytes;
        if (copied == cut_at)
                cut_off();
}

static void no_beat(void *argument)
{
        (void)argument;
}

static enum nebula_status copy(void)
{
        const struct transfer transfer = { .from = store, .to = to, .progress = on_progress };
        const struct transfer_pulse pulse = { no_beat, NULL, NULL };

        copied = 0;
        return transfer_object(&transfer, "t/x", "t/y", &file, &pulse, &error);
}

static bool is_there(void)
{
        struct store_entry entry;

        if (to->ops->stat(to, "t/y", &entry, NULL))
                return false;
        store_entry_done(&entry);
        return true;
}

static void begin(void)
{
        for (size_t i = 0; i < BYTES; i++)
                content[i] = (char)(i * 31 + i / 251 + 1);
        for (size_t i = 0; i < CHUNKS; i++)
                sums[i] = sum_crc64(0, content + i * CHUNK_BYTES, CHUNK_BYTES);
        store = begin_file();
        to = begin_mem();
        to_ops = to->ops;
        cut_at = UINT64_MAX;
        if (store->ops->put(store, "t/x", content, BYTES, STORE_ALWAYS, NULL, NULL, &error))
                abort();
}

static void end(void)
{
        store_close(store);
        store_close(to);
        end_file();
        end_mem();
}

/* fault (Storage): A file that nebula copy reads is cut off meanwhile, or its disk fails.
 * result: The copy says so, and nothing of the file counts. */
static void a_source_that_is_cut_off_while_it_is_compared_is_damaged(void)
{
        begin();
        cut_at = 3 * CHUNK_BYTES;
        CHECK(copy() == NEBULA_CORRUPT && strstr(error.message, "t/x") && strstr(error.message, "cut off") && !is_there());
        end();
}

static enum nebula_status cut_and_upload(struct store *at, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                                         struct nebula_error *failure)
{
        bulk_feed_wait(objects->feed);
        cut_off();
        return to_ops->upload(at, objects, count, ret_upload, failure);
}

/* fault: as a_source_that_is_cut_off_while_it_is_compared_is_damaged */
static void a_source_that_is_cut_off_before_it_is_sent_is_not_published(void)
{
        struct store_ops ops;

        begin();
        ops = *to_ops;
        ops.upload = cut_and_upload;
        to->ops = &ops;
        CHECK(copy() == NEBULA_CORRUPT && strstr(error.message, "cut off"));
        to->ops = to_ops;
        CHECK(!is_there());
        end();
}

static void a_source_that_stays_is_copied(void)
{
        char *back = malloc(BYTES);

        begin();
        CHECK(!copy() && is_there() && !to->ops->read(to, "t/y", back, 0, BYTES, &error) && !memcmp(back, content, BYTES));
        end();
        free(back);
}

TAP_MAIN(TEST(a_source_that_is_cut_off_while_it_is_compared_is_damaged), TEST(a_source_that_is_cut_off_before_it_is_sent_is_not_published),
         TEST(a_source_that_stays_is_copied))
