/* Sends one request to S3: its URL, its keys, and the region, which the first answer may correct. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "os/os.h"
#include "store/s3/s3_private.h"

#define SIGNED_BYTES (64u << 10) /* of larger bodies the signature has no hash, which takes long: they carry a CRC-64 */
#define LONG_TRIES 4             /* for a request whose 200 turned out to be a server failure */

struct signing {
        struct s3_store *s3;
        const struct object_call *call;
        const char *url, *region;
        char hash[OBJECT_SHA256_SIZE];
        uint64_t refused, serial; /* of the keys: the refused ones, and those of the last try */
};

static enum nebula_status sign(void *argument, bool was_refused, struct http_fields *fields, struct nebula_error *error)
{
        struct signing *signing = argument;
        struct object_sigv4_key key;
        enum nebula_status status;
        size_t size;
        char *text;

        status = object_token_get(signing->s3->keys, was_refused ? signing->serial : signing->refused, &text, &signing->serial, error);
        if (status) {
                object_report_origin(&signing->s3->object, error);
                return status;
        }
        size = strlen(text);
        s3_keys_split(text, &key);
        status = object_sigv4_fields(&s3_sigv4, &key, signing->region, os->wall_ns() / SECOND_NS, signing->call, signing->url, signing->hash,
                                     fields, error);
        object_forget_bytes(text, size);
        return status;
}

char *s3_value(const struct http_response *response, const char *name)
{
        struct xml_item item;
        char *found = NULL;
        struct xml xml;

        if (!response->text || !response->text_size)
                return NULL;
        xml_init(&xml, response->text, response->text_size);
        while (!found && xml_next(&xml, &item))
                if (item.kind == XML_END && !strcmp(item.name, name))
                        found = strdup(item.text);
        xml_done(&xml);
        return found;
}

/* Whether the body is an error, even with a 200. */
static bool is_error(const struct http_response *response)
{
        struct xml_item item;
        struct xml xml;
        bool is_so;

        if (!response->text || !response->text_size)
                return false;
        xml_init(&xml, response->text, response->text_size);
        is_so = xml_next(&xml, &item) && (!strcmp(item.name, "Error") || !strcmp(item.name, "ErrorResponse"));
        xml_done(&xml);
        return is_so;
}

/* Whether the body has no end: the connection was cut, and no length shows it. */
static bool is_cut(const struct http_response *response)
{
        struct xml_item item;
        struct xml xml;
        bool is_so;

        if (!response->text || !response->text_size)
                return false;
        xml_init(&xml, response->text, response->text_size);
        while (xml_next(&xml, &item))
                ;
        is_so = xml.is_broken;
        xml_done(&xml);
        return is_so;
}

void s3_code(const struct http_response *response, char ret_code[OBJECT_CODE_SIZE])
{
        char *code = is_error(response) ? s3_value(response, "Code") : NULL;

        snprintf(ret_code, OBJECT_CODE_SIZE, "%s", code ? code : "");
        free(code);
}

bool s3_is_code(const struct http_response *response, const char *code)
{
        char found[OBJECT_CODE_SIZE];

        s3_code(response, found);
        return !strcmp(found, code);
}

bool s3_is_under_way(const struct http_response *response)
{
        return response->status == 409 && (s3_is_code(response, "ConditionalRequestConflict") || s3_is_code(response, "OperationAborted"));
}

bool s3_condition_failed(const struct http_response *response)
{
        return response->status == 412 || s3_is_under_way(response);
}

void s3_add_listing(struct object_call *call, const char *prefix, bool deep, const char *entries, const char *from)
{
        object_param(call, "list-type", "2");
        if (*prefix)
                object_param(call, "prefix", prefix);
        if (!deep)
                object_param(call, "delimiter", "/");
        if (entries)
                object_param(call, "max-keys", entries);
        if (from)
                object_param(call, "continuation-token", from);
}

