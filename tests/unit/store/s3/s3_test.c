/* The S3 driver against a server that loses answers, changes bytes and checks limits. */
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "store/http/client.h"
#include "store/http/referring.h"
#include "store/http/transfers.h"
#include "store/s3/fake_s3.h"
#include "store/s3/s3_private.h"
#include "store/verify.h"
#include "sum/sum.h"
#include "tap.h"
#include "test_dir.h"

#define BIG_BYTES ((1u << 20) + 777)
#define PIECE (64u << 10)

static struct nebula_error error;
static struct fake_s3 fake;
static struct server *server;
static struct store *store;
static struct object_limits limits;

static void set_endpoint(void)
{
        char url[64];

        snprintf(url, sizeof url, "http://127.0.0.1:%d", server_port(server));
        setenv("AWS_ENDPOINT_URL", url, 1);
}

static void open_store(void)
{
        if (store_s3.open("s3://data/run", &store, &error))
                abort();
}

/* Parts and ranges of 64 KiB; quick to give up and to repeat. */
static void begin(enum fake_fault (*fault)(const struct server_call *call, void *argument), void *argument)
{
        static struct http_settings real;
        struct http_settings settings;

        if (!real.slowest) {
                real = http_settings_now();
                limits = s3_limits;
        }
        settings = real;
        settings.quiet_ms = settings.answer_ms = 60000; /* an answer that comes late on a busy machine does not count as lost */
        settings.retry_ms = settings.retry_new_ms = 5000;
        settings.pause_ms = 2;
        settings.pause_max_ms = 20;
        settings.halve_ms = 20;
        settings.hedge_ms = 60000; /* a slow machine sends no request more */
        settings.small_bytes = 0; /* what is said of large objects holds for those of a few bytes */
        http_settings_set(&settings);
        s3_limits = limits;
        s3_asks_stores = false; /* a test of what is asked sets it */
        s3_limits.part_bytes = s3_limits.part_bytes_good = s3_limits.read_bytes = PIECE;
        fake_init(&fake);
        fake.fault = fault;
        fake.argument = argument;
        server = server_start(fake_serve, &fake, false);
        object_token_forget_all();
        setenv("HOME", "/nonexistent", 1);
        setenv("AWS_ACCESS_KEY_ID", "AKID", 1);
        setenv("AWS_SECRET_ACCESS_KEY", "SECRET", 1);
        setenv("AWS_REGION", "eu-west-1", 1);
        set_endpoint();
        open_store();
}

static void end(void)
{
        store_close(store);
        server_stop(server);
        fake_done(&fake);
}

static enum nebula_status put(const char *key, const char *text, enum store_condition condition)
{
        return store_put_text(store, key, text, condition, &error);
}

/* The request line of the last request, and whether the header has each of these lines. */
static bool was_asked(const char *line, const char *const *fields)
{
        char wanted[600];
        bool is_so;

        pthread_mutex_lock(&fake.lock);
        snprintf(wanted, sizeof wanted, "%s HTTP/1.1\r\n", line);
        is_so = !strncmp(fake.last_head, wanted, strlen(wanted));
        for (; is_so && *fields; fields++) {
                snprintf(wanted, sizeof wanted, "\r\n%s\r\n", *fields);
                is_so = strstr(fake.last_head, wanted) != NULL;
        }
        if (!is_so)
                printf("# not \"%s\" with \"%s\":\n%s", line, *fields ? *fields : "", fake.last_head);
        pthread_mutex_unlock(&fake.lock);
        return is_so;
}
#define ASKED(line, ...) was_asked(line, (const char *const[]){ __VA_ARGS__, NULL })
#define EMPTY "x-amz-content-sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

static void each_operation_is_the_request_of_the_reference(void)
{
        struct store_object object = { "m.pt", "123456789", 9, NULL };
        struct store_victim victim = { "t/x", { "abc" } };
        struct store_upload *upload;
        struct store_entry entry;
        struct store_page page;
        struct store_stamp stamp;
        char bytes[3], *text;
        int64_t ns;

        begin(NULL, NULL);
        /* The check value of CRC-64/NVME is AE8B14860A799888; S3 wants its highest byte first. */
        CHECK(store->ops->put(store, "t/a b", "123456789", 9, STORE_IF_ABSENT, NULL, &stamp, &error) == NEBULA_OK && !strcmp(stamp.text, "e1"));
        CHECK(ASKED("PUT /data/run/t/a%20b", "x-amz-checksum-crc64nvme: rosUhgp5mIg=", "x-amz-sdk-checksum-algorithm: CRC64NVME", "If-None-Match: *", "Content-Length: 9",
                    "x-amz-content-sha256: 15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225"));
        CHECK(strstr(fake.last_head, "\r\nAuthorization: AWS4-HMAC-SHA256 Credential=AKID/") && strstr(fake.last_head, "/eu-west-1/s3/aws4_request,SignedHeaders=host;if-none-match;x-amz-checksum-crc64nvme;"
                                                                                                                     "x-amz-content-sha256;x-amz-date;x-amz-meta-nebula;x-amz-sdk-checksum-algorithm,Signature=") && !strstr(fake.last_head, "SECRET"));
        CHECK(store->ops->put(store, "t/a b", "x", 1, STORE_IF_SAME, &stamp, NULL, &error) == NEBULA_OK && ASKED("PUT /data/run/t/a%20b", "If-Match: \"e1\""));
        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK && !strstr(fake.last_head, "Match"));
        REQUIRE(store->ops->get(store, "t/x", 10, &text, NULL, &stamp, &error) == NEBULA_OK);
        CHECK(ASKED("GET /data/run/t/x", EMPTY) && !strstr(fake.last_head, "ange:"));
        free(text);
        CHECK(store->ops->read(store, "t/x", bytes, 0, 1, &error) == NEBULA_OK && ASKED("GET /data/run/t/x", "Range: bytes=0-0"));
        REQUIRE(store->ops->stat(store, "t/x", &entry, &error) == NEBULA_OK);
        CHECK(ASKED("HEAD /data/run/t/x", EMPTY) && entry.time_ns == 784111777LL * 1000000000 && !strcmp(entry.stamp.text, stamp.text));
        store_entry_done(&entry);
        CHECK(store->ops->remove(store, &victim, 1, &error) == NEBULA_OK && ASKED("DELETE /data/run/t/x", "If-Match: \"abc\"") && fake_find(&fake, "/data/run/t/x"));
        CHECK(store->ops->list(store, "t/", false, "m/1", &page, &error) == NEBULA_STORAGE); /* the fake has no lists: 404 */
        CHECK(ASKED("GET /data/?list-type=2&prefix=run%2Ft%2F&delimiter=%2F&continuation-token=m%2F1", EMPTY));
        CHECK(store->ops->clock(store, &ns, &error) == NEBULA_STORAGE); /* and no date */
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(ASKED("PUT /data/run/m.pt?partNumber=1&uploadId=up-1", "x-amz-checksum-crc64nvme: rosUhgp5mIg=") && !fake_find(&fake, "/data/run/m.pt"));
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK);
        CHECK(ASKED("POST /data/run/m.pt?uploadId=up-1", "If-None-Match: *", "x-amz-checksum-crc64nvme: rosUhgp5mIg=", "x-amz-checksum-type: FULL_OBJECT") &&
              !strcmp(fake.last_body, "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Part><PartNumber>1</PartNumber>"
                                      "<ETag>&quot;p1&quot;</ETag></Part></CompleteMultipartUpload>"));
        CHECK(fake_find(&fake, "/data/run/m.pt")->size == 9 && server_requests(server) == 12);
        end();
        setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required", 1);
        setenv("AWS_SESSION_TOKEN", "SESSION", 1);
        begin(NULL, NULL);
        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK && !strstr(fake.last_head, "checksum") && ASKED("PUT /data/run/t/x", "x-amz-security-token: SESSION"));
        end();
        unsetenv("AWS_REQUEST_CHECKSUM_CALCULATION");
        unsetenv("AWS_SESSION_TOKEN");
}

/* The k-th request has the fault, counted from 1, and `times` - 1 more. */
struct at {
        unsigned first, times;
        enum fake_fault fault;
};

static enum fake_fault fault_at(const struct server_call *call, void *argument)
{
        const struct at *at = argument;

        return call->number >= at->first && call->number < at->first + at->times ? at->fault : FAKE_NONE;
}

/*
 * fault (Object stores): The answer to a write that was done is lost.
 * result: The driver knows the object as its own.
 */
