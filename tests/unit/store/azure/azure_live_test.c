/* The kinds of credentials, on an emulator that takes TLS only and checks them (scripts/azurite.sh run --tls). */
#include "base/error.h"
#include "os/os.h"
#include "store/azure/azure_private.h"
#include "store/http/crypt.h"
#include "store/http/server.h"
#include "store/http/url.h"
#include "tap.h"

#define BIG_BYTES ((3u << 20) + 5)

static struct nebula_error error;
static struct azure_connection account;
static struct store *store;

static void open_store(const char *query)
{
        char url[600];

        snprintf(url, sizeof url, "%s/nebula/live%s", account.endpoint, query);
        if (store_azure.open(url, &store, &error))
                abort();
}

static enum nebula_status put(const char *key, const char *text)
{
        return store_put_text(store, key, text, STORE_ALWAYS, &error);
}

/* By the account's key; the other ways need a container. */
static void make_container(void)
{
        struct object_call call = { .method = "PUT" };
        struct http_response response;

        open_store("");
        object_param(&call, "restype", "container");
        if (azure_send((struct object_store *)store, &call, &response, &error) || (response.status != 201 && response.status != 409))
                abort();
        http_response_done(&response);
        store_close(store);
}

static void transfer(void)
{
        char *data = malloc(BIG_BYTES), *back = calloc(1, BIG_BYTES);
        struct store_object object = { "t/m.pt", data, BIG_BYTES, NULL };
        struct store_upload *upload;

        for (size_t i = 0; i < BIG_BYTES; i++)
                data[i] = (char)(i * 2654435761u >> 13);
        azure_limits.part_bytes = azure_limits.read_bytes = 1u << 20;
        CHECK(store_remove_one(store, "t/m.pt", &error) == NEBULA_OK);
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK);
        CHECK(store->ops->read_bulk(store, "t/m.pt", back, BIG_BYTES, 1u << 20, NULL, NULL, &error) == NEBULA_OK && !memcmp(data, back, BIG_BYTES));
        if (error.status)
                printf("# %s\n", error.message);
        free(data);
        free(back);
}

static void a_key_proves_over_tls(void)
{
        make_container();
        open_store("");
        transfer();
        store_close(store);
}

static void a_wrong_key_is_refused_and_not_shown(void)
{
        const char *real = strdup(getenv("AZURE_STORAGE_CONNECTION_STRING"));
        char text[600];

        snprintf(text, sizeof text, "AccountName=%s;AccountKey=U0VDUkVU;BlobEndpoint=%s", account.account, account.endpoint);
        setenv("AZURE_STORAGE_CONNECTION_STRING", text, 1);
        open_store("");
        CHECK(put("x", "1") == NEBULA_STORAGE && strstr(error.message, "AZURE_STORAGE_CONNECTION_STRING") && !strstr(error.message, "U0V"));
        printf("# %s\n", error.message);
        store_close(store);
        setenv("AZURE_STORAGE_CONNECTION_STRING", real, 1);
        free((char *)(uintptr_t)real);
}

/* A SAS of the container, signed with the account's key, that ends after so many seconds. */
static void make_sas(const char *permissions, int seconds, char *ret_query, size_t size)
{
        static const char version[] = "2020-10-02";
        char text[600], end[32], signature[CRYPT_BASE64_SIZE(CRYPT_SHA256_BYTES)];
        time_t until = (time_t)(os->wall_ns() / 1000000000 + seconds);
        uint8_t key[AZURE_KEY_MAX], digest[CRYPT_SHA256_BYTES];
        struct buf buf = { 0 };
        size_t key_size;
        struct tm tm;

        strftime(end, sizeof end, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&until, &tm));
        snprintf(text, sizeof text, "%s\n\n%s\n/blob/%s/nebula\n\n\nhttps\n%s\nc\n\n\n\n\n\n", permissions, end, account.account, version);
        if (!crypt_base64_decode(account.key, key, sizeof key, &key_size) || !crypt_hmac_sha256(key, key_size, text, strlen(text), digest))
                abort();
        crypt_base64(digest, sizeof digest, signature);
        url_encode(&buf, signature, "");
        buf_add_byte(&buf, 0);
        snprintf(ret_query, size, "?sv=%s&sr=c&sp=%s&se=%s&spr=https&sig=%s", version, permissions, end, buf.data);
        buf_done(&buf);
}

