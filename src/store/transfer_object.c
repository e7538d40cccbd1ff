/* Moves the bytes of one file: one thread reads and compares them, the caller's thread uploads them meanwhile. */
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/record.h"
#include "store/transfer_private.h"

#define PACE_BYTES (64u << 20)
#define SPILL_FALLBACK "/var/tmp"

struct moving {
        const struct transfer *transfer;
        const struct record_file *file;
        const struct transfer_pulse *pulse;
        const char *key; /* at the source */
        char *data;
        bool is_mapped;  /* `data` maps the source */
        int watch;       /* of that map; -1: none */
        struct bulk_feed feed;
        atomic_uint *missing; /* per piece of the feed: bytes not compared yet */
        atomic_bool stop;     /* the upload has failed */
        atomic_bool is_late;  /* the reader has stopped because of `stop` */
        enum nebula_status status;
        struct nebula_error error;
};

/* Tells the feed of a piece once all of its bytes are compared. `crc64`: of these bytes. */
static void report(struct moving *moving, uint64_t offset, uint64_t size, uint64_t crc64)
{
        if (moving->file->chunk_bytes == BULK_REQUEST_BYTES) {
                bulk_feed_report_summed(&moving->feed, offset, crc64, false);
                return;
        }
        while (size) {
                uint64_t piece = offset / BULK_REQUEST_BYTES, end = (piece + 1) * BULK_REQUEST_BYTES;
                uint64_t part = end - offset < size ? end - offset : size;

                if (atomic_fetch_sub(&moving->missing[piece], (unsigned)part) == part)
                        bulk_feed_report(&moving->feed, piece * BULK_REQUEST_BYTES);
                offset += part;
                size -= part;
        }
}

static enum nebula_status stop_late(struct moving *moving, struct nebula_error *error)
{
        atomic_store(&moving->is_late, true);
        return error_set(error, NEBULA_STORAGE, 0, "%s/%s is not read to its end", moving->transfer->from->root, moving->key);
}

static enum nebula_status check(void *argument, const void *data, uint64_t offset, uint64_t size, const uint64_t *crc64, struct nebula_error *error)
{
        struct moving *moving = argument;
        uint64_t wanted = moving->file->chunks[offset / moving->file->chunk_bytes], found = store_chunk_sum(data, size, crc64);

        if (atomic_load(&moving->stop))
                return stop_late(moving, error);
        if (found != wanted)
                return error_set(error, NEBULA_CORRUPT, 0,
                                 "%s/%s: damaged between byte %" PRIu64 " and %" PRIu64 ": the checksum is %016" PRIx64 ", it should be %016" PRIx64,
                                 moving->transfer->from->root, moving->key, offset, offset + size, found, wanted);
        report(moving, offset, size, found);
        if (moving->transfer->progress)
                moving->transfer->progress(moving->transfer->argument, size);
        moving->pulse->beat(moving->pulse->argument);
        return NEBULA_OK;
}

/* Checksums are some ten times as fast as storage. This loop stays only a little ahead of the upload, so that the progress counts bytes
 * that were sent. */
static enum nebula_status check_mapped(struct moving *moving)
{
        enum nebula_status status = NEBULA_OK;

        for (uint64_t offset = 0; offset < moving->file->size && !status; offset += moving->file->chunk_bytes) {
                uint64_t left = moving->file->size - offset;

                status = check(moving, moving->data + offset, offset, left < moving->file->chunk_bytes ? left : moving->file->chunk_bytes,
                               NULL, &moving->error);
                while (!status && !atomic_load(&moving->stop) && bulk_feed_pace(&moving->feed, PACE_BYTES))
                        ;
        }
        return status;
}

static void *read_all(void *argument)
{
        struct moving *moving = argument;
        struct store *from = moving->transfer->from;

        if (moving->is_mapped)
                moving->status = check_mapped(moving);
        else
                moving->status = from->ops->read_bulk(from, moving->key, moving->data, moving->file->size, moving->file->chunk_bytes, check, moving,
                                                      &moving->error);
        bulk_feed_end(&moving->feed);
        return NULL;
}

static enum nebula_status map_source(struct moving *moving, struct nebula_error *error)
{
        struct store *from = moving->transfer->from;
        struct os_stat stat;
        void *data;
        bool is_direct;
        int fd, result;
        enum nebula_status status = from->ops->open_read(from, moving->key, false, &fd, &is_direct, error);

        if (status)
                return status;
        result = os->fstat(fd, &stat);
        if (!result && store_check_size(from, moving->key, stat.size, moving->file->size, error)) {
                os->close(fd);
                return NEBULA_CORRUPT;
        }
        if (!result)
                result = os->map(fd, 0, stat.size, OS_MAP_READ, &data);
        os->close(fd);
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "cannot map %s/%s", from->root, moving->key);
        moving->data = data;
        moving->is_mapped = true;
        moving->watch = os->watch_map(data, stat.size);
        return NEBULA_OK;
}

static int map_spill(const char *directory, uint64_t size, void **ret_data)
{
        char path[4096];
        int fd, result;

        snprintf(path, sizeof path, "%s/.nebula-copy-%" PRIu32, directory, os->pid());
        fd = os->open(path, OS_READ | OS_WRITE | OS_CREATE | OS_EXCLUSIVE);
        if (fd < 0)
                return fd;
        os->unlink(path);
        result = os->allocate(fd, 0, size);
        if (!result)
                result = os->map(fd, 0, size, OS_MAP_READ | OS_MAP_WRITE, ret_data);
        os->close(fd);
        return result;
}

static enum nebula_status make_room(struct moving *moving, struct nebula_error *error)
{
        const char *directory = getenv("TMPDIR");
        uint64_t size = moving->file->size;
        void *data = NULL;
        int result;

