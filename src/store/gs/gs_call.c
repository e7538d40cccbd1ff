/* Sends one request to Google Cloud Storage, and describes its failure. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "os/os.h"
#include "store/gs/gs_private.h"

#define SIGNED_BYTES (64u << 10) /* of larger bodies the signature has no hash, which takes long: they carry a CRC-32C */
#define RIGHTS "storage.objects.create, get, delete and list, as the role Storage Object User has them"

struct signing {
        struct gs_store *gs;
        const struct object_call *call;
        const char *url;
        char hash[OBJECT_SHA256_SIZE];
        uint64_t serial; /* of the token that the last try used */
};

static enum nebula_status sign(void *argument, bool was_refused, struct http_fields *fields, struct nebula_error *error)
{
        struct signing *signing = argument;
        struct object_sigv4_key key;
        enum nebula_status status;
        size_t size;
        char *text;

        if (!signing->gs->s3.keys) {
                status = object_token_sign(signing->gs->bearer, &signing->serial, was_refused, fields, error);
                if (status)
                        object_report_origin(&signing->gs->s3.object, error);
                return status;
        }
        status = object_token_get(signing->gs->s3.keys, 0, &text, &signing->serial, error);
        if (status)
                return status;
        size = strlen(text);
        s3_keys_split(text, &key);
        status = object_sigv4_fields(&gs_sigv4, &key, GS_REGION, os->wall_ns() / SECOND_NS, signing->call, signing->url, signing->hash, fields, error);
        object_forget_bytes(text, size);
        return status;
}

static enum nebula_status find_credential(struct gs_store *gs, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        lock_take(&gs->s3.lock);
        if (!gs->s3.keys && !gs->bearer)
                status = gs_credential_find(&gs->s3.keys, &gs->bearer, gs->s3.source, error);
        lock_give(&gs->s3.lock);
        if (status)
                object_report_origin(&gs->s3.object, error);
        return status;
}

static char *make_url(const struct gs_store *gs, const struct object_call *call)
{
        struct buf buf = { 0 };

        s3_add_bucket(&buf, &gs->s3.address, "");
        buf_add_byte(&buf, '/');
        if (call->key)
                object_add_name(&buf, &gs->s3.object, call->key);
        object_query(&buf, call);
        return object_take(&buf);
}

/* Whether the body was changed on the way: then it is sent again. */
static bool is_changed(const struct http_response *response)
{
        return response->status == 400 && (s3_is_code(response, "BadDigest") || s3_is_code(response, "ContentSha256Mismatch"));
}

static enum nebula_status send_signed(struct object_store *store, const struct object_call *given, struct http_response *ret_response,
                                      struct nebula_error *error)
{
        struct gs_store *gs = (struct gs_store *)store;
        struct object_call with_project = *given, *call = &with_project;
        struct signing signing = { .gs = gs, .call = call, .hash = OBJECT_UNSIGNED };
        enum nebula_status status = find_credential(gs, error);
        char *url = status ? NULL : make_url(gs, call);

        object_header(call, "x-goog-user-project", conf_env("GOOGLE_CLOUD_QUOTA_PROJECT"));
        *ret_response = (struct http_response){ 0 };
        if (status)
                return status;
        signing.url = url;
        if (!url || (gs->s3.keys && call->body_size <= SIGNED_BYTES && !object_sha256_text(call->body_size ? call->body : "", (size_t)call->body_size, signing.hash)))
                status = object_no_memory(store, error);
        else
                status = object_send(store, call, url, sign, &signing, is_changed, ret_response, error);
        free(url);
        return status;
}

enum nebula_status gs_send(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                           struct nebula_error *error)
{
        struct vars *before = vars_enter(store->vars);
        enum nebula_status status = send_signed(store, call, ret_response, error);

        vars_leave(before);
        return status;
}

enum nebula_status gs_fail(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                           struct nebula_error *error)
{
        return s3_explain(store, deed, key, response, ((const struct gs_store *)store)->s3.source, RIGHTS, error);
}

enum nebula_status gs_reach(struct store *store, struct store_reach *ret_reach, struct nebula_error *error)
{
        struct gs_store *gs = (struct gs_store *)store;
        struct store_reach reach = { 0 };
        struct vars *before = vars_enter(gs->s3.object.vars);
        enum nebula_status status = find_credential(gs, error);

        vars_leave(before);

        if (status)
                return status;
        http_describe(gs->s3.address.endpoint, &gs->s3.object.trust, reach.transport, sizeof reach.transport);
        snprintf(reach.credential, sizeof reach.credential, "%s", gs->s3.source);
        *ret_reach = reach;
        return NEBULA_OK;
}
