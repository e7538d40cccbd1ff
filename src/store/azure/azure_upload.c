/*
 * Large objects. Their blocks go out of the caller's memory, several at once and as soon as they are final; Azure keeps them unseen.
 * Publishing names them in one list, which makes the blob. The names of blocks begin with the number of their upload, so a list never
 * names blocks of another upload that was interrupted or runs at the same time.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "store/azure/azure_private.h"
#include "store/http/crypt.h"
#include "store/http/lanes.h"

#define FEED_WAIT_MS 100
#define PUBLISH_WIDTH 8u
#define PUBLISH_ANSWER_MS 120000
#define RAW_ID_SIZE 24        /* of a block: the upload and the place, 16 and 8 hex digits; as base64 without padding */
#define ID_SIZE CRYPT_BASE64_SIZE(RAW_ID_SIZE)

struct azure_object {
        char *key;
        const char *data;
        uint64_t size, block_bytes, block_count;
        struct bulk_feed *feed; /* NULL: all bytes are final */
        uint32_t *missing;      /* with a feed: chunks of each block that are not final */
        uint64_t taken;         /* blocks that a thread has taken */
};
struct store_upload {
        char id[AZURE_ID_SIZE];
        size_t count;
        struct azure_object objects[];
};

/* The blocks of an upload that are still to be sent. */
struct sending {
        struct azure_store *azure;
        struct store_upload *upload;
        struct lock lock; /* guards the rest, and what says in an object how far it is */
        size_t object;    /* from which blocks are taken */
        bool is_begun;    /* its feed is */
};

static void block_id(const struct store_upload *upload, uint64_t index, char ret_id[ID_SIZE])
{
        char raw[RAW_ID_SIZE + 1];

        snprintf(raw, sizeof raw, "%s%08x", upload->id, (unsigned)index);
        crypt_base64(raw, RAW_ID_SIZE, ret_id);
}

static uint64_t count_of(uint64_t bytes, uint64_t part)
{
        return (bytes + part - 1) / part;
}

static enum nebula_status choose_blocks(const struct azure_store *azure, struct azure_object *object, struct nebula_error *error)
{
        uint64_t bytes = object->feed ? object->feed->chunk_bytes : azure_limits.block_bytes;

        while (bytes < azure_limits.block_bytes ||
               (count_of(object->size, bytes) > azure_limits.blocks_good && bytes < azure_limits.block_bytes_good))
                bytes *= 2;
        while (count_of(object->size, bytes) > azure_limits.blocks_max && bytes <= azure_limits.block_bytes_max)
                bytes *= 2;
        if (bytes > azure_limits.block_bytes_max)
                return error_set(error, NEBULA_INVALID, 0, "%s/%s: %" PRIu64 " bytes are more than a blob can have", azure->address.root,
                                 object->key, object->size);
        object->block_bytes = bytes;
        object->block_count = count_of(object->size, bytes);
        if (!object->feed)
                return NEBULA_OK;
        object->missing = calloc(object->block_count + 1, sizeof *object->missing);
        if (!object->missing)
                return azure_no_memory(azure, error);
        for (uint64_t offset = 0; offset < object->size; offset += object->feed->chunk_bytes)
                object->missing[offset / bytes]++;
        return NEBULA_OK;
}

static enum nebula_status plan(struct azure_store *azure, const struct store_object *objects, size_t count, struct store_upload *upload,
                               struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        azure_new_id(upload->id);
        for (size_t i = 0; i < count && !status; i++) {
                struct azure_object *object = &upload->objects[i];

                status = azure_check_key(azure, objects[i].key, error);
                if (status)
                        break;
                *object = (struct azure_object){ .key = strdup(objects[i].key), .data = objects[i].data, .size = objects[i].size,
                                                 .feed = objects[i].size ? objects[i].feed : NULL };
                upload->count = i + 1;
                status = object->key ? choose_blocks(azure, object, error) : azure_no_memory(azure, error);
        }
        return status;
}

