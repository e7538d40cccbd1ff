#include "cli/versions.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/about.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/verdict.h"
#include "cli/verified.h"
#include "cli/vouch.h"
#include "os/os.h"
#include "store/line_document.h"
#include "store/manifest_load.h"
#include "store/metrics.h"
#include "store/order.h"
#include "store/scan.h"
#include "sum/sum.h"

static struct version *find(struct versions *versions, const char *tag, const char *job, uint64_t sequence)
{
        for (size_t i = 0; i < versions->count; i++) {
                struct version *one = &versions->list[i];

                if (one->sequence == sequence && !strcmp(one->tag, tag) && !strcmp(one->job, job))
                        return one;
        }
        return NULL;
}

static void add_manifest(struct versions *versions, const struct manifest *manifest)
{
        struct version *version = &versions->list[versions->count++];

        snprintf(version->tag, sizeof version->tag, "%s", manifest->tag);
        snprintf(version->job, sizeof version->job, "%s", manifest->job);
        snprintf(version->state, sizeof version->state, "%s", nebula_state_name(NEBULA_STATE_DURABLE));
        version->step = manifest->step;
        version->number = manifest->number;
        version->size = manifest_size(manifest);
        version->written = manifest_written(manifest);
        version->file_count = manifest_count(manifest);
        version->committed = version->moved = (double)manifest->sequence / 1e9;
        version->in_storage = true;
        version->sequence = manifest->sequence;
        version->line = manifest->line;
}

static double first_move(const json_t *report)
{
        return number_of(json_array_get(json_object_get(report, "moves"), 0), "at");
}

static void add_report(struct versions *versions, const json_t *report)
{
        const char *tag = text_of(report, "tag"), *job = text_of(report, "job");
        const json_t *step = json_object_get(report, "step");
        uint64_t sequence = (uint64_t)json_integer_value(json_object_get(report, "sequence"));
        struct version *version = sequence ? find(versions, tag, job, sequence) : NULL;
        struct document_reader reader = { .kind = "report" };

        if (!*tag)
                return;
        if (!version) {
                version = &versions->list[versions->count++];
                snprintf(version->tag, sizeof version->tag, "%s", tag);
                snprintf(version->job, sizeof version->job, "%s", job);
                version->step = json_is_integer(step) ? (int64_t)json_integer_value(step) : -1;
                version->size = (uint64_t)number_of(report, "size");
                version->file_count = json_array_size(json_object_get(report, "files"));
                version->committed = number_of(report, "committed_at");
                version->moved = version->committed > 0 ? version->committed : first_move(report);
                version->in_storage = lies_in(report, "storage");
                version->written = version->in_storage ? (uint64_t)number_of(report, "written") : version->size;
                snprintf(version->state, sizeof version->state, "%s", text_of(report, "state"));
                version->sequence = sequence;
                line_parse(&reader, report, &version->line);
        }
        version->in_memory = lies_in(report, "memory");
        snprintf(version->error, sizeof version->error, "%s", text_of(report, "error"));
}

static int compare(const void *a, const void *b)
{
        const struct version *x = a, *y = b;

        if (x->moved != y->moved)
                return x->moved < y->moved ? -1 : 1;
        return strcmp(x->tag, y->tag);
}

static enum nebula_status mark_abandoned(struct versions *versions, struct nebula_error *error)
{
        struct order_entry *entries = calloc(versions->count + 1, sizeof *entries);
        bool is_done;

        for (size_t i = 0; entries && i < versions->count; i++) {
                const struct version *one = &versions->list[i];

                entries[i] = order_entry(one->tag, one->sequence, &one->line);
                entries[i].counts = one->sequence && (one->in_memory || one->in_storage);
                entries[i].job = one->job;
        }
        is_done = entries && order_mark(entries, versions->count);
        for (size_t i = 0; is_done && i < versions->count; i++)
                versions->list[i].is_abandoned = entries[i].is_abandoned;
        free(entries);
        return is_done ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to order the checkpoints");
}

/* Merges what was read already; `report` (NEBULA_REPORT_MEMORY) may be NULL. */
static enum nebula_status merge(const struct manifest_scan *scan, const json_t *report, struct versions *versions,
                                struct nebula_error *error)
{
        const json_t *reported = json_object_get(report, "versions");

