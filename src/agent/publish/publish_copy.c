/*
 * Makes a file of a version outside storage. It shares blocks with the stored file if the file system can do that;
 * otherwise it is a verified copy, taken from memory if possible. It is a hard link of the stored file only if the user
 * asked for that: a program that later writes to the published file in place, as torch.save does, must not change the
 * durable one.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/persist/storage.h"
#include "agent/publish/publish_private.h"
#include "agent/restore/restore.h"
#include "base/error.h"
#include "os/bulk.h"
#include "os/os.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_read.h"
#include "store/record.h"
#include "store/signature.h"
#include "sum/sum.h"

#define DIRECT_MIN (1u << 20)     /* for smaller files O_DIRECT costs more than it saves */
#define DIRTY_MAX (256u << 20)    /* page cache that a copy may use */

uint64_t publish_window_bytes = 64u << 20; /* of a copy from an object store: its requests run side by side */

/* The version's file in storage. */
struct stored {
        struct store *store; /* NULL: storage does not have this file */
        bool has_path;       /* it is a file of this machine */
        struct manifest manifest;
        char key[MANIFEST_KEY_MAX], path[PUBLISH_PATH_MAX];
};

static void find_stored(struct catalogue *catalogue, struct job *job, const struct publish *publish, const char *name,
                        struct stored *ret_stored)
{
        const struct manifest_file *file;
        const struct version *version;
        struct nebula_error error;
        struct store *store;
        bool is_damaged;

        catalogue_lock(catalogue);
        version = catalogue_version(catalogue, publish->version_id);
        is_damaged = version && version->copy != COPY_TRUSTED;
        catalogue_unlock(catalogue);
        if (is_damaged || storage_open(catalogue, job, &store, &error) || manifest_load(store, publish->tag, &ret_stored->manifest, &error))
                return;
        file = manifest_find_file(&ret_stored->manifest, name);
        /* A later writing of the tag may have replaced the file or carried it over. An earlier one is there if the version was lost. */
        if (!file || strcmp(ret_stored->manifest.job, job->name) || ret_stored->manifest.sequence < publish->sequence ||
            manifest_file_sequence(&ret_stored->manifest, file) > publish->sequence ||
            manifest_file_key(&ret_stored->manifest, file, ret_stored->key, &error))
                return;
        snprintf(ret_stored->path, sizeof ret_stored->path, "%.4000s/%.600s", store->root, ret_stored->key);
        ret_stored->store = store;
        ret_stored->has_path = store->ops->features(store) & STORE_PATHS;
}

static int open_new(const char *path, bool is_direct)
{
        return os->open(path, OS_WRITE | OS_CREATE | OS_TRUNCATE | OS_NOFOLLOW | OS_SHARED | (is_direct ? OS_DIRECT : 0));
}

/* If `result` is 0, syncs and closes the file; otherwise closes and removes it. */
static int end_new(int fd, const char *path, int result)
{
        int closed;

        if (!result)
                result = os_sync(fd);
        closed = os->close(fd);
        if (!result && closed < 0)
                result = -EIO;
        if (result)
                os->unlink(path);
        return result;
}

static int share_blocks(const struct stored *stored, const char *own)
{
        int source = os->open_below(stored->store->root, stored->key, OS_READ), fd, result;

        if (source < 0)
                return source;
        fd = open_new(own, false);
        result = fd < 0 ? fd : end_new(fd, own, os->clone(fd, source));
        os->close(source);
        return result;
}

/* Writes memory to a new file, past the page cache if possible. */
static int write_new(const char *own, const void *data, uint64_t size, bool is_direct)
{
        int fd = open_new(own, is_direct), result;

        if (fd < 0)
                return fd;
        if (size < DIRECT_MIN)
                return end_new(fd, own, os_write_at(fd, data, size, 0));
        result = os->allocate(fd, 0, size); /* a full disk is found before gigabytes are written */
        result = result == -ENOSPC || result == -EDQUOT || result == -EFBIG ? result : bulk_write(fd, is_direct, data, size, NULL);
        return end_new(fd, own, result);
}

/* Copies the file from memory, reading it back from storage first if needed; the bytes are verified. */
static enum nebula_status copy_opened(struct catalogue *catalogue, const struct publish *publish, const char *name, const char *own,
                                      struct nebula_error *error)
{
        struct ipc_open request = { .version_id = publish->version_id };
        struct ipc_opened *opened = NULL;
        void *data = NULL;
        int source = -1, result = 0;
        enum nebula_status status;

        strcpy(request.name, name);
        status = restore_open(catalogue, NULL, &request, &opened, &source, error);
        if (status)
                return status;
        if (opened->size)
                result = os->map(source, 0, opened->size, OS_MAP_READ, &data);
        if (!result) {
                result = write_new(own, data, opened->size, opened->size >= DIRECT_MIN);
                if (result == -EINVAL) /* the file system has no O_DIRECT */
                        result = write_new(own, data, opened->size, false);
        }
        if (data)
                os->unmap(data, opened->size);
        os->close(source);
        free(opened);
        return result < 0 ? publish_fail(error, "write", own, result) : NEBULA_OK;
}

