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
        struct plan_file *file = argument;

        bulk_feed_tell(&file->feed, offset);
}

/* So that another try, or a copy for a peer, need not compute them again. */
void sealing_keep_chunks(struct version *version, struct plan_file *file)
{
        struct agent_file *own = version_file(version, file->name);

        file->keeps_chunks = !own || own->image != file->image || (own->chunks && own->chunks != file->chunks);
        if (!file->keeps_chunks) {
                own->chunks = file->chunks;
                own->chunk_count = file->chunk_count;
        }
}

/* One at a time: the persist worker and the replica thread may want the same image, and the second finds it done. */
static pthread_mutex_t seal_lock = PTHREAD_MUTEX_INITIALIZER;

/* Others seal meanwhile, though not this image: it becomes theirs when it is whole. */
static bool await_copied(void *argument, uint64_t size)
{
        struct plan_file *file = argument;
        bool is_there;

        if (atomic_load(&file->image->copied) >= size)
                return atomic_load(&file->image->copied) != IMAGE_GIVEN_UP;
        pthread_mutex_unlock(&seal_lock);
        is_there = memory_await_copied(file->image, size, AHEAD_PATIENCE_MS);
        pthread_mutex_lock(&seal_lock);
        return is_there;
}

static enum nebula_status seal_file(struct catalogue *catalogue, struct version *version, struct plan_file *file, bool is_ahead,
                                    struct nebula_error *error)
{
        struct bulk_feed *feed = file->feed.offsets ? &file->feed : NULL;
        const struct image_flow flow = { is_ahead ? await_copied : NULL, feed ? tell : NULL, file };
        const struct agent_file *own;
        enum nebula_status status;
        void *data;

        pthread_mutex_lock(&seal_lock);
        catalogue_lock(catalogue);
        own = version_file(version, file->name);
        if (own && own->chunks && own->image == file->image) {
                file->chunks = own->chunks;
                file->chunk_count = own->chunk_count;
        }
        catalogue_unlock(catalogue);
        status = memory_map(file->image, &data, error);
        if (!status && !file->chunks) {
                status = image_seal_flowing(data, file->size, file->is_zip, IMAGE_CHUNK_BYTES, &flow, &file->chunks, &file->chunk_count,
                                            error);
                if (status)
                        error_prefix(error, "file \"%.100s\" in memory is not what its trainer promised", file->name);
                catalogue_lock(catalogue);
                if (!status)
                        sealing_keep_chunks(version, file);
                catalogue_unlock(catalogue);
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
                        sealing->status = seal_file(sealing->catalogue, sealing->version, file, sealing->is_ahead, &sealing->error);
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
