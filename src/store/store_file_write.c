/*
 * Writing objects: a temporary file beside its tag for each, the bytes, fsync
 * of each: then they are staged. A rename of each and fsync of each directory
 * places them. Where it stops, temporary files are removed and older objects of
 * those keys are untouched, or replaced as a whole.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "base/log.h"
#include "os/bulk.h"
#include "os/os.h"
#include "store/store_private.h"

#define TEMP_DIRECTORY ".nebula" /* as in STORE_TEMP_BELOW */
#define TEMP_TRIES 100
#define SLOW_MOST_MS ((int64_t)86400000)
#define TOGETHER_MAX 16 /* objects under way: as many open files */

struct staged_file {
        char *temp, *key; /* temp NULL: it has its name */
        uint64_t size;
};
struct store_staged {
        size_t count;
        struct staged_file files[];
};

struct file_writing {
        struct store *store;
        const struct store_object *object;
        int fd;               /* of `temp`; -1: closed */
        bool is_direct, made; /* made: `temp` is there */
        char parent[STORE_KEY_MAX], temp_parent[STORE_KEY_MAX];
        char temp[STORE_KEY_MAX + 32]; /* its key */
};

/* <tag>/.nebula for what is below a tag, the root for what isn't: in both places a sweep knows it as ours. */
static void choose_temp_parent(struct file_writing *writing, const char *key)
{
        size_t tag_length = strcspn(key, "/");

        if (!key[tag_length])
                writing->temp_parent[0] = 0;
        else
                snprintf(writing->temp_parent, STORE_KEY_MAX, "%.*s/" TEMP_DIRECTORY, (int)tag_length, key);
}

static int open_temp(struct file_writing *writing, int flags)
{
        struct file_store *file = (struct file_store *)writing->store;
        bool is_top = !*writing->temp_parent;

        for (int i = 0; i < TEMP_TRIES; i++) {
                int fd;

                snprintf(writing->temp, sizeof writing->temp, "%s%s%u-%u", writing->temp_parent, is_top ? STORE_TEMP_TOP : "/tmp-", os->pid(),
                         atomic_fetch_add(&file->temp_count, 1));
                do
                        fd = os->open_below(writing->store->root, writing->temp, flags | OS_WRITE | OS_CREATE | OS_EXCLUSIVE | OS_NOFOLLOW | OS_SHARED);
                while (fd == -EINTR);
                if (fd != -EEXIST)
                        return fd;
        }
        return -EEXIST;
}

/* Space is asked for first: a full disk is found out before gigabytes are written, and blocks lie together. */
static int reserve(int fd, uint64_t size)
{
        int result;

        do
                result = os->allocate(fd, 0, size);
        while (result == -EINTR);
        return result == -ENOSPC || result == -EDQUOT || result == -EFBIG ? result : 0;
}

static void drop_temp(struct file_writing *writing)
{
        if (writing->fd >= 0)
                os->close(writing->fd);
        if (writing->made)
                os->unlink_below(writing->store->root, writing->temp);
        writing->fd = -1;
        writing->made = false;
}

static int make_temp(struct file_writing *writing)
{
        struct file_store *file = (struct file_store *)writing->store;
        const char *root = writing->store->root;
        int result = -ENOENT;

        /* A directory that we know may have been removed since: then it is made again, once. */
        for (int i = 0; i < 2 && result == -ENOENT; i++) {
                if (i)
                        file_dirs_forget(file->dirs);
                result = file_dirs_ensure(file->dirs, root, writing->temp_parent);
                if (!result)
                        result = file_dirs_ensure(file->dirs, root, writing->parent);
                if (!result)
                        result = open_temp(writing, writing->is_direct ? OS_DIRECT : 0);
        }
        if (result < 0)
                return result;
        writing->fd = result;
        writing->made = true;
        return 0;
}

static int fill_temp(struct file_writing *writing)
{
        const struct store_object *object = writing->object;
        int result = make_temp(writing);

        if (result)
                return result;
        if (object->size < STORE_BULK_MIN)
                return object->feed && !bulk_feed_wait(object->feed) ? -ECANCELED
                                                                     : os_write_at(writing->fd, object->data, object->size, 0);
        result = reserve(writing->fd, object->size);
        return result ? result : bulk_write(writing->fd, writing->is_direct, object->data, object->size, object->feed);
}

static int fill(struct file_writing *writing)
{
        const struct store_object *object = writing->object;
        int result;

        writing->is_direct = object->size >= STORE_BULK_MIN && !((uintptr_t)object->data % BULK_PAGE_BYTES);
        result = fill_temp(writing);
        if (result == -EINVAL && writing->is_direct) { /* a file system without O_DIRECT */
                drop_temp(writing);
                writing->is_direct = false;
                result = fill_temp(writing);
        }
        return result;
}

