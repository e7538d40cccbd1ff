/*
 * args.h - command lines: --name, --name VALUE, --name=VALUE, positional
 * arguments in between, and `--`, after which all words are positional.
 *
 * Prints nothing: args_parse describes an error in `problem`.
 */
#ifndef NB_CLI_ARGS_H
#define NB_CLI_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARGS_POSITIONAL_MAX 64
#define ARGS_SECONDS_MAX 31536000 /* a year; in nanoseconds still far from 2^63 */

#define ARGS_NUMBER_MAX UINT64_C(999999999999999999)

enum args_kind {
        ARGS_FLAG,   /* to: bool * */
        ARGS_TEXT,   /* to: const char ** */
        ARGS_NUMBER, /* to: uint64_t *; decimal, from 1 to `most` */
};
struct args_option {
        const char *name; /* without the dashes */
        enum args_kind kind;
        void *to; /* written if the option is given */
        uint64_t most; /* of a number; 0: ARGS_NUMBER_MAX */
};
struct args {
        const char *positionals[ARGS_POSITIONAL_MAX];
        size_t count;
        char problem[200];
};

/* Skips argv[0]. If the line is wrong, fills args->problem and returns false. */
bool args_parse(int argc, char **argv, const struct args_option *options, size_t option_count, struct args *args);
/* Whether --help or -h comes before any `--`. */
bool args_want_help(int argc, char **argv);

#endif
