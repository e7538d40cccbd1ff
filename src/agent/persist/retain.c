/* Removes the versions that no rule keeps. The agent that writes manifests is the only one who does. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "image/image.h"
#include "os/os.h"
#include "store/order.h"
#include "store/pins.h"
#include "store/tag_log.h"

#define REMOVALS_MAX 256 /* after so many, their numbers in the storage path are swept */
#define PUT_BACK_MAX 100 /* half removed versions that are remembered; a sweep of a later agent finds the others */

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

/* The runs whose versions stay, because they go on elsewhere; the caller frees them. And the newest run. */
static struct ancestor *copy_rivals(struct catalogue *catalogue, const struct job *job, size_t *ret_count, char ret_newest[IPC_NAME_MAX])
{
        struct ancestor *rivals;

        *ret_count = 0;
        catalogue_lock(catalogue);
        memcpy(ret_newest, job->runs.newest, IPC_NAME_MAX);
        rivals = calloc(job->runs.ancestor_count + 1, sizeof *rivals);
        for (size_t i = 0; rivals && i < job->runs.ancestor_count; i++)
                if (job->runs.ancestors[i].is_rival)
                        rivals[(*ret_count)++] = job->runs.ancestors[i];
        catalogue_unlock(catalogue);
        return rivals;
}

static bool is_of_rival(const struct ancestor *rivals, size_t count, const char *run)
{
        for (size_t i = 0; i < count; i++)
                if (!strcmp(rivals[i].run, run))
                        return true;
        return false;
}

/* The tags of the versions that no rule keeps, oldest first. */
struct dropped {
        char (*tags)[256];
        size_t count;
        bool has_other_runs; /* one is of a run that is not this agent's own and may go on elsewhere */
};

