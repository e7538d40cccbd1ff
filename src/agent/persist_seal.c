/* Checksums of a version's files: while they are written, or for a copy on another node. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "agent/background.h"
#include "agent/persist_private.h"
#include "base/error.h"
#include "image/image.h"

static void tell(void *argument, uint64_t offset)
{
        bulk_feed_tell(argument, offset);
}

/* The checksums belong to the version, so that another try, or a copy for a peer, need not compute them again. */
static void keep_chunks(struct catalogue *catalogue, struct version *version, const struct plan_file *file)
{
        struct agent_file *own;

        catalogue_lock(catalogue);
        own = version_file(version, file->name);
        if (own && !own->chunks) {
                own->chunks = file->chunks;
                own->chunk_count = file->chunk_count;
        }
        catalogue_unlock(catalogue);
}

/* One at a time: the persist worker and the replica thread may want the same image, and the second finds it done. */
static pthread_mutex_t seal_lock = PTHREAD_MUTEX_INITIALIZER;

static enum nebula_status seal_file(struct catalogue *catalogue, struct version *version, struct plan_file *file,
                                    struct nebula_error *error)
{
        struct bulk_feed *feed = file->feed.offsets ? &file->feed : NULL;
        const struct agent_file *own;
        enum nebula_status status;
        void *data;

        pthread_mutex_lock(&seal_lock);
        catalogue_lock(catalogue);
        own = version_file(version, file->name);
        if (own && own->chunks) {
                file->chunks = own->chunks;
                file->chunk_count = own->chunk_count;
        }
        catalogue_unlock(catalogue);
        status = memory_map(file->image, &data, error);
        if (!status && !file->chunks) {
                status = image_seal_telling(data, file->size, file->is_zip, IMAGE_CHUNK_BYTES, feed ? tell : NULL, feed,
                                            &file->chunks, &file->chunk_count, error);
                if (status)
                        error_prefix(error, "file \"%.100s\" in memory is not what its trainer promised", file->name);
                else
                        keep_chunks(catalogue, version, file);
        } else if (!status && feed) {
                bulk_feed_tell_all(feed);
        }
        pthread_mutex_unlock(&seal_lock);
        return status;
}

/* Ends every feed, so that nobody waits for what will not come. */
static void seal(void *argument)
{
        struct sealing *sealing = argument;

        for (size_t i = 0; i < sealing->file_count; i++) {
                struct plan_file *file = &sealing->files[i];

                if (!file->carried && !sealing->status)
                        sealing->status = seal_file(sealing->catalogue, sealing->version, file, &sealing->error);
                if (file->feed.offsets)
                        bulk_feed_end(&file->feed);
        }
}

void *sealing_run(void *argument)
{
        seal(argument);
        return NULL;
}

enum nebula_status sealing_map(struct image *image, void **ret_data, struct nebula_error *error)
{
        enum nebula_status status;

        pthread_mutex_lock(&seal_lock);
        status = memory_map(image, ret_data, error);
        pthread_mutex_unlock(&seal_lock);
        return status;
}

enum nebula_status storage_seal(struct catalogue *catalogue, struct version *version, const char *name, const void **ret_data,
                                uint64_t **ret_chunks, struct nebula_error *error)
{
        struct plan_file file = { 0 };
        struct sealing sealing = { .catalogue = catalogue, .version = version, .files = &file, .file_count = 1 };
        const struct agent_file *own;

        catalogue_lock(catalogue);
        own = version_file(version, name);
        if (own) {
                snprintf(file.name, sizeof file.name, "%s", own->name);
                file.is_zip = own->format == IPC_FORMAT_ZIP;
                file.size = own->size;
                file.image = own->image;
        }
        catalogue_unlock(catalogue);
        if (!file.image)
                return error_set(error, NEBULA_NOT_FOUND, 0, "file \"%.200s\" is not in memory", name);
        background_run(seal, &sealing);
        if (sealing.status) {
                if (error)
                        *error = sealing.error;
                return sealing.status;
        }
        *ret_data = file.image->data;
        *ret_chunks = file.chunks;
        return NEBULA_OK;
}
