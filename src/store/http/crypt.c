#include "store/http/crypt.h"

#include <limits.h>
#include <openssl/crypto.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/pem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool crypt_sha256(const void *data, size_t size, uint8_t ret_digest[CRYPT_SHA256_BYTES])
{
        unsigned length = CRYPT_SHA256_BYTES;

        return EVP_Digest(data, size, ret_digest, &length, EVP_sha256(), NULL) == 1;
}

bool crypt_sha1_hex(const void *data, size_t size, char ret_text[CRYPT_SHA1_HEX])
{
        uint8_t digest[EVP_MAX_MD_SIZE];
        unsigned length = sizeof digest;

        if (EVP_Digest(data, size, digest, &length, EVP_sha1(), NULL) != 1)
                return false;
        for (unsigned i = 0; i < (CRYPT_SHA1_HEX - 1) / 2; i++)
                snprintf(ret_text + 2 * i, 3, "%02x", digest[i]);
        return true;
}

bool crypt_hmac_sha256(const void *key, size_t key_size, const void *data, size_t size, uint8_t ret_digest[CRYPT_SHA256_BYTES])
{
        unsigned length = CRYPT_SHA256_BYTES;

        return key_size <= INT_MAX && HMAC(EVP_sha256(), key, (int)key_size, data, size, ret_digest, &length) != NULL;
}

bool crypt_md5(const void *data, size_t size, char ret_text[CRYPT_MD5_SIZE])
{
        uint8_t digest[EVP_MAX_MD_SIZE];
        unsigned length = 0;

        if (EVP_Digest(data, size, digest, &length, EVP_md5(), NULL) != 1 || length != (CRYPT_MD5_SIZE - 1) / 2)
                return false;
        for (unsigned i = 0; i < length; i++)
                snprintf(ret_text + 2 * i, 3, "%02x", digest[i]);
        return true;
}

/* OpenSSL would ask a person for it on the terminal. */
static int no_password(char *to, int size, int is_written, void *argument)
{
        return -1;
}

bool crypt_sign_rs256(const char *pem, const void *data, size_t size, uint8_t ret_signature[CRYPT_RSA_MAX], size_t *ret_size)
{
        size_t length = strlen(pem);
        BIO *text = length <= INT_MAX ? BIO_new_mem_buf(pem, (int)length) : NULL;
        EVP_PKEY *key = text ? PEM_read_bio_PrivateKey(text, NULL, no_password, NULL) : NULL;
        EVP_MD_CTX *context = EVP_MD_CTX_new();
        bool is_signed = false;

        *ret_size = CRYPT_RSA_MAX;
        if (key && context && EVP_PKEY_base_id(key) == EVP_PKEY_RSA && EVP_PKEY_size(key) <= CRYPT_RSA_MAX)
                is_signed = EVP_DigestSignInit(context, NULL, EVP_sha256(), NULL, key) == 1 &&
                            EVP_DigestSign(context, ret_signature, ret_size, data, size) == 1;
        EVP_MD_CTX_free(context);
        EVP_PKEY_free(key);
        BIO_free(text);
        return is_signed;
}

struct evp_pkey_st *crypt_key_new(enum crypt_key_kind kind)
{
        EVP_PKEY_CTX *context = EVP_PKEY_CTX_new_id(kind == CRYPT_P256 ? EVP_PKEY_EC : EVP_PKEY_ED25519, NULL);
        EVP_PKEY *key = NULL;

        if (!context || EVP_PKEY_keygen_init(context) != 1 ||
            (kind == CRYPT_P256 && EVP_PKEY_CTX_set_ec_paramgen_curve_nid(context, NID_X9_62_prime256v1) != 1) ||
            EVP_PKEY_keygen(context, &key) != 1)
                key = NULL;
        EVP_PKEY_CTX_free(context);
        return key;
}

struct evp_pkey_st *crypt_key_private(const char *pem)
{
        size_t length = strlen(pem);
        BIO *text = length <= INT_MAX ? BIO_new_mem_buf(pem, (int)length) : NULL;
        EVP_PKEY *key = text ? PEM_read_bio_PrivateKey(text, NULL, no_password, NULL) : NULL;

        BIO_free(text);
        return key;
}

struct evp_pkey_st *crypt_key_public(const char **text)
{
        static const char begin[] = "-----BEGIN PUBLIC KEY-----", end[] = "-----END PUBLIC KEY-----";
        const char *first = strstr(*text, begin), *last = first ? strstr(first, end) : NULL;
        size_t length = last ? (size_t)(last - first) + sizeof end - 1 : 0;
        BIO *bio = length && length <= INT_MAX ? BIO_new_mem_buf(first, (int)length) : NULL;
        EVP_PKEY *key = bio ? PEM_read_bio_PUBKEY(bio, NULL, no_password, NULL) : NULL;

        if (length)
                *text = first + length;
        BIO_free(bio);
        return key;
}

struct evp_pkey_st *crypt_key_hold(struct evp_pkey_st *key)
{
        EVP_PKEY_up_ref(key);
        return key;
}

void crypt_key_free(struct evp_pkey_st *key)
{
        EVP_PKEY_free(key);
}

enum crypt_key_kind crypt_key_kind(const struct evp_pkey_st *key)
{
        char name[32];
        size_t length;

