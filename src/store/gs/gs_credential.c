/* Finds the HMAC keys or the bearer token, in the order of gs_credential_find. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "store/gs/gs_private.h"

#define MACHINE_HOST "169.254.169.254"
#define TOKEN_PATH "/computeMetadata/v1/instance/service-accounts/default/token"
#define TOKEN_URL "https://oauth2.googleapis.com/token"
#define FILE_MAX (64u << 10)

static enum nebula_status fetch_given(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        *ret_text = strdup(source);
        *ret_life_s = INT64_MAX;
        return *ret_text ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
}

static void done(void *source)
{
        object_forget(source);
}

/* Takes over the text. */
static struct object_token *find_given(char *text)
{
        char *identity = text ? strdup(text) : NULL;
        struct object_token *token = NULL;

        if (identity)
                token = object_token_find(&(struct object_token_source){ identity, fetch_given, text, done });
        else
                object_forget(text);
        object_forget(identity);
        return token;
}

static struct object_token *find_machine(void)
{
        const char *host = conf_env("GCE_METADATA_HOST") ? conf_env("GCE_METADATA_HOST") : MACHINE_HOST;
        bool has_half = conf_env("GS_ACCESS_KEY_ID") || conf_env("GS_SECRET_ACCESS_KEY");
        struct object_oauth oauth = { .is_machine = true };
        struct buf buf = { 0 };

        buf_add_text(&buf, "http://");
        buf_add_text(&buf, host);
        buf_add_text(&buf, TOKEN_PATH);
        oauth.url = object_take(&buf);
        oauth.missing = has_half ? "the environment holds half of an HMAC key (GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY), no token, and gcloud has left no file"
                                 : "the environment holds neither key nor token, and gcloud has left no file";
        oauth.name = strdup("the service account of this machine");
        oauth.header = strdup("Metadata-Flavor");
        oauth.secret = strdup("Google");
        return object_oauth_find(&oauth);
}

/* The token of a user who has logged in: gcloud's stored credential is exchanged for tokens. */
static struct object_token *find_user(const json_t *body)
{
        const char *id = json_string_value(json_object_get(body, "client_id")), *secret = json_string_value(json_object_get(body, "client_secret"));
        const char *refresh = json_string_value(json_object_get(body, "refresh_token")), *url = conf_env("GOOGLE_TOKEN_URL");
        struct object_oauth oauth = { .missing = "" };
        struct buf buf = { .is_secret = true };

        object_oauth_pair(&buf, "", "grant_type", "refresh_token");
        object_oauth_pair(&buf, "&", "client_id", id ? id : "");
        object_oauth_pair(&buf, "&", "client_secret", secret ? secret : "");
        object_oauth_pair(&buf, "&", "refresh_token", refresh ? refresh : "");
        oauth.form = object_take(&buf);
        oauth.name = strdup("the login of gcloud");
        oauth.url = strdup(url ? url : TOKEN_URL);
        return object_oauth_find(&oauth);
}

static char *copy_of(const json_t *body, const char *name)
{
        const char *text = json_string_value(json_object_get(body, name));

        return text ? strdup(text) : NULL;
}

/* The token of a service account: a token that its key has signed is exchanged for it. NULL with error: the file lacks a member. */
static struct object_token *find_service(const json_t *body, const char *path, struct nebula_error *error)
{
        struct object_oauth oauth = { .missing = "", .jwt = calloc(1, sizeof *oauth.jwt) };
        const char *url = conf_env("GOOGLE_TOKEN_URL");
        struct buf buf = { 0 };

