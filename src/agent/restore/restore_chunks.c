/*
 * Images that get the chunks of a stored file when trainers ask for them, for files that no descriptor leads to.
 *
 * A trainer that needs a part of such a file gets a sparse image at first. It asks for chunks before it reads them. All trainers of the
 * node share the image, so each chunk is read from storage once. Each chunk is checked as it arrives. The image takes memory for the
 * chunks that it has. When it has all chunks, it is an image like those that were read as a whole.
 *
 * A chunk goes from ABSENT to READING, and then to HERE; if the reading failed, back to ABSENT. Only the thread that set READING writes
 * to the chunk. `state` changes under the lock. If the nodes of the job read together (joint_read.h), a thread first reads the chunks that this
 * node owns. Then it asks for the others, which are ASKED instead of READING. An agent never lets another node wait for a chunk that is ASKED,
 * so no two nodes wait for each other.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/memory/memory.h"
#include "agent/peers/joint_read.h"
#include "agent/persist/storage.h"
#include "agent/restore/restore_private.h"
#include "base/error.h"
#include "store/manifest_load.h"
#include "store/manifest_read.h"
#include "store/record.h"
#include "store/signature.h"

#define RANGES_MAX 64 /* of one request to the store */

enum chunk_state { CHUNK_ABSENT, CHUNK_READING, CHUNK_ASKED, CHUNK_HERE };

struct image_chunks {
        struct wanted wanted;
        uint64_t version_id, size;
        char key[MANIFEST_KEY_MAX];
        uint32_t chunk_bytes, chunk_count, here_count;
        bool is_zip;
        uint8_t *state;
        uint64_t crc64[];
};

static struct image_chunks *chunks_new(const struct wanted *wanted, uint64_t version_id, const struct record_file *file)
{
        struct image_chunks *chunks = calloc(1, sizeof *chunks + file->chunk_count * (sizeof chunks->crc64[0] + sizeof chunks->state[0]));

        if (!chunks)
                return NULL;
        chunks->wanted = *wanted;
        chunks->version_id = version_id;
        chunks->size = file->size;
        chunks->chunk_bytes = file->chunk_bytes;
        chunks->chunk_count = (uint32_t)file->chunk_count;
        chunks->is_zip = file->is_zip;
        memcpy(chunks->crc64, file->chunks, file->chunk_count * sizeof chunks->crc64[0]);
        chunks->state = (uint8_t *)&chunks->crc64[file->chunk_count];
        return chunks;
}

/* A file of one chunk, or of chunks that share pages, is read as a whole. */
static bool has_parts(const struct store *store, const struct record_file *file)
{
        return store->ops->read_chunks && !signature_counts(store) && file->chunk_count > 1 && file->chunk_count < UINT32_MAX && file->chunk_bytes % MEMORY_PAGE == 0;
}

/* No lock held. */
static enum nebula_status make_image(struct catalogue *catalogue, struct job *job, const struct wanted *wanted, uint64_t version_id,
                                     struct image **ret_image, struct nebula_error *error)
{
        struct manifest manifest = { 0 };
        struct record_file file = { 0 };
        struct image_chunks *chunks = NULL;
        struct image *image;
        struct store *store;
        void *data;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        if (!status)
                status = restore_record(store, wanted, &manifest, &file, error);
        if (!status && !has_parts(store, &file))
                status = NEBULA_UNAVAILABLE;
        if (!status)
                chunks = chunks_new(wanted, version_id, &file);
        if (!status && !chunks)
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the chunks of \"%.200s\"", wanted->name);
        if (!status)
                status = manifest_locate_file(store, &manifest, &file, chunks->key, error);
        if (!status)
                status = memory_create_sparse(memory_capacity(file.size), &image, error);
        if (!status) {
                image->chunks = chunks;
                image->restored = image->exposed = true;
                *ret_image = image;
                status = image_map(image, &data, error);
                if (status)
                        memory_release(catalogue->memory, image);
        } else {
                free(chunks);
        }
        record_file_done(&file);
        manifest_done(&manifest);
        return status;
}

static enum nebula_status answer(struct catalogue *catalogue, struct image *image, struct ipc_opened **ret_opened, int *ret_fd,
                                 struct nebula_error *error)
{
        const struct image_chunks *chunks = image->chunks;
        struct ipc_opened *opened = calloc(1, sizeof *opened);
        enum nebula_status status;

