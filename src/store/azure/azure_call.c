/* One request to Azure: its URL, its body, and the small texts that are in its header. */
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

/* A body that was changed on the way, as its checksum told, is sent again. */
static enum nebula_status send_sound(const struct http_request *request, struct http_response *ret_response, struct nebula_error *error)
{
        enum nebula_status status = http_send(request, ret_response, error);

        for (int tries = 1; tries < SOUND_TRIES && !status && !strcmp(azure_code(ret_response), "Crc64Mismatch"); tries++) {
                http_response_done(ret_response);
                status = http_send(request, ret_response, error);
        }
        return status;
}

enum nebula_status azure_send(struct azure_store *azure, const struct azure_call *call, struct http_response *ret_response,
                              struct nebula_error *error)
{
        struct azure_signing signing = { .azure = azure, .call = call };
        enum nebula_status status = find_credential(azure, error);
        struct http_request request = {
                .method = call->method, .headers = call->headers, .header_count = call->header_count, .sign = azure_sign, .sign_argument = &signing,
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
