/* nebula prune: removes old versions from storage, by the agent's own rules. */
#include <fnmatch.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/table.h"
#include "cli/target.h"
#include "os/os.h"
#include "store/leases.h"
#include "store/manifest_remove.h"
#include "store/pins.h"
#include "store/scan.h"
#include "store/thin.h"

#define REASONS_MAX 160

struct prune {
        uint64_t keep_last, keep_every, hourly, daily, weekly; /* 0: not given */
        double within_s;
        const char *tag, *job, *thin;   /* NULL: not given */
        uint64_t entry;                 /* number of the version's entry in the tag's log; 0: any */
        bool abandoned, yes;
};

/* The bytes that go: the version, or with --thin its files of that name. */
static uint64_t goes(const struct prune *prune, const struct manifest *manifest)
{
        uint64_t bytes = 0;

        if (!prune->thin)
                return manifest_size(manifest);
        for (size_t i = 0; i < manifest->file_count; i++)
                if (!fnmatch(prune->thin, manifest->files[i].name, 0))
                        bytes += manifest->files[i].size;
        return bytes;
}

static enum nebula_status take_away(const struct prune *prune, struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        struct manifest now = { 0 };
        uint64_t bytes;
        enum nebula_status status;

        if (!prune->thin)
                return manifest_remove(store, manifest, error);
        status = thin_version(store, manifest, prune->thin, &now, &bytes, error);
        if (!status)
                manifest_done(&now);
        return status == NEBULA_INVALID ? NEBULA_BUSY : status; /* all its files match: it stays */
}

static bool has_rule(const struct prune *prune)
{
        return prune->keep_last || prune->keep_every || prune->hourly || prune->daily || prune->weekly || prune->within_s > 0;
}

/* Sets drop[i] and why[i] (store/order.h) by the rules for the versions of one job; versions of other jobs do not count. */
static enum nebula_status plan_job(const struct prune *prune, const struct manifest_scan *scan, const char *job, bool *drop, unsigned *why,
                                   struct nebula_error *error)
{
        /* Without --keep-last, the newest version stays all the same. */
        struct order_rule rule = { .last = (uint32_t)(prune->keep_last ? prune->keep_last : 1), .every = prune->keep_every,
                                   .hourly = (uint32_t)prune->hourly, .daily = (uint32_t)prune->daily, .weekly = (uint32_t)prune->weekly,
                                   .within_s = prune->within_s };
        struct order_entry *entries = manifest_scan_entries(scan);
        bool *stay = calloc(scan->count + 1, sizeof *stay), is_done;
        unsigned *reasons = calloc(scan->count + 1, sizeof *reasons);

        for (size_t i = 0; entries && i < scan->count; i++)
                entries[i].counts = !strcmp(entries[i].job, job);
        is_done = entries && stay && reasons && order_stay(entries, scan->count, &rule, has_rule(prune), stay, reasons);
        for (size_t i = 0; is_done && i < scan->count; i++) {
                why[i] |= reasons[i];
                drop[i] = drop[i] || !stay[i] || (prune->abandoned && entries[i].counts && entries[i].is_abandoned);
        }
        free(entries);
        free(stay);
        free(reasons);
        return is_done ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to plan for %zu checkpoints", scan->count);
}

static enum nebula_status plan_tag(const struct prune *prune, const struct manifest_scan *scan, bool *drop,
                                   struct nebula_error *error)
{
        for (size_t i = 0; i < scan->count; i++) {
                if (strcmp(scan->manifests[i].tag, prune->tag))
                        continue;
                if (prune->entry && prune->entry != scan->manifests[i].number)
                        return error_set(error, NEBULA_BUSY, 0, "\"%s\" was written again meanwhile: it is entry %" PRIu64 " of its log, not %" PRIu64
                                         ", and stays", prune->tag, scan->manifests[i].number, prune->entry);
                if (manifest_scan_newest(scan, scan->manifests[i].job) == (int64_t)i)
                        return error_set(error, NEBULA_BUSY, 0,
                                         "\"%s\" is the newest complete checkpoint, which a restart would load: it stays",
                                         prune->tag);
                drop[i] = true;
                return NEBULA_OK;
        }
        if (!strcmp(prune->tag, "latest") && scan->count)
                return error_set(error, NEBULA_BUSY, 0,
                                 "\"latest\" is the newest complete checkpoint, which a restart would load: it stays");
        return error_set(error, NEBULA_NOT_FOUND, 0, "no complete checkpoint \"%s\"", prune->tag);
}

