/* The promises of store.h about objects, on every kind of store. Lists and races have their own tests. */
#include <pthread.h>

#include "kinds.h"
#include "sum/sum.h"

#define BIG_BYTES ((6u << 20) + 777)
#define EACH(name, promise) static void name(void) { each(promise); }

static bool is_same(struct store_stamp a, struct store_stamp b)
{
        return !strcmp(a.text, b.text);
}

static void read_back(void)
{
        struct store_stamp stamp, got;
        struct store_entry entry;
        char *text, bytes[3];
        size_t size;

        CHECK(store->ops->put(store, "t/x", "a\0b", 3, STORE_ALWAYS, NULL, &stamp, &error) == NEBULA_OK);
        REQUIRE(store->ops->get(store, "t/x", 3, &text, &size, &got, &error) == NEBULA_OK);
        CHECK(size == 3 && !memcmp(text, "a\0b", 4) && stamp.text[0] && is_same(stamp, got));
        free(text);
        CHECK(store->ops->read(store, "t/x", bytes, 1, 2, &error) == NEBULA_OK && !memcmp(bytes, "\0b", 2));
        CHECK(store->ops->read(store, "t/x", bytes, 2, 2, &error) == NEBULA_CORRUPT && strstr(error.message, "t/x"));
        REQUIRE(store->ops->stat(store, "t/x", &entry, &error) == NEBULA_OK);
        CHECK(!strcmp(entry.key, "t/x") && entry.size == 3 && is_same(entry.stamp, stamp) && !entry.is_prefix && !entry.is_foreign);
        store_entry_done(&entry);
        CHECK(store->ops->put(store, "nothing", "", 0, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK && !strcmp(get("nothing"), ""));
        CHECK(put("a/b/c/d/e/f", "deep", STORE_ALWAYS) == NEBULA_OK && !strcmp(get("a/b/c/d/e/f"), "deep"));
}
EACH(what_is_put_is_read_with_its_stamp, read_back)

static void limits(void)
{
        char *text;

        CHECK(put("x", "0123456789", STORE_ALWAYS) == NEBULA_OK);
        CHECK(store->ops->get(store, "x", 9, &text, NULL, NULL, &error) == NEBULA_CORRUPT && strstr(error.message, "x"));
        REQUIRE(store->ops->get(store, "x", 10, &text, NULL, NULL, &error) == NEBULA_OK);
        free(text);
}
EACH(an_object_above_the_limit_is_refused, limits)

static void conditions(void)
{
        struct store_stamp first, second;

        CHECK(put("t/x", "1", STORE_IF_ABSENT) == NEBULA_OK);
        first = stamp_of("t/x");
        CHECK(put("t/x", "2", STORE_IF_ABSENT) == NEBULA_BUSY && strstr(error.message, "t/x"));
        CHECK(!strcmp(get("t/x"), "1") && is_same(stamp_of("t/x"), first));
        CHECK(put("t/x", "3", STORE_ALWAYS) == NEBULA_OK && !strcmp(get("t/x"), "3"));
        second = stamp_of("t/x");
        CHECK(!is_same(first, second));
        CHECK(store_remove_one(store, "t/x", &error) == NEBULA_OK && put("t/x", "4", STORE_IF_ABSENT) == NEBULA_OK && !strcmp(get("t/x"), "4"));
}
EACH(a_put_on_condition_replaces_nothing_else, conditions)

static enum nebula_status put_if_same(const char *key, const char *text, struct store_stamp seen, struct store_stamp *ret_stamp)
{
        return store->ops->put(store, key, text, strlen(text), STORE_IF_SAME, &seen, ret_stamp, &error);
}

static void same(void)
{
        struct store_stamp first, second;

        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK);
        first = stamp_of("t/x");
        if (!(features & STORE_PUTS_IF_SAME)) {
                CHECK(put_if_same("t/x", "2", first, NULL) == NEBULA_INVALID && !strcmp(get("t/x"), "1"));
                return;
        }
        CHECK(put_if_same("t/x", "2", first, &second) == NEBULA_OK && !strcmp(get("t/x"), "2") && is_same(stamp_of("t/x"), second));
        CHECK(put_if_same("t/x", "3", first, NULL) == NEBULA_BUSY && !strcmp(get("t/x"), "2"));
        CHECK(put_if_same("t/other", "3", second, NULL) == NEBULA_BUSY && !strcmp(get("t/other"), "-"));
}
EACH(a_put_replaces_the_one_that_was_seen, same)