        versions->list = calloc(scan->count + json_array_size(reported) + 1, sizeof *versions->list);
        if (!versions->list)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list the checkpoints");
        for (size_t i = 0; i < scan->count; i++)
                add_manifest(versions, &scan->manifests[i]);
        for (size_t i = 0; i < json_array_size(reported); i++)
                add_report(versions, json_array_get(reported, i));
        qsort(versions->list, versions->count, sizeof *versions->list, compare);
        versions->broken_count = scan->broken_count;
        memcpy(versions->broken, scan->broken, sizeof versions->broken);
        return mark_abandoned(versions, error);
}

struct reporting {
        const struct versions_progress *progress;
        const struct versions *versions; /* with the path, and without a list */
        const json_t *report;
};

static void report_scan(void *argument, const struct manifest_scan *newest, size_t read, size_t count)
{
        const struct reporting *reporting = argument;
        struct versions versions = *reporting->versions;

        if (!merge(newest, reporting->report, &versions, NULL))
                reporting->progress->report(reporting->progress->argument, &versions, read, count);
        free(versions.list);
}

/* The index is a hint: the newest version is loadable if its own documents say so. */
static void confirm_newest(struct store *store, struct manifest_scan *seen)
{
        int64_t index = manifest_scan_newest(seen, NULL);
        struct manifest newest;

        if (index < 0 || seen->manifests[index].sequence == seen->confirmed ||
            manifest_scan_load_newest(store, seen, NULL, &newest, &index, NULL))
                return;
        seen->confirmed = newest.sequence;
        manifest_done(&newest);
}

static enum nebula_status scan_path(const char *path, const struct reporting *reporting, struct manifest_scan *seen, struct pins *ret_pins,
                                    json_t **ret_verified, struct nebula_error *error)
{
        const struct manifest_scan_options options = { .by_index = true, .report = reporting->progress ? report_scan : NULL,
                                                       .argument = (void *)(uintptr_t)reporting };
        struct store *store;
        enum nebula_status status = store_open(path, &store, error);

        if (status)
                return status;
        status = manifest_scan_again(store, &options, seen, error);
        if (!status)
                confirm_newest(store, seen);
        if (!status && pins_load(store, true, ret_pins, error)) {
                cli_complain("the pins cannot be read: %s", error ? error->message : "");
                *ret_pins = (struct pins){ 0 };
        }
        if (!status)
                *ret_verified = verified_load(store);
        store_close(store);
        return status;
}

/* A check that was stopped in the middle counts only if it has found damage. */
static void add_verified(struct versions *versions, const json_t *verified)
{
        struct verified found;

        for (size_t i = 0; versions->list && i < versions->count; i++) {
                struct version *one = &versions->list[i];

                if (!one->in_storage || !verified_find(verified, one->tag, one->sequence, &found) || (found.ok && found.done < one->file_count))
                        continue;
                one->verified_at = found.at;
                one->verified_ok = found.ok;
        }
}

enum nebula_status versions_load_again(const char *given_path, bool ask_agent, const struct versions_progress *progress,
                                       struct manifest_scan *seen, struct versions *ret_versions, struct nebula_error *error)
{
        struct versions versions = { 0 };
        static const struct manifest_scan nothing;
        const struct manifest_scan *found = seen;
        struct cli_agent *agent = NULL;
        json_t *report = NULL, *verified = NULL;
        enum nebula_status status = target_path(given_path, versions.path, error);

        *ret_versions = (struct versions){ 0 };
        if (status)
                return status;
        if (ask_agent && cli_agent_open_if_any(versions.path, &agent)) {
                versions.has_agent = !cli_agent_report(agent, NEBULA_REPORT_MEMORY, versions.path, &report, NULL);
                cli_agent_close(agent);
        }
        if (*versions.path) {
                status = scan_path(versions.path, &(struct reporting){ progress, &versions, report }, seen, &versions.pins, &verified, error);
                /* Nothing has been persisted yet: the first file makes the directory. */
                if (status == NEBULA_NOT_FOUND && json_array_size(json_object_get(report, "versions"))) {
                        status = NEBULA_OK;
                        found = &nothing;
                }
        } else if (!versions.has_agent) {
                status = error_set(error, NEBULA_INVALID, 0,
                                   "no agent is running and no storage path is known: give --path DIR, set "
                                   "NEBULA_PERSISTENT_STORAGE_PATH, or go to a directory with checkpoints");
        }
        if (!status)
                status = merge(found, report, &versions, error);
        else if (versions.has_agent)
                merge(&nothing, report, &versions, NULL);
        add_verified(&versions, verified);
        json_decref(verified);
        if (!status || versions.has_agent) {
                versions.verdicts = json_incref(json_object_get(report, "verdicts"));
                *ret_versions = versions;
        }
        json_decref(report);
        return status;
}