static bool knows_job(const struct manifest_scan *scan, const char *job)
{
        for (size_t i = 0; i < scan->count; i++)
                if (!strcmp(scan->manifests[i].job, job))
                        return true;
        return false;
}

static enum nebula_status plan(const struct prune *prune, const struct manifest_scan *scan, bool *drop, unsigned *why,
                               struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        if (prune->tag)
                return plan_tag(prune, scan, drop, error);
        if (prune->job && !knows_job(scan, prune->job))
                return error_set(error, NEBULA_NOT_FOUND, 0, "no complete checkpoint of a job \"%s\"", prune->job);
        for (size_t i = 0; i < scan->count && !status; i++) {
                const char *job = scan->manifests[i].job;
                size_t first = 0;

                while (strcmp(scan->manifests[first].job, job))
                        first++;
                if (first == i && (!prune->job || !strcmp(prune->job, job)))
                        status = plan_job(prune, scan, job, drop, why, error);
        }
        return status;
}

/* Whether the agent will write a later version of the tag to storage, perhaps with files of this one. */
static bool is_followed(const json_t *report, const struct manifest *manifest)
{
        const json_t *versions = json_object_get(report, "versions"), *one;
        size_t index;

        json_array_foreach(versions, index, one) {
                const char *state = text_of(one, "state");
                bool is_open = !strcmp(state, nebula_state_name(NEBULA_STATE_CAPTURING)) ||
                               !strcmp(state, nebula_state_name(NEBULA_STATE_CAPTURED));

                if (!strcmp(text_of(one, "tag"), manifest->tag) && !strcmp(text_of(one, "job"), manifest->job) &&
                    !lies_in(one, "storage") && strcmp(state, nebula_state_name(NEBULA_STATE_FAILED)) &&
                    (is_open || (lies_in(one, "memory") && (uint64_t)json_integer_value(json_object_get(one, "sequence")) > manifest->sequence)))
                        return true;
        }
        return false;
}

/* Keeps versions that this machine's agent is writing again, as the agent's own retention does. If --tag names such a version, refuses. */
static enum nebula_status spare_followed(const char *given_path, const char *tag, const struct manifest_scan *scan,
                                         bool *drop, struct nebula_error *error)
{
        char path[TARGET_PATH_MAX];
        struct cli_agent *agent = NULL;
        json_t *report = NULL;
        enum nebula_status status = target_path(given_path, path, error);

        if (status || !cli_agent_open_if_any(path, &agent))
                return status;
        status = cli_agent_report(agent, NEBULA_REPORT_MEMORY, path, &report, error);
        cli_agent_close(agent);
        for (size_t i = 0; i < scan->count && !status; i++) {
                if (!drop[i] || !is_followed(report, &scan->manifests[i]))
                        continue;
                if (tag)
                        status = error_set(error, NEBULA_BUSY, 0, "\"%s\" stays: the running agent is writing it again, perhaps "
                                                                  "with files of this version", tag);
                drop[i] = false;
        }
        json_decref(report);
        return status;
}

/* Keeps pinned versions against all rules. If --tag names one, refuses. */
static enum nebula_status spare_pinned(struct store *store, const char *tag, const struct manifest_scan *scan, bool *drop, struct pins *ret_pins,
                                       struct nebula_error *error)
{
        enum nebula_status status = pins_load(store, true, ret_pins, error);

        if (!status)
                status = leases_add(store, ret_pins, error);
        for (size_t i = 0; i < scan->count && !status; i++) {
                const struct pin *pin = drop[i] ? pins_find(ret_pins, scan->manifests[i].tag) : NULL;

                if (pin && tag && pin->is_lease)
                        status = error_set(error, NEBULA_BUSY, 0, "\"%s\" stays: %s", tag, pin->reason);
                else if (pin && tag)
                        status = error_set(error, NEBULA_BUSY, 0, "\"%s\" stays: it is pinned%s%.200s; see `nebula unpin --help`", tag,
                                           *pin->reason ? ": " : "", pin->reason);
                drop[i] = drop[i] && !pin;
        }
        return status;
}

/* Adds a reason to the text, which begins empty. */
static void add_reason(char text[REASONS_MAX], const char *reason)
{
        size_t used = strlen(text);

        snprintf(text + used, REASONS_MAX - used, "%s%s", used ? ", " : "", reason);
}