        if (!opened)
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for an answer");
        *opened = (struct ipc_opened){ .size = chunks->size, .format = chunks->is_zip ? IPC_FORMAT_ZIP : IPC_FORMAT_RAW, .image_id = image->id,
                                       .source = IPC_SOURCE_STORAGE, .chunk_bytes = chunks->chunk_bytes, .chunk_count = chunks->chunk_count,
                                       .origin = chunks->wanted.origin };
        status = restore_lend(catalogue, image, ret_fd, error);
        if (status)
                free(opened);
        else
                *ret_opened = opened;
        return status;
}

enum nebula_status chunks_prepare(struct catalogue *catalogue, struct version *version, const char *name, struct nebula_error *error)
{
        struct agent_file *file = version_file(version, name);
        struct image *image = NULL;
        struct wanted wanted;
        enum nebula_status status;

        while (file->reading) {
                catalogue_wait(catalogue, &catalogue->moved, -1);
                file = version_file(version, name);
        }
        if (file->image)
                return NEBULA_UNAVAILABLE;
        if (!file->sparse) {
                file->reading = true;
                restore_want(version, file, &wanted);
                catalogue_unlock(catalogue);
                status = make_image(catalogue, version->job, &wanted, version->id, &image, error);
                catalogue_lock(catalogue);
                file = version_file(version, name);
                file->reading = false;
                pthread_cond_broadcast(&catalogue->moved);
                if (status)
                        return status;
                image->job = version->job;
                memory_add(catalogue->memory, image);
                memory_hold(image);
                file->sparse = image;
        }
        return NEBULA_OK;
}

enum nebula_status chunks_open(struct catalogue *catalogue, struct version *version, const char *name, struct ipc_opened **ret_opened,
                               int *ret_fd, struct nebula_error *error)
{
        enum nebula_status status = chunks_prepare(catalogue, version, name, error);

        return status ? status : answer(catalogue, version_file(version, name)->sparse, ret_opened, ret_fd, error);
}

/* Which chunks a thread takes: of a joint reading, those that this node owns, or the others. joint NULL: all. */
struct taking {
        struct joint *joint;
        bool is_own;
};

static bool is_taken(const struct taking *taking, uint32_t chunk)
{
        return !taking->joint || joint_is_own(taking->joint, chunk) == taking->is_own;
}

/* Takes absent chunks of the runs for this thread: they are READING or ASKED now. *ret_waits: another thread reads some of the others. */
static size_t take_absent(struct image_chunks *chunks, const struct taking *taking, const struct ipc_run *runs, size_t count,
                          struct store_range ranges[RANGES_MAX], bool *ret_waits)
{
        size_t used = 0;

        *ret_waits = false;
        for (size_t i = 0; i < count; i++)
                for (uint32_t chunk = runs[i].first; chunk - runs[i].first < runs[i].count; chunk++) {
                        uint64_t offset = (uint64_t)chunk * chunks->chunk_bytes;
                        uint64_t left = chunks->size - offset, size = left < chunks->chunk_bytes ? left : chunks->chunk_bytes;
                        bool joins = used && ranges[used - 1].offset + ranges[used - 1].size == offset;

                        if (!is_taken(taking, chunk))
                                continue;
                        *ret_waits |= chunks->state[chunk] == CHUNK_READING || chunks->state[chunk] == CHUNK_ASKED;
                        if (chunks->state[chunk] != CHUNK_ABSENT)
                                continue;
                        if (!joins && used == RANGES_MAX)
                                return used;
                        if (!joins)
                                ranges[used++] = (struct store_range){ offset, 0 };
                        ranges[used - 1].size += size;
                        chunks->state[chunk] = taking->joint && !taking->is_own ? CHUNK_ASKED : CHUNK_READING;
                }
        return used;
}

static void set_states(struct image_chunks *chunks, const struct store_range *ranges, size_t count, enum chunk_state state)
{
        for (size_t i = 0; i < count; i++)
                for (uint64_t done = 0; done < ranges[i].size; done += chunks->chunk_bytes) {
                        chunks->state[(ranges[i].offset + done) / chunks->chunk_bytes] = (uint8_t)state;
                        chunks->here_count += state == CHUNK_HERE;
                }
}

static enum nebula_status read_stored(struct store *store, struct image *image, const struct store_range *ranges, size_t count, struct nebula_error *error)
{
        struct image_chunks *chunks = image->chunks;
        const struct record_file file = { .size = chunks->size, .chunk_bytes = chunks->chunk_bytes, .chunks = chunks->crc64,
                                          .chunk_count = chunks->chunk_count };

