/* The driver of Azure Blob Storage: opening, and the operations on small objects. */
#include "store/azure/azure.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/azure/azure_private.h"
#include "store/http/lanes.h"

#define PUT_TRIES 3           /* of a write whose condition failed though nothing is there */
#define REMOVE_WIDTH 16u

struct azure_limits azure_limits = {
        .block_bytes = 8u << 20,
        .blocks_good = 1000,
        .block_bytes_good = 64u << 20,
        .block_bytes_max = UINT64_C(4000) << 20,
        .blocks_max = 50000,
        .read_bytes = 8u << 20,
};

static enum nebula_status azure_open(const char *url, struct store **ret_store, struct nebula_error *error)
{
        struct azure_store *azure = calloc(1, sizeof *azure);
        enum nebula_status status;

        if (!azure)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to open a storage path");
        status = azure_address_parse(url, &azure->address, error);
        if (status) {
                free(azure);
                return status;
        }
        azure->store = (struct store){ &store_azure, azure->address.root };
        lock_init(&azure->lock, LOCK_AZURE_STORE);
        *ret_store = &azure->store;
        return NEBULA_OK;
}

static void azure_close(struct store *store)
{
        struct azure_store *azure = (struct azure_store *)store;

        azure_credential_done(&azure->credential);
        azure_address_done(&azure->address);
        lock_done(&azure->lock);
        free(azure);
}

static unsigned azure_features(struct store *store)
{
        return STORE_LISTS_FRESH | STORE_COPIES | STORE_PUTS_IF_SAME;
}

enum nebula_status azure_look(struct azure_store *azure, const char *key, struct store_entry *ret_entry, char ret_id[AZURE_ID_SIZE],
                              struct nebula_error *error)
{
        struct azure_call call = { .method = "HEAD", .key = key };
        struct store_entry entry = { 0 };
        struct http_response response;
        enum nebula_status status = azure_send(azure, &call, &response, error);
        const char *length, *modified, *id;
        int64_t seconds = 0;

        if (status)
                return status;
        length = http_field(&response, "content-length");
        modified = http_field(&response, "last-modified");
        id = http_field(&response, AZURE_METADATA);
        if (response.status != 200)
                status = azure_fail(azure, AZURE_READ, key, &response, error);
        else if (!length || !modified || !http_date_parse(modified, &seconds))
                status = error_set(error, NEBULA_STORAGE, 0, "%s/%s: the answer does not say its size and time", azure->address.root, key);
        if (!status) {
                entry.size = strtoull(length, NULL, 10);
                entry.time_ns = seconds * 1000000000;
                azure_stamp(&response, &entry.stamp);
                if (ret_id)
                        snprintf(ret_id, AZURE_ID_SIZE, "%s", id ? id : "");
                *ret_entry = entry;
        }
        http_response_done(&response);
        return status;
}

static enum nebula_status azure_stat(struct store *store, const char *key, struct store_entry *ret_entry, struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        struct store_entry entry;
        enum nebula_status status = azure_check_key(azure, key, error);

        if (!status)
                status = azure_look(azure, key, &entry, NULL, error);
        if (status)
                return status;
        entry.key = strdup(key);
        if (!entry.key)
                return azure_no_memory(azure, error);
        *ret_entry = entry;
        return NEBULA_OK;
}

bool azure_condition_failed(const struct http_response *response)
{
        return response->status == 412 || (response->status == 409 && !strcmp(azure_code(response), "BlobAlreadyExists"));
}

enum nebula_status azure_look_who_wrote(struct azure_store *azure, const char *key, const char *id, enum store_condition condition,
                                        struct store_stamp *ret_stamp, struct nebula_error *error)
{
        char found[AZURE_ID_SIZE];
        struct store_entry entry;
        enum nebula_status status = azure_look(azure, key, &entry, found, error);

        if (status == NEBULA_NOT_FOUND && condition != STORE_IF_SAME)
                return status;
        if (status && status != NEBULA_NOT_FOUND)
                return status;
        if (status || strcmp(found, id))
                return error_set(error, NEBULA_BUSY, 0, condition == STORE_IF_SAME ? "%s/%s is another object by now" : "%s/%s is there already",
                                 azure->address.root, key);
        *ret_stamp = entry.stamp;
        return NEBULA_OK;
}

static enum nebula_status put_once(struct azure_store *azure, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                   const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct azure_call call = { .method = "PUT", .key = key, .body = data, .body_size = size };
        char crc64[16], id[AZURE_ID_SIZE], quoted[AZURE_QUOTED_SIZE];
        struct http_response response;
        enum nebula_status status;

        azure_crc64_text(data, size, crc64);
        azure_new_id(id);
        azure_header(&call, "x-ms-blob-type", "BlockBlob");
        azure_header(&call, "x-ms-content-crc64", crc64);
        azure_header(&call, AZURE_METADATA, id);
        azure_header(&call, "If-None-Match", condition == STORE_IF_ABSENT ? "*" : NULL);
        azure_header(&call, "If-Match", condition == STORE_IF_SAME ? azure_quoted(seen, quoted) : NULL);
        status = azure_send(azure, &call, &response, error);
        if (status)
                return status;
        if (response.status == 201)
                azure_stamp(&response, ret_stamp);
        else if (condition != STORE_ALWAYS && (azure_condition_failed(&response) || (condition == STORE_IF_SAME && response.status == 404)))
                status = azure_look_who_wrote(azure, key, id, condition, ret_stamp, error);
        else
                status = azure_fail(azure, AZURE_WRITE, key, &response, error);
        http_response_done(&response);
        return status;
}

