#include "cli/ledger.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

const char *const ledger_names[LEDGER_KINDS] = { "productive", "blocked", "inflated", "lost", "restart", "paused" };

static double least(double a, double b)
{
        return a < b ? a : b;
}

static double positive(double a)
{
        return a > 0 ? a : 0;
}

static int by_size(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return (x > y) - (x < y);
}

/* Sorts the list. 0: the list is empty. */
static double median(double *list, size_t count)
{
        if (!count)
                return 0;
        qsort(list, count, sizeof *list, by_size);
        return count % 2 ? list[count / 2] : (list[count / 2 - 1] + list[count / 2]) / 2;
}

/* Whether ranks have loaded a version since the save before. */
static bool is_restart(const struct history_row *before, const struct history_row *row)
{
        return row->read > before->begun && row->read <= row->begun && row->read > before->read;
}

static double blocked_of(const struct history_row *row, double until)
{
        return least(row->blocked_s, positive(until - row->begun));
}

/* The time of copying or writing a version after the save stopped blocking. */
static double background_of(const struct history_row *row, double until)
{
        double end = row->durable > row->begun ? row->durable : row->captured;

        return positive(least(end, until) - row->begun - blocked_of(row, until));
}

/* The share of the steps from `from` to `to` that were done before, that is, up to `high`. */
static double share_again(int64_t from, int64_t to, int64_t high)
{
        if (from < 0 || high <= from)
                return 0;
        return to <= high || to <= from ? 1 : (double)(high - from) / (double)(to - from);
}

static void add_trained(struct ledger *ledger, double seconds, double again)
{
        ledger->seconds[LEDGER_LOST] += seconds * again;
        ledger->seconds[LEDGER_PRODUCTIVE] += seconds * (1 - again);
}

/* high: the last step reached before. */
static void add_interval(struct ledger *ledger, const struct history_row *row, const struct history_row *next, int64_t high)
{
        double blocked = blocked_of(row, next->begun), rest = next->begun - row->begun - blocked;
        double usual = next->step > row->step ? (double)(next->step - row->step) * ledger->step_s : rest;
        double inflated = least(positive(rest - usual), background_of(row, next->begun));

        ledger->seconds[LEDGER_BLOCKED] += blocked;
        ledger->seconds[LEDGER_INFLATED] += inflated;
        add_trained(ledger, rest - inflated, next->step > row->step ? share_again(row->step, next->step, high) : 0);
}

/* interval_s: the usual time between two saves. */
static void add_restart(struct ledger *ledger, const struct history_row *row, const struct history_row *next, int64_t high, double interval_s)
{
        double blocked = blocked_of(row, next->read), down = next->read - row->begun - blocked, lost;

        if (next->stopped > row->begun && next->stopped <= next->read) {
                lost = least(positive(next->stopped - row->begun - blocked), down);
        } else {
                lost = least(down, interval_s / 2);
                ledger->estimated++;
        }
        if (next->stopped > 0 && next->read_step == row->step && lost < ledger->step_s && down - lost > LEDGER_PAUSE_S) {
                ledger->pauses++;
                ledger->seconds[LEDGER_BLOCKED] += blocked;
                ledger->seconds[LEDGER_LOST] += lost;
                ledger->seconds[LEDGER_PAUSED] += down - lost;
                add_trained(ledger, next->begun - next->read, share_again(next->read_step, next->step, high));
                return;
        }
        if (next->stepped > 0 && next->stopped >= next->stepped) {
                ledger->notice_s += positive(next->stopped - (next->stepped > row->begun ? next->stepped : row->begun) - ledger->step_s);
                ledger->noticed++;
        }
        ledger->restarts++;
        ledger->restored[next->read_tier]++;
        ledger->seconds[LEDGER_BLOCKED] += blocked;
        ledger->seconds[LEDGER_LOST] += lost;
        ledger->seconds[LEDGER_RESTART] += down - lost;
        add_trained(ledger, next->begun - next->read, share_again(next->read_step, next->step, high));
}

/* Measures the median time of a step, and of the interval between two saves, over intervals without a restart. */
static enum nebula_status measure(const struct history *history, struct ledger *ledger, double *ret_interval_s, struct nebula_error *error)
{
        double *steps = calloc(history->count + 1, sizeof *steps), *intervals = calloc(history->count + 1, sizeof *intervals);
        size_t count = 0;

        for (size_t i = 1; steps && intervals && i < history->count; i++) {
                const struct history_row *row = &history->rows[i - 1], *next = &history->rows[i];
                double rest = next->begun - row->begun - blocked_of(row, next->begun);

                if (is_restart(row, next) || next->step <= row->step || row->step < 0)
                        continue;
                steps[count] = rest / (double)(next->step - row->step);
                intervals[count++] = next->begun - row->begun;
        }
        ledger->step_s = steps ? median(steps, count) : 0;
        *ret_interval_s = intervals ? median(intervals, count) : 0;
        free(steps);
        free(intervals);
        return steps && intervals ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %zu saves", history->count);
}

enum nebula_status ledger_make(const struct history *history, struct ledger *ret_ledger, struct nebula_error *error)
{
        struct ledger ledger = { .first_step = -1, .last_step = -1, .saves = history->count };
        double interval_s;
        enum nebula_status status = measure(history, &ledger, &interval_s, error);

        if (status)
                return status;
        for (size_t i = 0; i < history->count; i++) {
                const struct history_row *row = &history->rows[i];

                ledger.first_step = ledger.first_step < 0 ? row->step : ledger.first_step;
                ledger.failed_saves += !strcmp(row->result, "failed");
                if (i && is_restart(row - 1, row))
                        add_restart(&ledger, row - 1, row, ledger.last_step, interval_s);
                else if (i)
                        add_interval(&ledger, row - 1, row, ledger.last_step);
                ledger.last_step = row->step > ledger.last_step ? row->step : ledger.last_step;
        }
        if (history->count) {
                ledger.begun = history->rows[0].begun;
                ledger.ended = history->rows[history->count - 1].begun;
        }
        *ret_ledger = ledger;
        return NEBULA_OK;
}

double ledger_total(const struct ledger *ledger)
{
        return ledger->ended - ledger->begun;
}

double ledger_goodput(const struct ledger *ledger)
{
        double ran = ledger_total(ledger) - ledger->seconds[LEDGER_PAUSED];

        return ran > 0 ? ledger->seconds[LEDGER_PRODUCTIVE] / ran : 0;
}
