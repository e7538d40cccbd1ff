/*
 * What a store that speaks S3's protocol lacks. Amazon's own endpoints are not asked. An answer counts until the store is closed.
 *
 * A large object must not replace another one. If the store ignores the condition of a completion, or keeps no metadata by which a lost
 * answer is found again, the upload reserves its key first: it writes a small object there, under If-None-Match. Only the writer of that
 * object completes an upload of this key.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "store/s3/s3_private.h"

#define RESERVE_SIZE 64

bool s3_is_lacking(const struct http_response *response)
{
        return response->status == 501 || response->status == 405 || s3_is_code(response, "NotImplemented") || s3_is_code(response, "NotSupported");
}

/* Tries the condition of a completion where there is an object already. *ret_is_kept: the store refuses it. */
static enum nebula_status try_condition(struct s3_store *s3, const char *key, const char *id, bool *ret_is_kept, struct nebula_error *error)
{
        struct object_call call = { .method = "POST", .key = key };
        struct object_range range = { .index = 0, .size = 1 };
        struct object_part part = { 0 };
        struct http_response response = { 0 };
        char *upload_id = NULL, *list = NULL;
        enum nebula_status status = s3_multipart_begin(&s3->object, key, id, &upload_id, error);
        size_t size = 0;

        if (!status)
                status = s3_multipart_send(&s3->object, key, upload_id, &range, "p", &part, NULL, error);
        if (!status && !(list = s3_multipart_list(&part, 1, &size)))
                status = object_no_memory(&s3->object, error);
        if (!status) {
                call.body = list;
                call.body_size = size;
                object_param(&call, "uploadId", upload_id);
                object_header(&call, "If-None-Match", "*");
                status = s3_send_long(&s3->object, &call, &response, error);
        }
        if (!status && response.status != 200 && !s3_condition_failed(&response) && !s3_is_lacking(&response) && response.status != 400)
                status = s3_fail(&s3->object, OBJECT_WRITE, key, &response, error);
        *ret_is_kept = !status && s3_condition_failed(&response);
        if (upload_id && response.status != 200)
                s3_multipart_abort(&s3->object, key, upload_id, NULL);
        http_response_done(&response);
        free(upload_id);
        free(list);
        return status;
}

static void report(const struct s3_store *s3, bool keeps_ids)
{
        log_event(LOG_LEVEL_INFO, "%s %s: each large object reserves its name before it is written", s3->object.store.root,
                  keeps_ids ? "ignores the condition of a completed upload" : "keeps no metadata of objects");
}

static enum nebula_status probe(struct s3_store *s3, enum s3_uploads *ret_uploads, struct nebula_error *error)
{
        char id[OBJECT_ID_SIZE], found[OBJECT_ID_SIZE], key[64];
        bool keeps_ids = false, is_kept = false;
        struct store_victim victim = { .key = key };
        struct store_entry entry = { 0 };
        enum nebula_status status;

        object_new_id(id);
        snprintf(key, sizeof key, STORE_TEMP_TOP "%s-0", id);
        status = object_put_as(&s3->object, key, "p", 1, id, error);
        if (!status)
                status = object_look(&s3->object, key, &entry, found, error);
        keeps_ids = !status && !strcmp(found, id);
        if (keeps_ids)
                status = try_condition(s3, key, id, &is_kept, error);
        if (*entry.stamp.text)
                victim.stamp = entry.stamp;
        object_remove(&s3->object.store, &victim, 1, NULL); /* this shows whether removals have a condition */
        store_drop(&s3->object.store, key); /* the completion may have replaced it */
        if (status)
                return status;
        *ret_uploads = is_kept ? S3_UPLOADS_CHECKED : S3_UPLOADS_RESERVED;
        atomic_store(&s3->keeps_ids, keeps_ids);
        if (!keeps_ids)
                atomic_store(&s3->object.never_refers, true); /* without a mark no object is known as a source */
        if (!is_kept)
                report(s3, keeps_ids);
        return NEBULA_OK;
}

enum nebula_status s3_find_uploads(struct s3_store *s3, enum s3_uploads *ret_uploads, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;
        enum s3_uploads found = (enum s3_uploads)atomic_load(&s3->uploads);

        if (found == S3_UPLOADS_UNKNOWN)
                status = probe(s3, &found, error);
        if (status)
                return status;
        atomic_store(&s3->uploads, found);
        *ret_uploads = found;
        return NEBULA_OK;
}

static void reservation(const char *id, char text[RESERVE_SIZE])
{
        snprintf(text, RESERVE_SIZE, "nebula: write %s of this object is not complete\n", id);
}

enum nebula_status s3_reserve(struct object_store *store, const char *key, const char *id, struct nebula_error *error)
{
        char text[RESERVE_SIZE];

        reservation(id, text);
        return object_put_as(store, key, text, strlen(text), id, error);
}

bool s3_is_reserved(struct object_store *store, const char *key, const char *id)
{
        char wanted[RESERVE_SIZE], *text = NULL;
        bool is_so;

        reservation(id, wanted);
        is_so = !object_get(&store->store, key, RESERVE_SIZE, &text, NULL, NULL, NULL) && !strcmp(text, wanted);
        free(text);
        return is_so;
}

void s3_release(struct object_store *store, const char *key, const char *id)
{
        struct store_victim victim = { .key = key };
        struct store_entry entry;

        if (!s3_is_reserved(store, key, id) || object_look(store, key, &entry, NULL, NULL))
                return;
        victim.stamp = entry.stamp;
        object_remove(&store->store, &victim, 1, NULL);
}

enum nebula_status s3_lacks(struct store *store, char *ret_text, size_t size, struct nebula_error *error)
{
        struct s3_store *s3 = (struct s3_store *)store;
        enum s3_uploads uploads = S3_UPLOADS_CHECKED;
        struct buf buf = { 0 };
        enum nebula_status status = s3_find_uploads(s3, &uploads, error);
        const struct {
                bool is_so;
                const char *name;
        } lacks[] = {
                { !atomic_load(&s3->keeps_ids), "metadata of objects (x-amz-meta-*)" },
                { uploads == S3_UPLOADS_RESERVED && atomic_load(&s3->keeps_ids), "If-None-Match of a completed upload" },
                { atomic_load(&s3->object.removal_trust) == OBJECT_NO_TRUST, "If-Match of a removal" },
                { atomic_load(&s3->lacks_part_copy), "UploadPartCopy" },
                { atomic_load(&s3->refuses_sums), "x-amz-checksum-crc64nvme" },
        };
        char *text;

        if (status)
                return status;
        for (size_t i = 0; i < sizeof lacks / sizeof *lacks; i++)
                if (lacks[i].is_so) {
                        buf_add_text(&buf, buf.size ? ", " : "");
                        buf_add_text(&buf, lacks[i].name);
                }
        text = object_take(&buf);
        if (!text)
                return object_no_memory(&s3->object, error);
        snprintf(ret_text, size, "%s", text);
        free(text);
        return NEBULA_OK;
}