static void a_write_whose_answer_was_lost_is_known_as_its_own(void)
{
        static const enum fake_fault faults[] = { FAKE_LOST, FAKE_BROKEN };

        for (size_t i = 0; i < 2; i++) {
                struct store_object object = { "m.pt", "bytes", 5, NULL };
                struct at at = { 1, 1, faults[i] };
                struct store_stamp stamp, seen;
                struct store_upload *upload, *late;

                begin(fault_at, &at);
                CHECK(store->ops->put(store, "t/x", "mine", 4, STORE_IF_ABSENT, NULL, &stamp, &error) == NEBULA_OK);
                CHECK(server_requests(server) == 3 && !strcmp(stamp.text, "e1") && fake.etags == 1); /* done once, refused, looked at */
                CHECK(put("t/x", "another", STORE_IF_ABSENT) == NEBULA_BUSY && strstr(error.message, "t/x"));
                at.first = server_requests(server) + 1;
                seen = stamp;
                CHECK(store->ops->put(store, "t/x", "newer", 5, STORE_IF_SAME, &seen, &stamp, &error) == NEBULA_OK && !strcmp(stamp.text, "e2"));
                CHECK(store->ops->put(store, "t/x", "late", 4, STORE_IF_SAME, &seen, &stamp, &error) == NEBULA_BUSY);
                REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
                at.first = server_requests(server) + 1;
                CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && fake.etags == 3);
                REQUIRE(store->ops->upload(store, &object, 1, &late, &error) == NEBULA_OK);
                CHECK(store->ops->publish(store, late, &error) == NEBULA_BUSY && strstr(error.message, "m.pt") && fake.etags == 3);
                CHECK(!fake_uploads_open(&fake)); /* the late one was aborted */
                end();
        }
}

/* The first request is done late: after a second one was refused as concurrent, and a look found no object. */
static enum fake_fault land_late(const struct server_call *call, void *argument)
{
        struct fake_object *object = &fake.objects[0];
        char *writer = argument;

        if (call->number == 1) {
                server_field(call, "x-amz-meta-nebula", writer, sizeof object->writer);
                return FAKE_RESET;
        }
        if (call->number == 3) {
                free(object->data);
                object->data = NULL;
        }
        if (call->number != 2 && call->number != 4)
                return FAKE_NONE;
        strcpy(object->path, "/data/run/t/x");
        strcpy(object->writer, writer);
        object->data = strdup("mine");
        object->size = 4;
        object->etag = 7;
        return FAKE_NONE;
}

static void a_write_that_is_done_late_is_known_as_its_own(void)
{
        char writer[64] = "";
        struct store_stamp stamp;

        begin(land_late, writer);
        CHECK(store->ops->put(store, "t/x", "mine", 4, STORE_IF_ABSENT, NULL, &stamp, &error) == NEBULA_OK && !strcmp(stamp.text, "e7"));
        CHECK(server_requests(server) == 5 && *writer);
        end();
}

static char *make_big(void)
{
        char *data = malloc(BIG_BYTES);

        for (size_t i = 0; i < BIG_BYTES; i++)
                data[i] = (char)(i * 2654435761u >> 13);
        return data;
}

static void a_small_object_is_one_request(void)
{
        static char bytes[5] = "bytes";
        struct at at = { 0, 0, FAKE_LOST };
        struct store_written written;
        struct bulk_feed feed;
        const struct store_object objects[] = { { .key = "t/empty" }, { .key = "t/m.pt", .data = bytes, .size = 5, .feed = &feed, .ret_written = &written } };
        struct http_settings settings;
        struct store_upload *upload;
        struct fake_object *found;

        begin(fault_at, &at);
        settings = http_settings_now();
        settings.small_bytes = 5;
        http_settings_set(&settings);
        REQUIRE(!bulk_feed_init_pieces(&feed, 5));
        bulk_feed_report(&feed, 0);
        bulk_feed_end(&feed);
        REQUIRE(store->ops->upload(store, objects, 2, &upload, &error) == NEBULA_OK);
        memcpy(bytes, "later", 5); /* as the caller may from now on */
        CHECK(server_requests(server) == 0 && *written.mark.text);
        at = (struct at){ 2, 1, FAKE_LOST };
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && fake.etags == 2);
        found = fake_find(&fake, "/data/run/t/m.pt");
        CHECK(found && found->size == 5 && !memcmp(found->data, "bytes", 5) && !strcmp(found->writer, written.mark.text));
        CHECK(fake_find(&fake, "/data/run/t/empty") && !fake_uploads_open(&fake));
        at.times = 0;
        REQUIRE(store->ops->upload(store, objects, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_BUSY);
        REQUIRE(store->ops->upload(store, objects, 1, &upload, &error) == NEBULA_OK);
        store->ops->abort(store, upload);
        bulk_feed_done(&feed);
        end();
}

static void a_failure_in_the_body_of_a_200_is_one(void)
{
        struct store_object object = { "m.pt", "bytes", 5, NULL };
        struct store_upload *upload;

        begin(NULL, NULL);
        strcpy(fake.error_in_200, "InternalError"); /* goes away */
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && fake_find(&fake, "/data/run/m.pt"));
        strcpy(fake.error_in_200, "cut");
        object.key = "o.pt";
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && fake_find(&fake, "/data/run/o.pt"));
        strcpy(fake.error_in_200, "PreconditionFailed");
        object.key = "n.pt";
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_BUSY && !fake_find(&fake, "/data/run/n.pt") && !fake_uploads_open(&fake));
        end();
}

/* The first completion runs for long and its answer is lost: the next ones conflict with it, and then find its object. */
static void a_completion_that_meets_itself_is_known_as_its_own(void)
{
        struct store_object object = { "m.pt", "bytes", 5, NULL };
        struct store_upload *upload;

        for (unsigned conflicts = 2; conflicts <= 6; conflicts++) {
                struct at at = { 3, 1, conflicts % 2 ? FAKE_LOST : FAKE_BROKEN };

                begin(fault_at, &at);
                REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
                fake.conflicts = conflicts;
                CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && fake.etags == 1 && !fake.conflicts && !fake_uploads_open(&fake));
                end();
        }
        begin(NULL, NULL);
        CHECK(put("m.pt", "another", STORE_ALWAYS) == NEBULA_OK);
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        fake.conflicts = 10;
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_BUSY && fake.conflicts == 9 && !fake_uploads_open(&fake));
        end();
}

/* S3 asks for a new upload then. */
static void a_completion_that_conflicts_again_and_again_ends_its_upload(void)
{
        struct store_object object = { "m.pt", "bytes", 5, NULL };
        struct store_upload *upload;

        begin(NULL, NULL);
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        fake.conflicts = 1000000;
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_STORAGE && strstr(error.message, "m.pt: the store says that another write of it runs"));
        CHECK(store_class(&error) == STORE_LATER && !fake_uploads_open(&fake) && fake.conflicts == 1000000 - 3);
        fake.conflicts = 0;
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK);
        end();
}

/*
 * fault (Object stores): Connections break or stall, and answers are cut, have wrong lengths or changed bits.
 * result: The driver repeats the request, and takes no wrong byte. Agent and commands read a document or chunk with a
 * wrong checksum once more before they call it damaged.
 */
static void one_changed_answer_is_no_damage(void)
{
        struct at at = { 0, 0, FAKE_FLIP_ANSWER };
        uint64_t sum = sum_crc64(0, "bytes", 5);
        json_t *body = document_new("thing");
        char *text, *found, bytes[5];
        size_t size, found_size;

        begin(fault_at, &at);
        REQUIRE(body && document_format(body, &text, &size, &error) == NEBULA_OK);
        CHECK(put("d", text, STORE_ALWAYS) == NEBULA_OK && put("m.pt", "bytes", STORE_ALWAYS) == NEBULA_OK);
        at = (struct at){ server_requests(server) + 1, 1, FAKE_FLIP_ANSWER };
        CHECK(document_get(store, "d", &found, &found_size, NULL, &error) == NEBULA_OK && found_size == size && !memcmp(found, text, size));
        free(found);
        at.first = server_requests(server) + 1;
        CHECK(verify_chunk(store, "m.pt", bytes, 0, 5, sum, &error) == NEBULA_OK && !memcmp(bytes, "bytes", 5));
        at = (struct at){ server_requests(server) + 1, 2, FAKE_FLIP_ANSWER };
        CHECK(verify_chunk(store, "m.pt", bytes, 0, 5, sum, &error) == NEBULA_CORRUPT);
        end();
        free(text);
        json_decref(body);
}

static void bytes_that_change_on_the_way_are_sent_again(void)
{
        struct at at = { 3, 2, FAKE_FLIP_BODY };
        char *data = make_big();
        struct store_object object = { "m.pt", data, BIG_BYTES, NULL };
        struct store_upload *upload;
        struct fake_object *found;

        begin(fault_at, &at);
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(server_requests(server) == 1 + (BIG_BYTES + PIECE - 1) / PIECE + 2);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK); /* the fake compares the sum of the whole */
        found = fake_find(&fake, "/data/run/m.pt");
        CHECK(found && found->size == BIG_BYTES && !memcmp(found->data, data, BIG_BYTES));
        end();
        at = (struct at){ 2, 1000, FAKE_FLIP_BODY };
        begin(fault_at, &at);
        CHECK(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_STORAGE && error.http_status == 400 && strstr(error.message, "BadDigest"));
        CHECK(!fake_uploads_open(&fake));
        end();
        free(data);
}

static bool object_is(const char *path, const char *data)
{
        const struct fake_object *found = fake_find(&fake, path);

        return found && found->size == REFERRING_BYTES && !memcmp(found->data, data, REFERRING_BYTES);
}

