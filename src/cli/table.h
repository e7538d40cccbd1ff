/*
 * table.h - aligned columns for people.
 *
 *      struct table *table = table_new(columns, count);
 *      table_cell(table, STYLE_GOOD, "%s", text);      // row by row, left to right
 *      table_print(table, stdout, term_columns(), term_has_colour());
 *      table_free(table);
 *
 * A column is as wide as its widest cell. If the table is wider than the terminal,
 * columns that may shrink lose their middle ("glob…p500"). Width 0 means no limit:
 * in a pipe nothing is cut.
 *
 * If an allocation fails, the table ends there and table_print returns false.
 */
#ifndef NB_CLI_TABLE_H
#define NB_CLI_TABLE_H

#include <stddef.h>

#include "cli/term.h"

#define TABLE_COLUMN_MAX 13

enum table_align { TABLE_LEFT, TABLE_RIGHT };
struct table_column {
        const char *title; /* NULL in all columns: no title line */
        enum table_align align;
        bool may_shrink;
};
struct table;

struct table *table_new(const struct table_column *columns, size_t count);
void table_cell(struct table *table, enum style style, const char *format, ...) __attribute__((format(printf, 3, 4)));
bool table_print(const struct table *table, FILE *file, uint32_t width, bool has_colour);
void table_free(struct table *table);
/* Width of UTF-8 text in columns: counts characters, not bytes; a combining or wide character counts as one. */
size_t table_text_width(const char *text);

#endif
