/* The worker's part of publishing: does one request after the other, and its consequences. */
#include <errno.h>
#include <string.h>

#include "agent/commit/commit.h"
#include "agent/log.h"
#include "agent/persist/progress.h"
#include "agent/persist/storage.h"
#include "agent/publish/publish_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/manifest_load.h"
#include "store/manifest_remove.h"
#include "store/pins.h"

#define RETRY_FIRST_NS (SECOND_NS / 4)
#define RETRY_MOST_NS (30 * SECOND_NS)
#define LISTED_MAX 1024 /* done requests kept per job, for looking up paths: some hundred KiB */

static void set_failed(struct publish *publish, const struct nebula_error *error)
{
        publish->state = PUBLISH_FAILED;
        publish->error = *error;
        log_event(LOG_LEVEL_ERROR, "%s of %s cannot be published as %s: %s", *publish->name ? publish->name : "the whole", publish->tag,
                  publish->path, error->message);
}

/* `there`: the published file. */
static void set_done(struct publish *publish, const struct os_stat *there)
{
        publish->state = PUBLISH_DONE;
        publish->done_ns = os->now_ns();
        publish->inode = there->inode;
        publish->size = there->size;
        publish->mtime_ns = there->mtime_ns;
        log_event(LOG_LEVEL_INFO, "%s is at %s", publish->tag, publish->path);
}

/* Drops old requests that are done or no longer matter. */
static void trim(struct job *job)
{
        size_t done = 0;

        for (struct publish *publish = job->publishes, *next; publish; publish = next) {
                next = publish->next;
                if ((publish->kind == PUBLISH_REMOVAL && (publish->cancelled || publish->state == PUBLISH_DONE)) ||
                    (publish->kind != PUBLISH_REMOVAL && publish_is_dead(publish) && publish_done_after(publish) &&
                     (publish->cancelled || publish->is_reported)))
                        publish_erase(job, publish);
                else
                        done += publish->state == PUBLISH_DONE;
        }
        for (struct publish *publish = job->publishes, *next; publish && done > LISTED_MAX; publish = next) {
                next = publish->next;
                if (publish->state == PUBLISH_DONE && next) {
                        publish_erase(job, publish);
                        done--;
                }
        }
}

/* Drops the requests whose path a removal has just removed. */
static void forget_path(struct job *job, const struct publish *removal)
{
        for (struct publish *publish = job->publishes, *next; publish && publish != removal; publish = next) {
                next = publish->next;
                if (!strcmp(publish->path, removal->path) && (publish->state == PUBLISH_DONE || publish_is_dead(publish)))
                        publish_erase(job, publish);
        }
}

static bool hopeless(const struct nebula_error *error)
{
        switch (error->sys_errno) {
        case EACCES: case EPERM: case EROFS: case ENOTDIR: case EISDIR: case ENAMETOOLONG: case EINVAL: case ELOOP: case EXDEV:
                return true;
        default:
                return error->status == NEBULA_INVALID || error->status == NEBULA_CORRUPT || error->status == NEBULA_NOT_FOUND ||
                       error->status == NEBULA_FAILED;
        }
}

static void try_later(struct catalogue *catalogue, struct job *job, struct publish *publish, const struct nebula_error *error)
{
        int64_t pause = RETRY_FIRST_NS << (publish->attempt < 8 ? publish->attempt : 7);

        publish->attempt++;
        job->publish_attempt++;
        storage_failed(catalogue, job, error, false);
        publish->failed_ns = os->now_ns();
        publish->retry_at_ns = publish->failed_ns + (pause < RETRY_MOST_NS ? pause : RETRY_MOST_NS);
        log_event(LOG_LEVEL_WARN, "%s cannot be published yet, the agent tries again: %s", publish->path, error->message);
        catalogue_signal_job(catalogue, job);
}

/* Drops the lock meanwhile. */
static enum nebula_status find_pin(struct catalogue *catalogue, struct job *job, const char *tag, bool *ret_is_pinned, struct nebula_error *error)
{
        struct pins pins = { 0 };
        struct store *store;
        enum nebula_status status;

        catalogue_unlock(catalogue);
        status = storage_open(catalogue, job, &store, error);
        if (!status)
                status = pins_load(store, false, &pins, error);
        *ret_is_pinned = !status && pins_find(&pins, tag);
        pins_done(&pins);
        catalogue_lock(catalogue);
        return status;
}