/* Part 1 is of 8 MiB of the source, part 2 of the chunk that differs and 1 MiB, since a part has 5 MiB, and part 3 is the rest of the source. */
static void bytes_of_a_source_are_taken_from_it(void)
{
        static const char *const fields[] = { "x-amz-copy-source: /data/run/t/a.pt", "x-amz-copy-source-range: bytes=13631488-20972296",
                                              "x-amz-copy-source-if-match: \"e1\"", "PUT /data/run/t/b.pt?partNumber=3&uploadId=up-2 HTTP/1.1" };
        struct store_source source = { .key = "t/a.pt", .size = REFERRING_BYTES };
        char *data = referring_make();

        begin(NULL, NULL);
        CHECK(referring_upload(store, "t/a.pt", data, ~0u, NULL, &source.mark, &error) == REFERRING_BYTES && object_is("/data/run/t/a.pt", data));
        client_meets_server(&fake.lock);
        fake.body_bytes = 0;
        data[2 * REFERRING_CHUNK] ^= 1;
        client_meets_server(&fake.lock);
        CHECK(referring_upload(store, "t/b.pt", data, 1u << 2, &source, NULL, &error) == 5u << 20);
        client_meets_server(&fake.lock);
        CHECK(fake.body_bytes == 5u << 20 && object_is("/data/run/t/b.pt", data));
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
                CHECK(strstr(fake.copy_head, "partNumber=1") || strstr(fake.copy_head, fields[i]));
        end();
        free(data);
}

/* fault: as a_source_that_is_gone_or_another_object_costs_nothing_but_sending */
static void a_part_that_its_source_refuses_is_sent(void)
{
        static const int statuses[] = { 404, 412, 403, 200, 400, 501 };
        struct store_source source = { .key = "t/a.pt", .size = REFERRING_BYTES };
        char *data = referring_make();

        for (size_t i = 0; i <= sizeof statuses / sizeof *statuses; i++) {
                if (i % 3 && !getenv("NEBULA_TEST_NIGHTLY"))
                        continue;
                begin(NULL, NULL);
                CHECK(referring_upload(store, "t/a.pt", data, ~0u, NULL, &source.mark, &error) == REFERRING_BYTES);
                client_meets_server(&fake.lock);
                fake.copy_status = i < sizeof statuses / sizeof *statuses ? statuses[i] : 0;
                fake.replaces_source = !fake.copy_status;
                data[2 * REFERRING_CHUNK] ^= 1;
                fake.body_bytes = 0;
                client_meets_server(&fake.lock);
                CHECK(referring_upload(store, "t/b.pt", data, 1u << 2, &source, NULL, &error) == REFERRING_BYTES);
                client_meets_server(&fake.lock);
                CHECK(fake.body_bytes == REFERRING_BYTES && *fake.copy_head && object_is("/data/run/t/b.pt", data) && !fake_uploads_open(&fake));
                end();
        }
        free(data);
}

/* fault: as shared_bytes_that_have_rotted_are_written_again */
/* The service says the CRC-64 of a copied part, or its MD5 as the ETag. Bytes of which it says neither are sent, and so are rotten ones. */
static void bytes_of_a_source_count_only_with_the_checksum_of_the_service(void)
{
        struct store_source source = { .key = "t/a.pt", .size = REFERRING_BYTES };
        char *data = referring_make();

        for (int sums = FAKE_COPY_CRC64; sums <= FAKE_COPY_NO_SUM; sums++)
                for (int is_rotten = 0; is_rotten <= 1; is_rotten++) {
                        begin(NULL, NULL);
                        REQUIRE(referring_upload(store, "t/a.pt", data, ~0u, NULL, &source.mark, &error) == REFERRING_BYTES);
                        client_meets_server(&fake.lock);
                        fake.copy_sums = sums;
                        fake_find(&fake, "/data/run/t/a.pt")->data[7] ^= (char)is_rotten; /* and its ETag stays */
                        client_meets_server(&fake.lock);
                        CHECK((referring_upload(store, "t/b.pt", data, 0, &source, NULL, &error) != 0) == (is_rotten || sums == FAKE_COPY_NO_SUM));
                        client_meets_server(&fake.lock);
                        CHECK(object_is("/data/run/t/b.pt", data) && !fake_uploads_open(&fake));
                        end();
                }
        free(data);
}

struct handing {
        const char *right;
        unsigned checks;
};

/* A right chunk is handed over, and its receiver changes it. */
static enum nebula_status hand_over(void *argument, const void *data, uint64_t offset, uint64_t size, const uint64_t *crc64,
                                    struct nebula_error *ret_error)
{
        struct handing *handing = argument;

        (void)crc64;
        handing->checks++;
        if (memcmp(handing->right + offset, data, size))
                return error_set(ret_error, NEBULA_CORRUPT, 0, "chunk at %llu", (unsigned long long)offset);
        memset((void *)(uintptr_t)data, 0xee, size);
        return NEBULA_OK;
}

static void a_chunk_that_was_handed_over_is_not_written_again(void)
{
        struct at at = { 1000000, 1, FAKE_FLIP_ANSWER };
        char *data = make_big(), *back = calloc(1, 64000);
        struct handing handing = { data, 0 };
        unsigned written = 0;

        begin(fault_at, &at);
        REQUIRE(store->ops->put(store, "m.pt", data, 64000, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK);
        at.first = server_requests(server) + 1;
        CHECK(store->ops->read_bulk(store, "m.pt", back, 64000, 1000, hand_over, &handing, &error) == NEBULA_OK && server_requests(server) == at.first + 1);
        CHECK(handing.checks == 64 + 1); /* the one in the middle was wrong at first */
        for (size_t i = 0; i < 64000; i++)
                written += (unsigned char)back[i] != 0xee;
        CHECK(!written);
        end();
        free(data);
        free(back);
}

/*
 * fault (Object stores): A name, part or size is beyond the limits of the service.
 * result: It is refused before a byte is sent.
 */
static void limits_are_kept_by_the_client(void)
{
        char name[1100], *data = make_big();
        struct store_object object = { "m.pt", data, 1000, NULL };
        struct store_upload *upload;

        begin(NULL, NULL);
        s3_limits = limits;
        CHECK(s3_limits.parts_max == 10000 && s3_limits.part_bytes_max == 5ull << 30 && s3_limits.part_bytes >= 5u << 20);
        s3_limits = (struct object_limits){ .part_bytes = 10, .parts_good = 3, .part_bytes_good = 40, .parts_min = 1, .parts_max = 7, .part_bytes_max = 160, .read_bytes = 64 };
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK && server_requests(server) == 8);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && !memcmp(fake_find(&fake, "/data/run/m.pt")->data, data, 1000));
        object = (struct store_object){ "n.pt", data, 7 * 160 + 1, NULL };
        CHECK(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_INVALID && strstr(error.message, "n.pt") && server_requests(server) == 9);
        object = (struct store_object){ "empty", data, 0, NULL };
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && !fake_find(&fake, "/data/run/empty")->size);
        memset(name, 'a', sizeof name);
        for (size_t i = 100; i < sizeof name; i += 100)
                name[i] = '/';
        memcpy(name, "\xc3\xa4", 2); /* bytes count, not characters */
        name[1024 - strlen("run/")] = 0;
        CHECK(put(name, "x", STORE_ALWAYS) == NEBULA_OK);
        name[1024 - strlen("run/")] = 'a';
        name[1025 - strlen("run/")] = 0;
        CHECK(put(name, "x", STORE_ALWAYS) == NEBULA_INVALID && strstr(error.message, "1024 bytes"));
        end();
        free(data);
}

static void a_server_without_conditional_removals_is_looked_at_first(void)
{
        struct store_victim victim = { "t/x", { "e1" } };

        begin(NULL, NULL);
        fake.refuses_conditional_removal = true;
        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK && put("t/x", "2", STORE_ALWAYS) == NEBULA_OK);
        CHECK(store->ops->remove(store, &victim, 1, &error) == NEBULA_OK && fake_find(&fake, "/data/run/t/x"));
        strcpy(victim.stamp.text, "e2");
        CHECK(store->ops->remove(store, &victim, 1, &error) == NEBULA_OK && !fake_find(&fake, "/data/run/t/x"));
        CHECK(store->ops->remove(store, &victim, 1, &error) == NEBULA_OK);
        end();
}

/* Answers to the requests for bytes 8 to 15 of an object of 32 bytes, one after the other; the last one for all later requests. */
struct ranges {
        const struct range_answer {
                int status;
                const char *fields, *body;
        } *answers;
        unsigned count, asked;
};

static void serve_range(struct server_call *call, void *argument)
{
        struct ranges *ranges = argument;
        const struct range_answer *answer = &ranges->answers[ranges->asked < ranges->count ? ranges->asked : ranges->count - 1];

        ranges->asked++;
        server_say(call, answer->status, answer->fields, answer->body);
}

static enum nebula_status read_ranges(struct ranges *ranges, char back[9])
{
        enum nebula_status status;

        store_close(store);
        server_stop(server);
        ranges->asked = 0;
        server = server_start(serve_range, ranges, false);
        set_endpoint();
        open_store();
        memset(back, 0, 9);
        status = store->ops->read(store, "x", back, 8, 8, &error);
        return status;
}

/*
 * fault (Object stores): An answer has another range than was asked for, or the whole object.
 * result: The driver asks again, three times. Then the read fails, and the object does not count as damaged.
 */