enum nebula_status versions_load(const char *given_path, bool ask_agent, struct versions *ret_versions, struct nebula_error *error)
{
        struct manifest_scan seen = { 0 };
        enum nebula_status status = versions_load_again(given_path, ask_agent, NULL, &seen, ret_versions, error);

        manifest_scan_done(&seen);
        return status;
}

void versions_load_metrics(struct versions *versions)
{
        struct store *store;

        versions->metrics = calloc(versions->count + 1, sizeof *versions->metrics);
        if (!versions->metrics || !*versions->path || store_open(versions->path, &store, NULL))
                return;
        for (size_t i = 0; i < versions->count; i++) {
                struct manifest manifest = { 0 };

                if (versions->list[i].in_storage && !manifest_load(store, versions->list[i].tag, &manifest, NULL))
                        versions->metrics[i] = about_load(store, &manifest);
                manifest_done(&manifest);
        }
        store_close(store);
}

void versions_load_signatures(struct versions *versions, bool always)
{
        struct store *store;

        if (!*versions->path || store_open(versions->path, &store, NULL))
                return;
        if (always || store->trust)
                versions->signatures = calloc(versions->count + 1, sizeof *versions->signatures);
        for (size_t i = 0; versions->signatures && i < versions->count; i++) {
                struct manifest manifest = { 0 };

                if (versions->list[i].in_storage && !manifest_load(store, versions->list[i].tag, &manifest, NULL))
                        versions->signatures[i] = vouch_list(store, &manifest);
                manifest_done(&manifest);
        }
        store_close(store);
}

struct ranked {
        struct version version;
        json_t *metrics;
        double value; /* the smallest is the best; infinity: it has none */
};

static int compare_ranked(const void *a, const void *b)
{
        const struct ranked *x = a, *y = b;

        if (x->value < y->value || x->value > y->value)
                return x->value < y->value ? -1 : 1;
        return x->version.moved < y->version.moved ? 1 : -1; /* of equal ones the newer */
}

bool versions_sort_by_metric(struct versions *versions, const char *metric, bool largest_first)
{
        struct ranked *list = versions->metrics ? calloc(versions->count + 1, sizeof *list) : NULL;
        bool has_any = false;

        for (size_t i = 0; list && i < versions->count; i++) {
                double value = metrics_value(json_object_get(versions->metrics[i], "metrics"), metric);

                has_any = has_any || !isnan(value);
                list[i] = (struct ranked){ versions->list[i], versions->metrics[i], isnan(value) ? INFINITY : largest_first ? -value : value };
        }
        if (list && has_any)
                qsort(list, versions->count, sizeof *list, compare_ranked);
        for (size_t i = 0; list && i < versions->count; i++) {
                versions->list[i] = list[i].version;
                versions->metrics[i] = list[i].metrics;
        }
        free(list);
        return has_any;
}

void versions_done(struct versions *versions)
{
        for (size_t i = 0; i < versions->count; i++) {
                json_decref(versions->metrics ? versions->metrics[i] : NULL);
                json_decref(versions->signatures ? versions->signatures[i] : NULL);
        }
        free(versions->metrics);
        free(versions->signatures);
        versions->metrics = versions->signatures = NULL;
        json_decref(versions->verdicts);
        pins_done(&versions->pins);
        free(versions->list);
        versions->list = NULL;
        versions->count = 0;
}

uint64_t versions_sum(const struct versions *versions)
{
        uint64_t sum = sum_crc64(0, versions->path, strlen(versions->path));

        sum = sum_crc64(sum, versions->broken, strlen(versions->broken));
        sum = sum_crc64(sum, &versions->broken_count, sizeof versions->broken_count);
        sum = sum_crc64(sum, &versions->has_agent, sizeof versions->has_agent);
        for (size_t i = 0; i < versions->pins.count; i++) {
                sum = sum_crc64(sum, versions->pins.list[i].tag, strlen(versions->pins.list[i].tag) + 1);
                sum = sum_crc64(sum, versions->pins.list[i].reason, strlen(versions->pins.list[i].reason) + 1);
        }
        return sum_crc64(sum, versions->list, versions->count * sizeof *versions->list); /* zeroed before they are filled */
}

static bool is_loadable(const struct version *one)
{
        return one->committed > 0 && strcmp(one->state, nebula_state_name(NEBULA_STATE_FAILED)) && !one->is_abandoned;
}

