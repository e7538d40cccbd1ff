/* The requests of a write. A temporary file is created, appended to, and flushed; then it is durable. A rename with the condition makes it
 * the object. If an agent dies before that, a sweep finds the temporary file. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/adls/adls_private.h"
#include "store/http/crypt.h"

#define ANSWER_MS 120000
#define RENAME_TRIES 8 /* while other writers remove the directory that this writer makes */

static bool is_code(const struct http_response *response, const char *code)
{
        return !strcmp(azure_code(response), code);
}

/* Whether the condition failed. */
static bool is_taken(const struct http_response *response)
{
        return response->status == 412 || is_code(response, "PathAlreadyExists");
}

static enum nebula_status finish(struct object_store *store, const char *key, const struct object_call *call, struct nebula_error *error)
{
        struct http_response response;
        enum nebula_status status = azure_send(store, call, &response, error);

        if (!status && !object_is_done(&response))
                status = adls_fail(store, OBJECT_WRITE, key, &response, error);
        http_response_done(&response);
        return status;
}

static enum nebula_status place_is_gone(const struct object_store *store, const char *key, struct nebula_error *error)
{
        return error_set(error, NEBULA_STORAGE, 0, "cannot write %s/%s: its temporary file is gone", store->store.root, key);
}

#define PROPERTIES_SIZE (CRYPT_BASE64_SIZE(OBJECT_ID_SIZE) + CRYPT_BASE64_SIZE(ADLS_SENT_SIZE) + 32)

/* The id of the write and, unless it is NULL, how much of the file was sent. */
static void add_properties(struct object_call *call, const char *id, const char *sent, char text[PROPERTIES_SIZE])
{
        char encoded[CRYPT_BASE64_SIZE(OBJECT_ID_SIZE)], encoded_sent[CRYPT_BASE64_SIZE(ADLS_SENT_SIZE)] = "";

        crypt_base64(id, strlen(id), encoded);
        if (sent)
                crypt_base64(sent, strlen(sent), encoded_sent);
        snprintf(text, PROPERTIES_SIZE, "nebula=%s%s%s", encoded, sent ? "," ADLS_SENT "=" : "", encoded_sent);
        object_header(call, "x-ms-properties", text);
}

enum nebula_status adls_set_properties(struct object_store *store, const struct object_upload *object, const char *sent, const atomic_bool *stop,
                                       struct nebula_error *error)
{
        struct object_call call = { .method = "PATCH", .key = object->place, .stop = stop };
        char properties[PROPERTIES_SIZE];

        object_param(&call, "action", "setProperties");
        add_properties(&call, object->id, sent, properties);
        return finish(store, object->key, &call, error);
}

/* Creates an empty temporary file with the id of the write. `key`: for messages. The condition prevents a late duplicate of the request
 * from emptying the file. If the condition fails because the first answer was lost, the file has this id. */
enum nebula_status adls_create(struct object_store *store, const char *key, const char *place, const char *id, struct nebula_error *error)
{
        struct object_call call = { .method = "PUT", .key = place };
        char properties[PROPERTIES_SIZE];
        struct http_response response;
        struct store_stamp stamp;
        enum nebula_status status;

        object_param(&call, "resource", "file");
        add_properties(&call, id, NULL, properties);
        object_header(&call, "If-None-Match", "*");
        status = azure_send(store, &call, &response, error);
        if (status)
                return status;
        if (is_taken(&response)) {
                status = object_look_who_wrote(store, place, id, STORE_IF_ABSENT, NULL, &stamp, error);
                if (status == NEBULA_NOT_FOUND)
                        status = place_is_gone(store, key, error);
        } else if (!object_is_done(&response)) {
                status = adls_fail(store, OBJECT_WRITE, key, &response, error);
        }
        http_response_done(&response);
        return status;
}

enum nebula_status adls_append(struct object_store *store, const char *key, const char *place, const struct object_range *range, const void *data,
                               const atomic_bool *stop, struct nebula_error *error)
{
        struct object_call call = { .method = "PATCH", .key = place, .body = data, .body_size = range->size, .moved = range->moved, .stop = stop };
        char position[24], sum[OBJECT_SUM_SIZE];

        snprintf(position, sizeof position, "%" PRIu64, range->offset);
        azure_crc64_text(object_range_sum(range, data), sum);
        object_param(&call, "action", "append");
        object_param(&call, "position", position);
        object_header(&call, "x-ms-content-crc64", sum);
        return finish(store, key, &call, error);
}

enum nebula_status adls_flush(struct object_store *store, const char *key, const char *place, uint64_t size, enum adls_flushing how,
                              struct nebula_error *error)
{
        struct object_call call = { .method = "PATCH", .key = place, .answer_ms = ANSWER_MS };
        char position[24];

        snprintf(position, sizeof position, "%" PRIu64, size);
        object_param(&call, "action", "flush");
        object_param(&call, "position", position);
        if (how == ADLS_FLUSH_ALL)
                object_param(&call, "close", "true");
        if (how == ADLS_FLUSH_FIRST)
                object_param(&call, "retainUncommittedData", "true");
        return finish(store, key, &call, error);
}

/* Makes the directory of the key, with its parents. */
static enum nebula_status make_parent(struct object_store *store, const char *key, struct nebula_error *error)
{
        char parent[STORE_KEY_MAX], *slash;
        struct object_call call = { .method = "PUT", .key = parent };

        memcpy(parent, key, strlen(key) + 1);
        slash = strrchr(parent, '/');
        if (!slash)
                return NEBULA_OK;
        *slash = 0;
        object_param(&call, "resource", "directory");
        return finish(store, key, &call, error);
}

