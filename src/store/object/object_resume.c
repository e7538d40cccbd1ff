/* The parts that an interrupted upload left in the service. A later upload of the same object takes a part of them if the service says that it
 * has the same size and the same checksum: its CRC-64, or else the MD5 that many services give as its ETag. All other parts are sent. */
#include <stdlib.h>
#include <string.h>

#include "store/http/crypt.h"
#include "store/object/object.h"

bool object_may_resume(const struct object_store *store, const struct object_upload *object)
{
        return object->resume && store->service->steps->can_resume && object->part_count > 1;
}

bool object_add_found(struct object_upload *object, uint64_t index, const struct object_part *part)
{
        if (index >= object->part_count)
                return true;
        if (!object->found)
                object->found = calloc(object->part_count, sizeof *object->found);
        if (object->found)
                object->found[index] = *part;
        return object->found;
}

static bool has_md5(const void *data, size_t size, const char *text)
{
        char md5[CRYPT_MD5_SIZE];

        return strlen(text) == CRYPT_MD5_SIZE - 1 && crypt_md5(data, size, md5) && !strcmp(md5, text);
}

bool object_take_found(struct object_upload *object, const struct object_range *range)
{
        const struct object_part *found = object->found ? &object->found[range->index] : NULL;
        const char *data = object->data + range->offset;
        uint64_t sum;

        if (!found || !found->size || found->size != range->size)
                return false;
        sum = object_range_sum(range, data);
        if (found->has_sum ? found->sum != sum : !has_md5(data, (size_t)range->size, found->etag.text))
                return false;
        object->parts[range->index] = *found;
        object->parts[range->index].sum = sum;
        atomic_fetch_add(&object->resumed, range->size);
        return true;
}

void object_report_began(struct store_upload *upload)
{
        size_t left = 0;

        for (size_t i = 0; i < upload->count; i++)
                left += upload->objects[i].text && strlen(upload->objects[i].text) < STORE_RESUME_MAX;
        for (size_t i = 0; i < upload->count && left; i++) {
                struct object_upload *object = &upload->objects[i];

                if (!object->text || strlen(object->text) >= STORE_RESUME_MAX)
                        continue;
                object->is_kept = true;
                object->resume->began(object->resume->argument, object->key, object->text, !--left);
        }
}
