/* nebula verify: checks every byte of one version, of all versions, or of one file. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "base/text.h"
#include "cli/check.h"
#include "cli/cli.h"
#include "cli/cli_agent.h"
#include "cli/human.h"
#include "cli/repair.h"
#include "cli/table.h"
#include "cli/verified.h"
#include "cli/vouch.h"
#include "os/os.h"
#include "store/manifest_load.h"
#include "store/place.h"
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
        struct verify_target *target;
        const struct manifest *manifest; /* that is checked now, since `began` */
        double began;
        bool was_ok;
        struct check_part part; /* of the version that is checked now */
};

/* The object that the command line names. */
struct verify_target {
        struct store *store; /* NULL: a file on its own */
        char tag[256];       /* "" = every version of the store */
        bool is_newest;      /* no tag was given: the newest version */
        size_t passed_over;  /* number of versions that cannot be read; one of them may be newer */
        char name[256];      /* "" = every file */
        json_t *verified;    /* what was known before; NULL: not asked */
        json_t *notes;       /* what was verified (verified.h) */
        int64_t stored_ns;   /* when the notes were stored last */
        struct budget *budget; /* NULL: no limit */
        bool repairs;
        struct cli_agent *agent; /* NULL: none runs, or it was not asked yet */
        bool asked_agent;
        struct store *from; /* that has sound copies; NULL: none is named */
        const char *new_documents; /* the source of repaired documents of the version that is checked now; NULL: none was repaired */
        char path[TARGET_PATH_MAX];
};

static bool is_kind(const char *path, enum os_kind kind)
{
        struct os_stat stat;

        return !os->stat(path, true, &stat) && stat.kind == kind;
}

static bool is_url(const char *path)
{
        return strstr(path, "://") != NULL;
}

/* Cuts the last component off the path and copies it to ret_last; false at the root. */
static bool cut_last(char *path, char ret_last[256])
{
        char *slash = strrchr(path, '/');
        char *url = is_url(path) ? place_signed(path) : NULL, *query = url ? strchr(url, '?') : NULL;
        bool can_cut = slash && slash != path && slash[-1] != '/' && strlen(slash + 1) <= 255;

        if (can_cut) {
                strcpy(ret_last, slash + 1);
                *slash = '\0';
        }
        if (can_cut && query) { /* a signature holds for what is above, too, or the store refuses it */
                memmove(url + strlen(path), query, strlen(query) + 1);
                place_keep(url);
        }
        place_forget(url);
        return can_cut;
}

/* Whether the directory of that path is that of a tag. */
static bool holds_manifest(const char *directory)
{
        char parent[TARGET_PATH_MAX], encoded[256], tag[256];
        struct store *store;
        uint64_t number = 0;

        strcpy(parent, directory);
        if (!cut_last(parent, encoded) || name_decode(encoded, tag, NULL) || store_open(parent, &store, NULL))
                return false;
        if (tag_log_number(store, tag, &number, NULL))
                number = 0;
        store_close(store);
        return number > 0;
}

static enum nebula_status name_of_path(struct verify_target *target, const char *inside, struct nebula_error *error)
{
        struct manifest manifest;
        enum nebula_status status = manifest_load(target->store, target->tag, &manifest, error);

        if (status)
                return status;
        status = NEBULA_NOT_FOUND;
        for (size_t i = 0; i < manifest.file_count && status; i++) {
                char encoded[256];

                if (name_encode(manifest.files[i].name, encoded, NULL) || strcmp(encoded, inside))
                        continue;
                strcpy(target->name, manifest.files[i].name);
                status = NEBULA_OK;
        }
        manifest_done(&manifest);
        return status ? error_set(error, status, 0, "\"%s\" has no file \"%s\"", target->tag, inside) : NEBULA_OK;
}

/* Finds out what the path is: a version's directory, a file in one, a directory of versions, or a file on its own. */
static enum nebula_status resolve_path(struct verify_target *target, struct nebula_error *error)
{
        char directory[TARGET_PATH_MAX], file[256] = "", encoded[256];
        enum nebula_status status;

