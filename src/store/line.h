/*
 * line.h - lines of history: a job that goes back to an older step and saves on.
 *
 * The versions of a job follow each other by their steps until it goes back: what it saves then begins a new line, which
 * has all of the earlier one up to the step that it went back to. Each version says the whole way to it, so that its
 * manifest alone tells which others are its past and which ones were abandoned, whatever has been removed since.
 *
 * Threads: no shared state.
 */
#ifndef NB_STORE_LINE_H
#define NB_STORE_LINE_H

#include "store/document.h"

#define LINE_FORKS_MAX 32 /* beyond these the oldest are forgotten: a manifest stays small whatever a job does for years */
#define LINE_FIRST (-2)   /* `after` of the first fork when earlier ones were forgotten: its line and all before count as the first */

struct line_fork {
        uint64_t began; /* the sequence of the first version of the line, which is larger than all before it */
        int64_t after;  /* of the lines before, steps up to this one are its past */
};
/* From the first line to a version's own; zeroed: the first line itself. */
struct line {
        uint32_t count;
        struct line_fork forks[LINE_FORKS_MAX];
};

/* A new line, of versions that come from step `after` of `line`. */
void line_fork(struct line *line, uint64_t began, int64_t after);
/* When the version's line began; 0: it is the first. `line` NULL: the first. */
uint64_t line_began(const struct line *line);
/* Whether a version of `line` with that step is in the past of `head`, or at its head. */
bool line_holds(const struct line *head, const struct line *line, int64_t step);
/* Whether it is one that line_fork can have made. */
bool line_is_sound(const struct line *line);

/* Adds "line" to a document, unless it is the first line: a list of [began, after]. False: no memory. */
bool line_format(const struct line *line, json_t *body);
/* Likewise out of one; absent: the first line. */
void line_parse(struct document_reader *reader, const json_t *body, struct line *ret_line);

#endif
