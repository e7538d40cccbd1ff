/* Checksums of bodies. The producer of an object's bytes may have computed them piece by piece: then no byte is read for them again. */
#include "store/object/object.h"
#include "sum/sum.h"

uint64_t object_body_sum(const struct object_call *call)
{
        return call->body_sum ? *call->body_sum : sum_crc64(0, call->body, call->body_size);
}

uint64_t object_range_sum(const struct object_range *range, const void *data)
{
        return range->has_sum ? range->sum : sum_crc64(0, data, range->size);
}

void object_take_sum(const struct object_upload *object, struct object_range *range)
{
        uint64_t end = range->offset + range->size, sum = 0, piece;

        if (!object->feed || range->offset % BULK_REQUEST_BYTES || (end % BULK_REQUEST_BYTES && end != object->size))
                return;
        for (uint64_t offset = range->offset; offset < end; offset += BULK_REQUEST_BYTES) {
                if (!bulk_feed_sum(object->feed, offset, &piece))
                        return;
                sum = sum_crc64_combine(sum, piece, end - offset < BULK_REQUEST_BYTES ? end - offset : BULK_REQUEST_BYTES);
        }
        range->sum = sum;
        range->has_sum = true;
}