        if (!oauth.jwt)
                return NULL;
        *oauth.jwt = (struct object_jwt){ copy_of(body, "private_key"), copy_of(body, "private_key_id"), copy_of(body, "client_email"),
                                          copy_of(body, "token_uri"), GS_SCOPE };
        if (!oauth.jwt->audience)
                oauth.jwt->audience = strdup(TOKEN_URL);
        if (!oauth.jwt->key || !oauth.jwt->issuer || !oauth.jwt->audience) {
                object_jwt_free(oauth.jwt);
                error_set(error, NEBULA_INVALID, 0, "%.200s lacks client_email or private_key", path);
                return NULL;
        }
        object_oauth_pair(&buf, "", "grant_type", "urn:ietf:params:oauth:grant-type:jwt-bearer");
        oauth.form = object_take(&buf);
        oauth.name = strdup("the service account of GOOGLE_APPLICATION_CREDENTIALS");
        oauth.url = strdup(url ? url : oauth.jwt->audience);
        return object_oauth_find(&oauth);
}

/* The path of the file of application default credentials. False: none. */
static bool file_path(char *path, size_t size)
{
        const char *given = conf_env("GOOGLE_APPLICATION_CREDENTIALS"), *home = conf_env("HOME");

        snprintf(path, size, "%s%s", given ? given : home ? home : "", given ? "" : "/.config/gcloud/application_default_credentials.json");
        return given || home;
}

/* NULL with *ret_is_there false: the file does not exist. */
static struct object_token *find_file(bool *ret_is_there, char ret_source[S3_SOURCE_MAX], struct nebula_error *error)
{
        struct object_token *token = NULL;
        char path[4096], *text;
        const char *type;
        json_t *body;
        size_t size;

        *ret_is_there = file_path(path, sizeof path) && !os_read_file(path, FILE_MAX, &text, &size);
        if (!*ret_is_there) {
                if (!conf_env("GOOGLE_APPLICATION_CREDENTIALS"))
                        return NULL;
                *ret_is_there = true;
                error_set(error, NEBULA_INVALID, 0, "GOOGLE_APPLICATION_CREDENTIALS: %.200s cannot be read", path);
                return NULL;
        }
        body = json_loadb(text, size, 0, NULL);
        object_forget_bytes(text, size);
        type = json_string_value(json_object_get(body, "type"));
        error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
        snprintf(ret_source, S3_SOURCE_MAX, "the login of gcloud");
        if (type && !strcmp(type, "service_account")) {
                snprintf(ret_source, S3_SOURCE_MAX, "the service account of GOOGLE_APPLICATION_CREDENTIALS");
                token = find_service(body, path, error);
        } else if (type && !strcmp(type, "authorized_user")) {
                token = find_user(body);
        } else if (type && !strcmp(type, "external_account")) {
                snprintf(ret_source, S3_SOURCE_MAX, "the workload identity of GOOGLE_APPLICATION_CREDENTIALS");
                token = gs_external_find(body, path, error);
        } else {
                error_set(error, NEBULA_INVALID, 0, "%.200s is of the type \"%.40s\", which is not supported: use the key file or an HMAC key of a service account", path, type ? type : "");
        }
        object_forget_json(body);
        return token;
}

enum nebula_status gs_credential_find(struct object_token **ret_keys, struct object_token **ret_bearer, char ret_source[S3_SOURCE_MAX],
                                      struct nebula_error *error)
{
        const char *access = conf_env("GS_ACCESS_KEY_ID"), *secret = conf_env("GS_SECRET_ACCESS_KEY"), *given = conf_env("GOOGLE_OAUTH_ACCESS_TOKEN");
        bool is_there;

        if (access && secret) {
                snprintf(ret_source, S3_SOURCE_MAX, "the key of GS_ACCESS_KEY_ID");
                *ret_keys = find_given(s3_keys_text(access, secret, ""));
        } else if (given) {
                snprintf(ret_source, S3_SOURCE_MAX, "the token of GOOGLE_OAUTH_ACCESS_TOKEN");
                *ret_bearer = find_given(strdup(given));
        } else {
                *ret_bearer = find_file(&is_there, ret_source, error);
                if (!*ret_bearer && is_there)
                        return error ? error->status : NEBULA_INVALID;
                if (!*ret_bearer) {
                        snprintf(ret_source, S3_SOURCE_MAX, "the service account of this machine");
                        *ret_bearer = find_machine();
                }
        }
        return *ret_keys || *ret_bearer ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
}
