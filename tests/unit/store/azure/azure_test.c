/* The Azure driver against a server that loses answers, changes bytes and checks limits. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

#include "base/error.h"
#include "os/os.h"
#include "store/azure/azure_private.h"
#include "store/azure/fake_azure.h"
#include "store/http/client.h"
#include "store/lanes.h"
#include "store/http/referring.h"
#include "store/http/renewed_sas.h"
#include "store/http/transfers.h"
#include "sum/sum.h"
#include "tap.h"
#include "test_dir.h"

#define BIG_BYTES ((1u << 20) + 777)

static struct nebula_error error;
static struct fake_azure fake;
static struct server *server;
static struct store *store;
static struct object_limits limits;

static void open_store(const char *query)
{
        char url[200];

        snprintf(url, sizeof url, "http://127.0.0.1:%d/acct/data/run%s", server_port(server), query);
        if (store_azure.open(url, &store, &error))
                abort();
}

/* Blocks and ranges of 64 KiB; quick to give up and to repeat. */
static void begin(enum fake_fault (*fault)(const struct server_call *call, void *argument), void *argument)
{
        static struct http_settings real;
        struct http_settings settings;

        if (!real.slowest) {
                real = http_settings_now();
                limits = azure_limits;
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
        azure_limits = limits;
        azure_limits.part_bytes = azure_limits.part_bytes_good = azure_limits.read_bytes = 64u << 10;
        fake_init(&fake);
        fake.fault = fault;
        fake.argument = argument;
        server = server_start(fake_serve, &fake, false);
        open_store("?sv=1&sig=SECRET");
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

/* Checks the request line of the last request, and that its header has these lines. */
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
#define ASKED(line, ...) was_asked(line, (const char *const[]){ "x-ms-version: " AZURE_VERSION, ##__VA_ARGS__, NULL })

static void each_operation_is_the_request_of_the_reference(void)
{
        struct store_object object = { "m.pt", "123456789", 9, NULL };
        struct store_victim victim = { "t/x", { "0xABC" } };
        struct store_upload *upload;
        struct store_entry entry;
        struct store_page page;
        struct store_stamp stamp;
        char bytes[3], *text;
        int64_t ns;

        begin(NULL, NULL);
        /* The check value of CRC-64/NVME is AE8B14860A799888, sent with its lowest byte first. */
        CHECK(store->ops->put(store, "t/a b", "123456789", 9, STORE_IF_ABSENT, NULL, &stamp, &error) == NEBULA_OK && !strcmp(stamp.text, "0x1"));
        CHECK(ASKED("PUT /acct/data/run/t/a%20b?sv=1&sig=SECRET", "x-ms-blob-type: BlockBlob", "x-ms-content-crc64: iJh5CoYUi64=", "If-None-Match: *",
                    "Content-Length: 9"));
        CHECK(store->ops->put(store, "t/a b", "x", 1, STORE_IF_SAME, &stamp, NULL, &error) == NEBULA_OK && ASKED("PUT /acct/data/run/t/a%20b?sv=1&sig=SECRET", "If-Match: \"0x1\""));
        CHECK(put("t/x", "1", STORE_ALWAYS) == NEBULA_OK && !strstr(fake.last_head, "Match"));
        REQUIRE(store->ops->get(store, "t/x", 10, &text, NULL, &stamp, &error) == NEBULA_OK);
        CHECK(ASKED("GET /acct/data/run/t/x?sv=1&sig=SECRET") && !strstr(fake.last_head, "range"));
        free(text);
        CHECK(store->ops->read(store, "t/x", bytes, 0, 1, &error) == NEBULA_OK && ASKED("GET /acct/data/run/t/x?sv=1&sig=SECRET", "x-ms-range: bytes=0-0"));
        REQUIRE(store->ops->stat(store, "t/x", &entry, &error) == NEBULA_OK);
        CHECK(ASKED("HEAD /acct/data/run/t/x?sv=1&sig=SECRET") && entry.time_ns == 784111777LL * 1000000000 && !strcmp(entry.stamp.text, stamp.text));
        store_entry_done(&entry);
        CHECK(store->ops->remove(store, &victim, 1, &error) == NEBULA_OK);
        CHECK(ASKED("DELETE /acct/data/run/t/x?sv=1&sig=SECRET", "If-Match: \"0xABC\"", "x-ms-delete-snapshots: include"));
        CHECK(store->ops->list(store, "t/", false, "m/1", &page, &error) == NEBULA_STORAGE); /* the fake has no lists: 404 */
        CHECK(ASKED("GET /acct/data?restype=container&comp=list&prefix=run%2Ft%2F&delimiter=%2F&marker=m%2F1&sv=1&sig=SECRET"));
        CHECK(store->ops->clock(store, &ns, &error) == NEBULA_STORAGE); /* and no date */
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(!strncmp(fake.last_head, "PUT /acct/data/run/m.pt?comp=block&blockid=", 43) && strstr(fake.last_head, "\r\nx-ms-content-crc64: iJh5CoYUi64=\r\n"));
        CHECK(!fake_find(&fake, "/acct/data/run/m.pt"));
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK);
        CHECK(ASKED("PUT /acct/data/run/m.pt?comp=blocklist&sv=1&sig=SECRET", "If-None-Match: *") && !strncmp(fake.last_body, "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList><Uncommitted>", 62));
        CHECK(fake_find(&fake, "/acct/data/run/m.pt")->size == 9);
        end();
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

static void a_put_whose_answer_was_lost_is_known_as_its_own(void)
{
        static const enum fake_fault faults[] = { FAKE_LOST, FAKE_BROKEN };

        for (size_t i = 0; i < 2; i++) {
                struct at at = { 1, 1, faults[i] };
                struct store_stamp stamp, seen;

                begin(fault_at, &at);
                CHECK(store->ops->put(store, "t/x", "mine", 4, STORE_IF_ABSENT, NULL, &stamp, &error) == NEBULA_OK);
                CHECK(server_requests(server) == 3 && !strcmp(stamp.text, "0x1") && fake.etags == 1); /* done once, refused, looked at */
                CHECK(put("t/x", "another", STORE_IF_ABSENT) == NEBULA_BUSY && strstr(error.message, "t/x"));
                at.first = server_requests(server) + 1;
                seen = stamp;
                CHECK(store->ops->put(store, "t/x", "newer", 5, STORE_IF_SAME, &seen, &stamp, &error) == NEBULA_OK && !strcmp(stamp.text, "0x2"));
                CHECK(store->ops->put(store, "t/x", "late", 4, STORE_IF_SAME, &seen, &stamp, &error) == NEBULA_BUSY);
                end();
        }
}

static void a_publication_whose_answer_was_lost_is_known_as_its_own(void)
{
        static const enum fake_fault faults[] = { FAKE_LOST, FAKE_BROKEN };

        for (size_t i = 0; i < 2; i++) {
                struct store_object object = { "m.pt", "bytes", 5, NULL };
                struct at at = { 2, 1, faults[i] };
                struct store_upload *upload, *late;

                begin(fault_at, &at);
                REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
                CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && fake.etags == 1);
                REQUIRE(store->ops->upload(store, &object, 1, &late, &error) == NEBULA_OK);
                CHECK(store->ops->publish(store, late, &error) == NEBULA_BUSY && strstr(error.message, "m.pt") && fake.etags == 1);
                end();
        }
}

/* Of two uploads to one key, Azure drops the blocks of the second, even if the first object is gone. */
static void an_upload_that_came_second_gives_way(void)
{
        struct store_object object = { "m.pt", "bytes", 5, NULL };
        struct store_upload *first, *second;

        begin(NULL, NULL);
        REQUIRE(store->ops->upload(store, &object, 1, &first, &error) == NEBULA_OK && store->ops->upload(store, &object, 1, &second, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, first, &error) == NEBULA_OK && store_remove_one(store, "m.pt", &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, second, &error) == NEBULA_BUSY && !fake_find(&fake, "/acct/data/run/m.pt"));
        end();
}

static char *make_big(void)
{
        char *data = malloc(BIG_BYTES);

        for (size_t i = 0; i < BIG_BYTES; i++)
                data[i] = (char)(i * 2654435761u >> 13);
        return data;
}

static void bytes_that_change_on_the_way_are_sent_again(void)
{
        struct at at = { 3, 2, FAKE_FLIP_BODY };
        char *data = make_big();
        struct store_object object = { "m.pt", data, BIG_BYTES, NULL };
        struct store_upload *upload;

        begin(fault_at, &at);
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK);
        CHECK(fake_find(&fake, "/acct/data/run/m.pt") && fake_find(&fake, "/acct/data/run/m.pt")->size == BIG_BYTES &&
              !memcmp(fake_find(&fake, "/acct/data/run/m.pt")->data, data, BIG_BYTES));
        end();
        at = (struct at){ 1, 1000, FAKE_FLIP_BODY };
        begin(fault_at, &at);
        CHECK(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_STORAGE && error.http_status == 400 && strstr(error.message, "Crc64Mismatch"));
        end();
        free(data);
}

