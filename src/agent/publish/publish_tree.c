/* Published directories: their label, the one rename, the replaced directory, and leftovers of earlier agents. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/clients/location.h"
#include "agent/log.h"
#include "agent/publish/publish_private.h"
#include "base/error.h"
#include "os/os.h"
#include "store/document.h"
#include "sum/sum.h"

#define LABEL ".nebula.json" /* names the version of a published directory */
#define LABEL_BYTES_MAX 16384
#define DEPTH_MAX 32 /* depth of directories in a checkpoint */
#define OWN_PREFIX ".nebula-"
#define UNFINISHED "new" /* part of the name of an unfinished file */
#define SET_ASIDE "old"  /* part of the name of a directory that is to be removed */

enum nebula_status publish_fail(struct nebula_error *error, const char *doing, const char *path, int result)
{
        return error_set(error, error_status_of_errno(-result), -result, "cannot %s %.300s", doing, path);
}

void publish_parent_of(const char *path, char ret_parent[PUBLISH_PATH_MAX])
{
        const char *slash = strrchr(path, '/');
        size_t length = slash == path ? 1 : (size_t)(slash - path);

        memmove(ret_parent, path, length);
        ret_parent[length] = 0;
}

static void own_name(const char *path, const struct publish *publish, const char *what, char ret_own[PUBLISH_PATH_MAX])
{
        char parent[PUBLISH_PATH_MAX];

        publish_parent_of(path, parent);
        snprintf(ret_own, PUBLISH_PATH_MAX, "%.4400s/" OWN_PREFIX "%016" PRIx64 "-%s", strcmp(parent, "/") ? parent : "",
                 publish->id, what);
}

void publish_unfinished_name(const char *path, const struct publish *publish, char ret_name[PUBLISH_PATH_MAX])
{
        own_name(path, publish, UNFINISHED, ret_name);
}

/* The publish id in a name that own_name made. */
static bool is_own_name(const char *name, uint64_t *ret_id)
{
        const char *id = name + strlen(OWN_PREFIX);
        char *end;

        if (strncmp(name, OWN_PREFIX, strlen(OWN_PREFIX)) || strspn(id, "0123456789abcdef") != 16 ||
            (strcmp(id + 16, "-" UNFINISHED) && strcmp(id + 16, "-" SET_ASIDE)))
                return false;
        *ret_id = strtoull(id, &end, 16);
        return true;
}

/*
 * Frameworks make directories without syncing them. So this syncs upwards, as far as directories belong
 * to this user and this file system.
 */
int publish_sync_way(const char *path)
{
        char at[PUBLISH_PATH_MAX];
        struct os_stat stat, above;
        int result;

        publish_parent_of(path, at);
        result = os->stat(at, true, &stat);
        if (!result)
                result = os_sync_dir(at);
        while (!result && at[1] && stat.uid == os->uid()) {
                publish_parent_of(at, at);
                if (os->stat(at, true, &above) < 0 || above.device != stat.device)
                        break;
                stat = above;
                result = os_sync_dir(at);
                if (result == -EACCES || result == -EPERM || result == -EROFS)
                        return 0; /* not readable, so this user did not make it */
        }
        return result;
}

/* The content of the label file. */

struct label {
        char tag[IPC_NAME_MAX], job[IPC_NAME_MAX], persist_path[IPC_PATH_MAX];
        uint64_t sequence;
        uint64_t publish_id; /* 0: not given */
        uint64_t name_sum;   /* of the directory's name; 0: not given */
};

static uint64_t name_sum(const char *path)
{
        const char *name = strrchr(path, '/') + 1;

        return sum_crc64(0, name, strlen(name));
}

static enum nebula_status write_label(const struct job *job, const struct publish *publish, const char *directory,
                                      struct nebula_error *error)
{
        char path[PUBLISH_PATH_MAX], *text;
        json_t *body = document_new("published");
        size_t size;
        enum nebula_status status;
        int result;

        if (!body || json_object_set_new(body, "tag", json_string(publish->tag)) ||
            json_object_set_new(body, "sequence", json_integer((json_int_t)publish->sequence)) ||
            json_object_set_new(body, "job", json_string(job->name)) ||
            json_object_set_new(body, "persist_path", json_string(job->persist_path)) ||
            json_object_set_new(body, "publish", document_hex(publish->id)) || json_object_set_new(body, "name", document_hex(name_sum(publish->path)))) {
                json_decref(body);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to describe %.200s", directory);
        }
        status = document_format(body, &text, &size, error);
        json_decref(body);
        if (status)
                return status;
        snprintf(path, sizeof path, "%.4400s/" LABEL, directory);
        result = os_write_file_atomic(path, text, size);
        free(text);
        return result < 0 ? publish_fail(error, "write", path, result) : NEBULA_OK;
}

