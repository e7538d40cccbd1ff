/* Reads that the service sends to another place, for instance to a CDN whose URL has a signature of its own. Only the range goes along. The
 * service keeps the last word about the object: its stamp is never that of the other place, and no answer from there says that there is no
 * object. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "store/http/crypt.h"
#include "store/object/object.h"

#define HOPS_MAX 4 /* from one place to another */
#define PRINTED_MAX 200

/* What the service said of the object, in the answer that leads elsewhere; NULL: nothing. */
struct said {
        char *etag, *generation, *modified;
};

static bool is_read(const struct object_call *call)
{
        return !strcmp(call->method, "GET") || !strcmp(call->method, "HEAD");
}

/* Whether S3 itself names another region or endpoint, which wants a signature of its own. */
static bool is_regional(const struct http_response *response)
{
        return http_field(response, "x-amz-bucket-region") || (response->text && strstr(response->text, "Redirect</Code>"));
}

static bool leads_elsewhere(const struct http_response *response)
{
        switch (response->status) {
        case 302:
        case 303:
                return true;
        case 301:
        case 307:
        case 308:
                return http_field(response, "location") && !is_regional(response);
        default:
                return false;
        }
}

/* The whole URL of a Location, which may begin with "/" or "//". NULL: it is none, or no memory. */
static char *resolve(const char *location, const char *from)
{
        size_t scheme = strcspn(from, ":") + 1, host = scheme + 2 + strcspn(from + scheme + 2, "/?");
        struct buf buf = { 0 };
        struct url url;
        char *whole;

        if (!location || !*location)
                return NULL;
        if (*location == '/')
                buf_add(&buf, from, location[1] == '/' ? scheme : host);
        buf_add(&buf, location, strcspn(location, "#"));
        whole = object_take(&buf);
        if (whole && url_split(whole, &url) && (!strcmp(url.scheme, "https") || !strcmp(url.scheme, "http")))
                return whole;
        object_forget(whole);
        return NULL;
}

static enum nebula_status refused(const struct object_store *store, const struct object_call *call, int status, const char *why, struct nebula_error *error)
{
        const char *key = call->key ? call->key : "";

        error_set(error, NEBULA_STORAGE, 0, "%s/%.200s: the answer is %d: %s", store->store.root, key, status, why);
        if (error)
                error->http_status = status;
        return NEBULA_STORAGE;
}

/* NULL with an error: this read must not go there. */
static char *find_place(const struct object_store *store, const struct object_call *call, const struct http_response *response, const char *from,
                        struct nebula_error *error)
{
        char *to = resolve(http_field(response, "location"), from), printed[PRINTED_MAX], why[PRINTED_MAX + 120] = "";
        struct url here, there;

        if (!to) {
                refused(store, call, response->status, "it sends the read elsewhere, but names no place by http or https (Location)", error);
                return NULL;
        }
        url_print(to, printed, sizeof printed);
        if (!url_split(from, &here) || !url_split(to, &there) || (!strcmp(here.scheme, "https") && strcmp(there.scheme, "https")))
                snprintf(why, sizeof why, "it sends the read from https to %s, where others could change the bytes", printed);
        else if (url_is_loopback(&there) && !url_is_loopback(&here))
                snprintf(why, sizeof why, "it sends the read to this machine itself, %s", printed);
        if (!*why)
                return to;
        refused(store, call, response->status, why, error);
        object_forget(to);
        return NULL;
}

static char *copy_field(const struct http_response *response, const char *name)
{
        const char *value = http_field(response, name);

        return value ? strdup(value) : NULL;
}

static void put_said(const struct said *said, struct http_response *response)
{
        if (said->modified)
                http_field_put(response, "last-modified", said->modified);
        http_field_put(response, "etag", said->etag ? said->etag : "");
        http_field_put(response, "x-goog-generation", said->generation ? said->generation : "");
}

/* Asks one place after the other. *ret_url: the last one. The response is that of the last place; it may lead elsewhere still. */
static enum nebula_status go_there(const struct object_store *store, const struct object_call *call, const struct http_request *origin,
                                   struct http_response *response, char **ret_url, struct nebula_error *error)
{
        struct http_request request = *origin;
        struct http_header range = { 0 };
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < call->header_count; i++)
                if (!strcasecmp(call->headers[i].name, "range") || !strcasecmp(call->headers[i].name, "x-ms-range"))
                        range = (struct http_header){ "Range", call->headers[i].value };
        request.headers = &range;
        request.header_count = range.name ? 1 : 0;
        request.sign = NULL;
        for (int hops = 0; hops < HOPS_MAX && !status && leads_elsewhere(response); hops++) {
                char *to = find_place(store, call, response, request.url, error);

                crypt_forget(response->fields, response->fields_size); /* the place's URL, too */
                http_response_done(response);
                if (!to)
                        return NEBULA_STORAGE;
                object_forget(*ret_url); /* its query may be a signature */
                request.url = *ret_url = to;
                status = http_send(&request, response, error);
        }
        return status;
}

static enum nebula_status not_there(const struct object_store *store, const struct object_call *call, const struct http_response *response, const char *url,
                                    struct nebula_error *error)
{
        char printed[PRINTED_MAX], why[PRINTED_MAX + 120];

        url_print(url, printed, sizeof printed);
        if (leads_elsewhere(response))
                snprintf(why, sizeof why, "the store sends the read from place to place, more than %d times; the last is %s", HOPS_MAX, printed);
        else
                snprintf(why, sizeof why, "the store has the object, and sends the read to %s, which does not give it", printed);
        return refused(store, call, response->status, why, error);
}

/* One walk from the service's answer. *ret_may_ask: the place refuses the read, as one does whose signature has expired. */
static enum nebula_status walk(const struct object_store *store, const struct object_call *call, const struct http_request *origin,
                               struct http_response *response, bool *ret_may_ask, struct nebula_error *error)
{
        struct said said = { copy_field(response, "etag"), copy_field(response, "x-goog-generation"), copy_field(response, "last-modified") };
        char *url = NULL;
        enum nebula_status status = go_there(store, call, origin, response, &url, error);

        *ret_may_ask = false;
        if (!status && (object_is_done(response) || response->status == 416)) {
                put_said(&said, response);
        } else if (!status) {
                *ret_may_ask = response->status / 100 == 4;
                status = not_there(store, call, response, url, error);
                http_response_done(response);
        }
        object_forget(url);
        free(said.etag);
        free(said.generation);
        free(said.modified);
        return status;
}

enum nebula_status object_follow(const struct object_store *store, const struct object_call *call, const struct http_request *origin,
                                 struct http_response *response, struct nebula_error *error)
{
        bool may_ask = false;
        enum nebula_status status;

        if (!leads_elsewhere(response))
                return NEBULA_OK;
        if (!is_read(call)) {
                status = refused(store, call, response->status, "it sends the write to another place, and Nebula sends data and keys to no other place: "
                                 "name that store itself in the storage path or its endpoint", error);
                http_response_done(response);
                return status;
        }
        status = walk(store, call, origin, response, &may_ask, error);
        if (!status || !may_ask)
                return status;
        status = http_send(origin, response, error);
        return status || !leads_elsewhere(response) ? status : walk(store, call, origin, response, &may_ask, error);
}
