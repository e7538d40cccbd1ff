/*
 * cli.h - the `nebula` command: a table of sub-commands, one file each, and the
 * functions that they share.
 *
 * Exit codes are part of the interface (docs/cli.md). A command returns one.
 * For an error, cli_fail prints one sentence to stderr and, with --json, an
 * object {"error": ...} to stdout, and returns the exit code.
 *
 * Threads: the main thread, except for the callbacks of verify.h.
 */
#ifndef NB_CLI_CLI_H
#define NB_CLI_CLI_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "cli/args.h"
#include "nebula.h"

enum cli_exit {
        CLI_OK = 0,
        CLI_WRONG = 1,       /* a check failed or found damage */
        CLI_USAGE = 2,       /* the command line is wrong */
        CLI_NOT_FOUND = 3,   /* no such tag, file or path */
        CLI_UNREACHABLE = 4, /* storage or the agent cannot be reached, or fails */
        CLI_REFUSED = 5,     /* the request would lose data */
        CLI_TIMEOUT = 6,     /* not done within the given time */
};

struct cli_command {
        const char *name, *usage, *summary;
        const char *help; /* text of `nebula NAME --help` below the usage */
        int (*run)(int argc, char **argv); /* argv[0] is the command's name */
};
extern const struct cli_command cli_commands[];
extern const size_t cli_command_count;

/* Options of every command. */
struct cli_common {
        const char *path; /* --path */
        bool json;
};
#define CLI_COMMON(common) { "path", ARGS_TEXT, &(common).path }, { "json", ARGS_FLAG, &(common).json }
#define CLI_COUNT(array) (sizeof(array) / sizeof *(array))

/* Parses a command's line. If it is wrong, prints why and returns false; the command exits with CLI_USAGE. */
bool cli_parse(int argc, char **argv, const struct args_option *options, size_t option_count, struct args *args,
               size_t least, size_t most);
/* Prints the error and returns its exit code. */
int cli_fail(bool json, const struct nebula_error *error);
/* One line on stderr, "nebula: ...". */
void cli_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Prints the same about a wrong command line, and where to read more. Returns CLI_USAGE. */
int cli_usage_error(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));
enum cli_exit cli_exit_of(enum nebula_status status);
/* {"status", "message"}, which each answer has as "error". */
json_t *cli_error_json(const struct nebula_error *error);
/* Prints to stdout and frees the value. Returns CLI_UNREACHABLE if stdout fails, else `code`. */
int cli_print_json(json_t *value, int code);
/* The same on one line, for a command that prints several values: JSON Lines. */
int cli_print_json_line(json_t *value, int code);
/* cli_fail for such a command. */
int cli_fail_line(bool json, const struct nebula_error *error);
/* Asks the question `asked` on the terminal, y/N. Without a terminal returns false and sets *ret_no_terminal. */
bool cli_confirm(const char *asked, bool *ret_no_terminal);

int command_agent(int argc, char **argv);
int command_copy(int argc, char **argv);
int command_diff(int argc, char **argv);
int command_doctor(int argc, char **argv);
int command_goodput(int argc, char **argv);
int command_flush(int argc, char **argv);
int command_follow(int argc, char **argv);
int command_help(int argc, char **argv);
int command_inspect(int argc, char **argv);
int command_list(int argc, char **argv);
int command_metrics(int argc, char **argv);
int command_pin(int argc, char **argv);
int command_prune(int argc, char **argv);
int command_python(int argc, char **argv);
int command_restore(int argc, char **argv);
int command_sign(int argc, char **argv);
int command_status(int argc, char **argv);
int command_stop(int argc, char **argv);
int command_store(int argc, char **argv);
int command_trace(int argc, char **argv);
int command_unpin(int argc, char **argv);
int command_verify(int argc, char **argv);
int command_version(int argc, char **argv);

#endif
