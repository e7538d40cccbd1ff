/*
 * No secret stays in memory that the drivers free. The program is linked with its own allocation functions (--wrap): each block that
 * this thread frees or grows is searched first.
 */
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "os/os.h"
#include "store/adls/adls.h"
#include "store/azure/azure.h"
#include "store/gs/gs.h"
#include "store/http/server.h"
#include "store/object/object.h"
#include "store/s3/s3.h"
#include "tap.h"
#include "test_dir.h"

void *__real_malloc(size_t size);
void __real_free(void *block);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *block, size_t size);
char *__wrap_strdup(const char *text);
char *__wrap_strndup(const char *text, size_t size);
void __wrap_free(void *block);

static _Thread_local bool is_watched; /* per thread: the server's threads keep the bytes that they have received */
static atomic_uint found; /* atomic: the server's threads free, too, and the compiler assumes that free does not write here */

static void search(const void *block)
{
        static const char *const marks[] = { "SECRET", "U0VDUkVU" /* the same in base64 */ };
        size_t size = is_watched && block ? malloc_usable_size((void *)(uintptr_t)block) : 0;

        for (size_t i = 0; i < 2; i++) {
                const char *at = size ? memmem(block, size, marks[i], strlen(marks[i])) : NULL;

                if (at && !found)
                        printf("# %.*s\n", (int)strnlen(block, size < 100 ? size : 100), (const char *)block);
                if (at)
                        atomic_fetch_add(&found, 1);
        }
}

/* Clears new blocks, so that an old block's content is not found in them. */
void *__wrap_malloc(size_t size)
{
        void *block = __real_malloc(size);

        if (block)
                memset(block, 0, malloc_usable_size(block));
        return block;
}

void *__wrap_calloc(size_t count, size_t size)
{
        size_t bytes;

        return __builtin_mul_overflow(count, size, &bytes) ? NULL : __wrap_malloc(bytes);
}

void __wrap_free(void *block)
{
        search(block);
        __real_free(block);
}

void *__wrap_realloc(void *block, size_t size)
{
        void *grown = __wrap_malloc(size);
        size_t old = block ? malloc_usable_size(block) : 0;

        if (!grown)
                return NULL;
        if (old)
                memcpy(grown, block, old < size ? old : size);
        __wrap_free(block);
        return grown;
}

char *__wrap_strndup(const char *text, size_t size)
{
        size_t length = strnlen(text, size);
        char *copy = __wrap_malloc(length + 1);

        if (copy)
                memcpy(copy, text, length);
        return copy;
}

char *__wrap_strdup(const char *text)
{
        return __wrap_strndup(text, strlen(text));
}

static struct server *server;
static char directory[256], url[300], path[300];
static char long_secret[1500]; /* bytes that grow with it move often */

/* Lends keys and tokens, and accepts every other request. */
static void serve(struct server_call *call, void *argument)
{
        char text[8000] = "";

        if (strstr(call->target, "/latest/api/token"))
                snprintf(text, sizeof text, "SECRET-session");
        else if (strstr(call->target, "security-credentials/the-role") || strstr(call->target, "/container"))
                snprintf(text, sizeof text, "{\"AccessKeyId\":\"A\",\"SecretAccessKey\":\"SECRET\",\"Token\":\"%s\",\"Expiration\":\"2099-01-01T00:00:00Z\"}", long_secret);
        else if (strstr(call->target, "security-credentials/"))
                snprintf(text, sizeof text, "the-role");
        else if (strstr(call->target, "/sts"))
                snprintf(text, sizeof text, "<R><Credentials><AccessKeyId>A</AccessKeyId><SecretAccessKey>SECRET</SecretAccessKey><SessionToken>%s</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></R>", long_secret);
        else if (strstr(call->target, "token"))
                snprintf(text, sizeof text, "{\"access_token\":\"%s\",\"expires_in\":3600}", long_secret);
        server_say(call, strcmp(call->method, "PUT") || strstr(call->target, "/latest/") ? 200 : 201,
                   "ETag: \"e\"\r\nx-goog-generation: 1\r\nx-ms-request-id: 1\r\nx-ms-copy-status: success\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n", text);
}