static int sync_temp(struct file_writing *writing)
{
        struct os_stat made;
        int result = os_sync(writing->fd), closed;

        if (!result && !os->fstat(writing->fd, &made))
                atomic_store(&((struct file_store *)writing->store)->given_uid, made.uid + UINT64_C(1));
        closed = os->close(writing->fd);
        writing->fd = -1;
        return result ? result : closed;
}

/* Its bytes are durable; `staged` has it from now on. */
static int hand_over(struct file_writing *writing, struct store_staged *staged)
{
        struct staged_file *file = &staged->files[staged->count];

        *file = (struct staged_file){ strdup(writing->temp), strdup(writing->object->key), writing->object->size };
        if (!file->temp || !file->key) {
                free(file->temp);
                free(file->key);
                return -ENOMEM;
        }
        staged->count++;
        writing->made = false;
        return 0;
}

/* *ret_at: which one a failure is about. */
static int stage_all(struct file_writing *writings, size_t count, struct store_staged *staged, size_t *ret_at)
{
        int (*const steps[])(struct file_writing *writing) = { fill, sync_temp };
        int result = 0;

        for (size_t step = 0; step < sizeof steps / sizeof steps[0]; step++)
                for (size_t i = 0; i < count; i++) {
                        *ret_at = i;
                        result = steps[step](&writings[i]);
                        if (result)
                                return result;
                }
        for (size_t i = 0; i < count && !result; i++)
                result = hand_over(&writings[i], staged);
        return result;
}

static enum nebula_status write_error(const struct store *store, const char *key, uint64_t size, int result, struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        struct os_space space;
        enum nebula_status status = file_path(store, key, path, error);

        if (status)
                return status;
        if (error_status_of_errno(-result) == NEBULA_NO_SPACE && !os->space(store->root, &space))
                return error_set(error, NEBULA_NO_SPACE, -result, "can't write %s: needs %" PRIu64 " bytes, %" PRIu64 " are free%s",
                                 path, size, space.free_bytes, space.free_bytes > size ? "; inodes or a quota may have run out" : "");
        return file_error(store, "write", path, result, error);
}

/* NEBULA_STORE_MBPS: a slow disk for tests, and for whoever wants to see what one would do to training. */
static void be_slow(const struct store_object *objects, size_t count, int64_t begun_ns)
{
        const char *text = conf_env("NEBULA_STORE_MBPS");
        struct nebula_error error;
        double rate = 0, takes_ms; /* rate: 10^6 bytes per second */
        uint64_t size = 0;
        int64_t left_ms;

        if (text && conf_parse_number("NEBULA_STORE_MBPS", text, &rate, &error))
                log_event(LOG_LEVEL_WARN, "%s: storage is as fast as it is", error.message);
        if (!(rate > 0))
                return;
        for (size_t i = 0; i < count; i++)
                size += objects[i].size;
        takes_ms = (double)size / rate / 1e3;
        left_ms = (takes_ms < SLOW_MOST_MS ? (int64_t)takes_ms : SLOW_MOST_MS) - (os->now_ns() - begun_ns) / 1000000;
        if (left_ms > 0)
                os->sleep_ms(left_ms);
}

/* What is in the way may be where its temporary file goes. */
static enum nebula_status stage_error(struct file_writing *writing, int result, struct nebula_error *error)
{
        const struct store *store = writing->store;
        char text[400], path[STORE_PATH_MAX], temp[STORE_PATH_MAX];

        snprintf(path, sizeof path, "%s/%s", store->root, writing->object->key);
        snprintf(temp, sizeof temp, "%s/%s/tmp", store->root, writing->temp_parent);
        if (error && !file_obstacle(path, result, text, sizeof text) &&
            file_obstacle(temp, result, text, sizeof text))
                return error_set(error, error_status_of_errno(-result), -result, "can't write %.200s: %s", path, text);
        return write_error(store, writing->object->key, writing->object->size, result, error);
}

static enum nebula_status stage_together(struct store *store, const struct store_object *objects, size_t count,
                                         struct file_writing *writings, struct store_staged *staged, struct nebula_error *error)
{
        struct file_store *file = (struct file_store *)store;
        size_t at = 0;
        int result;

        for (size_t i = 0; i < count; i++) {
                struct file_writing *writing = &writings[i];
                char path[STORE_PATH_MAX];
                enum nebula_status status;

                *writing = (struct file_writing){ .store = store, .object = &objects[i], .fd = -1 };
                if (!*objects[i].key)
                        return error_set(error, NEBULA_INVALID, 0, "an object of %s needs a key", store->root);
                status = file_path(store, objects[i].key, path, error);
                if (status)
                        return status;
                file_parent(objects[i].key, writing->parent);
                choose_temp_parent(writing, objects[i].key);
        }
        result = stage_all(writings, count, staged, &at);
        if (!result)
                return NEBULA_OK;
        for (size_t i = 0; i < count; i++)
                drop_temp(&writings[i]);
        file_dirs_forget(file->dirs);
        return stage_error(&writings[at], result, error);
}