static enum nebula_status azure_put(struct store *store, const char *key, const void *data, uint64_t size, enum store_condition condition,
                                    const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        enum nebula_status status = azure_check_key(azure, key, error);
        struct store_stamp stamp;

        if (!status && condition == STORE_IF_SAME && !seen)
                status = error_set(error, NEBULA_INVALID, 0, "%s/%s: no stamp to compare with", store->root, key);
        if (status)
                return status;
        /* Something was there, and is gone: the write may find the place free now. */
        for (int tries = 0; tries < PUT_TRIES; tries++) {
                status = put_once(azure, key, data, size, condition, seen, &stamp, error);
                if (status != NEBULA_NOT_FOUND)
                        break;
        }
        if (status == NEBULA_NOT_FOUND)
                return error_set(error, NEBULA_BUSY, 0, "%s/%s: the answer is that it is there, and nothing is", store->root, key);
        if (!status && ret_stamp)
                *ret_stamp = stamp;
        return status;
}

static enum nebula_status azure_get(struct store *store, const char *key, size_t limit, char **ret_text, size_t *ret_size,
                                    struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        struct azure_call call = { .method = "GET", .key = key, .text_max = limit ? limit : 1 };
        struct http_response response = { 0 };
        enum nebula_status status = azure_check_key(azure, key, error);

        if (!status)
                status = azure_send(azure, &call, &response, error);
        if (!status && response.status != 200)
                status = azure_fail(azure, AZURE_READ, key, &response, error);
        if (status == NEBULA_CORRUPT || (!status && response.text_size > limit))
                status = error_set(error, NEBULA_CORRUPT, 0, "%s/%s: has more than the %zu bytes that are allowed", store->root, key, limit);
        if (!status) {
                *ret_text = response.text;
                response.text = NULL;
                if (ret_size)
                        *ret_size = response.text_size;
                if (ret_stamp)
                        azure_stamp(&response, ret_stamp);
        }
        http_response_done(&response);
        return status;
}

struct removal {
        struct azure_store *azure;
        const struct store_victim *victims;
};

static enum nebula_status remove_one(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        const struct removal *removal = argument;
        const struct store_victim *victim = &removal->victims[index];
        struct azure_call call = { .method = "DELETE", .key = victim->key, .stop = stop };
        char quoted[AZURE_QUOTED_SIZE];
        struct http_response response;
        enum nebula_status status = azure_check_key(removal->azure, victim->key, error);
        bool is_other;

        if (status)
                return status;
        azure_header(&call, "x-ms-delete-snapshots", "include");
        azure_header(&call, "If-Match", *victim->stamp.text ? azure_quoted(&victim->stamp, quoted) : NULL);
        status = azure_send(removal->azure, &call, &response, error);
        if (status)
                return status;
        is_other = *victim->stamp.text && !strcmp(azure_code(&response), "ConditionNotMet");
        if (response.status != 202 && response.status != 404 && !is_other)
                status = azure_fail(removal->azure, AZURE_REMOVE, victim->key, &response, error);
        http_response_done(&response);
        return status;
}

static enum nebula_status azure_remove(struct store *store, const struct store_victim *victims, size_t count, struct nebula_error *error)
{
        struct removal removal = { (struct azure_store *)store, victims };

        return lanes_run(count, REMOVE_WIDTH, remove_one, &removal, error);
}

/* Every answer of the service has its time. One of a proxy has no x-ms-request-id. */
static enum nebula_status azure_clock(struct store *store, int64_t *ret_ns, struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        struct azure_call call = { .method = "HEAD", .key = ".nebula-clock" };
        struct http_response response;
        enum nebula_status status = azure_send(azure, &call, &response, error);
        const char *date;
        int64_t seconds;

        if (status)
                return status;
        date = http_field(&response, "x-ms-request-id") ? http_field(&response, "date") : NULL;
        if (date && http_date_parse(date, &seconds))
                *ret_ns = seconds * 1000000000;
        else
                status = error_set(error, NEBULA_STORAGE, 0, "%s does not tell the time: the answer is %d", store->root, response.status);
        http_response_done(&response);
        return status;
}

static enum nebula_status azure_free_bytes(struct store *store, uint64_t *ret_bytes, struct nebula_error *error)
{
        return error_set(error, NEBULA_NOT_FOUND, 0, "%s has no limit that is known", store->root);
}

const struct store_ops store_azure = {
        .scheme = "az",
        .open = azure_open,
        .close = azure_close,
        .features = azure_features,
        .put = azure_put,
        .get = azure_get,
        .upload = azure_upload,
        .publish = azure_publish,
        .abort = azure_abort,
        .read = azure_read,
        .read_bulk = azure_read_bulk,
        .list = azure_list,
        .stat = azure_stat,
        .remove = azure_remove,
        .clock = azure_clock,
        .copy = azure_copy,
        .free_bytes = azure_free_bytes,
};
