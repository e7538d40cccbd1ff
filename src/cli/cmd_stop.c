/* nebula stop: the agent finishes persisting and ends; --now drops what is only in memory. */
#include <stdlib.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/human.h"
#include "cli/link.h"
#include "cli/term.h"
#include "os/os.h"

#define END_TIMEOUT_MS 10000
#define END_POLL_MS 20

/* How much would be lost: versions in memory that storage does not have. */
static void count_unsaved(struct link *link, size_t *ret_count, uint64_t *ret_bytes)
{
        json_t *report = NULL, *versions;
        size_t count = 0;
        uint64_t bytes = 0;

        if (!link_report(link, NEBULA_REPORT_VERSIONS, "", &report, NULL)) {
                versions = json_object_get(report, "versions");
                for (size_t i = 0; i < json_array_size(versions); i++) {
                        const json_t *one = json_array_get(versions, i);

                        if (!lies_in(one, "memory") || lies_in(one, "storage"))
                                continue;
                        bytes += (uint64_t)number_of(one, "size");
                        count++;
                }
        }
        json_decref(report);
        *ret_count = count;
        *ret_bytes = bytes;
}

static bool may_drop(size_t count, uint64_t bytes, bool *ret_no_terminal)
{
        char question[200], size[HUMAN_MAX];

        snprintf(question, sizeof question, "Drop the memory tier? %zu version%s (%s) not in storage would be lost.", count,
                 count == 1 ? "" : "s", human_size(bytes, size));
        return cli_confirm(question, ret_no_terminal);
}

/* The answer comes just before the end; a new agent must be able to start when this command is back. */
static bool wait_for_end(uint32_t pid)
{
        for (int64_t waited = 0; os->alive(pid); waited += END_POLL_MS) {
                if (waited >= END_TIMEOUT_MS)
                        return false;
                os->sleep_ms(END_POLL_MS);
        }
        return true;
}

int command_stop(int argc, char **argv)
{
        struct cli_common common = { 0 };
        bool now = false, yes = false, no_terminal;
        const struct args_option options[] = {
                CLI_COMMON(common), { "now", ARGS_FLAG, &now }, { "yes", ARGS_FLAG, &yes },
        };
        struct nebula_error error;
        struct link *link = NULL;
        struct args args;
        uint64_t bytes;
        uint32_t pid;
        size_t count;
        enum nebula_status status;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (link_open("", &link, &error)) {
                if (!link_is_absent(&error))
                        return cli_fail(common.json, &error);
                if (common.json)
                        return cli_print_json(json_pack("{s:b}", "was_running", 0), CLI_OK);
                printf("no agent is running\n");
                return CLI_OK;
        }
        count_unsaved(link, &count, &bytes);
        if (now && !yes && !may_drop(count, bytes, &no_terminal)) {
                link_close(link);
                error_set(&error, NEBULA_BUSY, 0, "%s", no_terminal ?
                          "stop --now drops the memory tier: say --yes where nobody can be asked" : "nothing was stopped");
                cli_fail(common.json, &error);
                return CLI_REFUSED;
        }
        if (!now && count && !common.json)
                printf("finishing %zu version%s\n", count, count == 1 ? "" : "s");
        fflush(stdout);
        pid = link_agent_pid(link);
        status = link_stop(link, now, &error);
        link_close(link);
        /* An agent that ends at once may be gone before its answer is read. */
        if (status && status != NEBULA_UNAVAILABLE)
                return cli_fail(common.json, &error);
        if (!wait_for_end(pid)) {
                error_set(&error, NEBULA_TIMEOUT, 0, "the agent (pid %u) was told to stop and is still running", pid);
                return cli_fail(common.json, &error);
        }
        if (common.json)
                return cli_print_json(json_pack("{s:b, s:I, s:b, s:I}", "was_running", 1, "pid", (json_int_t)pid, "dropped", now,
                                                "unsaved", (json_int_t)count), CLI_OK);
        printf("the agent (pid %u) has ended%s\n", pid, now && count ? "; what was only in memory is gone" : "");
        return CLI_OK;
}
