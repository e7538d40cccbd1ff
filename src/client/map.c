/*
 * Reading back. What the node's memory holds is mapped: the agent has verified it. What only storage holds is read
 * straight into memory of this process, each chunk checked as it arrives: shared pages would have to be made first,
 * and that takes as long as the disk.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "image/image.h"
#include "os/bulk.h"
#include "os/os.h"
#include "sum/sum.h"

struct nebula_map {
        void *data; /* NULL when the file is empty */
        uint64_t size;
        bool is_zip;
};

/* A mapping beyond the end of its file would end the trainer with SIGBUS: so its size is looked at. */
static enum nebula_status map_image(struct nebula_map *map, int fd, struct nebula_error *error)
{
        struct os_stat stat;
        int result = os->fstat(fd, &stat);

        if (result < 0 || stat.size < map->size)
                return error_set(error, NEBULA_INTERNAL, result < 0 ? -result : 0,
                                 "the agent opened a file of %llu bytes that holds fewer", (unsigned long long)map->size);
        if (map->size == 0)
                return NEBULA_OK;
        result = os->map(fd, 0, map->size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE, &map->data);
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "a file of %llu bytes cannot be mapped",
                                 (unsigned long long)map->size);
        return NEBULA_OK;
}

static enum nebula_status check_chunk(void *argument, const void *data, uint64_t offset, uint64_t size,
                                      struct nebula_error *error)
{
        const struct ipc_opened *opened = argument;

        return sum_crc64(0, data, size) == opened->crc64[offset / opened->chunk_bytes] ? NEBULA_OK : NEBULA_CORRUPT;
}

/* False: not read, or damaged; nothing is kept. */
static bool read_stored(struct nebula_map *map, int fd, struct ipc_opened *opened)
{
        uint64_t size = map->size;
        int result = size == 0 ? 0 :
                     os->map(-1, 0, size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &map->data);

        if (result < 0) {
                map->data = NULL;
                return false;
        }
        if (size == 0)
                return true;
        os->advise(map->data, size, OS_ADVISE_HUGE); /* fewer pages to make; without it all works as well */
        result = bulk_read(fd, opened->is_direct, map->data, size, opened->chunk_bytes, check_chunk, opened, NULL);
        if (result == 0)
                return true;
        os->unmap(map->data, size);
        map->data = NULL;
        return false;
}

/* *ret_again: the stored file could not be read here; the agent finds out why, and what else there is. */
static enum nebula_status open_file(nebula_checkpoint *checkpoint, struct ipc_open *request, struct nebula_map *map,
                                    bool *ret_again, struct nebula_error *error)
{
        struct client_wire wire = { .fd = -1 };
        struct client_call call = {
                .type = IPC_OPEN, .request = request, .size = sizeof *request, .version_id = &request->version_id,
                .checkpoint = checkpoint, .timeout_ms = -1, /* as long as reading takes */
        };
        enum nebula_status status = session_call_alone(checkpoint->session, &wire, &call, error);

        *ret_again = false;
        if (status == NEBULA_OK) {
                struct ipc_opened *opened = wire.frame.payload;

                map->size = opened->size;
                map->is_zip = opened->format == IPC_FORMAT_ZIP;
                if (opened->chunk_bytes)
                        *ret_again = !read_stored(map, wire.frame.fd, opened);
                else
                        status = map_image(map, wire.frame.fd, error);
        }
        client_wire_close(&wire);
        return status;
}

enum nebula_status nebula_checkpoint_map(nebula_checkpoint *checkpoint, const char *name, nebula_map **ret_map,
                                         struct nebula_error *ret_error)
{
        struct ipc_open request = { .reads_storage = true };
        struct nebula_map *map;
        enum nebula_status status;
        bool again;

        if (!checkpoint || !name || !ret_map)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_checkpoint_map needs a checkpoint, a name and a "
                                 "place for the map");
        status = client_text(request.name, sizeof request.name, name, "the file's name", ret_error);
        if (status != NEBULA_OK)
                return status;
        status = copies_settle(checkpoint->session, 0, -1, ret_error);
        if (status != NEBULA_OK)
                return status;
        map = calloc(1, sizeof *map);
        if (!map)
                return error_set(ret_error, NEBULA_NO_MEMORY, 0, "no memory for a map");
        status = open_file(checkpoint, &request, map, &again, ret_error);
        if (status == NEBULA_OK && again) {
                request.reads_storage = false;
                status = open_file(checkpoint, &request, map, &again, ret_error);
        }
        if (status != NEBULA_OK) {
                nebula_map_free(map);
                return status;
        }
        *ret_map = map;
        return NEBULA_OK;
}

const void *nebula_map_data(const nebula_map *map)
{
        return map ? map->data : NULL;
}

uint64_t nebula_map_size(const nebula_map *map)
{
        return map ? map->size : 0;
}

enum nebula_status nebula_map_tensor(const nebula_map *map, const char *name, struct nebula_tensor *ret_tensor,
                                     struct nebula_error *ret_error)
{
        if (!map || !name || !ret_tensor)
                return error_set(ret_error, NEBULA_INVALID, 0, "nebula_map_tensor needs a map, a name and a place for the "
                                 "tensor");
        if (!map->is_zip)
                return error_set(ret_error, NEBULA_INVALID, 0, "the file holds plain bytes, so there is no tensor \"%.80s\" "
                                 "in it", name);
        return zip_find_tensor(map->data, map->size, name, ret_tensor, ret_error);
}

void nebula_map_free(nebula_map *map)
{
        if (!map)
                return;
        if (map->data)
                os->unmap(map->data, map->size);
        free(map);
}
