#include "cli/verdict.h"

#include <string.h>

#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/term.h"
#include "os/os.h"

int verdict_number(const json_t *verdict)
{
        const char *state = text_of(verdict, "state");

        return !strcmp(state, "fine") ? 0 : !strcmp(state, "at risk") ? 1 : !strcmp(state, "broken") ? 2 : -1;
}

void verdict_print(const json_t *verdict, const char *name, const char *rest)
{
        static const enum style styles[] = { STYLE_GOOD, STYLE_WARN, STYLE_BAD };
        int number = verdict_number(verdict);
        double for_s = (double)os->wall_ns() / 1e9 - number_of(verdict, "since");
        char duration[HUMAN_MAX];

        term_print(STYLE_BOLD, "job      ");
        if (*name)
                term_print(STYLE_PLAIN, "%s, ", name);
        if (number < 0) {
                term_print(STYLE_PLAIN, "%s\n", rest);
                return;
        }
        term_print(styles[number], "%s", text_of(verdict, "state"));
        if (number) {
                if (for_s >= 1)
                        term_print(styles[number], " for %s", human_duration((double)(int64_t)for_s, duration));
                term_print(styles[number], ": %s\n", text_of(verdict, "reason"));
                term_print(STYLE_PLAIN, "         do: %s\n", text_of(verdict, "cure"));
                if (*rest)
                        term_print(STYLE_PLAIN, "         %s\n", rest);
        } else {
                term_print(STYLE_PLAIN, "%s%s\n", *rest ? ", " : "", rest);
        }
}

void verdict_print_all(const json_t *verdicts)
{
        for (size_t i = 0; i < json_array_size(verdicts); i++)
                verdict_print(json_array_get(verdicts, i), text_of(json_array_get(verdicts, i), "job"), "");
}
