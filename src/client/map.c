/* Reading back: the bytes of a file, verified by the agent, mapped here. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "client/client.h"
#include "image/image.h"
#include "os/os.h"

struct nebula_map {
        void *data; /* NULL when the file is empty */
        uint64_t size;
        int fd;
        bool is_zip;
};

/* A mapping beyond the end of its file would end the trainer with SIGBUS: so its size is looked at. */
static enum nebula_status map_file(struct nebula_map *map, struct nebula_error *error)
{
        struct os_stat stat;
        int result = os->fstat(map->fd, &stat);

        if (result < 0 || stat.size < map->size)
                return error_set(error, NEBULA_INTERNAL, result < 0 ? -result : 0,
                                 "the agent opened a file of %llu bytes that holds fewer", (unsigned long long)map->size);
        if (map->size == 0)
                return NEBULA_OK;
        result = os->map(map->fd, 0, map->size, OS_MAP_READ | OS_MAP_PRIVATE, &map->data);
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "a file of %llu bytes cannot be mapped",
                                 (unsigned long long)map->size);
        return NEBULA_OK;
}

enum nebula_status nebula_checkpoint_map(nebula_checkpoint *checkpoint, const char *name, nebula_map **ret_map,
                                         struct nebula_error *ret_error)
{
        struct client_wire wire = { .fd = -1 };
        struct ipc_open request = { 0 };
        struct client_call call = {
                .type = IPC_OPEN, .request = &request, .size = sizeof request, .version_id = &request.version_id,
                .checkpoint = checkpoint, .timeout_ms = -1, /* as long as reading takes */
        };
        const struct ipc_opened *opened;
        struct nebula_map *map;
        enum nebula_status status;

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
        map->fd = -1;
        status = session_call_alone(checkpoint->session, &wire, &call, ret_error);
        if (status == NEBULA_OK) {
                opened = wire.frame.payload;
                map->size = opened->size;
                map->is_zip = opened->format == IPC_FORMAT_ZIP;
                map->fd = wire.frame.fd;
                wire.frame.fd = -1;
                status = map_file(map, ret_error);
        }
        client_wire_close(&wire);
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

int nebula_map_fd(const nebula_map *map)
{
        return map ? map->fd : -1;
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
        if (map->fd >= 0)
                os->close(map->fd);
        free(map);
}
