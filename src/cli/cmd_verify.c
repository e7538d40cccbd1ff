/* nebula verify: checks every byte of one version, of all versions, or of one file. */
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "base/text.h"
#include "cli/check.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/term.h"
#include "cli/repair.h"
#include "cli/verified.h"
#include "cli/verify_object.h"
#include "cli/verify_report.h"
#include "os/os.h"
#include "store/manifest_load.h"
#include "store/rebuild.h"
#include "store/scan.h"
#include "store/tag_log.h"

#define LOOKS_MAX 20 /* attempts, if the version is removed or written again meanwhile */

#define STORE_NOTES_NS (30 * SECOND_NS) /* a command that is killed loses no more than this */

/* How much a sample reads. */
struct budget {
        uint64_t bytes, used; /* bytes 0: no limit */
        int64_t until_ns;     /* 0: no limit */
        double since;         /* --every: versions that were verified later, and are sound, are left out; 0: none is */
        struct verify_run *run;
        const struct manifest *manifest; /* that is checked now, since `began` */
        double began;
        bool was_ok;
        struct check_part part; /* of the version that is checked now */
};

struct verify_run {
        struct verify_object object; /* that the command line names */
        json_t *verified;    /* what was known before; NULL: not asked */
        json_t *notes;       /* what was verified (verified.h) */
        int64_t stored_ns;   /* when the notes were stored last */
        struct budget *budget; /* NULL: no limit */
        bool repairs;
        struct cli_agent *agent; /* NULL: none runs, or it was not asked yet */
        bool asked_agent;
        struct store *from; /* that has sound copies; NULL: none is named */
        const char *new_documents; /* the source of repaired documents of the version that is checked now; NULL: none was repaired */
};

/* Whether files of several versions can share blocks in this store, so that damage of one is damage of all of them. */
static bool shares_blocks(struct store *store)
{
        return store && (store->ops->features(store) & (STORE_PATHS | STORE_REFERS)) == (STORE_PATHS | STORE_REFERS);
}

static void store_notes(struct verify_run *run, const struct manifest_scan *known)
{
        struct nebula_error error;

        if (run->object.store && verified_store(run->object.store, run->notes, known, &error))
                cli_complain("the time of this check could not be stored: %s", error.message);
        run->stored_ns = os->now_ns();
}

static void note(struct verify_run *run, const struct manifest *manifest, const struct check_part *part, bool is_ok, double began, bool was_ok)
{
        const struct verified one = { .at = began, .ok = was_ok && is_ok, .done = part ? part->done : manifest->file_count };

        if (*run->object.name)
                return;
        verified_note(run->notes, manifest->tag, manifest->sequence, &one);
        if (os->now_ns() - run->stored_ns > STORE_NOTES_NS)
                store_notes(run, NULL);
}

static bool budget_ends(void *argument, uint64_t bytes)
{
        struct budget *budget = argument;

        budget->used += bytes;
        if (os->now_ns() - budget->run->stored_ns > STORE_NOTES_NS) /* a large version takes hours */
                note(budget->run, budget->manifest, &budget->part, !budget->part.has_damage, budget->began, budget->was_ok);
        return (budget->bytes && budget->used >= budget->bytes) || (budget->until_ns && os->now_ns() >= budget->until_ns);
}

/* Where the check of this version begins: behind the files that an earlier sample has checked. */
static struct check_part *part_of(struct verify_run *run, const struct manifest *manifest, double *ret_began, bool *ret_was_ok)
{
        struct verified earlier;

        if (!run->budget)
                return NULL;
        run->budget->part = (struct check_part){ .ends = budget_ends, .argument = run->budget };
        if (verified_find(run->verified, manifest->tag, manifest->sequence, &earlier) && earlier.done < manifest->file_count) {
                run->budget->part.skip = earlier.done;
                *ret_began = earlier.at;
                *ret_was_ok = earlier.ok;
        }
        run->budget->run = run;
        run->budget->manifest = manifest;
        run->budget->began = *ret_began;
        run->budget->was_ok = *ret_was_ok;
        return &run->budget->part;
}

