/* The list of what is to be published, and what of it can happen. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/commit.h"
#include "agent/log.h"
#include "agent/publish.h"
#include "agent/storage.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "sum/sum.h"

#define SECOND_NS 1000000000
#define RETRY_FIRST_NS (SECOND_NS / 4)
#define RETRY_MOST_NS (30 * (int64_t)SECOND_NS)
#define LISTED_MAX 1024 /* requests that happened and are kept per job, to find paths by: some hundred KiB */
#define LIST_BYTES_MAX (32u << 20)

static void list_path(const struct catalogue *catalogue, const struct job *job, const char *suffix, char path[MEMORY_PATH_MAX])
{
        uint64_t id = sum_crc64(sum_crc64(0, job->persist_path, strlen(job->persist_path) + 1), job->name, strlen(job->name));

        snprintf(path, MEMORY_PATH_MAX, "%s/%016" PRIx64 "%s", catalogue->memory.directory, id, suffix);
}

static json_t *hex(uint64_t value)
{
        char text[17];

        document_crc64_text(value, text);
        return json_string(text);
}

static json_t *entry_json(const struct publish *publish)
{
        return json_pack("{s:o, s:i, s:i, s:b, s:b, s:o, s:I, s:s, s:s, s:s, s:s, s:o, s:I, s:I}", "id", hex(publish->id),
                         "kind", (int)publish->kind, "state", (int)publish->state, "cancelled", publish->cancelled,
                         "replaces", publish->replaces, "version", hex(publish->version_id), "generation",
                         (json_int_t)publish->generation, "tag", publish->tag, "name", publish->name, "path", publish->path,
                         "staging", publish->staging, "inode", hex(publish->inode), "size", (json_int_t)publish->size,
                         "mtime_ns", (json_int_t)publish->mtime_ns);
}

static int write_list(const struct catalogue *catalogue, const struct job *job, json_t *body)
{
        char path[MEMORY_PATH_MAX], temporary[MEMORY_PATH_MAX], *text;
        size_t size;
        int fd, result;

        list_path(catalogue, job, ".publish", path);
        list_path(catalogue, job, ".tmp", temporary);
        if (document_format(body, &text, &size, NULL))
                return -ENOMEM;
        fd = os->open(temporary, OS_WRITE | OS_CREATE | OS_TRUNCATE | OS_NOFOLLOW);
        result = fd < 0 ? fd : os_write_at(fd, text, size, 0);
        if (fd >= 0)
                os->close(fd);
        if (!result)
                result = os->rename(temporary, path);
        if (result < 0 && fd >= 0)
                os->unlink(temporary);
        free(text);
        return result;
}

/* As with notes, a list that cannot be written costs only the protection against the agent's death. */
static void keep_list(const struct catalogue *catalogue, const struct job *job)
{
        json_t *body, *entries;
        int result = -ENOMEM;

        if (!catalogue->memory.directory[0])
                return;
        body = document_new("publish");
        entries = json_array();
        for (const struct publish *publish = job->publishes; publish; publish = publish->next)
                json_array_append_new(entries, entry_json(publish));
        if (body && entries && !json_object_set_new(body, "persist_path", json_string(job->persist_path)) &&
            !json_object_set_new(body, "job", json_string(job->name)) && !json_object_set(body, "entries", entries))
                result = write_list(catalogue, job, body);
        json_decref(entries);
        json_decref(body);
        if (result < 0)
                log_event(LOG_LEVEL_WARN, "what is to be published would not survive the agent: %s", os_error_text(result));
}

static void publish_free(struct publish *publish)
{
        free(publish->path);
        free(publish->staging);
        free(publish);
}

void publish_free_all(struct job *job)
{
        while (job->publishes) {
                struct publish *publish = job->publishes;

                job->publishes = publish->next;
                publish_free(publish);
        }
}

static void erase(struct job *job, struct publish *gone)
{
        struct publish **link = &job->publishes;

        while (*link != gone)
                link = &(*link)->next;
        *link = gone->next;
        publish_free(gone);
}

static struct publish *append(struct job *job, enum publish_kind kind, const char *path, const char *staging,
                              struct nebula_error *error)
{
        struct publish *publish = calloc(1, sizeof *publish), **link = &job->publishes;

