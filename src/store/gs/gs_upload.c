/* Large objects. Their parts are a multipart upload of a temporary object, which Google does not show. Publishing completes it, composes
 * the object from the temporary one, if there is none, and removes the temporary one. If an agent dies in between, a sweep finds the
 * temporary object. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/gs/gs_private.h"

#define ANSWER_MS 120000

static enum nebula_status begin(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                struct nebula_error *error)
{
        enum nebula_status status;

        object->place = object_make_place(upload, object);
        object->parts = calloc(object->part_count, sizeof *object->parts);
        if (!object->place || !object->parts)
                return object_no_memory(store, error);
        status = s3_resume_find(store, object, error);
        if (!status && !object->upload_id)
                status = s3_multipart_begin(store, object->place, object->id, &object->upload_id, error);
        return status ? status : s3_resume_describe(store, object, error);
}

static enum nebula_status send_part(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                    const struct object_range *range, const void *data, const atomic_bool *stop, struct nebula_error *error)
{
        return s3_multipart_send(store, object->place, object->upload_id, range, data, &object->parts[range->index], stop, error);
}

/* Completes the upload of the temporary object. If an answer was lost, the upload is gone and the object has its id. */
static enum nebula_status complete(struct object_store *store, const struct object_upload *object, struct nebula_error *error)
{
        struct object_call call = { .method = "POST", .key = object->place, .answer_ms = ANSWER_MS };
        struct http_response response;
        struct store_stamp stamp;
        enum nebula_status status;
        size_t size;
        char *list;

        list = s3_multipart_list(object->parts, object->part_count, &size);
        if (!list)
                return object_no_memory(store, error);
        call.body = list;
        call.body_size = size;
        object_param(&call, "uploadId", object->upload_id);
        status = s3_send_long(store, &call, &response, error);
        free(list);
        if (status)
                return status;
        if (response.status == 404)
                status = object_look_who_wrote(store, object->place, object->id, STORE_IF_ABSENT, NULL, &stamp, error);
        else if (response.status != 200)
                status = gs_fail(store, OBJECT_WRITE, object->key, &response, error);
        http_response_done(&response);
        return status;
}

struct composing {
        struct object_store *store;
        const struct object_upload *object;
};

/* Composes the object from the temporary one. NEBULA_NOT_FOUND: the condition failed, but there is no object. */
static enum nebula_status compose_once(void *argument, struct nebula_error *error)
{
        const struct composing *composing = argument;
        struct object_store *store = composing->store;
        struct object_call call = { .method = "PUT", .key = composing->object->key, .answer_ms = ANSWER_MS };
        char text[OBJECT_QUOTED_SIZE], *body;
        struct http_response response;
        struct store_stamp stamp;
        enum nebula_status status;
        struct buf buf = { 0 };
        size_t size;

        buf_add_text(&buf, "<ComposeRequest><Component><Name>");
        /* A prefix may contain '&', '<' and '>'. */
        for (const char *byte = store->prefix; *byte; byte++) {
                if (*byte == '&' || *byte == '<' || *byte == '>')
                        buf_add_text(&buf, *byte == '&' ? "&amp;" : *byte == '<' ? "&lt;" : "&gt;");
                else
                        buf_add_byte(&buf, (uint8_t)*byte);
        }
        buf_add_text(&buf, composing->object->place);
        buf_add_text(&buf, "</Name></Component></ComposeRequest>");
        body = buf_take(&buf, &size);
        if (!body)
                return object_no_memory(store, error);
        call.body = body;
        call.body_size = size;
        object_param(&call, "compose", NULL);
        object_header(&call, GS_METADATA, composing->object->id);
        gs_condition(&call, STORE_IF_ABSENT, NULL, text);
        status = s3_send_long(store, &call, &response, error);
        free(body);
        if (status)
                return status;
        if (response.status == 412)
                status = object_look_who_wrote(store, composing->object->key, composing->object->id, STORE_IF_ABSENT, NULL, &stamp, error);
        else if (response.status == 404)
                status = error_set(error, NEBULA_STORAGE, 0, "cannot write %s/%s: its temporary object is gone", store->store.root, composing->object->key);
        else if (response.status != 200)
                status = gs_fail(store, OBJECT_WRITE, composing->object->key, &response, error);
        http_response_done(&response);
        return status;
}

static enum nebula_status publish(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                  struct nebula_error *error)
{
        struct composing composing = { store, object };
        enum nebula_status status = complete(store, object, error);

        if (status)
                return status;
        object->is_over = true;
        status = object_try_again(store, object->key, compose_once, &composing, error);
        store_remove_one(&store->store, object->place, NULL); /* else a sweep does */
        return status;
}

static void abort_upload(struct object_store *store, const struct object_upload *object)
{
        if (object->upload_id)
                s3_multipart_abort(store, object->place, object->upload_id, NULL);
}

const struct object_steps gs_steps = { .begin = begin, .can_resume = true, .puts_small = true, .send = send_part, .publish = publish, .abort = abort_upload };