/* Uploads the data, and tells the sums of all pieces but those from `unsent` on; `wrong`: changed bits of the last told one. */
static enum nebula_status upload_summed(const char *data, uint64_t size, uint64_t unsent, uint64_t wrong)
{
        struct bulk_feed feed;
        struct store_object object = { .key = "m.pt", .data = data, .size = size, .feed = &feed };
        struct store_upload *upload = NULL;
        enum nebula_status status;

        CHECK(!bulk_feed_init_pieces(&feed, size));
        for (uint64_t piece = 0; piece < unsent; piece++) {
                uint64_t offset = piece * BULK_REQUEST_BYTES, left = size - offset;
                uint64_t sum = sum_crc64(0, data + offset, left < BULK_REQUEST_BYTES ? left : BULK_REQUEST_BYTES);

                bulk_feed_report_summed(&feed, offset, piece + 1 == unsent ? sum ^ wrong : sum, false);
        }
        bulk_feed_report_all(&feed);
        bulk_feed_end(&feed);
        status = store->ops->upload(store, &object, 1, &upload, &error);
        store->ops->abort(store, upload);
        bulk_feed_done(&feed);
        return status;
}

/* The server compares each block with its sum. */
static void a_block_has_the_sum_that_its_producer_reported(void)
{
        const uint64_t size = 3 * (uint64_t)BULK_REQUEST_BYTES + 777;
        char *data = malloc(size);

        begin(NULL, NULL);
        azure_limits.part_bytes = azure_limits.part_bytes_good = 2 * BULK_REQUEST_BYTES;
        for (uint64_t i = 0; i < size; i++)
                data[i] = (char)(i * 7 + (i >> 9));
        CHECK(upload_summed(data, size, 4, 0) == NEBULA_OK);
        CHECK(upload_summed(data, size, 4, 2) == NEBULA_STORAGE && strstr(error.message, "Crc64Mismatch"));
        CHECK(upload_summed(data, size, 2, 2) == NEBULA_STORAGE && strstr(error.message, "Crc64Mismatch"));
        CHECK(upload_summed(data, size, 3, 2) == NEBULA_OK); /* the other piece of that block has none */
        end();
        free(data);
}