        if (publish) {
                publish->path = strdup(path);
                publish->staging = strdup(staging);
        }
        if (!publish || !publish->path || !publish->staging) {
                if (publish)
                        publish_free(publish);
                error_set(error, NEBULA_NO_MEMORY, 0, "no memory to remember %.300s", path);
                return NULL;
        }
        publish->id = memory_random_id();
        publish->kind = kind;
        while (*link)
                link = &(*link)->next;
        *link = publish;
        return publish;
}

static enum nebula_status check_path(const char *path, struct nebula_error *error)
{
        size_t length = strlen(path);

        bool climbs = strstr(path, "/../") || (length >= 3 && !strcmp(path + length - 3, "/.."));

        if (path[0] != '/' || length < 2 || path[length - 1] == '/' || climbs || strstr(path, "//"))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is not the absolute path of a file or directory", path);
        return NEBULA_OK;
}

static bool has_file(struct version *version, const char *name)
{
        for (const struct grant *grant = version->grants; grant; grant = grant->next)
                if (!strcmp(grant->name, name))
                        return true;
        return version_file(version, name) != NULL;
}

enum nebula_status publish_request(struct catalogue *catalogue, struct version *version, const struct ipc_publish *request,
                                   struct nebula_error *error)
{
        struct job *job = version->job;
        bool is_directory = !request->name[0], replaces = false;
        struct publish *publish;
        enum nebula_status status = check_path(request->path, error);

        if (!status && *request->staging)
                status = check_path(request->staging, error);
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
        publish = append(job, is_directory ? PUBLISH_DIRECTORY : PUBLISH_FILE, request->path, request->staging, error);
        if (!publish)
                return NEBULA_NO_MEMORY;
        /* Removing what is going to be replaced would only leave a moment with neither. */
        for (struct publish *other = job->publishes, *next; other != publish; other = next) {
                next = other->next;
                if (other->kind == PUBLISH_REMOVAL && other->state == PUBLISH_PENDING && !other->cancelled &&
                    !strcmp(other->path, request->path)) {
                        other->cancelled = true; /* the worker may hold it just now */
                        replaces = true;
                }
        }
        publish->version_id = version->id;
        publish->generation = version->generation;
        publish->replaces = is_directory && replaces;
        strcpy(publish->tag, version->tag);
        strcpy(publish->name, request->name);
        version->wanted = true;
        keep_list(catalogue, job);
        catalogue_signal(catalogue);
        return NEBULA_OK;
}

enum nebula_status publish_remove(struct catalogue *catalogue, struct job *job, const char *path, struct nebula_error *error)
{
        enum nebula_status status = check_path(path, error);

        if (status)
                return status;
        for (struct publish *publish = job->publishes; publish; publish = publish->next)
                if (publish->kind != PUBLISH_REMOVAL && publish->state == PUBLISH_PENDING && !strcmp(publish->path, path))
                        publish->cancelled = true;
        if (!append(job, PUBLISH_REMOVAL, path, "", error))
                return NEBULA_NO_MEMORY;
        keep_list(catalogue, job);
        catalogue_signal(catalogue);
        return NEBULA_OK;
}

/* Whether `path` is that of the publish, or of a file in the directory that it makes; ret_name: the file. */
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

static bool still_ours(const struct publish *publish)
{
        struct os_stat stat;

        if (os->stat(publish->path, false, &stat) < 0)
                return false;
        return publish->kind == PUBLISH_DIRECTORY ||
               (stat.inode == publish->inode && stat.size == publish->size && stat.mtime_ns == publish->mtime_ns);
}

struct version *publish_find(struct catalogue *catalogue, struct job *job, const char *path, char ret_name[IPC_NAME_MAX],
                             bool *ret_open)
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
                version = publish->cancelled ? NULL : catalogue_version(catalogue, publish->version_id);
                if (!version || (publish->state == PUBLISH_DONE && !still_ours(publish)))
                        continue;
                if (commit_open(version)) {
                        *ret_open = true;
                        continue;
                }
                if ((!version_whole_in_memory(version) && !version->stored) || (*name && !version_file(version, name)))
                        continue;
                found = version;
                *ret_open = false;
                strcpy(ret_name, name);
        }
        return found;
}

static bool is_dead(const struct publish *publish)
{
        return publish->cancelled || publish->state == PUBLISH_FAILED;
}

