/* Error messages and advice for answers of S3 that are not a success. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "store/s3/s3_private.h"

#define RIGHTS "s3:PutObject, s3:GetObject, s3:DeleteObject, s3:ListBucket and s3:AbortMultipartUpload"

static bool is_one_of(const char *code, const char *const *codes)
{
        for (; *codes; codes++)
                if (!strcmp(code, *codes))
                        return true;
        return false;
}
#define IS_ONE_OF(code, ...) is_one_of(code, (const char *const[]){ __VA_ARGS__, NULL })

/* Advice about an answer; "": there is none. */
static void advise(enum object_deed deed, const struct http_response *response, const char *code, const char *source, const char *rights,
                   char *text, size_t size)
{
        const char *region = http_field(response, "x-amz-bucket-region");
        char said[OBJECT_SENTENCE_SIZE];

        *text = 0;
        if (response->status == 403 && *object_skew(response, text, size))
                return;
        if (IS_ONE_OF(code, "RequestTimeTooSkewed"))
                snprintf(text, size, "this machine's clock differs from the store's: set it");
        else if (IS_ONE_OF(code, "NoSuchBucket"))
                snprintf(text, size, "create the bucket");
        else if (IS_ONE_OF(code, "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "InvalidClientTokenId", "AuthFailure"))
                snprintf(text, size, "%s is not accepted: the key or its secret is wrong", source);
        else if (IS_ONE_OF(code, "ExpiredToken", "InvalidToken", "TokenRefreshRequired"))
                snprintf(text, size, "%s is not accepted: its session has expired", source);
        else if (region || IS_ONE_OF(code, "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"))
                snprintf(text, size, "the bucket is in %s%s: set AWS_REGION", region ? "the region " : "another region", region ? region : "");
        else if (IS_ONE_OF(code, "InvalidObjectState"))
                snprintf(text, size, "a lifecycle rule has moved it to an archive: restore it there first");
        else if (*object_sentence(response, said, sizeof said)) /* of a policy, a KMS key, requester-pays: it names what is missing */
                snprintf(text, size, "\"%s\"%s%s", said, response->status == 403 || response->status == 401 ? "; the store refuses " : "",
                         response->status == 403 || response->status == 401 ? source : "");
        else if (response->status == 403 || response->status == 401)
                snprintf(text, size, "%s may not do this; writing takes %s%s", source, rights,
                         deed == OBJECT_REMOVE ? ". Or an object lock keeps it" : "");
}

enum nebula_status s3_explain(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                              const char *source, const char *rights, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_STORAGE;
        char code[OBJECT_CODE_SIZE], text[OBJECT_SENTENCE_SIZE + 160];

        s3_code(response, code);
        if (response->status == 404 && deed != OBJECT_LIST && (deed == OBJECT_READ || !IS_ONE_OF(code, "NoSuchBucket", "NoSuchUpload")))
                status = NEBULA_NOT_FOUND;
        else if (response->status == 413 || IS_ONE_OF(code, "EntityTooLarge", "KeyTooLongError"))
                status = NEBULA_INVALID;
        else if (response->status == 507 || IS_ONE_OF(code, "QuotaExceeded", "XMinioStorageFull"))
                status = NEBULA_NO_SPACE;
        advise(deed, response, code, source, rights, text, sizeof text);
        return object_refused(store, status, deed, key, response, code, text, error);
}

enum nebula_status s3_fail(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                           struct nebula_error *error)
{
        return s3_explain(store, deed, key, response, ((const struct s3_store *)store)->source, RIGHTS, error);
}