/* At the path of "m.pt", committed. */
static void plant(const char *data, size_t size)
{
        struct fake_blob *blob = &fake.blobs[0];

        snprintf(blob->path, sizeof blob->path, "/acct/data/run/m.pt");
        free(blob->data);
        blob->data = malloc(size + 1);
        memcpy(blob->data, data, size);
        blob->size = size;
        blob->etag = ++fake.etags;
}

static void a_chunk_that_changed_on_the_way_is_read_again(void)
{
        struct at at = { 4, 1, FAKE_FLIP_ANSWER };
        char *data = make_big(), *back = calloc(1, BIG_BYTES);

        begin(fault_at, &at);
        plant(data, BIG_BYTES);
        CHECK(store->ops->read_bulk(store, "m.pt", back, BIG_BYTES, 32u << 10, check_chunk, data, &error) == NEBULA_OK);
        CHECK(!memcmp(data, back, BIG_BYTES) && server_requests(server) == (BIG_BYTES >> 16) + 2);
        fake.blobs[0].data[5 << 16] ^= 1; /* in the store itself */
        CHECK(store->ops->read_bulk(store, "m.pt", back, BIG_BYTES, 32u << 10, check_chunk, data, &error) == NEBULA_CORRUPT && strstr(error.message, "chunk at 327680"));
        end();
        free(data);
        free(back);
}

static void an_object_that_is_too_short_says_how_long_it_is(void)
{
        char *data = make_big(), *back = calloc(1, 2 * BIG_BYTES);

        begin(NULL, NULL);
        plant(data, BIG_BYTES);
        CHECK(store->ops->read_bulk(store, "m.pt", back, BIG_BYTES + 1, 32u << 10, NULL, NULL, &error) == NEBULA_CORRUPT && strstr(error.message, "ends after 1049353 bytes, 1049354"));
        CHECK(store->ops->read(store, "m.pt", back, BIG_BYTES + 5, 10, &error) == NEBULA_CORRUPT && strstr(error.message, "ends after 1049353 bytes"));
        CHECK(store->ops->read(store, "m.pt", back, BIG_BYTES - 5, 10, &error) == NEBULA_CORRUPT);
        CHECK(store->ops->read(store, "m.pt", back, BIG_BYTES, 0, &error) == NEBULA_OK && store->ops->read(store, "m.pt", back, BIG_BYTES + 1, 0, &error) == NEBULA_CORRUPT);
        end();
        free(data);
        free(back);
}

/* Another object lies at the key from the third request on. */
static enum fake_fault replace_at(const struct server_call *call, void *argument)
{
        if (call->number == 3)
                fake.blobs[0].etag = ++fake.etags;
        return FAKE_NONE;
}

static void ranges_of_two_contents_are_never_mixed(void)
{
        char *data = make_big(), *back = calloc(1, BIG_BYTES);

        begin(replace_at, NULL);
        plant(data, BIG_BYTES);
        CHECK(store->ops->read_bulk(store, "m.pt", back, BIG_BYTES, 32u << 10, NULL, NULL, &error) == NEBULA_STORAGE && strstr(error.message, "replaced"));
        end();
        free(data);
        free(back);
}

/* fault: as limits_are_kept_by_the_client */
static void limits_are_kept_by_the_client(void)
{
        char name[1100], *data = make_big();
        struct store_object object = { "m.pt", data, 1000, NULL };
        struct store_upload *upload;

        begin(NULL, NULL);
        azure_limits = limits;
        CHECK(azure_limits.parts_max == 50000 && azure_limits.part_bytes_max == 4000ull << 20);
        azure_limits = (struct object_limits){ .part_bytes = 10, .parts_good = 3, .part_bytes_good = 40, .parts_max = 7, .part_bytes_max = 160, .read_bytes = 64 };
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK && server_requests(server) == 7);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && !memcmp(fake_find(&fake, "/acct/data/run/m.pt")->data, data, 1000));
        object = (struct store_object){ "n.pt", data, 7 * 160 + 1, NULL };
        CHECK(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_INVALID && strstr(error.message, "n.pt") && server_requests(server) == 8);
        memset(name, 'a', sizeof name);
        for (size_t i = 100; i < sizeof name; i += 100)
                name[i] = '/';
        name[1024 - strlen("run/")] = 0;
        CHECK(put(name, "x", STORE_ALWAYS) == NEBULA_OK);
        name[1024 - strlen("run/")] = 'a';
        name[1025 - strlen("run/")] = 0;
        CHECK(put(name, "x", STORE_ALWAYS) == NEBULA_INVALID && strstr(error.message, "1024"));
        memset(name, 'a', 255);
        name[255] = 0;
        CHECK(put(name, "x", STORE_ALWAYS) == NEBULA_INVALID && strstr(error.message, "254"));
        end();
        free(data);
}

struct said {
        int status;
        const char *fields, *text;
};

static void say(struct server_call *call, void *argument)
{
        const struct said *said = argument;

        server_say(call, said->status, said->fields, said->text);
}

