/*
 * term.h - output to a terminal: colours only on a terminal and if NO_COLOR is
 * not set; a progress line only where it can be overwritten.
 *
 * Threads: any thread may call progress_add; only the main thread calls the
 * others.
 */
#ifndef NB_CLI_TERM_H
#define NB_CLI_TERM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum style { STYLE_PLAIN, STYLE_BOLD, STYLE_DIM, STYLE_GOOD, STYLE_WARN, STYLE_BAD };

/* Columns of the terminal behind stdout; 0 if it is not a terminal. */
uint32_t term_columns(void);
bool term_has_colour(void);
bool term_can_ask(void); /* stdin and stderr are a terminal */
/* The escape sequence before styled text; print TERM_PLAIN after it. */
const char *term_code(enum style style);
#define TERM_PLAIN "\033[0m"
/* Replaces unprintable characters by '?', so that a tag or path cannot move the cursor. Newlines may stand only at the ends of a format. */
void term_print(enum style style, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Draws a line on stderr, "verifying  41 %  1.3 GiB of 3.2 GiB  1.1 GiB/s  2 s left", a few times a second. */
void progress_begin(const char *what, uint64_t total_bytes);
void progress_add(uint64_t bytes);
void progress_end(void); /* erases the line */

#endif
