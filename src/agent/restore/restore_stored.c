/* A search in storage. It runs on a thread of its own if memory has an answer, too: storage may hang. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/persist/storage.h"
#include "agent/restore/restore_private.h"
#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/manifest_check.h"
#include "store/manifest_load.h"
#include "store/scan.h"
#include "store/signature.h"

#define LOOKS_MAX 20 /* attempts, if each version that is found is removed before it can be checked */
#define TRIES 4      /* of a search that fails, if memory has an answer */
#define TRY_PAUSE_MS 100 /* doubles */
#define PATIENCE_NS (60 * SECOND_NS)

enum nebula_status restore_check_files(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        enum nebula_status status = manifest_check_present(store, manifest, &failure);

        if (!status)
                status = signature_check(store, manifest, &failure);
        if (status == NEBULA_NOT_FOUND)
                status = failure.status = NEBULA_CORRUPT;
        if (status == NEBULA_CORRUPT && manifest_is_gone(store, manifest))
                status = error_set(&failure, NEBULA_BUSY, 0, "checkpoint \"%.100s\" was removed or written again while it was looked at in %.150s",
                                   manifest->tag, store->root);
        if (status && error)
                *error = failure;
        return status;
}

/* In most cases the index is right, and nothing is missing. */
static bool newest_is_sound(struct store *store, const struct manifest_scan *scan, const char *job, bool any_job, struct manifest *ret_manifest)
{
        int64_t index = manifest_scan_newest(scan, job);

        if (index < 0 && any_job)
                index = manifest_scan_newest(scan, NULL);
        if (index < 0 || !scan->manifests[index].is_brief || !manifest_load_present(store, &scan->manifests[index], ret_manifest))
                return false;
        if (!signature_check(store, ret_manifest, NULL))
                return true;
        manifest_done(ret_manifest);
        return false;
}

/* Finds the newest version whose files are all there. Marks newer ones as damaged and describes them in `passed`. NEBULA_NOT_FOUND:
 * there is none. */
static enum nebula_status newest_sound(struct store *store, struct manifest_scan *scan, const char *job, bool any_job, struct passed *passed,
                                       struct manifest *ret_manifest, struct nebula_error *error)
{
        if (newest_is_sound(store, scan, job, any_job, ret_manifest))
                return NEBULA_OK;
        for (;;) {
                struct nebula_error failure = { 0 };
                struct manifest manifest = { 0 };
                int64_t index;
                enum nebula_status status = manifest_scan_load_newest(store, scan, job, &manifest, &index, &failure);

                if (status == NEBULA_NOT_FOUND && any_job)
                        status = manifest_scan_load_newest(store, scan, NULL, &manifest, &index, &failure);
                if (!status)
                        status = restore_check_files(store, &manifest, &failure);
                if (!status) {
                        *ret_manifest = manifest;
                        return NEBULA_OK;
                }
                manifest_done(&manifest);
                if (status != NEBULA_CORRUPT) {
                        if (error)
                                *error = failure;
                        return status;
                }
                log_event(LOG_LEVEL_ERROR, "FALLING BACK to an older checkpoint than %s: %s", scan->manifests[index].tag, failure.message);
                passed_add(passed, scan->manifests[index].tag, failure.message);
                scan->manifests[index].is_damaged = true;
        }
}

/* Puts a copy of the manifest in the place of the brief one of the list. */
static bool fill_in(struct manifest_scan *scan, const struct manifest *manifest)
{
        struct manifest copy;
        bool is_filled = false;
        size_t size;
        char *text;

        if (manifest_format(manifest, &text, &size, NULL))
                return false;
        for (size_t i = 0; i < scan->count; i++)
                if (scan->manifests[i].sequence == manifest->sequence && !strcmp(scan->manifests[i].tag, manifest->tag) &&
                    !manifest_parse(text, size, &copy, NULL)) {
                        copy.is_abandoned = scan->manifests[i].is_abandoned;
                        copy.stamp = scan->manifests[i].stamp;
                        manifest_done(&scan->manifests[i]);
                        scan->manifests[i] = copy;
                        is_filled = true;
                }
        scan->confirmed = manifest->sequence;
        free(text);
        return is_filled;
}

