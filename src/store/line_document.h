/*
 * line_document.h - lines of history in documents. The order of versions needs none, and a trainer's process has no JSON.
 */
#ifndef NB_STORE_LINE_DOCUMENT_H
#define NB_STORE_LINE_DOCUMENT_H

#include "store/document.h"
#include "store/line.h"

/* Whether line_fork can have made `line`. */
bool line_is_sound(const struct line *line);
/* Adds "line", a list of [began, after], to a document, unless it is the first line. False: no memory. */
bool line_format(const struct line *line, json_t *body);
/* Reads "line" from a document; if it is absent: the first line. */
void line_parse(struct document_reader *reader, const json_t *body, struct line *ret_line);

#endif
