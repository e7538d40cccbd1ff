#include "cli/view.h"

#include <stdlib.h>
#include <stdio.h>

#include "base/error.h"
#include "cli/link.h"
#include "image/image.h"
#include "os/os.h"

enum nebula_status view_open_path(const char *path, struct view *ret_view, struct nebula_error *error)
{
        struct view view = { 0 };
        struct os_stat stat;
        int fd = os->open(path, OS_READ), result;

        if (fd < 0)
                return error_set(error, error_status_of_errno(-fd), -fd, "cannot open %s", path);
        result = os->fstat(fd, &stat);
        if (!result && stat.kind != OS_KIND_FILE) {
                os->close(fd);
                return error_set(error, NEBULA_INVALID, 0, "%s is no file", path);
        }
        if (!result && stat.size)
                result = os->map(fd, 0, stat.size, OS_MAP_READ, &view.data);
        os->close(fd);
        if (result < 0)
                return error_set(error, error_status_of_errno(-result), -result, "cannot map %s", path);
        view.size = stat.size;
        *ret_view = view;
        return NEBULA_OK;
}

enum nebula_status view_open(struct store *store, const char *key, struct view *ret_view, struct nebula_error *error)
{
        struct view view = { 0 };
        struct old_entry entry;
        enum nebula_status status;
        int result;

        if (store->ops == &store_file) {
                char *path;

                if (asprintf(&path, "%s/%s", store->root, key) < 0)
                        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a path");
                status = view_open_path(path, ret_view, error);
                free(path);
                return status;
        }
        status = store->ops->old_stat(store, key, &entry, error);
        if (status)
                return status;
        view.size = entry.size;
        old_entry_done(&entry);
        if (view.size) {
                result = os->map(-1, 0, view.size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE | OS_MAP_ANONYMOUS, &view.data);
                if (result < 0)
                        return error_set(error, NEBULA_NO_MEMORY, -result, "no memory to read %s/%s", store->root, key);
                status = store->ops->read(store, key, view.data, 0, view.size, error);
        }
        if (status)
                view_close(&view);
        else
                *ret_view = view;
        return status;
}

enum nebula_status view_open_memory(struct link *link, uint64_t version_id, const char *name, struct view *ret_view,
                                    struct nebula_error *error)
{
        struct ipc_opened opened;
        struct view view = { 0 };
        int fd, result = 0;
        enum nebula_status status = link_file(link, version_id, name, &opened, &fd, error);

        if (status)
                return status;
        view.size = opened.size;
        if (view.size)
                result = os->map(fd, 0, view.size, OS_MAP_READ | OS_MAP_WRITE | OS_MAP_PRIVATE, &view.data);
        os->close(fd);
        if (result < 0)
                return error_set(error, NEBULA_NO_MEMORY, -result, "cannot map the agent's image of %s", name);
        if (opened.format == IPC_FORMAT_ZIP && view.size)
                status = image_seal_rest(view.data, view.size, error); /* in this process's private copy */
        if (status)
                view_close(&view);
        else
                *ret_view = view;
        return status;
}

void view_close(struct view *view)
{
        if (view->data)
                os->unmap(view->data, view->size);
        view->data = NULL;
}
