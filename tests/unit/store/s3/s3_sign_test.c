/* The S3 driver's signatures, against Amazon's published examples, and the URLs, regions and keys that it finds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"
#include "store/http/crypt.h"
#include "store/s3/s3_private.h"
#include "tap.h"
#include "test_dir.h"

#define EMPTY "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
#define HOST { "host", "examplebucket.s3.amazonaws.com" }
#define DATE { "x-amz-date", "20130524T000000Z" }

static struct nebula_error error;
static char directory[256];

/* "Examples: Signature Calculations" in the Amazon S3 API reference. */
static void the_published_examples_are_signed_alike(void)
{
        static const struct {
                struct object_call call;
                const char *path, *hash;
                struct http_header headers[6];
                size_t count;
                const char *signature;
        } examples[] = {
                { { .method = "GET" }, "/test.txt", EMPTY, { HOST, { "range", "bytes=0-9" }, { "x-amz-content-sha256", EMPTY }, DATE }, 4,
                  "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41" },
                { { .method = "PUT" }, "/test%24file.text", "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
                  { { "date", "Fri, 24 May 2013 00:00:00 GMT" }, HOST,
                    { "x-amz-content-sha256", "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072" }, DATE,
                    { "x-amz-storage-class", "REDUCED_REDUNDANCY" } }, 5,
                  "SignedHeaders=date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class,Signature=98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd" },
                { { .method = "GET", .params = { { "lifecycle", NULL } }, .param_count = 1 }, "/", EMPTY,
                  { HOST, { "x-amz-content-sha256", EMPTY }, DATE }, 3,
                  "SignedHeaders=host;x-amz-content-sha256;x-amz-date,Signature=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543" },
                { { .method = "GET", .params = { { "prefix", "J" }, { "max-keys", "2" } }, .param_count = 2 }, "/", EMPTY,
                  { HOST, { "x-amz-content-sha256", EMPTY }, DATE }, 3,
                  "SignedHeaders=host;x-amz-content-sha256;x-amz-date,Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7" },
        };
        const struct object_sigv4_key key = { "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "" };
        char time[OBJECT_SIGV4_TIME_SIZE], hash[OBJECT_SHA256_SIZE], wanted[400];

        object_sigv4_time(1369353600, time);
        CHECK(!strcmp(time, "20130524T000000Z"));
        CHECK(object_sha256_text("", 0, hash) && !strcmp(hash, EMPTY));
        for (size_t i = 0; i < sizeof examples / sizeof *examples; i++) {
                char *value = object_sigv4_sign(&s3_sigv4, &key, "us-east-1", time, &examples[i].call, examples[i].path, examples[i].headers,
                                                examples[i].count, examples[i].hash);

                snprintf(wanted, sizeof wanted, "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,%s", examples[i].signature);
                CHECK(value && !strcmp(value, wanted));
                if (value && strcmp(value, wanted))
                        printf("# %s\n#   and not %s\n", value, wanted);
                free(value);
        }
}

static const char *const variables[] = {
        "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE",
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "NEBULA_S3_STYLE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
};

/* No variable of AWS, and a home without files. */
static void begin(void)
{
        for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
                unsetenv(variables[i]);
        object_token_forget_all();
        test_dir_make(directory);
        setenv("HOME", directory, 1);
}

static void end(void)
{
        begin();
        test_dir_remove(directory);
}

static void write_file(const char *name, const char *text)
{
        char path[300];

        snprintf(path, sizeof path, "%s/.aws", directory);
        os_make_dirs(path, 0700);
        snprintf(path, sizeof path, "%s/.aws/%s", directory, name);
        if (os_write_file_atomic(path, text, strlen(text)))
                abort();
}

/* The bucket's URL for a storage path; "": the path is not valid. */
static const char *bucket_of(const char *url)
{
        static char text[300];
        struct s3_address address;
        char region[S3_REGION_MAX];
        struct buf buf = { 0 };

        text[0] = 0;
        if (s3_address_parse(url, "s3://", &address, &error))
                return text;
        s3_region_find(region);
        s3_add_bucket(&buf, &address, region);
        snprintf(text, sizeof text, "%.*s %s", (int)buf.size, buf.data, address.prefix);
        buf_done(&buf);
        s3_address_done(&address);
        return text;
}

static void a_path_means_a_bucket_of_a_region(void)
{
        static const char *const bad[] = { "s3://", "s3:///x", "s3://ab/x", "s3://A_b", "s3://-abc", "s3://abc.", "s3://a..bc", "s3://user@bucket/x", "s3://bucket:80/x",
                                           "s3://bucket/../x", "s3://bucket/%zz", "s3://bucket/x?versionId=1", "s3://bucket/a%0ab" };

        begin();
        CHECK(!strcmp(bucket_of("s3://bucket"), "https://bucket.s3.us-east-1.amazonaws.com "));
        setenv("AWS_REGION", "eu-west-1", 1);
        CHECK(!strcmp(bucket_of("s3://bucket/a/b/"), "https://bucket.s3.eu-west-1.amazonaws.com a/b/"));
        CHECK(!strcmp(bucket_of("s3://my.bucket/a%20b"), "https://s3.eu-west-1.amazonaws.com/my.bucket a b/"));
        setenv("NEBULA_S3_STYLE", "path", 1);
        CHECK(!strcmp(bucket_of("s3://bucket"), "https://s3.eu-west-1.amazonaws.com/bucket "));
        setenv("AWS_REGION", "cn-north-1", 1);
        CHECK(!strcmp(bucket_of("s3://bucket"), "https://s3.cn-north-1.amazonaws.com.cn/bucket "));
        setenv("AWS_REGION", "evil.host/", 1); /* no host but AWS's */
        CHECK(!strcmp(bucket_of("s3://bucket"), "https://s3.us-east-1.amazonaws.com/bucket "));
        unsetenv("NEBULA_S3_STYLE");
        setenv("AWS_ENDPOINT_URL", "https://minio.lan:9000/", 1);
        CHECK(!strcmp(bucket_of("s3://bucket/x"), "https://minio.lan:9000/bucket x/"));
        setenv("NEBULA_S3_STYLE", "virtual", 1);
        CHECK(!strcmp(bucket_of("s3://bucket/x"), "https://bucket.minio.lan:9000 x/"));
        setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:5000", 1);
        CHECK(!strcmp(bucket_of("s3://bucket/x"), "http://bucket.127.0.0.1:5000 x/"));
        setenv("AWS_ENDPOINT_URL_S3", "127.0.0.1:5000", 1);
        CHECK(!strcmp(bucket_of("s3://bucket/x"), "") && strstr(error.message, "AWS_ENDPOINT_URL"));
        setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:5000", 1);
        setenv("NEBULA_S3_STYLE", "other", 1);
        CHECK(!strcmp(bucket_of("s3://bucket/x"), "") && strstr(error.message, "NEBULA_S3_STYLE"));
        unsetenv("NEBULA_S3_STYLE");
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
                CHECK(!strcmp(bucket_of(bad[i]), "") && error.status == NEBULA_INVALID);
        end();
}

/* The keys that are found, "access secret session from source"; "": none. */
static const char *keys_found(void)
{
        static char text[500];
        struct object_sigv4_key key;
        char source[S3_SOURCE_MAX], *keys;
        uint64_t serial;
        struct object_token *token = s3_keys_find(source, &error);

        text[0] = 0;
        if (!token || object_token_get(token, 0, &keys, &serial, &error))
                return text;
        s3_keys_split(keys, &key);
        snprintf(text, sizeof text, "%s %s %s from %s", key.access, key.secret, key.session, source);
        free(keys);
        return text;
}

static void keys_are_those_of_the_environment_or_of_the_profile(void)
{
        char region[S3_REGION_MAX];

        begin();
        write_file("credentials", "# keys\n[other]\naws_access_key_id = WRONG\naws_secret_access_key=WRONG\n\n[default]\r\naws_access_key_id = AKID\r\naws_secret_access_key=se=cr/et\r\n"
                                  "[work]\naws_access_key_id=WORK\naws_secret_access_key=s\naws_session_token = token \n");
        write_file("config", "[default]\nregion = eu-north-1\ns3 =\n  endpoint_url = http://nested\n[profile work]\nregion = eu-west-3\nendpoint_url = http://127.0.0.1:9\n[profile sso]\nsso_session = x\n");
        CHECK(!strcmp(keys_found(), "AKID se=cr/et  from the profile \"default\""));
        s3_region_find(region);
        CHECK(!strcmp(region, "eu-north-1") && !strcmp(bucket_of("s3://bucket"), "https://bucket.s3.eu-north-1.amazonaws.com "));
        setenv("AWS_PROFILE", "work", 1);
        CHECK(!strcmp(keys_found(), "WORK s token from the profile \"work\""));
        CHECK(!strcmp(bucket_of("s3://bucket"), "http://127.0.0.1:9/bucket "));
        setenv("AWS_PROFILE", "sso", 1);
        CHECK(!strcmp(keys_found(), "") && error.status == NEBULA_INVALID && strstr(error.message, "sso_start_url"));
        setenv("AWS_ACCESS_KEY_ID", "ENV", 1);
        setenv("AWS_SECRET_ACCESS_KEY", "s", 1);
        CHECK(!strcmp(keys_found(), "ENV s  from the key of AWS_ACCESS_KEY_ID"));
        setenv("AWS_SESSION_TOKEN", "t", 1);
        CHECK(!strcmp(keys_found(), "ENV s t from the key of AWS_ACCESS_KEY_ID"));
        end();
}

TAP_MAIN(TEST(the_published_examples_are_signed_alike), TEST(a_path_means_a_bucket_of_a_region), TEST(keys_are_those_of_the_environment_or_of_the_profile))
