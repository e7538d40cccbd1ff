/*
 * Reads a zip whose bytes may be hostile. Each offset is checked against the
 * part of the file that must contain it before it is used. Only values that
 * were compared with the file's size are added, so no sum overflows.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "base/error.h"
#include "image/image.h"
#include "image/zip_format.h"
#include "sum/sum.h"

/* The bytes, and the place of the directory in them. */
struct archive {
        const uint8_t *bytes;
        uint64_t size;
        uint64_t directory_offset, directory_bytes, directory_end, count;
};

static enum nebula_status corrupt(struct nebula_error *error, uint64_t offset, const char *what)
{
        return error_set(error, NEBULA_CORRUPT, 0, "not a sound zip file: %s at offset %" PRIu64, what, offset);
}

/* Reads the zip64 end, if a locator stands before the end record. Returns where the directory must end. */
static enum nebula_status read_end64(struct archive *archive, uint64_t *end, struct nebula_error *error)
{
        uint64_t locator = *end - ZIP_LOCATOR_BYTES, end64;
        const uint8_t *at;

        if (*end < ZIP_LOCATOR_BYTES + ZIP_END64_BYTES || zip_get32(archive->bytes + locator) != ZIP_LOCATOR_SIGNATURE)
                return NEBULA_OK; /* no locator: the end record has all values */
        end64 = zip_get64(archive->bytes + locator + 8);
        if (end64 > locator - ZIP_END64_BYTES)
                return corrupt(error, locator, "the zip64 locator points outside");
        at = archive->bytes + end64;
        if (zip_get32(at) != ZIP_END64_SIGNATURE || zip_get64(at + 4) != locator - end64 - 12)
                return corrupt(error, end64, "no zip64 end record");
        archive->count = zip_get64(at + 32);
        archive->directory_offset = zip_get64(at + 48);
        archive->directory_bytes = zip_get64(at + 40);
        *end = end64;
        return NEBULA_OK;
}

static enum nebula_status find_directory(struct archive *archive, struct nebula_error *error)
{
        enum nebula_status status;
        uint64_t end;
        const uint8_t *at;

        if (archive->size < ZIP_END_BYTES)
                return corrupt(error, 0, "too short");
        end = archive->size - ZIP_END_BYTES;
        at = archive->bytes + end;
        if (zip_get32(at) != ZIP_END_SIGNATURE || zip_get16(at + 20) != 0)
                return corrupt(error, end, "no end record");
        archive->count = zip_get16(at + 10);
        archive->directory_bytes = zip_get32(at + 12);
        archive->directory_offset = zip_get32(at + 16);
        status = read_end64(archive, &end, error);
        if (status != NEBULA_OK)
                return status;
        if (archive->directory_offset > end || archive->directory_bytes != end - archive->directory_offset)
                return corrupt(error, end, "the directory does not end at its end record");
        if (archive->count > archive->directory_bytes / ZIP_CENTRAL_BYTES)
                return corrupt(error, end, "more records than the directory has room for");
        archive->directory_end = end;
        return NEBULA_OK;
}

bool zip_find_last(const void *data, uint64_t size, uint64_t *ret_begin)
{
        const uint8_t *bytes = data;
        uint64_t end = size - ZIP_END_BYTES, directory, before;

        if (size < ZIP_END_BYTES || zip_get32(bytes + end) != ZIP_END_SIGNATURE || zip_get16(bytes + end + 20))
                return false;
        directory = zip_get32(bytes + end + 12);
        before = zip_get32(bytes + end + 16);
        if (end >= ZIP_LOCATOR_BYTES + ZIP_END64_BYTES && zip_get32(bytes + end - ZIP_LOCATOR_BYTES) == ZIP_LOCATOR_SIGNATURE) {
                end -= ZIP_LOCATOR_BYTES + ZIP_END64_BYTES;
                if (zip_get32(bytes + end) != ZIP_END64_SIGNATURE)
                        return false;
                directory = zip_get64(bytes + end + 40);
                before = zip_get64(bytes + end + 48);
        }
        if (directory > end || before > end - directory)
                return false;
        *ret_begin = end - directory - before;
        return true;
}

