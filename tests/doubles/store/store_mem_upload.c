/* Large objects of the driver `mem`: the bytes first, the keys later. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/store_mem_private.h"

/* Copies a range of the source, if the source still has the expected mark. */
static enum nebula_status refer(struct store *store, const struct store_source *source, void *to, uint64_t offset, uint64_t size)
{
        struct mem_volume *volume = mem_volume_of(store);
        enum nebula_status status = mem_begin(store, source->key, NULL);
        const struct mem_object *object;
        char mark[24];

        if (status)
                return status;
        lock_take(&volume->lock);
        object = mem_find(volume, source->key);
        snprintf(mark, sizeof mark, "%" PRIu64, object ? object->mark : 0);
        if (!object || !object->mark || strcmp(mark, source->mark.text) || object->size != source->size || offset > object->size ||
            size > object->size - offset)
                status = NEBULA_BUSY;
        else
                memcpy(to, object->data + offset, size);
        lock_give(&volume->lock);
        return status;
}

/* Returns the number of bytes taken from the source. */
static uint64_t fill(struct store *store, const struct store_object *object, char *to)
{
        uint64_t referred = 0, chunk_bytes = object->source && object->feed ? object->feed->chunk_bytes : object->size + 1;

        for (uint64_t offset = 0; offset < object->size; offset += chunk_bytes) {
                uint64_t left = object->size - offset, size = left < chunk_bytes ? left : chunk_bytes;

                if (object->source && object->feed && bulk_feed_is_same(object->feed, offset) &&
                    !refer(store, object->source, to + offset, offset, size))
                        referred += size;
                else
                        memcpy(to + offset, (const char *)object->data + offset, size);
        }
        return referred;
}

static void report_written(struct store *store, const struct store_object *object, struct mem_object *uploaded, uint64_t referred)
{
        struct mem_volume *volume = mem_volume_of(store);

        lock_take(&volume->lock);
        uploaded->mark = ++volume->mark_count;
        lock_give(&volume->lock);
        if (!object->ret_written)
                return;
        object->ret_written->referred = referred;
        snprintf(object->ret_written->mark.text, sizeof object->ret_written->mark.text, "%" PRIu64, uploaded->mark);
}

static enum nebula_status upload_one(struct store *store, const struct store_object *object, struct mem_object *uploaded,
                                     struct nebula_error *error)
{
        enum nebula_status status = mem_begin(store, object->key, error);

        if (status)
                return status;
        if (!store_key_sound(object->key))
                return error_set(error, NEBULA_INVALID, 0, "\"%.300s\" is not a key of an object of %s", object->key, store->root);
        if (object->feed && !bulk_feed_wait(object->feed))
                return error_set(error, NEBULA_STORAGE, ECANCELED, "%s/%s: its writer has abandoned the upload", store->root, object->key);
        *uploaded = (struct mem_object){ .key = strdup(object->key), .data = malloc(object->size + 1), .size = object->size };
        if (!uploaded->key || !uploaded->data)
                return mem_no_memory(store, error);
        report_written(store, object, uploaded, fill(store, object, uploaded->data));
        return NEBULA_OK;
}

enum nebula_status mem_upload(struct store *store, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                              struct nebula_error *error)
{
        struct store_upload *upload = calloc(1, sizeof *upload + count * sizeof *upload->objects);
        enum nebula_status status = upload ? NEBULA_OK : mem_no_memory(store, error);

        for (size_t i = 0; !status && i < count; i++) {
                status = upload_one(store, &objects[i], &upload->objects[i], error);
                upload->count = i + 1;
        }
        if (status)
                mem_abort(store, upload);
        else
                *ret_upload = upload;
        return status;
}

static enum nebula_status publish_as(struct store *store, struct store_upload *upload, enum store_condition condition, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; !status && i < upload->count; i++) {
                struct mem_object *object = &upload->objects[i];

                status = mem_write(store, object->key, object->data, object->size, object->mark, condition, NULL, NULL, error);
                object->data = NULL;
        }
        mem_abort(store, upload);
        return status;
}

enum nebula_status mem_publish(struct store *store, struct store_upload *upload, struct nebula_error *error)
{
        return publish_as(store, upload, STORE_IF_ABSENT, error);
}

void mem_abort(struct store *store, struct store_upload *upload)
{
        (void)store;
        for (size_t i = 0; upload && i < upload->count; i++) {
                free(upload->objects[i].key);
                free(upload->objects[i].data);
        }
        free(upload);
}
