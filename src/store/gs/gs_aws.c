/* An identity of AWS for Google's STS: a signed request GetCallerIdentity, which STS sends on to AWS and so learns who has signed it. Nothing is
 * asked of AWS here. The keys are those that the S3 driver finds. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "store/gs/gs_private.h"

#define REGION_MAX 64
#define HEADERS 5

static const struct object_sigv4 sigv4 = {
        .algorithm = "AWS4-HMAC-SHA256", .key_prefix = "AWS4", .service = "sts", .terminator = "aws4_request", .date_name = "x-amz-date",
        .hash_name = NULL, .session_name = "x-amz-security-token",
};

/* Asks the machine for its zone, for instance "us-east-1a", whose region has one letter less. */
static enum nebula_status ask_region(const char *url, const char *session_url, char ret_region[REGION_MAX], struct nebula_error *error)
{
        struct http_header ttl = { "X-aws-ec2-metadata-token-ttl-seconds", "300" }, token = { "X-aws-ec2-metadata-token", NULL };
        struct http_request request = { .method = "PUT", .url = session_url, .headers = &ttl, .header_count = 1, .is_local = true, .text_max = 4096,
                                        .answer_is_secret = true, .retry_ms = 5000 };
        struct http_response session = { 0 }, zone = { 0 };
        enum nebula_status status = session_url ? http_send(&request, &session, error) : NEBULA_OK;

        if (!status && session_url && (session.status != 200 || !session.text || strpbrk(session.text, "\r\n")))
                status = error_set(error, NEBULA_STORAGE, 0, "the machine's service gives no session: the answer is %d", session.status);
        token.value = session.text;
        request = (struct http_request){ .method = "GET", .url = url, .headers = &token, .header_count = session.text ? 1 : 0, .is_local = true, .text_max = 4096,
                                         .retry_ms = 5000 };
        if (!status)
                status = http_send(&request, &zone, error);
        if (!status && (zone.status != 200 || !zone.text || strlen(zone.text) < 2 || strlen(zone.text) >= REGION_MAX))
                status = error_set(error, NEBULA_STORAGE, 0, "the metadata service of this machine gave no region, it answered %d: set AWS_REGION", zone.status);
        if (!status)
                snprintf(ret_region, REGION_MAX, "%.*s", (int)strlen(zone.text) - 1, zone.text);
        s3_forget_answer(&session);
        http_response_done(&zone);
        return status;
}

static enum nebula_status find_region(const json_t *source, char ret_region[REGION_MAX], struct nebula_error *error)
{
        const char *given = conf_env("AWS_REGION") ? conf_env("AWS_REGION") : conf_env("AWS_DEFAULT_REGION");
        const char *url = json_string_value(json_object_get(source, "region_url"));

        if (given && strlen(given) < REGION_MAX) {
                strcpy(ret_region, given);
                return NEBULA_OK;
        }
        if (!url)
                return error_set(error, NEBULA_INVALID, 0, "neither AWS_REGION nor a region_url is set");
        return ask_region(url, json_string_value(json_object_get(source, "imdsv2_session_token_url")), ret_region, error);
}

/* Puts the region into the URL of the request. NULL: no memory. */
static char *make_url(const char *pattern, const char *region)
{
        const char *at = strstr(pattern, "{region}");
        struct buf buf = { 0 };

        if (!at)
                return strdup(pattern);
        buf_add(&buf, pattern, (size_t)(at - pattern));
        buf_add_text(&buf, region);
        buf_add_text(&buf, at + strlen("{region}"));
        return object_take(&buf);
}

/* Cuts the query, which is changed, into the call's parameters. False: it has too many, or one that is encoded. */
static bool add_params(struct object_call *call, char *query)
{
        char *pair, *value;

        while ((pair = strsep(&query, "&"))) {
                value = strchr(pair, '=');
                if (!value || strchr(pair, '%') || call->param_count == OBJECT_PARAMS_MAX)
                        return false;
                *value++ = 0;
                object_param(call, pair, value);
        }
        object_sort_params(call);
        return true;
}

/* The request as JSON, with %XX, as STS takes it. NULL: no memory. */
static char *describe(const char *url, const struct http_header *headers, size_t count)
{
        json_t *list = json_array(), *body = json_pack("{s:s, s:s, s:o}", "url", url, "method", "POST", "headers", list);
        struct buf buf = { .is_secret = true };
        char *text;

        for (size_t i = 0; i < count && body; i++)
                json_array_append_new(list, json_pack("{s:s, s:s}", "key", headers[i].name, "value", headers[i].value));
        text = body && json_array_size(list) == count ? json_dumps(body, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
        json_decref(body);
        if (text)
                url_encode(&buf, text, "");
        buf.failed = buf.failed || !text;
        object_forget(text);
        return object_take(&buf);
}

static char *sign(const char *url, const char *region, const struct object_sigv4_key *key, const char *audience, struct nebula_error *error)
{
        char time[OBJECT_SIGV4_TIME_SIZE], hash[OBJECT_SHA256_SIZE], *query, *path, *value = NULL, *subject = NULL;
        struct object_call call = { .method = "POST" };
        struct http_header headers[HEADERS];
        size_t count = 0;
        struct url parts;

        if (!url_split(url, &parts)) {
                error_set(error, NEBULA_INVALID, 0, "regional_cred_verification_url is not a URL");
                return NULL;
        }
        object_sigv4_time(os->wall_ns() / SECOND_NS, time);
        headers[count++] = (struct http_header){ "host", parts.host };
        headers[count++] = (struct http_header){ sigv4.date_name, time };
        if (*key->session)
                headers[count++] = (struct http_header){ sigv4.session_name, key->session };
        query = strdup(parts.query);
        path = strndup(parts.path, parts.path_size);
        if (query && !add_params(&call, query))
                error_set(error, NEBULA_INVALID, 0, "regional_cred_verification_url has a query that cannot be signed");
        else if (query && path && object_sha256_text("", 0, hash))
                value = object_sigv4_sign(&sigv4, key, region, time, &call, path, headers, count, hash);
        if (value) {
                headers[count++] = (struct http_header){ "Authorization", value };
                headers[count++] = (struct http_header){ "x-goog-cloud-target-resource", audience };
                subject = describe(url, headers, count);
        }
        object_forget(value);
        free(query);
        free(path);
        return subject;
}

char *gs_aws_subject(const json_t *source, const char *audience, struct nebula_error *error)
{
        const char *pattern = json_string_value(json_object_get(source, "regional_cred_verification_url"));
        char region[REGION_MAX], where[S3_SOURCE_MAX], *url, *text = NULL, *subject = NULL;
        struct object_sigv4_key key;
        struct object_token *keys;
        uint64_t serial;
        size_t size;

        if (!pattern) {
                error_set(error, NEBULA_INVALID, 0, "regional_cred_verification_url is missing");
                return NULL;
        }
        keys = s3_keys_find(where, error);
        if (!keys || object_token_get(keys, 0, &text, &serial, error) || find_region(source, region, error))
                goto done;
        error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
        url = make_url(pattern, region);
        size = strlen(text);
        s3_keys_split(text, &key);
        if (url)
                subject = sign(url, region, &key, audience, error);
        free(url);
        object_forget_bytes(text, size);
        object_token_drop(keys);
        return subject;
done:
        object_forget(text);
        object_token_drop(keys);
        return NULL;
}
