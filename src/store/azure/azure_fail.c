/* Error messages and advice for answers that are not a success. */
#include <stdio.h>
#include <string.h>

#include "store/azure/azure_private.h"

const char *azure_code(const struct http_response *response)
{
        const char *code = http_field(response, "x-ms-error-code");

        return code ? code : "";
}

static bool is_code(const struct http_response *response, const char *code)
{
        return !strcmp(azure_code(response), code);
}

/* Advice about an answer; "": there is none. */
static const char *advice(const struct azure_store *azure, enum object_deed deed, const struct http_response *response, char *text, size_t size)
{
        const char *source = azure_credential_name(&azure->credential);
        char said[OBJECT_SENTENCE_SIZE];

        *text = 0;
        if ((response->status == 403 || response->status == 401) && *object_skew(response, text, size))
                return text;
        if ((response->status == 403 || response->status == 401) && azure->credential.proof == AZURE_PROOF_SAS)
                azure_sas_advice(&azure->credential, deed, text, size);
        if (*text)
                return text;
        if (is_code(response, "ContainerNotFound") || is_code(response, "FilesystemNotFound"))
                snprintf(text, size, "create the container");
        else if (is_code(response, "AuthorizationPermissionMismatch"))
                snprintf(text, size, "%s may not do this; writing takes the role Storage Blob Data Contributor, or a SAS with sp=rcwdl", source);
        else if (is_code(response, "AuthorizationFailure"))
                snprintf(text, size, "%s is refused; look at the account's network rules and at what the SAS allows", source);
        else if (is_code(response, "KeyBasedAuthenticationNotPermitted"))
                snprintf(text, size, "the account takes no keys, and no SAS of a key: give the job an identity");
        else if (is_code(response, "BlobImmutableDueToPolicy"))
                snprintf(text, size, "the container keeps its blobs from being changed or removed");
        else if (is_code(response, "PathImmutableDueToPolicy"))
                snprintf(text, size, "the container keeps its files from being renamed or removed; az:// writes to it without a rename");
        if (*text)
                return text;
        if (is_code(response, "AuthenticationFailed") || is_code(response, "InvalidAuthenticationInfo") ||
            ((response->status == 403 || response->status == 401) && !*object_sentence(response, said, sizeof said)))
                snprintf(text, size, "%s is not accepted; it may be wrong or expired", source);
        else if (*object_sentence(response, said, sizeof said))
                snprintf(text, size, "\"%s\"%s%s", said, response->status == 403 || response->status == 401 ? "; the store refuses " : "",
                         response->status == 403 || response->status == 401 ? source : "");
        return text;
}

enum nebula_status azure_fail(const struct object_store *store, enum object_deed deed, const char *key, const struct http_response *response,
                              struct nebula_error *error)
{
        const struct azure_store *azure = (const struct azure_store *)store;
        enum nebula_status status = NEBULA_STORAGE;
        char text[OBJECT_SENTENCE_SIZE + 160];

        if (response->status == 404 && deed != OBJECT_LIST &&
            (deed == OBJECT_READ || !(is_code(response, "ContainerNotFound") || is_code(response, "FilesystemNotFound"))))
                status = NEBULA_NOT_FOUND;
        else if (response->status == 413 || is_code(response, "RequestBodyTooLarge") || is_code(response, "OutOfRangeInput"))
                status = NEBULA_INVALID;
        else if (response->status == 507)
                status = NEBULA_NO_SPACE;
        advice(azure, deed, response, text, sizeof text);
        return object_refused(store, status, deed, key, response, azure_code(response), text, error);
}
