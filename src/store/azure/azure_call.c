/* One request to Azure: its URL, its signature, and what its failure means. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "os/os.h"
#include "store/azure/azure_private.h"
#include "store/http/crypt.h"
#include "store/http/url.h"
#include "sum/sum.h"

#define NAME_MAX_CHARACTERS 1024
#define COMPONENT_MAX_CHARACTERS 254
#define SOUND_TRIES 4          /* of a request whose body was changed on the way */
#define SKEW_S 600 /* Azure refuses what was signed 15 minutes ago */

/* One call of azure_send, for the signature of its tries. */
struct signing {
        struct azure_store *azure;
        const struct azure_call *call;
        const char *path;
        uint64_t serial; /* of the token that the last try used */
};

void azure_param(struct azure_call *call, const char *name, const char *value)
{
        if (call->param_count < AZURE_PARAMS_MAX)
                call->params[call->param_count++] = (struct azure_param){ name, value };
}

void azure_header(struct azure_call *call, const char *name, const char *value)
{
        if (value && call->header_count < AZURE_HEADERS_MAX)
                call->headers[call->header_count++] = (struct http_header){ name, value };
}

enum nebula_status azure_no_memory(const struct azure_store *azure, struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "%.400s: no memory", azure->address.root);
}

static char *take(struct buf *buf)
{
        size_t size;

        return buf_take(buf, &size);
}

static void add_blob_url(struct buf *buf, const struct azure_store *azure, const char *key)
{
        struct buf name = { 0 };
        char *text;

        buf_add_text(buf, azure->address.endpoint);
        buf_add_byte(buf, '/');
        buf_add_text(buf, azure->address.container);
        if (!key)
                return;
        buf_add_byte(buf, '/');
        url_encode(buf, azure->address.prefix, "/");
        azure_name_encode(&name, key);
        text = take(&name);
        if (text)
                url_encode(buf, text, "/");
        else
                buf->failed = true;
        free(text);
}

char *azure_blob_url(const struct azure_store *azure, const char *key, bool with_sas)
{
        struct buf buf = { 0 };

        add_blob_url(&buf, azure, key);
        if (with_sas && azure->credential.sas) {
                buf_add_byte(&buf, '?');
                buf_add_text(&buf, azure->credential.sas);
        }
        return take(&buf);
}

static char *make_url(const struct azure_store *azure, const struct azure_call *call)
{
        struct buf buf = { 0 };
        const char *separator = "?";

        add_blob_url(&buf, azure, call->key);
        for (size_t i = 0; i < call->param_count; i++) {
                buf_add_text(&buf, separator);
                buf_add_text(&buf, call->params[i].name);
                buf_add_byte(&buf, '=');
                url_encode(&buf, call->params[i].value, "");
                separator = "&";
        }
        if (azure->credential.sas) {
                buf_add_text(&buf, separator);
                buf_add_text(&buf, azure->credential.sas);
        }
        return take(&buf);
}

/* Characters count, not bytes. */
static size_t characters(const char *text, size_t size)
{
        size_t count = 0;

        for (size_t i = 0; i < size; i++)
                count += ((unsigned char)text[i] & 0xC0) != 0x80;
        return count;
}

static enum nebula_status invalid(const struct azure_store *azure, const char *key, const char *why, struct nebula_error *error)
{
        return error_set(error, NEBULA_INVALID, 0, "\"%.200s\" is no key of an object of %.200s: %s", key, azure->address.root, why);
}

enum nebula_status azure_check_key(const struct azure_store *azure, const char *key, struct nebula_error *error)
{
        size_t before = characters(azure->address.prefix, strlen(azure->address.prefix)), length = 0;
        const char *why = NULL;
        struct buf buf = { 0 };
        char *name;

