/* Reads one range. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/object/object.h"

#define TRIES 4 /* for an answer that is another range */

/* Parses "bytes 0-9/100" or "bytes *\/100". False: the answer has no such field. Writes *ret_first only for the former. */
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

/* A server, or one on the way to it, answers a request for a range with something else. That is no damage of the object. */
static enum nebula_status other_range(const struct object_store *store, const char *key, struct nebula_error *error)
{
        return error_set(error, NEBULA_UNAVAILABLE, 0, "%s/%s: the answer is another range than was asked for", store->store.root, key);
}

/* *ret_is_other: the object has enough bytes, but the answer has not. */
static enum nebula_status too_short(struct object_store *store, const char *key, const struct http_response *response, uint64_t wanted,
                                    bool *ret_is_other, struct nebula_error *error)
{
        uint64_t first, whole = 0;
        struct store_entry entry;

        if (!range_of(response, &first, &whole)) {
                enum nebula_status status = object_look(store, key, &entry, NULL, error);

                if (status)
                        return status;
                whole = entry.size;
        }
        *ret_is_other = whole >= wanted;
        if (*ret_is_other)
                return NEBULA_OK;
        return error_set(error, NEBULA_CORRUPT, 0, "%s/%s: ends after %" PRIu64 " bytes, %" PRIu64 " were expected", store->store.root, key,
                         whole, wanted);
}

static enum nebula_status was_replaced(const struct object_store *store, const char *key, struct nebula_error *error)
{
        return error_set(error, NEBULA_STORAGE, 0, "%s/%s: was replaced while it was read", store->store.root, key);
}

/* Some services ignore the condition of a read. */
static enum nebula_status check_stamp(const struct object_store *store, const char *key, const struct http_response *response,
                                      struct store_stamp *stamp, struct nebula_error *error)
{
        struct store_stamp found = { 0 };

        store->service->stamp(response, &found);
        if (!*stamp->text)
                *stamp = found;
        return *found.text && strcmp(found.text, stamp->text) ? was_replaced(store, key, error) : NEBULA_OK;
}

/* *ret_is_other: the answer is another range; nothing is known about the object. */
static enum nebula_status read_once(struct object_store *store, const struct object_reading *wanted, struct store_stamp *stamp,
                                    bool *ret_is_other, struct nebula_error *error)
{
        const char *key = wanted->key;
        uint64_t offset = wanted->offset, size = wanted->size;
        struct object_call call = { .method = "GET", .key = key, .into = wanted->data, .into_size = size, .into_sums = wanted->sums,
                                    .into_chunk = wanted->chunk_bytes, .stop = wanted->stop, .stop_too = wanted->stop_too,
                                    .watch = wanted->watch };
        char range[64], quoted[OBJECT_QUOTED_SIZE];
        struct http_response response;
        uint64_t first = 0, whole;
        enum nebula_status status;

        snprintf(range, sizeof range, "bytes=%" PRIu64 "-%" PRIu64, offset, offset + size - 1);
        object_header(&call, store->service->range, range);
        if (*stamp->text)
                store->service->condition(&call, STORE_IF_SAME, stamp, quoted);
        status = store->service->send(store, &call, &response, error);
        *ret_is_other = status == NEBULA_CORRUPT; /* more bytes than were asked for */
        if (status)
                return *ret_is_other ? NEBULA_OK : status;
        if (response.status == 416 || (response.status == 206 && response.into_size < size))
                status = too_short(store, key, &response, offset + size, ret_is_other, error);
        else if (response.status == 412)
                status = was_replaced(store, key, error);
        else if (response.status == 200 && !offset && response.into_size == size)
                ; /* the range is the whole object */
        else if (response.status == 206 ? !range_of(&response, &first, &whole) || first != offset : response.status == 200)
                *ret_is_other = true;
        else if (response.status != 206)
                status = store->service->fail(store, OBJECT_READ, key, &response, error);
        if (!status && !*ret_is_other)
                status = check_stamp(store, key, &response, stamp, error);
        http_response_done(&response);
        return status;
}

enum nebula_status object_read_range(struct object_store *store, const struct object_reading *wanted, struct store_stamp *stamp,
                                     struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        bool is_other = true;

        for (int tries = 0; tries < TRIES && is_other && !status; tries++)
                status = read_once(store, wanted, stamp, &is_other, error);
        return !status && is_other ? other_range(store, wanted->key, error) : status;
}

enum nebula_status object_read(struct store *base, const char *key, void *data, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        enum nebula_status status = object_check_key(store, key, error);
        struct object_reading range = { .key = key, .data = data, .offset = offset, .size = size };
        struct store_stamp stamp = { 0 };
        struct store_entry entry;

        if (status)
                return status;
        if (size)
                return object_read_range(store, &range, &stamp, error);
        status = object_look(store, key, &entry, NULL, error);
        if (!status && offset > entry.size)
                status = error_set(error, NEBULA_CORRUPT, 0, "%s/%s: ends after %" PRIu64 " bytes, %" PRIu64 " were expected", base->root, key,
                                   entry.size, offset);
        return status;
}
