/* Removes the versions that no rule keeps, and those that a client wants to have removed. Worker only. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit/ancestry.h"
#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/retain.h"
#include "agent/persist/slots_private.h"
#include "agent/pulse/hang_news.h"
#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "store/leases.h"
#include "store/manifest_load.h"
#include "store/manifest_remove.h"
#include "store/pins.h"
#include "store/scan.h"
#include "store/tag_log.h"

#define FORGET_AT 16 /* so many versions that another node's agent should have removed are looked up together */
#define PUT_BACK_MAX 100 /* half removed versions that are remembered; a sweep of a later agent finds the others */

/* Whether the version will become the tag's next writing in storage, perhaps with files of the stored one. */
static bool is_to_follow(const struct version *version)
{
        return version_open(version) || (version->in_memory && !version->stored && lifecycle_complete(version->life.state));
}

bool retain_in_use(const struct job *job, const struct manifest *manifest)
{
        for (const struct version *version = job->versions; version; version = version->next)
                if (!strcmp(version->tag, manifest->tag) &&
                    ((version->stored && version_is(version, manifest->sequence) && (version->pins || version->leases)) ||
                     (version_follows(version, manifest->sequence) && is_to_follow(version))))
                        return true;
        return false;
}

static void mark_removed(struct job *job, const struct manifest *manifest)
{
        for (struct version *version = job->versions; version; version = version->next)
                if (!strcmp(version->tag, manifest->tag) && version_is(version, manifest->sequence))
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
        manifest = known_find(&job->known, tag);
        if (manifest && !retain_in_use(job, manifest) && !ancestry_is_rival(job, manifest->run)) {
                taken = known_take(&job->known, job->name, tag);
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
                known_put(&job->known, job->name, manifest);
                catalogue_unlock(catalogue);
                known_free(manifest);
                return;
        }
        grown = job->storage->half_removed_count < PUT_BACK_MAX ?
                        realloc(job->storage->half_removed, (job->storage->half_removed_count + 1) * sizeof *grown) :
                        NULL;
        if (!grown) {
                known_free(manifest);
                return;
        }
        job->storage->half_removed = grown;
        grown[job->storage->half_removed_count++] = manifest;
}

/* A run that came before this one may still go on. This looks for versions that it has committed since this run began. */
static void find_rivals(struct catalogue *catalogue, struct job *job, struct store *store)
{
        struct manifest_scan scan;

        if (manifest_scan_index(store, &scan, NULL))
                return;
        catalogue_lock(catalogue);
        for (size_t i = 0; i < scan.count && ancestry_begun(job); i++) {
                const struct manifest *manifest = &scan.manifests[i];

                if (strcmp(manifest->job, job->name) || ancestry_is_rival(job, manifest->run) ||
                    ancestry_run_covers(job, manifest->run, manifest->sequence))
                        continue;
                ancestry_set_rival(job, manifest->run);
                log_event(LOG_LEVEL_WARN, "run \"%s\" of job \"%s\" writes to %s beside run \"%s\", for example %s: keep_last removes none of its "
                          "checkpoints. End one, or give it a path or a `job` name of its own", manifest->run, job->name, job->persist_path,
                          ancestry_newest(job), manifest->tag);
        }
        catalogue_unlock(catalogue);
        manifest_scan_done(&scan);
}

void retain_ask(struct job *job, struct asked_removal *removal)
{
        struct asked_removal **link = &job->storage->asked;

        while (*link)
                link = &(*link)->next;
        *link = removal;
}

void retain_unask(struct job *job, struct asked_removal *removal)
{
        struct asked_removal **link = &job->storage->asked;

        while (*link != removal)
                link = &(*link)->next;
        *link = removal->next;
}

struct asked_removal *retain_take(struct job *job)
{
        struct asked_removal *removal = job->storage->asked;

        if (!removal)
                return NULL;
        job->storage->asked = removal->next;
        removal->is_taken = true;
        return removal;
}

const struct removed *retain_removed(const struct job *job, double since)
{
        uint64_t count = job->storage->removed_count, first = count > REMOVED_MAX ? count - REMOVED_MAX : 0;

        for (uint64_t i = first; i < count; i++)
                if (job->storage->removed[i % REMOVED_MAX].at > since)
                        return &job->storage->removed[i % REMOVED_MAX];
        return NULL;
}