        if (!store_key_sound(key))
                return invalid(azure, key, "it is no path", error);
        azure_name_encode(&buf, key);
        name = take(&buf);
        if (!name)
                return azure_no_memory(azure, error);
        if (before + characters(name, strlen(name)) > NAME_MAX_CHARACTERS)
                why = "with what stands before it, it has more than 1024 characters";
        for (const char *part = name; *part; part += length + (part[length] == '/')) {
                length = strcspn(part, "/");
                if (characters(part, length) > COMPONENT_MAX_CHARACTERS)
                        why = "a component has more than 254 characters";
        }
        free(name);
        return why ? invalid(azure, key, why, error) : NEBULA_OK;
}

static int by_name(const void *a, const void *b)
{
        return strcmp(((const struct http_header *)a)->name, ((const struct http_header *)b)->name);
}

/* The value of one of the headers that stand in a line of their own; "": the request has it not. */
static const char *header_of(const struct azure_call *call, const char *name)
{
        for (size_t i = 0; i < call->header_count; i++)
                if (!strcasecmp(call->headers[i].name, name))
                        return call->headers[i].value;
        return "";
}

static void add_lines(struct buf *buf, const struct azure_call *call)
{
        static const char *const names[] = { "Content-MD5", "Content-Type", "Date", "If-Modified-Since", "If-Match", "If-None-Match",
                                             "If-Unmodified-Since", "Range" };
        char length[32] = "";

        buf_add_text(buf, call->method);
        buf_add_text(buf, "\n\n\n"); /* the encoding and the language of the content, which no request has */
        if (call->body_size)
                snprintf(length, sizeof length, "%llu", (unsigned long long)call->body_size);
        buf_add_text(buf, length);
        buf_add_byte(buf, '\n');
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
                buf_add_text(buf, header_of(call, names[i]));
                buf_add_byte(buf, '\n');
        }
}

char *azure_string_to_sign(const char *account, const char *path, const struct azure_call *call, const char *date)
{
        struct http_header headers[AZURE_HEADERS_MAX + 2] = { { "x-ms-date", date }, { "x-ms-version", AZURE_VERSION } };
        struct azure_param params[AZURE_PARAMS_MAX];
        size_t count = 2;
        struct buf buf = { 0 };

        add_lines(&buf, call);
        for (size_t i = 0; i < call->header_count; i++)
                if (!strncmp(call->headers[i].name, "x-ms-", 5))
                        headers[count++] = call->headers[i];
        qsort(headers, count, sizeof *headers, by_name);
        for (size_t i = 0; i < count; i++) {
                buf_add_text(&buf, headers[i].name);
                buf_add_byte(&buf, ':');
                buf_add_text(&buf, headers[i].value);
                buf_add_byte(&buf, '\n');
        }
        buf_add_byte(&buf, '/');
        buf_add_text(&buf, account);
        buf_add_text(&buf, path);
        memcpy(params, call->params, sizeof params);
        qsort(params, call->param_count, sizeof *params, by_name);
        for (size_t i = 0; i < call->param_count; i++) {
                buf_add_byte(&buf, '\n');
                buf_add_text(&buf, params[i].name);
                buf_add_byte(&buf, ':');
                buf_add_text(&buf, params[i].value);
        }
        return take(&buf);
}

static enum nebula_status sign_with_key(struct signing *signing, struct http_fields *fields, struct nebula_error *error)
{
        const struct azure_store *azure = signing->azure;
        uint8_t digest[CRYPT_SHA256_BYTES];
        char date[HTTP_DATE_SIZE], signature[CRYPT_BASE64_SIZE(CRYPT_SHA256_BYTES)], value[AZURE_ACCOUNT_MAX + 80];
        char *text;
        bool done;

        http_date_format(os->wall_ns() / 1000000000, date);
        text = azure_string_to_sign(azure->address.account, signing->path, signing->call, date);
        done = text && crypt_hmac_sha256(azure->credential.key, azure->credential.key_size, text, strlen(text), digest);
        free(text);
        if (!done)
                return azure_no_memory(azure, error);
        crypt_base64(digest, sizeof digest, signature);
        snprintf(value, sizeof value, "SharedKey %s:%s", azure->address.account, signature);
        http_fields_add(fields, "x-ms-date", date);
        http_fields_add(fields, "Authorization", value);
        return NEBULA_OK;
}

