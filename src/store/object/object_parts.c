/* The parts of large objects. They are sent from the caller's memory, several at once, each as soon as it is final. The service does not
 * show them. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/lanes.h"
#include "store/object/object.h"

#define SMALL_SUM_MAX (UINT64_C(16) << 20) /* bytes of the small objects of one upload */
#define FEED_WAIT_MS 100
#define STEP_WIDTH 8u

/* The state of sending the parts of an upload. */
struct sending {
        struct object_store *store;
        struct store_upload *upload;
        struct lock lock; /* guards the rest, and the progress of each object */
        size_t object;    /* index of the object whose parts are taken now */
        bool is_begun;    /* its feed is */
};

static uint64_t count_of(uint64_t bytes, uint64_t part)
{
        return (bytes + part - 1) / part;
}

static enum nebula_status choose_parts(const struct object_store *store, struct object_upload *object, struct nebula_error *error)
{
        const struct object_limits *limits = store->service->limits;
        uint64_t bytes = object->feed ? object->feed->chunk_bytes : limits->part_bytes;

        while (bytes < limits->part_bytes ||
               (count_of(object->size, bytes) > limits->parts_good && bytes < limits->part_bytes_good))
                bytes *= 2;
        while (count_of(object->size, bytes) > limits->parts_max && bytes <= limits->part_bytes_max)
                bytes *= 2;
        if (bytes > limits->part_bytes_max)
                return error_set(error, NEBULA_INVALID, 0, "%s/%s: %" PRIu64 " bytes are more than an object can have", store->store.root,
                                 object->key, object->size);
        object->part_bytes = bytes;
        object->part_count = count_of(object->size, bytes);
        if (object->part_count < limits->parts_min)
                object->part_count = limits->parts_min;
        if (object->source)
                return object_plan_ranges(store, object, error);
        if (!object->feed)
                return NEBULA_OK;
        object->missing = calloc(object->part_count + 1, sizeof *object->missing);
        if (!object->missing)
                return object_no_memory(store, error);
        for (uint64_t offset = 0; offset < object->size; offset += object->feed->chunk_bytes)
                object->missing[offset / bytes]++;
        return NEBULA_OK;
}

static void upload_free(struct store_upload *upload)
{
        if (upload)
                object_touch_end(upload);
        for (size_t i = 0; upload && i < upload->count; i++) {
                free(upload->objects[i].key);
                free(upload->objects[i].small);
                free(upload->objects[i].missing);
                free(upload->objects[i].fates);
                free(upload->objects[i].place);
                free(upload->objects[i].upload_id);
                free(upload->objects[i].parts);
                free(upload->objects[i].progress);
                free(upload->objects[i].found);
                free(upload->objects[i].text);
        }
        free(upload);
}

/* The sum of all is bounded: if there are many, the others are sent before, as large ones are. */
static void choose_small(const struct object_store *store, struct object_upload *object, uint64_t *left)
{
        uint32_t most = http_settings_now().small_bytes;

        if (!store->service->steps->puts_small || !most || object->size > most || object->size > *left || object->source ||
            object->part_count > 1)
                return;
        object->is_small = true;
        *left -= object->size;
}

/* Keeps the bytes of a small object for its one request. */
static enum nebula_status keep_small(const struct object_store *store, struct object_upload *object, struct nebula_error *error)
{
        object->small = malloc((size_t)object->size + 1);
        if (!object->small)
                return object_no_memory(store, error);
        memcpy(object->small, object->data, (size_t)object->size);
        return NEBULA_OK;
}

/* One step of all objects. */
struct stepping {
        struct object_store *store;
        struct store_upload *upload;
        object_step *step;
};

static object_step publish_step;

static enum nebula_status step_one(void *argument, size_t index, const atomic_bool *stop, struct nebula_error *error)
{
        const struct stepping *stepping = argument;

        if (stepping->upload->objects[index].is_small && stepping->step != publish_step)
                return NEBULA_OK;
        return stepping->step(stepping->store, stepping->upload, &stepping->upload->objects[index], error);
}

static enum nebula_status step_all(struct object_store *store, struct store_upload *upload, object_step *step, struct nebula_error *error)
{
        struct stepping stepping = { store, upload, step };

        return step ? lanes_run(upload->count, STEP_WIDTH, step_one, &stepping, error) : NEBULA_OK;
}