static bool read_label(const char *directory, struct label *ret_label)
{
        struct nebula_error error;
        struct document_reader reader = { .kind = "published", .error = &error };
        char path[PUBLISH_PATH_MAX], *text;
        struct label label = { 0 };
        size_t size;
        json_t *body;

        snprintf(path, sizeof path, "%.4400s/" LABEL, directory);
        if (os_read_file(path, LABEL_BYTES_MAX, &text, &size) < 0)
                return false;
        reader.status = document_parse(text, size, "published", &body, &error);
        free(text);
        if (reader.status)
                return false;
        document_text(&reader, body, "tag", 0, label.tag, sizeof label.tag);
        document_text(&reader, body, "job", 1, label.job, sizeof label.job);
        document_text(&reader, body, "persist_path", 1, label.persist_path, sizeof label.persist_path);
        label.sequence = document_sequence(&reader, body);
        if (json_object_get(body, "publish"))
                label.publish_id = document_crc64(&reader, json_object_get(body, "publish"), "publish");
        if (json_object_get(body, "name"))
                label.name_sum = document_crc64(&reader, json_object_get(body, "name"), "name");
        json_decref(body);
        if (!reader.status)
                *ret_label = label;
        return !reader.status;
}

bool publish_is_there(const struct publish *publish)
{
        struct label label;

        return read_label(publish->path, &label) && label.publish_id == publish->id;
}

/* Directory trees. */

struct walk {
        int (*file)(const char *from, const char *to, bool is_plain); /* not plain: a link, for example */
        int (*directory)(const char *from, const char *to);
};

/* Visits files first, then the directory that holds them. `to`: the same place below another root; "": none. */
static int walk(const char *from, const char *to, const struct walk *with, int depth)
{
        char name[300], inner[PUBLISH_PATH_MAX], target[PUBLISH_PATH_MAX];
        struct os_stat stat;
        struct os_dir *dir;
        int result, got;

        if (depth > DEPTH_MAX)
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
                        result = with->file(inner, target, stat.kind == OS_KIND_FILE);
        }
        os->closedir(dir);
        return result ? result : with->directory(from, to);
}