static void absent(void)
{
        struct store_entry entry;
        char byte;

        for (int round = 0; round < 2; round++) {
                CHECK(!strcmp(get("t/x"), "-") && !strcmp(get("t/x/y"), "-"));
                CHECK(store->ops->read(store, "t/x", &byte, 0, 1, &error) == NEBULA_NOT_FOUND && strstr(error.message, "t/x"));
                CHECK(store->ops->read_bulk(store, "t/x", &byte, 1, 4096, NULL, NULL, &error) == NEBULA_NOT_FOUND);
                CHECK(store->ops->stat(store, "t/x", &entry, &error) == NEBULA_NOT_FOUND);
                CHECK(store_remove_one(store, "t/x", &error) == NEBULA_OK && store_remove_one(store, "t/x/y", &error) == NEBULA_OK);
                if (features & STORE_COPIES)
                        CHECK(store->ops->copy(store, "t/x", "t/y", STORE_ALWAYS, &error) == NEBULA_NOT_FOUND && !strcmp(get("t/y"), "-"));
                CHECK(put("t", "an object that others could be below", STORE_ALWAYS) == NEBULA_OK);
        }
}
EACH(an_absent_object_is_not_found_and_its_removal_fine, absent)

static void prefix(void)
{
        struct store_entry entry;
        struct store_stamp stamp;
        char byte;

        CHECK(put("t/a/x", "1", STORE_ALWAYS) == NEBULA_OK);
        stamp = stamp_of("t/a/x");
        CHECK(store->ops->stat(store, "t/a", &entry, &error) == NEBULA_NOT_FOUND && !strcmp(get("t/a"), "-"));
        CHECK(store->ops->read(store, "t/a", &byte, 0, 1, &error) == NEBULA_NOT_FOUND);
        CHECK(store_remove_one(store, "t/a", &error) == NEBULA_OK);
        CHECK(store->ops->remove(store, &(struct store_victim){ "t/a", stamp }, 1, &error) == NEBULA_OK);
        CHECK(!strcmp(get("t/a/x"), "1"));
}
EACH(a_text_that_keys_begin_with_is_no_object, prefix)

static void strange_keys(void)
{
        static const char *const bad[] = { "", "/", "/x", "x/", "a//b", ".", "..", "a/..", "../x", "a/./b" };
        char byte, name[300], *text;
        struct store_entry entry;
        struct store_upload *upload;

        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
                struct store_object object = { .key = bad[i], .data = "x", .size = 1 };

                CHECK(put(bad[i], "x", STORE_ALWAYS) == NEBULA_INVALID);
                CHECK(store->ops->get(store, bad[i], 9, &text, NULL, NULL, &error) != NEBULA_OK);
                CHECK(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_INVALID);
                CHECK(store_remove_one(store, bad[i], &error) == NEBULA_INVALID);
                CHECK(store->ops->read(store, bad[i], &byte, 0, 1, &error) != NEBULA_OK);
                CHECK(store->ops->stat(store, bad[i], &entry, &error) != NEBULA_OK);
                if (features & STORE_COPIES)
                        CHECK(store->ops->copy(store, "x", bad[i], STORE_ALWAYS, &error) == NEBULA_INVALID);
        }
        memset(name, 'n', sizeof name - 1);
        name[sizeof name - 1] = 0;
        CHECK(put(name, "x", STORE_ALWAYS) == NEBULA_INVALID);
        CHECK(put("...", "dots", STORE_ALWAYS) == NEBULA_OK && put("..a/.b", "dots", STORE_ALWAYS) == NEBULA_OK && !strcmp(get("..a/.b"), "dots"));
        CHECK(put("%41 b+c/%2F", "as it is", STORE_ALWAYS) == NEBULA_OK && !strcmp(get("%41 b+c/%2F"), "as it is") && !strcmp(get("A b+c"), "-"));
}
EACH(no_key_leads_out_of_the_store, strange_keys)

