/* Keys that a service lends for some hours: to a pod by its web identity, to a container, or to a machine (IMDS, version 2). */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "store/http/crypt.h"
#include "store/s3/s3_private.h"

#define ANSWER_MAX (64u << 10)
#define CONTAINER_HOST "http://169.254.170.2"
#define MACHINE_HOST "http://169.254.169.254"
#define MACHINE_ROLES "/latest/meta-data/iam/security-credentials/"
#define MACHINE_CONNECT_MS 2000 /* the service is on this machine's network card or does not exist */
#define MACHINE_ANSWER_MS 3000
#define MACHINE_RETRY_MS 5000
#define UNKNOWN_LIFE_S 600

/* The settings at the time when the lender was found. */
struct lending {
        enum s3_lender lender;
        char *url;   /* of the web identity's or container's service; for the machine's: its host */
        char *role;  /* web identity: AWS_ROLE_ARN */
        char *name;  /* web identity: the session's name */
        char *file;  /* holds the web identity or the container's authorization; NULL: none */
        char *token; /* the container's authorization; NULL: none */
};

static enum nebula_status no_keys(const char *who, const struct http_response *response, struct nebula_error *error)
{
        char code[OBJECT_CODE_SIZE];
        enum nebula_status status;

        s3_code(response, code);
        status = error_set(error, NEBULA_STORAGE, 0, "%.200s gets no keys: the answer is %d%s%s", who, response->status, *code ? " " : "", code);
        if (error)
                error->http_status = response->status;
        return status;
}

static const char *who(const struct lending *lending)
{
        static const char *const names[] = { "the role of AWS_ROLE_ARN", "the role of this container", "the role of this machine" };

        return names[lending->lender];
}

int64_t s3_life_of(const char *expiration)
{
        int64_t seconds;

        return expiration && http_date_parse_iso(expiration, &seconds) ? seconds - os->wall_ns() / SECOND_NS : UNKNOWN_LIFE_S;
}

/* Reads the keys from JSON: both services of the machine use the same names. */
static enum nebula_status read_json(const struct lending *lending, const struct http_response *response, char **ret_text, int64_t *ret_life_s,
                                    struct nebula_error *error)
{
        json_t *body = response->status == 200 && response->text ? json_loadb(response->text, response->text_size, 0, NULL) : NULL;
        const char *access = json_string_value(json_object_get(body, "AccessKeyId")), *secret = json_string_value(json_object_get(body, "SecretAccessKey"));
        char *text = access && secret ? s3_keys_text(access, secret, json_string_value(json_object_get(body, "Token"))) : NULL;

        *ret_life_s = s3_life_of(json_string_value(json_object_get(body, "Expiration")));
        object_forget_json(body);
        if (!text)
                return no_keys(who(lending), response, error);
        *ret_text = text;
        return NEBULA_OK;
}

static enum nebula_status ask(const char *method, const char *url, const char *name, const char *value, struct http_response *ret_response,
                              struct nebula_error *error)
{
        struct http_header headers[] = { { name, value } };
        struct http_request request = { .method = method, .url = url, .headers = headers, .header_count = value ? 1 : 0, .is_local = true,
                                        .text_max = ANSWER_MAX, .answer_is_secret = true, .connect_ms = MACHINE_CONNECT_MS, .answer_ms = MACHINE_ANSWER_MS,
                                        .retry_ms = MACHINE_RETRY_MS };

        return s3_ask(request, ret_response, error);
}

void s3_forget_answer(struct http_response *response)
{
        if (response->text)
                crypt_forget(response->text, response->text_size);
        http_response_done(response);
}

/* Reads the first line of a file that the cluster replaces. */
static char *read_line(const char *path, struct nebula_error *error)
{
        size_t size;
        char *text;
        int result = os_read_file(path, ANSWER_MAX, &text, &size);

        if (result) {
                error_set(error, NEBULA_UNAVAILABLE, -result, "cannot read the token file %s", path);
                return NULL;
        }
        text[strcspn(text, "\r\n")] = 0;
        return text;
}