/* One more block of an object with a feed: 0, -EAGAIN, -ECANCELED. Lock held, also while waiting: no other thread has more to do. */
static int take_fed(struct sending *sending, struct azure_object *object, uint64_t *ret_index)
{
        uint64_t offset;
        int result;

        if (!sending->is_begun)
                bulk_feed_begin(object->feed);
        sending->is_begun = true;
        do {
                result = bulk_feed_take(object->feed, FEED_WAIT_MS, &offset);
                if (!result)
                        *ret_index = offset / object->block_bytes;
        } while (!result && --object->missing[*ret_index]);
        return result;
}

/* 0, -EAGAIN or -ECANCELED. There is a block for each call. */
static int take_block(struct sending *sending, struct azure_object **ret_object, uint64_t *ret_index)
{
        struct azure_object *object;
        int result = 0;

        lock_take(&sending->lock);
        object = &sending->upload->objects[sending->object];
        while (object->taken == object->block_count)
                object = &sending->upload->objects[++sending->object];
        *ret_object = object;
        *ret_index = object->taken;
        if (object->feed)
                result = take_fed(sending, object, ret_index);
        if (!result && ++object->taken == object->block_count && object->feed) {
                bulk_feed_finish(object->feed);
                sending->is_begun = false;
        }
        lock_give(&sending->lock);
        return result;
}

static enum nebula_status put_block(struct azure_store *azure, const struct store_upload *upload, const struct azure_object *object,
                                    uint64_t index, const atomic_bool *stop, struct nebula_error *error)
{
        uint64_t offset = index * object->block_bytes, left = object->size - offset;
        uint64_t size = left < object->block_bytes ? left : object->block_bytes;
        struct azure_call call = { .method = "PUT", .key = object->key, .body = object->data + offset, .body_size = size, .stop = stop };
        char id[ID_SIZE], crc64[16];
        struct http_response response;
        enum nebula_status status;

        block_id(upload, index, id);
        azure_crc64_text(call.body, size, crc64);
        azure_param(&call, "comp", "block");
        azure_param(&call, "blockid", id);
        azure_header(&call, "x-ms-content-crc64", crc64);
        status = azure_send(azure, &call, &response, error);
        if (!status && response.status != 201)
                status = azure_fail(azure, AZURE_WRITE, object->key, &response, error);
        http_response_done(&response);
        return status;
}

static enum nebula_status send_block(void *argument, size_t number, const atomic_bool *stop, struct nebula_error *error)
{
        struct sending *sending = argument;
        struct azure_object *object;
        uint64_t index;
        int result;

        do
                result = take_block(sending, &object, &index);
        while (result == -EAGAIN && !atomic_load(stop));
        if (result == -ECANCELED)
                return error_set(error, NEBULA_STORAGE, ECANCELED, "%s/%s was given up by its writer", sending->azure->address.root, object->key);
        if (result)
                return error_set(error, NEBULA_STORAGE, 0, "%s/%s was given up with another object", sending->azure->address.root, object->key);
        return put_block(sending->azure, sending->upload, object, index, stop, error);
}

static enum nebula_status send_blocks(struct azure_store *azure, struct store_upload *upload, struct nebula_error *error)
{
        struct sending sending = { .azure = azure, .upload = upload };
        enum nebula_status status;
        uint64_t blocks = 0;

        for (size_t i = 0; i < upload->count; i++)
                blocks += upload->objects[i].block_count;
        lock_init(&sending.lock, LOCK_AZURE_BLOCKS);
        status = lanes_run((size_t)blocks, http_width(), send_block, &sending, error);
        if (sending.is_begun)
                bulk_feed_finish(upload->objects[sending.object].feed);
        lock_done(&sending.lock);
        return status;
}

enum nebula_status azure_upload(struct store *store, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                                struct nebula_error *error)
{
        struct azure_store *azure = (struct azure_store *)store;
        struct store_upload *upload = calloc(1, sizeof *upload + count * sizeof *upload->objects);
        enum nebula_status status;

