/* What an answer means that is no success, and what to do about it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/azure/azure_private.h"

#define SKEW_S 600 /* Azure refuses what was signed 15 minutes ago */

const char *azure_code(const struct http_response *response)
{
        const char *code = http_field(response, "x-ms-error-code");

        return code ? code : "";
}

static bool is_code(const struct http_response *response, const char *code)
{
        return !strcmp(azure_code(response), code);
}

/* By how much this machine's clock is off, in words; "" when that is no reason to refuse a signature. */
static const char *skew(const struct http_response *response, char *text, size_t size)
{
        const char *date = http_field(response, "date");
        int64_t theirs, ours = os->wall_ns() / 1000000000;

        *text = 0;
        if (date && http_date_parse(date, &theirs) && llabs(ours - theirs) > SKEW_S)
                snprintf(text, size, "this machine's clock is %lld minutes %s the store's: set it",
                         (long long)llabs(ours - theirs) / 60, ours > theirs ? "ahead of" : "behind");
        return text;
}

/* What to do about an answer; "": nothing is known. */
static const char *advice(const struct azure_store *azure, const struct http_response *response, char *text, size_t size)
{
        const char *source = azure->credential.source;

        *text = 0;
        if ((response->status == 403 || response->status == 401) && *skew(response, text, size))
                return text;
        if (is_code(response, "ContainerNotFound"))
                snprintf(text, size, "create the container");
        else if (is_code(response, "AuthorizationPermissionMismatch"))
                snprintf(text, size, "%s may not do this; writing takes the role Storage Blob Data Contributor, or a SAS with sp=rcwdl", source);
        else if (is_code(response, "AuthorizationFailure"))
                snprintf(text, size, "%s is refused; look at the account's network rules and at what the SAS allows", source);
        else if (response->status == 403 || response->status == 401 || is_code(response, "InvalidAuthenticationInfo"))
                snprintf(text, size, "%s is not accepted; it may be wrong or expired", source);
        else if (is_code(response, "BlobImmutableDueToPolicy"))
                snprintf(text, size, "the container keeps its blobs from being changed or removed");
        return text;
}

enum nebula_status azure_fail(const struct azure_store *azure, enum azure_deed deed, const char *key, const struct http_response *response,
                              struct nebula_error *error)
{
        static const char *const verbs[] = { "read", "list", "write", "remove", "copy" };
        enum nebula_status status = NEBULA_STORAGE;
        char text[256];

        if (response->status == 404 && (deed == AZURE_READ || !is_code(response, "ContainerNotFound")))
                status = NEBULA_NOT_FOUND;
        else if (response->status == 413 || is_code(response, "RequestBodyTooLarge") || is_code(response, "OutOfRangeInput"))
                status = NEBULA_INVALID;
        else if (response->status == 507)
                status = NEBULA_NO_SPACE;
        advice(azure, response, text, sizeof text);
        if (status == NEBULA_NOT_FOUND)
                error_set(error, status, 0, "%.200s/%.200s: there is no such object", azure->address.root, key);
        else
                error_set(error, status, 0, "cannot %s %.150s/%.150s: the answer is %d %.60s%s%s", verbs[deed], azure->address.root, key, response->status,
                          azure_code(response), *text ? ": " : "", text);
        if (error)
                error->http_status = response->status;
        return status;
}
