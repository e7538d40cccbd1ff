#include "cli/cli.h"
#include "ipc/ipc.h"
#include "store/document.h"
#include "sum/sum.h"

int command_version(int argc, char **argv)
{
        static const char *const sums[] = { "portable", "pclmul", "vpclmul-256", "vpclmul-512", "pmull" };
        struct cli_common common = { 0 };
        const struct args_option options[] = { CLI_COMMON(common) };
        struct args args;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (common.json)
                return cli_print_json(json_pack("{s:s, s:s, s:i, s:s, s:s}", "nebula", NEBULA_VERSION, "formats",
                                                DOCUMENT_VERSION, "protocol", (int)IPC_VERSION, "checksums",
                                                sums[sum_isa_used()], "jansson", jansson_version_str()), CLI_OK);
        printf("nebula %s\n", NEBULA_VERSION);
        printf("formats %s, protocol %u, checksums %s, jansson %s\n", DOCUMENT_VERSION, IPC_VERSION, sums[sum_isa_used()],
               jansson_version_str());
        return CLI_OK;
}