        if (!upload)
                return azure_no_memory(azure, error);
        status = plan(azure, objects, count, upload, error);
        if (!status)
                status = send_blocks(azure, upload, error);
        if (status)
                azure_abort(store, upload);
        else
                *ret_upload = upload;
        return status;
}

/* The list of an object's blocks, in their order. NULL: no memory. */
static char *make_list(const struct store_upload *upload, const struct azure_object *object, size_t *ret_size)
{
        struct buf buf = { 0 };
        char id[ID_SIZE];

        buf_add_text(&buf, "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>");
        for (uint64_t i = 0; i < object->block_count; i++) {
                block_id(upload, i, id);
                buf_add_text(&buf, "<Uncommitted>");
                buf_add_text(&buf, id);
                buf_add_text(&buf, "</Uncommitted>");
        }
        buf_add_text(&buf, "</BlockList>");
        return buf_take(&buf, ret_size);
}

/*
 * The list was refused. That may be because it was done before, and the answer lost: then the blob has this upload's number. If nothing is
 * there, another upload had the key in the meantime: with its list, Azure drops the blocks of all others.
 */
static enum nebula_status look_whose(struct azure_store *azure, const struct store_upload *upload, const char *key, struct nebula_error *error)
{
        char found[AZURE_ID_SIZE];
        struct store_entry entry;
        enum nebula_status status = azure_look(azure, key, &entry, found, error);

        if (status == NEBULA_NOT_FOUND)
                return error_set(error, NEBULA_BUSY, 0, "%s/%s: another upload had this place, or this one took more than a week",
                                 azure->address.root, key);
        if (!status && strcmp(found, upload->id))
                return error_set(error, NEBULA_BUSY, 0, "%s/%s is there already", azure->address.root, key);
        return status;
}

struct publishing {
        struct azure_store *azure;
        const struct store_upload *upload;
};

static enum nebula_status publish_one(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        const struct publishing *publishing = argument;
        const struct azure_object *object = &publishing->upload->objects[index];
        struct azure_call call = { .method = "PUT", .key = object->key, .answer_ms = PUBLISH_ANSWER_MS };
        struct http_response response;
        enum nebula_status status;
        char crc64[16], *list;
        size_t size;

        list = make_list(publishing->upload, object, &size);
        if (!list)
                return azure_no_memory(publishing->azure, error);
        call.body = list;
        call.body_size = size;
        azure_crc64_text(list, size, crc64);
        azure_param(&call, "comp", "blocklist");
        azure_header(&call, "x-ms-content-crc64", crc64);
        azure_header(&call, AZURE_METADATA, publishing->upload->id);
        azure_header(&call, "If-None-Match", "*");
        status = azure_send(publishing->azure, &call, &response, error);
        free(list);
        if (status)
                return status;
        if (response.status == 409 || response.status == 412 || !strcmp(azure_code(&response), "InvalidBlockList"))
                status = look_whose(publishing->azure, publishing->upload, object->key, error);
        else if (response.status != 201)
                status = azure_fail(publishing->azure, AZURE_WRITE, object->key, &response, error);
        http_response_done(&response);
        return status;
}

enum nebula_status azure_publish(struct store *store, struct store_upload *upload, struct nebula_error *error)
{
        struct publishing publishing = { (struct azure_store *)store, upload };
        enum nebula_status status = lanes_run(upload->count, PUBLISH_WIDTH, publish_one, &publishing, error);

        azure_abort(store, upload);
        return status;
}

/* Blocks that no list names cannot be removed by themselves; Azure drops them a week after the last one. */
void azure_abort(struct store *store, struct store_upload *upload)
{
        for (size_t i = 0; upload && i < upload->count; i++) {
                free(upload->objects[i].key);
                free(upload->objects[i].missing);
        }
        free(upload);
}