        if (EVP_PKEY_base_id(key) == EVP_PKEY_ED25519)
                return CRYPT_ED25519;
        if (EVP_PKEY_base_id(key) == EVP_PKEY_EC && EVP_PKEY_get_group_name(key, name, sizeof name, &length) == 1 && !strcmp(name, SN_X9_62_prime256v1))
                return CRYPT_P256;
        return CRYPT_OTHER_KEY;
}

bool crypt_key_bytes(const struct evp_pkey_st *key, uint8_t ret_bytes[CRYPT_PUBLIC_BYTES])
{
        size_t size = CRYPT_PUBLIC_BYTES;

        return EVP_PKEY_get_raw_public_key(key, ret_bytes, &size) == 1 && size == CRYPT_PUBLIC_BYTES;
}

char *crypt_key_pem(struct evp_pkey_st *key, bool is_private)
{
        BIO *bio = BIO_new(BIO_s_secmem());
        char *data, *text = NULL;
        long size;

        if (bio && (is_private ? PEM_write_bio_PrivateKey(bio, key, NULL, NULL, 0, NULL, NULL) : PEM_write_bio_PUBKEY(bio, key)) == 1 &&
            (size = BIO_get_mem_data(bio, &data)) > 0)
                text = strndup(data, (size_t)size);
        BIO_free(bio);
        return text;
}

bool crypt_key_sign(struct evp_pkey_st *key, const void *data, size_t size, uint8_t ret_signature[CRYPT_SIGNATURE_MAX], size_t *ret_size)
{
        EVP_MD_CTX *context = EVP_MD_CTX_new();
        const EVP_MD *digest = crypt_key_kind(key) == CRYPT_ED25519 ? NULL : EVP_sha256();
        bool is_signed;

        *ret_size = CRYPT_SIGNATURE_MAX;
        is_signed = context && EVP_DigestSignInit(context, NULL, digest, NULL, key) == 1 &&
                    EVP_DigestSign(context, ret_signature, ret_size, data, size) == 1;
        EVP_MD_CTX_free(context);
        return is_signed;
}

bool crypt_key_verify(struct evp_pkey_st *key, const void *data, size_t size, const void *signature, size_t signature_size)
{
        EVP_MD_CTX *context = EVP_MD_CTX_new();
        const EVP_MD *digest = crypt_key_kind(key) == CRYPT_ED25519 ? NULL : EVP_sha256();
        bool is_sound = context && EVP_DigestVerifyInit(context, NULL, digest, NULL, key) == 1 &&
                        EVP_DigestVerify(context, signature, signature_size, data, size) == 1;

        EVP_MD_CTX_free(context);
        return is_sound;
}

struct evp_md_ctx_st *crypt_sum_begin(void)
{
        EVP_MD_CTX *sum = EVP_MD_CTX_new();

        if (sum && EVP_DigestInit_ex(sum, EVP_sha256(), NULL) == 1)
                return sum;
        EVP_MD_CTX_free(sum);
        return NULL;
}

bool crypt_sum_add(struct evp_md_ctx_st *sum, const void *data, size_t size)
{
        return EVP_DigestUpdate(sum, data, size) == 1;
}

bool crypt_sum_end(struct evp_md_ctx_st *sum, uint8_t ret_digest[CRYPT_SHA256_BYTES])
{
        unsigned length = CRYPT_SHA256_BYTES;
        bool is_done = EVP_DigestFinal_ex(sum, ret_digest, &length) == 1;

        EVP_MD_CTX_free(sum);
        return is_done;
}

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void crypt_base64(const void *data, size_t size, char *ret_text)
{
        const uint8_t *bytes = data;

        for (size_t i = 0; i < size; i += 3) {
                size_t left = size - i;
                uint32_t group = (uint32_t)bytes[i] << 16 | (left > 1 ? (uint32_t)bytes[i + 1] << 8 : 0) | (left > 2 ? bytes[i + 2] : 0);

                *ret_text++ = alphabet[group >> 18];
                *ret_text++ = alphabet[group >> 12 & 63];
                *ret_text++ = left > 1 ? alphabet[group >> 6 & 63] : '=';
                *ret_text++ = left > 2 ? alphabet[group & 63] : '=';
        }
        *ret_text = 0;
}

/* The value of a digit; 64: padding; 65: neither. */
static unsigned value_of(char digit)
{
        const char *found = digit ? strchr(alphabet, digit) : NULL;

        return found ? (unsigned)(found - alphabet) : digit == '=' ? 64 : 65;
}

bool crypt_base64_decode(const char *text, void *ret_data, size_t room, size_t *ret_size)
{
        size_t length = strlen(text), size = 0;
        uint8_t *bytes = ret_data;

        if (length % 4)
                return false;
        for (size_t i = 0; i < length; i += 4) {
                bool is_last = i + 4 == length;
                uint32_t group = 0;
                size_t count = 3;

                for (size_t k = 0; k < 4; k++) {
                        unsigned value = value_of(text[i + k]);

                        if (value > 64 || (value == 64 && !(is_last && k >= 2 && (k == 3 || text[i + 3] == '='))))
                                return false;
                        if (value == 64)
                                count--;
                        group = group << 6 | (value & 63);
                }
                if (count > room - size)
                        return false;
                for (size_t k = 0; k < count; k++)
                        bytes[size++] = (uint8_t)(group >> (16 - 8 * k));
        }
        *ret_size = size;
        return true;
}

void crypt_forget(void *data, size_t size)
{
        OPENSSL_cleanse(data, size);
}
