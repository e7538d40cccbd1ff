#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "image/image.h"

#define NAME_BYTES_MAX 255u /* NAME_MAX of all common file systems */

/* Names that Nebula or the system uses in these directories. A leading '.' is encoded only for these: other names
 * such as ".metadata" must keep their spelling, because programs look for them. */
static bool is_reserved(const char *name)
{
        return !strcmp(name, "latest") || !strcmp(name, ".") || !strcmp(name, "..") || !strncmp(name, ".nebula", 7);
}

static bool must_encode(const char *name, size_t index)
{
        unsigned char byte = (unsigned char)name[index];

        if (byte < 0x20 || byte == 0x7f || byte == '/' || byte == '%')
                return true;
        return index == 0 && is_reserved(name);
}

enum nebula_status name_encode(const char *name, char ret_text[256], struct nebula_error *error)
{
        static const char digits[] = "0123456789ABCDEF";
        char text[NAME_BYTES_MAX + 1];
        size_t size = strlen(name), used = 0;

        if (size == 0)
                return error_set(error, NEBULA_INVALID, 0, "a tag or file name is empty");
        if (!text_is_utf8(name, size))
                return error_set(error, NEBULA_INVALID, 0, "a tag or file name is not valid UTF-8");
        for (size_t k = 0; k < size; k++) {
                unsigned char byte = (unsigned char)name[k];
                bool encode = must_encode(name, k);

                if (used + (encode ? 3 : 1) > NAME_BYTES_MAX)
                        return error_set(error, NEBULA_INVALID, 0, "the tag or file name \"%.80s...\" is longer than %u bytes",
                                         name, NAME_BYTES_MAX);
                if (encode) {
                        text[used++] = '%';
                        text[used++] = digits[byte >> 4];
                        text[used++] = digits[byte & 15];
                } else {
                        text[used++] = name[k];
                }
        }
        text[used] = '\0';
        memcpy(ret_text, text, used + 1);
        return NEBULA_OK;
}

static int hex_digit(char digit)
{
        if (digit >= '0' && digit <= '9')
                return digit - '0';
        if (digit >= 'A' && digit <= 'F')
                return digit - 'A' + 10;
        return -1;
}

enum nebula_status name_decode(const char *text, char ret_name[256], struct nebula_error *error)
{
        char name[NAME_BYTES_MAX + 1], again[NAME_BYTES_MAX + 1];
        size_t used = 0;

        for (const char *at = text; *at; at++) {
                int byte = (unsigned char)*at;

                if (byte == '%') {
                        int high = hex_digit(at[1]), low = high < 0 ? -1 : hex_digit(at[2]);

                        byte = low < 0 ? 0 : high << 4 | low;
                        at += 2;
                }
                if (byte == 0 || used == NAME_BYTES_MAX)
                        goto invalid;
                name[used++] = (char)byte;
        }
        name[used] = '\0';
        /* A name has exactly one encoded form: any other text was not written by Nebula. */
        if (name_encode(name, again, NULL) != NEBULA_OK || strcmp(again, text) != 0)
                goto invalid;
        memcpy(ret_name, name, used + 1);
        return NEBULA_OK;
invalid:
        return error_set(error, NEBULA_INVALID, 0, "\"%.255s\" is not the encoded form of a name", text);
}

bool name_follows_step(const char *tag)
{
        static const char prefix[] = "global_step";
        size_t length = strlen(prefix);

        return !strncmp(tag, prefix, length) && tag[length] && !tag[length + strspn(tag + length, "0123456789")] && name_step(tag) >= 0;
}

int64_t name_step(const char *tag)
{
        size_t end = strlen(tag), start = end;
        int64_t step = 0;

        while (start > 0 && tag[start - 1] >= '0' && tag[start - 1] <= '9')
                start--;
        if (start == end)
                return -1;
        for (size_t k = start; k < end; k++) {
                if (__builtin_mul_overflow(step, 10, &step) || __builtin_add_overflow(step, tag[k] - '0', &step))
                        return -1;
        }
        return step;
}
