/* The certificates that AWS's variable or the profile names, for the bucket and for the service that lends keys. */
#include "os/os.h"
#include "store/http/client.h"
#include "store/http/server.h"
#include "store/s3/s3_private.h"
#include "tap.h"

#define ASSUMED                                                                                                                    \
        "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>A</AccessKeyId>"              \
        "<SecretAccessKey>SECRET</SecretAccessKey><SessionToken>T</SessionToken></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"

static struct nebula_error error;
static struct server *server, *other;
static char directory[256], bundle[300], wrong[300], transport[240];

static void serve(struct server_call *call, void *argument)
{
        if (!strcmp(call->method, "POST"))
                server_say(call, 200, "", ASSUMED);
        else
                server_say(call, 404, "", "<Error><Code>NoSuchKey</Code></Error>");
}

static void write_file(const char *name, const char *text)
{
        char path[400];

        snprintf(path, sizeof path, "%s/%s", directory, name);
        if (os_write_file_atomic(path, text, strlen(text)))
                abort();
}

/* The server's certificate is in `bundle`, that of another server in `wrong`. */
static void begin(void)
{
        static const char *const variables[] = { "AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE", "AWS_SESSION_TOKEN",
                                                 "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE" };
        char url[64], path[300];

        client_has_no_credentials(variables, sizeof variables / sizeof *variables, directory);
        server = server_start(serve, NULL, true);
        other = server_start(serve, NULL, true);
        snprintf(bundle, sizeof bundle, "%s/bundle.pem", directory);
        snprintf(wrong, sizeof wrong, "%s/wrong.pem", directory);
        snprintf(path, sizeof path, "%s/.aws", directory);
        if (!server_certificate(server, bundle) || !server_certificate(other, wrong) || os->mkdir(path, 0700))
                abort();
        setenv("AWS_ACCESS_KEY_ID", "AKID", 1);
        setenv("AWS_SECRET_ACCESS_KEY", "SECRET", 1);
        snprintf(url, sizeof url, "https://localhost:%d", server_port(server));
        setenv("AWS_ENDPOINT_URL", url, 1);
}

static void end(void)
{
        object_token_forget_all();
        server_stop(server);
        server_stop(other);
        test_dir_remove(directory);
}

/* NEBULA_NOT_FOUND: the server has answered. */
static enum nebula_status look(void)
{
        struct store_reach reach = { 0 };
        struct store_entry entry;
        struct store *store;
        enum nebula_status status;

        error = (struct nebula_error){ 0 };
        if (store_s3.open("s3://data/run", &store, &error))
                abort();
        status = store->ops->stat(store, "x", &entry, &error);
        if (!store->ops->reach(store, &reach, NULL))
                snprintf(transport, sizeof transport, "%s", reach.transport);
        store_close(store);
        return status;
}

static void the_variable_of_aws_counts_before_the_others(void)
{
        begin();
        setenv("SSL_CERT_FILE", wrong, 1);
        CHECK(look() == NEBULA_UNAVAILABLE && strstr(error.message, "$SSL_CERT_FILE names the certificates that are trusted"));
        setenv("AWS_CA_BUNDLE", bundle, 1);
        CHECK(look() == NEBULA_NOT_FOUND);
        CHECK(!strcmp(transport, "https, TLS 1.2 or newer, certificates of $AWS_CA_BUNDLE"));
        setenv("AWS_CA_BUNDLE", wrong, 1);
        setenv("SSL_CERT_FILE", bundle, 1);
        CHECK(look() == NEBULA_UNAVAILABLE && strstr(error.message, "$AWS_CA_BUNDLE names the certificates that are trusted"));
        setenv("AWS_CA_BUNDLE", "/nonexistent.pem", 1);
        CHECK(look() == NEBULA_UNAVAILABLE && strstr(error.message, "/nonexistent.pem") && strstr(error.message, "$AWS_CA_BUNDLE"));
        end();
}

static void the_profile_can_name_the_certificates(void)
{
        char config[500];

        begin();
        setenv("SSL_CERT_FILE", wrong, 1);
        snprintf(config, sizeof config, "[default]\nca_bundle = %s\n[profile empty]\nca_bundle =\n", bundle);
        write_file(".aws/config", config);
        CHECK(look() == NEBULA_NOT_FOUND && strstr(transport, "certificates of ca_bundle of the profile"));
        setenv("AWS_PROFILE", "empty", 1);
        CHECK(look() == NEBULA_UNAVAILABLE && strstr(error.message, "$SSL_CERT_FILE"));
        setenv("AWS_CA_BUNDLE", bundle, 1);
        CHECK(look() == NEBULA_NOT_FOUND && strstr(transport, "$AWS_CA_BUNDLE"));
        end();
}

static void the_service_that_lends_keys_is_asked_with_them_too(void)
{
        char path[400], url[64];

        begin();
        unsetenv("AWS_ACCESS_KEY_ID");
        write_file("token", "TOKEN\n");
        snprintf(path, sizeof path, "%s/token", directory);
        snprintf(url, sizeof url, "https://localhost:%d", server_port(server));
        setenv("AWS_WEB_IDENTITY_TOKEN_FILE", path, 1);
        setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x", 1);
        setenv("AWS_ENDPOINT_URL_STS", url, 1);
        CHECK(look() == NEBULA_UNAVAILABLE && strstr(error.message, "certificate"));
        setenv("AWS_CA_BUNDLE", bundle, 1);
        CHECK(look() == NEBULA_NOT_FOUND);
        unsetenv("AWS_ENDPOINT_URL_STS");
        end();
}

TAP_MAIN(TEST(the_variable_of_aws_counts_before_the_others), TEST(the_profile_can_name_the_certificates),
         TEST(the_service_that_lends_keys_is_asked_with_them_too))