        return manifest_read_chunks(store, chunks->key, &file, image->data, ranges, count, error);
}

/* Asks the owners, and reads from storage what does not come. */
static enum nebula_status read_joint(struct store *store, struct image *image, struct joint *joint, const struct store_range *ranges, size_t count,
                                     struct nebula_error *error)
{
        struct image_chunks *chunks = image->chunks;
        struct joint_file file = { .part = { .sequence = chunks->wanted.sequence, .origin = chunks->wanted.origin }, .size = chunks->size,
                                   .chunk_bytes = chunks->chunk_bytes, .crc64 = chunks->crc64, .data = image->data };
        bool *here = calloc(chunks->chunk_count, sizeof *here);
        enum nebula_status status = NEBULA_OK;

        if (!here)
                return read_stored(store, image, ranges, count, error);
        snprintf(file.part.tag, sizeof file.part.tag, "%s", chunks->wanted.tag);
        snprintf(file.part.name, sizeof file.part.name, "%s", chunks->wanted.name);
        joint_fetch(joint, &file, ranges, count, here);
        for (size_t i = 0; i < count; i++)
                for (uint64_t done = 0; !status && done < ranges[i].size; done += chunks->chunk_bytes) {
                        uint64_t offset = ranges[i].offset + done, left = ranges[i].size - done;
                        struct store_range lacking = { offset, left < chunks->chunk_bytes ? left : chunks->chunk_bytes };

                        if (!here[offset / chunks->chunk_bytes])
                                status = read_stored(store, image, &lacking, 1, error);
                }
        free(here);
        return status;
}

/* No lock held; the chunks are this thread's. */
static enum nebula_status read_ranges(struct catalogue *catalogue, struct job *job, struct image *image, const struct taking *taking,
                                      const struct store_range *ranges, size_t count, struct nebula_error *error)
{
        struct image_chunks *chunks = image->chunks;
        struct manifest manifest = { 0 };
        struct store *store;
        enum nebula_status status = storage_open(catalogue, job, &store, error);

        for (size_t i = 0; i < count && !status; i++)
                status = image_make_pages(image, ranges[i].offset, ranges[i].size, error);
        if (!status)
                status = taking->joint && !taking->is_own ? read_joint(store, image, taking->joint, ranges, count, error) :
                                                            read_stored(store, image, ranges, count, error);
        if (status == NEBULA_NOT_FOUND || status == NEBULA_CORRUPT) {
                if (restore_manifest(store, &chunks->wanted, &manifest, NULL) == NEBULA_NOT_FOUND)
                        status = restore_gone(chunks->wanted.tag, error);
                manifest_done(&manifest);
        }
        for (size_t i = 0; i < count && status; i++)
                image_drop_pages(image, ranges[i].offset, ranges[i].size);
        return status;
}

/* The same with the room for them. Lock held on entry and return. */
static enum nebula_status fill_ranges(struct catalogue *catalogue, struct job *job, struct image *image, const struct taking *taking,
                                      const struct store_range *ranges, size_t count, struct nebula_error *error)
{
        uint64_t size = 0;
        bool has_room;
        enum nebula_status status;

        for (size_t i = 0; i < count; i++)
                size += (ranges[i].size + MEMORY_PAGE - 1) / MEMORY_PAGE * MEMORY_PAGE;
        catalogue->memory->wanting++;
        status = restore_reserve(catalogue, size, image->chunks->wanted.name, error);
        catalogue->memory->wanting--;
        has_room = !status;
        if (has_room) {
                image->taken += size;
                catalogue_unlock(catalogue);
                status = read_ranges(catalogue, job, image, taking, ranges, count, error);
                catalogue_lock(catalogue);
        }
        if (status && has_room) {
                image->taken -= size;
                memory_unreserve(catalogue->memory, size);
        }
        set_states(image->chunks, ranges, count, status ? CHUNK_ABSENT : CHUNK_HERE);
        pthread_cond_broadcast(&catalogue->moved);
        return status;
}

/* It has all chunks. */
static void promote(struct version *version, struct image *image)
{
        struct agent_file *file = version_file(version, image->chunks->wanted.name);

        if (!file || file->sparse != image || file->image)
                return;
        file->image = image;
        file->sparse = NULL;
        file->format = image->chunks->is_zip ? IPC_FORMAT_ZIP : IPC_FORMAT_RAW;
        file->size = image->chunks->size;
}