        strcpy(directory, target->path);
        if (is_url(directory) && !holds_manifest(directory)) { /* TAG/FILE, or a storage path */
                if (!cut_last(directory, file) || !holds_manifest(directory)) {
                        strcpy(directory, target->path);
                        file[0] = '\0';
                }
        } else if (is_kind(directory, OS_KIND_FILE) && !cut_last(directory, file))
                return error_set(error, NEBULA_INVALID, 0, "cannot verify %s", target->path);
        if (!strncmp(file, "manifest-", 9) || strstr(file, ".record-")) {
                if (strlen(directory) > 8 && !strcmp(directory + strlen(directory) - 8, "/" MANIFEST_DIRECTORY)) {
                        cut_last(directory, encoded);
                        file[0] = '\0'; /* a manifest or record covers its version: check the whole version */
                }
        }
        if (!holds_manifest(directory)) {
                if (*file)
                        return NEBULA_OK; /* a file on its own */
                return store_open(directory, &target->store, error);
        }
        if (!cut_last(directory, encoded) || name_decode(encoded, target->tag, error))
                return error_set(error, NEBULA_INVALID, 0, "%s is not the directory of a checkpoint", target->path);
        status = store_open(directory, &target->store, error);
        if (!status && *file && name_of_path(target, file, error))
                status = error ? error->status : NEBULA_NOT_FOUND;
        return status;
}

static enum nebula_status resolve(const char *given_path, const char *word, bool all, struct verify_target *target,
                                  struct nebula_error *error)
{
        struct nebula_error absent;
        struct manifest manifest;
        enum nebula_status status;

        if (word && !*word) /* an empty path is not the current directory */
                return error_set(error, NEBULA_INVALID, 0, "a tag or path is empty");
        if (word && is_url(word) && !given_path) {
                status = target_absolute(word, target->path, error);
                return status ? status : resolve_path(target, error);
        }
        status = target_open(given_path, &target->store, &absent);
        if (!status && all)
                return NEBULA_OK;
        if (!status) {
                status = target_load(target->store, word, &manifest, &target->passed_over, &absent);
                if (!status) {
                        strcpy(target->tag, manifest.tag);
                        target->is_newest = !word || !strcmp(word, "latest");
                        manifest_done(&manifest);
                        return NEBULA_OK;
                }
                if (word && strcmp(word, "latest") && (status == NEBULA_CORRUPT || (target->repairs && rebuild_is_lost(target->store, word)))) {
                        snprintf(target->tag, sizeof target->tag, "%s", word);
                        return NEBULA_OK; /* the check reports what is wrong with it */
                }
                store_close(target->store);
                target->store = NULL;
        }
        if (word && !target_absolute(word, target->path, error) &&
            (is_kind(target->path, OS_KIND_FILE) || is_kind(target->path, OS_KIND_DIRECTORY)))
                return resolve_path(target, error);
        if (word && given_path == NULL && status == NEBULA_INVALID)
                return error_set(error, NEBULA_NOT_FOUND, 0, "\"%s\" is neither a tag nor a path", word);
        *error = absent;
        return status;
}

/* Whether files of several versions can share blocks in this store, so that damage of one is damage of all of them. */
static bool shares_blocks(struct store *store)
{
        return store && (store->ops->features(store) & (STORE_PATHS | STORE_REFERS)) == (STORE_PATHS | STORE_REFERS);
}

static void store_notes(struct verify_target *target, const struct manifest_scan *known)
{
        struct nebula_error error;

        if (target->store && verified_store(target->store, target->notes, known, &error))
                cli_complain("the time of this check could not be stored: %s", error.message);
        target->stored_ns = os->now_ns();
}

