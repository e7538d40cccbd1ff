/*
 * nebula status: the agent, its jobs and its queue; the newest versions in memory and storage.
 *
 * --serve is for a program that asks again and again. Each line of stdin asks for a status, which is one line of JSON. The process keeps the
 * manifests, and reads only those that are new. While storage is read for the first time, a line about once a second shows the newest
 * versions so far, with "reading": {"read": N, "of": M}. The last line of an answer has no "reading". If its versions are those of the answer
 * before, "storage" is {"same": true}. The end of stdin ends the command.
 */
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
#include "cli/templates.h"
#include "cli/verdict.h"
#include "cli/versions.h"
#include "os/os.h"
#include "store/scan.h"

#define NEWEST_SHOWN 8
#define SESSIONS_SHOWN 4
#define QUEUE_SHOWN 3 /* the newest version must stay on the first screen */
#define REDRAW_MS 1000

struct status {
        json_t *report;           /* NULL: no agent runs */
        json_t *history;          /* of the versions that the agent knows; NULL: not asked */
        struct versions versions; /* has_versions */
        bool has_versions;
        struct nebula_error storage_error; /* why storage could not be read */
        bool has_path;            /* the caller has named one: if it is no path, that is an error */
        struct nebula_error agent_error; /* set if an agent runs and does not answer */
        size_t read, of;          /* tags in storage that were looked at; of 0: all */
        bool is_same;             /* the caller has the versions already */
};

static void load_agent(const char *given_path, bool with_history, struct status *status)
{
        struct nebula_error error;
        struct cli_agent *agent = NULL;
        const char *set = conf_env("NEBULA_PERSISTENT_STORAGE_PATH");
        char path[TARGET_PATH_MAX];

        *status = (struct status){ 0 };
        /* Without target_path, which would read all manifests of the current directory once more. */
        status->has_path = given_path || set;
        if (target_absolute(given_path ? given_path : set ? set : ".", path, NULL))
                *path = 0; /* versions_load_again says why */
        if (cli_agent_open("", &agent, &error) || cli_agent_report(agent, NEBULA_REPORT_STATUS, path, &status->report, &error))
                if (agent || !cli_agent_is_absent(&error))
                        status->agent_error = error;
        if (with_history && status->report)
                cli_agent_report(agent, NEBULA_REPORT_HISTORY, path, &status->history, NULL);
        cli_agent_close(agent);
}

/* `progress` may be NULL; its argument is the status. */
static void load_storage(const char *given_path, const struct versions_progress *progress, struct manifest_scan *seen, struct status *status)
{
        status->has_versions = !versions_load_again(given_path, !status->agent_error.status, progress, seen, &status->versions, &status->storage_error);
}

static void status_done(struct status *status)
{
        json_decref(status->report);
        json_decref(status->history);
        versions_done(&status->versions);
}

static void print_agent(const struct status *status)
{
        const json_t *agent = json_object_get(status->report, "agent");
        char uptime[HUMAN_MAX], used[HUMAN_MAX], budget[HUMAN_MAX];

        term_print(STYLE_BOLD, "agent    ");
        if (status->agent_error.status) {
                term_print(STYLE_BAD, "%s\n", status->agent_error.message);
                return;
        }
        if (!agent) {
                term_print(STYLE_DIM, "not running; the first init() starts it\n");
                return;
        }
        term_print(STYLE_GOOD, "running");
        printf(", pid %.0f, up %s, memory %s of %s\n", number_of(agent, "pid"),
               human_duration(number_of(agent, "uptime_seconds"), uptime),
               human_size((uint64_t)number_of(agent, "memory_used"), used),
               human_size((uint64_t)number_of(agent, "memory_budget"), budget));
}

/* Prints the copies of the job that this node keeps for other nodes. */
static void print_kept(const json_t *job)
{
        json_t *kept = json_object_get(job, "copies_kept"), *bytes;
        bool is_spare = json_is_true(json_object_get(job, "spare")), is_first = true;
        json_int_t sum = 0;
        const char *node;
        char size[HUMAN_MAX];

        json_object_foreach(kept, node, bytes)
                sum += json_integer_value(bytes);
        if (!is_spare && !sum)
                return;
        printf("         this node %s%s%s", is_spare ? "waits as a spare" : "", is_spare && sum ? ", and " : "", sum ? "keeps " : "");
        if (sum)
                printf("%s in copies of node%s ", human_size((uint64_t)sum, size), json_object_size(kept) > 1 ? "s" : "");
        json_object_foreach(kept, node, bytes) {
                term_print(STYLE_PLAIN, "%s%s", is_first ? "" : ", ", node);
                is_first = false;
        }
        printf("\n");
}

