/* Copies. If the file system can share blocks (reflink), a program that writes over the copy does not change the object. Else the copy
 * is a second name of the file (hard link), with the same time and stamp: a program that writes over the copy in place damages the
 * object, and one that replaces the copy does not. If neither works, the bytes are copied. */
#include <errno.h>
#include <stdlib.h>

#include "base/error.h"
#include "store/store_file_private.h"

#define COPY_BYTES (1u << 20)

/* Whether the file system lacks the operation. */
static bool is_missing(int result)
{
        return result == -EOPNOTSUPP || result == -ENOTTY || result == -EINVAL || result == -EXDEV || result == -ENOSYS || result == -EPERM ||
               result == -EACCES || result == -EMLINK;
}

static int copy_bytes(int fd, int from, uint64_t size)
{
        char *buffer = malloc(COPY_BYTES);
        int result = buffer ? 0 : -ENOMEM;

        for (uint64_t offset = 0; offset < size && !result; offset += COPY_BYTES) {
                size_t some = size - offset < COPY_BYTES ? (size_t)(size - offset) : COPY_BYTES;

                result = os_read_at(from, buffer, some, offset);
                if (!result)
                        result = os_write_at(fd, buffer, some, offset);
        }
        free(buffer);
        return result;
}

static int share_blocks(int fd, int from)
{
        int result;

        do
                result = os->clone(fd, from);
        while (result == -EINTR);
        return result;
}

/* Makes a temporary file with its own bytes. `size`: copies so many bytes; UINT64_MAX: shares blocks or fails. */
static int copy_to_new(struct store *store, int from, uint64_t size, const char *to, char ret_temp[FILE_TEMP_MAX], struct os_stat *ret_made)
{
        int fd = file_temp_open(store, to, 0, ret_temp), result, closed;

        if (fd < 0)
                return fd;
        result = size == UINT64_MAX ? share_blocks(fd, from) : copy_bytes(fd, from, size);
        closed = result ? os->close(fd) : file_temp_close(store, fd, ret_made);
        if (!result)
                result = closed;
        if (result)
                os->unlink_below(store->root, ret_temp);
        return result;
}

/* Syncs the file: another program may have written it without that. */
static int link_to_new(struct store *store, const char *from, const char *to, char ret_temp[FILE_TEMP_MAX], struct os_stat *ret_made)
{
        int result = file_temp_link(store, to, from, ret_temp), fd;

        if (result)
                return result;
        fd = file_open_to_read(store, ret_temp, 0);
        result = fd < 0 ? fd : os_sync(fd);
        if (!result)
                result = os->fstat(fd, ret_made);
        if (fd >= 0)
                os->close(fd);
        if (result)
                os->unlink_below(store->root, ret_temp);
        return result;
}

static int copy_to_temp(struct store *store, const char *key, int from, uint64_t size, const char *to, char ret_temp[FILE_TEMP_MAX],
                        struct os_stat *ret_made)
{
        atomic_bool *cannot_clone = &((struct file_store *)store)->cannot_clone;
        int result = -EOPNOTSUPP;

        if (!atomic_load(cannot_clone)) {
                result = copy_to_new(store, from, UINT64_MAX, to, ret_temp, ret_made);
                atomic_store(cannot_clone, result == -EOPNOTSUPP || result == -ENOTTY);
        }
        if (is_missing(result))
                result = link_to_new(store, key, to, ret_temp, ret_made);
        return is_missing(result) ? copy_to_new(store, from, size, to, ret_temp, ret_made) : result;
}

/* The caller keeps `from` open, so that all steps copy the same file. */
static enum nebula_status copy_from(struct store *store, const char *key, int from, const char *to, enum store_condition condition,
                                    struct nebula_error *error)
{
        char temp[FILE_TEMP_MAX];
        struct file_placing placing = { .temp = temp, .key = (char *)(uintptr_t)to };
        struct os_stat found;
        size_t at;
        int result = os->fstat(from, &found);

        if (!result && found.kind != OS_KIND_FILE)
                return error_set(error, NEBULA_CORRUPT, 0, "%s/%s: is not a regular file", store->root, key);
        if (!result)
                result = copy_to_temp(store, key, from, found.size, to, temp, &placing.made);
        if (!result) {
                result = file_place(store, &placing, condition);
                if (!result)
                        result = file_place_sync(store, &placing, 1, &at);
                os->unlink_below(store->root, temp); /* a rename between two names of one file leaves both, as a link does */
        }
        if (result == -EEXIST && condition == STORE_IF_ABSENT)
                return error_set(error, NEBULA_BUSY, EEXIST, "%s/%s is there already", store->root, to);
        if (!result)
                return NEBULA_OK;
        file_dirs_forget(((struct file_store *)store)->dirs);
        return file_write_error(store, to, found.size, result, error);
}

enum nebula_status file_copy(struct store *store, const char *from, const char *to, enum store_condition condition, struct nebula_error *error)
{
        char path[STORE_PATH_MAX];
        enum nebula_status status = file_path(store, to, path, error);
        int fd;

        if (!status && (condition == STORE_IF_SAME || !*to || !*from))
                status = error_set(error, NEBULA_INVALID, 0, "%s: a copy needs the keys of both objects, and its only condition is STORE_IF_ABSENT", path);
        if (!status)
                status = file_path(store, from, path, error);
        if (status)
                return status;
        fd = file_open_to_read(store, from, 0);
        if (fd < 0)
                return file_error(store, "read", path, fd, error);
        status = copy_from(store, from, fd, to, condition, error);
        os->close(fd);
        return status;
}
