#include "store/http/xml.h"

#include <stdint.h>
#include <string.h>

static bool broken(struct xml *xml)
{
        xml->is_broken = true;
        return false;
}

static bool is_blank(char byte)
{
        return byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r';
}

static bool begins(const struct xml *xml, const char *text)
{
        size_t size = strlen(text);

        return (size_t)(xml->end - xml->at) >= size && !memcmp(xml->at, text, size);
}

/* Moves past the next `text`. */
static bool skip_to(struct xml *xml, const char *text)
{
        const char *found = memmem(xml->at, (size_t)(xml->end - xml->at), text, strlen(text));

        if (!found)
                return broken(xml);
        xml->at = found + strlen(text);
        return true;
}

void xml_init(struct xml *xml, const char *text, size_t size)
{
        *xml = (struct xml){ .at = text, .end = text + size, .text.is_secret = true }; /* secret, because a service lends keys in XML */
        if (begins(xml, "\xEF\xBB\xBF"))
                xml->at += 3;
        if (begins(xml, "<?xml"))
                skip_to(xml, "?>");
}

static void add_character(struct buf *buf, uint32_t character)
{
        if (character < 0x80) {
                buf_add_byte(buf, (uint8_t)character);
        } else if (character < 0x800) {
                buf_add_byte(buf, (uint8_t)(0xC0 | character >> 6));
                buf_add_byte(buf, (uint8_t)(0x80 | (character & 63)));
        } else if (character < 0x10000) {
                buf_add_byte(buf, (uint8_t)(0xE0 | character >> 12));
                buf_add_byte(buf, (uint8_t)(0x80 | (character >> 6 & 63)));
                buf_add_byte(buf, (uint8_t)(0x80 | (character & 63)));
        } else {
                buf_add_byte(buf, (uint8_t)(0xF0 | character >> 18));
                buf_add_byte(buf, (uint8_t)(0x80 | (character >> 12 & 63)));
                buf_add_byte(buf, (uint8_t)(0x80 | (character >> 6 & 63)));
                buf_add_byte(buf, (uint8_t)(0x80 | (character & 63)));
        }
}

/* 0 to 15; 16: no digit. */
static uint32_t digit_of(char byte)
{
        if (byte >= '0' && byte <= '9')
                return (uint32_t)(byte - '0');
        if (byte >= 'a' && byte <= 'f')
                return (uint32_t)(byte - 'a' + 10);
        return byte >= 'A' && byte <= 'F' ? (uint32_t)(byte - 'A' + 10) : 16;
}

/* Adds the character "#65" or "#x41". False: XML does not allow it. */
static bool add_numbered(struct buf *buf, const char *text, size_t size)
{
        bool is_hex = size > 1 && text[1] == 'x';
        size_t first = is_hex ? 2 : 1;
        uint32_t base = is_hex ? 16 : 10, value = 0;

        if (size == first || size > first + 7)
                return false;
        for (size_t i = first; i < size; i++) {
                if (digit_of(text[i]) >= base)
                        return false;
                value = value * base + digit_of(text[i]);
        }
        if (!value || value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF))
                return false;
        add_character(buf, value);
        return true;
}

/* at is on '&'. */
static bool take_entity(struct xml *xml)
{
        static const struct {
                const char *name;
                char byte;
        } named[] = { { "lt", '<' }, { "gt", '>' }, { "amp", '&' }, { "quot", '"' }, { "apos", '\'' } };
        const char *name = xml->at + 1, *end = memchr(name, ';', (size_t)(xml->end - name));
        size_t size;

        if (!end)
                return broken(xml);
        size = (size_t)(end - name);
        xml->at = end + 1;
        if (size && *name == '#')
                return add_numbered(&xml->text, name, size) || broken(xml);
        for (size_t i = 0; i < sizeof named / sizeof *named; i++)
                if (size == strlen(named[i].name) && !memcmp(name, named[i].name, size)) {
                        buf_add_byte(&xml->text, (uint8_t)named[i].byte);
                        return true;
                }
        return broken(xml);
}