static void *make_big(unsigned seed)
{
        unsigned char *data = aligned_alloc(4096, 8u << 20);

        for (size_t i = 0; i < 8u << 20; i++)
                data[i] = (unsigned char)(i * 2654435761u >> 13 ^ seed);
        return data;
}

static pthread_mutex_t seen_lock = PTHREAD_MUTEX_INITIALIZER;

struct seen {
        const unsigned char *data;
        uint64_t bytes, bad_at;
};

static enum nebula_status check_chunk(void *argument, const void *data, uint64_t offset, uint64_t size, const uint64_t *crc64,
                                      struct nebula_error *failure)
{
        struct seen *seen = argument;
        enum nebula_status status = NEBULA_OK;

        (void)failure;
        pthread_mutex_lock(&seen_lock);
        seen->bytes += memcmp(data, seen->data + offset, size) || store_chunk_sum(data, size, crc64) != sum_crc64(0, data, size) ? 0 : size;
        if (offset <= seen->bad_at && seen->bad_at < offset + size)
                status = NEBULA_CORRUPT;
        pthread_mutex_unlock(&seen_lock);
        return status;
}

static void upload_and_publish(const struct store_object *objects, size_t count, enum nebula_status expected)
{
        struct store_upload *upload;

        REQUIRE(store->ops->upload(store, objects, count, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == expected);
}

static void large(void)
{
        unsigned char *data = make_big(7), *back = aligned_alloc(4096, 8u << 20);
        struct store_object objects[] = { { "t/big", data, BIG_BYTES, NULL }, { "t/odd", data + 1, BIG_BYTES, NULL }, { "u/none", "", 0, NULL } };
        struct seen seen = { data, 0, UINT64_MAX };

        upload_and_publish(objects, 3, NEBULA_OK);
        memset(back, 0, BIG_BYTES);
        CHECK(store->ops->read_bulk(store, "t/big", back, BIG_BYTES, 1u << 20, check_chunk, &seen, &error) == NEBULA_OK);
        CHECK(seen.bytes == BIG_BYTES && !memcmp(data, back, BIG_BYTES));
        seen = (struct seen){ data + 1, 0, UINT64_MAX };
        CHECK(store->ops->read_bulk(store, "t/odd", back + 3, BIG_BYTES, 1000003, check_chunk, &seen, &error) == NEBULA_OK);
        CHECK(seen.bytes == BIG_BYTES && !memcmp(data + 1, back + 3, BIG_BYTES));
        seen = (struct seen){ data, 0, 3u << 20 };
        CHECK(store->ops->read_bulk(store, "t/big", back, BIG_BYTES, 1u << 20, check_chunk, &seen, &error) == NEBULA_CORRUPT);
        CHECK(store->ops->read_bulk(store, "t/big", back, BIG_BYTES + 1, 1u << 20, NULL, NULL, &error) == NEBULA_CORRUPT);
        CHECK(!strcmp(get("u/none"), ""));
        free(data);
        free(back);
}
EACH(a_large_object_is_read_and_checked_chunk_by_chunk, large)

static void some_chunks(void)
{
        const struct store_range ranges[] = { { 1u << 20, 2u << 20 }, { BIG_BYTES / (1u << 20) * (1u << 20), BIG_BYTES % (1u << 20) } };
        const uint64_t size = ranges[0].size + ranges[1].size;
        unsigned char *data = make_big(8), *back = calloc(1, BIG_BYTES);
        struct store_object object = { "t/big", data, BIG_BYTES, NULL };
        struct seen seen = { data, 0, UINT64_MAX };
        size_t wrong = 0;

        CHECK(store->ops->read_chunks || (features & STORE_LENDS_FD));
        upload_and_publish(&object, 1, NEBULA_OK);
        if (store->ops->read_chunks) {
                CHECK(store->ops->read_chunks(store, "t/big", back, ranges, 2, 1u << 20, check_chunk, &seen, &error) == NEBULA_OK && seen.bytes == size);
                for (size_t i = 0; i < BIG_BYTES; i++) {
                        bool is_asked = (i >= ranges[0].offset && i < ranges[0].offset + ranges[0].size) || i >= ranges[1].offset;

                        wrong += back[i] != (is_asked ? data[i] : 0);
                }
                CHECK(!wrong);
                seen = (struct seen){ data, 0, ranges[1].offset };
                CHECK(store->ops->read_chunks(store, "t/big", back, ranges, 2, 1u << 20, check_chunk, &seen, &error) == NEBULA_CORRUPT);
                CHECK(store->ops->read_chunks(store, "t/none", back, ranges, 2, 1u << 20, NULL, NULL, &error) == NEBULA_NOT_FOUND);
                CHECK(store->ops->read_chunks(store, "t/big", back, ranges, 0, 1u << 20, NULL, NULL, &error) == NEBULA_OK);
        }
        free(data);
        free(back);
}
EACH(chunks_of_a_large_object_are_read_and_no_others, some_chunks)

static void unseen(void)
{
        struct store_object objects[] = { { "t/x", "new", 3, NULL }, { "t/y", "new", 3, NULL } };
        struct store_upload *upload;

        REQUIRE(store->ops->upload(store, objects, 2, &upload, &error) == NEBULA_OK);
        CHECK(!strcmp(get("t/x"), "-") && stamp_of("t/y").text[0] == 0);
        CHECK(put("t/z", "meanwhile", STORE_ALWAYS) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK);
        CHECK(!strcmp(get("t/x"), "new") && !strcmp(get("t/y"), "new"));
        objects[0].key = "t/other";
        REQUIRE(store->ops->upload(store, objects, 1, &upload, &error) == NEBULA_OK);
        store->ops->abort(store, upload);
        store->ops->abort(store, NULL);
        CHECK(!strcmp(get("t/other"), "-"));
        if (features & STORE_LISTS_FRESH)
                CHECK(!strcmp(keys("", true), "t/x t/y t/z "));
}
EACH(an_upload_is_unseen_until_it_is_published, unseen)

static void taken(void)
{
        struct store_object objects[] = { { "t/a", "new", 3, NULL }, { "t/b", "new", 3, NULL } };

        CHECK(put("t/b", "old", STORE_ALWAYS) == NEBULA_OK);
        upload_and_publish(objects, 2, NEBULA_BUSY);
        CHECK(strstr(error.message, "t/b") && !strcmp(get("t/b"), "old") && (!strcmp(get("t/a"), "new") || !strcmp(get("t/a"), "-")));
}
EACH(what_is_published_replaces_nothing, taken)

struct feeding {
        struct bulk_feed feed;
        const char *data;
};

/* Tells the sums of all pieces but the last one. */
static void *feed_all(void *argument)
{
        struct feeding *feeding = argument;

        for (uint64_t offset = 0; offset + BULK_REQUEST_BYTES < BIG_BYTES; offset += BULK_REQUEST_BYTES)
                bulk_feed_report_summed(&feeding->feed, offset, sum_crc64(0, feeding->data + offset, BULK_REQUEST_BYTES), false);
        bulk_feed_report_all(&feeding->feed);
        bulk_feed_end(&feeding->feed);
        return NULL;
}

static void fed(void)
{
        char *data = make_big(9), *back = malloc(BIG_BYTES);
        struct feeding feeding = { .data = data };
        struct bulk_feed feed;
        struct store_object object = { "t/big", data, BIG_BYTES, &feeding.feed };
        struct store_upload *upload;
        pthread_t thread;

        REQUIRE(!bulk_feed_init(&feeding.feed, BIG_BYTES) && !pthread_create(&thread, NULL, feed_all, &feeding));
        upload_and_publish(&object, 1, NEBULA_OK);
        pthread_join(thread, NULL);
        bulk_feed_done(&feeding.feed);
        object.feed = &feed;
        CHECK(store->ops->read(store, "t/big", back, 0, BIG_BYTES, &error) == NEBULA_OK && !memcmp(data, back, BIG_BYTES));
        REQUIRE(!bulk_feed_init(&feed, BIG_BYTES));
        bulk_feed_report(&feed, 0);
        bulk_feed_end(&feed); /* the writer gives up */
        object.key = "t/other";
        CHECK(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_STORAGE && !strcmp(get("t/other"), "-"));
        bulk_feed_done(&feed);
        free(data);
        free(back);
}
EACH(an_upload_takes_bytes_while_they_are_made, fed)

/* Five chunks and a rest; the third chunk differs. Some services take no part of less than 5 MiB. */
#define REFER_BYTES (5 * REFER_CHUNK + 777)
#define REFER_CHUNK (uint64_t)BULK_REQUEST_BYTES

static void report_all_but(struct bulk_feed *feed, unsigned differing)
{
        for (unsigned i = 0; i < 6; i++)
                (i == differing ? bulk_feed_report : bulk_feed_report_same)(feed, i * REFER_CHUNK);
        bulk_feed_end(feed);
}

/* Uploads and publishes an object, and returns the number of bytes sent. */
static uint64_t upload_with(const char *key, const char *data, const struct store_source *source, unsigned differing, struct store_mark *ret_mark)
{
        struct store_written written = { { "" }, 1 };
        struct bulk_feed feed;
        struct store_object object = { .key = key, .data = data, .size = REFER_BYTES, .feed = &feed, .source = source, .ret_written = &written };

        CHECK(!bulk_feed_init_pieces(&feed, REFER_BYTES));
        report_all_but(&feed, differing);
        upload_and_publish(&object, 1, NEBULA_OK);
        bulk_feed_done(&feed);
        if (ret_mark)
                *ret_mark = written.mark;
        return REFER_BYTES - written.referred;
}

static bool holds(const char *key, const char *data)
{
        char *back = malloc(REFER_BYTES + 1);
        bool same = !store->ops->read(store, key, back, 0, REFER_BYTES, &error) && !memcmp(data, back, REFER_BYTES);

        free(back);
        return same;
}

static char *make_five(unsigned seed)
{
        char *data = aligned_alloc(4096, 6 * REFER_CHUNK);

        for (uint64_t i = 0; i < 6 * REFER_CHUNK; i++)
                data[i] = (char)(i * 2654435761u >> 13 ^ seed);
        return data;
}

static void refers(void)
{
        char *data = make_five(1);
        struct store_source source = { .key = "t/first", .size = REFER_BYTES };
        uint64_t sent;

        CHECK(upload_with("t/first", data, NULL, 0, &source.mark) == REFER_BYTES && source.mark.text[0]);
        data[2 * REFER_CHUNK + 5] ^= 1;
        sent = upload_with("t/second", data, &source, 2, NULL);
        CHECK(store->ops->features(store) & STORE_REFERS ? sent >= REFER_CHUNK && sent < 2 * REFER_CHUNK : sent == REFER_BYTES);
        CHECK(holds("t/second", data));
        data[2 * REFER_CHUNK + 5] ^= 1;
        CHECK(holds("t/first", data) && !store_remove_one(store, "t/first", &error));
        data[2 * REFER_CHUNK + 5] ^= 1;
        CHECK(holds("t/second", data));
        free(data);
}
EACH(what_is_the_same_in_a_source_is_not_sent_again, refers)

/* The feed says that the chunks are the same, but the source has other bytes: the driver must not take them. */
static void refers_not(void)
{
        char *data = make_five(1), *other = make_five(2);
        struct store_source source = { .key = "t/none", .size = REFER_BYTES, .mark = { "0123456789abcdef" } };
        struct store_mark mark;

        CHECK(upload_with("t/a", data, &source, 2, NULL) == REFER_BYTES && holds("t/a", data));
        upload_with("t/other", other, NULL, 0, &mark);
        source.key = "t/other"; /* the object of another upload */
        CHECK(upload_with("t/b", data, &source, 2, NULL) == REFER_BYTES && holds("t/b", data));
        CHECK(put("t/small", "of no upload", STORE_ALWAYS) == NEBULA_OK);
        source.key = "t/small";
        CHECK(upload_with("t/c", data, &source, 2, NULL) == REFER_BYTES && holds("t/c", data));
        source = (struct store_source){ .key = "t/other", .size = REFER_BYTES - 1, .mark = mark }; /* its size is another */
        CHECK(upload_with("t/d", data, &source, 2, NULL) == REFER_BYTES && holds("t/d", data));
        free(data);
        free(other);
}
EACH(bytes_come_from_the_very_object_that_is_meant_or_are_sent, refers_not)

static void removal(void)
{
        struct store_stamp old, x;
        struct store_victim victims[4];

        CHECK(put("t/x", "old", STORE_ALWAYS) == NEBULA_OK);
        old = stamp_of("t/x");
        CHECK(put("t/x", "newer", STORE_ALWAYS) == NEBULA_OK && put("t/d/y", "1", STORE_ALWAYS) == NEBULA_OK && put("u", "1", STORE_ALWAYS) == NEBULA_OK);
        victims[0] = (struct store_victim){ "t/x", old };
        victims[1] = (struct store_victim){ "t/d/y", stamp_of("t/d/y") };
        victims[2] = (struct store_victim){ "t/absent", old };
        victims[3] = (struct store_victim){ .key = "u" };
        x = stamp_of("t/x");
        CHECK(store->ops->remove(store, victims, 4, &error) == NEBULA_OK);
        CHECK(!strcmp(get("t/x"), "newer") && is_same(stamp_of("t/x"), x) && !strcmp(get("t/d/y"), "-") && !strcmp(get("u"), "-"));
        victims[0].stamp = x;
        CHECK(store->ops->remove(store, victims, 1, &error) == NEBULA_OK && !strcmp(get("t/x"), "-"));
        CHECK(store->ops->remove(store, NULL, 0, &error) == NEBULA_OK);
        if (features & STORE_LISTS_FRESH)
                CHECK(!strcmp(keys("", true), "") && !strcmp(keys("", false), ""));
        CHECK(put("t/d/y", "2", STORE_IF_ABSENT) == NEBULA_OK && !strcmp(get("t/d/y"), "2"));
}
EACH(a_removal_takes_only_what_was_seen, removal)

static void copies(void)
{
        if (!(features & STORE_COPIES))
                return;
        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK && put("view", "old", STORE_ALWAYS) == NEBULA_OK);
        CHECK(store->ops->copy(store, "t/x", "view", STORE_IF_ABSENT, &error) == NEBULA_BUSY && strstr(error.message, "view"));
        CHECK(!strcmp(get("view"), "old"));
        for (int i = 0; i < 2; i++) /* the second time to itself */
                CHECK(store->ops->copy(store, "t/x", "view", STORE_ALWAYS, &error) == NEBULA_OK && !strcmp(get("view"), "1"));
        CHECK(store->ops->copy(store, "t/x", "view", STORE_IF_ABSENT, &error) == NEBULA_BUSY);
        CHECK(store->ops->copy(store, "t/x", "far/away/y", STORE_IF_ABSENT, &error) == NEBULA_OK && !strcmp(get("far/away/y"), "1"));
        CHECK(put("view", "replaced", STORE_ALWAYS) == NEBULA_OK && !strcmp(get("t/x"), "1"));
        CHECK(put("t/x", "2", STORE_ALWAYS) == NEBULA_OK && !strcmp(get("far/away/y"), "1"));
        CHECK(store_remove_one(store, "t/x", &error) == NEBULA_OK && !strcmp(get("far/away/y"), "1"));
        CHECK(store->ops->copy(store, "far", "t/z", STORE_ALWAYS, &error) == NEBULA_NOT_FOUND);
        if (features & STORE_LISTS_FRESH)
                CHECK(!strcmp(keys("", true), "far/away/y view "));
}
EACH(a_copy_is_an_object_of_its_own, copies)