enum nebula_status file_old_stage(struct store *store, const struct store_object *objects, size_t count,
                              struct store_staged **ret_staged, struct nebula_error *error)
{
        size_t together = count < TOGETHER_MAX ? count : TOGETHER_MAX;
        struct store_staged *staged = calloc(1, sizeof *staged + count * sizeof *staged->files);
        struct file_writing *writings = calloc(together + 1, sizeof *writings);
        enum nebula_status status = NEBULA_OK;

        if (!staged || !writings)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to write to %.400s", store->root);
        for (size_t first = 0; !status && first < count; first += together) {
                size_t some = count - first < together ? count - first : together;
                int64_t begun_ns = os->now_ns();

                status = stage_together(store, objects + first, some, writings, staged, error);
                be_slow(objects + first, some, begun_ns);
        }
        free(writings);
        if (status)
                file_old_unstage(store, staged);
        else
                *ret_staged = staged;
        return status;
}

void file_old_unstage(struct store *store, struct store_staged *staged)
{
        for (size_t i = 0; staged && i < staged->count; i++) {
                if (staged->files[i].temp)
                        os->unlink_below(store->root, staged->files[i].temp);
                free(staged->files[i].temp);
                free(staged->files[i].key);
        }
        free(staged);
}

/* Each directory once. */
static int sync_parents(const struct store *store, const struct store_staged *staged, size_t *ret_at)
{
        char parent[STORE_KEY_MAX], other[STORE_KEY_MAX];
        int result = 0;

        for (size_t i = 0; i < staged->count && !result; i++) {
                bool is_synced = false;

                file_parent(staged->files[i].key, parent);
                for (size_t j = 0; j < i && !is_synced; j++) {
                        file_parent(staged->files[j].key, other);
                        is_synced = !strcmp(parent, other);
                }
                *ret_at = i;
                if (!is_synced)
                        result = file_sync_directory(store, parent);
        }
        return result;
}

enum nebula_status file_old_place(struct store *store, struct store_staged *staged, struct nebula_error *error)
{
        struct file_store *file = (struct file_store *)store;
        enum nebula_status status = NEBULA_OK;
        size_t at = 0;
        int result = 0;

        for (size_t i = 0; i < staged->count && !result; i++) {
                struct staged_file *one = &staged->files[i];

                at = i;
                result = os->rename_below(store->root, one->temp, one->key);
                if (!result) {
                        free(one->temp);
                        one->temp = NULL;
                }
        }
        if (!result)
                result = sync_parents(store, staged, &at);
        if (result) {
                file_dirs_forget(file->dirs);
                status = write_error(store, staged->files[at].key, staged->files[at].size, result, error);
        }
        file_old_unstage(store, staged);
        return status;
}

enum nebula_status file_old_write(struct store *store, const char *key, const void *data, uint64_t size,
                              struct nebula_error *error)
{
        struct store_object object = { .key = key, .data = data, .size = size };
        struct store_staged *staged;
        enum nebula_status status = file_old_stage(store, &object, 1, &staged, error);

        return status ? status : file_old_place(store, staged, error);
}

/* 0 or a negative errno; -EEXIST: something is there. */
static int put_absent(const char *root, const struct staged_file *file)
{
        struct os_stat stat;
        int result = os->link_below(root, file->temp, root, file->key);

        /* A server that did it may be asked again, when its answer was lost. */
        if (result == -EEXIST && !os->stat_below(root, file->temp, &stat) && stat.link_count > 1)
                return 0;
        if (result != -EPERM && result != -EOPNOTSUPP && result != -ENOSYS)
                return result;
        result = os->stat_below(root, file->key, &stat); /* a file system without links */
        if (!result)
                return -EEXIST;
        return result == -ENOENT ? os->rename_below(root, file->temp, file->key) : result;
}

enum nebula_status file_old_create(struct store *store, const char *key, const void *data, uint64_t size,
                               struct nebula_error *error)
{
        struct store_object object = { .key = key, .data = data, .size = size };
        struct store_staged *staged;
        enum nebula_status status = file_old_stage(store, &object, 1, &staged, error);
        size_t at;
        int result;

        if (status)
                return status;
        result = put_absent(store->root, &staged->files[0]);
        if (!result)
                result = sync_parents(store, staged, &at);
        if (result == -EEXIST) {
                status = error_set(error, NEBULA_BUSY, EEXIST, "%s/%s is there already", store->root, key);
        } else if (result) {
                file_dirs_forget(((struct file_store *)store)->dirs);
                status = write_error(store, key, size, result, error);
        }
        file_old_unstage(store, staged);
        return status;
}
