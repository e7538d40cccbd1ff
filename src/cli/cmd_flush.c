/* nebula flush: makes a version that the agent has in memory durable before its turn. */
#include <stdlib.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/target.h"
#include "cli/term.h"

static int flushed(bool json, const char *tag)
{
        if (json)
                return cli_print_json(json_pack("{s:s, s:s}", "tag", tag, "state", "durable"), CLI_OK);
        term_print(STYLE_PLAIN, "%s is durable\n", tag);
        return CLI_OK;
}

int command_flush(int argc, char **argv)
{
        struct cli_common common = { 0 };
        uint64_t timeout_s = 0;
        const struct args_option options[] = { CLI_COMMON(common), { "timeout", ARGS_NUMBER, &timeout_s, ARGS_SECONDS_MAX } };
        char path[TARGET_PATH_MAX];
        struct cli_agent *agent = NULL;
        json_t *version = NULL;
        struct nebula_error error;
        enum nebula_status status;
        struct args args;
        uint64_t version_id;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 1))
                return CLI_USAGE;
        status = target_path(common.path, path, &error);
        if (!status)
                status = cli_agent_open(path, &agent, &error);
        if (!status)
                status = cli_agent_find_younger(agent, path, args.count ? args.positionals[0] : NULL, 0, &version_id, &version, &error);
        if (!status)
                status = cli_agent_wait(agent, version_id, NEBULA_STATE_DURABLE, timeout_s ? (int64_t)timeout_s * 1000 : -1, &error);
        code = status ? cli_fail(common.json, &error) : flushed(common.json, text_of(version, "tag"));
        if (status == NEBULA_TIMEOUT)
                code = CLI_TIMEOUT;
        json_decref(version);
        cli_agent_close(agent);
        return code;
}