static enum nebula_status find_keys(struct s3_store *s3, char ret_region[S3_REGION_MAX], struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        lock_take(&s3->lock);
        if (!s3->object.trust.source)
                s3_trust_find(&s3->object.trust);
        if (!s3->keys) {
                s3->keys = s3_keys_find(s3->source, error);
                s3_region_find(s3->region);
        }
        if (!s3->keys) {
                status = error ? error->status : NEBULA_UNAVAILABLE;
                object_report_origin(&s3->object, error);
        }
        memcpy(ret_region, s3->region, S3_REGION_MAX);
        lock_give(&s3->lock);
        return status;
}

enum nebula_status s3_reach(struct store *store, struct store_reach *ret_reach, struct nebula_error *error)
{
        struct s3_store *s3 = (struct s3_store *)store;
        struct store_reach reach = { 0 };
        char region[S3_REGION_MAX], *url;
        struct buf buf = { 0 };
        struct vars *before = vars_enter(s3->object.vars);
        enum nebula_status status = find_keys(s3, region, error);

        vars_leave(before);
        if (status)
                return status;
        s3_add_bucket(&buf, &s3->address, region);
        url = object_take(&buf);
        if (!url)
                return object_no_memory(&s3->object, error);
        http_describe(url, &s3->object.trust, reach.transport, sizeof reach.transport);
        free(url);
        snprintf(reach.credential, sizeof reach.credential, "%.150s, signed for the region %.63s", s3->source, region);
        *ret_reach = reach;
        return NEBULA_OK;
}

static char *make_url(const struct s3_store *s3, const char *region, const struct object_call *call)
{
        struct buf buf = { 0 };

        s3_add_bucket(&buf, &s3->address, region);
        buf_add_byte(&buf, '/');
        if (call->key)
                object_add_name(&buf, &s3->object, call->key);
        object_query(&buf, call);
        return object_take(&buf);
}

/* Whether the body was changed or delayed on the way: then it is sent again. */
static bool is_changed(const struct http_response *response)
{
        return response->status == 400 && (s3_is_code(response, "BadDigest") || s3_is_code(response, "XAmzContentSHA256Mismatch") ||
                                           s3_is_code(response, "XAmzContentChecksumMismatch") || s3_is_code(response, "RequestTimeout"));
}

/* True: the bucket is in another region, which is remembered. */
static bool learn_region(struct s3_store *s3, const char *region, const struct http_response *response)
{
        const char *said = http_field(response, "x-amz-bucket-region");
        bool is_new;

        if (object_is_done(response) || response->status == 404 || !said || strlen(said) >= S3_REGION_MAX || !strcmp(said, region) ||
            strspn(said, "abcdefghijklmnopqrstuvwxyz0123456789-") != strlen(said))
                return false;
        lock_take(&s3->lock);
        is_new = strcmp(s3->region, said);
        snprintf(s3->region, sizeof s3->region, "%s", said);
        lock_give(&s3->lock);
        return is_new || strcmp(region, said);
}

static bool has_ended(const struct http_response *response)
{
        return (response->status == 400 || response->status == 403) && (s3_is_code(response, "ExpiredToken") || s3_is_code(response, "TokenRefreshRequired"));
}

static enum nebula_status send_to(struct s3_store *s3, const char *region, const struct object_call *call, uint64_t refused,
                                  struct http_response *ret_response, uint64_t *ret_serial, struct nebula_error *error)
{
        struct signing signing = { .s3 = s3, .call = call, .region = region, .refused = refused, .hash = OBJECT_UNSIGNED };
        char *url = make_url(s3, region, call);
        enum nebula_status status;

        if (!url || (call->body_size <= SIGNED_BYTES && !object_sha256_text(call->body_size ? call->body : "", (size_t)call->body_size, signing.hash))) {
                free(url);
                return object_no_memory(&s3->object, error);
        }
        signing.url = url;
        status = object_send(&s3->object, call, url, sign, &signing, is_changed, ret_response, error);
        *ret_serial = signing.serial;
        free(url);
        return status;
}

static enum nebula_status send_signed(struct s3_store *s3, const struct object_call *call, struct http_response *ret_response, struct nebula_error *error)
{
        uint64_t refused = 0, serial = 0;