/* The values of a zip64 extra field; NULL if there is none. */
static const uint8_t *find_zip64(const uint8_t *extra, size_t extra_size, size_t *ret_size)
{
        while (extra_size >= ZIP_EXTRA_HEAD_BYTES) {
                size_t size = zip_get16(extra + 2);

                if (size > extra_size - ZIP_EXTRA_HEAD_BYTES)
                        return NULL;
                if (zip_get16(extra) == ZIP_EXTRA_ZIP64) {
                        *ret_size = size;
                        return extra + ZIP_EXTRA_HEAD_BYTES;
                }
                extra += ZIP_EXTRA_HEAD_BYTES + size;
                extra_size -= ZIP_EXTRA_HEAD_BYTES + size;
        }
        return NULL;
}

/* Replaces each of `count` 32-bit fields that holds the zip64 mark by the next 8 bytes of the zip64 extra field. */
static bool resolve_zip64(uint64_t *fields[], size_t count, const uint8_t *extra, size_t extra_size)
{
        size_t size = 0;
        const uint8_t *at = find_zip64(extra, extra_size, &size);

        for (size_t k = 0; k < count; k++) {
                if (*fields[k] != ZIP_IN_ZIP64_32)
                        continue;
                if (!at || size < 8)
                        return false;
                *fields[k] = zip_get64(at);
                at += 8;
                size -= 8;
        }
        return true;
}

/* The local header must agree with the directory: torch.load reads one, unzip the other. */
static enum nebula_status read_local(const struct archive *archive, struct zip_entry *entry, struct nebula_error *error)
{
        uint64_t size, stored_size, *fields[] = { &size, &stored_size }, room, start = entry->header_offset;
        const uint8_t *at = archive->bytes + start;
        size_t name_size, extra_size;

        if (start > archive->directory_offset || archive->directory_offset - start < ZIP_LOCAL_BYTES)
                return corrupt(error, start, "a header outside the file");
        name_size = zip_get16(at + 26);
        extra_size = zip_get16(at + 28);
        room = archive->directory_offset - start - ZIP_LOCAL_BYTES;
        if (zip_get32(at) != ZIP_LOCAL_SIGNATURE)
                return corrupt(error, start, "no record header");
        if (name_size + extra_size > room || entry->size > room - name_size - extra_size)
                return corrupt(error, start, "a record that reaches into the directory");
        if (name_size != strlen(entry->name) || memcmp(at + ZIP_LOCAL_BYTES, entry->name, name_size) != 0)
                return corrupt(error, start, "a record of another name than in the directory");
        if (zip_get16(at + 8) != 0 || (zip_get16(at + 6) & ZIP_FLAG_DESCRIPTOR) != (entry->has_descriptor ? ZIP_FLAG_DESCRIPTOR : 0))
                return corrupt(error, start, "a record of another kind than in the directory");
        stored_size = zip_get32(at + 18);
        size = zip_get32(at + 22);
        if (!resolve_zip64(fields, 2, at + ZIP_LOCAL_BYTES + name_size, extra_size))
                return corrupt(error, start, "a record without its zip64 sizes");
        if (!entry->has_descriptor && (size != entry->size || stored_size != entry->size))
                return corrupt(error, start, "a record of another size than in the directory");
        entry->header_crc32 = entry->has_descriptor ? entry->crc32 : zip_get32(at + ZIP_LOCAL_CRC_AT);
        entry->header_crc_offset = start + ZIP_LOCAL_CRC_AT;
        entry->payload_offset = start + ZIP_LOCAL_BYTES + name_size + extra_size;
        return NEBULA_OK;
}

/* Reads the directory entry at *offset and moves *offset past it. */
static enum nebula_status read_central(const struct archive *archive, uint64_t *offset, struct zip_entry *entry,
                                       struct nebula_error *error)
{
        uint64_t start = *offset, room, stored_size, *fields[] = { &entry->size, &stored_size, &entry->header_offset };
        const uint8_t *at = archive->bytes + start;
        size_t name_size, extra_size, comment_size;

