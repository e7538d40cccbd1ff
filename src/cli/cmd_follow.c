/* nebula follow: runs a command for each new checkpoint of a path, with the checkpoint's files in a directory of memory. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/follow_best.h"
#include "cli/follow_directory.h"
#include "cli/target.h"
#include "cli/term.h"
#include "ipc/ipc.h"
#include "os/os.h"
#include "store/manifest.h"

#define COMPLAINT "nebula: " /* cli_complain */
#define REASON_MAX 1024
#define POLL_MS 5000 /* between looks at storage: a checkpoint of this node is noticed at once */

struct follow {
        struct cli_common common;
        const char *command, *directory; /* directory: in it each checkpoint gets one of its own */
        bool is_own; /* the directory is of this process: it is locked, and the last command that uses it removes it */
        int lock;    /* of that directory; -1: none */
        bool once;
        struct follow_best best; /* metric "": every checkpoint counts */
        nebula_session *session;
        char tag[IPC_NAME_MAX];
        uint64_t sequence; /* of the checkpoint that was followed last */
        char left[IPC_NAME_MAX]; /* the tag of the checkpoint whose files are to be put there once more; "": none */
};

/* The numbers of a version, from its description. */
static enum nebula_status read_numbers(nebula_checkpoint *checkpoint, uint64_t *ret_sequence, struct nebula_error *error)
{
        char *text = NULL;
        enum nebula_status status = nebula_checkpoint_report(checkpoint, &text, error);
        json_t *about = status ? NULL : json_loads(text, 0, NULL);

        nebula_text_free(text);
        if (!status && !about)
                status = error_set(error, NEBULA_CORRUPT, 0, "the agent's description of \"%s\" is damaged", nebula_checkpoint_tag(checkpoint));
        if (!status)
                *ret_sequence = (uint64_t)json_integer_value(json_object_get(about, "sequence"));
        json_decref(about);
        return status;
}

/* Characters on which the shell acts in the quotes of fill_command. */
#define ACTS_IN_QUOTES "'\"$`\\"
/* With those on which it acts outside of quotes: if the user's command has quotes around the {}, the quotes of fill_command end them. */
#define ACTS ACTS_IN_QUOTES " ;&|<>()*?[]{}"

/* The name of a tag's directory: that of storage, without ACTS. Any writer of the storage path may choose the tag. */
static bool directory_name(const char *tag, char ret_name[3 * IPC_NAME_MAX])
{
        char encoded[IPC_NAME_MAX], *to = ret_name;

        if (name_encode(tag, encoded, NULL))
                return false;
        for (const char *from = encoded; *from; from++) {
                if (strchr(ACTS, *from))
                        to += sprintf(to, "%%%02X", (unsigned)*from);
                else
                        *to++ = *from;
        }
        *to = 0;
        return true;
}

/* The command with each "{}" replaced by the directory, in quotes of the shell. Its shell removes the directory at every end, even if this
 * process was killed before. The caller frees the text. */
static char *fill_command(const struct follow *follow, const char *directory)
{
        static const char frame[] = "trap \"rm -rf '%s'; rmdir '%s' 2>/dev/null\" EXIT; trap 'exit 130' INT; trap 'exit 143' TERM\n";
        size_t length = strlen(directory), size = sizeof frame + strlen(follow->command) + 2 * length + strlen(follow->directory);
        char *filled, *to;

        for (const char *at = follow->command; (at = strstr(at, "{}")); at += 2)
                size += length + 2;
        filled = malloc(size);
        if (!filled)
                return NULL;
        to = filled + sprintf(filled, frame, directory, follow->directory);
        for (const char *from = follow->command; *from;) {
                if (!strncmp(from, "{}", 2)) {
                        to += sprintf(to, "'%s'", directory);
                        from += 2;
                } else {
                        *to++ = *from++;
                }
        }
        *to = 0;
        return filled;
}

