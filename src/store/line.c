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

bool line_is_sound(const struct line *line)
{
        if (line->count > LINE_FORKS_MAX)
                return false;
        for (uint32_t i = 0; i < line->count; i++) {
                const struct line_fork *fork = &line->forks[i];

                if (fork->began > DOCUMENT_SEQUENCE_MAX || fork->began <= (i ? fork[-1].began : 0) || fork->after < (i ? -1 : LINE_FIRST) ||
                    (i && fork->after <= fork[-1].after))
                        return false;
        }
        return true;
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

bool line_format(const struct line *line, json_t *body)
{
        json_t *forks;
        bool failed = false;

        if (!line->count)
                return true;
        forks = json_array();
        for (uint32_t i = 0; i < line->count && !failed; i++)
                failed = json_array_append_new(forks, json_pack("[I, I]", (json_int_t)line->forks[i].began, (json_int_t)line->forks[i].after));
        return !json_object_set_new(body, "line", failed ? NULL : forks);
}

void line_parse(struct document_reader *reader, const json_t *body, struct line *ret_line)
{
        const json_t *forks = json_object_get(body, "line");

        memset(ret_line, 0, sizeof *ret_line);
        if (!forks || reader->status)
                return;
        if (!json_is_array(forks) || json_array_size(forks) > LINE_FORKS_MAX) {
                document_wrong(reader, "line", "is no list of lines");
                return;
        }
        for (size_t i = 0; i < json_array_size(forks) && !reader->status; i++) {
                const json_t *began = json_array_get(json_array_get(forks, i), 0), *after = json_array_get(json_array_get(forks, i), 1);

                if (!json_is_integer(began) || !json_is_integer(after))
                        document_wrong(reader, "line", "has a member that is not two whole numbers");
                ret_line->forks[ret_line->count++] = (struct line_fork){ (uint64_t)json_integer_value(began), json_integer_value(after) };
        }
        if (!reader->status && !line_is_sound(ret_line))
                document_wrong(reader, "line", "does not ascend");
        if (reader->status)
                memset(ret_line, 0, sizeof *ret_line);
}
