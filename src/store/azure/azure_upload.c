/* Large objects. Their blocks are sent from the caller's memory, several at once, each as soon as it is final. Azure does not show them.
 * Publishing sends one list of blocks, which makes the blob. The names of blocks begin with the id of their upload, so a list never
 * names blocks of another upload. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/azure/azure_private.h"
#include "store/http/crypt.h"

#define PUBLISH_ANSWER_MS 120000
#define RAW_ID_SIZE 24        /* of a block: upload and index, 16 and 8 hex digits; base64 of that has no padding */
#define ID_SIZE CRYPT_BASE64_SIZE(RAW_ID_SIZE)

static void block_id(const struct store_upload *upload, uint64_t index, char ret_id[ID_SIZE])
{
        char raw[RAW_ID_SIZE + 1];

        snprintf(raw, sizeof raw, "%s%08x", upload->id, (unsigned)index);
        crypt_base64(raw, RAW_ID_SIZE, ret_id);
}

static enum nebula_status put_block(struct object_store *store, const struct store_upload *upload, struct object_upload *object, uint64_t index,
                                    const void *data, uint64_t size, const atomic_bool *stop, struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .key = object->key, .body = data, .body_size = size, .stop = stop };
        char id[ID_SIZE], crc64[OBJECT_SUM_SIZE];
        struct http_response response;
        enum nebula_status status;

        block_id(upload, index, id);
        azure_crc64_text(data, size, crc64);
        object_param(&call, "comp", "block");
        object_param(&call, "blockid", id);
        object_header(&call, "x-ms-content-crc64", crc64);
        status = azure_send(store, &call, &response, error);
        if (!status && response.status != 201)
                status = azure_fail(store, OBJECT_WRITE, object->key, &response, error);
        http_response_done(&response);
        return status;
}

/* Takes a block from the source by a URL that authorizes the read: with the store's SAS, with a SAS of its own, or together with a
 * token. */
static enum nebula_status put_block_from(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                         const struct object_range *range, const void *data, const atomic_bool *stop, struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .key = object->key, .answer_ms = PUBLISH_ANSWER_MS, .stop = stop };
        char id[ID_SIZE], bytes[64], quoted[OBJECT_QUOTED_SIZE], crc64[OBJECT_SUM_SIZE], *url = NULL, *bearer = NULL;
        enum nebula_status status = azure_source(store, object->source->key, &url, &bearer, error);
        struct http_response response;

        if (status)
                return status;
        block_id(upload, range->index, id);
        snprintf(bytes, sizeof bytes, "bytes=%" PRIu64 "-%" PRIu64, range->offset, range->offset + range->size - 1);
        azure_crc64_text(data, range->size, crc64);
        object_param(&call, "comp", "block");
        object_param(&call, "blockid", id);
        object_header(&call, "x-ms-copy-source", url);
        object_header(&call, "x-ms-copy-source-authorization", bearer);
        object_header(&call, "x-ms-source-range", bytes);
        object_header(&call, "x-ms-source-if-match", object_quoted(&object->source_stamp, quoted));
        object_header(&call, "x-ms-source-content-crc64", crc64);
        status = azure_send(store, &call, &response, error);
        if (!status && response.status != 201)
                status = azure_fail(store, OBJECT_COPY, object->source->key, &response, error);
        http_response_done(&response);
        object_forget(url);
        object_forget(bearer);
        return status;
}

/* The list of an object's blocks, in order. NULL: no memory. */
static char *make_list(const struct store_upload *upload, const struct object_upload *object, size_t *ret_size)
{
        struct buf buf = { 0 };
        char id[ID_SIZE];

        buf_add_text(&buf, "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>");
        for (uint64_t i = 0; i < object->part_count; i++) {
                block_id(upload, i, id);
                buf_add_text(&buf, "<Uncommitted>");
                buf_add_text(&buf, id);
                buf_add_text(&buf, "</Uncommitted>");
        }
        buf_add_text(&buf, "</BlockList>");
        return buf_take(&buf, ret_size);
}

/* Handles a refused list. Either an earlier try succeeded and its answer was lost: then the blob has this upload's id. Or there is no
 * blob: another upload had the key in the meantime, and with its list Azure dropped all other blocks. */
static enum nebula_status look_whose(struct object_store *store, const struct store_upload *upload, const char *key, struct nebula_error *error)
{
        char found[OBJECT_ID_SIZE];
        struct store_entry entry;
        enum nebula_status status = object_look(store, key, &entry, found, error);

        if (status == NEBULA_NOT_FOUND)
                return error_set(error, NEBULA_BUSY, 0, "%s/%s: another upload had this place, or this one took more than a week",
                                 store->store.root, key);
        if (!status && strcmp(found, upload->id))
                return error_set(error, NEBULA_BUSY, 0, "%s/%s is there already", store->store.root, key);
        return status;
}

static enum nebula_status publish(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                  struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .key = object->key, .answer_ms = PUBLISH_ANSWER_MS };
        struct http_response response;
        enum nebula_status status;
        char crc64[OBJECT_SUM_SIZE], *list;
        size_t size;

        list = make_list(upload, object, &size);
        if (!list)
                return object_no_memory(store, error);
        call.body = list;
        call.body_size = size;
        azure_crc64_text(list, size, crc64);
        object_param(&call, "comp", "blocklist");
        object_header(&call, "x-ms-content-crc64", crc64);
        object_header(&call, AZURE_METADATA, upload->id);
        object_header(&call, "If-None-Match", "*");
        status = azure_send(store, &call, &response, error);
        free(list);
        if (status)
                return status;
        if (response.status == 409 || response.status == 412 || !strcmp(azure_code(&response), "InvalidBlockList"))
                status = look_whose(store, upload, object->key, error);
        else if (response.status != 201)
                status = azure_fail(store, OBJECT_WRITE, object->key, &response, error);
        http_response_done(&response);
        return status;
}

/* Blocks that no list names cannot be removed one by one; Azure drops them a week after the last one. */
const struct object_steps azure_steps = { .send = put_block, .refer = put_block_from, .publish = publish };
