/* nebula goodput: how a job spent its time. */
#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/human.h"
#include "cli/ledger.h"
#include "cli/table.h"
#include "cli/target.h"

static const char *const meanings[LEDGER_KINDS] = {
        "training that stayed",
        "training stood still for saves",
        "slower steps while versions were copied or written",
        "training that failures undid",
        "from the end of the processes to the load of a version",
        "the same, 15 min or more after an end that lost nothing",
};

static json_t *json_of(const struct ledger *ledger)
{
        double total = ledger_total(ledger);
        json_t *seconds = json_object(), *tiers = json_object();

        for (int kind = 0; kind < LEDGER_KINDS; kind++)
                json_object_set_new(seconds, ledger_names[kind], json_real(ledger->seconds[kind]));
        for (int tier = 0; tier < HISTORY_TIERS; tier++)
                json_object_set_new(tiers, history_tier_names[tier], json_integer((json_int_t)ledger->restored[tier]));
        return json_pack("{s:f, s:f, s:f, s:o, s:o, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:I, s:f, s:o}", "begun", ledger->begun, "ended", ledger->ended, "wall_seconds",
                         total, "spent", seconds, "goodput", total > 0 ? json_real(ledger_goodput(ledger)) : json_null(),
                         "step_seconds", ledger->step_s, "first_step", (json_int_t)ledger->first_step, "last_step", (json_int_t)ledger->last_step,
                         "saves", (json_int_t)ledger->saves, "failed_saves", (json_int_t)ledger->failed_saves, "restarts",
                         (json_int_t)ledger->restarts, "pauses", (json_int_t)ledger->pauses, "restarts_by_tier", tiers, "restarts_estimated", (json_int_t)ledger->estimated, "restart_seconds",
                         ledger->restarts ? ledger->seconds[LEDGER_RESTART] / (double)ledger->restarts : 0.0, "notice_seconds",
                         ledger->noticed ? json_real(ledger->notice_s / (double)ledger->noticed) : json_null());
}

static void print(const struct ledger *ledger)
{
        static const struct table_column columns[] = {
                { "", TABLE_LEFT, false }, { "TIME", TABLE_RIGHT, false }, { "SHARE", TABLE_RIGHT, false }, { "", TABLE_LEFT, true },
        };
        struct table *table = table_new(columns, CLI_COUNT(columns));
        double total = ledger_total(ledger);
        char text[HUMAN_MAX], begun[HUMAN_MAX];

        for (int kind = 0; kind < LEDGER_KINDS; kind++) {
                if (kind == LEDGER_PAUSED && !ledger->pauses)
                        continue;
                table_cell(table, kind ? STYLE_PLAIN : STYLE_GOOD, "%s", ledger_names[kind]);
                table_cell(table, STYLE_PLAIN, "%s", human_duration(ledger->seconds[kind], text));
                table_cell(table, STYLE_PLAIN, "%.2f %%", 100 * ledger->seconds[kind] / total);
                table_cell(table, STYLE_DIM, "%s", meanings[kind]);
        }
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
        printf("\n%s from %s", human_duration(total, text), human_time(ledger->begun, begun));
        if (ledger->last_step >= 0)
                printf(", step %" PRId64 " to %" PRId64 ", %s per step", ledger->first_step, ledger->last_step, human_duration(ledger->step_s, text));
        else
                printf(", tags without steps"); /* so no step can be slower or be done again */
        printf("; %zu saves", ledger->saves);
        if (ledger->failed_saves)
                printf(" (%zu failed)", ledger->failed_saves);
        printf(", %zu restart%s", ledger->restarts, ledger->restarts == 1 ? "" : "s");
        if (ledger->restarts)
                printf(" of %s", human_duration(ledger->seconds[LEDGER_RESTART] / (double)ledger->restarts, text));
        if (ledger->noticed && ledger->notice_s > 0)
                printf(", noticed after %s", human_duration(ledger->notice_s / (double)ledger->noticed, text));
        else if (ledger->noticed)
                printf(", noticed at once");
        if (ledger->pauses)
                printf(", %zu pause%s; productive without the pauses: %.2f %%", ledger->pauses, ledger->pauses == 1 ? "" : "s", 100 * ledger_goodput(ledger));
        if (ledger->estimated)
                printf(" (of %zu it is not known when the processes ended: half an interval counts as lost)", ledger->estimated);
        printf("\n");
}

int command_goodput(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const char *given = NULL;
        const struct args_option options[] = { CLI_COMMON(common), { "history", ARGS_TEXT, &given } };
        struct history history = { 0 };
        struct ledger ledger;
        char path[TARGET_PATH_MAX];
        struct nebula_error error;
        struct args args;
        int code = CLI_OK;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (target_path(common.path, path, &error) || history_load(given, path, &history, &error) || ledger_make(&history, &ledger, &error))
                code = cli_fail(common.json, &error);
        else if (common.json)
                code = cli_print_json(json_of(&ledger), CLI_OK);
        else if (ledger_total(&ledger) <= 0)
                printf("the history has %zu save%s: a ledger takes two\n", history.count, history.count == 1 ? "" : "s");
        else
                print(&ledger);
        history_done(&history);
        return code;
}