/* Removes the version of a removed directory as well, if it is not pinned. Drops the lock while storage works. False: a thread is reading
 * it, or storage failed; try later. */
static bool drop_version(struct catalogue *catalogue, struct job *job, struct publish *removal)
{
        const char *tag = removal->tag;
        uint64_t sequence = removal->sequence;
        struct nebula_error error = { 0 };
        struct manifest manifest = { 0 };
        struct store *store = NULL;
        bool is_pinned = false;
        enum nebula_status status;

        if (job->persist_path[0] && find_pin(catalogue, job, tag, &is_pinned, &error)) {
                if (!hopeless(&error))
                        try_later(catalogue, job, removal, &error);
                else
                        log_event(LOG_LEVEL_WARN, "%s stays in %s, because its pins cannot be read: %s", tag, job->persist_path, error.message);
                return hopeless(&error);
        }
        if (is_pinned) {
                log_event(LOG_LEVEL_INFO, "%s stays in %s: it is pinned", tag, job->persist_path);
                return true;
        }
        for (struct version *version = job->versions; version; version = version->next)
                if (!strcmp(version->tag, tag) && (version->sequence > sequence || (version_open(version) && version->id != removal->version_id)))
                        return true; /* written again: the removal does not apply to it */
        for (struct version *version = job->versions; version; version = version->next)
                if (!strcmp(version->tag, tag) && version->pins)
                        return false;
        for (struct version *version = job->versions; version; version = version->next) {
                if (strcmp(version->tag, tag) || version_open(version))
                        continue;
                if (version->in_memory)
                        version_forget_memory(catalogue, version);
                version->stored = false;
        }
        known_free(known_take(&job->known, job->name, tag));
        catalogue_unlock(catalogue);
        status = storage_open(catalogue, job, &store, &error);
        if (!status)
                status = manifest_load(store, tag, &manifest, &error);
        if (!status && !strcmp(manifest.job, job->name) && manifest.sequence <= sequence)
                status = manifest_remove(store, &manifest, &error);
        else if (status == NEBULA_NOT_FOUND) /* the last try may have got as far as that */
                status = manifest_end_removal(store, tag, &error);
        if (status && status != NEBULA_NOT_FOUND)
                log_event(LOG_LEVEL_WARN, "%s could not be removed from %s: %s", tag, job->persist_path, error.message);
        manifest_done(&manifest);
        catalogue_lock(catalogue);
        if (!status || hopeless(&error))
                return true;
        try_later(catalogue, job, removal, &error);
        return false;
}

/* Whether `later` has carried over file `name` of the version; "": all of its files. */
static bool carries(struct version *later, struct version *version, const char *name)
{
        const struct agent_file *file, *carried;
        size_t count = 0;

        for (size_t i = 0; i < version->file_count; i++) {
                file = &version->files[i];
                if (*name && strcmp(file->name, name))
                        continue;
                carried = version_file(later, file->name);
                if (!carried || (version_file_sequence(later, carried) != version_file_sequence(version, file) && (!file->image || carried->image != file->image)))
                        return false;
                count++;
        }
        return count;
}

/* The later writing of the tag by the same run that is durable in the version's place, and has what is to be published. NULL: there is none. */
static struct version *heir_of(struct version *version, const char *name)
{
        for (struct version *later = version->job->versions; later; later = later->next)
                if (later->stored && later->sequence > version->sequence && !strcmp(later->tag, version->tag) && !strcmp(later->run, version->run) &&
                    carries(later, version, name))
                        return later;
        return NULL;
}

static enum nebula_status refuse(const struct version *version, struct nebula_error *error)
{
        if (version && version->life.state == NEBULA_STATE_FAILED)
                return error_set(error, NEBULA_FAILED, 0, "the checkpoint failed: %.400s", version->error.message);
        if (version && version->superseded)
                return error_set(error, NEBULA_FAILED, 0, "the checkpoint left memory before it was persisted");
        return NEBULA_OK;
}

