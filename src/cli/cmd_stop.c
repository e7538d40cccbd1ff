/* nebula stop: the agent finishes persisting and ends; --now drops versions that are only in memory. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/term.h"
#include "os/os.h"

#define END_TIMEOUT_MS 10000
#define END_POLL_MS 20
#define LOOK_MS 1000

/* Counts the versions in memory that storage does not have. */
static void count_unsaved(struct cli_agent *agent, size_t *ret_count, uint64_t *ret_bytes)
{
        json_t *report = NULL, *jobs;

        *ret_count = *ret_bytes = 0;
        if (cli_agent_report(agent, NEBULA_REPORT_STATUS, "", &report, NULL))
                return;
        jobs = json_object_get(report, "jobs");
        for (size_t i = 0; i < json_array_size(jobs); i++) {
                *ret_count += (size_t)number_of(json_array_get(jobs, i), "unsaved_count");
                *ret_bytes += (uint64_t)number_of(json_array_get(jobs, i), "unsaved_bytes");
        }
        json_decref(report);
}

/* Describes the versions that wait to be persisted, as "2 versions (1.1 GiB) for /scratch/run7 and 1 version (3.0
 * MiB) for /other"; "" if there are none. */
static void describe_queue(char *text, size_t size)
{
        json_t *report = NULL, *queue;
        struct nebula_error error;
        struct cli_agent *agent;
        size_t used = 0;

        *text = 0;
        if (cli_agent_open("", &agent, &error))
                return;
        if (cli_agent_report(agent, NEBULA_REPORT_STATUS, "", &report, &error)) {
                cli_agent_close(agent);
                return;
        }
        cli_agent_close(agent);
        queue = json_object_get(report, "queue");
        for (size_t i = 0; i < json_array_size(queue); i++) {
                const char *path = text_of(json_array_get(queue, i), "path");
                char human[HUMAN_MAX];
                uint64_t bytes = 0;
                size_t count = 0, first = 0;

                for (size_t j = json_array_size(queue); j-- > 0;) {
                        const json_t *other = json_array_get(queue, j);

                        if (strcmp(text_of(other, "path"), path))
                                continue;
                        bytes += (uint64_t)number_of(other, "size");
                        count++;
                        first = j;
                }
                if (first != i || used >= size)
                        continue;
                used += (size_t)snprintf(text + used, size - used, "%s%zu version%s (%s) for %s", used ? " and " : "", count,
                                         count == 1 ? "" : "s", human_size(bytes, human), path);
        }
        json_decref(report);
}

static int64_t look_ms(int64_t until_ns)
{
        int64_t left_ms = (until_ns - os->now_ns()) / 1000000;

        return left_ms < 0 ? 0 : left_ms < LOOK_MS ? left_ms + 1 : LOOK_MS;
}

/* Prints the agent's queue whenever it changes. timeout_s 0: no limit. */
static enum nebula_status wait_for_agent(struct cli_agent *agent, bool says, uint64_t timeout_s, struct nebula_error *error)
{
        int64_t until = timeout_s ? os->now_ns() + (int64_t)timeout_s * SECOND_NS : INT64_MAX;
        char said[1024] = "", left[1024] = "";
        enum nebula_status status;
        bool is_done;

        while (!(status = cli_agent_stopped(agent, look_ms(until), &is_done, error)) && !is_done) {
                describe_queue(left, sizeof left);
                if (os->now_ns() >= until)
                        return error_set(error, NEBULA_TIMEOUT, 0, "not done within %" PRIu64 " s, the agent goes on%s%.400s", timeout_s,
                                         left[0] ? " with " : "", left);
                if (says && left[0] && strcmp(left, said)) {
                        strcpy(said, left);
                        cli_complain("waiting for %s; Ctrl-C leaves the agent running", left);
                }
        }
        return status;
}

static bool may_drop(size_t count, uint64_t bytes, bool *ret_no_terminal)
{
        char question[200], size[HUMAN_MAX];

        snprintf(question, sizeof question, "Drop the memory tier? %zu version%s (%s) not in storage would be lost.", count,
                 count == 1 ? "" : "s", human_size(bytes, size));
        return cli_confirm(question, ret_no_terminal);
}

