/* Signs requests. A SAS is in the URL; a key or a token is used in the header. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "os/os.h"
#include "store/azure/azure_private.h"
#include "store/http/crypt.h"

/* The value of a header that has its own line in the text; "": the request lacks it. */
static const char *header_of(const struct object_call *call, const char *name)
{
        for (size_t i = 0; i < call->header_count; i++)
                if (!strcasecmp(call->headers[i].name, name))
                        return call->headers[i].value;
        return "";
}

static void add_lines(struct buf *buf, const struct object_call *call)
{
        static const char *const names[] = { "Content-MD5", "Content-Type", "Date", "If-Modified-Since", "If-Match", "If-None-Match",
                                             "If-Unmodified-Since", "Range" };
        char length[32] = "";

        buf_add_text(buf, call->method);
        buf_add_text(buf, "\n\n\n"); /* encoding and language of the content: no request has them */
        if (call->body_size)
                snprintf(length, sizeof length, "%llu", (unsigned long long)call->body_size);
        buf_add_text(buf, length);
        buf_add_byte(buf, '\n');
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
                buf_add_text(buf, header_of(call, names[i]));
                buf_add_byte(buf, '\n');
        }
}

char *azure_string_to_sign(const char *account, const char *path, const struct object_call *call, const char *date)
{
        struct http_header headers[OBJECT_HEADERS_MAX + 2] = { { "x-ms-date", date }, { "x-ms-version", AZURE_VERSION } };
        struct object_call sorted = *call;
        size_t count = 2;
        struct buf buf = { 0 };

        add_lines(&buf, call);
        for (size_t i = 0; i < call->header_count; i++)
                if (!strncmp(call->headers[i].name, "x-ms-", 5))
                        headers[count++] = call->headers[i];
        object_sort_headers(headers, count);
        for (size_t i = 0; i < count; i++) {
                buf_add_text(&buf, headers[i].name);
                buf_add_byte(&buf, ':');
                buf_add_text(&buf, headers[i].value);
                buf_add_byte(&buf, '\n');
        }
        buf_add_byte(&buf, '/');
        buf_add_text(&buf, account);
        buf_add_text(&buf, path);
        object_sort_params(&sorted);
        for (size_t i = 0; i < sorted.param_count; i++) {
                buf_add_byte(&buf, '\n');
                buf_add_text(&buf, sorted.params[i].name);
                buf_add_byte(&buf, ':');
                buf_add_text(&buf, sorted.params[i].value);
        }
        return object_take(&buf);
}

static enum nebula_status sign_with_key(struct azure_signing *signing, struct http_fields *fields, struct nebula_error *error)
{
        const struct azure_store *azure = signing->azure;
        uint8_t digest[CRYPT_SHA256_BYTES];
        char date[HTTP_DATE_SIZE], signature[CRYPT_BASE64_SIZE(CRYPT_SHA256_BYTES)], value[AZURE_ACCOUNT_MAX + 80];
        char *text;
        bool done;

        http_date_format(os->wall_ns() / SECOND_NS, date);
        text = azure_string_to_sign(azure->address.account, signing->path, signing->call, date);
        done = text && crypt_hmac_sha256(azure->credential.key, azure->credential.key_size, text, strlen(text), digest);
        free(text);
        if (!done)
                return object_no_memory(&azure->object, error);
        crypt_base64(digest, sizeof digest, signature);
        snprintf(value, sizeof value, "SharedKey %s:%s", azure->address.account, signature);
        http_fields_add(fields, "x-ms-date", date);
        http_fields_add(fields, "Authorization", value);
        return NEBULA_OK;
}

enum nebula_status azure_sign(void *argument, bool was_refused, struct http_fields *fields, struct nebula_error *error)
{
        struct azure_signing *signing = argument;
        enum nebula_status status;

        http_fields_add(fields, "x-ms-version", AZURE_VERSION);
        switch (signing->azure->credential.proof) {
        case AZURE_PROOF_KEY:
                return sign_with_key(signing, fields, error);
        case AZURE_PROOF_TOKEN:
                status = object_token_sign(signing->azure->credential.identity, &signing->serial, was_refused, fields, error);
                if (status)
                        object_report_origin(&signing->azure->object, error);
                return status;
        default:
                return NEBULA_OK; /* the URL holds the SAS */
        }
}
