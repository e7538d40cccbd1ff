/* Takes requests to publish, finds published versions, and decides which requests can be executed now. */
#include <stdio.h>
#include <string.h>

#include "agent/commit/carry_over.h"
#include "agent/commit/commit.h"
#include "agent/publish/publish_private.h"
#include "base/error.h"
#include "base/text.h"
#include "os/os.h"
#include "store/manifest_load.h"

static bool has_file(struct version *version, const char *name)
{
        for (const struct image_loan *loan = version->loans; loan; loan = loan->next)
                if (!strcmp(loan->name, name))
                        return true;
        return version_file(version, name) != NULL;
}

/* Cancels the removal that would also remove staged files. If memory for another entry is missing, the staged files stay. */
static void discard_staging(struct job *job, const struct publish *removal, const struct publish *successor)
{
        if (*removal->staging && strcmp(removal->staging, successor->staging))
                publish_append(job, PUBLISH_REMOVAL, removal->staging, removal->staging, NULL);
}

enum nebula_status publish_request(struct catalogue *catalogue, struct version *version, const struct ipc_publish *request,
                                   struct nebula_error *error)
{
        struct job *job = version->job;
        bool is_directory = !request->name[0], replaces = false;
        struct publish *publish;
        enum nebula_status status = publish_check_path(request->path, error);

        if (!status && *request->staging)
                status = publish_check_path(request->staging, error);
        if (status)
                return status;
        if (is_directory && !*request->staging)
                return error_set(error, NEBULA_INVALID, 0, "a whole checkpoint is published through a staging directory: give one");
        if (!is_directory && !has_file(version, request->name))
                return error_set(error, NEBULA_NOT_FOUND, 0, "checkpoint \"%.150s\" has no file \"%.150s\" to publish", version->tag,
                                 request->name);
        if (version->life.state == NEBULA_STATE_FAILED)
                return error_set(error, NEBULA_FAILED, 0, "checkpoint \"%.150s\" failed and cannot be published: %.250s", version->tag,
                                 version->error.message);
        publish = publish_append(job, is_directory ? PUBLISH_DIRECTORY : PUBLISH_FILE, request->path, request->staging, error);
        if (!publish)
                return NEBULA_NO_MEMORY;
        /* Cancels pending removals of this path: removing a path that is about to be replaced would leave a moment without either. */
        for (struct publish *other = job->publishes, *next; other != publish; other = next) {
                next = other->next;
                if (other->kind != PUBLISH_REMOVAL || other->state != PUBLISH_PENDING || other->cancelled)
                        continue;
                if (!strcmp(other->path, request->path)) {
                        other->cancelled = true; /* not freed: the worker may be using it */
                        replaces = true;
                        discard_staging(job, other, publish);
                } else if (is_directory && !strcmp(other->path, request->staging)) {
                        other->cancelled = true; /* it was staged again */
                }
        }
        publish->version_id = version->id;
        publish->sequence = version->sequence;
        publish->replaces = is_directory && replaces;
        strcpy(publish->tag, version->tag);
        strcpy(publish->name, request->name);
        version->wanted = true;
        publish_keep_list(catalogue, job);
        catalogue_signal_job(catalogue, job);
        return NEBULA_OK;
}

/* Refuses to remove a path that contains a storage path: no caller means to remove the checkpoints there. A path
 * such as "" or "." may have led to it. */
static enum nebula_status spare_storage(const struct catalogue *catalogue, const char *path, struct nebula_error *error)
{
        size_t length = strlen(path);

        for (const struct job *job = catalogue->jobs; job; job = job->next) {
                const char *storage = text_local_path(job->persist_path);

                if (!strncmp(storage, path, length) && (!storage[length] || storage[length] == '/'))
                        return error_set(error, NEBULA_INVALID, 0, "%.300s stays: the storage path %.300s is that directory, or lies in it",
                                         path, storage);
        }
        return NEBULA_OK;
}

enum nebula_status publish_remove(struct catalogue *catalogue, struct job *job, const char *path, struct nebula_error *error)
{
        enum nebula_status status = publish_check_path(path, error);
        const char *staging = ""; /* of a publish that never happens: its staging goes too */
        struct publish *removal;