/* Opens a store whose server always answers so. */
static void begin_saying(struct said *said)
{
        begin(NULL, NULL);
        store_close(store);
        server_stop(server);
        server = server_start(say, said, false);
        open_store("?sv=1&sig=SECRET");
}

static void send_elsewhere(struct server_call *call, void *argument)
{
        char *head = argument;

        if (!strncmp(call->target, "/moved", 6)) {
                strcpy(head, call->head);
                server_say(call, 206, "ETag: \"other\"\r\nContent-Range: bytes 1-2/3\r\n", "bc");
        } else {
                server_say(call, 302, "Location: /moved?sig=S\r\nETag: \"e3\"\r\n", "");
        }
}

static void a_read_that_is_sent_elsewhere_is_made_there_without_credentials(void)
{
        char head[8192] = "", bytes[2];

        begin(NULL, NULL);
        store_close(store);
        server_stop(server);
        server = server_start(send_elsewhere, head, false);
        open_store("?sv=1&sig=SECRET");
        CHECK(store->ops->read(store, "x", bytes, 1, 2, &error) == NEBULA_OK && !memcmp(bytes, "bc", 2));
        CHECK(!strncmp(head, "GET /moved?sig=S HTTP/1.1\r\n", 27) && strstr(head, "\r\nRange: bytes=1-2\r\n") && !strstr(head, "x-ms-") && !strstr(head, "SECRET"));
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, "sends the write to another place") && !strstr(error.message, "SECRET"));
        end();
}

/* fault: as a_refusal_says_what_to_do */
static void a_refusal_says_what_to_do(void)
{
        struct said said = { 403, "x-ms-error-code: AuthenticationFailed\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\n", "<Error><Code>AuthenticationFailed</Code></Error>" };
        char date[HTTP_DATE_SIZE], fields[200], *text;
        struct store_page page;

        begin_saying(&said);
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && error.http_status == 403 && strstr(error.message, "clock") && store_class(&error) == STORE_NEVER);
        printf("# %s\n", error.message);
        http_date_format(os->wall_ns() / 1000000000, date);
        snprintf(fields, sizeof fields, "x-ms-error-code: AuthenticationFailed\r\nDate: %s\r\n", date);
        said.fields = fields;
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, "the SAS of the storage path") && strstr(error.message, "expired") && !strstr(error.message, "SECRET"));
        printf("# %s\n", error.message);
        said = (struct said){ 403, "x-ms-error-code: AuthorizationPermissionMismatch\r\n", "" };
        CHECK(store->ops->list(store, "", true, NULL, &page, &error) == NEBULA_STORAGE && strstr(error.message, "Storage Blob Data Contributor"));
        said = (struct said){ 403, "x-ms-error-code: KeyBasedAuthenticationNotPermitted\r\n", "<Error><Code>K</Code><Message>no</Message></Error>" };
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, "the account takes no keys") && !strstr(error.message, "wrong or expired"));
        said = (struct said){ 403, "x-ms-error-code: AccountIsDisabled\r\n", "<Error><Code>A</Code><Message>The specified account is disabled.\nTime:1</Message></Error>" };
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, "\"The specified account is disabled.\"; the store refuses the SAS"));
        said = (struct said){ 404, "x-ms-error-code: ContainerNotFound\r\n", "" };
        CHECK(put("x", "1", STORE_IF_ABSENT) == NEBULA_STORAGE && strstr(error.message, "create the container") && store_class(&error) == STORE_NEVER);
        CHECK(store->ops->get(store, "x", 10, &text, NULL, NULL, &error) == NEBULA_NOT_FOUND);
        /* It is not empty: a name with a typing error must not look like a storage path without checkpoints. */
        CHECK(store->ops->list(store, "", true, NULL, &page, &error) == NEBULA_STORAGE && strstr(error.message, "create the container"));
        CHECK(store_remove_one(store, "x", &error) == NEBULA_OK);
        said = (struct said){ 409, "x-ms-error-code: BlobImmutableDueToPolicy\r\n", "" };
        CHECK(store_remove_one(store, "x", &error) == NEBULA_STORAGE && strstr(error.message, "from being changed"));
        end();
}

