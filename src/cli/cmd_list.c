/* nebula list: versions in storage and in the agent's memory, merged. */
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/human.h"
#include "cli/link.h"
#include "cli/table.h"
#include "cli/target.h"
#include "cli/versions.h"
#include "os/os.h"

static void print_table(const struct versions *versions)
{
        static const struct table_column columns[] = {
                { "TAG", TABLE_LEFT, true }, { "STEP", TABLE_RIGHT, false }, { "STATE", TABLE_LEFT, false },
                { "SIZE", TABLE_RIGHT, false }, { "FILES", TABLE_RIGHT, false }, { "AGE", TABLE_RIGHT, false },
                { "WHERE", TABLE_LEFT, false },
        };
        struct table *table = table_new(columns, CLI_COUNT(columns));

        versions_table_rows(versions, table);
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
}

int command_list(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const struct args_option options[] = { CLI_COMMON(common) };
        struct versions versions;
        struct nebula_error error;
        struct args args;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 0))
                return CLI_USAGE;
        if (versions_load(common.path, &versions, &error))
                return cli_fail(common.json, &error);
        code = versions.broken_count ? CLI_WRONG : CLI_OK;
        if (common.json) {
                code = cli_print_json(versions_json(&versions), code);
        } else {
                if (versions.count)
                        print_table(&versions);
                else
                        printf("no checkpoints%s%s\n", *versions.path ? " in " : "", versions.path);
                if (versions.broken_count)
                        fprintf(stderr, "nebula: %zu checkpoint%s not sound: %s\n", versions.broken_count,
                                versions.broken_count == 1 ? " is" : "s are", versions.broken);
        }
        versions_done(&versions);
        return code;
}