/* Why a version stays, in the words of the options. Without rules the newest alone has a reason. */
static void name_reasons(const struct prune *prune, unsigned why, const struct pin *pin, char text[REASONS_MAX])
{
        static const struct {
                enum order_why why;
                const char *name;
        } names[] = { { ORDER_WHY_NEWEST, "newest" }, { ORDER_WHY_LAST, "last" }, { ORDER_WHY_HOURLY, "hourly" }, { ORDER_WHY_DAILY, "daily" },
                      { ORDER_WHY_WEEKLY, "weekly" }, { ORDER_WHY_WITHIN, "within" }, { ORDER_WHY_ABANDONED, "abandoned not long ago" } };
        char every[40];

        *text = 0;
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
                if (why & names[i].why && (names[i].why != ORDER_WHY_LAST || prune->keep_last))
                        add_reason(text, names[i].name);
        snprintf(every, sizeof every, "every %" PRIu64, prune->keep_every);
        if (why & ORDER_WHY_EVERY)
                add_reason(text, every);
        if (pin)
                add_reason(text, pin->is_lease ? "read" : "pinned");
}

static void print_plan(const struct prune *prune, const struct manifest_scan *scan, const bool *drop, const unsigned *why, const struct pins *pins,
                       const char *verb)
{
        static const struct table_column columns[] = {
                { "TAG", TABLE_LEFT, true }, { "STEP", TABLE_RIGHT, false }, { "SIZE", TABLE_RIGHT, false },
                { "AGE", TABLE_RIGHT, false }, { "", TABLE_LEFT, false },
        };
        struct table *table = table_new(columns, CLI_COUNT(columns));
        double now = (double)os->wall_ns() / 1e9;
        char size[HUMAN_MAX], age[HUMAN_MAX], reasons[REASONS_MAX];

        for (size_t i = 0; i < scan->count; i++) {
                const struct manifest *one = &scan->manifests[i];

                name_reasons(prune, why[i], pins_find(pins, one->tag), reasons);

                table_cell(table, STYLE_PLAIN, "%s", one->tag);
                if (one->step < 0)
                        table_cell(table, STYLE_PLAIN, "-");
                else
                        table_cell(table, STYLE_PLAIN, "%" PRId64, one->step);
                table_cell(table, STYLE_PLAIN, "%s", human_size(manifest_size(one), size));
                table_cell(table, STYLE_PLAIN, "%s", human_age((double)one->sequence / 1e9, now, age));
                table_cell(table, drop[i] ? STYLE_BAD : STYLE_GOOD, "%s%s%s%s", drop[i] ? verb : "stays", one->is_abandoned ? ", abandoned" : "",
                           !drop[i] && *reasons ? ": " : "", drop[i] ? "" : reasons);
        }
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
}

static const char *pin_reason(const struct pins *pins, const char *tag)
{
        const struct pin *pin = pins_find(pins, tag);

        return pin && !pin->is_lease ? pin->reason : NULL;
}

static json_t *plan_json(const struct prune *prune, const struct manifest_scan *scan, const bool *drop, const unsigned *why, const struct pins *pins,
                         uint64_t bytes)
{
        json_t *removed = json_array(), *kept = json_array();
        char reasons[REASONS_MAX];

        for (size_t i = 0; i < scan->count; i++) {
                name_reasons(prune, why[i], pins_find(pins, scan->manifests[i].tag), reasons);
                json_array_append_new(drop[i] ? removed : kept,
                                      json_pack("{s:s, s:s, s:I, s:I, s:I, s:b, s:s?, s:s}", "tag", scan->manifests[i].tag, "job",
                                                scan->manifests[i].job, "entry", (json_int_t)scan->manifests[i].number, "step", (json_int_t)scan->manifests[i].step, "size",
                                                (json_int_t)manifest_size(&scan->manifests[i]), "abandoned",
                                                scan->manifests[i].is_abandoned, "pinned", pin_reason(pins, scan->manifests[i].tag), "stays", drop[i] ? "" : reasons));
        }
        return json_pack("{s:b, s:I, s:o, s:o}", "dry_run", !prune->yes, "bytes", (json_int_t)bytes, "removed", removed, "kept",
                         kept);
}

