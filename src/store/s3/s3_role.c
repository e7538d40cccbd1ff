/* Keys that a profile of AWS's command gets from a service: those of a role, which STS lends for other keys (AssumeRole), and those of a
 * login (aws sso login), whose token lies in a file. */
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
#define DEPTH_MAX 5 /* profiles whose keys others use */

static const struct object_sigv4 sts_sigv4 = {
        .algorithm = "AWS4-HMAC-SHA256", .key_prefix = "AWS4", .service = "sts", .terminator = "aws4_request", .date_name = "x-amz-date",
        .hash_name = "x-amz-content-sha256", .session_name = "x-amz-security-token",
};

static enum nebula_status no_memory(struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for keys");
}

/* The settings at the time when the profile was read. */
struct assuming {
        struct object_token *from; /* the keys that ask for those of the role */
        char *who;  /* for messages */
        char *url;  /* of STS */
        char *form; /* of the request */
        char region[S3_REGION_MAX];
};

struct asking {
        const struct assuming *assuming;
        const struct object_call *call;
        char hash[OBJECT_SHA256_SIZE];
};

static enum nebula_status sign(void *argument, bool was_refused, struct http_fields *fields, struct nebula_error *error)
{
        const struct asking *asking = argument;
        const struct assuming *assuming = asking->assuming;
        struct object_sigv4_key key;
        uint64_t serial;
        size_t size;
        char *text;
        enum nebula_status status = object_token_get(assuming->from, 0, &text, &serial, error);

        (void)was_refused;
        if (status)
                return status;
        size = strlen(text);
        s3_keys_split(text, &key);
        status = object_sigv4_fields(&sts_sigv4, &key, assuming->region, os->wall_ns() / SECOND_NS, asking->call, assuming->url, asking->hash,
                                     fields, error);
        object_forget_bytes(text, size);
        return status;
}

static enum nebula_status fetch_role(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        const struct assuming *assuming = source;
        struct object_call call = { .method = "POST" };
        struct asking asking = { .assuming = assuming, .call = &call };
        struct http_response response;
        enum nebula_status status;

        object_header(&call, "content-type", "application/x-www-form-urlencoded");
        if (!object_sha256_text(assuming->form, strlen(assuming->form), asking.hash))
                return no_memory(error);
        status = s3_ask((struct http_request){ .method = "POST", .url = assuming->url, .headers = call.headers, .header_count = call.header_count,
                                               .sign = sign, .sign_argument = &asking, .body = assuming->form,
                                               .body_size = strlen(assuming->form), .text_max = ANSWER_MAX, .answer_is_secret = true },
                        &response, error);
        if (!status)
                status = s3_lend_read(assuming->who, &response, ret_text, ret_life_s, error);
        s3_forget_answer(&response);
        return status;
}

static void assuming_free(void *source)
{
        struct assuming *assuming = source;

        free(assuming->who);
        free(assuming->url);
        object_forget(assuming->form);
        object_token_drop(assuming->from);
        free(assuming);
}

static char *role_form(const char *profile, const char *role)
{
        char *name = s3_profile_value_of(profile, "role_session_name"), *external = s3_profile_value_of(profile, "external_id");
        struct buf buf = { .is_secret = true };

        buf_add_text(&buf, "Action=AssumeRole&Version=2011-06-15");
        object_oauth_pair(&buf, "&", "RoleArn", role);
        object_oauth_pair(&buf, "&", "RoleSessionName", name ? name : "nebula");
        if (external)
                object_oauth_pair(&buf, "&", "ExternalId", external);
        object_forget(name);
        object_forget(external);
        return object_take(&buf);
}

static char *text_of(const char *before, const char *text, const char *behind)
{
        struct buf buf = { 0 };

        buf_add_text(&buf, before);
        buf_add_text(&buf, text);
        buf_add_text(&buf, behind);
        return object_take(&buf);
}

/* The URL of STS; its path is signed, so it has one. */
static char *role_url(void)
{
        char *url = s3_sts_url(), *whole;
        struct url parts;

        if (!url || !url_split(url, &parts) || parts.path_size)
                return url;
        whole = text_of(url, "/", "");
        free(url);
        return whole;
}

static struct object_token *find_role(const char *profile, const char *role, struct object_token *from, struct nebula_error *error)
{
        struct assuming *assuming = calloc(1, sizeof *assuming);
        struct object_token *token = NULL;
        char *identity;