static enum nebula_status fetch_container(const struct lending *lending, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        char *token = lending->file ? read_line(lending->file, error) : NULL;
        struct http_response response;
        enum nebula_status status;

        if (lending->file && !token)
                return NEBULA_UNAVAILABLE;
        status = ask("GET", lending->url, "Authorization", token ? token : lending->token, &response, error);
        object_forget(token);
        if (!status)
                status = read_json(lending, &response, ret_text, ret_life_s, error);
        s3_forget_answer(&response);
        return status;
}

/* The machine's role is the last choice, so the user may have meant other keys: says which ones are missing. */
static void name_missing(struct nebula_error *error)
{
        const char *access = conf_env("AWS_ACCESS_KEY_ID"), *secret = conf_env("AWS_SECRET_ACCESS_KEY"), *profile = conf_env("AWS_PROFILE");

        if (access || secret)
                error_prefix(error, "%s is set without %s, the profile holds no keys, and this machine lends none",
                             access ? "AWS_ACCESS_KEY_ID" : "AWS_SECRET_ACCESS_KEY", access ? "AWS_SECRET_ACCESS_KEY" : "AWS_ACCESS_KEY_ID");
        else if (profile)
                error_prefix(error, "the environment and the profile \"%.60s\" hold no keys, and this machine lends none", profile);
        else
                error_prefix(error, "the environment and the profile hold no keys, and this machine lends none");
}

/* Gets a session of the machine's service, then the name of the role, then its keys. */
static enum nebula_status fetch_machine(const struct lending *lending, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        struct http_response session = { 0 }, role = { 0 }, keys = { 0 };
        char url[600];
        enum nebula_status status;

        snprintf(url, sizeof url, "%.300s/latest/api/token", lending->url);
        status = ask("PUT", url, "x-aws-ec2-metadata-token-ttl-seconds", "21600", &session, error);
        if (!status && (session.status != 200 || strpbrk(session.text, "\r\n")))
                status = no_keys(who(lending), &session, error);
        if (status == NEBULA_TIMEOUT)
                error_prefix(error, "in a container, let the service's answers pass 2 hops (aws ec2 modify-instance-metadata-options)");
        snprintf(url, sizeof url, "%.300s" MACHINE_ROLES, lending->url);
        if (!status)
                status = ask("GET", url, "x-aws-ec2-metadata-token", session.text, &role, error);
        if (!status && (role.status != 200 || !*role.text || strlen(role.text) > 128))
                status = no_keys(who(lending), &role, error);
        if (!status) {
                snprintf(url, sizeof url, "%.300s" MACHINE_ROLES "%.*s", lending->url, (int)strcspn(role.text, "\r\n"), role.text);
                status = ask("GET", url, "x-aws-ec2-metadata-token", session.text, &keys, error);
        }
        if (!status)
                status = read_json(lending, &keys, ret_text, ret_life_s, error);
        if (status)
                name_missing(error);
        s3_forget_answer(&session);
        http_response_done(&role);
        s3_forget_answer(&keys);
        return status;
}

enum nebula_status s3_lend_read(const char *borrower, const struct http_response *response, char **ret_text, int64_t *ret_life_s,
                                struct nebula_error *error)
{
        char *access = s3_value(response, "AccessKeyId"), *secret = s3_value(response, "SecretAccessKey");
        char *session = s3_value(response, "SessionToken"), *expiration = s3_value(response, "Expiration");
        char *text = response->status == 200 && access && secret && session ? s3_keys_text(access, secret, session) : NULL;

        *ret_life_s = s3_life_of(expiration);
        object_forget(access);
        object_forget(secret);
        object_forget(session);
        free(expiration);
        if (!text)
                return no_keys(borrower, response, error);
        *ret_text = text;
        return NEBULA_OK;
}

