/*
 * nebula trace: one version's life as a Chrome trace, which Perfetto and chrome://tracing show.
 *
 * Each rank is a thread of the node whose record covers it: its copying, and the writing of the node's share. The version itself is a
 * process of its own. Times are microseconds since 1970, so that traces of other programs can be shown beside it.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/target.h"
#include "cli/term.h"
#include "os/os.h"
#include "store/manifest_load.h"
#include "store/record.h"

#define VERSION_PID 0 /* nodes count from 1 */

struct trace {
        json_t *events;
        double begun, ended; /* seconds since 1970, of all events; 0: no event yet */
        double slowest;      /* seconds of the slowest rank's copy */
        uint32_t slowest_rank;
        size_t ranks;
};

/* The nearest one: a time since 1970 with six decimals may lie just below it as a double. */
static double micros(double seconds)
{
        return round(seconds * 1e6);
}

static void add_name(struct trace *trace, const char *what, uint64_t pid, uint64_t tid, const char *name)
{
        json_array_append_new(trace->events, json_pack("{s:s, s:s, s:I, s:I, s:{s:s}}", "ph", "M", "name", what, "pid", (json_int_t)pid, "tid",
                                                       (json_int_t)tid, "args", "name", name));
}

static void widen(struct trace *trace, double from, double to)
{
        if (from > 0 && (trace->begun <= 0 || from < trace->begun))
                trace->begun = from;
        if (to > trace->ended)
                trace->ended = to;
}

/* Adds an interval to a thread. Clocks of several nodes may disagree: an interval that would end before its begin gets length 0. */
static void add_piece(struct trace *trace, const char *name, uint64_t pid, uint64_t tid, double from, double to, json_t *args)
{
        if (from > 0 && to > 0) {
                widen(trace, from, to);
                json_array_append_new(trace->events, json_pack("{s:s, s:s, s:s, s:f, s:f, s:I, s:I, s:O}", "ph", "X", "name", name, "cat", "nebula", "ts",
                                                           micros(from), "dur", to > from ? micros(to) - micros(from) : 0.0, "pid", (json_int_t)pid,
                                                           "tid", (json_int_t)tid, "args", args));
        }
        json_decref(args);
}

static void add_moment(struct trace *trace, const char *name, double at)
{
        if (at <= 0)
                return;
        widen(trace, at, at);
        json_array_append_new(trace->events, json_pack("{s:s, s:s, s:s, s:s, s:f, s:I, s:I}", "ph", "i", "name", name, "cat", "nebula", "s", "g", "ts",
                                                       micros(at), "pid", (json_int_t)VERSION_PID, "tid", (json_int_t)0));
}

static json_t *files_of(const struct record *record, uint32_t rank, uint64_t *ret_bytes)
{
        json_t *files = json_object();

        *ret_bytes = 0;
        for (size_t i = 0; i < record->file_count; i++) {
                if (record->files[i].rank != rank)
                        continue;
                *ret_bytes += record->files[i].size;
                json_object_set_new(files, record->files[i].name, json_integer((json_int_t)record->files[i].size));
        }
        return files;
}

static void add_rank(struct trace *trace, const struct record *record, const struct record_rank *rank, uint64_t pid)
{
        char name[64];
        uint64_t bytes;
        json_t *files = files_of(record, rank->rank, &bytes);
        double copied = rank->captured - rank->begun;

        snprintf(name, sizeof name, "rank %u", rank->rank);
        add_name(trace, "thread_name", pid, rank->rank, name);
        add_piece(trace, "copy to memory", pid, rank->rank, rank->begun, rank->captured,
                  json_pack("{s:I, s:I, s:o}", "rank", (json_int_t)rank->rank, "bytes", (json_int_t)bytes, "files", files));
        add_piece(trace, "write to storage", pid, rank->rank, rank->captured, record->persisted,
                  json_pack("{s:I, s:I, s:s}", "rank", (json_int_t)rank->rank, "bytes", (json_int_t)bytes, "writing", record->writing));
        if (copied > trace->slowest || !trace->ranks) {
                trace->slowest = copied;
                trace->slowest_rank = rank->rank;
        }
        trace->ranks++;
}

static enum nebula_status add_records(struct trace *trace, struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        char name[400];
        enum nebula_status status = NEBULA_OK;

        for (size_t r = 0; r < manifest->record_count && !status; r++) {
                struct record record = { 0 };

                status = manifest_load_record(store, manifest, r, &record, error);
                if (!status) {
                        snprintf(name, sizeof name, "node of rank %u%s", record.ranks[0].rank,
                                 manifest->records[r].sequence == manifest->sequence ? "" : " (an earlier writing)");
                        add_name(trace, "process_name", r + 1, 0, name);
                }
                for (size_t i = 0; i < record.rank_count && !status; i++)
                        add_rank(trace, &record, &record.ranks[i], r + 1);
                record_done(&record);
        }
        if (!status)
                add_moment(trace, "committed", (double)manifest->sequence / 1e9);
        return status;
}