static enum nebula_status plan(struct object_store *store, const struct store_object *objects, size_t count,
                               struct store_upload **ret_upload, struct nebula_error *error)
{
        struct store_upload *upload = calloc(1, sizeof *upload + count * sizeof *upload->objects);
        enum nebula_status status = NEBULA_OK;
        uint64_t small = SMALL_SUM_MAX;

        if (!upload)
                return object_no_memory(store, error);
        object_new_id(upload->id);
        for (size_t i = 0; i < count && !status; i++) {
                struct object_upload *object = &upload->objects[i];

                status = object_check_key(store, objects[i].key, error);
                if (status)
                        break;
                *object = (struct object_upload){ .key = strdup(objects[i].key), .data = objects[i].data, .size = objects[i].size,
                                                  .feed = objects[i].size ? objects[i].feed : NULL, .source = objects[i].source,
                                                  .ret_written = objects[i].ret_written, .resume = objects[i].resume };
                memcpy(object->id, upload->id, sizeof object->id);
                upload->count = i + 1;
                status = object->key ? NEBULA_OK : object_no_memory(store, error);
        }
        if (!status)
                status = step_all(store, upload, object_find_source, error);
        for (size_t i = 0; i < count && !status; i++) {
                status = choose_parts(store, &upload->objects[i], error);
                if (!status)
                        choose_small(store, &upload->objects[i], &small);
        }
        if (status)
                upload_free(upload);
        else
                *ret_upload = upload;
        return status;
}

/* Takes one more part of an object with a feed: 0, -EAGAIN or -ECANCELED. Lock held, even while waiting: no other thread has work
 * before. */
static int take_fed(struct sending *sending, struct object_upload *object, uint64_t *ret_index)
{
        uint64_t offset;
        int result;

        if (!sending->is_begun)
                bulk_feed_begin(object->feed, object->resume && sending->store->service->steps->in_order);
        sending->is_begun = true;
        do {
                result = bulk_feed_take(object->feed, FEED_WAIT_MS, &offset);
                if (!result)
                        *ret_index = offset / object->part_bytes;
        } while (!result && --object->missing[*ret_index]);
        return result;
}

/* The same for an object with a source. */
static int take_range(struct sending *sending, struct object_upload *object, struct object_range *ret_range)
{
        uint64_t offset;
        int result;

        if (!sending->is_begun)
                bulk_feed_begin(object->feed, false);
        sending->is_begun = true;
        while (!object_next_range(object, ret_range)) {
                result = bulk_feed_take(object->feed, FEED_WAIT_MS, &offset);
                if (result)
                        return result;
                object->fates[offset / object->feed->chunk_bytes] = bulk_feed_is_same(object->feed, offset) ? OBJECT_SAME : OBJECT_DIFFERS;
        }
        return 0;
}

static int take_uniform(struct sending *sending, struct object_upload *object, struct object_range *ret_range)
{
        uint64_t index = object->taken;
        int result = object->feed ? take_fed(sending, object, &index) : 0;

        if (result)
                return result;
        object->taken++;
        *ret_range = (struct object_range){ .index = index, .offset = index * object->part_bytes };
        ret_range->size = object->size - ret_range->offset < object->part_bytes ? object->size - ret_range->offset : object->part_bytes;
        return 0;
}

static bool is_taken(const struct object_upload *object)
{
        return object->source ? object->planned == object->size : object->taken == object->part_count;
}

/* 0, -EAGAIN or -ECANCELED. -ENODATA: no part is left; an object with a source may have fewer than part_count. */
static int take_part(struct sending *sending, struct object_upload **ret_object, struct object_range *ret_range)
{
        struct store_upload *upload = sending->upload;
        struct object_upload *object;
        int result = -ENODATA;

        lock_take(&sending->lock);
        while (sending->object < upload->count && is_taken(&upload->objects[sending->object]))
                sending->object++;
        *ret_object = object = &upload->objects[sending->object < upload->count ? sending->object : 0];
        if (sending->object < upload->count)
                result = (object->source ? take_range : take_uniform)(sending, object, ret_range);
        if (!result && is_taken(object) && object->feed) {
                bulk_feed_finish(object->feed);
                sending->is_begun = false;
        }
        lock_give(&sending->lock);
        return result;
}