static void a_listing_is_read_as_azure_writes_it(void)
{
        static const char text[] =
                "\xEF\xBB\xBF<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults ServiceEndpoint=\"https://acct.blob.core.windows.net/\" ContainerName=\"data\">"
                "<Prefix>run/</Prefix><Blobs>"
                "<Blob><Name>run/t/x&amp;y</Name><Properties><Creation-Time>Sun, 06 Nov 1994 08:49:37 GMT</Creation-Time><Last-Modified>Sun, 06 Nov 1994 08:49:38 GMT</Last-Modified>"
                "<Etag>0x8D1</Etag><Content-Length>12345678901</Content-Length><BlobType>BlockBlob</BlobType></Properties><OrMetadata /></Blob>"
                "<Blob><Name>run/t/dir</Name><Properties><ResourceType>directory</ResourceType><Content-Length>0</Content-Length></Properties></Blob>"
                "<Blob><Name Encoded=\"true\">run/t/a%20b</Name><Properties><Etag>\"0x8D2\"</Etag><Content-Length>1</Content-Length></Properties></Blob>"
                "<Blob><Name>run/t/mark/</Name><Properties><Content-Length>0</Content-Length></Properties></Blob>"
                "<Blob><Name>run/t/raw\\</Name><Properties><Content-Length>0</Content-Length></Properties></Blob>"
                "<BlobPrefix><Name>run/t/d/</Name></BlobPrefix>"
                "</Blobs><NextMarker>2!76!MDAwMDEy</NextMarker></EnumerationResults>";
        static const char *const bad[] = { "", "no", "<EnumerationResults><Blobs><Blob><Name>run/x</Name>", "<Error/>",
                                           "<EnumerationResults><Blobs><Blob><Name>run/x</Name><Properties><Content-Length>1x</Content-Length></Properties></Blob></Blobs></EnumerationResults>" };
        struct said said = { 200, "", text };
        struct store_page page;

        begin_saying(&said);
        REQUIRE(store->ops->list(store, "t/", false, NULL, &page, &error) == NEBULA_OK);
        CHECK(page.count == 3 && !strcmp(page.next, "2!76!MDAwMDEy"));
        CHECK(!strcmp(page.entries[0].key, "t/a b") && page.entries[0].size == 1 && !strcmp(page.entries[0].stamp.text, "0x8D2"));
        CHECK(!strcmp(page.entries[1].key, "t/d") && page.entries[1].is_prefix);
        CHECK(!strcmp(page.entries[2].key, "t/x&y") && page.entries[2].size == 12345678901 && !strcmp(page.entries[2].stamp.text, "0x8D1") && page.entries[2].time_ns == 784111778LL * 1000000000);
        store_page_done(&page);
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
                said.text = bad[i];
                CHECK(store->ops->list(store, "t/", false, NULL, &page, &error) == NEBULA_STORAGE);
        }
        end();
}

/* The copy is pending until the third look. */
static void copy_slowly(struct server_call *call, void *argument)
{
        const char *result = argument, *fields = "x-ms-copy-status: pending\r\nContent-Length: 5\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n";
        char done[200];

        snprintf(done, sizeof done, "x-ms-copy-status: %s\r\n", result);
        if (!strcmp(call->method, "PUT"))
                server_say(call, 202, "x-ms-copy-status: pending\r\n", "");
        else
                server_say(call, 200, call->number < 5 ? fields : done, "");
}

static void a_copy_is_waited_for(void)
{
        static const char *const results[] = { "success", "failed" };

        for (size_t i = 0; i < 2; i++) {
                begin(NULL, NULL);
                store_close(store);
                server_stop(server);
                server = server_start(copy_slowly, (void *)(uintptr_t)results[i], false);
                open_store("?sv=1&sig=SECRET");
                /* The copy reads the source's properties first, and that answer has a size. */
                CHECK(store->ops->copy(store, "a", "b", STORE_ALWAYS, &error) == (i ? NEBULA_STORAGE : NEBULA_OK) && server_requests(server) == 5);
                end();
        }
}

/* The SAS is renewed just before the request that names the source. */
static void copy_renewed(struct server_call *call, void *argument)
{
        char source[200];

        server_field(call, "x-ms-copy-source", source, sizeof source);
        if (*source && !renewed_sas.is_new)
                renewed_sas_write(true);
        if (!renewed_sas_takes(call, source))
                server_say(call, 403, "x-ms-error-code: AuthenticationFailed\r\n", "");
        else if (*source)
                server_say(call, 202, "x-ms-copy-status: success\r\n", "");
        else
                server_say(call, 200, "Content-Length: 5\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n", "");
}

static void a_copy_goes_on_with_the_new_sas_of_the_file(void)
{
        begin(NULL, NULL);
        store_close(store);
        server_stop(server);
        renewed_sas_begin();
        server = server_start(copy_renewed, NULL, false);
        open_store("");
        CHECK(store->ops->copy(store, "a", "b", STORE_ALWAYS, &error) == NEBULA_OK && server_requests(server) == 3);
        end();
        renewed_sas_end();
}

/* A service that hands out tokens, each with the next number, and remembers the last request. */
struct issuer {
        int life_s, status;
        char head[2048], body[4096];
        atomic_uint tokens;
        bool is_starting; /* 404 to the first two */
};

static void issue(struct server_call *call, void *argument)
{
        struct issuer *issuer = argument;
        char text[200];

        snprintf(issuer->head, sizeof issuer->head, "%s", call->head);
        snprintf(issuer->body, sizeof issuer->body, "%s", call->body);
        if ((issuer->is_starting && call->number <= 2) || issuer->status) {
                server_say(call, issuer->status ? issuer->status : 404, "", "{\"error\":\"invalid_client\",\"error_description\":\"because\"}");
                return;
        }
        snprintf(text, sizeof text, "{\"access_token\":\"SECRET%u\",\"expires_in\":\"%d\",\"token_type\":\"Bearer\"}", atomic_fetch_add(&issuer->tokens, 1) + 1, issuer->life_s);
        server_say(call, 200, "Content-Type: application/json\r\n", text);
}

static const char *const identity_variables[] = { "AZURE_POD_IDENTITY_AUTHORITY_HOST", "AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE",
                                                  "AZURE_AUTHORITY_HOST", "IDENTITY_ENDPOINT", "IDENTITY_HEADER", "MSI_ENDPOINT", "MSI_SECRET", "DEFAULT_IDENTITY_CLIENT_ID" };

/* Starts a service, tells it by the variable as http://127.0.0.1:port<path>, and opens the store without a SAS. */
static struct server *begin_identity(struct issuer *issuer, const char *variable, const char *path)
{
        struct server *service = server_start(issue, issuer, false);
        char url[200];

