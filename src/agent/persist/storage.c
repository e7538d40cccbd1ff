#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/carry_over.h"
#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "store/counts.h"
#include "store/manifest_load.h"
#include "store/scan.h"
#include "store/sweep.h"
#include "store/trust.h"

/* Lock held. NULL: it must be opened. */
static struct store *open_store(const struct job *job)
{
        return job->storage->opened_with == job->storage->variables ? job->storage->store : NULL;
}

/* Lock held. Keeps the store of earlier variables, which other threads may use. False: no memory. */
static bool replace_store(struct job *job, struct store *store, struct vars *variables)
{
        struct store **former = job->storage->former;

        if (job->storage->store) {
                former = realloc(former, (job->storage->former_count + 1) * sizeof *former);
                if (!former)
                        return false;
                job->storage->former = former;
                former[job->storage->former_count++] = job->storage->store;
        }
        vars_drop(job->storage->opened_with);
        job->storage->opened_with = vars_hold(variables);
        job->storage->store = store;
        return true;
}

/* `former`: opened for the job before, with other variables; NULL: none. */
static enum nebula_status open_with(struct job *job, struct vars *variables, const struct store *former, struct store **ret_store, struct nebula_error *error)
{
        struct vars *before = vars_enter(variables);
        enum nebula_status status = store_open(job->persist_path, ret_store, error);

        vars_leave(before);
        if (!status && former && trust_keep(&(*ret_store)->trust, former->trust, error)) {
                store_close(*ret_store);
                status = NEBULA_INVALID;
        }
        if (!status) {
                atomic_store(&(*ret_store)->mount_length, job->storage->mount_length);
                store_count(*ret_store);
        }
        return status;
}

enum nebula_status storage_open(struct catalogue *catalogue, struct job *job, struct store **ret_store,
                                struct nebula_error *error)
{
        struct store *store, *opened, *former;
        struct vars *variables;
        enum nebula_status status;

        catalogue_lock(catalogue);
        store = open_store(job);
        former = job->storage->store;
        variables = vars_hold(job->storage->variables);
        catalogue_unlock(catalogue);
        if (!store && !job->persist_path[0])
                status = error_set(error, NEBULA_NOT_FOUND, 0, "no persistent storage path is set");
        else
                status = store ? NEBULA_OK : open_with(job, variables, former, &store, error);
        if (!status) {
                catalogue_lock(catalogue);
                opened = open_store(job);
                if (!opened && (job->storage->variables != variables || !replace_store(job, store, variables)))
                        status = error_set(error, NEBULA_UNAVAILABLE, 0, "%s gets other credentials, or there is no memory for it", job->persist_path);
                catalogue_unlock(catalogue);
                if (opened ? opened != store : status != NEBULA_OK)
                        store_close(store);
                store = opened ? opened : store;
        }
        vars_drop(variables);
        if (!status)
                *ret_store = store;
        return status;
}

enum trust_policy storage_policy(struct catalogue *catalogue, struct job *job)
{
        enum trust_policy policy, before = TRUST_OFF;
        struct vars *variables, *entered;
        struct store *store;

        if (!storage_open(catalogue, job, &store, NULL))
                return store->trust ? store->trust->policy : TRUST_OFF;
        catalogue_lock(catalogue);
        variables = vars_hold(job->storage->variables);
        if (job->storage->store && job->storage->store->trust)
                before = job->storage->store->trust->policy;
        catalogue_unlock(catalogue);
        entered = vars_enter(variables);
        policy = trust_policy();
        vars_leave(entered);
        vars_drop(variables);
        return policy > before ? policy : before;
}

void storage_take_variables(struct job *job, struct vars *variables)
{
        if (!variables || vars_same(job->storage->variables, variables))
                return;
        vars_drop(job->storage->variables);
        job->storage->variables = vars_hold(variables);
        for (struct version *version = job->live; version; version = version->next_live)
                version->persist->retry_at_ns = 0;
}

void storage_share_variables(struct job *job, const struct job *from)
{
        storage_take_variables(job, from->storage->variables);
}

uint32_t storage_mount_length(const struct job *job)
{
        return job->storage->mount_length;
}

void storage_adopt_mount(struct job *job, uint32_t mount_length)
{
        if (!job->storage->mount_length && mount_length <= strlen(job->persist_path))
                job->storage->mount_length = mount_length;
}

static void found_free(struct manifest_scan *found)
{
        if (found)
                manifest_scan_done(found);
        free(found);
}

void storage_close(struct job *job)
{
        found_free(job->storage->found);
        store_close(job->storage->store);
        for (size_t i = 0; i < job->storage->former_count; i++)
                store_close(job->storage->former[i]);
        free(job->storage->former);
        vars_drop(job->storage->opened_with);
        vars_drop(job->storage->variables);
}

/* The uploads with which this agent goes on, in this storage path. */
static struct unfinished list_unfinished(struct catalogue *catalogue, const struct job *job)
{
        struct unfinished all = { 0 };

