/* nebula copy: copies versions from one storage path to another. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/human.h"
#include "cli/target.h"
#include "cli/term.h"
#include "os/os.h"
#include "store/latest.h"
#include "store/manifest_load.h"
#include "store/scan.h"
#include "store/transfer.h"

#define LINE_NS SECOND_NS /* pause between two progress lines with --json */

struct copy {
        bool json, all, replaces;
        const char *tag;
        struct store *from, *to;
        struct manifest *versions; /* oldest first */
        size_t count, broken;      /* broken: versions of the source that cannot be read */
        bool *is_needed;
        uint64_t total;
        size_t copied, present, gone, damaged;
        struct nebula_error damage; /* of the first damaged version: with all, the others are copied first */
        uint64_t copied_bytes;
        int64_t begun_ns;
        atomic_uint_fast64_t done;
        _Atomic int64_t reported_ns;
};

/* Of the source: a file or record is missing, or is not what the manifest names. */
static bool is_damage(enum nebula_status status)
{
        return status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT;
}

static void on_progress(void *argument, uint64_t bytes)
{
        struct copy *copy = argument;
        uint64_t done = atomic_fetch_add(&copy->done, bytes) + bytes;
        int64_t now = os->now_ns(), before = atomic_load(&copy->reported_ns);
        double seconds = (double)(now - copy->begun_ns) / 1e9;

        progress_add(bytes);
        if (!copy->json || now - before < LINE_NS || !atomic_compare_exchange_strong(&copy->reported_ns, &before, now))
                return;
        cli_print_json_line(json_pack("{s:s, s:I, s:I, s:f, s:f}", "event", "progress", "done", (json_int_t)done, "total", (json_int_t)copy->total,
                                      "bytes_per_s", (double)done / seconds, "seconds_left",
                                      done < copy->total ? seconds * (double)(copy->total - done) / (double)done : 0.0), CLI_OK);
}

static void on_complaint(void *argument, const char *message)
{
        (void)argument;
        cli_complain("%s", message);
}

static enum nebula_status choose_all(struct copy *copy, struct nebula_error *error)
{
        struct manifest_scan scan;
        enum nebula_status status = manifest_scan(copy->from, &scan, error);

        if (status)
                return status;
        copy->versions = scan.manifests;
        copy->count = scan.count;
        copy->broken = scan.broken_count;
        if (scan.broken_count)
                cli_complain("%zu checkpoint%s cannot be read and cannot be copied: %s", scan.broken_count, scan.broken_count == 1 ? "" : "s", scan.broken);
        scan.manifests = NULL;
        scan.count = 0;
        manifest_scan_done(&scan);
        return NEBULA_OK;
}

static enum nebula_status choose(struct copy *copy, struct nebula_error *error)
{
        enum nebula_status status;

        if (copy->all)
                return choose_all(copy, error);
        copy->versions = calloc(1, sizeof *copy->versions);
        if (!copy->versions)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a checkpoint");
        status = target_load(copy->from, copy->tag, &copy->versions[0], NULL, error);
        copy->count = !status;
        return status;
}

/* Checks all versions before the first byte is copied, so that a copy does not stop in the middle because a version is refused. */
static enum nebula_status look(struct copy *copy, const struct transfer *transfer, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        copy->is_needed = calloc(copy->count + 1, sizeof *copy->is_needed);
        if (!copy->is_needed)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %zu checkpoints", copy->count);
        for (size_t i = 0; i < copy->count && !status; i++) {
                enum transfer_state state = TRANSFER_ABSENT;

                status = transfer_look(transfer, &copy->versions[i], &state, error);
                if (is_damage(status) && copy->all) { /* copy_one looks again */
                        state = TRANSFER_ABSENT;
                        status = NEBULA_OK;
                }
                if (!status && state == TRANSFER_OTHER && !copy->replaces)
                        return error_set(error, NEBULA_BUSY, 0, "%s has another version of \"%s\"; --replace puts this one in its place", copy->to->root,
                                         copy->versions[i].tag);
                copy->is_needed[i] = state != TRANSFER_PRESENT;
                copy->total += copy->is_needed[i] ? manifest_size(&copy->versions[i]) : 0;
        }
        return status;
}

static void report(struct copy *copy, const struct manifest *version, const char *result)
{
        char size[HUMAN_MAX];

        if (copy->json) {
                cli_print_json_line(json_pack("{s:s, s:s, s:s, s:I, s:I}", "event", "version", "tag", version->tag, "result", result, "size",
                                              (json_int_t)manifest_size(version), "file_count", (json_int_t)version->file_count), CLI_OK);
                return;
        }
        progress_end();
        term_print(STYLE_BOLD, "%s", version->tag);
        printf("  %s in %zu file%s  ", human_size(manifest_size(version), size), version->file_count, version->file_count == 1 ? "" : "s");
        if (!strcmp(result, "copied"))
                term_print(STYLE_GOOD, "copied, verified\n");
        else if (!strcmp(result, "damaged"))
                term_print(STYLE_BAD, "not copied: damaged\n");
        else
                term_print(STYLE_DIM, "%s\n", !strcmp(result, "present") ? "is there already" : "was removed meanwhile");
        fflush(stdout);
}

static enum nebula_status copy_one(struct copy *copy, const struct transfer *transfer, const struct manifest *version, struct nebula_error *error)
{
        enum transfer_state before;
        enum nebula_status status = transfer_version(transfer, version, &before, error);

