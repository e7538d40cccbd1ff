#include <stdbool.h>
#include <string.h>

#include "store/line.h"

uint64_t line_began(const struct line *line)
{
        return line && line->count ? line->forks[line->count - 1].began : 0;
}

static bool is_first(const struct line_fork *fork)
{
        return fork->after == LINE_FIRST;
}

/* Merges the two oldest lines; the result becomes the first line. */
static void forget_oldest(struct line *line)
{
        line->count--;
        memmove(&line->forks[0], &line->forks[1], line->count * sizeof line->forks[0]);
        line->forks[0].after = LINE_FIRST;
}

void line_fork(struct line *line, uint64_t began, int64_t after)
{
        /* Forks at or after step `after` are not in the past of the new line. */
        while (line->count && line->forks[line->count - 1].after >= after)
                line->count--;
        if (line->count == LINE_FORKS_MAX)
                forget_oldest(line);
        line->forks[line->count++] = (struct line_fork){ began, after };
}

bool line_holds(const struct line *head, const struct line *line, int64_t step)
{
        uint64_t began = line_began(line);
        uint32_t next = 0, count = head ? head->count : 0;

        if (began > line_began(head))
                return true; /* it is the head's line, or a later one */
        if (count && is_first(&head->forks[0]) && began <= head->forks[0].began) {
                next = 1;
        } else if (began) {
                while (next < count && head->forks[next].began != began)
                        next++;
                if (next++ == count)
                        return false;
        }
        for (; next < count; next++)
                if (step > head->forks[next].after)
                        return false;
        return true;
}