static void a_sas_proves_what_it_allows(void)
{
        char query[300], *text;

        make_container();
        make_sas("racwdl", 600, query, sizeof query);
        open_store(query);
        transfer();
        CHECK(put("x", "1") == NEBULA_OK && store->ops->copy(store, "x", "y", STORE_ALWAYS, &error) == NEBULA_OK);
        if (error.status)
                printf("# %s\n", error.message);
        store_close(store);
        make_sas("rl", 600, query, sizeof query);
        open_store(query);
        CHECK(put("x", "2") == NEBULA_STORAGE && error.http_status == 403 && strstr(error.message, "has sp=rl and lacks w") && !strstr(error.message, "sig="));
        printf("# %s\n", error.message);
        REQUIRE(store->ops->get(store, "x", 10, &text, NULL, NULL, &error) == NEBULA_OK);
        CHECK(!strcmp(text, "1"));
        free(text);
        store_close(store);
        make_sas("rl", -600, query, sizeof query);
        open_store(query);
        CHECK(store->ops->get(store, "x", 10, &text, NULL, NULL, &error) == NEBULA_STORAGE && error.http_status == 403);
        printf("# %s\n", error.message);
        store_close(store);
}

/* Every permission but one. The objects exist, so that a write replaces one, which takes w. */
static void lacks(const char *permissions, char missing)
{
        char query[300], said[80], *text;
        struct store_page page = { 0 };

        make_sas(permissions, 600, query, sizeof query);
        open_store(query);
        snprintf(said, sizeof said, "has sp=%s and lacks %c", permissions, missing);
        CHECK((put("sas/key", "1") == NEBULA_OK) == (missing != 'w'));
        CHECK(missing != 'w' || strstr(error.message, said));
        CHECK((store->ops->list(store, "", false, NULL, &page, &error) == NEBULA_OK) == (missing != 'l'));
        CHECK(missing != 'l' || strstr(error.message, said));
        store_page_done(&page);
        CHECK((store->ops->get(store, "sas/key", 10, &text, NULL, NULL, &error) == NEBULA_OK) == (missing != 'r'));
        CHECK(missing != 'r' || strstr(error.message, said));
        if (missing != 'r')
                free(text);
        CHECK((store_remove_one(store, "sas/old", &error) == NEBULA_OK) == (missing != 'd'));
        CHECK(missing != 'd' || (strstr(error.message, said) && !strstr(error.message, "sig=")));
        store_close(store);
}

static void a_sas_that_lacks_a_permission_says_which(void)
{
        make_container();
        open_store("");
        REQUIRE(put("sas/key", "1") == NEBULA_OK && put("sas/old", "0") == NEBULA_OK);
        store_close(store);
        lacks("rcwd", 'l');
        lacks("rcwl", 'd');
        lacks("cwdl", 'r');
        lacks("rcdl", 'w');
}

static void wait_s(int seconds)
{
        struct timespec pause = { .tv_sec = seconds };

        nanosleep(&pause, NULL);
}

#define LIFE_S 4

/* Sends the parts of an upload with a SAS that ends before the upload is published. */
static struct store_upload *begin_upload(char *data)
{
        struct store_object object = { "t/short.pt", data, BIG_BYTES, NULL };
        struct store_upload *upload;

        azure_limits.part_bytes = 1u << 20;
        if (store->ops->upload(store, &object, 1, &upload, &error))
                abort();
        wait_s(LIFE_S + 1);
        return upload;
}

static void an_upload_whose_sas_expires_says_so_and_leaves_nothing_in_the_way(void)
{
        char query[300], *data = calloc(1, BIG_BYTES), *back = calloc(1, BIG_BYTES);
        struct store_object object = { "t/short.pt", data, BIG_BYTES, NULL };
        struct store_upload *upload;
        struct store_entry entry;

        make_container();
        data[BIG_BYTES - 1] = 'x';
        make_sas("rcwdl", LIFE_S, query, sizeof query);
        open_store(query);
        upload = begin_upload(data);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_STORAGE);
        CHECK(strstr(error.message, "the SAS of the storage path has expired, at 20") && strstr(error.message, "AZURE_STORAGE_SAS_TOKEN_FILE") && !strstr(error.message, "sig="));
        printf("# %s\n", error.message);
        store_close(store);
        make_sas("rcwdl", 600, query, sizeof query);
        open_store(query);
        CHECK(store->ops->stat(store, "t/short.pt", &entry, NULL) == NEBULA_NOT_FOUND);
        REQUIRE(store->ops->upload(store, &object, 1, &upload, &error) == NEBULA_OK && store->ops->publish(store, upload, &error) == NEBULA_OK);
        CHECK(store->ops->read_bulk(store, "t/short.pt", back, BIG_BYTES, 1u << 20, NULL, NULL, &error) == NEBULA_OK && !memcmp(data, back, BIG_BYTES));
        CHECK(store_remove_one(store, "t/short.pt", &error) == NEBULA_OK);
        store_close(store);
        free(data);
        free(back);
}

static void write_sas(const char *file, int seconds)
{
        char query[300];
        int fd = os->open(file, OS_WRITE | OS_CREATE | OS_TRUNCATE);

        make_sas("rcwdl", seconds, query, sizeof query);
        strcat(query, "\n");
        if (fd < 0 || os->write(fd, query + 1, strlen(query + 1)) < 0)
                abort();
        os->close(fd);
}