        begin(NULL, NULL);
        store_close(store);
        object_token_forget_all();
        snprintf(url, sizeof url, "http://127.0.0.1:%d%s", server_port(service), path);
        setenv(variable, url, 1);
        strcpy(fake.token, "Bearer SECRET1");
        open_store("");
        return service;
}

static void end_identity(struct server *service)
{
        end();
        server_stop(service);
        for (size_t i = 0; i < sizeof identity_variables / sizeof *identity_variables; i++)
                unsetenv(identity_variables[i]);
        object_token_forget_all();
}

static void the_machines_identity_is_asked_once(void)
{
        struct issuer issuer = { .life_s = 3600, .is_starting = true };
        struct server *service = begin_identity(&issuer, "AZURE_POD_IDENTITY_AUTHORITY_HOST", "");

        for (int i = 0; i < 5; i++)
                CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(atomic_load(&issuer.tokens) == 1 && server_requests(service) == 3);
        CHECK(!strncmp(issuer.head, "GET /metadata/identity/oauth2/token?api-version=2018-02-01&resource=https%3A%2F%2Fstorage.azure.com%2F HTTP/1.1\r\n", 109) &&
              strstr(issuer.head, "\r\nMetadata: true\r\n"));
        end_identity(service);
        issuer = (struct issuer){ .status = 400 };
        service = begin_identity(&issuer, "AZURE_POD_IDENTITY_AUTHORITY_HOST", "");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, "the environment holds no key, SAS or identity for this account: "
              "the managed identity of this machine gets no token: the answer is 400 invalid_client: because"));
        end_identity(service);
}

/*
 * fault (Object stores): A token or temporary keys end in the middle of an upload.
 * result: The driver gets new ones.
 */
static void a_token_that_is_refused_is_replaced_in_the_middle_of_an_upload(void)
{
        struct issuer issuer = { .life_s = 3600 };
        struct server *service = begin_identity(&issuer, "AZURE_POD_IDENTITY_AUTHORITY_HOST", "");
        char *data = make_big();
        struct store_object object = { "m.pt", data, BIG_BYTES, NULL };
        struct store_upload *upload;

        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        pthread_mutex_lock(&fake.lock);
        strcpy(fake.token, "Bearer SECRET2");
        pthread_mutex_unlock(&fake.lock);
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && atomic_load(&issuer.tokens) == 2);
        strcpy(fake.token, "Bearer other");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && error.http_status == 401 && strstr(error.message, "managed identity") && !strstr(error.message, "SECRET"));
        free(data);
        end_identity(service);
}

static void a_token_is_replaced_before_it_ends(void)
{
        struct issuer issuer = { .life_s = 1 };
        struct server *service = begin_identity(&issuer, "AZURE_POD_IDENTITY_AUTHORITY_HOST", "");

        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK && put("x", "1", STORE_ALWAYS) == NEBULA_OK && atomic_load(&issuer.tokens) == 1);
        os->sleep_ms(600); /* of a short life, half */
        issuer.status = 400;
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK); /* the service fails: the old one is good for a while */
        os->sleep_ms(500);
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, "because"));
        issuer.status = 0;
        strcpy(fake.token, "Bearer SECRET2");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        end_identity(service);
}

static void the_endpoints_of_app_service_and_azure_ml_are_asked_their_way(void)
{
        struct issuer issuer = { .life_s = 3600 };
        struct server *service;

        setenv("IDENTITY_HEADER", "HEADER", 1);
        setenv("AZURE_CLIENT_ID", "me", 1);
        service = begin_identity(&issuer, "IDENTITY_ENDPOINT", "/msi/token");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(!strncmp(issuer.head, "GET /msi/token?api-version=2019-08-01&resource=https%3A%2F%2Fstorage.azure.com%2F&client_id=me HTTP/1.1\r\n", 103) &&
              strstr(issuer.head, "\r\nX-IDENTITY-HEADER: HEADER\r\n"));
        end_identity(service);
        issuer = (struct issuer){ .life_s = 3600 };
        setenv("MSI_SECRET", "HIDDEN", 1);
        setenv("DEFAULT_IDENTITY_CLIENT_ID", "me", 1);
        service = begin_identity(&issuer, "MSI_ENDPOINT", "/token");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(!strncmp(issuer.head, "GET /token?api-version=2017-09-01&resource=https%3A%2F%2Fstorage.azure.com%2F&clientid=me HTTP/1.1\r\n", 98) &&
              strstr(issuer.head, "\r\nsecret: HIDDEN\r\n"));
        end_identity(service);
}

static void a_workload_identity_posts_its_file(void)
{
        struct issuer issuer = { .life_s = 3600 };
        struct server *service;
        char directory[256], path[300];

        test_dir_make(directory);
        snprintf(path, sizeof path, "%s/token", directory);
        os_write_file_atomic(path, "signed.by+cluster\n", 18);
        setenv("AZURE_CLIENT_ID", "me", 1);
        setenv("AZURE_TENANT_ID", "tenant", 1);
        setenv("AZURE_FEDERATED_TOKEN_FILE", path, 1);
        service = begin_identity(&issuer, "AZURE_AUTHORITY_HOST", "/");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(!strncmp(issuer.head, "POST /tenant/oauth2/v2.0/token HTTP/1.1\r\n", 41) && strstr(issuer.head, "\r\nContent-Type: application/x-www-form-urlencoded\r\n"));
        CHECK(!strcmp(issuer.body, "client_id=me&grant_type=client_credentials&scope=https%3A%2F%2Fstorage.azure.com%2F.default&"
                                   "client_assertion_type=urn%3Aietf%3Aparams%3Aoauth%3Aclient-assertion-type%3Ajwt-bearer&client_assertion=signed.by%2Bcluster"));
        object_token_forget_all();
        os_write_file_atomic(path, "another", 7); /* the cluster replaces it */
        strcpy(fake.token, "Bearer SECRET2");
        store_close(store);
        open_store("");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK && strstr(issuer.body, "client_assertion=another"));
        test_dir_remove(directory);
        end_identity(service);
}