        if (archive->directory_end - start < ZIP_CENTRAL_BYTES || zip_get32(at) != ZIP_CENTRAL_SIGNATURE)
                return corrupt(error, start, "no directory entry");
        room = archive->directory_end - start - ZIP_CENTRAL_BYTES;
        name_size = zip_get16(at + 28);
        extra_size = zip_get16(at + 30);
        comment_size = zip_get16(at + 32);
        if (name_size + extra_size + comment_size > room)
                return corrupt(error, start, "a directory entry that is cut off");
        if (name_size == 0 || name_size >= sizeof entry->name || memchr(at + ZIP_CENTRAL_BYTES, '\0', name_size))
                return corrupt(error, start, "a record with no usable name");
        memcpy(entry->name, at + ZIP_CENTRAL_BYTES, name_size);
        entry->name[name_size] = '\0';
        entry->directory_crc_offset = start + ZIP_CENTRAL_CRC_AT;
        entry->crc32 = zip_get32(at + ZIP_CENTRAL_CRC_AT);
        entry->has_descriptor = zip_get16(at + 8) & ZIP_FLAG_DESCRIPTOR;
        stored_size = zip_get32(at + 20);
        entry->size = zip_get32(at + 24);
        entry->header_offset = zip_get32(at + 42);
        if (!resolve_zip64(fields, 3, at + ZIP_CENTRAL_BYTES + name_size, extra_size))
                return corrupt(error, start, "a directory entry without its zip64 values");
        if (zip_get16(at + 10) != 0 || stored_size != entry->size || (zip_get16(at + 8) & ZIP_FLAG_ENCRYPTED))
                return error_set(error, NEBULA_INVALID, 0, "record \"%s\" is compressed or encrypted, not stored", entry->name);
        *offset = start + ZIP_CENTRAL_BYTES + name_size + extra_size + comment_size;
        return NEBULA_OK;
}

static int by_offset(const void *a, const void *b)
{
        const struct zip_entry *left = a, *right = b;

        return (left->header_offset > right->header_offset) - (left->header_offset < right->header_offset);
}

/* Most writers list the records in the order of the file. */
static void sort_by_offset(struct zip_entry *entries, size_t count)
{
        for (size_t k = 1; k < count; k++) {
                if (entries[k].header_offset < entries[k - 1].header_offset) {
                        qsort(entries, count, sizeof *entries, by_offset);
                        return;
                }
        }
}

/* Sorts the entries by offset and refuses overlaps: two records with the same bytes could not both be sealed. */
static enum nebula_status check_order(struct zip_entry *entries, size_t count, struct nebula_error *error)
{
        sort_by_offset(entries, count);
        for (size_t k = 1; k < count; k++) {
                if (entries[k].header_offset < entries[k - 1].payload_offset + entries[k - 1].size)
                        return corrupt(error, entries[k].header_offset, "a record inside another");
        }
        return NEBULA_OK;
}

enum nebula_status zip_find_directory(const void *data, uint64_t size, uint64_t *ret_offset, struct nebula_error *error)
{
        struct archive archive = { .bytes = data, .size = size };
        enum nebula_status status = find_directory(&archive, error);

        if (status == NEBULA_OK)
                *ret_offset = archive.directory_offset;
        return status;
}

enum nebula_status zip_find_headers(const void *data, uint64_t size, uint64_t **ret_offsets, size_t *ret_count,
                                    struct nebula_error *error)
{
        struct archive archive = { .bytes = data, .size = size };
        enum nebula_status status = find_directory(&archive, error);
        uint64_t *offsets, at = archive.directory_offset;
        struct zip_entry entry;

        if (status != NEBULA_OK)
                return status;
        offsets = calloc((size_t)archive.count + 1, sizeof *offsets);
        if (!offsets)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the offsets of %" PRIu64 " records", archive.count);
        for (uint64_t k = 0; k < archive.count && status == NEBULA_OK; k++) {
                status = read_central(&archive, &at, &entry, error);
                offsets[k] = entry.header_offset;
        }
        if (status != NEBULA_OK) {
                free(offsets);
                return status;
        }
        *ret_offsets = offsets;
        *ret_count = (size_t)archive.count;
        return NEBULA_OK;
}

/* The place of a record that zip_layout_init has put there: its payload is aligned, and ends where the next record begins. */
static enum nebula_status place_record(struct zip_entry *entry, uint64_t end, struct nebula_error *error)
{
        uint64_t payload = entry->header_offset + ZIP_LOCAL_BYTES + strlen(entry->name) + ZIP_EXTRA_HEAD_BYTES;