static void an_answer_with_another_range_is_no_damage(void)
{
        static const struct range_answer good = { 206, "Content-Range: bytes 8-15/32\r\n", "89abcdef" };
        const struct range_answer others[] = {
                { 206, "Content-Range: bytes 8-11/32\r\n", "89ab" },     /* fewer bytes than were asked for */
                { 206, "Content-Range: bytes 0-7/32\r\n", "01234567" },
                { 206, "Content-Range: bytes 8-23/32\r\n", "89abcdef01234567" },
                { 206, "", "89abcdef" },
                { 200, "", "0123456789abcdef0123456789abcdef" },         /* the whole object */
                { 200, "", "<html>log in</html>" },
                { 200, "", "no" },
        };
        char back[9];

        begin(NULL, NULL);
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
                const struct range_answer both[] = { others[i], good };
                struct ranges first_wrong = { both, 2, 0 }, always_wrong = { &others[i], 1, 0 };

                CHECK(read_ranges(&first_wrong, back) == NEBULA_OK && first_wrong.asked == 2 && !strcmp(back, "89abcdef"));
                CHECK(read_ranges(&always_wrong, back) == NEBULA_UNAVAILABLE && strstr(error.message, "run/x: the answer is another range"));
        }
        CHECK(read_ranges(&(struct ranges){ &(struct range_answer){ 206, "Content-Range: bytes 8-11/12\r\n", "89ab" }, 1, 0 }, back) == NEBULA_CORRUPT &&
              strstr(error.message, "ends after 12 bytes, 16 were expected"));
        end();
}

struct said {
        int status;
        const char *fields, *code, *message;
};

static void say(struct server_call *call, void *argument)
{
        const struct said *said = argument;
        char text[2000];

        if (said->status == 200)
                snprintf(text, sizeof text, "%s", said->code);
        else
                snprintf(text, sizeof text, "<?xml version=\"1.0\"?><Error><Code>%s</Code><Message>%s</Message></Error>", said->code,
                         said->message ? said->message : "You have sent sig=SECRET");
        server_say(call, said->status, said->fields, text);
}

/* Opens a store whose server always answers so. */
static void begin_saying(struct said *said)
{
        begin(NULL, NULL);
        store_close(store);
        server_stop(server);
        server = server_start(say, said, false);
        set_endpoint();
        open_store();
}

static bool fails_with(const char *text)
{
        bool is_so = put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, text) && !strstr(error.message, "SECRET");

        printf("# %s\n", error.message);
        return is_so && store_class(&error) == STORE_NEVER;
}

/*
 * fault (Object stores): A key is wrong, or a SAS or token has expired.
 * result: The message names it, without the secret.
 */
static void a_refusal_says_what_to_do(void)
{
        struct said said = { 403, "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n", "RequestTimeTooSkewed" };
        struct store_page page;
        char *text;

        begin_saying(&said);
        CHECK(fails_with("minutes ahead of the store's"));
        said = (struct said){ 403, "", "RequestTimeTooSkewed" };
        CHECK(fails_with("clock"));
        said = (struct said){ 403, "", "SignatureDoesNotMatch" };
        CHECK(fails_with("the key of AWS_ACCESS_KEY_ID is not accepted"));
        said = (struct said){ 403, "", "InvalidAccessKeyId" };
        CHECK(fails_with("the key of AWS_ACCESS_KEY_ID is not accepted"));
        said = (struct said){ 400, "", "ExpiredToken" };
        CHECK(fails_with("expired"));
        said = (struct said){ 403, "", "AccessDenied" };
        CHECK(fails_with("s3:PutObject"));
        said = (struct said){ 301, "x-amz-bucket-region: eu-central-1\r\n", "PermanentRedirect" };
        CHECK(fails_with("the region eu-central-1: set AWS_REGION"));
        said = (struct said){ 404, "", "NoSuchBucket" };
        CHECK(fails_with("create the bucket"));
        CHECK(store->ops->get(store, "x", 10, &text, NULL, NULL, &error) == NEBULA_NOT_FOUND);
        /* It is not empty: a name with a typing error must not look like a storage path without checkpoints. */
        CHECK(store->ops->list(store, "", true, NULL, &page, &error) == NEBULA_STORAGE && strstr(error.message, "create the bucket"));
        CHECK(store_remove_one(store, "x", &error) == NEBULA_OK);
        said = (struct said){ 404, "x-amz-delete-marker: true\r\n", "NoSuchKey" }; /* a bucket with versions, after a removal */
        CHECK(store->ops->get(store, "x", 10, &text, NULL, NULL, &error) == NEBULA_NOT_FOUND && store_remove_one(store, "x", &error) == NEBULA_OK);
        said = (struct said){ 403, "", "AccessDenied" }; /* object lock, or a right that is missing: S3 says the same of both */
        CHECK(store_remove_one(store, "x", &error) == NEBULA_STORAGE && strstr(error.message, "s3:DeleteObject") && strstr(error.message, "object lock"));
        said = (struct said){ 403, "", "AccessDenied", "User: arn:aws:iam::1:user/u is not authorized to perform: kms:GenerateDataKey on resource: k\nmore" };
        CHECK(fails_with("403 AccessDenied: \"User: arn:aws:iam::1:user/u is not authorized to perform: kms:GenerateDataKey on resource: k\"; the store refuses the key of"));
        CHECK(!strstr(error.message, "s3:PutObject"));
        said = (struct said){ 403, "", "AccessDenied", "Access Denied" };
        CHECK(fails_with("s3:PutObject"));
        said = (struct said){ 400, "", "UserProjectMissing", "Bucket is a requester pays bucket but no user project provided." };
        CHECK(fails_with("400 UserProjectMissing: \"Bucket is a requester pays bucket but no user project provided.\""));
        said = (struct said){ 403, "", "InvalidObjectState" };
        CHECK(store->ops->get(store, "x", 10, &text, NULL, NULL, &error) == NEBULA_STORAGE && strstr(error.message, "archive"));
        end();
}

/* A store, and a place to which it sends reads. */
struct place {
        atomic_int sent;             /* reads that the store sent there */
        const char *status, *fields; /* of the store's answer: its status line's number, and more fields */
        char location[300];
        int answer;                  /* of the place; 0: the bytes */
        unsigned refusals;           /* so many answers are `answer`, then come the bytes */
        atomic_uint heads;
        char head[4096];
};

static void send_there(struct server_call *call, void *argument)
{
        struct place *there = argument;
        char fields[600];

        if (!strcmp(call->method, "HEAD") && !there->fields) { /* only GetObject leads elsewhere */
                atomic_fetch_add(&there->heads, 1);
                server_answer(call, 200, "ETag: \"e8\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n", "", 0);
                return;
        }
        atomic_fetch_add(&there->sent, 1);
        snprintf(fields, sizeof fields, "%s%s%s%s", *there->location ? "Location: " : "", there->location, *there->location ? "\r\n" : "",
                 there->fields ? there->fields : "");
        server_say(call, atoi(there->status), fields, "");
}

static void answer_there(struct server_call *call, void *argument)
{
        struct place *there = argument;
        char range[64];

        snprintf(there->head, sizeof there->head, "%s", call->head);
        if (there->answer && (there->refusals == UINT_MAX || there->refusals)) {
                there->refusals -= there->refusals != UINT_MAX;
                server_say(call, there->answer, "x-amz-bucket-region: us-west-2\r\n", "<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>");
        } else if (*server_field(call, "range", range, sizeof range)) {
                server_say(call, 206, "ETag: \"other\"\r\nContent-Range: bytes 2-4/6\r\n", "cde");
        } else {
                server_say(call, 200, "ETag: \"other\"\r\n", "abcdef");
        }
}

/* The store answers each read with this place; *ret_other is the place. */
static void begin_elsewhere(struct place *there, struct server **ret_other)
{
        *ret_other = server_start(answer_there, there, false);
        there->status = "302";
        snprintf(there->location, sizeof there->location, "http://127.0.0.1:%d/moved?sig=SECRET", server_port(*ret_other));
        begin(NULL, NULL);
        store_close(store);
        server_stop(server);
        server = server_start(send_there, there, false);
        set_endpoint();
        open_store();
}

/* fault: as an_expired_place_is_asked_for_once_more_and_never_says_that_there_is_no_object */
/* As Hugging Face's buckets answer. */
static void a_read_that_is_sent_elsewhere_is_made_there_without_credentials(void)
{
        static const char *const statuses[] = { "301", "302", "303", "307", "308" };
        struct place there = { .fields = "ETag: \"e7\"\r\n" };
        struct server *other;
        struct store_stamp stamp;
        char *text, bytes[3];

        begin_elsewhere(&there, &other);
        for (size_t i = 0; i < 5; i++) {
                there.status = statuses[i];
                REQUIRE(store->ops->get(store, "x", 10, &text, NULL, &stamp, &error) == NEBULA_OK);
                CHECK(!strcmp(text, "abcdef") && !strcmp(stamp.text, "e7") && !strncmp(there.head, "GET /moved?sig=SECRET HTTP/1.1\r\n", 32));
                free(text);
        }
        CHECK(store->ops->read(store, "x", bytes, 2, 3, &error) == NEBULA_OK && !memcmp(bytes, "cde", 3));
        CHECK(strstr(there.head, "\r\nRange: bytes=2-4\r\n") && !strstr(there.head, "Authorization") && !strstr(there.head, "x-amz"));
        CHECK(server_connections(other) == 1); /* one connection for all of them */
        server_stop(other);
        CHECK(store->ops->get(store, "x", 10, &text, NULL, NULL, &error) == NEBULA_UNAVAILABLE && !strstr(error.message, "SECRET"));
        end();
}