static void note(struct verify_target *target, const struct manifest *manifest, const struct check_part *part, bool is_ok, double began, bool was_ok)
{
        const struct verified one = { .at = began, .ok = was_ok && is_ok, .done = part ? part->done : manifest->file_count };

        if (*target->name)
                return;
        verified_note(target->notes, manifest->tag, manifest->sequence, &one);
        if (os->now_ns() - target->stored_ns > STORE_NOTES_NS)
                store_notes(target, NULL);
}

static bool budget_ends(void *argument, uint64_t bytes)
{
        struct budget *budget = argument;

        budget->used += bytes;
        if (os->now_ns() - budget->target->stored_ns > STORE_NOTES_NS) /* a large version takes hours */
                note(budget->target, budget->manifest, &budget->part, !budget->part.has_damage, budget->began, budget->was_ok);
        return (budget->bytes && budget->used >= budget->bytes) || (budget->until_ns && os->now_ns() >= budget->until_ns);
}

/* Where the check of this version begins: behind the files that an earlier sample has checked. */
static struct check_part *part_of(struct verify_target *target, const struct manifest *manifest, double *ret_began, bool *ret_was_ok)
{
        struct verified earlier;

        if (!target->budget)
                return NULL;
        target->budget->part = (struct check_part){ .ends = budget_ends, .argument = target->budget };
        if (verified_find(target->verified, manifest->tag, manifest->sequence, &earlier) && earlier.done < manifest->file_count) {
                target->budget->part.skip = earlier.done;
                *ret_began = earlier.at;
                *ret_was_ok = earlier.ok;
        }
        target->budget->target = target;
        target->budget->manifest = manifest;
        target->budget->began = *ret_began;
        target->budget->was_ok = *ret_was_ok;
        return &target->budget->part;
}

/* The agent of this node must know: memory may have the only sound copy. */
static void tell_agent(struct verify_target *target, const struct manifest *manifest, const struct check_part *part, bool is_ok)
{
        bool is_all = !*target->name && !(part && (part->skip || part->is_over));

        if (is_ok && !is_all)
                return;
        if (!target->asked_agent)
                cli_agent_open_if_any(target->store->root, &target->agent);
        target->asked_agent = true;
        if (target->agent)
                cli_agent_compared(target->agent, manifest->tag, manifest->sequence, is_ok, NULL);
}

/* Returns whether the version is to be looked at again. */
static bool repairs_manifest(struct verify_target *target, const char *tag)
{
        bool has_changed = false;

        if (!target->repairs || target->new_documents)
                return false;
        target->new_documents = repair_manifest(target->store, tag, target->from, &has_changed);
        return has_changed || target->new_documents;
}

/* False: the version was removed or written again while it was checked. *ret_outage: the store did not answer, so nothing is known. */
static bool append_once(struct verify_target *target, const char *tag, json_t *versions, enum nebula_status *ret_status,
                        struct nebula_error *ret_outage)
{
        struct manifest manifest = { 0 };
        struct nebula_error error;
        json_t *version = NULL;
        enum nebula_status status = manifest_load(target->store, tag, &manifest, &error);
        double began = (double)os->wall_ns() / 1e9;
        struct check_part *part = NULL;
        bool is_gone, was_ok = true;

