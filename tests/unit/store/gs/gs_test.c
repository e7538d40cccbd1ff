/* The requests of the Google driver, and its credentials. */
#include <pthread.h>
#include <stdatomic.h>

#include "os/os.h"
#include "store/gs/gs_private.h"
#include "store/http/server.h"
#include "tap.h"
#include "test_dir.h"

static struct nebula_error error;
static struct store *store;
static struct server *server;
static char last_head[4096], last_body[4096], token[64], directory[256];
static int refusal;
static const char *code;

/* Takes every request with the right token. */
static void serve(struct server_call *call, void *argument)
{
        char said[200], text[200] = "";

        snprintf(last_head, sizeof last_head, "%s", call->head);
        snprintf(last_body, sizeof last_body, "%s", call->body);
        server_field(call, "authorization", said, sizeof said);
        if (refusal || (*token && strcmp(said, token))) {
                snprintf(text, sizeof text, "<?xml version='1.0' encoding='UTF-8'?><Error><Code>%s</Code></Error>", refusal ? code : "AuthenticationRequired");
                server_say(call, refusal ? refusal : 401, "", text);
                return;
        }
        if (strstr(call->target, "?uploads"))
                strcpy(text, "<InitiateMultipartUploadResult><UploadId>U</UploadId></InitiateMultipartUploadResult>");
        server_say(call, 200, "x-goog-generation: 17\r\nETag: \"p\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n", text);
}

static const char *const variables[] = { "GS_ACCESS_KEY_ID", "GS_SECRET_ACCESS_KEY", "GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST", "GOOGLE_TOKEN_URL" };

static void begin(void)
{
        struct http_settings settings = http_settings_now();
        char url[64];

        settings.pause_ms = 2;
        settings.retry_ms = settings.retry_new_ms = 100;
        http_settings_set(&settings);
        for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
                unsetenv(variables[i]);
        *token = 0;
        refusal = 0;
        object_token_forget_all();
        test_dir_make(directory);
        setenv("HOME", directory, 1);
        server = server_start(serve, NULL, false);
        snprintf(url, sizeof url, "127.0.0.1:%d", server_port(server));
        setenv("STORAGE_EMULATOR_HOST", url, 1);
        if (store_gs.open("gs://data/run", &store, &error))
                abort();
}

static void end(void)
{
        store_close(store);
        server_stop(server);
        test_dir_remove(directory);
}

static bool asked(const char *line, const char *field)
{
        char wanted[300];
        bool is_so;

        snprintf(wanted, sizeof wanted, "%s HTTP/1.1\r\n", line);
        is_so = !strncmp(last_head, wanted, strlen(wanted));
        snprintf(wanted, sizeof wanted, "\r\n%s\r\n", field);
        is_so = is_so && strstr(last_head, wanted);
        if (!is_so)
                printf("# not \"%s\" with \"%s\":\n%s", line, field, last_head);
        return is_so;
}

static void each_operation_is_the_request_of_the_reference(void)
{
        struct store_object object = { "m.pt", "123456789", 9, NULL };
        struct store_victim victim = { "t/x", { "17" } };
        struct store_upload *upload;
        struct store_stamp stamp;

        begin();
        setenv("GS_ACCESS_KEY_ID", "GOOG1E", 1);
        setenv("GS_SECRET_ACCESS_KEY", "SECRET", 1);
        CHECK(store->ops->put(store, "t/a b", "123456789", 9, STORE_IF_ABSENT, NULL, &stamp, &error) == NEBULA_OK && !strcmp(stamp.text, "17"));
        CHECK(asked("PUT /data/run/t/a%20b", "x-goog-if-generation-match: 0") && asked("PUT /data/run/t/a%20b", "x-goog-hash: crc32c=4waSgw=="));
        CHECK(strstr(last_head, "\r\nAuthorization: GOOG4-HMAC-SHA256 Credential=GOOG1E/") && strstr(last_head, "/auto/storage/goog4_request,SignedHeaders=host;") && !strstr(last_head, "x-amz"));
        CHECK(store->ops->put(store, "t/x", "1", 1, STORE_IF_SAME, &stamp, NULL, &error) == NEBULA_OK && asked("PUT /data/run/t/x", "x-goog-if-generation-match: 17"));
        CHECK(store_put_text(store, "t/x", "1", STORE_ALWAYS, &error) == NEBULA_OK && !strstr(last_head, "generation-match"));
        CHECK(store->ops->remove(store, &victim, 1, &error) == NEBULA_OK && asked("DELETE /data/run/t/x", "x-goog-if-generation-match: 17"));
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(!strncmp(last_head, "PUT /data/run/.nebula-tmp-", 26) && strstr(last_head, "?partNumber=1&uploadId=U HTTP/1.1\r\n") && strstr(last_head, "\r\nx-goog-hash: crc32c=4waSgw==\r\n"));
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK && !strncmp(last_head, "DELETE /data/run/.nebula-tmp-", 29));
        CHECK(store->ops->copy(store, "a&b", "b", STORE_IF_ABSENT, &error) == NEBULA_OK && asked("PUT /data/run/b", "x-goog-copy-source: /data/run/a%26b") &&
              strstr(last_head, "\r\nx-goog-if-generation-match: 0\r\n"));
        end();
}