static bool get_fails(const char *sentence, int http_status)
{
        char *text = NULL;
        bool is_so = store->ops->get(store, "x", 10, &text, NULL, NULL, &error) == NEBULA_STORAGE && strstr(error.message, sentence) &&
                     error.http_status == http_status && !strstr(error.message, "SECRET");

        if (!is_so)
                printf("# %d %d %s\n", error.status, error.http_status, error.message);
        return is_so;
}

/* fault: as an_expired_place_is_asked_for_once_more_and_never_says_that_there_is_no_object */
static void a_place_that_a_read_must_not_go_to_is_named(void)
{
        struct place there = { 0 };
        struct server *other;

        begin_elsewhere(&there, &other);
        snprintf(there.location, sizeof there.location, "http://127.0.0.1:%d/x", server_port(server)); /* each answer leads there again */
        CHECK(get_fails("from place to place, more than 4 times", 302) && atomic_load(&there.sent) == 5);
        strcpy(there.location, "/x/y?sig=SECRET"); /* of the same host */
        CHECK(get_fails("from place to place", 302));
        *there.location = 0;
        CHECK(get_fails("names no place by http or https (Location)", 302));
        strcpy(there.location, "file:///etc/passwd");
        CHECK(get_fails("names no place", 302));
        strcpy(there.location, "http://cdn.example/x?sig=SECRET"); /* plain http to another machine */
        CHECK(store->ops->get(store, "x", 10, &(char *){ NULL }, NULL, NULL, &error) == NEBULA_INVALID && strstr(error.message, "NEBULA_STORE_ALLOW_HTTP"));
        there.fields = "";
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && error.http_status == 302 && strstr(error.message, "sends the write to another place"));
        there.status = "307";
        there.fields = "x-amz-bucket-region: eu-west-1\r\n"; /* S3 itself names an endpoint, which wants a signature */
        CHECK(get_fails("the region eu-west-1", 307));
        server_stop(other);
        end();
}

/*
 * fault (Storage): A store sends reads to another place (302), whose URL may have expired.
 * result: The driver reads there, without credentials, or asks the store once more. No answer from there says that an
 * object is missing.
 */
/* The store knows whether there is an object. The other place does not. */
static void an_expired_place_is_asked_for_once_more_and_never_says_that_there_is_no_object(void)
{
        static const int answers[] = { 403, 404, 410 };
        struct server *other;
        char *text;

        for (size_t i = 0; i < 3; i++) {
                struct place there = { .answer = answers[i], .refusals = 1 };

                begin_elsewhere(&there, &other);
                REQUIRE(store->ops->get(store, "x", 10, &text, NULL, NULL, &error) == NEBULA_OK && !strcmp(text, "abcdef"));
                free(text);
                CHECK(atomic_load(&there.sent) == 2);
                there.refusals = UINT_MAX;
                CHECK(get_fails("/moved, which does not give it", answers[i]) && atomic_load(&there.sent) == 4);
                CHECK(store->ops->read(store, "x", &(char){ 0 }, 2, 1, &error) == NEBULA_STORAGE);
                server_stop(other);
                end();
        }
}

static void the_stamp_of_another_place_is_none_of_the_object(void)
{
        struct place there = { 0 }; /* no ETag in the answer that leads elsewhere */
        struct server *other;
        struct store_stamp stamp;
        char *text;

        begin_elsewhere(&there, &other);
        REQUIRE(store->ops->get(store, "x", 10, &text, NULL, &stamp, &error) == NEBULA_OK && !strcmp(stamp.text, "e8"));
        free(text);
        CHECK(atomic_load(&there.heads) == 1 && atomic_load(&there.sent) == 2); /* the look is before the read that counts */
        server_stop(other);
        end();
}

/* The rules of a store that speaks the protocol and lacks parts of it. */
static void begin_lacking(unsigned lacks)
{
        begin(NULL, NULL);
        store_close(store);
        fake.lacks = lacks;
        s3_asks_stores = true;
        open_store();
}

/*
 * fault (Storage): A store that speaks S3's protocol lacks conditions, metadata, checksums or UploadPartCopy.
 * result: If it ignores the condition of a write, saves fail with a sentence. Else the driver takes another way, and no
 * upload replaces another one's object.
 */
static void a_store_that_ignores_the_condition_of_a_write_gets_none(void)
{
        begin_lacking(FAKE_LACKS_PUT_CONDITION);
        CHECK(put("t/x", "1", STORE_IF_ABSENT) == NEBULA_STORAGE && strstr(error.message, "If-None-Match") && store_class(&error) == STORE_NEVER);
        CHECK(put("t/y", "1", STORE_IF_ABSENT) == NEBULA_STORAGE);
        end();
        begin_lacking(0);
        CHECK(put("t/x", "1", STORE_IF_ABSENT) == NEBULA_OK && server_requests(server) == 2);
        CHECK(put("t/y", "1", STORE_IF_ABSENT) == NEBULA_OK && server_requests(server) == 3); /* it is asked once */
        end();
}

static void publish_as(const char *key, const char *bytes, enum nebula_status expected)
{
        struct store_object object = { key, bytes, strlen(bytes), NULL };
        struct store_upload *upload;

        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == expected);
}

/* fault: as a_store_that_ignores_the_condition_of_a_write_gets_none */
static void no_upload_replaces_an_object_where_completions_have_no_condition(void)
{
        static const unsigned lacks[] = { FAKE_LACKS_COMPLETE_CONDITION, FAKE_LACKS_METADATA, FAKE_LACKS_METADATA | FAKE_LACKS_COMPLETE_CONDITION };
        char said[200];

        for (size_t i = 0; i < 3; i++) {
                begin_lacking(lacks[i]);
                publish_as("t/m.pt", "bytes", NEBULA_OK);
                CHECK(!memcmp(fake_find(&fake, "/data/run/t/m.pt")->data, "bytes", 5) && !fake_uploads_open(&fake));
                CHECK(!strstr(fake.last_head, "If-None-Match"));
                publish_as("t/m.pt", "other", NEBULA_BUSY);
                CHECK(!memcmp(fake_find(&fake, "/data/run/t/m.pt")->data, "bytes", 5) && !fake_uploads_open(&fake));
                CHECK(store->ops->lacks(store, said, sizeof said, &error) == NEBULA_OK && strstr(said, lacks[i] & FAKE_LACKS_METADATA ? "metadata" : "If-None-Match"));
                for (size_t j = 0; j < FAKE_OBJECTS; j++) /* the probe's object is gone */
                        CHECK(!strstr(fake.objects[j].path, ".nebula-tmp") || !fake.objects[j].data);
                end();
        }
        begin_lacking(0);
        publish_as("t/m.pt", "bytes", NEBULA_OK);
        CHECK(strstr(fake.last_head, "If-None-Match: *") && store->ops->lacks(store, said, sizeof said, &error) == NEBULA_OK && !*said);
        end();
}

/* fault: as a_store_that_ignores_the_condition_of_a_write_gets_none */
static void a_lost_answer_is_known_as_its_own_without_metadata(void)
{
        struct at at = { 3, 1, FAKE_LOST };
        struct store_object object = { "m.pt", "bytes", 5, NULL };
        struct store_upload *upload;
        struct store_stamp stamp;

        begin_lacking(FAKE_LACKS_METADATA);
        fake.fault = fault_at;
        fake.argument = &at;
        CHECK(put("t/first", "1", STORE_IF_ABSENT) == NEBULA_OK && server_requests(server) == 2);
        CHECK(store->ops->put(store, "t/x", "mine", 4, STORE_IF_ABSENT, NULL, &stamp, &error) == NEBULA_OK && *stamp.text && server_requests(server) > 4);
        CHECK(put("t/x", "other", STORE_IF_ABSENT) == NEBULA_BUSY && put("t/x", "mine", STORE_IF_ABSENT) == NEBULA_BUSY);
        at.first = server_requests(server) + 1;
        CHECK(store->ops->put(store, "t/x", "more", 4, STORE_IF_SAME, &stamp, NULL, &error) == NEBULA_STORAGE && strstr(error.message, "the answer to a write was lost"));
        publish_as("o.pt", "bytes", NEBULA_OK);
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        at.first = server_requests(server) + 2; /* the reservation comes before the completion */
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && !memcmp(fake_find(&fake, "/data/run/m.pt")->data, "bytes", 5));
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_BUSY);
        end();
}