        *ret_response = (struct http_response){ 0 };
        for (int tries = 0;; tries++) {
                char region[S3_REGION_MAX];
                enum nebula_status status = find_keys(s3, region, error);

                if (!status)
                        status = send_to(s3, region, call, refused, ret_response, &serial, error);
                if (status || tries == 2)
                        return status;
                if (has_ended(ret_response))
                        refused = serial;
                else if (!learn_region(s3, region, ret_response))
                        return status;
                http_response_done(ret_response);
        }
}

static bool is_sum(const char *name)
{
        return !strncmp(name, "x-amz-checksum-", 15) || !strcmp(name, "x-amz-sdk-checksum-algorithm");
}

/* The same call without checksums in its header. False: it has none. */
static bool leave_out_sums(const struct object_call *call, struct object_call *ret_call)
{
        *ret_call = *call;
        ret_call->header_count = 0;
        for (size_t i = 0; i < call->header_count; i++)
                if (!is_sum(call->headers[i].name))
                        ret_call->headers[ret_call->header_count++] = call->headers[i];
        return ret_call->header_count < call->header_count;
}

static bool may_refuse_sums(const struct http_response *response)
{
        return s3_is_lacking(response) || (response->status == 400 && (s3_is_code(response, "InvalidRequest") || s3_is_code(response, "InvalidArgument")));
}

/* A store that only speaks the protocol may refuse checksums: then the bodies carry none from now on. If the call fails without them, too, they
 * were not the reason. */
static enum nebula_status send_plainly(struct s3_store *s3, const struct object_call *call, struct http_response *response, struct nebula_error *error)
{
        struct object_call plain;
        struct http_response second;
        enum nebula_status status;

        if (!s3->address.endpoint || !may_refuse_sums(response) || !leave_out_sums(call, &plain))
                return NEBULA_OK;
        status = send_signed(s3, &plain, &second, error);
        if (!status && !object_is_done(&second)) {
                http_response_done(&second);
                return NEBULA_OK;
        }
        http_response_done(response);
        *response = second;
        if (!status)
                atomic_store(&s3->refuses_sums, true);
        if (!status && atomic_exchange(&s3->has_sums, false))
                log_event(LOG_LEVEL_INFO, "%s refuses checksums (CRC64NVME): bodies carry none from now on", s3->object.store.root);
        return status;
}

enum nebula_status s3_send(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                           struct nebula_error *error)
{
        struct vars *before = vars_enter(store->vars);
        struct s3_store *s3 = (struct s3_store *)store;
        enum nebula_status status = send_signed(s3, call, ret_response, error);

        if (!status)
                status = send_plainly(s3, call, ret_response, error);
        vars_leave(before);
        return status;
}

/* The status that the failure usually has. */
static int status_of(const struct http_response *response)
{
        static const struct {
                const char *code;
                int status;
        } known[] = { { "PreconditionFailed", 412 }, { "ConditionalRequestConflict", 409 }, { "OperationAborted", 409 }, { "NoSuchUpload", 404 },
                      { "NoSuchKey", 404 }, { "InvalidPart", 400 }, { "BadDigest", 400 } };

        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
                if (s3_is_code(response, known[i].code))
                        return known[i].status;
        return 500;
}

enum nebula_status s3_send_long(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                                struct nebula_error *error)
{
        int64_t pause_ms = http_settings_now().pause_ms;

        for (int tries = 0;; tries++) {
                enum nebula_status status = store->service->send(store, call, ret_response, error);

                if (!status)
                        ret_response->tries += (unsigned)tries;
                if (status || ret_response->status != 200 || (!is_error(ret_response) && !is_cut(ret_response)))
                        return status;
                ret_response->status = status_of(ret_response); /* 500 for a cut body: only another try shows the outcome */
                if (ret_response->status != 500 || tries + 1 == LONG_TRIES)
                        return status;
                http_response_done(ret_response);
                os->sleep_ms(pause_ms << tries);
        }
}
