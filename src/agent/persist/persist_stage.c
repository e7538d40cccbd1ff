/* Uploads the files, and publishes them. */
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "agent/log.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/slots_private.h"
#include "base/error.h"
#include "image/image.h"
#include "os/os.h"
#include "os/thread.h"
#include "store/manifest_keys.h"

_Static_assert(IMAGE_CHUNK_BYTES == BULK_REQUEST_BYTES, "a chunk that was summed is a piece that may be written");

/* Files of a plan that are written together. */
struct batch {
        struct plan_file *files;
        size_t file_count, mapped_count; /* mapped_count: so many of them have been looked at, and are mapped unless they are carried */
        struct store_object *objects;
        size_t object_count;
};

/* Lists the objects to write and their keys. Images are mapped: the writer needs them before they are sealed. */
static enum nebula_status list_objects(struct plan *plan, struct batch *batch, struct nebula_error *error)
{
        for (; batch->mapped_count < batch->file_count; batch->mapped_count++) {
                struct plan_file *file = &batch->files[batch->mapped_count];
                enum nebula_status status;
                char key[MANIFEST_KEY_MAX];
                void *data;

                if (file->carried)
                        continue;
                status = sealing_map(plan->catalogue, file->image, &data, error);
                if (status)
                        return status;
                status = file_key(plan->writer.directory, file->is_apart ? plan->writing : NULL, file->name, key, error);
                if (status) {
                        batch->mapped_count++;
                        return status;
                }
                persist_set_resume(plan, file, key);
                batch->objects[batch->object_count++] = (struct store_object){
                        .key = strdup(key), .data = data, .size = file->size, .feed = &file->feed,
                        .source = file->source ? &file->source->object : NULL, .ret_written = &file->written,
                        .resume = &file->resume,
                };
                if ((file->source ? bulk_feed_init_pieces : bulk_feed_init)(&file->feed, file->size) || !batch->objects[batch->object_count - 1].key) {
                        batch->mapped_count++;
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", plan->writer.manifest.tag);
                }
                file->feed.moved_bytes = &plan->version->persist->moved_bytes;
        }
        return NEBULA_OK;
}

static void batch_done(struct catalogue *catalogue, struct batch *batch)
{
        for (size_t i = 0; i < batch->mapped_count; i++)
                if (!batch->files[i].carried)
                        sealing_unmap(catalogue, batch->files[i].image);
        for (size_t i = 0; i < batch->object_count; i++)
                free((char *)(uintptr_t)batch->objects[i].key);
        free(batch->objects);
}

struct seal_and_look {
        struct plan *plan;
        struct sealing sealing;
        const struct batch *batch;
};

/* The look needs the CRC-32s, and takes the time in which storage writes the last pieces. */
static void *seal_and_look(void *argument)
{
        struct seal_and_look *both = argument;

        sealing_run(&both->sealing);
        for (size_t i = 0, at = 0; i < both->batch->file_count && !both->sealing.status && !both->sealing.is_vain; i++)
                if (!both->batch->files[i].carried)
                        persist_look_at(both->plan, &both->batch->files[i], both->batch->objects[at++].data);
        return NULL;
}

/* Sends each piece to storage as soon as its checksum is known. */
static enum nebula_status upload_batch(struct plan *plan, struct batch *batch, struct store_upload **ret_upload, struct nebula_error *error)
{
        struct store *store = plan->writer.store;
        struct seal_and_look both = { .plan = plan, .batch = batch,
                                      .sealing = { .catalogue = plan->catalogue, .version = plan->version, .files = batch->files,
                                                   .file_count = batch->file_count, .is_ahead = plan->is_ahead } };
        struct sealing *sealing = &both.sealing;
        enum nebula_status status = list_objects(plan, batch, error);
        pthread_t thread;
        bool is_started;

        if (status || !batch->object_count)
                return status;
        is_started = !os_thread_start(&thread, seal_and_look, &both, true);
        if (!is_started)
                seal_and_look(&both);
        status = store->ops->upload(store, batch->objects, batch->object_count, ret_upload, error);
        sealing->is_vain = status != NEBULA_OK;
        if (is_started)
                pthread_join(thread, NULL);
        if (sealing->status) { /* no record will name the written files */
                status = sealing->status;
                if (error)
                        *error = sealing->error;
        }
        return status;
}

static enum nebula_status find_places(struct plan *plan, struct nebula_error *error)
{
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < plan->file_count && !status; i++)
                if (!plan->files[i].carried)
                        status = writer_is_apart(&plan->writer, plan->files[i].name, &plan->files[i].is_apart, error);
        return status;
}

enum nebula_status persist_upload(void *argument, struct nebula_error *error)
{
        struct plan *plan = argument;
        enum nebula_status status = find_places(plan, error);

        if (status)
                return status;
        plan_find_sources(plan);
        atomic_store(&plan->version->persist->moved_bytes, 0);
        plan->values = (struct plan_values){ 0 };
        plan->uploads = calloc(plan->file_count / PERSIST_BATCH + 1, sizeof *plan->uploads);
        if (!plan->uploads)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", plan->writer.manifest.tag);
        for (size_t first = 0; first < plan->file_count && !status; first += PERSIST_BATCH) {
                size_t left = plan->file_count - first;
                struct batch batch = { .files = plan->files + first, .file_count = left < PERSIST_BATCH ? left : PERSIST_BATCH };

                batch.objects = calloc(batch.file_count, sizeof *batch.objects);
                status = batch.objects ? upload_batch(plan, &batch, &plan->uploads[plan->upload_count++], error)
                                       : error_set(error, NEBULA_NO_MEMORY, 0, "no memory to persist \"%s\"", plan->writer.manifest.tag);
                batch_done(plan->catalogue, &batch);
        }
        if (!status)
                persist_judge_values(plan);
        return status;
}

static void report_written(const struct plan *plan)
{
        uint64_t size = 0, written = 0;

        for (size_t i = 0; i < plan->file_count; i++) {
                const struct plan_file *file = &plan->files[i];

                size += file->carried ? 0 : file->size;
                written += file->carried ? 0 : file->size - file->written.referred - file->written.resumed;
        }
        catalogue_lock(plan->catalogue);
        plan->version->persist->written_bytes = written;
        plan_report_common(plan->job, plan);
        catalogue_unlock(plan->catalogue);
        if (written < size)
                log_event(LOG_LEVEL_INFO, "%s: %" PRIu64 " of %" PRIu64 " MiB had to be written, storage had the rest already",
                          plan->writer.manifest.tag, (written + (1u << 20) - 1) >> 20, (size + (1u << 20) - 1) >> 20);
}

enum nebula_status persist_publish(void *argument, struct nebula_error *error)
{
        struct plan *plan = argument;
        struct store *store = plan->writer.store;
        struct nebula_error taken = { 0 };
        enum nebula_status status = NEBULA_OK;

        for (size_t i = 0; i < plan->upload_count && !status; i++) {
                struct store_upload *upload = plan->uploads[i];

                plan->uploads[i] = NULL;
                status = upload ? store->ops->publish(store, upload, &taken) : NEBULA_OK;
        }
        plan->writer.is_overtaken = status == NEBULA_BUSY;
        if (status == NEBULA_BUSY) /* the next attempt finds the name taken and writes the file below the writing's own directory */
                return error_set(error, NEBULA_STORAGE, 0, "another program took the place of a file of \"%.150s\" while it was written: %.250s",
                                 plan->writer.manifest.tag, taken.message);
        if (status && error)
                *error = taken;
        if (status)
                return status;
        plan->is_published = true;
        report_written(plan);
        return NEBULA_OK;
}