static int carry_out(const struct prune *prune, bool json, struct store *store, const struct manifest_scan *scan, const struct pins *pins,
                     bool *drop, const unsigned *why)
{
        struct nebula_error error = { 0 };
        char size[HUMAN_MAX], before[40];
        uint64_t bytes = 0;
        size_t count = 0;

        for (size_t i = 0; i < scan->count; i++) {
                uint64_t size_of_one = goes(prune, &scan->manifests[i]);

                drop[i] = drop[i] && (!prune->thin || size_of_one);
                if (!drop[i])
                        continue;
                if (prune->yes && take_away(prune, store, &scan->manifests[i], &error)) {
                        if (error.status != NEBULA_BUSY) {
                                snprintf(before, sizeof before, ", after %zu that were", count);
                                error_prefix(&error, "\"%.200s\" could not be removed%s", scan->manifests[i].tag, count ? before : "");
                                return cli_fail(json, &error);
                        }
                        cli_complain("%s", error.message);
                        drop[i] = false;
                        continue;
                }
                bytes += size_of_one;
                count++;
        }
        if (json)
                return cli_print_json(plan_json(prune, scan, drop, why, pins, bytes), CLI_OK);
        if (scan->count)
                print_plan(prune, scan, drop, why, pins, prune->thin ? (prune->yes ? "thinned" : "would be thinned") : prune->yes ? "removed" : "would go");
        if (!count)
                printf("nothing to remove\n");
        else if (prune->yes)
                printf("%s%s%s %zu of %zu checkpoints, %s\n", prune->thin ? "removed " : "removed", prune->thin ? prune->thin : "",
                       prune->thin ? " from" : "", count, scan->count, human_size(bytes, size));
        else
                printf("would remove %s%s%zu of %zu checkpoints, %s; nothing was removed, add --yes to remove them\n", prune->thin ? prune->thin : "",
                       prune->thin ? " from " : "", count, scan->count, human_size(bytes, size));
        return CLI_OK;
}

int command_prune(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const char *within = NULL;
        struct prune prune = { 0 };
        const struct args_option options[] = {
                CLI_COMMON(common), { "keep-last", ARGS_NUMBER, &prune.keep_last, UINT32_MAX },
                { "keep-every", ARGS_NUMBER, &prune.keep_every }, { "tag", ARGS_TEXT, &prune.tag },
                { "keep-hourly", ARGS_NUMBER, &prune.hourly, UINT32_MAX }, { "keep-daily", ARGS_NUMBER, &prune.daily, UINT32_MAX },
                { "keep-weekly", ARGS_NUMBER, &prune.weekly, UINT32_MAX }, { "keep-within", ARGS_TEXT, &within },
                { "entry", ARGS_NUMBER, &prune.entry },
                { "job", ARGS_TEXT, &prune.job },
                { "thin", ARGS_TEXT, &prune.thin },
                { "abandoned", ARGS_FLAG, &prune.abandoned }, { "yes", ARGS_FLAG, &prune.yes },
        };
        struct manifest_scan scan = { 0 };
        struct pins pins = { 0 };
        struct nebula_error error;
        struct store *store = NULL;
        bool *drop = NULL;
        unsigned *why = NULL;
        struct args args;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (within && (conf_parse_duration("--keep-within", within, &prune.within_s, &error) || !(prune.within_s > 0)))
                return cli_usage_error("prune", "--keep-within takes a time, such as 14d or 36h");
        if (!prune.tag == !(has_rule(&prune) || prune.abandoned))
                return cli_usage_error("prune", "say which checkpoints to keep (--keep-last, --keep-every, --keep-hourly, --keep-daily, --keep-weekly, "
                                                "--keep-within) or which to remove (--abandoned, --tag)");
        if (prune.entry && !prune.tag)
                return cli_usage_error("prune", "--entry is for --tag");
        if (prune.thin && !*prune.thin)
                return cli_usage_error("prune", "--thin needs a pattern of file names, for example 'optimizer*'");
        if (prune.tag && prune.job)
                return cli_usage_error("prune", "--tag and --job cannot be used together");
        if (target_open(common.path, &store, &error) || manifest_scan(store, &scan, &error)) {
                code = cli_fail(common.json, &error);
                goto out;
        }
        drop = calloc(scan.count + 1, sizeof *drop);
        why = calloc(scan.count + 1, sizeof *why);
        if (!drop || !why) {
                error_set(&error, NEBULA_NO_MEMORY, 0, "no memory to plan for %zu checkpoints", scan.count);
                code = cli_fail(common.json, &error);
        } else if (plan(&prune, &scan, drop, why, &error) || spare_followed(common.path, prune.tag, &scan, drop, &error) ||
                   spare_pinned(store, prune.tag, &scan, drop, &pins, &error)) {
                code = cli_fail(common.json, &error);
                if (error.status == NEBULA_BUSY)
                        code = CLI_REFUSED;
        } else {
                code = carry_out(&prune, common.json, store, &scan, &pins, drop, why);
        }
out:
        free(drop);
        free(why);
        pins_done(&pins);
        manifest_scan_done(&scan);
        if (store)
                store_close(store);
        return code;
}
