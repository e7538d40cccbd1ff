/* One request to Azure: its URL, and the credential that signs it. */
#include <stdlib.h>
#include <string.h>

#include "store/azure/azure_private.h"
#include "store/http/crypt.h"
#include "sum/sum.h"

static void add_url(struct buf *buf, const struct azure_store *azure, const char *key)
{
        buf_add_text(buf, azure->address.endpoint);
        buf_add_byte(buf, '/');
        buf_add_text(buf, azure->address.container);
        if (!key)
                return;
        buf_add_byte(buf, '/');
        object_add_name(buf, &azure->object, key);
}

static void add_sas(struct buf *buf, const char *sas, const char *separator)
{
        if (!sas)
                return;
        buf_add_text(buf, separator);
        buf_add_text(buf, sas);
}

char *azure_blob_url(const struct azure_store *azure, const char *key)
{
        struct buf buf = { 0 };

        add_url(&buf, azure, key);
        return object_take(&buf);
}

static char *make_url(const struct azure_store *azure, const struct object_call *call, const char *sas)
{
        struct buf buf = { .is_secret = true };

        add_url(&buf, azure, call->key);
        object_query(&buf, call);
        add_sas(&buf, sas, call->param_count ? "&" : "?");
        return object_take(&buf);
}

/* The value of the header that names another object, with this SAS. NULL: no memory. */
static char *make_source(const char *value, const char *sas)
{
        struct buf buf = { .is_secret = true };

        buf_add_text(&buf, value);
        add_sas(&buf, sas, "?");
        return object_take(&buf);
}

enum nebula_status azure_find_credential(struct azure_store *azure, struct nebula_error *error)
{
        struct vars *before = vars_enter(azure->object.vars);
        enum nebula_status status = NEBULA_OK;

        lock_take(&azure->lock);
        if (!azure->has_credential) {
                status = azure_credential_find(&azure->address, &azure->credential, error);
                azure->has_credential = !status;
        }
        lock_give(&azure->lock);
        vars_leave(before);
        if (status)
                object_report_origin(&azure->object, error);
        return status;
}

static bool is_changed(const struct http_response *response)
{
        return !strcmp(azure_code(response), "Crc64Mismatch");
}

/* Sends the request with this SAS; NULL: the credential is none. */
static enum nebula_status send_with(struct azure_store *azure, const struct object_call *call, const char *sas, struct http_response *ret_response,
                                    struct nebula_error *error)
{
        struct object_store *store = &azure->object;
        struct object_call sent = *call;
        struct azure_signing signing = { .azure = azure, .call = &sent };
        char *url = make_url(azure, call, sas), *path = NULL, *source = call->source.name ? make_source(call->source.value, sas) : NULL;
        enum nebula_status status;
        struct url parts;
        bool is_made;

        if (url && url_split(url, &parts))
                path = strndup(parts.path, parts.path_size);
        is_made = path && (source || !call->source.name);
        object_header(&sent, call->source.name, source);
        signing.path = path;
        status = is_made ? object_send(store, &sent, url, azure_sign, &signing, is_changed, ret_response, error) : object_no_memory(store, error);
        free(path);
        object_forget(source); /* it holds the SAS, as the URL does */
        object_forget(url);
        return status;
}

static bool renew(struct azure_store *azure, const char *used)
{
        bool is_new;

        lock_take(&azure->lock);
        is_new = azure_credential_renew(&azure->credential, used);
        lock_give(&azure->lock);
        return is_new;
}

static enum nebula_status send_signed(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                              struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        enum nebula_status status = azure_find_credential(azure, error);
        const char *sas;

        *ret_response = (struct http_response){ 0 };
        if (status)
                return status;
        sas = azure->credential.sas;
        status = send_with(azure, call, sas, ret_response, error);
        if (!status && (ret_response->status == 403 || ret_response->status == 401) && renew(azure, sas)) {
                http_response_done(ret_response);
                *ret_response = (struct http_response){ 0 };
                status = send_with(azure, call, azure->credential.sas, ret_response, error);
        }
        return status;
}

enum nebula_status azure_send(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                              struct nebula_error *error)
{
        struct vars *before = vars_enter(store->vars);
        enum nebula_status status = send_signed(store, call, ret_response, error);

        vars_leave(before);
        return status;
}

void azure_crc64_text(uint64_t crc, char ret_text[OBJECT_SUM_SIZE])
{
        uint8_t bytes[8];

        for (size_t i = 0; i < sizeof bytes; i++)
                bytes[i] = (uint8_t)(crc >> (8 * i));
        crypt_base64(bytes, sizeof bytes, ret_text);
}
