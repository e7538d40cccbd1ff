/*
 * args.h - command lines: --name, --name VALUE, --name=VALUE, positionals in
 * between, and `--` for "no options from here on".
 *
 * Nothing is printed here: args_parse describes what is wrong in `problem`.
 */
#ifndef NB_CLI_ARGS_H
#define NB_CLI_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARGS_POSITIONAL_MAX 64

enum args_kind {
        ARGS_FLAG,   /* to: bool * */
        ARGS_TEXT,   /* to: const char ** */
        ARGS_NUMBER, /* to: uint64_t *; decimal, above 0 */
};
struct args_option {
        const char *name; /* without the dashes */
        enum args_kind kind;
        void *to; /* written when the option is given */
};
struct args {
        const char *positionals[ARGS_POSITIONAL_MAX];
        size_t count;
        char problem[200];
};

/* argv[0] is skipped. Returns false and fills args->problem when the line is wrong. */
bool args_parse(int argc, char **argv, const struct args_option *options, size_t option_count, struct args *args);
/* Whether --help or -h stands before any `--`. */
bool args_want_help(int argc, char **argv);

#endif
