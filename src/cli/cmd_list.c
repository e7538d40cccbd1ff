/* nebula list: versions in storage and in the agent's memory, merged. */
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/table.h"
#include "cli/target.h"
#include "cli/versions.h"
#include "os/os.h"

int command_list(int argc, char **argv)
{
        struct cli_common common = { 0 };
        bool metrics = false;
        const struct args_option options[] = { CLI_COMMON(common), { "metrics", ARGS_FLAG, &metrics } };
        struct versions versions;
        struct nebula_error error;
        struct args args;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (versions_load(common.path, true, &versions, &error))
                return cli_fail(common.json, &error);
        if (metrics)
                versions_load_metrics(&versions);
        code = versions.broken_count ? CLI_WRONG : CLI_OK;
        if (common.json) {
                code = cli_print_json(versions_json(&versions), code);
        } else {
                if (versions.count)
                        versions_print(&versions, 0);
                else
                        term_print(STYLE_PLAIN, "no checkpoints%s%s\n", *versions.path ? " in " : "", versions.path);
                if (versions.count && versions_newest(&versions) != versions.list + versions.count - 1) {
                        printf("\n");
                        versions_print_newest(&versions);
                }
                if (versions.broken_count)
                        cli_complain("%zu checkpoint%s damaged or unreadable: %s", versions.broken_count,
                                versions.broken_count == 1 ? " is" : "s are", versions.broken);
        }
        versions_done(&versions);
        return code;
}