/* The agent of this node must know: memory may have the only sound copy. */
static void tell_agent(struct verify_run *run, const struct manifest *manifest, const struct check_part *part, bool is_ok)
{
        bool is_all = !*run->object.name && !(part && (part->skip || part->is_over));

        if (is_ok && !is_all)
                return;
        if (!run->asked_agent)
                cli_agent_open_if_any(run->object.store->root, &run->agent);
        run->asked_agent = true;
        if (run->agent)
                cli_agent_compared(run->agent, manifest->tag, manifest->sequence, is_ok, NULL);
}

/* Returns whether the version is to be looked at again. */
static bool repairs_manifest(struct verify_run *run, const char *tag)
{
        bool has_changed = false;

        if (!run->repairs || run->new_documents)
                return false;
        run->new_documents = repair_manifest(run->object.store, tag, run->from, &has_changed);
        return has_changed || run->new_documents;
}

/* False: the version was removed or written again while it was checked. *ret_outage: the store did not answer, so nothing is known. */
static bool append_once(struct verify_run *run, const char *tag, json_t *versions, enum nebula_status *ret_status,
                        struct nebula_error *ret_outage)
{
        struct manifest manifest = { 0 };
        struct nebula_error error;
        json_t *version = NULL;
        enum nebula_status status = manifest_load(run->object.store, tag, &manifest, &error);
        double began = (double)os->wall_ns() / 1e9;
        struct check_part *part = NULL;
        bool is_gone, was_ok = true;

        *ret_outage = (struct nebula_error){ 0 };
        if (status && store_class(&error) == STORE_AGAIN)
                *ret_outage = error;
        else if (status && (status != NEBULA_NOT_FOUND || rebuild_is_lost(run->object.store, tag)) && repairs_manifest(run, tag))
                return false;
        else if (status && status != NEBULA_NOT_FOUND)
                version = check_broken(run->object.store, tag, &error);
        if (!status) {
                progress_begin(tag, manifest_size(&manifest));
                part = part_of(run, &manifest, &began, &was_ok);
                if (run->repairs) {
                        const char *source = repair_records(run->object.store, &manifest, run->from);

                        run->new_documents = source ? source : run->new_documents;
                }
                version = check_version(run->object.store, &manifest, *run->object.name ? run->object.name : NULL, part, ret_outage);
                if (version && run->repairs && !check_ok(version) && !ret_outage->status)
                        repair_version(run->object.store, &manifest, run->from, version);
                if (version && run->new_documents)
                        json_object_set_new(json_array_get(json_object_get(version, "documents"), 0), "repaired", json_string(run->new_documents));
                run->new_documents = NULL;
                if (version && !ret_outage->status)
                        check_signatures(run->object.store, &manifest, version);
                if (*run->object.tag && !ret_outage->status && shares_blocks(run->object.store))
                        check_name_sharers(run->object.store, &manifest, version);
                progress_end();
        }
        if (ret_outage->status) {
                json_decref(version);
                manifest_done(&manifest);
                *ret_status = ret_outage->status;
                return true;
        }
        is_gone = status == NEBULA_NOT_FOUND || (!status && !check_ok(version) && manifest_is_gone(run->object.store, &manifest));
        if (!is_gone)
                json_array_append(versions, version);
        if (!is_gone && !status)
                tell_agent(run, &manifest, part, check_ok(version));
        if (!is_gone && !status)
                note(run, &manifest, part, check_ok(version), began, was_ok);
        json_decref(version);
        manifest_done(&manifest);
        *ret_status = status;
        return !is_gone;
}

/* NEBULA_NOT_FOUND: the version was removed. NEBULA_BUSY: it was written again during every attempt. Others: the store did not answer, and
 * `error` says so. In all these cases the version is not added to `versions`. */
