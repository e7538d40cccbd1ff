/*
 * text.h - checks and repairs the encoding of strings.
 */
#ifndef NB_BASE_TEXT_H
#define NB_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether the text is well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF. */
bool text_is_utf8(const char *text, size_t size);
/* Replaces each byte that is not part of well-formed UTF-8 by '?'. */
void text_make_utf8(char *text);
/* Replaces control characters, characters without width and right-to-left marks by `by`, and bytes that are not well-formed UTF-8 by '?'. */
void text_replace_hidden(char *text, char by);
/* The same with '?': for terminals, logs and JSON. */
void text_make_printable(char *text);
/* The first character that the functions above replace and that is no ASCII control character below DEL. False: there is none. The text is
 * well-formed UTF-8. */
bool text_find_hidden(const char *text, size_t size, size_t *ret_at, size_t *ret_length, uint32_t *ret_character);
/* The path of a `file://` URL. Another URL or a path is returned as it is. */
const char *text_local_path(const char *url);
/*
 * Whether a table of text needs one more apostrophe before this cell. A spreadsheet takes a cell for a formula if its first character is
 * one of = + - @ or of their full-width forms. Spaces and apostrophes before that character do not count. So a reader can distinguish an apostrophe
 * of the cell from an added one: text_cell_content().
 */
bool text_is_formula(const char *cell);
/* The cell without the apostrophe that was added. */
const char *text_cell_content(const char *cell);

#endif
