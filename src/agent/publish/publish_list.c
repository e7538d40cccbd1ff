/* A job's publish list: in memory, and in the memory directory for the next agent. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/clients/location.h"
#include "agent/log.h"
#include "agent/memory/memory.h"
#include "agent/publish/publish_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "sum/sum.h"

#define LIST_BYTES_MAX (32u << 20)

static void publish_free(struct publish *publish)
{
        free(publish->path);
        free(publish->staging);
        free(publish);
}

void publish_done(struct catalogue *catalogue)
{
        for (struct job *job = catalogue->jobs; job; job = job->next)
                while (job->publishes) {
                        struct publish *publish = job->publishes;

                        job->publishes = publish->next;
                        publish_free(publish);
                }
}

void publish_erase(struct job *job, struct publish *gone)
{
        struct publish **link = &job->publishes;

        while (*link != gone)
                link = &(*link)->next;
        *link = gone->next;
        publish_free(gone);
}

struct publish *publish_append(struct job *job, enum publish_kind kind, const char *path, const char *staging,
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

enum nebula_status publish_check_path(const char *path, struct nebula_error *error)
{
        size_t length = strlen(path);

        bool climbs = strstr(path, "/../") || (length >= 3 && !strcmp(path + length - 3, "/.."));

        if (path[0] != '/' || length < 2 || path[length - 1] == '/' || climbs || strstr(path, "//"))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is not the absolute path of a file or directory", path);
        return NEBULA_OK;
}

/* Writes the list. */

static uint64_t list_id(const struct job *job)
{
        return sum_crc64(sum_crc64(0, job->persist_path, strlen(job->persist_path) + 1), job->name, strlen(job->name));
}

static json_t *entry_json(const struct publish *publish)
{
        return json_pack("{s:o, s:i, s:i, s:b, s:b, s:b, s:o, s:I, s:s, s:s, s:s, s:s, s:o, s:I, s:I}", "id", document_hex(publish->id),
                         "kind", (int)publish->kind, "state", (int)publish->state, "cancelled", publish->cancelled,
                         "replaces", publish->replaces, "taken", publish->taken, "version", document_hex(publish->version_id), "sequence",
                         (json_int_t)publish->sequence, "tag", publish->tag, "name", publish->name, "path", publish->path,
                         "staging", publish->staging, "inode", document_hex(publish->inode), "size", (json_int_t)publish->size,
                         "mtime_ns", (json_int_t)publish->mtime_ns);
}

void publish_keep_list(struct catalogue *catalogue, const struct job *job)
{
        struct memory_file_task task = { .kind = MEMORY_FILE_REPLACE, .suffix = ".publish" };
        json_t *body, *entries;
        char *text;
        size_t size;
        bool is_reported = false;

        if (!catalogue->memory->directory[0])
                return;
        body = document_new("publish");
        entries = json_array();
        for (const struct publish *publish = job->publishes; publish; publish = publish->next)
                json_array_append_new(entries, entry_json(publish));
        if (body && entries && !json_object_set_new(body, "persist_path", json_string(job->persist_path)) &&
            !json_object_set_new(body, "job", json_string(job->name)) && !json_object_set(body, "entries", entries) &&
            !document_format(body, &text, &size, NULL)) {
                task.id = list_id(job);
                task.data = text;
                task.size = size;
                is_reported = memory_files_add(catalogue->memory, &task);
        }
        json_decref(entries);
        json_decref(body);
        if (!is_reported)
                publish_lose_list(-ENOMEM);
}

void publish_lose_list(int result)
{
        log_event(LOG_LEVEL_WARN, "publish requests would not survive the agent, because their list cannot be written: %s",
                  os_error_text(result));
}

/* Reads the list. */

static void read_entry(struct document_reader *reader, const json_t *object, struct job *job)
{
        char path[IPC_PATH_MAX], staging[IPC_PATH_MAX];
        struct publish *publish;

        document_text(reader, object, "path", 0, path, sizeof path);
        document_text(reader, object, "staging", 1, staging, sizeof staging);
        if (reader->status || publish_check_path(path, reader->error))
                return;
        publish = publish_append(job, (enum publish_kind)document_u64(reader, object, "kind", PUBLISH_REMOVAL), path, staging, reader->error);
        if (!publish)
                return;
        publish->id = document_crc64(reader, json_object_get(object, "id"), "id");
        publish->state = (enum publish_state)document_u64(reader, object, "state", PUBLISH_FAILED);
        publish->cancelled = json_is_true(json_object_get(object, "cancelled"));
        publish->replaces = json_is_true(json_object_get(object, "replaces"));
        publish->taken = json_is_true(json_object_get(object, "taken")); /* another program may have the path by now */
        publish->version_id = document_crc64(reader, json_object_get(object, "version"), "version");
        publish->sequence = document_u64(reader, object, "sequence", INT64_MAX);
        document_text(reader, object, "tag", 1, publish->tag, sizeof publish->tag);
        document_text(reader, object, "name", 1, publish->name, sizeof publish->name);
        publish->inode = document_crc64(reader, json_object_get(object, "inode"), "inode");
        publish->size = document_u64(reader, object, "size", INT64_MAX);
        publish->mtime_ns = (int64_t)document_u64(reader, object, "mtime_ns", INT64_MAX);
        if (reader->status) {
                publish_erase(job, publish);
                return;
        }
        if (publish->state == PUBLISH_FAILED)
                error_set(&publish->error, NEBULA_FAILED, 0, "an earlier agent could not publish it");
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
        if (!reader.status && !catalogue_job(catalogue, persist_path, name))
                location_resolve(catalogue, persist_path);
        if (!reader.status)
                job = catalogue_job_get(catalogue, persist_path, name);
        for (size_t i = 0; job && !reader.status && i < json_array_size(entries); i++)
                read_entry(&reader, json_array_get(entries, i), job);
        json_decref(body);
        if (!reader.status)
                return;
refused:
        log_event(LOG_LEVEL_WARN, "publish requests are lost: %s: %s", path, error.message);
}

/* A list that cannot be read stays: the next agent may be able to. */
static void adopt_list(struct catalogue *catalogue, const char *path)
{
        struct os_stat stat;
        size_t size;
        char *text;
        int result = os->stat(path, false, &stat);

        if (!result && (stat.kind != OS_KIND_FILE || stat.uid != os->uid()))
                result = -EPERM;
        if (!result)
                result = os_read_file(path, LIST_BYTES_MAX, &text, &size);
        if (result < 0) {
                log_event(LOG_LEVEL_WARN, "publish requests wait: their list cannot be read: %s: %s", path, os_error_text(result));
                return;
        }
        read_list(catalogue, text, size, path);
        free(text);
}

static void each_list(struct catalogue *catalogue, bool adopt)
{
        char name[300], path[MEMORY_PATH_MAX];
        struct os_dir *dir;
        uint64_t id;

        if (!catalogue->memory->directory[0] || os->opendir(catalogue->memory->directory, &dir) < 0)
                return;
        while (os->readdir(dir, name, sizeof name) > 0) {
                if (!memory_image_name(name, ".publish", &id))
                        continue;
                if ((size_t)snprintf(path, sizeof path, "%s/%s", catalogue->memory->directory, name) >= sizeof path)
                        continue;
                if (adopt)
                        adopt_list(catalogue, path);
                else
                        os->unlink(path);
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