static enum nebula_status fetch_web_identity(const struct lending *lending, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        struct http_header headers[] = { { "Content-Type", "application/x-www-form-urlencoded" } };
        char *token = read_line(lending->file, error), *form;
        struct http_request request = { .method = "POST", .url = lending->url, .headers = headers, .header_count = 1, .text_max = ANSWER_MAX,
                                        .answer_is_secret = true };
        struct http_response response = { 0 };
        struct buf buf = { .is_secret = true };
        enum nebula_status status;

        if (!token)
                return NEBULA_UNAVAILABLE;
        buf_add_text(&buf, "Action=AssumeRoleWithWebIdentity&Version=2011-06-15");
        object_oauth_pair(&buf, "&", "RoleArn", lending->role);
        object_oauth_pair(&buf, "&", "RoleSessionName", lending->name);
        object_oauth_pair(&buf, "&", "WebIdentityToken", token);
        object_forget(token);
        form = object_take(&buf);
        if (!form)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for keys");
        request.body = form;
        request.body_size = strlen(form);
        status = s3_ask(request, &response, error);
        object_forget(form);
        if (!status)
                status = s3_lend_read(who(lending), &response, ret_text, ret_life_s, error);
        s3_forget_answer(&response);
        return status;
}

static enum nebula_status fetch(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        const struct lending *lending = source;

        switch (lending->lender) {
        case S3_WEB_IDENTITY:
                return fetch_web_identity(lending, ret_text, ret_life_s, error);
        case S3_CONTAINER:
                return fetch_container(lending, ret_text, ret_life_s, error);
        default:
                return fetch_machine(lending, ret_text, ret_life_s, error);
        }
}

static void done(void *source)
{
        struct lending *lending = source;

        free(lending->url);
        free(lending->role);
        free(lending->name);
        free(lending->file);
        object_forget(lending->token);
        free(lending);
}

static char *copy_of(const char *text)
{
        return text ? strdup(text) : NULL;
}

char *s3_sts_url(void)
{
        const char *given = conf_env("AWS_ENDPOINT_URL_STS") ? conf_env("AWS_ENDPOINT_URL_STS") : conf_env("AWS_ENDPOINT_URL");
        char region[S3_REGION_MAX];
        struct buf buf = { 0 };

        if (given)
                return strdup(given);
        s3_region_find(region);
        buf_add_text(&buf, "https://");
        s3_add_host(&buf, "sts", region);
        buf_add_byte(&buf, '/');
        return object_take(&buf);
}

static char *container_url(void)
{
        const char *relative = conf_env("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
        struct buf buf = { 0 };

        if (!relative)
                return strdup(conf_env("AWS_CONTAINER_CREDENTIALS_FULL_URI"));
        buf_add_text(&buf, CONTAINER_HOST);
        buf_add_text(&buf, relative);
        return object_take(&buf);
}

static void fill(struct lending *lending)
{
        const char *machine = conf_env("AWS_EC2_METADATA_SERVICE_ENDPOINT");
        size_t size;

        switch (lending->lender) {
        case S3_WEB_IDENTITY:
                lending->url = s3_sts_url();
                lending->role = strdup(conf_env("AWS_ROLE_ARN"));
                lending->name = strdup(conf_env("AWS_ROLE_SESSION_NAME") ? conf_env("AWS_ROLE_SESSION_NAME") : "nebula");
                lending->file = strdup(conf_env("AWS_WEB_IDENTITY_TOKEN_FILE"));
                break;
        case S3_CONTAINER:
                lending->url = container_url();
                lending->file = copy_of(conf_env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"));
                lending->token = copy_of(conf_env("AWS_CONTAINER_AUTHORIZATION_TOKEN"));
                break;
        default:
                machine = machine ? machine : MACHINE_HOST;
                size = strlen(machine);
                lending->url = strndup(machine, size - (machine[size - 1] == '/'));
        }
}

struct object_token *s3_lend_find(enum s3_lender lender)
{
        struct lending *lending = calloc(1, sizeof *lending);
        struct object_token *token = NULL;
        struct buf buf = { .is_secret = true };
        char *identity;

        if (!lending)
                return NULL;
        lending->lender = lender;
        fill(lending);
        buf_add_byte(&buf, (uint8_t)('0' + lender));
        for (size_t i = 0; i < 5; i++) {
                const char *const parts[] = { lending->url, lending->role, lending->name, lending->file, lending->token };

                buf_add_text(&buf, parts[i] ? parts[i] : "");
                buf_add_byte(&buf, '\n');
        }
        identity = object_take(&buf);
        if (identity && lending->url && (lender != S3_WEB_IDENTITY || (lending->role && lending->name && lending->file)))
                token = object_token_find(&(struct object_token_source){ identity, fetch, lending, done });
        else
                done(lending);
        object_forget(identity);
        return token;
}
