#include "store/repair_object.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "os/os.h"
#include "store/manifest_keys.h"
#include "store/tag_log.h"
#include "store/transfer_private.h"
#include "sum/sum.h"

static uint64_t chunk_size(const struct record_file *file, size_t index)
{
        uint64_t offset = (uint64_t)index * file->chunk_bytes;

        return file->size - offset < file->chunk_bytes ? file->size - offset : file->chunk_bytes;
}

/* All of it, before anything is written. */
static bool is_sound(const struct repair_source *source, const struct record_file *file)
{
        static const struct verify_watch watch;

        if (source->from)
                return !verify_file(source->from, source->key, file, &watch, NULL);
        if (source->size != file->size)
                return false;
        for (size_t i = 0; i < file->chunk_count; i++)
                if (sum_crc64(0, (const char *)source->data + i * file->chunk_bytes, chunk_size(file, i)) != file->chunks[i])
                        return false;
        return true;
}

static enum nebula_status write_chunk(const struct repair_source *source, const struct record_file *file, size_t index, int fd, char *buffer, const char *path,
                                      struct nebula_error *error)
{
        uint64_t offset = (uint64_t)index * file->chunk_bytes, size = chunk_size(file, index);
        enum nebula_status status = verify_goes_on(source->watch, path, error);
        int result = status ? 0 : os_read_at(fd, buffer, size, offset);

        if (status)
                return status;
        if (!result && sum_crc64(0, buffer, size) == file->chunks[index])
                return NEBULA_OK;
        if (!source->from)
                memcpy(buffer, (const char *)source->data + offset, size);
        else
                status = verify_chunk(source->from, source->key, buffer, offset, size, file->chunks[index], error);
        if (status)
                return status;
        result = os_write_at(fd, buffer, size, offset);
        return result < 0 ? error_set(error, error_status_of_errno(-result), -result, "%.300s cannot be repaired", path) : NEBULA_OK;
}

/* A later writing of the tag puts its own file in this place, after its entry in the log. */
static enum nebula_status check_newest(struct store *store, const struct manifest *manifest, struct nebula_error *error)
{
        struct tag_log log = { 0 };
        enum nebula_status status = tag_log_head(store, manifest->tag, &log, error);

        if (!status && (log.is_removal || !log.number || log.is_unsound || log.manifest.sequence != manifest->sequence))
                status = error_set(error, NEBULA_BUSY, 0, "\"%.200s\" was written again or removed meanwhile", manifest->tag);
        tag_log_done(&log);
        return status;
}

/* Looks at the log after the file was opened: from then on all bytes go into that file, also if another one takes its place. Closes `fd`. */
static enum nebula_status write_into(struct store *store, const struct manifest *manifest, const char *key, const struct record_file *file,
                                     const struct repair_source *source, int fd, struct nebula_error *error)
{
        char *buffer = malloc((size_t)file->chunk_bytes + 1);
        enum nebula_status status = buffer ? check_newest(store, manifest, error) :
                                    error_set(error, NEBULA_NO_MEMORY, 0, "no memory to repair %.300s", key);
        int result;

        for (size_t i = 0; !status && i < file->chunk_count; i++)
                status = write_chunk(source, file, i, fd, buffer, key, error);
        free(buffer);
        result = status ? 0 : os->truncate(fd, file->size);
        if (!result && !status)
                result = os_sync(fd);
        os->close(fd);
        return result < 0 ? error_set(error, error_status_of_errno(-result), -result, "%.300s/%.300s cannot be repaired", store->root, key) : status;
}

/* No sweep takes the object for debris: a manifest names it. */
static void no_beat(void *argument)
{
        (void)argument;
}

/* A repair that writes the whole object. */
struct replacing {
        struct store *store;
        const struct manifest *manifest;
        const char *key;
};

/* The damaged object goes when the bytes of the new one are in storage: storage that has no room for them keeps what it has. A file in a directory
 * was missing: if another program has put one there since, that one stays. */
static enum nebula_status make_way(void *argument, struct nebula_error *error)
{
        const struct replacing *replacing = argument;
        struct store *store = replacing->store;
        enum nebula_status status = check_newest(store, replacing->manifest, error);

        return status || store->ops->features(store) & STORE_PATHS ? status : store_remove_one(store, replacing->key, error);
}

static enum nebula_status upload(struct replacing *replacing, const struct repair_source *source, struct nebula_error *error)
{
        const struct store_object object = { .key = replacing->key, .data = source->data, .size = source->size };
        struct store *store = replacing->store;
        struct store_upload *upload = NULL;
        enum nebula_status status = store->ops->upload(store, &object, 1, &upload, error);

        if (status)
                return status;
        status = make_way(replacing, error);
        if (!status)
                return store->ops->publish(store, upload, error);
        store->ops->abort(store, upload);
        return status;
}

static enum nebula_status write_again(struct store *store, const struct manifest *manifest, const char *key, const struct record_file *file,
                                      const struct repair_source *source, struct nebula_error *error)
{
        struct replacing replacing = { store, manifest, key };
        const struct transfer transfer = { .from = source->from, .to = store };
        const struct transfer_pulse pulse = { no_beat, make_way, &replacing };

        return !source->from ? upload(&replacing, source, error) : transfer_object(&transfer, source->key, key, file, &pulse, error);
}

enum nebula_status repair_object(struct store *store, const struct manifest *manifest, const char *key, const struct record_file *file,
                                 const struct repair_source *source, struct nebula_error *error)
{
        static const struct verify_watch none;
        int fd = -ENOENT;
        enum nebula_status status;

        if (!is_sound(source, file))
                return error_set(error, NEBULA_INVALID, 0, "%.300s is damaged, and its copy is not what the record describes", key);
        if (store->ops->features(store) & STORE_PATHS)
                fd = os->open_below(store->root, key, OS_READ | OS_WRITE);
        if (fd >= 0)
                status = write_into(store, manifest, key, file, source, fd, error);
        else if (fd == -ENOENT)
                status = write_again(store, manifest, key, file, source, error);
        else
                status = error_set(error, error_status_of_errno(-fd), -fd, "%.300s/%.300s cannot be opened to repair it", store->root, key);
        return status ? status : verify_file(store, key, file, source->watch ? source->watch : &none, error);
}

bool repair_is_record(const struct manifest *manifest, size_t index, const char *text, size_t size)
{
        const struct manifest_record *entry = &manifest->records[index];

        return size == entry->size && sum_crc64(0, text, size) == entry->crc64;
}

enum nebula_status repair_record(struct store *store, const struct manifest *manifest, size_t index, const char *text, size_t size,
                                 struct nebula_error *error)
{
        const struct manifest_record *entry = &manifest->records[index];
        char directory[256], key[MANIFEST_KEY_MAX];
        enum nebula_status status = name_encode(manifest->tag, directory, error);

        if (!status)
                status = record_key(directory, entry->writing, entry->rank, key, error);
        if (!status && !repair_is_record(manifest, index, text, size))
                status = error_set(error, NEBULA_INVALID, 0, "%.300s is damaged, and this is not what the manifest says of it", key);
        if (!status)
                status = check_newest(store, manifest, error);
        return status ? status : store->ops->put(store, key, text, size, STORE_ALWAYS, NULL, NULL, error);
}
