/* Keys that a profile of AWS's command gets from others: a role's from STS, a login's from the portal, and those that a program prints. */
#include "os/os.h"
#include "store/http/client.h"
#include "store/http/crypt.h"
#include "store/http/server.h"
#include "store/s3/s3_private.h"
#include "tap.h"
#include "test_dir.h"

static struct nebula_error error;
static struct server *server; /* STS and the portal */
static char directory[256], last_head[4096], last_body[4096];
static int refusal;

static void serve(struct server_call *call, void *argument)
{
        snprintf(last_head, sizeof last_head, "%s", call->head);
        snprintf(last_body, sizeof last_body, "%s", call->body);
        if (refusal)
                server_say(call, refusal, "", "<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>");
        else if (!strcmp(call->method, "POST"))
                server_say(call, 200, "", "<AssumeRoleResponse><AssumeRoleResult><Credentials><AccessKeyId>ROLE</AccessKeyId><SecretAccessKey>SECRET</SecretAccessKey>"
                                          "<SessionToken>SESSION</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>");
        else
                server_say(call, 200, "", "{\"roleCredentials\":{\"accessKeyId\":\"LOGIN\",\"secretAccessKey\":\"SECRET\",\"sessionToken\":\"SESSION\",\"expiration\":4070908800000}}");
}

static void write_file(const char *name, const char *text)
{
        char path[400];

        snprintf(path, sizeof path, "%s/%s", directory, name);
        if (os_write_file_atomic(path, text, strlen(text)))
                abort();
}

static void begin(const char *config, const char *credentials)
{
        static const char *const variables[] = { "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN", "AWS_ENDPOINT_URL",
                                                 "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE" };
        char url[64], path[300];

        client_has_no_credentials(variables, sizeof variables / sizeof *variables, directory);
        refusal = 0;
        for (const char *const *name = (const char *const[]){ ".aws", ".aws/sso", ".aws/sso/cache", NULL }; *name; name++) {
                snprintf(path, sizeof path, "%s/%s", directory, *name);
                if (os->mkdir(path, 0700))
                        abort();
        }
        write_file(".aws/config", config);
        write_file(".aws/credentials", credentials);
        server = server_start(serve, NULL, false);
        snprintf(url, sizeof url, "http://127.0.0.1:%d", server_port(server));
        setenv("AWS_ENDPOINT_URL_STS", url, 1);
        setenv("AWS_ENDPOINT_URL_SSO", url, 1);
}

static void end(void)
{
        object_token_forget_all();
        server_stop(server);
        test_dir_remove(directory);
}

/* The keys of the profile, "access secret session from source"; "": none. */
static const char *keys_of(const char *profile)
{
        static char text[500];
        struct object_sigv4_key key;
        char source[S3_SOURCE_MAX], *keys;
        struct object_token *token;
        uint64_t serial;

        setenv("AWS_PROFILE", profile, 1);
        error = (struct nebula_error){ 0 };
        token = s3_keys_find(source, &error);
        text[0] = 0;
        if (!token || object_token_get(token, 0, &keys, &serial, &error))
                return text;
        s3_keys_split(keys, &key);
        snprintf(text, sizeof text, "%s %s %s from %s", key.access, key.secret, key.session, source);
        free(keys);
        return text;
}

static bool says(const char *what)
{
        bool does = strstr(error.message, what) && !strstr(error.message, "SECRET") && !strstr(error.message, "TOKEN");

        if (!does)
                printf("# not \"%s\": %s\n", what, error.message);
        return does;
}

static void a_role_is_assumed_with_the_keys_of_its_source(void)
{
        begin("[profile work]\nregion = eu-west-3\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = base\nexternal_id = e+1\n[profile far]\nrole_arn = arn:aws:iam::2:role/y\n"
              "role_session_name = me\nsource_profile = work\n[profile own]\nrole_arn = arn:aws:iam::3:role/z\nsource_profile = own\n",
              "[base]\naws_access_key_id = BASE\naws_secret_access_key = SECRET\n[own]\naws_access_key_id = OWN\naws_secret_access_key = SECRET\n");
        CHECK(!strcmp(keys_of("work"), "ROLE SECRET SESSION from the profile \"work\""));
        CHECK(!strncmp(last_head, "POST / HTTP/1.1\r\n", 17) && strstr(last_head, "\r\nAuthorization: AWS4-HMAC-SHA256 Credential=BASE/") &&
              strstr(last_head, "/eu-west-3/sts/aws4_request,SignedHeaders=content-type;host;x-amz-content-sha256;x-amz-date,"));
        CHECK(!strcmp(last_body, "Action=AssumeRole&Version=2011-06-15&RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fx&RoleSessionName=nebula&ExternalId=e%2B1"));
        CHECK(!strcmp(keys_of("far"), "ROLE SECRET SESSION from the profile \"far\""));
        CHECK(strstr(last_head, " Credential=ROLE/") && strstr(last_head, "\r\nx-amz-security-token: SESSION\r\n") && strstr(last_body, "role%2Fy&RoleSessionName=me"));
        CHECK(!strcmp(keys_of("own"), "ROLE SECRET SESSION from the profile \"own\"") && strstr(last_head, " Credential=OWN/"));
        end();
}

