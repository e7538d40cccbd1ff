#include "cli/stats.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/table.h"
#include "os/os.h"
#include "store/order.h"

/* "optim/rank12.pt" is an item "optim/rank*.pt". */
static void item_of(const char *name, char ret_item[256])
{
        size_t used = 0;

        for (; *name; name++) {
                if (!isdigit((unsigned char)*name))
                        ret_item[used++] = *name;
                else if (!used || ret_item[used - 1] != '*')
                        ret_item[used++] = '*';
        }
        ret_item[used] = '\0';
}

static void month_of(uint64_t sequence, char ret_month[16])
{
        time_t seconds = (time_t)(sequence / SECOND_NS);
        struct tm parts;

        if (!gmtime_r(&seconds, &parts) || !strftime(ret_month, 16, "%Y-%m", &parts))
                strcpy(ret_month, "?");
}

static void count(json_t *groups, const char *name, const char *key, uint64_t number, uint64_t bytes, int64_t written)
{
        json_t *group = json_object_get(groups, name);

        if (!group) {
                group = json_pack("{s:i, s:i}", key, 0, "bytes", 0);
                json_object_set_new(groups, name, group);
        }
        json_object_set_new(group, key, json_integer((json_int_t)number_of(group, key) + (json_int_t)number));
        json_object_set_new(group, "bytes", json_integer(json_integer_value(json_object_get(group, "bytes")) + (json_int_t)bytes));
        if (written >= 0)
                json_object_set_new(group, "written", json_integer(json_integer_value(json_object_get(group, "written")) + written));
}

/* The groups as a list, each with its name: by name, or the largest first. */
static json_t *listed(json_t *groups, const char *key, bool largest_first)
{
        json_t *list = json_array(), *group;
        const char *name;

        json_object_foreach(groups, name, group) {
                size_t at = json_array_size(list);
                json_t *row = json_object();

                json_object_set_new(row, key, json_string(name));
                json_object_update(row, group);
                while (at && (largest_first ? number_of(json_array_get(list, at - 1), "bytes") < number_of(row, "bytes")
                                            : strcmp(text_of(json_array_get(list, at - 1), key), name) > 0))
                        at--;
                json_array_insert_new(list, at, row);
        }
        json_decref(groups);
        return list;
}

/* Adds what `rule` would remove of all jobs. The pinned ones count as removed: `nebula prune` without --yes shows each. */
static bool add_rule(json_t *rules, const struct manifest_scan *scan, const json_t *jobs, const char *words, const struct order_rule *rule)
{
        bool *stay = calloc(scan->count + 1, sizeof *stay), is_done = stay != NULL;
        json_int_t removed = 0, bytes = 0;

        for (size_t j = 0; is_done && j < json_array_size(jobs); j++) {
                struct order_entry *entries = manifest_scan_entries(scan);

                for (size_t i = 0; entries && i < scan->count; i++)
                        entries[i].counts = !strcmp(entries[i].job, text_of(json_array_get(jobs, j), "job"));
                is_done = entries && order_stay(entries, scan->count, rule, true, stay, NULL);
                for (size_t i = 0; is_done && i < scan->count; i++) {
                        removed += !stay[i];
                        bytes += stay[i] ? 0 : (json_int_t)manifest_size(&scan->manifests[i]);
                }
                free(entries);
        }
        free(stay);
        if (is_done)
                json_array_append_new(rules, json_pack("{s:s, s:I, s:I}", "rule", words, "removed_count", removed, "bytes", bytes));
        return is_done;
}

enum nebula_status stats_load(struct store *store, json_t **ret_stats, struct nebula_error *error)
{
        static const struct {
                const char *words;
                struct order_rule rule;
        } rules[] = {
                { "--keep-last 1", { .last = 1 } }, { "--keep-last 3", { .last = 3 } }, { "--keep-last 10", { .last = 10 } },
                { "--keep-last 3 --keep-daily 7 --keep-weekly 8", { .last = 3, .daily = 7, .weekly = 8 } },
        };
        json_t *jobs = json_object(), *items = json_object(), *months = json_object(), *freed = json_array();
        struct manifest_scan scan;
        uint64_t bytes = 0, written = 0;
        enum nebula_status status = manifest_scan(store, &scan, error);

