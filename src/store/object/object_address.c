/* The parts of a storage path that all object stores share: a container and a prefix. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/object/object.h"

enum nebula_status object_wrong_url(const char *url, const char *what, struct nebula_error *error)
{
        char printed[300];

        url_print(url, printed, sizeof printed);
        return error_set(error, NEBULA_INVALID, 0, "the storage path \"%s\": %s", printed, what);
}

bool object_take_component(const char **path, size_t *path_size, char *ret_text, size_t room)
{
        const char *end;
        size_t size;

        while (*path_size && **path == '/') {
                (*path)++;
                (*path_size)--;
        }
        end = memchr(*path, '/', *path_size);
        size = end ? (size_t)(end - *path) : *path_size;
        if (!size || size >= room)
                return false;
        memcpy(ret_text, *path, size);
        ret_text[size] = 0;
        *path += size;
        *path_size -= size;
        return true;
}

/* Whether the text is a name that needs no decoding. */
static bool is_name(const char *text)
{
        struct buf buf = { 0 };
        bool is_same;

        object_name_encode(&buf, text);
        is_same = !buf.failed && buf.size == strlen(text) && !memcmp(buf.data, text, buf.size);
        buf_done(&buf);
        return is_same;
}

char *object_make_prefix(const char *path, size_t size)
{
        struct buf buf = { 0 };
        char *prefix;

        while (size && *path == '/') {
                path++;
                size--;
        }
        while (size && path[size - 1] == '/')
                size--;
        if (!url_decode(&buf, path, size)) {
                buf_done(&buf);
                return NULL;
        }
        prefix = object_take(&buf);
        if (prefix && *prefix && !(store_key_sound(prefix) && is_name(prefix))) {
                free(prefix);
                return NULL;
        }
        if (prefix && *prefix) {
                buf_add_text(&buf, prefix);
                buf_add_byte(&buf, '/');
                free(prefix);
                prefix = object_take(&buf);
        }
        return prefix;
}

char *object_make_endpoint(const struct url *url)
{
        struct buf buf = { 0 };
        char port[16] = "";

        if (url->port > 0)
                snprintf(port, sizeof port, ":%d", url->port);
        buf_add_text(&buf, url->scheme);
        buf_add_text(&buf, "://");
        buf_add_text(&buf, strchr(url->host, ':') ? "[" : "");
        buf_add_text(&buf, url->host);
        buf_add_text(&buf, strchr(url->host, ':') ? "]" : "");
        buf_add_text(&buf, port);
        return object_take(&buf);
}

char *object_make_endpoint_with_path(const struct url *url)
{
        char *host = object_make_endpoint(url), *endpoint;
        size_t size = url->path_size;
        struct buf buf = { 0 };

        while (size && url->path[size - 1] == '/')
                size--;
        buf_add_text(&buf, host ? host : "");
        buf_add(&buf, url->path, size);
        endpoint = host ? object_take(&buf) : NULL;
        free(host);
        return endpoint;
}

char *object_make_root(const char *before, const char *container, const char *prefix)
{
        struct buf buf = { 0 };
        size_t size = strlen(prefix);

        buf_add_text(&buf, before);
        buf_add_text(&buf, container);
        buf_add_text(&buf, size ? "/" : "");
        buf_add(&buf, prefix, size ? size - 1 : 0);
        return object_take(&buf);
}