/* The agent answers just before it ends. This waits for the end, because a new agent must be able to start as soon
 * as the command returns. */
static bool wait_for_end(uint32_t seen_pid)
{
        for (int64_t waited = 0; cli_agent_is_there(seen_pid); waited += END_POLL_MS) {
                if (waited >= END_TIMEOUT_MS)
                        return false;
                os->sleep_ms(END_POLL_MS);
        }
        return true;
}

/* Waits without progress messages: an agent of another version cannot be asked about its queue. */
static int await_other_version(bool json, uint32_t pid)
{
        if (!json)
                printf("the agent (pid %u) is of another version of Nebula: it was asked to finish and end\n", pid);
        fflush(stdout);
        while (!wait_for_end(pid))
                ;
        if (json)
                return cli_print_json(json_pack("{s:b, s:I, s:b}", "was_running", 1, "pid", (json_int_t)pid, "dropped", 0), CLI_OK);
        printf("the agent (pid %u) has ended\n", pid);
        return CLI_OK;
}

int command_stop(int argc, char **argv)
{
        struct cli_common common = { 0 };
        bool now = false, yes = false, no_terminal;
        uint64_t timeout_s = 0;
        const struct args_option options[] = {
                CLI_COMMON(common), { "now", ARGS_FLAG, &now }, { "yes", ARGS_FLAG, &yes }, { "timeout", ARGS_NUMBER, &timeout_s, ARGS_SECONDS_MAX },
        };
        struct nebula_error error;
        struct cli_agent *agent = NULL;
        struct args args;
        uint64_t bytes;
        uint32_t pid, seen_pid;
        size_t count;
        enum nebula_status status;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (cli_agent_open("", &agent, &error)) {
                if (!now && cli_agent_end_other_version(&error, &pid))
                        return await_other_version(common.json, pid);
                if (!cli_agent_is_absent(&error))
                        return cli_fail(common.json, &error);
                if (common.json)
                        return cli_print_json(json_pack("{s:b}", "was_running", 0), CLI_OK);
                printf("no agent is running\n");
                return CLI_OK;
        }
        count_unsaved(agent, &count, &bytes);
        if (now && !yes && !may_drop(count, bytes, &no_terminal)) {
                cli_agent_close(agent);
                error_set(&error, NEBULA_BUSY, 0, "%s", no_terminal ?
                          "stop --now drops the memory tier: say --yes, because there is no terminal to ask on" : "nothing was stopped");
                cli_fail(common.json, &error);
                return CLI_REFUSED;
        }
        if (!now && count && !common.json)
                printf("finishing %zu version%s\n", count, count == 1 ? "" : "s");
        fflush(stdout);
        pid = cli_agent_pid(agent);
        seen_pid = cli_agent_seen_pid(agent);
        status = cli_agent_stop(agent, now, &error);
        if (!status)
                status = wait_for_agent(agent, !common.json, timeout_s, &error);
        cli_agent_close(agent);
        if (status == NEBULA_TIMEOUT) {
                cli_fail(common.json, &error);
                return CLI_TIMEOUT;
        }
        /* An agent that ends at once may be gone before its answer was read. */
        if (status && status != NEBULA_UNAVAILABLE)
                return cli_fail(common.json, &error);
        if (!wait_for_end(seen_pid)) {
                error_set(&error, NEBULA_TIMEOUT, 0, "the agent (pid %u) was asked to stop and is still running", pid);
                return cli_fail(common.json, &error);
        }
        if (common.json)
                return cli_print_json(json_pack("{s:b, s:I, s:b, s:I}", "was_running", 1, "pid", (json_int_t)pid, "dropped", now,
                                                "unsaved_count", (json_int_t)count), CLI_OK);
        printf("the agent (pid %u) has ended%s\n", pid, now && count ? "; what was only in memory is gone" : "");
        return CLI_OK;
}
