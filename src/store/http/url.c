#include "store/http/url.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

static bool is_letter(char byte)
{
        return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
}

static bool is_digit(char byte)
{
        return byte >= '0' && byte <= '9';
}

static char lower(char byte)
{
        return byte >= 'A' && byte <= 'Z' ? (char)(byte + ('a' - 'A')) : byte;
}

/* Copies `size` bytes in lower case; each must be a letter, a digit or in `others`. False: one is not, or there is no room. */
static bool copy_name(char *to, size_t room, const char *from, size_t size, const char *others)
{
        if (!size || size >= room)
                return false;
        for (size_t i = 0; i < size; i++) {
                if (!is_letter(from[i]) && !is_digit(from[i]) && (!from[i] || !strchr(others, from[i])))
                        return false;
                to[i] = lower(from[i]);
        }
        to[size] = 0;
        return true;
}

/* *text follows the host: ":" and a number, or nothing. Moves it past the port. */
static bool split_port(const char **text, int *ret_port)
{
        int port = 0, digits = 0;

        *ret_port = -1;
        if (**text != ':')
                return true;
        for ((*text)++; is_digit(**text) && digits < 6; (*text)++, digits++)
                port = port * 10 + (**text - '0');
        if (!digits || port < 1 || port > 65535)
                return false;
        *ret_port = port;
        return true;
}

bool url_split(const char *text, struct url *ret_url)
{
        struct url url = { 0 };
        size_t size = strcspn(text, ":");

        if (!is_letter(*text) || !copy_name(url.scheme, sizeof url.scheme, text, size, "+-.") || strncmp(text + size, "://", 3))
                return false;
        for (const char *byte = text; *byte; byte++)
                if ((unsigned char)*byte <= ' ' || *byte == 127 || *byte == '\\' || *byte == '#')
                        return false;
        text += size + 3;
        if (*text == '[') {
                size = strcspn(++text, "]");
                if (text[size] != ']' || !copy_name(url.host, sizeof url.host, text, size, ":."))
                        return false;
                text += size + 1;
        } else {
                size = strcspn(text, ":/?");
                if (!copy_name(url.host, sizeof url.host, text, size, "-._"))
                        return false;
                text += size;
        }
        if (!split_port(&text, &url.port) || (*text && *text != '/' && *text != '?'))
                return false;
        url.path = text;
        url.path_size = strcspn(text, "?");
        url.query = text[url.path_size] ? text + url.path_size + 1 : "";
        *ret_url = url;
        return true;
}

/* Whether the host is four plain decimal numbers, the first 127: other spellings do not count as loopback. */
static bool is_127(const char *host)
{
        unsigned a, b, c, d;
        char again[32];

        if (sscanf(host, "%3u.%3u.%3u.%3u", &a, &b, &c, &d) != 4 || a != 127 || b > 255 || c > 255 || d > 255)
                return false;
        snprintf(again, sizeof again, "%u.%u.%u.%u", a, b, c, d);
        return !strcmp(again, host);
}

bool url_is_loopback(const struct url *url)
{
        return !strcmp(url->host, "localhost") || !strcmp(url->host, "::1") || is_127(url->host);
}

void url_encode(struct buf *buf, const char *text, const char *keep)
{
        static const char digits[] = "0123456789ABCDEF";

        for (; *text; text++) {
                uint8_t byte = (uint8_t)*text;

                if (is_letter(*text) || is_digit(*text) || strchr("-._~", *text) || strchr(keep, *text)) {
                        buf_add_byte(buf, byte);
                        continue;
                }
                buf_add_byte(buf, '%');
                buf_add_byte(buf, (uint8_t)digits[byte >> 4]);
                buf_add_byte(buf, (uint8_t)digits[byte & 15]);
        }
}

static int hex(char byte)
{
        if (is_digit(byte))
                return byte - '0';
        byte = lower(byte);
        return byte >= 'a' && byte <= 'f' ? byte - 'a' + 10 : -1;
}

bool url_decode(struct buf *buf, const char *text, size_t size)
{
        for (size_t i = 0; i < size; i++) {
                int high, low;

                if (text[i] != '%') {
                        buf_add_byte(buf, (uint8_t)text[i]);
                        continue;
                }
                if (size - i < 3)
                        return false;
                high = hex(text[i + 1]);
                low = hex(text[i + 2]);
                if (high < 0 || low < 0 || !(high | low))
                        return false;
                buf_add_byte(buf, (uint8_t)(high << 4 | low));
                i += 2;
        }
        return true;
}

void url_print(const char *text, char *ret_text, size_t size)
{
        struct url url;
        char port[16] = "";
        bool is_v6;

        if (!url_split(text, &url)) { /* what follows the scheme may be a secret */
                snprintf(ret_text, size, "%.*s://...", strstr(text, "://") ? (int)strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789") : 0, text);
                return;
        }
        if (url.port > 0)
                snprintf(port, sizeof port, ":%d", url.port);
        is_v6 = strchr(url.host, ':') != NULL;
        snprintf(ret_text, size, "%s://%s%s%s%s%.*s", url.scheme, is_v6 ? "[" : "", url.host, is_v6 ? "]" : "", port,
                 (int)url.path_size, url.path);
}