static bool done_after(const struct publish *publish)
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
                if (!is_dead(earlier) || (strcmp(earlier->path, removal->path) && !done_after(earlier)))
                        return true;
        }
        return false;
}

/* Of two publishes of one path the later one must come last. */
static bool turn_waits(const struct job *job, const struct publish *publish)
{
        for (const struct publish *earlier = job->publishes; earlier != publish; earlier = earlier->next)
                if (earlier->kind != PUBLISH_REMOVAL && earlier->state == PUBLISH_PENDING && !earlier->cancelled &&
                    !strcmp(earlier->path, publish->path))
                        return true;
        return false;
}

static bool can_happen(struct catalogue *catalogue, const struct job *job, const struct publish *publish)
{
        const struct version *version;

        if (publish->state != PUBLISH_PENDING || publish->cancelled)
                return false;
        if (publish->kind == PUBLISH_REMOVAL)
                return !removal_waits(job, publish);
        version = catalogue_version(catalogue, publish->version_id);
        /* One that the agent does not know any more may be in storage still. */
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
                if (publish->state != PUBLISH_FAILED || publish->cancelled || (!version && publish->told) ||
                    (version && publish->version_id != version->id))
                        continue;
                publish->told = true;
                return error_set(error, publish->error.status, 0, "%.120s could not be put to %.150s: %.200s",
                                 *publish->name ? publish->name : publish->tag, publish->path, publish->error.message);
        }
        return NEBULA_OK;
}

bool publish_pending(struct catalogue *catalogue, struct job *job)
{
        for (const struct publish *publish = job->publishes; publish; publish = publish->next)
                if (can_happen(catalogue, job, publish))
                        return true;
        return false;
}

static void set_failed(struct publish *publish, const struct nebula_error *error)
{
        publish->state = PUBLISH_FAILED;
        publish->error = *error;
        log_event(LOG_LEVEL_ERROR, "%s of %s does not appear as %s: %s", *publish->name ? publish->name : "the whole", publish->tag,
                  publish->path, error->message);
}

static void set_done(struct publish *publish)
{
        struct os_stat stat;

        publish->state = PUBLISH_DONE;
        if (publish->kind == PUBLISH_FILE && !os->stat(publish->path, false, &stat)) {
                publish->inode = stat.inode;
                publish->size = stat.size;
                publish->mtime_ns = stat.mtime_ns;
        }
        log_event(LOG_LEVEL_INFO, "%s is at %s", publish->tag, publish->path);
}

/* What happened long ago, or does not matter any more. */
static void trim(struct job *job)
{
        size_t done = 0;

        for (struct publish *publish = job->publishes, *next; publish; publish = next) {
                next = publish->next;
                if ((publish->kind == PUBLISH_REMOVAL && (publish->cancelled || publish->state == PUBLISH_DONE)) ||
                    (publish->kind != PUBLISH_REMOVAL && is_dead(publish) && done_after(publish) &&
                     (publish->cancelled || publish->told)))
                        erase(job, publish);
                else
                        done += publish->state == PUBLISH_DONE;
        }
        for (struct publish *publish = job->publishes, *next; publish && done > LISTED_MAX; publish = next) {
                next = publish->next;
                if (publish->state == PUBLISH_DONE && next) {
                        erase(job, publish);
                        done--;
                }
        }
}

/* What was published or was to be at the path of a removal that happened. */
static void forget_path(struct job *job, const struct publish *removal)
{
        for (struct publish *publish = job->publishes, *next; publish && publish != removal; publish = next) {
                next = publish->next;
                if (!strcmp(publish->path, removal->path) && (publish->state == PUBLISH_DONE || is_dead(publish)))
                        erase(job, publish);
        }
}

