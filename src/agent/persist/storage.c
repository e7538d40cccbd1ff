#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/carry_over.h"
#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/catalogue/retention.h"
#include "agent/persist/persist_private.h"
#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "store/counts.h"
#include "store/pins.h"
#include "store/tag_log.h"

#define REMOVALS_MAX 256 /* after so many, their numbers in the storage path are swept */
#define PUT_BACK_MAX 100 /* half removed versions that are remembered; a sweep of a later agent finds the others */

/* Lock held. NULL: it must be opened. */
static struct store *open_store(const struct job *job)
{
        return job->storage.opened_with == job->storage.variables ? job->storage.store : NULL;
}

/* Lock held. Keeps the store of earlier variables, which other threads may use. False: no memory. */
static bool replace_store(struct job *job, struct store *store, struct vars *variables)
{
        struct store **former = job->storage.former;

        if (job->storage.store) {
                former = realloc(former, (job->storage.former_count + 1) * sizeof *former);
                if (!former)
                        return false;
                job->storage.former = former;
                former[job->storage.former_count++] = job->storage.store;
        }
        vars_drop(job->storage.opened_with);
        job->storage.opened_with = vars_hold(variables);
        job->storage.store = store;
        return true;
}

static enum nebula_status open_with(struct job *job, struct vars *variables, struct store **ret_store, struct nebula_error *error)
{
        struct vars *before = vars_enter(variables);
        enum nebula_status status = store_open(job->persist_path, ret_store, error);

        vars_leave(before);
        if (!status) {
                atomic_store(&(*ret_store)->mount_length, job->storage.mount_length);
                store_count(*ret_store);
        }
        return status;
}

enum nebula_status storage_open(struct catalogue *catalogue, struct job *job, struct store **ret_store,
                                struct nebula_error *error)
{
        struct store *store, *opened;
        struct vars *variables;
        enum nebula_status status;