static enum nebula_status append_version(struct verify_run *run, const char *tag, json_t *versions, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        struct nebula_error outage;

        run->new_documents = NULL;
        for (int look = 0; look < LOOKS_MAX && status != NEBULA_NOT_FOUND; look++) {
                if (!append_once(run, tag, versions, &status, &outage))
                        continue;
                if (outage.status)
                        *error = outage;
                return outage.status;
        }
        cli_complain("%s was removed or written again meanwhile; it was not checked", tag);
        return status == NEBULA_NOT_FOUND ? status : NEBULA_BUSY;
}

static bool is_outage(enum nebula_status status)
{
        return status && status != NEBULA_NOT_FOUND && status != NEBULA_BUSY;
}

/* Checks one version. If the newest was wanted and is removed meanwhile, checks the next newest. */
static enum nebula_status append_one(struct verify_run *run, json_t *versions, struct nebula_error *error)
{
        struct manifest newest;
        char tag[256];

        strcpy(tag, run->object.tag);
        for (int look = 0; look < LOOKS_MAX; look++) {
                enum nebula_status status = append_version(run, tag, versions, error);

                if (!status || is_outage(status))
                        return status;
                if (!run->object.is_newest || status != NEBULA_NOT_FOUND)
                        break;
                status = target_load(run->object.store, NULL, &newest, NULL, error);
                if (status)
                        return status;
                strcpy(tag, newest.tag);
                manifest_done(&newest);
        }
        return error_set(error, NEBULA_NOT_FOUND, 0, "\"%s\" has been removed", tag);
}

static bool is_among(const struct manifest_scan *scan, const char *tag)
{
        for (size_t i = 0; i < scan->count; i++)
                if (!strcmp(scan->manifests[i].tag, tag))
                        return true;
        return false;
}

/* Adds directories that hold a manifest which the scan could not read. Directories of other users, such as lost+found, are only named. */
static enum nebula_status append_broken(struct verify_run *run, const struct manifest_scan *scan,
                                        json_t *versions, struct nebula_error *error)
{
        struct store *store = run->object.store;
        struct store_list list;
        struct nebula_error failure;
        char tag[256];
        enum nebula_status status = store_list_all(store, "", false, &list, error), outcome = NEBULA_OK;

        if (status)
                return status;
        for (size_t i = 0; i < list.count && !is_outage(outcome); i++) {
                struct tag_log log = { 0 };

                if (!list.entries[i].is_prefix || name_decode(list.entries[i].key, tag, NULL) || is_among(scan, tag))
                        continue;
                status = tag_log_head(store, tag, &log, &failure);
                if (!status && log.is_unsound)
                        outcome = append_version(run, tag, versions, error);
                else if (status && list.entries[i].is_foreign) {
                        text_make_printable(failure.message);
                        cli_complain("%s; it belongs to another user and was not checked", failure.message);
                } else if (status) {
                        outcome = append_version(run, tag, versions, error);
                }
                tag_log_done(&log);
        }
        store_list_done(&list);
        return is_outage(outcome) ? outcome : NEBULA_OK;
}

static bool has_any(struct store *store, const char *directory, const char *below)
{
        struct store_list list;
        char prefix[300];
        bool has;

        snprintf(prefix, sizeof prefix, "%s/%s", directory, below);
        if (store_list_all(store, prefix, true, &list, NULL))
                return false;
        has = list.count > 0;
        store_list_done(&list);
        return has;
}

static bool is_begun(struct store *store, const char *directory, const char *tag)
{
        uint64_t number = 0;

        return has_any(store, directory, MANIFEST_DIRECTORY "/") && !tag_log_number(store, tag, &number, NULL) && !number;
}

/* Whether the directory is a storage path itself: the user has named the one above it. */
static bool is_storage_path(struct store *store, const char *directory)
{
        return has_any(store, directory, MANIFEST_DIRECTORY "/index/");
}