/* The version whose directory was removed goes as well. The lock is free while storage works. */
static void drop_version(struct catalogue *catalogue, struct job *job, const char *tag, uint64_t generation)
{
        struct nebula_error error = { 0 };
        struct manifest manifest = { 0 };
        struct store *store = NULL;
        enum nebula_status status;

        for (struct version *version = job->versions; version; version = version->next)
                if (!strcmp(version->tag, tag) && (version->generation > generation || version->pins))
                        return; /* written again, or being read: it is not ours to take away */
        for (struct version *version = job->versions; version; version = version->next) {
                if (strcmp(version->tag, tag) || commit_open(version))
                        continue;
                if (version->in_memory)
                        version_forget_memory(catalogue, version);
                version->stored = false;
        }
        for (size_t i = 0; i < job->stored.count; i++)
                if (!strcmp(job->stored.manifests[i].tag, tag)) {
                        manifest_done(&job->stored.manifests[i]);
                        memmove(&job->stored.manifests[i], &job->stored.manifests[i + 1],
                                (--job->stored.count - i) * sizeof job->stored.manifests[0]);
                        break;
                }
        catalogue_unlock(catalogue);
        status = storage_open(catalogue, job, &store, &error);
        if (!status)
                status = manifest_load(store, tag, &manifest, &error);
        if (!status && !strcmp(manifest.job, job->name) && manifest.generation <= generation)
                status = manifest_remove(store, &manifest, &error);
        if (status && status != NEBULA_NOT_FOUND)
                log_event(LOG_LEVEL_WARN, "%s could not be removed from %s: %s", tag, job->persist_path, error.message);
        manifest_done(&manifest);
        catalogue_lock(catalogue);
}

