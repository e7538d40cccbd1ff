/* nebula doctor: runs each check and prints advice. */
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "cli/cli.h"
#include "cli/doctor.h"
#include "cli/doctor_measure.h"
#include "cli/doctor_save.h"
#include "cli/table.h"
#include "cli/target.h"

static const char *const verdict_words[] = { "ok", "note", "BAD" };
static const enum style verdict_styles[] = { STYLE_GOOD, STYLE_WARN, STYLE_BAD };

struct doctor {
        bool json, is_bad;
        json_t *list;
};

/* On a terminal the name of a check comes before its result: if it hangs on a mount, the name is seen. */
static void run_checks(struct doctor *doctor, const struct doctor_check *checks, size_t count, const char *path)
{
        bool shows_names = !doctor->json && term_columns();

        for (size_t i = 0; i < count; i++) {
                struct doctor_finding finding = { 0 };

                if (shows_names) {
                        printf("%-22s ", checks[i].name);
                        fflush(stdout);
                }
                if (!checks[i].run(path, &finding)) {
                        fputs(shows_names ? "\r\033[K" : "", stdout);
                        continue;
                }
                text_make_printable(finding.found); /* a cut path may end in the middle of a character */
                text_make_printable(finding.advice);
                doctor->is_bad = doctor->is_bad || finding.verdict == DOCTOR_BAD;
                if (doctor->json) {
                        json_array_append_new(doctor->list,
                                              json_pack("{s:s, s:s, s:s, s:s}", "check", checks[i].name, "result",
                                                        verdict_words[finding.verdict], "found", finding.found, "advice",
                                                        finding.advice));
                        continue;
                }
                if (!shows_names)
                        printf("%-22s ", checks[i].name);
                term_print(verdict_styles[finding.verdict], "%-5s", verdict_words[finding.verdict]);
                term_print(STYLE_PLAIN, "%s\n", finding.found);
                if (*finding.advice) {
                        printf("%-28s", "");
                        term_print(STYLE_DIM, "%s\n", finding.advice);
                }
        }
}

int command_doctor(int argc, char **argv)
{
        struct cli_common common = { 0 };
        bool measures = false, saves = false, dies = false, health = false;
        const struct args_option options[] = { CLI_COMMON(common), { "measure", ARGS_FLAG, &measures }, { "save", ARGS_FLAG, &saves },
                                               { "health", ARGS_FLAG, &health }, { "save-and-die", ARGS_FLAG, &dies } };
        json_t *steps = NULL;
        struct doctor doctor = { 0 };
        struct doctor_limits limits = { 0 };
        char path[TARGET_PATH_MAX] = "";
        struct nebula_error error, measure_error = { 0 };
        struct args args;
        json_t *answer;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 1))
                return CLI_USAGE;
        if (common.path && args.count)
                return cli_usage_error("doctor", "give the storage path once: as PATH, or with --path");
        if (dies)
                return doctor_save_and_die();
        if (health && (measures || saves)) {
                cli_complain("--health goes without --measure and --save");
                return CLI_USAGE;
        }
        if (!health && target_path(args.count ? args.positionals[0] : common.path, path, &error))
                return cli_fail(common.json, &error);
        doctor.json = common.json;
        doctor.list = json_array();
        if (!health)
                run_checks(&doctor, doctor_machine_checks, doctor_machine_count, path);
        run_checks(&doctor, doctor_health_checks, doctor_health_count, path);
        if (!health) {
                run_checks(&doctor, doctor_storage_checks, doctor_storage_count, path);
                run_checks(&doctor, doctor_store_checks, doctor_store_count, path);
        }
        if (measures && doctor_measure(path, &limits, &measure_error)) {
                text_make_printable(measure_error.message);
                doctor.is_bad = true;
        }
        if (saves && doctor.is_bad)
                cli_complain("the save is left out, because of what does not work");
        else if (saves && !doctor_save(path, &steps))
                doctor.is_bad = true;
        if (common.json) {
                answer = json_pack("{s:b, s:s, s:o}", "ok", !doctor.is_bad, "path", path, "checks", doctor.list);
                if (measures)
                        json_object_set_new(answer, "limits", doctor_limits_json(&limits, &measure_error));
                if (steps)
                        json_object_set_new(answer, "save", steps);
                return cli_print_json(answer, doctor.is_bad ? CLI_WRONG : CLI_OK);
        }
        json_decref(doctor.list);
        if (measures)
                doctor_limits_print(&limits, &measure_error);
        doctor_save_print(steps);
        json_decref(steps);
        if (doctor.is_bad)
                term_print(STYLE_BAD, "\nsomething essential does not work\n");
        else
                term_print(STYLE_GOOD, health ? "\nthis machine is well\n" : "\nNebula works on this machine\n");
        return doctor.is_bad ? CLI_WRONG : CLI_OK;
}