/* Names directories without a manifest: other commands do not show them, but their files may be the damage that the user is looking for. */
static void report_incomplete(struct store *store)
{
        struct store_list list;
        char tag[256];

        if (store_list_all(store, "", false, &list, NULL))
                return;
        for (size_t i = 0; i < list.count; i++) {
                if (!list.entries[i].is_prefix || name_decode(list.entries[i].key, tag, NULL) || !is_begun(store, list.entries[i].key, tag))
                        continue;
                if (rebuild_is_lost(store, tag))
                        cli_complain("%s was not checked: its manifest is missing; `nebula verify %s --repair` makes it again from its records", tag, tag);
                else if (is_storage_path(store, list.entries[i].key))
                        cli_complain("%s was not checked: it is no checkpoint but a storage path with checkpoints of its own", tag);
                else
                        cli_complain("%s was not checked: it has no manifest, so its writing is not finished or was interrupted", tag);
        }
        store_list_done(&list);
}

/* Repairs the versions whose manifests are missing, and checks them. */
static enum nebula_status append_lost(struct verify_run *run, json_t *versions, struct nebula_error *error)
{
        struct store_list list;
        char tag[256];
        enum nebula_status status = store_list_all(run->object.store, "", false, &list, error), outcome = NEBULA_OK;

        if (status)
                return status;
        for (size_t i = 0; i < list.count && !is_outage(outcome); i++)
                if (list.entries[i].is_prefix && !name_decode(list.entries[i].key, tag, NULL) && is_begun(run->object.store, list.entries[i].key, tag) &&
                    rebuild_is_lost(run->object.store, tag))
                        outcome = append_version(run, tag, versions, error);
        store_list_done(&list);
        return is_outage(outcome) ? outcome : NEBULA_OK;
}

/* Checks all readable versions, oldest first, then adds the unreadable ones. */
static enum nebula_status append_all(struct verify_run *run, json_t *versions, struct nebula_error *error)
{
        struct manifest_scan scan;
        enum nebula_status status = manifest_scan(run->object.store, &scan, error);

        if (status)
                return status;
        for (size_t i = 0; i < scan.count && !is_outage(status); i++)
                status = append_version(run, scan.manifests[i].tag, versions, error);
        if (!is_outage(status))
                status = scan.broken_count ? append_broken(run, &scan, versions, error) : NEBULA_OK;
        manifest_scan_done(&scan);
        if (!status && run->repairs)
                status = append_lost(run, versions, error);
        if (status)
                return status;
        report_incomplete(run->object.store);
        if (!status && !json_array_size(versions))
                status = error_set(error, NEBULA_NOT_FOUND, 0, "no checkpoint in %s", run->object.store->root);
        return status;
}

struct turn {
        const struct manifest *manifest;
        struct verified last; /* at 0: never */
};

/* First the one whose check was stopped, then those that were never verified, then by the time of the last check. */
static int compare_turns(const void *a, const void *b)
{
        const struct turn *x = a, *y = b;
        bool x_goes_on = x->last.at > 0 && x->last.done < x->manifest->file_count, y_goes_on = y->last.at > 0 && y->last.done < y->manifest->file_count;

        if (x_goes_on != y_goes_on)
                return x_goes_on ? -1 : 1;
        if (x->last.at < y->last.at || x->last.at > y->last.at)
                return x->last.at < y->last.at ? -1 : 1;
        return (x->manifest->sequence > y->manifest->sequence) - (x->manifest->sequence < y->manifest->sequence);
}

/* One that is damaged is due at once: it may be repaired by now. */
static bool is_due(const struct budget *budget, const struct turn *turn)
{
        return budget->since <= 0 || turn->last.at < budget->since || !turn->last.ok || turn->last.done < turn->manifest->file_count;
}

/* Checks versions until the budget ends, those first that were not verified for the longest time. */
static enum nebula_status append_sample(struct verify_run *run, double share, json_t *versions, json_t **ret_sample, struct nebula_error *error)
{
        struct manifest_scan scan;
        enum nebula_status status = manifest_scan(run->object.store, &scan, error);
        struct turn *turns = status ? NULL : calloc(scan.count + 1, sizeof *turns);
        size_t checked = 0, never = 0;
        uint64_t total = 0;

