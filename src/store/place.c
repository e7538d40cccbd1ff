#include "store/place.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "base/text.h"
#include "os/lock.h"
#include "store/http/url.h"

#define KEPT_MAX 64 /* storage paths of one agent that have a signature */

struct kept {
        char *place, *query;
};
static struct lock places_lock = LOCK_INIT(LOCK_STORE_PLACES); /* guards the rest */
static struct kept kept[KEPT_MAX];                            /* newest first */
static size_t kept_count;

void place_forget(char *secret)
{
        if (secret)
                explicit_bzero(secret, strlen(secret));
        free(secret);
}

static bool has_scheme(const char *url, const char *scheme)
{
        size_t size = strlen(scheme);

        return !strncmp(url, scheme, size) && !strncmp(url + size, "://", 3);
}

/* Adds the path without '/' at its ends, with %XX only where a URL needs it. False: the driver refuses such a path. */
static bool add_path(struct buf *buf, const char *path, size_t size)
{
        struct buf plain = { 0 };
        bool is_sound;

        while (size && *path == '/') {
                path++;
                size--;
        }
        while (size && path[size - 1] == '/')
                size--;
        is_sound = url_decode(&plain, path, size) && !plain.failed && text_is_utf8(plain.data ? plain.data : "", plain.size);
        if (is_sound && plain.size)
                buf_add_byte(buf, '/');
        for (size_t i = 0; is_sound && i < plain.size; i++) {
                char byte[2] = { plain.data[i] };
                bool is_plain = (unsigned char)*byte > ' ' && !strchr("%?#\\\177", *byte);

                if (is_plain)
                        buf_add_byte(buf, (uint8_t)*byte);
                else
                        url_encode(buf, byte, "");
        }
        buf_done(&plain);
        return is_sound && !buf->failed;
}

/* Adds what stands before the path. Case counts in the name of a bucket and of a container ("container@account"), and not in a host's. */
static void add_host(struct buf *buf, const char *url, size_t size, bool is_bucket)
{
        const char *host = strstr(url, "://") + 3, *at = memchr(host, '@', (size_t)(url + size - host));
        const char *port = has_scheme(url, "https") ? ":443" : has_scheme(url, "http") ? ":80" : NULL;

        if (port && size > strlen(port) && !strncmp(url + size - strlen(port), port, strlen(port)))
                size -= strlen(port);
        for (const char *byte = url; byte < url + size; byte++) {
                bool is_upper = *byte >= 'A' && *byte <= 'Z';

                buf_add_byte(buf, (uint8_t)(is_upper && !is_bucket && (!at || byte > at) ? *byte + ('a' - 'A') : *byte));
        }
}

/* The normal spelling; NULL: the text stays as it is. */
static char *normalized(const char *url)
{
        static const char *const schemes[] = { "az", "abfs", "abfss", "https", "http", "s3", "gs" };
        bool is_known = false, is_bucket = has_scheme(url, "s3") || has_scheme(url, "gs");
        struct buf buf = { 0 };
        size_t host, path, size;

        for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++)
                is_known = is_known || has_scheme(url, schemes[i]);
        if (!is_known || (strchr(url, '?') && (is_bucket || !strstr(strchr(url, '?'), "sig=")))) /* no signature: the driver refuses it */
                return NULL;
        host = (size_t)(strstr(url, "://") + 3 - url);
        host += strcspn(url + host, "/?");
        path = strcspn(url + host, "?");
        if ((has_scheme(url, "http") || has_scheme(url, "https")) && memchr(url, '@', host)) /* a password: the driver refuses it */
                return NULL;
        add_host(&buf, url, host, is_bucket);
        if (!add_path(&buf, url + host, path)) {
                buf_done(&buf);
                return NULL;
        }
        return buf_take(&buf, &size);
}

void place_normalize(char *url)
{
        char *text = normalized(url);

        if (text && strlen(text) <= strlen(url))
                strcpy(url, text);
        free(text);
}

/* Lock held. kept_count: there is none. */
static size_t find(const char *place)
{
        size_t i = 0;

        while (i < kept_count && strcmp(kept[i].place, place))
                i++;
        return i;
}

void place_keep(const char *url)
{
        const char *query = strchr(url, '?');
        struct kept new = { normalized(url), query ? strdup(query + 1) : NULL }, old = { 0 };
        size_t at;

        if (!new.place || !new.query || !*new.query) {
                free(new.place);
                place_forget(new.query);
                return;
        }
        lock_take(&places_lock);
        at = find(new.place);
        if (at == kept_count && kept_count < KEPT_MAX)
                kept_count++;
        else
                old = kept[at < KEPT_MAX ? at : --at];
        memmove(kept + 1, kept, at * sizeof *kept);
        kept[0] = new;
        lock_give(&places_lock);
        free(old.place);
        place_forget(old.query);
}

char *place_query(const char *url)
{
        char *place = normalized(url), *query = NULL;
        size_t at;

        if (!place)
                return NULL;
        lock_take(&places_lock);
        at = find(place);
        if (at < kept_count)
                query = strdup(kept[at].query);
        lock_give(&places_lock);
        free(place);
        return query;
}

char *place_signed(const char *path)
{
        char *query = place_query(path), *whole = NULL;

        if (!query)
                return strdup(path);
        if (asprintf(&whole, "%s?%s", path, query) < 0)
                whole = NULL;
        place_forget(query);
        return whole;
}