static enum nebula_status sign_with_token(struct signing *signing, bool was_refused, struct http_fields *fields, struct nebula_error *error)
{
        struct buf buf = { 0 };
        char *token, *value;
        enum nebula_status status = azure_identity_token(signing->azure->credential.identity, was_refused ? signing->serial : 0, &token,
                                                         &signing->serial, error);

        if (status)
                return status;
        buf_add_text(&buf, "Bearer ");
        buf_add_text(&buf, token);
        value = take(&buf);
        if (value)
                http_fields_add(fields, "Authorization", value);
        crypt_forget(token, strlen(token));
        free(token);
        if (!value)
                return azure_no_memory(signing->azure, error);
        crypt_forget(value, strlen(value));
        free(value);
        return NEBULA_OK;
}

static enum nebula_status sign(void *argument, bool was_refused, struct http_fields *fields, struct nebula_error *error)
{
        struct signing *signing = argument;

        http_fields_add(fields, "x-ms-version", AZURE_VERSION);
        switch (signing->azure->credential.proof) {
        case AZURE_PROOF_KEY:
                return sign_with_key(signing, fields, error);
        case AZURE_PROOF_TOKEN:
                return sign_with_token(signing, was_refused, fields, error);
        default:
                return NEBULA_OK; /* the URL holds the SAS */
        }
}

static enum nebula_status find_credential(struct azure_store *azure, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        lock_take(&azure->lock);
        if (!azure->has_credential) {
                status = azure_credential_find(&azure->address, &azure->credential, error);
                azure->has_credential = !status;
        }
        lock_give(&azure->lock);
        return status;
}

const char *azure_code(const struct http_response *response)
{
        const char *code = http_field(response, "x-ms-error-code");

        return code ? code : "";
}

static bool is_code(const struct http_response *response, const char *code)
{
        return !strcmp(azure_code(response), code);
}

/* A body that was changed on the way, as its checksum told, is sent again. */
static enum nebula_status send_sound(const struct http_request *request, struct http_response *ret_response, struct nebula_error *error)
{
        enum nebula_status status = http_send(request, ret_response, error);

        for (int tries = 1; tries < SOUND_TRIES && !status && is_code(ret_response, "Crc64Mismatch"); tries++) {
                http_response_done(ret_response);
                status = http_send(request, ret_response, error);
        }
        return status;
}

enum nebula_status azure_send(struct azure_store *azure, const struct azure_call *call, struct http_response *ret_response,
                              struct nebula_error *error)
{
        struct signing signing = { .azure = azure, .call = call };
        enum nebula_status status = find_credential(azure, error);
        struct http_request request = {
                .method = call->method, .headers = call->headers, .header_count = call->header_count, .sign = sign, .sign_argument = &signing,
                .body = call->body, .body_size = call->body_size, .into = call->into, .into_size = call->into_size,
                .text_max = call->text_max, .answer_ms = call->answer_ms, .stop = call->stop,
        };
        char *url = status ? NULL : make_url(azure, call), *path = NULL;
        struct url parts;

        *ret_response = (struct http_response){ 0 };
        if (status)
                return status;
        if (url && url_split(url, &parts))
                path = strndup(parts.path, parts.path_size);
        request.url = url;
        signing.path = path;
        status = path ? send_sound(&request, ret_response, error) : azure_no_memory(azure, error);
        free(path);
        free(url);
        return status;
}

