#include "cli/sparse.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/mapped.h"
#include "image/image.h"
#include "os/os.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/record.h"
#include "store/verify.h"
#include "sum/sum.h"

#define READ_BYTES (32u << 20) /* of one request */
#define HEADER_BYTES 1024u     /* a record's header with its padding, or most of it */

static enum nebula_status reserve(struct sparse *sparse, struct nebula_error *error)
{
        void *data = NULL;
        int result = 0;
        enum nebula_status status;

        sparse->is_mapped = sparse->store->ops->features(sparse->store) & STORE_PATHS;
        if (sparse->is_mapped) {
                sparse->mapped.watch = -1;
                status = mapped_open(sparse->store, sparse->key, &sparse->mapped, error);
                if (!status)
                        status = store_check_size(sparse->store, sparse->key, sparse->mapped.size, sparse->size, error);
                sparse->data = status ? NULL : sparse->mapped.data;
                return status;
        }
        if (sparse->size)
                result = os->map(-1, 0, sparse->size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &data);
        sparse->data = data;
        return result < 0 ? error_set(error, NEBULA_NO_MEMORY, -result, "no addresses for %s", sparse->key) : NEBULA_OK;
}

static enum nebula_status open_file(struct sparse *sparse, struct sparse *ret_sparse, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        sparse->size = sparse->recorded.size;
        sparse->have = calloc(sparse->recorded.chunk_count + 1, sizeof *sparse->have);
        if (!sparse->have)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to read %s", sparse->key);
        if (!status)
                status = reserve(sparse, error);
        if (status)
                sparse_close(sparse);
        else
                *ret_sparse = *sparse;
        return status;
}

enum nebula_status sparse_open_recorded(struct store *store, const char *key, const struct record_file *recorded, struct sparse *ret_sparse,
                                        struct nebula_error *error)
{
        struct sparse sparse = { .store = store, .recorded = *recorded };

        snprintf(sparse.key, sizeof sparse.key, "%s", key);
        return open_file(&sparse, ret_sparse, error);
}

enum nebula_status sparse_open(struct store *store, const struct manifest *manifest, const char *name, struct sparse *ret_sparse,
                               struct nebula_error *error)
{
        struct sparse sparse = { .store = store, .is_record_ours = true };
        enum nebula_status status = manifest_load_file(store, manifest, name, &sparse.recorded, error);

        if (status)
                return status;
        status = manifest_file_key(manifest, manifest_find_file(manifest, name), sparse.key, error);
        if (status) {
                sparse_close(&sparse);
                return status;
        }
        return open_file(&sparse, ret_sparse, error);
}

enum nebula_status sparse_end(struct sparse *sparse, enum nebula_status status, struct nebula_error *error)
{
        char place[MANIFEST_KEY_MAX + 4096];

        if (!sparse->is_mapped)
                return status;
        snprintf(place, sizeof place, "%s/%s", sparse->store->root, sparse->key);
        return mapped_end(&sparse->mapped, place, status, error);
}

void sparse_close(struct sparse *sparse)
{
        if (sparse->is_record_ours)
                record_file_done(&sparse->recorded);
        free(sparse->have);
        if (sparse->is_mapped)
                mapped_close(&sparse->mapped);
        else if (sparse->data)
                os->unmap(sparse->data, sparse->size);
        *sparse = (struct sparse){ 0 };
}

static uint64_t chunk_size(const struct sparse *sparse, uint64_t index)
{
        uint64_t left = sparse->size - index * sparse->recorded.chunk_bytes;

        return left < sparse->recorded.chunk_bytes ? left : sparse->recorded.chunk_bytes;
}

static enum nebula_status check_chunk(struct sparse *sparse, uint64_t index, struct nebula_error *error)
{
        uint64_t offset = index * sparse->recorded.chunk_bytes, size = chunk_size(sparse, index), recorded = sparse->recorded.chunks[index];
        uint64_t found = sum_crc64(0, sparse->data + offset, size);
        enum nebula_status status = NEBULA_OK;

        if (found != recorded && sparse->is_mapped)
                status = error_set(error, NEBULA_CORRUPT, 0,
                                   "%s/%s: damaged between byte %" PRIu64 " and %" PRIu64 ": the checksum is %016" PRIx64 ", it should be %016" PRIx64,
                                   sparse->store->root, sparse->key, offset, offset + size, found, recorded);
        else if (found != recorded)
                status = verify_chunk(sparse->store, sparse->key, sparse->data + offset, offset, size, recorded, error);
        sparse->have[index] = !status;
        return status;
}