/* fault: as a_store_that_ignores_the_condition_of_a_write_gets_none */
static void a_removal_looks_first_where_it_has_no_condition(void)
{
        struct store_victim old = { "t/x", { "abc" } }, own = { "t/x", { "" } };
        struct store_entry entry;

        for (unsigned lacks = 0; lacks <= FAKE_LACKS_REMOVAL_CONDITION; lacks += FAKE_LACKS_REMOVAL_CONDITION) {
                begin_lacking(lacks);
                CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK && put("t/y", "2", STORE_ALWAYS) == NEBULA_OK);
                CHECK(store->ops->remove(store, &old, 1, &error) == NEBULA_OK && fake_find(&fake, "/data/run/t/x"));
                for (size_t i = 0; i < 2; i++) {
                        own.key = i ? "t/y" : "t/x";
                        REQUIRE(store->ops->stat(store, own.key, &entry, &error) == NEBULA_OK);
                        own.stamp = entry.stamp;
                        store_entry_done(&entry);
                        CHECK(put("t/z", "3", STORE_ALWAYS) == NEBULA_OK && store->ops->remove(store, &own, 1, &error) == NEBULA_OK);
                        CHECK(!fake_find(&fake, i ? "/data/run/t/y" : "/data/run/t/x"));
                }
                CHECK(put("t/y", "4", STORE_ALWAYS) == NEBULA_OK && store->ops->remove(store, &own, 1, &error) == NEBULA_OK && fake_find(&fake, "/data/run/t/y"));
                end();
        }
}

/* Another caller's removal comes between the look and the removal that asks whether the store knows conditions. */
static enum fake_fault remove_before(const struct server_call *call, void *argument)
{
        struct fake_object *object = !strcmp(call->method, "DELETE") ? fake_find(&fake, "/data/run/t/x") : NULL;

        if (!object)
                return FAKE_NONE;
        free(object->data);
        object->data = NULL;
        return FAKE_NONE;
}

static void a_removal_that_finds_nothing_any_more_is_done(void)
{
        struct store_victim victim = { "t/x", { "" } };
        struct store_entry entry;

        begin_lacking(0);
        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK);
        REQUIRE(store->ops->stat(store, "t/x", &entry, &error) == NEBULA_OK);
        victim.stamp = entry.stamp;
        store_entry_done(&entry);
        fake.fault = remove_before;
        CHECK(store->ops->remove(store, &victim, 1, &error) == NEBULA_OK && ASKED("DELETE /data/run/t/x", "If-Match: \"nebula-no-such-stamp\""));
        end();
}

/* fault: as a_store_that_ignores_the_condition_of_a_write_gets_none */
static void a_store_that_refuses_checksums_gets_bodies_without(void)
{
        begin_lacking(FAKE_LACKS_SUMS);
        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK && !strstr(fake.last_head, "checksum") && server_requests(server) == 2);
        publish_as("t/m.pt", "bytes", NEBULA_OK);
        CHECK(!memcmp(fake_find(&fake, "/data/run/t/m.pt")->data, "bytes", 5) && !strstr(fake.last_head, "checksum"));
        end();
}

static void a_read_that_ignores_its_condition_mixes_no_two_objects(void)
{
        char *bytes = make_big(), *back = malloc(BIG_BYTES);

        begin_lacking(FAKE_LACKS_GET_CONDITION | FAKE_REPLACES_WHILE_READ);
        CHECK(store->ops->put(store, "t/big", bytes, BIG_BYTES, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK);
        CHECK(store->ops->read_bulk(store, "t/big", back, BIG_BYTES, PIECE, NULL, NULL, &error) == NEBULA_STORAGE && strstr(error.message, "was replaced while it was read"));
        end();
        free(bytes);
        free(back);
}

static void a_copy_goes_as_a_whole_where_parts_cannot_be_copied(void)
{
        begin_lacking(0);
        fake.copy_status = 501;
        CHECK(put("t/x", "abc", STORE_ALWAYS) == NEBULA_OK && put("t/taken", "other", STORE_ALWAYS) == NEBULA_OK);
        CHECK(store->ops->copy(store, "t/x", "t/y", STORE_IF_ABSENT, &error) == NEBULA_OK && fake_find(&fake, "/data/run/t/y")->size == 3);
        CHECK(store->ops->copy(store, "t/x", "t/taken", STORE_IF_ABSENT, &error) == NEBULA_BUSY && fake_find(&fake, "/data/run/t/taken")->size == 5);
        end();
}

static void the_clock_of_a_store_without_request_ids_is_that_of_its_listing(void)
{
        int64_t ns = 0;

        begin_lacking(FAKE_LACKS_MARKS);
        CHECK(store->ops->clock(store, &ns, &error) == NEBULA_OK && ns == 784111777LL * 1000000000);
        end();
}

static void the_path_of_an_endpoint_comes_before_the_bucket(void)
{
        char endpoint[100];

        begin(NULL, NULL);
        snprintf(endpoint, sizeof endpoint, "http://127.0.0.1:%d/name/space/", server_port(server));
        setenv("AWS_ENDPOINT_URL", endpoint, 1);
        store_close(store);
        open_store();
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK && fake_find(&fake, "/name/space/data/run/x"));
        publish_as("m.pt", "bytes", NEBULA_OK);
        CHECK(ASKED("POST /name/space/data/run/m.pt?uploadId=up-1", "If-None-Match: *") && fake_find(&fake, "/name/space/data/run/m.pt"));
        snprintf(endpoint, sizeof endpoint, "http://127.0.0.1:%d/My%%20Org", server_port(server)); /* as it stands in the URL, so it is signed */
        setenv("AWS_ENDPOINT_URL", endpoint, 1);
        store_close(store);
        open_store();
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK && fake_find(&fake, "/My%20Org/data/run/x"));
        end();
}

/*
 * fault (Object stores): A service gives the same page of a listing again and again, or says that more follows and not
 * where.
 * result: The listing fails.
 */
static void a_listing_is_read_as_s3_writes_it(void)
{
        static const char text[] =
                "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>data</Name><Prefix>run/t/</Prefix>"
                "<NextContinuationToken>1ueGcxLPRx1Tr/XYExHnhbYLgveDs2J/wm36Hy4vbOwM=</NextContinuationToken><KeyCount>4</KeyCount><MaxKeys>1000</MaxKeys><Delimiter>/</Delimiter><IsTruncated>true</IsTruncated>"
                "<Contents><Key>run/t/a b</Key><LastModified>1994-11-06T08:49:37.000Z</LastModified><ETag>&quot;9b2cf535f27731c974343645a3985328&quot;</ETag><Size>1</Size><StorageClass>STANDARD</StorageClass></Contents>"
                "<Contents><Key>run/t/mark/</Key><LastModified>1994-11-06T08:49:37.000Z</LastModified><ETag>&quot;x&quot;</ETag><Size>0</Size></Contents>"
                "<Contents><Key>run/t/x&amp;y</Key><LastModified>1994-11-06T08:49:38.999Z</LastModified><ETag>&quot;4a5b-2&quot;</ETag><ChecksumAlgorithm>CRC64NVME</ChecksumAlgorithm><Size>12345678901</Size>"
                "<Owner><ID>1</ID><DisplayName>Key</DisplayName></Owner></Contents>"
                "<CommonPrefixes><Prefix>run/t/d/</Prefix></CommonPrefixes></ListBucketResult>";
        static const char *const bad[] = { "", "no", "<ListBucketResult><Contents><Key>run/x</Key>", "<Error/>", "<ListBucketResult><Contents><Key>run/x</Key><Size>1x</Size></Contents></ListBucketResult>",
                                           "<ListBucketResult><Contents><Key>run/x</Key><LastModified>yesterday</LastModified></Contents></ListBucketResult>",
                                           "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>" };
        struct said said = { 200, "", text };
        struct store_page page;

        begin_saying(&said);
        REQUIRE(store->ops->list(store, "t/", false, NULL, &page, &error) == NEBULA_OK);
        CHECK(page.count == 3 && !strcmp(page.next, "1ueGcxLPRx1Tr/XYExHnhbYLgveDs2J/wm36Hy4vbOwM="));
        CHECK(!strcmp(page.entries[0].key, "t/a b") && page.entries[0].size == 1 && !strcmp(page.entries[0].stamp.text, "9b2cf535f27731c974343645a3985328") && page.entries[0].time_ns == 784111777LL * 1000000000);
        CHECK(!strcmp(page.entries[1].key, "t/d") && page.entries[1].is_prefix);
        CHECK(!strcmp(page.entries[2].key, "t/x&y") && page.entries[2].size == 12345678901 && !strcmp(page.entries[2].stamp.text, "4a5b-2") && page.entries[2].time_ns == 784111778LL * 1000000000);
        CHECK(store->ops->list(store, "t/", false, page.next, &page, &error) == NEBULA_STORAGE && strstr(error.message, "the same page again"));
        store_page_done(&page);
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
                said.code = bad[i];
                CHECK(store->ops->list(store, "t/", false, NULL, &page, &error) == NEBULA_STORAGE);
        }
        end();
}

/* Uploads of four tags. Those of `old` rest since 1994. Of `busy`, a part of one came lately, and of `new` one was begun lately. */
struct listed {
        char ended[1000]; /* targets of aborts */
        unsigned lists, refusal;
        bool has_gone; /* one of `old` ends at this moment */
        bool ignores_key, ignores_part; /* the place at which a page begins */
};

