/* nebula pin, nebula unpin: exempt versions from all removal rules. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/table.h"
#include "cli/target.h"
#include "os/os.h"
#include "store/pins.h"

static bool is_in_memory(const char *path, const char *tag)
{
        struct cli_agent *agent = NULL;
        json_t *version = NULL;
        uint64_t id;
        bool result;

        if (!cli_agent_open_if_any(path, &agent))
                return false;
        result = !cli_agent_find_younger(agent, path, tag, 0, &id, &version, NULL);
        json_decref(version);
        cli_agent_close(agent);
        return result;
}

/* The tag that "latest" stands for, or the given tag, if it exists; `is_any`: even if it does not. */
static enum nebula_status find_tag(struct store *store, const char *given, bool is_any, char ret_tag[256], struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        enum nebula_status status;

        snprintf(ret_tag, 256, "%s", given);
        if (is_any && strcmp(given, "latest"))
                return NEBULA_OK;
        status = target_load(store, given, &manifest, NULL, error);
        if (!status)
                memcpy(ret_tag, manifest.tag, sizeof manifest.tag);
        else if ((status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT) && strcmp(given, "latest") &&
                 (status == NEBULA_CORRUPT || is_in_memory(store->root, given)))
                status = NEBULA_OK; /* a damaged version may be worth keeping */
        manifest_done(&manifest);
        return status;
}

/* NEBULA_NOT_FOUND: the path may be mistyped. A pin itself can be the first object of a path. */
static enum nebula_status check_path(struct store *store, struct nebula_error *error)
{
        struct os_stat root;

        if (store->ops->features(store) & STORE_PATHS && os->stat(store->root, true, &root) == -ENOENT)
                return error_set(error, NEBULA_NOT_FOUND, ENOENT, "%s does not exist", store->root);
        return NEBULA_OK;
}

static int list_pins(bool json, struct store *store)
{
        static const struct table_column columns[] = {
                { "TAG", TABLE_LEFT, true }, { "SINCE", TABLE_LEFT, false }, { "REASON", TABLE_LEFT, true },
        };
        struct nebula_error error;
        struct table *table;
        struct pins pins;
        char time[HUMAN_MAX];
        int code = CLI_OK;

        if (check_path(store, &error) || pins_load(store, true, &pins, &error))
                return cli_fail(json, &error);
        if (json) {
                json_t *list = json_array();

                for (size_t i = 0; i < pins.count; i++)
                        json_array_append_new(list, json_pack("{s:s, s:s, s:f}", "tag", pins.list[i].tag, "pinned", pins.list[i].reason, "pinned_at",
                                                              pins.list[i].time));
                code = cli_print_json(json_pack("{s:s, s:o}", "path", store->root, "pins", list), code);
        } else if (!pins.count) {
                term_print(STYLE_PLAIN, "no checkpoint is pinned in %s\n", store->root);
        } else {
                table = table_new(columns, CLI_COUNT(columns));
                for (size_t i = 0; i < pins.count; i++) {
                        table_cell(table, STYLE_PLAIN, "%s", pins.list[i].tag);
                        table_cell(table, STYLE_PLAIN, "%s", pins.list[i].time > 0 ? human_time(pins.list[i].time, time) : "-");
                        table_cell(table, STYLE_PLAIN, "%s", pins.list[i].reason);
                }
                table_print(table, stdout, term_columns(), term_has_colour());
                table_free(table);
        }
        pins_done(&pins);
        return code;
}

int command_pin(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const char *reason = "";
        bool early = false;
        const struct args_option options[] = { CLI_COMMON(common), { "reason", ARGS_TEXT, &reason }, { "early", ARGS_FLAG, &early } };
        struct store *store = NULL;
        struct nebula_error error;
        struct args args;
        char tag[256];
        int code = CLI_OK;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 1))
                return CLI_USAGE;
        if (target_open(common.path, &store, &error))
                return cli_fail(common.json, &error);
        if (!args.count)
                code = list_pins(common.json, store);
        else if (find_tag(store, args.positionals[0], early, tag, &error) || pin_put(store, tag, reason, &error))
                code = cli_fail(common.json, &error);
        else if (common.json)
                code = cli_print_json(json_pack("{s:s, s:s}", "tag", tag, "pinned", reason), CLI_OK);
        else
                term_print(STYLE_PLAIN, "%s is pinned in %s\n", tag, store->root);
        store_close(store);
        return code;
}

int command_unpin(int argc, char **argv)
{
        struct cli_common common = { 0 };
        const struct args_option options[] = { CLI_COMMON(common) };
        struct store *store = NULL;
        struct nebula_error error;
        struct args args;
        char tag[256];
        bool was_there = false;
        int code = CLI_OK;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 1, 1))
                return CLI_USAGE;
        if (target_open(common.path, &store, &error))
                return cli_fail(common.json, &error);
        if (check_path(store, &error) || find_tag(store, args.positionals[0], true, tag, &error) || pin_remove(store, tag, &was_there, &error))
                code = cli_fail(common.json, &error);
        else if (common.json)
                code = cli_print_json(json_pack("{s:s, s:b}", "tag", tag, "was_pinned", was_there), CLI_OK);
        else
                term_print(STYLE_PLAIN, was_there ? "%s is no longer pinned in %s\n" : "%s was not pinned in %s\n", tag, store->root);
        store_close(store);
        return code;
}
