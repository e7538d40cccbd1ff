/*
 * Loads files. A file in the node's memory is mapped; the agent has verified it. A file that only a file system holds is
 * read straight into this process's memory, and each chunk is checked as it arrives. A shared mapping would not do:
 * making its pages takes as long as the disk. Of a file in an object store the agent reads the parts that are needed (partial.c).
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "image/torch_pickle.h"
#include "os/os.h"

/* Smaller files are copied: a mapping takes as long, and a process may have 65,000 of them (vm.max_map_count). */
#define COPIED_BYTES (128u << 10)
#define READ_FROM (4u << 20) /* smallest image whose descriptor a lazy map keeps */
#define HEADER_BYTES 512u /* of a record, with name and padding; a larger header costs its reader one more read */

struct nebula_map {
        void *data; /* NULL if the file is empty */
        uint64_t size;
        bool is_zip;
        struct client_stored *stored;    /* reads the file; NULL: the agent has it, or has had it read */
        int image_fd;                    /* of a whole image, to read from without a page of the map; -1: none */
        bool is_image;                   /* `data` maps the agent's image: the first write to a page copies it */
        struct map_own *own;
        struct client_partial *partial;    /* the image has only some of the bytes; NULL: it has all */
        _Atomic(struct torch_tensors *) tensors; /* what nebula_map_tensor has found; NULL: it was not called */
        nebula_checkpoint *checkpoint;   /* a reference */
        char name[IPC_NAME_MAX];
};

/* Maps memory for a file that is read here, without asking for huge pages: the host of a virtual machine takes back
 * free memory in pieces of that size, and returns it at a tenth of a disk's speed. */
static enum nebula_status make_room(struct nebula_map *map, struct nebula_error *error)
{
        int result = map->size == 0 ? 0 : os->map(-1, 0, map->size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS,
                                                  &map->data);

        if (result < 0)
                return error_set(error, NEBULA_NO_MEMORY, -result, "no memory for a file of %llu bytes", (unsigned long long)map->size);
        return NEBULA_OK;
}

static int copy_image(struct nebula_map *map, int fd)
{
        int result = os_read_at(fd, map->data, map->size, 0);

        if (result < 0) {
                os->unmap(map->data, map->size);
                map->data = NULL;
        }
        return result;
}

/* Checks the size first: touching a mapping beyond the end of its file would end the trainer with SIGBUS. */
static enum nebula_status map_image(struct nebula_map *map, int fd, bool copies, struct nebula_error *error)
{
        struct os_stat stat;
        int result = os->fstat(fd, &stat);

        if (result < 0 || stat.size < map->size)
                return error_set(error, NEBULA_INTERNAL, result < 0 ? -result : 0,
                                 "the agent opened a file of %llu bytes that holds fewer", (unsigned long long)map->size);
        if (copies && map->size < COPIED_BYTES) {
                enum nebula_status status = make_room(map, error);

                if (status)
                        return status;
                result = copy_image(map, fd);
        } else {
                result = os->map(fd, 0, map->size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE, &map->data);
                map->is_image = result >= 0;
        }
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "a file of %llu bytes cannot be mapped",
                                 (unsigned long long)map->size);
        return NEBULA_OK;
}

enum nebula_status map_open_file(nebula_checkpoint *checkpoint, const char *name, enum ipc_reads reads, struct client_wire *wire,
                                 struct nebula_error *error)
{
        struct ipc_open request = { .reads_storage = reads };
        struct client_call call = {
                .type = IPC_OPEN, .request = &request, .size = sizeof request, .version_id = &request.version_id,
                .checkpoint = checkpoint, .timeout_ms = -1, /* no limit: reading takes as long as it takes */
        };

        memcpy(request.name, name, strlen(name) + 1);
        return session_call_alone(checkpoint->session, wire, &call, error);
}

static enum nebula_status no_map(struct nebula_error *error)
{
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a map");
}

static enum nebula_status open_map(struct nebula_map *map, enum ipc_reads reads, struct nebula_error *error)
{
        struct client_wire wire = { .fd = -1 };
        enum nebula_status status = map_open_file(map->checkpoint, map->name, reads, &wire, error);

