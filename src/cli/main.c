#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "cli/cli.h"
#include "cli/term.h"
#include "os/os.h"
#include "os/process.h"
#include "store/cloud.h"

#define NO_COMMAND "there is no command \"%s\"; `nebula` alone lists them"

const struct cli_command cli_commands[] = {
        { "status", "nebula status [--watch | --serve] [--path DIR] [--json]", "shows the state of the agent, and the newest versions",
          "Works without an agent; never starts one. --watch redraws every second\n"
          "until Ctrl-C. --serve is for programs: each line of stdin asks for a status,\n"
          "which is one line of JSON.\n\n"
          "  nebula status --watch --path /scratch/run7\n",
          command_status },
        { "list", "nebula list [--metrics | --best METRIC[:max] | --signatures | --stats | --find NAME | --jobs] [--path DIR] [--json]", "lists all complete checkpoints, in memory and in storage",
          "Oldest first. STATE is the promise each one keeps: durable survives power\n"
          "loss, committed survives the death of the trainer. --metrics also shows the\n"
          "metrics that the program gave to each version, --best the best one first, the\n"
          "smallest or, with :max, the largest. --signatures: who has signed each, without it\n"
          "if a key is trusted here. --stats: bytes by job, month and item, and\n"
          "what rules of `nebula prune` would free. --find: the versions that have a file or\n"
          "a tensor of that name; * and ? are known. --jobs: the jobs whose storage paths lie\n"
          "in DIR, with the newest checkpoint of each.\n\n"
          "  nebula list --path /scratch/run7\n"
          "  nebula list --find '*.attn.*'\n",
          command_list },
        { "inspect", "nebula inspect TAG [NAME [--tensors]] [--path DIR] [--json]", "shows files, ranks, sizes and times of one checkpoint",
          "TAG may be \"latest\". With NAME it shows the records inside that torch file,\n"
          "with --tensors its tensors: type, shape, norm, smallest and largest value, NaNs\n"
          "and infinities.\n\n"
          "  nebula inspect global_step500 model.pt\n",
          command_inspect },
        { "diff", "nebula diff A B [--path DIR] [--with DIR] [--json]", "lists the tensors of two checkpoints that differ, and by how much",
          "A and B are tags. --with: B is in that storage. It does not read parts whose\n"
          "checksums are equal. Exit code 1 if anything differs.\n\n"
          "  nebula diff global_step400 global_step500\n",
          command_diff },
        { "trace", "nebula trace TAG [--out FILE] [--path DIR]", "writes the life of one checkpoint, all ranks, as a trace for Perfetto",
          "The Chrome trace goes to FILE, else to stdout. It shows copying and writing of each rank.\n\n"
          "  nebula trace latest --out trace.json   # open it at https://ui.perfetto.dev\n",
          command_trace },
        { "goodput", "nebula goodput [--history FILE] [--path DIR] [--json]", "shows how a job spent its time: training, saves, failures",
          "Its source is the history that agents write (checkpointHistories.csv). The time between\n"
          "the first and the last save is productive, blocked by saves, slowed by them, lost to\n"
          "failures, or spent on restarts.\n\n"
          "  nebula goodput --path /scratch/run7\n",
          command_goodput },
        { "metrics", "nebula metrics [--listen [ADDRESS:]PORT | --textfile FILE [--every SECONDS]] [--history FILE] [--path DIR]",
          "exposes metrics of this node for Prometheus",
          "Prints them once; --listen serves them at /metrics, at 127.0.0.1 unless an address is\n"
          "given; --textfile writes them to a file for node_exporter, once or every SECONDS.\n"
          "docs/operate.md lists them.\n\n"
          "  nebula metrics --listen 9109 --path /scratch/run7\n"
          "  nebula metrics --textfile /var/lib/node_exporter/nebula.prom --every 15 --path /scratch/run7\n",
          command_metrics },
        { "verify", "nebula verify [TAG|PATH] [--all | --every 7d | --sample 5% | --bytes 50G | --time 10m] [--rate 50M] [--repair [--from DIR]] [--path DIR] [--json]", "checks every byte against its checksum",
          "Without TAG it checks the newest checkpoint. PATH is a storage path, the directory of\n"
          "one checkpoint, or a single file; also a URL in an object store. Names file and\n"
          "offset of each damage. Exit code 1 if there is any. --sample, --bytes and --time check\n"
          "a part, those first that were not verified for the longest time; the next one goes on.\n"
          "--every checks all that were not verified for so long, and goes on where it was\n"
          "interrupted. --rate: so many bytes a second at most. --repair writes damaged files\n"
          "again, from the memory of this node and its peers or from the storage of --from.\n\n"
          "  nebula verify global_step500\n"
          "  nebula verify /scratch/run7 --every 7d --rate 50M --repair --from az://account/container/run7\n"
          "  nebula verify /scratch/run7/global_step500/model.pt\n",
          command_verify },
        { "restore", "nebula restore TAG (--to DIR [NAME...] | --hf DIR [NAME] [OPTIONS]) [--force] [--path DIR] [--json]",
          "copies the files out of storage, verified, or out of the agent's memory",
          "The copies are plain torch files. Nothing in DIR is overwritten without\n"
          "--force. From memory it works while the agent still holds the version.\n\n"
          "  nebula restore latest --to ./out && python3 -c 'import torch; torch.load(\"out/model.pt\")'\n\n"
          "--hf, part of the Python package, writes a Hugging Face directory of the weights of any\n"
          "checkpoint: torch files, FSDP, ZeRO, tensor-parallel ranks. Its options: --config DIR (of\n"
          "config.json and the tokenizer), --dtype bf16 | fp16 | fp32, --max-shard-size 5GB, --key KEY,\n"
          "--rename FILE, --ranks PATTERN, --mapping FILE. DIR may be a URL, TAG a directory.\n\n"
          "  nebula restore latest --hf ./hf --config ./model --dtype bf16\n",
          command_restore },
        { "follow", "nebula follow [PATH] [--exec COMMAND] [--best METRIC[:max]] [--once] [--in DIR]", "runs a command for each new checkpoint",
          "The first one is the newest, then comes each newer one; checkpoints that came and were\n"
          "replaced while the command ran are skipped. In COMMAND, {} is a directory in memory that\n"
          "has the checkpoint's files, checked; it goes when the command has ended. --in: another\n"
          "place for it. --once: ends after one. Without --exec: prints the tags. --best: only one\n"
          "that is the best so far by a metric, the smallest value or, with :max, the largest.\n\n"
          "  nebula follow /scratch/run7 --exec 'python evaluate.py {}'\n",
          command_follow },
        { "pin", "nebula pin [TAG [--reason TEXT] [--early]] [--path DIR] [--json]", "pins a checkpoint, so that no rule removes it",
          "No rule of a job and no `nebula prune` removes a pinned checkpoint. TAG may be\n"
          "\"latest\". Without TAG: lists the pins. --early: TAG need not exist yet.\n\n"
          "  nebula pin global_step500 --reason \"the paper's figure 3\"\n",
          command_pin },
        { "unpin", "nebula unpin TAG [--path DIR] [--json]", "removes the pin of a checkpoint, so that the rules apply again",
          "\n  nebula unpin global_step500\n", command_unpin },
        { "prune", "nebula prune (--keep-last N | --keep-every K | --keep-hourly N | --keep-daily N | --keep-weekly N | --keep-within TIME | --abandoned | --tag TAG [--entry N]) [--thin PATTERN] [--yes] [--job NAME] [--path DIR] [--json]", "removes old checkpoints from storage",
          "Shows what would be removed; --yes removes it. A checkpoint that one of the rules\n"
          "keeps stays. The newest complete checkpoint always stays, and so does every file\n"
          "that Nebula did not write. --keep-every K keeps versions whose step is a multiple\n"
          "of K, --keep-daily N the newest one of each of the newest N days that have one (UTC;\n"
          "hours and weeks in the same way), --keep-within 14d all that were committed in the\n"
          "14 days before the latest. --abandoned removes checkpoints that the job left behind when it went back\n"
          "to an earlier step. --entry N removes the version of TAG only if it is still that\n"
          "entry of its log, as `nebula prune --json` shows it. With --thin, checkpoints stay\n"
          "and lose only the files of that name.\n\n"
          "  nebula prune --keep-last 3 --keep-every 1000 --yes\n"
          "  nebula prune --keep-last 3 --keep-daily 7 --keep-weekly 8\n"
          "  nebula prune --keep-last 2 --thin 'optimizer*' --yes\n",
          command_prune },
        { "copy", "nebula copy SRC DST [--tag TAG | --all] [--replace] [--json]", "copies versions from one storage path to another, and verifies them",
          "SRC and DST are directories or URLs. Without --tag or --all the newest checkpoint.\n"
          "Every chunk is compared with its checksum before it is sent. A version\n"
          "that DST has already is not copied again. A copy that was interrupted goes on where\n"
          "it was. If DST has another version of a tag, nothing is copied without --replace.\n\n"
          "  nebula copy /scratch/run7 az://account/container/run7 --all\n",
          command_copy },
        { "sign", "nebula sign [TAG | --all] [--key FILE] [--path DIR] | --new-key FILE [--p256] | --trust FILE | --distrust ID | --trusted | --bundle DIR --key FILE",
          "signs checkpoints, makes keys, and says which are trusted",
          "Signs the newest checkpoint, or TAG, with the private key of FILE or of\n"
          "$NEBULA_SIGN_KEY. With NEBULA_SIGN_KEY the agent signs what it writes. With\n"
          "NEBULA_SIGNATURES=require, programs read only checkpoints that a trusted key has\n"
          "signed. --new-key makes FILE and FILE.pub; --trust adds the key of a public file to\n"
          "those of this user, --distrust removes one, --trusted lists them. --bundle writes\n"
          "DIR/model.sig, which OpenSSF's model_signing verifies; its key is one of --p256.\n\n"
          "  nebula sign --new-key ~/run7.key && nebula sign --trust ~/run7.key.pub\n"
          "  nebula sign global_step500 --key ~/run7.key\n",
          command_sign },
        { "doctor", "nebula doctor [PATH] [--health] [--measure] [--save] [--path DIR] [--json]", "checks this machine, and gives advice",
          "Tries each ability. Exit code 1 if something essential does not work. --measure\n"
          "also measures how fast memory is copied and storage written and read, with\n"
          "256 MiB, which `nebula plan` can take. --save saves a checkpoint, kills the process,\n"
          "loads it from memory and from storage, and removes it, in a place of its own.\n"
          "--health looks only at memory, disk and devices, as `nebula run` does before a node joins.\n\n"
          "  nebula doctor /scratch/run7\n  nebula doctor --save /scratch/run7\n",
          command_doctor },
        { "flush", "nebula flush [TAG] [--timeout SECONDS] [--path DIR] [--json]", "makes a version in memory durable now",
          "Without TAG the newest one. Returns when it is durable. It does not wait for the\n"
          "interval at which the job persists.\n\n"
          "  nebula flush --path /scratch/run7\n",
          command_flush },
        { "plan", "nebula plan (--params N | --config FILE) [--gpus N] [--nodes N] [OPTIONS] [--json]",
          "computes the needs of a job: memory, stage, intervals, goodput, storage",
          "Part of the Python package. Without a storage path it computes from given speeds,\n"
          "with --measure from those of this machine. `nebula plan --options` lists all options.\n\n"
          "  nebula plan --params 70B --gpus 8 --nodes 32 --gpu-memory 80G\n",
          command_python },
        { "run", "nebula run [--warm auto|off|MODULES] [OPTIONS] SCRIPT [ARGUMENTS]", "torchrun, with workers that start warm",
          "Part of the Python package. All options are those of torchrun. The workers are\n"
          "forked from a process that has their imports done. --warm says which: by default\n"
          "those of the last worker of this script.\n\n"
          "  nebula run --nproc-per-node 8 --max-restarts 100 train.py\n",
          command_python },
        { "studio", "nebula studio [--path DIR]... [--port N] [--read-only] [--token-file FILE] [--host NAME] [--history FILE] [--every SECONDS]", "serves a page that shows the job and its checkpoints",
          "Part of the Python package, with its extra `studio`. Serves the page on this machine\n"
          "alone, until Ctrl-C, and prints its address. DIR may have several jobs in it.\n"
          "--read-only: without controls. --token-file and --host are for a reverse proxy\n"
          "(docs/operate.md). --history is a checkpointHistories.csv\n"
          "that is not beside the storage; --every says how often it looks (1 s, at object\n"
          "stores 15 s).\n\n"
          "  nebula studio --path /scratch/run7\n",
          command_python },
        { "stop", "nebula stop [--now [--yes]] [--timeout SECONDS] [--json]", "finishes persisting and ends the agent",
          "--now drops versions that are only in memory; it asks first, or takes --yes as the answer. After --timeout the\n"
          "command gives up with exit code 6, and the agent goes on.\n\n"
          "  nebula stop\n",
          command_stop },
        { "agent", "nebula agent --daemon | --foreground", "runs the agent (the first init() does this by itself)",
          "One agent per user and node. --foreground stays on the terminal and logs there.\n\n"
          "  nebula agent --foreground\n",
          command_agent },
        { "store", "nebula store [--path DIR]", "reads and writes small objects for a program that asks on stdin",
          "One JSON request per line of stdin, one JSON answer per line of stdout. The\n"
          "rendezvous of elastic jobs uses it. Values are UTF-8 texts of at most 16 MiB.\n\n"
          "  {\"do\":\"features\"}                  {\"puts_if_same\":true,\"lists_fresh\":true}\n"
          "  {\"do\":\"get\",\"key\":K}             {\"value\":V,\"stamp\":S}\n"
          "  {\"do\":\"put\",\"key\":K,\"value\":V}   {\"stamp\":S}; on a condition with \"if\":\"absent\",\n"
          "                                     or with \"if\":\"same\",\"stamp\":S\n"
          "  {\"do\":\"list\",\"prefix\":P}         {\"entries\":[{\"key\":K,\"time_ns\":T},...]}\n"
          "  {\"do\":\"remove\",\"keys\":[K,...]}   {}\n"
          "  {\"do\":\"clock\"}                     {\"time_ns\":T}, the time of the store\n"
          "  {\"do\":\"upload\",\"key\":K,\"file\":PATH}  {\"size\":N}; a file becomes the object\n"
          "  {\"do\":\"sum\",\"key\":K}             {\"size\":N,\"crc64\":S}\n\n"
          "A request that failed has {\"error\":{\"status\":...,\"message\":...,\"again\":...}}.\n"
          "Status busy: the condition does not hold; not_found: there is no such object.\n"
          "\"again\": the same request may succeed later.\n\n"
          "  nebula store --path /scratch/run7 <<< '{\"do\":\"list\", \"prefix\":\"\"}'\n",
          command_store },
        { "version", "nebula version [--json]", "shows the versions of Nebula and of its parts",
          "\n  nebula version\n", command_version },
        { "help", "nebula help [COMMAND]", "shows this overview, or the help of one command",
          "\n  nebula help verify\n", command_help },
};
const size_t cli_command_count = CLI_COUNT(cli_commands);

