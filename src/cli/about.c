#include "cli/about.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"

#include <stdlib.h>
#include <string.h>

#include "base/buf.h"

#define ABOUT_FILE "nebula-metadata.json"
#define ABOUT_MAX (1u << 20)

json_t *about_load(struct store *store, const struct manifest *manifest)
{
        const struct manifest_file *file = manifest_find_file(manifest, ABOUT_FILE);
        char key[MANIFEST_KEY_MAX], *text;
        json_t *document;
        size_t size;

        if (!file || manifest_file_key(manifest, file, key, NULL) || store->ops->get(store, key, ABOUT_MAX, &text, &size, NULL, NULL))
                return NULL;
        document = json_loadb(text, size, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
        if (!document) /* a seed, for example, may have more than 64 bits */
                document = json_loadb(text, size, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, NULL);
        free(text);
        if (json_is_object(json_object_get(document, "metrics")) && json_is_object(json_object_get(document, "metadata")))
                return document;
        json_decref(document);
        return NULL;
}

static int is_text(const json_t *value)
{
        return json_is_string(value) && strlen(json_string_value(value)) == json_string_length(value);
}

char *about_text(const json_t *object)
{
        struct buf buf = { 0 };
        const char *name;
        size_t size;
        json_t *value;
        char *text;

        if (!json_object_size(object))
                return NULL;
        json_object_foreach((json_t *)object, name, value) {
                text = json_is_null(value) ? strdup("nan") : is_text(value) ? strdup(json_string_value(value))
                                                          : json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(6));
                buf_add_text(&buf, buf.size ? " " : "");
                buf_add_text(&buf, name);
                buf_add_text(&buf, "=");
                buf_add_text(&buf, text ? text : "?");
                free(text);
        }
        return buf_take(&buf, &size);
}
