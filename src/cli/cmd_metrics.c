/* nebula metrics: prints them once, writes them to a file periodically, or serves them over HTTP. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/metrics.h"
#include "cli/metrics_server.h"
#include "cli/output_file.h"
#include "cli/target.h"
#include "os/os.h"

/* Replaces the file atomically. node_exporter reads names that end in .prom; the temporary name does not. */
static enum nebula_status write_once(const char *file, const char *path, const char *history, struct nebula_error *error)
{
        struct output_file output;
        char directory[TARGET_PATH_MAX], *name;
        size_t size;
        char *text;
        enum nebula_status status = target_absolute(file, directory, error);

        if (status)
                return status;
        text = metrics_text(path, history, &size);
        if (!text)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the metrics");
        name = strrchr(directory, '/');
        *name++ = 0;
        status = output_file_begin(&output, *directory ? directory : "/", name, size, error);
        if (!status) {
                output_file_write(&output, text, 0, size);
                status = output_file_sync(&output, error);
                if (status)
                        output_file_abandon(&output);
                else
                        status = output_file_place(&output, true, error);
        }
        free(text);
        return status;
}

/* A full disk may have room again later. Only the first failure ends the command: the file's name may be wrong. */
static int write_again(const char *file, const char *path, const char *history, uint64_t every_s)
{
        bool has_written = false, has_failed = false;
        struct nebula_error error;

        for (;;) {
                enum nebula_status status = write_once(file, path, history, &error);

                if (status && !has_written)
                        return cli_fail(false, &error);
                if (!every_s)
                        return CLI_OK;
                if (status && !has_failed)
                        cli_complain("%s; trying again every %" PRIu64 " s", error.message, every_s);
                has_written = true;
                has_failed = status != NEBULA_OK;
                os->sleep_ms((int64_t)every_s * 1000); /* until Ctrl-C, which needs no clean-up */
        }
}

static int print_once(const char *path, const char *history)
{
        size_t size;
        char *text = metrics_text(path, history, &size);

        if (!text)
                return CLI_UNREACHABLE;
        fwrite(text, 1, size, stdout);
        free(text);
        return CLI_OK;
}

int command_metrics(int argc, char **argv)
{
        const char *given = NULL, *history = NULL, *listen = NULL, *file = NULL;
        uint64_t every_s = 0;
        const struct args_option options[] = {
                { "path", ARGS_TEXT, &given }, { "history", ARGS_TEXT, &history }, { "listen", ARGS_TEXT, &listen },
                { "textfile", ARGS_TEXT, &file }, { "every", ARGS_NUMBER, &every_s, ARGS_SECONDS_MAX },
        };
        char path[TARGET_PATH_MAX];
        struct nebula_error error;
        struct args args;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (listen && file)
                return cli_usage_error("metrics", "--listen and --textfile cannot be used together");
        if (every_s && !file)
                return cli_usage_error("metrics", "--every is for --textfile");
        if (target_path(given, path, &error))
                return cli_fail(false, &error);
        if (listen)
                return metrics_serve(listen, path, history, &error) ? cli_fail(false, &error) : CLI_OK;
        return file ? write_again(file, path, history, every_s) : print_once(path, history);
}
