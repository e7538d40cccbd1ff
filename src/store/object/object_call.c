/* Requests to any object store: small texts, and sending one request. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/counts.h"
#include "store/http/crypt.h"
#include "store/object/object.h"

#define SOUND_TRIES 4 /* for a body that was changed on the way */

void object_param(struct object_call *call, const char *name, const char *value)
{
        if (call->param_count == OBJECT_PARAMS_MAX)
                abort(); /* unreachable: the calls are known at compile time */
        call->params[call->param_count++] = (struct object_param){ name, value };
}

void object_header(struct object_call *call, const char *name, const char *value)
{
        if (!value)
                return;
        if (call->header_count == OBJECT_HEADERS_MAX)
                abort();
        call->headers[call->header_count++] = (struct http_header){ name, value };
}

static int by_param_name(const void *a, const void *b)
{
        return strcmp(((const struct object_param *)a)->name, ((const struct object_param *)b)->name);
}

void object_sort_params(struct object_call *call)
{
        qsort(call->params, call->param_count, sizeof *call->params, by_param_name);
}

static int by_header_name(const void *a, const void *b)
{
        return strcmp(((const struct http_header *)a)->name, ((const struct http_header *)b)->name);
}

void object_sort_headers(struct http_header *headers, size_t count)
{
        qsort(headers, count, sizeof *headers, by_header_name);
}

void object_query(struct buf *buf, const struct object_call *call)
{
        for (size_t i = 0; i < call->param_count; i++) {
                buf_add_text(buf, i ? "&" : "?");
                buf_add_text(buf, call->params[i].name);
                if (!call->params[i].value)
                        continue;
                buf_add_byte(buf, '=');
                url_encode(buf, call->params[i].value, "");
        }
}

char *object_take(struct buf *buf)
{
        size_t size;

        return buf_take(buf, &size);
}

void object_forget_bytes(void *secret, size_t size)
{
        if (secret)
                crypt_forget(secret, size);
        free(secret);
}

void object_forget(char *secret)
{
        object_forget_bytes(secret, secret ? strlen(secret) : 0);
}

void object_forget_json(struct json_t *body)
{
        const char *name;
        json_t *value;

        json_object_foreach(body, name, value)
                if (json_is_string(value))
                        crypt_forget((char *)(uintptr_t)json_string_value(value), json_string_length(value));
        json_decref(body);
}

enum nebula_status object_no_memory(const struct object_store *store, struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "%.400s: no memory", store->store.root);
}

void object_add_name(struct buf *buf, const struct object_store *store, const char *key)
{
        struct buf name = { 0 };
        char *text;

        url_encode(buf, store->prefix, "/");
        object_name_encode(&name, key);
        text = object_take(&name);
        if (text)
                url_encode(buf, text, "/");
        else
                buf->failed = true;
        free(text);
}

bool object_is_done(const struct http_response *response)
{
        return response->status / 100 == 2;
}

enum nebula_status object_send(const struct object_store *store, const struct object_call *call, const char *url, http_sign *sign, void *argument,
                               bool (*is_changed)(const struct http_response *response), struct http_response *ret_response,
                               struct nebula_error *error)
{
        struct http_request request = {
                .method = call->method, .url = url, .trust = store->trust, .headers = call->headers, .header_count = call->header_count, .sign = sign,
                .sign_argument = argument, .body = call->body, .body_size = call->body_size, .into = call->into, .into_size = call->into_size,
                .into_sums = call->into_sums, .into_chunk = call->into_chunk,
                .text_max = call->text_max, .answer_ms = call->answer_ms, .retries = store_counts_retries(&store->store), .moved = call->moved, .stop = call->stop,
                .stop_too = call->stop_too, .watch = call->watch,
        };
        enum nebula_status status = http_send(&request, ret_response, error);

        for (int tries = 1; tries < SOUND_TRIES && !status && is_changed(ret_response); tries++) {
                http_response_done(ret_response);
                status = http_send(&request, ret_response, error);
        }
        return status ? status : object_follow(store, call, &request, ret_response, error);
}

void object_new_id(char ret_id[OBJECT_ID_SIZE])
{
        uint64_t number = 0;

        os->random(&number, sizeof number);
        snprintf(ret_id, OBJECT_ID_SIZE, "%016llx", (unsigned long long)number);
}

void object_etag_text(const char *text, struct store_stamp *ret_stamp)
{
        size_t size = strlen(text);

        if (size >= 2 && *text == '"' && text[size - 1] == '"') {
                text++;
                size -= 2;
        }
        snprintf(ret_stamp->text, sizeof ret_stamp->text, "%.*s", (int)size, text);
}

void object_etag(const struct http_response *response, struct store_stamp *ret_stamp)
{
        const char *etag = http_field(response, "etag");

        object_etag_text(etag ? etag : "", ret_stamp);
}

const char *object_quoted(const struct store_stamp *stamp, char ret_text[OBJECT_QUOTED_SIZE])
{
        snprintf(ret_text, OBJECT_QUOTED_SIZE, "\"%s\"", stamp->text);
        return ret_text;
}

void object_etag_condition(struct object_call *call, enum store_condition condition, const struct store_stamp *seen,
                           char text[OBJECT_QUOTED_SIZE])
{
        object_header(call, "If-None-Match", condition == STORE_IF_ABSENT ? "*" : NULL);
        object_header(call, "If-Match", condition == STORE_IF_SAME ? object_quoted(seen, text) : NULL);
}
