/* Signature version 4 of Amazon, and of Google, which uses other names. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "store/http/crypt.h"
#include "store/object/object.h"

#define DATE_SIZE 9 /* "20130524", the first bytes of a date and time */

void object_sigv4_time(int64_t seconds, char ret_text[OBJECT_SIGV4_TIME_SIZE])
{
        time_t time = (time_t)seconds;
        struct tm tm;

        strftime(ret_text, OBJECT_SIGV4_TIME_SIZE, "%Y%m%dT%H%M%SZ", gmtime_r(&time, &tm));
}

bool object_sha256_text(const void *data, size_t size, char ret_text[OBJECT_SHA256_SIZE])
{
        uint8_t digest[CRYPT_SHA256_BYTES];

        if (!crypt_sha256(data, size, digest))
                return false;
        for (size_t i = 0; i < sizeof digest; i++)
                snprintf(ret_text + 2 * i, 3, "%02x", digest[i]);
        return true;
}

static void add_query(struct buf *buf, const struct object_call *call)
{
        struct object_call sorted = *call;

        object_sort_params(&sorted);
        for (size_t i = 0; i < sorted.param_count; i++) {
                buf_add_text(buf, i ? "&" : "");
                url_encode(buf, sorted.params[i].name, "");
                buf_add_byte(buf, '=');
                url_encode(buf, sorted.params[i].value ? sorted.params[i].value : "", "");
        }
        buf_add_byte(buf, '\n');
}

static void add_names(struct buf *buf, const struct http_header *headers, size_t count)
{
        for (size_t i = 0; i < count; i++) {
                buf_add_text(buf, i ? ";" : "");
                buf_add_text(buf, headers[i].name);
        }
}

/* The canonical text of the request, which is signed. Path and query come from the URL. */
static char *canonical(const struct object_call *call, const char *path, const struct http_header *headers, size_t count, const char *hash)
{
        struct buf buf = { .is_secret = true };

        buf_add_text(&buf, call->method);
        buf_add_byte(&buf, '\n');
        buf_add_text(&buf, *path ? path : "/");
        buf_add_byte(&buf, '\n');
        add_query(&buf, call);
        for (size_t i = 0; i < count; i++) {
                buf_add_text(&buf, headers[i].name);
                buf_add_byte(&buf, ':');
                buf_add_text(&buf, headers[i].value);
                buf_add_byte(&buf, '\n');
        }
        buf_add_byte(&buf, '\n');
        add_names(&buf, headers, count);
        buf_add_byte(&buf, '\n');
        buf_add_text(&buf, hash);
        return object_take(&buf);
}

/* Derives the key of one day, region and service. */
static bool derive(const struct object_sigv4 *sigv4, const char *secret, const char *day, const char *region, uint8_t key[CRYPT_SHA256_BYTES])
{
        const char *const steps[] = { day, region, sigv4->service, sigv4->terminator };
        struct buf buf = { .is_secret = true };
        uint8_t next[CRYPT_SHA256_BYTES];
        char *first;
        bool done;

        buf_add_text(&buf, sigv4->key_prefix);
        buf_add_text(&buf, secret);
        first = object_take(&buf);
        done = first && crypt_hmac_sha256(first, strlen(first), day, strlen(day), key);
        for (size_t i = 1; done && i < sizeof steps / sizeof *steps; i++) {
                done = crypt_hmac_sha256(key, CRYPT_SHA256_BYTES, steps[i], strlen(steps[i]), next);
                memcpy(key, next, sizeof next);
        }
        crypt_forget(next, sizeof next);
        object_forget(first);
        return done;
}

