#include "cli/jobs.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/table.h"
#include "cli/target.h"
#include "cli/verdict.h"
#include "os/os.h"
#include "store/index.h"
#include "store/scan.h"

/* With one request of one page: whether the path has versions of its own. */
static enum nebula_status is_job(struct store *store, bool *ret_is, struct nebula_error *error)
{
        struct store_page page = { 0 };
        enum nebula_status status = store->ops->list(store, INDEX_PREFIX, false, NULL, &page, error);

        *ret_is = !status && page.count > 0;
        store_page_done(&page);
        return status;
}

/* The agent's jobs in that path: the worst verdict, and the number of trainers that are connected. */
static void add_agent(json_t *row, const json_t *report, const char *path)
{
        const json_t *jobs = json_object_get(report, "jobs"), *worst = NULL;
        double trainers = 0, in_memory = 0;

        for (size_t i = 0; i < json_array_size(jobs); i++) {
                const json_t *job = json_array_get(jobs, i), *verdict = json_object_get(job, "verdict");

                if (strcmp(text_of(job, "path"), path))
                        continue;
                trainers += number_of(job, "trainer_count");
                in_memory += number_of(job, "memory_count");
                if (verdict && (!worst || verdict_number(verdict) > verdict_number(worst)))
                        worst = verdict;
        }
        json_object_set_new(row, "trainer_count", json_integer((json_int_t)trainers));
        json_object_set_new(row, "memory_count", json_integer((json_int_t)in_memory));
        json_object_set(row, "verdict", worst ? (json_t *)(uintptr_t)worst : json_null());
}

/* `name`: below the given path; "": that path itself. A path without versions becomes no row, unless it is the agent's. */
static void add_row(json_t *jobs, const char *path, const char *name, struct store *store, const json_t *report)
{
        struct manifest newest = { 0 };
        struct nebula_error error = { 0 };
        enum nebula_status status = target_load(store, NULL, &newest, NULL, &error);
        json_t *row = json_pack("{s:s, s:s, s:s?, s:I, s:f, s:I, s:s}", "name", *name ? name : path, "path", path, "newest", status ? NULL : newest.tag, "step",
                                (json_int_t)(status ? -1 : newest.step), "committed_at", status ? 0.0 : (double)newest.sequence / 1e9, "size",
                                (json_int_t)(status ? 0 : manifest_size(&newest)), "reason", status && status != NEBULA_NOT_FOUND ? error.message : "");

        add_agent(row, report, path);
        json_array_append_new(jobs, row);
        manifest_done(&newest);
}

static bool has_row(const json_t *jobs, const char *path)
{
        for (size_t i = 0; i < json_array_size(jobs); i++)
                if (!strcmp(text_of(json_array_get(jobs, i), "path"), path))
                        return true;
        return false;
}

/* A job whose first version is not in storage yet, or whose storage is not there. */
static void add_unsaved(json_t *jobs, const char *parent, const json_t *report)
{
        const json_t *known = json_object_get(report, "jobs");
        size_t length = strlen(parent);

        for (size_t i = 0; i < json_array_size(known); i++) {
                const char *path = text_of(json_array_get(known, i), "path");
                const char *name = !strncmp(path, parent, length) && path[length] == '/' ? path + length + 1 : "";
                struct store *store;

                if (!*name || strchr(name, '/') || has_row(jobs, path) || store_open(path, &store, NULL))
                        continue;
                add_row(jobs, path, name, store, report);
                store_close(store);
        }
}

static enum nebula_status open_below(const char *parent, const char *key, char ret_path[TARGET_PATH_MAX], struct store **ret_store,
                                     struct nebula_error *error)
{
        enum nebula_status status = target_below(parent, key, ret_path, error);

        return status ? status : store_open(ret_path, ret_store, error);
}

static enum nebula_status add_below(const char *parent, struct store *store, const json_t *report, json_t *jobs, struct nebula_error *error)
{
        struct store_list list;
        enum nebula_status status = store_list_all(store, "", false, &list, error);

        if (status)
                return status;
        for (size_t i = 0; i < list.count; i++) {
                char path[TARGET_PATH_MAX];
                struct store *below;
                bool is = false;

                if (!list.entries[i].is_prefix || !strncmp(list.entries[i].key, MANIFEST_DIRECTORY, sizeof MANIFEST_DIRECTORY - 1) ||
                    open_below(parent, list.entries[i].key, path, &below, NULL))
                        continue;
                if (!is_job(below, &is, NULL) && is)
                        add_row(jobs, path, list.entries[i].key, below, report);
                store_close(below);
        }
        store_list_done(&list);
        return NEBULA_OK;
}