static void an_upload_goes_on_with_the_new_sas_of_the_file(void)
{
        char *real = strdup(getenv("AZURE_STORAGE_CONNECTION_STRING")), file[] = "/tmp/nebula-sas-XXXXXX";
        char *data = calloc(1, BIG_BYTES), *back = calloc(1, BIG_BYTES);
        struct store_upload *upload;

        make_container();
        REQUIRE(mkstemp(file) >= 0);
        data[BIG_BYTES - 1] = 'y';
        write_sas(file, LIFE_S);
        setenv("AZURE_STORAGE_SAS_TOKEN_FILE", file, 1);
        unsetenv("AZURE_STORAGE_CONNECTION_STRING");
        open_store("");
        upload = begin_upload(data);
        CHECK(put("x", "1") == NEBULA_STORAGE && strstr(error.message, "has expired") && strstr(error.message, "write a new one into that file"));
        printf("# %s\n", error.message);
        write_sas(file, 600);
        CHECK(store->ops->publish(store, upload, &error) == NEBULA_OK);
        CHECK(store->ops->read_bulk(store, "t/short.pt", back, BIG_BYTES, 1u << 20, NULL, NULL, &error) == NEBULA_OK && !memcmp(data, back, BIG_BYTES));
        CHECK(put("x", "1") == NEBULA_OK && store_remove_one(store, "t/short.pt", &error) == NEBULA_OK);
        store_close(store);
        os->unlink(file);
        open_store("");
        CHECK(put("x", "1") == NEBULA_INVALID && strstr(error.message, file));
        store_close(store);
        unsetenv("AZURE_STORAGE_SAS_TOKEN_FILE");
        setenv("AZURE_STORAGE_CONNECTION_STRING", real, 1);
        free(real);
        free(data);
        free(back);
}

static void add_part(struct buf *token, const char *json)
{
        char text[600];

        crypt_base64(json, strlen(json), text);
        for (char *at = text; *at && *at != '='; at++)
                buf_add_byte(token, (uint8_t)(*at == '+' ? '-' : *at == '/' ? '_' : *at));
}

/* A token as the service of a machine hands it out. The emulator looks at all but the signature. */
static void hand_out(struct server_call *call, void *argument)
{
        long now = (long)(os->wall_ns() / 1000000000);
        struct buf token = { 0 };
        char body[400], answer[1500];

        snprintf(body, sizeof body, "{\"aud\":\"https://storage.azure.com\",\"iss\":\"https://sts.windows.net/ab1f708d-50f6-404c-a006-d71b2ac7a606/\",\"iat\":%ld,\"nbf\":%ld,\"exp\":%ld}",
                 now - 60, now - 60, now + 3600);
        add_part(&token, "{\"typ\":\"JWT\",\"alg\":\"RS256\",\"kid\":\"x\"}");
        buf_add_byte(&token, '.');
        add_part(&token, body);
        buf_add_text(&token, ".c2lnbmF0dXJl");
        buf_add_byte(&token, 0);
        snprintf(answer, sizeof answer, "{\"access_token\":\"%s\",\"expires_on\":\"%ld\"}", token.data, now + 3600);
        buf_done(&token);
        server_say(call, 200, "", answer);
}

static void the_machines_identity_proves_by_a_token(void)
{
        char *real = strdup(getenv("AZURE_STORAGE_CONNECTION_STRING")), host[64];
        struct server *service = server_start(hand_out, NULL, false);

        make_container();
        snprintf(host, sizeof host, "http://127.0.0.1:%d", server_port(service));
        setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", host, 1);
        unsetenv("AZURE_STORAGE_CONNECTION_STRING");
        open_store("");
        transfer();
        CHECK(put("x", "1") == NEBULA_OK && store->ops->copy(store, "x", "y", STORE_ALWAYS, &error) == NEBULA_OK && server_requests(service) == 1);
        if (error.status)
                printf("# %s\n", error.message);
        store_close(store);
        server_stop(service);
        unsetenv("AZURE_POD_IDENTITY_AUTHORITY_HOST");
        setenv("AZURE_STORAGE_CONNECTION_STRING", real, 1);
        free(real);
}

static const struct tap_test tests[] = { TEST(a_key_proves_over_tls), TEST(a_wrong_key_is_refused_and_not_shown), TEST(a_sas_proves_what_it_allows), TEST(a_sas_that_lacks_a_permission_says_which),
                                         TEST(an_upload_whose_sas_expires_says_so_and_leaves_nothing_in_the_way), TEST(an_upload_goes_on_with_the_new_sas_of_the_file),
                                         TEST(the_machines_identity_proves_by_a_token) };

int main(void)
{
        if (azure_connection_parse(getenv("AZURE_STORAGE_CONNECTION_STRING"), &account, &error)) {
                printf("1..0 # SKIP AZURE_STORAGE_CONNECTION_STRING names no emulator\n");
                return 77;
        }
        return tap_run(tests, sizeof tests / sizeof *tests);
}
