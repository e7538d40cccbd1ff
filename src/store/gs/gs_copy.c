/* Copies inside the bucket: the service moves the bytes. */
#include <stdlib.h>

#include "base/error.h"
#include "store/gs/gs_private.h"

#define COPY_ANSWER_MS 120000

struct copying {
        struct gs_store *gs;
        const char *from, *to;
        enum store_condition condition;
        char id[OBJECT_ID_SIZE]; /* of all tries */
};

static enum nebula_status copy_once(void *argument, struct nebula_error *error)
{
        const struct copying *copying = argument;
        struct object_store *store = &copying->gs->s3.object;
        struct object_call call = { .method = "PUT", .key = copying->to, .answer_ms = COPY_ANSWER_MS };
        char text[OBJECT_QUOTED_SIZE], *source;
        struct http_response response;
        struct store_stamp stamp;
        enum nebula_status status;
        struct buf buf = { 0 };

        buf_add_byte(&buf, '/');
        buf_add_text(&buf, copying->gs->s3.address.bucket);
        buf_add_byte(&buf, '/');
        object_add_name(&buf, store, copying->from);
        source = object_take(&buf);
        if (!source)
                return object_no_memory(store, error);
        object_header(&call, "x-goog-copy-source", source);
        object_header(&call, "x-goog-metadata-directive", "REPLACE");
        object_header(&call, GS_METADATA, copying->id);
        gs_condition(&call, copying->condition, NULL, text);
        status = s3_send_long(store, &call, &response, error);
        free(source);
        if (status)
                return status;
        if (response.status == 412)
                status = object_look_who_wrote(store, copying->to, copying->id, STORE_IF_ABSENT, NULL, &stamp, error);
        else if (response.status != 200)
                status = gs_fail(store, OBJECT_COPY, copying->from, &response, error);
        http_response_done(&response);
        return status;
}

enum nebula_status gs_copy(struct store *store, const char *from, const char *to, enum store_condition condition, struct nebula_error *error)
{
        struct copying copying = { (struct gs_store *)store, from, to, condition, "" };
        struct object_store *object = &copying.gs->s3.object;
        enum nebula_status status = object_check_key(object, from, error);
        struct store_entry entry;

        object_new_id(copying.id);
        if (!status)
                status = object_check_key(object, to, error);
        if (!status && condition == STORE_IF_SAME)
                status = error_set(error, NEBULA_INVALID, 0, "%s/%s: the only condition of a copy is STORE_IF_ABSENT", store->root, to);
        if (!status) /* trying again does not help if the source is absent */
                status = object_look(object, from, &entry, NULL, error);
        return status ? status : object_try_again(object, to, copy_once, &copying, error);
}