enum nebula_status sparse_need(struct sparse *sparse, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        uint32_t chunk_bytes = sparse->recorded.chunk_bytes;
        uint64_t first = offset / chunk_bytes, end = size ? (offset + size - 1) / chunk_bytes + 1 : first;
        enum nebula_status status = NEBULA_OK;

        while (first < end && !status) {
                uint64_t count = 0, bytes = 0;

                while (first + count < end && !sparse->have[first + count] && bytes < READ_BYTES)
                        bytes += chunk_size(sparse, first + count++);
                if (count && !sparse->is_mapped)
                        status = sparse->store->ops->read(sparse->store, sparse->key, sparse->data + first * chunk_bytes, first * chunk_bytes, bytes,
                                                          error);
                for (uint64_t i = 0; i < count && !status; i++)
                        status = check_chunk(sparse, first + i, error);
                first += count ? count : 1;
        }
        return status;
}

/* Reads bytes without comparing a chunk's checksum: their structure is then parsed as hostile. */
static enum nebula_status peek(struct sparse *sparse, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        if (offset >= sparse->size || sparse->is_mapped)
                return NEBULA_OK;
        if (size > sparse->size - offset)
                size = sparse->size - offset;
        if (sparse->have[offset / sparse->recorded.chunk_bytes] && sparse->have[(offset + size - 1) / sparse->recorded.chunk_bytes])
                return NEBULA_OK;
        return sparse->store->ops->read(sparse->store, sparse->key, sparse->data + offset, offset, size, error);
}

static enum nebula_status peek_headers(struct sparse *sparse, struct nebula_error *error)
{
        uint64_t *headers;
        size_t count;
        enum nebula_status status = zip_find_headers(sparse->data, sparse->size, &headers, &count, error);

        if (status)
                return status;
        for (size_t i = 0; i < count && !status; i++)
                status = peek(sparse, headers[i], HEADER_BYTES, error);
        free(headers);
        return status;
}

enum nebula_status sparse_records(struct sparse *sparse, struct zip_entry **ret_entries, size_t *ret_count, struct nebula_error *error)
{
        uint64_t tail = sparse->size < ZIP_TAIL_BYTES ? sparse->size : ZIP_TAIL_BYTES, directory;
        enum nebula_status status = NEBULA_OK;

        if (sparse->is_mapped || !sparse->size)
                return zip_read(sparse->data, sparse->size, ret_entries, ret_count, error);
        status = peek(sparse, sparse->size - tail, tail, error);
        if (!status)
                status = zip_find_directory(sparse->data, sparse->size, &directory, error);
        if (!status)
                status = peek(sparse, directory, sparse->size - directory, error);
        if (!status)
                status = zip_read_directory(sparse->data, sparse->size, ret_entries, ret_count, error);
        for (size_t i = 0; !status && i < *ret_count; i++)
                (*ret_entries)[i].header_crc32 = (*ret_entries)[i].crc32;
        if (status != NEBULA_INVALID)
                return status;
        status = peek_headers(sparse, error);
        return status ? status : zip_read(sparse->data, sparse->size, ret_entries, ret_count, error);
}

enum nebula_status sparse_structure(struct sparse *sparse, struct nebula_error *error)
{
        uint64_t tail = sparse->size < ZIP_TAIL_BYTES ? sparse->size : ZIP_TAIL_BYTES, directory;
        struct zip_entry *entries;
        size_t count;
        enum nebula_status status;

        if (!sparse->size)
                return error_set(error, NEBULA_INVALID, 0, "an empty file is not a file of torch.save");
        status = sparse_need(sparse, sparse->size - tail, tail, error);
        if (!status)
                status = zip_find_directory(sparse->data, sparse->size, &directory, error);
        if (!status)
                status = sparse_need(sparse, directory, sparse->size - directory, error);
        if (!status)
                status = peek_headers(sparse, error);
        if (!status)
                status = zip_read(sparse->data, sparse->size, &entries, &count, error);
        if (status)
                return status;
        for (size_t i = 0; i < count && !status; i++) {
                const char *slash = strchr(entries[i].name, '/');

                if (slash && !strcmp(slash + 1, "data.pkl"))
                        status = sparse_need(sparse, entries[i].payload_offset, entries[i].size, error);
        }
        free(entries);
        return status;
}

static bool same_chunk(const struct sparse *a, const struct sparse *b, uint64_t index)
{
        return index < a->recorded.chunk_count && index < b->recorded.chunk_count && a->recorded.chunks[index] == b->recorded.chunks[index] &&
               chunk_size(a, index) == chunk_size(b, index);
}

enum nebula_status sparse_same(struct sparse *a, struct sparse *b, uint64_t offset, uint64_t size, bool *ret_same, struct nebula_error *error)
{
        uint32_t chunk_bytes = a->recorded.chunk_bytes;
        enum nebula_status status = NEBULA_OK;

        *ret_same = true;
        while (size && *ret_same && !status) {
                uint64_t left = chunk_bytes - offset % chunk_bytes, part = size < left ? size : left;

                if (chunk_bytes != b->recorded.chunk_bytes || !same_chunk(a, b, offset / chunk_bytes)) {
                        status = sparse_need(a, offset, part, error);
                        if (!status)
                                status = sparse_need(b, offset, part, error);
                        *ret_same = !status && !memcmp(a->data + offset, b->data + offset, part);
                }
                offset += part;
                size -= part;
        }
        return status;
}