        for (size_t i = 0; !status && i < scan.count; i++) {
                const struct manifest *one = &scan.manifests[i];
                char name[256];

                bytes += manifest_size(one);
                written += manifest_written(one);
                count(jobs, one->job, "version_count", 1, manifest_size(one), (int64_t)manifest_written(one));
                month_of(one->sequence, name);
                count(months, name, "version_count", 1, manifest_size(one), (int64_t)manifest_written(one));
                for (size_t f = 0; f < one->file_count; f++) {
                        item_of(one->files[f].name, name);
                        count(items, name, "file_count", 1, one->files[f].size, -1);
                }
        }
        jobs = listed(jobs, "job", true);
        items = listed(items, "name", true);
        months = listed(months, "month", false);
        for (size_t r = 0; !status && r < CLI_COUNT(rules); r++)
                if (!add_rule(freed, &scan, jobs, rules[r].words, &rules[r].rule))
                        status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %zu checkpoints", scan.count);
        if (!status)
                *ret_stats = json_pack("{s:s, s:I, s:I, s:I, s:O, s:O, s:O, s:O, s:I}", "path", store->root, "version_count", (json_int_t)scan.count, "bytes",
                                       (json_int_t)bytes, "written", (json_int_t)written, "jobs", jobs, "items", items, "months", months, "rules", freed,
                                       "unreadable_count", (json_int_t)scan.broken_count);
        json_decref(jobs);
        json_decref(items);
        json_decref(months);
        json_decref(freed);
        if (!status || scan.manifests)
                manifest_scan_done(&scan);
        return status;
}

#define SHOWN_ITEMS 20

static void print_groups(const json_t *list, const char *title, const char *key, const char *number, const char *of)
{
        const struct table_column columns[] = {
                { title, TABLE_LEFT, true }, { number, TABLE_RIGHT, false }, { "BYTES", TABLE_RIGHT, false }, { of, TABLE_RIGHT, false },
        };
        size_t shown = json_array_size(list) > SHOWN_ITEMS ? SHOWN_ITEMS : json_array_size(list);
        struct table *table = table_new(columns, of ? 4 : 3);
        char size[HUMAN_MAX];

        for (size_t i = 0; i < shown; i++) {
                const json_t *row = json_array_get(list, i);
                const char *name = text_of(row, key);

                table_cell(table, STYLE_PLAIN, "%s", *name ? name : "(without a name)");
                table_cell(table, STYLE_PLAIN, "%.0f", json_object_get(row, "file_count") ? number_of(row, "file_count") : json_object_get(row, "removed_count") ? number_of(row, "removed_count") : number_of(row, "version_count"));
                table_cell(table, STYLE_PLAIN, "%s", human_size((uint64_t)number_of(row, "bytes"), size));
                if (of)
                        table_cell(table, STYLE_PLAIN, "%s", human_size((uint64_t)number_of(row, "written"), size));
        }
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
        if (shown < json_array_size(list))
                term_print(STYLE_DIM, "and %zu smaller ones\n", json_array_size(list) - shown);
        printf("\n");
}

void stats_print(const json_t *stats)
{
        char bytes[HUMAN_MAX], written[HUMAN_MAX];

        term_print(STYLE_BOLD, "%s", text_of(stats, "path"));
        printf("  %.0f checkpoints, %s; %s were written, the rest was there already\n\n", number_of(stats, "version_count"),
               human_size((uint64_t)number_of(stats, "bytes"), bytes), human_size((uint64_t)number_of(stats, "written"), written));
        if (number_of(stats, "version_count") <= 0)
                return;
        print_groups(json_object_get(stats, "jobs"), "JOB", "job", "CHECKPOINTS", "WRITTEN");
        print_groups(json_object_get(stats, "months"), "MONTH", "month", "CHECKPOINTS", "WRITTEN");
        print_groups(json_object_get(stats, "items"), "ITEM", "name", "FILES", NULL);
        print_groups(json_object_get(stats, "rules"), "PRUNE WITH", "rule", "REMOVES", NULL);
}