/* Returns when all chunks of the runs that this thread takes are there. Lock held on entry and return. */
static enum nebula_status fill_taken(struct catalogue *catalogue, struct version *version, struct image *image, const struct taking *taking,
                                     const struct ipc_run *runs, size_t count, struct nebula_error *error)
{
        struct store_range ranges[RANGES_MAX];
        bool waits = true;
        enum nebula_status status = NEBULA_OK;

        while (!status && waits) {
                size_t used = take_absent(image->chunks, taking, runs, count, ranges, &waits);

                waits |= used > 0; /* there may be more */
                if (used)
                        status = fill_ranges(catalogue, version->job, image, taking, ranges, used, error);
                else if (waits)
                        catalogue_wait(catalogue, &catalogue->moved, -1);
        }
        return status;
}

static bool lacks_any(const struct image_chunks *chunks, const struct ipc_run *runs, size_t count)
{
        for (size_t i = 0; i < count; i++)
                for (uint32_t k = 0; k < runs[i].count; k++)
                        if (chunks->state[runs[i].first + k] == CHUNK_ABSENT)
                                return chunks->chunk_bytes <= PEER_PIECE_BYTES && chunks->wanted.sequence;
        return false;
}

/* Returns when all chunks of the runs are there. for_other: another node asks for them. Lock held on entry and return. */
static enum nebula_status fill(struct catalogue *catalogue, struct version *version, struct image *image, const struct ipc_run *runs,
                               size_t count, bool for_other, struct nebula_error *error)
{
        struct taking taking = { NULL, true };
        enum nebula_status status;

        memory_hold(image);
        version->pins++;
        if (!for_other && joint_wanted(catalogue, version->job) && lacks_any(image->chunks, runs, count)) {
                catalogue_unlock(catalogue);
                taking.joint = joint_open(catalogue, version->job, image->chunks->wanted.name);
                catalogue_lock(catalogue);
        }
        status = fill_taken(catalogue, version, image, &taking, runs, count, error);
        if (!status && taking.joint) {
                taking.is_own = false;
                status = fill_taken(catalogue, version, image, &taking, runs, count, error);
        }
        if (taking.joint) {
                catalogue_unlock(catalogue);
                joint_close(catalogue, taking.joint);
                catalogue_lock(catalogue);
        }
        if (!status && image->chunks->here_count == image->chunks->chunk_count)
                promote(version, image);
        if (status == NEBULA_CORRUPT) {
                enum trust_policy policy;

                catalogue_unlock(catalogue);
                policy = storage_policy(catalogue, version->job);
                catalogue_lock(catalogue);
                if (policy == TRUST_OFF) /* else a signature can be missing */
                        version_judge_copy(catalogue, version, false, "a chunk of it is not what its checksum says");
        }
        version->pins--;
        memory_drop(catalogue->memory, image);
        return status;
}

enum nebula_status restore_fetch(struct catalogue *catalogue, const struct ipc_fetch *request, struct nebula_error *error)
{
        struct version *version = NULL;
        struct image *image;
        enum nebula_status status = NEBULA_OK;

        catalogue_lock(catalogue);
        image = memory_find(catalogue->memory, request->image_id);
        if (image && image->chunks)
                version = catalogue_version(catalogue, image->chunks->version_id);
        if (!version)
                status = error_set(error, NEBULA_BUSY, 0, "the agent does not have this part of a file in memory any more: open the file again");
        if (!status && request->run_count > IPC_RUNS_MAX)
                status = error_set(error, NEBULA_INVALID, 0, "%" PRIu32 " ranges are too many for one request", request->run_count);
        for (uint32_t i = 0; i < request->run_count && !status; i++)
                if (request->runs[i].first > image->chunks->chunk_count || request->runs[i].count > image->chunks->chunk_count - request->runs[i].first)
                        status = error_set(error, NEBULA_INVALID, 0, "chunks %" PRIu32 " to %" PRIu64 " lie outside of \"%.150s\"", request->runs[i].first,
                                           (uint64_t)request->runs[i].first + request->runs[i].count, image->chunks->wanted.name);
        if (!status)
                status = fill(catalogue, version, image, request->runs, request->run_count, false, error);
        if (version)
                catalogue_signal_job(catalogue, version->job);
        catalogue_unlock(catalogue);
        return status;
}

enum nebula_status chunks_complete(struct catalogue *catalogue, struct version *version, const char *name, struct nebula_error *error)
{
        struct agent_file *file = version_file(version, name);
        struct image *image = file->sparse;
        enum nebula_status status;

