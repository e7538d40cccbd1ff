/*
 * Names of objects, the same in all stores. A name is the key, so that other programs find a checkpoint's files, with these exceptions:
 *   - Azure refuses control characters and bytes that are not UTF-8, and turns '\' into '/'. The name has %XX for such bytes.
 *   - Azure drops a dot at the end of a component. The name has "%2E" after such a dot. It keeps the dot itself, because Azure lists
 *     names in order. So names sort as keys do, except for bytes below '%' and '/' after such a dot.
 *   - The name has %25 for a '%' of the key that would look like one of these.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "store/object/object.h"

#define NAME_MAX_LENGTH 1024
#define COMPONENT_MAX_LENGTH 254

static bool ends_component(char byte)
{
        return !byte || byte == '/';
}

/* The bytes of the character at `text`, 1 to 4; 0: its first byte must be escaped in a name. */
static size_t plain_size(const char *text)
{
        const unsigned char *bytes = (const unsigned char *)text;
        size_t size;

        if (*bytes < 0x80)
                return *bytes >= 0x20 && *bytes != 0x7f && *bytes != '\\' && !(*bytes == '.' && ends_component(text[1]));
        size = *bytes >= 0xf0 ? 4 : *bytes >= 0xe0 ? 3 : 2;
        if (strnlen(text, size) < size || !text_is_utf8(text, size))
                return 0;
        if (*bytes == 0xc2 && bytes[1] < 0xa0) /* more control characters */
                return 0;
        return *bytes == 0xef && bytes[1] == 0xbf && bytes[2] >= 0xbe ? 0 : size; /* XML does not allow U+FFFE and U+FFFF */
}

static int hex(char digit)
{
        return digit >= '0' && digit <= '9' ? digit - '0' : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10 : -1;
}

/* Whether the '%' at `text` begins "%XX" for a byte that a name cannot have. Any number of "25" may follow the '%'; *ret_is_bare: none
 * does. */
static bool is_escape(const char *text, bool *ret_is_bare, uint8_t *ret_byte)
{
        const char *digits = text + 1;
        int high, low, byte;

        while (!strncmp(digits, "25", 2))
                digits += 2;
        high = hex(digits[0]);
        low = high < 0 ? -1 : hex(digits[1]);
        byte = low < 0 ? -1 : high << 4 | low;
        *ret_is_bare = digits == text + 1;
        *ret_byte = (uint8_t)byte;
        return byte >= 0x7f || (byte >= 0 && byte < 0x20) || byte == '\\' || (byte == '.' && ends_component(digits[2]));
}

static void add_hex(struct buf *buf, uint8_t byte)
{
        static const char digits[] = "0123456789ABCDEF";

        buf_add_byte(buf, '%');
        buf_add_byte(buf, (uint8_t)digits[byte >> 4]);
        buf_add_byte(buf, (uint8_t)digits[byte & 15]);
}

void object_name_encode(struct buf *buf, const char *key)
{
        bool is_bare;
        uint8_t byte;

        while (*key) {
                size_t size = *key == '%' && is_escape(key, &is_bare, &byte) ? 0 : plain_size(key);

                if (size || *key == '.')
                        buf_add(buf, key, size ? size : 1);
                if (!size)
                        add_hex(buf, (uint8_t)*key);
                key += size ? size : 1;
        }
}

void object_name_decode(struct buf *buf, const char *name)
{
        bool is_bare;
        uint8_t byte;

        while (*name) {
                bool escapes = *name == '%' && is_escape(name, &is_bare, &byte);

                if (!escapes || !is_bare)
                        buf_add_byte(buf, (uint8_t)*name);
                else if (byte != '.') /* the escape follows the dot */
                        buf_add_byte(buf, byte);
                name += escapes ? 3 : 1;
        }
}

void object_name_begin(struct buf *buf, const char *prefix)
{
        const char *slash = strrchr(prefix, '/'), *last = slash ? slash + 1 : prefix;
        struct buf parents = { 0 };
        size_t size;

        buf_add(&parents, prefix, (size_t)(last - prefix));
        buf_add_byte(&parents, 0);
        if (parents.failed)
                buf->failed = true;
        else
                object_name_encode(buf, parents.data);
        buf_done(&parents);
        for (; *last && *last != '%' && (size = plain_size(last)); last += size)
                buf_add(buf, last, size);
}

/* Counts bytes or characters. In UTF-8 each character has one byte that is not 10xxxxxx. */
static size_t length_of(const struct object_service *service, const char *text, size_t size)
{
        size_t count = 0;

        for (size_t i = 0; i < size; i++)
                count += service->counts_bytes || ((unsigned char)text[i] & 0xC0) != 0x80;
        return count;
}

static enum nebula_status invalid(const struct object_store *store, const char *key, const char *why, struct nebula_error *error)
{
        return error_set(error, NEBULA_INVALID, 0, "\"%.200s\" is not a key of an object of %.200s: %s", key, store->store.root, why);
}

enum nebula_status object_check_key(const struct object_store *store, const char *key, struct nebula_error *error)
{
        const struct object_service *service = store->service;
        size_t before = length_of(service, store->prefix, strlen(store->prefix)), length = 0;
        const char *why = NULL;
        struct buf buf = { 0 };
        char *name;

        if (!store_key_sound(key))
                return invalid(store, key, "it is no path", error);
        object_name_encode(&buf, key);
        name = object_take(&buf);
        if (!name)
                return object_no_memory(store, error);
        if (before + length_of(service, name, strlen(name)) > NAME_MAX_LENGTH)
                why = service->counts_bytes ? "with what stands before it, it has more than 1024 bytes"
                                            : "with what stands before it, it has more than 1024 characters";
        for (const char *part = name; *part && !service->counts_bytes; part += length + (part[length] == '/')) {
                length = strcspn(part, "/");
                if (length_of(service, part, length) > COMPONENT_MAX_LENGTH)
                        why = "a component has more than 254 characters";
        }
        free(name);
        return why ? invalid(store, key, why, error) : NEBULA_OK;
}