#define UPLOAD(key, id, begun) "<Upload><Key>run/" key "</Key><UploadId>" id "</UploadId><Initiator><ID>x</ID></Initiator><Initiated>" begun "T08:49:37.000Z</Initiated></Upload>"
#define LIST(more, body) "<ListMultipartUploadsResult><Bucket>data</Bucket>" more body "</ListMultipartUploadsResult>"

static void serve_listed(struct server_call *call, void *argument)
{
        struct listed *listed = argument;
        size_t used = strlen(listed->ended);

        if (listed->refusal) {
                server_say(call, (int)listed->refusal, "", "<Error><Code>AccessDenied</Code></Error>");
        } else if (!strcmp(call->method, "DELETE")) {
                snprintf(listed->ended + used, sizeof listed->ended - used, "%s ", call->target);
                server_say(call, 204, "", "");
        } else if (strstr(call->target, "uploads=") || strstr(call->target, "?uploads")) {
                listed->lists++;
                server_say(call, 200, "", !listed->ignores_key && strstr(call->target, "key-marker=run%2Fold%2Fb") && strstr(call->target, "upload-id-marker=2")
                                                  ? LIST("<IsTruncated>false</IsTruncated>", UPLOAD("new/b", "6", "2030-01-01") UPLOAD("busy/b", "4", "1994-11-06") UPLOAD("other/b", "7", "1994-11-06"))
                                                  : LIST("<IsTruncated>true</IsTruncated><NextKeyMarker>run/old/b</NextKeyMarker><NextUploadIdMarker>2</NextUploadIdMarker>",
                                                         UPLOAD("old/b", "2", "1994-11-06") UPLOAD("busy/a", "3", "1994-11-06") UPLOAD("old/a", "1", "1994-11-06") UPLOAD("new/a", "5", "1994-11-06")));
        } else if (listed->has_gone && strstr(call->target, "uploadId=2")) {
                server_say(call, 404, "", "<Error><Code>NoSuchUpload</Code></Error>");
        } else {
                server_say(call, 200, "", strstr(call->target, "uploadId=4") && (listed->ignores_part || !strstr(call->target, "part-number-marker=1"))
                                                  ? "<ListPartsResult><IsTruncated>true</IsTruncated><NextPartNumberMarker>1</NextPartNumberMarker><Part><LastModified>1994-11-06T09:00:00.000Z</LastModified></Part></ListPartsResult>"
                                          : strstr(call->target, "uploadId=4")
                                                  ? "<ListPartsResult><IsTruncated>false</IsTruncated><Part><LastModified>2030-01-01T00:00:00.000Z</LastModified></Part></ListPartsResult>"
                                                  : "<ListPartsResult><IsTruncated>false</IsTruncated></ListPartsResult>");
        }
}

static int64_t limit_2020(void *argument, const char *key)
{
        return strncmp(key, "other/", 6) ? INT64_C(1577836800) * 1000000000 : INT64_MIN;
}

/* fault: as a_listing_is_read_as_s3_writes_it */
static void a_sweep_ends_the_uploads_of_a_tag_only_when_all_of_them_rest(void)
{
        struct listed listed = { .has_gone = true };
        size_t count = 99;

        begin(NULL, NULL);
        store_close(store);
        server_stop(server);
        server = server_start(serve_listed, &listed, false);
        set_endpoint();
        open_store();
        CHECK(store->ops->sweep(store, limit_2020, NULL, &count, &error) == NEBULA_OK && count == 0 && !*listed.ended && listed.lists == 2);
        listed.has_gone = false;
        CHECK(store->ops->sweep(store, limit_2020, NULL, &count, &error) == NEBULA_OK && count == 2 && !strcmp(listed.ended, "/data/run/old/a?uploadId=1 /data/run/old/b?uploadId=2 "));
        listed.ignores_part = true;
        CHECK(store->ops->sweep(store, limit_2020, NULL, &count, &error) == NEBULA_STORAGE && strstr(error.message, "the same page again"));
        listed.ignores_part = false;
        listed.ignores_key = true;
        CHECK(store->ops->sweep(store, limit_2020, NULL, &count, &error) == NEBULA_STORAGE && strstr(error.message, "the same page again"));
        listed.refusal = 403;
        CHECK(store->ops->sweep(store, limit_2020, NULL, &count, &error) == NEBULA_OK && count == 0);
        listed.refusal = 400;
        CHECK(store->ops->sweep(store, limit_2020, NULL, &count, &error) == NEBULA_STORAGE);
        end();
}

static void a_part_of_an_upload_that_was_ended_can_be_tried_again_later(void)
{
        struct object_part part;

        begin(NULL, NULL);
        CHECK(s3_multipart_send((struct object_store *)store, "m.pt", "up-99", &(struct object_range){ .size = 5 }, "bytes", &part, NULL, &error) == NEBULA_STORAGE);
        CHECK(strstr(error.message, "has ended its upload") && store_class(&error) == STORE_LATER);
        end();
}

static char told[STORE_RESUME_MAX];

static void tell(void *argument, const char *key, const char *text, bool is_last)
{
        snprintf(told, sizeof told, "%s", text);
}

/* Uploads six parts, and goes on with the upload; the list of its parts has three pages. */
static void interrupted_upload(bool lists_no_sums)
{
        struct store_resume first = { NULL, tell, NULL }, later = { told, tell, NULL };
        struct store_written written;
        char *data = calloc(6, PIECE);
        struct store_object object = { .key = "m.pt", .data = data, .size = 6 * PIECE, .ret_written = &written, .resume = &first };
        struct store_upload *upload;

        begin(NULL, NULL);
        fake.lists_no_sums = lists_no_sums;
        REQUIRE(data && store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK && fake.body_bytes == 6 * PIECE);
        store->ops->abort(store, upload);
        CHECK(fake_uploads_open(&fake) == 1 && strstr(told, " up-1"));
        data[3 * PIECE] = data[5 * PIECE + 1] = 1;
        object.resume = &later;
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(written.resumed == (lists_no_sums ? 0 : 4 * PIECE) && fake.body_bytes == 12 * PIECE - written.resumed);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && fake.uploads_begun == 1 && !fake_uploads_open(&fake));
        CHECK(!memcmp(fake_find(&fake, "/data/run/m.pt")->data, data, object.size)); /* the server has compared its CRC-64 */
        end();
        free(data);
}

static void parts_are_known_by_their_sums_and_no_other_counts(void)
{
        interrupted_upload(false);
        interrupted_upload(true); /* nor has it an MD5 */
}

/* Lends keys with the next number each time, and remembers the requests. */
struct lender {
        char heads[8][2048], body[4096];
        atomic_uint lent;
        bool is_xml;
        int refusal;
};

static void lend(struct server_call *call, void *argument)
{
        struct lender *lender = argument;
        char text[600];

        snprintf(lender->heads[call->number % 8], sizeof *lender->heads, "%s", call->head);
        snprintf(lender->body, sizeof lender->body, "%s", call->body);
        if (lender->refusal) {
                server_say(call, lender->refusal, "", "<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>");
                return;
        }
        if (!strcmp(call->target, "/latest/api/token")) {
                server_say(call, 200, "", "SESSION");
                return;
        }
        if (!strcmp(call->target, "/latest/meta-data/iam/security-credentials/")) {
                server_say(call, 200, "", "the-role\n");
                return;
        }
        snprintf(text, sizeof text, lender->is_xml ? "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>LENT%u</AccessKeyId><SecretAccessKey>SECRET</SecretAccessKey>"
                                                     "<SessionToken>TOKEN</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
                                                   : "{\"Code\":\"Success\",\"AccessKeyId\":\"LENT%u\",\"SecretAccessKey\":\"SECRET\",\"Token\":\"TOKEN\",\"Expiration\":\"2099-01-01T00:00:00Z\"}",
                 atomic_fetch_add(&lender->lent, 1) + 1);
        server_say(call, 200, "", text);
}

static const char *const lender_variables[] = { "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN",
                                                "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN", "AWS_ENDPOINT_URL_STS" };

/* Starts a service, tells it by the variable as http://127.0.0.1:port<path>, and opens the store without keys. */
static struct server *begin_lent(struct lender *lender, const char *variable, const char *path)
{
        struct server *service = server_start(lend, lender, false);
        char url[200];

        begin(NULL, NULL);
        unsetenv("AWS_ACCESS_KEY_ID");
        snprintf(url, sizeof url, "http://127.0.0.1:%d%s", server_port(service), path);
        setenv(variable, url, 1);
        strcpy(fake.access, "LENT1");
        return service;
}

static void end_lent(struct server *service)
{
        end();
        server_stop(service);
        for (size_t i = 0; i < sizeof lender_variables / sizeof *lender_variables; i++)
                unsetenv(lender_variables[i]);
        object_token_forget_all();
}

