/*
 * url.h - URLs of object stores: their parts, their encoding, and their printing without secrets.
 *
 *      if (url_split(text, &url))
 *              ... url.host, url.port, url.path, url.query ...
 *
 * libcurl parses the same text, and both parsers must find the same host. So this one refuses user names, backslashes, blanks and
 * control bytes.
 *
 * Threads: no shared state.
 */
#ifndef NB_STORE_HTTP_URL_H
#define NB_STORE_HTTP_URL_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

#define URL_HOST_MAX 256

struct url {
        char scheme[16];         /* in lower case */
        char host[URL_HOST_MAX]; /* in lower case; without the brackets of an IPv6 address */
        int port;                /* -1: the scheme's own */
        const char *path;        /* within the text that was split: "" or begins with '/' */
        size_t path_size;        /* bytes of the path; the query follows */
        const char *query;       /* after '?'; "" when there is none */
};

/* False: the text is not a URL, or one that this reader refuses, for instance with a fragment ("#..."). */
bool url_split(const char *text, struct url *ret_url);
/* Whether the host is this machine's loopback interface: "localhost", 127.0.0.0/8 or ::1. */
bool url_is_loopback(const struct url *url);

/* Adds `text` with %XX for every byte but letters, digits, "-._~" and those in `keep`. */
void url_encode(struct buf *buf, const char *text, const char *keep);
/* Adds the text with each %XX decoded. False: a '%' without two hex digits, or %00. */
bool url_decode(struct buf *buf, const char *text, size_t size);

/* The URL for messages and logs, without user name, query and fragment, which may hold secrets. Of a text that is
 * not a URL it prints "SCHEME://...". */
void url_print(const char *text, char *ret_text, size_t size);

#endif