/* Does some operations with each credential that the environment can name. */
static bool leaves_nothing(const struct store_ops *ops, const char *place)
{
        struct nebula_error error = { 0 };
        struct store_entry entry;
        struct store *store;
        bool is_done;

        found = 0;
        is_watched = true;
        is_done = ops->open(place, &store, &error) == NEBULA_OK;
        if (is_done) {
                /* S3 and Google answer 200 to a write, Azure 201; both count as done. */
                is_done = ops->put(store, "x", "1", 1, STORE_ALWAYS, NULL, NULL, &error) == NEBULA_OK && ops->stat(store, "x", &entry, &error) == NEBULA_OK;
                if (is_done)
                        store_entry_done(&entry);
                if (is_done && ops == &store_azure)
                        ops->copy(store, "x", "y", STORE_ALWAYS, &error);
                store_close(store);
        }
        object_token_forget_all();
        is_watched = false;
        if (!is_done)
                printf("# %s: %s\n", place, error.message);
        return is_done && !found;
}

static void a_secret_that_is_not_overwritten_is_found(void)
{
        char *text = strdup("a SECRET"), *grown;
        struct buf buf = { 0 };

        found = 0;
        is_watched = true;
        free(text);
        CHECK(found == 1);
        text = strdup("a SECRET");
        grown = realloc(text, 10000);
        CHECK(found == 2);
        object_forget(grown);
        buf_add_text(&buf, "a SECRET");
        for (int i = 0; i < 2000; i++)
                buf_add_byte(&buf, 'x');
        CHECK(found > 2);
        found = 0;
        buf.is_secret = true;
        buf_done(&buf);
        buf_add_text(&buf, long_secret);
        for (int i = 0; i < 20000; i++)
                buf_add_byte(&buf, 'x');
        object_forget(object_take(&buf));
        CHECK(buf.is_secret);
        buf_add_text(&buf, long_secret);
        buf_done(&buf);
        text = strdup("name\nSECRET");
        text[4] = 0;
        object_forget_bytes(text, 11);
        object_forget(NULL);
        object_forget_bytes(NULL, 0);
        CHECK(!found);
        is_watched = false;
}

static const char *const variables[] = { "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET",
                                         "AZURE_AUTHORITY_HOST", "IDENTITY_ENDPOINT", "IDENTITY_HEADER", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_STS", "AWS_ACCESS_KEY_ID",
                                         "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
                                         "AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN", "STORAGE_EMULATOR_HOST", "GS_ACCESS_KEY_ID",
                                         "GS_SECRET_ACCESS_KEY", "GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_TOKEN_URL" };

static void begin(void)
{
        memset(long_secret, 's', sizeof long_secret - 1);
        memcpy(long_secret, "SECRET", 6);
        for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
                unsetenv(variables[i]);
        object_token_forget_all();
        test_dir_make(directory);
        setenv("HOME", directory, 1);
        snprintf(path, sizeof path, "%s/file", directory);
        server = server_start(serve, NULL, false);
        snprintf(url, sizeof url, "http://127.0.0.1:%d", server_port(server));
        setenv("AWS_ENDPOINT_URL", url, 1);
        setenv("STORAGE_EMULATOR_HOST", url, 1);
}

static void end(void)
{
        server_stop(server);
        test_dir_remove(directory);
        unsetenv("AWS_SHARED_CREDENTIALS_FILE");
}

/* Sets the variable to the URL of the server, with this behind it. */
static void name_server(const char *variable, const char *behind)
{
        char text[400];

        snprintf(text, sizeof text, "%s%s", url, behind);
        setenv(variable, text, 1);
}

static void keys_of_s3_are_overwritten(void)
{
        static const char profile[] = "[other]\naws_secret_access_key = SECRET2\n[default]\naws_access_key_id = A\naws_secret_access_key = SECRET\n";

        begin();
        setenv("AWS_ACCESS_KEY_ID", "A", 1);
        setenv("AWS_SECRET_ACCESS_KEY", "SECRET", 1);
        setenv("AWS_SESSION_TOKEN", long_secret, 1);
        CHECK(leaves_nothing(&store_s3, "s3://data/run"));
        unsetenv("AWS_ACCESS_KEY_ID");
        os_write_file_atomic(path, profile, strlen(profile));
        setenv("AWS_SHARED_CREDENTIALS_FILE", path, 1);
        CHECK(leaves_nothing(&store_s3, "s3://data/run"));
        unsetenv("AWS_SHARED_CREDENTIALS_FILE");
        name_server("AWS_EC2_METADATA_SERVICE_ENDPOINT", "");
        CHECK(leaves_nothing(&store_s3, "s3://data/run"));
        name_server("AWS_CONTAINER_CREDENTIALS_FULL_URI", "/container");
        setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "SECRET", 1);
        CHECK(leaves_nothing(&store_s3, "s3://data/run"));
        os_write_file_atomic(path, long_secret, strlen(long_secret));
        setenv("AWS_WEB_IDENTITY_TOKEN_FILE", path, 1);
        setenv("AWS_ROLE_ARN", "arn", 1);
        name_server("AWS_ENDPOINT_URL_STS", "/sts");
        CHECK(leaves_nothing(&store_s3, "s3://data/run"));
        end();
}

