/* Publishing in file systems: links, copies, one rename. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/publish.h"
#include "agent/restore.h"
#include "agent/storage.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"

#define PATH_BYTES (IPC_PATH_MAX + 600)
#define DIRECTORY_MODE 0755
#define LABEL "/.nebula.json" /* in a published directory: which version it is of */
#define LABEL_BYTES_MAX 16384

static enum nebula_status fail(struct nebula_error *error, const char *doing, const char *path, int result)
{
        return error_set(error, error_status_of_errno(-result), -result, "cannot %s %.300s", doing, path);
}

static void parent_of(const char *path, char ret_parent[PATH_BYTES])
{
        const char *slash = strrchr(path, '/');
        size_t length = slash == path ? 1 : (size_t)(slash - path);

        memcpy(ret_parent, path, length);
        ret_parent[length] = 0;
}

/* `directory`/.nebula-<id>-<what>: the same for each try, so that one that was interrupted leaves nothing. */
static void own_name(const char *path, const struct publish *publish, const char *what, char ret_own[PATH_BYTES])
{
        char parent[PATH_BYTES];

        parent_of(path, parent);
        snprintf(ret_own, PATH_BYTES, "%.4400s/.nebula-%016" PRIx64 "-%s", strcmp(parent, "/") ? parent : "", publish->id, what);
}

static int sync_parent(const char *path)
{
        char parent[PATH_BYTES];

        parent_of(path, parent);
        return os_sync_dir(parent);
}

/* The version's file as storage has it now; "" when it is not the one meant, or no file of this machine. */
static void stored_path(struct catalogue *catalogue, struct job *job, const struct publish *publish, const char *name,
                        char ret_path[PATH_BYTES])
{
        struct manifest manifest = { 0 };
        struct nebula_error error;
        struct store *store;
        char key[1200];
        const struct manifest_file *file;

        ret_path[0] = 0;
        if (storage_open(catalogue, job, &store, &error) || store->ops != &store_file ||
            manifest_load(store, publish->tag, &manifest, &error))
                return;
        file = manifest_find_file(&manifest, name);
        /* A later writing of the tag may have replaced the file, or carried it over. */
        if (file && !strcmp(manifest.job, job->name) &&
            (manifest.generation == publish->generation || file->generation <= publish->generation) &&
            !manifest_file_key(store, &manifest, file, key, &error))
                snprintf(ret_path, PATH_BYTES, "%.4000s/%.600s", store->root, key);
        manifest_done(&manifest);
}

/* The bytes that were verified, from memory or storage, into a file that is on disk when this returns. */
static enum nebula_status copy_to(struct catalogue *catalogue, struct job *job, const struct publish *publish, const char *name,
                                  const char *to, struct nebula_error *error)
{
        struct ipc_open request = { .version_id = publish->version_id };
        struct ipc_opened *opened = NULL;
        void *data = NULL;
        int source = -1, fd = -1, result = 0;
        enum nebula_status status;

        strcpy(request.name, name);
        status = restore_open(catalogue, &request, &opened, &source, error);
        if (status)
                return status;
        if (opened->size)
                result = os->map(source, 0, opened->size, OS_MAP_READ, &data);
        if (!result)
                fd = os->open(to, OS_WRITE | OS_CREATE | OS_TRUNCATE | OS_NOFOLLOW | OS_SHARED);
        if (!result && fd < 0)
                result = fd;
        if (!result)
                result = os_write_at(fd, data, opened->size, 0);
        if (!result)
                result = os_sync(fd);
        if (fd >= 0 && os->close(fd) < 0 && !result)
                result = -EIO;
        if (data)
                os->unmap(data, opened->size);
        os->close(source);
        free(opened);
        if (result < 0) {
                os->unlink(to);
                return fail(error, "write", to, result);
        }
        return NEBULA_OK;
}

static bool must_copy(int result)
{
        return result == -EXDEV || result == -EPERM || result == -EMLINK || result == -EOPNOTSUPP || result == -ENOSYS ||
               result == -ENOENT;
}

/* One file of the version at `to`, whole or not at all; durable but for its directory's entry. */
static enum nebula_status put(struct catalogue *catalogue, struct job *job, const struct publish *publish, const char *name,
                              const char *to, struct nebula_error *error)
{
        char from[PATH_BYTES], own[PATH_BYTES], parent[PATH_BYTES];
        enum nebula_status status;
        int result;

        parent_of(to, parent);
        result = os_make_dirs(parent, DIRECTORY_MODE);
        if (result < 0)
                return fail(error, "make", parent, result);
        own_name(to, publish, "new", own);
        os->unlink(own);
        stored_path(catalogue, job, publish, name, from);
        result = from[0] ? os->link(from, own) : -EXDEV;
        if (result < 0) {
                if (!must_copy(result))
                        return fail(error, "link to", to, result);
                status = copy_to(catalogue, job, publish, name, own, error);
                if (status)
                        return status;
        }
        result = os->rename(own, to);
        os->unlink(own); /* renaming one name of a file to another name of it leaves both */
        return result < 0 ? fail(error, "rename to", to, result) : NEBULA_OK;
}