static int run_command(const struct follow *follow, const char *directory)
{
        char *command = fill_command(follow, directory);
        int result;

        fflush(stdout);
        if (follow->is_own)
                os->inherit(follow->lock, true); /* so it lasts as long as the shell */
        result = command ? system(command) : -1; /* the user's own command, as their shell would run it */
        if (follow->is_own)
                os->inherit(follow->lock, false);
        free(command);
        if ((result & 127) == SIGINT || result >> 8 == 130)
                exit(CLI_OK); /* Ctrl-C is meant for both */
        if (result)
                cli_complain("the command for %s ended with status %d", follow->tag, result > 255 ? result >> 8 : result);
        return result ? CLI_WRONG : CLI_OK;
}

/* Reads the last line that `nebula restore` has printed to its stderr: the reason of its failure. Without one, *reason stays as it is. */
static void read_reason(int fd, char reason[REASON_MAX])
{
        char text[REASON_MAX], *begin = text;
        struct os_stat stat;
        int64_t length = -1;

        if (!os->fstat(fd, &stat))
                length = os->pread(fd, text, sizeof text - 1, stat.size < sizeof text ? 0 : stat.size - (sizeof text - 1));
        while (length > 0 && text[length - 1] == '\n')
                length--;
        if (length <= 0)
                return;
        text[length] = 0;
        if (strrchr(text, '\n'))
                begin = strrchr(text, '\n') + 1;
        if (!strncmp(begin, COMPLAINT, sizeof COMPLAINT - 1))
                begin += sizeof COMPLAINT - 1;
        strcpy(reason, begin);
}

/* Puts the files of the version into a new directory. If storage or the directory has failed, another try may succeed. */
static int unpack(struct follow *follow, const char *directory)
{
        char *words[] = { (char[]){ "nebula" }, (char[]){ "restore" }, (char[]){ "--to" }, (char *)(uintptr_t)directory, (char[]){ "--path" },
                          (char *)(uintptr_t)follow->common.path, (char[]){ "--" }, (char *)(uintptr_t)follow->tag, NULL };
        bool is_told = !strcmp(follow->left, follow->tag);
        char reason[REASON_MAX];
        int code = 0, result = 0, errors = os->memfd("nebula-follow");

        follow->left[0] = 0;
        if (follow->is_own)
                result = follow_directory_take(follow->directory, &follow->lock);
        if (!result) {
                os_remove_tree(directory);
                result = os->spawn("/proc/self/exe", words, (const int[3]){ follow->lock, -1, errors }, &code); /* it needs no stdin */
        }
        snprintf(reason, sizeof reason, "`nebula restore` ends with %d", code);
        if (errors >= 0) {
                read_reason(errors, reason);
                os->close(errors);
        }
        if (result < 0) {
                code = CLI_UNREACHABLE;
                snprintf(reason, sizeof reason, "%s", os_error_text(result));
        }
        if (code == CLI_UNREACHABLE && !follow->once)
                strcpy(follow->left, follow->tag);
        if (code && code != CLI_NOT_FOUND && !(is_told && *follow->left))
                cli_complain("the files of %s cannot be put into %s%s: %s", follow->tag, directory, *follow->left ? " yet" : "", reason);
        return code;
}

/* Handles the checkpoint that is newest now. CLI_NOT_FOUND: it left before its files were there, because a newer one took its place. */
static int handle(struct follow *follow)
{
        char directory[IPC_PATH_MAX], name[3 * IPC_NAME_MAX];
        int code;

        if (!follow->command) {
                term_print(STYLE_PLAIN, "%s\n", follow->tag);
                fflush(stdout);
                return CLI_OK;
        }
        if (!directory_name(follow->tag, name) || (size_t)snprintf(directory, sizeof directory, "%s/%s", follow->directory, name) >= sizeof directory)
                return CLI_WRONG;
        code = unpack(follow, directory);
        if (!code)
                return run_command(follow, directory);
        os_remove_tree(directory);
        if (follow->is_own)
                os->rmdir(follow->directory);
        return code;
}

static enum nebula_status find(struct follow *follow, nebula_checkpoint **ret_found, struct nebula_error *error)
{
        if (*follow->best.metric)
                return follow_best_find(&follow->best, follow->session, ret_found, error);
        return nebula_checkpoint_latest(follow->session, NULL, ret_found, error);
}

