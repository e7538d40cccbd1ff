#include "base/text.h"

#include <stdint.h>
#include <string.h>

/* Returns how many bytes follow a character's first byte, and the range of the second byte; -1 if no character starts with that byte. */
static int following(uint8_t first, uint8_t *ret_low, uint8_t *ret_high)
{
        *ret_low = 0x80;
        *ret_high = 0xbf;
        if (first < 0x80)
                return 0;
        if (first >= 0xc2 && first <= 0xdf) /* c0, c1: overlong */
                return 1;
        if (first >= 0xe0 && first <= 0xef) {
                if (first == 0xe0)
                        *ret_low = 0xa0; /* else overlong */
                if (first == 0xed)
                        *ret_high = 0x9f; /* else a surrogate */
                return 2;
        }
        if (first >= 0xf0 && first <= 0xf4) {
                if (first == 0xf0)
                        *ret_low = 0x90; /* else overlong */
                if (first == 0xf4)
                        *ret_high = 0x8f; /* else above U+10FFFF */
                return 3;
        }
        return -1;
}

/* Size of the well-formed character at the start of `bytes`; 0 if there is none. */
static size_t character_size(const uint8_t *bytes, size_t size)
{
        uint8_t low, high;
        int count = following(bytes[0], &low, &high);

        if (count < 0 || (size_t)count >= size)
                return 0;
        for (int k = 1; k <= count; k++) {
                if (bytes[k] < low || bytes[k] > high)
                        return 0;
                low = 0x80;
                high = 0xbf;
        }
        return (size_t)count + 1;
}

bool text_is_utf8(const char *text, size_t size)
{
        const uint8_t *bytes = (const uint8_t *)text;

        for (size_t k = 0, length; k < size; k += length) {
                length = character_size(bytes + k, size - k);
                if (!length)
                        return false;
        }
        return true;
}

void text_make_utf8(char *text)
{
        size_t size = strlen(text);

        for (size_t k = 0, length; k < size; k += length ? length : 1) {
                length = character_size((const uint8_t *)text + k, size - k);
                if (!length)
                        text[k] = '?';
        }
}

static uint32_t character_at(const uint8_t *bytes, size_t size)
{
        static const uint8_t first_bits[] = { 0, 0x7f, 0x1f, 0x0f, 0x07 };
        uint32_t character = bytes[0] & first_bits[size];

        for (size_t k = 1; k < size; k++)
                character = character << 6 | (bytes[k] & 0x3f);
        return character;
}

static bool is_hidden(uint32_t character)
{
        /* Control characters, and those of Unicode that have no width or that turn their neighbours around. */
        static const struct {
                uint16_t first, last;
        } ranges[] = { { 0x00, 0x1f },     { 0x7f, 0x9f },     { 0xad, 0xad },     { 0x61c, 0x61c },   { 0x115f, 0x115f }, { 0x180e, 0x180e },
                       { 0x200b, 0x200f }, { 0x2028, 0x202e }, { 0x2060, 0x206f }, { 0xfeff, 0xfeff }, { 0xfff9, 0xfffb } };

        for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
                if (character >= ranges[i].first && character <= ranges[i].last)
                        return true;
        return false;
}

void text_replace_hidden(char *text, char by)
{
        char *end = text;

        text_make_utf8(text);
        for (size_t length; *text; text += length) {
                length = character_size((const uint8_t *)text, strlen(text));
                if (is_hidden(character_at((const uint8_t *)text, length))) {
                        *end++ = by;
                } else {
                        memmove(end, text, length);
                        end += length;
                }
        }
        *end = '\0';
}

void text_make_printable(char *text)
{
        text_replace_hidden(text, '?');
}

bool text_find_hidden(const char *text, size_t size, size_t *ret_at, size_t *ret_length, uint32_t *ret_character)
{
        for (size_t k = 0, length; k < size; k += length) {
                uint32_t character;

                length = character_size((const uint8_t *)text + k, size - k);
                if (!length)
                        return false;
                character = character_at((const uint8_t *)text + k, length);
                if (character >= 0x7f && is_hidden(character)) {
                        *ret_at = k;
                        *ret_length = length;
                        *ret_character = character;
                        return true;
                }
        }
        return false;
}

bool text_is_formula(const char *cell)
{
        static const char *const starts[] = { "=", "+", "-", "@", "\xef\xbc\x9d", "\xef\xbc\x8b", "\xef\xbc\x8d", "\xef\xbc\xa0" };

        cell += strspn(cell, "' ");
        for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
                if (!strncmp(cell, starts[i], strlen(starts[i])))
                        return true;
        return false;
}

const char *text_cell_content(const char *cell)
{
        return *cell == '\'' && text_is_formula(cell) ? cell + 1 : cell;
}

const char *text_local_path(const char *url)
{
        static const char scheme[] = "file://";
        size_t length = sizeof scheme - 1;

        return strncmp(url, scheme, length) ? url : url + length;
}
