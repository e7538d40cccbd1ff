/* The requests of the Google driver, and its credentials. */
#include <jansson.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <pthread.h>
#include <stdatomic.h>

#include "os/os.h"
#include "store/gs/gs_private.h"
#include "store/http/client.h"
#include "store/http/crypt.h"
#include "store/http/server.h"
#include "tap.h"
#include "test_dir.h"

static struct nebula_error error;
static struct store *store;
static struct server *server;
static char last_head[4096], last_body[4096], token[64], directory[256];
static int refusal;
static const char *code;
static bool sends_elsewhere; /* the first answer to a read */

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
        if (sends_elsewhere && !strcmp(call->method, "GET") && strncmp(call->target, "/moved", 6)) {
                server_say(call, 302, "Location: /moved?sig=S\r\nx-goog-generation: 9\r\n", "");
                return;
        }
        if (strstr(call->target, "?uploads"))
                strcpy(text, "<InitiateMultipartUploadResult><UploadId>U</UploadId></InitiateMultipartUploadResult>");
        server_say(call, 200, "x-goog-generation: 17\r\nETag: \"p\"\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n", text);
}

static const char *const variables[] = { "GS_ACCESS_KEY_ID", "GS_SECRET_ACCESS_KEY", "GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST", "GOOGLE_TOKEN_URL",
                                          "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION" };

