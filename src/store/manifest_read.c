#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "store/manifest.h"
#include "store/manifest_private.h"
#include "sum/sum.h"

struct read_argument {
        const struct record_file *file;
        const char *root, *key;
};

static enum nebula_status check_chunk(void *argument, const void *data, uint64_t offset, uint64_t size,
                                      struct nebula_error *error)
{
        const struct read_argument *read = argument;
        uint64_t index = offset / read->file->chunk_bytes;
        uint64_t found = sum_crc64(0, data, size);

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
        if (entry.size != size)
                status = error_set(error, NEBULA_CORRUPT, 0, "%s/%s: has %" PRIu64 " bytes, it should have %" PRIu64,
                                   store->root, key, entry.size, size);
        store_entry_done(&entry);
        return status;
}

enum nebula_status manifest_read_file(struct store *store, const struct manifest *manifest, const char *name,
                                      void *data, uint64_t size, struct nebula_error *error)
{
        const struct manifest_file *file = manifest_find_file(manifest, name);
        struct record_file recorded = { 0 };
        struct read_argument argument = { .file = &recorded, .root = store->root };
        char key[MANIFEST_KEY_MAX];
        enum nebula_status status = manifest_load_file(store, manifest, name, &recorded, error);

        if (status)
                return status;
        if (size != recorded.size) {
                status = error_set(error, NEBULA_INVALID, 0, "\"%s\" has %" PRIu64 " bytes, %" PRIu64 " were asked for",
                                   name, recorded.size, size);
                goto out;
        }
        /* A settle between the look and the read moves the file: the second look finds it in place. */
        for (int attempt = 0; attempt < 2; attempt++) {
                status = manifest_file_key(store, manifest, file, key, error);
                if (status)
                        break;
                argument.key = key;
                status = check_size(store, key, size, error);
                if (!status && size)
                        status = store->ops->read_bulk(store, key, data, size, recorded.chunk_bytes, check_chunk,
                                                       &argument, error);
                if (status != NEBULA_NOT_FOUND)
                        break;
        }
out:
        record_file_done(&recorded);
        return status;
}