static enum nebula_status copy_chunks(int source, int fd, const struct stored *stored, const struct record_file *file, const char *own,
                                      struct nebula_error *error)
{
        char *chunk = malloc(file->chunk_bytes);
        uint64_t dirty = 0;
        int result = chunk ? 0 : -ENOMEM;
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < file->chunk_count && !result && !status; i++) {
                uint64_t offset = (uint64_t)i * file->chunk_bytes;
                size_t size = file->size - offset < file->chunk_bytes ? (size_t)(file->size - offset) : file->chunk_bytes;

                result = os_read_at(source, chunk, size, offset);
                if (result)
                        status = publish_fail(error, "read", stored->path, result);
                else if (sum_crc64(0, chunk, size) != file->chunks[i])
                        status = error_set(error, NEBULA_CORRUPT, 0, "%.300s is damaged at offset %" PRIu64, stored->path, offset);
                else
                        result = os_write_at(fd, chunk, size, offset);
                dirty += size;
                if (!result && !status && dirty >= DIRTY_MAX) {
                        result = os_sync(fd);
                        dirty = 0;
                }
        }
        free(chunk);
        return status || !result ? status : publish_fail(error, "write", own, result);
}

static enum nebula_status copy_from_path(int fd, const struct stored *stored, const struct record_file *file, const char *own,
                                         struct nebula_error *error)
{
        int source = os->open_below(stored->store->root, stored->key, OS_READ);
        enum nebula_status status;

        if (source < 0)
                return publish_fail(error, "read", stored->path, source);
        status = copy_chunks(source, fd, stored, file, own, error);
        os->close(source);
        return status;
}

/* Reads whole chunks of the object, whose sums are compared. The store takes the address of the object's first byte. */
static enum nebula_status read_window(const struct stored *stored, const struct record_file *file, char *window, struct store_range range,
                                      struct nebula_error *error)
{
        if (range.size == file->size)
                return manifest_read_file(stored->store, &stored->manifest, file, window, error);
        return manifest_read_chunks(stored->store, stored->key, file, (void *)((uintptr_t)window - range.offset), &range, 1, error);
}

/* From an object store. */
static enum nebula_status copy_from_store(int fd, const struct stored *stored, const struct record_file *file, const char *own,
                                          struct nebula_error *error)
{
        uint64_t chunk = file->chunk_bytes ? file->chunk_bytes : 1; /* 0: of an empty file */
        uint64_t step = chunk < publish_window_bytes ? publish_window_bytes / chunk * chunk : chunk;
        char *window = malloc(file->size < step ? file->size + 1 : step);
        enum nebula_status status = window ? NEBULA_OK : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to read %.300s", stored->path);

        for (struct store_range range = { 0 }; !status && range.offset < file->size; range.offset += range.size) {
                int result = 0;

                range.size = file->size - range.offset < step ? file->size - range.offset : step;
                status = read_window(stored, file, window, range, error);
                if (!status)
                        result = os_write_at(fd, window, range.size, range.offset);
                if (!status && !result && file->size > step)
                        result = os_sync(fd);
                if (result)
                        status = publish_fail(error, "write", own, result);
        }
        free(window);
        return status;
}

/* Copies from storage piece by piece, so that a large file need not fit into the memory tier. */
static enum nebula_status copy_stored(const struct stored *stored, const char *name, const char *own, struct nebula_error *error)
{
        struct record_file file = { 0 };
        int fd, result;
        enum nebula_status status = manifest_load_file(stored->store, &stored->manifest, name, &file, error);

        if (status)
                return status;
        fd = open_new(own, false);
        if (fd < 0) {
                status = publish_fail(error, "write", own, fd);
        } else {
                status = (stored->has_path ? copy_from_path : copy_from_store)(fd, stored, &file, own, error);
                result = end_new(fd, own, status ? -ECANCELED : 0);
                if (!status && result)
                        status = publish_fail(error, "write", own, result);
        }
        record_file_done(&file);
        return status;
}

static bool in_memory(struct catalogue *catalogue, const struct publish *publish, const char *name)
{
        const struct agent_file *file;
        struct version *version;
        bool found;

        catalogue_lock(catalogue);
        version = catalogue_version(catalogue, publish->version_id);
        file = version ? version_file(version, name) : NULL;
        found = file && file->image;
        catalogue_unlock(catalogue);
        return found;
}

enum nebula_status publish_make_file(struct catalogue *catalogue, struct job *job, const struct publish *publish, const char *name,
                                     const char *own, struct nebula_error *error)
{
        struct stored stored = { 0 };
        bool is_checked;
        enum nebula_status status = NEBULA_NOT_FOUND;

        find_stored(catalogue, job, publish, name, &stored);
        is_checked = stored.store && signature_counts(stored.store); /* then restore_open compares it */
        if (stored.has_path && !is_checked && !share_blocks(&stored, own))
                status = NEBULA_OK;
        if (status && stored.store && !is_checked && !in_memory(catalogue, publish, name))
                status = copy_stored(&stored, name, own, error);
        if (status && status != NEBULA_NO_SPACE) /* it may have moved meanwhile, or lie elsewhere */
                status = copy_opened(catalogue, publish, name, own, error);
        manifest_done(&stored.manifest);
        return status;
}