static void begin(void)
{
        struct http_settings settings;
        char url[64];

        client_has_no_credentials(variables, sizeof variables / sizeof *variables, directory);
        settings = http_settings_now();
        settings.small_bytes = 0; /* what is said of large objects holds for those of a few bytes */
        http_settings_set(&settings);
        *token = 0;
        refusal = 0;
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
        CHECK(store_put_text(store, "t/x", "1", STORE_ALWAYS, &error) == NEBULA_OK && !strstr(last_head, "generation-match") && !strstr(last_head, "user-project"));
        setenv("GOOGLE_CLOUD_QUOTA_PROJECT", "payer", 1);
        CHECK(store_put_text(store, "t/x", "1", STORE_ALWAYS, &error) == NEBULA_OK && strstr(last_head, "\r\nx-goog-user-project: payer\r\n") &&
              strstr(last_head, ";x-goog-user-project,"));
        unsetenv("GOOGLE_CLOUD_QUOTA_PROJECT");
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

static EVP_PKEY *make_key(void)
{
        EVP_PKEY_CTX *context = EVP_PKEY_CTX_new_id(EVP_PKEY_RSA, NULL);
        EVP_PKEY *key = NULL;

        if (EVP_PKEY_keygen_init(context) != 1 || EVP_PKEY_CTX_set_rsa_keygen_bits(context, 2048) != 1 || EVP_PKEY_keygen(context, &key) != 1)
                abort();
        EVP_PKEY_CTX_free(context);
        return key;
}

/* A key file as Google's console writes it. `password`: NULL, or of the key. */
static void write_key_file(EVP_PKEY *key, const char *url, const char *password)
{
        BIO *memory = BIO_new(BIO_s_mem());
        char path[300], *pem, *text;
        json_t *body;
        long size;

        PEM_write_bio_PKCS8PrivateKey(memory, key, password ? EVP_aes_256_cbc() : NULL, password, password ? (int)strlen(password) : 0, NULL, NULL);
        size = BIO_get_mem_data(memory, &pem);
        body = json_pack("{s:s, s:s, s:s%, s:s, s:s}", "type", "service_account", "private_key_id", "k1", "private_key", pem, (size_t)size,
                         "client_email", "me@project.iam.gserviceaccount.com", "token_uri", url);
        text = json_dumps(body, 0);
        write_file(path, text);
        setenv("GOOGLE_APPLICATION_CREDENTIALS", path, 1);
        free(text);
        json_decref(body);
        BIO_free(memory);
}

/* Decodes base64 for URLs, which has no padding; NUL-terminated. */
static size_t decode(const char *from, size_t size, char *ret_data, size_t room)
{
        char text[2000];
        size_t length = 0;

        if (size + 4 >= sizeof text)
                abort();
        for (; length < size; length++)
                text[length] = from[length] == '-' ? '+' : from[length] == '_' ? '/' : from[length];
        while (length % 4)
                text[length++] = '=';
        text[length] = 0;
        CHECK(crypt_base64_decode(text, ret_data, room - 1, &size));
        ret_data[size] = 0;
        return size;
}

/* The header and the claims of the assertion; checks its signature. */
static json_t *read_assertion(EVP_PKEY *key, const char *token_text, json_t **ret_claims)
{
        const char *first = strchr(token_text, '.'), *second = first ? strchr(first + 1, '.') : NULL;
        EVP_MD_CTX *context = EVP_MD_CTX_new();
        char head[500] = "", claims[1000] = "", signature[600];
        size_t size;

        if (!second)
                abort();
        decode(token_text, (size_t)(first - token_text), head, sizeof head);
        decode(first + 1, (size_t)(second - first - 1), claims, sizeof claims);
        size = decode(second + 1, strlen(second + 1), signature, sizeof signature);
        CHECK(EVP_DigestVerifyInit(context, NULL, EVP_sha256(), NULL, key) == 1);
        CHECK(EVP_DigestVerify(context, (unsigned char *)signature, size, (const unsigned char *)token_text, (size_t)(second - token_text)) == 1);
        EVP_MD_CTX_free(context);
        *ret_claims = json_loads(claims, 0, NULL);
        return json_loads(head, 0, NULL);
}

static const char *text_of(const json_t *object, const char *name)
{
        const char *text = json_string_value(json_object_get(object, name));

        return text ? text : "";
}

static void the_key_of_a_service_account_signs_for_a_token(void)
{
        static const char before[] = "grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Ajwt-bearer&assertion=";
        struct server *service = server_start(issue, NULL, false);
        EVP_PKEY *key = make_key();
        json_t *head, *claims;
        char url[64];

        begin();
        tokens = 0;
        snprintf(url, sizeof url, "http://127.0.0.1:%d/token", server_port(service));
        write_key_file(key, url, NULL);
        strcpy(token, "Bearer SECRET1");
        REQUIRE(put() == NEBULA_OK && put() == NEBULA_OK && tokens == 1 && !strncmp(service_body, before, sizeof before - 1));
        head = read_assertion(key, service_body + sizeof before - 1, &claims);
        CHECK(!strcmp(text_of(head, "alg"), "RS256") && !strcmp(text_of(head, "kid"), "k1") && !strcmp(text_of(head, "typ"), "JWT"));
        CHECK(!strcmp(text_of(claims, "iss"), "me@project.iam.gserviceaccount.com") && !strcmp(text_of(claims, "aud"), url));
        CHECK(!strcmp(text_of(claims, "scope"), "https://www.googleapis.com/auth/devstorage.read_write"));
        CHECK(json_integer_value(json_object_get(claims, "exp")) - json_integer_value(json_object_get(claims, "iat")) == 3600);
        CHECK(llabs(json_integer_value(json_object_get(claims, "iat")) - os->wall_ns() / 1000000000) < 300);
        strcpy(token, "Bearer SECRET2"); /* the first one ended */
        CHECK(put() == NEBULA_OK && tokens == 2);
        json_decref(head);
        json_decref(claims);
        EVP_PKEY_free(key);
        end();
        server_stop(service);
}

static void a_key_file_that_cannot_be_used_is_refused_without_its_key(void)
{
        EVP_PKEY *key = make_key();
        char path[300];

        begin();
        write_key_file(key, "http://127.0.0.1:1/token", "password"); /* nobody is asked for it */
        CHECK(put() == NEBULA_INVALID && strstr(error.message, "me@project") && !strstr(error.message, "BEGIN"));
        store_close(store);
        store_gs.open("gs://data/run", &store, &error);
        write_file(path, "{\"type\":\"service_account\",\"private_key\":\"SECRET\",\"client_email\":\"me\"}");
        CHECK(put() == NEBULA_INVALID && strstr(error.message, "no RSA key") && !strstr(error.message, "SECRET"));
        store_close(store);
        store_gs.open("gs://data/run", &store, &error);
        write_file(path, "{\"type\":\"service_account\",\"private_key\":\"SECRET\"}");
        CHECK(put() == NEBULA_INVALID && strstr(error.message, "client_email") && !strstr(error.message, "SECRET"));
        EVP_PKEY_free(key);
        end();
}

/* Google's STS and its service of accounts, and the provider's own service. */
static char exchanged[2048], lent[2048], provider_head[2048], exchange_head[2048], lent_head[2048];
static int exchange_refusal, lend_refusal;
static const char *provided; /* NULL: the provider refuses */

static void federate(struct server_call *call, void *argument)
{
        if (!strcmp(call->method, "GET")) {
                snprintf(provider_head, sizeof provider_head, "%s", call->head);
                server_say(call, provided ? 200 : 404, "", provided ? provided : "SECRET");
        } else if (strstr(call->target, "generateAccessToken")) {
                snprintf(lent_head, sizeof lent_head, "%s", call->head);
                snprintf(lent, sizeof lent, "%s", call->body);
                server_say(call, lend_refusal ? lend_refusal : 200, "", lend_refusal ? "{\"error\":{\"code\":403,\"message\":\"no right\",\"status\":\"PERMISSION_DENIED\"}}"
                                                                                 : "{\"accessToken\":\"LENT\",\"expireTime\":\"2099-01-01T00:00:00Z\"}");
        } else {
                snprintf(exchange_head, sizeof exchange_head, "%s", call->head);
                snprintf(exchanged, sizeof exchanged, "%s", call->body);
                server_say(call, exchange_refusal ? exchange_refusal : 200, "", exchange_refusal ? "{\"error\":\"invalid_grant\",\"error_description\":\"the audience is wrong\"}"
                                                                                             : "{\"access_token\":\"STS\",\"expires_in\":3600,\"token_type\":\"Bearer\"}");
        }
}

/* A file of the type external_account; `more`: further members. The store opens anew. */
static void use_identity(struct server *service, const char *source, const char *more)
{
        char path[300], text[2000];

        snprintf(text, sizeof text, "{\"type\":\"external_account\",\"audience\":\"//iam/pools/a/providers/b\",\"subject_token_type\":\"urn:ietf:params:oauth:token-type:jwt\","
                                    "\"token_url\":\"http://127.0.0.1:%d/v1/token\",\"credential_source\":{%s}%s}", server_port(service), source, more);
        write_file(path, text);
        setenv("GOOGLE_APPLICATION_CREDENTIALS", path, 1);
        object_token_forget_all();
        store_close(store);
        if (store_gs.open("gs://data/run", &store, &error))
                abort();
        error = (struct nebula_error){ 0 };
        *exchanged = *lent = 0;
}

static bool says(const char *what)
{
        bool does = strstr(error.message, what) && !strstr(error.message, "SECRET");

        if (!does)
                printf("# not \"%s\": %s\n", what, error.message);
        return does;
}

static void another_providers_token_is_exchanged(void)
{
        static const char form[] = "grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Atoken-exchange&requested_token_type=urn%3Aietf%3Aparams%3Aoauth%3Atoken-type%3Aaccess_token"
                                   "&audience=%2F%2Fiam%2Fpools%2Fa%2Fproviders%2Fb&scope=https%3A%2F%2Fwww.googleapis.com%2Fauth%2Fdevstorage.read_write"
                                   "&subject_token_type=urn%3Aietf%3Aparams%3Aoauth%3Atoken-type%3Ajwt&subject_token=";
        struct server *service = server_start(federate, NULL, false);
        char source[600], more[300], wanted[1200];

        begin();
        exchange_refusal = lend_refusal = 0;
        strcpy(token, "Bearer STS");
        snprintf(source, sizeof source, "%s/subject", directory);
        if (os_write_file_atomic(source, "SUBJECT+1\n", 10))
                abort();
        snprintf(source, sizeof source, "\"file\":\"%s/subject\"", directory);
        use_identity(service, source, "");
        snprintf(wanted, sizeof wanted, "%sSUBJECT%%2B1", form);
        CHECK(put() == NEBULA_OK && !strcmp(exchanged, wanted) && !*lent && !strstr(exchange_head, "Authorization"));
        use_identity(service, source, ",\"workforce_pool_user_project\":\"p1\"");
        strcat(wanted, "&options=%7B%22userProject%22%3A%22p1%22%7D");
        CHECK(put() == NEBULA_OK && !strcmp(exchanged, wanted));
        use_identity(service, source, ",\"client_id\":\"me\",\"client_secret\":\"pw\"");
        CHECK(put() == NEBULA_OK && strstr(exchange_head, "\r\nAuthorization: Basic bWU6cHc=\r\n"));

        provided = "{\"value\":\"FROM-URL\"}";
        snprintf(source, sizeof source, "\"url\":\"http://127.0.0.1:%d/identity?x=1\",\"headers\":{\"Metadata\":\"True\"},\"format\":{\"type\":\"json\",\"subject_token_field_name\":\"value\"}",
                 server_port(service));
        snprintf(more, sizeof more, ",\"service_account_impersonation_url\":\"http://127.0.0.1:%d/v1/projects/-/serviceAccounts/a:generateAccessToken\","
                                    "\"service_account_impersonation\":{\"token_lifetime_seconds\":1800}", server_port(service));
        use_identity(service, source, more);
        strcpy(token, "Bearer LENT");
        CHECK(put() == NEBULA_OK && strstr(exchanged, "&scope=https%3A%2F%2Fwww.googleapis.com%2Fauth%2Fcloud-platform&") && strstr(exchanged, "&subject_token=FROM-URL"));
        CHECK(!strncmp(provider_head, "GET /identity?x=1 HTTP/1.1\r\n", 28) && strstr(provider_head, "\r\nMetadata: True\r\n"));
        CHECK(strstr(lent_head, "\r\nAuthorization: Bearer STS\r\n") && !strcmp(lent, "{\"scope\":[\"https://www.googleapis.com/auth/devstorage.read_write\"],\"lifetime\":\"1800s\"}"));

        use_identity(service, "\"executable\":{\"command\":\"printf '{\\\"version\\\":1,\\\"success\\\":true,\\\"token_type\\\":\\\"%s\\\",\\\"id_token\\\":\\\"PRINTED\\\"}' urn:ietf:params:oauth:token-type:id_token\"}", "");
        CHECK(put() == NEBULA_INVALID && says("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1"));
        setenv("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "1", 1);
        strcpy(token, "Bearer STS");
        CHECK(put() == NEBULA_OK && strstr(exchanged, "&subject_token=PRINTED"));
        end();
        server_stop(service);
}

static int64_t at_a_fixed_time(void)
{
        return 1767323045 * INT64_C(1000000000); /* 2026-01-02T03:04:05Z */
}

/* The decoded subject token; NULL: there is none. */
static json_t *read_subject(void)
{
        const char *from = strstr(exchanged, "&subject_token=");
        struct buf once = { 0 }, twice = { 0 };
        size_t size;
        json_t *body;
        char *text;

        if (!from || !url_decode(&once, from + 15, strlen(from + 15)))
                return NULL;
        text = buf_take(&once, &size);
        CHECK(url_decode(&twice, text, size));
        free(text);
        text = buf_take(&twice, &size);
        body = json_loadb(text, size, 0, NULL);
        free(text);
        return body;
}

static const char *header_of(const json_t *subject, const char *name)
{
        json_t *header;
        size_t i;

        json_array_foreach(json_object_get(subject, "headers"), i, header)
                if (!strcmp(text_of(header, "key"), name))
                        return text_of(header, "value");
        return "";
}

/* botocore 1.44.8 computed the signatures. */
static void an_identity_of_aws_signs_the_request_that_sts_sends_on(void)
{
        static const char source[] = "\"environment_id\":\"aws1\",\"regional_cred_verification_url\":\"https://sts.{region}.amazonaws.com?Action=GetCallerIdentity&Version=2011-06-15\"";
        struct server *service = server_start(federate, NULL, false);
        struct os_table table = os_linux;
        char with_region[600];
        json_t *subject;

        begin();
        exchange_refusal = lend_refusal = 0;
        strcpy(token, "Bearer STS");
        setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE", 1);
        setenv("AWS_SECRET_ACCESS_KEY", "SECRET", 1);
        setenv("AWS_SESSION_TOKEN", "SESSION+/=", 1);
        setenv("AWS_REGION", "eu-west-3", 1);
        table.wall_ns = at_a_fixed_time;
        os = &table;
        use_identity(service, source, "");
        CHECK(put() == NEBULA_OK);
        subject = read_subject();
        CHECK(!strcmp(text_of(subject, "url"), "https://sts.eu-west-3.amazonaws.com?Action=GetCallerIdentity&Version=2011-06-15") && !strcmp(text_of(subject, "method"), "POST"));
        CHECK(!strcmp(header_of(subject, "Authorization"), "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20260102/eu-west-3/sts/aws4_request,SignedHeaders=host;x-amz-date;x-amz-security-token,"
                                                           "Signature=be48e57361f4cf0088acae0ad25f41a397ee2bc6870c2529977fd3c52a36127e"));
        CHECK(!strcmp(header_of(subject, "x-amz-security-token"), "SESSION+/=") && !strcmp(header_of(subject, "x-goog-cloud-target-resource"), "//iam/pools/a/providers/b"));
        json_decref(subject);

        unsetenv("AWS_SESSION_TOKEN");
        unsetenv("AWS_REGION");
        provided = "eu-west-3b";
        snprintf(with_region, sizeof with_region, "%s,\"region_url\":\"http://127.0.0.1:%d/placement/availability-zone\"", source, server_port(service));
        use_identity(service, with_region, "");
        CHECK(put() == NEBULA_OK && !strncmp(provider_head, "GET /placement/availability-zone HTTP/1.1\r\n", 43));
        subject = read_subject();
        CHECK(strstr(header_of(subject, "Authorization"), ",Signature=42ee722b0a9de3e58382695ef875965340f856f2bc9b0c75403f3b0a609655ef"));
        json_decref(subject);
        os = &os_linux;
        end();
        server_stop(service);
}

static void an_identity_that_gets_no_token_is_refused_with_the_reason_and_without_its_tokens(void)
{
        struct server *service = server_start(federate, NULL, false);
        char source[600], more[300];

        begin();
        setenv("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "1", 1);
        exchange_refusal = lend_refusal = 0;
        use_identity(service, "\"environment_id\":\"aws2\"", "");
        CHECK(put() == NEBULA_INVALID && says("environment_id"));
        setenv("AWS_ACCESS_KEY_ID", "A", 1);
        setenv("AWS_SECRET_ACCESS_KEY", "SECRET", 1);
        use_identity(service, "\"environment_id\":\"aws1\",\"regional_cred_verification_url\":\"https://sts.{region}.amazonaws.com?Action=GetCallerIdentity\"", "");
        CHECK(put() == NEBULA_INVALID && says("AWS_REGION"));
        setenv("AWS_REGION", "eu-west-3", 1);
        use_identity(service, "\"environment_id\":\"aws1\"", "");
        CHECK(put() == NEBULA_INVALID && says("regional_cred_verification_url"));
        use_identity(service, "\"certificate\":{}", "");
        CHECK(put() == NEBULA_INVALID && says("file, url, executable or environment_id"));
        use_identity(service, "\"file\":\"/nonexistent\"", "");
        CHECK(put() == NEBULA_UNAVAILABLE && says("cannot read the token file /nonexistent"));
        use_identity(service, "\"executable\":{\"command\":\"echo SECRET; exit 4\"}", "");
        CHECK(put() == NEBULA_UNAVAILABLE && says("its program ended with the code 4"));
        use_identity(service, "\"executable\":{\"command\":\"echo SECRET\"}", "");
        CHECK(put() == NEBULA_UNAVAILABLE && says("its program prints no token that is valid now"));
        snprintf(source, sizeof source, "\"url\":\"http://127.0.0.1:%d/identity\",\"format\":{\"type\":\"json\",\"subject_token_field_name\":\"value\"}", server_port(service));
        provided = NULL;
        use_identity(service, source, "");
        CHECK(put() == NEBULA_STORAGE && says("answers 404"));
        provided = "{\"other\":\"SECRET\"}";
        use_identity(service, source, "");
        CHECK(put() == NEBULA_UNAVAILABLE && says("holds no token in the form"));
        provided = "{\"value\":\"SECRET\"}";
        exchange_refusal = 400;
        use_identity(service, source, "");
        CHECK(put() == NEBULA_STORAGE && says("gets no token of STS: the answer is 400 invalid_grant: the audience is wrong"));
        exchange_refusal = 0;
        lend_refusal = 403;
        snprintf(more, sizeof more, ",\"service_account_impersonation_url\":\"http://127.0.0.1:%d/v1/a:generateAccessToken\"", server_port(service));
        use_identity(service, source, more);
        CHECK(put() == NEBULA_STORAGE && says("gets no token of the service account: the answer is 403 PERMISSION_DENIED: no right"));
        end();
        server_stop(service);
}

/* fault: as a_refusal_says_what_to_do */
static void a_refusal_says_what_to_do(void)
{
        char path[300];

        begin();
        write_file(path, "{\"type\":\"impersonated_service_account\",\"private_key\":\"SECRET\"}");
        setenv("GOOGLE_APPLICATION_CREDENTIALS", path, 1);
        CHECK(put() == NEBULA_INVALID && strstr(error.message, "impersonated_service_account") && strstr(error.message, "HMAC key") && !strstr(error.message, "SECRET"));
        unsetenv("GOOGLE_APPLICATION_CREDENTIALS");
        setenv("GCE_METADATA_HOST", "127.0.0.1:1", 1);
        CHECK(put() == NEBULA_UNAVAILABLE && strstr(error.message, "the environment holds neither key nor token"));
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

static void a_read_that_is_sent_elsewhere_keeps_the_generation_of_the_store(void)
{
        struct store_stamp stamp;
        char url[100], *text;

        begin();
        setenv("GS_ACCESS_KEY_ID", "GOOG1E", 1);
        setenv("GS_SECRET_ACCESS_KEY", "SECRET", 1);
        sends_elsewhere = true;
        REQUIRE(store->ops->get(store, "t/x", 10, &text, NULL, &stamp, &error) == NEBULA_OK && !strcmp(stamp.text, "9"));
        free(text);
        CHECK(!strncmp(last_head, "GET /moved?sig=S HTTP/1.1\r\n", 27) && !strstr(last_head, "Authorization") && !strstr(last_head, "x-goog"));
        sends_elsewhere = false;
        snprintf(url, sizeof url, "http://127.0.0.1:%d/a%%20b/", server_port(server)); /* an endpoint with a path */
        setenv("STORAGE_EMULATOR_HOST", url, 1);
        store_close(store);
        REQUIRE(store_gs.open("gs://data/run", &store, &error) == NEBULA_OK && store_put_text(store, "t/x", "1", STORE_ALWAYS, &error) == NEBULA_OK);
        CHECK(!strncmp(last_head, "PUT /a%20b/data/run/t/x HTTP/1.1\r\n", 34));
        end();
}

TAP_MAIN(TEST(a_read_that_is_sent_elsewhere_keeps_the_generation_of_the_store), TEST(each_operation_is_the_request_of_the_reference), TEST(a_machines_token_is_asked_for_once_and_replaced_when_it_is_refused),
         TEST(the_login_of_gcloud_is_exchanged_for_a_token), TEST(the_key_of_a_service_account_signs_for_a_token),
         TEST(a_key_file_that_cannot_be_used_is_refused_without_its_key), TEST(another_providers_token_is_exchanged), TEST(an_identity_of_aws_signs_the_request_that_sts_sends_on),
         TEST(an_identity_that_gets_no_token_is_refused_with_the_reason_and_without_its_tokens), TEST(a_refusal_says_what_to_do))
