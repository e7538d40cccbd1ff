/* Multipart uploads. Parts are sent from the caller's memory, several at once, each as soon as it is final. S3 does not show them. The
 * completion makes them the object, if there is none. An upload that is neither completed nor aborted stays, and costs money, until a
 * sweep or a rule of the bucket ends it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/http/crypt.h"
#include "store/s3/s3_private.h"
#include "sum/sum.h"

#define ANSWER_MS 120000
#define CONFLICTS_MAX 3 /* answers that another write of the key is running */

void s3_crc64_text(uint64_t crc, char ret_text[OBJECT_SUM_SIZE])
{
        uint8_t bytes[8];

        for (size_t i = 0; i < sizeof bytes; i++)
                bytes[i] = (uint8_t)(crc >> (56 - 8 * i));
        crypt_base64(bytes, sizeof bytes, ret_text);
}

uint64_t s3_crc64_of(const char *text)
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
        return atomic_load(&((const struct s3_store *)store)->has_sums);
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

enum nebula_status s3_multipart_send(struct object_store *store, const char *key, const char *upload_id,
                                     const struct object_range *range, const void *data, struct object_part *ret_part, const atomic_bool *stop,
                                     struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .key = key, .body = data, .body_size = range->size,
                                    .body_sum = range->has_sum ? &range->sum : NULL, .moved = range->moved, .stop = stop };
        char number[24], sum[OBJECT_SUM_SIZE];
        struct http_response response;
        enum nebula_status status;

        snprintf(number, sizeof number, "%" PRIu64, range->index + 1);
        object_param(&call, "partNumber", number);
        object_param(&call, "uploadId", upload_id);
        store->service->add_object(store, &call, sum);
        ret_part->sum = has_sums(store) ? s3_crc64_of(sum) : 0;
        ret_part->size = range->size;
        status = store->service->send(store, &call, &response, error);
        if (status)
                return status;
        object_etag(&response, &ret_part->etag);
        if (response.status == 404 && s3_is_code(&response, "NoSuchUpload"))
                status = error_set(error, NEBULA_STORAGE, 0, "cannot write %s/%s: a sweep, or a rule of the bucket, has ended its upload",
                                   store->store.root, key);
        else if (response.status != 200)
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

enum nebula_status s3_multipart_abort(struct object_store *store, const char *key, const char *upload_id, struct nebula_error *error)
{
        struct object_call call = { .method = "DELETE", .key = key };
        struct http_response response;
        enum nebula_status status;

        object_param(&call, "uploadId", upload_id);
        status = store->service->send(store, &call, &response, error);
        if (!status)
                http_response_done(&response);
        return status;
}

/* The completion of an upload: one request, repeated while another write of the key is running. */
struct completing {
        struct object_store *store;
        const char *key, *id, *upload_id;
        enum store_condition condition;
        const char *list; /* of the parts */
        size_t list_size;
        const uint64_t *sum;
        bool is_under_way; /* the last answer: another write of the key is running */
        bool was_lost;     /* the answer of a try: then that try may be the other write */
        bool is_reserved;  /* the key is: then what is there is the reservation, or this object */
        uint64_t size;     /* of the object */
};

/* NEBULA_OK: the object has this upload's id, so an earlier completion succeeded and its answer was lost. NEBULA_NOT_FOUND: there is no
 * object. */
static enum nebula_status look_whose(const struct completing *completing, struct nebula_error *error)
{
        struct store_stamp stamp;
        struct store_entry entry;
        enum nebula_status status;

        if (!completing->is_reserved)
                return object_look_who_wrote(completing->store, completing->key, completing->id, STORE_IF_ABSENT, NULL, &stamp, error);
        status = object_look(completing->store, completing->key, &entry, NULL, error);
        if (status || (entry.size == completing->size && !s3_is_reserved(completing->store, completing->key, completing->id)))
                return status;
        return NEBULA_NOT_FOUND;
}

static enum nebula_status refused(struct completing *completing, const struct http_response *response, struct nebula_error *error)
{
        enum nebula_status status;

        completing->is_under_way = s3_is_under_way(response);
        if (response->status != 404 && !s3_condition_failed(response))
                return s3_fail(completing->store, OBJECT_WRITE, completing->key, response, error);
        status = look_whose(completing, error);
        if (completing->is_under_way && completing->condition == STORE_ALWAYS && status == NEBULA_BUSY)
                return NEBULA_NOT_FOUND; /* STORE_ALWAYS: this upload replaces the object */
        if (completing->is_under_way || status != NEBULA_NOT_FOUND)
                return status;
        return error_set(error, NEBULA_BUSY, 0, "%s/%s: another upload had this place, or a rule of the bucket has ended this one",
                         completing->store->store.root, completing->key);
}

/* NEBULA_NOT_FOUND: another write of the key is running, and there is no object. It may be an earlier try of this completion whose
 * answer was lost. */
static enum nebula_status complete_once(struct completing *completing, struct nebula_error *error)
{
        struct object_call call = { .method = "POST", .key = completing->key, .answer_ms = ANSWER_MS, .body = completing->list,
                                    .body_size = completing->list_size };
        char text[OBJECT_SUM_SIZE];
        struct http_response response;
        enum nebula_status status;