        if (!status)
                status = spare_storage(catalogue, path, error);
        if (status)
                return status;
        for (struct publish *publish = job->publishes; publish; publish = publish->next)
                if (publish->kind == PUBLISH_DIRECTORY && publish->state == PUBLISH_PENDING && !strcmp(publish->path, path))
                        staging = publish->staging;
        removal = publish_append(job, PUBLISH_REMOVAL, path, staging, error);
        if (!removal)
                return NEBULA_NO_MEMORY;
        for (struct publish *publish = job->publishes; publish != removal; publish = publish->next) {
                if (publish->kind == PUBLISH_REMOVAL || strcmp(publish->path, path))
                        continue;
                if (publish->state == PUBLISH_PENDING)
                        publish->cancelled = true;
                if (publish->kind == PUBLISH_DIRECTORY) { /* it may leave the list before this removal can happen */
                        removal->version_id = publish->version_id;
                        removal->sequence = publish->sequence;
                        strcpy(removal->tag, publish->tag);
                }
        }
        publish_keep_list(catalogue, job);
        catalogue_signal_job(catalogue, job);
        return NEBULA_OK;
}

/* Whether `path` is the path of the publish, or of a file in the directory that it makes; ret_name: the file. */
static bool covers(const struct publish *publish, const char *path, char ret_name[IPC_NAME_MAX])
{
        size_t length = strlen(publish->path);

        if (!strcmp(publish->path, path)) {
                strcpy(ret_name, publish->name);
                return true;
        }
        if (publish->kind == PUBLISH_FILE || strncmp(publish->path, path, length) || path[length] != '/' ||
            strlen(path + length + 1) >= IPC_NAME_MAX)
                return false;
        strcpy(ret_name, path + length + 1);
        return true;
}

void publish_look(const char *path, struct publish_look *ret_look)
{
        struct publish_look look = { .at_ns = os->now_ns() };
        char part[IPC_PATH_MAX];
        struct os_stat stat = { 0 };

        snprintf(part, sizeof part, "%s", path);
        while (os->stat(part, false, &stat) < 0 && strrchr(part, '/'))
                *strrchr(part, '/') = 0;
        look.there = strlen(part);
        if (look.there == strlen(path))
                look.stat = stat;
        *ret_look = look;
}

/* Whether the published file or directory is still at the path. `look` is at the path or at one below it. */
static bool still_ours(const struct publish *publish, const struct publish_look *look)
{
        if (publish->done_ns >= look->at_ns)
                return true; /* it appeared after the look */
        if (publish->kind == PUBLISH_DIRECTORY)
                return look->there >= strlen(publish->path);
        return look->stat.inode == publish->inode && look->stat.size == publish->size && look->stat.mtime_ns == publish->mtime_ns;
}

/*
 * The version from which file `name` of this one can be loaded: itself, or a later writing of its tag that replaced it
 * in storage and carried the file over. NULL: there is none, and only the published path has the file.
 */
static struct version *loadable_version_of(struct catalogue *catalogue, struct version *version, const char *name)
{
        const struct agent_file *file = version_file(version, name);
        const struct manifest *manifest;
        const struct manifest_file *carried;

        if (*name && !file)
                return NULL;
        if (version_whole_in_memory(version))
                return version;
        manifest = version->stored ? job_stored(version->job, version->tag) : NULL;
        if (!manifest || version_is(version, manifest->sequence))
                return manifest ? version : NULL;
        carried = *name ? manifest_find_file(manifest, name) : NULL;
        if (!carried || manifest_file_sequence(manifest, carried) != version_file_sequence(version, file))
                return NULL;
        return catalogue_stored(catalogue, version->job, manifest);
}

struct version *publish_find(struct catalogue *catalogue, struct job *job, const char *path, const struct publish_look *look,
                             char ret_name[IPC_NAME_MAX], bool *ret_open)
{
        struct version *found = NULL, *version;
        char name[IPC_NAME_MAX];

        *ret_open = false;
        for (const struct publish *publish = job->publishes; publish; publish = publish->next) {
                if (!covers(publish, path, name))
                        continue;
                if (publish->kind == PUBLISH_REMOVAL) {
                        if (!publish->cancelled) {
                                found = NULL;
                                *ret_open = false;
                        }
                        continue;
                }
                if (publish->cancelled || (publish->state == PUBLISH_DONE && !still_ours(publish, look)))
                        continue;
                if (publish->state == PUBLISH_DONE)
                        found = NULL; /* it has replaced the earlier one */
                version = catalogue_version(catalogue, publish->version_id);
                if (!version)
                        continue;
                if (version_open(version)) {
                        *ret_open = true;
                        continue;
                }
                version = loadable_version_of(catalogue, version, name);
                if (!version)
                        continue;
                found = version;
                *ret_open = false;
                strcpy(ret_name, name);
        }
        return found;
}