static const struct cli_command *find_command(const char *name)
{
        for (size_t i = 0; i < cli_command_count; i++)
                if (!strcmp(cli_commands[i].name, name))
                        return &cli_commands[i];
        return NULL;
}

static void print_overview(void)
{
        term_print(STYLE_BOLD, "nebula");
        printf(" %s - checkpoints of large-model training: fast, exact, verified\n\n", NEBULA_VERSION);
        for (size_t i = 0; i < cli_command_count; i++) {
                printf("  ");
                term_print(STYLE_BOLD, "%-9s", cli_commands[i].name);
                printf("%s\n", cli_commands[i].summary);
        }
        printf("\n`nebula COMMAND --help` says more. Storage is --path DIR, else\n"
               "$NEBULA_PERSISTENT_STORAGE_PATH, else the current directory.\n"
               "Exit codes: 0 fine, 1 something is wrong, 2 usage, 3 not found,\n"
               "4 storage or agent cannot be reached, 5 refused, 6 not done in time.\n");
}

static void print_help(const struct cli_command *command)
{
        printf("usage: %s\n\n%c%s.\n%s%s", command->usage, toupper((unsigned char)command->summary[0]),
               command->summary + 1, *command->help == '\n' ? "" : "\n", command->help);
}

int command_help(int argc, char **argv)
{
        const struct cli_command *command;
        struct args args;

        if (!cli_parse(argc, argv, NULL, 0, &args, 0, 1))
                return CLI_USAGE;
        if (!args.count) {
                print_overview();
                return CLI_OK;
        }
        command = find_command(args.positionals[0]);
        if (!command) {
                cli_complain(NO_COMMAND, args.positionals[0]);
                return CLI_USAGE;
        }
        print_help(command);
        return CLI_OK;
}