/* *ret_scan: the list, if all is sound and `leaves`; otherwise it stays empty. */
static enum nebula_status stored_newest(struct store *store, const char *job, bool any_job, bool leaves, struct manifest *ret_manifest,
                                        struct passed *passed, struct manifest_scan *ret_scan, struct nebula_error *error)
{
        struct manifest_scan scan = { 0 };
        enum nebula_status status = manifest_scan_index(store, &scan, error);

        if (status)
                return status;
        *passed = (struct passed){ 0 };
        status = newest_sound(store, &scan, job, any_job, passed, ret_manifest, error);
        if (scan.broken_count)
                log_event(LOG_LEVEL_WARN, "%zu broken manifests in %s are passed over, the first: %s", scan.broken_count, store->root, scan.broken);
        if (!status)
                passed_scan(passed, store, &scan, ret_manifest);
        else if (status == NEBULA_NOT_FOUND && (passed->count || scan.broken_count)) /* "None" makes a job start from nothing, so it must be certain. */
                status = error_set(error, NEBULA_CORRUPT, 0, "no checkpoint in %.150s can be loaded: %.300s", store->root,
                                   passed->count ? passed->list[0].reason : scan.broken);
        else if (status == NEBULA_NOT_FOUND)
                status = error_set(error, NEBULA_NOT_FOUND, 0, "there is no complete checkpoint in %.300s", store->root);
        if (leaves && !status && !passed->count && fill_in(&scan, ret_manifest))
                *ret_scan = scan;
        else
                manifest_scan_done(&scan);
        return status;
}

/* A person who misses a checkpoint sees its files, and not that its manifest was lost. */
static void say_if_bare(struct store *store, const char *tag)
{
        struct store_page page = { 0 };
        bool is_any = false;
        char prefix[300];

        if (name_encode(tag, prefix, NULL))
                return;
        strcat(prefix, "/");
        if (!store->ops->list(store, prefix, false, NULL, &page, NULL))
                for (size_t i = 0; i < page.count; i++)
                        is_any = is_any || !page.entries[i].is_prefix;
        if (is_any)
                log_event(LOG_LEVEL_WARN, "there is no checkpoint \"%s\" in %s: its files are there, but no manifest (.nebula/manifest-*.json). It was never "
                          "completed, was copied without the manifest, or is not of Nebula", tag, store->root);
        store_page_done(&page);
}

static enum nebula_status stored_tag(struct store *store, const struct ipc_find *wanted, const char *job, bool any_job,
                                     struct manifest *ret_manifest, struct nebula_error *error)
{
        const char *tag = wanted->tag;
        struct manifest manifest = { 0 };
        enum nebula_status status = manifest_load(store, tag, &manifest, error);

        if (status == NEBULA_NOT_FOUND)
                say_if_bare(store, tag);
        if (status == NEBULA_NOT_FOUND)
                return error_set(error, status, 0, "there is no complete checkpoint \"%.200s\" in %.200s", tag, store->root);
        if (status)
                return status;
        if (!any_job && strcmp(manifest.job, job))
                status = error_set(error, NEBULA_NOT_FOUND, 0, "checkpoint \"%.150s\" in %.150s belongs to another job, \"%.100s\"",
                                   tag, store->root, manifest.job);
        else if (!version_wanted(wanted, manifest.sequence))
                status = error_set(error, NEBULA_NOT_FOUND, 0,
                                   "checkpoint \"%.150s\" in %.150s is another writing (sequence %" PRIu64 ", and not %" PRIu64 ")", tag, store->root,
                                   manifest.sequence, wanted->sequence);
        else
                status = restore_check_files(store, &manifest, error);
        if (status)
                manifest_done(&manifest);
        else
                *ret_manifest = manifest;
        return status;
}

static bool is_certain(enum nebula_status status)
{
        return !status || status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT || status == NEBULA_INVALID;
}

enum nebula_status restore_scan(struct catalogue *catalogue, struct store *store, struct manifest_scan *ret_scan, struct nebula_error *error)
{
        enum nebula_status status = manifest_scan_index(store, ret_scan, error);

        for (int tries = 1; tries < TRIES && !is_certain(status) && !catalogue->stopping; tries++) {
                catalogue_lock(catalogue);
                catalogue_wait(catalogue, &catalogue->moved, TRY_PAUSE_MS << tries);
                catalogue_unlock(catalogue);
                status = manifest_scan_index(store, ret_scan, error);
        }
        return status;
}