enum nebula_status publish_put_file(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                    struct nebula_error *error)
{
        enum nebula_status status = put(catalogue, job, publish, publish->name, publish->path, error);
        int result;

        if (status)
                return status;
        result = sync_parent(publish->path);
        return result < 0 ? fail(error, "sync the directory of", publish->path, result) : NEBULA_OK;
}

/* A name's place below a directory: never above it. */
static bool stays_below(const char *name)
{
        for (const char *part = name;; part++) {
                size_t length = strcspn(part, "/");

                if (!length || (length == 1 && part[0] == '.') || (length == 2 && part[0] == '.' && part[1] == '.'))
                        return false;
                part += length;
                if (!*part)
                        return true;
        }
}

struct names {
        char (*names)[IPC_NAME_MAX];
        size_t count;
};

/* The version's files: as the agent knows it, or as its manifest says. */
static enum nebula_status list_files(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                     struct names *ret_names, struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct version *version;
        struct names names = { 0 };
        struct store *store;
        enum nebula_status status;

        catalogue_lock(catalogue);
        version = catalogue_version(catalogue, publish->version_id);
        if (version) {
                names.names = calloc(version->file_count + 1, sizeof *names.names);
                for (size_t i = 0; names.names && i < version->file_count; i++)
                        strcpy(names.names[names.count++], version->files[i].name);
        }
        catalogue_unlock(catalogue);
        if (!version) {
                status = storage_open(catalogue, job, &store, error);
                if (!status)
                        status = manifest_load(store, publish->tag, &manifest, error);
                if (!status && (strcmp(manifest.job, job->name) || manifest.generation != publish->generation))
                        status = error_set(error, NEBULA_NOT_FOUND, 0, "checkpoint \"%.200s\" was lost or written again", publish->tag);
                if (status) {
                        manifest_done(&manifest);
                        return status;
                }
                names.names = calloc(manifest.file_count + 1, sizeof *names.names);
                for (size_t i = 0; names.names && i < manifest.file_count; i++)
                        strcpy(names.names[names.count++], manifest.files[i].name);
                manifest_done(&manifest);
        }
        if (!names.names)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to list the files of \"%.200s\"", publish->tag);
        *ret_names = names;
        return NEBULA_OK;
}

static enum nebula_status write_label(const struct job *job, const struct publish *publish, const char *directory,
                                      struct nebula_error *error)
{
        char path[PATH_BYTES], *text;
        json_t *body = document_new("published");
        size_t size;
        enum nebula_status status;
        int result;

        if (!body || json_object_set_new(body, "tag", json_string(publish->tag)) ||
            json_object_set_new(body, "generation", json_integer((json_int_t)publish->generation)) ||
            json_object_set_new(body, "job", json_string(job->name)) ||
            json_object_set_new(body, "persist_path", json_string(job->persist_path))) {
                json_decref(body);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe %.200s", directory);
        }
        status = document_format(body, &text, &size, error);
        json_decref(body);
        if (status)
                return status;
        snprintf(path, sizeof path, "%.4400s" LABEL, directory);
        result = os_write_file_atomic(path, text, size);
        free(text);
        return result < 0 ? fail(error, "write", path, result) : NEBULA_OK;
}

struct walk {
        int (*file)(const char *from, const char *to);
        int (*directory)(const char *from, const char *to);
};

/* Files first, then the directory that held them. `to`: the same place below another root, or "". */
static int walk(const char *from, const char *to, const struct walk *with, int depth)
{
        char name[300], inner[PATH_BYTES], target[PATH_BYTES];
        struct os_stat stat;
        struct os_dir *dir;
        int result, got;

        if (depth > 32)
                return -ELOOP;
        result = os->opendir(from, &dir);
        if (result < 0)
                return result;
        while (!result && (got = os->readdir(dir, name, sizeof name)) != 0) {
                if (got < 0) {
                        result = got;
                        break;
                }
                if ((size_t)snprintf(inner, sizeof inner, "%.4300s/%s", from, name) >= sizeof inner ||
                    (size_t)snprintf(target, sizeof target, "%.4300s/%s", to, name) >= sizeof target) {
                        result = -ENAMETOOLONG;
                        break;
                }
                result = os->stat(inner, false, &stat);
                if (result == -ENOENT)
                        result = 0;
                else if (!result && stat.kind == OS_KIND_DIRECTORY)
                        result = walk(inner, target, with, depth + 1);
                else if (!result)
                        result = with->file(inner, stat.kind == OS_KIND_FILE ? target : "");
        }
        os->closedir(dir);
        return result ? result : with->directory(from, to);
}

static int sync_file(const char *path, const char *regular)
{
        int fd, result;

        if (!*regular)
                return 0; /* a link: its directory's entry is all there is */
        fd = os->open(path, OS_READ | OS_NOFOLLOW);
        if (fd < 0)
                return fd;
        result = os_sync(fd);
        os->close(fd);
        return result;
}

static int sync_directory(const char *path, const char *unused)
{
        (void)unused;
        return os_sync_dir(path);
}

