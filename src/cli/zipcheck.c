#include "cli/zipcheck.h"

#include <stdlib.h>

#include "base/error.h"
#include "sum/sum.h"

enum nebula_status zipcheck_begin(struct zipcheck *ret_check, struct zip_entry *entries, size_t count,
                                  uint32_t chunk_bytes, struct nebula_error *error)
{
        struct zipcheck check = { .entries = entries, .entry_count = count };
        size_t capacity = 1;

        for (size_t i = 0; i < count; i++)
                capacity += (size_t)(entries[i].size / chunk_bytes) + 2;
        check.segments = calloc(capacity, sizeof *check.segments);
        if (!check.segments) {
                free(entries);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to check %zu records", count);
        }
        for (size_t i = 0; i < count; i++) {
                uint64_t offset = entries[i].payload_offset, end = offset + entries[i].size;

                while (offset < end) {
                        uint64_t border = (offset / chunk_bytes + 1) * chunk_bytes;
                        uint64_t stop = border < end ? border : end;

                        check.segments[check.segment_count++] =
                                (struct zipcheck_segment){ .offset = offset, .size = stop - offset, .entry = i };
                        offset = stop;
                }
        }
        *ret_check = check;
        return NEBULA_OK;
}

/* Index of the first segment at or after `offset`. */
static size_t first_segment(const struct zipcheck *check, uint64_t offset)
{
        size_t low = 0, high = check->segment_count;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (check->segments[middle].offset < offset)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

void zipcheck_chunk(struct zipcheck *check, const void *data, uint64_t offset, uint64_t size)
{
        size_t low = first_segment(check, offset);

        for (; low < check->segment_count; low++) {
                struct zipcheck_segment *segment = &check->segments[low];

                if (segment->offset + segment->size > offset + size)
                        return;
                segment->crc32 = sum_crc32(0, (const char *)data + (segment->offset - offset), segment->size);
        }
}

bool zipcheck_wrong(const struct zipcheck *check, size_t index)
{
        const struct zip_entry *entry = &check->entries[index];
        size_t low = first_segment(check, entry->payload_offset);
        uint32_t crc32 = 0;

        for (; low < check->segment_count && check->segments[low].entry == index; low++)
                crc32 = sum_crc32_combine(crc32, check->segments[low].crc32, check->segments[low].size);
        return crc32 != entry->crc32 || crc32 != entry->header_crc32;
}

void zipcheck_done(struct zipcheck *check)
{
        free(check->entries);
        free(check->segments);
        *check = (struct zipcheck){ 0 };
}
