/*
 * Multipart uploads. Parts go out of the caller's memory, several at once and as soon as they are final; S3 keeps them unseen. To complete
 * an upload makes its parts the object, where none is. An upload that is neither completed nor aborted stays, and costs, until a rule of
 * the bucket removes it.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/http/crypt.h"
#include "store/s3/s3_private.h"
#include "sum/sum.h"

#define ANSWER_MS 120000

void s3_crc64_text(uint64_t crc, char ret_text[OBJECT_SUM_SIZE])
{
        uint8_t bytes[8];

        for (size_t i = 0; i < sizeof bytes; i++)
                bytes[i] = (uint8_t)(crc >> (56 - 8 * i));
        crypt_base64(bytes, sizeof bytes, ret_text);
}

static uint64_t crc64_of(const char *text)
{
        uint8_t bytes[8] = { 0 };
        uint64_t crc = 0;
        size_t size;

        crypt_base64_decode(text, bytes, sizeof bytes, &size);
        for (size_t i = 0; i < sizeof bytes; i++)
                crc = crc << 8 | bytes[i];
        return crc;
}

static bool has_sums(const struct object_store *store)
{
        return ((const struct s3_store *)store)->has_sums;
}

enum nebula_status s3_multipart_begin(struct object_store *store, const char *key, const char *id, char **ret_upload_id, struct nebula_error *error)
{
        struct object_call call = { .method = "POST", .key = key };
        struct http_response response;
        enum nebula_status status;

        object_param(&call, "uploads", NULL);
        object_header(&call, store->service->metadata, id);
        if (has_sums(store)) {
                object_header(&call, "x-amz-checksum-algorithm", "CRC64NVME");
                object_header(&call, "x-amz-checksum-type", "FULL_OBJECT");
        }
        status = store->service->send(store, &call, &response, error);
        if (status)
                return status;
        if (response.status != 200)
                status = store->service->fail(store, OBJECT_WRITE, key, &response, error);
        else if (!(*ret_upload_id = s3_value(&response, "UploadId")))
                status = error_set(error, NEBULA_STORAGE, 0, "cannot write %s/%s: the answer names no upload", store->store.root, key);
        http_response_done(&response);
        return status;
}

enum nebula_status s3_multipart_send(struct object_store *store, const char *key, const char *upload_id, uint64_t index, const void *data,
                                     uint64_t size, struct object_part *ret_part, const atomic_bool *stop, struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .key = key, .body = data, .body_size = size, .stop = stop };
        char number[24], sum[OBJECT_SUM_SIZE];
        struct http_response response;
        enum nebula_status status;

        snprintf(number, sizeof number, "%" PRIu64, index + 1);
        object_param(&call, "partNumber", number);
        object_param(&call, "uploadId", upload_id);
        store->service->add_object(store, &call, sum);
        ret_part->sum = has_sums(store) ? crc64_of(sum) : 0;
        status = store->service->send(store, &call, &response, error);
        if (status)
                return status;
        object_etag(&response, &ret_part->etag);
        if (response.status != 200)
                status = store->service->fail(store, OBJECT_WRITE, key, &response, error);
        else if (!*ret_part->etag.text)
                status = error_set(error, NEBULA_STORAGE, 0, "cannot write %s/%s: the answer names no ETag", store->store.root, key);
        http_response_done(&response);
        return status;
}

char *s3_multipart_list(const struct object_part *parts, uint64_t count, size_t *ret_size)
{
        struct buf buf = { 0 };

        buf_add_text(&buf, "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
        for (uint64_t i = 0; i < count; i++) {
                char text[2 * sizeof parts->etag.text];

                snprintf(text, sizeof text, "<Part><PartNumber>%" PRIu64 "</PartNumber><ETag>&quot;%s&quot;</ETag></Part>", i + 1, parts[i].etag.text);
                buf_add_text(&buf, text);
        }
        buf_add_text(&buf, "</CompleteMultipartUpload>");
        return buf_take(&buf, ret_size);
}

void s3_multipart_abort(struct object_store *store, const char *key, const char *upload_id)
{
        struct object_call call = { .method = "DELETE", .key = key };
        struct http_response response;

        object_param(&call, "uploadId", upload_id);
        if (!store->service->send(store, &call, &response, NULL))
                http_response_done(&response);
}

/*
 * It was refused. That may be because it was done before, and the answer lost: then the object has this upload's number. If nothing is
 * there, another write had the key in the meantime.
 */