static void keys_and_tokens_of_google_are_overwritten(void)
{
        static const char user[] = "{\"type\":\"authorized_user\",\"client_id\":\"me\",\"client_secret\":\"SECRET\",\"refresh_token\":\"SECRET\"}";

        begin();
        setenv("GS_ACCESS_KEY_ID", "A", 1);
        setenv("GS_SECRET_ACCESS_KEY", "SECRET", 1);
        CHECK(leaves_nothing(&store_gs, "gs://data/run"));
        unsetenv("GS_ACCESS_KEY_ID");
        setenv("GOOGLE_OAUTH_ACCESS_TOKEN", long_secret, 1);
        CHECK(leaves_nothing(&store_gs, "gs://data/run"));
        unsetenv("GOOGLE_OAUTH_ACCESS_TOKEN");
        os_write_file_atomic(path, user, strlen(user));
        setenv("GOOGLE_APPLICATION_CREDENTIALS", path, 1);
        name_server("GOOGLE_TOKEN_URL", "/token");
        CHECK(leaves_nothing(&store_gs, "gs://data/run"));
        end();
}

static void keys_signatures_and_tokens_of_azure_are_overwritten(void)
{
        char text[1000];

        begin();
        snprintf(text, sizeof text, "AccountName=acct;AccountKey=U0VDUkVUU0VDUkVU;BlobEndpoint=%s/acct;DfsEndpoint=%s/acct", url, url);
        setenv("AZURE_STORAGE_CONNECTION_STRING", text, 1);
        CHECK(leaves_nothing(&store_azure, "az://acct/data/run") && leaves_nothing(&store_adls, "abfss://data@acct.dfs.core.windows.net/run"));
        snprintf(text, sizeof text, "AccountName=acct;SharedAccessSignature=sv=1&sig=SECRET;BlobEndpoint=%s/acct;DfsEndpoint=%s/acct", url, url);
        setenv("AZURE_STORAGE_CONNECTION_STRING", text, 1);
        CHECK(leaves_nothing(&store_azure, "az://acct/data/run") && leaves_nothing(&store_adls, "abfss://data@acct.dfs.core.windows.net/run"));
        CHECK(leaves_nothing(&store_adls, "abfss://data@acct.dfs.core.windows.net/run?sv=1&sig=SECRET"));
        unsetenv("AZURE_STORAGE_CONNECTION_STRING");
        name_server("PLACE", "/acct/data/run?sv=1&sig=SECRET");
        CHECK(leaves_nothing(&store_azure, getenv("PLACE")));
        name_server("PLACE", "/acct/data/run");
        setenv("AZURE_STORAGE_KEY", "U0VDUkVUU0VDUkVU", 1);
        CHECK(leaves_nothing(&store_azure, getenv("PLACE")));
        unsetenv("AZURE_STORAGE_KEY");
        name_server("IDENTITY_ENDPOINT", "/token");
        setenv("IDENTITY_HEADER", "SECRET", 1);
        CHECK(leaves_nothing(&store_azure, getenv("PLACE")));
        setenv("AZURE_CLIENT_ID", "me", 1);
        setenv("AZURE_TENANT_ID", "tenant", 1);
        setenv("AZURE_CLIENT_SECRET", long_secret, 1);
        name_server("AZURE_AUTHORITY_HOST", "");
        CHECK(leaves_nothing(&store_azure, getenv("PLACE")));
        end();
}

TAP_MAIN(TEST(a_secret_that_is_not_overwritten_is_found), TEST(keys_of_s3_are_overwritten), TEST(keys_and_tokens_of_google_are_overwritten),
         TEST(keys_signatures_and_tokens_of_azure_are_overwritten))
