/* Error messages for answers that are not a success. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "base/text.h"
#include "os/os.h"
#include "store/http/xml.h"
#include "store/object/object.h"

#define SKEW_S 600 /* Azure and S3 refuse signatures that are 15 minutes old */

const char *object_skew(const struct http_response *response, char *text, size_t size)
{
        const char *date = http_field(response, "date");
        int64_t theirs, ours = os->wall_ns() / SECOND_NS;

        *text = 0;
        if (date && http_date_parse(date, &theirs) && llabs(ours - theirs) > SKEW_S)
                snprintf(text, size, "this machine's clock is %lld minutes %s the store's: set it",
                         (long long)llabs(ours - theirs) / 60, ours > theirs ? "ahead of" : "behind");
        return text;
}

/* Whether a text may hold a part of a signature or of a URL with one. */
static bool may_be_secret(const char *text)
{
        static const char *const signs[] = { "sig=", "ignature=", "oken=", "redential=", "assword", "AccountKey" };

        for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
                if (strstr(text, signs[i]))
                        return true;
        return false;
}

const char *object_sentence(const struct http_response *response, char *text, size_t size)
{
        struct xml_item item;
        struct xml xml;

        *text = 0;
        if (!response->text || !response->text_size)
                return text;
        xml_init(&xml, response->text, response->text_size);
        while (!*text && xml_next(&xml, &item))
                if (item.kind == XML_END && item.depth == 2 && !strcmp(item.name, "Message"))
                        snprintf(text, size, "%.*s", (int)strcspn(item.text, "\r\n"), item.text);
        xml_done(&xml);
        text_make_printable(text);
        if (may_be_secret(text) || !strcasecmp(text, "Access Denied") || !strcasecmp(text, "Access Denied."))
                *text = 0;
        return text;
}

void object_report_origin(const struct object_store *store, struct nebula_error *error)
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
                object_report_origin(store, error);
        if (error)
                error->http_status = response->status;
        return status;
}