/* Looks for a checkpoint that is newer than the last one. False: there is none. */
static bool look(struct follow *follow, struct nebula_error *error)
{
        nebula_checkpoint *found = NULL;
        uint64_t sequence = 0;
        bool is_new = false;

        *error = (struct nebula_error){ 0 };
        if (!find(follow, &found, error) && found && !read_numbers(found, &sequence, error))
                is_new = sequence > follow->sequence;
        if (is_new) {
                follow->sequence = sequence;
                snprintf(follow->tag, sizeof follow->tag, "%s", nebula_checkpoint_tag(found));
        }
        nebula_checkpoint_free(found);
        return is_new;
}

static int run(struct follow *follow)
{
        struct nebula_error error;
        struct nebula_event event;
        struct follow before;
        nebula_watch *watch = NULL;
        char reported[sizeof error.message] = "";
        int code = CLI_OK;

        for (;;) {
                if (!watch && nebula_watch_open(follow->session, &watch, &error))
                        return cli_fail(false, &error);
                before = *follow;
                if (look(follow, &error)) {
                        code = handle(follow);
                        if (follow->once && code != CLI_NOT_FOUND)
                                return nebula_watch_close(watch), code;
                        if (!*follow->left)
                                continue;
                        follow->sequence = before.sequence; /* so the next look finds it, or a newer one */
                        follow->best.limit = before.best.limit;
                        follow->best.has_limit = before.best.has_limit;
                }
                if (error.status && strcmp(reported, error.message)) {
                        cli_complain(error.status == NEBULA_NOT_FOUND ? "%s yet: waiting for the first one" : "%s", error.message);
                        snprintf(reported, sizeof reported, "%s", error.message);
                }
                if (nebula_watch_next(watch, POLL_MS, &event, &error) == NEBULA_UNAVAILABLE) { /* the next look starts another agent */
                        nebula_watch_close(watch);
                        watch = NULL;
                        os->sleep_ms(200);
                }
        }
}

int command_follow(int argc, char **argv)
{
        struct follow follow = { .lock = -1 };
        const char *best = NULL;
        const struct args_option options[] = {
                CLI_COMMON(follow.common), { "exec", ARGS_TEXT, &follow.command }, { "in", ARGS_TEXT, &follow.directory }, { "once", ARGS_FLAG, &follow.once },
                { "best", ARGS_TEXT, &best },
        };
        struct nebula_options settings;
        struct nebula_error error;
        struct store *store = NULL;
        struct args args;
        char path[TARGET_PATH_MAX], directory[64];
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 1))
                return CLI_USAGE;
        if (args.count)
                follow.common.path = args.positionals[0];
        if (target_open(follow.common.path, &store, &error) || target_path(follow.common.path, path, &error))
                return cli_fail(follow.common.json, &error);
        store_close(store);
        follow.common.path = path;
        snprintf(directory, sizeof directory, FOLLOW_DIRECTORY "%u", os->pid());
        follow.is_own = !follow.directory;
        if (follow.is_own)
                follow.directory = directory;
        if (follow.directory[0] != '/' || strpbrk(follow.directory, ACTS_IN_QUOTES))
                return cli_usage_error("follow", "--in is \"%.200s\": give an absolute path without quotes, $, ` and \\", follow.directory);
        if (best && !follow_best_parse(best, &follow.best))
                return cli_usage_error("follow", "--best is \"%.200s\": give METRIC, METRIC:min or METRIC:max", best);
        if (follow.command)
                follow_directory_sweep();
        nebula_options_init(&settings);
        settings.persist_path = path;
        settings.is_reader = 1;
        if (nebula_session_open(&settings, &follow.session, &error))
                return cli_fail(follow.common.json, &error);
        code = run(&follow);
        nebula_session_close(follow.session);
        if (follow.lock >= 0)
                os->close(follow.lock);
        follow_best_done(&follow.best);
        return code;
}