/* The newest version that a job would resume from; NULL: there is none. */
static const struct version *find_newest(const struct versions *versions)
{
        const struct version *newest = NULL;

        for (size_t i = 0; i < versions->count; i++) /* the list may be in the order of a metric */
                if (is_loadable(&versions->list[i]) && (!newest || compare(newest, &versions->list[i]) < 0))
                        newest = &versions->list[i];
        return newest;
}

json_t *versions_json(const struct versions *versions)
{
        const struct version *newest = find_newest(versions);
        json_t *list = json_array();

        for (size_t i = 0; i < versions->count; i++) {
                const struct version *one = &versions->list[i];
                const struct pin *pin = pins_find(&versions->pins, one->tag);
                json_t *where = json_array(), *row;

                if (one->in_memory)
                        json_array_append_new(where, json_string("memory"));
                if (one->in_storage)
                        json_array_append_new(where, json_string("storage"));
                row = json_pack("{s:s, s:s, s:I, s:I, s:s, s:I, s:I, s:I, s:f, s:o, s:b, s:s, s:s?}", "tag", one->tag, "job",
                                                one->job, "step", (json_int_t)one->step, "sequence",
                                                (json_int_t)one->sequence, "state", one->state, "size",
                                                (json_int_t)one->size, "written", (json_int_t)one->written, "file_count", (json_int_t)one->file_count,
                                                "committed_at", one->committed, "where", where, "abandoned", one->is_abandoned, "reason",
                                                one->error, "pinned", pin ? pin->reason : NULL);
                line_format(&one->line, row);
                if (one->number)
                        json_object_set_new(row, "entry", json_integer((json_int_t)one->number));
                json_object_set_new(row, "verified_at", one->verified_at > 0 ? json_real(one->verified_at) : json_null());
                json_object_set_new(row, "verified_ok", one->verified_at > 0 ? json_boolean(one->verified_ok) : json_null());
                if (versions->metrics && versions->metrics[i]) {
                        json_object_set(row, "metrics", json_object_get(versions->metrics[i], "metrics"));
                        json_object_set(row, "metadata", json_object_get(versions->metrics[i], "metadata"));
                }
                if (versions->signatures && versions->signatures[i])
                        json_object_set(row, "signatures", versions->signatures[i]);
                json_array_append_new(list, row);
        }
        return json_pack("{s:s, s:b, s:O?, s:o, s:s?, s:I, s:s}", "path", versions->path, "running", versions->has_agent, "verdicts", versions->verdicts, "versions", list, "newest",
                         newest ? newest->tag : NULL, "unreadable_count", (json_int_t)versions->broken_count, "first_unreadable", versions->broken);
}

static enum style style_of(const char *state)
{
        if (!strcmp(state, nebula_state_name(NEBULA_STATE_DURABLE)))
                return STYLE_GOOD;
        return strcmp(state, nebula_state_name(NEBULA_STATE_FAILED)) ? STYLE_WARN : STYLE_BAD;
}

static bool any_referred(const struct versions *versions)
{
        for (size_t i = 0; i < versions->count; i++)
                if (versions->list[i].written < versions->list[i].size)
                        return true;
        return false;
}

static const char *where_of(const struct version *one)
{
        if (one->in_memory)
                return one->in_storage ? "memory+storage" : "memory";
        return one->in_storage ? "storage" : "";
}

void versions_print_newest(const struct versions *versions)
{
        const struct version *newest = find_newest(versions), *last = versions->list + versions->count - 1;
        const struct version *problem = NULL;
        size_t newer = 0;

        for (const struct version *one = newest ? newest + 1 : versions->list; versions->count && one <= last; one++) {
                newer += !one->is_abandoned;
                if (*one->error && !one->is_abandoned && (!problem || one->step >= problem->step))
                        problem = one; /* several may have failed at one moment */
        }
        if (newest) {
                term_print(STYLE_BOLD, "newest   ");
                term_print(STYLE_PLAIN, "%s, %s, in %s\n", newest->tag, newest->state, where_of(newest));
        }
        if (problem)
                term_print(STYLE_BAD, "         %zu%s cannot be loaded: %s %s%s\n", newer, newest ? " newer" : "", problem->tag,
                           strcmp(problem->state, nebula_state_name(NEBULA_STATE_FAILED)) ? "" : "failed: ", problem->error);
}

void versions_print_head(const struct versions *versions)
{
        bool is_stuck = versions->count && find_newest(versions) != versions->list + versions->count - 1;

        verdict_print_all(versions->verdicts);
        if (is_stuck)
                versions_print_newest(versions);
        if (is_stuck || json_array_size(versions->verdicts))
                printf("\n");
}