        if (!assuming) {
                object_token_drop(from);
                no_memory(error);
                return NULL;
        }
        *assuming = (struct assuming){ .from = from, .who = text_of("the role of the profile \"", profile, "\""), .url = role_url(),
                                       .form = role_form(profile, role) };
        s3_region_find(assuming->region);
        identity = text_of("aws role of ", profile, assuming->form ? assuming->form : "");
        if (identity && assuming->who && assuming->url && assuming->form)
                token = object_token_find(&(struct object_token_source){ identity, fetch_role, assuming, assuming_free });
        else
                assuming_free(assuming);
        if (!token)
                no_memory(error);
        object_forget(identity);
        return token;
}

struct login {
        char *who;
        char *file; /* holds the token of the login */
        char *url;  /* gives the keys for it */
};

/* The token of the login. NULL with error: there is none that is valid. */
static char *login_token(const struct login *login, struct nebula_error *error)
{
        char *text = NULL, *token = NULL;
        const char *found;
        json_t *body;
        size_t size;

        if (os_read_file(login->file, ANSWER_MAX, &text, &size)) {
                error_set(error, NEBULA_UNAVAILABLE, 0, "%s has no login: run aws sso login", login->who);
                return NULL;
        }
        body = json_loadb(text, size, 0, NULL);
        object_forget_bytes(text, size);
        found = json_string_value(json_object_get(body, "accessToken"));
        if (!found || s3_life_of(json_string_value(json_object_get(body, "expiresAt"))) <= 0)
                error_set(error, NEBULA_UNAVAILABLE, 0, "%s has a login that has ended: run aws sso login", login->who);
        else if (!(token = strdup(found)))
                no_memory(error);
        object_forget_json(body);
        return token;
}

static enum nebula_status read_login(const struct login *login, const struct http_response *response, char **ret_text, int64_t *ret_life_s,
                                     struct nebula_error *error)
{
        json_t *body = response->status == 200 && response->text ? json_loadb(response->text, response->text_size, 0, NULL) : NULL;
        json_t *keys = json_object_get(body, "roleCredentials");
        const char *access = json_string_value(json_object_get(keys, "accessKeyId")), *secret = json_string_value(json_object_get(keys, "secretAccessKey"));
        char *text = access && secret ? s3_keys_text(access, secret, json_string_value(json_object_get(keys, "sessionToken"))) : NULL;

        *ret_life_s = json_integer_value(json_object_get(keys, "expiration")) / 1000 - os->wall_ns() / SECOND_NS;
        json_incref(keys);
        object_forget_json(keys);
        json_decref(body);
        if (!text)
                return error_set(error, NEBULA_STORAGE, 0, "%s gets no keys: the answer is %d: run aws sso login, and see that the account and the role are yours",
                                 login->who, response->status);
        *ret_text = text;
        return NEBULA_OK;
}

static enum nebula_status fetch_login(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        const struct login *login = source;
        char *token = login_token(login, error);
        struct http_header header = { "x-amz-sso_bearer_token", token };
        struct http_response response;
        enum nebula_status status;

        if (!token)
                return NEBULA_UNAVAILABLE;
        status = s3_ask((struct http_request){ .method = "GET", .url = login->url, .headers = &header, .header_count = 1, .text_max = ANSWER_MAX,
                                               .answer_is_secret = true },
                        &response, error);
        object_forget(token);
        if (!status)
                status = read_login(login, &response, ret_text, ret_life_s, error);
        s3_forget_answer(&response);
        return status;
}

static void login_free(void *source)
{
        struct login *login = source;

        free(login->who);
        free(login->file);
        free(login->url);
        free(login);
}

/* The file of AWS's command: its name is the SHA-1 of the session's name, or of the start URL for profiles without a session. */
static char *login_file(const char *session)
{
        const char *home = conf_env("HOME");
        char name[CRYPT_SHA1_HEX + 5];

        if (!home || !crypt_sha1_hex(session, strlen(session), name))
                return NULL;
        strcat(name, ".json");
        return text_of(home, "/.aws/sso/cache/", name);
}

