/*
 * xml.h - the answers of object stores: elements and text, nothing else of XML.
 *
 *      struct xml xml;
 *      xml_init(&xml, text, size);
 *      while (xml_next(&xml, &item))
 *              ... item.kind, item.name, item.text ...
 *      if (xml.is_broken) ... the text is cut off, or has XML that this reader refuses ...
 *
 * The reader takes a byte order mark, a declaration, comments, elements with attributes, text with the five named entities and
 * numbered characters. It refuses document types and CDATA, so nothing expands and nothing is fetched. Bytes are not checked to
 * be UTF-8.
 *
 * Ownership: an item's text belongs to the reader, until the next call. Threads: no shared state.
 */
#ifndef NB_STORE_HTTP_XML_H
#define NB_STORE_HTTP_XML_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

#define XML_DEPTH_MAX 16
#define XML_NAME_MAX 64

enum xml_kind { XML_BEGIN, XML_END };

struct xml_item {
        enum xml_kind kind;
        size_t depth;            /* of the element; 1: the outermost element */
        const char *name;        /* of the element */
        const char *text;        /* XML_END: the text directly in the element, "" if there is none */
        const char *attributes;  /* XML_BEGIN: as in the source, blanks included */
        size_t attributes_size;
};

struct xml {
        const char *at, *end;
        char names[XML_DEPTH_MAX][XML_NAME_MAX]; /* of the open elements */
        size_t depth;
        struct buf text;    /* of the innermost open one */
        bool closes;        /* the last element has no content: its end is next */
        bool any;           /* the outermost element has begun */
        bool is_broken;
        bool no_memory;
};

void xml_init(struct xml *xml, const char *text, size_t size);
/* The next begin or end of an element. False: the text has ended, or is_broken or no_memory is set. */
bool xml_next(struct xml *xml, struct xml_item *ret_item);
void xml_done(struct xml *xml);

#endif