/* Notes the removal for clients that follow events. */
static void report_removed(struct catalogue *catalogue, struct job *job, const struct manifest *manifest, const char *rules)
{
        struct removed *removed;

        catalogue_lock(catalogue);
        if (!job->storage->removed)
                job->storage->removed = calloc(REMOVED_MAX, sizeof *job->storage->removed);
        if (job->storage->removed) {
                removed = &job->storage->removed[job->storage->removed_count++ % REMOVED_MAX];
                *removed = (struct removed){ .at = catalogue_moment(catalogue), .size = manifest_size(manifest) };
                strcpy(removed->tag, manifest->tag);
                snprintf(removed->rules, sizeof removed->rules, "%s", rules);
                catalogue_signal_event(catalogue, job);
        }
        catalogue_unlock(catalogue);
        log_event(LOG_LEVEL_INFO, "removed %s from %s, by %s", manifest->tag, job->persist_path, rules);
}

/* Removes a version that was taken out of the list. Takes the manifest over. */
static enum nebula_status remove_one(struct catalogue *catalogue, struct job *job, struct store *store, struct manifest *manifest, const char *rules,
                                     struct nebula_error *error)
{
        enum nebula_status status;

        if (is_foreign(store, manifest)) {
                status = error_set(error, NEBULA_INVALID, 0, "%s stays in %s: it belongs to another user", manifest->tag, job->persist_path);
                log_event(LOG_LEVEL_INFO, "%s", error->message);
                known_free(manifest);
                return status;
        }
        status = manifest_remove(store, manifest, error);
        if (!status)
                report_removed(catalogue, job, manifest, rules);
        else
                log_event(LOG_LEVEL_WARN, "%s could not be removed from %s: %s", manifest->tag, job->persist_path, error->message);
        if (!status && job->storage->metrics)
                json_object_del(job->storage->metrics, manifest->tag);
        if (status && status != NEBULA_BUSY)
                put_back(catalogue, job, store, manifest);
        else
                known_free(manifest);
        return status;
}

/* Removals that failed halfway are tried again. */
static void remove_rests(struct catalogue *catalogue, struct job *job, struct store *store)
{
        struct manifest **rests = job->storage->half_removed;
        size_t count = job->storage->half_removed_count;
        struct nebula_error error;

        job->storage->half_removed = NULL;
        job->storage->half_removed_count = 0;
        for (size_t i = 0; i < count; i++)
                remove_one(catalogue, job, store, rests[i], "an earlier rule", &error);
        free(rests);
}

/* The number of versions that stay is counted over those that exist: another program may have removed some since the scan. A listing may be
 * stale, so a version that it lacks is looked up by name. */
static enum nebula_status forget_missing(struct catalogue *catalogue, struct job *job, struct store *store, struct nebula_error *error)
{
        struct known_versions *known = &job->known;
        struct store_list tags;
        enum nebula_status status = store_list_all(store, "", false, &tags, error);

        if (status)
                return status;
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
        return NEBULA_OK;
}

/* The pins, and what readers of other nodes have. */
enum nebula_status retain_load_kept(struct store *store, struct pins *ret_pins, struct nebula_error *error)
{
        enum nebula_status status = pins_load(store, false, ret_pins, error);

        if (!status && (status = leases_add(store, ret_pins, error)))
                pins_done(ret_pins);
        return status;
}

static enum nebula_status remove_some(struct catalogue *catalogue, struct job *job, struct store *store, const struct dropped *dropped,
                                      bool *ret_has_more, struct nebula_error *error)
{
        struct nebula_error removal = { 0 };
        int64_t until = os->now_ns() + RETAIN_TURN_NS;
        struct pins pins;
        size_t next;
        enum nebula_status status = retain_load_kept(store, &pins, error);

        if (status)
                return status;
        if (dropped->has_other_runs)
                find_rivals(catalogue, job, store);
        for (next = 0; next < dropped->count && (!next || os->now_ns() < until); next++) {
                struct manifest *manifest = pins_find(&pins, dropped->tags[next]) ? NULL : take(catalogue, job, dropped->tags[next]);

                if (manifest)
                        remove_one(catalogue, job, store, manifest, dropped->rules, &removal);
        }
        pins_done(&pins);
        *ret_has_more = next < dropped->count;
        return NEBULA_OK;
}

