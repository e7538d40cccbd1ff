/*
 * term.h - what stdout and stderr can show: colours only on a terminal and
 * unless NO_COLOR is set, a progress line only where it can be overwritten.
 *
 * Threads: progress_add may be called from any; the rest from the main one.
 */
#ifndef NB_CLI_TERM_H
#define NB_CLI_TERM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum style { STYLE_PLAIN, STYLE_BOLD, STYLE_DIM, STYLE_GOOD, STYLE_WARN, STYLE_BAD };

/* Columns of the terminal behind stdout; 0 when it is none. */
uint32_t term_columns(void);
bool term_has_colour(void);
bool term_can_ask(void); /* stdin and stderr are a terminal */
/* The escape sequence before styled text; TERM_PLAIN goes behind it. */
const char *term_code(enum style style);
#define TERM_PLAIN "\033[0m"
/* What comes from elsewhere cannot move the cursor: what is not printable becomes '?'. Newlines stand at the ends of a format only. */
void term_print(enum style style, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* One line on stderr, "verifying  41 %  1.3 of 3.2 GiB  1.1 GiB/s", redrawn a few times a second. */
void progress_begin(const char *what, uint64_t total_bytes);
void progress_add(uint64_t bytes);
void progress_end(void); /* wipes the line */

#endif
