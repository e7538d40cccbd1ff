/* Checksums of a version's files: while they are written, or for a copy on another node. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/background.h"
#include "agent/memory/memory.h"
#include "agent/persist/due.h"
#include "agent/persist/persist_private.h"
#include "agent/persist/persist_seal.h"
#include "base/error.h"
#include "image/image.h"
#include "os/lock.h"
#include "os/os.h"

#define PACE_BYTES (64u << 20) /* slightly more than the bytes that are being written to storage */

/* A file that is being summed. */
struct flowing {
        struct sealing *sealing;
        struct plan_file *file;
};

/* So that another try, or a copy for a peer, need not compute them again. */
void sealing_keep_chunks(struct version *version, struct plan_file *file)
{
        struct agent_file *own = version_file(version, file->name);

        file->keeps_chunks = !own || own->image != file->image || (own->chunks && own->chunks != file->chunks);
        if (!file->keeps_chunks) {
                own->chunks = file->chunks;
                own->chunk_count = file->chunk_count;
                own->image->scrubbed_ns = os->now_ns(); /* the image may have served another version before */
                own->image->scrub_next = 0;
        }
}

/* One at a time: the persist worker and the replica thread may want the same image, and the second finds it done. */
static struct lock seal_lock = LOCK_INIT(LOCK_SEAL);
static atomic_uint seal_waiting; /* threads */

static void seal_begin(void)
{
        atomic_fetch_add(&seal_waiting, 1);
        lock_take(&seal_lock);
        atomic_fetch_sub(&seal_waiting, 1);
}

static void report_feed(struct plan_file *file, uint64_t offset, uint64_t crc64)
{
        bulk_feed_report_summed(&file->feed, offset, crc64, plan_source_has(file, offset, crc64));
}

/* Checksums are some ten times as fast as storage. If they ran ahead of it, they would take a processor from training and gain
 * nothing. So they stay a little ahead of the writes of one file, unless another thread waits to seal. */
static void report(void *argument, uint64_t offset, uint64_t crc64)
{
        struct flowing *flowing = argument;
        struct bulk_feed *feed = &flowing->file->feed;

        report_feed(flowing->file, offset, crc64);
        while (flowing->sealing->file_count == 1 && !atomic_load(&seal_waiting) && bulk_feed_pace(feed, PACE_BYTES))
                ;
}

/* Whether another wait may follow one of `waited_ns`. It only compares times: this thread has a low priority, and others want the
 * lock. */
static bool may_wait(struct sealing *sealing, int64_t waited_ns)
{
        bool is_held_up, is_stopping;

        sealing->waited_ns += waited_ns;
        if (sealing->waited_ns < AHEAD_LOOK_MS * INT64_C(1000000))
                return !sealing->is_vain;
        catalogue_lock(sealing->catalogue);
        is_held_up = due_other(sealing->catalogue, sealing->version);
        is_stopping = sealing->catalogue->stopping;
        catalogue_unlock(sealing->catalogue);
        sealing->held_up_ns += is_held_up ? sealing->waited_ns : 0;
        sealing->waited_ns = 0;
        return !is_stopping && !sealing->is_vain && sealing->held_up_ns < AHEAD_PATIENCE_NS;
}

/* Other threads seal meanwhile, but not this image. */
static bool await_copied(void *argument, uint64_t size)
{
        struct flowing *flowing = argument;
        struct image *image = flowing->file->image;
        uint64_t copied = atomic_load(&image->copied), before = copied;
        int64_t begun_ns, moved_ns, now_ns;
        bool goes_on = true;

        if (copied >= size)
                return copied != IMAGE_GIVEN_UP;
        lock_give(&seal_lock);
        begun_ns = moved_ns = os->now_ns();
        while (goes_on && copied < size) {
                copied = image_await_copied(image, size, AHEAD_LOOK_MS);
                now_ns = os->now_ns();
                moved_ns = copied != before ? now_ns : moved_ns;
                goes_on = may_wait(flowing->sealing, now_ns - begun_ns) && now_ns - moved_ns < AHEAD_PATIENCE_NS;
                before = copied;
                begun_ns = now_ns;
        }
        seal_begin();
        return copied >= size && copied != IMAGE_GIVEN_UP;
}

static enum nebula_status seal_file(struct sealing *sealing, struct plan_file *file, struct nebula_error *error)
{
        struct catalogue *catalogue = sealing->catalogue;
        struct version *version = sealing->version;
        struct bulk_feed *feed = file->feed.offsets ? &file->feed : NULL;
        struct flowing flowing = { sealing, file };
        struct image_flow flow = { .await = sealing->is_ahead ? await_copied : NULL, .ready = feed ? report : NULL, .argument = &flowing };
        const struct agent_file *own;
        enum nebula_status status;
        void *data;