static void again(void)
{
        struct store *other = kind->again(), *first = store;

        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK);
        store = other;
        CHECK(!strcmp(get("t/x"), "1") && put("t/x", "2", STORE_IF_ABSENT) == NEBULA_BUSY && store_remove_one(store, "t/x", &error) == NEBULA_OK);
        CHECK((store->ops->features(store) | STORE_REFERS) == (features | STORE_REFERS)); /* the bit may go */
        store = first;
        CHECK(!strcmp(get("t/x"), "-") && put("t/x", "3", STORE_IF_ABSENT) == NEBULA_OK);
        store_close(other);
}
EACH(two_stores_of_one_url_see_the_same_objects, again)

/* Some stores count in seconds, and file systems in ticks. */
static void times(void)
{
        int64_t before, after, second = 1000000000;
        struct store_entry entry;

        CHECK(store->ops->clock(store, &before, &error) == NEBULA_OK);
        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK);
        REQUIRE(store->ops->stat(store, "t/x", &entry, &error) == NEBULA_OK);
        CHECK(store->ops->clock(store, &after, &error) == NEBULA_OK);
        CHECK(before - second <= entry.time_ns && entry.time_ns <= after + second && before <= after);
        store_entry_done(&entry);
}
EACH(an_object_has_the_time_of_the_stores_clock, times)

