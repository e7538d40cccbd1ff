#include "cli/history.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "base/text.h"
#include "cli/target.h"
#include "os/os.h"
#include "store/manifest.h"

#define FILE_NAME "checkpointHistories.csv"
#define TEXT_MAX (256u << 20)
#define FIELDS_MAX 32

/* Some numbers are only read because a field that is none shows a line that was cut. */
static const char *const wanted[] = { "tag", "step", "sequence", "world", "files", "size_bytes", "result", "blocked_ms", "copy_ms", "capture_cpu_ms",
                                      "faults", "begun", "captured", "committed", "durable", "persist_seconds", "persist_mib_per_s", "stopped", "stepped", "read",
                                      "read_step", "written_bytes", "read_tier" };
enum column { TAG, STEP, SEQUENCE, WORLD, FILES, SIZE, RESULT, BLOCKED, COPY, CPU, FAULTS, BEGUN, CAPTURED, COMMITTED, DURABLE, PERSIST, RATE, STOPPED, STEPPED, READ,
              READ_STEP, WRITTEN, READ_TIER, COLUMNS };

const char *const history_tier_names[HISTORY_TIERS] = { "unknown", "memory", "peer", "storage" };

/* Cuts off the next field and removes its quotes, in place. *text is NULL after the last one. */
static char *next_field(char **text)
{
        char *from = *text, *to = from, *begin = from;

        if (*from != '"') {
                *text = strchr(from, ',');
                if (*text)
                        *(*text)++ = 0;
                return begin;
        }
        for (from++; *from && !(from[0] == '"' && from[1] != '"'); from++) {
                from += from[0] == '"';
                *to++ = *from;
        }
        from += *from == '"';
        *text = *from == ',' ? from + 1 : NULL;
        *to = 0;
        return begin;
}

static size_t split(char *line, char *fields[FIELDS_MAX])
{
        size_t count = 0;

        while (line && count < FIELDS_MAX)
                fields[count++] = next_field(&line);
        return count;
}

/* Finds the index of each column; -1: absent. An old file may lack the newest columns. Returns the number of columns of the file. */
static size_t read_header(char *line, int places[COLUMNS])
{
        char *fields[FIELDS_MAX];
        size_t count = split(line, fields), missing = 0;

        for (int c = 0; c < COLUMNS; c++) {
                places[c] = -1;
                for (size_t i = 0; i < count; i++)
                        if (!strcmp(fields[i], wanted[c]))
                                places[c] = (int)i;
        }
        for (int c = STOPPED; c < COLUMNS; c++)
                if (places[c] < 0)
                        places[c] = (int)(count + missing++);
        return count;
}

/* Reads the numbers of a row; 0: the row has no such column. False: a field is no number, as in a line that was cut. */
static bool read_numbers(char *const *fields, size_t count, const int places[COLUMNS], double ret_numbers[COLUMNS])
{
        for (int c = 0; c < COLUMNS; c++) {
                const char *field = places[c] >= 0 && (size_t)places[c] < count ? fields[places[c]] : "";
                char *end;

                if (c == TAG || c == RESULT || c == READ_TIER)
                        continue;
                ret_numbers[c] = strtod(field, &end);
                if (*end || !isfinite(ret_numbers[c]) || fabs(ret_numbers[c]) >= 9e18)
                        return false;
        }
        return true;
}

static enum history_tier tier_in(char *const *fields, size_t count, int place)
{
        for (int tier = HISTORY_TIER_MEMORY; place >= 0 && (size_t)place < count && tier < HISTORY_TIERS; tier++)
                if (!strcmp(fields[place], history_tier_names[tier]))
                        return (enum history_tier)tier;
        return HISTORY_TIER_UNKNOWN;
}

/* column_count: of the header. A line with fewer fields was cut: a full disk can do that, or the agent is just writing it. */
static bool read_row(char *line, const int places[COLUMNS], size_t column_count, struct history_row *row)
{
        double numbers[COLUMNS];
        char *fields[FIELDS_MAX];
        size_t count = split(line, fields);

        if (places[TAG] < 0 || places[BEGUN] < 0 || count < column_count || !read_numbers(fields, count, places, numbers))
                return false;
        *row = (struct history_row){
                .step = (int64_t)numbers[STEP],
                .sequence = (uint64_t)fabs(numbers[SEQUENCE]),
                .size = (uint64_t)fabs(numbers[SIZE]),
                .blocked_s = numbers[BLOCKED] / 1e3,
                .persist_s = numbers[PERSIST],
                .begun = numbers[BEGUN],
                .captured = numbers[CAPTURED],
                .committed = numbers[COMMITTED],
                .durable = numbers[DURABLE],
                .stopped = numbers[STOPPED],
                .stepped = numbers[STEPPED],
                .read = numbers[READ],
                .read_step = (int64_t)numbers[READ_STEP],
                .read_tier = tier_in(fields, count, places[READ_TIER]),
        };
        snprintf(row->tag, sizeof row->tag, "%s", text_cell_content(fields[places[TAG]]));
        if (places[RESULT] >= 0 && (size_t)places[RESULT] < count)
                snprintf(row->result, sizeof row->result, "%s", fields[places[RESULT]]);
        return row->begun > 0;
}

static double larger(double a, double b)
{
        return a > b ? a : b;
}

