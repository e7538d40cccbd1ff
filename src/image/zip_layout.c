/*
 * An image from front to back:
 *
 *      per record   local header, name, extra field (zip64 sizes if needed, padding), payload
 *      directory    per record a central header, name, extra field (zip64 values if needed)
 *      end          zip64 end and its locator if needed, then the end record
 *
 * Padding makes each payload begin at a multiple of 64. Readers find a payload through the
 * lengths in its local header, so the padding is part of that header's extra field.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "base/error.h"
#include "image/image.h"
#include "image/zip_format.h"

#define NAME_BYTES_MAX 40u /* "archive/data/" and 20 digits */
#define VERSION_PLAIN 20u
#define VERSION_ZIP64 45u
#define DOS_DATE 0x0021u /* 1980-01-01, the earliest date: equal values give equal bytes */
#define AHEAD_COUNT 16u /* records whose headers are prefetched */

enum { RECORD_PICKLE, RECORD_BYTEORDER, RECORD_VERSION, RECORD_STORAGES };

static const char byteorder[] = "little";
static const char version[] = "3\n";

struct zip_record {
        uint64_t header_offset, payload_offset, size;
};

static const char *const fixed_names[] = { "archive/data.pkl", "archive/byteorder", "archive/version" };
static const char storage_prefix[] = "archive/data/";

static size_t digit_count(size_t number)
{
        size_t count = 1;

        while (number >= 10) {
                number /= 10;
                count++;
        }
        return count;
}

static size_t record_name_size(size_t index)
{
        return index < RECORD_STORAGES ? strlen(fixed_names[index]) :
                                         sizeof storage_prefix - 1 + digit_count(index - RECORD_STORAGES);
}

/* Not snprintf: in files of many small storages most of the bytes are names. Returns the same as record_name_size. */
static size_t record_name(size_t index, char ret_name[NAME_BYTES_MAX])
{
        size_t size = record_name_size(index);

        if (index < RECORD_STORAGES) {
                memcpy(ret_name, fixed_names[index], size);
                return size;
        }
        memcpy(ret_name, storage_prefix, sizeof storage_prefix - 1);
        index -= RECORD_STORAGES;
        for (size_t at = size; at-- > sizeof storage_prefix - 1; index /= 10)
                ret_name[at] = (char)('0' + index % 10);
        return size;
}

static bool size_needs_zip64(const struct zip_record *record)
{
        return record->size >= ZIP_IN_ZIP64_32;
}

/* Size of the zip64 extra field of a directory entry: both sizes and the offset, as far as needed. */
static uint32_t central_extra_bytes(const struct zip_record *record)
{
        uint32_t bytes = 0;

        if (size_needs_zip64(record))
                bytes += 16;
        if (record->header_offset >= ZIP_IN_ZIP64_32)
                bytes += 8;
        return bytes ? bytes + ZIP_EXTRA_HEAD_BYTES : 0;
}

static bool end_needs_zip64(const struct zip_layout *layout, uint64_t directory_bytes)
{
        return layout->record_count >= ZIP_IN_ZIP64_16 || layout->directory_offset >= ZIP_IN_ZIP64_32 ||
               directory_bytes >= ZIP_IN_ZIP64_32;
}

/* Places one record at `offset`. False if the image would become larger than a file can be. */
static bool place(struct zip_record *record, size_t index, uint64_t size, uint64_t *offset)
{
        uint64_t payload;

        record->header_offset = *offset;
        record->size = size;
        payload = *offset + ZIP_LOCAL_BYTES + record_name_size(index) + ZIP_EXTRA_HEAD_BYTES;
        if (size_needs_zip64(record))
                payload += ZIP_LOCAL_ZIP64_BYTES;
        record->payload_offset = (payload + IMAGE_ALIGNMENT - 1) / IMAGE_ALIGNMENT * IMAGE_ALIGNMENT;
        if (size > INT64_MAX / 4 || record->payload_offset > INT64_MAX / 4) /* so that no later sum overflows */
                return false;
        *offset = record->payload_offset + size;
        return true;
}

static uint64_t directory_size(const struct zip_layout *layout)
{
        uint64_t bytes = 0;

        for (size_t k = 0; k < layout->record_count; k++)
                bytes += ZIP_CENTRAL_BYTES + record_name_size(k) + central_extra_bytes(&layout->records[k]);
        return bytes;
}