        catalogue_lock(catalogue);
        store = open_store(job);
        variables = vars_hold(job->storage.variables);
        catalogue_unlock(catalogue);
        if (!store && !job->persist_path[0])
                status = error_set(error, NEBULA_NOT_FOUND, 0, "no persistent storage path is set");
        else
                status = store ? NEBULA_OK : open_with(job, variables, &store, error);
        if (!status) {
                catalogue_lock(catalogue);
                opened = open_store(job);
                if (!opened && (job->storage.variables != variables || !replace_store(job, store, variables)))
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

void storage_take_variables(struct job *job, struct vars *variables)
{
        if (!variables || vars_same(job->storage.variables, variables))
                return;
        vars_drop(job->storage.variables);
        job->storage.variables = vars_hold(variables);
        for (struct version *version = job->live; version; version = version->next_live)
                version->persist.retry_at_ns = 0;
}

void storage_close(struct job *job)
{
        store_close(job->storage.store);
        for (size_t i = 0; i < job->storage.former_count; i++)
                store_close(job->storage.former[i]);
        free(job->storage.former);
        vars_drop(job->storage.opened_with);
        vars_drop(job->storage.variables);
}

/* The uploads with which this agent goes on, in this storage path. */
static struct unfinished list_unfinished(struct catalogue *catalogue, const struct job *job)
{
        struct unfinished all = { 0 };

        catalogue_lock(catalogue);
        for (const struct job *other = catalogue->jobs; other; other = other->next)
                for (const struct version *version = strcmp(other->persist_path, job->persist_path) ? NULL : other->live; version;
                     version = version->next_live)
                        for (size_t i = 0; i < version->persist.unfinished.count; i++)
                                unfinished_set(&all, version->persist.unfinished.uploads[i].key, version->persist.unfinished.uploads[i].text);
        catalogue_unlock(catalogue);
        return all;
}

static bool goes_on(void *argument, const char *key)
{
        return unfinished_find(argument, key) || unfinished_has_place(argument, key);
}

/* Removes the parts of an unfinished write that are too old to belong to a living agent. */
static void sweep(struct catalogue *catalogue, struct job *job, struct store *store)
{
        struct nebula_error error = { 0 };
        struct unfinished going = list_unfinished(catalogue, job);
        size_t removed = 0;
        enum nebula_status status = manifest_sweep_but(store, (int64_t)catalogue->sweep_age_s * 1000000000, goes_on, &going, &removed, &error);

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
                if (version->stored && !version->pins && !carry_over_stored_manifest(job, version->tag))
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

/* One scan. *ret_is_over: no run has begun meanwhile, so the list is what the newest run found. */
static enum nebula_status scan_once(struct catalogue *catalogue, struct job *job, struct store *store, bool *ret_is_over, struct nebula_error *error)
{
        struct manifest_scan scan = { 0 };
        struct nebula_error failure = { 0 };
        uint64_t beginning;
        bool is_first;
        enum nebula_status status;

        catalogue_lock(catalogue);
        beginning = job->runs.beginning;
        catalogue_unlock(catalogue);
        status = manifest_scan(store, &scan, &failure);
        if (status == NEBULA_NOT_FOUND) {
                memset(&scan, 0, sizeof scan); /* the path need not exist yet */
        } else if (status) {
                if (error)
                        *error = failure;
                return status;
        } else {
                sweep(catalogue, job, store);
        }
        if (scan.broken_count)
                log_event(LOG_LEVEL_WARN, "%zu broken manifests in %s, the first: %s", scan.broken_count, job->persist_path, scan.broken);
        if (scan.link_count)
                log_event(LOG_LEVEL_INFO, "%zu symbolic links in %s are not followed, the first is \"%s\": to have a checkpoint found that lies "
                          "behind one, move its directory there", scan.link_count, job->persist_path, scan.link);
        catalogue_lock(catalogue);
        manifest_scan_done(&job->storage.stored);
        job->storage.stored = scan;
        catalogue_unlock(catalogue);
        if (!status) {
                find_gone(catalogue, job, store);
                latest_mend(catalogue, job, store);
        }
        catalogue_lock(catalogue);
        is_first = !job->storage.was_scanned;
        job->storage.mount_length = atomic_load(&store->mount_length);
        *ret_is_over = beginning == job->runs.beginning;
        if (*ret_is_over) {
                job->storage.is_scanned = job->storage.was_scanned = true;
                carry_over_stored(catalogue, job, is_first);
                catalogue_signal(catalogue);
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

/* Whether the version will become the tag's next generation in storage, perhaps with files of the stored one. */
static bool is_to_follow(const struct version *version)
{
        return commit_open(version) || (version->in_memory && !version->stored && lifecycle_complete(version->life.state));
}

/* Whether a version of this manifest is being read, or its tag written again. */
static bool in_use(const struct job *job, const struct manifest *manifest)
{
        for (const struct version *version = job->versions; version; version = version->next)
                if (!strcmp(version->tag, manifest->tag) &&
                    ((version->stored && version_is(version, manifest->generation, manifest->sequence) && version->pins) ||
                     (version->generation > manifest->generation && is_to_follow(version))))
                        return true;
        return false;
}

/* Takes the manifests that may be removed out of the job's list, so that no client is sent to them. Adds those that were half removed
 * before. */
static struct manifest *take_dropped(struct job *job, const struct pins *pins, size_t *ret_count)
{
        size_t count = job->storage.stored.count, dropped = 0, kept = 0;
        struct retain_entry *entries = calloc(count + 1, sizeof *entries);
        struct manifest *taken = calloc(count + job->storage.half_removed_count + 1, sizeof *taken);
        bool *drop = calloc(count + 1, sizeof *drop);

        if (entries && taken && drop) {
                while (job->storage.half_removed_count)
                        taken[dropped++] = job->storage.half_removed[--job->storage.half_removed_count];
                for (size_t i = 0; i < count; i++) {
                        const struct manifest *manifest = &job->storage.stored.manifests[i];

                        entries[i] = (struct retain_entry){
                                .step = manifest->step, .follows_step = name_follows_step(manifest->tag),
                                .sequence = manifest->sequence, .line_began = line_began(&manifest->line),
                                .line = &manifest->line, .durable = true,
                                .complete = !strcmp(manifest->job, job->name) && !ancestry_is_rival(job, manifest->run),
                                .busy = in_use(job, manifest) || pins_find(pins, manifest->tag),
                        };
                }
                retain_mark(entries, count);
                retain_storage(entries, count, job->settings.keep_last, job->settings.keep_every, drop);
                for (size_t i = 0; i < count; i++) {
                        if (drop[i])
                                taken[dropped++] = job->storage.stored.manifests[i];
                        else
                                job->storage.stored.manifests[kept++] = job->storage.stored.manifests[i];
                }
                job->storage.stored.count = kept;
        }
        free(entries);
        free(drop);
        *ret_count = dropped;
        return taken;
}

static void mark_removed(struct job *job, const struct manifest *manifest)
{
        for (struct version *version = job->versions; version; version = version->next)
                if (!strcmp(version->tag, manifest->tag) && version_is(version, manifest->generation, manifest->sequence))
                        version->stored = false;
}

/* Whether another user wrote this version under the job's name. The job may count it as superseded, but may not remove it. */
static bool is_foreign(struct store *store, const struct manifest *manifest)
{
        struct nebula_error error;
        struct store_entry entry;
        char directory[256], key[MANIFEST_KEY_MAX];
        bool result;

        if (name_encode(manifest->tag, directory, &error) || tag_log_key(directory, manifest->number, key, &error))
                return true;
        if (store->ops->stat(store, key, &entry, &error))
                return false;
        result = entry.is_foreign;
        store_entry_done(&entry);
        return result;
}

/* Keeps a version that could not be removed for another attempt after the next version. If its manifest is still there, it returns to
 * the job's list. Otherwise it must not: files would be carried over from its rest. */
static void put_back(struct catalogue *catalogue, struct job *job, struct store *store, struct manifest *manifest)
{
        bool is_gone = manifest_is_gone(store, manifest);
        struct manifest **list = is_gone ? &job->storage.half_removed : &job->storage.stored.manifests, *grown;
        size_t *count = is_gone ? &job->storage.half_removed_count : &job->storage.stored.count, at;

        catalogue_lock(catalogue);
        grown = *count < PUT_BACK_MAX || !is_gone ? realloc(*list, (*count + 1) * sizeof *grown) : NULL;
        if (grown) {
                *list = grown;
                for (at = (*count)++; at && grown[at - 1].sequence > manifest->sequence; at--)
                        grown[at] = grown[at - 1];
                grown[at] = *manifest;
                memset(manifest, 0, sizeof *manifest);
        }
        catalogue_unlock(catalogue);
}

/* Brief copies of the manifests in the job's list: a scan reads only others. Empty without memory. */
static struct manifest_scan copy_known(struct catalogue *catalogue, const struct job *job)
{
        struct manifest_scan known = { 0 };
        size_t room;

        catalogue_lock(catalogue);
        room = job->storage.stored.count;
        known.manifests = calloc(room + 1, sizeof *known.manifests);
        while (known.manifests && known.count < room) {
                manifest_copy_brief(&job->storage.stored.manifests[known.count], &known.manifests[known.count]);
                known.count++;
        }
        catalogue_unlock(catalogue);
        return known;
}

/* A run that came before this one may still go on. This looks for versions that it has committed since this run began. */
static void find_rivals(struct catalogue *catalogue, struct job *job, struct store *store)
{
        static const struct manifest_scan_options brief = { .is_brief = true };
        struct manifest_scan scan = copy_known(catalogue, job);

        if (manifest_scan_again(store, &brief, &scan, NULL)) {
                manifest_scan_done(&scan);
                return;
        }
        catalogue_lock(catalogue);
        for (size_t i = 0; i < scan.count && job->runs.has_newest; i++) {
                const struct manifest *manifest = &scan.manifests[i];

                if (strcmp(manifest->job, job->name) || ancestry_is_rival(job, manifest->run) ||
                    ancestry_run_covers(job, manifest->run, manifest->sequence))
                        continue;
                ancestry_set_rival(job, manifest->run);
                log_event(LOG_LEVEL_WARN, "run \"%s\"%s%s of job \"%s\" writes to %s beside run \"%s\": keep_last removes none of its "
                          "checkpoints. End one, or give it a path or a `job` name of its own", manifest->run, *manifest->host ? " on host " : "",
                          manifest->host, job->name, job->persist_path, job->runs.newest);
        }
        catalogue_unlock(catalogue);
        manifest_scan_done(&scan);
}

/* Whether any is of a run that is not this agent's own and may go on elsewhere. */
static bool any_of_other_runs(const struct job *job, const struct manifest *manifests, size_t count)
{
        for (size_t i = 0; i < count; i++)
                if (strcmp(manifests[i].run, job->runs.newest))
                        return true;
        return false;
}

/* Removes one version. `manifest` stays the caller's and may be empty afterwards. */
static void remove_one(struct catalogue *catalogue, struct job *job, struct store *store, struct manifest *manifest)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;
        bool is_rivals;

        catalogue_lock(catalogue);
        is_rivals = ancestry_is_rival(job, manifest->run);
        if (!is_rivals)
                mark_removed(job, manifest);
        catalogue_unlock(catalogue);
        if (is_rivals) {
                put_back(catalogue, job, store, manifest);
                return;
        }
        if (is_foreign(store, manifest)) {
                log_event(LOG_LEVEL_INFO, "%s stays in %s: it belongs to another user", manifest->tag, job->persist_path);
                return;
        }
        status = manifest_remove(store, manifest, &error);
        if (!status) {
                log_event(LOG_LEVEL_INFO, "removed %s from %s, by keep_last=%u", manifest->tag, job->persist_path, job->settings.keep_last);
                return;
        }
        log_event(LOG_LEVEL_WARN, "%s could not be removed from %s: %s", manifest->tag, job->persist_path, error.message);
        if (status != NEBULA_BUSY)
                put_back(catalogue, job, store, manifest);
}

void storage_end_uploads(struct catalogue *catalogue, struct job *job, const struct unfinished *list)
{
        struct store *store;

        if (!storage_open(catalogue, job, &store, NULL))
                persist_forget(store, list, false);
}

/* Forgets a version of the job's list that is not in storage any more. */
static void forget_one(struct catalogue *catalogue, struct job *job, const char *tag, uint64_t sequence)
{
        struct manifest_scan *stored = &job->storage.stored;

        catalogue_lock(catalogue);
        for (size_t i = 0; i < stored->count; i++) {
                if (strcmp(stored->manifests[i].tag, tag) || stored->manifests[i].sequence != sequence)
                        continue;
                manifest_done(&stored->manifests[i]);
                memmove(&stored->manifests[i], &stored->manifests[i + 1], (--stored->count - i) * sizeof *stored->manifests);
                break;
        }
        catalogue_unlock(catalogue);
}

/* The number of versions that stay is counted over those that exist: another program may have removed some since the scan. A listing may be
 * stale, so a version that it lacks is looked up by name. False: storage cannot be listed. */
static bool forget_missing(struct catalogue *catalogue, struct job *job, struct store *store)
{
        struct manifest_scan known = copy_known(catalogue, job);
        struct store_list tags;
        bool is_listed = !store_list_all(store, "", false, &tags, NULL);

        for (size_t i = 0; is_listed && i < known.count; i++) {
                struct manifest there = { 0 };
                char directory[256];

                if (!name_encode(known.manifests[i].tag, directory, NULL) && !store_list_find(&tags, directory) &&
                    manifest_load(store, known.manifests[i].tag, &there, NULL) == NEBULA_NOT_FOUND)
                        forget_one(catalogue, job, known.manifests[i].tag, known.manifests[i].sequence);
                manifest_done(&there);
        }
        if (is_listed)
                store_list_done(&tags);
        manifest_scan_done(&known);
        return is_listed;
}

void storage_retain(struct catalogue *catalogue, struct job *job)
{
        struct nebula_error error = { 0 };
        struct manifest *dropped;
        struct store *store;
        struct pins pins;
        size_t count;
        bool looks;

        if (storage_open(catalogue, job, &store, &error))
                return;
        if (pins_load(store, false, &pins, &error)) {
                log_event(LOG_LEVEL_WARN, "no checkpoint is removed from %s, since its pins cannot be read: %s", job->persist_path, error.message);
                return;
        }
        if (!forget_missing(catalogue, job, store)) {
                pins_done(&pins);
                return;
        }
        catalogue_lock(catalogue);
        dropped = take_dropped(job, &pins, &count);
        looks = any_of_other_runs(job, dropped, count);
        catalogue_unlock(catalogue);
        if (looks)
                find_rivals(catalogue, job, store);
        for (size_t i = 0; i < count; i++) {
                remove_one(catalogue, job, store, &dropped[i]);
                manifest_done(&dropped[i]);
        }
        free(dropped);
        pins_done(&pins);
        /* An agent that writes for months opens the path, and sweeps it, only once. */
        job->storage.removals += count;
        if (job->storage.removals >= REMOVALS_MAX) {
                job->storage.removals = 0;
                tag_log_sweep(store, TAG_LOG_REST_NS, NULL);
        }
}

void storage_failed(struct catalogue *catalogue, struct job *job, const struct nebula_error *error, bool is_new)
{
        job->storage.error = *error;
        job->persist.failure_count++;
        if (!is_new)
                return;
        job->storage.error_at = catalogue_moment(catalogue);
        catalogue_signal_event(catalogue);
}