        *ret_outage = (struct nebula_error){ 0 };
        if (status && store_class(&error) == STORE_AGAIN)
                *ret_outage = error;
        else if (status && (status != NEBULA_NOT_FOUND || rebuild_is_lost(target->store, tag)) && repairs_manifest(target, tag))
                return false;
        else if (status && status != NEBULA_NOT_FOUND)
                version = check_broken(target->store, tag, &error);
        if (!status) {
                progress_begin(tag, manifest_size(&manifest));
                part = part_of(target, &manifest, &began, &was_ok);
                if (target->repairs && target->from && !target->new_documents && repair_records(target->store, &manifest, target->from))
                        target->new_documents = target->from->root;
                version = check_version(target->store, &manifest, *target->name ? target->name : NULL, part, ret_outage);
                if (version && target->repairs && !check_ok(version) && !ret_outage->status)
                        repair_version(target->store, &manifest, target->from, version);
                if (version && target->new_documents)
                        json_object_set_new(json_array_get(json_object_get(version, "documents"), 0), "repaired", json_string(target->new_documents));
                target->new_documents = NULL;
                if (version && !ret_outage->status)
                        check_signatures(target->store, &manifest, version);
                if (*target->tag && !ret_outage->status && shares_blocks(target->store))
                        check_name_sharers(target->store, &manifest, version);
                progress_end();
        }
        if (ret_outage->status) {
                json_decref(version);
                manifest_done(&manifest);
                *ret_status = ret_outage->status;
                return true;
        }
        is_gone = status == NEBULA_NOT_FOUND || (!status && !check_ok(version) && manifest_is_gone(target->store, &manifest));
        if (!is_gone)
                json_array_append(versions, version);
        if (!is_gone && !status)
                tell_agent(target, &manifest, part, check_ok(version));
        if (!is_gone && !status)
                note(target, &manifest, part, check_ok(version), began, was_ok);
        json_decref(version);
        manifest_done(&manifest);
        *ret_status = status;
        return !is_gone;
}

/* NEBULA_NOT_FOUND: the version was removed. NEBULA_BUSY: it was written again during every attempt. Others: the store did not answer, and
 * `error` says so. In all these cases the version is not added to `versions`. */