/* Removes documents that a person or another node may want for a week, also for an agent that writes for months. A sweep lists all of them, so its
 * cost must not depend on how often versions are removed. */
static void sweep_rests(struct job *job, struct store *store)
{
        int64_t now_ns = os->now_ns();
        bool is_due = job->storage->rests_at_ns && now_ns >= job->storage->rests_at_ns;

        if (!job->storage->rests_at_ns || is_due)
                job->storage->rests_at_ns = now_ns + RESTS_PAUSE_NS;
        if (!is_due)
                return;
        tag_log_sweep(store, TAG_LOG_REST_NS, NULL);
        hang_news_sweep(store, HANG_NEWS_REST_NS, NULL);
}

enum nebula_status storage_retain(struct catalogue *catalogue, struct job *job, bool *ret_has_more, struct nebula_error *error)
{
        struct dropped dropped = { 0 };
        struct store *store;
        bool is_remover;
        int64_t begun_ns;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        *ret_has_more = false;
        if (status)
                return status;
        catalogue_lock(catalogue);
        is_remover = job->is_remover;
        catalogue_unlock(catalogue);
        remove_rests(catalogue, job, store);
        begun_ns = os->now_ns();
        status = retain_decide(catalogue, job, store, &dropped, error);
        job->storage->rules_ns = os->now_ns() - begun_ns;
        if (!status && dropped.count >= (is_remover ? 1 : FORGET_AT)) {
                status = forget_missing(catalogue, job, store, error);
                if (!status && is_remover) {
                        free(dropped.tags);
                        status = retain_decide(catalogue, job, store, &dropped, error);
                }
                if (!status && is_remover)
                        status = remove_some(catalogue, job, store, &dropped, ret_has_more, error);
        }
        free(dropped.tags);
        if (!status && is_remover && !*ret_has_more)
                status = retain_items(catalogue, job, store, ret_has_more, error);
        sweep_rests(job, store);
        return status;
}

/* The version of the tag that a client may have removed, taken out of the list. */
static enum nebula_status take_asked(struct catalogue *catalogue, struct job *job, struct store *store, const char *tag, struct manifest **ret_manifest,
                                     struct nebula_error *error)
{
        const struct manifest *newest, *manifest;
        struct pins pins;
        const struct pin *pin;
        bool is_pinned, is_leased;
        enum nebula_status status = forget_missing(catalogue, job, store, error);

        if (status)
                return status;
        status = retain_load_kept(store, &pins, error);
        if (status)
                return status;
        pin = pins_find(&pins, tag);
        is_pinned = pin && !pin->is_lease;
        is_leased = pin && pin->is_lease;
        pins_done(&pins);
        newest = known_newest(&job->known);
        manifest = known_find(&job->known, tag);
        if (!manifest || strcmp(manifest->job, job->name))
                return error_set(error, NEBULA_NOT_FOUND, 0, "no complete checkpoint \"%s\" of this job is in %s", tag, job->persist_path);
        if (is_pinned)
                return error_set(error, NEBULA_INVALID, 0, "\"%s\" stays: it is pinned", tag);
        if (is_leased)
                return error_set(error, NEBULA_INVALID, 0, "\"%s\" stays: a reader on another node has it", tag);
        if (newest == manifest)
                return error_set(error, NEBULA_INVALID, 0, "\"%s\" is the newest complete checkpoint, which a restart would load: it stays", tag);
        *ret_manifest = take(catalogue, job, tag);
        return *ret_manifest ? NEBULA_OK : error_set(error, NEBULA_INVALID, 0, "\"%s\" stays: it is being read or written again", tag);
}

enum nebula_status storage_remove_tag(struct catalogue *catalogue, struct job *job, const char *tag, struct nebula_error *error)
{
        struct manifest *manifest;
        struct store *store;
        bool is_scanned;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        catalogue_lock(catalogue);
        is_scanned = job->is_scanned;
        catalogue_unlock(catalogue);
        if (!status && !is_scanned)
                status = storage_scan(catalogue, job, error);
        if (!status)
                status = take_asked(catalogue, job, store, tag, &manifest, error);
        return status ? status : remove_one(catalogue, job, store, manifest, "a request of the program", error);
}

bool retain_goes_on(const struct job *job)
{
        return job->retain_due && !job->storage->retain_attempt;
}