void cli_complain(const char *format, ...)
{
        char text[1024];
        va_list arguments;

        va_start(arguments, format);
        vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        text_make_printable(text);
        fprintf(stderr, "nebula: %s\n", text);
}

int cli_usage_error(const char *command, const char *format, ...)
{
        char text[512];
        va_list arguments;

        va_start(arguments, format);
        vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        cli_complain("%s; see `nebula %s --help`", text, command);
        return CLI_USAGE;
}

bool cli_parse(int argc, char **argv, const struct args_option *options, size_t option_count, struct args *args,
               size_t least, size_t most)
{
        if (!args_parse(argc, argv, options, option_count, args))
                cli_usage_error(argv[0], "%s", args->problem);
        else if (args->count < least)
                cli_complain("an argument is missing: %s", find_command(argv[0])->usage);
        else if (args->count > most)
                cli_usage_error(argv[0], "\"%s\" is one argument too many", args->positionals[most]);
        else
                return true;
        return false;
}

enum cli_exit cli_exit_of(enum nebula_status status)
{
        switch (status) {
        case NEBULA_OK:
                return CLI_OK;
        case NEBULA_NOT_FOUND:
                return CLI_NOT_FOUND;
        case NEBULA_INVALID:
                return CLI_USAGE;
        case NEBULA_TIMEOUT:
        case NEBULA_BUSY:
        case NEBULA_STORAGE:
        case NEBULA_NO_SPACE:
        case NEBULA_UNAVAILABLE:
                return CLI_UNREACHABLE;
        default:
                return CLI_WRONG;
        }
}

