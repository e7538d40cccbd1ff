#include "cli/args.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static bool parse_number(const char *text, uint64_t most, uint64_t *ret_number)
{
        uint64_t number = 0;

        most = most ? most : ARGS_NUMBER_MAX;
        if (!*text || strlen(text) > 18)
                return false;
        for (; *text; text++) {
                if (*text < '0' || *text > '9')
                        return false;
                number = number * 10 + (uint64_t)(*text - '0');
        }
        *ret_number = number;
        return number > 0 && number <= most;
}

static const struct args_option *find(const struct args_option *options, size_t count, const char *name, size_t length)
{
        for (size_t i = 0; i < count; i++)
                if (strlen(options[i].name) == length && !memcmp(options[i].name, name, length))
                        return &options[i];
        return NULL;
}

/* Takes one option at argv[*at] and its value, which may be the next word. */
static bool take_option(int argc, char **argv, int *at, const struct args_option *options, size_t count,
                        struct args *args)
{
        const char *name = argv[*at] + 2, *value = strchr(name, '=');
        size_t length = value ? (size_t)(value - name) : strlen(name);
        const struct args_option *option = find(options, count, name, length);

        if (argv[*at][1] != '-' || !option) {
                snprintf(args->problem, sizeof args->problem, "unknown option %.80s", argv[*at]);
                return false;
        }
        if (option->kind == ARGS_FLAG) {
                if (value) {
                        snprintf(args->problem, sizeof args->problem, "--%s takes no value", option->name);
                        return false;
                }
                *(bool *)option->to = true;
                return true;
        }
        value = value ? value + 1 : *at + 1 < argc ? argv[++*at] : NULL;
        if (!value || !*value) {
                snprintf(args->problem, sizeof args->problem, "--%s needs a value", option->name);
                return false;
        }
        if (option->kind == ARGS_TEXT) {
                *(const char **)option->to = value;
                return true;
        }
        if (!parse_number(value, option->most, option->to)) {
                snprintf(args->problem, sizeof args->problem, "--%s takes a whole number from 1 to %" PRIu64 ", not \"%.80s\"", option->name,
                         option->most ? option->most : ARGS_NUMBER_MAX, value);
                return false;
        }
        return true;
}

bool args_parse(int argc, char **argv, const struct args_option *options, size_t option_count, struct args *args)
{
        bool only_positionals = false;

        args->count = 0;
        args->problem[0] = '\0';
        for (int i = 1; i < argc; i++) {
                if (!only_positionals && !strcmp(argv[i], "--")) {
                        only_positionals = true;
                } else if (!only_positionals && argv[i][0] == '-' && argv[i][1]) {
                        if (!take_option(argc, argv, &i, options, option_count, args))
                                return false;
                } else if (args->count == ARGS_POSITIONAL_MAX) {
                        snprintf(args->problem, sizeof args->problem, "more than %d arguments", ARGS_POSITIONAL_MAX);
                        return false;
                } else {
                        args->positionals[args->count++] = argv[i];
                }
        }
        return true;
}

bool args_want_help(int argc, char **argv)
{
        for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
                if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))
                        return true;
        return false;
}