        object_param(&call, "uploadId", completing->upload_id);
        object_header(&call, "If-None-Match", completing->condition == STORE_IF_ABSENT && !completing->is_reserved ? "*" : NULL);
        if (completing->sum) {
                s3_crc64_text(*completing->sum, text);
                object_header(&call, "x-amz-checksum-crc64nvme", text);
                object_header(&call, "x-amz-checksum-type", "FULL_OBJECT");
        }
        status = s3_send_long(completing->store, &call, &response, error);
        if (status)
                return status;
        completing->was_lost = completing->was_lost || response.tries > 1;
        if (response.status != 200)
                status = refused(completing, &response, error);
        http_response_done(&response);
        return status;
}

/* Aborts the upload, so that a late completion has no effect. Then the object either exists or never will. */
static enum nebula_status give_up(const struct completing *completing, struct nebula_error *error)
{
        enum nebula_status status;

        s3_multipart_abort(completing->store, completing->key, completing->upload_id, NULL);
        status = look_whose(completing, error);
        if (status == NEBULA_NOT_FOUND || (status == NEBULA_BUSY && completing->condition == STORE_ALWAYS))
                status = error_set(error, NEBULA_STORAGE, 0, "cannot write %s/%s: the store says that another write of it runs, so it needs a new upload", completing->store->store.root,
                                   completing->key);
        return status;
}

/* S3 lets no upload be completed that met another write: only a new upload can be. */
static enum nebula_status complete(struct completing *completing, struct nebula_error *error)
{
        struct http_settings settings = http_settings_now();
        int64_t until_ns = os->now_ns() + settings.retry_ms * 1000000, pause_ms = settings.pause_ms;
        enum nebula_status status;

        for (int conflicts = 1; (status = complete_once(completing, error)) == NEBULA_NOT_FOUND && completing->is_under_way; conflicts++) {
                if (os->now_ns() >= until_ns || (conflicts >= CONFLICTS_MAX && !completing->was_lost))
                        break;
                os->sleep_ms(pause_ms);
                pause_ms = 2 * pause_ms < settings.pause_max_ms ? 2 * pause_ms : settings.pause_max_ms;
        }
        return status == NEBULA_NOT_FOUND && completing->is_under_way ? give_up(completing, error) : status;
}

static enum nebula_status reserve(struct completing *completing, struct nebula_error *error)
{
        enum s3_uploads uploads = S3_UPLOADS_CHECKED;
        enum nebula_status status = NEBULA_OK;

        if (completing->condition == STORE_IF_ABSENT)
                status = s3_find_uploads((struct s3_store *)completing->store, &uploads, error);
        if (status || uploads != S3_UPLOADS_RESERVED)
                return status;
        completing->is_reserved = true;
        return s3_reserve(completing->store, completing->key, completing->id, error);
}

enum nebula_status s3_complete(struct object_store *store, const char *key, const char *id, const char *upload_id, enum store_condition condition,
                               const struct object_part *parts, uint64_t count, const uint64_t *sum, struct nebula_error *error)
{
        struct completing completing = { .store = store, .key = key, .id = id, .upload_id = upload_id, .condition = condition, .sum = sum };
        char *list = s3_multipart_list(parts, count, &completing.list_size);
        enum nebula_status status;

        if (!list)
                return object_no_memory(store, error);
        completing.list = list;
        for (uint64_t i = 0; i < count; i++)
                completing.size += parts[i].size;
        status = reserve(&completing, error);
        if (!status) /* after a failure the reservation stays: this completion may come late */
                status = complete(&completing, error);
        free(list);
        return status;
}

static enum nebula_status begin(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                struct nebula_error *error)
{
        enum nebula_status status;

        (void)upload;
        object->parts = calloc(object->part_count, sizeof *object->parts);
        if (!object->parts)
                return object_no_memory(store, error);
        status = s3_resume_find(store, object, error);
        if (!status && !object->upload_id)
                status = s3_multipart_begin(store, object->key, object->id, &object->upload_id, error);
        return status ? status : s3_resume_describe(store, object, error);
}

static enum nebula_status send_part(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                    const struct object_range *range, const void *data, const atomic_bool *stop, struct nebula_error *error)
{
        return s3_multipart_send(store, object->key, object->upload_id, range, data, &object->parts[range->index], stop, error);
}

static uint64_t whole_sum(const struct object_upload *object)
{
        uint64_t sum = 0;

        for (uint64_t i = 0; i < object->part_count; i++)
                sum = sum_crc64_combine(sum, object->parts[i].sum, object->parts[i].size);
        return sum;
}

static enum nebula_status publish(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                  struct nebula_error *error)
{
        uint64_t sum = has_sums(store) ? whole_sum(object) : 0;

        (void)upload;
        return s3_complete(store, object->key, object->id, object->upload_id, STORE_IF_ABSENT, object->parts, object->part_count,
                           has_sums(store) ? &sum : NULL, error);
}

static void abort_upload(struct object_store *store, const struct object_upload *object)
{
        if (object->upload_id)
                s3_multipart_abort(store, object->key, object->upload_id, NULL);
}

const struct object_steps s3_steps = { .begin = begin, .can_resume = true, .puts_small = true, .send = send_part, .refer = s3_refer, .publish = publish, .abort = abort_upload };