/* Prints which version left memory last, because the machine was short of it. */
static void print_left(const json_t *job)
{
        const json_t *left = json_object_get(job, "left_memory");

        if (left)
                term_print(STYLE_PLAIN, "         %s: %s\n", text_of(left, "tag"), text_of(left, "reason"));
}

static void print_job(const json_t *job)
{
        const char *name = text_of(job, "job"), *path = text_of(job, "path");
        char rest[TARGET_PATH_MAX + 80], stored[40] = "";

        /* The trainers of a job without storage have ended, and their versions are gone. */
        if (!*path && number_of(job, "trainer_count") <= 0 && number_of(job, "memory_count") <= 0 &&
            !json_is_true(json_object_get(job, "spare")))
                return;
        if (*path)
                snprintf(stored, sizeof stored, ", %.0f in storage", number_of(job, "storage_count"));
        snprintf(rest, sizeof rest, "%s, %.0f in memory%s", *path ? path : "memory only", number_of(job, "memory_count"), stored);
        verdict_print(json_object_get(job, "verdict"), name, rest);
        print_kept(job);
        print_left(job);
}

/* The jobs of the given path, then the others, the worst first. */
static void print_jobs(const json_t *report)
{
        const json_t *jobs = json_object_get(report, "jobs");

        for (int rank = 0; rank <= 3; rank++)
                for (size_t i = 0; i < json_array_size(jobs); i++) {
                        const json_t *job = json_array_get(jobs, i);
                        int number = verdict_number(json_object_get(job, "verdict"));

                        if (rank == (!strcmp(text_of(job, "path"), text_of(report, "path")) ? 0 : number == 2 ? 1 : number == 1 ? 2 : 3))
                                print_job(job);
                }
}

static void print_sessions(const json_t *sessions)
{
        size_t count = json_array_size(sessions), shown = count > SESSIONS_SHOWN ? SESSIONS_SHOWN - 1 : count;

        for (size_t i = 0; i < shown; i++) {
                const json_t *session = json_array_get(sessions, i);

                term_print(STYLE_BOLD, "trainer  ");
                printf("rank %.0f of %.0f, pid %.0f\n", number_of(session, "rank"), number_of(session, "world"),
                       number_of(session, "pid"));
        }
        if (shown < count)
                printf("         and %zu more\n", count - shown);
}

static void print_queue(const json_t *queue)
{
        size_t shown = json_array_size(queue) > QUEUE_SHOWN ? QUEUE_SHOWN : json_array_size(queue);
        uint64_t rest = 0;
        char size[HUMAN_MAX];

        for (size_t i = shown; i < json_array_size(queue); i++)
                rest += (uint64_t)number_of(json_array_get(queue, i), "size");
        for (size_t i = 0; i < shown; i++) {
                const json_t *one = json_array_get(queue, i);

                term_print(STYLE_BOLD, "queue    ");
                term_print(STYLE_PLAIN, "%s, %s", text_of(one, "tag"), human_size((uint64_t)number_of(one, "size"), size));
                printf(", %s", json_is_true(json_object_get(one, "writing")) ? "being written" : "waits");
                if (*text_of(one, "reason"))
                        term_print(STYLE_BAD, ", has failed"); /* the verdict and the table say why */
                printf("\n");
        }
        if (rest)
                printf("         and %zu more, %s\n", json_array_size(queue) - shown, human_size(rest, size));
}

static void print_newest(const struct versions *versions)
{
        size_t older = versions->count > NEWEST_SHOWN ? versions->count - NEWEST_SHOWN : 0;

        if (!versions->count)
                return;
        versions_print_newest(versions);
        printf("\n");
        versions_print(versions, older);
        if (older)
                term_print(STYLE_DIM, "and %zu older\n", older);
}

/* Without a path, the command shows the agent alone. */
static bool is_storage_unread(const struct status *status)
{
        return !status->has_versions && (status->has_path || status->storage_error.status != NEBULA_INVALID);
}

static void print_storage(const struct status *status)
{
        if (!status->has_versions) {
                if (!is_storage_unread(status))
                        return;
                term_print(STYLE_BOLD, "storage  ");
                term_print(STYLE_BAD, "%s\n", status->storage_error.message);
                print_newest(&status->versions); /* those in memory */
                return;
        }
        if (*status->versions.path) {
                term_print(STYLE_BOLD, "storage  ");
                term_print(STYLE_PLAIN, "%s\n", status->versions.path);
        }
        if (status->versions.broken_count)
                term_print(STYLE_BAD, "         %zu not sound: %s\n", status->versions.broken_count, status->versions.broken);
        print_newest(&status->versions);
}