static enum nebula_status look_whose(struct object_store *store, const char *key, const char *id, struct nebula_error *error)
{
        struct store_stamp stamp;
        enum nebula_status status = object_look_who_wrote(store, key, id, STORE_IF_ABSENT, NULL, &stamp, error);

        if (status == NEBULA_NOT_FOUND)
                return error_set(error, NEBULA_BUSY, 0, "%s/%s: another upload had this place, or a rule of the bucket has ended this one",
                                 store->store.root, key);
        return status;
}

enum nebula_status s3_complete(struct object_store *store, const char *key, const char *id, const char *upload_id, enum store_condition condition,
                               const struct object_part *parts, uint64_t count, const uint64_t *sum, struct nebula_error *error)
{
        struct object_call call = { .method = "POST", .key = key, .answer_ms = ANSWER_MS };
        char text[OBJECT_SUM_SIZE], *list;
        struct http_response response;
        enum nebula_status status;
        size_t size;

        list = s3_multipart_list(parts, count, &size);
        if (!list)
                return object_no_memory(store, error);
        call.body = list;
        call.body_size = size;
        object_param(&call, "uploadId", upload_id);
        object_header(&call, "If-None-Match", condition == STORE_IF_ABSENT ? "*" : NULL);
        if (sum) {
                s3_crc64_text(*sum, text);
                object_header(&call, "x-amz-checksum-crc64nvme", text);
                object_header(&call, "x-amz-checksum-type", "FULL_OBJECT");
        }
        status = s3_send_long(store, &call, &response, error);
        free(list);
        if (status)
                return status;
        if (response.status == 404 || s3_condition_failed(&response))
                status = look_whose(store, key, id, error);
        else if (response.status != 200)
                status = s3_fail(store, OBJECT_WRITE, key, &response, error);
        http_response_done(&response);
        return status;
}

static enum nebula_status begin(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                struct nebula_error *error)
{
        object->parts = calloc(object->part_count, sizeof *object->parts);
        if (!object->parts)
                return object_no_memory(store, error);
        return s3_multipart_begin(store, object->key, upload->id, &object->upload_id, error);
}

static enum nebula_status send_part(struct object_store *store, const struct store_upload *upload, struct object_upload *object, uint64_t index,
                                    const void *data, uint64_t size, const atomic_bool *stop, struct nebula_error *error)
{
        return s3_multipart_send(store, object->key, object->upload_id, index, data, size, &object->parts[index], stop, error);
}

static uint64_t whole_sum(const struct object_upload *object)
{
        uint64_t sum = 0;

        for (uint64_t i = 0; i < object->part_count; i++) {
                uint64_t left = object->size - i * object->part_bytes;

                sum = sum_crc64_combine(sum, object->parts[i].sum, left < object->part_bytes ? left : object->part_bytes);
        }
        return sum;
}

static enum nebula_status publish(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                  struct nebula_error *error)
{
        uint64_t sum = has_sums(store) ? whole_sum(object) : 0;

        return s3_complete(store, object->key, upload->id, object->upload_id, STORE_IF_ABSENT, object->parts, object->part_count,
                           has_sums(store) ? &sum : NULL, error);
}

static void abort_upload(struct object_store *store, const struct object_upload *object)
{
        if (object->upload_id)
                s3_multipart_abort(store, object->key, object->upload_id);
}

const struct object_steps s3_steps = { .begin = begin, .send = send_part, .publish = publish, .abort = abort_upload };