        if (status == NEBULA_OK) {
                const struct ipc_opened *opened = wire.frame.payload;

                map->size = opened->size;
                map->is_zip = opened->format == IPC_FORMAT_ZIP;
                if (opened->image_id) {
                        map->partial = partial_new(opened);
                        status = map->partial ? map_image(map, wire.frame.fd, false, error) : no_map(error);
                } else if (!opened->chunk_bytes) {
                        status = map_image(map, wire.frame.fd, true, error);
                        if (status == NEBULA_OK && reads == IPC_READS_PARTS && map->size >= READ_FROM) {
                                map->image_fd = wire.frame.fd;
                                wire.frame.fd = -1;
                        }
                } else {
                        map->stored = stored_new(wire.frame.fd, opened);
                        if (map->stored)
                                wire.frame.fd = -1;
                        status = map->stored ? make_room(map, error) : no_map(error);
                }
        }
        session_wire_done(map->checkpoint->session, &wire);
        return status;
}

static enum nebula_status written_again(const struct nebula_map *map, struct nebula_error *error)
{
        return error_set(error, NEBULA_FAILED, 0, "\"%s\" of checkpoint \"%s\" was written again while it was read", map->name, map->checkpoint->tag);
}

/* Reading the stored file here failed: asks the agent, which finds the damage or has another source. */
static enum nebula_status fetch_from_agent(struct nebula_map *map, struct nebula_error *error)
{
        struct client_wire wire = { .fd = -1 };
        enum nebula_status status = map_open_file(map->checkpoint, map->name, IPC_READS_NONE, &wire, error);
        struct nebula_map image = { .size = map->size };

        if (status == NEBULA_OK && ((const struct ipc_opened *)wire.frame.payload)->size != map->size)
                status = written_again(map, error);
        if (status == NEBULA_OK)
                status = map_image(&image, wire.frame.fd, true, error);
        if (status == NEBULA_OK && map->size) {
                if (!stored_fill(map->stored, map->data, image.data))
                        status = written_again(map, error);
                os->unmap(image.data, map->size);
        }
        session_wire_done(map->checkpoint->session, &wire);
        if (status == NEBULA_OK) {
                stored_free(map->stored);
                map->stored = NULL;
        }
        return status;
}

static enum nebula_status fetch_partial(struct nebula_map *map, const struct nebula_part *parts, size_t count, struct nebula_error *error)
{
        return partial_fetch(map->partial, map->checkpoint, map->name, map->data, parts, count, error);
}

static enum nebula_status fetch_all(struct nebula_map *map, struct nebula_error *error)
{
        if (map->partial)
                return fetch_partial(map, &(struct nebula_part){ 0, map->size, NULL }, 1, error);
        if (!map->stored)
                return NEBULA_OK;
        if (!stored_fetch_all(map->stored, map->data))
                return fetch_from_agent(map, error);
        stored_free(map->stored);
        map->stored = NULL;
        return NEBULA_OK;
}

static enum nebula_status map_file(nebula_checkpoint *checkpoint, const char *name, enum ipc_reads reads, nebula_map **ret_map,
                                   struct nebula_error *ret_error)
{
        struct nebula_map *map;
        enum nebula_status status;

        if (!checkpoint || !name || !ret_map)
                return error_set(ret_error, NEBULA_INVALID, 0, "a map needs a checkpoint, a name and a place for the result");
        map = calloc(1, sizeof *map);
        if (!map)
                return error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for a map");
        map->image_fd = -1;
        map->checkpoint = checkpoint;
        atomic_fetch_add(&checkpoint->user_count, 1);
        status = client_text(map->name, sizeof map->name, name, "the file's name", ret_error);
        if (status == NEBULA_OK)
                status = copies_await(checkpoint->session, 0, -1, ret_error);
        if (status == NEBULA_OK)
                status = open_map(map, reads, ret_error);
        if (status != NEBULA_OK) {
                nebula_map_free(map);
                return status;
        }
        *ret_map = map;
        return NEBULA_OK;
}

enum nebula_status nebula_checkpoint_map_lazily(nebula_checkpoint *checkpoint, const char *name, nebula_map **ret_map,
                                                struct nebula_error *ret_error)
{
        return map_file(checkpoint, name, IPC_READS_PARTS, ret_map, ret_error);
}

enum nebula_status nebula_checkpoint_map(nebula_checkpoint *checkpoint, const char *name, nebula_map **ret_map,
                                         struct nebula_error *ret_error)
{
        nebula_map *map = NULL;
        enum nebula_status status = map_file(checkpoint, name, IPC_READS_WHOLE, ret_map ? &map : NULL, ret_error);

        if (status == NEBULA_OK)
                status = fetch_all(map, ret_error);
        if (status != NEBULA_OK) {
                nebula_map_free(map);
                return status;
        }
        *ret_map = map;
        return NEBULA_OK;
}