        if (!directory || *directory != '/')
                directory = SPILL_FALLBACK;
        if (size <= os->memory_free() / 4)
                result = os->map(-1, 0, size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &data);
        else
                result = map_spill(directory, size, &data);
        if (result < 0)
                return error_set(error, result == -ENOMEM ? NEBULA_NO_MEMORY : error_status_of_errno(-result), -result,
                                 "no room to buffer the %" PRIu64 " bytes of %s/%s in %.100s; set TMPDIR to another directory", size,
                                 moving->transfer->from->root, moving->key, directory);
        moving->data = data;
        return NEBULA_OK;
}

static enum nebula_status start(struct moving *moving, pthread_t *ret_thread, struct nebula_error *error)
{
        uint64_t size = moving->file->size;
        size_t pieces = (size_t)((size + BULK_REQUEST_BYTES - 1) / BULK_REQUEST_BYTES);

        moving->missing = calloc(pieces, sizeof *moving->missing);
        if (!moving->missing || bulk_feed_init(&moving->feed, size))
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to copy %s", moving->key);
        for (size_t i = 0; i < pieces; i++) {
                uint64_t left = size - i * (uint64_t)BULK_REQUEST_BYTES;

                atomic_init(&moving->missing[i], (unsigned)(left < BULK_REQUEST_BYTES ? left : BULK_REQUEST_BYTES));
        }
        if (os_thread_start(ret_thread, read_all, moving, false)) {
                bulk_feed_done(&moving->feed);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no thread to copy %s", moving->key);
        }
        return NEBULA_OK;
}

/* If both fail, the one that failed first is the cause: a failed reader ends the feed, and a failed upload stops the reader. */
static enum nebula_status move(struct moving *moving, const char *to_key, struct store_upload **ret_upload, struct nebula_error *error)
{
        struct store *to = moving->transfer->to;
        struct store_object object = { .key = to_key, .data = moving->data, .size = moving->file->size, .feed = &moving->feed };
        struct store_upload *upload = NULL;
        pthread_t thread;
        enum nebula_status status = start(moving, &thread, error);

        if (status)
                return status;
        status = to->ops->upload(to, &object, 1, &upload, error);
        atomic_store(&moving->stop, status != NEBULA_OK);
        pthread_join(thread, NULL);
        bulk_feed_done(&moving->feed);
        if (!status) {
                *ret_upload = upload;
        } else if (moving->status && !moving->is_late) {
                status = moving->status;
                if (error)
                        *error = moving->error;
        }
        return status;
}

/* Bytes that were added at the end have no checksum. */
static enum nebula_status check_size(struct store *from, const char *key, const struct record_file *file, struct nebula_error *error)
{
        struct store_entry entry;
        enum nebula_status status = from->ops->stat(from, key, &entry, error);

        if (status)
                return status;
        status = store_check_size(from, key, entry.size, file->size, error);
        store_entry_done(&entry);
        return status;
}

/* The upload has met a page of the source that could not be read any more: the file was cut off, or its disk fails. EFAULT: the kernel
 * met it, in a write. */
static enum nebula_status end_watch(const struct moving *moving, enum nebula_status status, struct store_upload *upload, struct nebula_error *error)
{
        const struct transfer *transfer = moving->transfer;

        if (!os->unwatch_map(moving->watch) && !(status && moving->is_mapped && error && error->sys_errno == EFAULT))
                return status;
        if (!status)
                transfer->to->ops->abort(transfer->to, upload);
        return error_set(error, NEBULA_CORRUPT, 0, "%s/%s: a part of it could not be read while it was copied: it was cut off, or its disk fails",
                         transfer->from->root, moving->key);
}

static enum nebula_status transfer_once(const struct transfer *transfer, const char *from_key, const char *to_key, const struct record_file *file,
                                        const struct transfer_pulse *pulse, bool *ret_is_refused, struct nebula_error *error)
{
        struct moving moving = { .transfer = transfer, .file = file, .pulse = pulse, .key = from_key, .watch = -1 };
        struct store_object empty = { .key = to_key };
        struct store *to = transfer->to;
        struct store_upload *upload = NULL;
        bool is_mapped = file->size && transfer->from->ops->features(transfer->from) & STORE_LENDS_FD;
        enum nebula_status status = is_mapped ? map_source(&moving, error) : check_size(transfer->from, from_key, file, error);

        if (!status && !file->size) {
                status = to->ops->upload(to, &empty, 1, &upload, error);
        } else if (!status) {
                if (!is_mapped)
                        status = make_room(&moving, error);
                if (!status)
                        status = move(&moving, to_key, &upload, error);
        }
        status = end_watch(&moving, status, upload, error);
        if (!status && pulse->ready && (status = pulse->ready(pulse->argument, error)))
                to->ops->abort(to, upload);
        if (!status) {
                status = to->ops->publish(to, upload, error);
                *ret_is_refused = status == NEBULA_STORAGE;
        }
        free(moving.missing);
        if (moving.data)
                os->unmap(moving.data, file->size);
        return status;
}

enum nebula_status transfer_object(const struct transfer *transfer, const char *from_key, const char *to_key, const struct record_file *file,
                                   const struct transfer_pulse *pulse, struct nebula_error *error)
{
        bool is_refused = false;
        enum nebula_status status = transfer_once(transfer, from_key, to_key, file, pulse, &is_refused, error);

        /* A store that does not take an upload may take a new one. */
        return is_refused && store_class(error) == STORE_LATER ? transfer_once(transfer, from_key, to_key, file, pulse, &is_refused, error) : status;
}