/* Drops the lock meanwhile. *ret_there: of a file. */
static enum nebula_status in_file_systems(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                          char ret_tag[IPC_NAME_MAX], uint64_t *ret_sequence, struct os_stat *ret_there,
                                          struct nebula_error *error)
{
        enum nebula_status status = NEBULA_INTERNAL;

        catalogue_unlock(catalogue);
        switch (publish->kind) {
        case PUBLISH_FILE:
                status = publish_put_file(catalogue, job, publish, error);
                if (!status)
                        os->stat(publish->path, false, ret_there);
                break;
        case PUBLISH_DIRECTORY:
                status = publish_put_directory(catalogue, job, publish, error);
                break;
        case PUBLISH_REMOVAL:
                status = publish_take_away(catalogue, job, publish, ret_tag, ret_sequence, error);
                break;
        }
        if (!status)
                publish_sweep(catalogue, publish->path);
        catalogue_lock(catalogue);
        return status;
}

/* `tag`: of the version in the label of the removed directory; "": the label does not say. */
static void end_removal(struct catalogue *catalogue, struct job *job, struct publish *removal, const char *tag,
                        uint64_t sequence, const struct nebula_error *error)
{
        const struct version *version = catalogue_version(catalogue, removal->version_id);

        if (error->status)
                log_event(LOG_LEVEL_WARN, "%s could not be removed: %s", removal->path, error->message);
        if (tag[0] && strcmp(removal->path, removal->staging)) {
                strcpy(removal->tag, tag);
                removal->sequence = sequence;
        } else if (version) {
                removal->sequence = version->sequence ? version->sequence : job->last_sequence; /* what was committed before it goes, too */
        }
        removal->taken = true;
        forget_path(job, removal);
        if (error->status || !removal->tag[0] || drop_version(catalogue, job, removal))
                removal->state = PUBLISH_DONE;
}

/* A version that was open when its publish was requested had no sequence. The next agent may not know it any more, and finds it in storage by that. */
static void note_version(struct catalogue *catalogue, const struct job *job, struct publish *publish, const struct version *version)
{
        if (!version || !version->sequence || publish->taken || (publish->version_id == version->id && publish->sequence == version->sequence))
                return;
        publish->version_id = version->id;
        publish->sequence = version->sequence;
        publish_keep_list(catalogue, job);
}

static void run_one(struct catalogue *catalogue, struct job *job, struct publish *publish)
{
        struct version *version = publish->kind == PUBLISH_REMOVAL ? NULL : catalogue_version(catalogue, publish->version_id);
        struct version *heir = version && version->superseded ? heir_of(version, publish->name) : NULL;
        struct nebula_error error = { 0 };
        char tag[IPC_NAME_MAX] = "";
        struct os_stat there = { 0 };
        uint64_t sequence = 0;
        enum nebula_status status;

        version = heir ? heir : version;
        note_version(catalogue, job, publish, version);
        status = refuse(version, &error);
        if (version)
                version->pins++;
        if (!status && !publish->taken)
                status = in_file_systems(catalogue, job, publish, tag, &sequence, &there, &error);
        if (version)
                version->pins--;
        if (status && !hopeless(&error)) {
                try_later(catalogue, job, publish, &error);
                return;
        }
        error.status = status;
        job->publish_attempt = 0;
        if (publish->kind == PUBLISH_REMOVAL)
                end_removal(catalogue, job, publish, tag, sequence, &error);
        else if (status)
                set_failed(publish, &error);
        else
                set_done(publish, &there);
        trim(job);
        publish_keep_list(catalogue, job);
        catalogue_signal_job(catalogue, job);
}

bool publish_work(struct catalogue *catalogue, struct job *job, int64_t now_ns, int64_t *due)
{
        for (struct publish *publish = job->publishes; publish; publish = publish->next)
                if (publish->state == PUBLISH_PENDING)
                        note_version(catalogue, job, publish, catalogue_version(catalogue, publish->version_id));
        for (struct publish *publish = job->publishes; publish; publish = publish->next) {
                if (!publish_can_happen(catalogue, job, publish))
                        continue;
                if (publish->retry_at_ns > now_ns) {
                        *due = *due < publish->retry_at_ns ? *due : publish->retry_at_ns;
                        continue;
                }
                progress_set_busy(job, true);
                run_one(catalogue, job, publish);
                progress_set_busy(job, false);
                return true;
        }
        return false;
}