/* Decides without the lock, as the worker of the list (known.h). */
static void decide(struct catalogue *catalogue, const struct job *job, const struct order_rule *rule, struct dropped *ret_dropped)
{
        const struct known_versions *known = &job->storage.known;
        char newest_run[IPC_NAME_MAX];
        size_t rival_count;
        struct ancestor *rivals = copy_rivals(catalogue, job, &rival_count, newest_run);
        struct order_entry *entries = calloc(known->count + 1, sizeof *entries);
        bool *stay = calloc(known->count + 1, sizeof *stay);
        size_t count = 0;

        *ret_dropped = (struct dropped){ 0 };
        if (!rivals || !entries || !stay)
                goto out;
        for (size_t i = 0; i < known->count; i++) {
                const struct manifest *manifest = known->list[i];

                entries[i] = order_entry(manifest->tag, manifest->sequence, &manifest->line);
                entries[i].counts = !strcmp(manifest->job, job->name) && !is_of_rival(rivals, rival_count, manifest->run);
        }
        if (!order_mark(entries, known->count) || !order_stay(entries, known->count, rule, 1, stay))
                goto out;
        for (size_t i = 0; i < known->count; i++)
                count += !stay[i];
        ret_dropped->tags = count ? calloc(count, sizeof *ret_dropped->tags) : NULL;
        for (size_t i = 0; ret_dropped->tags && i < known->count; i++) {
                if (stay[i])
                        continue;
                strcpy(ret_dropped->tags[ret_dropped->count++], known->list[i]->tag);
                ret_dropped->has_other_runs |= strcmp(known->list[i]->run, newest_run) != 0;
        }
out:
        free(rivals);
        free(entries);
        free(stay);
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

/* Takes a version out of the job's list, so that no client is sent to it. NULL: it stays, because it is in use or of a rival. */
static struct manifest *take(struct catalogue *catalogue, struct job *job, const char *tag)
{
        const struct manifest *manifest;
        struct manifest *taken = NULL;

        catalogue_lock(catalogue);
        manifest = known_find(&job->storage.known, tag);
        if (manifest && !in_use(job, manifest) && !ancestry_is_rival(job, manifest->run)) {
                taken = known_take(&job->storage.known, job->name, tag);
                mark_removed(job, taken);
        }
        catalogue_unlock(catalogue);
        return taken;
}

/* Keeps a version that could not be removed for another attempt after the next version. If its manifest is still there, it returns to
 * the job's list. Otherwise it must not: files would be carried over from its rest. Takes the manifest over. */
static void put_back(struct catalogue *catalogue, struct job *job, struct store *store, struct manifest *manifest)
{
        struct manifest **grown;

        if (!manifest_is_gone(store, manifest)) {
                catalogue_lock(catalogue);
                known_put(&job->storage.known, job->name, manifest);
                catalogue_unlock(catalogue);
                known_free(manifest);
                return;
        }
        grown = job->storage.half_removed_count < PUT_BACK_MAX ?
                        realloc(job->storage.half_removed, (job->storage.half_removed_count + 1) * sizeof *grown) :
                        NULL;
        if (!grown) {
                known_free(manifest);
                return;
        }
        job->storage.half_removed = grown;
        grown[job->storage.half_removed_count++] = manifest;
}

/* Brief copies of the manifests in the job's list: a scan reads only others. Empty without memory. */
static struct manifest_scan copy_known(const struct job *job)
{
        const struct known_versions *known = &job->storage.known;
        struct manifest_scan copy = { .manifests = calloc(known->count + 1, sizeof *copy.manifests) };

        for (; copy.manifests && copy.count < known->count; copy.count++)
                manifest_copy_brief(known->list[copy.count], &copy.manifests[copy.count]);
        return copy;
}

/* A run that came before this one may still go on. This looks for versions that it has committed since this run began. */
static void find_rivals(struct catalogue *catalogue, struct job *job, struct store *store)
{
        static const struct manifest_scan_options brief = { .is_brief = true };
        struct manifest_scan scan = copy_known(job);

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

/* Removes a version that was taken out of the list. Takes the manifest over. */
static void remove_one(struct catalogue *catalogue, struct job *job, struct store *store, struct manifest *manifest, const char *rule)
{
        struct nebula_error error = { 0 };
        enum nebula_status status;

        if (is_foreign(store, manifest)) {
                log_event(LOG_LEVEL_INFO, "%s stays in %s: it belongs to another user", manifest->tag, job->persist_path);
                known_free(manifest);
                return;
        }
        status = manifest_remove(store, manifest, &error);
        if (!status)
                log_event(LOG_LEVEL_INFO, "removed %s from %s, by %s", manifest->tag, job->persist_path, rule);
        else
                log_event(LOG_LEVEL_WARN, "%s could not be removed from %s: %s", manifest->tag, job->persist_path, error.message);
        if (status && status != NEBULA_BUSY)
                put_back(catalogue, job, store, manifest);
        else
                known_free(manifest);
}

/* Removals that failed halfway are tried again. */
static void remove_rests(struct catalogue *catalogue, struct job *job, struct store *store, const char *rule)
{
        struct manifest **rests = job->storage.half_removed;
        size_t count = job->storage.half_removed_count;

        job->storage.half_removed = NULL;
        job->storage.half_removed_count = 0;
        for (size_t i = 0; i < count; i++)
                remove_one(catalogue, job, store, rests[i], rule);
        free(rests);
}

/* The number of versions that stay is counted over those that exist: another program may have removed some since the scan. A listing may be
 * stale, so a version that it lacks is looked up by name. False: storage cannot be listed. */
static bool forget_missing(struct catalogue *catalogue, struct job *job, struct store *store)
{
        struct known_versions *known = &job->storage.known;
        struct store_list tags;

        if (store_list_all(store, "", false, &tags, NULL))
                return false;
        for (size_t i = known->count; i--;) {
                struct manifest there = { 0 }, *gone = NULL;
                char directory[256];

                if (name_encode(known->list[i]->tag, directory, NULL) || store_list_find(&tags, directory))
                        continue;
                if (manifest_load(store, known->list[i]->tag, &there, NULL) == NEBULA_NOT_FOUND) {
                        catalogue_lock(catalogue);
                        gone = known_take(known, job->name, known->list[i]->tag);
                        catalogue_unlock(catalogue);
                }
                known_free(gone);
                manifest_done(&there);
        }
        store_list_done(&tags);
        return true;
}

static void remove_all(struct catalogue *catalogue, struct job *job, struct store *store, const struct dropped *dropped, const char *rule)
{
        struct nebula_error error = { 0 };
        struct pins pins;

        if (pins_load(store, false, &pins, &error)) {
                log_event(LOG_LEVEL_WARN, "no checkpoint is removed from %s, since its pins cannot be read: %s", job->persist_path, error.message);
                return;
        }
        if (dropped->has_other_runs)
                find_rivals(catalogue, job, store);
        for (size_t i = 0; i < dropped->count; i++) {
                struct manifest *manifest = pins_find(&pins, dropped->tags[i]) ? NULL : take(catalogue, job, dropped->tags[i]);

                if (!manifest)
                        continue;
                remove_one(catalogue, job, store, manifest, rule);
                job->storage.removals++;
        }
        pins_done(&pins);
        /* An agent that writes for months opens the path, and sweeps it, only once. */
        if (job->storage.removals >= REMOVALS_MAX) {
                job->storage.removals = 0;
                tag_log_sweep(store, TAG_LOG_REST_NS, NULL);
        }
}

void storage_retain(struct catalogue *catalogue, struct job *job)
{
        struct order_rule rule;
        struct dropped dropped;
        struct store *store;
        char text[64];

        catalogue_lock(catalogue);
        rule = (struct order_rule){ .last = job->settings.keep_last, .every = job->settings.keep_every };
        catalogue_unlock(catalogue);
        snprintf(text, sizeof text, "keep_last=%u", rule.last);
        if (storage_open(catalogue, job, &store, NULL))
                return;
        remove_rests(catalogue, job, store, text);
        decide(catalogue, job, &rule, &dropped);
        if (dropped.count && forget_missing(catalogue, job, store)) {
                free(dropped.tags);
                decide(catalogue, job, &rule, &dropped);
                remove_all(catalogue, job, store, &dropped, text);
        }
        free(dropped.tags);
}
