/* The parts of an object that has bytes of another one, its source. The bytes decide the borders of the parts: the service takes a run
 * of chunks that are the same from the source, all other bytes are sent. Parts are numbered in the order of their bytes, because S3
 * allows no gaps. So a part is planned once all chunks before its end are final.
 * Services require parts of a least size. A shorter run of same chunks is sent with the bytes after it. A shorter run of other chunks
 * takes bytes from the run after it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "store/object/object.h"

#define REFER_BYTES (UINT64_C(64) << 20) /* of one request: it takes a few seconds, and other requests run beside it */

enum nebula_status object_find_source(struct object_store *store, const struct store_upload *upload, struct object_upload *object,
                                      struct nebula_error *error)
{
        const struct store_source *source = object->source;
        char id[OBJECT_ID_SIZE];
        struct store_entry entry;

        (void)upload;
        (void)error;
        object->source = NULL;
        if (!source || !object->feed || !store->service->steps->refer || atomic_load(&store->never_refers) || object_check_key(store, source->key, NULL) ||
            object_look(store, source->key, &entry, id, NULL) || entry.size != source->size || strcmp(id, source->mark.text))
                return NEBULA_OK;
        object->source = source;
        object->source_stamp = entry.stamp;
        return NEBULA_OK;
}

static uint64_t larger(uint64_t a, uint64_t b)
{
        return a > b ? a : b;
}

enum nebula_status object_plan_ranges(const struct object_store *store, struct object_upload *object, struct nebula_error *error)
{
        const struct object_limits *limits = store->service->limits;
        uint64_t chunks = object->size / object->feed->chunk_bytes + 1;

        object->part_min = larger(limits->refer_bytes, larger(object->feed->chunk_bytes, object->size / (limits->parts_max - 1) + 1));
        object->part_bytes = larger(object->part_bytes, object->part_min);
        object->part_count = object->size / object->part_min + 1;
        object->fates = calloc(chunks, 1);
        return object->fates ? NEBULA_OK : object_no_memory(store, error);
}

static enum object_fate fate_at(const struct object_upload *object, uint64_t offset)
{
        return object->fates[offset / object->feed->chunk_bytes];
}

static uint64_t chunk_end(const struct object_upload *object, uint64_t offset)
{
        uint64_t end = (offset / object->feed->chunk_bytes + 1) * object->feed->chunk_bytes;

        return end < object->size ? end : object->size;
}

/* The bytes of the run of same chunks at `begin` that one request takes; 0: the run is too short. False: the end of the run is not known
 * yet. */
static bool measure_run(const struct object_upload *object, uint64_t begin, uint64_t *ret_size)
{
        uint64_t most = larger(REFER_BYTES, object->part_min), end = begin;

        while (end < object->size && end - begin < most + object->part_min && fate_at(object, end) == OBJECT_SAME)
                end = chunk_end(object, end);
        if (end < object->size && end - begin < most + object->part_min && fate_at(object, end) == OBJECT_NOT_FINAL)
                return false;
        if (end - begin > most) /* leave at least part_min bytes for the next part */
                *ret_size = end == object->size || end - begin - most >= object->part_min ? most : end - begin - object->part_min;
        else
                *ret_size = end == object->size || end - begin >= object->part_min ? end - begin : 0;
        return true;
}

/* The bytes to send at `begin`, if the source lacks them or its run is too short. A rest of the next run that would be too short for a
 * part is sent, too. False: the end is not known yet. */
static bool measure_sent(const struct object_upload *object, uint64_t begin, uint64_t *ret_size)
{
        uint64_t end = begin, room = object->part_bytes + object->part_min, most = object->size - begin < room ? object->size : begin + room;
        bool has_other = false;

        while (end < most) {
                enum object_fate fate = fate_at(object, end);
                uint64_t next = chunk_end(object, end);

                if (fate == OBJECT_NOT_FINAL)
                        return false;
                if (fate == OBJECT_SAME && has_other) {
                        if (end - begin >= object->part_min)
                                break;
                        next = next < begin + object->part_min ? next : begin + object->part_min;
                }
                has_other = has_other || fate == OBJECT_DIFFERS;
                end = next < most ? next : most;
        }
        *ret_size = end - begin == room ? object->part_bytes : end - begin;
        return true;
}

bool object_next_range(struct object_upload *object, struct object_range *ret_range)
{
        uint64_t begin = object->planned, size;

        if (!measure_run(object, begin, &size))
                return false;
        *ret_range = (struct object_range){ .refers = size != 0 };
        if (!size && !measure_sent(object, begin, &size))
                return false;
        ret_range->index = object->taken++;
        ret_range->offset = begin;
        ret_range->size = size;
        object->planned += size;
        return true;
}

bool object_refer(struct object_store *store, const struct store_upload *upload, struct object_upload *object, const struct object_range *range,
                  const atomic_bool *stop)
{
        struct nebula_error error = { 0 };

        if (!range->refers || atomic_load(&object->is_refused))
                return false;
        if (!store->service->steps->refer(store, upload, object, range, object->data + range->offset, stop, &error)) {
                atomic_fetch_add(&object->referred, range->size);
                return true;
        }
        if (!atomic_exchange(&object->is_refused, true) && !atomic_load(stop))
                log_event(LOG_LEVEL_INFO, "%s/%s is sent completely, although %s has some of its bytes: %s", store->store.root, object->key,
                          object->source->key, error.message);
        return false;
}
