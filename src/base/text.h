/*
 * text.h - what a string is made of.
 */
#ifndef NB_BASE_TEXT_H
#define NB_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

/* Well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF. */
bool text_is_utf8(const char *text, size_t size);
/* Puts '?' in the place of what is no UTF-8. */
void text_make_utf8(char *text);
/* Puts '?' in the place of control bytes and of what is no UTF-8: for terminals, logs and JSON. */
void text_make_printable(char *text);

#endif
