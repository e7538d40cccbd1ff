/* nebula list: versions in storage and in the agent's memory, merged; --jobs: the jobs of a path; --stats, --find: what is in them. */
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/follow_best.h"
#include "cli/human.h"
#include "cli/jobs.h"
#include "cli/stats.h"
#include "cli/table.h"
#include "cli/target.h"
#include "cli/versions.h"

static int show(const struct cli_common *common, json_t *answer, void (*print)(const json_t *answer), int code)
{
        if (common->json)
                return cli_print_json(answer, code);
        print(answer);
        json_decref(answer);
        return code;
}

static int list_jobs(const struct cli_common *common)
{
        struct nebula_error error;
        json_t *answer;

        return jobs_load(common->path, &answer, &error) ? cli_fail(common->json, &error) : show(common, answer, jobs_print, CLI_OK);
}

/* `list --stats` and `list --find`. */
static int list_contents(const struct cli_common *common, const char *pattern)
{
        struct nebula_error error;
        struct store *store;
        json_t *answer;
        int code;

        if (target_open(common->path, &store, &error))
                return cli_fail(common->json, &error);
        if (pattern ? find_load(store, pattern, &answer, &error) : stats_load(store, &answer, &error))
                code = cli_fail(common->json, &error);
        else if (pattern)
                code = show(common, answer, find_print, json_array_size(json_object_get(answer, "matches")) ? CLI_OK : CLI_NOT_FOUND);
        else
                code = show(common, answer, stats_print, CLI_OK);
        store_close(store);
        return code;
}

int command_list(int argc, char **argv)
{
        struct cli_common common = { 0 };
        bool metrics = false, signatures = false, jobs = false, stats = false;
        const char *best = NULL, *pattern = NULL;
        const struct args_option options[] = { CLI_COMMON(common), { "metrics", ARGS_FLAG, &metrics }, { "signatures", ARGS_FLAG, &signatures }, { "jobs", ARGS_FLAG, &jobs }, { "stats", ARGS_FLAG, &stats },
                                               { "best", ARGS_TEXT, &best }, { "find", ARGS_TEXT, &pattern } };
        struct follow_best order = { 0 };
        struct versions versions;
        struct nebula_error error;
        enum nebula_status status;
        struct args args;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (jobs + stats + (pattern != NULL) + (metrics || best || signatures) > 1)
                return cli_usage_error("list", "--jobs, --stats and --find can be used neither together nor with --metrics, --signatures or --best");
        if (pattern && !*pattern)
                return cli_usage_error("list", "--find takes a name or a pattern, such as '*.attn.*'");
        if (best && !follow_best_parse(best, &order))
                return cli_usage_error("list", "--best takes METRIC, METRIC:min or METRIC:max, not \"%s\"", best);
        follow_best_done(&order);
        if (jobs)
                return list_jobs(&common);
        if (stats || pattern)
                return list_contents(&common, pattern);
        status = versions_load(common.path, true, &versions, &error);
        if (status && !versions.has_agent)
                return cli_fail(common.json, &error);
        if (metrics || best)
                versions_load_metrics(&versions);
        if (best && !versions_sort_by_metric(&versions, order.metric, order.is_largest))
                cli_complain("no checkpoint has a metric \"%s\"", order.metric);
        versions_load_signatures(&versions, signatures);
        code = versions.broken_count ? CLI_WRONG : CLI_OK;
        if (status)
                code = cli_exit_of(status);
        if (common.json) {
                json_t *body = versions_json(&versions);

                if (status)
                        json_object_set_new(body, "error", cli_error_json(&error));
                code = cli_print_json(body, code);
        } else {
                if (!best) /* the rows are in another order */
                        versions_print_head(&versions);
                if (versions.count)
                        versions_print(&versions, 0);
                else if (!status)
                        term_print(STYLE_PLAIN, "no checkpoints%s%s\n", *versions.path ? " in " : "", versions.path);
                if (versions.broken_count)
                        cli_complain("%zu checkpoint%s damaged or unreadable: %s", versions.broken_count,
                                versions.broken_count == 1 ? " is" : "s are", versions.broken);
        }
        versions_done(&versions);
        if (status)
                cli_fail(false, &error); /* after what can be shown all the same */
        return code;
}