static int sync_file(const char *path, const char *unused, bool is_plain)
{
        uint64_t id;
        int fd, result;

        (void)unused;
        if (is_own_name(strrchr(path, '/') + 1, &id))
                return os->unlink(path); /* left by an interrupted earlier agent; it is no part of the checkpoint */
        if (!is_plain)
                return 0; /* a link has no data but its directory entry */
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

static int move_file(const char *from, const char *to, bool is_plain)
{
        char parent[PUBLISH_PATH_MAX];
        int result;

        (void)is_plain;
        publish_parent_of(to, parent);
        result = os_make_dirs(parent, PUBLISH_DIRECTORY_MODE);
        if (!result)
                result = os->rename(from, to);
        if (!result) {
                os->unlink(from); /* in case both were names of one file */
                result = os_sync_dir(parent);
        }
        return result;
}

static int move_directory(const char *from, const char *to)
{
        int result = os_make_dirs(to, PUBLISH_DIRECTORY_MODE); /* a directory without files */

        return result ? result : os->rmdir(from);
}

static const struct walk syncing = { sync_file, sync_directory }, moving = { move_file, move_directory };

/* Moves files one by one into a directory that exists already. The label comes last: it says that all are there. */
static enum nebula_status join(const struct job *job, const struct publish *publish, struct nebula_error *error)
{
        char label[PUBLISH_PATH_MAX];
        int result;

        snprintf(label, sizeof label, "%.4400s/" LABEL, publish->staging);
        result = os->unlink(label);
        if (!result || result == -ENOENT)
                result = walk(publish->staging, publish->path, &moving, 0);
        return result ? publish_fail(error, "add files to", publish->path, result) :
                        write_label(job, publish, publish->path, error);
}

/* Replaces the directory or the file at the path. It swaps names with staging, so that the path always exists. If the file
 * system cannot swap, the old one is moved aside first. */
static int replace(const struct publish *publish)
{
        char old[PUBLISH_PATH_MAX];
        int result = os->exchange(publish->staging, publish->path);

        if (result == -EINVAL || result == -ENOSYS || result == -EOPNOTSUPP) {
                own_name(publish->path, publish, SET_ASIDE, old);
                result = os->rename(publish->path, old);
                if (!result)
                        result = -ENOENT;
        }
        return result == -ENOENT ? os->rename(publish->staging, publish->path) : result;
}

enum nebula_status publish_move_directory(const struct job *job, const struct publish *publish, struct nebula_error *error)
{
        char parent[PUBLISH_PATH_MAX];
        enum nebula_status status = write_label(job, publish, publish->staging, error);
        int result;

        if (status)
                return status;
        result = walk(publish->staging, "", &syncing, 0);
        publish_parent_of(publish->path, parent);
        if (!result)
                result = os_make_dirs(parent, PUBLISH_DIRECTORY_MODE);
        if (!result)
                result = publish->replaces ? replace(publish) : os->rename(publish->staging, publish->path);
        if (result == -ENOTDIR) /* a file is there */
                result = replace(publish);
        if (result == -ENOTEMPTY || result == -EEXIST)
                return join(job, publish, error);
        return result ? publish_fail(error, "make a directory of", publish->path, result) : NEBULA_OK;
}

/* Whether what was at the path is at staging now. */
static bool has_swapped(const struct publish *publish)
{
        struct os_stat stat;

        return publish->replaces || (!os->stat(publish->staging, false, &stat) && stat.kind != OS_KIND_DIRECTORY);
}

enum nebula_status publish_finish_directory(const struct publish *publish, struct nebula_error *error)
{
        char old[PUBLISH_PATH_MAX];
        int result = publish_sync_way(publish->path);

        own_name(publish->path, publish, SET_ASIDE, old);
        if (!result)
                result = os_remove_tree(old);
        if (!result && has_swapped(publish)) {
                result = os->rename(publish->staging, old);
                result = result == -ENOENT ? 0 : result ? result : os_remove_tree(old);
        }
        return result ? publish_fail(error, "finish", publish->path, result) : NEBULA_OK;
}

/* `path`: of the directory, before it was moved aside. A copy with another name, whose label came with it, does not own the version. */
static void report_version(struct catalogue *catalogue, const struct job *job, const char *path, const char *directory, char ret_tag[IPC_NAME_MAX],
                           uint64_t *ret_sequence)
{
        struct label label;

        if (!read_label(directory, &label) || strcmp(label.job, job->name) || (label.name_sum && label.name_sum != name_sum(path)) ||
            !location_same(catalogue, label.persist_path, job->persist_path))
                return;
        strcpy(ret_tag, label.tag);
        *ret_sequence = label.sequence;
}

enum nebula_status publish_take_away(struct catalogue *catalogue, struct job *job, const struct publish *publish, char ret_tag[IPC_NAME_MAX],
                                     uint64_t *ret_sequence, struct nebula_error *error)
{
        char parent[PUBLISH_PATH_MAX], old[PUBLISH_PATH_MAX];
        struct os_stat stat;
        int result = 0;

        own_name(publish->path, publish, SET_ASIDE, old);
        if (!os->stat(old, false, &stat)) {
                report_version(catalogue, job, publish->path, old, ret_tag, ret_sequence); /* an earlier attempt got this far */
        } else {
                result = os->stat(publish->path, false, &stat);
                if (!result && stat.kind == OS_KIND_DIRECTORY) {
                        report_version(catalogue, job, publish->path, publish->path, ret_tag, ret_sequence);
                        result = os->rename(publish->path, old); /* so that no reader sees half of it */
                } else if (!result) {
                        result = os->unlink(publish->path);
                }
        }
        publish_parent_of(publish->path, parent);
        if (!result || result == -ENOENT)
                result = os_sync_dir(parent);
        if (!result)
                result = os_remove_tree(old);
        if (!result && publish->staging[0])
                result = os_remove_tree(publish->staging);
        return result && result != -ENOENT ? publish_fail(error, "remove", publish->path, result) : NEBULA_OK;
}

/* Leftovers. */

static bool is_pending(struct catalogue *catalogue, uint64_t id)
{
        bool found = false;

        catalogue_lock(catalogue);
        for (const struct job *job = catalogue->jobs; job; job = job->next)
                for (const struct publish *publish = job->publishes; publish; publish = publish->next)
                        found = found || (publish->id == id && publish->state == PUBLISH_PENDING);
        catalogue_unlock(catalogue);
        return found;
}

void publish_sweep(struct catalogue *catalogue, const char *path)
{
        int64_t before_ns = os->wall_ns() - (int64_t)catalogue->sweep_age_s * SECOND_NS;
        char name[300], parent[PUBLISH_PATH_MAX], full[PUBLISH_PATH_MAX];
        struct os_stat stat;
        struct os_dir *dir;
        uint64_t id;
        int result;

        publish_parent_of(path, parent);
        if (os->opendir(parent, &dir) < 0)
                return;
        while (os->readdir(dir, name, sizeof name) > 0) {
                if (!is_own_name(name, &id) || (size_t)snprintf(full, sizeof full, "%s/%s", parent, name) >= sizeof full ||
                    os->stat(full, false, &stat) < 0 || stat.uid != os->uid() || stat.mtime_ns > before_ns)
                        continue;
                /* A linked file may be about to get its name, and takes no space. */
                if ((stat.kind == OS_KIND_FILE && stat.link_count > 1) || is_pending(catalogue, id))
                        continue;
                result = os_remove_tree(full);
                if (result)
                        log_event(LOG_LEVEL_WARN, "%s could not be removed: %s", full, os_error_text(result));
                else
                        log_event(LOG_LEVEL_INFO, "removed %s, an unfinished leftover", full);
        }
        os->closedir(dir);
}
