/*
 * signature.h - who vouches for a version: docs/formats.md is the specification.
 *
 * A signature is the object <tag>/.nebula/signature-<sequence>-<key>.json, created once. It names the version (tag, job, run, sequence)
 * and the SHA-256 of each file, and ends with an Ed25519 signature of all bytes before it. It does not say where the version lies, so a copy of
 * the version keeps it.
 *
 * A store carries the policy and the keys (trust.h). Readers ask here:
 *
 *      signature_check    before a version is chosen
 *      signature_take     before a file of it is read: the file gets the SHA-256 that its bytes must have
 *      signature_match    when all of its bytes are in memory
 *
 * manifest_load_file and manifest_read.h call the last two, so that no bytes of a version reach a reader without them.
 *
 * Threads: any.
 */
#ifndef NB_STORE_SIGNATURE_H
#define NB_STORE_SIGNATURE_H

#include <jansson.h>

#include "store/record.h"
#include "store/trust.h"

/* By the policy of the store. NEBULA_CORRUPT: readers must not use the version. */
enum nebula_status signature_check(struct store *store, const struct manifest *manifest, struct nebula_error *error);
/* The same for one file. Sets is_signed and sha256 of `file`, if a signature counts. */
enum nebula_status signature_take(struct store *store, const struct manifest *manifest, struct record_file *file, struct nebula_error *error);
/* NEBULA_CORRUPT: `data` is not what was signed. A file that is not signed matches. */
enum nebula_status signature_match(const struct record_file *file, const void *data, struct nebula_error *error);
/* Whether the store's policy looks at signatures: then no descriptor of a stored file and no part of one is handed out. */
bool signature_counts(const struct store *store);

/* Signs a version with the store's own key. `digests`: of each file, in the order of the manifest. Succeeds if the same signature is there. */
enum nebula_status signature_put(struct store *store, const struct manifest *manifest, const uint8_t (*digests)[32], struct nebula_error *error);
/* Copies the signatures of a version to its copy. If the copy has other numbers, they do not hold for it: *ret_is_lost. */
enum nebula_status signature_copy(struct store *from, const struct manifest *source, struct store *to, const struct manifest *copy, bool *ret_is_lost,
                                  struct nebula_error *error);

/* Readers learn this of each signature of a version. */
struct signature_key {
        char id[TRUST_ID_SIZE];
        bool is_trusted; /* the signature holds, and its key is trusted; false: the key is not known here */
        bool is_wrong;   /* a trusted key's signature that does not hold: something was changed */
        char why[512];   /* of is_wrong */
};
/* All signatures of a version. The caller frees *ret_keys. */
enum nebula_status signature_list(struct store *store, const struct manifest *manifest, struct signature_key **ret_keys, size_t *ret_count,
                                  struct nebula_error *error);

/* Adds the own key's signature to a document that document_format has made. It replaces the text. */
enum nebula_status signature_seal(const struct trust *trust, char **text, size_t *size, struct nebula_error *error);
/* Whether a document has a signature of the own key. */
bool signature_is_own(const struct trust *trust, const char *text, size_t size);

/* The SHA-256 of a file by the signature of a key that the store trusts. NEBULA_NOT_FOUND, NEBULA_CORRUPT: there is no such signature. */
enum nebula_status signature_known(struct store *store, const struct manifest *manifest, const char *name, uint8_t ret_digest[32]);

/* A SHA-256 as 64 hex digits; NULL: no memory. */
json_t *signature_digest_text(const uint8_t digest[32]);
/* False: `text` (NULL: none) is not one. */
bool signature_read_digest(const char *text, uint8_t ret_digest[32]);

void signature_free(struct signature *signature); /* NULL is fine */

#endif
