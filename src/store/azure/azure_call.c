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

static void add_sas(struct buf *buf, const struct azure_store *azure, const char *separator)
{
        if (!azure->credential.sas)
                return;
        buf_add_text(buf, separator);
        buf_add_text(buf, azure->credential.sas);
}

char *azure_blob_url(const struct azure_store *azure, const char *key, bool with_sas)
{
        struct buf buf = { .is_secret = true };

        add_url(&buf, azure, key);
        if (with_sas)
                add_sas(&buf, azure, "?");
        return object_take(&buf);
}

static char *make_url(const struct azure_store *azure, const struct object_call *call)
{
        struct buf buf = { .is_secret = true };

        add_url(&buf, azure, call->key);
        object_query(&buf, call);
        add_sas(&buf, azure, call->param_count ? "&" : "?");
        return object_take(&buf);
}

enum nebula_status azure_find_credential(struct azure_store *azure, struct nebula_error *error)
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

static bool is_changed(const struct http_response *response)
{
        return !strcmp(azure_code(response), "Crc64Mismatch");
}

enum nebula_status azure_send(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                              struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        struct azure_signing signing = { .azure = azure, .call = call };
        enum nebula_status status = azure_find_credential(azure, error);
        char *url = status ? NULL : make_url(azure, call), *path = NULL;
        struct url parts;

        *ret_response = (struct http_response){ 0 };
        if (status)
                return status;
        if (url && url_split(url, &parts))
                path = strndup(parts.path, parts.path_size);
        signing.path = path;
        status = path ? object_send(store, call, url, azure_sign, &signing, is_changed, ret_response, error) : object_no_memory(store, error);
        free(path);
        object_forget(url); /* it holds the SAS */
        return status;
}

void azure_crc64_text(uint64_t crc, char ret_text[OBJECT_SUM_SIZE])
{
        uint8_t bytes[8];

        for (size_t i = 0; i < sizeof bytes; i++)
                bytes[i] = (uint8_t)(crc >> (8 * i));
        crypt_base64(bytes, sizeof bytes, ret_text);
}