static int status_exit(const struct status *status)
{
        if (status->agent_error.status)
                return CLI_UNREACHABLE;
        if (is_storage_unread(status))
                return cli_exit_of(status->storage_error.status);
        return status->has_versions && status->versions.broken_count ? CLI_WRONG : CLI_OK;
}

/* Why storage could not be read, and what memory has. */
static json_t *unread_json(const struct status *status)
{
        json_t *unread = status->versions.has_agent ? versions_json(&status->versions) : json_object();

        json_object_set_new(unread, "error", cli_error_json(&status->storage_error));
        return unread;
}

static json_t *status_json(const struct status *status)
{
        json_t *result = json_object();

        json_object_set_new(result, "running", json_boolean(status->report != NULL));
        json_object_set_new(result, "templates", templates_list());
        if (status->report)
                json_object_update(result, status->report);
        if (status->history)
                json_object_update(result, status->history);
        if (status->is_same)
                json_object_set_new(result, "storage", json_pack("{s:b}", "same", true));
        else if (status->has_versions)
                json_object_set_new(result, "storage", versions_json(&status->versions));
        else
                json_object_set_new(result, "storage", unread_json(status));
        if (status->agent_error.status)
                json_object_set_new(result, "error", cli_error_json(&status->agent_error));
        if (status->of)
                json_object_set_new(result, "reading", json_pack("{s:I, s:I}", "read", (json_int_t)status->read, "of", (json_int_t)status->of));
        return result;
}

static void report_newest(void *argument, const struct versions *newest, size_t read, size_t count)
{
        struct status status = *(struct status *)argument;

        status.versions = *newest;
        status.has_versions = true;
        status.read = read;
        status.of = count;
        cli_print_json_line(status_json(&status), 0);
}

static int serve(const char *given_path)
{
        struct status status;
        const struct versions_progress progress = { report_newest, &status };
        struct manifest_scan seen = { 0 };
        bool has_seen = false;
        uint64_t sum, shown = 0; /* of the versions; 0: none were shown */
        char *line = NULL;
        size_t room = 0;
        int code = CLI_OK;

        while (code == CLI_OK && getline(&line, &room, stdin) > 0) {
                load_agent(given_path, true, &status);
                load_storage(given_path, has_seen ? NULL : &progress, &seen, &status);
                has_seen = has_seen || status.has_versions;
                sum = status.has_versions ? versions_sum(&status.versions) : 0;
                status.is_same = sum && sum == shown;
                shown = sum;
                code = cli_print_json_line(status_json(&status), CLI_OK);
                status_done(&status);
        }
        manifest_scan_done(&seen);
        free(line);
        return code;
}

/* The part that needs no storage. */
static void print_agent_part(const struct status *status)
{
        print_agent(status);
        print_jobs(status->report);
        print_sessions(json_object_get(status->report, "sessions"));
        templates_print();
        print_queue(json_object_get(status->report, "queue"));
}

int command_status(int argc, char **argv)
{
        struct cli_common common = { 0 };
        bool watch = false, serves = false;
        const struct args_option options[] = { CLI_COMMON(common), { "watch", ARGS_FLAG, &watch }, { "serve", ARGS_FLAG, &serves } };
        struct manifest_scan seen = { 0 };
        struct status status;
        struct args args;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (watch && common.json)
                return cli_usage_error("status", "--watch and --json cannot be used together");
        if (serves && watch)
                return cli_usage_error("status", "--watch and --serve cannot be used together");
        if (serves)
                return serve(common.path);
        for (;;) {
                bool is_redrawn = watch && term_columns();

                load_agent(common.path, common.json, &status);
                if (!common.json && !is_redrawn) { /* at once: storage may hang */
                        print_agent_part(&status);
                        fflush(stdout);
                }
                load_storage(common.path, NULL, &seen, &status);
                if (common.json) {
                        code = cli_print_json(status_json(&status), status_exit(&status));
                } else {
                        code = status_exit(&status);
                        if (is_redrawn) {
                                printf("\033[H\033[J");
                                print_agent_part(&status);
                        }
                        print_storage(&status);
                }
                status_done(&status);
                if (!watch || fflush(stdout)) {
                        manifest_scan_done(&seen);
                        return code;
                }
                os->sleep_ms(REDRAW_MS); /* until Ctrl-C, which needs no clean-up */
        }
}