        catalogue_lock(catalogue);
        for (const struct job *other = catalogue->jobs; other; other = other->next)
                for (const struct version *version = strcmp(other->persist_path, job->persist_path) ? NULL : other->live; version;
                     version = version->next_live)
                        for (size_t i = 0; i < version->persist->unfinished.count; i++)
                                unfinished_set(&all, version->persist->unfinished.uploads[i].key, version->persist->unfinished.uploads[i].text);
        catalogue_unlock(catalogue);
        return all;
}

static bool goes_on(void *argument, const char *key)
{
        return unfinished_find(argument, key) || unfinished_has_place(argument, key);
}

/* Removes the parts of an unfinished write that are too old to belong to a living agent. */
static void sweep(struct catalogue *catalogue, struct job *job, struct store *store, const struct store_list *rest)
{
        struct nebula_error error = { 0 };
        struct unfinished going = list_unfinished(catalogue, job);
        size_t removed = 0;
        bool is_first = !job->storage->rests_at_ns; /* each session that begins reads the list again */
        enum nebula_status status = manifest_sweep_rest(store, rest, (int64_t)catalogue->sweep_age_s * SECOND_NS, is_first, goes_on, &going, &removed, &error);

        if (is_first)
                job->storage->rests_at_ns = os->now_ns() + RESTS_PAUSE_NS;

        unfinished_done(&going);
        if (status)
                log_event(LOG_LEVEL_WARN, "%s could not be swept: %s", job->persist_path, error.message);
        else if (removed)
                log_event(LOG_LEVEL_INFO, "removed the rest of interrupted writes from %s: %zu objects", job->persist_path, removed);
}

/* The next version that storage had and that is not in the job's list any more. Lock held. */
static struct version *next_missing(struct job *job, uint64_t after_id)
{
        struct version *version = job->versions;

        while (after_id && version && version->id != after_id)
                version = version->next;
        for (version = after_id && version ? version->next : version; version; version = version->next)
                if (version->stored && !version->pins && !job_stored(job, version->tag))
                        return version;
        return NULL;
}

/* Finds versions whose directory another program has removed or moved. A listing may be stale, so each is looked up by name. */
static void find_gone(struct catalogue *catalogue, struct job *job, struct store *store)
{
        struct version *version;
        uint64_t id = 0;

        catalogue_lock(catalogue);
        while ((version = next_missing(job, id))) {
                struct manifest there = { 0 };
                enum nebula_status status;
                char tag[IPC_NAME_MAX];

                id = version->id;
                memcpy(tag, version->tag, sizeof tag);
                version->pins++;
                catalogue_unlock(catalogue);
                status = manifest_load(store, tag, &there, NULL);
                manifest_done(&there);
                catalogue_lock(catalogue);
                version->pins--;
                if (status != NEBULA_NOT_FOUND)
                        continue;
                log_event(LOG_LEVEL_WARN, "%s is not in %s any more: another program has removed or moved its directory", tag, job->persist_path);
                version->stored = false;
                version->is_gone = version->in_memory;
        }
        catalogue_unlock(catalogue);
}

/* The files that a version in memory may carry over from its tag's version in storage. */
static void fill_rewritten(struct catalogue *catalogue, struct job *job, struct store *store, struct manifest_scan *scan)
{
        for (size_t i = 0; i < scan->count; i++) {
                struct manifest *one = &scan->manifests[i], read;
                bool is_wanted = false;

                catalogue_lock(catalogue);
                for (const struct version *version = job_may_have(job, one->tag) ? job->versions : NULL; version && !is_wanted; version = version->next)
                        is_wanted = one->is_brief && !strcmp(version->tag, one->tag) && !(version->stored && version_is(version, one->sequence));
                catalogue_unlock(catalogue);
                if (is_wanted && !manifest_scan_confirm(store, scan, i, &read, NULL)) {
                        manifest_done(one);
                        *one = read;
                }
        }
}

/* Lock held. Whether a list that was begun then may be the first of the run: no work on the job has read or changed storage since. */
static bool list_counts(const struct job *job, const struct search_begun *begun)
{
        return !job->is_scanned && begun->asked == job->scans_asked && os->now_ns() - begun->ns < STORAGE_SEARCH_NS;
}

bool storage_search_begins(struct catalogue *catalogue, struct job *job, struct search_begun *ret_begun)
{
        bool leaves;

        catalogue_lock(catalogue);
        leaves = job->scan_due && !job->is_scanned && !job->persist->is_busy;
        *ret_begun = (struct search_begun){ job->scans_asked, os->now_ns() };
        if (leaves && !job->storage->searches++)
                job->storage->search_ns = ret_begun->ns;
        catalogue_unlock(catalogue);
        return leaves;
}