static bool any_problem(const struct versions *versions, size_t first)
{
        for (size_t i = first; i < versions->count; i++)
                if (*versions->list[i].error)
                        return true;
        return false;
}

static bool any_verified(const struct versions *versions, size_t first)
{
        for (size_t i = first; i < versions->count; i++)
                if (versions->list[i].verified_at > 0)
                        return true;
        return false;
}

void versions_print(const struct versions *versions, size_t first)
{
        static const struct table_column columns[] = {
                { "TAG", TABLE_LEFT, true }, { "STEP", TABLE_RIGHT, false }, { "STATE", TABLE_LEFT, false },
                { "SIZE", TABLE_RIGHT, false }, { "FILES", TABLE_RIGHT, false }, { "AGE", TABLE_RIGHT, false },
                { "WHERE", TABLE_LEFT, false }, { "WRITTEN", TABLE_RIGHT, false }, { "METRICS", TABLE_LEFT, true }, { "VERIFIED", TABLE_RIGHT, false },
                { "SIGNED", TABLE_LEFT, true }, { "PINNED", TABLE_LEFT, true }, { "REASON", TABLE_LEFT, true },
        };
        struct table_column chosen[sizeof columns / sizeof columns[0]];
        size_t fixed = sizeof columns / sizeof columns[0] - 6, count = fixed;
        bool shows_written = any_referred(versions), shows_reason = any_problem(versions, first), shows_verified = any_verified(versions, first);
        struct table *table;
        double now = (double)os->wall_ns() / 1e9;
        char size[HUMAN_MAX], age[HUMAN_MAX], *said;

        memcpy(chosen, columns, fixed * sizeof *columns);
        if (shows_written)
                chosen[count++] = columns[fixed];
        if (versions->metrics)
                chosen[count++] = columns[fixed + 1];
        if (shows_verified)
                chosen[count++] = columns[fixed + 2];
        if (versions->signatures)
                chosen[count++] = columns[fixed + 3];
        if (versions->pins.count)
                chosen[count++] = columns[fixed + 4];
        if (shows_reason)
                chosen[count++] = columns[fixed + 5];
        table = table_new(chosen, count);
        for (size_t i = first; i < versions->count; i++) {
                const struct version *one = &versions->list[i];

                if (one->number > 1)
                        table_cell(table, STYLE_PLAIN, "%s (entry %" PRIu64 ")", one->tag, one->number);
                else
                        table_cell(table, STYLE_PLAIN, "%s", one->tag);
                if (one->step < 0)
                        table_cell(table, STYLE_PLAIN, "-");
                else
                        table_cell(table, STYLE_PLAIN, "%" PRId64, one->step);
                table_cell(table, one->is_abandoned ? STYLE_DIM : style_of(one->state), "%s%s", one->state, one->is_abandoned ? ", abandoned" : "");
                table_cell(table, STYLE_PLAIN, "%s", human_size(one->size, size));
                table_cell(table, STYLE_PLAIN, "%zu", one->file_count);
                table_cell(table, STYLE_PLAIN, "%s", human_age(one->moved, now, age));
                table_cell(table, STYLE_PLAIN, "%s", where_of(one));
                if (shows_written)
                        table_cell(table, STYLE_PLAIN, "%s", one->in_storage ? human_size(one->written, size) : "");
                if (versions->metrics) {
                        said = about_text(json_object_get(versions->metrics[i], "metrics"));
                        table_cell(table, STYLE_PLAIN, "%s", said ? said : "");
                        free(said);
                }
                if (shows_verified && one->verified_at > 0 && !one->verified_ok)
                        table_cell(table, STYLE_BAD, "DAMAGED");
                else if (shows_verified)
                        table_cell(table, STYLE_PLAIN, "%s", one->verified_at > 0 ? human_age(one->verified_at, now, age) : "never");
                if (versions->signatures) {
                        bool is_wrong;

                        said = vouch_short(versions->signatures[i], &is_wrong);
                        table_cell(table, is_wrong ? STYLE_BAD : STYLE_PLAIN, "%s", said ? said : "-");
                        free(said);
                }
                if (versions->pins.count) {
                        const struct pin *pin = pins_find(&versions->pins, one->tag);

                        table_cell(table, STYLE_PLAIN, "%s", !pin ? "" : *pin->reason ? pin->reason : "yes");
                }
                if (shows_reason)
                        table_cell(table, style_of(one->state), "%s", one->error);
        }
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
}