/* A service that hands out tokens, each with the next number. */
static atomic_uint tokens;
static char service_head[2048], service_body[2048];

static void issue(struct server_call *call, void *argument)
{
        char text[200];

        snprintf(service_head, sizeof service_head, "%s", call->head);
        snprintf(service_body, sizeof service_body, "%s", call->body);
        snprintf(text, sizeof text, "{\"access_token\":\"SECRET%u\",\"expires_in\":3599,\"token_type\":\"Bearer\"}", atomic_fetch_add(&tokens, 1) + 1);
        server_say(call, 200, "Content-Type: application/json\r\n", text);
}

static enum nebula_status put(void)
{
        return store_put_text(store, "x", "1", STORE_ALWAYS, &error);
}

static void a_machines_token_is_asked_for_once_and_replaced_when_it_is_refused(void)
{
        struct server *service = server_start(issue, NULL, false);
        char host[64];

        begin();
        tokens = 0;
        snprintf(host, sizeof host, "127.0.0.1:%d", server_port(service));
        setenv("GCE_METADATA_HOST", host, 1);
        strcpy(token, "Bearer SECRET1");
        CHECK(put() == NEBULA_OK && put() == NEBULA_OK && tokens == 1);
        CHECK(!strncmp(service_head, "GET /computeMetadata/v1/instance/service-accounts/default/token HTTP/1.1\r\n", 74) && strstr(service_head, "\r\nMetadata-Flavor: Google\r\n"));
        strcpy(token, "Bearer SECRET2");
        CHECK(put() == NEBULA_OK && tokens == 2);
        strcpy(token, "Bearer other");
        CHECK(put() == NEBULA_STORAGE && error.http_status == 401 && strstr(error.message, "the service account of this machine") && !strstr(error.message, "SECRET"));
        printf("# %s\n", error.message);
        end();
        server_stop(service);
}

static void write_file(char path[300], const char *text)
{
        snprintf(path, 300, "%s/credentials.json", directory);
        if (os_write_file_atomic(path, text, strlen(text)))
                abort();
}

static void the_login_of_gcloud_is_exchanged_for_a_token(void)
{
        struct server *service = server_start(issue, NULL, false);
        char url[64], path[300];

        begin();
        tokens = 0;
        snprintf(url, sizeof url, "http://127.0.0.1:%d/token", server_port(service));
        setenv("GOOGLE_TOKEN_URL", url, 1);
        write_file(path, "{\"type\":\"authorized_user\",\"client_id\":\"me\",\"client_secret\":\"HIDDEN\",\"refresh_token\":\"1//x\"}");
        setenv("GOOGLE_APPLICATION_CREDENTIALS", path, 1);
        strcpy(token, "Bearer SECRET1");
        CHECK(put() == NEBULA_OK && !strcmp(service_body, "grant_type=refresh_token&client_id=me&client_secret=HIDDEN&refresh_token=1%2F%2Fx"));
        end();
        server_stop(service);
}

static void a_refusal_says_what_to_do(void)
{
        char path[300];

        begin();
        write_file(path, "{\"type\":\"service_account\",\"private_key\":\"SECRET\"}");
        setenv("GOOGLE_APPLICATION_CREDENTIALS", path, 1);
        CHECK(put() == NEBULA_INVALID && strstr(error.message, "service_account") && strstr(error.message, "HMAC key") && !strstr(error.message, "SECRET"));
        unsetenv("GOOGLE_APPLICATION_CREDENTIALS");
        setenv("GCE_METADATA_HOST", "127.0.0.1:1", 1);
        CHECK(put() == NEBULA_UNAVAILABLE && strstr(error.message, "the environment holds no key"));
        setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "GIVEN", 1);
        store_close(store);
        store_gs.open("gs://data/run", &store, &error);
        CHECK(put() == NEBULA_OK && strstr(last_head, "\r\nAuthorization: Bearer GIVEN\r\n"));
        refusal = 403;
        code = "AccessDenied";
        CHECK(put() == NEBULA_STORAGE && strstr(error.message, "storage.objects.create") && store_class(&error) == STORE_NEVER);
        printf("# %s\n", error.message);
        refusal = 404;
        code = "NoSuchBucket";
        CHECK(put() == NEBULA_STORAGE && strstr(error.message, "create the bucket"));
        end();
}

TAP_MAIN(TEST(each_operation_is_the_request_of_the_reference), TEST(a_machines_token_is_asked_for_once_and_replaced_when_it_is_refused),
         TEST(the_login_of_gcloud_is_exchanged_for_a_token), TEST(a_refusal_says_what_to_do))