static void a_role_that_cannot_be_assumed_is_refused_with_the_reason(void)
{
        begin("[profile loop]\nrole_arn = arn:1\nsource_profile = pool\n[profile pool]\nrole_arn = arn:2\nsource_profile = loop\n[profile none]\nrole_arn = arn:1\n"
              "[profile empty]\nrole_arn = arn:1\nsource_profile = nobody\n[profile code]\nrole_arn = arn:1\nsource_profile = base\nmfa_serial = m\n"
              "[profile work]\nrole_arn = arn:1\nsource_profile = base\n",
              "[base]\naws_access_key_id = BASE\naws_secret_access_key = SECRET\n");
        CHECK(!*keys_of("loop") && error.status == NEBULA_INVALID && says("too many"));
        CHECK(!*keys_of("none") && error.status == NEBULA_INVALID && says("source_profile"));
        CHECK(!*keys_of("empty") && error.status == NEBULA_INVALID && says("the profile \"nobody\" has no aws_access_key_id"));
        CHECK(!*keys_of("code") && error.status == NEBULA_INVALID && says("mfa_serial"));
        refusal = 403;
        CHECK(!*keys_of("work") && error.status == NEBULA_STORAGE && says("the role of the profile \"work\" gets no keys: the answer is 403 AccessDenied"));
        end();
}

static void write_login(const char *session, const char *expires)
{
        char name[100], text[200], digest[CRYPT_SHA1_HEX];

        CHECK(crypt_sha1_hex(session, strlen(session), digest));
        snprintf(name, sizeof name, ".aws/sso/cache/%s.json", digest);
        snprintf(text, sizeof text, "{\"startUrl\":\"https://x\",\"accessToken\":\"TOKEN\",\"expiresAt\":\"%s\"}", expires);
        write_file(name, text);
}

static void the_token_of_a_login_is_exchanged_for_keys(void)
{
        char digest[CRYPT_SHA1_HEX];

        begin("[sso-session team]\nsso_start_url = https://x/start\nsso_region = eu-west-1\n[profile new]\nsso_session = team\nsso_account_id = 123\nsso_role_name = A+b\n"
              "[profile old]\nsso_start_url = https://x/old\nsso_region = eu-west-1\nsso_account_id = 124\nsso_role_name = c\n[profile part]\nsso_session = team\n"
              "[profile role]\nrole_arn = arn:1\nsource_profile = new\n", "");
        CHECK(crypt_sha1_hex("abc", 3, digest) && !strcmp(digest, "a9993e364706816aba3e25717850c26c9cd0d89d")); /* FIPS 180-2 */
        CHECK(!*keys_of("new") && error.status == NEBULA_UNAVAILABLE && says("aws sso login"));
        write_login("team", "2020-01-01T00:00:00Z");
        object_token_forget_all();
        CHECK(!*keys_of("new") && error.status == NEBULA_UNAVAILABLE && says("has ended: run aws sso login"));
        write_login("team", "2099-01-01T00:00:00Z");
        write_login("https://x/old", "2099-01-01T00:00:00Z");
        object_token_forget_all();
        CHECK(!strcmp(keys_of("new"), "LOGIN SECRET SESSION from the profile \"new\""));
        CHECK(!strncmp(last_head, "GET /federation/credentials?role_name=A%2Bb&account_id=123 HTTP/1.1\r\n", 69) && strstr(last_head, "\r\nx-amz-sso_bearer_token: TOKEN\r\n"));
        CHECK(!strcmp(keys_of("old"), "LOGIN SECRET SESSION from the profile \"old\"") && strstr(last_head, "account_id=124"));
        CHECK(!strcmp(keys_of("role"), "ROLE SECRET SESSION from the profile \"role\"") && strstr(last_head, " Credential=LOGIN/"));
        CHECK(!*keys_of("part") && error.status == NEBULA_INVALID && says("sso_account_id"));
        object_token_forget_all();
        refusal = 401;
        CHECK(!*keys_of("new") && error.status == NEBULA_STORAGE && says("the answer is 401: run aws sso login"));
        end();
}