/* Writes a piece of JSON. It escapes characters on which a terminal acts and characters that show nothing. Such a character is always part
 * of a string. */
static int write_piece(const char *text, size_t size, void *stream)
{
        uint32_t character;
        size_t at, length;

        while (text_find_hidden(text, size, &at, &length, &character)) {
                if (fwrite(text, 1, at, stream) != at || fprintf(stream, "\\u%04x", character) < 0)
                        return -1;
                text += at + length;
                size -= at + length;
        }
        return fwrite(text, 1, size, stream) == size ? 0 : -1;
}

static int print_json(json_t *value, size_t flags, int code)
{
        if (!value || json_dump_callback(value, write_piece, stdout, flags | JSON_REAL_PRECISION(17)) || fputc('\n', stdout) == EOF || fflush(stdout)) {
                cli_complain("cannot print the answer");
                code = CLI_UNREACHABLE;
        }
        json_decref(value);
        return code;
}

json_t *cli_error_json(const struct nebula_error *error)
{
        char message[sizeof error->message];

        memcpy(message, error->message, sizeof message);
        text_make_printable(message); /* it may quote bytes that JSON cannot hold */
        return json_pack("{s:s, s:s}", "status", nebula_status_name(error->status), "message", message);
}

int cli_print_json(json_t *value, int code)
{
        return print_json(value, JSON_INDENT(2), code);
}

