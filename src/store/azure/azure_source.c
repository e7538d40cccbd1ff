/* A blob that the service reads for this store, by a URL. The request's own signature is for the new block only, so the URL must
 * authorize the read. With an account key the driver signs a SAS for this blob that is valid for an hour. A SAS of the store is added by
 * azure_send. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "os/os.h"
#include "store/azure/azure_private.h"
#include "store/http/crypt.h"

#define LIFE_S 3600
#define EXPIRY_SIZE 24 /* "2026-11-27T01:02:03Z" */

/* The text that the account's key signs. NULL: no memory. */
static char *string_to_sign(const char *account, const char *path, const char *expiry)
{
        struct buf buf = { 0 };

        buf_add_text(&buf, "r\n\n"); /* permission to read, from now on */
        buf_add_text(&buf, expiry);
        buf_add_text(&buf, "\n/blob/");
        buf_add_text(&buf, account);
        buf_add_text(&buf, path);
        buf_add_text(&buf, "\n\n\n\n" AZURE_VERSION "\nb"); /* no policy, address or protocol; one blob */
        buf_add_text(&buf, "\n\n\n\n\n\n\n");             /* no snapshot, no encryption scope, no changed headers of the answer */
        return object_take(&buf);
}

static bool sign(const struct azure_store *azure, const char *path, const char *expiry, char ret_signature[CRYPT_BASE64_SIZE(CRYPT_SHA256_BYTES)])
{
        char *text = string_to_sign(azure->address.account, path, expiry);
        uint8_t digest[CRYPT_SHA256_BYTES];
        bool done = text && crypt_hmac_sha256(azure->credential.key, azure->credential.key_size, text, strlen(text), digest);

        if (done)
                crypt_base64(digest, sizeof digest, ret_signature);
        free(text);
        return done;
}

static void make_expiry(char ret_expiry[EXPIRY_SIZE])
{
        time_t seconds = (time_t)(os->wall_ns() / SECOND_NS + LIFE_S);
        struct tm tm;

        gmtime_r(&seconds, &tm);
        strftime(ret_expiry, EXPIRY_SIZE, "%Y-%m-%dT%H:%M:%SZ", &tm);
}

/* The name of the blob for the signature: not encoded as in a URL. NULL: no memory. */
static char *blob_path(const struct azure_store *azure, const char *key)
{
        struct buf buf = { 0 };

        buf_add_byte(&buf, '/');
        buf_add_text(&buf, azure->address.container);
        buf_add_byte(&buf, '/');
        buf_add_text(&buf, azure->object.prefix);
        object_name_encode(&buf, key);
        return object_take(&buf);
}

static char *url_with_own_sas(const struct azure_store *azure, const char *key)
{
        char expiry[EXPIRY_SIZE], signature[CRYPT_BASE64_SIZE(CRYPT_SHA256_BYTES)];
        char *plain = azure_blob_url(azure, key), *path = blob_path(azure, key);
        struct buf buf = { .is_secret = true };
        bool done;

        make_expiry(expiry);
        done = plain && path && sign(azure, path, expiry, signature);
        if (done) {
                buf_add_text(&buf, plain);
                buf_add_text(&buf, "?sv=" AZURE_VERSION "&sr=b&sp=r&se=");
                url_encode(&buf, expiry, "");
                buf_add_text(&buf, "&sig=");
                url_encode(&buf, signature, "");
        }
        free(plain);
        free(path);
        crypt_forget(signature, sizeof signature);
        return done ? object_take(&buf) : NULL;
}

static enum nebula_status get_bearer(const struct azure_store *azure, char **ret_bearer, struct nebula_error *error)
{
        struct buf buf = { .is_secret = true };
        uint64_t serial;
        char *text;
        enum nebula_status status = object_token_get(azure->credential.identity, 0, &text, &serial, error);

        if (status)
                return status;
        buf_add_text(&buf, "Bearer ");
        buf_add_text(&buf, text);
        object_forget(text);
        *ret_bearer = object_take(&buf);
        return *ret_bearer ? NEBULA_OK : object_no_memory(&azure->object, error);
}

enum nebula_status azure_source(struct object_store *store, const char *key, char **ret_url, char **ret_bearer, struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        enum nebula_status status = azure_find_credential(azure, error);
        char *bearer = NULL;

        if (!status && azure->credential.proof == AZURE_PROOF_TOKEN)
                status = get_bearer(azure, &bearer, error);
        if (status)
                return status;
        *ret_url = azure->credential.proof == AZURE_PROOF_KEY ? url_with_own_sas(azure, key) : azure_blob_url(azure, key);
        if (!*ret_url) {
                object_forget(bearer);
                return object_no_memory(store, error);
        }
        *ret_bearer = bearer;
        return NEBULA_OK;
}