static void look(struct catalogue *catalogue, struct job *job, const struct ipc_find *wanted, const struct search_scope *scope, struct stored *stored)
{
        struct store *store;
        struct manifest_scan scan = { 0 };
        struct search_begun begun;
        enum nebula_status status = storage_open(catalogue, job, &store, &stored->error);
        bool leaves = !status && !*wanted->tag && storage_search_begins(catalogue, job, &begun);

        for (int looks = 0; !status && looks < LOOKS_MAX && (!looks || stored->status == NEBULA_BUSY); looks++)
                stored->status = *wanted->tag ? stored_tag(store, wanted, job->name, scope->any_job, &stored->manifest, &stored->error) :
                                                stored_newest(store, job->name, scope->any_job, leaves, &stored->manifest, &stored->passed, &scan, &stored->error);
        if (leaves)
                storage_search_ends(catalogue, job, scan.manifests ? &scan : NULL, &begun);
        if (status)
                stored->status = status;
        if (*scope->also && (!stored->status || stored->status == NEBULA_NOT_FOUND))
                stored->also_status = manifest_load(store, scope->also, &stored->also, NULL);
}

void restore_look(struct catalogue *catalogue, struct job *job, const struct ipc_find *wanted, const struct search_scope *scope, struct stored *ret_stored)
{
        *ret_stored = (struct stored){ 0 };
        look(catalogue, job, wanted, scope, ret_stored);
}

void stored_done(struct stored *stored)
{
        manifest_done(&stored->manifest);
        manifest_done(&stored->also);
}

/* A search on a thread of its own. The catalogue's lock guards the last two fields. */
struct search {
        struct catalogue *catalogue;
        struct job *job; /* pinned */
        struct ipc_find wanted;
        struct search_scope scope;
        struct stored stored;
        bool is_over, is_left; /* is_left: its caller waits no more, so the thread frees it */
};

static void *search_main(void *argument)
{
        struct search *search = argument;
        struct catalogue *catalogue = search->catalogue;
        bool is_left = false;

        for (int tries = 0; tries < TRIES && !is_left && (!tries || !is_certain(search->stored.status)); tries++) {
                catalogue_lock(catalogue);
                if (tries)
                        catalogue_wait(catalogue, &catalogue->moved, TRY_PAUSE_MS << tries);
                is_left = search->is_left || catalogue->stopping;
                catalogue_unlock(catalogue);
                stored_done(&search->stored);
                restore_look(catalogue, search->job, &search->wanted, &search->scope, &search->stored);
        }
        catalogue_lock(catalogue);
        search->is_over = true;
        search->job->pins--;
        catalogue->lane_count--;
        catalogue_signal_job(catalogue, search->job);
        is_left = search->is_left;
        catalogue_unlock_last(catalogue);
        if (is_left) {
                stored_done(&search->stored);
                free(search);
        }
        return NULL;
}

static struct search *begin(struct catalogue *catalogue, struct job *job, const struct ipc_find *wanted, const struct search_scope *scope)
{
        struct search *search = calloc(1, sizeof *search);

        if (!search)
                return NULL;
        search->catalogue = catalogue;
        search->job = job;
        search->wanted = *wanted;
        search->scope = *scope;
        job->pins++;
        catalogue->lane_count++;
        if (!os_thread_start(NULL, search_main, search, false))
                return search;
        job->pins--;
        catalogue->lane_count--;
        free(search);
        return NULL;
}

void restore_look_patiently(struct catalogue *catalogue, struct job *job, const struct ipc_find *wanted, const struct search_scope *scope,
                            struct stored *ret_stored)
{
        int64_t until_ns = os->now_ns() + PATIENCE_NS, left_ns;
        struct search *search;
        bool is_over;

        *ret_stored = (struct stored){ 0 };
        catalogue_lock(catalogue);
        search = begin(catalogue, job, wanted, scope);
        while (search && !search->is_over && !catalogue->stopping && (left_ns = until_ns - os->now_ns()) > 0)
                catalogue_wait(catalogue, &catalogue->moved, left_ns / 1000000 + 1);
        is_over = search && search->is_over;
        if (is_over)
                *ret_stored = search->stored;
        else if (search)
                search->is_left = true;
        catalogue_unlock(catalogue);
        if (is_over)
                free(search);
        else
                ret_stored->status = error_set(&ret_stored->error, search ? NEBULA_TIMEOUT : NEBULA_NO_MEMORY, 0, "%.300s %s", job->persist_path,
                                               search ? "has not answered for a minute" : "was not searched: there is no memory");
}