enum nebula_status zip_layout_init(struct zip_layout *layout, size_t pickle_size, const uint64_t *storage_sizes,
                                   size_t storage_count, struct nebula_error *error)
{
        struct zip_layout made = { .storage_count = storage_count };
        uint64_t offset = 0, directory_bytes;

        if (storage_count > SIZE_MAX / sizeof *made.records - RECORD_STORAGES)
                return error_set(error, NEBULA_INVALID, 0, "a file of %zu storages is too large", storage_count);
        made.record_count = storage_count + RECORD_STORAGES;
        made.records = calloc(made.record_count, sizeof *made.records);
        made.storage_offsets = calloc(storage_count + 1, sizeof *made.storage_offsets); /* + 1: calloc of 0 items may return NULL */
        if (!made.records || !made.storage_offsets) {
                zip_layout_done(&made);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the layout of %zu storages", storage_count);
        }
        for (size_t k = 0; k < made.record_count; k++) {
                uint64_t size = k == RECORD_PICKLE      ? pickle_size
                                : k == RECORD_BYTEORDER ? sizeof byteorder - 1
                                : k == RECORD_VERSION   ? sizeof version - 1
                                                        : storage_sizes[k - RECORD_STORAGES];

                if (!place(&made.records[k], k, size, &offset)) {
                        zip_layout_done(&made);
                        return error_set(error, NEBULA_INVALID, 0, "storage of %" PRIu64 " bytes makes the file too large", size);
                }
                if (k >= RECORD_STORAGES)
                        made.storage_offsets[k - RECORD_STORAGES] = made.records[k].payload_offset;
        }
        made.pickle_offset = made.records[RECORD_PICKLE].payload_offset;
        made.directory_offset = offset;
        directory_bytes = directory_size(&made);
        made.size = offset + directory_bytes + ZIP_END_BYTES;
        if (end_needs_zip64(&made, directory_bytes))
                made.size += ZIP_END64_BYTES + ZIP_LOCATOR_BYTES;
        *layout = made;
        return NEBULA_OK;
}

void zip_layout_done(struct zip_layout *layout)
{
        free(layout->records);
        free(layout->storage_offsets);
        *layout = (struct zip_layout){ 0 };
}

static uint32_t clamp32(uint64_t value)
{
        return value >= ZIP_IN_ZIP64_32 ? ZIP_IN_ZIP64_32 : (uint32_t)value;
}

/* The fields that local and central header share: from the version to the length of the name. */
static uint8_t *write_common(uint8_t *at, const struct zip_record *record, bool zip64, size_t name_size)
{
        at = zip_put16(at, zip64 ? VERSION_ZIP64 : VERSION_PLAIN);
        at = zip_put16(at, 0); /* flags */
        at = zip_put16(at, 0); /* stored */
        at = zip_put16(at, 0); /* time */
        at = zip_put16(at, DOS_DATE);
        at = zip_put32(at, 0); /* CRC-32, filled in by image_seal */
        at = zip_put32(at, clamp32(record->size));
        at = zip_put32(at, clamp32(record->size));
        return zip_put16(at, (uint32_t)name_size);
}

static void write_local(const struct zip_record *record, const char *name, size_t name_size, uint8_t *image)
{
        uint8_t *at = image + record->header_offset, *payload = image + record->payload_offset;
        size_t extra_size = (size_t)(record->payload_offset - record->header_offset) - ZIP_LOCAL_BYTES - name_size;

        at = zip_put32(at, ZIP_LOCAL_SIGNATURE);
        at = write_common(at, record, size_needs_zip64(record), name_size);
        at = zip_put16(at, (uint32_t)extra_size);
        memcpy(at, name, name_size);
        at += name_size;
        if (size_needs_zip64(record)) {
                at = zip_put16(at, ZIP_EXTRA_ZIP64);
                at = zip_put16(at, ZIP_LOCAL_ZIP64_BYTES - ZIP_EXTRA_HEAD_BYTES);
                at = zip_put64(at, record->size);
                at = zip_put64(at, record->size);
        }
        at = zip_put16(at, ZIP_EXTRA_PADDING);
        at = zip_put16(at, (uint32_t)(payload - at) - 2);
        memset(at, 0, (size_t)(payload - at));
}

