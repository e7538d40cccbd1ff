/* Uploads large objects: makes a temporary file for each, writes its bytes, and syncs it. No key changes, so an interruption leaves only
 * temporary files. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/conf.h"
#include "base/error.h"
#include "base/log.h"
#include "os/bulk.h"
#include "store/store_file_private.h"

#define SLOW_MOST_MS ((int64_t)86400000)
#define TOGETHER_MAX 16 /* objects at the same time: that many open files */

struct file_writing {
        struct store *store;
        const struct store_object *object;
        int fd;               /* of `temp`; -1: closed */
        int source;           /* of the object's source, checked; -1: all bytes are written */
        bool is_direct, is_made; /* is_made: `temp` exists */
        uint64_t referred; /* bytes of the source */
        struct os_stat made;
        char temp[FILE_TEMP_MAX]; /* its key */
};

/* Reserves the space first: a full disk fails before gigabytes are written, and the blocks are contiguous. */
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
        if (writing->is_made)
                os->unlink_below(writing->store->root, writing->temp);
        writing->fd = -1;
        writing->is_made = false;
}

static void close_source(struct file_writing *writing)
{
        if (writing->source >= 0)
                os->close(writing->source);
        writing->source = -1;
}

static int make_temp(struct file_writing *writing)
{
        int fd = file_temp_open(writing->store, writing->object->key, writing->is_direct ? OS_DIRECT : 0, writing->temp);

        if (fd < 0)
                return fd;
        writing->fd = fd;
        writing->is_made = true;
        return 0;
}

static int fill_temp(struct file_writing *writing)
{
        const struct store_object *object = writing->object;
        int result = make_temp(writing);

        if (result)
                return result;
        writing->referred = 0;
        if (writing->source >= 0) /* most of the bytes may need no space */
                return file_refer(writing->store, object, writing->source, writing->temp, writing->fd, writing->is_direct, &writing->referred);
        if (object->size < FILE_BULK_MIN)
                return object->feed && !bulk_feed_wait(object->feed) ? -ECANCELED
                                                                     : os_write_at(writing->fd, object->data, object->size, 0);
        result = reserve(writing->fd, object->size);
        return result ? result : bulk_write(writing->fd, writing->is_direct, object->data, object->size, object->feed);
}

static int fill(struct file_writing *writing)
{
        const struct store_object *object = writing->object;
        int result;

        writing->is_direct = object->size >= FILE_BULK_MIN && !((uintptr_t)object->data % BULK_PAGE_BYTES);
        writing->source = file_open_source(writing->store, object);
        result = fill_temp(writing);
        if (result == -EINVAL && writing->is_direct) { /* the file system has no O_DIRECT */
                drop_temp(writing);
                writing->is_direct = false;
                result = fill_temp(writing);
        }
        close_source(writing);
        return result;
}

static int sync_temp(struct file_writing *writing)
{
        int fd = writing->fd;

        writing->fd = -1;
        return file_temp_close(writing->store, fd, &writing->made);
}

/* Moves the durable temporary file to `upload`. */
static int hand_over(struct file_writing *writing, struct store_upload *upload)
{
        struct file_placing *file = &upload->files[upload->count];

        *file = (struct file_placing){ strdup(writing->temp), strdup(writing->object->key), writing->made };
        if (!file->temp || !file->key) {
                free(file->temp);
                free(file->key);
                return -ENOMEM;
        }
        upload->count++;
        writing->is_made = false;
        if (writing->object->ret_written) {
                struct store_written *written = writing->object->ret_written;

                *written = (struct store_written){ .referred = writing->referred };
                snprintf(written->mark.text, sizeof written->mark.text, "%s", file_stamp(&writing->made).text);
        }
        return 0;
}

/* *ret_at: the index that a failure concerns. */
static int upload_all(struct file_writing *writings, size_t count, struct store_upload *upload, size_t *ret_at)
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
                result = hand_over(&writings[i], upload);
        return result;
}

enum nebula_status file_write_error(const struct store *store, const char *key, uint64_t size, int result, struct nebula_error *error)
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