static void a_machines_role_lends_keys_in_a_session(void)
{
        struct lender lender = { .is_xml = false };
        struct server *service = begin_lent(&lender, "AWS_EC2_METADATA_SERVICE_ENDPOINT", "/");

        for (int i = 0; i < 5; i++)
                CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(server_requests(service) == 3 && ASKED("PUT /data/run/x", "x-amz-security-token: TOKEN"));
        CHECK(!strncmp(lender.heads[1], "PUT /latest/api/token HTTP/1.1\r\n", 32) && strstr(lender.heads[1], "\r\nx-aws-ec2-metadata-token-ttl-seconds: 21600\r\n"));
        CHECK(!strncmp(lender.heads[3], "GET /latest/meta-data/iam/security-credentials/the-role HTTP/1.1\r\n", 65) && strstr(lender.heads[3], "\r\nx-aws-ec2-metadata-token: SESSION\r\n"));
        end_lent(service);
        lender = (struct lender){ .refusal = 404 };
        service = begin_lent(&lender, "AWS_EC2_METADATA_SERVICE_ENDPOINT", "");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, "the role of this machine gets no keys"));
        CHECK(strstr(error.message, "AWS_SECRET_ACCESS_KEY is set without AWS_ACCESS_KEY_ID"));
        printf("# %s\n", error.message);
        end_lent(service);
        setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1", 1);
        begin(NULL, NULL);
        unsetenv("AWS_ACCESS_KEY_ID");
        unsetenv("AWS_SECRET_ACCESS_KEY");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_UNAVAILABLE && strstr(error.message, "hold no keys"));
        printf("# %s\n", error.message);
        end();
        setenv("AWS_EC2_METADATA_DISABLED", "true", 1);
        begin(NULL, NULL);
        unsetenv("AWS_ACCESS_KEY_ID");
        unsetenv("AWS_SECRET_ACCESS_KEY");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_UNAVAILABLE && strstr(error.message, "AWS_EC2_METADATA_DISABLED is set"));
        end();
        unsetenv("AWS_EC2_METADATA_DISABLED");
        unsetenv("AWS_EC2_METADATA_SERVICE_ENDPOINT");
}

static void a_container_s_secret_goes_to_no_other_machine(void)
{
        static const char *const names[] = { "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI" };
        static const char *const bad[][2] = { { "http://192.0.2.1/get", ".example.com/get" }, { "http://169.254.170.2.example.com/get", "@example.com/get" },
                                              { "ftp://127.0.0.1/get", ":1@example.com/" } };

        begin(NULL, NULL);
        unsetenv("AWS_ACCESS_KEY_ID");
        setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "Basic xyz", 1);
        for (size_t i = 0; i < 6; i++) {
                setenv(names[i % 2], bad[i / 2][i % 2], 1);
                CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_INVALID && strstr(error.message, names[i % 2]) && !strstr(error.message, "xyz"));
                unsetenv(names[i % 2]);
        }
        unsetenv("AWS_CONTAINER_AUTHORIZATION_TOKEN");
        end();
}

/* fault: as a_token_that_is_refused_is_replaced_in_the_middle_of_an_upload */
static void keys_that_ended_are_replaced_in_the_middle_of_an_upload(void)
{
        struct lender lender = { .is_xml = false };
        struct server *service = begin_lent(&lender, "AWS_CONTAINER_CREDENTIALS_FULL_URI", "/get?role=1");
        char *data = make_big();
        struct store_object object = { "m.pt", data, BIG_BYTES, NULL };
        struct store_upload *upload;

        setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "Basic xyz", 1);
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(!strncmp(lender.heads[1], "GET /get?role=1 HTTP/1.1\r\n", 26) && strstr(lender.heads[1], "\r\nAuthorization: Basic xyz\r\n"));
        pthread_mutex_lock(&fake.lock);
        strcpy(fake.access, "LENT2");
        pthread_mutex_unlock(&fake.lock);
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && atomic_load(&lender.lent) == 2);
        strcpy(fake.access, "other");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, "the role of this container is not accepted: its session has expired") && !strstr(error.message, "SECRET"));
        free(data);
        end_lent(service);
}

static void a_web_identity_posts_its_file(void)
{
        struct lender lender = { .is_xml = true };
        struct server *service = begin_lent(&lender, "AWS_ENDPOINT_URL_STS", "/");
        char directory[256], path[300];

        test_dir_make(directory);
        snprintf(path, sizeof path, "%s/token", directory);
        os_write_file_atomic(path, "signed.by+cluster\n", 18);
        setenv("AWS_WEB_IDENTITY_TOKEN_FILE", path, 1);
        setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x", 1);
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(!strncmp(lender.heads[1], "POST / HTTP/1.1\r\n", 17) && !strcmp(lender.body, "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fx&RoleSessionName=nebula&WebIdentityToken=signed.by%2Bcluster"));
        end_lent(service);
        lender = (struct lender){ .refusal = 403 };
        service = begin_lent(&lender, "AWS_ENDPOINT_URL_STS", "/");
        setenv("AWS_WEB_IDENTITY_TOKEN_FILE", path, 1);
        setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x", 1);
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, "the role of AWS_ROLE_ARN gets no keys: the answer is 403 AccessDenied"));
        test_dir_remove(directory);
        end_lent(service);
}

/*
 * fault (Object stores): A bucket is in another region.
 * result: The driver goes there.
 */
static void the_region_of_a_bucket_is_learned(void)
{
        begin(NULL, NULL);
        strcpy(fake.region, "eu-central-1");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK && put("x", "2", STORE_ALWAYS) == NEBULA_OK && server_requests(server) == 3);
        end();
}

static struct fake_object *held; /* of the last transfer; NULL: it was not published */

static const void *find_object(const char *key, size_t *ret_size)
{
        char path[64];

        snprintf(path, sizeof path, "/data/run/%s", key);
        held = fake_find(&fake, path);
        *ret_size = held ? held->size : 0;
        return held ? held->data : NULL;
}

/* fault: as one_changed_answer_is_no_damage */
/* Here the stored bytes are right, too. */
static void no_fault_makes_wrong_bytes(void)
{
        unsigned seldom = 6, good = 0, open = 0, count = fault_transfers();
        char *data = make_big(), *back = malloc(BIG_BYTES), key[32];
        struct http_settings settings;

        begin(fault_seldom, &seldom);
        settings = http_settings_now();
        settings.width_max = settings.width_first = 8;
        settings.quiet_ms = settings.answer_ms = 100;
        http_settings_set(&settings);
        for (unsigned i = 0; i < count; i++) {
                snprintf(key, sizeof key, "m%u.pt", i);
                good += transfer(store, key, data + i % 50, BIG_BYTES - 50, back, find_object);
                if (held)
                        memset(held->path, 0, sizeof held->path); /* the server has room for few */
                open += fake_uploads_drop(&fake);
        }
        printf("# %u of %u transfers, %u requests, %u uploads left open\n", good, count, server_requests(server), open);
        CHECK(good > count * 9 / 10);
        end();
        free(data);
        free(back);
}

TAP_MAIN(TEST(each_operation_is_the_request_of_the_reference), TEST(a_write_whose_answer_was_lost_is_known_as_its_own), TEST(a_write_that_is_done_late_is_known_as_its_own),
         TEST(a_small_object_is_one_request), TEST(a_failure_in_the_body_of_a_200_is_one), TEST(a_completion_that_meets_itself_is_known_as_its_own), TEST(a_completion_that_conflicts_again_and_again_ends_its_upload), TEST(one_changed_answer_is_no_damage), TEST(bytes_that_change_on_the_way_are_sent_again), TEST(bytes_of_a_source_are_taken_from_it),
         TEST(a_part_that_its_source_refuses_is_sent), TEST(bytes_of_a_source_count_only_with_the_checksum_of_the_service), TEST(a_chunk_that_was_handed_over_is_not_written_again), TEST(limits_are_kept_by_the_client),
         TEST(a_server_without_conditional_removals_is_looked_at_first), TEST(a_removal_that_finds_nothing_any_more_is_done), TEST(an_answer_with_another_range_is_no_damage), TEST(a_refusal_says_what_to_do), TEST(a_read_that_is_sent_elsewhere_is_made_there_without_credentials), TEST(a_place_that_a_read_must_not_go_to_is_named),
         TEST(an_expired_place_is_asked_for_once_more_and_never_says_that_there_is_no_object), TEST(the_stamp_of_another_place_is_none_of_the_object), TEST(a_store_that_ignores_the_condition_of_a_write_gets_none),
         TEST(no_upload_replaces_an_object_where_completions_have_no_condition), TEST(a_lost_answer_is_known_as_its_own_without_metadata), TEST(a_removal_looks_first_where_it_has_no_condition),
         TEST(a_store_that_refuses_checksums_gets_bodies_without), TEST(a_read_that_ignores_its_condition_mixes_no_two_objects), TEST(a_copy_goes_as_a_whole_where_parts_cannot_be_copied),
         TEST(the_clock_of_a_store_without_request_ids_is_that_of_its_listing), TEST(the_path_of_an_endpoint_comes_before_the_bucket),
         TEST(a_listing_is_read_as_s3_writes_it),
         TEST(a_sweep_ends_the_uploads_of_a_tag_only_when_all_of_them_rest), TEST(a_part_of_an_upload_that_was_ended_can_be_tried_again_later), TEST(parts_are_known_by_their_sums_and_no_other_counts), TEST(a_machines_role_lends_keys_in_a_session), TEST(a_container_s_secret_goes_to_no_other_machine), TEST(keys_that_ended_are_replaced_in_the_middle_of_an_upload),
         TEST(a_web_identity_posts_its_file), TEST(the_region_of_a_bucket_is_learned), TEST(no_fault_makes_wrong_bytes))