static char *login_url(const char *region, const char *account, const char *role)
{
        const char *given = conf_env("AWS_ENDPOINT_URL_SSO");
        struct buf buf = { 0 };

        if (given)
                buf_add_text(&buf, given);
        else
                buf_add_text(&buf, "https://");
        if (!given)
                s3_add_host(&buf, "portal.sso", region);
        object_oauth_pair(&buf, "/federation/credentials?", "role_name", role);
        object_oauth_pair(&buf, "&", "account_id", account);
        return object_take(&buf);
}

static struct object_token *find_login(const char *profile, struct nebula_error *error)
{
        char *session = s3_profile_value_of(profile, "sso_session"), *section = session ? text_of("sso-session ", session, "") : NULL;
        const char *place = section ? section : profile;
        char *start = s3_profile_value_of(place, "sso_start_url"), *region = s3_profile_value_of(place, "sso_region");
        char *account = s3_profile_value_of(profile, "sso_account_id"), *role = s3_profile_value_of(profile, "sso_role_name"), *identity = NULL;
        struct login *login = calloc(1, sizeof *login);
        struct object_token *token = NULL;

        no_memory(error);
        if (!conf_env("HOME")) {
                error_set(error, NEBULA_INVALID, 0, "the profile \"%.60s\" has a login in ~/.aws/sso/cache, and HOME is not set", profile);
        } else if (!start || !region || !account || !role) {
                error_set(error, NEBULA_INVALID, 0, "the profile \"%.60s\" lacks one of sso_start_url, sso_region, sso_account_id, sso_role_name", profile);
        } else if (login) {
                *login = (struct login){ text_of("the profile \"", profile, "\""), login_file(session ? session : start), login_url(region, account, role) };
                identity = login->file && login->url ? text_of(login->file, "\n", login->url) : NULL;
        }
        if (identity && login->who)
                token = object_token_find(&(struct object_token_source){ identity, fetch_login, login, login_free });
        else if (login)
                login_free(login);
        free(identity);
        free(section);
        object_forget(session);
        object_forget(start);
        object_forget(region);
        object_forget(account);
        object_forget(role);
        return token;
}

static struct object_token *find_at(const char *profile, unsigned depth, struct nebula_error *error);

/* The keys that ask for those of the role. */
static struct object_token *find_source(const char *profile, unsigned depth, struct nebula_error *error)
{
        char *from = s3_profile_value_of(profile, "source_profile"), *kind = s3_profile_value_of(profile, "credential_source");
        struct object_token *token = NULL;

        if (depth == DEPTH_MAX)
                error_set(error, NEBULA_INVALID, 0, "the profile \"%.60s\" is one of too many that follow source_profile", profile);
        else if (from && !strcmp(from, profile))
                token = s3_profile_keys(profile, error);
        else if (from)
                token = find_at(from, depth + 1, error);
        else if (kind && !strcmp(kind, "Ec2InstanceMetadata"))
                token = s3_lend_find(S3_MACHINE);
        else
                error_set(error, NEBULA_INVALID, 0, "the profile \"%.60s\" has a role_arn, but neither source_profile nor credential_source = Ec2InstanceMetadata",
                          profile);
        object_forget(from);
        object_forget(kind);
        return token;
}

static struct object_token *find_at(const char *profile, unsigned depth, struct nebula_error *error)
{
        char *role = s3_profile_value_of(profile, "role_arn"), *mfa = s3_profile_value_of(profile, "mfa_serial");
        struct object_token *token = NULL, *from;

        if (role && mfa) {
                error_set(error, NEBULA_INVALID, 0, "the profile \"%.60s\" asks a person for a code (mfa_serial): export its keys (aws configure export-credentials)",
                          profile);
        } else if (role) {
                from = find_source(profile, depth, error);
                token = from ? find_role(profile, role, from, error) : NULL;
        } else if (s3_profile_has(profile, "sso_session") || s3_profile_has(profile, "sso_start_url")) {
                token = find_login(profile, error);
        } else {
                token = s3_profile_keys(profile, error);
        }
        object_forget(role);
        object_forget(mfa);
        return token;
}

bool s3_role_is_asked(const char *profile)
{
        return s3_profile_has(profile, "role_arn") || s3_profile_has(profile, "sso_session") || s3_profile_has(profile, "sso_start_url");
}

struct object_token *s3_role_find(const char *profile, struct nebula_error *error)
{
        return find_at(profile, 0, error);
}
