/* Large objects. Their blocks are sent from the caller's memory, several at once, each as soon as it is final. Azure does not show them.
 * Publishing sends one list of blocks, which makes the blob. The name of a block has the id of its upload, so a list never names blocks of
 * another upload, and the CRC-64 of its bytes, with which Azure has compared them. So a later upload with the same id knows which blocks
 * it need not send. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/azure/azure_private.h"
#include "store/http/crypt.h"

#define PUBLISH_ANSWER_MS 120000
#define BLOCKS_TEXT_MAX (16u << 20)
#define RAW_ID_SIZE 39        /* of a block: upload, index and CRC-64 in 16, 7 and 16 hex digits; base64 of that has no padding */
#define ID_SIZE CRYPT_BASE64_SIZE(RAW_ID_SIZE)

static void block_id(const struct object_upload *object, uint64_t index, uint64_t sum, char ret_id[ID_SIZE])
{
        char raw[RAW_ID_SIZE + 1];

        snprintf(raw, sizeof raw, "%s%07x%016" PRIx64, object->id, (unsigned)index & 0xfffffffu, sum);
        crypt_base64(raw, RAW_ID_SIZE, ret_id);
}

/* False: it is no block of the object's upload. */
static bool parse_block_id(const struct object_upload *object, const char *id, uint64_t *ret_index, uint64_t *ret_sum)
{
        char raw[RAW_ID_SIZE + 1], index[8], *end;
        size_t size;

        if (!crypt_base64_decode(id, raw, RAW_ID_SIZE, &size) || size != RAW_ID_SIZE || strncmp(raw, object->id, OBJECT_ID_SIZE - 1))
                return false;
        raw[RAW_ID_SIZE] = 0;
        if (strspn(raw + OBJECT_ID_SIZE - 1, "0123456789abcdef") != RAW_ID_SIZE - (OBJECT_ID_SIZE - 1))
                return false;
        memcpy(index, raw + OBJECT_ID_SIZE - 1, 7);
        index[7] = 0;
        *ret_index = strtoull(index, &end, 16);
        *ret_sum = strtoull(raw + OBJECT_ID_SIZE - 1 + 7, &end, 16);
        return true;
}

/* Reads a list of blocks. Blocks of other uploads are left out. */
static enum nebula_status read_blocks(const struct object_store *store, struct object_upload *object, const struct http_response *response,
                                      struct nebula_error *error)
{
        char id[ID_SIZE] = "";
        bool no_memory = false;
        struct xml_item item;
        struct xml xml;

        xml_init(&xml, response->text, response->text_size);
        while (!no_memory && xml_next(&xml, &item)) {
                struct object_part part = { .has_sum = true };
                uint64_t index;

                if (item.kind != XML_END)
                        continue;
                if (!strcmp(item.name, "Name"))
                        snprintf(id, sizeof id, "%s", strlen(item.text) < sizeof id ? item.text : "");
                else if (!strcmp(item.name, "Size") && parse_block_id(object, id, &index, &part.sum)) {
                        part.size = strtoull(item.text, NULL, 10);
                        no_memory = !object_add_found(object, index, &part);
                }
        }
        no_memory = no_memory || xml.no_memory;
        xml_done(&xml); /* a list that was cut off names fewer blocks: the others are sent */
        return no_memory ? object_no_memory(store, error) : NEBULA_OK;
}

/* Finds the blocks that an earlier upload left. If Azure does not list them, all are sent. */
static enum nebula_status find_blocks(struct object_store *store, struct object_upload *object, struct nebula_error *error)
{
        struct object_call call = { .method = "GET", .key = object->key, .text_max = BLOCKS_TEXT_MAX };
        struct http_response response;
        enum nebula_status status;

        snprintf(object->id, sizeof object->id, "%s", object->resume->former);
        object_param(&call, "comp", "blocklist");
        object_param(&call, "blocklisttype", "uncommitted");
        status = azure_send(store, &call, &response, error);
        if (status)
                return status;
        if (response.status == 200)
                status = read_blocks(store, object, &response, error);
        http_response_done(&response);
        return status;
}