/* By how much this machine's clock is off, in words; "" when that is no reason to refuse a signature. */
static const char *skew(const struct http_response *response, char *text, size_t size)
{
        const char *date = http_field(response, "date");
        int64_t theirs, ours = os->wall_ns() / 1000000000;

        *text = 0;
        if (date && http_date_parse(date, &theirs) && llabs(ours - theirs) > SKEW_S)
                snprintf(text, size, "this machine's clock is %lld minutes %s the store's: set it",
                         (long long)llabs(ours - theirs) / 60, ours > theirs ? "ahead of" : "behind");
        return text;
}

/* What to do about an answer; "": nothing is known. */
static const char *advice(const struct azure_store *azure, const struct http_response *response, char *text, size_t size)
{
        const char *source = azure->credential.source;

        *text = 0;
        if ((response->status == 403 || response->status == 401) && *skew(response, text, size))
                return text;
        if (is_code(response, "ContainerNotFound"))
                snprintf(text, size, "create the container");
        else if (is_code(response, "AuthorizationPermissionMismatch"))
                snprintf(text, size, "%s may not do this; writing takes the role Storage Blob Data Contributor, or a SAS with sp=rcwdl", source);
        else if (is_code(response, "AuthorizationFailure"))
                snprintf(text, size, "%s is refused; look at the account's network rules and at what the SAS allows", source);
        else if (response->status == 403 || response->status == 401 || is_code(response, "InvalidAuthenticationInfo"))
                snprintf(text, size, "%s is not accepted; it may be wrong or expired", source);
        else if (is_code(response, "BlobImmutableDueToPolicy"))
                snprintf(text, size, "the container keeps its blobs from being changed or removed");
        return text;
}

enum nebula_status azure_fail(const struct azure_store *azure, enum azure_deed deed, const char *key, const struct http_response *response,
                              struct nebula_error *error)
{
        static const char *const verbs[] = { "read", "list", "write", "remove", "copy" };
        enum nebula_status status = NEBULA_STORAGE;
        char text[256];

        if (response->status == 404 && (deed == AZURE_READ || !is_code(response, "ContainerNotFound")))
                status = NEBULA_NOT_FOUND;
        else if (response->status == 413 || is_code(response, "RequestBodyTooLarge") || is_code(response, "OutOfRangeInput"))
                status = NEBULA_INVALID;
        else if (response->status == 507)
                status = NEBULA_NO_SPACE;
        advice(azure, response, text, sizeof text);
        if (status == NEBULA_NOT_FOUND)
                error_set(error, status, 0, "%.200s/%.200s: there is no such object", azure->address.root, key);
        else
                error_set(error, status, 0, "cannot %s %.150s/%.150s: the answer is %d %.60s%s%s", verbs[deed], azure->address.root, key, response->status,
                          azure_code(response), *text ? ": " : "", text);
        if (error)
                error->http_status = response->status;
        return status;
}

void azure_crc64_text(const void *data, uint64_t size, char ret_text[16])
{
        uint64_t crc = sum_crc64(0, data, size);
        uint8_t bytes[8];

        for (size_t i = 0; i < sizeof bytes; i++)
                bytes[i] = (uint8_t)(crc >> (8 * i));
        crypt_base64(bytes, sizeof bytes, ret_text);
}

void azure_new_id(char ret_id[AZURE_ID_SIZE])
{
        uint64_t number = 0;

        os->random(&number, sizeof number);
        snprintf(ret_id, AZURE_ID_SIZE, "%016llx", (unsigned long long)number);
}

void azure_stamp(const struct http_response *response, struct store_stamp *ret_stamp)
{
        const char *etag = http_field(response, "etag");
        size_t size = etag ? strlen(etag) : 0;

        if (size >= 2 && *etag == '"' && etag[size - 1] == '"') {
                etag++;
                size -= 2;
        }
        snprintf(ret_stamp->text, sizeof ret_stamp->text, "%.*s", (int)size, etag ? etag : "");
}

const char *azure_quoted(const struct store_stamp *stamp, char ret_text[AZURE_QUOTED_SIZE])
{
        snprintf(ret_text, AZURE_QUOTED_SIZE, "\"%s\"", stamp->text);
        return ret_text;
}
