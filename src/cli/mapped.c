#include "cli/mapped.h"

#include <stdlib.h>
#include <stdio.h>

#include "base/error.h"
#include "cli/cli_agent.h"
#include "image/image.h"
#include "os/os.h"

/* Closes `fd`. A negative one is the result of an open that failed. */
static enum nebula_status map_file(const char *path, int fd, struct mapped *ret_mapped, struct nebula_error *error)
{
        struct mapped mapped = { .watch = -1 };
        struct os_stat stat;
        int result;

        if (fd < 0)
                return error_set(error, error_status_of_errno(-fd), -fd, "cannot open %s", path);
        result = os->fstat(fd, &stat);
        if (!result && stat.kind != OS_KIND_FILE) {
                os->close(fd);
                return error_set(error, NEBULA_INVALID, 0, "%s is not a regular file", path);
        }
        if (!result && stat.size)
                result = os->map(fd, 0, stat.size, OS_MAP_READ, &mapped.data);
        os->close(fd);
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "cannot map %s", path);
        mapped.size = stat.size;
        if (mapped.size)
                mapped.watch = os->watch_map(mapped.data, mapped.size);
        *ret_mapped = mapped;
        return NEBULA_OK;
}

enum nebula_status mapped_open_path(const char *path, struct mapped *ret_mapped, struct nebula_error *error)
{
        return map_file(path, os->open(path, OS_READ), ret_mapped, error);
}

enum nebula_status mapped_open(struct store *store, const char *key, struct mapped *ret_mapped, struct nebula_error *error)
{
        struct mapped mapped = { .watch = -1 };
        struct store_entry entry;
        enum nebula_status status;
        int result;

        if (store->ops->features(store) & STORE_PATHS) {
                char *path;

                if (asprintf(&path, "%s/%s", store->root, key) < 0)
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a path");
                status = map_file(path, os->open_below(store->root, key, OS_READ), ret_mapped, error); /* follows no link */
                free(path);
                return status;
        }
        status = store->ops->stat(store, key, &entry, error);
        if (status)
                return status;
        mapped.size = entry.size;
        store_entry_done(&entry);
        if (mapped.size) {
                result = os->map(-1, 0, mapped.size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &mapped.data);
                if (result < 0)
                        return error_set(error, NEBULA_NO_MEMORY, -result, "no memory to read %s/%s", store->root, key);
                status = store->ops->read(store, key, mapped.data, 0, mapped.size, error);
        }
        if (status)
                mapped_close(&mapped);
        else
                *ret_mapped = mapped;
        return status;
}

enum nebula_status mapped_open_memory(struct cli_agent *agent, uint64_t version_id, const char *name, struct mapped *ret_mapped,
                                      struct nebula_error *error)
{
        struct ipc_opened opened;
        struct mapped mapped = { .watch = -1 };
        int fd, result = 0;
        enum nebula_status status = cli_agent_file(agent, version_id, name, &opened, &fd, error);

        if (status)
                return status;
        mapped.size = opened.size;
        if (mapped.size)
                result = os->map(fd, 0, mapped.size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE, &mapped.data);
        os->close(fd);
        if (result < 0)
                return error_set(error, NEBULA_NO_MEMORY, -result, "cannot map the agent's image of %s", name);
        if (opened.format == IPC_FORMAT_ZIP && mapped.size)
                status = image_seal_rest(mapped.data, mapped.size, error); /* in this process's private copy */
        if (status)
                mapped_close(&mapped);
        else
                *ret_mapped = mapped;
        return status;
}

enum nebula_status mapped_end(struct mapped *mapped, const char *place, enum nebula_status status, struct nebula_error *error)
{
        bool is_torn = os->unwatch_map(mapped->watch);

        mapped->watch = -1;
        return is_torn ? error_set(error, NEBULA_CORRUPT, 0, "%s: a part of it cannot be read: it was cut off, or its disk fails", place) : status;
}

void mapped_close(struct mapped *mapped)
{
        os->unwatch_map(mapped->watch);
        mapped->watch = -1;
        if (mapped->data)
                os->unmap(mapped->data, mapped->size);
        mapped->data = NULL;
}