        seal_begin();
        catalogue_lock(catalogue);
        own = version_file(version, file->name);
        if (own && own->chunks && own->image == file->image) {
                file->chunks = own->chunks;
                file->chunk_count = own->chunk_count;
        }
        catalogue_unlock(catalogue);
        status = image_map(file->image, &data, error);
        if (!status && !file->chunks) {
                flow.sums = (const struct image_sum *)(const void *)((const char *)data + image_sums_offset(file->size));
                flow.sum_count = &file->image->sum_count;
                status = image_seal_flowing(data, file->size, file->is_zip, IMAGE_CHUNK_BYTES, &flow, &file->chunks, &file->chunk_count,
                                            error);
                if (status) {
                        error_prefix(error, "file \"%.100s\" in memory is not what its trainer promised", file->name);
                } else {
                        catalogue_lock(catalogue);
                        sealing_keep_chunks(version, file);
                        catalogue_unlock(catalogue);
                }
        } else if (!status && feed) {
                for (size_t i = 0; i < file->chunk_count; i++)
                        report_feed(file, i * (uint64_t)IMAGE_CHUNK_BYTES, file->chunks[i]);
        }
        lock_give(&seal_lock);
        return status;
}

/* Ends every feed, so that no writer waits for bytes that will not come. */
static void seal(void *argument)
{
        struct sealing *sealing = argument;

        for (size_t i = 0; i < sealing->file_count; i++) {
                struct plan_file *file = &sealing->files[i];

                if (!file->carried && !sealing->status)
                        sealing->status = seal_file(sealing, file, &sealing->error);
                if (file->feed.offsets)
                        bulk_feed_end(&file->feed);
        }
}

void *sealing_run(void *argument)
{
        seal(argument);
        return NULL;
}

enum nebula_status sealing_map(struct catalogue *catalogue, struct image *image, void **ret_data, struct nebula_error *error)
{
        enum nebula_status status;
        bool wants_pin, is_pinned;

        seal_begin();
        status = image_map(image, ret_data, error);
        catalogue_lock(catalogue);
        image->readers += !status;
        catalogue_unlock(catalogue);
        lock_give(&seal_lock);
        if (status || image->capacity < MEMORY_ROUND)
                return status;
        catalogue_lock(catalogue);
        wants_pin = image_wants_pin(image);
        catalogue_unlock(catalogue);
        if (!wants_pin)
                return NEBULA_OK;
        is_pinned = image_pin(image);
        catalogue_lock(catalogue);
        image->pinned = is_pinned;
        image->unpinnable = !is_pinned;
        catalogue_unlock(catalogue);
        return NEBULA_OK;
}

/* Both locks held, so no thread seals it now or begins to read it. */
static void unmap_unread(struct image *image)
{
        if (--image->readers || image_stays_mapped(image))
                return;
        image_unmap(image);
        image->pinned = false;
}

void sealing_unmap(struct catalogue *catalogue, struct image *image)
{
        seal_begin();
        catalogue_lock(catalogue);
        unmap_unread(image);
        catalogue_unlock(catalogue);
        lock_give(&seal_lock);
}

void storage_unseal(struct catalogue *catalogue, struct image *image)
{
        seal_begin();
        catalogue_lock(catalogue);
        unmap_unread(image);
        memory_drop(catalogue->memory, image);
        catalogue_signal(catalogue); /* a save may wait for room */
        catalogue_unlock(catalogue);
        lock_give(&seal_lock);
}

/* Copies the new checksums, since the version may lose its own. Lock held. */
static enum nebula_status take_sums(struct version *version, struct plan_file *file, uint64_t **ret_chunks,
                                    struct nebula_error *error)
{
        const struct agent_file *own = version_file(version, file->name);

        if (file->keeps_chunks) {
                *ret_chunks = file->chunks;
                return NEBULA_OK;
        }
        if (!own || own->image != file->image || !own->chunks)
                return error_set(error, NEBULA_NOT_FOUND, 0, "file \"%.200s\" has left memory", file->name);
        *ret_chunks = malloc((own->chunk_count + 1) * sizeof **ret_chunks);
        if (!*ret_chunks)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the checksums of \"%.200s\"", file->name);
        memcpy(*ret_chunks, own->chunks, own->chunk_count * sizeof **ret_chunks);
        return NEBULA_OK;
}

enum nebula_status storage_seal(struct catalogue *catalogue, struct version *version, const char *name,
                                struct image **ret_image, uint64_t **ret_chunks, struct nebula_error *error)
{
        struct plan_file file = { 0 };
        struct sealing sealing = { .catalogue = catalogue, .version = version, .files = &file, .file_count = 1 };
        const struct agent_file *own;
        enum nebula_status status;

        catalogue_lock(catalogue);
        own = version_file(version, name);
        if (own && own->image) {
                snprintf(file.name, sizeof file.name, "%s", own->name);
                file.is_zip = own->format == IPC_FORMAT_ZIP;
                file.size = own->size;
                file.image = own->image;
                file.image->readers++;
                memory_hold(file.image); /* the worker may find that the version will never be written, and release it */
        }
        catalogue_unlock(catalogue);
        if (!file.image)
                return error_set(error, NEBULA_NOT_FOUND, 0, "file \"%.200s\" is not in memory", name);
        background_run(seal, &sealing);
        if (sealing.status && error)
                *error = sealing.error;
        catalogue_lock(catalogue);
        status = sealing.status ? sealing.status : take_sums(version, &file, ret_chunks, error);
        catalogue_unlock(catalogue);
        if (status)
                storage_unseal(catalogue, file.image);
        else
                *ret_image = file.image;
        return status;
}