/* 0: broken, or its storage cannot be read; 1: at risk; 2: the others. */
static int badness(const json_t *row)
{
        int number = verdict_number(json_object_get(row, "verdict"));

        return *text_of(row, "reason") || number == 2 ? 0 : number == 1 ? 1 : 2;
}

/* The worst first, else in their order. */
static json_t *worst_first(json_t *jobs)
{
        json_t *sorted = json_array();

        for (int rank = 0; rank <= 2; rank++)
                for (size_t i = 0; i < json_array_size(jobs); i++)
                        if (badness(json_array_get(jobs, i)) == rank)
                                json_array_append(sorted, json_array_get(jobs, i));
        json_decref(jobs);
        return sorted;
}

enum nebula_status jobs_load(const char *given_path, json_t **ret_jobs, struct nebula_error *error)
{
        char path[TARGET_PATH_MAX];
        struct cli_agent *agent = NULL;
        struct store *store;
        json_t *report = NULL, *jobs;
        bool is = false;
        enum nebula_status status = given_path || getenv("NEBULA_PERSISTENT_STORAGE_PATH") ? target_path(given_path, path, error) : target_absolute(".", path, error);

        if (!status)
                status = store_open(path, &store, error);
        if (status)
                return status;
        if (cli_agent_open_if_any("", &agent))
                cli_agent_report(agent, NEBULA_REPORT_STATUS, path, &report, NULL);
        cli_agent_close(agent);
        jobs = json_array();
        status = is_job(store, &is, error);
        if (!status && is)
                add_row(jobs, path, "", store, report);
        else if (!status)
                status = add_below(path, store, report, jobs, error);
        store_close(store);
        if (!status && !is)
                add_unsaved(jobs, path, report);
        json_decref(report);
        if (status) {
                json_decref(jobs);
                return status;
        }
        *ret_jobs = json_pack("{s:s, s:b, s:o}", "path", path, "is_job", is, "jobs", worst_first(jobs));
        return NEBULA_OK;
}

void jobs_print(const json_t *answer)
{
        static const struct table_column columns[] = {
                { "JOB", TABLE_LEFT, true }, { "VERDICT", TABLE_LEFT, true }, { "NEWEST", TABLE_LEFT, true }, { "STEP", TABLE_RIGHT, false },
                { "SIZE", TABLE_RIGHT, false }, { "AGE", TABLE_RIGHT, false },
        };
        static const enum style styles[] = { STYLE_PLAIN, STYLE_GOOD, STYLE_WARN, STYLE_BAD };
        const json_t *jobs = json_object_get(answer, "jobs");
        struct table *table = table_new(columns, CLI_COUNT(columns));
        double now = (double)os->wall_ns() / 1e9;
        char size[HUMAN_MAX], age[HUMAN_MAX];

        for (size_t i = 0; i < json_array_size(jobs); i++) {
                const json_t *row = json_array_get(jobs, i), *verdict = json_object_get(row, "verdict");
                int number = verdict_number(verdict);
                bool has_newest = *text_of(row, "newest");

                table_cell(table, STYLE_PLAIN, "%s", text_of(row, "name"));
                if (*text_of(row, "reason"))
                        table_cell(table, STYLE_BAD, "%s", text_of(row, "reason"));
                else if (number > 0)
                        table_cell(table, styles[number + 1], "%s: %s", text_of(verdict, "state"), text_of(verdict, "reason"));
                else
                        table_cell(table, styles[number + 1], "%s", number < 0 ? "-" : text_of(verdict, "state"));
                table_cell(table, STYLE_PLAIN, "%s", has_newest ? text_of(row, "newest") : number_of(row, "memory_count") > 0 ? "only in memory" : "none yet");
                if (number_of(row, "step") < 0)
                        table_cell(table, STYLE_PLAIN, "-");
                else
                        table_cell(table, STYLE_PLAIN, "%.0f", number_of(row, "step"));
                table_cell(table, STYLE_PLAIN, "%s", has_newest ? human_size((uint64_t)number_of(row, "size"), size) : "-");
                table_cell(table, STYLE_PLAIN, "%s", human_age(number_of(row, "committed_at"), now, age));
        }
        if (json_array_size(jobs))
                table_print(table, stdout, term_columns(), term_has_colour());
        else
                term_print(STYLE_PLAIN, "no jobs in %s\n", text_of(answer, "path"));
        table_free(table);
}