static bool lies_in(const struct nebula_map *map, uint64_t offset, uint64_t size)
{
        return offset <= map->size && size <= map->size - offset;
}

static enum nebula_status fetch_parts(struct nebula_map *map, const struct nebula_part *parts, size_t count, struct nebula_error *error)
{
        if (map->partial)
                return fetch_partial(map, parts, count, error);
        if (!map->stored || stored_fetch(map->stored, map->data, parts, count))
                return NEBULA_OK;
        return fetch_from_agent(map, error);
}

enum nebula_status nebula_map_fetch(nebula_map *map, uint64_t offset, uint64_t size, struct nebula_error *ret_error)
{
        if (!map || !lies_in(map, offset, size))
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_map_fetch needs a map and a range that lies in it");
        return fetch_parts(map, &(struct nebula_part){ offset, size, NULL }, 1, ret_error);
}

enum nebula_status nebula_map_fetch_parts(nebula_map *map, const struct nebula_part *parts, size_t count, struct nebula_error *ret_error)
{
        if (!map || (count && !parts))
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_map_fetch_parts needs a map and parts");
        for (size_t i = 0; i < count; i++)
                if (!lies_in(map, parts[i].offset, parts[i].size))
                        return error_set(ret_error, NEBULA_INVALID, 0, "part %zu does not lie in the file", i);
        return fetch_parts(map, parts, count, ret_error);
}

/* As fetch_parts, but of a stored file it puts no more than these bytes into the map: a chunk has a thousand pages. */
static enum nebula_status fetch_bytes(struct nebula_map *map, uint64_t offset, uint64_t size, struct nebula_error *error)
{
        struct nebula_part part = { offset, size, (char *)map->data + offset };

        return map->stored ? nebula_map_read(map, &part, 1, error) : fetch_parts(map, &part, 1, error);
}

static enum nebula_status fetch_directory(struct nebula_map *map, struct nebula_error *error)
{
        uint64_t directory = 0, tail = map->size < ZIP_TAIL_BYTES ? map->size : ZIP_TAIL_BYTES;
        enum nebula_status status = fetch_bytes(map, map->size - tail, tail, error);

        if (status == NEBULA_OK && zip_find_directory(map->data, map->size, &directory, NULL) == NEBULA_OK)
                status = fetch_bytes(map, directory, map->size - directory, error);
        return status;
}

enum nebula_status nebula_map_fetch_directory(nebula_map *map, int *ret_has_headers, struct nebula_error *ret_error)
{
        struct zip_entry *entries;
        size_t count;
        enum nebula_status status;

        if (!map || !ret_has_headers)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_map_fetch_directory needs a map and a place for the answer");
        *ret_has_headers = 1;
        if (!map->stored && !map->partial)
                return NEBULA_OK; /* all bytes are there */
        status = fetch_directory(map, ret_error);
        if (status != NEBULA_OK)
                return status;
        if (zip_read_directory(map->data, map->size, &entries, &count, NULL) != NEBULA_OK)
                return nebula_map_fetch_headers(map, ret_error);
        free(entries);
        *ret_has_headers = 0;
        return NEBULA_OK;
}

enum nebula_status nebula_map_fetch_headers(nebula_map *map, struct nebula_error *ret_error)
{
        uint64_t *offsets = NULL;
        struct nebula_part *parts = NULL;
        struct nebula_error why;
        enum nebula_status status;
        size_t count = 0;

        if (!map)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_map_fetch_headers needs a map");
        if (!map->stored && !map->partial)
                return NEBULA_OK; /* all bytes are there */
        status = fetch_directory(map, ret_error);
        if (status != NEBULA_OK)
                return status;
        status = zip_find_headers(map->data, map->size, &offsets, &count, &why);
        if (status != NEBULA_OK) /* a file that is no zip has no headers; its reader will report that */
                return status == NEBULA_NO_MEMORY ? error_set(ret_error, status, 0, "%s", why.message) : NEBULA_OK;
        parts = calloc(count + 1, sizeof *parts);
        if (!parts)
                status = error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for the places of %zu records", count);
        for (size_t i = 0, used = 0; i <= count && parts; i++) {
                if (i == count)
                        status = fetch_parts(map, parts, used, ret_error);
                else if (lies_in(map, offsets[i], HEADER_BYTES))
                        parts[used++] = (struct nebula_part){ offsets[i], HEADER_BYTES, NULL };
        }
        free(parts);
        free(offsets);
        return status;
}