        if (status)
                return status;
        for (size_t i = 0; turns && i < scan.count; i++) {
                turns[i].manifest = &scan.manifests[i];
                total += manifest_size(&scan.manifests[i]);
                if (!verified_find(run->verified, scan.manifests[i].tag, scan.manifests[i].sequence, &turns[i].last))
                        turns[i].last = (struct verified){ 0 };
        }
        if (!turns)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %zu checkpoints", scan.count);
        else
                qsort(turns, scan.count, sizeof *turns, compare_turns);
        if (share > 0)
                run->budget->bytes = (uint64_t)((double)total * share) + 1;
        for (; turns && checked < scan.count && !is_outage(status) && !run->budget->part.is_over; checked++)
                if (is_due(run->budget, &turns[checked]))
                        status = append_version(run, turns[checked].manifest->tag, versions, error);
        if (turns && !is_outage(status) && run->repairs) {
                status = scan.broken_count ? append_broken(run, &scan, versions, error) : NEBULA_OK;
                if (!status)
                        status = append_lost(run, versions, error);
        }
        if (turns && !is_outage(status)) {
                status = NEBULA_OK;
                run->object.passed_over = run->repairs ? 0 : scan.broken_count;
                if (scan.broken_count && !run->repairs)
                        cli_complain("%zu checkpoint%s cannot be read: %s", scan.broken_count, scan.broken_count == 1 ? "" : "s", scan.broken);
                for (size_t i = checked; i < scan.count; i++)
                        never += turns[i].last.at <= 0;
                *ret_sample = json_pack("{s:I, s:I, s:I, s:f}", "version_count", (json_int_t)scan.count, "bytes", (json_int_t)total, "never_verified_count", (json_int_t)never,
                                        "oldest_at", checked < scan.count ? turns[checked].last.at : (double)os->wall_ns() / 1e9);
                store_notes(run, &scan);
                json_object_clear(run->notes);
        }
        free(turns);
        manifest_scan_done(&scan);
        return status;
}

static enum nebula_status check_object(struct verify_run *run, json_t *versions, struct nebula_error *error)
{
        if (run->object.store && *run->object.tag) {
                return append_one(run, versions, error);
        } else if (run->object.store) {
                return append_all(run, versions, error);
        } else {
                json_t *file = check_lone_file(run->object.path);
                json_t *lone = json_pack("{s:s, s:I, s:b, s:I, s:[], s:[]}", "tag", "(no manifest lists this file: checked by its own "
                                                                                    "CRC-32s)",
                                         "sequence", (json_int_t)0, "ok", check_ok(file), "size",
                                         json_integer_value(json_object_get(file, "size")), "documents", "files");

                json_array_append_new(json_object_get(lone, "files"), file);
                json_array_append_new(versions, lone);
        }
        return NEBULA_OK;
}

/* "5%" */
static bool parse_share(const char *text, double *ret_share)
{
        size_t length = strlen(text);
        char number[32];

        if (length < 2 || length >= sizeof number || text[length - 1] != '%')
                return false;
        snprintf(number, sizeof number, "%.*s", (int)length - 1, text);
        if (conf_parse_number("--sample", number, ret_share, NULL))
                return false;
        *ret_share /= 100;
        return *ret_share > 0 && *ret_share <= 1;
}

static enum nebula_status store_open_at(const char *path, struct store **ret_store, struct nebula_error *error)
{
        char absolute[TARGET_PATH_MAX];
        enum nebula_status status = target_absolute(path, absolute, error);

        return status ? status : store_open(absolute, ret_store, error);
}

