/* Finds the keys, in the order of AWS's own programs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/conf.h"
#include "base/error.h"
#include "store/s3/s3_private.h"

char *s3_keys_text(const char *access, const char *secret, const char *session)
{
        struct buf buf = { .is_secret = true };

        buf_add_text(&buf, access);
        buf_add_byte(&buf, '\n');
        buf_add_text(&buf, secret);
        buf_add_byte(&buf, '\n');
        buf_add_text(&buf, session ? session : "");
        buf_add_byte(&buf, '\n');
        return object_take(&buf);
}

void s3_keys_split(char *text, struct object_sigv4_key *ret_key)
{
        char *rest = text;

        ret_key->access = strsep(&rest, "\n");
        ret_key->secret = strsep(&rest, "\n");
        ret_key->session = strsep(&rest, "\n");
}

/* Reads the files again after the store refused the keys: they may have changed. */
static enum nebula_status fetch_profile(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        const char *profile = source;
        char *access = s3_profile_value_of(profile, "aws_access_key_id"), *secret = s3_profile_value_of(profile, "aws_secret_access_key");
        char *session = s3_profile_value_of(profile, "aws_session_token"), *text = NULL;

        if (access && secret)
                text = s3_keys_text(access, secret, session);
        object_forget(access);
        object_forget(secret);
        object_forget(session);
        if (!text)
                return error_set(error, NEBULA_UNAVAILABLE, 0, "the profile \"%.60s\" has no aws_access_key_id and aws_secret_access_key any more",
                                 profile);
        *ret_text = text;
        *ret_life_s = INT64_MAX;
        return NEBULA_OK;
}

static enum nebula_status fetch_given(void *source, char **ret_text, int64_t *ret_life_s, struct nebula_error *error)
{
        *ret_text = strdup(source);
        *ret_life_s = INT64_MAX;
        return *ret_text ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for keys");
}

static void done(void *source)
{
        object_forget(source);
}

static struct object_token *find_given(const char *access, const char *secret, const char *session)
{
        char *text = s3_keys_text(access, secret, session), *identity = text ? strdup(text) : NULL;
        struct object_token *token;

        if (!identity) {
                object_forget(text);
                return NULL;
        }
        token = object_token_find(&(struct object_token_source){ identity, fetch_given, text, done });
        object_forget(identity);
        return token;
}

static bool has_keys(const char *profile)
{
        return s3_profile_has(profile, "aws_access_key_id") && s3_profile_has(profile, "aws_secret_access_key");
}

struct object_token *s3_profile_keys(const char *profile, struct nebula_error *error)
{
        struct object_token *token = NULL;
        char identity[300], *source;

        if (has_keys(profile)) {
                snprintf(identity, sizeof identity, "aws profile %.200s", profile);
                source = strdup(profile);
                if (source) /* which the token takes over, or frees */
                        token = object_token_find(&(struct object_token_source){ identity, fetch_profile, source, done });
        } else if (s3_profile_has(profile, "credential_process")) {
                token = s3_process_find(profile);
        } else {
                error_set(error, NEBULA_INVALID, 0, "the profile \"%.60s\" has no aws_access_key_id and aws_secret_access_key", profile);
                return NULL;
        }
        if (!token)
                error_set(error, NEBULA_NO_MEMORY, 0, "no memory for keys");
        return token;
}

/* The service that lends keys to a container gets a secret. With http it must be on this machine or its network card, as for AWS's
 * programs. */
static enum nebula_status check_container(struct nebula_error *error)
{
        static const char *const near[] = { "169.254.170.2", "169.254.170.23", "fd00:ec2::23" }; /* of ECS and EKS */
        const char *relative = conf_env("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"), *full = conf_env("AWS_CONTAINER_CREDENTIALS_FULL_URI");
        bool is_sound = relative && *relative == '/';
        struct url url;

        if (!relative && full && url_split(full, &url)) {
                bool is_near = url_is_loopback(&url);

                for (size_t i = 0; i < sizeof near / sizeof *near; i++)
                        is_near = is_near || !strcmp(url.host, near[i]);
                is_sound = !strcmp(url.scheme, "https") || (!strcmp(url.scheme, "http") && is_near);
        }
        return is_sound ? NEBULA_OK
                        : error_set(error, NEBULA_INVALID, 0, "%s names no service of this machine: it would get a secret",
                                    relative ? "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI" : "AWS_CONTAINER_CREDENTIALS_FULL_URI");
}

struct object_token *s3_keys_find(char ret_source[S3_SOURCE_MAX], struct nebula_error *error)
{
        const char *access = conf_env("AWS_ACCESS_KEY_ID"), *secret = conf_env("AWS_SECRET_ACCESS_KEY"), *profile = s3_profile_name();
        struct object_token *token;

        snprintf(ret_source, S3_SOURCE_MAX, "the profile \"%.60s\"", profile);
        if (access && secret) {
                snprintf(ret_source, S3_SOURCE_MAX, "the key of AWS_ACCESS_KEY_ID");
                token = find_given(access, secret, conf_env("AWS_SESSION_TOKEN"));
        } else if (conf_env("AWS_WEB_IDENTITY_TOKEN_FILE") && conf_env("AWS_ROLE_ARN")) {
                snprintf(ret_source, S3_SOURCE_MAX, "the role of AWS_ROLE_ARN");
                token = s3_lend_find(S3_WEB_IDENTITY);
        } else if (s3_role_is_asked(profile)) {
                return s3_role_find(profile, error);
        } else if (has_keys(profile) || s3_profile_has(profile, "credential_process")) {
                return s3_profile_keys(profile, error);
        } else if (conf_env("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") || conf_env("AWS_CONTAINER_CREDENTIALS_FULL_URI")) {
                if (check_container(error))
                        return NULL;
                snprintf(ret_source, S3_SOURCE_MAX, "the role of this container");
                token = s3_lend_find(S3_CONTAINER);
        } else if (conf_env("AWS_EC2_METADATA_DISABLED") && !strcasecmp(conf_env("AWS_EC2_METADATA_DISABLED"), "true")) {
                error_set(error, NEBULA_UNAVAILABLE, 0, "the environment and the profile \"%.60s\" hold no keys, and AWS_EC2_METADATA_DISABLED is set", profile);
                return NULL;
        } else {
                snprintf(ret_source, S3_SOURCE_MAX, "the role of this machine");
                token = s3_lend_find(S3_MACHINE);
        }
        if (!token)
                error_set(error, NEBULA_NO_MEMORY, 0, "no memory for keys");
        return token;
}
