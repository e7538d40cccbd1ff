/* Error messages for answers that are not a success. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/object/object.h"

#define SKEW_S 600 /* Azure and S3 refuse signatures that are 15 minutes old */

const char *object_skew(const struct http_response *response, char *text, size_t size)
{
        const char *date = http_field(response, "date");
        int64_t theirs, ours = os->wall_ns() / 1000000000;

        *text = 0;
        if (date && http_date_parse(date, &theirs) && llabs(ours - theirs) > SKEW_S)
                snprintf(text, size, "this machine's clock is %lld minutes %s the store's: set it",
                         (long long)llabs(ours - theirs) / 60, ours > theirs ? "ahead of" : "behind");
        return text;
}

void object_tell_origin(const struct object_store *store, struct nebula_error *error)
{
        struct vars *before = vars_enter(store->vars);
        const char *origin = vars_origin();

        if (*origin && error) {
                error_suffix(error, "; ");
                error_suffix(error, origin);
        }
        vars_leave(before);
}

enum nebula_status object_refused(const struct object_store *store, enum nebula_status status, enum object_deed deed, const char *key,
                                  const struct http_response *response, const char *code, const char *advice, struct nebula_error *error)
{
        static const char *const verbs[] = { "read", "list", "write", "remove", "copy" };

        if (status == NEBULA_NOT_FOUND)
                error_set(error, status, 0, "%.200s/%.200s: there is no such object", store->store.root, key);
        else
                error_set(error, status, 0, "cannot %s %.150s/%.150s: the answer is %d %.60s%s%s", verbs[deed], store->store.root, key,
                          response->status, code, *advice ? ": " : "", advice);
        if (response->status == 401 || response->status == 403 || response->status == 400)
                object_tell_origin(store, error);
        if (error)
                error->http_status = response->status;
        return status;
}