void storage_search_ends(struct catalogue *catalogue, struct job *job, struct manifest_scan *scan, const struct search_begun *begun)
{
        struct manifest_scan *found = scan ? malloc(sizeof *found) : NULL, *former = found;

        if (found)
                *found = *scan;
        else if (scan)
                manifest_scan_done(scan);
        catalogue_lock(catalogue);
        if (found && list_counts(job, begun) && !job->persist->is_busy) {
                former = job->storage->found;
                job->storage->found = found;
                job->storage->found_begun = *begun;
        }
        job->storage->searches--;
        job->storage->asked_ns = 0;
        catalogue_signal_job(catalogue, job);
        catalogue_unlock(catalogue);
        found_free(former);
}

/* The list of a search. False: there is none that counts. */
static bool take_found(struct catalogue *catalogue, struct job *job, struct manifest_scan *ret_scan)
{
        struct manifest_scan *found;
        bool counts;

        catalogue_lock(catalogue);
        found = job->storage->found;
        job->storage->found = NULL;
        counts = found && list_counts(job, &job->storage->found_begun);
        catalogue_unlock(catalogue);
        if (counts)
                *ret_scan = *found;
        else if (found)
                manifest_scan_done(found);
        free(found);
        return counts;
}

/* The version that a resume would load: the job's verdict names its damage before that. */
static void fill_newest(const struct job *job, struct store *store, struct manifest_scan *scan)
{
        struct manifest newest;
        int64_t index = manifest_scan_newest(scan, job->name);

        if (index >= 0 && scan->confirmed == scan->manifests[index].sequence && !scan->manifests[index].is_brief)
                return;
        if (manifest_scan_load_newest(store, scan, job->name, &newest, &index, NULL))
                return;
        manifest_done(&scan->manifests[index]);
        newest.is_abandoned = scan->manifests[index].is_abandoned;
        scan->manifests[index] = newest;
}

/* One scan. *ret_is_over: no run has begun meanwhile, so the list is what the newest run found. */
static enum nebula_status scan_once(struct catalogue *catalogue, struct job *job, struct store *store, bool *ret_is_over, struct nebula_error *error)
{
        struct manifest_scan scan = { 0 };
        struct known_versions known, former;
        struct nebula_error failure = { 0 };
        uint64_t asked;
        bool is_first;
        int64_t begun_ns = os->now_ns();
        enum nebula_status status;

        catalogue_lock(catalogue);
        asked = job->scans_asked;
        catalogue_unlock(catalogue);
        status = take_found(catalogue, job, &scan) ? NEBULA_OK : manifest_scan_index(store, &scan, &failure);
        if (status == NEBULA_NOT_FOUND) {
                memset(&scan, 0, sizeof scan); /* the path need not exist yet */
        } else if (status) {
                if (error)
                        *error = failure;
                return status;
        } else {
                sweep(catalogue, job, store, &scan.rest);
                fill_newest(job, store, &scan);
                fill_rewritten(catalogue, job, store, &scan);
        }
        if (scan.broken_count)
                log_event(LOG_LEVEL_WARN, "%zu broken manifests in %s, the first: %s", scan.broken_count, job->persist_path, scan.broken);
        if (scan.link_count)
                log_event(LOG_LEVEL_INFO, "%zu symbolic links in %s are not followed, the first is \"%s\": to have a checkpoint found that lies "
                          "behind one, move its directory there", scan.link_count, job->persist_path, scan.link);
        if (!known_new(&scan, job->name, &known)) {
                manifest_scan_done(&scan);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the checkpoints of %s", job->persist_path);
        }
        catalogue_lock(catalogue);
        former = job->known;
        job->known = known;
        catalogue_unlock(catalogue);
        known_done(&former);
        if (!status) {
                find_gone(catalogue, job, store);
                latest_mend(catalogue, job, store);
        }
        catalogue_lock(catalogue);
        is_first = !job->storage->was_scanned;
        job->storage->mount_length = atomic_load(&store->mount_length);
        snprintf(job->storage->damage, sizeof job->storage->damage, "%s", scan.broken_count ? scan.broken : "");
        *ret_is_over = asked == job->scans_asked;
        if (*ret_is_over) {
                job->is_scanned = job->storage->was_scanned = true;
                job->scanned_ns = begun_ns;
                carry_over_stored(catalogue, job, is_first);
                catalogue_signal_job(catalogue, job);
        }
        catalogue_unlock(catalogue);
        return NEBULA_OK;
}

enum nebula_status storage_scan(struct catalogue *catalogue, struct job *job, struct nebula_error *error)
{
        struct store *store;
        bool is_over = false;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        while (!status && !is_over)
                status = scan_once(catalogue, job, store, &is_over, error);
        return status;
}

void storage_end_uploads(struct catalogue *catalogue, struct job *job, const struct unfinished *list)
{
        struct store *store;

        if (!storage_open(catalogue, job, &store, NULL))
                persist_forget(store, list, false);
}

void storage_failed(struct catalogue *catalogue, struct job *job, const struct nebula_error *error, bool is_new)
{
        job->storage->error = *error;
        job->persist->failure_count++;
        if (!is_new)
                return;
        job->storage->error_at = catalogue_moment(catalogue);
        catalogue_signal_event(catalogue, job);
}