static int move_file(const char *from, const char *to)
{
        char parent[PATH_BYTES];
        int result;

        if (!*to)
                return os->unlink(from);
        parent_of(to, parent);
        result = os_make_dirs(parent, DIRECTORY_MODE);
        if (!result)
                result = os->rename(from, to);
        if (!result) {
                os->unlink(from); /* when both were names of one file */
                result = os_sync_dir(parent);
        }
        return result;
}

static int remove_directory(const char *from, const char *to)
{
        (void)to;
        return os->rmdir(from);
}

static const struct walk syncing = { sync_file, sync_directory }, moving = { move_file, remove_directory };

/* Staging becomes the path. Where something is already, its files join that, one by one. */
static int move_directory(const struct publish *publish)
{
        char parent[PATH_BYTES], old[PATH_BYTES];
        int result;

        parent_of(publish->path, parent);
        result = os_make_dirs(parent, DIRECTORY_MODE);
        own_name(publish->path, publish, "old", old);
        if (!result && publish->replaces) {
                result = os->rename(publish->path, old);
                result = result == -ENOENT ? 0 : result;
        }
        if (!result)
                result = os->rename(publish->staging, publish->path);
        if (result == -ENOTEMPTY || result == -EEXIST)
                result = walk(publish->staging, publish->path, &moving, 0);
        if (!result)
                result = os_sync_dir(parent);
        if (!result)
                sync_parent(publish->staging);
        if (!result && publish->replaces)
                result = os_remove_tree(old);
        return result;
}

enum nebula_status publish_put_directory(struct catalogue *catalogue, struct job *job, const struct publish *publish,
                                         struct nebula_error *error)
{
        struct names names = { 0 };
        char to[PATH_BYTES];
        enum nebula_status status = list_files(catalogue, job, publish, &names, error);
        int result = 0;

        if (status)
                return status;
        result = os_make_dirs(publish->staging, DIRECTORY_MODE);
        if (result < 0)
                status = fail(error, "make", publish->staging, result);
        for (size_t i = 0; !status && i < names.count; i++) {
                if (!stays_below(names.names[i])) {
                        status = error_set(error, NEBULA_INVALID, 0, "the file name \"%.200s\" leads out of its directory",
                                           names.names[i]);
                        break;
                }
                snprintf(to, sizeof to, "%.4200s/%s", publish->staging, names.names[i]);
                status = put(catalogue, job, publish, names.names[i], to, error);
        }
        free(names.names);
        if (!status)
                status = write_label(job, publish, publish->staging, error);
        if (status)
                return status;
        result = walk(publish->staging, "", &syncing, 0);
        if (!result)
                result = move_directory(publish);
        return result < 0 ? fail(error, "make a directory of", publish->path, result) : NEBULA_OK;
}

static void read_label(const struct job *job, const char *directory, char ret_tag[IPC_NAME_MAX], uint64_t *ret_generation)
{
        struct nebula_error error;
        struct document_reader reader = { .kind = "published", .error = &error };
        char path[PATH_BYTES], persist_path[IPC_PATH_MAX], name[IPC_NAME_MAX], tag[IPC_NAME_MAX], *text;
        uint64_t generation;
        size_t size;
        json_t *body;

        snprintf(path, sizeof path, "%.4400s" LABEL, directory);
        if (os_read_file(path, LABEL_BYTES_MAX, &text, &size) < 0)
                return;
        if (!document_parse(text, size, "published", &body, &error)) {
                document_text(&reader, body, "tag", 0, tag, sizeof tag);
                document_text(&reader, body, "job", 1, name, sizeof name);
                document_text(&reader, body, "persist_path", 1, persist_path, sizeof persist_path);
                generation = document_u64(&reader, body, "generation", INT64_MAX);
                if (!reader.status && !strcmp(name, job->name) && !strcmp(persist_path, job->persist_path)) {
                        strcpy(ret_tag, tag);
                        *ret_generation = generation;
                }
                json_decref(body);
        }
        free(text);
}

enum nebula_status publish_take_away(struct job *job, const struct publish *publish, char ret_tag[IPC_NAME_MAX],
                                     uint64_t *ret_generation, struct nebula_error *error)
{
        char old[PATH_BYTES];
        struct os_stat stat;
        int result = os->stat(publish->path, false, &stat);

        own_name(publish->path, publish, "old", old);
        if (!result && stat.kind == OS_KIND_DIRECTORY) {
                read_label(job, publish->path, ret_tag, ret_generation);
                result = os->rename(publish->path, old); /* so that nobody sees half of it */
                if (!result)
                        result = sync_parent(publish->path);
                if (!result)
                        result = os_remove_tree(old);
        } else if (!result) {
                result = os->unlink(publish->path);
                if (!result)
                        result = sync_parent(publish->path);
        } else if (result == -ENOENT) {
                if (!os->stat(old, false, &stat))
                        read_label(job, old, ret_tag, ret_generation); /* the rest of a removal that was interrupted */
                result = os_remove_tree(old);
        }
        return result < 0 && result != -ENOENT ? fail(error, "remove", publish->path, result) : NEBULA_OK;
}