/* NEBULA_STORE_MBPS simulates a slow disk: for tests, and for users who measure its effect on training. */
static void be_slow(const struct file_writing *writings, size_t count, int64_t begun_ns)
{
        const char *text = conf_env("NEBULA_STORE_MBPS");
        struct nebula_error error;
        double rate = 0, takes_ms; /* rate: 10^6 bytes per second */
        uint64_t size = 0;
        int64_t left_ms;

        if (text && conf_parse_number("NEBULA_STORE_MBPS", text, &rate, &error))
                log_event(LOG_LEVEL_WARN, "%s: the agent does not slow storage down", error.message);
        if (!(rate > 0))
                return;
        for (size_t i = 0; i < count; i++)
                size += writings[i].object->size - writings[i].referred;
        takes_ms = (double)size / rate / 1e3;
        left_ms = (takes_ms < SLOW_MOST_MS ? (int64_t)takes_ms : SLOW_MOST_MS) - (os->now_ns() - begun_ns) / 1000000;
        if (left_ms > 0)
                os->sleep_ms(left_ms);
}

/* Describes a failure; the obstacle may be on the path of the temporary file. */
static enum nebula_status upload_error(struct file_writing *writing, int result, struct nebula_error *error)
{
        const struct store *store = writing->store;
        char text[400], path[STORE_PATH_MAX], temp[STORE_PATH_MAX], temp_parent[STORE_KEY_MAX];

        file_temp_parent(writing->object->key, temp_parent);
        snprintf(path, sizeof path, "%s/%s", store->root, writing->object->key);
        snprintf(temp, sizeof temp, "%s/%s/tmp", store->root, temp_parent);
        if (error && !file_obstacle(path, result, text, sizeof text) && file_obstacle(temp, result, text, sizeof text))
                return error_set(error, error_status_of_errno(-result), -result, "can't write %.200s: %s", path, text);
        return file_write_error(store, writing->object->key, writing->object->size, result, error);
}

static enum nebula_status upload_together(struct store *store, const struct store_object *objects, size_t count,
                                          struct file_writing *writings, struct store_upload *upload, struct nebula_error *error)
{
        size_t at = 0;
        int result;

        for (size_t i = 0; i < count; i++) {
                char path[STORE_PATH_MAX];
                enum nebula_status status;

                writings[i] = (struct file_writing){ .store = store, .object = &objects[i], .fd = -1, .source = -1 };
                if (!*objects[i].key)
                        return error_set(error, NEBULA_INVALID, 0, "an object of %s needs a key", store->root);
                status = file_path(store, objects[i].key, path, error);
                if (status)
                        return status;
        }
        result = upload_all(writings, count, upload, &at);
        if (!result)
                return NEBULA_OK;
        for (size_t i = 0; i < count; i++)
                drop_temp(&writings[i]);
        file_dirs_forget(((struct file_store *)store)->dirs);
        return upload_error(&writings[at], result, error);
}

enum nebula_status file_upload(struct store *store, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                               struct nebula_error *error)
{
        size_t together = count < TOGETHER_MAX ? count : TOGETHER_MAX;
        struct store_upload *upload = calloc(1, sizeof *upload + count * sizeof *upload->files);
        struct file_writing *writings = calloc(together + 1, sizeof *writings);
        enum nebula_status status = NEBULA_OK;

        if (!upload || !writings)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to write to %.400s", store->root);
        for (size_t first = 0; !status && first < count; first += together) {
                size_t some = count - first < together ? count - first : together;
                int64_t begun_ns = os->now_ns();

                status = upload_together(store, objects + first, some, writings, upload, error);
                be_slow(writings, some, begun_ns);
        }
        free(writings);
        if (!status) {
                *ret_upload = upload;
                return NEBULA_OK;
        }
        file_end_upload(store, upload);
        for (size_t i = 0; i < count && store_key_sound(objects[i].key); i++)
                if (!i || !file_same_parent(objects[i - 1].key, objects[i].key))
                        file_remove_empty(store, objects[i].key);
        return status;
}

void file_end_upload(struct store *store, struct store_upload *upload)
{
        for (size_t i = 0; upload && i < upload->count; i++) {
                if (upload->files[i].temp)
                        os->unlink_below(store->root, upload->files[i].temp);
                free(upload->files[i].temp);
                free(upload->files[i].key);
        }
        free(upload);
}

void file_abort(struct store *store, struct store_upload *upload)
{
        for (size_t i = 0; upload && i < upload->count; i++) {
                os->unlink_below(store->root, upload->files[i].temp);
                free(upload->files[i].temp);
                upload->files[i].temp = NULL;
        }
        for (size_t i = 0; upload && i < upload->count; i++)
                if (!i || !file_same_parent(upload->files[i - 1].key, upload->files[i].key))
                        file_remove_empty(store, upload->files[i].key);
        file_end_upload(store, upload);
}
