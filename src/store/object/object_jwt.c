/* JSON web tokens (RFC 7519), signed with an RSA key. A service takes one in exchange for a bearer token. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/http/crypt.h"
#include "store/object/object.h"

#define LIFE_S 3600 /* the longest that Google takes */

/* Base64 for URLs, without padding (RFC 7515). */
static void add_encoded(struct buf *buf, const void *data, size_t size)
{
        char *text = malloc(CRYPT_BASE64_SIZE(size));

        if (!text) {
                buf->failed = true;
                return;
        }
        crypt_base64(data, size, text);
        for (char *digit = text; *digit && *digit != '='; digit++)
                buf_add_byte(buf, (uint8_t)(*digit == '+' ? '-' : *digit == '/' ? '_' : *digit));
        object_forget(text);
}

/* Takes over the object. */
static void add_json(struct buf *buf, json_t *object)
{
        char *text = object ? json_dumps(object, JSON_COMPACT | JSON_SORT_KEYS) : NULL;

        if (text)
                add_encoded(buf, text, strlen(text));
        else
                buf->failed = true;
        free(text);
        json_decref(object);
}

static void add_claims(struct buf *buf, const struct object_jwt *jwt)
{
        json_int_t now_s = (json_int_t)(os->wall_ns() / SECOND_NS);

        add_json(buf, json_pack("{s:s, s:s*, s:s}", "alg", "RS256", "kid", jwt->key_id, "typ", "JWT"));
        buf_add_byte(buf, '.');
        add_json(buf, json_pack("{s:s, s:s, s:s, s:I, s:I}", "iss", jwt->issuer, "scope", jwt->scope, "aud", jwt->audience, "iat", now_s, "exp",
                                now_s + LIFE_S));
}

static enum nebula_status no_memory(struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a token");
}

enum nebula_status object_jwt_sign(const struct object_jwt *jwt, char **ret_text, struct nebula_error *error)
{
        struct buf buf = { .is_secret = true };
        uint8_t signature[CRYPT_RSA_MAX];
        size_t size;
        char *text;

        add_claims(&buf, jwt);
        if (buf.failed) {
                buf_done(&buf);
                return no_memory(error);
        }
        if (!crypt_sign_rs256(jwt->key, buf.data, buf.size, signature, &size)) {
                buf_done(&buf);
                return error_set(error, NEBULA_INVALID, 0, "the private key of %.200s is no RSA key in PEM that can be used", jwt->issuer);
        }
        buf_add_byte(&buf, '.');
        add_encoded(&buf, signature, size);
        text = object_take(&buf);
        if (!text)
                return no_memory(error);
        *ret_text = text;
        return NEBULA_OK;
}

void object_jwt_free(struct object_jwt *jwt)
{
        if (!jwt)
                return;
        object_forget(jwt->key);
        free(jwt->key_id);
        free(jwt->issuer);
        free(jwt->audience);
        free(jwt);
}
