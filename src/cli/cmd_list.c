/* nebula list: versions in storage and in the agent's memory, merged; --jobs: the jobs of a path. */
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/jobs.h"
#include "cli/table.h"
#include "cli/target.h"
#include "cli/versions.h"
#include "os/os.h"

static int list_jobs(const struct cli_common *common)
{
        struct nebula_error error;
        json_t *told;

        if (jobs_load(common->path, &told, &error))
                return cli_fail(common->json, &error);
        if (common->json)
                return cli_print_json(told, CLI_OK);
        jobs_print(told);
        json_decref(told);
        return CLI_OK;
}

int command_list(int argc, char **argv)
{
        struct cli_common common = { 0 };
        bool metrics = false, jobs = false;
        const struct args_option options[] = { CLI_COMMON(common), { "metrics", ARGS_FLAG, &metrics }, { "jobs", ARGS_FLAG, &jobs } };
        struct versions versions;
        struct nebula_error error;
        enum nebula_status status;
        struct args args;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (jobs)
                return list_jobs(&common);
        status = versions_load(common.path, true, &versions, &error);
        if (status && !versions.has_agent)
                return cli_fail(common.json, &error);
        if (metrics)
                versions_load_metrics(&versions);
        code = versions.broken_count ? CLI_WRONG : CLI_OK;
        if (status)
                code = cli_exit_of(status);
        if (common.json) {
                json_t *body = versions_json(&versions);

                if (status)
                        json_object_set_new(body, "error", json_pack("{s:s, s:s}", "status", nebula_status_name(status), "message", error.message));
                code = cli_print_json(body, code);
        } else {
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