/* The list's entry of an earlier directory at this path, for directories that tell nothing of themselves. */
static void removed_version(const struct job *job, const struct publish *removal, char tag[IPC_NAME_MAX], uint64_t *generation)
{
        for (const struct publish *publish = job->publishes; publish != removal; publish = publish->next)
                if (publish->kind == PUBLISH_DIRECTORY && !strcmp(publish->path, removal->path)) {
                        strcpy(tag, publish->tag);
                        *generation = publish->generation;
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

static enum nebula_status refuse(const struct version *version, struct nebula_error *error)
{
        if (version && version->life.state == NEBULA_STATE_FAILED)
                return error_set(error, NEBULA_FAILED, 0, "the checkpoint failed: %.400s", version->error.message);
        if (version && version->superseded)
                return error_set(error, NEBULA_FAILED, 0, "it left memory before it was persisted");
        return NEBULA_OK;
}

static void run_one(struct catalogue *catalogue, struct job *job, struct publish *publish)
{
        struct version *version = publish->kind == PUBLISH_REMOVAL ? NULL : catalogue_version(catalogue, publish->version_id);
        struct nebula_error error = { 0 };
        char tag[IPC_NAME_MAX] = "";
        uint64_t generation = 0;
        enum nebula_status status = refuse(version, &error);

        if (version) {
                publish->generation = version->generation; /* persisting may have given it another number */
                version->pins++;
        }
        if (!status) {
                catalogue_unlock(catalogue);
                if (publish->kind == PUBLISH_REMOVAL)
                        status = publish_take_away(job, publish, tag, &generation, &error);
                else
                        status = publish->kind == PUBLISH_FILE ? publish_put_file(catalogue, job, publish, &error) :
                                                                 publish_put_directory(catalogue, job, publish, &error);
                catalogue_lock(catalogue);
        }
        if (version)
                version->pins--;
        if (status && !hopeless(&error)) {
                int64_t pause = RETRY_FIRST_NS << (job->publish_attempt < 8 ? job->publish_attempt : 7);

                job->publish_attempt++;
                job->failure_count++;
                job->store_error = error;
                job->publish_retry_at_ns = os->now_ns() + (pause < RETRY_MOST_NS ? pause : RETRY_MOST_NS);
                log_event(LOG_LEVEL_WARN, "%s cannot be published yet: %s", publish->path, error.message);
                catalogue_signal(catalogue);
                return;
        }
        job->publish_attempt = 0;
        job->publish_retry_at_ns = 0;
        if (publish->kind == PUBLISH_REMOVAL) {
                if (status)
                        log_event(LOG_LEVEL_WARN, "%s could not be removed: %s", publish->path, error.message);
                else if (!tag[0])
                        removed_version(job, publish, tag, &generation);
                publish->state = PUBLISH_DONE;
                forget_path(job, publish);
                if (!status && tag[0])
                        drop_version(catalogue, job, tag, generation);
        } else if (status) {
                set_failed(publish, &error);
        } else {
                set_done(publish);
        }
        trim(job);
        keep_list(catalogue, job);
        catalogue_signal(catalogue);
}

bool publish_work(struct catalogue *catalogue, int64_t now_ns, int64_t *due)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                for (struct publish *publish = job->publishes; publish; publish = publish->next) {
                        if (!can_happen(catalogue, job, publish))
                                continue;
                        if (job->publish_retry_at_ns > now_ns) {
                                *due = *due < job->publish_retry_at_ns ? *due : job->publish_retry_at_ns;
                                break;
                        }
                        job->persisting = true;
                        run_one(catalogue, job, publish);
                        job->persisting = false;
                        return true;
                }
        return false;
}

/* Reading back. */

static void read_entry(struct document_reader *reader, const json_t *object, struct job *job)
{
        char path[IPC_PATH_MAX], staging[IPC_PATH_MAX];
        struct publish *publish;

        document_text(reader, object, "path", 0, path, sizeof path);
        document_text(reader, object, "staging", 1, staging, sizeof staging);
        if (reader->status || check_path(path, reader->error))
                return;
        publish = append(job, (enum publish_kind)document_u64(reader, object, "kind", PUBLISH_REMOVAL), path, staging, reader->error);
        if (!publish)
                return;
        publish->id = document_crc64(reader, json_object_get(object, "id"), "id");
        publish->state = (enum publish_state)document_u64(reader, object, "state", PUBLISH_FAILED);
        publish->cancelled = json_is_true(json_object_get(object, "cancelled"));
        publish->replaces = json_is_true(json_object_get(object, "replaces"));
        publish->version_id = document_crc64(reader, json_object_get(object, "version"), "version");
        publish->generation = document_u64(reader, object, "generation", INT64_MAX);
        document_text(reader, object, "tag", 1, publish->tag, sizeof publish->tag);
        document_text(reader, object, "name", 1, publish->name, sizeof publish->name);
        publish->inode = document_crc64(reader, json_object_get(object, "inode"), "inode");
        publish->size = document_u64(reader, object, "size", INT64_MAX);
        publish->mtime_ns = (int64_t)document_u64(reader, object, "mtime_ns", INT64_MAX);
        if (publish->state == PUBLISH_FAILED)
                error_set(&publish->error, NEBULA_FAILED, 0, "an agent before this one could not do it");
}

static void read_list(struct catalogue *catalogue, const char *text, size_t size, const char *path)
{
        struct nebula_error error = { 0 };
        struct document_reader reader = { .kind = "publish", .error = &error };
        char persist_path[IPC_PATH_MAX] = "", name[IPC_NAME_MAX] = "";
        struct job *job = NULL;
        json_t *body, *entries;

        if (document_parse(text, size, "publish", &body, &error))
                goto refused;
        document_text(&reader, body, "persist_path", 1, persist_path, sizeof persist_path);
        document_text(&reader, body, "job", 1, name, sizeof name);
        entries = document_array(&reader, body, "entries");
        if (!reader.status)
                job = catalogue_job_get(catalogue, persist_path, name);
        for (size_t i = 0; job && !reader.status && i < json_array_size(entries); i++)
                read_entry(&reader, json_array_get(entries, i), job);
        json_decref(body);
        if (!reader.status)
                return;
refused:
        log_event(LOG_LEVEL_WARN, "what was to be published is lost: %s: %s", path, error.message);
}

static void each_list(struct catalogue *catalogue, bool adopt)
{
        char name[300], path[MEMORY_PATH_MAX], *text;
        struct os_stat stat;
        struct os_dir *dir;
        uint64_t id;
        size_t size;

        if (!catalogue->memory.directory[0] || os->opendir(catalogue->memory.directory, &dir) < 0)
                return;
        while (os->readdir(dir, name, sizeof name) > 0) {
                if (!memory_image_name(name, ".publish", &id))
                        continue;
                if ((size_t)snprintf(path, sizeof path, "%s/%s", catalogue->memory.directory, name) >= sizeof path)
                        continue;
                if (!adopt) {
                        os->unlink(path);
                        continue;
                }
                if (os->stat(path, false, &stat) < 0 || stat.kind != OS_KIND_FILE || stat.uid != os->uid() ||
                    os_read_file(path, LIST_BYTES_MAX, &text, &size) < 0)
                        continue;
                read_list(catalogue, text, size, path);
                free(text);
        }
        os->closedir(dir);
}

void publish_adopt_all(struct catalogue *catalogue)
{
        each_list(catalogue, true);
}

void publish_forget(struct catalogue *catalogue)
{
        each_list(catalogue, false);
}