/* Adds another node's share of the same version. The version begins with its first rank, and blocks as long as its slowest. */
static void join(struct history_row *row, const struct history_row *other)
{
        if (other->read > 0 && row->read > 0 && other->read_step == row->read_step)
                row->read_tier = other->read_tier > row->read_tier ? other->read_tier : row->read_tier;
        else if (other->read > row->read)
                row->read_tier = other->read_tier;
        row->size += other->size;
        row->blocked_s = larger(row->blocked_s, other->blocked_s);
        row->persist_s = larger(row->persist_s, other->persist_s);
        row->begun = row->begun < other->begun ? row->begun : other->begun;
        row->captured = larger(row->captured, other->captured);
        row->committed = larger(row->committed, other->committed);
        row->durable = larger(row->durable, other->durable);
        row->stopped = larger(row->stopped, other->stopped);
        row->stepped = larger(row->stepped, other->stepped);
        if (other->read > row->read) {
                row->read = other->read;
                row->read_step = other->read_step;
        }
}

static int by_writing(const void *a, const void *b)
{
        const struct history_row *x = a, *y = b;
        int order = strcmp(x->tag, y->tag);

        if (order || x->sequence != y->sequence)
                return order ? order : x->sequence < y->sequence ? -1 : 1;
        return (x->committed > y->committed) - (x->committed < y->committed);
}

static int by_begin(const void *a, const void *b)
{
        const struct history_row *x = a, *y = b;

        return (x->begun > y->begun) - (x->begun < y->begun);
}

/* Whether two rows are shares of one version: a version that was not committed has no sequence. */
static bool is_share(const struct history_row *row, const struct history_row *other)
{
        return !strcmp(row->tag, other->tag) && row->sequence == other->sequence && row->step == other->step &&
               (fabs(row->committed - other->committed) < 60 || fabs(row->begun - other->begun) < 60);
}

/* A loss of power can leave zeros where lines were. The lines behind them count. */
static void part_lines(char *text, size_t size)
{
        size_t used = 0;

        for (size_t i = 0; i < size; i++)
                if (text[i] || (used && text[used - 1] != '\n'))
                        text[used++] = text[i] ? text[i] : '\n';
        text[used] = 0;
}

static enum nebula_status parse(char *text, struct history *ret_history, struct nebula_error *error)
{
        struct history history = { 0 };
        size_t lines = 1, joined = 0, columns = 0;
        char *line = text, *end;
        int places[COLUMNS];

        for (const char *at = text; (at = strchr(at, '\n')); at++)
                lines++;
        history.rows = calloc(lines, sizeof *history.rows);
        if (!history.rows)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a history of %zu lines", lines);
        for (size_t n = 0; line; line = end, n++) {
                end = strchr(line, '\n');
                if (end)
                        *end++ = 0;
                if (*line && line[strlen(line) - 1] == '\r') /* another program has rewritten the file */
                        line[strlen(line) - 1] = 0;
                if (!n)
                        columns = read_header(line, places);
                else if (*line && read_row(line, places, columns, &history.rows[history.count]))
                        history.count++;
        }
        if (history.count)
                qsort(history.rows, history.count, sizeof *history.rows, by_writing);
        for (size_t i = 0; i < history.count; i++)
                if (joined && is_share(&history.rows[joined - 1], &history.rows[i]))
                        join(&history.rows[joined - 1], &history.rows[i]);
                else
                        history.rows[joined++] = history.rows[i];
        history.count = joined;
        if (history.count)
                qsort(history.rows, history.count, sizeof *history.rows, by_begin);
        *ret_history = history;
        return NEBULA_OK;
}

static enum nebula_status read_file(const char *path, char **ret_text, struct nebula_error *error)
{
        size_t size = 0;
        int result = os_read_file(path, TEXT_MAX, ret_text, &size);

        if (result)
                return error_set(error, error_status_of_errno(-result), -result, "cannot read %s", path);
        part_lines(*ret_text, size);
        return NEBULA_OK;
}

static enum nebula_status read_stored(const char *path, char **ret_text, struct nebula_error *error)
{
        struct store *store;
        size_t size;
        enum nebula_status status = store_open(path, &store, error);

        if (status)
                return status;
        status = store->ops->get(store, MANIFEST_DIRECTORY "/" FILE_NAME, TEXT_MAX, ret_text, &size, NULL, error);
        if (status == NEBULA_NOT_FOUND)
                error_set(error, NEBULA_NOT_FOUND, 0, "%s has no history in " MANIFEST_DIRECTORY "/" FILE_NAME "; --history names another file", store->root);
        if (!status)
                part_lines(*ret_text, size);
        store_close(store);
        return status;
}

enum nebula_status history_load(const char *given, const char *path, struct history *ret_history, struct nebula_error *error)
{
        const char *output = conf_env("NEBULA_OUTPUT_DIR");
        char file[TARGET_PATH_MAX], *text;
        enum nebula_status status;

        if (given) {
                status = target_absolute(given, file, error);
                if (!status)
                        status = read_file(file, &text, error);
        } else if (output) {
                snprintf(file, sizeof file, "%s/" FILE_NAME, output);
                status = read_file(file, &text, error);
        } else if (*path) {
                status = read_stored(path, &text, error);
        } else {
                status = error_set(error, NEBULA_INVALID, 0, "no storage path is known: give --path DIR or --history FILE");
        }
        if (status)
                return status;
        status = parse(text, ret_history, error);
        free(text);
        return status;
}

void history_done(struct history *history)
{
        free(history->rows);
        *history = (struct history){ 0 };
}