char *object_sigv4_sign(const struct object_sigv4 *sigv4, const struct object_sigv4_key *key, const char *region, const char *time,
                        const struct object_call *call, const char *path, const struct http_header *headers, size_t count, const char *hash)
{
        char *request = canonical(call, path, headers, count, hash), digest[OBJECT_SHA256_SIZE], day[DATE_SIZE], scope[160], *text;
        uint8_t signing[CRYPT_SHA256_BYTES], signature[CRYPT_SHA256_BYTES];
        struct buf buf = { 0 };
        bool done = request && object_sha256_text(request, strlen(request), digest);

        object_forget(request); /* it holds the session */
        if (!done)
                return NULL;
        snprintf(day, sizeof day, "%s", time);
        snprintf(scope, sizeof scope, "%s/%.80s/%s/%s", day, region, sigv4->service, sigv4->terminator);
        buf_add_text(&buf, sigv4->algorithm);
        buf_add_byte(&buf, '\n');
        buf_add_text(&buf, time);
        buf_add_byte(&buf, '\n');
        buf_add_text(&buf, scope);
        buf_add_byte(&buf, '\n');
        buf_add_text(&buf, digest);
        text = object_take(&buf);
        done = text && derive(sigv4, key->secret, day, region, signing) &&
               crypt_hmac_sha256(signing, sizeof signing, text, strlen(text), signature);
        crypt_forget(signing, sizeof signing);
        free(text);
        if (!done)
                return NULL;
        buf_add_text(&buf, sigv4->algorithm);
        buf_add_text(&buf, " Credential=");
        buf_add_text(&buf, key->access);
        buf_add_byte(&buf, '/');
        buf_add_text(&buf, scope);
        buf_add_text(&buf, ",SignedHeaders=");
        add_names(&buf, headers, count);
        buf_add_text(&buf, ",Signature=");
        for (size_t i = 0; i < sizeof signature; i++) {
                char hex[3];

                snprintf(hex, sizeof hex, "%02x", signature[i]);
                buf_add_text(&buf, hex);
        }
        return object_take(&buf);
}

enum nebula_status object_sigv4_fields(const struct object_sigv4 *sigv4, const struct object_sigv4_key *key, const char *region,
                                       int64_t seconds, const struct object_call *call, const char *url, const char *hash,
                                       struct http_fields *fields, struct nebula_error *error)
{
        struct http_header headers[OBJECT_HEADERS_MAX + 4];
        char names[OBJECT_HEADERS_MAX][64], time[OBJECT_SIGV4_TIME_SIZE], host[URL_HOST_MAX + 18], port[16] = "", *path, *value;
        size_t count = 0;
        struct url parts;

        if (!url_split(url, &parts))
                return error_set(error, NEBULA_INVALID, 0, "the URL of an object cannot be read");
        if (parts.port > 0 && parts.port != (strcmp(parts.scheme, "http") ? 443 : 80))
                snprintf(port, sizeof port, ":%d", parts.port);
        snprintf(host, sizeof host, "%s%s%s%s", strchr(parts.host, ':') ? "[" : "", parts.host, strchr(parts.host, ':') ? "]" : "", port);
        object_sigv4_time(seconds, time);
        for (; count < call->header_count; count++) {
                snprintf(names[count], sizeof names[count], "%s", call->headers[count].name);
                for (char *byte = names[count]; *byte; byte++)
                        *byte = *byte >= 'A' && *byte <= 'Z' ? (char)(*byte + ('a' - 'A')) : *byte;
                headers[count] = (struct http_header){ names[count], call->headers[count].value };
        }
        headers[count++] = (struct http_header){ "host", host };
        headers[count++] = (struct http_header){ sigv4->hash_name, hash };
        headers[count++] = (struct http_header){ sigv4->date_name, time };
        if (*key->session)
                headers[count++] = (struct http_header){ sigv4->session_name, key->session };
        object_sort_headers(headers, count);
        path = strndup(parts.path, parts.path_size);
        value = path ? object_sigv4_sign(sigv4, key, region, time, call, path, headers, count, hash) : NULL;
        free(path);
        if (!value)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a signature");
        http_fields_add(fields, sigv4->hash_name, hash);
        http_fields_add(fields, sigv4->date_name, time);
        if (*key->session)
                http_fields_add(fields, sigv4->session_name, key->session);
        http_fields_add(fields, "Authorization", value);
        object_forget(value);
        return NEBULA_OK;
}