/* Adds the times at which the agent saw the version change its state. Only the agent knows them. */
static void add_moves(struct trace *trace, const char *path, const char *tag)
{
        struct cli_agent *agent = NULL;
        json_t *report = NULL, *version, *move;
        size_t v, m;

        if (!cli_agent_open_if_any(path, &agent))
                return;
        if (!cli_agent_report(agent, NEBULA_REPORT_VERSIONS, path, &report, NULL)) {
                json_array_foreach(json_object_get(report, "versions"), v, version) {
                        const json_t *moves = json_object_get(version, "moves");

                        if (strcmp(text_of(version, "tag"), tag))
                                continue;
                        json_array_foreach(moves, m, move) {
                                const json_t *next = json_array_get(moves, m + 1);

                                if (next)
                                        add_piece(trace, text_of(move, "state"), VERSION_PID, 1, number_of(move, "at"), number_of(next, "at"), json_object());
                                else
                                        add_moment(trace, text_of(move, "state"), number_of(move, "at"));
                        }
                        if (json_array_size(moves))
                                add_name(trace, "thread_name", VERSION_PID, 1, "states, as this node's agent saw them");
                }
        }
        json_decref(report);
        cli_agent_close(agent);
}

static int by_time(const void *a, const void *b)
{
        double x = number_of(*(json_t *const *)a, "ts"), y = number_of(*(json_t *const *)b, "ts");

        return (x > y) - (x < y);
}

/* Sorts by time, because some readers require that. Names have no time and come first. */
static void sort_events(struct trace *trace)
{
        size_t count = json_array_size(trace->events);
        json_t **list = calloc(count + 1, sizeof *list), *sorted = json_array();

        for (size_t i = 0; list && i < count; i++)
                list[i] = json_array_get(trace->events, i);
        if (list)
                qsort(list, count, sizeof *list, by_time);
        for (size_t i = 0; list && i < count; i++)
                json_array_append(sorted, list[i]);
        free(list);
        json_decref(trace->events);
        trace->events = sorted;
}

static enum nebula_status write_file(const char *given, const json_t *document, struct nebula_error *error)
{
        char path[TARGET_PATH_MAX];
        char *text = json_dumps(document, JSON_COMPACT | JSON_REAL_PRECISION(17));
        enum nebula_status status = target_absolute(given, path, error);
        int result;

        if (!status && !text)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the trace");
        if (!status) {
                result = os_write_file_atomic(path, text, strlen(text));
                if (result)
                        status = error_set(error, error_status_of_errno(-result), -result, "cannot write %s", path);
        }
        free(text);
        return status;
}

static int finish(struct trace *trace, const struct manifest *manifest, const char *out)
{
        char text[HUMAN_MAX], copied[HUMAN_MAX], name[300];
        struct nebula_error error;
        json_t *document;
        int code = CLI_OK;

        snprintf(name, sizeof name, "checkpoint %s", manifest->tag);
        add_name(trace, "process_name", VERSION_PID, 0, name);
        add_name(trace, "thread_name", VERSION_PID, 0, "life");
        add_piece(trace, manifest->tag, VERSION_PID, 0, trace->begun, trace->ended,
                  json_pack("{s:I, s:I, s:I, s:s}", "step", (json_int_t)manifest->step, "sequence", (json_int_t)manifest->sequence, "bytes",
                            (json_int_t)manifest_size(manifest), "job", manifest->job));
        sort_events(trace);
        document = json_pack("{s:O, s:s, s:{s:s, s:s}}", "traceEvents", trace->events, "displayTimeUnit", "ms", "otherData", "tag", manifest->tag,
                             "program", "nebula " NEBULA_VERSION);
        if (!out)
                return cli_print_json_line(document, CLI_OK);
        if (write_file(out, document, &error)) {
                code = cli_fail(false, &error);
        } else {
                term_print(STYLE_BOLD, "%s", manifest->tag);
                term_print(STYLE_PLAIN, "  %zu rank%s, %s from the first save to storage; slowest copy: rank %u, %s\n", trace->ranks,
                           trace->ranks == 1 ? "" : "s", human_duration(trace->ended - trace->begun, text), trace->slowest_rank,
                           human_duration(trace->slowest, copied));
                term_print(STYLE_PLAIN, "%s: open it at https://ui.perfetto.dev\n", out);
        }
        json_decref(document);
        return code;
}

int command_trace(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const char *out = NULL;
        const struct args_option options[] = { CLI_COMMON(common), { "out", ARGS_TEXT, &out } };
        struct store *store = NULL;
        struct manifest manifest = { 0 };
        struct trace trace = { .events = json_array() };
        struct nebula_error error;
        struct args args;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 1, 1))
                code = CLI_USAGE;
        else if (target_open(common.path, &store, &error) || target_load(store, args.positionals[0], &manifest, NULL, &error) ||
                 add_records(&trace, store, &manifest, &error))
                code = cli_fail(common.json, &error);
        else {
                add_moves(&trace, store->root, manifest.tag);
                code = finish(&trace, &manifest, out);
        }
        json_decref(trace.events);
        manifest_done(&manifest);
        if (store)
                store_close(store);
        return code;
}