enum nebula_status nebula_map_read(nebula_map *map, const struct nebula_part *parts, size_t count, struct nebula_error *ret_error)
{
        enum nebula_status status;
        uint64_t end = 0;

        if (!map || (count && !parts))
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_map_read needs a map and parts");
        for (size_t i = 0; i < count; end = parts[i].offset + parts[i].size, i++)
                if (!lies_in(map, parts[i].offset, parts[i].size) || parts[i].offset < end || (parts[i].size && !parts[i].data))
                        return error_set(ret_error, NEBULA_INVALID, 0, "part %zu must begin after the end of the part before it, and end within the file", i);
        if (map->partial) {
                status = fetch_partial(map, parts, count, ret_error);
                if (status != NEBULA_OK)
                        return status;
        }
        if (stored_scatter(map->stored, map->image_fd, map->data, map->size, parts, count))
                return NEBULA_OK;
        status = fetch_from_agent(map, ret_error);
        if (status == NEBULA_OK)
                stored_scatter(NULL, -1, map->data, map->size, parts, count); /* from memory, so it cannot fail */
        return status;
}

enum nebula_status map_read_record(nebula_map *map, const struct nebula_part *part, uint32_t crc32, struct nebula_error *error)
{
        if (lies_in(map, part->offset, part->size) && map->stored && stored_read_record(map->stored, part, crc32))
                return NEBULA_OK;
        return nebula_map_read(map, part, 1, error);
}

enum map_rest map_rest(const nebula_map *map)
{
        if (map->stored && !stored_is_direct(map->stored))
                return MAP_REST_CACHED;
        return map->stored || map->partial ? MAP_REST_ELSEWHERE : MAP_REST_NONE;
}

const void *nebula_map_data(const nebula_map *map)
{
        return map ? map->data : NULL;
}

uint64_t nebula_map_size(const nebula_map *map)
{
        return map ? map->size : 0;
}

static void free_tensors(struct torch_tensors *tensors)
{
        if (tensors)
                torch_tensors_done(tensors);
        free(tensors);
}

/* Reads the pickle once. Of two threads that do it at the same time one keeps what it found. */
static enum nebula_status find_tensors(nebula_map *map, const struct torch_tensors **ret_tensors, struct nebula_error *error)
{
        struct torch_tensors *found, *before = atomic_load(&map->tensors);
        enum nebula_status status;

        *ret_tensors = before;
        if (before)
                return NEBULA_OK;
        found = calloc(1, sizeof *found);
        if (!found)
                return no_map(error);
        status = torch_tensors_find(map->data, map->size, found, error);
        if (status == NEBULA_OK && atomic_compare_exchange_strong(&map->tensors, &before, found)) {
                *ret_tensors = found;
                return NEBULA_OK;
        }
        free_tensors(found);
        *ret_tensors = before;
        return status;
}

enum nebula_status nebula_map_tensor(const nebula_map *map, const char *name, struct nebula_tensor *ret_tensor,
                                     struct nebula_error *ret_error)
{
        const struct torch_tensors *tensors;
        enum nebula_status status;

        if (!map || !name || !ret_tensor)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_map_tensor needs a map, a name and a place for the "
                                 "tensor");
        if (!map->is_zip)
                return error_set(ret_error, NEBULA_INVALID, 0, "the file holds plain bytes, so there is no tensor \"%.80s\" "
                                 "in it", name);
        status = find_tensors((nebula_map *)map, &tensors, ret_error); /* for the caller the map stays as it is */
        return status ? status : torch_tensors_pick(tensors, map->data, name, ret_tensor, ret_error);
}

static void close_image(struct nebula_map *map)
{
        if (map->image_fd >= 0)
                os->close(map->image_fd);
        map->image_fd = -1;
}

void nebula_map_own(nebula_map *map)
{
        if (!map)
                return;
        close_image(map); /* the program may change the map now, and keep it */
        if (map->is_image && !map->partial && !map->own)
                map->own = map_own_start(map->data, map->size);
}

void nebula_map_free(nebula_map *map)
{
        if (!map)
                return;
        map_own_stop(map->own);
        if (map->data)
                os->unmap(map->data, map->size);
        close_image(map);
        stored_free(map->stored);
        partial_free(map->partial);
        free_tensors(map->tensors);
        nebula_checkpoint_free(map->checkpoint);
        free(map);
}