int cli_print_json_line(json_t *value, int code)
{
        return print_json(value, JSON_COMPACT, code);
}

static int fail(bool json, size_t flags, const struct nebula_error *error)
{
        int code = cli_exit_of(error->status);
        char message[sizeof error->message];

        memcpy(message, error->message, sizeof message);
        text_make_printable(message); /* it may quote bytes that JSON cannot hold */
        cli_complain("%s", message);
        if (json)
                print_json(json_pack("{s:o}", "error", cli_error_json(error)), flags, code);
        return code;
}

int cli_fail(bool json, const struct nebula_error *error)
{
        return fail(json, JSON_INDENT(2), error);
}

int cli_fail_line(bool json, const struct nebula_error *error)
{
        return fail(json, JSON_COMPACT, error);
}

bool cli_confirm(const char *asked, bool *ret_no_terminal)
{
        char answer[16] = "";

        *ret_no_terminal = !term_can_ask();
        if (*ret_no_terminal)
                return false;
        fprintf(stderr, "%s [y/N] ", asked);
        return fgets(answer, sizeof answer, stdin) && (answer[0] == 'y' || answer[0] == 'Y');
}

/* The query of a URL can be a signature, and each user of the machine can read the command line of a process. From here on only this process
 * has it. */
static void hide_queries(int argc, char **argv)
{
        for (int i = 1; i < argc; i++) {
                char *url = strstr(argv[i], "://"), *query = url ? strchr(url, '?') : NULL, *own = query ? strdup(argv[i]) : NULL;

                if (!own)
                        continue;
                memset(query + 1, 'x', strlen(query + 1));
                argv[i] = own;
        }
}

int main(int argc, char **argv)
{
        const struct cli_command *command;
        int code;

        os_file_limit_no_signal();
        hide_queries(argc, argv);
        cloud_offer();
        if (argc == 3 && !strcmp(argv[1], "programs")) /* of an agent, which may start none itself */
                return os_programs_serve(atoi(argv[2])) < 0;
        os_programs_offer();
        if (argc < 2 || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
                print_overview();
                return CLI_OK;
        }
        command = find_command(strcmp(argv[1], "--version") ? argv[1] : "version");
        if (!command) {
                cli_complain(NO_COMMAND, argv[1]);
                return CLI_USAGE;
        }
        if (args_want_help(argc - 1, argv + 1)) {
                print_help(command);
                return CLI_OK;
        }
        code = command->run(argc - 1, argv + 1);
        /* `nebula list > file` on a full disk must not count as success. */
        if ((fflush(stdout) || ferror(stdout)) && code == CLI_OK) {
                cli_complain("cannot write the output");
                code = CLI_UNREACHABLE;
        }
        return code;
}