/* Makes a program `az` with this text, and finds it first. */
static void write_az(const char *directory, const char *text)
{
        char path[300], *before = getenv("PATH"), after[4096];

        snprintf(path, sizeof path, "%s/az", directory);
        REQUIRE(!os_write_file_atomic(path, text, strlen(text)) && !chmod(path, 0700));
        snprintf(after, sizeof after, "%s:%s", directory, before);
        if (strncmp(before, directory, strlen(directory)))
                setenv("PATH", after, 1);
}

static void a_login_of_az_gives_tokens_where_the_machine_has_no_identity(void)
{
        struct issuer issuer = { .status = 400 };
        char directory[256], *path = strdup(getenv("PATH"));
        struct store_reach reach;
        struct server *service;

        test_dir_make(directory);
        write_az(directory, "#!/bin/sh\n[ \"$*\" = 'account get-access-token --output json --resource https://storage.azure.com/' ] || exit 2\n"
                            "echo called >>\"$0.calls\"\n"
                            "echo '{\"accessToken\": \"SECRET1\", \"expiresOn\": \"2030-01-01 00:00:00.000000\", \"expires_on\": 1893456000}'\n");
        service = begin_identity(&issuer, "AZURE_POD_IDENTITY_AUTHORITY_HOST", "");
        for (int i = 0; i < 3; i++)
                CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(store->ops->reach(store, &reach, &error) == NEBULA_OK && !strcmp(reach.credential, "tokens for the login of az"));
        CHECK(server_requests(service) == 1);
        issuer = (struct issuer){ .life_s = 3600 };
        strcpy(fake.token, "Bearer SECRET2"); /* a refused token is replaced; now the machine has an identity, and that goes first */
        atomic_store(&issuer.tokens, 1);
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_OK);
        CHECK(store->ops->reach(store, &reach, &error) == NEBULA_OK && !strcmp(reach.credential, "tokens for the managed identity of this machine"));
        end_identity(service);

        issuer = (struct issuer){ .status = 400 };
        write_az(directory, "#!/bin/sh\necho SECRET; echo SECRET >&2; exit 1\n");
        service = begin_identity(&issuer, "AZURE_POD_IDENTITY_AUTHORITY_HOST", "");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && !strstr(error.message, "SECRET"));
        CHECK(strstr(error.message, "`az account get-access-token` ended with the code 1: run it in a shell to see why: the environment holds no key, SAS or identity"));
        write_az(directory, "#!/bin/sh\necho '[]'\n");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_STORAGE && strstr(error.message, "does not print a JSON object with accessToken: the environment"));
        CHECK(store->ops->reach(store, &reach, &error) == NEBULA_STORAGE);
        end_identity(service);
        setenv("PATH", path, 1);
        free(path);
        test_dir_remove(directory);
}

static void without_any_credential_the_error_says_so(void)
{
        struct http_settings settings;

        begin(NULL, NULL);
        store_close(store);
        object_token_forget_all();
        setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", "http://127.0.0.1:1", 1);
        settings = http_settings_now();
        settings.retry_ms = settings.retry_new_ms = 50;
        http_settings_set(&settings);
        open_store("");
        CHECK(put("x", "1", STORE_ALWAYS) == NEBULA_UNAVAILABLE && strstr(error.message, "no key, SAS or identity"));
        printf("# %s\n", error.message);
        unsetenv("AZURE_POD_IDENTITY_AUTHORITY_HOST");
        end();
        object_token_forget_all();
}

static struct fake_blob *held; /* of the last transfer; NULL: it was not published */

static const void *find_blob(const char *key, size_t *ret_size)
{
        char path[64];

        snprintf(path, sizeof path, "/acct/data/run/%s", key);
        held = fake_find(&fake, path);
        *ret_size = held ? held->size : 0;
        return held ? held->data : NULL;
}

/* fault: as one_changed_answer_is_no_damage */
/* Here the stored bytes are right, too. */
static void no_fault_makes_wrong_bytes(void)
{
        unsigned seldom = 6, good = 0, count = fault_transfers();
        char *data = make_big(), *back = malloc(BIG_BYTES), key[32];
        struct http_settings settings;

        begin(fault_seldom, &seldom);
        settings = http_settings_now();
        settings.width_max = settings.width_first = 8;
        settings.quiet_ms = settings.answer_ms = 100;
        http_settings_set(&settings);
        for (unsigned i = 0; i < count; i++) {
                snprintf(key, sizeof key, "m%u.pt", i);
                good += transfer(store, key, data + i % 50, BIG_BYTES - 50, back, find_blob);
                if (held)
                        memset(held->path, 0, sizeof held->path); /* the server has room for few */
        }
        printf("# %u of %u transfers, %u requests\n", good, count, server_requests(server));
        CHECK(good > count * 9 / 10);
        end();
        free(data);
        free(back);
}

