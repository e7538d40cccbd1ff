/*
 * crypt.h - the functions that sign requests: SHA-256, HMAC-SHA-256, MD5, RSA, base64 and hex. The only file of the stores with OpenSSL.
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
/* Overwrites a secret. Compilers do not remove this, even if the memory is not used again. */
void crypt_forget(void *data, size_t size);

#endif
