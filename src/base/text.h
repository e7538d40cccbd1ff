/*
 * text.h - checks and repairs the encoding of strings.
 */
#ifndef NB_BASE_TEXT_H
#define NB_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

/* Whether the text is well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF. */
bool text_is_utf8(const char *text, size_t size);
/* Replaces each byte that is not part of well-formed UTF-8 by '?'. */
void text_make_utf8(char *text);
/* Replaces control characters, characters without width and right-to-left marks by `by`, and bytes that are not well-formed UTF-8 by '?'. */
void text_replace_hidden(char *text, char by);
/* The same with '?': for terminals, logs and JSON. */
void text_make_printable(char *text);

#endif