static enum nebula_status append_version(struct verify_target *target, const char *tag, json_t *versions, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        struct nebula_error outage;

        target->new_documents = NULL;
        for (int look = 0; look < LOOKS_MAX && status != NEBULA_NOT_FOUND; look++) {
                if (!append_once(target, tag, versions, &status, &outage))
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
static enum nebula_status append_one(struct verify_target *target, json_t *versions, struct nebula_error *error)
{
        struct manifest newest;
        char tag[256];

        strcpy(tag, target->tag);
        for (int look = 0; look < LOOKS_MAX; look++) {
                enum nebula_status status = append_version(target, tag, versions, error);

                if (!status || is_outage(status))
                        return status;
                if (!target->is_newest || status != NEBULA_NOT_FOUND)
                        break;
                status = target_load(target->store, NULL, &newest, NULL, error);
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
static enum nebula_status append_broken(struct verify_target *target, const struct manifest_scan *scan,
                                        json_t *versions, struct nebula_error *error)
{
        struct store *store = target->store;
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
                        outcome = append_version(target, tag, versions, error);
                else if (status && list.entries[i].is_foreign) {
                        text_make_printable(failure.message);
                        cli_complain("%s; it belongs to another user and was not checked", failure.message);
                } else if (status) {
                        outcome = append_version(target, tag, versions, error);
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
static enum nebula_status append_lost(struct verify_target *target, json_t *versions, struct nebula_error *error)
{
        struct store_list list;
        char tag[256];
        enum nebula_status status = store_list_all(target->store, "", false, &list, error), outcome = NEBULA_OK;

        if (status)
                return status;
        for (size_t i = 0; i < list.count && !is_outage(outcome); i++)
                if (list.entries[i].is_prefix && !name_decode(list.entries[i].key, tag, NULL) && is_begun(target->store, list.entries[i].key, tag) &&
                    rebuild_is_lost(target->store, tag))
                        outcome = append_version(target, tag, versions, error);
        store_list_done(&list);
        return is_outage(outcome) ? outcome : NEBULA_OK;
}

/* Checks all readable versions, oldest first, then adds the unreadable ones. */
static enum nebula_status append_all(struct verify_target *target, json_t *versions, struct nebula_error *error)
{
        struct manifest_scan scan;
        enum nebula_status status = manifest_scan(target->store, &scan, error);

        if (status)
                return status;
        for (size_t i = 0; i < scan.count && !is_outage(status); i++)
                status = append_version(target, scan.manifests[i].tag, versions, error);
        if (!is_outage(status))
                status = scan.broken_count ? append_broken(target, &scan, versions, error) : NEBULA_OK;
        manifest_scan_done(&scan);
        if (!status && target->repairs)
                status = append_lost(target, versions, error);
        if (status)
                return status;
        report_incomplete(target->store);
        if (!status && !json_array_size(versions))
                status = error_set(error, NEBULA_NOT_FOUND, 0, "no checkpoint in %s", target->store->root);
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
static enum nebula_status append_sample(struct verify_target *target, double share, json_t *versions, json_t **ret_sample, struct nebula_error *error)
{
        struct manifest_scan scan;
        enum nebula_status status = manifest_scan(target->store, &scan, error);
        struct turn *turns = status ? NULL : calloc(scan.count + 1, sizeof *turns);
        size_t checked = 0, never = 0;
        uint64_t total = 0;

        if (status)
                return status;
        for (size_t i = 0; turns && i < scan.count; i++) {
                turns[i].manifest = &scan.manifests[i];
                total += manifest_size(&scan.manifests[i]);
                if (!verified_find(target->verified, scan.manifests[i].tag, scan.manifests[i].sequence, &turns[i].last))
                        turns[i].last = (struct verified){ 0 };
        }
        if (!turns)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for %zu checkpoints", scan.count);
        else
                qsort(turns, scan.count, sizeof *turns, compare_turns);
        if (share > 0)
                target->budget->bytes = (uint64_t)((double)total * share) + 1;
        for (; turns && checked < scan.count && !is_outage(status) && !target->budget->part.is_over; checked++)
                if (is_due(target->budget, &turns[checked]))
                        status = append_version(target, turns[checked].manifest->tag, versions, error);
        if (turns && !is_outage(status) && target->repairs) {
                status = scan.broken_count ? append_broken(target, &scan, versions, error) : NEBULA_OK;
                if (!status)
                        status = append_lost(target, versions, error);
        }
        if (turns && !is_outage(status)) {
                status = NEBULA_OK;
                target->passed_over = target->repairs ? 0 : scan.broken_count;
                if (scan.broken_count && !target->repairs)
                        cli_complain("%zu checkpoint%s cannot be read: %s", scan.broken_count, scan.broken_count == 1 ? "" : "s", scan.broken);
                for (size_t i = checked; i < scan.count; i++)
                        never += turns[i].last.at <= 0;
                *ret_sample = json_pack("{s:I, s:I, s:I, s:f}", "version_count", (json_int_t)scan.count, "bytes", (json_int_t)total, "never_verified_count", (json_int_t)never,
                                        "oldest_at", checked < scan.count ? turns[checked].last.at : (double)os->wall_ns() / 1e9);
                store_notes(target, &scan);
                json_object_clear(target->notes);
        }
        free(turns);
        manifest_scan_done(&scan);
        return status;
}

static void print_sample(const json_t *sample)
{
        double never = json_number_value(json_object_get(sample, "never_verified_count")), oldest = json_number_value(json_object_get(sample, "oldest_at"));
        char age[HUMAN_MAX], size[HUMAN_MAX];

        printf("%.0f checkpoints, %s: ", json_number_value(json_object_get(sample, "version_count")),
               human_size((uint64_t)json_number_value(json_object_get(sample, "bytes")), size));
        if (never > 0)
                printf("%.0f never verified; the next sample goes on with them\n", never);
        else
                printf("all were verified; the oldest check was %s\n", human_age(oldest, (double)os->wall_ns() / 1e9, age));
}

/* Prints one line per file, and each damage below it. */
static void print_file(const json_t *file, struct table *table)
{
        const json_t *damages = json_object_get(file, "damage");
        const char *repaired = json_string_value(json_object_get(file, "repaired"));
        char size[HUMAN_MAX];

        table_cell(table, check_ok(file) ? STYLE_GOOD : STYLE_BAD, "  %s", check_ok(file) ? "ok" : "DAMAGED");
        table_cell(table, STYLE_PLAIN, "%s", json_string_value(json_object_get(file, "name")));
        table_cell(table, STYLE_PLAIN, "%s", human_size((uint64_t)json_integer_value(json_object_get(file, "size")), size));
        table_cell(table, STYLE_PLAIN, "%s%s", json_array_size(damages) ? "see below" : repaired ? "it was damaged; its bytes are from " : "", repaired ? repaired : "");
}

static void print_damage(const json_t *file)
{
        const json_t *damages = json_object_get(file, "damage"), *same = json_object_get(file, "same_in");

        for (size_t i = 0; i < json_array_size(damages); i++) {
                const json_t *one = json_array_get(damages, i), *records = json_object_get(one, "record_names");

                printf("  ");
                term_print(STYLE_BAD, "%s", json_string_value(json_object_get(file, "name")));
                printf(" at byte %" JSON_INTEGER_FORMAT ", %" JSON_INTEGER_FORMAT " bytes",
                       json_integer_value(json_object_get(one, "offset")), json_integer_value(json_object_get(one, "size")));
                for (size_t r = 0; r < json_array_size(records); r++)
                        term_print(STYLE_PLAIN, "%s%s", r ? ", " : ", in ", json_string_value(json_array_get(records, r)));
                term_print(STYLE_PLAIN, "\n    %s\n", json_string_value(json_object_get(one, "message")));
        }
        for (size_t i = 0; i < json_array_size(same); i++)
                printf("%s%s", i ? ", " : "    other versions have the same bytes there, and can share them: ", json_string_value(json_array_get(same, i)));
        if (json_array_size(same))
                printf("\n");
}

static void print_version(const json_t *version)
{
        static const struct table_column columns[] = {
                { NULL, TABLE_LEFT, false }, { NULL, TABLE_LEFT, true }, { NULL, TABLE_RIGHT, false }, { NULL, TABLE_LEFT, false },
        };
        const json_t *lists[] = { json_object_get(version, "documents"), json_object_get(version, "files") };
        struct table *table = table_new(columns, CLI_COUNT(columns));

        char *signed_by = vouch_text(json_object_get(version, "signatures"));

        term_print(STYLE_BOLD, "%s\n", json_string_value(json_object_get(version, "tag")));
        if (signed_by)
                term_print(STYLE_PLAIN, "  %s\n", signed_by);
        free(signed_by);
        for (size_t l = 0; l < CLI_COUNT(lists); l++)
                for (size_t i = 0; i < json_array_size(lists[l]); i++)
                        if (l == 1 || !check_ok(json_array_get(lists[l], i)) || json_object_get(json_array_get(lists[l], i), "repaired"))
                                print_file(json_array_get(lists[l], i), table);
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
        for (size_t l = 0; l < CLI_COUNT(lists); l++)
                for (size_t i = 0; i < json_array_size(lists[l]); i++)
                        print_damage(json_array_get(lists[l], i));
}

struct verify_sum {
        uint64_t bytes;
        size_t files, bad;
};

static struct verify_sum sum_up(const json_t *versions)
{
        struct verify_sum sum = { 0 };

        for (size_t v = 0; v < json_array_size(versions); v++) {
                const json_t *version = json_array_get(versions, v);
                const json_t *files = json_object_get(version, "files"), *documents = json_object_get(version, "documents");

                for (size_t i = 0; i < json_array_size(files); i++) {
                        sum.bytes += (uint64_t)json_integer_value(json_object_get(json_array_get(files, i), "size"));
                        sum.bad += !check_ok(json_array_get(files, i));
                        sum.files++;
                }
                for (size_t i = 0; i < json_array_size(documents); i++)
                        sum.bad += !check_ok(json_array_get(documents, i));
        }
        return sum;
}

static int finish(bool json, json_t *versions, const json_t *sample, size_t passed_over, double seconds)
{
        struct verify_sum sum = sum_up(versions);
        char size[HUMAN_MAX], speed[HUMAN_MAX], duration[HUMAN_MAX];
        bool ok = !sum.bad && !passed_over;
        int code = ok ? CLI_OK : CLI_WRONG;

        if (json)
                return cli_print_json(json_pack("{s:b, s:I, s:I, s:f, s:O, s:O?}", "ok", ok, "bytes", (json_int_t)sum.bytes,
                                                "file_count", (json_int_t)sum.files, "seconds", seconds, "versions", versions, "sample", sample),
                                      code);
        for (size_t v = 0; v < json_array_size(versions); v++)
                print_version(json_array_get(versions, v));
        printf("%s in %zu file%s, %s, %s: ", human_size(sum.bytes, size), sum.files, sum.files == 1 ? "" : "s",
               human_duration(seconds, duration), human_speed(sum.bytes, seconds, speed));
        if (sum.bad)
                term_print(STYLE_BAD, "%zu damaged\n", sum.bad);
        else if (passed_over)
                term_print(STYLE_BAD, "no damage here, but %zu checkpoint(s) could not be read\n", passed_over);
        else
                term_print(STYLE_GOOD, "no damage\n");
        if (sample)
                print_sample(sample);
        return code;
}

static enum nebula_status check_target(struct verify_target *target, json_t *versions, struct nebula_error *error)
{
        if (target->store && *target->tag) {
                return append_one(target, versions, error);
        } else if (target->store) {
                return append_all(target, versions, error);
        } else {
                json_t *file = check_lone_file(target->path);
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
        struct verify_target target = { .stored_ns = os->now_ns() };
        const char *sample_text = NULL, *bytes_text = NULL, *time_text = NULL, *rate_text = NULL, *every_text = NULL, *from_text = NULL;
        const struct args_option options[] = { CLI_COMMON(common), { "all", ARGS_FLAG, &all }, { "sample", ARGS_TEXT, &sample_text },
                                               { "bytes", ARGS_TEXT, &bytes_text }, { "time", ARGS_TEXT, &time_text },
                                               { "rate", ARGS_TEXT, &rate_text }, { "every", ARGS_TEXT, &every_text }, { "repair", ARGS_FLAG, &target.repairs },
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
                target.budget = &budget;
        if ((rate_text && (conf_parse_size("--rate", rate_text, &rate, &error) || !rate)) || (every_text && conf_parse_duration("--every", every_text, &every, &error)))
                return cli_usage_error("verify", rate_text && !rate ? "--rate takes bytes per second, such as 50M" : "%s", error.message);
        if (from_text && !target.repairs)
                return cli_usage_error("verify", "--from says where --repair finds sound copies: give both");
        if (every_text && args.count == 1) { /* `verify PATH --every 7d` */
                common.path = args.positionals[0];
                args.count = 0;
        }
        if (target.budget && (all || args.count))
                return cli_usage_error("verify", "--sample, --bytes and --time choose the checkpoints: leave out %s", all ? "--all" : "the tag");
        if (all && args.count)
                return cli_usage_error("verify", "--all and \"%s\" cannot be used together", args.positionals[0]);
        if (resolve(common.path, args.count ? args.positionals[0] : NULL, all || target.budget, &target, &error)) {
                code = cli_fail(common.json, &error);
                goto out;
        }
        if (from_text && store_open_at(from_text, &target.from, &error)) {
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
        target.notes = json_object();
        target.verified = target.budget ? verified_load(target.store) : NULL;
        if (target.budget ? append_sample(&target, share, versions, &sample, &error) : check_target(&target, versions, &error)) {
                for (size_t v = 0; v < json_array_size(versions) && !common.json; v++)
                        print_version(json_array_get(versions, v));
                code = cli_fail(common.json, &error);
        } else {
                code = finish(common.json, versions, sample, target.passed_over, (double)(os->now_ns() - begun_ns) / 1e9);
        }
        store_notes(&target, NULL);
out:
        json_decref(versions);
        json_decref(sample);
        json_decref(target.notes);
        json_decref(target.verified);
        cli_agent_close(target.agent);
        store_close(target.from);
        store_close(target.store);
        return code;
}