static void views(void)
{
        int fd;
        bool direct;
        uint64_t bytes;

        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(!store->ops->open_read == !(features & STORE_LENDS_FD) && !store->ops->copy == !(features & STORE_COPIES));
        if (features & STORE_LENDS_FD)
                CHECK(store->ops->open_read(store, "t/none", false, &fd, &direct, &error) == NEBULA_NOT_FOUND &&
                      store->ops->open_read(store, "t", true, &fd, &direct, &error) == NEBULA_NOT_FOUND);
        CHECK(store->ops->free_bytes(store, &bytes, &error) == (features & STORE_PATHS ? NEBULA_OK : NEBULA_NOT_FOUND));
}
EACH(a_feature_is_an_operation_that_works, views)

TAP_MAIN(TEST(what_is_put_is_read_with_its_stamp), TEST(an_object_above_the_limit_is_refused), TEST(a_put_on_condition_replaces_nothing_else),
         TEST(a_put_replaces_the_one_that_was_seen), TEST(an_absent_object_is_not_found_and_its_removal_fine),
         TEST(a_text_that_keys_begin_with_is_no_object), TEST(no_key_leads_out_of_the_store),
         TEST(a_large_object_is_read_and_checked_chunk_by_chunk), TEST(an_upload_is_unseen_until_it_is_published),
         TEST(chunks_of_a_large_object_are_read_and_no_others),
         TEST(what_is_published_replaces_nothing), TEST(an_upload_takes_bytes_while_they_are_made), TEST(what_is_the_same_in_a_source_is_not_sent_again),
         TEST(bytes_come_from_the_very_object_that_is_meant_or_are_sent), TEST(a_removal_takes_only_what_was_seen),
         TEST(a_copy_is_an_object_of_its_own), TEST(two_stores_of_one_url_see_the_same_objects), TEST(an_object_has_the_time_of_the_stores_clock),
         TEST(a_feature_is_an_operation_that_works))