static bool is_id(const char *text)
{
        return strspn(text, "0123456789abcdef") == OBJECT_ID_SIZE - 1 && !text[OBJECT_ID_SIZE - 1];
}

static enum nebula_status begin(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        (void)upload;
        object->parts = calloc(object->part_count + 1, sizeof *object->parts);
        if (!object->parts)
                return object_no_memory(store, error);
        if (!object_may_resume(store, object))
                return NEBULA_OK;
        if (object->resume->former && is_id(object->resume->former))
                status = find_blocks(store, object, error);
        object->text = strdup(object->id);
        return status || object->text ? status : object_no_memory(store, error);
}

static enum nebula_status put_block(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                    const struct object_range *range, const void *data, const atomic_bool *stop, struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .key = object->key, .body = data, .body_size = range->size, .moved = range->moved, .stop = stop };
        char id[ID_SIZE], crc64[OBJECT_SUM_SIZE];
        struct http_response response;
        enum nebula_status status;

        (void)upload;
        object->parts[range->index].sum = object_range_sum(range, data);
        block_id(object, range->index, object->parts[range->index].sum, id);
        azure_crc64_text(object->parts[range->index].sum, crc64);
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

        (void)upload;
        if (status)
                return status;
        snprintf(bytes, sizeof bytes, "bytes=%" PRIu64 "-%" PRIu64, range->offset, range->offset + range->size - 1);
        object->parts[range->index].sum = object_range_sum(range, data);
        block_id(object, range->index, object->parts[range->index].sum, id);
        azure_crc64_text(object->parts[range->index].sum, crc64);
        object_param(&call, "comp", "block");
        object_param(&call, "blockid", id);
        call.source = (struct http_header){ "x-ms-copy-source", url };
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
static char *make_list(const struct object_upload *object, size_t *ret_size)
{
        struct buf buf = { 0 };
        char id[ID_SIZE];

        buf_add_text(&buf, "<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>");
        for (uint64_t i = 0; i < object->part_count; i++) {
                block_id(object, i, object->parts[i].sum, id);
                buf_add_text(&buf, "<Uncommitted>");
                buf_add_text(&buf, id);
                buf_add_text(&buf, "</Uncommitted>");
        }
        buf_add_text(&buf, "</BlockList>");
        return buf_take(&buf, ret_size);
}

/* Handles a refused list. Either an earlier try succeeded and its answer was lost: then the blob has this upload's id. Or there is no
 * blob: another upload had the key in the meantime, and with its list Azure dropped all other blocks. */
static enum nebula_status look_whose(struct object_store *store, const struct object_upload *object, struct nebula_error *error)
{
        char found[OBJECT_ID_SIZE];
        struct store_entry entry;
        const char *key = object->key;
        enum nebula_status status = object_look(store, key, &entry, found, error);

        if (status == NEBULA_NOT_FOUND)
                return error_set(error, NEBULA_BUSY, 0, "%s/%s: another upload had this place, or this one took more than a week",
                                 store->store.root, key);
        if (!status && strcmp(found, object->id))
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

        (void)upload;
        list = make_list(object, &size);
        if (!list)
                return object_no_memory(store, error);
        call.body = list;
        call.body_size = size;
        azure_crc64_text(object_body_sum(&call), crc64);
        object_param(&call, "comp", "blocklist");
        object_header(&call, "x-ms-content-crc64", crc64);
        object_header(&call, AZURE_METADATA, object->id);
        object_header(&call, "If-None-Match", "*");
        status = azure_send(store, &call, &response, error);
        free(list);
        if (status)
                return status;
        if (response.status == 409 || response.status == 412 || !strcmp(azure_code(&response), "InvalidBlockList"))
                status = look_whose(store, object, error);
        else if (response.status != 201)
                status = azure_fail(store, OBJECT_WRITE, object->key, &response, error);
        http_response_done(&response);
        return status;
}

/* Blocks that no list names cannot be removed one by one; Azure drops them a week after the last one. */
const struct object_steps azure_steps = { .begin = begin, .can_resume = true, .puts_small = true, .send = put_block, .refer = put_block_from, .publish = publish };
