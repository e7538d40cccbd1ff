/*
 * crypt.h - the functions that sign requests and versions: SHA-256, HMAC-SHA-256, MD5, RSA, Ed25519, ECDSA, base64 and hex. The only file of the stores
 * with OpenSSL.
 *
 * Threads: no shared state.
 */
#ifndef NB_STORE_HTTP_CRYPT_H
#define NB_STORE_HTTP_CRYPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CRYPT_SHA256_BYTES 32
#define CRYPT_RSA_MAX 1024 /* bytes of a signature by the largest key: 8192 bits */
#define CRYPT_BASE64_SIZE(bytes) (((bytes) + 2) / 3 * 4 + 1) /* of the text for so many bytes, its NUL included */

/* False: OpenSSL has no memory for it. */
bool crypt_sha256(const void *data, size_t size, uint8_t ret_digest[CRYPT_SHA256_BYTES]);
/* In hex digits: AWS's command names files so. Never for a signature. */
#define CRYPT_SHA1_HEX 41
bool crypt_sha1_hex(const void *data, size_t size, char ret_text[CRYPT_SHA1_HEX]);
bool crypt_hmac_sha256(const void *key, size_t key_size, const void *data, size_t size, uint8_t ret_digest[CRYPT_SHA256_BYTES]);
/* In hex. False: no memory, or this machine's OpenSSL has no MD5. */
#define CRYPT_MD5_SIZE 33
bool crypt_md5(const void *data, size_t size, char ret_text[CRYPT_MD5_SIZE]);
/* Signs with an RSA key in PEM, as RS256 of RFC 7518. False: the key cannot be used, or no memory. */
bool crypt_sign_rs256(const char *pem, const void *data, size_t size, uint8_t ret_signature[CRYPT_RSA_MAX], size_t *ret_size);
/* ret_text has CRYPT_BASE64_SIZE(size) bytes. */
void crypt_base64(const void *data, size_t size, char *ret_text);
/* Decodes a text of whole groups of four, padding included. False: it is not base64, or has more than `room` bytes. */
bool crypt_base64_decode(const char *text, void *ret_data, size_t room, size_t *ret_size);
/*
 * Keys that sign versions (Ed25519) and bundles (ECDSA on P-256, with SHA-256). OpenSSL's name of the struct.
 */
struct evp_pkey_st;
enum crypt_key_kind { CRYPT_ED25519, CRYPT_P256, CRYPT_OTHER_KEY };
#define CRYPT_ED25519_BYTES 64    /* of a signature */
#define CRYPT_PUBLIC_BYTES 32     /* of an Ed25519 key */
#define CRYPT_SIGNATURE_MAX 80    /* bytes of a signature of either kind */
/* A new key. NULL: this machine's OpenSSL does not make such keys, or has no memory. */
struct evp_pkey_st *crypt_key_new(enum crypt_key_kind kind);
/* Reads the PEM text of a private key. NULL: there is none, or a password protects it. */
struct evp_pkey_st *crypt_key_private(const char *pem);
/* Reads the next public key of a PEM text, and moves *text behind it. NULL: there is none. */
struct evp_pkey_st *crypt_key_public(const char **text);
struct evp_pkey_st *crypt_key_hold(struct evp_pkey_st *key); /* one more crypt_key_free is needed then */
void crypt_key_free(struct evp_pkey_st *key); /* NULL is fine */
enum crypt_key_kind crypt_key_kind(const struct evp_pkey_st *key);
/* Of an Ed25519 key. */
bool crypt_key_bytes(const struct evp_pkey_st *key, uint8_t ret_bytes[CRYPT_PUBLIC_BYTES]);
/* A NUL-terminated PEM text, which the caller frees, after crypt_forget if it is private. NULL: no memory. */
char *crypt_key_pem(struct evp_pkey_st *key, bool is_private);
bool crypt_key_sign(struct evp_pkey_st *key, const void *data, size_t size, uint8_t ret_signature[CRYPT_SIGNATURE_MAX], size_t *ret_size);
bool crypt_key_verify(struct evp_pkey_st *key, const void *data, size_t size, const void *signature, size_t signature_size);

/* SHA-256 of bytes that come in pieces. NULL: no memory. crypt_sum_end frees it, also if it fails. */
struct evp_md_ctx_st *crypt_sum_begin(void);
bool crypt_sum_add(struct evp_md_ctx_st *sum, const void *data, size_t size);
bool crypt_sum_end(struct evp_md_ctx_st *sum, uint8_t ret_digest[CRYPT_SHA256_BYTES]);

/* Overwrites a secret. Compilers do not remove this, even if the memory is not used again. */
void crypt_forget(void *data, size_t size);

#endif
