#include <string.h>

#include "store/line_document.h"

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