        if (entry->size >= ZIP_IN_ZIP64_32)
                payload += ZIP_LOCAL_ZIP64_BYTES;
        payload = (payload + IMAGE_ALIGNMENT - 1) / IMAGE_ALIGNMENT * IMAGE_ALIGNMENT;
        if (entry->header_offset > end || entry->has_descriptor || payload > end || entry->size != end - payload)
                return error_set(error, NEBULA_INVALID, 0, "the place of record \"%s\" does not follow from the directory", entry->name);
        entry->payload_offset = payload;
        return NEBULA_OK;
}

static enum nebula_status place_records(const struct archive *archive, struct zip_entry *entries, struct nebula_error *error)
{
        size_t count = (size_t)archive->count;
        enum nebula_status status = NEBULA_OK;

        sort_by_offset(entries, count);
        for (size_t k = 0; k < count && status == NEBULA_OK; k++)
                status = place_record(&entries[k], k + 1 < count ? entries[k + 1].header_offset : archive->directory_offset, error);
        return status;
}

static enum nebula_status read_records(struct archive *archive, bool has_headers, struct zip_entry *entries, struct nebula_error *error)
{
        uint64_t offset = archive->directory_offset;
        enum nebula_status status = NEBULA_OK;

        for (uint64_t k = 0; k < archive->count && status == NEBULA_OK; k++) {
                status = read_central(archive, &offset, &entries[k], error);
                if (status == NEBULA_OK && has_headers)
                        status = read_local(archive, &entries[k], error);
        }
        if (status == NEBULA_OK && offset != archive->directory_end)
                status = corrupt(error, offset, "more in the directory than its records");
        if (status == NEBULA_OK)
                status = has_headers ? check_order(entries, (size_t)archive->count, error) : place_records(archive, entries, error);
        return status;
}

static enum nebula_status read_archive(const void *data, uint64_t size, bool has_headers, struct zip_entry **ret_entries, size_t *ret_count,
                                       struct nebula_error *error)
{
        struct archive archive = { .bytes = data, .size = size };
        enum nebula_status status = find_directory(&archive, error);
        struct zip_entry *entries;

        if (status != NEBULA_OK)
                return status;
        entries = calloc((size_t)archive.count + 1, sizeof *entries); /* + 1: calloc of 0 items may return NULL */
        if (!entries)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a directory of %" PRIu64 " records", archive.count);
        status = read_records(&archive, has_headers, entries, error);
        if (status != NEBULA_OK) {
                free(entries);
                return status;
        }
        *ret_entries = entries;
        *ret_count = (size_t)archive.count;
        return NEBULA_OK;
}

enum nebula_status zip_read(const void *data, uint64_t size, struct zip_entry **ret_entries, size_t *ret_count,
                            struct nebula_error *error)
{
        return read_archive(data, size, true, ret_entries, ret_count, error);
}

enum nebula_status zip_read_directory(const void *data, uint64_t size, struct zip_entry **ret_entries, size_t *ret_count,
                                      struct nebula_error *error)
{
        return read_archive(data, size, false, ret_entries, ret_count, error);
}

enum nebula_status zip_verify(const void *data, uint64_t size, struct nebula_error *error)
{
        const uint8_t *bytes = data;
        struct zip_entry *entries;
        size_t count;
        enum nebula_status status = zip_read(data, size, &entries, &count, error);

        if (status != NEBULA_OK)
                return status;
        for (size_t k = 0; k < count && status == NEBULA_OK; k++) {
                const struct zip_entry *entry = &entries[k];
                uint32_t found = sum_crc32(0, bytes + entry->payload_offset, (size_t)entry->size);

                if (entry->header_crc32 != entry->crc32)
                        status = corrupt(error, entry->header_crc_offset, "another CRC-32 than in the directory");
                else if (found != entry->crc32)
                        status = error_set(error, NEBULA_CORRUPT, 0,
                                           "record \"%s\" at offset %" PRIu64 " (%" PRIu64 " bytes) has CRC-32 %08" PRIx32
                                           ", expected %08" PRIx32,
                                           entry->name, entry->payload_offset, entry->size, found, entry->crc32);
        }
        free(entries);
        return status;
}
