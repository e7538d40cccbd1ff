#include "cli/table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"

#define GAP 2
#define SHRUNK_MIN 8

struct cell {
        char *text;
        enum style style;
};
struct table {
        struct table_column columns[TABLE_COLUMN_MAX];
        size_t column_count;
        struct cell *cells; /* row by row */
        size_t cell_count, capacity;
        bool is_broken; /* an allocation failed */
};

struct table *table_new(const struct table_column *columns, size_t count)
{
        struct table *table = count <= TABLE_COLUMN_MAX ? calloc(1, sizeof *table) : NULL;

        if (!table)
                return NULL;
        memcpy(table->columns, columns, count * sizeof *columns);
        table->column_count = count;
        return table;
}

void table_free(struct table *table)
{
        if (!table)
                return;
        for (size_t i = 0; i < table->cell_count; i++)
                free(table->cells[i].text);
        free(table->cells);
        free(table);
}

void table_cell(struct table *table, enum style style, const char *format, ...)
{
        va_list arguments;
        char *text;
        int length;

        if (!table || table->is_broken)
                return;
        if (table->cell_count == table->capacity) {
                size_t capacity = table->capacity ? table->capacity * 2 : 64;
                struct cell *cells = realloc(table->cells, capacity * sizeof *cells);

                if (!cells) {
                        table->is_broken = true;
                        return;
                }
                table->cells = cells;
                table->capacity = capacity;
        }
        va_start(arguments, format);
        length = vasprintf(&text, format, arguments);
        va_end(arguments);
        if (length < 0) {
                table->is_broken = true;
                return;
        }
        text_make_printable(text); /* a tag may contain any character */
        table->cells[table->cell_count++] = (struct cell){ .text = text, .style = style };
}

size_t table_text_width(const char *text)
{
        size_t width = 0;

        for (; *text; text++)
                width += ((unsigned char)*text & 0xc0) != 0x80;
        return width;
}

static const char *skip_characters(const char *text, size_t count)
{
        while (*text && count--)
                for (text++; ((unsigned char)*text & 0xc0) == 0x80; text++)
                        ;
        return text;
}

static void measure(const struct table *table, uint32_t limit, size_t widths[TABLE_COLUMN_MAX])
{
        size_t total = (table->column_count - 1) * GAP;

        for (size_t c = 0; c < table->column_count; c++) {
                widths[c] = table->columns[c].title ? table_text_width(table->columns[c].title) : 0;
                for (size_t i = c; i < table->cell_count; i += table->column_count) {
                        size_t width = table_text_width(table->cells[i].text);

                        if (width > widths[c])
                                widths[c] = width;
                }
                total += widths[c];
        }
        while (limit && total > limit) {
                size_t widest = table->column_count;

                for (size_t c = 0; c < table->column_count; c++)
                        if (table->columns[c].may_shrink && widths[c] > SHRUNK_MIN &&
                            (widest == table->column_count || widths[c] > widths[widest]))
                                widest = c;
                if (widest == table->column_count)
                        return;
                widths[widest]--;
                total--;
        }
}

/* `blanks` come from the cells before. They are printed in front of the next text, so that no line ends in blanks. */
static size_t print_cell(FILE *file, const char *text, size_t width, enum table_align align, size_t blanks, const char *on,
                         const char *off)
{
        size_t length = table_text_width(text);
        size_t pad = length < width ? width - length : 0;

        if (!length)
                return blanks + width + GAP;
        fprintf(file, "%*s%s", (int)(blanks + (align == TABLE_RIGHT ? pad : 0)), "", on);
        if (length > width) {
                size_t head = (width - 1) / 2, tail = width - 1 - head;
                const char *end = skip_characters(text, head);

                fprintf(file, "%.*s…%s%s", (int)(end - text), text, skip_characters(text, length - tail), off);
        } else {
                fprintf(file, "%s%s", text, off);
        }
        return GAP + (align == TABLE_LEFT ? pad : 0);
}

bool table_print(const struct table *table, FILE *file, uint32_t width, bool has_colour)
{
        size_t widths[TABLE_COLUMN_MAX], last, blanks = 0;

        if (!table)
                return false;
        measure(table, width, widths);
        last = table->column_count - 1;
        for (size_t c = 0; table->columns[0].title && c <= last; c++)
                blanks = print_cell(file, table->columns[c].title, widths[c], table->columns[c].align, blanks,
                                    has_colour ? term_code(STYLE_DIM) : "", has_colour ? TERM_PLAIN : "");
        if (table->columns[0].title)
                fputc('\n', file);
        for (size_t i = 0; i < table->cell_count; i++) {
                const struct cell *cell = &table->cells[i];
                size_t c = i % table->column_count;
                bool is_styled = has_colour && cell->style != STYLE_PLAIN;

                blanks = print_cell(file, cell->text, widths[c], table->columns[c].align, c ? blanks : 0,
                                    is_styled ? term_code(cell->style) : "", is_styled ? TERM_PLAIN : "");
                if (c == last)
                        fputc('\n', file);
        }
        return !table->is_broken;
}
