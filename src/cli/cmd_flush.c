/* nebula flush: makes a version that the agent has in memory durable before its turn. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/target.h"
#include "cli/term.h"
#include "os/os.h"

#define STEP_MS 500 /* between two looks at the agent's queue */

/* The version's row of the agent's queue; NULL: it is not there, or the agent does not answer. The caller decrefs *ret_report. */
static const json_t *find_row(struct cli_agent *agent, const char *path, const char *tag, json_t **ret_report)
{
        const json_t *row;
        size_t index;

        if (cli_agent_report(agent, NEBULA_REPORT_STATUS, "", ret_report, NULL))
                return NULL;
        json_array_foreach(json_object_get(*ret_report, "queue"), index, row)
                if (!strcmp(text_of(row, "tag"), tag) && !strcmp(text_of(row, "path"), path))
                        return row;
        return NULL;
}

/* Draws how much of the version is in storage. *drawn: the bytes that the line has; UINT64_MAX: there is no line yet. */
static void draw(struct cli_agent *agent, const char *path, const char *tag, uint64_t *drawn)
{
        json_t *report = NULL;
        const json_t *row = find_row(agent, path, tag, &report);
        uint64_t moved = row ? (uint64_t)number_of(row, "moved") : 0;
        char what[80];

        if (row && *drawn == UINT64_MAX) {
                snprintf(what, sizeof what, "flushing %s", tag);
                progress_begin(what, (uint64_t)number_of(row, "size"));
                *drawn = 0;
        }
        if (row) {
                progress_add(moved - *drawn); /* modulo 2^64: another attempt begins at 0 */
                *drawn = moved;
        }
        json_decref(report);
}

/* timeout_ms < 0: no limit. */
static enum nebula_status wait_for(struct cli_agent *agent, const char *path, const char *tag, uint64_t version_id, int64_t timeout_ms,
                                   struct nebula_error *error)
{
        int64_t until_ns = os->now_ns() + timeout_ms * 1000000, left_ms = timeout_ms;
        uint64_t drawn = UINT64_MAX;
        enum nebula_status status;

        for (;;) {
                bool is_last = timeout_ms >= 0 && left_ms <= STEP_MS;

                status = cli_agent_wait(agent, version_id, NEBULA_STATE_DURABLE, is_last ? left_ms : STEP_MS, error);
                if (status != NEBULA_TIMEOUT || is_last)
                        break;
                draw(agent, path, tag, &drawn);
                left_ms = (until_ns - os->now_ns()) / 1000000;
                left_ms = left_ms < 0 ? 0 : left_ms;
        }
        progress_end();
        return status;
}

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
                status = wait_for(agent, path, text_of(version, "tag"), version_id, timeout_s ? (int64_t)timeout_s * 1000 : -1, &error);
        code = status ? cli_fail(common.json, &error) : flushed(common.json, text_of(version, "tag"));
        if (status == NEBULA_TIMEOUT)
                code = CLI_TIMEOUT;
        json_decref(version);
        cli_agent_close(agent);
        return code;
}