/* "/container/name" of the temporary file. */
static char *source_of(const struct azure_store *azure, const char *place)
{
        struct buf buf = { 0 };

        buf_add_byte(&buf, '/');
        buf_add_text(&buf, azure->address.container);
        buf_add_byte(&buf, '/');
        object_add_name(&buf, &azure->object, place);
        return object_take(&buf);
}

/* The rename found no temporary file. Either it succeeded before and its answer was lost: then the object has this write's id. Or the
 * file was removed, for instance by a sweep: then nothing was written. An object of another write proves neither, so it is a failure. */
static enum nebula_status look_for_lost(struct adls_renaming *renaming, struct nebula_error *error)
{
        enum nebula_status status = object_look_who_wrote(renaming->store, renaming->key, renaming->id, renaming->condition, renaming->seen,
                                                          &renaming->stamp, error);

        if (status == NEBULA_NOT_FOUND || (status == NEBULA_BUSY && renaming->condition == STORE_ALWAYS))
                return place_is_gone(renaming->store, renaming->key, error);
        return status;
}

/* *ret_lacks_parent: the caller makes the directory, and tries again. */
static enum nebula_status rename_in(struct adls_renaming *renaming, bool *ret_lacks_parent, struct nebula_error *error)
{
        struct object_store *store = renaming->store;
        char *source = source_of((struct azure_store *)store, renaming->place), text[OBJECT_QUOTED_SIZE];
        struct object_call call = { .method = "PUT", .key = renaming->key, .answer_ms = ANSWER_MS };
        struct http_response response;
        enum nebula_status status;
        bool is_met;

        if (!source)
                return object_no_memory(store, error);
        call.source = (struct http_header){ "x-ms-rename-source", source };
        object_etag_condition(&call, renaming->condition, renaming->seen, text);
        status = azure_send(store, &call, &response, error);
        free(source);
        if (status)
                return status;
        *ret_lacks_parent = is_code(&response, "RenameDestinationParentPathNotFound");
        is_met = renaming->condition != STORE_ALWAYS && is_taken(&response);
        if (object_is_done(&response) || *ret_lacks_parent)
                ;
        else if (is_code(&response, "SourcePathNotFound"))
                status = look_for_lost(renaming, error);
        else if (is_met || (renaming->condition == STORE_IF_SAME && response.status == 404))
                status = object_look_who_wrote(store, renaming->key, renaming->id, renaming->condition, renaming->seen, &renaming->stamp, error);
        else
                status = adls_fail(store, OBJECT_WRITE, renaming->key, &response, error);
        http_response_done(&response);
        return status;
}

enum nebula_status adls_rename(void *argument, struct nebula_error *error)
{
        struct adls_renaming *renaming = argument;
        bool lacks_parent = true;
        enum nebula_status status = NEBULA_OK;

        for (int tries = 0; !status && lacks_parent; tries++) {
                if (tries == RENAME_TRIES)
                        return error_set(error, NEBULA_STORAGE, 0, "cannot write %s/%s: another program removes its directory again and again", renaming->store->store.root, renaming->key);
                if (tries)
                        status = make_parent(renaming->store, renaming->key, error);
                if (!status && tries && renaming->condition == STORE_IF_SAME)
                        return error_set(error, NEBULA_BUSY, 0, "%s/%s has been replaced", renaming->store->store.root, renaming->key);
                if (!status)
                        status = rename_in(renaming, &lacks_parent, error);
        }
        return status;
}

static enum nebula_status write_file(struct object_store *store, const char *key, const char *place, const char *id, const void *data, uint64_t size,
                                     struct nebula_error *error)
{
        enum nebula_status status = adls_create(store, key, place, id, error);

        if (!status && size)
                status = adls_append(store, key, place, &(struct object_range){ .size = size }, data, NULL, error);
        return status ? status : adls_flush(store, key, place, size, ADLS_FLUSH_ALL, error);
}

/* The stamp of the object of write `id`. If another write has replaced it: a stamp that no object has. */
static enum nebula_status own_stamp(struct object_store *store, const char *key, const char *id, struct store_stamp *ret_stamp,
                                    struct nebula_error *error)
{
        struct nebula_error failure = { 0 };
        char found[OBJECT_ID_SIZE];
        struct store_entry entry;
        enum nebula_status status = object_look(store, key, &entry, found, &failure);

        if (status && status != NEBULA_NOT_FOUND) {
                if (error)
                        *error = failure;
                return status;
        }
        if (!status && !strcmp(found, id))
                *ret_stamp = entry.stamp;
        else
                strcpy(ret_stamp->text, "replaced");
        return NEBULA_OK;
}

enum nebula_status adls_put(struct store *base, const char *key, const void *data, uint64_t size, enum store_condition condition,
                            const struct store_stamp *seen, struct store_stamp *ret_stamp, struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        enum nebula_status status = object_check_key(store, key, error);
        char id[OBJECT_ID_SIZE], place[64];
        struct adls_renaming renaming = { store, place, key, id, condition, seen, { "" } };

        if (!status && condition == STORE_IF_SAME && !seen)
                status = error_set(error, NEBULA_INVALID, 0, "%s/%s: the condition STORE_IF_SAME needs a stamp", base->root, key);
        if (status)
                return status;
        object_new_id(id);
        snprintf(place, sizeof place, STORE_TEMP_TOP "%s", id);
        status = write_file(store, key, place, id, data, size, error);
        if (!status)
                status = object_try_again(store, key, adls_rename, &renaming, error);
        if (status) {
                store_remove_one(base, place, NULL); /* else a sweep does */
                return status;
        }
        if (ret_stamp && !*renaming.stamp.text)
                status = own_stamp(store, key, id, &renaming.stamp, error);
        if (!status && ret_stamp)
                *ret_stamp = renaming.stamp;
        return status;
}