int command_verify(int argc, char **argv)
{
        struct cli_common common = { 0 };
        bool all = false;
        struct verify_run run = { .stored_ns = os->now_ns() };
        const char *sample_text = NULL, *bytes_text = NULL, *time_text = NULL, *rate_text = NULL, *every_text = NULL, *from_text = NULL;
        const struct args_option options[] = { CLI_COMMON(common), { "all", ARGS_FLAG, &all }, { "sample", ARGS_TEXT, &sample_text },
                                               { "bytes", ARGS_TEXT, &bytes_text }, { "time", ARGS_TEXT, &time_text },
                                               { "rate", ARGS_TEXT, &rate_text }, { "every", ARGS_TEXT, &every_text }, { "repair", ARGS_FLAG, &run.repairs },
                                               { "from", ARGS_TEXT, &from_text } };
        struct budget budget = { 0 };
        struct nebula_error error = { 0 };
        double share = 0, seconds = 0, every = 0;
        uint64_t rate = 0;
        json_t *versions = NULL, *sample = NULL;
        struct args args;
        int64_t begun_ns;
        int code;

        if (!cli_parse(argc, argv, options, CLI_COUNT(options), &args, 0, 1))
                return CLI_USAGE;
        if (sample_text && !parse_share(sample_text, &share))
                return cli_usage_error("verify", "--sample takes a share, such as 5%%");
        if ((bytes_text && conf_parse_size("--bytes", bytes_text, &budget.bytes, &error)) || (time_text && conf_parse_duration("--time", time_text, &seconds, &error)))
                return cli_usage_error("verify", "%s", error.message);
        if (sample_text || bytes_text || time_text || every_text)
                run.budget = &budget;
        if ((rate_text && (conf_parse_size("--rate", rate_text, &rate, &error) || !rate)) || (every_text && conf_parse_duration("--every", every_text, &every, &error)))
                return cli_usage_error("verify", rate_text && !rate ? "--rate takes bytes per second, such as 50M" : "%s", error.message);
        if (from_text && !run.repairs)
                return cli_usage_error("verify", "--from says where --repair finds sound copies: give both");
        if (every_text && args.count == 1) { /* `verify PATH --every 7d` */
                common.path = args.positionals[0];
                args.count = 0;
        }
        if (run.budget && (all || args.count))
                return cli_usage_error("verify", "--sample, --bytes and --time choose the checkpoints: leave out %s", all ? "--all" : "the tag");
        if (all && args.count)
                return cli_usage_error("verify", "--all and \"%s\" cannot be used together", args.positionals[0]);
        if (verify_resolve(common.path, args.count ? args.positionals[0] : NULL, all || run.budget, run.repairs, &run.object, &error)) {
                code = cli_fail(common.json, &error);
                goto out;
        }
        if (from_text && store_open_at(from_text, &run.from, &error)) {
                code = cli_fail(common.json, &error);
                goto out;
        }
        if (rate_text || every_text)
                os->thread_nice(19); /* and so the threads that read; their I/O follows it */
        check_set_rate((double)rate);
        budget.since = every > 0 ? (double)os->wall_ns() / 1e9 - every : 0;
        begun_ns = os->now_ns();
        budget.until_ns = seconds > 0 ? begun_ns + (int64_t)(seconds * 1e9) : 0;
        versions = json_array();
        run.notes = json_object();
        run.verified = run.budget ? verified_load(run.object.store) : NULL;
        if (run.budget ? append_sample(&run, share, versions, &sample, &error) : check_object(&run, versions, &error)) {
                for (size_t v = 0; v < json_array_size(versions) && !common.json; v++)
                        verify_print_version(json_array_get(versions, v));
                code = cli_fail(common.json, &error);
        } else {
                code = verify_print(common.json, versions, sample, run.object.passed_over, (double)(os->now_ns() - begun_ns) / 1e9);
        }
        store_notes(&run, NULL);
out:
        json_decref(versions);
        json_decref(sample);
        json_decref(run.notes);
        json_decref(run.verified);
        cli_agent_close(run.agent);
        store_close(run.from);
        store_close(run.object.store);
        return code;
}