static enum nebula_status send_range(struct sending *sending, struct object_upload *object, struct object_range *range,
                                     const atomic_bool *stop, struct nebula_error *error)
{
        if (object->is_small) {
                bulk_feed_count(object->feed, range->size);
                return range->size ? keep_small(sending->store, object, error) : NEBULA_OK;
        }
        object_take_sum(object, range);
        range->moved = bulk_feed_counter(object->feed);
        if (object_take_found(object, range) || object_refer(sending->store, sending->upload, object, range, stop)) {
                bulk_feed_count(object->feed, range->size);
                return NEBULA_OK;
        }
        return sending->store->service->steps->send(sending->store, sending->upload, object, range, object->data + range->offset, stop, error);
}

static enum nebula_status send_part(void *argument, size_t number, const atomic_bool *stop, struct nebula_error *error)
{
        struct sending *sending = argument;
        struct object_upload *object;
        struct object_range range;
        int result;

        do
                result = take_part(sending, &object, &range);
        while (result == -EAGAIN && !atomic_load(stop));
        if (result == -ENODATA)
                return NEBULA_OK;
        if (result == -ECANCELED)
                return error_set(error, NEBULA_STORAGE, ECANCELED, "%s/%s: its writer has abandoned the upload", sending->store->store.root, object->key);
        if (result)
                return error_set(error, NEBULA_STORAGE, 0, "%s/%s: the upload of another object failed, so this one was abandoned", sending->store->store.root, object->key);
        return send_range(sending, object, &range, stop, error);
}

static enum nebula_status send_parts(struct object_store *store, struct store_upload *upload, struct nebula_error *error)
{
        struct sending sending = { .store = store, .upload = upload };
        enum nebula_status status;
        uint64_t parts = 0;

        for (size_t i = 0; i < upload->count; i++)
                parts += upload->objects[i].part_count;
        lock_init(&sending.lock, LOCK_OBJECT_PARTS);
        status = lanes_run((size_t)parts, http_width(), send_part, &sending, error);
        if (sending.is_begun)
                bulk_feed_finish(upload->objects[sending.object].feed);
        lock_done(&sending.lock);
        for (size_t i = 0; i < upload->count; i++)
                upload->objects[i].part_count = upload->objects[i].taken;
        return status;
}

char *object_make_place(const struct store_upload *upload, const struct object_upload *object)
{
        char place[64];

        snprintf(place, sizeof place, STORE_TEMP_TOP "%s-%zu", upload->id, (size_t)(object - upload->objects));
        return strdup(place);
}

static void report_written(const struct store_upload *upload)
{
        for (size_t i = 0; i < upload->count; i++) {
                struct store_written *written = upload->objects[i].ret_written;

                if (!written)
                        continue;
                snprintf(written->mark.text, sizeof written->mark.text, "%s", upload->objects[i].id);
                written->referred = atomic_load(&upload->objects[i].referred);
                written->resumed = atomic_load(&upload->objects[i].resumed);
        }
}

enum nebula_status object_upload(struct store *base, const struct store_object *objects, size_t count, struct store_upload **ret_upload,
                                 struct nebula_error *error)
{
        struct object_store *store = (struct object_store *)base;
        const struct object_steps *steps = store->service->steps;
        struct store_upload *upload = NULL;
        enum nebula_status status = plan(store, objects, count, &upload, error);

        if (status)
                return status;
        status = step_all(store, upload, steps->begin, error);
        if (!status)
                object_report_began(upload);
        if (!status)
                object_touch_begin(store, upload);
        if (!status)
                status = send_parts(store, upload, error);
        if (!status)
                status = step_all(store, upload, steps->end, error);
        if (status) {
                object_abort(base, upload);
                return status;
        }
        report_written(upload);
        *ret_upload = upload;
        return NEBULA_OK;
}

static enum nebula_status publish_step(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                       struct nebula_error *error)
{
        enum nebula_status status = object->is_small ? object_put_as(store, object->key, object->small ? object->small : "", object->size, object->id, error)
                                                     : store->service->steps->publish(store, upload, object, error);

        object->is_over = object->is_over || !status;
        return status;
}

enum nebula_status object_publish(struct store *base, struct store_upload *upload, struct nebula_error *error)
{
        enum nebula_status status = step_all((struct object_store *)base, upload, publish_step, error);

        object_abort(base, upload);
        return status;
}

static enum nebula_status abort_step(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                     struct nebula_error *error)
{
        if (!object->is_over && !object->is_kept)
                store->service->steps->abort(store, object);
        return NEBULA_OK;
}

void object_abort(struct store *base, struct store_upload *upload)
{
        struct object_store *store = (struct object_store *)base;

        if (upload && store->service->steps->abort)
                step_all(store, upload, abort_step, NULL);
        upload_free(upload);
}
