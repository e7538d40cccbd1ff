/* Reading ranges, in parallel where there are many. All of them are of one content: the ETag of the first is the condition of the others. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/object/object.h"
#include "store/http/lanes.h"

/* "bytes 0-9/100", "bytes *\/100". False: the answer does not say it. *ret_first is written for the former only. */
static bool range_of(const struct http_response *response, uint64_t *ret_first, uint64_t *ret_whole)
{
        const char *text = http_field(response, "content-range"), *slash = text ? strchr(text, '/') : NULL;
        char *end;

        if (!slash || strncmp(text, "bytes ", 6) || slash[1] < '0' || slash[1] > '9')
                return false;
        *ret_whole = strtoull(slash + 1, &end, 10);
        if (*end)
                return false;
        if (text[6] != '*')
                *ret_first = strtoull(text + 6, NULL, 10);
        return true;
}

static enum nebula_status too_short(struct object_store *store, const char *key, const struct http_response *response, uint64_t wanted,
                                    struct nebula_error *error)
{
        uint64_t first, whole = 0;
        struct store_entry entry;

        if (!range_of(response, &first, &whole)) {
                enum nebula_status status = object_look(store, key, &entry, NULL, error);

                if (status)
                        return status;
                whole = entry.size;
        }
        return error_set(error, NEBULA_CORRUPT, 0, "%s/%s: ends after %" PRIu64 " bytes, %" PRIu64 " were expected", store->store.root, key,
                         whole, wanted);
}

/* One range; size > 0. `stamp` "": of whatever is there, which it becomes. `sums`: NULL, or of each chunk of it. */
static enum nebula_status read_range(struct object_store *store, const char *key, void *data, uint64_t offset, uint64_t size,
                                     struct store_stamp *stamp, uint64_t *sums, uint64_t chunk_bytes, const atomic_bool *stop,
                                     struct nebula_error *error)
{
        struct object_call call = { .method = "GET", .key = key, .into = data, .into_size = size, .into_sums = sums, .into_chunk = chunk_bytes,
                                    .stop = stop };
        char range[64], quoted[OBJECT_QUOTED_SIZE];
        struct http_response response;
        uint64_t first = 0, whole;
        enum nebula_status status;

        snprintf(range, sizeof range, "bytes=%" PRIu64 "-%" PRIu64, offset, offset + size - 1);
        object_header(&call, store->service->range, range);
        if (*stamp->text)
                store->service->condition(&call, STORE_IF_SAME, stamp, quoted);
        status = store->service->send(store, &call, &response, error);
        if (status)
                return status;
        if (response.status == 416 || (response.status == 206 && response.into_size < size))
                status = too_short(store, key, &response, offset + size, error);
        else if (response.status == 412)
                status = error_set(error, NEBULA_STORAGE, 0, "%s/%s: was replaced while it was read", store->store.root, key);
        else if (response.status == 200 && !offset && response.into_size == size)
                ; /* the whole object is the range */
        else if (response.status == 206 ? !range_of(&response, &first, &whole) || first != offset : response.status == 200)
                status = error_set(error, NEBULA_STORAGE, 0, "%s/%s: the answer is another range than was asked for", store->store.root, key);
        else if (response.status != 206)
                status = store->service->fail(store, OBJECT_READ, key, &response, error);
        if (!status && !*stamp->text)
                store->service->stamp(&response, stamp);
        http_response_done(&response);
        return status;
}

enum nebula_status object_read(struct store *base, const char *key, void *data, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        enum nebula_status status = object_check_key(store, key, error);
        struct store_stamp stamp = { 0 };
        struct store_entry entry;

        if (status)
                return status;
        if (size)
                return read_range(store, key, data, offset, size, &stamp, NULL, 0, NULL, error);
        status = object_look(store, key, &entry, NULL, error);
        if (!status && offset > entry.size)
                status = error_set(error, NEBULA_CORRUPT, 0, "%s/%s: ends after %" PRIu64 " bytes, %" PRIu64 " were expected", base->root, key,
                                   entry.size, offset);
        return status;
}

struct reading {
        struct object_store *store;
        const char *key;
        char *data;
        uint64_t size, piece_bytes;
        uint32_t chunk_bytes;
        store_check *check;
        void *argument;
        struct store_stamp stamp;
        size_t first; /* index of lanes_run's first piece */
};

/* *done: bytes of the piece whose chunks were right; at a failure, those before the wrong one. `sums`: of the chunks behind *done. */
static enum nebula_status check_chunks(const struct reading *reading, uint64_t offset, uint64_t size, const uint64_t *sums, uint64_t *done,
                                       struct nebula_error *error)
{
        for (; *done < size; sums++) {
                uint64_t left = size - *done, chunk = left < reading->chunk_bytes ? left : reading->chunk_bytes;
                enum nebula_status status = NEBULA_OK;

                if (reading->check)
                        status = reading->check(reading->argument, reading->data + offset + *done, offset + *done, chunk, sums, error);
                if (status)
                        return status;
                *done += chunk;
        }
        return NEBULA_OK;
}

/*
 * Bytes that were changed on the way are right the second time; those that are wrong in the store are not. Chunks that were right are not read
 * again: an upload of the same memory may be sending them.
 */
static enum nebula_status read_piece(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        struct reading *reading = argument;
        uint64_t offset = (index + reading->first) * reading->piece_bytes, left = reading->size - offset;
        uint64_t size = left < reading->piece_bytes ? left : reading->piece_bytes;
        struct store_stamp stamp = reading->stamp;
        uint64_t *sums = calloc((size_t)(size / reading->chunk_bytes + 1), sizeof *sums), done = 0;
        enum nebula_status status = sums ? NEBULA_OK : object_no_memory(reading->store, error);

        for (int tries = 0; tries < 2 && !status; tries++) {
                status = read_range(reading->store, reading->key, reading->data + offset + done, offset + done, size - done, &stamp, reading->check ? sums : NULL,
                                    reading->chunk_bytes, stop, error);
                if (status)
                        break;
                if (index + reading->first == 0)
                        reading->stamp = stamp; /* no other piece is read before the first */
                status = check_chunks(reading, offset, size, sums, &done, error);
                if (status != NEBULA_CORRUPT || tries)
                        break;
                status = NEBULA_OK;
        }
        free(sums);
        return status;
}

enum nebula_status object_read_bulk(struct store *base, const char *key, void *data, uint64_t size, uint32_t chunk_bytes, store_check *check,
                                   void *argument, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        enum nebula_status status = object_check_key(store, key, error);
        struct reading reading = { store, key, data, size, 0, chunk_bytes, check, argument, { "" }, 0 };

        if (!status && !chunk_bytes)
                status = error_set(error, NEBULA_INVALID, 0, "%s/%s: chunks of no bytes", base->root, key);
        if (status)
                return status;
        if (!size)
                return object_read(base, key, data, 0, 0, error);
        reading.piece_bytes = chunk_bytes >= store->service->limits->read_bytes ? chunk_bytes : store->service->limits->read_bytes / chunk_bytes * chunk_bytes;
        status = read_piece(&reading, 0, NULL, error);
        reading.first = 1;
        if (!status && size > reading.piece_bytes)
                status = lanes_run((size_t)((size - 1) / reading.piece_bytes), http_width(), read_piece, &reading, error);
        return status;
}
