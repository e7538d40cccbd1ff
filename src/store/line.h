/*
 * line.h - lines of history: a job that goes back to an older step and saves on.
 *
 * The steps of a job's versions ascend until the job goes back to an older step. Its next save begins a new line, whose
 * past is the earlier line up to that step. Each version lists all lines that lead to it. So its manifest alone shows
 * which versions are its past and which are abandoned, even after others were removed.
 *
 * Threads: no shared state.
 */
#ifndef NB_STORE_LINE_H
#define NB_STORE_LINE_H

#include <stdbool.h>
#include <stdint.h>

#define LINE_FORKS_MAX 32 /* the oldest are forgotten, so that manifests stay small */
#define LINE_FIRST (-2)   /* `after` of the first fork if earlier ones were forgotten: its line counts as the first */

struct line_fork {
        uint64_t began; /* the sequence of the first version of the line, larger than that of all earlier versions */
        int64_t after;  /* the past of this line contains the earlier lines up to this step */
};
/* The lines from the first one to a version's own. Zeroed: the first line itself. */
struct line {
        uint32_t count;
        struct line_fork forks[LINE_FORKS_MAX];
};

/* Begins a new line that continues from step `after` of `line`. */
void line_fork(struct line *line, uint64_t began, int64_t after);
/* When the version's line began; 0: it is the first line. `line` NULL: the first line. */
uint64_t line_began(const struct line *line);
/* Whether a version of `line` with that step is in the past of `head`, or at its head. */
bool line_holds(const struct line *head, const struct line *line, int64_t step);

#endif