static uint8_t *write_central(const struct zip_record *record, const char *name, size_t name_size, uint8_t *at)
{
        uint32_t extra_bytes = central_extra_bytes(record);

        at = zip_put32(at, ZIP_CENTRAL_SIGNATURE);
        at = zip_put16(at, extra_bytes ? VERSION_ZIP64 : VERSION_PLAIN); /* made by */
        at = write_common(at, record, extra_bytes != 0, name_size);
        at = zip_put16(at, extra_bytes);
        at = zip_put16(at, 0); /* comment */
        at = zip_put16(at, 0); /* disk */
        at = zip_put16(at, 0); /* attributes */
        at = zip_put32(at, 0);
        at = zip_put32(at, clamp32(record->header_offset));
        memcpy(at, name, name_size);
        at += name_size;
        if (extra_bytes) {
                at = zip_put16(at, ZIP_EXTRA_ZIP64);
                at = zip_put16(at, extra_bytes - ZIP_EXTRA_HEAD_BYTES);
                if (size_needs_zip64(record)) {
                        at = zip_put64(at, record->size);
                        at = zip_put64(at, record->size);
                }
                if (record->header_offset >= ZIP_IN_ZIP64_32)
                        at = zip_put64(at, record->header_offset);
        }
        return at;
}

static uint8_t *write_end64(const struct zip_layout *layout, uint64_t directory_bytes, uint8_t *at)
{
        at = zip_put32(at, ZIP_END64_SIGNATURE);
        at = zip_put64(at, ZIP_END64_BYTES - 12); /* size of the record after this field */
        at = zip_put16(at, VERSION_ZIP64);
        at = zip_put16(at, VERSION_ZIP64);
        at = zip_put32(at, 0);
        at = zip_put32(at, 0);
        at = zip_put64(at, layout->record_count);
        at = zip_put64(at, layout->record_count);
        at = zip_put64(at, directory_bytes);
        at = zip_put64(at, layout->directory_offset);
        at = zip_put32(at, ZIP_LOCATOR_SIGNATURE);
        at = zip_put32(at, 0);
        at = zip_put64(at, layout->directory_offset + directory_bytes);
        return zip_put32(at, 1); /* disks */
}

static void write_end(const struct zip_layout *layout, uint64_t directory_bytes, uint8_t *at)
{
        uint32_t count = layout->record_count >= ZIP_IN_ZIP64_16 ? ZIP_IN_ZIP64_16 : (uint32_t)layout->record_count;

        at = zip_put32(at, ZIP_END_SIGNATURE);
        at = zip_put16(at, 0);
        at = zip_put16(at, 0);
        at = zip_put16(at, count);
        at = zip_put16(at, count);
        at = zip_put32(at, clamp32(directory_bytes));
        at = zip_put32(at, clamp32(layout->directory_offset));
        zip_put16(at, 0); /* comment */
}

void zip_layout_write(const struct zip_layout *layout, const void *pickle, void *image)
{
        const struct zip_record *records = layout->records;
        uint8_t *bytes = image, *directory = bytes + layout->directory_offset, *at = directory;
        uint64_t directory_bytes;

        for (size_t k = 0; k < layout->record_count; k++) {
                char name[NAME_BYTES_MAX];
                size_t name_size = record_name(k, name);

                /* Headers lie far apart and are not in the cache. */
                if (k + AHEAD_COUNT < layout->record_count) {
                        __builtin_prefetch(bytes + records[k + AHEAD_COUNT].header_offset, 1);
                        __builtin_prefetch(bytes + records[k + AHEAD_COUNT].header_offset + IMAGE_ALIGNMENT, 1);
                }
                write_local(&records[k], name, name_size, bytes);
                at = write_central(&records[k], name, name_size, at);
        }
        if (records[RECORD_PICKLE].size)
                memcpy(bytes + layout->pickle_offset, pickle, (size_t)records[RECORD_PICKLE].size);
        memcpy(bytes + records[RECORD_BYTEORDER].payload_offset, byteorder, sizeof byteorder - 1);
        memcpy(bytes + records[RECORD_VERSION].payload_offset, version, sizeof version - 1);
        directory_bytes = (uint64_t)(at - directory);
        if (end_needs_zip64(layout, directory_bytes))
                at = write_end64(layout, directory_bytes, at);
        write_end(layout, directory_bytes, at);
}
