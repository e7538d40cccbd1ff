#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "store/manifest.h"
#include "store/manifest_private.h"
#include "sum/sum.h"

struct read_argument {
        const struct record_file *file;
        const char *root, *key;
        void *data;
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
        struct old_entry entry;
        enum nebula_status status = store->ops->old_stat(store, key, &entry, error);

        if (status)
                return status;
        if (entry.size != size)
                status = error_set(error, NEBULA_CORRUPT, 0, "%s/%s: has %" PRIu64 " bytes, it should have %" PRIu64,
                                   store->root, key, entry.size, size);
        old_entry_done(&entry);
        return status;
}

/* Calls `take`, which may be NULL, with the key of the file's bytes, which are as many as was recorded. */
static enum nebula_status at_its_place(struct store *store, const struct manifest *manifest, const struct manifest_file *file,
                                       enum nebula_status (*take)(struct store *store, const char *key, void *argument,
                                                                  struct nebula_error *error),
                                       void *argument, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_NOT_FOUND;
        char key[MANIFEST_KEY_MAX];

        /* A settle between the look and the read moves the file: the second look finds it in place. */
        for (int attempt = 0; attempt < 2 && status == NEBULA_NOT_FOUND; attempt++) {
                status = manifest_file_key(store, manifest, file, key, error);
                if (status)
                        break;
                status = check_size(store, key, file->size, error);
                if (!status && take)
                        status = take(store, key, argument, error);
        }
        return status;
}

enum nebula_status manifest_check_file(struct store *store, const struct manifest *manifest, const struct manifest_file *file,
                                       struct nebula_error *error)
{
        return at_its_place(store, manifest, file, NULL, NULL, error);
}

static enum nebula_status take_bytes(struct store *store, const char *key, void *argument, struct nebula_error *error)
{
        struct read_argument *read = argument;

        read->key = key;
        if (!read->file->size)
                return NEBULA_OK;
        return store->ops->read_bulk(store, key, read->data, read->file->size, read->file->chunk_bytes, check_chunk, read, error);
}

enum nebula_status manifest_read_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      void *data, struct nebula_error *error)
{
        struct read_argument read = { .file = recorded, .root = store->root, .data = data };

        return at_its_place(store, manifest, manifest_find_file(manifest, recorded->name), take_bytes, &read, error);
}

struct open_argument {
        int fd;
        bool is_direct;
};

static enum nebula_status take_descriptor(struct store *store, const char *key, void *argument, struct nebula_error *error)
{
        struct open_argument *opened = argument;

        return store->ops->open_read(store, key, &opened->fd, &opened->is_direct, error);
}

enum nebula_status manifest_open_file(struct store *store, const struct manifest *manifest, const struct record_file *recorded,
                                      int *ret_fd, bool *ret_direct, struct nebula_error *error)
{
        struct open_argument opened = { .fd = -1 };
        enum nebula_status status = at_its_place(store, manifest, manifest_find_file(manifest, recorded->name), take_descriptor, &opened, error);

        *ret_fd = opened.fd;
        *ret_direct = opened.is_direct;
        return status;
}
