/* Copies inside the store: no client reads the bytes. CopyObject replaces the object that has the key. A conditional copy is a multipart
 * upload whose parts are ranges of the source, because more servers support conditions there. A copy of more than 5 GiB is one, too. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/http/crypt.h"
#include "store/s3/s3_private.h"
#include "sum/sum.h"

#define COPY_ANSWER_MS 120000
#define COPY_PART_BYTES (UINT64_C(1) << 30)
#define COPY_ONCE_MAX (UINT64_C(5) << 30)

/* "/bucket/name", encoded for a URL. NULL: no memory. */
static char *source_of(const struct s3_store *s3, const char *key)
{
        struct buf buf = { 0 };

        buf_add_byte(&buf, '/');
        buf_add_text(&buf, s3->address.bucket);
        buf_add_byte(&buf, '/');
        object_add_name(&buf, &s3->object, key);
        return object_take(&buf);
}

static enum nebula_status copy_once(struct s3_store *s3, const char *source, const char *from, const char *to, struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .key = to, .answer_ms = COPY_ANSWER_MS };
        char id[OBJECT_ID_SIZE];
        struct http_response response;
        enum nebula_status status;

        object_new_id(id);
        object_header(&call, "x-amz-copy-source", source);
        object_header(&call, "x-amz-metadata-directive", "REPLACE");
        object_header(&call, S3_METADATA, id);
        status = s3_send_long(&s3->object, &call, &response, error);
        if (!status && response.status != 200)
                status = s3_fail(&s3->object, OBJECT_COPY, from, &response, error);
        http_response_done(&response);
        return status;
}

/* A copy whose parts are ranges of the source. */
struct copying {
        const char *source, *from, *to, *upload_id;
        const struct store_stamp *stamp; /* of the source */
        uint64_t index, first, size;
        const void *data; /* the bytes that the source must have; NULL: whatever it has */
        const uint64_t *sum; /* of `data` */
        const atomic_bool *stop;
};

/* Compares the service's checksum of the part with that of the bytes in memory: it has read the source, whose bytes may have rotted. Stores
 * without CRC-64 say the MD5 as the ETag. */
static bool is_true_copy(const struct copying *copying, const struct http_response *response, const char *etag)
{
        char *sum = s3_value(response, "ChecksumCRC64NVME"), md5[CRYPT_MD5_SIZE];
        struct store_stamp said;
        bool is_so;

        object_etag_text(etag, &said);
        if (sum)
                is_so = s3_crc64_of(sum) == *copying->sum;
        else
                is_so = strlen(said.text) == CRYPT_MD5_SIZE - 1 && crypt_md5(copying->data, copying->size, md5) && !strcmp(said.text, md5);
        free(sum);
        return is_so;
}

static enum nebula_status copy_range(struct s3_store *s3, const struct copying *copying, struct object_part *ret_part, struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .key = copying->to, .answer_ms = COPY_ANSWER_MS, .stop = copying->stop };
        char number[24], range[64], quoted[OBJECT_QUOTED_SIZE], *etag;
        struct http_response response;
        enum nebula_status status;

        snprintf(number, sizeof number, "%" PRIu64, copying->index + 1);
        snprintf(range, sizeof range, "bytes=%" PRIu64 "-%" PRIu64, copying->first, copying->first + copying->size - 1);
        object_param(&call, "partNumber", number);
        object_param(&call, "uploadId", copying->upload_id);
        object_header(&call, "x-amz-copy-source", copying->source);
        object_header(&call, "x-amz-copy-source-range", range);
        object_header(&call, "x-amz-copy-source-if-match", object_quoted(copying->stamp, quoted));
        status = s3_send_long(&s3->object, &call, &response, error);
        if (status)
                return status;
        etag = response.status == 200 ? s3_value(&response, "ETag") : NULL;
        if (etag && copying->data && !is_true_copy(copying, &response, etag))
                status = error_set(error, NEBULA_CORRUPT, 0, "the service's checksum of the copied bytes is missing, or is another one");
        else if (etag)
                object_etag_text(etag, &ret_part->etag);
        else
                status = s3_fail(&s3->object, OBJECT_COPY, copying->from, &response, error);
        if (status && s3_is_lacking(&response)) {
                atomic_store(&s3->lacks_part_copy, true);
                atomic_store(&s3->object.never_refers, true);
        }
        free(etag);
        http_response_done(&response);
        return status;
}