        if (is_damage(status) && copy->all && manifest_is_gone(copy->from, version)) {
                copy->gone++;
                report(copy, version, "gone");
                return NEBULA_OK;
        }
        if (is_damage(status) && copy->all) { /* the others are sound, and younger */
                report(copy, version, "damaged");
                if (copy->damaged++)
                        cli_complain("%s", error->message);
                else
                        copy->damage = *error;
                return NEBULA_OK;
        }
        if (status)
                return status;
        if (before == TRANSFER_PRESENT) {
                copy->present++;
        } else {
                copy->copied++;
                copy->copied_bytes += manifest_size(version);
        }
        report(copy, version, before == TRANSFER_PRESENT ? "present" : "copied");
        return NEBULA_OK;
}

/* A failure loses no data: Nebula's readers do not use this hint. */
static void mend_latest(struct copy *copy)
{
        struct manifest newest = { 0 };
        struct nebula_error error = { 0 };
        char directory[256];
        enum nebula_status status = target_load(copy->to, NULL, &newest, NULL, &error);

        if (!status)
                status = name_encode(newest.tag, directory, &error);
        if (!status)
                status = latest_put(copy->to, directory, NULL, &error);
        if (status)
                cli_complain("%s", error.message);
        manifest_done(&newest);
}

static int finish(const struct copy *copy)
{
        double seconds = (double)(os->now_ns() - copy->begun_ns) / 1e9;
        char size[HUMAN_MAX], duration[HUMAN_MAX], speed[HUMAN_MAX];
        int code = copy->broken || copy->damaged ? CLI_WRONG : CLI_OK;

        if (copy->json && copy->damaged) {
                cli_fail_line(true, &copy->damage);
                return code;
        }

        if (copy->json)
                return cli_print_json_line(json_pack("{s:s, s:I, s:I, s:I, s:I, s:f}", "event", "end", "copied_count", (json_int_t)copy->copied, "present_count",
                                                     (json_int_t)copy->present, "unreadable_count", (json_int_t)copy->broken, "bytes",
                                                     (json_int_t)copy->copied_bytes, "seconds", seconds), code);
        if (!copy->count) {
                term_print(STYLE_PLAIN, "no checkpoints in %s\n", copy->from->root);
        } else if (!copy->copied && copy->damaged) {
                term_print(STYLE_PLAIN, "nothing was copied to %s\n", copy->to->root);
        } else if (!copy->copied) {
                term_print(STYLE_PLAIN, "nothing to copy: %s has %s already\n", copy->to->root, copy->count == 1 ? "it" : "them");
        } else {
                term_print(STYLE_PLAIN, "%zu checkpoint%s copied to %s: ", copy->copied, copy->copied == 1 ? "" : "s", copy->to->root);
                printf("%s, %s, %s\n", human_size(copy->copied_bytes, size), human_duration(seconds, duration),
                       human_speed(copy->copied_bytes, seconds, speed));
        }
        if (copy->damaged)
                cli_fail_line(false, &copy->damage);
        return code;
}

static enum nebula_status open_both(struct copy *copy, const char *const *places, struct nebula_error *error)
{
        char path[TARGET_PATH_MAX];
        enum nebula_status status = target_absolute(places[0], path, error);

        if (!status)
                status = store_open(path, &copy->from, error);
        if (!status)
                status = target_absolute(places[1], path, error);
        return status ? status : store_open(path, &copy->to, error);
}

static int run(struct copy *copy, const char *const *places)
{
        struct transfer transfer = { .replaces = copy->replaces, .progress = on_progress, .complain = on_complaint, .argument = copy };
        struct nebula_error error = { 0 };
        enum nebula_status status = open_both(copy, places, &error);
        int code;

        transfer.from = copy->from;
        transfer.to = copy->to;
        if (!status)
                status = choose(copy, &error);
        if (!status)
                status = look(copy, &transfer, &error);
        copy->begun_ns = os->now_ns();
        atomic_store(&copy->reported_ns, copy->begun_ns);
        for (size_t i = 0; i < copy->count && !status; i++) {
                char what[300];

                if (!copy->is_needed[i]) {
                        copy->present++;
                        report(copy, &copy->versions[i], "present");
                        continue;
                }
                snprintf(what, sizeof what, "copying %.200s", copy->versions[i].tag);
                progress_begin(what, manifest_size(&copy->versions[i]));
                status = copy_one(copy, &transfer, &copy->versions[i], &error);
                progress_end();
        }
        if (copy->copied)
                mend_latest(copy);
        if (!status)
                return finish(copy);
        code = cli_fail_line(copy->json, &error);
        return status == NEBULA_BUSY ? CLI_REFUSED : code;
}

int command_copy(int argc, char **argv)
{
        struct copy copy = { 0 };
        const struct args_option options[] = {
                { "tag", ARGS_TEXT, &copy.tag }, { "all", ARGS_FLAG, &copy.all }, { "replace", ARGS_FLAG, &copy.replaces }, { "json", ARGS_FLAG, &copy.json },
        };
        struct args args;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 2, 2))
                return CLI_USAGE;
        if (copy.tag && copy.all)
                return cli_usage_error("copy", "--tag and --all cannot be used together");
        code = run(&copy, args.positionals);
        for (size_t i = 0; i < copy.count; i++)
                manifest_done(&copy.versions[i]);
        free(copy.versions);
        free(copy.is_needed);
        store_close(copy.from);
        store_close(copy.to);
        return code;
}