/* Takes the text up to the next tag. Outside the outermost element only blanks are allowed. */
static bool take_text(struct xml *xml)
{
        while (xml->at < xml->end && *xml->at != '<') {
                if (!xml->depth && !is_blank(*xml->at))
                        return broken(xml);
                if (*xml->at == '&') {
                        if (!take_entity(xml))
                                return false;
                        continue;
                }
                if (!*xml->at)
                        return broken(xml);
                if (xml->depth)
                        buf_add_byte(&xml->text, (uint8_t)*xml->at);
                xml->at++;
        }
        return true;
}

static bool is_name_byte(char byte)
{
        return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || (byte >= '0' && byte <= '9') || byte == '-' ||
               byte == '_' || byte == '.' || byte == ':';
}

/* at is on the first byte of a name; moves past it. */
static bool take_name(struct xml *xml, char ret_name[XML_NAME_MAX])
{
        size_t size = 0;

        while (xml->at + size < xml->end && is_name_byte(xml->at[size]))
                size++;
        if (!size || size >= XML_NAME_MAX)
                return broken(xml);
        memcpy(ret_name, xml->at, size);
        ret_name[size] = 0;
        xml->at += size;
        return true;
}

/* at is behind the name: attributes, and '>' or '/>'. A '>' in quotes belongs to an attribute. */
static bool take_attributes(struct xml *xml, struct xml_item *item)
{
        char quote = 0;

        item->attributes = xml->at;
        for (; xml->at < xml->end && (quote || *xml->at != '>'); xml->at++) {
                if (!quote && (*xml->at == '"' || *xml->at == '\''))
                        quote = *xml->at;
                else if (*xml->at == quote)
                        quote = 0;
                else if (*xml->at == '<' || !*xml->at)
                        return broken(xml);
        }
        if (xml->at == xml->end)
                return broken(xml);
        item->attributes_size = (size_t)(xml->at - item->attributes);
        xml->closes = item->attributes_size && xml->at[-1] == '/';
        if (xml->closes)
                item->attributes_size--;
        xml->at++;
        return true;
}

/* at is behind '<'. */
static bool take_begin(struct xml *xml, struct xml_item *item)
{
        if (xml->depth == XML_DEPTH_MAX || (!xml->depth && xml->any) || !take_name(xml, xml->names[xml->depth]) || !take_attributes(xml, item))
                return broken(xml);
        xml->any = true;
        item->kind = XML_BEGIN;
        item->name = xml->names[xml->depth++];
        item->depth = xml->depth;
        item->text = "";
        xml->text.size = 0;
        return true;
}

static bool end_element(struct xml *xml, struct xml_item *item)
{
        buf_add_byte(&xml->text, 0);
        if (xml->text.failed) {
                xml->no_memory = true;
                return false;
        }
        item->kind = XML_END;
        item->depth = xml->depth--;
        item->name = xml->names[xml->depth];
        item->text = xml->text.data;
        item->attributes = "";
        xml->text.size = 0; /* in an element with text and elements, only the text after the last element stays; no reader uses it */
        return true;
}

/* at is behind '</'. */
static bool take_end(struct xml *xml, struct xml_item *item)
{
        char name[XML_NAME_MAX];

        if (!xml->depth || !take_name(xml, name))
                return broken(xml);
        while (xml->at < xml->end && is_blank(*xml->at))
                xml->at++;
        if (xml->at == xml->end || *xml->at != '>' || strcmp(name, xml->names[xml->depth - 1]))
                return broken(xml);
        xml->at++;
        return end_element(xml, item);
}

bool xml_next(struct xml *xml, struct xml_item *ret_item)
{
        *ret_item = (struct xml_item){ 0 };
        if (xml->is_broken || xml->no_memory)
                return false;
        if (xml->closes) {
                xml->closes = false;
                return end_element(xml, ret_item);
        }
        for (;;) {
                if (!take_text(xml))
                        return false;
                if (xml->at == xml->end)
                        return xml->any && !xml->depth ? false : broken(xml);
                if (!begins(xml, "<!--"))
                        break;
                if (!skip_to(xml, "-->"))
                        return false;
        }
        xml->at++;
        if (xml->at < xml->end && *xml->at == '/') {
                xml->at++;
                return take_end(xml, ret_item);
        }
        return take_begin(xml, ret_item);
}

void xml_done(struct xml *xml)
{
        buf_done(&xml->text);
        *xml = (struct xml){ 0 };
}
