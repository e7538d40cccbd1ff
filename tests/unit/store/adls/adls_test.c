/* The requests of the ADLS driver, and the paths that it accepts. */
#include "store/adls/adls_private.h"
#include "store/http/renewed_sas.h"
#include "store/http/server.h"
#include "tap.h"

static struct nebula_error error;
static struct store *store;
static struct server *server;
static char heads[8][4096]; /* of the last requests */

static const char *head(unsigned back)
{
        return heads[(server_requests(server) - back) % 8];
}

/* Takes every request. */
static void serve(struct server_call *call, void *argument)
{
        snprintf(heads[call->number % 8], sizeof *heads, "%s", call->head);
        server_say(call, !strcmp(call->method, "GET") || !strcmp(call->method, "HEAD") ? 200 : 201, "x-ms-resource-type: file\r\nETag: \"0x1\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n", "");
}

static void begin(server_handler *answer)
{
        char text[200];

        server = server_start(answer, NULL, false);
        snprintf(text, sizeof text, "AccountName=acct;AccountKey=U0VDUkVU;DfsEndpoint=http://127.0.0.1:%d/acct/", server_port(server));
        setenv("AZURE_STORAGE_CONNECTION_STRING", text, 1);
        if (store_adls.open("abfss://data@acct.dfs.core.windows.net/run", &store, &error))
                abort();
}

static void end(void)
{
        store_close(store);
        server_stop(server);
        unsetenv("AZURE_STORAGE_CONNECTION_STRING");
}

/* Whether a request begins so and has the field. */
static bool is(const char *request, const char *line, const char *field)
{
        bool is_so = !strncmp(request, line, strlen(line)) && strstr(request, field);

        if (!is_so)
                printf("# not \"%s\" with \"%s\":\n%s", line, field, request);
        return is_so;
}

static void a_write_is_created_appended_flushed_and_renamed(void)
{
        struct store_object object = { "t/m.pt", "123456789", 9, NULL };
        struct store_victim victim = { "t/x", { "0xABC" } };
        struct store_upload *upload;
        struct store_page page;
        struct store_stamp stamp = { "0x1" };

        begin(serve);
        CHECK(store->ops->put(store, "t/a b", "123456789", 9, STORE_IF_SAME, &stamp, NULL, &error) == NEBULA_OK && server_requests(server) == 4);
        CHECK(is(head(3), "PUT /acct/data/run/.nebula-tmp-", "?resource=file HTTP/1.1\r\n") && is(head(3), "PUT ", "\r\nx-ms-properties: nebula=") && is(head(3), "PUT ", "\r\nIf-None-Match: *\r\n"));
        CHECK(is(head(2), "PATCH /acct/data/run/.nebula-tmp-", "?action=append&position=0 HTTP/1.1\r\n") && is(head(2), "PATCH ", "\r\nx-ms-content-crc64: iJh5CoYUi64=\r\n"));
        CHECK(is(head(1), "PATCH /acct/data/run/.nebula-tmp-", "?action=flush&position=9&close=true HTTP/1.1\r\n"));
        CHECK(is(head(0), "PUT /acct/data/run/t/a%20b HTTP/1.1\r\n", "\r\nx-ms-rename-source: /data/run/.nebula-tmp-") && is(head(0), "PUT ", "\r\nIf-Match: \"0x1\"\r\n"));
        CHECK(strstr(head(0), "\r\nAuthorization: SharedKey acct:") && strstr(head(0), "\r\nx-ms-version: " AZURE_VERSION "\r\n") && !strstr(head(0), "SECRET"));
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(is(head(0), "PATCH /acct/data/run/.nebula-tmp-", "-0?action=flush&position=9&close=true HTTP/1.1\r\n"));
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && is(head(0), "PUT /acct/data/run/t/m.pt HTTP/1.1\r\n", "\r\nIf-None-Match: *\r\n"));
        CHECK(store->ops->remove(store, &victim, 1, &error) == NEBULA_OK && is(head(1), "DELETE /acct/data/run/t/x?recursive=false HTTP/1.1\r\n", "\r\nIf-Match: \"0xABC\"\r\n"));
        CHECK(is(head(0), "DELETE /acct/data/run/t?recursive=false HTTP/1.1\r\n", "")); /* empty, or it stays */
        CHECK(store->ops->list(store, "t/.nebula/man", false, NULL, &page, &error) == NEBULA_STORAGE); /* the answer is no JSON */
        CHECK(is(head(0), "GET /acct/data?resource=filesystem&recursive=false&directory=run%2Ft%2F.nebula HTTP/1.1\r\n", ""));
        end();
}

