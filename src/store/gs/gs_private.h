/*
 * gs_private.h - declarations that the files of the Google driver share.
 *
 *      gs.c             opening, and the table of the service
 *      gs_credential.c  HMAC keys and tokens
 *      gs_external.c    tokens for another provider's tokens
 *      gs_aws.c         AWS as such a provider
 *      gs_call.c        one request, and messages about its failure
 *      gs_upload.c      multipart uploads and compositions
 *      gs_copy.c        copies inside the store
 */
#ifndef NB_STORE_GS_GS_PRIVATE_H
#define NB_STORE_GS_GS_PRIVATE_H

#include "store/gs/gs.h"
#include "store/s3/s3_private.h"

#define GS_METADATA "x-goog-meta-nebula"
#define GS_REGION "auto"
#define GS_SCOPE "https://www.googleapis.com/auth/devstorage.read_write"

extern struct object_limits gs_limits;
extern const struct object_sigv4 gs_sigv4;

struct gs_store {
        struct s3_store s3;          /* must be first. Its keys are HMAC keys; NULL: bearer tokens are used */
        struct object_token *bearer; /* guarded by the lock of `s3`, as its keys are */
};

/* gs_credential.c: fills `keys` or `bearer`, and `source`. */
enum nebula_status gs_credential_find(struct object_token **ret_keys, struct object_token **ret_bearer, char ret_source[S3_SOURCE_MAX],
                                      struct nebula_error *error);

/* gs_external.c: of a file of the type "external_account". NULL with error: it lacks something, or no memory. */
struct object_token *gs_external_find(struct json_t *body, const char *path, struct nebula_error *error);

/* gs_aws.c: the subject token of an identity of AWS. NULL with error. `source`: the credential_source of the file. */
char *gs_aws_subject(const struct json_t *source, const char *audience, struct nebula_error *error);

/* gs_call.c */
enum nebula_status gs_send(struct object_store *store, const struct object_call *call, struct http_response *ret_response,
                           struct nebula_error *error);
enum nebula_status gs_fail(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                           struct nebula_error *error);
enum nebula_status gs_reach(struct store *store, struct store_reach *ret_reach, struct nebula_error *error);
void gs_condition(struct object_call *call, enum store_condition condition, const struct store_stamp *seen, char text[OBJECT_QUOTED_SIZE]);

/* gs_upload.c, gs_copy.c: operations */
extern const struct object_steps gs_steps;
enum nebula_status gs_copy(struct store *store, const char *from, const char *to, enum store_condition condition, struct nebula_error *error);

#endif