/* A program that counts its runs and prints a file. Its command has a quoted argument with a blank. */
static void write_program(const char *printed)
{
        write_file("printed", printed);
        write_file("program", "echo \"$2\" >>\"$1/runs\"; cat \"$1/printed\"; echo 'KEEP SECRET' >&2\n");
}

static void write_profile(const char *command)
{
        char text[900];

        snprintf(text, sizeof text, "[profile program]\ncredential_process = %s\n[profile role]\nrole_arn = arn:1\nsource_profile = program\n", command);
        write_file(".aws/config", text);
        object_token_forget_all();
}

static bool has_run(const char *wanted)
{
        char path[300], *text;
        size_t size;
        bool is_so;

        snprintf(path, sizeof path, "%s/runs", directory);
        if (os_read_file(path, 4096, &text, &size))
                return !*wanted;
        is_so = !strcmp(text, wanted);
        if (!is_so)
                printf("# it has run with: %s\n", text);
        free(text);
        return is_so;
}

static void a_program_prints_the_keys(void)
{
        struct object_token *token;
        char command[600], source[S3_SOURCE_MAX], *keys;
        uint64_t serial;

        begin("", "");
        snprintf(command, sizeof command, "sh %s/program %s \"a b\"", directory, directory);
        write_profile(command);
        write_program("{\"Version\": 1, \"AccessKeyId\": \"PRINTED\", \"SecretAccessKey\": \"SECRET\", \"SessionToken\": \"SESSION\", \"Expiration\": \"2099-01-01T00:00:00+00:00\"}");
        CHECK(!strcmp(keys_of("program"), "PRINTED SECRET SESSION from the profile \"program\"") && has_run("a b\n"));
        CHECK(!strcmp(keys_of("role"), "ROLE SECRET SESSION from the profile \"role\"") && strstr(last_head, " Credential=PRINTED/") && has_run("a b\n"));
        write_program("{\"Version\": 1, \"AccessKeyId\": \"NEXT\", \"SecretAccessKey\": \"SECRET\"}");
        setenv("AWS_PROFILE", "program", 1);
        token = s3_keys_find(source, &error);
        REQUIRE(token && object_token_get(token, 0, &keys, &serial, &error) == NEBULA_OK);
        CHECK(!strncmp(keys, "PRINTED\n", 8));
        free(keys);
        REQUIRE(object_token_get(token, serial, &keys, &serial, &error) == NEBULA_OK); /* S3 has refused them */
        CHECK(!strcmp(keys, "NEXT\nSECRET\n\n") && has_run("a b\na b\n"));
        free(keys);
        end();
}

static void a_program_without_keys_is_refused_with_the_reason_and_without_what_it_printed(void)
{
        begin("", "");
        write_profile("exit 3");
        CHECK(!*keys_of("program") && error.status == NEBULA_UNAVAILABLE && says("the credential_process of the profile \"program\" ended with the code 3"));
        write_profile("echo SECRET");
        CHECK(!*keys_of("program") && error.status == NEBULA_UNAVAILABLE && says("does not print a JSON object"));
        write_profile("echo '{\"Version\": 2, \"AccessKeyId\": \"A\", \"SecretAccessKey\": \"SECRET\"}'");
        CHECK(!*keys_of("program") && error.status == NEBULA_UNAVAILABLE && says("Version 1"));
        write_profile("yes SECRET");
        CHECK(!*keys_of("program") && error.status == NEBULA_UNAVAILABLE && says("more than 64 KiB"));
        end();
}

static void the_end_of_keys_is_read_in_each_zone(void)
{
        int64_t now = os->wall_ns() / 1000000000, end = 1893456000; /* 2030-01-01T00:00:00Z */

        CHECK(llabs(s3_life_of("2030-01-01T00:00:00Z") - (end - now)) <= 1);
        CHECK(llabs(s3_life_of("2030-01-01T01:30:00.250+01:30") - (end - now)) <= 1);
        CHECK(llabs(s3_life_of("2029-12-31T17:00:00-0700") - (end - now)) <= 1);
        CHECK(s3_life_of("tomorrow") == 600 && s3_life_of(NULL) == 600);
}

TAP_MAIN(TEST(a_program_prints_the_keys), TEST(a_program_without_keys_is_refused_with_the_reason_and_without_what_it_printed),
         TEST(the_end_of_keys_is_read_in_each_zone), TEST(a_role_is_assumed_with_the_keys_of_its_source), TEST(a_role_that_cannot_be_assumed_is_refused_with_the_reason), TEST(the_token_of_a_login_is_exchanged_for_keys))