static void serve_page(struct server_call *call, void *argument)
{
        server_say(call, 200, "x-ms-continuation: same\r\n", "{\"paths\":[]}");
}

static void a_service_that_repeats_a_page_is_not_asked_for_ever(void)
{
        struct store_page page;

        begin(serve_page);
        CHECK(store->ops->list(store, "t/", false, NULL, &page, &error) == NEBULA_STORAGE && strstr(error.message, "the same page again"));
        CHECK(server_requests(server) == 2);
        end();
}

static void a_touch_sets_the_properties_of_the_file_again(void)
{
        struct object_upload object = { .key = (char *)(uintptr_t)"t/m.pt" };
        struct store_upload upload = { .id = "0123456789abcdef", .count = 1 };
        char created[200], touched[200];
        atomic_bool stop = false;

        begin(serve);
        REQUIRE(adls_steps.begin((struct object_store *)store, &upload, &object, &error) == NEBULA_OK);
        snprintf(created, sizeof created, "%.*s", (int)strcspn(strstr(head(0), "x-ms-properties:"), "\r"), strstr(head(0), "x-ms-properties:"));
        adls_steps.touch((struct object_store *)store, &upload, &object, &stop);
        snprintf(touched, sizeof touched, "PATCH /acct/data/run/%s?action=setProperties HTTP/1.1\r\n", object.place);
        CHECK(is(head(0), touched, created));
        free(object.place);
        end();
}

static enum { OWN, REPLACED, REMOVED } what; /* is at the key after the write */

static void serve_late(struct server_call *call, void *argument)
{
        static char properties[100];
        char fields[400];

        if (strstr(call->target, "resource=file"))
                server_field(call, "x-ms-properties", properties, sizeof properties);
        snprintf(fields, sizeof fields, "ETag: \"0x2\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\nx-ms-properties: %s\r\n",
                 what == OWN ? properties : "nebula=b3RoZXI=");
        if (!strcmp(call->method, "HEAD") && what == REMOVED)
                server_say(call, 404, "x-ms-error-code: PathNotFound\r\n", "");
        else
                server_say(call, !strcmp(call->method, "HEAD") ? 200 : 201, fields, "");
}

static void a_put_has_no_stamp_of_another_write(void)
{
        struct store_stamp stamp;

        begin(serve_late);
        what = OWN;
        CHECK(store->ops->put(store, "t/x", "1", 1, STORE_ALWAYS, NULL, &stamp, &error) == NEBULA_OK && !strcmp(stamp.text, "0x2"));
        what = REPLACED;
        CHECK(store->ops->put(store, "t/x", "1", 1, STORE_ALWAYS, NULL, &stamp, &error) == NEBULA_OK && *stamp.text && strcmp(stamp.text, "0x2"));
        what = REMOVED;
        CHECK(store->ops->put(store, "t/x", "1", 1, STORE_ALWAYS, NULL, &stamp, &error) == NEBULA_OK && *stamp.text && strcmp(stamp.text, "0x2"));
        end();
}

static unsigned created; /* requests that create a file */

/* The first creation is done, and its answer lost: the second meets the file. */
static void serve_created(struct server_call *call, void *argument)
{
        static char properties[100];
        char fields[400];

        snprintf(heads[call->number % 8], sizeof *heads, "%s", call->head);
        if (strstr(call->target, "resource=file") && created++) {
                server_say(call, 409, "x-ms-error-code: PathAlreadyExists\r\n", "");
                return;
        }
        if (strstr(call->target, "resource=file")) {
                server_field(call, "x-ms-properties", properties, sizeof properties);
                server_reset(call);
                return;
        }
        snprintf(fields, sizeof fields, "ETag: \"0x2\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\nx-ms-properties: %s\r\n", what == OWN ? properties : "nebula=b3RoZXI=");
        if (!strcmp(call->method, "HEAD") && what == REMOVED)
                server_say(call, 404, "x-ms-error-code: PathNotFound\r\n", "");
        else
                server_say(call, !strcmp(call->method, "HEAD") ? 200 : 201, fields, "");
}

