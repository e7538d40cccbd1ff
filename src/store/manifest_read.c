#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "base/error.h"
#include "store/manifest.h"
#include "store/manifest_keys.h"
#include "store/manifest_load.h"
#include "store/manifest_private.h"
#include "store/manifest_read.h"
#include "store/record.h"
#include "store/signature.h"

static atomic_ullong read_bytes;

struct read_argument {
        const struct record_file *file;
        const char *root, *key;
};

static enum nebula_status check_chunk(void *argument, const void *data, uint64_t offset, uint64_t size, const uint64_t *crc64,
                                      struct nebula_error *error)
{
        const struct read_argument *read = argument;
        uint64_t index = offset / read->file->chunk_bytes;
        uint64_t found = store_chunk_sum(data, size, crc64);

        atomic_fetch_add(&read_bytes, size);
        if (found == read->file->chunks[index])
                return NEBULA_OK;
        return error_set(error, NEBULA_CORRUPT, 0,
                         "%s/%s: damaged between byte %" PRIu64 " and %" PRIu64 ": the checksum is %016" PRIx64 ", it should be %016" PRIx64,
                         read->root, read->key, offset, offset + size, found, read->file->chunks[index]);
}

static enum nebula_status check_size(struct store *store, const char *key, uint64_t size, struct nebula_error *error)
{
        struct store_entry entry;
        enum nebula_status status = store->ops->stat(store, key, &entry, error);

        if (status)
                return status;
        status = store_check_size(store, key, entry.size, size, error);
        store_entry_done(&entry);
        return status;
}

enum nebula_status manifest_locate_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                        char ret_key[MANIFEST_KEY_MAX], struct nebula_error *error)
{
        const struct manifest_file *file = manifest_find_file(manifest, recorded->name);
        enum nebula_status status = manifest_file_key(manifest, file, ret_key, error);

        return status ? status : check_size(store, ret_key, recorded->size, error);
}

enum nebula_status manifest_read_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      void *data, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        struct read_argument read = { .file = recorded, .root = store->root, .key = key };
        enum nebula_status status = manifest_locate_file(store, manifest, recorded, key, error);

        if (!status && recorded->size)
                status = store->ops->read_bulk(store, key, data, recorded->size, recorded->chunk_bytes, check_chunk, &read, error);
        if (!status && signature_match(recorded, data, error)) {
                status = NEBULA_CORRUPT;
                error_prefix(error, "%s/%s", store->root, key);
        }
        return status;
}

enum nebula_status manifest_read_chunks(struct store *store, const char *key, const struct record_file *recorded, void *data,
                                        const struct store_range *ranges, size_t count, struct nebula_error *error)
{
        struct read_argument read = { .file = recorded, .root = store->root, .key = key };

        if (signature_counts(store))
                return error_set(error, NEBULA_UNAVAILABLE, 0, "%s/%s is read as a whole, because its signature counts", store->root, key);
        return store->ops->read_chunks(store, key, data, ranges, count, recorded->chunk_bytes, check_chunk, &read, error);
}

uint64_t manifest_read_bytes(void)
{
        return atomic_load(&read_bytes);
}

enum nebula_status manifest_open_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      bool is_shared, int *ret_fd, bool *ret_direct, struct nebula_error *error)
{
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = manifest_locate_file(store, manifest, recorded, key, error);

        if (!status && signature_counts(store)) /* another program could change the file after a check */
                status = error_set(error, NEBULA_UNAVAILABLE, 0, "%s/%s is read by the agent, because its signature counts", store->root, key);
        return status ? status : store->ops->open_read(store, key, is_shared, ret_fd, ret_direct, error);
}