static bool blob_is(const char *path, const char *data)
{
        const struct fake_blob *found = fake_find(&fake, path);

        return found && found->size == REFERRING_BYTES && !memcmp(found->data, data, REFERRING_BYTES);
}

static void bytes_of_a_source_are_taken_from_it(void)
{
        struct store_source source = { .key = "t/a.pt", .size = REFERRING_BYTES };
        char *data = referring_make(), wanted[200];

        begin(NULL, NULL);
        CHECK(referring_upload(store, "t/a.pt", data, ~0u, NULL, &source.mark, &error) == REFERRING_BYTES && blob_is("/acct/data/run/t/a.pt", data));
        client_meets_server(&fake.lock);
        fake.body_bytes = 0;
        data[4 * REFERRING_CHUNK] ^= 1;
        client_meets_server(&fake.lock);
        CHECK(referring_upload(store, "t/b.pt", data, 1u << 4, &source, NULL, &error) == REFERRING_CHUNK);
        client_meets_server(&fake.lock);
        CHECK(fake.body_bytes == REFERRING_CHUNK && blob_is("/acct/data/run/t/b.pt", data));
        snprintf(wanted, sizeof wanted, "x-ms-copy-source: http://127.0.0.1:%d/acct/data/run/t/a.pt?sv=1&sig=SECRET\r\n", server_port(server));
        CHECK(strstr(fake.copy_head, wanted) && strstr(fake.copy_head, "\r\nx-ms-source-if-match: \"0x1\"\r\n"));
        CHECK(strstr(fake.copy_head, "\r\nx-ms-source-range: bytes=0-16777215\r\n") || strstr(fake.copy_head, "\r\nx-ms-source-range: bytes=20971520-20972296\r\n"));
        end();
        free(data);
}

/* fault: as a_source_that_is_gone_or_another_object_costs_nothing_but_sending */
static void a_block_that_its_source_refuses_is_sent(void)
{
        static const int statuses[] = { 404, 412, 403, 400, 409, 501 };
        struct store_source source = { .key = "t/a.pt", .size = REFERRING_BYTES };
        char *data = referring_make();

        for (size_t i = 0; i < sizeof statuses / sizeof *statuses + 2; i++) {
                if (i % 3 && i < sizeof statuses / sizeof *statuses && !getenv("NEBULA_TEST_NIGHTLY"))
                        continue;
                begin(NULL, NULL);
                CHECK(referring_upload(store, "t/a.pt", data, ~0u, NULL, &source.mark, &error) == REFERRING_BYTES);
                client_meets_server(&fake.lock);
                REQUIRE(fake_find(&fake, "/acct/data/run/t/a.pt"));
                fake.copy_status = i < sizeof statuses / sizeof *statuses ? statuses[i] : 0;
                fake.replaces_source = i == sizeof statuses / sizeof *statuses;
                if (i > sizeof statuses / sizeof *statuses) /* the service compares what it has read */
                        for (unsigned chunk = 0; chunk < REFERRING_CHUNKS; chunk++)
                                fake_find(&fake, "/acct/data/run/t/a.pt")->data[chunk * REFERRING_CHUNK + 9] ^= 1;
                data[2 * REFERRING_CHUNK] ^= 1;
                fake.body_bytes = 0;
                client_meets_server(&fake.lock);
                CHECK(referring_upload(store, "t/b.pt", data, 1u << 2, &source, NULL, &error) == REFERRING_BYTES);
                client_meets_server(&fake.lock);
                CHECK(fake.body_bytes == REFERRING_BYTES && *fake.copy_head && blob_is("/acct/data/run/t/b.pt", data));
                end();
        }
        free(data);
}

TAP_MAIN(TEST(a_read_that_is_sent_elsewhere_is_made_there_without_credentials), TEST(bytes_of_a_source_are_taken_from_it), TEST(a_block_that_its_source_refuses_is_sent),
         TEST(each_operation_is_the_request_of_the_reference), TEST(a_put_whose_answer_was_lost_is_known_as_its_own),
         TEST(a_publication_whose_answer_was_lost_is_known_as_its_own), TEST(an_upload_that_came_second_gives_way),
         TEST(bytes_that_change_on_the_way_are_sent_again), TEST(a_block_has_the_sum_that_its_producer_reported), TEST(a_chunk_that_changed_on_the_way_is_read_again),
         TEST(an_object_that_is_too_short_says_how_long_it_is), TEST(ranges_of_two_contents_are_never_mixed), TEST(limits_are_kept_by_the_client),
         TEST(a_refusal_says_what_to_do), TEST(a_listing_is_read_as_azure_writes_it), TEST(a_copy_is_waited_for), TEST(a_copy_goes_on_with_the_new_sas_of_the_file),
         TEST(the_machines_identity_is_asked_once), TEST(a_token_that_is_refused_is_replaced_in_the_middle_of_an_upload),
         TEST(a_token_is_replaced_before_it_ends), TEST(the_endpoints_of_app_service_and_azure_ml_are_asked_their_way),
         TEST(a_workload_identity_posts_its_file), TEST(a_login_of_az_gives_tokens_where_the_machine_has_no_identity),
         TEST(without_any_credential_the_error_says_so), TEST(no_fault_makes_wrong_bytes))