static void a_creation_that_comes_twice_does_not_empty_the_file(void)
{
        begin(serve_created);
        created = 0;
        what = OWN;
        CHECK(store->ops->put(store, "t/x", "1", 1, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK && created == 2 && server_requests(server) == 6);
        CHECK(is(head(4), "PUT /acct/data/run/.nebula-tmp-", "\r\nIf-None-Match: *\r\n"));
        CHECK(is(head(3), "HEAD /acct/data/run/.nebula-tmp-", ""));
        created = 0;
        what = REMOVED;
        CHECK(store->ops->put(store, "t/x", "1", 1, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_STORAGE && strstr(error.message, "its temporary file is gone"));
        end();
}

/* The rename finds no temporary file. */
static void serve_swept(struct server_call *call, void *argument)
{
        char source[300];

        if (*server_field(call, "x-ms-rename-source", source, sizeof source))
                server_say(call, 404, "x-ms-error-code: SourcePathNotFound\r\n", "");
        else
                serve_late(call, argument);
}

static void a_rename_without_its_file_is_done_only_if_the_object_is_of_this_write(void)
{
        struct store_object object = { "t/m.pt", "123456789", 9, NULL };
        struct store_upload *upload;
        struct store_stamp stamp, seen = { "0x2" };

        begin(serve_swept);
        what = OWN;
        CHECK(store->ops->put(store, "t/x", "1", 1, STORE_ALWAYS, NULL, &stamp, &error) == NEBULA_OK && !strcmp(stamp.text, "0x2"));
        for (what = REPLACED; what <= REMOVED; what++) {
                CHECK(store->ops->put(store, "t/x", "1", 1, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_STORAGE && strstr(error.message, "its temporary file is gone"));
                REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
                CHECK(store->ops->publish(store, upload, &error) == (what == REPLACED ? NEBULA_BUSY : NEBULA_STORAGE));
        }
        what = REPLACED; /* not by a writer: the object is the one that was seen */
        CHECK(store->ops->put(store, "t/x", "1", 1, STORE_IF_SAME, &seen, NULL, &error) == NEBULA_STORAGE && strstr(error.message, "its temporary file is gone"));
        end();
}

/* The SAS is renewed just before the rename. */
static void serve_renamed(struct server_call *call, void *argument)
{
        char source[200];

        server_field(call, "x-ms-rename-source", source, sizeof source);
        if (*source && !renewed_sas.is_new)
                renewed_sas_write(true);
        snprintf(heads[call->number % 8], sizeof *heads, "%s", call->head);
        if (renewed_sas_takes(call, source))
                serve(call, argument);
        else
                server_say(call, 403, "x-ms-error-code: AuthenticationFailed\r\n", "");
}

static void a_rename_goes_on_with_the_new_sas_of_the_file(void)
{
        char text[200];

        renewed_sas_begin();
        server = server_start(serve_renamed, NULL, false);
        snprintf(text, sizeof text, "AccountName=acct;DfsEndpoint=http://127.0.0.1:%d/acct/", server_port(server));
        setenv("AZURE_STORAGE_CONNECTION_STRING", text, 1);
        REQUIRE(store_adls.open("abfss://data@acct.dfs.core.windows.net/run", &store, &error) == NEBULA_OK);
        CHECK(store->ops->put(store, "t/x", "1", 1, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK && server_requests(server) == 5);
        CHECK(is(head(1), "PUT /acct/data/run/t/x?sv=1&sig=OLD HTTP/1.1\r\n", "?sv=1&sig=OLD\r\n") && is(head(0), "PUT /acct/data/run/t/x?sv=1&sig=NEW HTTP/1.1\r\n", "?sv=1&sig=NEW\r\n"));
        end();
        renewed_sas_end();
}

static void a_path_names_container_and_account(void)
{
        static const char *const bad[] = { "abfss://", "abfss://account.dfs.core.windows.net/x", "abfss://c@", "abfss://data@acct.dfs.core.windows.net/../x", "abfss://data@ac_ct.dfs.core.windows.net/x",
                                           "abfss://da--ta@acct.dfs.core.windows.net", "abfss://a/b@acct.dfs.core.windows.net", "abfss://data@acct.blob.core.windows.net/x" };
        struct azure_store *azure;

        unsetenv("AZURE_STORAGE_CONNECTION_STRING");
        REQUIRE(store_adls.open("abfss://data@acct.dfs.core.windows.net/a/b%20c/?sv=1&sig=SECRET", &store, &error) == NEBULA_OK);
        azure = (struct azure_store *)store;
        CHECK(!strcmp(azure->address.endpoint, "https://acct.dfs.core.windows.net") && !strcmp(azure->address.container, "data") && !strcmp(azure->address.prefix, "a/b c/") &&
              !strcmp(azure->address.sas, "sv=1&sig=SECRET") && !strcmp(store->root, "abfss://data@acct.dfs.core.windows.net/a/b c"));
        store_close(store);
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
                CHECK(store_adls.open(bad[i], &store, &error) == NEBULA_INVALID);
        CHECK(strstr(error.message, "names the blob service: write ACCOUNT.dfs.core.windows.net"));
}

/* Takes no rename. */
static void serve_immutable(struct server_call *call, void *argument)
{
        bool is_rename = strstr(call->head, "x-ms-rename-source:");

        snprintf(heads[call->number % 8], sizeof *heads, "%s", call->head);
        server_say(call, is_rename ? 409 : 201, is_rename ? "x-ms-error-code: PathImmutableDueToPolicy\r\n" : "x-ms-request-id: 1\r\n", "");
}

/*
 * fault (Object stores): An immutability policy keeps an object.
 * result: The message says so.
 */
static void an_immutable_container_is_named_with_the_path_that_can_write_to_it(void)
{
        begin(serve_immutable);
        CHECK(store->ops->put(store, "t/x", "1", 1, STORE_IF_ABSENT, NULL, NULL, &error) == NEBULA_STORAGE && store_class(&error) == STORE_NEVER);
        CHECK(strstr(error.message, "t/x") && strstr(error.message, "keeps its files from being renamed") && strstr(error.message, "az://"));
        end();
}

static unsigned told; /* uploads that can go on later */

static void tell(void *argument, const char *key, const char *text, bool is_last)
{
        told++;
}

/* Takes no flush of the first bytes. */
static void serve_whole(struct server_call *call, void *argument)
{
        bool is_first = strstr(call->target, "retainUncommittedData=true");

        snprintf(heads[call->number % 8], sizeof *heads, "%s", call->head);
        server_say(call, is_first ? 400 : 200, is_first ? "x-ms-error-code: InvalidFlushPosition\r\n" : "ETag: \"0x1\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n", "");
}

static void a_service_that_does_not_flush_in_pieces_gets_whole_files(void)
{
        struct store_resume resume = { NULL, tell, NULL };
        struct store_object object = { .key = "t/m.pt", .data = "1234567890", .size = 10, .resume = &resume };
        struct http_settings settings = http_settings_now(), before = settings;
        struct object_limits limits = adls_limits;
        struct store_upload *upload;

        settings.width_first = settings.width_max = 1; /* the parts arrive in order */
        http_settings_set(&settings);
        begin(serve_whole);
        adls_limits.part_bytes = adls_limits.part_bytes_good = 1;
        CHECK(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_STORAGE && store_class(&error) == STORE_LATER && told == 1);
        CHECK(is(head(0), "DELETE /acct/data/run/.nebula-tmp-", ""));
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK && told == 1);
        CHECK(is(head(0), "PATCH /acct/data/run/.nebula-tmp-", "?action=flush&position=10&close=true HTTP/1.1\r\n"));
        CHECK(is(head(1), "PATCH /acct/data/run/.nebula-tmp-", "?action=append&")); /* nothing was flushed before */
        store->ops->abort(store, upload);
        adls_limits = limits;
        end();
        http_settings_set(&before);
}

static void an_upload_that_can_go_on_says_what_it_flushes(void)
{
        struct store_resume resume = { NULL, tell, NULL };
        struct store_object object = { .key = "t/m.pt", .data = "123456789", .size = 9, .resume = &resume };
        struct object_limits limits = adls_limits;
        struct store_upload *upload;

        begin(serve);
        adls_limits.part_bytes = adls_limits.part_bytes_good = 5;
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(is(head(0), "PATCH /acct/data/run/.nebula-tmp-", "?action=flush&position=9&close=true HTTP/1.1\r\n"));
        /* "0000000000000009:ae8b14860a799888 ", in base64: the CRC-64 of "123456789" */
        CHECK(is(head(1), "PATCH /acct/data/run/.nebula-tmp-", "?action=setProperties HTTP/1.1\r\n") && is(head(1), "PATCH ", ",nebula_sent=MDAwMDAwMDAwMDAwMDAwOTphZThiMTQ4NjBhNzk5ODg4ID"));
        store->ops->abort(store, upload);
        adls_limits = limits;
        end();
}

TAP_MAIN(TEST(an_immutable_container_is_named_with_the_path_that_can_write_to_it), TEST(a_service_that_does_not_flush_in_pieces_gets_whole_files),
         TEST(an_upload_that_can_go_on_says_what_it_flushes),
         TEST(a_write_is_created_appended_flushed_and_renamed), TEST(a_service_that_repeats_a_page_is_not_asked_for_ever), TEST(a_touch_sets_the_properties_of_the_file_again), TEST(a_put_has_no_stamp_of_another_write),
         TEST(a_creation_that_comes_twice_does_not_empty_the_file), TEST(a_rename_without_its_file_is_done_only_if_the_object_is_of_this_write),
         TEST(a_path_names_container_and_account), TEST(a_rename_goes_on_with_the_new_sas_of_the_file))