        if (!image || file->image)
                return NEBULA_OK;
        status = fill(catalogue, version, image, &(struct ipc_run){ 0, image->chunks->chunk_count }, 1, false, error);
        file = version_file(version, name);
        if (status && file->sparse == image) {
                file->sparse = NULL;
                memory_drop(catalogue->memory, image);
        }
        return status;
}

/* The version that another node means, pinned. NULL: this node does not know it, or storage has another one. Lock held on entry and return, released
 * while storage is asked. */
static struct version *find_stored(struct catalogue *catalogue, struct job *job, const struct peer_part *wanted)
{
        struct version *version = job->versions;
        struct manifest manifest = { 0 };
        struct store *store;
        enum nebula_status status;

        while (version && !(version->stored && !version->is_remote && version->sequence == wanted->sequence && !strcmp(version->tag, wanted->tag)))
                version = version->next;
        if (!version) {
                catalogue_unlock(catalogue);
                status = storage_open(catalogue, job, &store, NULL);
                if (!status)
                        status = manifest_load(store, wanted->tag, &manifest, NULL);
                catalogue_lock(catalogue);
                if (!status && manifest.sequence == wanted->sequence && !strcmp(manifest.job, job->name))
                        version = catalogue_stored(catalogue, job, &manifest);
                manifest_done(&manifest);
        }
        if (version)
                version->pins++;
        return version;
}

/* Whether a chunk has room without a version that leaves memory for it: another node can read the chunk by itself. Lock held. */
static bool has_spare_room(const struct catalogue *catalogue, const struct image *image)
{
        const struct memory *memory = catalogue->memory;

        return memory->used < memory->budget && memory->budget - memory->used >= image->chunks->chunk_bytes;
}

enum nebula_status restore_part(struct catalogue *catalogue, struct job *job, const struct peer_part *wanted, struct restore_part *ret_part,
                                struct nebula_error *error)
{
        struct version *version;
        struct agent_file *file;
        struct image *image = NULL;
        enum nebula_status status;

        catalogue_lock(catalogue);
        version = find_stored(catalogue, job, wanted);
        file = version ? version_file(version, wanted->name) : NULL;
        status = file && version_file_sequence(version, file) == wanted->origin ? NEBULA_OK : error_set(error, NEBULA_NOT_FOUND, 0, "there is no such file here");
        if (!status && !file->image)
                status = chunks_prepare(catalogue, version, wanted->name, error);
        if (status != NEBULA_NOT_FOUND) {
                file = version_file(version, wanted->name);
                image = file->sparse ? file->sparse : file->image && file->image->chunks ? file->image : NULL;
                status = image && wanted->chunk < image->chunks->chunk_count ? NEBULA_OK :
                                                                              error_set(error, NEBULA_NOT_FOUND, 0, "there is no such chunk here");
        }
        if (!status && image->chunks->state[wanted->chunk] == CHUNK_ASKED)
                status = error_set(error, NEBULA_BUSY, 0, "this node waits for another one that reads the chunk");
        if (!status && image->chunks->state[wanted->chunk] == CHUNK_ABSENT && !has_spare_room(catalogue, image))
                status = error_set(error, NEBULA_BUSY, 0, "the memory of this node is full");
        if (!status) {
                memory_hold(image);
                status = fill(catalogue, version, image, &(struct ipc_run){ wanted->chunk, 1 }, 1, true, error);
                if (!status && !image->data) /* it is whole, and not mapped any more */
                        status = error_set(error, NEBULA_NOT_FOUND, 0, "the chunk is not mapped here");
                if (status)
                        memory_drop(catalogue->memory, image);
                else
                        image->readers++; /* it stays mapped */
        }
        if (!status) {
                const struct image_chunks *chunks = image->chunks;
                uint64_t offset = (uint64_t)wanted->chunk * chunks->chunk_bytes, left = chunks->size - offset;

                *ret_part = (struct restore_part){ .version = version, .image = image, .bytes = (const char *)image->data + offset, .offset = offset,
                                                   .crc64 = chunks->crc64[wanted->chunk], .size = left < chunks->chunk_bytes ? left : chunks->chunk_bytes };
        } else if (version) {
                version->pins--;
                catalogue_signal_job(catalogue, version->job);
        }
        catalogue_unlock(catalogue);
        return status;
}

void restore_part_done(struct catalogue *catalogue, struct restore_part *part)
{
        catalogue_lock(catalogue);
        part->image->readers--;
        memory_drop(catalogue->memory, part->image);
        part->version->pins--;
        catalogue_signal_job(catalogue, part->version->job);
        catalogue_unlock(catalogue);
}