static enum nebula_status copy_part(struct s3_store *s3, const char *source, const char *from, const char *to, const char *upload_id,
                                    const struct store_entry *entry, uint64_t index, struct object_part *ret_part, struct nebula_error *error)
{
        struct copying copying = { .source = source, .from = from, .to = to, .upload_id = upload_id, .stamp = &entry->stamp, .index = index,
                                   .first = index * COPY_PART_BYTES };

        copying.size = entry->size - copying.first < COPY_PART_BYTES ? entry->size - copying.first : COPY_PART_BYTES;
        ret_part->size = copying.size;
        if (!copying.size) /* an empty range cannot be copied */
                return s3_multipart_send(&s3->object, to, upload_id, &(struct object_range){ .index = index }, "", ret_part, NULL, error);
        return copy_range(s3, &copying, ret_part, error);
}

enum nebula_status s3_refer(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                            const struct object_range *range, const void *data, const atomic_bool *stop, struct nebula_error *error)
{
        struct s3_store *s3 = (struct s3_store *)store;
        struct object_part *part = &object->parts[range->index];
        struct copying copying = { .from = object->source->key, .to = object->key, .upload_id = object->upload_id, .stamp = &object->source_stamp,
                                   .index = range->index, .first = range->offset, .size = range->size, .data = data, .stop = stop };
        uint64_t sum = object_range_sum(range, data);
        char *source = source_of(s3, copying.from);
        enum nebula_status status;

        (void)upload;
        if (!source)
                return object_no_memory(store, error);
        copying.source = source;
        copying.sum = &sum;
        status = copy_range(s3, &copying, part, error);
        part->size = range->size;
        part->sum = atomic_load(&s3->has_sums) ? sum : 0;
        free(source);
        return status;
}

/* For a store that copies whole objects only. */
static enum nebula_status reserve_and_copy(struct s3_store *s3, const char *source, const char *from, const char *to, enum store_condition condition,
                                           struct nebula_error *error)
{
        char id[OBJECT_ID_SIZE];
        enum nebula_status status = NEBULA_OK;

        object_new_id(id);
        if (condition == STORE_IF_ABSENT)
                status = s3_reserve(&s3->object, to, id, error);
        if (status)
                return status;
        status = copy_once(s3, source, from, to, error);
        if (status && condition == STORE_IF_ABSENT)
                s3_release(&s3->object, to, id);
        return status;
}

static enum nebula_status copy_parts(struct s3_store *s3, const char *source, const char *from, const char *to, enum store_condition condition,
                                     const struct store_entry *entry, struct nebula_error *error)
{
        uint64_t count = entry->size ? (entry->size + COPY_PART_BYTES - 1) / COPY_PART_BYTES : 1;
        struct object_part *parts = calloc((size_t)count, sizeof *parts);
        char id[OBJECT_ID_SIZE], *upload_id = NULL;
        enum nebula_status status;

        if (!parts)
                return object_no_memory(&s3->object, error);
        object_new_id(id);
        status = s3_multipart_begin(&s3->object, to, id, &upload_id, error);
        for (uint64_t i = 0; i < count && !status; i++)
                status = copy_part(s3, source, from, to, upload_id, entry, i, &parts[i], error);
        if (!status)
                status = s3_complete(&s3->object, to, id, upload_id, condition, parts, count, NULL, error);
        if (status && upload_id)
                s3_multipart_abort(&s3->object, to, upload_id, NULL);
        free(upload_id);
        free(parts);
        return status;
}

static enum nebula_status copy_by_parts(struct s3_store *s3, const char *source, const char *from, const char *to, enum store_condition condition,
                                        const struct store_entry *entry, struct nebula_error *error)
{
        enum nebula_status status;

        if (!atomic_load(&s3->lacks_part_copy)) {
                status = copy_parts(s3, source, from, to, condition, entry, error);
                if (!status || status == NEBULA_BUSY || !atomic_load(&s3->lacks_part_copy))
                        return status;
        }
        return reserve_and_copy(s3, source, from, to, condition, error);
}

enum nebula_status s3_copy(struct store *store, const char *from, const char *to, enum store_condition condition, struct nebula_error *error)
{
        struct s3_store *s3 = (struct s3_store *)store;
        enum nebula_status status = object_check_key(&s3->object, from, error);
        struct store_entry entry;
        char *source;

        if (!status)
                status = object_check_key(&s3->object, to, error);
        if (!status && condition == STORE_IF_SAME)
                status = error_set(error, NEBULA_INVALID, 0, "%s/%s: the only condition of a copy is STORE_IF_ABSENT", store->root, to);
        if (!status)
                status = object_look(&s3->object, from, &entry, NULL, error);
        if (status)
                return status;
        source = source_of(s3, from);
        if (!source)
                return object_no_memory(&s3->object, error);
        if (condition == STORE_ALWAYS && entry.size <= COPY_ONCE_MAX)
                status = copy_once(s3, source, from, to, error);
        else
                status = copy_by_parts(s3, source, from, to, condition, &entry, error);
        free(source);
        return status;
}