bool publish_is_dead(const struct publish *publish)
{
        return publish->cancelled || publish->state == PUBLISH_FAILED;
}

bool publish_done_after(const struct publish *publish)
{
        for (publish = publish->next; publish; publish = publish->next)
                if (publish->kind != PUBLISH_REMOVAL && publish->state == PUBLISH_DONE)
                        return true;
        return false;
}

/* Whether `removal` waits for an earlier publish. */
static bool removal_waits(const struct job *job, const struct publish *removal)
{
        for (const struct publish *earlier = job->publishes; earlier != removal; earlier = earlier->next) {
                if (earlier->kind == PUBLISH_REMOVAL || earlier->state == PUBLISH_DONE)
                        continue;
                if (!publish_is_dead(earlier) || (strcmp(earlier->path, removal->path) && !publish_done_after(earlier)))
                        return true;
        }
        return false;
}

/* Whether a thread reads or writes the version that the removal also removes. */
static bool removal_is_held(const struct job *job, const struct publish *removal)
{
        for (const struct version *version = job->versions; version; version = version->next)
                if (version->pins && !strcmp(version->tag, removal->tag))
                        return true;
        return false;
}

/* Two publishes of one path must happen in order. */
static bool turn_waits(const struct job *job, const struct publish *publish)
{
        for (const struct publish *earlier = job->publishes; earlier != publish; earlier = earlier->next)
                if (earlier->kind != PUBLISH_REMOVAL && earlier->state == PUBLISH_PENDING && !earlier->cancelled &&
                    !strcmp(earlier->path, publish->path))
                        return true;
        return false;
}

bool publish_can_happen(struct catalogue *catalogue, const struct job *job, const struct publish *publish)
{
        const struct version *version;

        if (publish->state != PUBLISH_PENDING || publish->cancelled)
                return false;
        if (publish->kind == PUBLISH_REMOVAL)
                return !removal_waits(job, publish) && !removal_is_held(job, publish);
        version = catalogue_version(catalogue, publish->version_id);
        /* A version that the agent no longer knows may still be in storage. */
        if (version && !version->stored && version->life.state != NEBULA_STATE_FAILED && !version->superseded)
                return false;
        return !turn_waits(job, publish);
}

bool publish_waits(const struct version *version)
{
        for (const struct publish *publish = version->job->publishes; publish; publish = publish->next)
                if (publish->kind != PUBLISH_REMOVAL && publish->version_id == version->id && publish->state == PUBLISH_PENDING &&
                    !publish->cancelled)
                        return true;
        return false;
}

enum nebula_status publish_failure(struct job *job, const struct version *version, struct nebula_error *error)
{
        for (struct publish *publish = job->publishes; publish; publish = publish->next) {
                if (publish->state != PUBLISH_FAILED || publish->cancelled || (!version && publish->is_reported) ||
                    (version && publish->version_id != version->id))
                        continue;
                publish->is_reported = true;
                return error_set(error, publish->error.status, 0, "%.120s could not be published to %.150s: %.200s",
                                 *publish->name ? publish->name : publish->tag, publish->path, publish->error.message);
        }
        return NEBULA_OK;
}

/* A thread that holds the version keeps the removal only for a moment. */
bool publish_removes(const struct job *job)
{
        for (const struct publish *publish = job->publishes; publish; publish = publish->next)
                if (publish->kind == PUBLISH_REMOVAL && publish->state == PUBLISH_PENDING && !publish->cancelled && !removal_waits(job, publish))
                        return true;
        return false;
}

bool publish_pending(struct catalogue *catalogue, struct job *job, int64_t since_ns)
{
        for (const struct publish *publish = job->publishes; publish; publish = publish->next)
                if (publish->failed_ns < since_ns && publish_can_happen(catalogue, job, publish))
                        return true;
        return false;
}
